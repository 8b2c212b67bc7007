"""Statistics of one run, and of several seeds of it.

Accuracies are fractions in [0, 1]. A client without test examples has no accuracy: it is left out and
counted, never scored as zero. The standard deviation over clients divides by their number, because they are
all the clients of the federation and not a sample. Clients that never train are reported apart from the
others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy import stats

from ..simulation.records import RoundRecord, RunRecord
from .frame import evaluations, section
from .measures import ACCURACY, LOSS, MEASURES, Measure

LAST = 10  # evaluations in the mean over the end of a run
# Tolerance in comparing an accuracy with a target: rounding must not make 0.9 miss a target of 0.9.
ROUNDING = 1e-12
CONFIDENCE = 0.95
COSTS = ("bytes_up", "bytes_down", "parameters_up", "parameters_down", "steps", "flops")
KEYS = ["measure", "series", "split", "unseen", "round"]
STATISTICS = ["mean", "std", "weighted", "worst", "without", "non_finite"]
NO_SCORES = pd.DataFrame(columns=STATISTICS, dtype=np.float64)


class Estimate(NamedTuple):
    """A number over seeds.

    Attributes:
        n: seeds that have the number.
        mean: their mean.
        std: standard deviation with n - 1 in the denominator; NaN for one seed.
        ci: half-width of the 95 % confidence interval of the mean, from Student's t with n - 1 degrees of
        freedom;
            NaN for one seed.
    """

    n: int
    mean: float
    std: float
    ci: float


def half_width(std: Any, n: int) -> Any:
    """Half-width of the 95 % interval of a mean of ``n`` values with standard deviation ``std``."""
    return stats.t.ppf(0.5 + CONFIDENCE / 2, n - 1) * std / math.sqrt(n) if n > 1 else std * math.nan


def estimate(values: Iterable[float]) -> Estimate | None:
    """Mean and interval over seeds; None and non-finite values are left out. None if no value is left."""
    x = pd.Series(list(values), dtype=np.float64)
    x = x[np.isfinite(x)]
    if x.empty:
        return None
    return Estimate(len(x), float(x.mean()), float(x.std()), float(half_width(x.std(), len(x))))


def curve_over_seeds(tracks: Iterable[pd.Series]) -> pd.DataFrame:
    """Mean over seeds and half-width of its 95 % interval at the rounds that all seeds have.

    Args:
        tracks: values by round, one series a seed; empty ones are left out.

    Returns:
        Columns ``mean`` and ``ci`` (NaN for one seed), indexed by round; empty without seeds.
    """
    known = [track for track in tracks if len(track)]
    table = pd.concat(known, axis=1, join="inner").sort_index() if known else pd.DataFrame(dtype=np.float64)
    return pd.DataFrame({"mean": table.mean(axis=1), "ci": half_width(table.std(axis=1), len(known))})


def score_clients(values: pd.DataFrame) -> pd.DataFrame:
    """Statistics over clients of every evaluation.

    Args:
        values: rows of :func:`fedlowrank.report.frame.evaluations`.

    Returns:
        One row for each evaluation with a finite value, with the columns ``KEYS`` and: ``mean`` over clients,
        ``weighted`` mean by examples (NaN if they are not known), ``std`` over clients, ``worst`` (mean of
        the worst ceil(10 %) of clients), ``without`` (clients without examples) and ``non_finite`` (clients
        left out because their value is NaN or infinite).
    """
    # One number for each evaluation: grouping by five columns again and again would take most of the time.
    key = values.groupby(KEYS, sort=False).ngroup()
    values = values.assign(key=key, finite=np.isfinite(values["value"]))
    evaluations = values.groupby("key")
    counts = evaluations[["measured", "finite"]].sum()
    finite = values[values["finite"]]
    clients = finite.groupby("key")["value"]
    size = clients.transform("size")
    scores = pd.DataFrame({"mean": clients.mean(), "std": clients.std(ddof=0)}, index=counts.index)
    weights = finite["examples"]
    weighted = (finite["value"] * weights).groupby(finite["key"]).sum() / weights.groupby(finite["key"]).sum()
    scores["weighted"] = weighted.where(evaluations["examples"].count() == evaluations["value"].size())
    badness = finite["value"].where(finite["measure"] == LOSS.field, -finite["value"])
    place = badness.groupby(finite["key"]).rank(method="first", ascending=False)
    scores["worst"] = finite[place <= np.ceil(size / 10)].groupby("key")["value"].mean()
    scores["without"] = evaluations["value"].size() - counts["measured"]
    scores["non_finite"] = counts["measured"] - counts["finite"]
    names = values.drop_duplicates("key").set_index("key")[KEYS]
    return names.join(scores)[counts["finite"] > 0].reset_index(drop=True)


def total_costs(records: Sequence[RoundRecord]) -> dict[str, float]:
    """Sums over rounds of ``COSTS`` and of ``seconds_train``, ``seconds_server``, ... where recorded."""
    costs: dict[str, float] = {name: sum(getattr(record, name) for record in records) for name in COSTS}
    for kind in dict.fromkeys(kind for record in records for kind in record.seconds):
        costs[f"seconds_{kind}"] = math.fsum(record.seconds.get(kind, 0.0) for record in records)
    return costs


@dataclass(frozen=True, eq=False)
class Run:
    """A run record with its statistics."""

    record: RunRecord

    @cached_property
    def values(self) -> pd.DataFrame:
        """Every client's results, see :func:`fedlowrank.report.frame.evaluations`."""
        return evaluations(self.record)

    @cached_property
    def scores(self) -> dict[tuple[str, str, str, bool], pd.DataFrame]:
        """Statistics by round (:func:`score_clients`), by measure, series, split and unseen clients."""
        groups = score_clients(self.values).groupby(KEYS[:-1], sort=False)
        return {key: rows.set_index("round") for key, rows in groups}

    @cached_property
    def measure(self) -> Measure | None:
        """Accuracy if any client has one, else loss if any client has one, else None."""
        known = set(self.values.loc[self.values["measured"] & (self.values["split"] == "test"), "measure"])
        return next((measure for measure in MEASURES if measure.field in known), None)

    @cached_property
    def headline(self) -> str | None:
        """The first series that the method reports, or None if the run was never evaluated."""
        for record in self.record.rounds:
            for results in (record.accuracy, record.risk):
                if results:
                    return next(iter(results))
        return None

    @property
    def series(self) -> list[str]:
        """Names of all series in what the run is judged by."""
        field = (self.measure or ACCURACY).field
        results = [getattr(record, field) or {} for record in self.record.rounds]
        return list(dict.fromkeys(name for series in results for name in series))

    def curve(
        self, series: str | None, measure: Measure, split: str = "test", *, unseen: bool = False
    ) -> pd.DataFrame:  # fmt: skip
        """Scores of one series by round, over the clients that can train or over those that never do."""
        return self.scores.get((measure.field, series or "", split, unseen), NO_SCORES)

    @cached_property
    def _results(self) -> dict[tuple[str, str], dict[str, float]]:
        found = {}
        for field, series, split, unseen in self.scores:
            if split == "test" and not unseen:
                measure = next(measure for measure in MEASURES if measure.field == field)
                found[field, series] = self._choose_rounds(series, measure)
        return found

    def results(self, series: str | None, measure: Measure) -> dict[str, float] | None:
        """Statistics of a series at the rounds that a report may choose; None if it was never evaluated.

        Returns:
            ``last``: mean over clients at the last evaluated round, with ``round``, ``std_clients``,
            ``last_weighted``, ``worst_tenth``, ``without`` and ``non_finite``. ``best_by_validation``: at
            ``best_round``, whose mean validation result is best, the earliest on ties. ``last_ten``: mean
            over the last ten evaluations, the one before training left out. ``best_test``: the best over
            rounds, an optimistic number because it selects on test examples. ``unseen`` and ``std_unseen``:
            over the clients that never train.
        """
        return self._results.get((measure.field, series or ""))

    def _choose_rounds(self, series: str, measure: Measure) -> dict[str, float]:
        test = self.curve(series, measure)
        last, at = test.iloc[-1], test.index[-1]
        found = {
            "round": at, "last": last["mean"], "std_clients": last["std"], "last_weighted": last["weighted"],
            "worst_tenth": last["worst"], "without": last["without"], "non_finite": last["non_finite"],
        }  # fmt: skip
        means, trained = test["mean"], test["mean"][test.index > 0]
        found["last_ten"] = (means if trained.empty else trained).tail(LAST).mean()
        found["best_test"] = means.min() if measure.is_loss else means.max()
        validation = self.curve(series, measure, "val")["mean"].reindex(means.index).dropna()
        if not validation.empty:
            best = validation.idxmin() if measure.is_loss else validation.idxmax()
            found |= {"best_round": best, "best_by_validation": means[best]}
        unseen = self.curve(series, measure, unseen=True)
        if at in unseen.index:
            found |= {"unseen": unseen.loc[at, "mean"], "std_unseen": unseen.loc[at, "std"]}
        return found

    def _test_values(self, series: str | None, measure: Measure) -> pd.DataFrame:
        rows = self.values[(self.values["series"] == series) & (self.values["split"] == "test")]
        return rows[rows["measure"] == measure.field]

    def client_values(self, series: str | None, measure: Measure) -> pd.Series:
        """Finite results of the clients that can train, by client, at the last evaluated round."""
        test = self.curve(series, measure)
        rows = self._test_values(series, measure)
        rows = rows[(rows["round"] == (test.index[-1] if len(test) else None)) & ~rows["unseen"]]
        return rows[np.isfinite(rows["value"])].set_index("client")["value"]

    @cached_property
    def costs(self) -> dict[str, float]:
        """Costs of the whole run."""
        return total_costs(self.record.rounds)

    def costs_to(self, target: float | None) -> dict[str, float] | None:
        """``round`` of the first evaluation whose mean accuracy reaches the target, and all costs up to it.

        None without a target, and if it was never reached.
        """
        means = self.curve(self.headline, ACCURACY)["mean"]
        reached = means.index[means >= (math.inf if target is None else target - ROUNDING)]
        if reached.empty:
            return None
        records = [record for record in self.record.rounds if record.round <= reached[0]]
        return {"round": int(reached[0]), **total_costs(records)}

    @property
    def status(self) -> str:
        """What is wrong with the run; empty for a finished one that was evaluated."""
        found = []
        state = str(self.record.status.get("state", "unknown"))
        if state != "finished":
            trained = self.record.rounds[-1].round if self.record.rounds else 0
            found.append(f"{state} at round {self.record.status.get('rounds', trained)}")
        measure = self.measure or ACCURACY
        scored = self.curve(self.headline, measure)
        if scored.empty:
            found.append("no evaluation")
        elif scored.index[-1] < self._test_values(self.headline, measure)["round"].max():
            noun = measure.noun if measure.is_loss else "accuracy"
            found.append(f"no finite {noun} after round {scored.index[-1]}")
        return ", ".join(found)

    @property
    def own_target(self) -> float | None:
        """The target accuracy in the run's configuration, in (0, 1], or None."""
        value = section(self.record.config, "run").get("target")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return None
        return float(value) if 0 < value <= 1 else None
