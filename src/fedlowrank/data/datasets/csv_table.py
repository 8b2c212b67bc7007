"""Tables in CSV or Parquet files: one column is the label, one may be the client, the others are features."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from ...core.arguments.field_checks import CheckedFields
from ...core.errors import DataError, did_you_mean
from ...core.io.text import explain_encoding, list_first
from ..dataset import Dataset, Examples, WideColumn
from ..download.data_files import check_file, expand_path
from ..input_types import are_rounded, warn_of_rounding
from ..user_data.columns import are_mostly_numbers, find_text, find_unnamed
from ..user_data.user_arrays import TABLE_WARNING, are_whole_classes

if TYPE_CHECKING:
    from pandas import DataFrame, Series

_MAX_CATEGORIES = 100
_MISSING_CATEGORY = "missing"
_THOUSANDS = re.compile(r"\s*[+-]?(\d{1,3}(,\d{3})+|\d{1,3})\s*")
_MAX_NAMES = 12


@dataclass(frozen=True, eq=False, repr=False)
class TableDataset(Dataset):
    """A data set from a table.

    Attributes:
        columns: name of each input after the encoding: the name of its column, or ``column=value`` for a text column.
    """

    columns: tuple[str, ...] = ()


@dataclass(frozen=True)
class Csv(CheckedFields):
    """A table in a ``.csv``, ``.tsv`` or ``.parquet`` file, with a row for each example.

    Numbers stay unchanged (``data.normalize`` scales them); a text column becomes a 0/1 feature for each of its
    values. Text in a column of which at least 90 % are numbers is an error, unless a Parquet file stores the column as
    text, ``categories`` names it, or ``classes`` names the values of the label.

    Attributes:
        path: path of the file, also with ``.gz``. Parquet needs ``pip install 'fedlowrank[huggingface]'``.
        label: column of the targets. Text, booleans and whole numbers are classes, in sorted order; real numbers are
            a regression, with a note if all are whole, such as 1.0.
        client: column of the natural clients (a hospital, a writer), for partition ``natural``, or None. It is read
            as text: 1 and 01 are two clients.
        features: columns of the inputs, in this order; by default all but the label and the client, in the order of
            the file. All must have names then.
        test: path of a file with the test part, with the same columns, or None.
        classes: names of the classes in the order of their numbers; by default the sorted values of the label. Set it
            if each client of a network reads its own file, which may lack a class.
        task: kind of the task: ``auto`` decides by the type of the label, as above; ``classification`` and
            ``regression`` set it.
        missing: treatment of empty cells of features: ``refuse`` raises an error; ``drop`` removes their rows;
            ``mean`` fills in the mean of the column over the training part of all clients, and makes "missing" a
            separate value in text columns. The mean is information on all clients that a real federation would have
            to compute together; with join --data it is the mean of the client's own file. Empty labels and clients
            are always refused.
        decimal: decimal separator, a point, or a comma as in "1,5". Parquet files hold numbers and ignore it.
        separator: character between cells, such as ";" if the decimal separator is a comma; by default a tab in
            ``.tsv`` files and a comma in others.
        categories: columns of features that are read as text, such as codes: 1 and 01 are two values.
    """

    path: str
    label: str
    client: str | None = None
    features: tuple[str, ...] = ()
    test: str | None = None
    classes: tuple[str, ...] = ()
    task: Literal["auto", "classification", "regression"] = "auto"
    missing: Literal["refuse", "drop", "mean"] = "refuse"
    decimal: Literal[".", ","] = "."
    separator: Literal[",", ";", "\t", "|"] | None = None
    categories: tuple[str, ...] = ()

    def load(self) -> TableDataset:
        """Load the rows as inputs float32 [n, features].

        Raises:
            DataError: if a file cannot be read, a column does not exist, or a cell cannot be used; the message names
                the column and the row.
        """
        tables = [self._read(self.path)]
        if self.test is not None:
            tables.append(self._read_like(tables[0], self.test))
        features = self._choose_features(tables[0])
        for table in tables:
            self._check_columns(table, features)
        notes: tuple[str, ...] = ()
        if self.missing == "drop":
            sizes = [len(table) for table in tables]
            tables = [_drop_rows(table, features) for table in tables]
            if dropped := sum(sizes) - sum(map(len, tables)):
                notes = (f"{dropped} of {sum(sizes)} rows dropped, which have empty cells",)
        notes += _describe_columns(tables[0], features)
        encoded_columns = [self._encode(name, [table[name] for table in tables]) for name in features]
        inputs = [torch.cat([values[k] for values, _ in encoded_columns], dim=1) for k in range(len(tables))]
        columns = tuple(column for _, names in encoded_columns for column in names)
        wide_columns = _find_wide_columns(tables, columns)
        targets, classes = self._convert_targets([table[self.label] for table in tables])
        natural_clients: list[Tensor | None] = [None, None]
        client_names: tuple[str, ...] = ()
        if self.client is not None:
            client_numbers, client_names = _number_clients([table[self.client] for table in tables])
            natural_clients = [*client_numbers, None]
        train, *test = [Examples(x, y) for x, y in zip(inputs, targets, strict=True)]
        if self.task == "auto" and are_whole_classes([train.y]):
            notes += (TABLE_WARNING,)
        name = Path(self.path).name.split(".")[0]
        test_part = test[0] if test else None
        return TableDataset(
            name,
            train,
            test_part,
            classes,
            natural_clients[0],
            natural_clients[1],
            notes=notes,
            natural_names=client_names,
            wide_columns=wide_columns,
            columns=columns,
        )

    def load_with_rows(self, path: str) -> tuple[TableDataset, tuple[str, ...] | None]:
        """Load the training part, with the rows of another file as its test part, in the training part's encoding.

        Args:
            path: path of a file with the columns of the inputs, matched by name; further columns are ignored.

        Returns:
            The data set, whose test part has placeholder targets, and the client of each row, or None if the file
            does not have the column ``client``.

        Raises:
            DataError: if the file lacks a column or has an empty cell or a category that the training part lacks.
        """
        train = self._read(self.path)
        rows = self._read_like(train, path)
        features = self._choose_features(train)
        self._check_columns(train, features)
        if missing := [name for name in features if name not in rows.columns]:
            raise DataError(
                f"{rows.attrs['path']!r} lacks the columns {list_first(list(map(repr, missing)), _MAX_NAMES)}; the models take "
                f"{list_first(list(map(repr, features)), _MAX_NAMES)}. {did_you_mean(missing[0], map(str, rows.columns))}"
            )
        checker = replace(self, missing="mean" if self.missing == "mean" else "refuse")
        client = None if self.client is None or self.client not in rows.columns else self.client
        checker._check_cells(rows, features, [] if client is None else [client])
        if self.missing == "drop":
            train = _drop_rows(train, features)
        # messages about the test part name its file
        encode = replace(self, test=path)._encode
        encoded_columns = [encode(name, [train[name], rows[name]]) for name in features]
        inputs = [torch.cat([values[k] for values, _ in encoded_columns], dim=1) for k in range(2)]
        columns = tuple(column for _, names in encoded_columns for column in names)
        (y,), classes = self._convert_targets([train[self.label]])
        test = Examples(inputs[1], torch.zeros(len(rows), *y.shape[1:], dtype=y.dtype))
        wide_columns = _find_wide_columns([train, rows], columns)
        name = Path(self.path).name.split(".")[0]
        row_clients = None if client is None else tuple(map(str, rows[client]))
        return TableDataset(
            name, Examples(inputs[0], y), test, classes, wide_columns=wide_columns, columns=columns
        ), row_clients

    def read_client_names(self) -> tuple[str, ...] | None:
        """Read the sorted names in the column ``client`` of the training part; None if the file lacks the column."""
        table = self._read(self.path)
        if self.client not in table.columns:
            return None
        return tuple(sorted(set(table[self.client].dropna().map(str))))

    def _choose_features(self, table: DataFrame) -> tuple[str, ...]:
        """Choose the columns of the inputs."""
        features = self.features or tuple(
            str(name) for name in table.columns if name not in (self.label, self.client)
        )
        if not features or self.label in features or self.client in features:
            raise DataError(
                f"{self.path!r}: features must be columns besides label and client, not {features}."
            )
        if not self.features and (name := find_unnamed(features)) is not None:
            number = list(map(str, table.columns)).index(name) + 1
            if table[name].isna().all():
                raise DataError(
                    f"{self.path!r}: the column {number} has no name and only empty cells, as after a separator at the end of "
                    "the rows. Remove it, or list the inputs in data.features."
                )
            raise DataError(
                f"{self.path!r}: the column {number} has no name. If it holds the row numbers of DataFrame.to_csv, which can "
                "reveal the label, write the table with index=False. Otherwise name it, or list the inputs in data.features."
            )
        return features

    def _read(self, path: str, text_columns: Sequence[str] = ()) -> DataFrame:
        names = {*self.categories, *text_columns}
        if self.client is not None:
            names.add(self.client)
        if any(re.fullmatch(r"0|-?[1-9][0-9]*", name) is None for name in self.classes):
            # a file with some of the classes 01, 02 and A1 may hold nothing but numbers
            names.add(self.label)
        return _read_table(path, self.decimal, self.separator, sorted(names))

    def _read_like(self, train: DataFrame, path: str) -> DataFrame:
        """Read a further file with the types of the training part: its values of a text column may all be numbers."""
        table = self._read(path, [str(name) for name in train.columns if not _is_number(train[name])])
        for name in train.columns.intersection(table.columns):
            # truth values beside empty cells are objects
            values = table[name].dropna()
            if train[name].dtype.kind == "b" and all(isinstance(value, bool) for value in values):
                table[name] = table[name].astype("float64")
        return table

    def _check_columns(self, table: DataFrame, features: Sequence[str]) -> None:
        source = f"{table.attrs['path']!r}"
        for name in (self.label, self.client, *features):
            if name is not None and name not in table.columns:
                hint = did_you_mean(name, map(str, table.columns))
                raise DataError(f"{source} has no column {name!r}. {hint}")
        if others := [name for name in self.categories if name not in features]:
            raise DataError(
                f"{source}: data.categories names {others[0]!r}, which is no feature. {did_you_mean(others[0], features)}"
            )
        self._check_cells(table, features, [name for name in (self.label, self.client) if name is not None])

    def _check_cells(self, table: DataFrame, features: Sequence[str], required: Sequence[str]) -> None:
        """Refuse cells of features and required columns that are empty, infinite or hold several values."""
        source = f"{table.attrs['path']!r}"
        for name in [*required, *(features if self.missing == "refuse" else ())]:
            if (is_empty := table[name].isna()).any():
                row = int(np.flatnonzero(is_empty)[0]) + 1
                advice = (
                    "Fill it in."
                    if name in required
                    else "Fill it in, or set data.missing to 'drop' or 'mean'."
                )
                count = int(is_empty.sum())
                cells = "1 empty cell," if count == 1 else f"{count} empty cells, the first"
                text = self._read_cell(table.attrs["path"], name, row)
                quote = f", which reads {text!r} and counts as empty" if text else ""
                advice += " As a category write it in another way." if text else ""
                raise DataError(
                    f"{source}: the column {name!r} has {cells} in row {row} of the data{quote}. {advice}"
                )
        for name in features:
            _refuse_lists(table[name], source)
        for name in (*required, *features):
            _refuse_infinities(table[name], source)

    def _read_cell(self, path: str, name: str, row: int) -> str:
        """Text of a cell that counts as empty; "" for a cell without text."""
        if _is_parquet(path):
            return ""
        import pandas

        texts = pandas.read_csv(
            path,
            sep=_choose_separator(path, self.separator),
            skipinitialspace=True,
            index_col=False,
            dtype=str,
            keep_default_na=False,
            nrows=row,
        )
        return str(texts[name].iloc[row - 1]).strip() if len(texts) == row else ""

    def _encode(self, name: str, parts: list[Series]) -> tuple[list[Tensor], list[str]]:
        """Encode one column: inputs [n, 1] of numbers or [n, values] of text, and the names of the inputs."""
        if all(_is_number(part) for part in parts):
            mean = parts[0].astype("float64").mean() if self.missing == "mean" else None
            if mean is not None and np.isnan(mean):
                raise DataError(
                    f"{self.path!r}: the column {name!r} is empty. Leave it out of data.features."
                )
            numbers = [part.astype("float64") for part in parts]
            filled_numbers = numbers if mean is None else [part.fillna(mean) for part in numbers]
            arrays = [part.to_numpy(dtype=np.float32, copy=True)[:, None] for part in filled_numbers]
            return [torch.from_numpy(array) for array in arrays], [name]
        if name not in self.categories:
            self._refuse_text_among_numbers(
                parts,
                "Correct it, or leave the cell empty and set data.missing. If the values are categories, set data.categories = "
                f"[{name!r}]",
            )
        texts = [
            part.astype("object").where(part.notna(), _MISSING_CATEGORY).astype(str).to_numpy()
            for part in parts
        ]
        categories = np.unique(texts[0])
        if len(categories) > _MAX_CATEGORIES:
            raise DataError(
                f"{self.path!r}: the column {name!r} is text with {len(categories)} different values, at most "
                f"{_MAX_CATEGORIES} become features. Name the columns to use in data.features."
            )
        for text in texts[1:]:
            if unknown := sorted(set(text) - set(categories)):
                raise DataError(
                    f"{self.test!r}: the column {name!r} has the value {unknown[0]!r}, which the training "
                    "part lacks."
                )
        inputs = [torch.from_numpy((text[:, None] == categories).astype(np.float32)) for text in texts]
        return inputs, [f"{name}={value}" for value in categories]

    def _convert_targets(self, parts: list[Series]) -> tuple[list[Tensor], tuple[str, ...]]:
        """Convert the targets: [n, 1] of a regression, or the numbers of classes [n] with the names of the classes."""
        is_real = any(part.dtype.kind == "f" for part in parts)
        if self.task == "classification" or (self.task == "auto" and not is_real):
            if self.task == "auto" and not self.classes:
                advice = "Correct it, or set data.task = 'classification' if the values are classes"
                self._refuse_text_among_numbers(parts, advice)
            return self._number_classes(parts)
        if self.classes:
            raise DataError(
                f"{self.path!r}: data.classes names classes, but {self.label!r} holds real numbers, a "
                "regression. Leave out data.classes, or set data.task to 'classification'."
            )
        if not all(_is_number(part) for part in parts):
            self._refuse_text_among_numbers(parts, "Correct it, or remove the row")
            raise DataError(f"{self.path!r}: a regression needs numbers in the column {self.label!r}.")
        for part in parts:
            warn_of_rounding(part.to_numpy(), f"the column {self.label!r} of {self.path!r}", "targets")
        return [torch.from_numpy(part.to_numpy(dtype=np.float32)[:, None].copy()) for part in parts], ()

    def _refuse_text_among_numbers(self, parts: Sequence[Series], advice: str) -> None:
        """Refuse a column of numbers in which a cell is text, or which has another decimal separator.

        In a Parquet file a column of text is text by its type, and only another decimal separator is an error.

        Args:
            parts: the column in the training part, which decides whether it holds numbers, and in the test part.
            advice: what to do with a cell of text.
        """
        if all(_is_number(part) for part in parts):
            return
        cells = [part.dropna().astype(str) for part in parts]
        name, values = parts[0].name, cells[0].tolist()
        self._refuse_thousands(name, values)
        decimals = (self.decimal, "," if self.decimal == "." else ".")
        text_rows = {decimal: find_text(values, decimal) for decimal in decimals}
        text_rows = {decimal: rows for decimal, rows in text_rows.items() if are_mostly_numbers(values, rows)}
        if not text_rows:
            return
        decimal = min(text_rows, key=lambda decimal: len(text_rows[decimal]))
        invalid_cells = [
            (path, f"{part.iloc[i]!r} in row {part.index[i] + 1} of the data is no number")
            for path, part in zip((self.path, self.test), cells, strict=False)
            for i in find_text(part.tolist(), decimal)
        ]
        if decimal != self.decimal:
            example = next(value for value in values if decimal in value)
            kind = "comma" if decimal == "," else "point"
            setting = f'Set data.decimal = "{decimal}" to read them as numbers.'
            setting = "Write them as numbers." if _is_parquet(self.path) else setting
            invalid_text = f" The value {invalid_cells[0][1]}. {advice}." if invalid_cells else ""
            raise DataError(
                f"{self.path!r}: the column {name!r} holds numbers with a decimal {kind}, such as {example!r}, which would "
                f"become categories. {setting}{invalid_text}"
            )
        if invalid_cells and not (_is_parquet(self.path) and not _is_number(parts[0])):
            path, text = invalid_cells[0]
            count = f" (the first of {len(invalid_cells)} such values)" if len(invalid_cells) > 1 else ""
            raise DataError(
                f"{path!r}: the column {name!r} holds numbers, but the value {text}{count}. {advice}."
            )

    def _refuse_thousands(self, name: object, values: Sequence[str]) -> None:
        """Refuse a text column of whole numbers whose commas may be thousands separators."""
        example = next((value.strip() for value in values if "," in value), None)
        if example is None or not all(_THOUSANDS.fullmatch(value) for value in values):
            return
        raise DataError(
            f"{self.path!r}: the column {name!r} holds numbers with a comma, such as {example!r}, which may be "
            f"{example.replace(',', '')} with a separator of thousands or {example.replace(',', '.', 1)} with a decimal comma. "
            'Write thousands without commas; set data.decimal = "," only if these are decimals.'
        )

    def _number_classes(self, parts: list[Series]) -> tuple[list[Tensor], tuple[str, ...]]:
        labels, names = _number_values(parts)
        if not self.classes:
            return labels, names
        if unknown := sorted(set(names) - set(self.classes)):
            raise DataError(
                f"{self.path!r}: the label {self.label!r} has the value {unknown[0]!r}. "
                + did_you_mean(unknown[0], self.classes)
            )
        class_indices = torch.tensor([self.classes.index(name) for name in names])
        return [class_indices[y] for y in labels], self.classes


def _number_values(parts: list[Series]) -> tuple[list[Tensor], tuple[str, ...]]:
    """Replace values by their index among the sorted values of all parts, int64 [n]; also return these values as text."""
    arrays = [part.to_numpy() if _is_number(part) else part.astype(str).to_numpy(dtype=str) for part in parts]
    if len({array.dtype.kind == "U" for array in arrays}) > 1:
        arrays = [array.astype(str) for array in arrays]
    values = np.unique(np.concatenate(arrays))
    return [torch.from_numpy(np.searchsorted(values, array)) for array in arrays], tuple(map(str, values))


def _number_clients(parts: list[Series]) -> tuple[list[Tensor], tuple[str, ...]]:
    """Number the clients, int64 [n], and return their names; numbers are sorted by value, text alphabetically.

    Names that are equal as numbers, such as "1" and "01", are different clients.
    """
    import pandas

    if any(_is_number(part) for part in parts):
        return _number_values(parts)
    texts = [part.astype(str) for part in parts]
    names = pandas.Series(pandas.unique(pandas.concat(texts, ignore_index=True)))
    numbers = pandas.to_numeric(names, errors="coerce")
    if numbers.isna().any() or numbers.nunique() < len(names):
        return _number_values(texts)
    sorted_names = names.iloc[np.argsort(numbers.to_numpy(), kind="stable")]
    number_by_name = {name: i for i, name in enumerate(sorted_names)}
    client_numbers = [
        torch.from_numpy(text.map(number_by_name).to_numpy(dtype=np.int64).copy()) for text in texts
    ]
    return client_numbers, tuple(map(str, sorted_names))


def _find_wide_columns(tables: Sequence[DataFrame], columns: Sequence[str]) -> tuple[WideColumn, ...]:
    """Find the numeric columns whose values float32 cannot distinguish."""
    wide_columns = []
    for index, name in enumerate(columns):
        if name not in tables[0].columns or not all(_is_number(table[name]) for table in tables):
            continue
        values = tables[0][name].to_numpy(dtype=np.float64)
        mean = np.nanmean(values)
        parts = [table[name].to_numpy(dtype=np.float64, na_value=mean) for table in tables]
        if are_rounded(parts[0][:, None])[0]:
            wide_columns.append(WideColumn(name, index, tuple(parts)))
    return tuple(wide_columns)


def _drop_rows(table: DataFrame, features: Sequence[str]) -> DataFrame:
    """Remove the rows with an empty cell in a feature; refuse a table without other rows."""
    rows = table.dropna(subset=list(features))
    if not len(rows):
        raise DataError(
            f"{table.attrs['path']!r}: every row has an empty cell in {list_first(list(map(repr, features)), _MAX_NAMES)}, so "
            "data.missing = 'drop' leaves none. Set data.missing to 'mean', or leave columns out by data.features."
        )
    return rows


def _refuse_lists(column: Series, source: str) -> None:
    """Refuse a column of a Parquet file with several values in a cell."""
    if column.dtype.kind != "O":
        return
    example = next((value for value in column if value is not None), None)
    if isinstance(example, np.ndarray | list | dict | tuple):
        raise DataError(
            f"{source}: the column {column.name!r} holds several values in a cell, such as {str(example)[:60]}. Save each value "
            "as a column of its own, or leave the column out: name the others in data.features."
        )


def _refuse_infinities(column: Series, source: str) -> None:
    """Refuse a numeric column with an infinity, or a number too large for float32."""
    if not _is_number(column):
        return
    values = column.to_numpy(dtype=np.float64, na_value=np.nan)
    rows = np.flatnonzero(np.abs(values) > np.finfo(np.float32).max)
    if len(rows):
        raise DataError(
            f"{source}: the column {column.name!r} holds {values[rows[0]]:g} in row {rows[0] + 1} of the data, which is "
            "infinite or too large for float32. Correct it or leave the cell empty."
        )


def _describe_columns(table: DataFrame, features: Sequence[str]) -> tuple[str, ...]:
    """Notes that name the numeric features and the one-hot features with their numbers of categories."""
    numeric_columns = [name for name in features if _is_number(table[name])]
    text_columns = [name for name in features if name not in numeric_columns]
    one_hot_columns = [f"{name} ({table[name].nunique(dropna=False)})" for name in text_columns]
    notes = []
    if numeric_columns:
        notes.append(f"numeric columns: {list_first(numeric_columns, _MAX_NAMES)}")
    if one_hot_columns:
        notes.append(
            f"one-hot columns, with their numbers of categories: {list_first(one_hot_columns, _MAX_NAMES)}"
        )
    return tuple(notes)


def _is_number(column: Series) -> bool:
    return column.dtype.kind in "biuf"


def _is_parquet(path: str) -> bool:
    return path.removesuffix(".gz").endswith(".parquet")


def _choose_separator(path: str, separator: str | None) -> str:
    return separator or ("\t" if path.removesuffix(".gz").endswith(".tsv") else ",")


def _read_table(path: str, decimal: str, separator: str | None, text_columns: Sequence[str]) -> DataFrame:
    # imported here, because it takes as long as many other imports of the package
    import pandas

    file = Path(expand_path(path))
    extension = file.name.removesuffix(".gz").rsplit(".", 1)[-1]
    if extension not in ("csv", "tsv", "parquet"):
        raise DataError(f"{str(file)!r} ends in none of .csv, .tsv, .parquet, .csv.gz, .tsv.gz.")
    check_file(file)
    try:
        if extension == "parquet":
            # the index numbers the rows in messages
            table = _convert_decimals(pandas.read_parquet(file).reset_index(drop=True))
            table = table.astype({name: "string" for name in text_columns if name in table.columns})
        else:
            sep = _choose_separator(file.name, separator)
            with warnings.catch_warnings():
                # the warning reports dropped cells unless they are empty; without index_col=False the first cells
                # would become row names
                warnings.simplefilter("error", pandas.errors.ParserWarning)
                header = pandas.read_csv(
                    file, sep=sep, header=None, nrows=1, dtype=str, skipinitialspace=True
                )
                # pandas would call the second of two columns y.1
                _refuse_equal_names(header.iloc[0].dropna(), file)
                table = pandas.read_csv(
                    file,
                    sep=sep,
                    decimal=decimal,
                    skipinitialspace=True,
                    index_col=False,
                    dtype=dict.fromkeys(text_columns, str),
                    # one type for a column: by default each block of rows has its own
                    low_memory=False,
                )
    except pandas.errors.ParserWarning as error:
        _refuse_single_column(pandas.read_csv(file, sep=sep, nrows=0), file)
        raise DataError(
            f"the rows of {str(file)!r} have more cells than its first line has names. Name every column in the "
            "first line, or remove the separator at the end of the rows."
        ) from error
    except ImportError as error:
        raise DataError("reading Parquet needs pyarrow: pip install 'fedlowrank[huggingface]'") from error
    except UnicodeDecodeError as error:
        raise DataError(f"cannot read {str(file)!r}: {explain_encoding(file) or error}") from error
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"cannot read {str(file)!r}: {error}") from error
    if not len(table):
        raise DataError(f"{str(file)!r} holds no rows.")
    _refuse_single_column(table, file)
    table.attrs["path"] = str(file)
    return table


def _refuse_equal_names(names: Series, file: Path) -> None:
    """Refuse a table in which two columns have one name."""
    if len(repeated := names[names.duplicated()]):
        raise DataError(
            f"{str(file)!r} has several columns {repeated.iloc[0]!r}; rename one of them, or remove it if it is a copy."
        )


def _convert_decimals(table: DataFrame) -> DataFrame:
    """Convert decimal numbers of a Parquet file's table to float64."""
    for name in table.columns:
        if table[name].dtype.kind != "O":
            continue
        values = table[name].dropna()
        if len(values) and all(isinstance(value, Decimal) for value in values):
            table[name] = table[name].astype(np.float64)
    return table


def _refuse_single_column(table: DataFrame, file: Path) -> None:
    """Refuse a table with a single column whose name contains another separator."""
    if len(table.columns) == 1 and (
        separator := next((c for c in ";|\t," if c in str(table.columns[0])), None)
    ):
        raise DataError(
            f"{str(file)!r} has a single column, {str(table.columns[0])!r}. Set data.separator to {separator!r}."
        )
