"""Where texts come from, by name."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from ...core.errors import ConfigError, DataError, did_you_mean
from ...core.key import Key
from .passages import Lines, Speakers
from .records import Instruction, Labeled, Texts, check_columns, check_share, hold_out
from .rows import Table, expand, find_file, read_file, read_split


class TextSource(Protocol):
    """Texts that can be loaded; the settings are the fields of a dataclass."""

    def load(self) -> Texts:
        """Read the records into memory.

        Raises:
            DataError: if they cannot be read; the message names the file and the line.
        """
        ...


@dataclass(frozen=True)
class Gsm8k:
    """Grade-school maths questions with worked answers that end in ``#### number``.

    Source: Cobbe et al., "Training Verifiers to Solve Math Word Problems" (2021).

    Attributes:
        path: the folder with the files ``train`` and ``test`` (``.jsonl``, ``.jsonl.gz``, ``.json`` or ``.parquet``),
            or the training file.
        test: the test file, or None: the one in the folder, or no test part where ``path`` is a file.
        annotations: whether the answers keep what is meant for a calculator, ``<<48/2=24>>``.
    """

    path: str
    test: str | None = None
    annotations: bool = True

    def load(self) -> Texts:
        """The questions as prompts and the answers as responses; see `TextSource.load`."""
        folder = Path(expand(self.path))
        train_file: Path | str = self.path
        test_file: Path | str | None = self.test
        if folder.is_dir():
            train_file = find_file(folder, "train")
            test_file = find_file(folder, "test") if self.test is None else self.test
        notes: list[str] = []
        train = self._read(train_file, notes)
        test = None if test_file is None else self._read(test_file, notes)
        return Texts("gsm8k", train, test, notes=tuple(notes))

    def _read(self, file: Path | str, notes: list[str]) -> list[Instruction]:
        records = _instructions(read_file(file), notes, "question", "answer")
        if self.annotations:
            return records
        return [replace(record, response=re.sub(r"<<[^<>]*>>", "", record.response)) for record in records]


LANGUAGES = ("C", "C#", "C++", "Go", "Java", "PHP", "Pascal", "Python", "Scala")
"""The nine subsets of Fed-CodeAlpaca (Kuang et al., FederatedScope-LLM, 2023)."""


def language_of(text: str) -> str | None:
    """The first programming language that a text names as a word of its own, or None.

    ``go`` is a verb, too, and ``c`` a letter, so these two count with a capital alone.
    """
    found = re.search(r"(?<![\w#+])(C#|C\+\+|C(?![\w#+])|Go(?!\w)|(?i:java|php|pascal|python|scala)(?!\w))", text)
    if found is None:
        return None
    return next(name for name in LANGUAGES if name.lower() == found.group().lower())


@dataclass(frozen=True)
class CodeAlpaca:
    """Programming tasks in the form of Alpaca: instruction, input, output.

    Source: Chaudhary, "Code Alpaca: An Instruction-following LLaMA model for code generation" (2023).

    Attributes:
        path: the file, ``.json`` as published, ``.jsonl``, either with ``.gz``, or ``.parquet``.
        by_language: keep only tasks that name one of nine programming languages, which becomes their category. The file
            itself does not say; it is the first of :data:`LANGUAGES` in instruction or input.
        test_share: share of the records that become the test part, from 0 (none) to below 1, drawn at random.
        seed: of that draw.
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
        records = _instructions(read_file(self.path), notes, "instruction", "output", "input")
        if self.by_language:
            named = [replace(r, category=language_of(f"{r.prompt} {r.input}")) for r in records]
            records = [r for r in named if r.category is not None]
            notes.append(f"{len(named) - len(records)} of {len(named)} tasks name none of the nine languages; left out")
            if not records:
                raise DataError(f"{self.path!r}: no task names one of {', '.join(LANGUAGES)}")
        train, test = hold_out(records, self.test_share, Key(("codealpaca", self.seed)))
        return Texts("codealpaca", train, test, notes=tuple(notes))


@dataclass(frozen=True)
class Dolly:
    """Instructions of eight categories written by people, some about a passage (the context), with their replies.

    Source: Conover et al., "Free Dolly: Introducing the World's First Truly Open Instruction-Tuned LLM" (2023).

    Attributes:
        path: the file, ``.jsonl`` as published, ``.json``, either with ``.gz``, or ``.parquet``.
        held_out_category: category whose records become the test part (a task that nobody trains on), or None.
        test_share: otherwise: share of the records that become the test part, from 0 (none) to below 1, drawn at
            random.
        seed: of that draw.
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
        table = read_file(self.path)
        records = _instructions(table, notes, "instruction", "response", "context", "category")
        if self.held_out_category is None:
            train, test = hold_out(records, self.test_share, Key(("dolly", self.seed)))
            return Texts("dolly", train, test, notes=tuple(notes))
        known = {record.category for record in records if record.category is not None}
        if self.held_out_category not in known:
            raise DataError(
                f"{table.source!r} has no category {self.held_out_category!r}. "
                + did_you_mean(self.held_out_category, known)
            )
        train = [record for record in records if record.category != self.held_out_category]
        test = [record for record in records if record.category == self.held_out_category]
        return Texts("dolly", train, test, notes=tuple(notes))


@dataclass(frozen=True)
class Instructions:
    """Instructions and responses from any file or data set with such columns.

    Attributes:
        path: a file (``.jsonl``, ``.json``, either with ``.gz``, ``.parquet``); a folder that ``datasets`` reads or has
            saved; or, if no such path exists, a name on the hub.
        test: a file with the test part, or None.
        prompt: column of the instructions.
        response: column of the responses.
        input: column of what an instruction is about, or None where there is none.
        category: column of categories, text or whole numbers, or None.
        client: column of natural clients, text or whole numbers, or None.
        name: of a folder or on the hub: configuration of the data set, for those that have several.
        train_split: of a folder or on the hub: split for training.
        test_split: of a folder or on the hub: split for the test part, or None for no test part or that of ``test``.
        test_share: share of the records that become the test part, from 0 (none) to below 1, drawn at random.
        seed: of that draw.
        cache: folder for what ``datasets`` keeps between runs, or None for its usual one.
    """

    path: str
    test: str | None = None
    prompt: str = "instruction"
    response: str = "output"
    input: str | None = None
    category: str | None = None
    client: str | None = None
    name: str | None = None
    train_split: str = "train"
    test_split: str | None = None
    test_share: float = 0.0
    seed: int = 0
    cache: str | None = None

    def __post_init__(self) -> None:
        check_share(self.test_share)
        _check_test(test=self.test, test_split=self.test_split, test_share=self.test_share or None)

    def load(self) -> Texts:
        """The records; see `TextSource.load`."""
        notes: list[str] = []
        tables = _tables(self.path, self.test, self.name, self.train_split, self.test_split, self.cache)
        columns = (self.prompt, self.response, self.input, self.category, self.client)
        parts = [_instructions(table, notes, *columns) for table in tables]
        train, test = hold_out(parts[0], self.test_share, Key(("instructions", self.seed)))
        return Texts(_name(self.path), train, parts[1] if len(parts) > 1 else test, notes=tuple(notes))


@dataclass(frozen=True)
class TextClasses:
    """Texts with class labels from any file or data set, e.g. banking77, AG News or SST-2.

    Attributes:
        path: as of :class:`Instructions`: a file, a folder or a name on the hub.
        test: a file with the test part, or None.
        text: columns of the text; several (a title and a body) are joined.
        separator: what stands between joined columns; empty columns are passed over.
        label: column of the labels: text, or whole numbers from 0 on.
        client: column of natural clients, text or whole numbers, or None.
        classes: names of the classes in the order of their numbers; empty to take them from the data: those that the
            data set itself defines, else labels that are text in alphabetical order, or the numbers.
        name: of a folder or on the hub: configuration of the data set, for those that have several.
        train_split: of a folder or on the hub: split for training.
        test_split: of a folder or on the hub: split for the test part, or None for no test part or that of ``test``.
        cache: folder for what ``datasets`` keeps between runs, or None for its usual one.
    """

    path: str
    test: str | None = None
    text: tuple[str, ...] = ("text",)
    separator: str = "\n"
    label: str = "label"
    client: str | None = None
    classes: tuple[str, ...] = ()
    name: str | None = None
    train_split: str = "train"
    test_split: str | None = None
    cache: str | None = None

    def __post_init__(self) -> None:
        check_columns("text", self.text)
        _check_test(test=self.test, test_split=self.test_split)

    def load(self) -> Texts:
        """The labeled texts; see `TextSource.load`."""
        notes: list[str] = []
        tables = _tables(self.path, self.test, self.name, self.train_split, self.test_split, self.cache)
        parts = [self._labeled(table, notes) for table in tables]
        classes = self.classes or tables[0].classes.get(self.label, ())
        test = parts[1] if len(parts) > 1 else None
        return Texts(_name(self.path), parts[0], test, classes, tuple(notes))

    def _labeled(self, table: Table, notes: list[str]) -> list[Labeled]:
        table.require(*self.text, self.label, self.client)
        records = []
        for i in range(len(table)):
            # A missing title does no harm beside a body; without any text the record is left out below.
            columns = [table.text(i, column, optional=len(self.text) > 1) for column in self.text]
            label = table.rows[i].get(self.label)
            if isinstance(label, bool) or not isinstance(label, str | int):
                raise DataError(f"{table.place(i)}: {self.label!r} must be text or a whole number, not {label!r}.")
            text = self.separator.join(column for column in columns if column)
            records.append(Labeled(text, label, table.name(i, self.client)))
        kept = [record for record in records if record.text.strip()]
        _tell(table, len(records), len(kept), "no text", notes)
        return kept


TEXT_SOURCES: dict[str, type] = {
    "gsm8k": Gsm8k,
    "codealpaca": CodeAlpaca,
    "dolly": Dolly,
    "instructions": Instructions,
    "text_classes": TextClasses,
    "lines": Lines,
    "speakers": Speakers,
}
"""Sources of texts by name."""


def _instructions(
    table: Table,
    notes: list[str],
    prompt: str,
    response: str,
    input: str | None = None,
    category: str | None = None,
    client: str | None = None,
) -> list[Instruction]:
    """Records of a table by the names of its columns; those with an empty response are left out, with a note."""
    table.require(prompt, response, input, category, client)
    records = []
    for i in range(len(table)):
        record = Instruction(
            table.text(i, prompt),
            table.text(i, response),
            "" if input is None else table.text(i, input, optional=True),
            table.name(i, category),
            table.name(i, client),
        )
        if category is not None and record.category is None:
            raise DataError(f"{table.place(i)} has no {category!r}, by which partitions go. Fill it in.")
        records.append(record)
    kept = [record for record in records if record.response.strip()]
    _tell(table, len(records), len(kept), "an empty response", notes)
    return kept


def _tell(table: Table, found: int, kept: int, why: str, notes: list[str]) -> None:
    if kept == 0:
        raise DataError(f"{table.source!r}: each of the {found} records has {why}; nothing is left.")
    if kept < found:
        notes.append(f"{table.source}: {found - kept} of {found} records left out, which have {why}")


def _tables(
    path: str, test: str | None, name: str | None, train_split: str, test_split: str | None, cache: str | None
) -> list[Table]:
    """The training part, and the test part if there is one."""
    if Path(expand(path)).is_file():
        if test_split is not None:
            raise ConfigError(f"{path!r} is a file, which has no split {test_split!r}. Name a test file as test.")
        tables = [read_file(path)]
    else:
        splits = [train_split] if test_split is None else [train_split, test_split]
        tables = [read_split(path, name, split, cache) for split in splits]
    return tables if test is None else [*tables, read_file(test)]


def _check_test(**choices: object) -> None:
    given = [name for name, value in choices.items() if value is not None]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} each choose the test part; set one of them.")


def _name(path: str) -> str:
    """A name for reports: of the file, or of its folder where the file is merely the training part."""
    where = Path(expand(path))
    stem = where.name
    for end in (".gz", ".jsonl", ".json", ".parquet"):
        stem = stem.removesuffix(end)
    return where.parent.name if stem.startswith("train") and where.parent.name else stem or path
