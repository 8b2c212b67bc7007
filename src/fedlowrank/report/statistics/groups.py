"""Runs grouped by experiment, method and settings, so that only the seeds differ within a group."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import pandas as pd

from ...core.io.text import on_one_line
from ...results.records import RunRecord
from .accuracy_target import Target, choose_target
from .measures import TEST_ACCURACY, TEST_LOSS, TOKEN_LOSS, Measure
from .modes import find_modes
from .run_statistics import Estimate, RunStatistics, SeriesResults, curve_over_seeds, estimate
from .setting_names import CODE, last_part, value_text, vary_text


@dataclass(frozen=True)
class RunGroup:
    """One method with one setting, over its seeds."""

    experiment: str  # its name
    method: str  # its name
    vary: tuple[tuple[str, Any], ...]  # the varied settings with their values
    short: str  # label without the varied settings, so the same for a method throughout a sweep
    label: str  # with them, unique in the experiment
    target: Target  # accuracy up to which costs are counted
    runs: tuple[RunStatistics, ...]  # one a seed, in the order given: those that finished, or all if none did
    left_out: tuple[
        RunStatistics, ...
    ] = ()  # seeds that did not finish, where others did: they are in no result
    repeated: tuple[str, ...] = ()  # seeds given more than once; only the first run of each counts

    @property
    def variation(self) -> str:
        """The varied settings in words; empty for none."""
        return vary_text(self.vary)

    @property
    def first(self) -> RunRecord:
        """The run of the first seed, for what all seeds share."""
        return self.runs[0].record

    @property
    def measure(self) -> Measure:
        """What its runs are judged by; accuracy if none was evaluated."""
        known = (run.measure for run in self.runs if run.measure and run.results(run.headline, run.measure))
        return with_token_names(next(known, TEST_ACCURACY), [self])

    @property
    def headline(self) -> str | None:
        """Name of the headline series."""
        return next((run.headline for run in self.runs if run.headline is not None), None)

    @property
    def series(self) -> list[str]:
        """Names of all its series, the headline first."""
        names = dict.fromkeys(name for run in self.runs for name in run.series)
        return sorted(names, key=lambda name: name != self.headline)

    @cached_property
    def headline_results(self) -> pd.DataFrame:
        """Statistics of the headline, one row a seed: see :meth:`.run_statistics.RunStatistics.results`."""
        return self.results()

    def results(self, series: str | None = None, measure: Measure | None = None) -> pd.DataFrame:
        """Statistics of a series, else of the headline, one row a seed: see :meth:`.run_statistics.RunStatistics.results`."""
        name, by = self.headline if series is None else series, measure or self.measure
        rows = [results for run in self.runs if (results := run.results(name, by)) is not None]
        return pd.DataFrame(rows, columns=SeriesResults._fields)

    def final(self, series: str | None = None, measure: Measure | None = None) -> Estimate | None:
        """Mean result of a series at the last evaluated round, over seeds."""
        return self._estimate("last", series, measure)

    def best_by_validation(
        self, series: str | None = None, measure: Measure | None = None
    ) -> Estimate | None:
        """Mean result of a series at each run's best round by validation, over seeds; None without validation."""
        return self._estimate("best_by_validation", series, measure)

    def _estimate(self, column: str, series: str | None, measure: Measure | None) -> Estimate | None:
        name, by = self.headline if series is None else series, measure or self.measure
        rows = [(run.has_found_groups, row) for run in self.runs if (row := run.results(name, by))]
        successes_and_values = [
            (success, result) for success, row in rows if math.isfinite(result := getattr(row, column))
        ]
        value = estimate(result for _, result in successes_and_values)
        if value is None:
            return None
        successes, results = zip(*successes_and_values, strict=True)
        seeds = [run.state for run in (*self.runs, *self.left_out)]
        clients = int(sum(row.non_finite for _, row in rows)) if column == "last" else 0
        diverged = []
        if n := seeds.count("diverged"):
            diverged.append(f"{n} of {len(seeds)} seeds")
        if clients:
            diverged.append(f"{clients} client{'s' * (clients > 1)}")
        certain = [success for success in successes if success is not None]
        return value._replace(
            modes=find_modes(results, is_loss=by.is_loss, successes=successes),
            diverged=" and ".join(diverged),
            groups_found=(sum(certain), len(certain)) if certain else None,
        )

    def curve(
        self, series: str | None = None, measure: Measure | None = None, *, unseen: bool = False
    ) -> pd.DataFrame:  # fmt: skip
        """Learning curve of a series over seeds.

        Returns:
            Columns ``mean``, ``ci`` (NaN where results are bimodal), ``bytes`` (sent both ways since the
            start) and ``simulated_seconds`` (since the start; NaN without a simulated clock), indexed by round.
        """
        name, by = self.headline if series is None else series, measure or self.measure
        scores = [run.curve(name, by, who="unseen" if unseen else "counted")["mean"] for run in self.runs]
        curve = self._without_interval(curve_over_seeds(scores), name, by)
        sent = [run.sent for run, score in zip(self.runs, scores, strict=True) if len(score)]
        elapsed = [run.simulated for run, score in zip(self.runs, scores, strict=True) if len(score)]
        return curve.assign(
            bytes=curve_over_seeds(sent)["mean"].reindex(curve.index),
            simulated_seconds=curve_over_seeds(elapsed)["mean"].reindex(curve.index),
        )

    def recovery_curve(self) -> pd.DataFrame:
        """Cluster recovery over training, over seeds; empty if clusters are not known."""
        return self._without_interval(curve_over_seeds(run.recovery for run in self.runs))

    def seed_curves(self, series: str | None = None, measure: Measure | None = None) -> list[pd.Series]:
        """Learning curve of each seed where results are bimodal; empty otherwise."""
        name, by = self.headline if series is None else series, measure or self.measure
        curves = [run.curve(name, by)["mean"] for run in self.runs] if self._is_bimodal(name, by) else []
        return [curve for curve in curves if len(curve)]

    def _is_bimodal(self, series: str | None, measure: Measure | None) -> bool:
        """Whether the final results of a series, or those that the group is judged by, are bimodal."""
        return any(found and found.modes for found in (self.final(), self.final(series, measure)))

    def _without_interval(
        self, curve: pd.DataFrame, series: str | None = None, measure: Measure | None = None
    ) -> pd.DataFrame:
        """The curve, without its interval where results are bimodal: it would describe no seed."""
        return curve.assign(ci=math.nan) if self._is_bimodal(series, measure) else curve

    def final_recovery(self) -> Estimate | None:
        """Cluster recovery at the last round with routes, over seeds."""
        return estimate(run.recovery.iloc[-1] for run in self.runs if len(run.recovery))


def with_token_names(measure: Measure, groups: Sequence[RunGroup]) -> Measure:
    """The measure, or where all groups predict tokens the loss by that name, for they have no accuracy."""
    return TOKEN_LOSS if groups and all(group.first.predicts_tokens for group in groups) else measure


def measure_of(groups: Sequence[RunGroup]) -> Measure:
    """What the groups of one experiment are compared by: loss only where none has an accuracy."""
    has_loss = any(group.final(measure=TEST_LOSS) for group in groups)
    has_accuracy = any(group.final(measure=TEST_ACCURACY) for group in groups)
    return with_token_names(TEST_LOSS if has_loss and not has_accuracy else TEST_ACCURACY, groups)


def group_runs(records: Sequence[RunRecord], target: float | None = None) -> list[RunGroup]:
    """Group runs by experiment, method and settings, so that only the seeds differ within a group.

    All settings count, not only the varied ones: two runs of one method with different learning rates are two
    groups, not two seeds.

    Args:
        records: runs in the order in which their methods appear.
        target: see :func:`.accuracy_target.choose_target`.

    Returns:
        The groups: experiments, then methods and settings, in order of first appearance.

    Raises:
        ConfigError: if the target given is not in (0, 1].
    """
    groups: list[RunGroup] = []
    for experiment in dict.fromkeys(record.experiment for record in records):
        runs = [RunStatistics(record) for record in records if record.experiment == experiment]
        by_settings: dict[str, list[RunStatistics]] = {}
        for run in runs:
            key = json.dumps([run.record.method, run.settings, run.record.vary], sort_keys=True)
            by_settings.setdefault(key, []).append(run)
        chosen = choose_target([_finished(some) for some in by_settings.values()], target)
        groups += _label([_group(experiment, some, chosen) for some in by_settings.values()])
    return groups


def _finished(runs: Sequence[RunStatistics]) -> list[RunStatistics]:
    """The runs that finished; all of them if none did, as where a report is written of runs that go on."""
    return [run for run in runs if run.state == "finished"] or list(runs)


def _group(experiment: str, runs: Sequence[RunStatistics], target: Target) -> RunGroup:
    seeds = [run.record.seed for run in runs]
    # A seed twice is the same run twice: counted as two it would narrow the interval over seeds for nothing.
    by_seed = dict(zip(reversed(seeds), reversed(runs), strict=True))
    repeated = tuple(seed for seed, n in Counter(seeds).items() if n > 1)
    first, distinct = runs[0].record, [by_seed[seed] for seed in dict.fromkeys(seeds)]
    finished, title = _finished(distinct), first.method_title
    left_out = tuple(run for run in distinct if run not in finished)
    return RunGroup(
        experiment, first.method, first.vary, title, title, target, tuple(finished), left_out, repeated
    )


def _label(groups: Sequence[RunGroup]) -> list[RunGroup]:
    """Make labels unique: by the method's name, its code, then the settings that differ, at last by a number."""
    titles = {(group.short, group.method) for group in groups}
    methods = Counter(short for short, _ in titles)
    names = [f"{g.short} ({g.method})" if methods[g.short] > 1 else g.short for g in groups]
    settings = [group.runs[0].settings for group in groups]
    labeled: list[RunGroup] = []
    used: Counter[str] = Counter()
    for name, own, group in zip(names, settings, groups, strict=True):
        alike: dict[str, list[dict[str, str]]] = {}
        for other_name, other, other_group in zip(names, settings, groups, strict=True):
            if other_name == name:
                alike.setdefault(str(other_group.vary), []).append(other)
        keys = {key for some in alike.values() for one in some for key in one}
        differing = sorted(k for k in keys if any(len({one.get(k) for one in s}) > 1 for s in alike.values()))
        code = [key.removeprefix(CODE) for key in differing if key.startswith(CODE)]
        others = [key for key in differing if not key.startswith(CODE)]
        named = _name_code(name, group.method, _code_text(code, own, group.method)) if code else name
        short = ", ".join([named, *(f"{last_part(key)} = {value_text(own.get(key))}" for key in others)])
        label = f"{short} ({group.variation})" if group.vary else short
        used[label] += 1
        label = f"{label} [{used[label]}]" if used[label] > 1 else label
        labeled.append(replace(group, short=short, label=label))
    return labeled


def _code_text(names: Sequence[str], settings: Mapping[str, str], method: str) -> str:
    """The digests of the user's own code, such as ``code 2ac89f8f, code of met:half 1b22c0de``.

    Args:
        names: of the code, ``module:attribute``.
        settings: of a run, from :func:`settings_of`.
        method: the name of its method.
    """
    texts = []
    for name in names:
        of = "" if name == method else f"of {on_one_line(name)} "
        # a description ends with the digest
        words = str(json.loads(settings.get(f"{CODE}{name}", "null")) or "unknown").split()
        texts.append(f"code {of}{on_one_line(words[-1])[:8]}")
    return ", ".join(texts)


def _name_code(name: str, method: str, code: str) -> str:
    """The name of a group with its code, such as ``FedAvg (mine:Own, code 2ac89f8f)``."""
    if name.endswith(f"({method})"):
        return f"{name[:-1]}, {code})"
    return f"{name} ({method}, {code})" if ":" in method and name != method else f"{name} ({code})"
