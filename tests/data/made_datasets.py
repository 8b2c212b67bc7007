"""Data sets and federations that several tests of this folder use."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedlowrank import Federation
from fedlowrank.data.augment import NO_AUGMENT, Augment
from fedlowrank.data.dataset import Dataset, Examples
from fedlowrank.models.architectures.cnn import CNN
from fedlowrank.models.architectures.mlp import MLP


def balanced(classes: int, per_class: int) -> np.ndarray:
    """Labels in random order."""
    return np.random.default_rng(classes).permutation(np.repeat(np.arange(classes), per_class))


def numbered(
    n_train: int = 400, n_test: int = 200, classes: int = 4, natural: Any = None, natural_test: Any = None
) -> Dataset:
    """Each example is its own number: training examples from 0, test examples from 10,000.

    Without classes the targets are this number times 1 and 2.
    """

    def part(start: int, n: int) -> Examples:
        x = torch.arange(start, start + n)[:, None]
        return Examples(x.float(), x[:, 0] % classes if classes else x * torch.tensor([1.0, 2.0]))

    test = part(10_000, n_test) if n_test else None
    names = tuple("abcdefghij"[:classes])
    return Dataset("numbers", part(0, n_train), test, names, natural, natural_test)


def federation(
    augment: Augment = NO_AUGMENT, sizes: Sequence[int] = (23, 9, 31), flat: bool = False, **kwargs: Any
) -> Federation:
    """Images normalized channel by channel, of which the classes differ in brightness."""
    random, clients = np.random.default_rng(5), []
    mean, width = random.random((2, 1, 2, 1, 1)).astype(np.float32) + 0.1
    for n in sizes:
        y = random.integers(0, 3, n + 8)
        x = random.integers(0, 200, (n + 8, 2, 8, 8)) + 20 * y[:, None, None, None]
        x = (x.astype(np.float32) / np.float32(255) - mean) / width
        x = x.reshape(len(x), -1) if flat else x
        cuts = {"train": slice(n), "val": slice(n, n + 3), "test": slice(n + 3, None)}
        clients.append({part: (x[cut], y[cut]) for part, cut in cuts.items()})
    make = (lambda: MLP(128, (6, 5), 3)) if flat else (lambda: CNN((2, 8, 8), 3, (4, 5), (7, 6)))
    return Federation.from_arrays(clients, make, classes=3, augment=augment, **kwargs)


def write(file: Path, rows: list[Any]) -> str:
    """Rows in the format that the name of the file ends in."""
    name = file.name
    if name.endswith(".parquet"):
        arrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(arrow.Table.from_pylist(rows), file)
        return str(file)
    plain = name.removesuffix(".gz")
    text = json.dumps(rows) if plain.endswith(".json") else "".join(json.dumps(row) + "\n" for row in rows)
    file.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return str(file)
