"""Bounds of numeric settings: a smallest integer, or a bound written as ``">= 0 and < 1"``."""

from __future__ import annotations

import functools
import math
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import ConfigError
from .field_checks import check_value


def check_minimum(name: str, value: Any, minimum: int) -> int:
    """Check that a value is a whole number of at least a minimum, and return it as an int.

    Args:
        name: name of the setting, for the message.
        value: number of Python or numpy, but no bool. A float without a fractional part is accepted, as files contain
            them.
        minimum: smallest number that is accepted.

    Raises:
        ConfigError: if the value is below the minimum or of another type; the message is that of the checks of
            fields.
    """
    number: int = check_value(name, int, value)
    if number < minimum:
        raise ConfigError(f"{name} must be a whole number of at least {minimum}; it is {number}")
    return number


_COMPARE = {">=": operator.ge, ">": operator.gt, "<=": operator.le, "<": operator.lt}
_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_INTERVAL = re.compile(rf"([\[(\]])\s*({_NUMBER})?[^,;]*[,;]\s*({_NUMBER})?.*?([\])\[])")
_GRAMMAR = (
    "Write one comparison (>=, >, <= or <, then a number) or several joined by 'and', such as '>= 0 and < 1'"
)


def check_bounds(settings: Any, bounds: Mapping[str, str], title: str) -> None:
    """Refuse a number out of its bounds, including NaN and infinities; None is accepted.

    Args:
        settings: dataclass object that holds the numbers.
        bounds: bound of each field by the field's name, such as ``"> 0 and <= 1"``.
        title: title of the settings, for the message.

    Raises:
        ConfigError: if a number is out of its bounds; the message names the field, its bounds and its value. Also if
            a bound cannot be read, names an unknown field, or belongs to a field that is no number.
    """
    if not isinstance(bounds, Mapping):
        raise ConfigError(f"{title}: bounds must be a dict by name of a field, not {bounds!r}. {_GRAMMAR}")
    for name, bound in bounds.items():
        if not hasattr(settings, name):
            raise ConfigError(f"{title}: bounds names {name!r}, which is no field")
        value = getattr(settings, name)
        limits = _parse(bound, f"{title}: bounds[{name!r}]")
        if value is None:
            continue
        try:
            is_inside = math.isfinite(value) and all(compare(value, limit) for compare, limit in limits)
        except TypeError as error:
            raise ConfigError(
                f"{title}: {name} must be a number, for bounds names it; it is {value!r}"
            ) from error
        if not is_inside:
            raise ConfigError(f"{title}: {name} must be {bound}; it is {value}")


@functools.cache
def _parse(bound: Any, location: str) -> list[tuple[Callable[[Any, Any], bool], float]]:
    """Parse a bound into its comparisons, each with its number."""
    limits = []
    for comparison in bound.split(" and ") if isinstance(bound, str) else ():
        match = re.fullmatch(rf"\s*(>=|<=|>|<)\s*({_NUMBER})\s*", comparison)
        if match is None:
            break
        limits.append((_COMPARE[match[1]], float(match[2])))
    else:
        if limits:
            return limits
    suggestion = _from_interval(bound) if isinstance(bound, str) else ""
    raise ConfigError(f"{location} is {bound!r}. {suggestion or _GRAMMAR}.")


def _from_interval(text: str) -> str:
    """Suggest what to write instead of an interval such as ``[0, 1)``; empty for any other text."""
    match = _INTERVAL.fullmatch(text.strip())
    if match is None:
        return ""
    left, low, high, right = match.groups()
    comparisons = [
        *([f"{'>=' if left == '[' else '>'} {low}"] if low else []),
        *([f"{'<=' if right == ']' else '<'} {high}"] if high else []),
    ]
    return f"Write {' and '.join(comparisons)!r}" if comparisons else ""
