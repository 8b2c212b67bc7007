"""Sources of plain text that is cut into passages, with or without speakers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ...core.arguments.bounds import check_minimum
from ...core.arguments.field_checks import CheckedFields
from ...core.arguments.shares import multiply_share
from ...core.errors import DataError
from ..download.data_files import expand_path
from .table import name_speaker, read_file, read_text
from .text_records import Instruction, Texts, check_column_setting, check_share

Unit = Literal["characters", "lines"]


@dataclass(frozen=True)
class Lines(CheckedFields):
    """A plain text file in UTF-8 without clients, cut into passages. Goes with format ``none``.

    Attributes:
        path: the file, with ``.gz`` or without; ``~`` and environment variables are replaced.
        unit: what ``length`` counts.
        length: characters or lines of a passage, at least 1; the last one may be shorter.
        test_share: share of the passages, from the end of the text, that become the test part, from 0 to
            below 1.
    """

    path: str
    unit: Unit = "characters"
    length: int = 400
    test_share: float = 0.0

    def __post_init__(self) -> None:
        check_minimum("length", self.length, 1)
        check_share(self.test_share)

    def load(self) -> Texts:
        """The passages in order, as responses without a prompt; see `TextSource.load`."""
        records, blank_count = self._cut(read_text(self.path), None)
        path = expand_path(self.path)
        if not records:
            raise DataError(f"{path!r} holds no text.")
        train, test = self._split(records)
        if self.test_share and not test:
            raise DataError(f"{path!r}: too few passages for a test part: {len(records)}. Lower length.")
        return Texts(Path(path).name, train, test or None, notes=_describe_blank(blank_count))

    def _cut(self, text: str, client: str | None) -> tuple[list[Instruction], int]:
        """The passages that are not blank, and the number of blank ones."""
        passages = cut_passages(text, self.unit, self.length)
        records = [Instruction("", passage, client=client) for passage in passages if passage.strip()]
        return records, len(passages) - len(records)

    def _split(self, records: list[Instruction]) -> tuple[list[Instruction], list[Instruction]]:
        """All but the last share of the records, and these; at least one of the former."""
        boundary = len(records) - min(
            round(multiply_share(self.test_share, len(records))), max(0, len(records) - 1)
        )
        return records[:boundary], records[boundary:]


@dataclass(frozen=True)
class Speakers(Lines):
    """Plain text by speaker, each a natural client, cut into passages. Goes with format ``none``.

    Attributes:
        path: a file with a row for each speech or speaker, e.g. ``by_speaker.jsonl.gz``; kinds of files as of
            `table.read_file`.
        length: characters or lines of a passage, at least 1. No passage spans two rows.
        test_share: share of each speaker's passages, the last ones, that become the test part, from 0 to
            below 1. It is rounded, and one passage at least stays for training, so that speakers with few
            passages have none in the test part.
        speaker: columns that together name a speaker; e.g. ``("play", "speaker")``.
        text: column of the text.
    """

    speaker: tuple[str, ...] = ("speaker",)
    text: str = "text"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_column_setting("speaker", self.speaker)

    def load(self) -> Texts:
        """The passages, speakers in the order of their first row; see `TextSource.load`."""
        table = read_file(self.path)
        table.require(*self.speaker, self.text)
        speakers: dict[str, list[Instruction]] = {}
        blank_count = 0
        for i in range(len(table.rows)):
            speaker = name_speaker(table, i, self.speaker)
            records, row_blank_count = self._cut(table.text(i, self.text), speaker)
            speakers.setdefault(speaker, []).extend(records)
            blank_count += row_blank_count
        parts = [self._split(records) for records in speakers.values()]
        train, test = ([record for part in parts for record in part[k]] for k in (0, 1))
        if not train:
            raise DataError(f"{table.source!r} holds no text in the column {self.text!r}.")
        notes = list(_describe_blank(blank_count))
        if self.test_share:
            if not test:
                raise DataError(f"{table.source!r}: too few passages per speaker for a test. Lower length.")
            if untested_count := sum(not part[1] for part in parts):
                notes.append(
                    f"{untested_count} of {len(parts)} speakers have too few passages for the test part"
                )
        return Texts(Path(table.source).name.split(".")[0], train, test or None, notes=tuple(notes))


def cut_passages(text: str, unit: Unit, length: int) -> list[str]:
    """Cut a text into consecutive pieces of that many characters or lines; a line ends with its break."""
    units = text if unit == "characters" else re.findall(r"[^\n]*\n|[^\n]+", text)
    return ["".join(units[i : i + length]) for i in range(0, len(units), length)]


def _describe_blank(blank_count: int) -> tuple[str, ...]:
    return (f"{blank_count} blank passages dropped",) if blank_count else ()
