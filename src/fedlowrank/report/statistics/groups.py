"""Runs grouped by experiment, method and settings, so that only the seeds differ within a group."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from ...core.errors import ConfigError
from ...core.learning.losses import Loss
from ...results.records import RunRecord
from ...rounds.run_settings import RunSettings
from ..tables.number_formats import on_one_line
from .measures import ACCURACY, LOSS, TOKEN_LOSS, Measure
from .modes import find_modes
from .run_statistics import ROUNDING, Estimate, RunStatistics, curve_over_seeds, estimate

# Sections of ``run.json`` that the methods of an experiment share.
SECTIONS = ("data", "partition", "split", "concept", "augment", "language", "lora", "model", "run")
_NOT_SETTINGS = ("seed", "target")


class Target(NamedTuple):
    """The accuracy up to which costs are counted (None if there is none), and where it comes from."""

    value: float | None
    source: str


@dataclass(frozen=True)
class RunGroup:
    """One method with one setting, over its seeds."""

    experiment: str  # its name
    method: str  # its name
    vary: tuple[tuple[str, Any], ...]  # the varied settings with their values
    short: str  # label without the varied settings, so the same for a method throughout a sweep
    label: str  # with them, unique in the experiment
    target: Target  # accuracy up to which costs are counted
    runs: tuple[RunStatistics, ...]  # one a seed, in the order given
    repeated: tuple[str, ...] = ()  # seeds given more than once; only the first run of each counts

    @property
    def first(self) -> RunRecord:
        """The run of the first seed, for what all seeds share."""
        return self.runs[0].record

    @property
    def measure(self) -> Measure:
        """What its runs are judged by; accuracy if none was evaluated."""
        known = (run.measure for run in self.runs if run.measure and run.results(run.headline, run.measure))
        return with_token_names(next(known, ACCURACY), [self])

    @property
    def headline(self) -> str | None:
        """Name of the headline series."""
        return next((run.headline for run in self.runs if run.headline is not None), None)

    @property
    def series(self) -> list[str]:
        """Names of all its series, the headline first."""
        names = dict.fromkeys(name for run in self.runs for name in run.series)
        return sorted(names, key=lambda name: name != self.headline)

    def results(self, series: str | None = None, measure: Measure | None = None) -> pd.DataFrame:
        """Statistics of a series, else of the headline, one row a seed: see :meth:`.run_statistics.RunStatistics.results`."""
        name, by = self.headline if series is None else series, measure or self.measure
        rows = [found for run in self.runs if (found := run.results(name, by)) is not None]
        return pd.DataFrame(rows, columns=RESULTS)

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
        found = [(run.has_found_groups, known[column]) for run in self.runs
                 if (known := run.results(name, by)) and math.isfinite(known.get(column, math.nan))]  # fmt: skip
        value = estimate(result for _, result in found)
        if value is None:
            return None
        successes, results = zip(*found, strict=True)
        return value._replace(modes=find_modes(results, is_loss=by.is_loss, successes=successes))

    def groups_found(self) -> tuple[int, int] | None:
        """Seeds that found all groups of clients, and seeds of which it is known; None if it is of none."""
        known = [run.has_found_groups for run in self.runs if run.has_found_groups is not None]
        return (sum(known), len(known)) if known else None

    def curve(
        self, series: str | None = None, measure: Measure | None = None, *, unseen: bool = False
    ) -> pd.DataFrame:  # fmt: skip
        """Learning curve of a series over seeds.

        Returns:
            Columns ``mean``, ``ci`` (NaN where results are bimodal), ``bytes`` (sent both ways since the
            start) and ``simulated_seconds`` (since the start; NaN without a simulated clock), indexed by round.
        """
        name, by = self.headline if series is None else series, measure or self.measure
        scores = [run.curve(name, by, who="unseen" if unseen else "trained")["mean"] for run in self.runs]
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


RESULTS = [
    "round", "last", "std_clients", "last_weighted", "worst_tenth", "without", "non_finite", "last_ten",
    "best_test", "best_round", "best_by_validation", "unseen", "std_unseen", "honest", "std_honest",
]  # fmt: skip


def predicts_tokens(run: RunRecord) -> bool:
    """Whether the models of a run are language models that predict tokens, and not classes."""
    compares = Loss((run.config.get("loss") or {}).get("kind", "auto")).compares_texts
    return bool(run.section("language")) and not run.config.get("classes") and not compares


def with_token_names(measure: Measure, groups: Sequence[RunGroup]) -> Measure:
    """The measure, or where all groups predict tokens the loss by that name, for they have no accuracy."""
    return TOKEN_LOSS if groups and all(predicts_tokens(group.first) for group in groups) else measure


def measure_of(groups: Sequence[RunGroup]) -> Measure:
    """What the groups of one experiment are compared by: loss only where none has an accuracy."""
    has_loss = any(group.final(measure=LOSS) for group in groups)
    has_accuracy = any(group.final(measure=ACCURACY) for group in groups)
    return with_token_names(LOSS if has_loss and not has_accuracy else ACCURACY, groups)


def choose_target(settings: Sequence[Sequence[RunStatistics]], target: float | None = None) -> Target:
    """The target of one experiment: as given, else the runs' own, else one that tells methods apart.

    An accuracy that a method reaches without any message (Standalone) costs nothing. Where there is such a
    method, the target is the largest whole percent above its best accuracy that all seeds of another method
    reached. Otherwise it is the largest whole percent that all runs reached or, if that says nothing, that all
    seeds of one method reached. A target says nothing if it does not exceed the chance level
    (:func:`chance_level`) or if every run reached it by its first evaluated round.

    Args:
        settings: runs of each method and setting, one a seed.
        target: accuracy in (0, 1], or None.

    Raises:
        ConfigError: if the target given is not in (0, 1].
    """
    if target is not None and not 0 < target <= 1:
        raise ConfigError(f"the target accuracy is a fraction in (0, 1], not {target:g}")
    runs = [run for some in settings for run in some]
    measures = {run.measure for run in runs}
    if LOSS in measures and ACCURACY not in measures:
        return Target(None, "no target: these runs have no accuracy")
    if target is not None:
        return Target(target, "as asked for")
    own = {run.own_target for run in runs}
    if len(own) == 1 and None not in own:
        return Target(own.pop(), "the target in the configuration of the runs")
    free = [run for run in runs if run.sends_nothing and _best_mean(run) is not None]
    others = [some for some in settings if not any(run.sends_nothing for run in some)]
    best = max(map(_whole_percent, others), default=0)
    if free:
        plateau = max(_best_mean(run) or 0.0 for run in free)
        reached = f"{method_title(free[0].record)} reaches without communication"
        if best / 100 <= plateau + ROUNDING:
            return Target(None, f"no method exceeds what {reached}")
        source = "the highest whole percent that all seeds of another method reached, above the "
        choices = [(best, f"{source}{100 * plateau:.1f} % that {reached}")]
    else:
        choices = [
            (_whole_percent(runs), "the highest whole percent that all runs reached"),
            (best, "the highest whole percent that all seeds of one method reached"),
        ]
    chance, why = max((chance_level(run.record) for run in runs), default=0.0), "no target"
    for whole, source in choices:
        if whole / 100 <= chance + ROUNDING:
            why = f"no method exceeds the {100 * chance:.1f} % of a constant answer" if chance else why
        elif all(_reaches_at_once(run, whole / 100) for run in runs):
            why = "all runs reach what they have in common by their first evaluation"
        else:
            return Target(whole / 100, source)
    return Target(None, why)


def chance_level(run: RunRecord) -> float:
    """The mean accuracy over clients of an answer that needs no input; 0 if classes are not known.

    It is the larger of a uniform guess, 1 / classes, and of the one class that is right most often.
    """
    if predicts_tokens(run) or not run.config.get("classes"):
        return 0.0
    guess, unseen = 1 / len(run.config["classes"]), run.measurements.flagged("unseen")
    rows = [(row.get("classes") or {}).get("test") for row in run.clients if row.get("id") not in unseen]
    shares = [np.array(counts) / sum(counts) for counts in rows if counts and sum(counts)]
    if len({len(one) for one in shares}) != 1:
        return guess
    return max(guess, float(np.mean(shares, axis=0).max()))


def _reaches_at_once(run: RunStatistics, target: float) -> bool:
    """Whether a run has the target by its first evaluation after training; so has one without evaluations."""
    means = run.curve(run.headline, ACCURACY)["mean"]
    first = means[means.index <= next((at for at in means.index if at > 0), 0)]
    return means.empty or bool((first >= target - ROUNDING).any())


def _best_mean(run: RunStatistics) -> float | None:
    """The largest mean accuracy over rounds; None if the run was never evaluated."""
    means = run.curve(run.headline, ACCURACY)["mean"]
    return float(means.max()) if len(means) else None


def _whole_percent(runs: Sequence[RunStatistics]) -> int:
    """The highest whole percent that all evaluated runs reached; 0 if there is none."""
    known = [best for run in runs if (best := _best_mean(run)) is not None]
    return math.floor(100 * min(known, default=0) + 1e-9)


def group_runs(records: Sequence[RunRecord], target: float | None = None) -> list[RunGroup]:
    """Group runs by experiment, method and settings, so that only the seeds differ within a group.

    All settings count, not only the varied ones: two runs of one method with different learning rates are two
    groups, not two seeds.

    Args:
        records: runs in the order in which their methods appear.
        target: see :func:`choose_target`.

    Returns:
        The groups: experiments, then methods and settings, in order of first appearance.

    Raises:
        ConfigError: if the target given is not in (0, 1].
    """
    found: list[RunGroup] = []
    for experiment in dict.fromkeys(map(experiment_name, records)):
        runs = [RunStatistics(record) for record in records if experiment_name(record) == experiment]
        by_settings: dict[str, list[RunStatistics]] = {}
        for run in runs:
            record = run.record
            settings = [method_name(record), settings_of(record), varied_settings(record)]
            key = json.dumps(settings, sort_keys=True)
            by_settings.setdefault(key, []).append(run)
        chosen = choose_target(list(by_settings.values()), target)
        found += _label([_group(experiment, some, chosen) for some in by_settings.values()])
    return found


def _group(experiment: str, runs: Sequence[RunStatistics], target: Target) -> RunGroup:
    seeds = [seed_of(run.record) for run in runs]
    # A seed twice is the same run twice: counted as two it would narrow the interval over seeds for nothing.
    by_seed = dict(zip(reversed(seeds), reversed(runs), strict=True))
    repeated = tuple(seed for seed, n in Counter(seeds).items() if n > 1)
    first, method = runs[0].record, method_name(runs[0].record)
    title = method_title(first)
    kept = tuple(by_seed[seed] for seed in dict.fromkeys(seeds))
    return RunGroup(experiment, method, varied_settings(first), title, title, target, kept, repeated)


def _label(groups: Sequence[RunGroup]) -> list[RunGroup]:
    """Make labels unique: by the method's name, then by the settings that differ, at last by a number."""
    titles = {(group.short, group.method) for group in groups}
    methods = Counter(short for short, _ in titles)
    names = [f"{g.short} ({g.method})" if methods[g.short] > 1 else g.short for g in groups]
    settings = [settings_of(group.first) for group in groups]
    found: list[RunGroup] = []
    used: Counter[str] = Counter()
    for name, own, group in zip(names, settings, groups, strict=True):
        alike: dict[str, list[dict[str, str]]] = {}
        for other_name, other, other_group in zip(names, settings, groups, strict=True):
            if other_name == name:
                alike.setdefault(str(other_group.vary), []).append(other)
        keys = {key for some in alike.values() for one in some for key in one}
        differing = sorted(k for k in keys if any(len({one.get(k) for one in s}) > 1 for s in alike.values()))
        short = ", ".join([name, *(f"{last_part(key)} = {value_text(own.get(key))}" for key in differing)])
        label = f"{short} ({vary_text(group.vary)})" if group.vary else short
        used[label] += 1
        label = f"{label} [{used[label]}]" if used[label] > 1 else label
        found.append(replace(group, short=short, label=label))
    return found


def by_variation(groups: Sequence[RunGroup]) -> dict[str, list[RunGroup]]:
    """The groups by what is varied, in words."""
    texts = [vary_text(group.vary) for group in groups]
    return {text: [group for group in groups if vary_text(group.vary) == text] for text in texts}


def by_experiment(groups: Sequence[RunGroup]) -> dict[str, list[RunGroup]]:
    """The groups by the name of their experiment."""
    return {name: [g for g in groups if g.experiment == name] for name in (g.experiment for g in groups)}


def in_order(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Runs in the order in which their experiment compares the methods, each method's by seed.

    Runs of different experiments, and equal ones, keep the order given.
    """
    experiments = list(dict.fromkeys(map(experiment_name, runs)))

    def place(run: RunRecord) -> tuple[int, int, float]:
        compared = run.section("experiment").get("compare")
        methods = compared if isinstance(compared, list) else []
        name, seed = method_name(run), run.section("run").get("seed")
        return (
            experiments.index(experiment_name(run)),
            methods.index(name) if name in methods else len(methods),
            seed if isinstance(seed, (int, float)) else math.inf,
        )

    return sorted(runs, key=place)


def experiment_name(run: RunRecord) -> str:
    """Name of the run's experiment."""
    return on_one_line(run.config.get("name") or run.folder.name)


def method_name(run: RunRecord) -> str:
    """Name of the run's method, as the reference numbers call it."""
    return on_one_line(run.section("method").get("name") or "unnamed")


def method_title(run: RunRecord) -> str:
    """Title of the run's method, for people."""
    return on_one_line(run.section("method").get("title") or method_name(run))


def seed_of(run: RunRecord) -> str:
    """The run's seed as text."""
    return on_one_line(run.section("run").get("seed", "?"))


def settings_of(run: RunRecord) -> dict[str, str]:
    """Everything but the seed that could make two runs differ, as ``section.key`` to JSON text."""
    found: dict[str, str] = {}
    # Settings that a run from before them does not record, so that old and new runs form one group.
    _flatten("run", asdict(RunSettings()), found)
    _flatten("method", run.section("method", "fields"), found)
    for name in SECTIONS:
        _flatten(name, run.section(name), found)
    return {key: value for key, value in found.items() if last_part(key) not in _NOT_SETTINGS}


def _flatten(prefix: str, value: object, into: dict[str, str]) -> None:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _flatten(f"{prefix}.{key}", inner, into)
    else:
        into[prefix] = json.dumps(value, sort_keys=True)


def varied_settings(run: RunRecord) -> tuple[tuple[str, Any], ...]:
    """The varied settings of a run; seeds are not settings."""
    vary = run.section("vary")
    return tuple(
        (on_one_line(key), value) for key, value in vary.items() if last_part(key) not in _NOT_SETTINGS
    )


def vary_text(vary: Sequence[tuple[str, Any]]) -> str:
    """Varied settings in words, such as ``classes_per_client = 4``; empty for none."""
    return ", ".join(f"{last_part(key)} = {value_text(value)}" for key, value in vary)


def value_text(value: object) -> str:
    """A setting's value as one line: text as it is, anything else as JSON."""
    return on_one_line(value if isinstance(value, str) else json.dumps(value, sort_keys=True))


def last_part(key: str) -> str:
    """The name of a setting without its section, unless every section may have one of that name."""
    section, _, name = key.rpartition(".")
    return f"{section.rpartition('.')[2]}.{name}" if name == "kind" else name
