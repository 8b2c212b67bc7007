"""Sources of texts by name."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from ...core.arguments.field_checks import CheckedFields
from ...core.errors import ConfigError, DataError, did_you_mean
from ...core.key import Key
from ..download.data_files import expand_path
from .passages import Lines, Speakers
from .rows.text_rows import TextRows
from .table import Table, choose_title, find_file, read_file, read_split, refuse_split_of_file
from .text_records import (
    Instruction,
    Labeled,
    Texts,
    check_column_setting,
    check_one_test,
    check_share,
    hold_out,
    is_label,
)


class TextSource(Protocol):
    """Texts that can be loaded; the settings are the fields of a dataclass."""

    def load(self) -> Texts:
        """Read the records into memory.

        Raises:
            DataError: if they cannot be read; the message names the file and the line.
        """
        ...


@dataclass(frozen=True)
class Gsm8k(CheckedFields):
    """Grade-school math questions with worked answers that end in ``#### number``.

    Source: Cobbe et al., "Training Verifiers to Solve Math Word Problems" (2021).

    Attributes:
        path: the folder with the files ``train`` and ``test`` (``.jsonl``, ``.jsonl.gz``, ``.json`` or
            ``.parquet``), or the training file.
        test: the test file, or None: the one in the folder, or no test part if ``path`` is a file.
        annotations: whether the answers keep the annotations for a calculator, ``<<48/2=24>>``.
    """

    path: str
    test: str | None = None
    annotations: bool = True

    def load(self) -> Texts:
        """The questions as prompts and the answers as responses; see `TextSource.load`."""
        folder = Path(expand_path(self.path))
        files: list[Path | str | None] = [self.path, self.test]
        if folder.is_dir():
            files = [find_file(folder, "train"), self.test or find_file(folder, "test")]
        notes: list[str] = []
        parts = [
            _read_instructions(read_file(f), notes, "question", "answer") for f in files if f is not None
        ]
        if not self.annotations:
            parts = [
                [replace(record, response=re.sub(r"<<[^<>]*>>", "", record.response)) for record in part]
                for part in parts
            ]
        return Texts("gsm8k", parts[0], parts[1] if len(parts) > 1 else None, notes=tuple(notes))


LANGUAGES = ("C", "C#", "C++", "Go", "Java", "PHP", "Pascal", "Python", "Scala")
"""The nine subsets of Fed-CodeAlpaca (Kuang et al., FederatedScope-LLM, 2023)."""

# ``go`` is a verb and ``c`` a letter, so these two count only with a capital.
_LANGUAGE = re.compile(r"(?<![\w#+])(C#|C\+\+|C(?![\w#+])|Go(?!\w)|(?i:java|php|pascal|python|scala)(?!\w))")


def find_programming_language(text: str) -> str | None:
    """The first programming language that a text names as a separate word, or None."""
    match = _LANGUAGE.search(text)
    return match and next(name for name in LANGUAGES if name.lower() == match.group().lower())


@dataclass(frozen=True)
class CodeAlpaca(CheckedFields):
    """Programming tasks in the form of Alpaca: instruction, input, output.

    Source: Chaudhary, "Code Alpaca: An Instruction-following LLaMA model for code generation" (2023).

    Attributes:
        path: the file, ``.json`` as published, ``.jsonl``, either with ``.gz``, or ``.parquet``.
        by_language: keep only tasks that name one of nine programming languages, which becomes their
            category. It is the first of :data:`LANGUAGES` in instruction or input.
        test_share: random share of the records that become the test part, from 0 (none) to below 1.
        seed: seed of that draw.
    """

    path: str
    by_language: bool = False
    test_share: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_share(self.test_share)

    def load(self) -> Texts:
        """The tasks; see `TextSource.load`."""
        notes: list[str] = []
        records = _read_instructions(read_file(self.path), notes, "instruction", "output", "input")
        if self.by_language:
            count = len(records)
            records = [
                replace(r, category=find_programming_language(f"{r.prompt} {r.input}")) for r in records
            ]
            records = [r for r in records if r.category is not None]
            notes.append(f"{count - len(records)} of {count} tasks name none of the nine languages; dropped")
            if not records:
                raise DataError(f"{self.path!r}: no task names one of {', '.join(LANGUAGES)}")
        train, test = hold_out(records, self.test_share, Key(("codealpaca", self.seed)))
        return Texts("codealpaca", train, test, notes=tuple(notes))


@dataclass(frozen=True)
class Dolly(CheckedFields):
    """Instructions of eight categories written by people, some about a passage (the context), with responses.

    Source: Conover et al., "Free Dolly: Introducing the World's First Truly Open Instruction-Tuned LLM"
        (2023).

    Attributes:
        path: the file, ``.jsonl`` as published, ``.json``, either with ``.gz``, or ``.parquet``.
        held_out_category: category whose records become the test part (an unseen task), or None.
        test_share: otherwise: random share of the records that become the test part, from 0 to below 1.
        seed: seed of that draw.
    """

    path: str
    held_out_category: str | None = None
    test_share: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_share(self.test_share)
        if self.held_out_category is not None and self.test_share:
            raise ConfigError("held_out_category and test_share both choose the test part; set one of them.")

    def load(self) -> Texts:
        """The instructions with their categories; see `TextSource.load`."""
        notes: list[str] = []
        table, category = read_file(self.path), self.held_out_category
        records = _read_instructions(table, notes, "instruction", "response", "context", "category")
        train, test = hold_out(records, self.test_share, Key(("dolly", self.seed)))
        if category is not None:
            train = [record for record in records if record.category != category]
            test = [record for record in records if record.category == category]
            if not test:
                hint = did_you_mean(category, {str(record.category) for record in records})
                raise DataError(f"{table.source!r} has no category {category!r}. {hint}")
        return Texts("dolly", train, test, notes=tuple(notes))


@dataclass(frozen=True)
class _FileOrHub(CheckedFields):
    """A data set from any file, folder or the hub.

    Attributes:
        path: a file (``.jsonl``, ``.json``, either with ``.gz``, ``.parquet``); a folder that ``datasets``
            reads or has saved; or, if no such path exists, a name on the hub.
        test: a file with the test part, or None.
        name: configuration of a data set in a folder or on the hub, for those that have several.
        train_split: split for training, of a folder or a data set on the hub.
        test_split: split for the test part, of a folder or a data set on the hub; or None for none or that of ``test``.
        cache: folder of the cache of ``datasets``, or None for its usual one.
    """

    path: str
    test: str | None = None
    name: str | None = None
    train_split: str = "train"
    test_split: str | None = None
    cache: str | None = None

    def _read_tables(self) -> list[Table]:
        """The training part, and the test part if there is one."""
        if Path(expand_path(self.path)).is_file():
            refuse_split_of_file(self.path, self.test_split)
            tables = [read_file(self.path)]
        else:
            splits = [self.train_split] if self.test_split is None else [self.train_split, self.test_split]
            tables = [read_split(self.path, self.name, split, self.cache) for split in splits]
        return tables if self.test is None else [*tables, read_file(self.test)]


@dataclass(frozen=True)
class Instructions(_FileOrHub):
    """Instructions and responses from any file or data set with such columns.

    Attributes:
        prompt: column of the instructions.
        response: column of the responses.
        input: column of the texts that the instructions are about, or None.
        category: column of categories, text or whole numbers, or None.
        client: column of natural clients, text or whole numbers, or None.
        test_share: random share of the records that become the test part, from 0 (none) to below 1.
        seed: seed of that draw.
    """

    prompt: str = "instruction"
    response: str = "output"
    input: str | None = None
    category: str | None = None
    client: str | None = None
    test_share: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_share(self.test_share)
        check_one_test(self.test, self.test_split, self.test_share)

    def load(self) -> Texts:
        """The records; see `TextSource.load`."""
        notes: list[str] = []
        columns = (self.prompt, self.response, self.input, self.category, self.client)
        records, *test = [_read_instructions(table, notes, *columns) for table in self._read_tables()]
        train, test_records = hold_out(records, self.test_share, Key(("instructions", self.seed)))
        return Texts(choose_title(self.path), train, test[0] if test else test_records, notes=tuple(notes))


@dataclass(frozen=True)
class TextClasses(_FileOrHub):
    """Texts with class labels from any file or data set, e.g. banking77, AG News or SST-2.

    Attributes:
        text: columns of the text; several (a title and a body) are joined.
        separator: text between joined columns; empty columns are skipped.
        label: column of the labels: text, or whole numbers from 0 on.
        client: column of natural clients, text or whole numbers, or None.
        classes: names of the classes in the order of their numbers; by default those of the data set, else
            the sorted text labels, or the numbers. Labels that are all among these names are names, also whole numbers.
    """

    text: tuple[str, ...] = ("text",)
    separator: str = "\n"
    label: str = "label"
    client: str | None = None
    classes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_column_setting("text", self.text)
        check_one_test(self.test, self.test_split)

    def load(self) -> Texts:
        """The labeled texts; see `TextSource.load`."""
        notes: list[str] = []
        tables = self._read_tables()
        train, *test = [self._read_records(table, notes) for table in tables]
        classes = self.classes or tables[0].classes.get(self.label, ())
        return Texts(
            choose_title(self.path),
            train,
            test[0] if test else None,
            classes,
            tuple(notes),
            labels_are_numbers=any(self.label in table.classes for table in tables),
        )

    def _read_records(self, table: Table, notes: list[str]) -> list[Labeled]:
        table.require(*self.text, self.label, self.client)
        records = []
        for i in range(len(table.rows)):
            # Of several columns some may be missing, e.g. the title.
            texts = [table.text(i, column, optional=len(self.text) > 1) for column in self.text]
            label = table.value(i, self.label)
            if not is_label(label):
                location, numbers = table.locate(i), "a whole number of 64 bits"
                raise DataError(f"{location}: {self.label!r} must be text or {numbers}, not {label!r}.")
            text = self.separator.join(column for column in texts if column)
            records.append(Labeled(text, label, table.name(i, self.client)))
        nonempty_records = [record for record in records if record.text.strip()]
        _note_dropped(table, len(nonempty_records), "no text", notes)
        return nonempty_records


TEXT_SOURCES: dict[str, type] = {
    "text": TextRows,
    "gsm8k": Gsm8k,
    "codealpaca": CodeAlpaca,
    "dolly": Dolly,
    "instructions": Instructions,
    "text_classes": TextClasses,
    "lines": Lines,
    "speakers": Speakers,
}
"""Sources of texts by name."""


def _read_instructions(
    table: Table,
    notes: list[str],
    prompt: str,
    response: str,
    input: str | None = None,
    category: str | None = None,
    client: str | None = None,
) -> list[Instruction]:
    """Records from the columns of a table; those with an empty response are dropped, with a note."""
    table.require(prompt, response, input, category, client)
    records = []
    for i in range(len(table.rows)):
        record = Instruction(
            table.text(i, prompt),
            table.text(i, response),
            "" if input is None else table.text(i, input, optional=True),
            table.name(i, category),
            table.name(i, client),
        )
        if category is not None and record.category is None:
            raise DataError(f"{table.locate(i)} has no {category!r}, which partitions use. Fill it in.")
        records.append(record)
    nonempty_records = [record for record in records if record.response.strip()]
    _note_dropped(table, len(nonempty_records), "an empty response", notes)
    return nonempty_records


def _note_dropped(table: Table, kept_count: int, reason: str, notes: list[str]) -> None:
    count = len(table.rows)
    if kept_count == 0:
        raise DataError(f"{table.source!r}: each of the {count} records has {reason}; nothing is left.")
    if kept_count < count:
        notes.append(f"{table.source}: {count - kept_count} of {count} records dropped, which have {reason}")
