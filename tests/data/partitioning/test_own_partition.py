"""Partitions by a function of the user's own: what it gets, what it may return, and who may name it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.core.errors import ConfigError, DataError
from fedlowrank.core.key import Key
from fedlowrank.data.clients import make_clients
from fedlowrank.data.partitioning.own_partition import OwnPartition, as_partition
from fedlowrank.data.partitioning.partition import Iid
from fedlowrank.data.partitioning.split import SPLITS
from tests.data.made_datasets import numbered

CODE = """
import numpy as np

def blocks(labels, natural, generator, clients=3, shuffle=False):
    order = generator.permutation(len(labels)) if shuffle else np.arange(len(labels))
    return np.array_split(order, clients)
"""


def blocks(labels: Any, natural: Any, generator: Any, clients: int = 3) -> Any:
    return np.array_split(np.arange(len(labels)), clients)


def tables(**partition: Any) -> dict[str, Any]:
    return {
        "method": "fedavg",
        "data": {"source": "iris"},
        "partition": partition,
        "model": {"names": ["mlp"]},
    }


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module with a partition."""
    name = f"own_partition_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def sizes(made: ExperimentConfig) -> list[int]:
    return [len(d.train) + len(d.val) + len(d.test) for d in made.shares().data]


@pytest.mark.full
def test_a_file_names_the_function_and_its_options(own: str) -> None:
    made = ExperimentConfig.parse(tables(kind=f"{own}:blocks", clients=4))
    assert sizes(made) == [38, 38, 37, 37]
    again = ExperimentConfig.parse(made.to_dict())
    assert again.to_dict() == made.to_dict()
    assert again.partition == made.partition
    # the generator is that of the seed
    one, two = (ExperimentConfig.parse(tables(kind=f"{own}:blocks", shuffle=True)) for _ in range(2))
    assert one.federation().describe() == two.federation().describe()
    other = ExperimentConfig.parse({**tables(kind=f"{own}:blocks", shuffle=True), "run": {"seed": 1}})
    assert one.federation().describe() != other.federation().describe()


def test_python_takes_the_function_itself() -> None:
    for value in (blocks, {"kind": blocks}, partial(blocks, clients=3)):
        assert sizes(ExperimentConfig.parse({**tables(), "partition": value})) == [50, 50, 50]
    assert sizes(ExperimentConfig.parse(tables(kind=blocks, clients=2))) == [75, 75]
    actual = make_clients(numbered(n_test=0), blocks, SPLITS["local"](), Key((0,)))
    assert [len(d.train) + len(d.val) + len(d.test) for d in actual] == [134, 133, 133]
    assert isinstance(as_partition(Iid(3)), Iid)


def test_the_function_gets_labels_natural_clients_and_a_generator() -> None:
    got: list[Any] = []

    def seen(labels: Any, natural: Any, generator: Any) -> Any:
        got.extend([labels.copy(), natural.copy(), generator])
        # what a function does to its arguments changes no data
        labels[:] = 0
        natural[:] = 0
        return [np.array([0, 3]), (2, 1)]

    labels, natural = np.array([3, 1, 2, 0]), np.array([7, 7, -1, 9])
    parts = as_partition(seen).assign(labels, 4, Key((0,)), natural)
    assert [p.tolist() for p in parts] == [[0, 3], [1, 2]]
    assert got[0].tolist() == labels.tolist() == [3, 1, 2, 0]
    assert got[1].tolist() == natural.tolist() == [7, 7, -1, 9]
    assert isinstance(got[2], np.random.Generator)


WRONG = {
    "twice": ([[0, 1], [2, 2]], "positions of client 1 hold example 2 more than once"),
    "shared": ([[0, 1], [2], [1, 3]], "gave example 1 to client 0 and to client 2"),
    "negative": ([[0, 1], [-1]], r"client 1 must lie between 0 and 9, .* one is -1"),
    "beyond": ([[0, 10]], r"client 0 must lie between 0 and 9, for there are 10 examples; one is 10"),
    "none": ([[0], []], "gave client 1 no examples"),
    "no client": ([], "returned no client"),
    "mask": ([np.ones(10, dtype=bool)], "np.flatnonzero"),
    "real": ([[0.0, 1.0]], r"client 0 must be integers \[n_k\], not float64 \[2\]"),
    "matrix": ([[[0, 1]]], r"int64 \[1, 2\]"),
    "flat": ([0, 1, 2], r"client 0 must be integers \[n_k\], not int64 \[\]"),
    "ragged": ([[[0], [1, 2]]], "no list of integers"),
    "dict": ({0: [1]}, "must return a list .* not a dict"),
    "nothing": (None, "not a NoneType"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_a_function_must_not_return(name: str) -> None:
    actual, message = WRONG[name]
    with pytest.raises(DataError, match=message):
        as_partition(lambda labels, natural, generator: actual).assign(np.zeros(10, dtype=int), 1, Key((0,)))


def test_the_number_of_clients_is_the_one_that_is_set(own: str) -> None:
    def two(labels: Any, natural: Any, generator: Any, clients: int) -> Any:
        return [[0], [1]]

    made = ExperimentConfig.parse(tables(kind=two, clients=3))
    with pytest.raises(DataError, match=r"returned 2 clients, but partition\.clients is 3"):
        made.shares()


CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any], str]] = {
    "an option": (blocks, {"alpha": 1}, r"unexpected keyword argument 'alpha'.*entries of \[partition\]"),
    "too few": (lambda labels: [labels], {}, "too many positional"),
    "too many": (lambda a, b, c, alpha: [a], {}, "missing a required argument: 'alpha'"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_function_of_other_arguments_is_refused_before_data_are_read(name: str) -> None:
    function, options, message = CALLS[name]
    with pytest.raises(ConfigError, match=message):
        ExperimentConfig.parse(tables(kind=function, **options))


def test_names_that_cannot_be_imported_are_errors(own: str) -> None:
    for kind, message in (
        (f"{own}:blocs", "partition.kind: .* cannot be imported"),
        (f"{own}:np", "is .* and not a function"),
    ):
        with pytest.raises(ConfigError, match=message):
            ExperimentConfig.parse(tables(kind=kind)).shares()
    with pytest.raises(ConfigError, match="module:function"):
        ExperimentConfig.parse(tables(kind="blocks:"))
    with pytest.raises(ConfigError, match=r"no 'block'.*'module:function'"):
        ExperimentConfig.parse(tables(kind="block"))


def test_a_run_folder_may_not_name_a_partition_of_its_own(own: str) -> None:
    made = ExperimentConfig.parse(tables(kind=f"{own}:blocks"))
    assert made.code == (f"{own}:blocks",)
    with pytest.raises(ConfigError, match=f"names Python code, {own}:blocks"):
        ExperimentConfig.parse(made.to_dict(), allow_code=False)


def test_a_comparison_varies_the_rule(own: str) -> None:
    mine = f"{own}:blocks"
    made = ExperimentConfig.parse(tables(kind=mine, clients=3, shuffle=True))
    # a rule of the package does not get the options of a function
    assert made.overlay({"partition": {"kind": "iid"}}).partition == Iid(3)
    assert made.overlay({"partition": {"kind": mine, "clients": 5}}).partition == OwnPartition(
        mine, {"clients": 5, "shuffle": True}
    )
    back = ExperimentConfig.parse(tables(kind="iid", clients=6)).overlay({"partition": {"kind": mine}})
    assert back.partition == OwnPartition(mine, {"clients": 6})


def test_the_test_part_cannot_be_divided_by_the_same_function() -> None:
    with pytest.raises(DataError, match="test_share"):
        make_clients(numbered(), blocks, SPLITS["test_share"](), Key((0,)))
