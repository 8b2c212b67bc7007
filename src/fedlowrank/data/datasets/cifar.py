"""CIFAR-10 and CIFAR-100, in the binary version and the python version of their authors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from ...core.arguments.field_checks import CheckedFields
from ...core.errors import DataError
from ..dataset import Dataset, Examples
from ..download.data_files import find_folder
from ..download.unpickle import PickledArray, unpickle
from ..input_types import scale_bytes
from ..partitioning.checks import describe_array
from .cifar_names import CIFAR10, CIFAR100_COARSE, CIFAR100_FINE

_IMAGE_SHAPE = (3, 32, 32)
_IMAGE_BYTES = 3 * 32 * 32
_TRAIN_FILES = tuple(f"data_batch_{i}" for i in range(1, 6))

Images = tuple[np.ndarray, np.ndarray]
"""Pixels uint8 [n, 3072] and labels int64 [n] of a file."""


@dataclass(frozen=True)
class Cifar10(CheckedFields):
    """CIFAR-10: 32x32 color images of 10 classes, in five training files and one test file.

    The binary version (``data_batch_1.bin`` ... ``test_batch.bin``) and the python version (``data_batch_1``
    ... ``test_batch``, pickles that are read without running code) are recognized by their files; the binary
    one has precedence. Source: Krizhevsky, "Learning Multiple Layers of Features from Tiny Images" (2009).

    Attributes:
        path: folder with the files, or a folder at most two levels above it.
    """

    path: str

    def load(self) -> Dataset:
        """Load the images as [n, 3, 32, 32] in [0, 1].

        Raises:
            DataError: if files are missing, cut short, of different sizes, or a pickle holds more than data.
        """
        folder, suffix = _find_version(self.path, (*_TRAIN_FILES, "test_batch"), "CIFAR-10 files")
        files = [folder / (name + suffix) for name in (*_TRAIN_FILES, "test_batch")]
        if suffix:
            *train, test = [_read_binary(file, label_bytes=1, column=0) for file in files]
            names = _read_names(folder / "batches.meta.txt", None, CIFAR10)
        else:
            *train, test = [_read_pickle(file, "labels") for file in files]
            names = _read_names(folder / "batches.meta", "label_names", CIFAR10)
        sizes = [len(y) for _, y in train]
        if len(set(sizes)) > 1:
            raise DataError(f"training files in {str(folder)!r} must have equally many images, not {sizes}")
        return Dataset("cifar10", _make_examples(train), _make_examples([test]), names)


@dataclass(frozen=True)
class Cifar100(CheckedFields):
    """CIFAR-100: 32x32 color images of 100 fine or 20 coarse classes, in a training file and a test file.

    The binary version (``train.bin``, ``test.bin``) and the python version (``train``, ``test``, pickles that
    are read without running code) are recognized by their files; the binary one has precedence. Files with
    fewer images than the official 50,000 and 10,000 are accepted. Source: Krizhevsky, "Learning Multiple
    Layers of Features from Tiny Images" (2009).

    Attributes:
        path: folder with the files, or a folder at most two levels above it.
        labels: ``fine`` for the 100 fine classes, ``coarse`` for the 20 coarse classes.
    """

    path: str
    labels: Literal["fine", "coarse"] = "fine"

    def load(self) -> Dataset:
        """Load the images as [n, 3, 32, 32] in [0, 1].

        Raises:
            DataError: if files are missing or cut short, or a pickle holds more than data.
        """
        folder, suffix = _find_version(self.path, ("train", "test"), "CIFAR-100 files")
        default_names, column = (CIFAR100_FINE, 1) if self.labels == "fine" else (CIFAR100_COARSE, 0)
        if suffix:
            parts = [_read_binary(folder / f"{part}.bin", 2, column) for part in ("train", "test")]
            names = _read_names(folder / f"{self.labels}_label_names.txt", None, default_names)
        else:
            parts = [_read_pickle(folder / part, f"{self.labels}_labels") for part in ("train", "test")]
            names = _read_names(folder / "meta", f"{self.labels}_label_names", default_names)
        return Dataset("cifar100", _make_examples(parts[:1]), _make_examples(parts[1:]), names)


def _find_version(path: str, names: Sequence[str], description: str) -> tuple[Path, str]:
    """Find the folder and the ending of its file names: ``.bin`` in the binary version, else empty."""

    def contains(folder: Path, suffix: str) -> bool:
        return all((folder / (name + suffix)).is_file() for name in names)

    description = f"{description} ({', '.join(names)}; or the same names with .bin)"
    folder = find_folder(path, lambda f: contains(f, ".bin") or contains(f, ""), description)
    return folder, ".bin" if contains(folder, ".bin") else ""


def _read_bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {str(file)!r}: {error.strerror or error}.") from error


def _read_binary(file: Path, label_bytes: int, column: int) -> Images:
    """Read records of label bytes, of which one column is used, and pixels."""
    data = np.frombuffer(_read_bytes(file), dtype=np.uint8)
    record_size = label_bytes + _IMAGE_BYTES
    if len(data) == 0 or len(data) % record_size:
        raise DataError(
            f"{str(file)!r} is cut short or of another format: expected a multiple of {record_size} bytes ({label_bytes} "
            f"of labels, {_IMAGE_BYTES} of pixels), e.g. {(len(data) // record_size + 1) * record_size}; found {len(data)}."
        )
    rows = data.reshape(-1, record_size)
    return rows[:, label_bytes:], rows[:, column].astype(np.int64)


def _read_pickle(file: Path, key: str) -> Images:
    source = f"the python version of CIFAR in {str(file)!r}"
    content = _read_dictionary(file, source)
    data, labels = content.get("data"), content.get(key)
    if not isinstance(data, PickledArray) or not isinstance(labels, list):
        raise DataError(f"{source}: expected an array 'data' and a list {key!r}, found {sorted(content)}.")
    x = data.value
    if x.dtype != np.uint8 or x.shape != (len(labels), _IMAGE_BYTES) or len(x) == 0:
        raise DataError(
            f"{source}: expected pixels uint8 [n, {_IMAGE_BYTES}] and n labels, found {describe_array(x)} and "
            f"{len(labels)} labels."
        )
    if not all(isinstance(v, int) and abs(v) < 2**31 for v in labels):
        raise DataError(f"{source}: the list {key!r} must hold whole numbers.")
    return x, np.array(labels, dtype=np.int64)


def _read_dictionary(file: Path, source: str) -> dict[str, Any]:
    content = unpickle(_read_bytes(file), source)
    if not isinstance(content, dict):
        raise DataError(f"{source}: expected a dictionary, found a {type(content).__name__}.")
    return {_to_text(key): value for key, value in content.items()}


def _to_text(value: object) -> str:
    return value.decode("latin1") if isinstance(value, bytes) else str(value)


def _read_names(file: Path, key: str | None, default_names: tuple[str, ...]) -> tuple[str, ...]:
    """Read the names of the classes from the lines of a file, or from a list in a pickle; the default names without a file."""
    if not file.is_file():
        return default_names
    if key is None:
        names: Any = [line.strip() for line in _to_text(_read_bytes(file)).splitlines() if line.strip()]
    else:
        names = _read_dictionary(file, repr(str(file))).get(key)
        if not isinstance(names, list):
            raise DataError(f"{str(file)!r}: expected a list {key!r}.")
    if len(names) != len(default_names):
        raise DataError(f"{str(file)!r}: expected {len(default_names)} names of classes, found {len(names)}.")
    return tuple(_to_text(name) for name in names)


def _make_examples(files: list[Images]) -> Examples:
    """Convert the images of several files one after the other, directly into the result."""
    sizes = [len(y) for _, y in files]
    x = torch.empty((sum(sizes), *_IMAGE_SHAPE), dtype=torch.float32)
    for out, (pixels, _) in zip(torch.split(x, sizes), files, strict=True):
        scale_bytes(pixels.reshape(-1, *_IMAGE_SHAPE), out)
    return Examples(x, torch.from_numpy(np.concatenate([y for _, y in files])))
