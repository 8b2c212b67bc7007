"""Rows of named values from files, folders and the hub, each with the place where it stands."""

from __future__ import annotations

import gzip
import importlib
import json
import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from ...core.errors import DataError, did_you_mean

_LINES = (".jsonl", ".jsonl.gz")
_ARRAYS = (".json", ".json.gz")
_KNOWN = (*_LINES, *_ARRAYS, ".parquet")
_NEEDS = "pip install 'fedlowrank[language]'"


@dataclass(frozen=True, eq=False)
class Table:
    """Rows of named values.

    Attributes:
        source: where they come from, for messages.
        rows: the rows; a row may lack a column that others have.
        numbers: number of each row at its source, for messages.
        unit: what these numbers count: lines of a file, or rows.
        classes: names of the classes of the columns that hold numbers of named classes.
    """

    source: str
    rows: Sequence[Mapping[str, Any]]
    numbers: Sequence[int]
    unit: str = "row"
    classes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.rows)

    def place(self, i: int) -> str:
        """Where row ``i`` stands, for messages."""
        return f"{self.source!r}, {self.unit} {self.numbers[i]}"

    def require(self, *columns: str | None) -> None:
        """Refuse a table without a row, or one in which no row has a column of that name.

        Raises:
            DataError: naming the column, with the nearest of those that there are.
        """
        if not self.rows:
            raise DataError(f"{self.source!r} holds no rows.")
        known = {name for row in self.rows for name in row}
        for column in columns:
            if column is not None and column not in known:
                raise DataError(f"{self.source!r} has no column {column!r}. {did_you_mean(column, known)}")

    def text(self, i: int, column: str, *, optional: bool = False) -> str:
        """The text in a column of row ``i``; a null is an empty text.

        Args:
            i: index of the row.
            column: name of the column.
            optional: whether a row without that column counts as an empty text.

        Raises:
            DataError: if there is another thing than text, or nothing; the message says in which line.
        """
        row = self.rows[i]
        if column not in row and not optional:
            raise DataError(f"{self.place(i)} has no {column!r}; it has {', '.join(map(repr, row)) or 'nothing'}.")
        value = row.get(column)
        if value is None:
            return ""
        if not isinstance(value, str):
            raise DataError(f"{self.place(i)}: {column!r} must be text, not {_short(value)}.")
        return value

    def name(self, i: int, column: str | None) -> str | None:
        """What names a client or a category in row ``i``: text, or a whole number as text; None for a null.

        Raises:
            DataError: if there is another thing; the message says in which line.
        """
        if column is None:
            return None
        value = self.rows[i].get(column)
        if value is None or value == "":
            return None
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise DataError(f"{self.place(i)}: {column!r} must be text or a whole number, not {_short(value)}.")
        return str(value)


def expand(path: str) -> str:
    """A path with ``~`` and environment variables replaced.

    Raises:
        DataError: if a variable is not set.
    """
    text = os.path.expandvars(os.path.expanduser(path))  # noqa: PTH111 - a hub name is no path
    if (unset := re.search(r"\$(\w+|\{\w+\})", text)) and not Path(text).exists():
        raise DataError(f"the path {path!r} needs the environment variable {unset[0]}, which is not set.")
    return text


def find_file(folder: Path, stem: str) -> Path:
    """The file of that name in a folder, whatever it ends in.

    Args:
        folder: where to look.
        stem: name of the file without its end.

    Raises:
        DataError: if there is none, or several.
    """
    found = [file for suffix in _KNOWN if (file := folder / (stem + suffix)).is_file()]
    if len(found) == 1:
        return found[0]
    if found:
        raise DataError(f"{str(folder)!r} holds several: {', '.join(file.name for file in found)}. Name one of them.")
    raise DataError(f"{str(folder)!r} holds no {stem} file; looked for {', '.join(stem + s for s in _KNOWN)}.")


def read_file(path: str | Path) -> Table:
    """The rows of a file: ``.jsonl`` (an object a line), ``.json`` (a list of objects), either with ``.gz``, or parquet.

    Args:
        path: the file; ``~`` and environment variables are replaced. Blank lines of a ``.jsonl`` file are skipped.

    Raises:
        DataError: if it is missing, damaged or of another kind; the message names the line.
    """
    file = Path(expand(str(path)))
    if not file.is_file():
        raise DataError(
            f"the file {str(file)!r} does not exist." if not file.exists() else f"{str(file)!r} is no file."
        )
    if file.name.endswith(".parquet"):
        return _parquet(file)
    if file.name.endswith(_LINES):
        return _lines(file)
    if file.name.endswith(_ARRAYS):
        return _array(file)
    raise DataError(f"{str(file)!r} ends in none of {', '.join(_KNOWN)}.")


def read_text(path: str) -> str:
    """All of a text file in UTF-8, ``.gz`` or not; ``~`` and environment variables are replaced.

    Raises:
        DataError: if it cannot be read.
    """
    file = Path(expand(path))
    with _opened(file) as stream:
        return stream.read()


def read_split(path: str, name: str | None, split: str, cache: str | None) -> Table:
    """A split of a folder that ``datasets`` reads or has saved, or of a data set on the hub.

    Args:
        path: the folder; or, if no such path exists, a name on the hub. ``~`` and environment variables are replaced.
        name: configuration of the data set, for those that have several.
        split: name of the split; a data set saved without splits is the split ``train``.
        cache: folder for what the library keeps between runs, or None for its usual one.

    Raises:
        DataError: if ``datasets`` is missing, nothing can be read, or there is no such split.
    """
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"{path!r} needs the library datasets: {_NEEDS}") from error
    text = expand(path)
    where = Path(text)
    # Anything that looks like a path should not be asked for on the hub when it is merely misspelt.
    if not where.exists() and (where.is_absolute() or path.startswith((".", "~", "$"))):
        raise DataError(f"{text!r} does not exist.")
    try:
        if (where / "dataset_dict.json").is_file() or (where / "state.json").is_file():
            found = datasets.load_from_disk(str(where))
        else:
            found = datasets.load_dataset(text, name, cache_dir=cache)
    # The library wraps the errors of a dozen readers; those of the network are all kinds of OSError.
    except (OSError, ValueError, TypeError, KeyError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise DataError(f"datasets cannot read {text!r}: {type(error).__name__}: {error}") from error
    parts = {"train": found} if isinstance(found, datasets.Dataset) else dict(found)
    if split not in parts:
        raise DataError(f"{text!r} has no split {split!r}. {did_you_mean(split, parts)}")
    part = parts[split]
    kinds = {column: kind for column, kind in part.features.items() if isinstance(kind, datasets.ClassLabel)}
    classes = {column: tuple(kind.names) for column, kind in kinds.items()}
    return Table(f"{text} ({split})", part.to_list(), range(1, len(part) + 1), classes=classes)


@contextmanager
def _opened(file: Path) -> Iterator[IO[str]]:
    try:
        opener = gzip.open if file.name.endswith(".gz") else open
        # Some editors put a byte order mark in front, which is no part of the text.
        with opener(file, "rt", encoding="utf-8-sig", newline="\n") as stream:
            yield stream
    except UnicodeDecodeError as error:
        raise DataError(f"{str(file)!r} is not text in UTF-8: {error}.") from error
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot read {str(file)!r}: {error}.") from error


def _lines(file: Path) -> Table:
    rows, numbers = [], []
    with _opened(file) as stream:
        for number, line in enumerate(stream, 1):
            if line.strip():
                rows.append(_object(line, f"{str(file)!r}, line {number}"))
                numbers.append(number)
    return Table(str(file), rows, numbers, "line")


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise DataError(f"{where} is not JSON: {error}.") from error
    if not isinstance(row, dict):
        raise DataError(f"{where} must be an object with named values, not {_short(row)}.")
    return row


def _array(file: Path) -> Table:
    with _opened(file) as stream:
        content = stream.read()
    try:
        rows = json.loads(content)
    except (json.JSONDecodeError, RecursionError) as error:
        hint = " A file with an object a line must end in .jsonl." if "Extra data" in str(error) else ""
        raise DataError(f"{str(file)!r} is not JSON: {error}.{hint}") from error
    if not isinstance(rows, list):
        raise DataError(f"{str(file)!r} must hold a list of objects, not {_short(rows)}.")
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise DataError(f"{str(file)!r}, row {number} must be an object with named values, not {_short(row)}.")
    return Table(str(file), rows, range(1, len(rows) + 1))


def _parquet(file: Path) -> Table:
    try:
        arrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise DataError(f"{str(file)!r} needs the library pyarrow: {_NEEDS}") from error
    try:
        rows = parquet.read_table(file).to_pylist()
    except (OSError, ValueError, arrow.ArrowException) as error:
        raise DataError(f"{str(file)!r} cannot be read as parquet: {error}") from error
    return Table(str(file), rows, range(1, len(rows) + 1))


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= 40 else text[:37] + "..."
