"""MNIST and the data sets published in its IDX format."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ..core.errors import DataError
from .dataset import Dataset, Examples
from .files import find_folder, pixels

_PARTS = {"train": "train", "test": "t10k"}


@dataclass(frozen=True)
class Mnist:
    """MNIST, Fashion-MNIST, KMNIST and others in the same files: IDX, plain or compressed with gzip.

    The folder holds ``train-images-idx3-ubyte``, ``train-labels-idx1-ubyte``, ``t10k-images-idx3-ubyte`` and
    ``t10k-labels-idx1-ubyte``, each with or without ``.gz``; ``train-images.idx3-ubyte`` and so on are known too.
    Source of the format: LeCun, Cortes and Burges, "The MNIST database of handwritten digits".

    Attributes:
        path: folder with the four files, or a folder at most two levels above it.
        classes: names of the classes in the order of the labels; none given: the numbers "0", "1", ...
    """

    path: str
    classes: tuple[str, ...] = ()

    def load(self) -> Dataset:
        """The images as [n, 1, height, width] in [0, 1].

        Raises:
            DataError: if a file is missing, of another format, cut short, or too long.
        """
        folder = find_folder(self.path, lambda f: all(_find(f, p, "images") for p in _PARTS.values()), "IDX files")
        parts = {part: _part(folder, prefix) for part, prefix in _PARTS.items()}
        count = 1 + max(int(examples.y.max()) for examples in parts.values())
        names = self.classes or tuple(str(c) for c in range(count))
        return Dataset("mnist", parts["train"], parts["test"], names)


def read_idx(path: Path, dims: int) -> np.ndarray:
    """The array of an IDX file of unsigned bytes.

    Args:
        path: the file; compressed if its name ends in ``.gz``.
        dims: number of dimensions that it must have.

    Returns:
        uint8 array of the shape that the header gives, not writable.

    Raises:
        DataError: if the magic number differs, or if the file holds fewer or more bytes than its header says.
    """
    where = f"IDX file {str(path)!r}"
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            header = file.read(4 + 4 * dims)
            expected = 0x0800 + dims
            if len(header) < 4 or (magic := struct.unpack(">I", header[:4])[0]) != expected:
                found = f"{magic:#010x}" if len(header) >= 4 else f"{len(header)} bytes in all"
                raise DataError(f"{where}: expected the magic number {expected:#010x}, found {found}.")
            if len(header) < 4 + 4 * dims:
                raise DataError(f"{where}: expected a header of {4 + 4 * dims} bytes, found {len(header)}.")
            shape = struct.unpack(f">{dims}I", header[4:])
            size = math.prod(shape)
            # One byte more than the header promises shows a file that is too long; a compressed file that expands
            # without end is not followed.
            body = file.read(size + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{where} cannot be read or is cut short: {error}.") from error
    if len(body) != size:
        found = str(len(body)) if len(body) < size else "more"
        raise DataError(f"{where}: its header says {list(shape)}, {size} bytes; found {found}.")
    return np.frombuffer(body, dtype=np.uint8).reshape(shape)


def _part(folder: Path, prefix: str) -> Examples:
    images, labels = (_find(folder, prefix, kind) for kind in ("images", "labels"))
    if images is None or labels is None:
        raise DataError(f"{str(folder)!r} holds the images {prefix}-images-idx3-ubyte, but not their labels.")
    x, y = read_idx(images, 3), read_idx(labels, 1)
    if len(x) == 0 or x.size == 0:
        raise DataError(f"IDX file {str(images)!r} holds no images: its header says {list(x.shape)}.")
    if len(x) != len(y):
        raise DataError(f"{str(images)!r} holds {len(x)} images, but {str(labels)!r} {len(y)} labels.")
    return Examples(pixels(x[:, None]), torch.from_numpy(y.astype(np.int64)))


def _find(folder: Path, prefix: str, kind: str) -> Path | None:
    dims = {"images": 3, "labels": 1}[kind]
    names = [f"{prefix}-{kind}{dot}idx{dims}-ubyte{end}" for dot in "-." for end in ("", ".gz")]
    return next((folder / name for name in names if (folder / name).is_file()), None)
