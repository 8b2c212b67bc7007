"""Runs grouped by experiment, method and settings, so that only the seeds differ within a group."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import pandas as pd

from ..core.errors import ConfigError
from ..simulation.records import RunRecord
from ..simulation.settings import RunSettings
from .formats import one_line
from .frame import section
from .measures import ACCURACY, LOSS, TOKEN_ACCURACY, TOKEN_LOSS, Measure
from .metrics import ROUNDING, Estimate, RunStatistics, curve_over_seeds, estimate

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
        """Statistics of a series, else of the headline, one row a seed: see :meth:`.metrics.RunStatistics.results`."""
        name, by = self.headline if series is None else series, measure or self.measure
        rows = [found for run in self.runs if (found := run.results(name, by)) is not None]
        return pd.DataFrame(rows, columns=RESULTS)

    def final(self, series: str | None = None, measure: Measure | None = None) -> Estimate | None:
        """Mean result of a series at the last evaluated round, over seeds."""
        return estimate(self.results(series, measure)["last"])

    def best_by_validation(
        self, series: str | None = None, measure: Measure | None = None
    ) -> Estimate | None:
        """Mean result of a series at each run's best round by validation, over seeds; None without validation."""
        return estimate(self.results(series, measure)["best_by_validation"])

    def curve(
        self, series: str | None = None, measure: Measure | None = None, *, unseen: bool = False
    ) -> pd.DataFrame:  # fmt: skip
        """Learning curve of a series over seeds.

        Returns:
            Columns ``mean``, ``ci``, ``bytes`` (sent both ways since the start) and ``simulated_seconds`` (since
            the start; NaN without a simulated clock), indexed by round.
        """
        name, by = self.headline if series is None else series, measure or self.measure
        scores = [run.curve(name, by, unseen=unseen)["mean"] for run in self.runs]
        curve = curve_over_seeds(scores)
        sent = [run.sent for run, score in zip(self.runs, scores, strict=True) if len(score)]
        elapsed = [run.simulated for run, score in zip(self.runs, scores, strict=True) if len(score)]
        return curve.assign(
            bytes=curve_over_seeds(sent)["mean"].reindex(curve.index),
            simulated_seconds=curve_over_seeds(elapsed)["mean"].reindex(curve.index),
        )

    def recovery_curve(self) -> pd.DataFrame:
        """Cluster recovery over training, over seeds; empty if clusters are not known."""
        return curve_over_seeds(run.recovery for run in self.runs)

    def final_recovery(self) -> Estimate | None:
        """Cluster recovery at the last round with routes, over seeds."""
        return estimate(run.recovery.iloc[-1] for run in self.runs if len(run.recovery))


RESULTS = [
    "round", "last", "std_clients", "last_weighted", "worst_tenth", "without", "non_finite", "last_ten",
    "best_test", "best_round", "best_by_validation", "unseen", "std_unseen", "honest", "std_honest",
]  # fmt: skip


def predicts_tokens(run: RunRecord) -> bool:
    """Whether the models of a run are language models that predict tokens, and not classes."""
    return bool(section(run.config, "language")) and not run.config.get("classes")


def with_token_names(measure: Measure, groups: Sequence[RunGroup]) -> Measure:
    """The measure under the name that it has where all groups predict tokens."""
    if not groups or not all(predicts_tokens(group.first) for group in groups):
        return measure
    return TOKEN_LOSS if measure.is_loss else TOKEN_ACCURACY


def measure_of(groups: Sequence[RunGroup]) -> Measure:
    """What the groups of one experiment are compared by: loss only where none has an accuracy."""
    has_loss = any(group.final(measure=LOSS) for group in groups)
    has_accuracy = any(group.final(measure=ACCURACY) for group in groups)
    return with_token_names(LOSS if has_loss and not has_accuracy else ACCURACY, groups)


def choose_target(settings: Sequence[Sequence[RunStatistics]], target: float | None = None) -> Target:
    """The target of one experiment: as given, else the runs' own, else one that all or some runs reached.

    A method that sends nothing (Standalone) reaches its best accuracy free of charge. Where there is one, the
    target is the largest whole percent above that accuracy which all seeds of another method reached.

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
    if free:
        plateau = max(_best_mean(run) or 0.0 for run in free)
        others = [some for some in settings if not any(run.sends_nothing for run in some)]
        whole = max(map(_whole_percent, others), default=0)
        reached = f"{method_title(free[0].record)} reaches without communication"
        if whole / 100 <= plateau + ROUNDING:
            return Target(None, f"no method exceeds what {reached}")
        source = "the highest whole percent that all seeds of another method reached, above the "
        return Target(whole / 100, f"{source}{100 * plateau:.1f} % that {reached}")
    whole = _whole_percent(runs)
    if whole > 0:
        return Target(whole / 100, "the highest whole percent that all runs reached")
    return Target(None, "no target")


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
        compared = section(run.config, "experiment").get("compare")
        methods = compared if isinstance(compared, list) else []
        name, seed = method_name(run), section(run.config, "run").get("seed")
        return (
            experiments.index(experiment_name(run)),
            methods.index(name) if name in methods else len(methods),
            seed if isinstance(seed, (int, float)) else math.inf,
        )

    return sorted(runs, key=place)


def experiment_name(run: RunRecord) -> str:
    """Name of the run's experiment."""
    return one_line(run.config.get("name") or run.folder.name)


def method_name(run: RunRecord) -> str:
    """Name of the run's method, as the reference numbers call it."""
    return one_line(section(run.config, "method").get("name") or "unnamed")


def method_title(run: RunRecord) -> str:
    """Title of the run's method, for people."""
    return one_line(section(run.config, "method").get("title") or method_name(run))


def seed_of(run: RunRecord) -> str:
    """The run's seed as text."""
    return one_line(section(run.config, "run").get("seed", "?"))


def settings_of(run: RunRecord) -> dict[str, str]:
    """Everything but the seed that could make two runs differ, as ``section.key`` to JSON text."""
    found: dict[str, str] = {}
    # Settings that a run from before them does not record, so that old and new runs form one group.
    _flatten("run", asdict(RunSettings()), found)
    _flatten("method", section(section(run.config, "method"), "fields"), found)
    for name in SECTIONS:
        _flatten(name, section(run.config, name), found)
    return {key: value for key, value in found.items() if last_part(key) not in _NOT_SETTINGS}


def _flatten(prefix: str, value: object, into: dict[str, str]) -> None:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _flatten(f"{prefix}.{key}", inner, into)
    else:
        into[prefix] = json.dumps(value, sort_keys=True)


def varied_settings(run: RunRecord) -> tuple[tuple[str, Any], ...]:
    """The varied settings of a run; seeds are not settings."""
    vary = section(run.config, "vary")
    return tuple((one_line(key), value) for key, value in vary.items() if last_part(key) not in _NOT_SETTINGS)


def vary_text(vary: Sequence[tuple[str, Any]]) -> str:
    """Varied settings in words, such as ``classes_per_client = 4``; empty for none."""
    return ", ".join(f"{last_part(key)} = {value_text(value)}" for key, value in vary)


def value_text(value: object) -> str:
    """A setting's value as one line: text as it is, anything else as JSON."""
    return one_line(value if isinstance(value, str) else json.dumps(value, sort_keys=True))


def last_part(key: str) -> str:
    """The name of a setting without its section, unless every section may have one of that name."""
    section, _, name = key.rpartition(".")
    return f"{section.rpartition('.')[2]}.{name}" if name == "kind" else name
