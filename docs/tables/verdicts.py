"""The rules by which the papers' claims are judged; see ``docs/evidence.py``. ``docs/results/protocol.md`` states them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from fedlowrank.report.statistics.significance import ALPHA, compare_over_seeds

MARGIN = 1.0
"""Differences within this many points of accuracy are equivalent."""
MARKS = ("for", "open", "against")
"""What a comparison says about its claim."""
VERDICTS = ("holds", "holds in part", "depends", "does not hold", "equivalent", "undecided", "no interval")
"""What the comparisons of a claim say about it; no interval is a claim without comparisons."""


class Judgment(NamedTuple):
    """One comparison: the estimate, its 95 % interval, and what they say about the claim."""

    value: float  # difference in points (of losses: as it is), or share of successes
    low: float  # NaN if there is no interval
    high: float
    p: float  # of the statement that the mark makes; 1 if the mark makes none because a method diverged
    n: int  # seeds behind the estimate
    mark: str  # one of MARKS
    is_equivalent: bool = False  # by two one-sided tests with MARGIN


def judge_difference(
    differences: NDArray[np.float64],
    expected: str,
    margin: float = MARGIN,
    more_diverged: int = 0,
    lower_is_better: bool = False,
) -> Judgment:
    """Judge paired differences of two methods.

    Args:
        differences: method minus the other, of the seeds in which neither diverged, ``[seeds]``.
        expected: what the claim says: ``+`` above 0, ``-`` below 0, ``>=`` above -margin, ``=`` within the margin.
        margin: of equivalence, in the unit of the differences; NaN if there is none.
        more_diverged: seeds in which the method diverged, minus those in which the other diverged.
        lower_is_better: whether a method wins by a difference below 0, as for losses.

    Returns:
        The mark is ``for`` if the whole 95 % interval is on the claimed side of 0, ``against`` if it is on the other
        side, and ``open`` otherwise. For ``>=`` and ``=``, ``for`` means that the whole 90 % interval is above -margin or
        within the margin; for ``=``, ``against`` means that the whole 95 % interval is on one side of 0 and the difference is not
        shown to be within the margin. A method that diverged more often than the other cannot win: such a mark
        becomes ``open``. With unequal numbers of diverged seeds there is no equivalence.
    """
    found = compare_over_seeds(differences)
    inner = _narrow_interval(differences)
    is_equivalent = bool(more_diverged == 0 and -margin < inner[0] and inner[1] < margin)
    mark, p = "open", found.p
    if expected == ">=" and more_diverged <= 0 and inner[0] > -margin:
        mark, p = "for", _p_above(differences, -margin)
    elif expected == "=" and is_equivalent:
        mark, p = "for", max(_p_above(differences, -margin), _p_above(-differences, -margin))
    elif found.low > 0 or found.high < 0:
        side = 1 if found.low > 0 else -1
        winner = -side if lower_is_better else side
        if winner * more_diverged > 0:
            mark, p = "open", 1.0
        else:
            claimed = {"+": 1, ">=": 1, "-": -1, "=": 0}[expected]
            mark = "for" if side == claimed else "against"
    return Judgment(found.mean, found.low, found.high, p, found.n, mark, is_equivalent)


def judge_rate(successes: int, n: int) -> Judgment:
    """Judge a share of successful runs; a diverged run is a failure.

    Args:
        successes: runs that succeeded.
        n: runs, at least one.

    Returns:
        The interval is Wilson's of 95 %. The mark is ``for`` if the whole interval is above one half, ``against`` if
        it is below, and ``open`` otherwise. p is that of the score test, which the interval inverts.
    """
    low, high = wilson_interval(successes, n)
    mark = "for" if low > 0.5 else "against" if high < 0.5 else "open"
    z = (successes / n - 0.5) / math.sqrt(0.25 / n)
    return Judgment(successes / n, low, high, float(2 * stats.norm.sf(abs(z))), n, mark)


def wilson_interval(successes: int, n: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share, both ends between 0 and 1."""
    found = stats.binomtest(successes, n).proportion_ci(1 - ALPHA, method="wilson")
    return float(found.low), float(found.high)


def judge_claim(judgments: Sequence[Judgment], is_strong: Sequence[bool], asks: str) -> str:
    """One verdict for all comparisons of a claim.

    Args:
        judgments: of the comparisons.
        is_strong: whether each excludes its null hypothesis after Holm's correction within the claim.
        asks: ``every``: the claim is about all comparisons at once ("the best", "above A, B and C"); ``each``: it is a direction
            that each comparison tests; ``one``: it says that something can be.

    Returns:
        A statement about all comparisons needs no correction: it is made only if every single one confirms it
        (intersection-union test). A statement that some comparison confirms or contradicts the claim is made from
        corrected comparisons only.
    """
    marks = [judgment.mark for judgment in judgments]
    strong = {judgment.mark for judgment, stands in zip(judgments, is_strong, strict=True) if stands}
    if set(marks) == {"for"} or (asks == "one" and "for" in strong):
        return "holds"
    if set(marks) == {"against"} or (asks == "every" and "against" in strong):
        return "does not hold"
    if asks == "each" and {"for", "against"} <= strong:
        return "depends"
    if asks == "each" and "against" in strong:
        return "does not hold"
    if asks == "each" and "for" in strong:
        return "holds in part"
    return "equivalent" if all(judgment.is_equivalent for judgment in judgments) else "undecided"


def _narrow_interval(differences: NDArray[np.float64]) -> tuple[float, float]:
    """The 90 % interval of the mean, whose ends are the two one-sided tests of 5 %."""
    found = compare_over_seeds(differences)
    if math.isnan(found.low) or found.low == found.high:
        return found.low, found.high
    low, high = stats.ttest_1samp(differences, 0.0).confidence_interval(1 - 2 * ALPHA)
    return float(low), float(high)


def _p_above(differences: NDArray[np.float64], bound: float) -> float:
    """One-sided p-value of a mean above a bound; 0 where equal differences have no spread."""
    if np.ptp(differences) == 0:
        return 0.0
    return float(stats.ttest_1samp(differences, bound, alternative="greater").pvalue)
