"""The source of text rows: files, folders and the hub, in every form that is recognized by its columns."""

from __future__ import annotations

import glob
import itertools
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ....core.arguments.field_checks import CheckedFields
from ....core.errors import ConfigError, DataError
from ....core.key import Key
from ...download.data_files import expand_path
from ..on_disk.lazy_records import LazyRecords, join_records
from ..table import (
    DATA_ENDINGS,
    Table,
    choose_title,
    number_csv_labels,
    read_data_file,
    read_split,
    refuse_split_of_file,
    remove_endings,
)
from ..text_records import Conversation, Record, Texts, check_one_test, check_share, hold_out
from .row_forms import (
    FORMS,
    Form,
    explain_mixed_prompts,
    has_messages,
    list_unread_columns,
    read_rows,
    recognize_form,
)

_FORMATS: dict[Form, Literal["verbatim", "none"]] = {
    "prompt_completion": "verbatim",
    "preference": "verbatim",
    "text": "none",
}
"""Formats of prompts that are text, by the form of the rows."""


@dataclass(frozen=True)
class TextRows(CheckedFields):
    """Text data in any usual form: conversations, prompts with completions, preference pairs, pairs of texts, labels, plain text.

    Files are ``.jsonl``, ``.json``, ``.csv``, ``.tsv`` (each also with ``.gz``) or ``.parquet``. The form of a
    row is recognized by the columns, and the notes of the data set say which one it is.

    Attributes:
        path: a file, a pattern such as ``clients/*.jsonl``, a folder, a list of files, or a name on the hub. A
            folder is one that ``datasets`` reads or has saved; with ``client_by_file``, one of files.
        form: ``auto``, or one of messages, conversations, prompt_completion, alpaca, preference, text, labels,
            token_labels, pairs.
        client_by_file: each file is a natural client, named after the file. Goes with partition natural.
        client_column: column of natural clients, text or whole numbers, or None. Goes with partition natural.
        category_column: column of categories, which partitions can use like a class, or None.
        classes: names of the classes of labeled rows, in the order of their numbers; by default those of the data
            set, else the sorted names, or the numbers. Labels that are all among these names are names, also whole numbers.
        test: a file with the test part, or None.
        name: configuration of a data set in a folder or on the hub, for those that have several.
        train_split: split for training, of a folder or a data set on the hub.
        test_split: split for the test part, of a folder or a data set on the hub; or None.
        test_share: random share of the records that become the test part, from 0 (none) to below 1.
        seed: seed of that draw.
        cache: folder of the cache of ``datasets``, or None for its usual one.
        on_disk: whether texts are larger than memory: rows are read when they are needed, and tokens lie in memory-mapped files,
            in ``cache`` or else the system's folder of temporary files. Files must be ``.jsonl`` or ``.parquet`` with
            instructions, conversations or plain texts, without packing.
    """

    path: str | tuple[str, ...]
    form: Literal[
        "auto",
        "messages",
        "conversations",
        "prompt_completion",
        "alpaca",
        "preference",
        "text",
        "labels",
        "token_labels",
        "pairs",
    ] = "auto"
    client_by_file: bool = False
    client_column: str | None = None
    category_column: str | None = None
    classes: tuple[str, ...] = ()
    test: str | None = None
    name: str | None = None
    train_split: str = "train"
    test_split: str | None = None
    test_share: float = 0.0
    seed: int = 0
    cache: str | None = None
    on_disk: bool = False

    def __post_init__(self) -> None:
        check_share(self.test_share)
        check_one_test(self.test, self.test_split, self.test_share)
        if self.client_by_file and self.client_column is not None:
            raise ConfigError("client_by_file and client_column both say whose a row is; set one of them.")
        if self.client_by_file and self.test is not None:
            raise ConfigError(
                "with client_by_file each client's test part comes from its own file. Leave test out, and set "
                "the section [split]; or set test_share, to test all clients on a share of all rows."
            )
        if not self.path:
            raise ConfigError("path is an empty list; name at least one file.")

    def load(self) -> Texts:
        """The records; see `TextSource.load`."""
        notes: list[str] = []
        train_tables = self._read_train_tables()
        tables = number_csv_labels([*train_tables, *self._read_test_tables()])
        train_tables, test_tables = tables[: len(train_tables)], tables[len(train_tables) :]
        forms = {table.source: self._choose_form(table) for table in tables}
        self._check_one_form(forms)
        train_parts, test_parts = (
            [self._read(table, forms, notes) for table in tables] for tables in (train_tables, test_tables)
        )
        self._check_one_type(tables, [*train_parts, *test_parts])
        train, test = self._join(train_parts), self._join(test_parts)
        self._check_one_order(tables, forms)
        remaining_records, test_records = hold_out(train, self.test_share, Key(("text_rows", self.seed)))
        form = next(iter(forms.values()))
        columns = FORMS[form].describe()
        origin = "set by data.form" if self.form != "auto" else "recognized by its columns"
        files_text = f"{len(forms)} files" if len(forms) > 1 else next(iter(forms))
        setting_columns = (self.client_column, self.category_column)
        unread_columns = sorted(
            {name for table in tables for name in list_unread_columns(table, form, *setting_columns)}
        )
        unread_note = f"; not read: {', '.join(unread_columns)}" if unread_columns else ""
        notes.insert(0, f"{files_text}: rows are of the form {form!r} ({columns}), {origin}{unread_note}")
        train_records: Any = remaining_records
        held_out: Any = test if len(test) else test_records
        return Texts(
            self._choose_title(),
            train_records,
            held_out,
            classes=self.classes or self._find_class_names(train_tables[0], form),
            notes=tuple(notes),
            format=_FORMATS.get(form),
            folder=self._choose_folder() if self.on_disk else None,
            labels_are_numbers=any(self._find_class_names(table, form) for table in tables),
        )

    def _choose_form(self, table: Table) -> Form:
        return recognize_form(table) if self.form == "auto" else self.form

    def _join(self, parts: list[Sequence[Record]]) -> Sequence[Record]:
        """The records of several tables, in order."""
        lazy_parts = [part for part in parts if isinstance(part, LazyRecords)]
        if lazy_parts:
            return join_records(lazy_parts)
        return list(itertools.chain.from_iterable(parts))

    def _choose_folder(self) -> Path:
        """Where files of tokens are made."""
        folder = Path(tempfile.gettempdir() if self.cache is None else expand_path(self.cache))
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _read(self, table: Table, forms: dict[str, Form], notes: list[str]) -> Sequence[Record]:
        records, empty_count = read_rows(
            table, forms[table.source], self.category_column, self.client_column, self.on_disk
        )
        if not len(records):
            raise DataError(f"{table.source!r}: no row has a text to learn.")
        if empty_count:
            notes.append(
                f"{table.source}: {empty_count} of {len(table.rows)} rows dropped, which have no text to learn"
            )
        if self.client_by_file:
            client = remove_endings(table.source)
            if isinstance(records, LazyRecords):
                return _set_client_of_all(records, client)
            records = [_set_client(record, client) for record in records]
        return records

    def _check_one_form(self, forms: dict[str, Form]) -> None:
        first_sources: dict[Form, str] = {}
        for source, form in forms.items():
            first_sources.setdefault(form, source)
        if len(first_sources) > 1:
            forms_text = "; ".join(f"{form!r} as in {source!r}" for form, source in first_sources.items())
            raise DataError(
                f"the files have rows of different forms: {forms_text}. Convert them to one form."
            )

    def _check_one_type(self, tables: Sequence[Table], parts: Sequence[Sequence[Record]]) -> None:
        """Refuse files whose prompts are text beside files of messages; within a file all are alike."""
        sources = {_hold_messages(part): table.source for table, part in zip(tables, parts, strict=True)}
        if len(sources) > 1:
            raise DataError(explain_mixed_prompts(f"as in {sources[False]!r}", f"as in {sources[True]!r}"))

    def _read_train_tables(self) -> list[Table]:
        files = self._find_files()
        if files is None:
            assert isinstance(self.path, str)
            return [read_split(self.path, self.name, self.train_split, self.cache, self.on_disk)]
        refuse_split_of_file(files[0], self.test_split)
        return [read_data_file(file, self.cache, self.on_disk) for file in files]

    def _read_test_tables(self) -> list[Table]:
        if self.test is not None:
            return [read_data_file(self.test, self.cache, self.on_disk)]
        if self.test_split is None:
            return []
        assert isinstance(self.path, str)
        return [read_split(self.path, self.name, self.test_split, self.cache, self.on_disk)]

    def _find_files(self) -> list[str] | None:
        """The files that the path names, or None for what ``datasets`` finds by itself."""
        if not isinstance(self.path, str):
            files = [expand_path(path) for path in self.path]
        else:
            expanded_path = expand_path(self.path)
            if any(letter in expanded_path for letter in "*?[") and not Path(expanded_path).exists():
                files = sorted(glob.glob(expanded_path))  # noqa: PTH207 - a pattern may be absolute
                if not files:
                    raise DataError(f"no file fits the pattern {str(Path(expanded_path).absolute())!r}.")
            elif Path(expanded_path).is_file():
                files = [expanded_path]
            elif self.client_by_file and Path(expanded_path).is_dir():
                paths = sorted(Path(expanded_path).iterdir())
                files = [str(file) for file in paths if file.name.removesuffix(".gz").endswith(DATA_ENDINGS)]
                if not files:
                    raise DataError(
                        f"{expanded_path!r} holds no file that ends in {', '.join(DATA_ENDINGS)}."
                    )
            elif self.client_by_file:
                raise DataError(
                    f"client_by_file needs a folder, a pattern or a list of files, not {expanded_path!r}."
                )
            else:
                return None
        if self.client_by_file:
            duplicates = [name for name, count in Counter(map(remove_endings, files)).items() if count > 1]
            if duplicates:
                raise DataError(f"two files would both be the client {duplicates[0]!r}. Rename one of them.")
        return files

    def _find_class_names(self, table: Table, form: Form) -> tuple[str, ...]:
        """The classes that a data set itself names for its column of labels."""
        names = {"labels": ("label",), "token_labels": ("ner_tags", "labels", "tags")}.get(form, ())
        return next((table.classes[name] for name in names if name in table.classes), ())

    def _check_one_order(self, tables: Sequence[Table], forms: Mapping[str, Form]) -> None:
        """Refuse class numbers of files that name their classes in other orders: a number would be two classes."""
        class_names = {table.source: self._find_class_names(table, forms[table.source]) for table in tables}
        orders = {source: names for source, names in class_names.items() if names}
        if self.classes:
            orders = {"data.classes": tuple(self.classes), **orders}
        if len(set(orders.values())) > 1:
            listing = "; ".join(f"{list(names)} in {source!r}" for source, names in orders.items())
            raise DataError(
                f"labels are numbers of classes whose names are in different orders: {listing}. Store the names instead of the "
                "numbers, or cast all files to one order"
            )

    def _choose_title(self) -> str:
        """A name for reports: of a list of files that of their folder, otherwise as `choose_title`."""
        if not isinstance(self.path, str):
            return Path(expand_path(self.path[0])).parent.name or remove_endings(self.path[0])
        return choose_title(self.path)


def _hold_messages(records: Sequence[Record]) -> bool:
    """Whether the records of a file are lists of messages; of preference pairs on disk, which are refused, False."""
    if isinstance(records, LazyRecords):
        return records.facts.types[0] is Conversation
    return has_messages(records[0])


def _set_client(record: Record, client: str) -> Record:
    return replace(record, client=client)


def _set_client_of_all(records: LazyRecords[Record], client: str) -> LazyRecords[Record]:
    def read(indices: np.ndarray) -> Iterator[Record]:
        return (_set_client(record, client) for record in records.select(indices))

    clients = np.full(len(records), client, dtype=object)
    return LazyRecords(read, np.arange(len(records)), records.facts._replace(clients=clients))
