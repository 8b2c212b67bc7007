"""Rows of a file and records that are read when they are needed, for texts that are larger than memory."""

from __future__ import annotations

import bisect
import itertools
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar, overload

import numpy as np

from ....core.errors import DataError

T = TypeVar("T")


class LazyList(Sequence[T], Generic[T]):
    """A list of values that are made at every access.

    Args:
        read: makes the value of a number.
        numbers: numbers of the values, int64 [n].
    """

    def __init__(self, read: Callable[[int], T], numbers: np.ndarray) -> None:
        self._read = read
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> LazyList[T]: ...

    def __getitem__(self, index: int | slice) -> T | LazyList[T]:
        if isinstance(index, slice):
            return self.select(np.arange(len(self))[index])
        return self._read(int(self._numbers[index]))

    def __iter__(self) -> Iterator[T]:
        return map(self._read, self._numbers.tolist())

    def select(self, indices: np.ndarray) -> LazyList[T]:
        """The values at some indices, in their order."""
        return LazyList(self._read, self._numbers[indices])


def join_lists(parts: Sequence[LazyList[T]]) -> LazyList[T]:
    """Join lists, one after another."""
    ends = list(itertools.accumulate(map(len, parts)))

    def read(number: int) -> T:
        part_index = bisect.bisect_right(ends, number)
        return parts[part_index][number - (ends[part_index - 1] if part_index else 0)]

    return LazyList(read, np.arange(ends[-1] if ends else 0))


class RecentRows(Sequence[Mapping[str, Any]]):
    """Rows with the last one kept: a record reads several values of one row.

    Args:
        rows: rows that are made at every access.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self._rows = rows
        self._last: tuple[int, Mapping[str, Any]] | None = None

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return iter(self._rows)

    def __getitem__(self, index: Any) -> Any:
        if self._last is None or self._last[0] != index:
            self._last = index, self._rows[index]
        return self._last[1]


class LineRows(Sequence[Mapping[str, Any]]):
    """Rows of a file with an object per line, parsed at every access. Memory: 16 bytes a row.

    Args:
        file: a ``.jsonl`` file without compression.
        parse: parses a line, given its location for messages.

    Raises:
        DataError: if the file cannot be read.
    """

    def __init__(self, file: Path, parse: Callable[[str, str], Mapping[str, Any]]) -> None:
        self._file, self._parse = file, parse
        starts, numbers, start = array("q"), array("q"), 0
        try:
            with file.open("rb") as stream:
                for number, line in enumerate(stream, 1):
                    if line.strip():
                        starts.append(start)
                        numbers.append(number)
                    start += len(line)
        except OSError as error:
            raise DataError(f"cannot read {str(file)!r}: {error}.") from error
        self._starts, self.lines = np.array(starts, np.int64), np.array(numbers, np.int64)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: Any) -> Any:
        with self._file.open("rb") as stream:
            return self._read(stream, index)

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        with self._file.open("rb") as stream:
            for index in range(len(self)):
                yield self._read(stream, index)

    def _read(self, stream: BinaryIO, index: int) -> Mapping[str, Any]:
        stream.seek(int(self._starts[index]))
        location = f"{str(self._file)!r}, line {int(self.lines[index])}"
        try:
            # utf-8-sig skips the byte order mark that some editors write
            return self._parse(stream.readline().decode("utf-8-sig"), location)
        except UnicodeDecodeError as error:
            raise DataError(f"{location} is not text in UTF-8: {error}.") from error
