"""Settings that take one of a few words, or numbers within bounds."""

from __future__ import annotations

import dataclasses
import math
import numbers
import operator
import typing
from collections.abc import Mapping
from typing import Any, Literal

from .errors import ConfigError, did_you_mean

_KNOWN: dict[type[Any], dict[str, tuple[str, ...]]] = {}


def check_choices(settings: Any) -> None:
    """Refuse a word that a ``Literal`` field does not know; it would else be taken for one of the others.

    Args:
        settings: a dataclass, from its ``__post_init__``.

    Raises:
        ConfigError: naming the field and the nearest word.
    """
    for name, words in _words(type(settings)).items():
        value = getattr(settings, name)
        if value not in words:
            raise ConfigError(
                f"{type(settings).__name__}.{name}: {value!r} is no choice. {did_you_mean(str(value), words)}"
            )


def _words(cls: type[Any]) -> dict[str, tuple[str, ...]]:
    if cls not in _KNOWN:
        hints = typing.get_type_hints(cls)
        fields = [f.name for f in dataclasses.fields(cls)]
        _KNOWN[cls] = {n: typing.get_args(hints[n]) for n in fields if typing.get_origin(hints[n]) is Literal}
    return _KNOWN[cls]


def check_rank(rank: Any, name: str) -> int:
    """A rank as an int.

    Args:
        rank: a whole number of at least 1, of Python or numpy; no bool.
        name: of the setting, for the message.

    Raises:
        ConfigError: if it is something else.
    """
    if not isinstance(rank, bool) and isinstance(rank, numbers.Integral) and int(rank) >= 1:
        return int(rank)
    raise ConfigError(f"{name} must be a whole number of at least 1; it is {rank!r}")


_COMPARE = {">=": operator.ge, ">": operator.gt, "<=": operator.le, "<": operator.lt}


def check_bounds(settings: Any, bounds: Mapping[str, str], title: str) -> None:
    """Refuse a number out of its bounds, NaN and infinities included; None is accepted.

    Args:
        settings: a dataclass.
        bounds: by name of a field, such as ``"> 0 and <= 1"``.
        title: of the settings, for the message.

    Raises:
        ConfigError: naming the field, its bounds and its value.
    """
    for name, bound in bounds.items():
        value = getattr(settings, name)
        limits = [part.split() for part in bound.split(" and ")]
        inside = value is None or all(_COMPARE[sign](value, float(limit)) for sign, limit in limits)
        if not inside or (value is not None and not math.isfinite(value)):
            raise ConfigError(f"{title}: {name} must be {bound}; it is {value}")
