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

_CHUNK_VALUES = 1 << 16
"""About so many values are copied at once."""


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
        x = {name: self._copy(t, index) for name, t in self.x.items()}
        return MappedExamples(x, self._copy(self.y, index), folder=self.folder)

    def _copy(self, t: Tensor, index: Tensor) -> Tensor:
        with TensorFile(self.folder) as file:
            for rows in split_slices(len(index), t[:1].numel()):
                file.write(t.index_select(0, index[rows]).numpy())
            return file.map((len(index), *t.shape[1:]))


class TensorFile(contextlib.AbstractContextManager["TensorFile"]):
    """An int64 tensor that is written to a file in order and then mapped. The file has no name and goes with the tensor.

    The memory of this process does not grow with what is written.

    Args:
        folder: where the file is made.

    Raises:
        DataError: if the file cannot be made or written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with explain_missing_file(folder):
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - closed on exit

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, values: np.ndarray) -> None:
        """Append int64 values."""
        with explain_missing_file(self._folder):
            np.ascontiguousarray(values).tofile(self._file)

    def map(self, shape: tuple[int, ...]) -> Tensor:
        """The values as a tensor of this shape."""
        if 0 in shape:
            return torch.zeros(shape, dtype=torch.int64)
        with explain_missing_file(self._folder):
            return torch.from_numpy(np.memmap(self._file, np.int64, "r+", shape=shape))


@contextlib.contextmanager
def explain_missing_file(folder: Path) -> Iterator[None]:
    """Raise a DataError where the file of tokens in a folder cannot be made, written or mapped."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"data.on_disk: tokens cannot be written to a file in {str(folder)!r}: {error}"
        ) from error


def split_slices(count: int, width: int) -> Iterator[slice]:
    """Slices of rows of a width that are copied at once."""
    row_count = max(1, _CHUNK_VALUES // max(1, width))
    return (slice(a, min(count, a + row_count)) for a in range(0, count, row_count))
