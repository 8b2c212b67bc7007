"""Clients of a data set have the names of the natural ones, and examples without a client are counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch

from fedlowrank import simulate
from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.core.errors import DataError
from fedlowrank.core.key import Key
from fedlowrank.data.clients import make_clients
from fedlowrank.data.dataset import Dataset, Examples
from fedlowrank.data.describe import format_class_counts
from fedlowrank.data.partitioning.partition import Iid, Natural
from fedlowrank.data.partitioning.split import LocalSplit, OwnTest

KEY = Key((0,))


def sites(train: str, test: str | None = None) -> Dataset:
    """A data set with an example for each letter, whose natural client has this name; ``-`` has none."""
    names = sorted({*train, *(test or "")} - {"-"})

    def read(text: str) -> tuple[Examples, torch.Tensor]:
        numbers = torch.tensor([names.index(c) if c in names else -1 for c in text])
        return Examples(torch.randn(len(text), 2), torch.arange(len(text)) % 2), numbers

    one, natural = read(train)
    other, natural_test = (None, None) if test is None else read(test)
    return Dataset("sites", one, other, ("0", "1"), natural, natural_test, natural_names=tuple(names))


def test_examples_without_a_client_are_counted() -> None:
    notes = make_clients(sites("a" * 10 + "b" * 10 + "---"), Natural(), LocalSplit(), KEY)[0].notes
    assert notes == ("3 of 23 training examples belong to no client",)
    # c is tested, but has no training examples
    clients = make_clients(sites("a" * 10 + "b" * 10, "aabbccc"), Natural(), OwnTest(), KEY)
    assert clients[0].notes == ("3 of 7 test examples belong to no client",)
    assert clients[1].notes == ()

    def some(labels: Any, *_: Any) -> Any:
        return np.array_split(np.arange(len(labels))[:12], 2)

    assert make_clients(sites("a" * 20), some, LocalSplit(), KEY)[0].notes == (
        "8 of 20 training examples belong to no client",
    )
    merged = make_clients(sites("a" * 20, "a" * 5), some, LocalSplit(pool="all"), KEY)
    assert merged[0].notes == ("13 of 25 examples belong to no client",)
    assert make_clients(sites("aabb" * 5), Natural(), LocalSplit(), KEY)[0].notes == ()


def test_natural_clients_have_their_names() -> None:
    data = sites("n" * 10 + "s" * 10)
    assert [client.name for client in make_clients(data, Natural(), LocalSplit(), KEY)] == ["n", "s"]
    assert [client.name for client in make_clients(data, Iid(2), LocalSplit(), KEY)] == ["", ""]
    clients = make_clients(data, Natural(), LocalSplit(), KEY)
    assert "1 (s)" in format_class_counts(clients, ("0", "1"))
    with pytest.raises(DataError, match=r"client 1 has 2 examples, too few .* It is 's'"):
        make_clients(sites("n" * 10 + "ss"), Natural(), LocalSplit(), KEY)


def test_an_experiment_keeps_the_names_of_sites(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    frame = pandas.DataFrame(
        {"x": random.normal(size=60), "y": np.arange(60) % 2, "hospital": ["south", "north"] * 30}
    )
    frame.to_csv(tmp_path / "a.csv", index=False)
    np.savez(tmp_path / "a.npz", x=frame[["x"]], y=frame.y, client=frame.hospital.to_numpy(dtype=str))
    for data in (
        {"source": "csv", "path": str(tmp_path / "a.csv"), "label": "y", "client": "hospital"},
        {"source": "arrays", "path": str(tmp_path / "a.npz")},
    ):
        tables = {"data": data, "partition": {"kind": "natural"}, "model": {"names": ["linear"]}}
        made = ExperimentConfig.parse(tables).federation()
        assert [info.name for info in made.infos] == ["north", "south"]
    result = simulate("fedavg", made, rounds=1)
    assert set(result.predictions()["client_name"]) == {"north", "south"}
    assert len(result.predict("south")) == 3
