"""Chooses the columns of a table, or keys of a dict, for inputs, target, client and part."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Any

from ...core.errors import DataError, did_you_mean

_TARGET_NAMES = ("label", "labels", "target", "targets", "y")
"""Names of columns that are recognized as targets if the user names none."""

_MIN_NUMBER_SHARE = 0.9
"""Share of numbers among the values of a text column from which it is a column of numbers with errors."""

_NUMBERS = {
    mark: re.compile(rf"\s*[+-]?(\d+[{mark}]?\d*|[{mark}]\d+)([eE][+-]?\d+)?\s*") for mark in (".", ",")
}
"""Numbers by their decimal separator."""

_UNNAMED = re.compile(r"Unnamed: \d+")
"""Name that pandas gives to a column without a name."""


@dataclass(frozen=True)
class Columns:
    """Columns of a table that the user names.

    Attributes:
        client: column of the clients of a data frame.
        target: column of the targets, or several columns of real targets.
        features: columns of the inputs; None for all others.
        split: column with the part of each row of a data frame: ``train``, ``val`` or ``test``.
    """

    client: Any = None
    target: Any = None
    features: Sequence[Any] | None = None
    split: Any = None

    def __post_init__(self) -> None:
        features: Any = self.features
        if features is not None and (isinstance(features, str | Set) or not isinstance(features, Iterable)):
            example = sorted(features, key=str) if isinstance(features, Set) else [features]
            raise DataError(f"features= is a list of columns, such as {example!r}; it is {features!r}")

    def choose(self, keys: Sequence[Any], prefix: str, description: str) -> tuple[Any, list[Any]]:
        """Choose the target and the inputs among the keys of a dict.

        Args:
            keys: keys of the dict.
            prefix: beginning of the message.
            description: description of the object that has the keys, for messages.

        Raises:
            DataError: if a key does not exist, or no key has a usual name of targets.
        """
        target = self.target
        if target is None:
            targets = [key for key in keys if key in _TARGET_NAMES]
            if len(targets) != 1:
                raise DataError(
                    f"{prefix}{description} {[*keys]}; name the target among them: target={keys[-1]!r}"
                )
            target = targets[0]
        if isinstance(target, list | tuple):
            raise DataError(f"{prefix}several targets are columns of a DataFrame; name one key: target=...")
        features = [key for key in keys if key != target] if self.features is None else [*self.features]
        check_columns([target, *features], keys, f"{prefix}{description} {[*keys]}")
        if not features or target in features:
            raise DataError(
                f"{prefix}{description} {[*keys]}; besides the target {target!r} it needs an input"
            )
        return target, features

    def refuse(self, prefix: str, description: str) -> None:
        """Reject a choice of columns for data that have none."""
        for name, value in (("target", self.target), ("features", self.features)):
            if value is not None:
                raise DataError(
                    f"{prefix}{name}= names a column of a DataFrame or a key of a dict, but these examples {description}; "
                    "leave it out"
                )


def check_columns(names: Sequence[Any], columns: Sequence[Hashable], prefix: str) -> None:
    """Reject a column that does not exist."""
    for name in names:
        if name not in columns:
            raise DataError(f"{prefix}, but none is {name!r}. {did_you_mean(str(name), map(str, columns))}")


def find_unnamed(columns: Iterable[Any]) -> str | None:
    """Find a column without a name, such as the row numbers that ``DataFrame.to_csv`` writes; None if all have names."""
    return next((name for name in columns if isinstance(name, str) and _UNNAMED.fullmatch(name)), None)


def find_text(values: Sequence[str], decimal: str = ".") -> list[int]:
    """Find the values that are no numbers with this decimal separator; return their indices."""
    return [i for i, value in enumerate(values) if not _NUMBERS[decimal].fullmatch(value)]


def are_mostly_numbers(values: Sequence[str], text_rows: Sequence[int]) -> bool:
    """Whether at least 90 % of the values of a column are numbers; values without a letter or digit do not count.

    Args:
        values: values of the column.
        text_rows: indices of those that are no numbers.
    """
    number_count = len(values) - len(text_rows)
    word_count = sum(any(map(str.isalnum, values[i])) for i in text_rows)
    return number_count > 0 and number_count >= _MIN_NUMBER_SHARE * (number_count + word_count)
