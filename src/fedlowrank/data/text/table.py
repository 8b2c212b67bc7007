"""Tables of text: rows of named values from files, folders and the hub, with their line for messages."""

from __future__ import annotations

import csv
import gzip
import importlib
import json
import os
import re
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np

from ...core.errors import ConfigError, DataError, did_you_mean
from ...core.io.text import explain_encoding
from ..datasets.hub import open_dataset
from ..download.data_files import expand_path, explain_missing
from .on_disk.lazy_records import LineRows, RecentRows

_WHOLE_NUMBER = re.compile(r"-?(0|[1-9][0-9]{0,17})")
_SURROGATE = re.compile("[\ud800-\udfff]")
_LINE_ENDINGS = (".jsonl", ".jsonl.gz")
_ENDINGS = (*_LINE_ENDINGS, ".json", ".json.gz", ".parquet")
DATA_ENDINGS = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
"""Endings of the files that `read_data_file` reads; all but the last one also with ``.gz``."""


@dataclass(frozen=True, eq=False)
class Table:
    """Rows of named values; its methods raise a DataError that names the line.

    Attributes:
        source: name of the source, for messages.
        rows: the rows; a row may lack a column that others have.
        classes: names of the classes of the columns that hold class numbers.
        lines: line of each row in a file with a row per line.
    """

    source: str
    rows: Sequence[Mapping[str, Any]]
    classes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    lines: Sequence[int] | np.ndarray = ()

    @cached_property
    def _columns(self) -> tuple[set[str], set[str]]:
        """Columns that a row has, and those with a value, found in one pass over the rows."""
        columns: set[str] = set()
        filled_columns: set[str] = set()
        for row in self.rows:
            columns.update(row)
            filled_columns.update(name for name, value in row.items() if value is not None)
        return columns, filled_columns

    @property
    def columns_with_values(self) -> set[str]:
        """Columns that have a value in some row."""
        return self._columns[1]

    def locate(self, i: int) -> str:
        """Source and number of row ``i``, for messages."""
        number = f"line {self.lines[i]}" if len(self.lines) else f"row {i + 1}"
        return f"{self.source!r}, {number}"

    def require(self, *columns: str | None) -> None:
        """Reject a table without rows, or without one of these columns in any row."""
        if not len(self.rows):
            raise DataError(f"{self.source!r} holds no rows.")
        table_columns = self._columns[0]
        for column in columns:
            if column is not None and column not in table_columns:
                raise DataError(
                    f"{self.source!r} has no column {column!r}. {did_you_mean(column, table_columns)}"
                )

    def value(self, i: int, column: str) -> Any:
        """The value in a column of row ``i``, None for a missing one; refuses text that no tokenizer takes."""
        value = self.rows[i].get(column)
        if surrogate := find_lone_surrogate(value):
            raise DataError(explain_surrogate(f"{self.locate(i)}: {column!r}", surrogate))
        return value

    def text(self, i: int, column: str, *, optional: bool = False) -> str:
        """The text in a column of row ``i``; empty for a null, and with ``optional`` for a missing column."""
        row = self.rows[i]
        if column not in row and not optional:
            columns = ", ".join(map(repr, row)) or "nothing"
            raise DataError(f"{self.locate(i)} has no {column!r}; it has {columns}.")
        value = self.value(i, column)
        if value is not None and not isinstance(value, str):
            raise DataError(f"{self.locate(i)}: {column!r} must be text, not {_shorten(value)}.")
        return value or ""

    def name(self, i: int, column: str | None) -> str | None:
        """The name of a client or category in row ``i``: text, or a whole number as text; None for a null."""
        value = None if column is None else self.value(i, column)
        if value is None or value == "":
            return None
        if isinstance(value, bool) or not isinstance(value, str | int):
            value_text = _shorten(value)
            raise DataError(f"{self.locate(i)}: {column!r} must be text or a whole number, not {value_text}.")
        return str(value)


def find_lone_surrogate(value: Any) -> str | None:
    """Half of a surrogate pair in a text, or in the texts of a list or an object; or None.

    JSON can hold one as an escape. No tokenizer takes it, and no file in UTF-8.
    """
    if isinstance(value, str):
        match = None if value.isascii() else _SURROGATE.search(value)
        return match and match.group()
    if isinstance(value, Mapping):
        value = [*value, *value.values()]
    if isinstance(value, list | tuple):
        return next(filter(None, map(find_lone_surrogate, value)), None)
    return None


def explain_surrogate(location: str, surrogate: str) -> str:
    """Explain half of a surrogate pair in a text at a location."""
    return (
        f"{location} holds {surrogate!a}, which is half of a surrogate pair and no character. Replace it, or drop the "
        "row."
    )


def explain_json_error(text: str, error: ValueError | RecursionError) -> str:
    """Explain why Python cannot read a text as JSON, in words that follow its location."""
    if isinstance(error, json.JSONDecodeError | RecursionError):
        return f"is not JSON: {error}."
    # the only other error: Python converts no longer numbers
    max_digits = sys.get_int_max_str_digits()
    match = re.search(rf"(?<![^\s:,\[])-?[0-9]{{{max_digits + 1},}}", text)
    position = json.JSONDecodeError("", text, match.start()) if match else None
    location = f", at line {position.lineno} column {position.colno}" if position else ""
    return (
        f"has a whole number of more than {max_digits} digits{location}. Write it as text, or leave it out."
    )


def find_file(folder: Path, stem: str) -> Path:
    """The only file with that stem in a folder, with any known ending."""
    files = [file for ending in _ENDINGS if (file := folder / (stem + ending)).is_file()]
    if len(files) == 1:
        return files[0]
    if files:
        names = ", ".join(file.name for file in files)
        raise DataError(f"{str(folder)!r} holds several: {names}. Name one of them.")
    names = ", ".join(stem + ending for ending in _ENDINGS)
    raise DataError(f"{str(folder)!r} holds no {stem} file; looked for {names}.")


def remove_endings(path: str) -> str:
    """Name of a file without its endings; of a folder or a data set on the hub its name."""
    name = os.path.basename(os.path.normpath(expand_path(path)))  # noqa: PTH119 - a hub name is no path
    for ending in (".gz", *DATA_ENDINGS):
        name = name.removesuffix(ending)
    return name


def choose_title(path: str) -> str:
    """A name for reports: of the file, or of its folder if the file is only the training part."""
    stem, folder = remove_endings(path), Path(expand_path(path)).parent.name
    return folder if (stem.startswith("train") or "*" in stem) and folder else stem or path


def refuse_split_of_file(path: str, split: str | None) -> None:
    """Refuse the name of a split of a single file, unless it is None."""
    if split is not None:
        raise ConfigError(f"{path!r} is a file, which has no split {split!r}. Name a test file as test.")


def read_file(path: str | Path) -> Table:
    """Read ``.jsonl`` (an object per line), ``.json`` (a list of objects), also with ``.gz``, or parquet.

    Blank lines of ``.jsonl`` are skipped; ``~`` and environment variables in the path are replaced.

    Raises:
        DataError: if it is missing, damaged or of another kind; the message names the line.
    """
    file = Path(expand_path(str(path)))
    if not file.exists():
        raise DataError(explain_missing(file))
    if not file.is_file():
        raise DataError(f"{str(file)!r} is no file.")
    if not file.name.endswith(_ENDINGS):
        raise DataError(f"{str(file)!r} ends in none of {', '.join(_ENDINGS)}.")
    if file.name.endswith(_LINE_ENDINGS):
        return _read_lines(file)
    rows = _read_parquet(file) if file.suffix == ".parquet" else _read_list(file)
    return Table(str(file), rows)


def name_speaker(table: Table, i: int, columns: Sequence[str]) -> str:
    """Join the names of the speaker of row ``i``, such as play and role; refuse a row that lacks one of them."""
    names = [name for column in columns if (name := table.name(i, column)) is not None]
    if len(names) < len(columns):
        raise DataError(f"{table.locate(i)} names no speaker in {', '.join(map(repr, columns))}.")
    return ", ".join(names)


def read_text(path: str) -> str:
    """Read a text file in UTF-8, also with ``.gz``; ``~`` and environment variables are replaced."""
    with _open_text(Path(expand_path(path))) as stream:
        return stream.read()


def read_split(path: str, name: str | None, split: str, cache: str | None, on_disk: bool = False) -> Table:
    """Read a split of a data set with the library ``datasets``.

    Args:
        path: a folder, or a name on the hub; see `hub.open_dataset`.
        name: configuration of the data set, for those that have several.
        split: name of the split; a data set saved without splits is the split ``train``.
        cache: folder of the library's cache, or None for its usual one.
        on_disk: leave the rows in the library's memory-mapped files.
    """
    library, dataset = open_dataset(path, name, cache, "language")
    return _make_table(library, dataset, path, split, on_disk)


def read_data_file(path: str, cache: str | None, on_disk: bool = False) -> Table:
    """Read a file: parquet with the library ``datasets``; JSON, JSON lines and CSV as they are, also with ``.gz``.

    The library guesses: of texts that look like dates, numbers, truth values or nothing (``NA``) it makes those.

    Args:
        path: the file.
        cache: folder of the library's cache, or None for its usual one.
        on_disk: read each row at its access; for ``.jsonl`` and ``.parquet`` alone.

    Raises:
        DataError: if the file is missing, damaged or of another kind.
    """
    ending = Path(path.removesuffix(".gz")).suffix
    if on_disk and not path.endswith((".jsonl", ".parquet")):
        raise DataError(
            f"data.on_disk reads .jsonl and .parquet files without compression, and {path!r} is none. Convert it, or leave "
            "on_disk out"
        )
    if on_disk and ending == ".jsonl":
        file = Path(expand_path(path))
        if not file.is_file():
            raise DataError(explain_missing(file))
        rows = LineRows(file, lambda line, where: _check_object(_parse(line, where), where))
        return Table(str(file), RecentRows(rows), lines=rows.lines)
    if ending in (".json", ".jsonl"):
        return read_file(path)
    if ending in (".csv", ".tsv"):
        return _read_csv(Path(expand_path(path)), "\t" if ending == ".tsv" else ",")
    library, dataset = open_dataset(path, None, cache, "language")
    return replace(_make_table(library, dataset, path, "train", on_disk), source=expand_path(path))


def _make_table(library: Any, dataset: Any, path: str, split: str, on_disk: bool) -> Table:
    splits = {"train": dataset} if isinstance(dataset, library.Dataset) else dict(dataset)
    if split not in splits:
        raise DataError(f"{path!r} has no split {split!r}. {did_you_mean(split, splits)}")
    part = splits[split]
    # of a list of labels the feature of its items
    features = {column: getattr(feature, "feature", feature) for column, feature in part.features.items()}
    class_features = {
        column: feature for column, feature in features.items() if isinstance(feature, library.ClassLabel)
    }
    classes = {column: tuple(feature.names) for column, feature in class_features.items()}
    return Table(f"{expand_path(path)} ({split})", RecentRows(part) if on_disk else part.to_list(), classes)


@contextmanager
def _open_text(file: Path) -> Iterator[IO[str]]:
    try:
        opener = gzip.open if file.name.endswith(".gz") else open
        # utf-8-sig skips the byte order mark that some editors write.
        with opener(file, "rt", encoding="utf-8-sig", newline="\n") as stream:
            yield stream
    except UnicodeDecodeError as error:
        reason = explain_encoding(file) or error
        raise DataError(f"{str(file)!r} is not text in UTF-8: {reason}.") from error
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot read {str(file)!r}: {error}.") from error


def _read_lines(file: Path) -> Table:
    rows, line_numbers = [], []
    with _open_text(file) as stream:
        for number, line in enumerate(stream, 1):
            if line.strip():
                location = f"{str(file)!r}, line {number}"
                rows.append(_check_object(_parse(line, location), location))
                line_numbers.append(number)
    return Table(str(file), rows, lines=line_numbers)


def _read_csv(file: Path, delimiter: str) -> Table:
    """Rows of text; an empty cell is a null."""
    # as much as a C long holds everywhere
    csv.field_size_limit((1 << 31) - 1)
    with _open_text(file) as stream:
        try:
            rows = [dict(row) for row in csv.DictReader(stream, delimiter=delimiter, strict=True)]
        except csv.Error as error:
            raise DataError(f"cannot read {str(file)!r} as CSV: {error}.") from error
    for number, row in enumerate(rows, 1):
        if None in row:
            raise DataError(f"{str(file)!r}, row {number} has more cells than the header has names.")
    return Table(str(file), [{name: value or None for name, value in row.items()} for row in rows])


def number_csv_labels(tables: Sequence[Table]) -> list[Table]:
    """Convert the labels of CSV files to numbers if they are whole numbers in all rows of all these files.

    A file by itself may lack the labels that have letters.
    """
    changed_tables = list(tables)
    is_csv = [Path(table.source.removesuffix(".gz")).suffix in (".csv", ".tsv") for table in tables]
    for name in ("label", "labels"):
        indices = [
            i for i, table in enumerate(changed_tables) if is_csv[i] and table.rows and name in table.rows[0]
        ]
        values = [row[name] for i in indices for row in changed_tables[i].rows]
        if values and all(value is not None and _WHOLE_NUMBER.fullmatch(value) for value in values):
            for i in indices:
                rows = [{**row, name: int(row[name])} for row in changed_tables[i].rows]
                changed_tables[i] = replace(changed_tables[i], rows=rows)
    return changed_tables


def _read_list(file: Path) -> list[dict[str, Any]]:
    with _open_text(file) as stream:
        content = stream.read()
    rows = _parse(content, repr(str(file)))
    if not isinstance(rows, list):
        raise DataError(f"{str(file)!r} must hold a list of objects, not {_shorten(rows)}.")
    return [_check_object(row, f"{str(file)!r}, row {number}") for number, row in enumerate(rows, 1)]


def _parse(text: str, location: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        hint = " A file with an object per line must end in .jsonl." if "Extra data" in str(error) else ""
        raise DataError(f"{location} {explain_json_error(text, error)}{hint}") from error


def _check_object(row: Any, location: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise DataError(f"{location} must be an object with named values, not {_shorten(row)}.")
    return row


def _read_parquet(file: Path) -> list[dict[str, Any]]:
    try:
        arrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        install = "pip install 'fedlowrank[language]'"
        raise DataError(f"{str(file)!r} needs the library pyarrow: {install}") from error
    try:
        rows: list[dict[str, Any]] = parquet.read_table(file).to_pylist()
    except (OSError, ValueError, arrow.ArrowException) as error:
        raise DataError(f"{str(file)!r} cannot be read as parquet: {error}") from error
    return rows


def _shorten(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= 40 else text[:37] + "..."
