"""Text records: instructions with their responses, and texts with class labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from ...core.errors import ConfigError, DataError
from ...core.key import Key


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


Records: TypeAlias = list[Instruction] | list[Labeled]


@dataclass(frozen=True, eq=False)
class Texts:
    """Records of a data set, before they are formatted and tokenized.

    Attributes:
        name: name for messages and reports.
        train: records to train on, all instructions or all labeled.
        test: records of the same kind to test on, or None.
        classes: of labeled texts: names of the classes in the order of their numbers; empty to take them from
            the labels. Empty for instructions.
        notes: warnings for the reader of results, e.g. how many records were dropped.
    """

    name: str
    train: Records
    test: Records | None = None
    classes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def parts(self) -> list[Records]:
        """The training part, and the test part if there is one."""
        return [self.train] if self.test is None else [self.train, self.test]

    @property
    def kind(self) -> Literal["instructions", "classes"]:
        """The task: responses to instructions, or the classes of texts."""
        return "instructions" if isinstance(self.train[0], Instruction) else "classes"


def check_share(share: float) -> None:
    """Reject a share of test records outside [0, 1)."""
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share < 1:
        raise ConfigError(f"test_share must be a share from 0 to below 1, not {share!r}.")


def check_column_setting(setting: str, columns: object) -> None:
    """Reject an empty list of columns, and a string, whose letters would be taken for columns."""
    if isinstance(columns, str) or not columns:
        raise ConfigError(f"{setting} must be a list of at least one column, not {columns!r}.")


def hold_out(
    records: Sequence[Instruction], share: float, key: Key
) -> tuple[list[Instruction], list[Instruction] | None]:
    """Split off a random share of the records for the test: at least one, or None for a share of 0.

    Raises:
        DataError: if no record would be left to train on.
    """
    if share == 0:
        return list(records), None
    size = max(1, round(share * len(records)))
    if size >= len(records):
        raise DataError(f"{len(records)} records cannot spare {size} for the test. Lower test_share.")
    chosen = set((key / "test").numpy().permutation(len(records))[:size].tolist())
    train = [record for i, record in enumerate(records) if i not in chosen]
    return train, [record for i, record in enumerate(records) if i in chosen]
