"""Statistics of one run, each under a name that says when and over what it was taken.

Accuracies are fractions in [0, 1]. A client without test examples has no accuracy; it is left out and counted, never
scored as zero. The standard deviation over clients divides by their number: the clients of a federation are all there
are, not a sample of them. Clients that never train are judged apart from the others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..simulation.records import RoundRecord, RunRecord
from .measure import ACCURACY, LOSS, Measure, judged

LAST = 10
"""Evaluations in the mean over the end of a run."""

REACHED = 1e-12
"""Slack in comparing an accuracy with a target: rounding must not turn 0.9 into a miss of 0.9."""


@dataclass(frozen=True)
class Score:
    """Accuracy or loss of one evaluation over clients.

    Attributes:
        round: rounds completed at the evaluation.
        values: of each client that has one.
        mean: unweighted mean over those clients.
        weighted: mean weighted by test examples; None if their numbers are not known.
        std: standard deviation over those clients, dividing by their number.
        worst: mean of the worst ceil(10 %) of those clients.
        without: clients without examples in the split.
        non_finite: clients whose number is NaN or infinite, left out as well.
    """

    round: int
    values: tuple[float, ...]
    mean: float
    weighted: float | None
    std: float
    worst: float
    without: int
    non_finite: int


@dataclass(frozen=True)
class SeriesSummary:
    """Test accuracy, or loss, of one series of a run, over the clients that can train.

    Attributes:
        name: the series, such as ``personal`` or ``global``.
        last: at the last evaluated round. This is the headline.
        best: at the round whose mean validation accuracy is best, the earliest on ties; None without validation.
        last_ten: mean over the last ten evaluations, the one before training left out.
        max_test: max test over rounds (as some libraries report), the least of a loss. It selects on the test examples,
            so it is an optimistic number and never the default one.
        unseen: at the round of ``last``, over the clients that never train; None where there are none.
    """

    name: str
    last: Score | None
    best: Score | None
    last_ten: float | None
    max_test: float | None
    unseen: Score | None = None


@dataclass(frozen=True)
class Totals:
    """Costs summed over rounds.

    Attributes:
        bytes_up: bytes of messages to the server.
        bytes_down: bytes of messages from the server.
        parameters_up: floating-point elements in messages to the server.
        parameters_down: floating-point elements in messages from the server.
        steps: optimizer steps of all clients.
        flops: floating-point operations of training.
        seconds: wall-clock seconds of each kind, such as ``train``, ``server`` and ``evaluate``.
    """

    bytes_up: int
    bytes_down: int
    parameters_up: int
    parameters_down: int
    steps: int
    flops: int
    seconds: dict[str, float]

    @property
    def bytes(self) -> int:
        """Bytes both ways."""
        return self.bytes_up + self.bytes_down

    @property
    def parameters(self) -> int:
        """Tensor elements both ways."""
        return self.parameters_up + self.parameters_down

    @property
    def working_seconds(self) -> float:
        """Seconds of training and of the server: evaluation is part of measuring, not of the method."""
        return self.seconds.get("train", 0.0) + self.seconds.get("server", 0.0)


@dataclass(frozen=True)
class ToTarget:
    """The first evaluated round at which mean test accuracy reaches a target.

    Attributes:
        round: rounds completed by then.
        totals: costs of those rounds, the unevaluated ones between included.
    """

    round: int
    totals: Totals


@dataclass(frozen=True)
class RunSummary:
    """What the report says about one run.

    Attributes:
        run: the run.
        headline: name of the method's first series, or None if the run was never evaluated.
        measure: what the run is judged by.
        accuracy: test accuracy of every series by name.
        risk: test loss of every series by name; empty for runs recorded before losses were.
        totals: costs of the whole run.
        target: target accuracy, in [0, 1], or None.
        to_target: when and at what cost it was reached, or None if it was not.
    """

    run: RunRecord
    headline: str | None
    measure: Measure
    accuracy: dict[str, SeriesSummary]
    risk: dict[str, SeriesSummary]
    totals: Totals
    target: float | None
    to_target: ToTarget | None

    def by(self, measure: Measure) -> dict[str, SeriesSummary]:
        """Every series by name, as a measure sees it."""
        return self.accuracy if measure == ACCURACY else self.risk

    @property
    def series(self) -> dict[str, SeriesSummary]:
        """Every series by name, in what the run is judged by."""
        return self.by(self.measure)

    @property
    def main(self) -> SeriesSummary | None:
        """The headline series, in what the run is judged by."""
        return None if self.headline is None else self.series.get(self.headline)

    @property
    def _last_evaluation(self) -> int:
        found = [one.round for one in self.run.rounds if "test" in self.measure.of(one).get(self.headline or "", {})]
        return max(found, default=0)

    @property
    def status(self) -> str:
        """Empty for a finished run that was evaluated, else what is wrong with it."""
        said = []
        state = str(self.run.status.get("state", "unknown"))
        if state != "finished":
            rounds = self.run.status.get("rounds", self.run.rounds[-1].round if self.run.rounds else 0)
            said.append(f"{state} at round {rounds}")
        if self.main is None or self.main.last is None:
            said.append("no evaluation")
        elif self.main.last.round < self._last_evaluation:
            noun = "accuracy" if self.measure == ACCURACY else self.measure.noun
            said.append(f"no finite {noun} after round {self.main.last.round}")
        return ", ".join(said)


def score(
    values: Sequence[float | None], weights: Sequence[float] | None = None, at: int = 0, measure: Measure = ACCURACY
) -> Score | None:
    """Statistics over clients of one evaluation.

    Args:
        values: accuracy or loss of each client, None for one without examples.
        weights: examples of each client, or None if not known.
        at: the round, for the record.
        measure: what the values are, for which of them are the worst.

    Returns:
        The statistics, or None if no client has a value.
    """
    present = [i for i, value in enumerate(values) if value is not None]
    kept = [i for i in present if math.isfinite(values[i] or 0.0)]
    if not kept:
        return None
    x = np.array([values[i] for i in kept], dtype=np.float64)
    weighted = None
    if weights is not None and len(weights) == len(values):
        w = np.array([weights[i] for i in kept], dtype=np.float64)
        weighted = float((x * w).sum() / w.sum()) if w.sum() > 0 else None
    worst = sorted(x, key=measure.rank, reverse=True)[: math.ceil(len(x) / 10)]
    return Score(
        round=at,
        values=tuple(float(value) for value in x),
        mean=float(x.mean()),
        weighted=weighted,
        std=float(x.std()),
        worst=float(np.mean(worst)),
        without=len(values) - len(present),
        non_finite=len(present) - len(kept),
    )


def headline_series(run: RunRecord) -> str | None:
    """The first series that the method reports, or None if the run was never evaluated."""
    for record in run.rounds:
        for measure in (ACCURACY, LOSS):
            if measure.of(record):
                return next(iter(measure.of(record)))
    return None


def unseen_clients(run: RunRecord) -> frozenset[int]:
    """Identifiers of the clients that never train; none in runs recorded before there were such."""
    return frozenset(row.get("id", i) for i, row in enumerate(run.clients) if row.get("unseen") is True)


def scores(
    run: RunRecord, series: str, split: str = "test", measure: Measure = ACCURACY, *, unseen: bool = False
) -> list[Score]:
    """Statistics of every evaluation of one series, in the order of the rounds.

    Args:
        run: the run.
        series: such as ``personal``.
        split: ``test`` or ``val``.
        measure: accuracy or loss.
        unseen: over the clients that never train instead of those that can.
    """
    sizes = {row.get("id", i): float(row.get(split) or 0) for i, row in enumerate(run.clients)}
    apart = unseen_clients(run)
    found = []
    for record in run.rounds:
        values = measure.of(record).get(series, {}).get(split)
        if values is None:
            continue
        kept = [i for i in range(len(values)) if (i in apart) == unseen]
        weights = [sizes[i] for i in kept] if all(i in sizes for i in kept) else None
        one = score([values[i] for i in kept], weights, record.round, measure)
        if one is not None:
            found.append(one)
    return found


def totals(records: Sequence[RoundRecord]) -> Totals:
    """Costs summed over rounds."""
    kinds = dict.fromkeys(kind for record in records for kind in record.seconds)
    return Totals(
        bytes_up=sum(record.bytes_up for record in records),
        bytes_down=sum(record.bytes_down for record in records),
        parameters_up=sum(record.parameters_up for record in records),
        parameters_down=sum(record.parameters_down for record in records),
        steps=sum(record.steps for record in records),
        flops=sum(record.flops for record in records),
        seconds={kind: math.fsum(record.seconds.get(kind, 0.0) for record in records) for kind in kinds},
    )


def summarize_series(run: RunRecord, series: str, measure: Measure = ACCURACY) -> SeriesSummary:
    """Test accuracy or loss of one series at the rounds that a report may choose."""
    test = scores(run, series, "test", measure)
    if not test:
        return SeriesSummary(series, None, None, None, None)
    validation = {one.round: one.mean for one in scores(run, series, "val", measure)}
    candidates = [one for one in test if one.round in validation]
    best = min(candidates, key=lambda one: (measure.rank(validation[one.round]), one.round)) if candidates else None
    trained = [one.mean for one in test if one.round > 0] or [one.mean for one in test]
    never = {one.round: one for one in scores(run, series, "test", measure, unseen=True)}
    return SeriesSummary(
        name=series,
        last=test[-1],
        best=best,
        last_ten=math.fsum(trained[-LAST:]) / len(trained[-LAST:]),
        max_test=min((one.mean for one in test), key=measure.rank),
        unseen=never.get(test[-1].round),
    )


def to_target(run: RunRecord, series: str | None, target: float | None) -> ToTarget | None:
    """The first evaluated round at which mean test accuracy reaches a target, and the costs until then.

    Args:
        run: the run.
        series: series to look at.
        target: accuracy in [0, 1].

    Returns:
        The round and its costs, or None if there is no target or it was never reached.
    """
    if series is None or target is None:
        return None
    for one in scores(run, series):
        if one.mean >= target - REACHED:
            return ToTarget(one.round, totals([record for record in run.rounds if record.round <= one.round]))
    return None


def summarize(run: RunRecord, target: float | None = None) -> RunSummary:
    """Everything that the report says about one run.

    Args:
        run: the run.
        target: target accuracy in [0, 1]; None for the run's own, if it has one.
    """
    target = run_target(run) if target is None else target
    headline = headline_series(run)

    def each(measure: Measure) -> dict[str, SeriesSummary]:
        names = dict.fromkeys(name for record in run.rounds for name in measure.of(record))
        return {name: summarize_series(run, name, measure) for name in names}

    return RunSummary(
        run=run,
        headline=headline,
        measure=judged(run) or ACCURACY,
        accuracy=each(ACCURACY),
        risk=each(LOSS),
        totals=totals(run.rounds),
        target=target,
        to_target=to_target(run, headline, target),
    )


def run_target(run: RunRecord) -> float | None:
    """The target accuracy in the run's own configuration, in (0, 1], or None."""
    value = part(run.config, "run").get("target")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
        return None
    return float(value)


def highest_all_reached(runs: Sequence[RunRecord]) -> float | None:
    """The largest whole percent that every evaluated run's mean test accuracy reached at some round.

    Returns:
        A fraction, or None if no run was evaluated or one of them never reached 1 %.
    """
    peaks = []
    for run in runs:
        series = headline_series(run)
        means = [one.mean for one in scores(run, series)] if series is not None else []
        if means:
            peaks.append(max(means))
    whole = math.floor(100 * min(peaks) + 1e-9) if peaks else 0
    return whole / 100 if whole > 0 else None


def part(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A part of ``run.json``, empty if it is missing or null."""
    value = config.get(name)
    return value if isinstance(value, dict) else {}
