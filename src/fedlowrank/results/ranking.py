"""Compares results of rounds, settings and models: finds the best of several, with ties up to rounding."""

from __future__ import annotations

import math
from collections.abc import Iterable

ROUNDING = 1e-12
"""Relative difference up to which two results are equal: the mean of the same values in another order differs in its
last bits."""


def exceeds(value: float, other: float, margin: float = 0.0) -> bool:
    """Whether a value exceeds another one by more than ``margin``, and not by rounding alone."""
    threshold = other + margin
    return value > threshold and not math.isclose(
        value, threshold, rel_tol=ROUNDING, abs_tol=ROUNDING * margin
    )


def find_best(values: Iterable[float | None], *, lower_is_better: bool = False) -> int | None:
    """Find the index of the best value, the first among those that are equal up to :data:`ROUNDING`.

    Args:
        values: results in the order in which ties are decided; None and NaN are never the best.
        lower_is_better: whether the smallest value is the best, as for a loss.

    Returns:
        The index, from 0; None if there is no value.
    """
    sign = -1.0 if lower_is_better else 1.0
    best, index = 0.0, None
    for k, value in enumerate(values):
        if value is None or math.isnan(value):
            continue
        if index is None or exceeds(sign * value, best):
            best, index = sign * value, k
    return index
