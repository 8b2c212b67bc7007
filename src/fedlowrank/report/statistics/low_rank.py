"""Low-rank statistics: results by rank of the client, replies, the server's update W, model sizes, ranks, the downlink.

Accuracies are fractions. Clients that never train are left out, as in every other mean.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from ...core.io.text import on_one_line
from ...results.measurements import TRAINING_LOSS
from ...results.records import RunRecord
from .groups import RunGroup
from .measures import TEST_ACCURACY, TEST_LOSS, Measure
from .run_statistics import Estimate, RunStatistics, curve_over_seeds, estimate, half_width


def has_adapters(groups: Sequence[RunGroup]) -> bool:
    """Whether any run has adapters, a language model, or clients with ranks of their own."""
    runs = [run.record for group in groups for run in group.runs]
    section_names = ("lora", "language")
    return any(any(run.section(name) for name in section_names) or run.ranks for run in runs)


def results_by_rank(group: RunGroup, series: str, measure: Measure) -> pd.DataFrame:
    """Tabulate results of a series by rank of the client at the last evaluated round, the largest rank first.

    Returns:
        A table indexed by rank: ``mean`` over the clients of a rank and over seeds, ``ci`` (NaN for one seed), ``n``
        (number of seeds), and ``least`` and ``most`` (numbers of clients of this rank in a seed).
    """
    seed_tables = []
    for run in group.runs:
        values = run.client_values(series, measure)
        ranks = pd.Series(run.record.ranks, dtype=np.float64).reindex(values.index)
        seed_tables.append(values.groupby(ranks).agg(["mean", "size"]))
    rank_groups = pd.concat(seed_tables).groupby(level=0)
    table = rank_groups["mean"].agg(["mean", "std", "size"])
    ci = [half_width(std, n) for std, n in zip(table["std"], table["size"], strict=True)]
    table = pd.DataFrame({"mean": table["mean"], "ci": np.array(ci, dtype=np.float64), "n": table["size"]})
    return table.assign(least=rank_groups["size"].min(), most=rank_groups["size"].max()).sort_index(
        ascending=False
    )


class RankResults(NamedTuple):
    """Results of one series of a group by rank of the client."""

    group: RunGroup
    series: str
    table: pd.DataFrame  # see :func:`results_by_rank`


def list_rank_results(groups: Sequence[RunGroup], measure: Measure) -> list[RankResults]:
    """List results of every series of every group by rank; empty unless there are clients of two ranks."""
    if not any(run.record.ranks for group in groups for run in group.runs):
        return []
    all_results = [
        RankResults(group, name, results_by_rank(group, name, measure))
        for group in groups
        for name in group.series
    ]
    nonempty_results = [results for results in all_results if len(results.table)]
    return (
        nonempty_results
        if len({rank for results in nonempty_results for rank in results.table.index}) > 1
        else []
    )


def adapter_row(group: RunGroup) -> dict[str, float]:
    """Make the columns of the CSV about adapters; empty for runs without adapters.

    ``perplexity`` is the exponential of the mean loss per token over clients and seeds, so it is the geometric mean
    of their perplexities; ``accuracy_rank_8`` or ``loss_rank_8`` is the mean over the clients of rank 8. Columns of a
    further series end in a point and its name.
    """
    row: dict[str, float] = {}
    table_by_series = {results.series: results.table for results in list_rank_results([group], group.measure)}
    prefix = "loss" if group.measure.is_loss else "accuracy"
    for name in group.series:
        suffix = "" if name == group.headline else f".{on_one_line(name)}"
        loss = group.final(name, TEST_LOSS)
        if group.first.predicts_tokens and loss is not None:
            row[f"perplexity{suffix}"] = perplexity(loss.mean)
        if name in table_by_series:
            row |= {
                f"{prefix}_rank_{rank:.0f}{suffix}": mean
                for rank, mean in table_by_series[name]["mean"].items()
            }
    return row


def perplexity(loss: float) -> float:
    """Exponential of a loss per token in nats; infinite if the number is too large."""
    return math.exp(loss) if loss < math.log(np.finfo(np.float64).max) else math.inf


def format_ranks(run: RunRecord) -> str:
    """Format the ranks of the clients with the number of clients of each, such as ``8 × 2, 4``; empty if there is none."""
    counts = Counter(run.ranks.values())
    sorted_counts = sorted(counts.items(), reverse=True)
    return ", ".join(f"{rank} × {n}" if n > 1 else str(rank) for rank, n in sorted_counts)


def reply_values(run: RunStatistics, metric: str) -> pd.DataFrame:
    """Tabulate a method's metric of each client's reply, rows by round, columns by client; NaN if not finite.

    ``metric`` is ``weights``, p_i of the reply, or ``truncation``, ‖W - W^{r_i}‖_F² / ‖W‖_F² of the download.
    """
    table = run.table.of_rounds(metric)
    table = table[[name for name in table if str(name).isdecimal()]].rename(columns=int).sort_index(axis=1)
    return table.where(np.isfinite(table)).dropna(axis=1, how="all")


def server_rank(group: RunGroup) -> tuple[pd.DataFrame, float, float] | None:
    """Compute the rank of the server's update, which is 0 before training, by round.

    Returns:
        The mean over layers as a curve, and the least and the largest rank of a layer in the last record, as means
        over seeds; None if no update began at rank 0.
    """
    mean_curves, last_rows = [], []
    for run in group.runs:
        table = run.table.of_rounds("ranks")
        table = table.loc[:, table.iloc[:1].eq(0).all()].dropna(how="all")
        if (table > 0).any(axis=None):
            mean_curves.append(table.mean(axis=1))
            last_rows.append(table.iloc[-1])
    curve = curve_over_seeds(mean_curves)
    if curve.empty:
        return None
    return (
        curve,
        float(np.mean([row.min() for row in last_rows])),
        float(np.mean([row.max() for row in last_rows])),
    )


def energy(group: RunGroup) -> pd.DataFrame:
    """Compute ‖W‖_F², summed over layers, by round; empty if it was not recorded."""
    return curve_over_seeds(_total(run, "energy") for run in group.runs)


def discarded_share(group: RunGroup) -> pd.DataFrame:
    """Compute the share of ‖W‖_F² that a cap on the rank discards in each round; empty if it never does."""
    totals = [(_total(run, "energy"), _total(run, "discarded")) for run in group.runs]
    # the share of an empty update, 0 / 0, is 0
    curve = curve_over_seeds(
        discarded_energy / (kept_energy + discarded_energy).replace(0.0, 1.0)
        for kept_energy, discarded_energy in totals
    )
    return curve if (curve["mean"] > 0).any() else curve.iloc[:0]


def training_losses(group: RunGroup) -> dict[str, pd.DataFrame]:
    """Compute the mean loss over the steps of each pass, of all participants, by round; passes in order."""
    tables = [run.table.of_rounds(TRAINING_LOSS) for run in group.runs]
    names = dict.fromkeys(name for table in tables for name in table)
    curves = {name: curve_over_seeds(t[name] for t in tables if name in t) for name in names}
    return {name: curve for name, curve in curves.items() if len(curve)}


def _total(run: RunStatistics, metric: str) -> pd.Series:
    return run.table.of_rounds(metric).sum(axis=1, skipna=False)


class RankCurve(NamedTuple):
    """The rank of one weight by round, as a mean over seeds."""

    percent: pd.DataFrame  # percent of the first rank; columns ``mean`` and ``ci``, indexed by round
    first: float  # rank before training
    last: float  # rank at the last round that all seeds share


def model_size(group: RunGroup, series: str) -> tuple[Estimate, Estimate] | None:
    """Estimate the parameter count of a series' client models: mean and standard deviation over clients, both over seeds.

    It is taken at the round of the last result, otherwise in the last record that has it. The result is None if no
    run recorded it.
    """
    means, deviations = [], []
    for run in group.runs:
        table = run.table.over_clients("parameters", series, "", "all")
        if len(table):
            scores = run.curve(series, run.measure or TEST_ACCURACY)
            is_known = len(scores) > 0 and scores.index[-1] in table.index
            sizes = table.loc[scores.index[-1]] if is_known else table.iloc[-1]
            means.append(sizes["mean"])
            deviations.append(sizes["std"])
    mean, std = estimate(means), estimate(deviations)
    return (mean, std) if mean and std else None


def rank_curves(group: RunGroup) -> dict[str, RankCurve]:
    """Compute the ranks of a group's low-rank weights by round, for each weight, in the order of the model.

    Weights that some seeds lack, or whose rank was zero before training, are left out.
    """
    tables = [table for run in group.runs if len(table := run.table.of_rounds("ranks"))]
    curves = {}
    for name in tables[0].columns if tables else ():
        if all(name in table and table[name].notna().all() and table[name].iloc[0] > 0 for table in tables):
            percent = curve_over_seeds([100 * table[name] / table[name].iloc[0] for table in tables])
            if len(percent):
                first_rank = float(np.mean([table[name].iloc[0] for table in tables]))
                last_rank = float(np.mean([table.at[percent.index[-1], name] for table in tables]))
                curves[name] = RankCurve(percent, first_rank, last_rank)
    return curves


def last_ranks(group: RunGroup) -> dict[str, float]:
    """Rank of every low-rank weight in the last record that has ranks, as a mean over the seeds that have it."""
    last_rows = [table.iloc[-1] for run in group.runs if len(table := run.table.of_rounds("ranks"))]
    means = pd.DataFrame(last_rows).mean().dropna()
    return {str(name): float(mean) for name, mean in means.items()}


def downlink(group: RunGroup) -> pd.DataFrame:
    """Compute the bytes from the server to each participant by round, over seeds; empty if no client took part."""
    return curve_over_seeds(
        pd.Series({r.round: r.bytes_down / len(r.participants) for r in run.record.rounds if r.participants})
        for run in group.runs
    )
