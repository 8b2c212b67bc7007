"""Which of several results is the best: rounds, settings and models are all compared here, with ties up to rounding."""

from __future__ import annotations

import math
from collections.abc import Iterable

ROUNDING = 1e-12
"""Relative difference up to which two results are equal: the mean of the same values in another order differs in its
last bits."""


def exceeds(value: float, other: float, by: float = 0.0) -> bool:
    """Whether a value is larger than another one by more than ``by``, and not by rounding alone."""
    least = other + by
    return value > least and not math.isclose(value, least, rel_tol=ROUNDING, abs_tol=ROUNDING * by)


def find_best(values: Iterable[float | None], *, lower_is_better: bool = False) -> int | None:
    """Place of the best value, the first of those that are equal up to :data:`ROUNDING`.

    Args:
        values: in the order in which ties are decided; None and NaN are never the best.
        lower_is_better: whether the best is the smallest, as of a loss.

    Returns:
        The place, counted from 0; None if there is no value.
    """
    sign = -1.0 if lower_is_better else 1.0
    best, place = 0.0, None
    for k, value in enumerate(values):
        if value is None or math.isnan(value):
            continue
        if place is None or exceeds(sign * value, best):
            best, place = sign * value, k
    return place
