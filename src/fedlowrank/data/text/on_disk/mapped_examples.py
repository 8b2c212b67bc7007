"""Examples whose tokens lie in memory-mapped files: memory holds the pages in use, and the system may drop them."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ....core.errors import DataError
from ...dataset import Examples

_CHUNK_ROWS = 1024
"""Rows that are copied at once."""


@dataclass(frozen=True, eq=False)
class MappedExamples(Examples):
    """Examples in memory-mapped files.

    Attributes:
        folder: where further files are made.
    """

    folder: Path = field(default=Path(), kw_only=True)

    def take(self, index: Tensor | np.ndarray) -> Examples:
        """Copy the examples at positions [m] in 0..n-1 to new files."""
        index = torch.as_tensor(index, dtype=torch.int64)
        assert isinstance(self.x, dict)
        x = {name: map_tensor((len(index), *t.shape[1:]), self.folder) for name, t in self.x.items()}
        y = map_tensor((len(index), *self.y.shape[1:]), self.folder)
        for rows in split_slices(len(index)):
            for name, t in self.x.items():
                torch.index_select(t, 0, index[rows], out=x[name][rows])
            torch.index_select(self.y, 0, index[rows], out=y[rows])
        return MappedExamples(x, y, folder=self.folder)


def map_tensor(shape: tuple[int, ...], folder: Path) -> Tensor:
    """Make an int64 tensor of zeros in a memory-mapped file; the file has no name and goes with the tensor.

    Args:
        shape: shape of the tensor.
        folder: where the file is made.

    Raises:
        DataError: if the file cannot be made.
    """
    if 0 in shape:
        return torch.zeros(shape, dtype=torch.int64)
    with explain_missing_file(folder), tempfile.TemporaryFile(dir=folder) as file:
        return torch.from_numpy(np.memmap(file, np.int64, "w+", shape=shape))


@contextlib.contextmanager
def explain_missing_file(folder: Path) -> Iterator[None]:
    """Raise a DataError where no file for tokens can be made in a folder."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"data.on_disk: no file for tokens can be made in {str(folder)!r}: {error}"
        ) from error


def split_slices(count: int) -> Iterator[slice]:
    """Places of the rows that are copied at once."""
    return (slice(a, min(count, a + _CHUNK_ROWS)) for a in range(0, count, _CHUNK_ROWS))
