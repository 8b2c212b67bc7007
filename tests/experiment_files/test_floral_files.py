"""FLoRAL's experiment files: they say what the paper says, in its protocol, and every method of them runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fedlowrank import simulate
from fedlowrank.data import sources
from fedlowrank.data.dataset import Dataset, Examples
from fedlowrank.data.partitioning.concept import CONCEPTS
from tests.experiment_files.common import ROOT, forget, loaded, runnable

FLORAL = ROOT / "floral"

# arXiv:2410.03497, Table 1: full, then reduced
ROWS = (
    "fedavg", "local_adaptor", "ensemble", "ensemble_optimal", "floral_1", "floral_1_optimal", "floral_10",
    "floral_10_optimal",
)  # fmt: skip
TABLE_1 = {
    "mnist-r": (
        (91.5, 86.6, 92.0, 95.8, 91.3, 93.9, 91.8, 94.5),
        (78.2, 47.4, 66.7, 88.2, 73.1, 87.5, 75.7, 87.0),
    ),
    "mnist-ls": (
        (25.8, 84.5, 93.8, 95.6, 89.7, 93.7, 93.1, 94.2),
        (23.2, 32.0, 86.4, 87.6, 46.0, 87.6, 70.8, 86.9),
    ),
    "cifar10-r": (
        (64.4, 66.3, 71.0, 73.7, 65.5, 68.9, 65.1, 69.3),
        (45.6, 33.5, 42.4, 45.0, 45.2, 47.8, 44.5, 47.2),
    ),
    "cifar10-ls": (
        (21.9, 68.8, 46.4, 73.3, 62.8, 72.2, 56.2, 72.1),
        (18.7, 30.8, 41.7, 45.1, 44.2, 44.1, 42.1, 42.7),
    ),
    "cifar100": (
        (29.2, 85.1, 86.2, 92.8, 81.3, 82.4, 87.3, 86.6),
        (20.7, 39.5, 43.7, 55.0, 52.2, 53.1, 51.2, 53.9),
    ),
}
# Tables 2, 4, 5: columns CIFAR-10-R, CIFAR-10-LS, CIFAR-100, a row each arm in the order of the files
ABLATIONS = {
    "table2": ((66.5, 66.8, 70.2, 71.5, 69.0, 70.8), (36.3, 41.6, 74.1, 74.2, 73.8, 74.1), (48.8, 50.9, 51.7, 57.4, 51.3, 54.8)),
    "table4": ((70.2, 67.6, 68.5, 67.6), (74.1, 73.5, 74.0, 73.9), (51.7, 49.1, 51.9, 50.8)),
    "table5": (
        (69.8, 67.6, 68.7, 67.6, 68.9, 70.2, 64.6), (72.7, 73.4, 73.7, 73.9, 73.3, 74.1, 21.9),
        (45.1, 45.8, 46.6, 50.8, 47.9, 51.7, 12.1),
    ),
}  # fmt: skip
DATA = ("cifar10-r", "cifar10-ls", "cifar100")
# clients, clusters, participation, batch, learning rate
PROTOCOL = {
    "mnist-r": (300, 4, 0.1, 32, 0.1), "mnist-ls": (300, 4, 0.1, 32, 0.1), "cifar10-r": (20, 4, 1.0, 64, 0.03),
    "cifar10-ls": (20, 4, 1.0, 64, 0.03), "cifar100": (100, 10, 0.25, 64, 1e-3),
}  # fmt: skip


def whole(stem: str) -> Path:
    return FLORAL / f"{stem}.toml"


@pytest.mark.few(8)
@pytest.mark.parametrize("reduced", [False, True], ids=["full", "reduced"])
@pytest.mark.parametrize("task", TABLE_1)
def test_table_1_in_the_protocol_of_the_paper(task: str, reduced: bool) -> None:
    made = loaded(whole(task + "-reduced" * reduced))
    clients, clusters, share, batch, lr = PROTOCOL[task]
    assert tuple(made.compared_methods) == ROWS
    assert made.describe()["reference"]["accuracy"] == dict(zip(ROWS, TABLE_1[task][reduced], strict=True))
    partition, concept = vars(made.partition), vars(made.concept)
    assert (partition["clients"], concept["clusters"]) == (clients, clusters)
    assert isinstance(
        made.concept, CONCEPTS[{"r": "rotation", "ls": "label_shift"}.get(task.split("-")[-1], "natural")]
    )
    assert (made.run.participation, made.run.rounds) == (share, 1500 if reduced else 500)
    assert (made.data.preparation.keep, made.data.preparation.keep_at_least) == (0.05 if reduced else 1, 10)
    assert (made.augment.flip, made.augment.crop) == ((False, 0) if "mnist" in task else (True, 4))
    for name in made.compared_methods:
        method: Any = made.build_method(name)
        assert (method.epochs, method.batch_size) == (1, batch)
        assert (method.optimizer.lr, method.optimizer.momentum, method.optimizer.weight_decay) == (lr, 0, 0)
        if hasattr(method, "clusters"):
            assert method.clusters == clusters
            assert method.router.routing == ("optimal" if name.endswith("optimal") else "learned")
            if method.router.routing == "learned":
                assert method.router.lr == (0.3 if reduced else 0.1)
        if name.startswith("floral"):
            assert method.rank == (0.1 if "_10" in name else 0.01)
            assert method.server_optimizer.kind == ("adamw" if task == "cifar100" else "sgd")
            assert method.precondition


@pytest.mark.few(1)
@pytest.mark.parametrize("task", DATA)
@pytest.mark.parametrize("table", ABLATIONS)
def test_ablations_show_the_numbers_of_the_paper(table: str, task: str) -> None:
    made = loaded(whole(f"{table}-{task}"))
    shown = made.describe()["reference"]
    assert shown["label"].startswith(f"FLoRAL Table {table[-1]}")
    assert (
        tuple(shown["accuracy"][name] for name in made.compared_methods) == ABLATIONS[table][DATA.index(task)]
    )
    methods: list[Any] = [made.build_method(name) for name in made.compared_methods]
    if table == "table2":
        truth = PROTOCOL[task][1]
        expected = [(c, rho) for c in (truth // 2, truth, 2 * truth) for rho in (0.01, 0.1)]
        assert [(m.clusters, m.rank) for m in methods] == expected
    if table == "table4":
        assert [m.construction for m in methods[:3]] == ["balanced", "input", "reshaped"]
        assert "convolution" not in methods[3].kinds


@pytest.mark.full
def test_the_options_of_small_versions_fit_every_file() -> None:
    rows = [
        line.split("|")[1:3]
        for line in (ROOT / "README.md").read_text().splitlines()
        if "-o runs/small" in line and line.startswith("|")
    ]
    options = {data.split(",")[0].strip(): cell.strip(" `").split(" --")[0].split() for data, cell in rows}
    actual = dict.fromkeys(options, 0)
    for stem in (p.stem for p in runnable(FLORAL)):
        # CIFAR-100 before CIFAR-10, whose name it contains
        names = sorted(options, key=len, reverse=True)
        name = next(n for n in names if n.replace("-", "").lower() in stem)
        large, little = loaded(whole(stem)), loaded(whole(stem), *options[name])
        assert little.run.rounds < large.run.rounds
        assert little.run.evaluate_every <= little.run.rounds
        actual[name] += 1
    assert actual == {"MNIST": 8, "CIFAR-10": 10, "CIFAR-100": 5, "synthetic": 2}


@dataclasses.dataclass(frozen=True)
class Tiny:
    """A few random images of the sizes that the models take, in place of any data set."""

    path: str
    labels: str = "fine"

    def load(self) -> Dataset:
        g = torch.Generator().manual_seed(0)
        train, test = (
            Examples(torch.rand(n, 3, 32, 32, generator=g), torch.arange(n) % 20) for n in (240, 80)
        )
        return Dataset("tiny", train, test, tuple(map(str, range(20))))


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("cifar10", "cifar100", "mnist"):
        monkeypatch.setitem(sources.SOURCES, name, Tiny)
    forget()
    yield
    forget()


@pytest.mark.full
@pytest.mark.few(1)
@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(
    ("stem", "some"),
    [
        ("mnist-r", slice(None)),
        ("related-mnist-ls", slice(None)),
        ("unseen-mnist-r", slice(None)),
        ("synthetic-mlp", slice(None)),
        # of the networks with convolutions a few methods, for the time they take
        ("cifar100", slice(3, 6, 2)),
        ("table4-cifar10-r", slice(1, 4, 2)),
        ("table5-cifar10-ls", slice(0, 1)),
    ],
)
def test_the_methods_of_a_file_run(stem: str, some: slice) -> None:
    count = 10 if stem in ("cifar100", "unseen-mnist-r") else 4
    clients = () if stem == "synthetic-mlp" else (f"partition.clients={count}",)
    made = loaded(whole(stem), *clients, "run.rounds=1", "run.participation=0.5")
    federation = made.federation()
    for name in made.compared_methods[some]:
        settings = dict(vars(made.run))
        result = simulate(made.build_method(name), federation, **settings)
        record = result.rounds[-1]
        assert record.is_evaluated
        losses = record.values("loss", split="test")
        assert len(losses) == len(federation.clients)
        assert None not in losses
        assert bool(record.series("route")) == hasattr(made.build_method(name), "clusters")
