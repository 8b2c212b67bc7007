"""CIFAR-10 and CIFAR-100, in the binary version and the python version of their authors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from ..core.errors import ConfigError, DataError, did_you_mean
from .cifar_names import CIFAR10, CIFAR100_COARSE, CIFAR100_FINE
from .dataset import Dataset, Examples
from .files import fill, find_folder, read
from .unpickle import PickledArray, unpickle

_SHAPE = (3, 32, 32)
_PIXELS = 3 * 32 * 32
_BATCHES = tuple(f"data_batch_{i}" for i in range(1, 6))

Batch = tuple[np.ndarray, np.ndarray]
"""Pixels uint8 [n, 3072] and labels [n] of a file."""


@dataclass(frozen=True)
class Cifar10:
    """CIFAR-10: 32x32 color images of 10 classes, in five training files and one test file.

    The binary version (``data_batch_1.bin`` ... ``test_batch.bin``) and the python version (``data_batch_1`` ...
    ``test_batch``, pickles that are read without running anything) are recognized by their files; where both are
    found, the binary one is read. Source: Krizhevsky, "Learning Multiple Layers of Features from Tiny Images" (2009).

    Attributes:
        path: folder with the files, or a folder at most two levels above it.
    """

    path: str

    def load(self) -> Dataset:
        """The images as [n, 3, 32, 32] in [0, 1].

        Raises:
            DataError: if files are missing, cut short, of different sizes, or a pickle holds more than data.
        """
        folder, end = _version(self.path, (*_BATCHES, "test_batch"), "CIFAR-10 files")
        files = [folder / (name + end) for name in _BATCHES]
        if end:
            train = [_records(file, 1, 0) for file in files]
            test = _records(folder / "test_batch.bin", 1, 0)
            names = _names(folder / "batches.meta.txt", CIFAR10)
        else:
            train = [_pickled(file, "labels") for file in files]
            test = _pickled(folder / "test_batch", "labels")
            names = _pickled_names(folder / "batches.meta", "label_names", CIFAR10)
        sizes = [len(y) for _, y in train]
        if len(set(sizes)) > 1:
            raise DataError(f"the five training files in {str(folder)!r} should hold equally many images, not {sizes}.")
        return Dataset("cifar10", _examples(train), _examples([test]), names)


@dataclass(frozen=True)
class Cifar100:
    """CIFAR-100: 32x32 color images of 100 fine classes in 20 coarse ones, in a training file and a test file.

    The binary version (``train.bin``, ``test.bin``) and the python version (``train``, ``test``, pickles that are read
    without running anything) are recognized by their files; where both are found, the binary one is read. Files with
    fewer images than the official 50,000 and 10,000 are read as they are. Source: Krizhevsky, "Learning Multiple
    Layers of Features from Tiny Images" (2009).

    Attributes:
        path: folder with the files, or a folder at most two levels above it.
        labels: ``fine`` for the 100 classes, ``coarse`` for the 20.
    """

    path: str
    labels: Literal["fine", "coarse"] = "fine"

    def __post_init__(self) -> None:
        if self.labels not in ("fine", "coarse"):
            raise ConfigError(f"unknown labels {self.labels!r}. " + did_you_mean(self.labels, ("fine", "coarse")))

    def load(self) -> Dataset:
        """The images as [n, 3, 32, 32] in [0, 1].

        Raises:
            DataError: if files are missing or cut short, or a pickle holds more than data.
        """
        folder, end = _version(self.path, ("train", "test"), "CIFAR-100 files")
        known = CIFAR100_FINE if self.labels == "fine" else CIFAR100_COARSE
        if end:
            column = {"coarse": 0, "fine": 1}[self.labels]
            train, test = (_records(folder / f"{part}.bin", 2, column) for part in ("train", "test"))
            names = _names(folder / f"{self.labels}_label_names.txt", known)
        else:
            train, test = (_pickled(folder / part, f"{self.labels}_labels") for part in ("train", "test"))
            names = _pickled_names(folder / "meta", f"{self.labels}_label_names", known)
        return Dataset("cifar100", _examples([train]), _examples([test]), names)


def _version(path: str, names: Iterable[str], what: str) -> tuple[Path, str]:
    """The folder and what its file names end in: ``.bin`` for the binary version, nothing for the python version."""

    def holds(folder: Path, end: str) -> bool:
        return all((folder / (name + end)).is_file() for name in names)

    names = tuple(names)
    shown = ", ".join(names)
    folder = find_folder(
        path, lambda f: holds(f, ".bin") or holds(f, ""), f"{what} ({shown}; or the same names with .bin)"
    )
    return folder, ".bin" if holds(folder, ".bin") else ""


def _records(file: Path, labels: int, column: int) -> Batch:
    data = np.frombuffer(read(file), dtype=np.uint8)
    size = labels + _PIXELS
    if len(data) == 0 or len(data) % size:
        whole = len(data) // size
        raise DataError(
            f"{str(file)!r} is cut short or of another format: expected a multiple of {size} bytes "
            f"({labels} of labels, {_PIXELS} of pixels), e.g. {(whole + 1) * size}; found {len(data)}."
        )
    rows = data.reshape(-1, size)
    return rows[:, labels:], rows[:, column].astype(np.int64)


def _pickled(file: Path, key: str) -> Batch:
    where = f"the python version of CIFAR in {str(file)!r}"
    content = _dictionary(file, where)
    data, labels = content.get("data"), content.get(key)
    if not isinstance(data, PickledArray) or not isinstance(labels, list):
        raise DataError(f"{where}: expected an array 'data' and a list {key!r}, found the keys {sorted(content)}.")
    x = data.value
    if x.dtype != np.uint8 or x.ndim != 2 or x.shape[1] != _PIXELS or len(x) != len(labels) or len(x) == 0:
        raise DataError(
            f"{where}: expected pixels uint8 [n, {_PIXELS}] and n labels, found {x.dtype} {list(x.shape)} and "
            f"{len(labels)} labels."
        )
    if not all(isinstance(v, int) and abs(v) < 2**31 for v in labels):
        raise DataError(f"{where}: the list {key!r} must hold whole numbers.")
    return x, np.array(labels, dtype=np.int64)


def _dictionary(file: Path, where: str) -> dict[str, Any]:
    content = unpickle(read(file), where)
    if not isinstance(content, dict):
        raise DataError(f"{where}: expected a dictionary, found a {type(content).__name__}.")
    return {_text(key): value for key, value in content.items()}


def _text(value: object) -> str:
    return value.decode("latin1") if isinstance(value, bytes) else str(value)


def _names(file: Path, known: tuple[str, ...]) -> tuple[str, ...]:
    if not file.is_file():
        return known
    lines = [line.strip() for line in read(file).decode("latin1").splitlines()]
    return _as_many(tuple(line for line in lines if line), known, file)


def _pickled_names(file: Path, key: str, known: tuple[str, ...]) -> tuple[str, ...]:
    if not file.is_file():
        return known
    names = _dictionary(file, repr(str(file))).get(key)
    if not isinstance(names, list):
        raise DataError(f"{str(file)!r}: expected a list {key!r}.")
    return _as_many(tuple(_text(name) for name in names), known, file)


def _as_many(names: tuple[str, ...], known: tuple[str, ...], file: Path) -> tuple[str, ...]:
    if len(names) != len(known):
        raise DataError(f"{str(file)!r}: expected {len(known)} names of classes, found {len(names)}.")
    return names


def _examples(batches: list[Batch]) -> Examples:
    """The batches together, converted one after the other straight into the result."""
    n = sum(len(y) for _, y in batches)
    x, start = torch.empty((n, *_SHAPE), dtype=torch.float32), 0
    for pixels, y in batches:
        fill(x[start : start + len(y)], pixels.reshape(-1, *_SHAPE))
        start += len(y)
    return Examples(x, torch.from_numpy(np.concatenate([y for _, y in batches])))
