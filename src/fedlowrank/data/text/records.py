"""Raw text: instructions with their responses, and texts with class labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from ...core.errors import ConfigError, DataError
from ...core.key import Key


@dataclass(frozen=True)
class Instruction:
    """What a language model is asked and what it should reply.

    Attributes:
        prompt: the instruction or question; empty for plain text.
        response: what the model learns to reply; empty where a reply is still to be generated.
        input: what the instruction is about (a passage, a piece of code); empty for none.
        category: kind of the task, by which partitions can skew the clients, or None.
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


Records: TypeAlias = list[Instruction] | list[Labeled]


@dataclass(frozen=True, eq=False)
class Texts:
    """Records of a data set, before they are formatted and tokenized.

    Attributes:
        name: name for messages and reports.
        train: records to train on, all instructions or all labeled.
        test: records of the same kind to test on, or None.
        classes: of labeled texts: names of the classes in the order of their numbers; empty to take them from the
            labels. Empty for instructions.
        notes: what a reader of results should know, e.g. how many records were left out.

    Raises:
        DataError: on construction: an empty part, or instructions beside labeled texts.
    """

    name: str
    train: Records
    test: Records | None = None
    classes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for part, records in (("training", self.train), ("test", self.test)):
            if records is not None and not records:
                raise DataError(f"the {part} part of the texts {self.name!r} is empty.")
        kinds = {type(record).__name__ for records in (self.train, self.test or []) for record in records}
        if len(kinds) > 1:
            raise DataError(
                f"the texts {self.name!r} mix {' and '.join(sorted(kinds))} records; they must be of a kind."
            )
        if self.classes and self.kind == "instructions":
            raise DataError(f"the texts {self.name!r} are instructions, but they name classes.")

    @property
    def kind(self) -> Literal["instructions", "classes"]:
        """What is to be learnt: replies to instructions, or the classes of texts."""
        return "instructions" if isinstance(self.train[0], Instruction) else "classes"


def check_share(share: float) -> None:
    """Refuse a share of test records outside [0, 1).

    Raises:
        ConfigError: if it is.
    """
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share < 1:
        raise ConfigError(f"test_share must be a share from 0 to below 1, not {share!r}.")


def check_columns(setting: str, columns: object) -> None:
    """Refuse an empty list of columns, or a single word, whose letters would be taken for columns.

    Raises:
        ConfigError: if it is one.
    """
    if isinstance(columns, str) or not columns:
        raise ConfigError(f"{setting} must be a list of at least one column, not {columns!r}.")


def hold_out(
    records: Sequence[Instruction], share: float, key: Key
) -> tuple[list[Instruction], list[Instruction] | None]:
    """Set a share of the records aside for the test, at random.

    Args:
        records: all records.
        share: of the records, from 0 to below 1; rounded, but at least one record where it is above 0.
        key: randomness.

    Returns:
        Records for training and for the test, both in their old order; None for a share of 0.

    Raises:
        DataError: if nothing would be left to train on.
    """
    if share == 0:
        return list(records), None
    held = max(1, round(share * len(records)))
    if held >= len(records):
        raise DataError(f"{len(records)} records cannot spare {held} for the test. Lower test_share.")
    chosen = set((key / "test").numpy().permutation(len(records))[:held].tolist())
    train = [record for i, record in enumerate(records) if i not in chosen]
    return train, [record for i, record in enumerate(records) if i in chosen]
