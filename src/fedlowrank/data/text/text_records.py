"""Text records: instructions, conversations, preference pairs, and texts with labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np

from ...core.arguments.shares import multiply_share
from ...core.errors import ConfigError, DataError
from ...core.key import Key
from .on_disk.lazy_records import LazyRecords


@dataclass(frozen=True)
class Instruction:
    """An instruction for a language model, and its response.

    Attributes:
        prompt: the instruction or question; empty for plain text.
        response: the text to learn; empty if it is still to be generated.
        input: the text that the instruction is about (a passage, a piece of code); empty for none.
        category: kind of the task, which partitions can use like a class, or None.
        client: natural client to whom the record belongs, or None.
    """

    prompt: str
    response: str = ""
    input: str = ""
    category: str | None = None
    client: str | None = None


@dataclass(frozen=True)
class Labeled:
    """A text with its class.

    Attributes:
        text: the text.
        label: its class: a name, or a number from 0 on.
        client: natural client to whom the record belongs, or None.
    """

    text: str
    label: str | int
    client: str | None = None


ChatMessage: TypeAlias = Mapping[str, Any]
"""A turn of a conversation as chat templates take it: ``role``, ``content`` and what else the row has."""


@dataclass(frozen=True, eq=False)
class Conversation:
    """Turns of a system, a user, an assistant and tools.

    Attributes:
        messages: the turns in order, see `ChatMessage`.
        tools: JSON schemas of the functions that the assistant may call, for the chat template.
        learn_from: number of the first turn whose text a model may learn. Earlier turns are the prompt, even
            those of the assistant.
        category: kind of the task, which partitions can use like a class, or None.
        client: natural client to whom the record belongs, or None.
        location: file and row, for messages.
    """

    messages: tuple[ChatMessage, ...]
    tools: tuple[Any, ...] = ()
    learn_from: int = 0
    category: str | None = None
    client: str | None = None
    location: str = "a conversation"


@dataclass(frozen=True, eq=False)
class Preference:
    """Two responses to one prompt, of which people prefer the first.

    Attributes:
        chosen: the prompt with the preferred response.
        rejected: instruction of the same prompt with the other response.
        category: kind of the task, which partitions can use like a class, or None.
        client: natural client to whom the record belongs, or None.
    """

    chosen: Instruction | Conversation
    rejected: Instruction | Conversation
    category: str | None = None
    client: str | None = None


@dataclass(frozen=True)
class TextPair:
    """Two texts that belong together, such as a question and its answer.

    Attributes:
        anchor: the first text.
        positive: the text that an embedding of the first is to be near to.
        category: kind of the pair, which partitions can use like a class, or None.
        client: natural client to whom the record belongs, or None.
    """

    anchor: str
    positive: str
    category: str | None = None
    client: str | None = None


@dataclass(frozen=True, eq=False)
class TokenLabeled:
    """Words with a label each, e.g. of named entities.

    Attributes:
        words: the words of the text.
        labels: class of each word: names, or numbers from 0 on. Negative numbers are words without a label.
        client: natural client to whom the record belongs, or None.
        location: file and row, for messages.
    """

    words: tuple[str, ...]
    labels: tuple[str | int, ...]
    client: str | None = None
    location: str = "a text"


Record: TypeAlias = Instruction | Conversation | Preference | Labeled | TokenLabeled | TextPair
Records: TypeAlias = (
    list[Instruction]
    | list[Conversation]
    | list[Preference]
    | list[Labeled]
    | list[TokenLabeled]
    | list[TextPair]
)
RecordKind: TypeAlias = Literal[
    "instructions", "conversations", "preferences", "classes", "token_classes", "pairs"
]

KINDS: dict[type, RecordKind] = {
    Instruction: "instructions",
    Conversation: "conversations",
    Preference: "preferences",
    Labeled: "classes",
    TokenLabeled: "token_classes",
    TextPair: "pairs",
}
"""The task of records of each type."""

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Texts:
    """Records of a data set, before they are formatted and tokenized.

    Attributes:
        name: name for messages and reports.
        train: records to train on, all of one type.
        test: records of the same kind to test on, or None.
        classes: names of the classes of labeled texts or words, in the order of their numbers; empty to take
            them from the labels. Empty for the other records.
        notes: warnings for the reader of results, e.g. how many records were dropped.
        format: format of instructions that the rows call for, which ``auto`` selects
            (:func:`.text_formats.choose_format`); None for ``alpaca``, or ``none`` if no record has an instruction.
        folder: where the tokens are stored in memory-mapped files; None for tokens in memory.
        labels_are_numbers: whether whole-number labels are always numbers of ``classes``, as in data sets that name
            their classes themselves. Otherwise labels that are all among ``classes``, also as whole numbers, are names.
    """

    name: str
    train: Records
    test: Records | None = None
    classes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    format: Literal["verbatim", "none"] | None = None
    folder: Path | None = None
    labels_are_numbers: bool = False

    @property
    def parts(self) -> list[Records]:
        """The training part, and the test part if there is one."""
        return [self.train] if self.test is None else [self.train, self.test]

    @property
    def kind(self) -> RecordKind:
        """The task: what the records are."""
        return KINDS[type(self.train[0])]


def is_label(value: object) -> bool:
    """Whether a value can be a label: text, or a whole number of 64 bits."""
    if isinstance(value, int) and not isinstance(value, bool):
        return -(1 << 63) <= value < 1 << 63
    return isinstance(value, str)


def check_share(share: float) -> None:
    """Reject a share of test records outside [0, 1)."""
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share < 1:
        raise ConfigError(f"test_share must be a share from 0 to below 1, not {share!r}.")


def check_one_test(test: str | None, test_split: str | None, test_share: float = 0.0) -> None:
    """Reject more than one setting that chooses the test part."""
    settings = {"test": test, "test_split": test_split, "test_share": test_share or None}
    names = [name for name, value in settings.items() if value is not None]
    if len(names) > 1:
        raise ConfigError(f"{' and '.join(names)} each choose the test part; set one of them.")


def check_column_setting(setting: str, columns: object) -> None:
    """Reject an empty list of columns, and a string, whose letters would be taken for columns."""
    if isinstance(columns, str) or not columns:
        raise ConfigError(f"{setting} must be a list of at least one column, not {columns!r}.")


def hold_out(records: Sequence[T], share: float, key: Key) -> tuple[list[T], list[T] | None]:
    """Split off a random share of the records for the test: at least one, or None for a share of 0.

    Raises:
        DataError: if no record would be left to train on.
    """
    if share == 0:
        all_records: Any = records if isinstance(records, LazyRecords) else list(records)
        return all_records, None
    test_count = max(1, round(multiply_share(share, len(records))))
    if test_count >= len(records):
        raise DataError(f"{len(records)} records cannot spare {test_count} for the test. Lower test_share.")
    test_indices = (key / "test").numpy().permutation(len(records))[:test_count]
    if isinstance(records, LazyRecords):
        is_test = np.zeros(len(records), dtype=bool)
        is_test[test_indices] = True
        lazy_parts: Any = records.select(np.flatnonzero(~is_test)), records.select(np.flatnonzero(is_test))
        return lazy_parts[0], lazy_parts[1]
    test_index_set = set(test_indices.tolist())
    train = [record for i, record in enumerate(records) if i not in test_index_set]
    return train, [record for i, record in enumerate(records) if i in test_index_set]
