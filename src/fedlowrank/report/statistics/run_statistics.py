"""Statistics of one run, and of several of its seeds.

Accuracies are fractions in [0, 1]. A client without test examples has no accuracy: it is left out and counted, and
never scored as zero. The standard deviation over clients divides by their number, because they are all the clients of
the federation and not a sample. Clients that never train are reported separately, and hostile clients of a simulated
attack are in no result.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy.special import stdtrit

from ...core.io.text import on_one_line
from ...results.measurements import COSTS, ClientSelection, Measurements, mean_over_clients
from ...results.ranking import ROUNDING, find_best
from ...results.records import RoundRecord, RunRecord, describe_missing
from .chosen_clusters import Collapse, find_collapse, finds_all_groups
from .measures import MEASURES, TEST_ACCURACY, TEST_LOSS, Measure
from .modes import Modes
from .setting_names import settings_of
from .significance import CONFIDENCE

LAST_EVALUATIONS = 10  # number of evaluations in the mean over the end of a run


class Estimate(NamedTuple):
    """A number over seeds; for one seed, ``std`` and ``ci`` are NaN."""

    n: int  # number of seeds that have the number
    mean: float
    std: float  # standard deviation over seeds, with n - 1 in the denominator
    # half-width of the 95 % confidence interval of the mean, by Student's t with n - 1 degrees of freedom
    ci: float
    modes: Modes | None = None  # set if the mean and its interval describe no seed
    diverged: str = ""  # values left out of the mean because they are not finite, such as ``1 of 3 seeds``
    # seeds that found all groups of clients, and seeds for which this is known; None if it is for none
    groups_found: tuple[int, int] | None = None


class SeriesResults(NamedTuple):
    """Results of one series of a run: fractions for an accuracy, nats for a loss; NaN if there is none.

    All but the last two are over the clients that can train and, in a simulated attack, are not hostile.

    Attributes:
        round: last evaluated round.
        last: mean over clients at the last evaluated round.
        std_clients: standard deviation over clients at the last evaluated round.
        last_weighted: mean at the last evaluated round, with clients weighted by their test examples.
        worst_tenth: mean of the worst tenth of clients at the last evaluated round.
        clients: number of clients in the mean.
        without: number of clients without test examples.
        not_evaluated: number of clients that were not drawn for the evaluation.
        non_finite: number of clients whose value is not finite.
        diverged: number of clients whose value or loss is not finite; a model of NaN has an accuracy, of wrong answers.
        last_ten: mean over the last ten evaluations, without the one before training.
        best_test: best mean over rounds, which is optimistic because it selects on test examples.
        best_round: round whose mean validation result is best, the earliest on ties.
        best_by_validation: mean over clients at the round ``best_round``.
        unseen: mean over the clients that never train.
        std_unseen: standard deviation over the clients that never train.
    """

    round: int
    last: float
    std_clients: float
    last_weighted: float
    worst_tenth: float
    clients: int
    without: int
    not_evaluated: int
    non_finite: int
    diverged: int
    last_ten: float
    best_test: float
    best_round: float
    best_by_validation: float
    unseen: float
    std_unseen: float


def format_estimate(measure: Measure, value: Estimate) -> str:
    """Format a result over seeds without its unit: ``93.12 ± 1.10``, or for two groups of seeds ``4 of 5 ≥ 92.50``."""
    if modes := value.modes:
        text = format_successes(measure, modes.success_count, modes.n, modes.bound)
    else:
        text = measure.format_pair(value.mean, value.ci)
    return f"{text} ({value.diverged} diverged)" if value.diverged else text


def result_sort_key(measure: Measure, value: Estimate) -> tuple[bool, float]:
    """Compute a sort key that puts the best result first, and results with diverged seeds or clients last.

    The mean over the other seeds and clients may be too good.
    """
    return bool(value.diverged), measure.sort_key(value.mean)


def format_successes(measure: Measure, success_count: int, seed_count: int, bound: float) -> str:
    """Format the number of seeds that succeed, and their worst result without its unit, such as ``4 of 5 ≥ 92.50``."""
    sign = "≤" if measure.is_loss else "≥"
    return f"{success_count} of {seed_count} {sign} {measure.format_number(bound)}"


def half_width(std: Any, n: int) -> Any:
    """Compute the half-width of the 95 % interval of a mean of ``n`` values with standard deviation ``std``."""
    return stdtrit(n - 1, 0.5 + CONFIDENCE / 2) * std / math.sqrt(n) if n > 1 else std * math.nan


def estimate(values: Iterable[float]) -> Estimate | None:
    """Compute mean and interval over seeds, without None and non-finite values; None if no value is left."""
    x = pd.Series(list(values), dtype=np.float64)
    x = x[np.isfinite(x)]
    if x.empty:
        return None
    return Estimate(len(x), float(x.mean()), float(x.std()), float(half_width(x.std(), len(x))))


def curve_over_seeds(curves: Iterable[pd.Series]) -> pd.DataFrame:
    """Compute the mean over seeds and the half-width of its 95 % interval at the rounds that all seeds have.

    Args:
        curves: values by round, one series per seed; non-finite values and empty series are left out.

    Returns:
        A table with columns ``mean`` and ``ci`` (NaN for one seed), indexed by round; empty without seeds.
    """
    finite_curves = (curve[np.isfinite(curve.astype(float))] for curve in curves)
    nonempty_curves = [curve for curve in finite_curves if len(curve)]
    table = (
        pd.concat(nonempty_curves, axis=1, join="inner").sort_index()
        if nonempty_curves
        else pd.DataFrame(dtype=np.float64)
    )
    return pd.DataFrame(
        {"mean": table.mean(axis=1), "ci": half_width(table.std(axis=1), len(nonempty_curves))}
    )


def total_costs(records: Sequence[RoundRecord]) -> dict[str, float]:
    """Sum over rounds ``COSTS`` and the recorded seconds of clients, server and simulation."""
    costs: dict[str, float] = {name: sum(getattr(record, name) for record in records) for name in COSTS}
    for kind in dict.fromkeys(kind for record in records for kind in record.seconds):
        costs[f"seconds_{kind}"] = math.fsum(record.seconds.get(kind, 0.0) for record in records)
    simulated_seconds = [r.simulated_seconds for r in records if r.simulated_seconds is not None]
    if simulated_seconds:
        costs["simulated_seconds"] = math.fsum(simulated_seconds)
    return costs


@dataclass(frozen=True, eq=False)
class RunStatistics:
    """A run record with its statistics."""

    record: RunRecord

    @property
    def table(self) -> Measurements:
        """All measurements of the run."""
        return self.record.measurements

    @cached_property
    def settings(self) -> dict[str, str]:
        """Settings, except the seed, in which runs may differ: see :func:`.setting_names.settings_of`."""
        return settings_of(self.record)

    @cached_property
    def examples(self) -> tuple[int, ...]:
        """Numbers of training, validation and test examples of all clients."""
        splits = ("train", "val", "test")
        return tuple(sum(int(row.get(split) or 0) for row in self.record.clients) for split in splits)

    @cached_property
    def recovery(self) -> pd.Series:
        """Cluster recovery by round."""
        return pd.Series(self.table.recovery(), dtype=np.float64)

    @cached_property
    def has_found_groups(self) -> bool | None:
        """Whether the run found all groups of clients, see :func:`.chosen_clusters.finds_all_groups`."""
        return finds_all_groups(self.record)

    @cached_property
    def collapse(self) -> Collapse | None:
        """The cluster that all clients chose in the end, see :func:`.chosen_clusters.find_collapse`."""
        return find_collapse(self.record)

    @cached_property
    def sent(self) -> pd.Series:
        """Bytes sent both ways since the start, by round."""
        bytes_up, bytes_down = (self.table.of_rounds(name)[""] for name in ("bytes_up", "bytes_down"))
        return (bytes_up + bytes_down).cumsum()

    @cached_property
    def simulated(self) -> pd.Series:
        """Simulated seconds since the start, by round; empty without a simulated clock."""
        seconds = self.table.of_rounds("simulated_seconds")
        if seconds.empty:
            return pd.Series(dtype=np.float64)
        return seconds[""].reindex([record.round for record in self.record.rounds]).fillna(0.0).cumsum()

    @cached_property
    def _curves(self) -> dict[tuple[str, str, str, ClientSelection], pd.DataFrame]:
        return {}

    def curve(
        self, series: str | None, measure: Measure, split: str = "test", *, group: ClientSelection = "counted"
    ) -> pd.DataFrame:  # fmt: skip
        """Compute statistics of one series over clients, by round: see :func:`fedlowrank.results.measurements.summarize`."""
        key = measure.name, series or "", split, group
        if key not in self._curves:
            self._curves[key] = self.table.over_clients(*key)
        return self._curves[key]

    @cached_property
    def last_metrics(self) -> dict[tuple[str, str], float]:
        """Further metrics after the last round that has them, by name and series.

        They are means over the clients that count in means and for which the metric is defined; infinite if the value
        of one of these clients is not finite.
        """
        metrics = {}
        for name in self.table.metrics:
            for series in self.table.series(name):
                values = self.table.of_clients(name, series, "test").iloc[-1]
                counted_values = values[self.table.select_clients("counted", len(values))].dropna()
                mean = mean_over_clients(counted_values)
                if mean is not None:
                    metrics[name, series] = math.inf if math.isnan(mean) else mean
        return metrics

    @cached_property
    def measure(self) -> Measure | None:
        """Accuracy if any client has one, otherwise loss if any client has one, otherwise None."""
        for measure in MEASURES:
            tables = (self.table.of_clients(measure.name, s, "test") for s in self.table.series(measure.name))
            if any(table.notna().any(axis=None) for table in tables):
                return measure
        return None

    @property
    def headline(self) -> str | None:
        """The first series that the method reports, or None if the run was never evaluated."""
        return next(iter(self.table.all_series), None)

    @property
    def series(self) -> list[str]:
        """Names of all series in the measure that the run is judged by."""
        return self.table.series((self.measure or TEST_ACCURACY).name)

    @cached_property
    def _results(self) -> dict[tuple[str, str | None], SeriesResults | None]:
        return {}

    def results(self, series: str | None, measure: Measure) -> SeriesResults | None:
        """Compute statistics of a series at the rounds that a report may choose; None if it was never evaluated."""
        key = measure.name, series
        if key not in self._results:
            self._results[key] = self._compute_results(series, measure)
        return self._results[key]

    def _compute_results(self, series: str | None, measure: Measure) -> SeriesResults | None:
        test_curve = self.curve(series, measure)
        if test_curve.empty:
            return None
        last_row, last_round = test_curve.iloc[-1], test_curve.index[-1]
        # the divergence of a client must not make a round better
        worst_value = math.inf if measure.is_loss else -math.inf
        diverged_counts = self._count_diverged(series, measure, "test")
        losses = self._read_losses(series, "test")
        # a round in which no value is finite has no row in the curve
        if len(losses) and losses.index[-1] > last_round:
            diverged_count = int(np.isinf(losses.iloc[-1]).sum())
        else:
            diverged_count = diverged_counts.iloc[-1]
        means = test_curve["mean"]
        finite_means = means.where(diverged_counts == 0, worst_value)
        trained_means = means[means.index > 0]
        validation_curve = self.curve(series, measure, "val")
        is_finite = self._count_diverged(series, measure, "val") == 0
        validation = validation_curve["mean"].where(is_finite, worst_value)
        validation = validation.reindex(means.index).dropna()
        index = find_best(validation, lower_is_better=measure.is_loss)
        best_round = math.nan if index is None else validation.index[index]
        unseen_curve = self.curve(series, measure, group="unseen")
        is_unseen = last_round in unseen_curve.index
        return SeriesResults(
            round=last_round,
            last=last_row["mean"],
            std_clients=last_row["std"],
            last_weighted=last_row["weighted"],
            worst_tenth=last_row["worst"],
            clients=last_row["clients"],
            without=last_row["without"],
            not_evaluated=last_row["not_evaluated"],
            non_finite=last_row["non_finite"],
            diverged=diverged_count,
            last_ten=(means if trained_means.empty else trained_means).tail(LAST_EVALUATIONS).mean(),
            best_test=means.iloc[find_best(finite_means, lower_is_better=measure.is_loss) or 0],
            best_round=best_round,
            best_by_validation=math.nan if index is None else means[best_round],
            unseen=unseen_curve.loc[last_round, "mean"] if is_unseen else math.nan,
            std_unseen=unseen_curve.loc[last_round, "std"] if is_unseen else math.nan,
        )

    def _count_diverged(self, series: str | None, measure: Measure, split: str) -> pd.Series:
        """Count the clients whose value or loss is not finite, by round."""
        counts = self.curve(series, measure, split)["non_finite"]
        # from the table: a curve has no round in which all losses are not finite
        diverged = np.isinf(self._read_losses(series, split)).sum(axis=1).reindex(counts.index, fill_value=0)
        return pd.concat([counts, diverged], axis=1).max(axis=1).astype(int)

    def _read_losses(self, series: str | None, split: str) -> pd.DataFrame:
        """Losses of the clients that count in means, with rows of rounds."""
        losses = self.table.of_clients(TEST_LOSS.name, series or "", split)
        return losses[self.table.select_clients("counted", losses.shape[1])]

    def client_values(self, series: str | None, measure: Measure) -> pd.Series:
        """Finite results of the clients that count in means, by client, at the last evaluated round."""
        test_curve = self.curve(series, measure)
        if test_curve.empty:
            return pd.Series(dtype=np.float64)
        row = pd.Series(self.table.row(test_curve.index[-1], measure.name, series or "", "test"))
        return row[np.isfinite(row) & row.index.isin(self.table.select_clients("counted", len(row)))]

    @cached_property
    def costs(self) -> dict[str, float]:
        """Costs of the whole run, NaN for those that are not known."""
        return self._cost_of(self.record.rounds)

    def _cost_of(self, records: Sequence[RoundRecord]) -> dict[str, float]:
        costs = total_costs(records)
        run = self.record
        is_confidential = run.section("run", "privacy").get("kind", "none") != "none" or run.section(
            "run", "secure"
        ).get("on")
        if is_confidential and run.is_deployed:
            # over a network, such clients do not tell how much they computed
            costs |= {"steps": math.nan, "flops": math.nan}
        return costs

    @property
    def sends_nothing(self) -> bool:
        """Whether the run's clients trained without any message."""
        return self.costs["steps"] > 0 and self.costs["bytes_up"] + self.costs["bytes_down"] == 0

    def costs_to(self, target: float | None) -> dict[str, float] | None:
        """Find the ``round`` of the first evaluation whose mean accuracy reaches the target, with all costs up to it.

        The result is None without a target, and if the target was never reached.
        """
        means = self.curve(self.headline, TEST_ACCURACY)["mean"]
        reached_rounds = means.index[means >= (math.inf if target is None else target - ROUNDING)]
        if reached_rounds.empty:
            return None
        records = [record for record in self.record.rounds if record.round <= reached_rounds[0]]
        return {"round": int(reached_rounds[0]), **self._cost_of(records)}

    @property
    def state(self) -> str:
        """State in which the run ended: ``finished``, or ``diverged``, ``stopped`` or ``running``."""
        return str(self.record.status.get("state", "unknown"))

    @property
    def status(self) -> str:
        """Description of what is wrong with the run; empty for a finished one that was evaluated."""
        problems, state = [], self.state
        if state != "finished":
            last_round = self.record.rounds[-1].round if self.record.rounds else 0
            problems.append(f"{state} at round {self.record.status.get('rounds', last_round)}")
        if self.record.missing:
            problems.append(f"{describe_missing(self.record.missing)}, and costs are without them")
        measure = self.measure or TEST_ACCURACY
        score_curve = self.curve(self.headline, measure)
        if score_curve.empty:
            is_evaluated = any(record.is_evaluated for record in self.record.rounds)
            test_sizes = [row.get("test") or 0 for row in self.record.clients]
            # `join` names the smallest number of examples
            reason = " left the sites: their test sets are small (join --exact-evaluation)"
            is_held_back = self.record.is_deployed and is_evaluated and any(test_sizes)
            problems.append(f"no evaluation{reason if is_held_back else ''}")
        elif (
            score_curve.index[-1] < self.table.of_clients(measure.name, self.headline or "", "test").index[-1]
        ):
            measure_name = measure.sentence_name if measure.is_loss else "accuracy"
            problems.append(f"no finite {measure_name} after round {score_curve.index[-1]}")
        elif state == "finished" and score_curve.index[-1] < self.record.rounds[-1].round:
            problems.append(
                f"last evaluated at round {score_curve.index[-1]} of {self.record.rounds[-1].round}"
            )
        return ", ".join(problems)

    @property
    def own_target(self) -> float | None:
        """Target accuracy in the run's configuration, in (0, 1], or None."""
        value = self.record.section("run").get("target")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return None
        return float(value) if 0 < value <= 1 else None


def list_metrics(runs: Sequence[RunStatistics], headline: str | None) -> dict[tuple[str, str], str]:
    """List further metrics by name and series, with the suffix of their columns: empty for the headline, else ``.SERIES``."""
    keys = dict.fromkeys(key for run in runs for key in run.last_metrics)
    return {(name, s): "" if s == headline else f".{on_one_line(s)}" for name, s in keys}


def metric_row(runs: Sequence[RunStatistics], headline: str | None) -> dict[str, float | None]:
    """Make the columns of the CSV for further metrics, from runs that differ in the seed.

    ``metric_NAME`` is the mean over seeds and ``metric_NAME_ci95_seeds`` the half-width of its 95 % confidence
    interval. Columns of a series other than the headline end in a point and its name. Values are empty if a seed's
    mean is not finite.
    """
    row: dict[str, float | None] = {}
    for (name, series), suffix in list_metrics(runs, headline).items():
        values = [run.last_metrics[name, series] for run in runs if (name, series) in run.last_metrics]
        interval = estimate(values) if np.isfinite(values).all() else None
        row[f"metric_{name}{suffix}"] = interval.mean if interval else None
        row[f"metric_{name}_ci95_seeds{suffix}"] = interval.ci if interval else None
    return row
