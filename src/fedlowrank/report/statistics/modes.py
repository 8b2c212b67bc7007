"""Results that fall into two groups of seeds, as those of methods that find all groups of clients or miss one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

LEAST_GAP = 0.1  # between the two groups of seeds: ten points of accuracy
GAP_TO_SPREAD = 5.0  # least ratio of that gap to the range within either group
# Seeds from which the results alone may show two groups: normal results look so in fewer than 2 % of samples
# of five, but in every fifth sample of three.
MIN_SEEDS = 5


class Modes(NamedTuple):
    """Two groups of seeds: those that succeed and those that fail."""

    n: int  # seeds
    reached: int  # those of the better group
    bound: float  # worst result of the better group
    rest: float  # best result of the worse group


def find_modes(
    values: Sequence[float], *, is_loss: bool = False, successes: Sequence[bool | None] = ()
) -> Modes | None:
    """Find out whether the results of seeds are bimodal, so that a mean with its interval describes none of them.

    They are if the widest gap between neighboring results is at least :data:`LEAST_GAP` (of losses: the mean of the
    better group, so that the others are double) and :data:`GAP_TO_SPREAD` times the range of the results on either
    side. Fewer than :data:`MIN_SEEDS` seeds are too few to see that by their results: then the better group must be
    those seeds that succeeded by another criterion, and the worse group those that did not.

    Args:
        values: a finite result of each of the seeds.
        is_loss: whether lower is better.
        successes: whether each seed succeeded by a criterion other than the result; None where it is not known.

    Returns:
        The two groups, or None if the results are not bimodal.
    """
    if len(values) < 3:
        return None
    sign = -1.0 if is_loss else 1.0
    order = np.argsort(sign * np.asarray(values))[::-1]
    best = sign * np.asarray(values)[order]
    gaps = best[:-1] - best[1:]
    reached = int(gaps.argmax()) + 1
    good, bad, gap = best[:reached], best[reached:], float(gaps.max())
    least = abs(float(good.mean())) if is_loss else LEAST_GAP
    spread = max(float(np.ptp(good)), float(np.ptp(bad)))
    if gap <= 0 or gap < least or gap < GAP_TO_SPREAD * spread:
        return None
    if len(values) < MIN_SEEDS:
        if len(successes) != len(values):
            return None
        if [successes[i] for i in order] != [True] * reached + [False] * len(bad):
            return None
    return Modes(len(values), reached, float(sign * good[-1]), float(sign * bad[0]))
