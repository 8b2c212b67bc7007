"""Detects results that fall into two groups of seeds, such as seeds that find all groups of clients and seeds that miss one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

LEAST_GAP = 0.1  # least gap between the two groups of seeds: ten points of accuracy
GAP_TO_SPREAD = 5.0  # least ratio of the gap to the range within either group
# Minimum number of seeds for which the results alone may show two groups: normal results look bimodal in fewer
# than 2 % of samples of five, but in every fifth sample of three.
MIN_SEEDS = 5


class Modes(NamedTuple):
    """Two groups of seeds: those that succeed and those that fail."""

    n: int  # number of seeds
    success_count: int  # number of seeds in the better group
    bound: float  # worst result of the better group
    failure_bound: float  # best result of the worse group


def find_modes(
    values: Sequence[float], *, is_loss: bool = False, successes: Sequence[bool | None] = ()
) -> Modes | None:
    """Find out whether the results of seeds are bimodal, so that a mean with its interval describes none of them.

    They are if the widest gap between neighboring results is at least :data:`LEAST_GAP` (for losses: the mean of the
    better group, so that the other losses are double) and :data:`GAP_TO_SPREAD` times the range of the results on
    either side. Fewer than :data:`MIN_SEEDS` seeds are too few to see this in their results alone: then the better
    group must be those seeds that succeeded by another criterion, and the worse group those that did not.

    Args:
        values: finite results of the seeds.
        is_loss: whether lower is better.
        successes: whether each seed succeeded by a criterion other than the result; None if it is not known.

    Returns:
        The two groups, or None if the results are not bimodal.
    """
    if len(values) < 3:
        return None
    sign = -1.0 if is_loss else 1.0
    order = np.argsort(sign * np.asarray(values))[::-1]
    sorted_values = sign * np.asarray(values)[order]
    gaps = sorted_values[:-1] - sorted_values[1:]
    success_count = int(gaps.argmax()) + 1
    better_values, worse_values, gap = (
        sorted_values[:success_count],
        sorted_values[success_count:],
        float(gaps.max()),
    )
    min_gap = abs(float(better_values.mean())) if is_loss else LEAST_GAP
    max_range = max(float(np.ptp(better_values)), float(np.ptp(worse_values)))
    if gap <= 0 or gap < min_gap or gap < GAP_TO_SPREAD * max_range:
        return None
    if len(values) < MIN_SEEDS:
        if len(successes) != len(values):
            return None
        if [successes[i] for i in order] != [True] * success_count + [False] * len(worse_values):
            return None
    return Modes(len(values), success_count, float(sign * better_values[-1]), float(sign * worse_values[0]))
