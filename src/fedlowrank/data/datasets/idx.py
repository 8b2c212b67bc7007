"""MNIST and other data sets in its IDX format."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ...core.arguments.field_checks import CheckedFields
from ...core.errors import DataError
from ..dataset import Dataset, Examples
from ..download.data_files import find_folder
from ..input_types import scale_bytes

_DIMENSIONS = {"images": 3, "labels": 1}


@dataclass(frozen=True)
class Mnist(CheckedFields):
    """MNIST, Fashion-MNIST, KMNIST and others in the same files: IDX, plain or compressed with gzip.

    The folder holds ``train-images-idx3-ubyte``, ``train-labels-idx1-ubyte``, ``t10k-images-idx3-ubyte`` and
    ``t10k-labels-idx1-ubyte``, each with or without ``.gz``; names like ``train-images.idx3-ubyte`` work,
    too. Source of the format: LeCun, Cortes and Burges, "The MNIST database of handwritten digits".

    Attributes:
        path: folder with the four files, or a folder at most two levels above it.
        classes: names of the classes in the order of the labels; by default the numbers "0", "1", ...
    """

    path: str
    classes: tuple[str, ...] = ()

    def load(self) -> Dataset:
        """Load the images as [n, 1, height, width] in [0, 1].

        Raises:
            DataError: if a file is missing, has another format, or is cut short or too long.
        """
        prefixes = ("train", "t10k")
        folder = find_folder(
            self.path, lambda f: all(_find_file(f, p, "images") for p in prefixes), "IDX files"
        )
        train, test = (_read_part(folder, prefix) for prefix in prefixes)
        class_count = 1 + max(int(train.y.max()), int(test.y.max()))
        return Dataset("mnist", train, test, self.classes or tuple(map(str, range(class_count))))


def read_idx(path: Path, dims: int) -> np.ndarray:
    """Read an IDX file of unsigned bytes with that many dimensions, compressed if it ends in ``.gz``."""
    source = f"IDX file {str(path)!r}"
    magic = struct.pack(">I", 0x0800 + dims)
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            header = file.read(4 + 4 * dims)
            if header[:4] != magic:
                raise DataError(
                    f"{source}: expected magic number {magic.hex()}, found {header[:4].hex() or '0 bytes'}."
                )
            if len(header) < 4 + 4 * dims:
                raise DataError(f"{source}: expected a header of {4 + 4 * dims} bytes, found {len(header)}.")
            shape = struct.unpack(f">{dims}I", header[4:])
            size = math.prod(shape)
            # one byte more than the header says, to detect a file that is too long
            content = file.read(size + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{source} cannot be read or is cut short: {error}.") from error
    if len(content) != size:
        actual = str(len(content)) if len(content) < size else "more"
        raise DataError(f"{source}: its header says {list(shape)}, {size} bytes; found {actual}.")
    return np.frombuffer(content, dtype=np.uint8).reshape(shape)


def _read_part(folder: Path, prefix: str) -> Examples:
    images, labels = (_find_file(folder, prefix, kind) for kind in ("images", "labels"))
    if images is None or labels is None:
        raise DataError(f"{str(folder)!r} has the images {prefix}-images-idx3-ubyte, but not their labels.")
    x, y = read_idx(images, 3), read_idx(labels, 1)
    if x.size == 0:
        raise DataError(f"IDX file {str(images)!r} has no images: its header says {list(x.shape)}.")
    if len(x) != len(y):
        raise DataError(f"{str(images)!r} has {len(x)} images, but {str(labels)!r} {len(y)} labels.")
    return Examples(scale_bytes(x[:, None]), torch.from_numpy(y.astype(np.int64)))


def _find_file(folder: Path, prefix: str, kind: str) -> Path | None:
    suffixes = (
        f"{dot}idx{_DIMENSIONS[kind]}-ubyte{compression}" for dot in "-." for compression in ("", ".gz")
    )
    files = (folder / f"{prefix}-{kind}{suffix}" for suffix in suffixes)
    return next((file for file in files if file.is_file()), None)
