"""Rows of a file and records that are read when they are needed, for texts that are larger than memory."""

from __future__ import annotations

import codecs
import itertools
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Generic, NamedTuple, TypeVar, overload

import numpy as np

from ....core.errors import DataError

T = TypeVar("T")

_CHUNK_ROWS = 256
"""Rows that are copied from a library's table at once."""


class RecordFacts(NamedTuple):
    """What is known of n records without reading them again. Memory: 24 bytes a record.

    Attributes:
        types: type of each record, object [n].
        categories: category of each record or None, object [n].
        clients: natural client of each record or None, object [n].
    """

    types: np.ndarray
    categories: np.ndarray
    clients: np.ndarray

    def select(self, indices: np.ndarray) -> RecordFacts:
        """The facts of some records, in their order."""
        return RecordFacts(*(values[indices] for values in self))


class LazyRecords(Sequence[T], Generic[T]):
    """A list of records that are made at every access. Reading them in order is fast, a single one is slow.

    Args:
        read: makes the records of some numbers, in their order.
        numbers: numbers of the records, int64 [n].
        facts: what is known of the records.
    """

    def __init__(
        self, read: Callable[[np.ndarray], Iterator[T]], numbers: np.ndarray, facts: RecordFacts
    ) -> None:
        self._read = read
        self._numbers = numbers
        self.facts = facts

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> LazyRecords[T]: ...

    def __getitem__(self, index: int | slice) -> T | LazyRecords[T]:
        if isinstance(index, slice):
            return self.select(np.arange(len(self))[index])
        return next(self._read(self._numbers[[index]]))

    def __iter__(self) -> Iterator[T]:
        return self._read(self._numbers)

    def select(self, indices: np.ndarray) -> LazyRecords[T]:
        """The records at some indices, in their order."""
        return LazyRecords(self._read, self._numbers[indices], self.facts.select(indices))


def join_records(parts: Sequence[LazyRecords[T]]) -> LazyRecords[T]:
    """Join lists of at least one part, one after another."""
    ends = np.cumsum([len(part) for part in parts])

    def read(numbers: np.ndarray) -> Iterator[T]:
        if not len(numbers):
            return
        part_indices = np.searchsorted(ends, numbers, side="right")
        boundaries = (np.flatnonzero(np.diff(part_indices)) + 1).tolist()
        for start, stop in itertools.pairwise([0, *boundaries, len(numbers)]):
            part_index = int(part_indices[start])
            part = parts[part_index]
            yield from part.select(numbers[start:stop] - (ends[part_index] - len(part)))

    facts = RecordFacts(*map(np.concatenate, zip(*(part.facts for part in parts), strict=True)))
    return LazyRecords(read, np.arange(ends[-1]), facts)


def list_facts(records: Iterable[Any]) -> RecordFacts:
    """List what is known of records, which are read once."""
    names: dict[str | None, str | None] = {}
    types, categories, clients = [], [], []
    for record in records:
        category, client = getattr(record, "category", None), record.client
        types.append(type(record))
        # records of one client share its name in memory
        categories.append(names.setdefault(category, category))
        clients.append(names.setdefault(client, client))
    return RecordFacts(*(np.array(values, dtype=object) for values in (types, categories, clients)))


class RecentRows(Sequence[Mapping[str, Any]]):
    """Rows with the last one kept: a record reads several values of one row.

    Args:
        rows: rows that are made at every access: of a file, or of the library ``datasets``.
    """

    def __init__(self, rows: Any) -> None:
        self._rows = rows
        self._last: tuple[int, Mapping[str, Any]] | None = None

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return self._read(np.arange(len(self)))

    def __getitem__(self, index: Any) -> Any:
        if self._last is None or self._last[0] != index:
            self._last = index, self._rows[index]
        return self._last[1]

    def visit(self, numbers: np.ndarray) -> Iterator[int]:
        """Make the rows of some numbers the last one in turn, and give their numbers."""
        for number, row in zip(numbers.tolist(), self._read(numbers), strict=True):
            self._last = number, row
            yield number

    def _read(self, numbers: np.ndarray) -> Iterator[Mapping[str, Any]]:
        if isinstance(self._rows, LineRows):
            yield from self._rows.read(numbers)
            return
        for start in range(0, len(numbers), _CHUNK_ROWS):
            columns = self._rows[numbers[start : start + _CHUNK_ROWS].tolist()]
            for values in zip(*columns.values(), strict=True):
                yield dict(zip(columns, values, strict=True))


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
        return next(self.read(np.array([index])))

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return self.read(np.arange(len(self)))

    def read(self, numbers: np.ndarray) -> Iterator[Mapping[str, Any]]:
        """The rows of some numbers, in their order; the file is opened once."""
        with self._file.open("rb") as stream:
            for start, line_number in zip(
                self._starts[numbers].tolist(), self.lines[numbers].tolist(), strict=True
            ):
                yield self._parse_line(stream, start, f"{str(self._file)!r}, line {line_number}")

    def _parse_line(self, stream: BinaryIO, start: int, location: str) -> Mapping[str, Any]:
        stream.seek(start)
        try:
            # some editors write a byte order mark
            text = stream.readline().removeprefix(codecs.BOM_UTF8).decode()
        except UnicodeDecodeError as error:
            raise DataError(f"{location} is not text in UTF-8: {error}.") from error
        return self._parse(text, location)
