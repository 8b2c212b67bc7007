"""Chooses the columns of a table, or keys of a dict, for inputs, target, client and part."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from ...core.errors import DataError, did_you_mean

_TARGET_NAMES = ("label", "labels", "target", "targets", "y")
"""Names by which a target is recognized if the user names none."""


@dataclass(frozen=True)
class Columns:
    """The columns of a table that the user names.

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

    def choose(self, known: Sequence[Any], who: str, has: str) -> tuple[Any, list[Any]]:
        """The target and the inputs among the keys of a dict.

        Args:
            known: the keys.
            who: begins a message.
            has: what has the keys, for messages.

        Raises:
            DataError: if a key does not exist, or none is named as targets usually are.
        """
        target = self.target
        if target is None:
            targets = [key for key in known if key in _TARGET_NAMES]
            if len(targets) != 1:
                raise DataError(f"{who}{has} {[*known]}; name the target among them: target={known[-1]!r}")
            target = targets[0]
        if isinstance(target, list | tuple):
            raise DataError(f"{who}several targets are columns of a DataFrame; name one key: target=...")
        features = [key for key in known if key != target] if self.features is None else [*self.features]
        check_columns([target, *features], known, f"{who}{has} {[*known]}")
        if not features or target in features:
            raise DataError(f"{who}{has} {[*known]}; besides the target {target!r} it needs an input")
        return target, features

    def refuse(self, who: str, description: str) -> None:
        """Reject a choice of columns where there are none."""
        for name, value in (("target", self.target), ("features", self.features)):
            if value is not None:
                raise DataError(
                    f"{who}{name}= names a column of a DataFrame or a key of a dict, but these examples {description}; "
                    "leave it out"
                )


def check_columns(names: Sequence[Any], known: Sequence[Hashable], where: str) -> None:
    """Reject a column that does not exist."""
    for name in names:
        if name not in known:
            raise DataError(f"{where}, but none is {name!r}. {did_you_mean(str(name), map(str, known))}")
