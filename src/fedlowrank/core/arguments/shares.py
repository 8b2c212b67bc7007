"""Exact products of a share and a count, so that rounding a product never depends on floating point."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import lru_cache

_MAX_DENOMINATOR = 10**6
"""Largest denominator with which a float is read as a fraction such as 2/3."""


def multiply_share(share: float, count: int) -> Fraction:
    """Multiply a share by a count exactly, for the share that the user wrote: 0.7 · 90 is 63, in floats it is less.

    Args:
        share: number that a user wrote as a decimal, such as 0.7, or computed as a fraction, such as 2 / 3.
        count: number of which the share is taken.

    Returns:
        The product. ``math.floor``, ``math.ceil``, ``round`` (halves to even) and :func:`round_half_up` make it a count.
    """
    return _read_share(float(str(share))) * count


def round_half_up(x: Fraction) -> int:
    """Round to the nearest integer; halves go up, so that 10 % of 25 clients are 3."""
    return math.floor(x + Fraction(1, 2))


@lru_cache(maxsize=1024)
def _read_share(share: float) -> Fraction:
    """The fraction that a float stands for: the simple one that rounds to it, or else its shortest decimal."""
    fraction = Fraction(share).limit_denominator(_MAX_DENOMINATOR)
    return fraction if float(fraction) == share else Fraction(str(share))
