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

from ...core.io.text import format_count, on_one_line
from ...results.records import RunRecord
from ...results.varied_settings import last_part
from .accuracy_target import Target, choose_target
from .measures import TEST_ACCURACY, TEST_LOSS, TOKEN_LOSS, Measure
from .modes import find_modes
from .run_statistics import Estimate, RunStatistics, SeriesResults, curve_over_seeds, estimate
from .setting_names import CODE, value_text, vary_text


@dataclass(frozen=True)
class RunGroup:
    """One method with one setting, over its seeds."""

    experiment: str  # name of the experiment
    method: str  # name of the method
    vary: tuple[tuple[str, Any], ...]  # varied settings with their values
    short_label: str  # label without the varied settings, the same for a method throughout a sweep
    label: str  # label with the varied settings, unique in the experiment
    target: Target  # accuracy up to which costs are counted
    runs: tuple[RunStatistics, ...]  # one per seed: finished ones, or else in progress, or else diverged
    unfinished_runs: tuple[
        RunStatistics, ...
    ] = ()  # seeds that did not finish, or diverged, although others did not; they are in no result
    repeated_seeds: tuple[str, ...] = ()  # seeds that occur more than once; only the first run of each counts

    @property
    def variation(self) -> str:
        """Varied settings in words, the same for every method of a comparison; empty for none."""
        return vary_text(self.vary)

    @property
    def has_diverged(self) -> bool:
        """Whether every seed diverged, so that all results are of rounds before that."""
        return all(run.state == "diverged" for run in (*self.runs, *self.unfinished_runs))

    @property
    def first(self) -> RunRecord:
        """Run of the first seed, for values that all seeds share."""
        return self.runs[0].record

    @property
    def measure(self) -> Measure:
        """Measure that the runs are judged by; accuracy if none was evaluated."""
        measures = (
            run.measure for run in self.runs if run.measure and run.results(run.headline, run.measure)
        )
        return with_token_names(next(measures, TEST_ACCURACY), [self])

    @property
    def headline(self) -> str | None:
        """Name of the headline series."""
        return next((run.headline for run in self.runs if run.headline is not None), None)

    @property
    def series(self) -> list[str]:
        """Names of all series, the headline first."""
        names = dict.fromkeys(name for run in self.runs for name in run.series)
        return sorted(names, key=lambda name: name != self.headline)

    def _select(self, series: str | None, measure: Measure | None) -> tuple[str | None, Measure]:
        """Fill in the headline series and the measure of the group."""
        return self.headline if series is None else series, measure or self.measure

    @cached_property
    def headline_results(self) -> pd.DataFrame:
        """Statistics of the headline, one row per seed: see :meth:`.run_statistics.RunStatistics.results`."""
        return self.results()

    def results(self, series: str | None = None, measure: Measure | None = None) -> pd.DataFrame:
        """Statistics of a series or the headline, one row per seed: see :meth:`.run_statistics.RunStatistics.results`."""
        name, criterion = self._select(series, measure)
        rows = [results for run in self.runs if (results := run.results(name, criterion)) is not None]
        return pd.DataFrame(rows, columns=SeriesResults._fields)

    def final(self, series: str | None = None, measure: Measure | None = None) -> Estimate | None:
        """Estimate the result of a series at the last evaluated round, over seeds."""
        return self._estimate("last", series, measure)

    def best_by_validation(
        self, series: str | None = None, measure: Measure | None = None
    ) -> Estimate | None:
        """Estimate the result of a series at each run's best round by validation, over seeds; None without validation."""
        return self._estimate("best_by_validation", series, measure)

    def _estimate(self, column: str, series: str | None, measure: Measure | None) -> Estimate | None:
        name, criterion = self._select(series, measure)
        rows = [(run.has_found_groups, row) for run in self.runs if (row := run.results(name, criterion))]
        successes_and_values = [
            (success, result) for success, row in rows if math.isfinite(result := getattr(row, column))
        ]
        value = estimate(result for _, result in successes_and_values)
        if value is None:
            return None
        successes, results = zip(*successes_and_values, strict=True)
        states = [run.state for run in (*self.runs, *self.unfinished_runs)]
        client_count = int(sum(row.diverged for _, row in rows)) if column == "last" else 0
        diverged_texts = []
        if n := states.count("diverged"):
            diverged_texts.append(f"{n} of {len(states)} seeds")
        if client_count:
            diverged_texts.append(format_count(client_count, "client"))
        known_successes = [success for success in successes if success is not None]
        return value._replace(
            modes=find_modes(results, is_loss=criterion.is_loss, successes=successes),
            diverged=" and ".join(diverged_texts),
            groups_found=(sum(known_successes), len(known_successes)) if known_successes else None,
        )

    def curve(
        self, series: str | None = None, measure: Measure | None = None, *, unseen: bool = False
    ) -> pd.DataFrame:  # fmt: skip
        """Compute the learning curve of a series over seeds.

        Returns:
            Columns ``mean``, ``ci`` (NaN if results are bimodal), ``bytes`` (sent both ways since the start) and
            ``simulated_seconds`` (since the start; NaN without a simulated clock), indexed by round.
        """
        name, criterion = self._select(series, measure)
        score_curves = [
            run.curve(name, criterion, group="unseen" if unseen else "counted")["mean"] for run in self.runs
        ]
        curve = self._without_interval(curve_over_seeds(score_curves), name, criterion)
        byte_curves = [run.sent for run, score in zip(self.runs, score_curves, strict=True) if len(score)]
        time_curves = [
            run.simulated for run, score in zip(self.runs, score_curves, strict=True) if len(score)
        ]
        return curve.assign(
            bytes=curve_over_seeds(byte_curves)["mean"].reindex(curve.index),
            simulated_seconds=curve_over_seeds(time_curves)["mean"].reindex(curve.index),
        )

    def recovery_curve(self) -> pd.DataFrame:
        """Compute cluster recovery by round, over seeds; empty if clusters are not known."""
        return self._without_interval(curve_over_seeds(run.recovery for run in self.runs))

    def seed_curves(self, series: str | None = None, measure: Measure | None = None) -> list[pd.Series]:
        """Compute the learning curve of each seed if results are bimodal; empty otherwise."""
        name, criterion = self._select(series, measure)
        curves = (
            [run.curve(name, criterion)["mean"] for run in self.runs]
            if self._is_bimodal(name, criterion)
            else []
        )
        return [curve for curve in curves if len(curve)]

    def _is_bimodal(self, series: str | None, measure: Measure | None) -> bool:
        """Whether the final results of a series, or those that the group is judged by, are bimodal."""
        return any(result and result.modes for result in (self.final(), self.final(series, measure)))

    def _without_interval(
        self, curve: pd.DataFrame, series: str | None = None, measure: Measure | None = None
    ) -> pd.DataFrame:
        """Remove the interval from a curve if results are bimodal, because it would describe no seed."""
        return curve.assign(ci=math.nan) if self._is_bimodal(series, measure) else curve

    def final_recovery(self) -> Estimate | None:
        """Estimate cluster recovery at the last round with routes, over seeds."""
        return estimate(run.recovery.iloc[-1] for run in self.runs if len(run.recovery))


def with_token_names(measure: Measure, groups: Sequence[RunGroup]) -> Measure:
    """Rename the loss if all groups predict tokens, because they have no accuracy; otherwise keep the measure."""
    return TOKEN_LOSS if groups and all(group.first.predicts_tokens for group in groups) else measure


def measure_of(groups: Sequence[RunGroup]) -> Measure:
    """Choose the measure that the groups of one experiment are compared by: loss only if none has an accuracy."""
    has_loss = any(group.final(measure=TEST_LOSS) for group in groups)
    has_accuracy = any(group.final(measure=TEST_ACCURACY) for group in groups)
    return with_token_names(TEST_LOSS if has_loss and not has_accuracy else TEST_ACCURACY, groups)


def group_runs(records: Sequence[RunRecord], target: float | None = None) -> list[RunGroup]:
    """Group runs by experiment, method and settings, so that only the seeds differ within a group.

    All settings count and not only the varied ones: two runs of one method with different learning rates are two
    groups and not two seeds.

    Args:
        records: records of the runs, in the order in which their methods appear.
        target: accuracy in (0, 1], or None for a default; see :func:`.accuracy_target.choose_target`.

    Returns:
        The groups: experiments, then methods and settings, in order of first appearance.

    Raises:
        ConfigError: if the given target is not in (0, 1].
    """
    groups: list[RunGroup] = []
    for experiment in dict.fromkeys(record.experiment for record in records):
        runs = [RunStatistics(record) for record in records if record.experiment == experiment]
        runs_by_settings: dict[str, list[RunStatistics]] = {}
        for run in runs:
            key = json.dumps([run.record.method, run.settings, run.record.vary], sort_keys=True)
            runs_by_settings.setdefault(key, []).append(run)
        group_target = choose_target(
            [_finished_or_diverged(setting_runs) for setting_runs in runs_by_settings.values()], target
        )
        groups += _label(
            [_group(experiment, setting_runs, group_target) for setting_runs in runs_by_settings.values()]
        )
    return groups


def _finished(runs: Sequence[RunStatistics]) -> list[RunStatistics]:
    """Select the runs that finished, or else those in progress, or all if every run diverged."""
    finished_runs = [run for run in runs if run.state == "finished"]
    return finished_runs or [run for run in runs if run.state != "diverged"] or list(runs)


def _finished_or_diverged(runs: Sequence[RunStatistics]) -> list[RunStatistics]:
    finished_runs = _finished(runs)
    return [run for run in runs if run.state == "diverged" or run in finished_runs]


def _group(experiment: str, runs: Sequence[RunStatistics], target: Target) -> RunGroup:
    seeds = [run.record.seed for run in runs]
    # A repeated seed is the same run twice; counted as two it would narrow the interval over seeds.
    run_by_seed = dict(zip(reversed(seeds), reversed(runs), strict=True))
    repeated_seeds = tuple(seed for seed, n in Counter(seeds).items() if n > 1)
    first_record, distinct_runs = runs[0].record, [run_by_seed[seed] for seed in dict.fromkeys(seeds)]
    finished_runs, title = _finished(distinct_runs), first_record.method_title
    unfinished_runs = tuple(run for run in distinct_runs if run not in finished_runs)
    return RunGroup(
        experiment,
        first_record.method,
        first_record.vary,
        title,
        title,
        target,
        tuple(finished_runs),
        unfinished_runs,
        repeated_seeds,
    )


def _label(groups: Sequence[RunGroup]) -> list[RunGroup]:
    """Make labels unique: by the method's name, its code, then the settings that differ, and finally by a number."""
    titles = {(group.short_label, group.method) for group in groups}
    method_counts = Counter(short_label for short_label, _ in titles)
    names = [
        f"{g.short_label} ({g.method})" if method_counts[g.short_label] > 1 else g.short_label for g in groups
    ]
    settings = [group.runs[0].settings for group in groups]
    labeled_groups: list[RunGroup] = []
    label_counts: Counter[str] = Counter()
    for name, own_settings, group in zip(names, settings, groups, strict=True):
        settings_by_variation: dict[str, list[dict[str, str]]] = {}
        for other_name, other_settings, other_group in zip(names, settings, groups, strict=True):
            if other_name == name:
                settings_by_variation.setdefault(str(other_group.vary), []).append(other_settings)
        keys = {
            key
            for same_settings in settings_by_variation.values()
            for seed_settings in same_settings
            for key in seed_settings
        }
        differing_keys = sorted(
            k
            for k in keys
            if any(
                len({seed_settings.get(k) for seed_settings in s}) > 1 for s in settings_by_variation.values()
            )
        )
        code_names = [key.removeprefix(CODE) for key in differing_keys if key.startswith(CODE)]
        other_keys = [key for key in differing_keys if not key.startswith(CODE)]
        code_label = (
            _name_code(name, group.method, _code_text(code_names, own_settings, group.method))
            if code_names
            else name
        )
        short_label = ", ".join(
            [code_label, *(f"{last_part(key)} = {value_text(own_settings.get(key))}" for key in other_keys)]
        )
        label = f"{short_label} ({vary_text(group.vary, group.method)})" if group.vary else short_label
        label_counts[label] += 1
        label = f"{label} [{label_counts[label]}]" if label_counts[label] > 1 else label
        labeled_groups.append(replace(group, short_label=short_label, label=label))
    return labeled_groups


def _code_text(names: Sequence[str], settings: Mapping[str, str], method: str) -> str:
    """Describe the digests of the user's own code, such as ``code 2ac89f8f, code of met:half 1b22c0de``.

    Args:
        names: names of the code, ``module:attribute``.
        settings: settings of a run, from :func:`.setting_names.settings_of`.
        method: name of the run's method.
    """
    texts = []
    for name in names:
        owner_text = "" if name == method else f"of {on_one_line(name)} "
        # a description ends with the digest
        words = str(json.loads(settings.get(f"{CODE}{name}", "null")) or "unknown").split()
        texts.append(f"code {owner_text}{on_one_line(words[-1])[:8]}")
    return ", ".join(texts)


def _name_code(name: str, method: str, code: str) -> str:
    """Name a group with its code, such as ``FedAvg (mine:Own, code 2ac89f8f)``."""
    if name.endswith(f"({method})"):
        return f"{name[:-1]}, {code})"
    return f"{name} ({method}, {code})" if ":" in method and name != method else f"{name} ({code})"
