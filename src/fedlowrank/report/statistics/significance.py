"""Paired tests of a difference between two methods, and the correction for several comparisons.

Two runs of the same seed have the same clients, data and initial weights. Their common variation cancels in the
difference of their results, so a paired interval is usually narrower than that of either method alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from ...results.measurements import Floats

CONFIDENCE = 0.95  # confidence level of every interval of a report
ALPHA = 1 - CONFIDENCE  # level of significance of corrected p-values
RESAMPLES = 9999  # number of resamples in the bootstrap over clients
EXACT_PAIRS = 200  # number of unequal pairs up to which Wilcoxon's test is exact
PairUnit = Literal["seeds", "clients"]


class Difference(NamedTuple):
    """A mean paired difference with its 95 % confidence interval and the p-value of "no difference"."""

    mean: float
    low: float  # lower end; NaN with fewer than two pairs, or if all differ by the same amount
    high: float
    p: float  # two-sided p-value; NaN with fewer than two pairs
    n: int  # number of pairs
    pair_unit: PairUnit  # kind of pairs
    test_sign: int  # sign of the statistic of the test: of the mean, or of the signed-rank sum W⁺ - W⁻

    @property
    def sign(self) -> int:
        """Sign of the difference if the interval excludes 0 and the test has the same sign, else 0.

        Without an interval, the mean stands for it.
        """
        low, high = (self.mean, self.mean) if math.isnan(self.low) else (self.low, self.high)
        interval_sign = (low > 0) - (high < 0)
        return interval_sign if interval_sign == self.test_sign else 0


def compare_over_seeds(differences: ArrayLike) -> Difference:
    """Test a mean difference over seeds with a paired t-test.

    Args:
        differences: mean difference over the clients of each seed, ``[seeds]``; at least one.

    Returns:
        The interval and p-value from Student's t with n - 1 degrees of freedom. Equal differences have no spread to
        estimate, and t would be infinite: the p-value is then that of the exact sign test, 2 / 2ⁿ, and there is no
        interval. If all are zero, p is 1 and the interval is zero.
    """
    x = np.asarray(differences, dtype=np.float64)
    mean = float(x.mean())
    if len(x) < 2:
        return Difference(mean, math.nan, math.nan, math.nan, len(x), "seeds", _sign(mean))
    if _is_constant(x):
        return _without_spread(x, "seeds")
    test = stats.ttest_1samp(x, 0.0)
    low, high = test.confidence_interval(CONFIDENCE)
    return Difference(mean, float(low), float(high), float(test.pvalue), len(x), "seeds", _sign(mean))


def compare_over_clients(differences: ArrayLike) -> Difference:
    """Test a mean difference over the clients of one seed.

    The test says whether the clients of this run differ between the methods, and nothing about other seeds.

    Args:
        differences: difference of each client, ``[clients]``; at least one.

    Returns:
        The comparison. Its interval is a percentile bootstrap of the mean with a generator of its own, so that equal
        values give equal intervals. The p-value is from Wilcoxon's signed-rank test, see :func:`compare_signed_ranks`. Equal
        differences are treated as in :func:`compare_over_seeds`.
    """
    x = np.asarray(differences, dtype=np.float64)
    mean = float(x.mean())
    if len(x) < 2:
        return Difference(mean, math.nan, math.nan, math.nan, len(x), "clients", _sign(mean))
    if _is_constant(x):
        return _without_spread(x, "clients")
    # rounding must not separate equal differences, such as 0.3 - 0.2 and 0.2 - 0.1
    p, test_sign = compare_signed_ranks(np.round(x / np.abs(x).max(), 10))
    # at most a million values in memory at once, because a federation may have thousands of clients
    low, high = stats.bootstrap(
        (x,), np.mean, n_resamples=RESAMPLES, batch=max(1, 10**6 // len(x)), method="percentile",
        confidence_level=CONFIDENCE, random_state=np.random.default_rng(0),
    ).confidence_interval  # fmt: skip
    return Difference(mean, float(low), float(high), p, len(x), "clients", test_sign)


def compare_signed_ranks(differences: Floats) -> tuple[float, int]:
    """Test differences with Wilcoxon's signed-rank test.

    Args:
        differences: difference of each pair, ``[pairs]``. Zeros are left out, and equal sizes share the mean of their ranks.

    Returns:
        The two-sided p-value, and the sign of W⁺ - W⁻. Up to :data:`EXACT_PAIRS` differences that are not zero, the p-value
        is exact over all choices of their signs; with more, it is that of the normal approximation. With equal sizes and few
        pairs the approximation would be too small.
    """
    x = differences[differences != 0]
    # twice the ranks are whole numbers, also if ranks are shared
    ranks = np.rint(2 * stats.rankdata(np.abs(x))).astype(int)
    sign = _sign(float(np.where(x > 0, ranks, -ranks).sum()))
    if len(x) > EXACT_PAIRS:
        return float(stats.wilcoxon(x).pvalue), sign
    probabilities = np.ones(1)  # of each sum of the ranks with a positive sign
    for rank in ranks:
        probabilities = (np.pad(probabilities, (0, rank)) + np.pad(probabilities, (rank, 0))) / 2
    positive = int(ranks[x > 0].sum())
    # the distribution is symmetric
    return min(1.0, 2.0 * float(probabilities[: min(positive, ranks.sum() - positive) + 1].sum())), sign


def correct_holm(p_values: Sequence[float], comparisons: int = 0) -> list[float]:
    """Correct p-values for several comparisons by the step-down method of Holm (1979).

    The probability of one false finding or more among all comparisons is at most α if those with a corrected
    p-value below α are called significant.

    Args:
        p_values: p-values of the comparisons; NaN, for one that could not be tested, stays NaN and is not counted.
        comparisons: number of comparisons, if p-values of more than the given ones might have been looked at: all
            pairs of methods if each is compared with the one that came out best. 0 counts the given ones. The
            p-values that are not given are assumed to be larger, which is conservative.

    Returns:
        The corrected p-values in the given order.
    """
    p = np.asarray(p_values, dtype=np.float64)
    order = [i for i in np.argsort(p, kind="stable") if not math.isnan(p[i])]
    corrected_p = np.full(len(p), math.nan)
    factors = max(comparisons, len(order)) - np.arange(len(order))
    corrected_p[order] = np.minimum(1.0, np.maximum.accumulate(factors * p[order])) if order else ()
    return [float(value) for value in corrected_p]


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)


def _is_constant(x: Floats) -> bool:
    """Whether all values are equal up to rounding, so that their spread is no estimate."""
    # differences of numbers near 1 or 100 have rounding errors of 1e-16 or 1e-14, even if they are small
    return bool(np.ptp(x) <= max(1e-12, 1e-9 * np.abs(x).max()))


def _without_spread(x: Floats, unit: PairUnit) -> Difference:
    """Compare pairs that all differ by the same amount."""
    mean, n = float(x.mean()), len(x)
    # with the tolerance of the spread, so that rounding is no difference
    if abs(mean) <= 1e-12:
        return Difference(mean, mean, mean, 1.0, n, unit, 0)
    return Difference(mean, math.nan, math.nan, 2.0 * 0.5**n, n, unit, _sign(mean))
