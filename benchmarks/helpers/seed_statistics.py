"""Mean over seeds and its interval."""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd

from fedlowrank.report.statistics.run_statistics import half_width


def mean_and_half_width(values: Iterable[float]) -> tuple[float, float]:
    """Compute the mean over seeds and the half-width of its 95 % interval by Student's t.

    A value that is not finite makes the mean NaN or infinite: a seed that diverged is not left out. The half-width of one
    value is NaN.
    """
    x = pd.Series(list(values), dtype=float)
    return float(x.mean(skipna=False)), float(half_width(x.std(skipna=False), len(x)))
