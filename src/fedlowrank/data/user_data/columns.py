"""Chooses the columns of a table, or keys of a dict, for inputs, target, client and part."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ...core.errors import DataError, did_you_mean

_TARGET_NAMES = ("label", "labels", "target", "targets", "y")
"""Names of columns that are recognized as targets if the user names none."""


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
        features = self.features
        if features is not None and (isinstance(features, str) or not isinstance(features, Iterable)):
            raise DataError(f"features= is a list of columns, such as [{features!r}]; it is {features!r}")

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
