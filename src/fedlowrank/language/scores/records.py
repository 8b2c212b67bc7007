"""Records of evaluation files: a JSON object a line, gzipped or not."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...core.errors import DataError, did_you_mean


def read_records(path: str, columns: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The records of a ``.jsonl`` or ``.jsonl.gz`` file.

    Args:
        path: of the file.
        columns: each record must have these.

    Raises:
        DataError: if the file cannot be read, is empty, or a line is no JSON object with the columns.
    """
    where = Path(path).expanduser()
    try:
        stored = where.read_bytes()
        text = (gzip.decompress(stored) if where.suffix == ".gz" else stored).decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise DataError(f"{path!r} cannot be read: {type(error).__name__}: {error}") from error
    # not splitlines(): a line of JSON may hold other line separators of Unicode as they are
    records = [
        (number, _parse(path, number, line))
        for number, line in enumerate(text.split("\n"), 1)
        if line.strip()
    ]
    if not records:
        raise DataError(f"{path!r} has no record.")
    for number, record in records:
        for column in columns:
            if column not in record:
                raise DataError(f"{path!r}, line {number}, has no {column!r}. {did_you_mean(column, record)}")
    return [record for _, record in records]


def text_of(record: Mapping[str, Any], column: str) -> str:
    """A column that must hold text; null is empty.

    Raises:
        DataError: if it holds something else.
    """
    value = record.get(column)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise DataError(f"the column {column!r} holds {value!r}, not text.")
    return value


def _parse(path: str, number: int, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise DataError(f"{path!r}, line {number}, is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise DataError(f"{path!r}, line {number}, is not a JSON object.")
    return record
