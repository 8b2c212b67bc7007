"""Model sizes, ranks of the server's weights and the downlink, over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from .groups import Group, vary_text
from .measures import ACCURACY
from .metrics import Estimate, curve_over_seeds, estimate


class RankCurve(NamedTuple):
    """The rank of one weight over training, mean over seeds."""

    percent: pd.DataFrame  # of the rank before training; columns ``mean`` and ``ci``, indexed by round
    first: float  # before training
    last: float  # at the last round that all seeds share


def model_size(group: Group, series: str) -> tuple[Estimate, Estimate] | None:
    """Parameter count of a series' client models: mean and standard deviation over clients, both over seeds.

    It is taken at the round of the last result, else in the last record that has it. None if no run recorded
    it.
    """
    means, deviations = [], []
    for run in group.runs:
        if series in run.sizes:
            table, scores = run.sizes[series], run.curve(series, run.measure or ACCURACY)
            is_known = len(scores) > 0 and scores.index[-1] in table.index
            sizes = table.loc[scores.index[-1]] if is_known else table.iloc[-1]
            means.append(sizes.mean())
            deviations.append(sizes.std(ddof=0))
    mean, std = estimate(means), estimate(deviations)
    return (mean, std) if mean and std else None


def sizes_differ(groups: Sequence[Group]) -> bool:
    """Whether some client's model changes its size over methods, series or rounds of one setting.

    Otherwise the size is that of the architecture, and a report need not show it. Settings with other varied
    values are apart: that a larger architecture has more parameters is no news.
    """
    settings: dict[str, list[pd.DataFrame]] = {}
    for group in groups:
        of_setting = settings.setdefault(f"{group.experiment} {vary_text(group.vary)}", [])
        of_setting += [table for run in group.runs for table in run.sizes.values()]
    return any((pd.concat(tables).nunique() > 1).any() for tables in settings.values() if tables)


def rank_curves(group: Group) -> dict[str, RankCurve]:
    """Ranks of a group's low-rank weights over training, by weight, in the order of the model.

    Weights that not all seeds have, or whose rank was zero before training, are left out.
    """
    tables = [table for run in group.runs if len(table := run.reported("ranks"))]
    found = {}
    for name in tables[0].columns if tables else ():
        if all(name in table and table[name].notna().all() and table[name].iloc[0] > 0 for table in tables):
            percent = curve_over_seeds([100 * table[name] / table[name].iloc[0] for table in tables])
            if len(percent):
                first = float(np.mean([table[name].iloc[0] for table in tables]))
                last = float(np.mean([table.at[percent.index[-1], name] for table in tables]))
                found[name] = RankCurve(percent, first, last)
    return found


def last_ranks(group: Group) -> dict[str, float]:
    """Rank of every low-rank weight in the last record that has ranks, mean over the seeds that have it."""
    last = [table.iloc[-1] for run in group.runs if len(table := run.reported("ranks"))]
    means = pd.DataFrame(last).mean().dropna()
    return {str(name): float(mean) for name, mean in means.items()}


def downlink(group: Group) -> pd.DataFrame:
    """Bytes from the server to each participant by round, over seeds; empty if nobody took part."""
    return curve_over_seeds(
        pd.Series({r.round: r.bytes_down / len(r.participants) for r in run.record.rounds if r.participants})
        for run in group.runs
    )
