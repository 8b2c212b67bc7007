"""Pandas data frames as clients: numeric columns as inputs, a column of the client and one of the target."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...core.contract.task import client_title
from ...core.errors import DataError, did_you_mean
from ...core.io.text import format_count
from .columns import Columns, are_mostly_numbers, check_columns, find_text, find_unnamed

if TYPE_CHECKING:
    from pandas import DataFrame, Series

SPLITS = ("train", "val", "test")
"""Names of the parts of a client."""


def is_frame(value: Any) -> bool:
    """Whether a value is a ``pandas.DataFrame``; does not import pandas."""
    pandas = sys.modules.get("pandas")
    return pandas is not None and isinstance(value, pandas.DataFrame)


def read_frame_clients(frame: DataFrame, columns: Columns) -> list[tuple[str, dict[str, tuple[Any, Any]]]]:
    """Read the clients of one data frame, sorted by name.

    Returns:
        The name of each client, with a pair of a data frame of inputs ``[n, features]`` and targets by part; the
        part's name is empty if the frame has no column of parts.

    Raises:
        DataError: if a column does not exist, is not numeric, or has empty cells.
    """
    column_names = [*frame.columns]
    if columns.client is None or columns.target is None:
        missing_name = "client" if columns.client is None else "target"
        raise DataError(
            "a DataFrame needs the names of two columns, client=... and target=...; "
            f"{missing_name}= is missing. Its columns are {column_names}. Without a column of clients give a list of frames, one "
            "for each client, and target=..."
        )
    key_columns = [columns.client, *([] if columns.split is None else [columns.split])]
    features = _choose_columns(frame, columns, key_columns, "the DataFrame")
    for name in key_columns:
        if empty_count := int(frame[name].isna().sum()):
            raise DataError(
                f"the column {name!r} has {format_count(empty_count, 'empty cell')}, first in row "
                f"{_find_first_row(frame[name].isna())!r}. Leave such rows out: frame.dropna(subset=[{name!r}])."
            )
    if columns.split is not None:
        _check_splits(frame[columns.split])
    clients = []
    for i, (key, rows) in enumerate(frame.groupby(frame[columns.client].astype(object), sort=True)):
        prefix = f"{client_title(i, str(key))}: "
        parts = {"": rows}
        if columns.split is not None:
            parts = {str(part): part_rows for part, part_rows in rows.groupby(columns.split, observed=True)}
            if "train" not in parts:
                raise DataError(
                    f"{prefix}the column {columns.split!r} names no row 'train', only {sorted(parts)}"
                )
        pairs = {
            part: _take_pair(part_rows, columns.target, features, prefix) for part, part_rows in parts.items()
        }
        clients.append((str(key), pairs))
    if not clients:
        raise DataError("the DataFrame has no rows")
    names = [name for name, _ in clients]
    if duplicates := [name for name in names if names.count(name) > 1]:
        raise DataError(
            f"the column {columns.client!r} has several values that read {duplicates[0]!r}, such as a number and a text, so two "
            f"clients would have one name. Give them one type: frame[{columns.client!r}].astype(str)"
        )
    return clients


def read_frame_pair(frame: DataFrame, columns: Columns, title: str) -> tuple[Any, Any]:
    """Inputs (a data frame) and targets of one client's data frame; ``title`` names the client in messages."""
    features = _choose_columns(frame, columns, [], f"{title}: its DataFrame")
    return _take_pair(frame, columns.target, features, f"{title}: ")


def convert_frame(frame: DataFrame, prefix: str = "") -> Any:
    """Convert all columns to an array: int64 if all hold whole numbers, else float64.

    Raises:
        DataError: if a column is not numeric, or has empty cells; the message names it.
    """
    kinds = [_check_numbers(frame.iloc[:, i], prefix) for i in range(frame.shape[1])]
    return frame.to_numpy(dtype=np.int64 if all(kind in "iu" for kind in kinds) else np.float64)


def check_rows(x: Any, y: Any, title: str) -> None:
    """Refuse a pair of inputs and targets whose pandas indices name other rows, and row numbers as an input.

    Indices are ignored if one of them only numbers the rows and the other has other values, as after ``reset_index``.

    Args:
        x: inputs, or a dict of them.
        y: targets.
        title: description of the pair, with which the message begins.

    Raises:
        DataError: if the rows of two data frames or series may not belong together.
    """
    pandas = sys.modules.get("pandas")
    if pandas is None:
        return
    inputs = {f"input {n!r}": value for n, value in x.items()} if isinstance(x, Mapping) else {"inputs": x}
    for value in filter(is_frame, inputs.values()):
        _refuse_unnamed(value.columns, f"{title}: its DataFrame", "leave it out: x.drop(columns=[{name!r}])")
    indices = {
        # the values count, and not their types: a MultiIndex has tuples
        name: value.index.to_flat_index().astype(object)
        for name, value in {**inputs, "targets": y}.items()
        if isinstance(value, pandas.DataFrame | pandas.Series)
    }
    for name, index in list(indices.items())[1:]:
        first_name, first_index = next(iter(indices.items()))
        if len(index) != len(first_index) or index.equals(first_index):
            continue
        numbers_rows = any(pandas.RangeIndex(len(index)).equals(i) for i in (index, first_index))
        if numbers_rows and not (index.isin(first_index).all() and first_index.isin(index).all()):
            continue
        row = next(i for i in range(len(index)) if not index[i : i + 1].equals(first_index[i : i + 1]))
        raise DataError(
            f"{title}: its {first_name} and its {name} have other indices: row {row} (counted from 0) has {first_index[row]!r} "
            f"and {index[row]!r}. Rows are paired by position. Put the rows with one index together: y.loc[x.index]; or, if "
            "the order is right, give arrays: y.to_numpy()"
        )


def _refuse_unnamed(names: Sequence[Any], title: str, advice: str) -> None:
    """Refuse the row numbers of a CSV file as an input."""
    if (name := find_unnamed(names)) is not None:
        raise DataError(
            f"{title} has the column {name!r}, which has no name in its file. DataFrame.to_csv writes such row numbers without "
            "index=False, and as an input they can reveal the label. Read the file with index_col=0, or "
            + advice.format(name=name)
        )


def _choose_columns(frame: DataFrame, columns: Columns, key_columns: list[Any], title: str) -> list[Any]:
    """Choose the columns of the inputs, and check that all columns exist."""
    column_names = [*frame.columns]
    targets = _list_targets(columns.target)
    required_names = [*key_columns, *targets, *(columns.features or ())]
    check_columns(required_names, column_names, f"{title} has the columns {column_names}")
    if duplicates := [name for name in column_names if column_names.count(name) > 1]:
        raise DataError(f"{title} has several columns {duplicates[0]!r}; rename one of them")
    features = [name for name in column_names if name not in (*key_columns, *targets)]
    if columns.features is not None:
        features = [*columns.features]
    else:
        _refuse_unnamed(features, title, "name the inputs: features=[...]")
    if not features or {*features} & {*key_columns, *targets}:
        raise DataError(f"{title}: features must be columns besides client, target and split, not {features}")
    return features


def _list_targets(target: Any) -> list[Any]:
    return [*target] if isinstance(target, list | tuple) else [target]


def _take_pair(frame: DataFrame, target: Any, features: Sequence[Any], prefix: str) -> tuple[Any, Any]:
    """Take inputs and targets; a list of columns holds real targets, also if it has a single one."""
    targets = _list_targets(target)
    for name in targets:
        if empty_count := int(frame[name].isna().sum()):
            raise DataError(
                f"{prefix}the target {name!r} has {format_count(empty_count, 'empty cell')}, first in row "
                f"{_find_first_row(frame[name].isna())!r}. Leave such rows out: frame.dropna(subset=[{name!r}])."
            )
    x = frame[[*features]]
    if isinstance(target, list | tuple):
        for name in targets:
            if not _holds_numbers(frame[name]):
                raise DataError(
                    f"{prefix}the target {name!r} holds no numbers but {frame[name].dtype}, such as "
                    f"{_find_example(frame[name])!r}. A list of columns is a regression, which needs numbers. For classes give "
                    f"target={name!r}"
                )
        return x, convert_frame(frame[[*targets]], prefix).astype(np.float64)
    y = frame[target]
    if _find_kind(y) == "f":
        return x, y.to_numpy(dtype=np.float64)[:, None]
    return x, y


def _find_kind(column: Series) -> str:
    """Numpy kind of the type of a column, also behind pandas' own numeric types, which support empty cells."""
    return str(getattr(column.dtype, "numpy_dtype", column.dtype).kind)


def _holds_numbers(column: Series) -> bool:
    return _find_kind(column) in "biuf" and str(column.dtype) != "category"


def _check_numbers(column: Series, prefix: str) -> str:
    """Check a numeric column and return the numpy kind of its type."""
    kind, name = _find_kind(column), column.name
    if not _holds_numbers(column):
        raise DataError(
            f"{prefix}the column {name!r} holds no numbers but {column.dtype}, such as {_find_example(column)!r}. "
            f"{_advise_encoding(column)}, or leave it out: frame.drop(columns=[{name!r}])"
        )
    if empty_count := int(column.isna().sum()):
        raise DataError(
            f"{prefix}the column {name!r} has {format_count(empty_count, 'empty cell')}, first in row "
            f"{_find_first_row(column.isna())!r}. Fill them in (fillna), or leave such rows out: frame.dropna()."
        )
    if kind == "f" and (mask := np.isinf(column.astype("float64"))).any():
        raise DataError(
            f"{prefix}the column {name!r} holds an infinity, first in row {_find_first_row(mask)!r}. Correct it, or leave such "
            "rows out"
        )
    return kind


def _check_splits(column: Series) -> None:
    for value in column.unique():
        if value not in SPLITS:
            raise DataError(
                f"the column {column.name!r} names the part of each row, one of {', '.join(map(repr, SPLITS))}, but "
                f"holds {value!r}. {did_you_mean(str(value), SPLITS)}"
            )


def _find_first_row(mask: Series) -> Any:
    """Index of the first row where a boolean column is true."""
    row = mask.index[mask.to_numpy()][0]
    return row.item() if isinstance(row, np.generic) else row


def _advise_encoding(column: Series) -> str:
    """Advise how to convert a column that holds no numbers."""
    if column.dtype.kind == "M":
        difference = (
            f"(frame[{column.name!r}] - pandas.Timestamp('2020-01-01', tz={_name_time_zone(column)!r}))"
        )
        return f"Make a small number of it, the same for all clients, such as days: {difference}.dt.total_seconds() / 86400"
    if column.dtype.kind == "m":
        return f"Make a number of it: frame[{column.name!r}].dt.total_seconds()"
    cells = column.dropna()
    if all(isinstance(value, int | float) for value in cells):
        return f"Give it a type of numbers, frame[{column.name!r}].astype(float)"
    texts = cells.astype(str)
    text_rows = find_text(texts.tolist())
    if are_mostly_numbers(texts.tolist(), text_rows):
        conversion = f"frame[{column.name!r}] = pandas.to_numeric(frame[{column.name!r}])"
        if not text_rows:
            return f"Make numbers of it, {conversion}"
        value = texts.iloc[text_rows[0]]
        return (
            f"Nearly all its cells are numbers, but {value!r} in row {_find_first_row(texts == value)!r} is none. Correct it and "
            f"make numbers of the column, {conversion}"
        )
    return (
        "Encode it in one frame of all clients, so that all get the same columns, frame = "
        f"pandas.get_dummies(frame, columns=[{column.name!r}], dtype=float)"
    )


def _name_time_zone(column: Series) -> str | None:
    """Name of the time zone of a column of times, or None."""
    zone = getattr(column.dt, "tz", None)
    return None if zone is None else str(zone)


def _find_example(column: Series) -> Any:
    values = column.dropna()
    return values.iloc[0] if len(values) else None
