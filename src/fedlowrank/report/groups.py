"""Runs that differ in nothing but their seed, taken together."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy import stats

from ..core.errors import ConfigError
from ..simulation.records import RunRecord
from .measure import ACCURACY, LOSS, MEASURES, Measure, judged
from .summary import RunSummary, Score, highest_all_reached, part, run_target, summarize
from .units import plain

CONFIDENCE = 0.95
PARTS = ("data", "partition", "split", "concept", "augment", "language", "lora", "model", "run")
"""Parts of ``run.json`` that the methods of an experiment share."""

_NOT_SETTINGS = ("seed", "target")

_BEFORE = {"run.unseen": "0.0"}
"""What runs did that were recorded before a setting existed; so old and new runs are of one setting."""


@dataclass(frozen=True)
class Spread:
    """A number over seeds.

    Attributes:
        n: seeds that have the number.
        mean: their mean.
        std: standard deviation with n - 1 in the denominator; None for one seed.
        ci: half-width of the 95 % confidence interval of the mean, from Student's t with n - 1 degrees of freedom; None
            for one seed.
    """

    n: int
    mean: float
    std: float | None
    ci: float | None


@dataclass(frozen=True)
class Target:
    """The accuracy that the costs "to target" are counted up to.

    Attributes:
        value: fraction, or None if there is none.
        source: where it comes from, in words.
    """

    value: float | None
    source: str


@dataclass(frozen=True)
class Group:
    """One method with one setting, over its seeds.

    Attributes:
        name: name of the experiment.
        method: name of the method.
        vary: the varied settings with their values, in order.
        short: label without the varied settings; the same method has the same one throughout a sweep.
        label: label with them, unique in the experiment.
        target: what "to target" means here.
        runs: one summary a seed, in the order given.
        repeated: seeds given more than once; only the first run of each is in ``runs``.
    """

    name: str
    method: str
    vary: tuple[tuple[str, Any], ...]
    short: str
    label: str
    target: Target
    runs: tuple[RunSummary, ...]
    repeated: tuple[str, ...] = ()

    @property
    def first(self) -> RunRecord:
        """The run of the first seed, for what all seeds share."""
        return self.runs[0].run

    @property
    def measure(self) -> Measure:
        """What its runs are judged by; accuracy if none was evaluated."""
        known = (one.measure for one in self.runs if one.main is not None and one.main.last is not None)
        return worded(next(known, ACCURACY), [self])

    @property
    def headline(self) -> str | None:
        """Name of the headline series."""
        return next((one.headline for one in self.runs if one.headline is not None), None)

    @property
    def series(self) -> list[str]:
        """Names of all its series, the headline first."""
        names = dict.fromkeys(name for one in self.runs for name in one.series)
        return sorted(names, key=lambda name: name != self.headline)

    def last_of(self, series: str | None, measure: Measure | None = None) -> list[Score]:
        """Test scores of a series at the last evaluated round, one a seed that has one.

        Args:
            series: its name.
            measure: accuracy or loss; None for what the group is judged by.
        """
        found = [one.by(measure or self.measure).get(series or "") for one in self.runs]
        return [one.last for one in found if one is not None and one.last is not None]

    @property
    def last(self) -> list[Score]:
        """Headline test scores at the last evaluated round, one a seed that has one, in what the group is judged by."""
        return self.last_of(self.headline)

    def final(self, measure: Measure | None = None) -> Spread | None:
        """Headline test accuracy or loss at the last evaluated round, over seeds; None for what it is judged by."""
        return spread(one.mean for one in self.last_of(self.headline, measure))

    def unseen(self, measure: Measure | None = None) -> list[Score]:
        """The same of the clients that never train, one a seed that has such."""
        found = [one.by(measure or self.measure).get(self.headline or "") for one in self.runs]
        return [one.unseen for one in found if one is not None and one.unseen is not None]

    @property
    def accuracy(self) -> Spread | None:
        """Headline test accuracy at the last evaluated round, over seeds."""
        return self.final(ACCURACY)


def spread(values: Iterable[float | None]) -> Spread | None:
    """Mean, standard deviation and interval of a number over seeds; seeds without it are left out.

    Returns:
        The statistics, or None if no seed has the number.
    """
    x = np.array([v for v in values if v is not None and math.isfinite(v)], dtype=np.float64)
    if len(x) == 0:
        return None
    if len(x) == 1:
        return Spread(1, float(x[0]), None, None)
    std = float(x.std(ddof=1))
    return Spread(len(x), float(x.mean()), std, half_width(std, len(x)))


def half_width(std: float, n: int) -> float:
    """Half-width of the 95 % interval of a mean of ``n`` values from their standard deviation."""
    return float(stats.t.ppf(0.5 + CONFIDENCE / 2, n - 1)) * std / math.sqrt(n)


def measure_of(groups: Sequence[Group]) -> Measure:
    """What the groups of one experiment are compared by: loss only where none has an accuracy."""
    losses = any(group.final(LOSS) is not None for group in groups)
    return worded(LOSS if losses and all(group.final(ACCURACY) is None for group in groups) else ACCURACY, groups)


@dataclass(frozen=True, eq=False)
class _PerToken(Measure):
    """What a measure is called where models predict tokens: other words for the same numbers, so equal to it."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Measure) and other.field == self.field

    def __hash__(self) -> int:
        return hash(next(one for one in MEASURES if one.field == self.field))


TOKEN_ACCURACY = _PerToken("accuracy", "next-token accuracy", "Next-token accuracy", "%", 100.0, higher=True)
TOKEN_LOSS = _PerToken("risk", "loss per token", "Loss per token", "", 1.0, higher=False)


def predicts_tokens(run: RunRecord) -> bool:
    """Whether the models of a run are language models that predict tokens, and not classes."""
    return bool(part(run.config, "language")) and not run.config.get("classes")


def worded(measure: Measure, groups: Sequence[Group]) -> Measure:
    """A measure under the name that it has for these groups: another one if all of them predict tokens."""
    if not groups or not all(predicts_tokens(group.first) for group in groups):
        return measure
    return TOKEN_ACCURACY if measure == ACCURACY else TOKEN_LOSS


def choose_target(runs: Sequence[RunRecord], target: float | None = None) -> Target:
    """The target of a set of runs: as given, else the runs' own, else the highest that all reached.

    Args:
        runs: runs of one experiment.
        target: accuracy in (0, 1], or None.

    Raises:
        ConfigError: if the target given is not in (0, 1].
    """
    if target is not None and not 0 < target <= 1:
        raise ConfigError(f"the target accuracy is a fraction in (0, 1], not {target:g}")
    kinds = {judged(run) for run in runs}
    if LOSS in kinds and ACCURACY not in kinds:
        return Target(None, "no target: these runs have no accuracy")
    if target is not None:
        return Target(target, "as asked for")
    own = {run_target(run) for run in runs}
    if len(own) == 1 and None not in own:
        return Target(own.pop(), "the target in the configuration of the runs")
    value = highest_all_reached(runs)
    return Target(value, "the highest whole percent that all runs reached" if value is not None else "no target")


def aggregate(runs: Sequence[RunRecord], target: float | None = None) -> list[Group]:
    """Group runs by experiment, method and settings, so that only the seeds differ within a group.

    Settings other than the varied ones count too: two runs of one method with different learning rates are two groups,
    not two seeds.

    Args:
        runs: runs in the order in which their methods shall appear.
        target: see :func:`choose_target`.

    Returns:
        The groups: experiments in order of first appearance, then methods and settings in order of first appearance.

    Raises:
        ConfigError: if the target given is not in (0, 1].
    """
    found: list[Group] = []
    for name in dict.fromkeys(experiment(run) for run in runs):
        members = [run for run in runs if experiment(run) == name]
        aim = choose_target(members, target)
        buckets: dict[str, list[RunRecord]] = {}
        for run in members:
            buckets.setdefault(json.dumps([method_name(run), settings(run), varied(run)], sort_keys=True), []).append(
                run
            )
        found += _labeled([_group(name, bucket, aim) for bucket in buckets.values()])
    return found


def in_order(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Runs in the order in which their experiment compares the methods, each method's by seed.

    Runs of different experiments, and whatever else is level, keep the order given.
    """
    experiments = list(dict.fromkeys(map(experiment, runs)))

    def place(run: RunRecord) -> tuple[int, int, float]:
        compared, number = part(run.config, "experiment").get("compare"), part(run.config, "run").get("seed")
        known = compared if isinstance(compared, list) else []
        name = method_name(run)
        return (
            experiments.index(experiment(run)),
            known.index(name) if name in known else len(known),
            number if isinstance(number, (int, float)) else math.inf,
        )

    return sorted(runs, key=place)


def experiment(run: RunRecord) -> str:
    """Name of the run's experiment."""
    return plain(run.config.get("name") or run.folder.name)


def method_name(run: RunRecord) -> str:
    """Name of the run's method, as the reference numbers call it."""
    return plain(part(run.config, "method").get("name") or "unnamed")


def seed(run: RunRecord) -> str:
    """The run's seed as text."""
    return plain(part(run.config, "run").get("seed", "?"))


def settings(run: RunRecord) -> dict[str, str]:
    """Everything but the seed that could make two runs differ, as ``part.key`` to JSON text."""
    found: dict[str, str] = dict(_BEFORE)
    _flatten("method", part(part(run.config, "method"), "fields"), found)
    for name in PARTS:
        _flatten(name, part(run.config, name), found)
    return {key: value for key, value in found.items() if key.rpartition(".")[2] not in _NOT_SETTINGS}


def varied(run: RunRecord) -> tuple[tuple[str, Any], ...]:
    """The varied settings of a run; seeds are not settings."""
    vary = part(run.config, "vary")
    return tuple((plain(key), value) for key, value in vary.items() if key.rpartition(".")[2] not in _NOT_SETTINGS)


def vary_text(vary: Sequence[tuple[str, Any]]) -> str:
    """Varied settings in words, such as ``classes_per_client = 4``; empty for none."""
    return ", ".join(f"{key.rpartition('.')[2]} = {value_text(value)}" for key, value in vary)


def value_text(value: object) -> str:
    """A setting's value as one line: text as it is, anything else as JSON."""
    return plain(value if isinstance(value, str) else json.dumps(value))


def _flatten(prefix: str, value: object, into: dict[str, str]) -> None:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _flatten(f"{prefix}.{key}", inner, into)
    else:
        into[prefix] = json.dumps(value, sort_keys=True)


def _group(name: str, runs: Sequence[RunRecord], target: Target) -> Group:
    by_seed: dict[str, RunRecord] = {}
    repeated = []
    for run in runs:
        # A seed twice is the same run twice: counted as two it would narrow the interval over seeds for nothing.
        if seed(run) in by_seed:
            repeated.append(seed(run))
        by_seed.setdefault(seed(run), run)
    first = runs[0]
    title = plain(part(first.config, "method").get("title") or method_name(first))
    return Group(
        name=name,
        method=method_name(first),
        vary=varied(first),
        short=title,
        label=title,
        target=target,
        runs=tuple(summarize(run, target.value) for run in by_seed.values()),
        repeated=tuple(dict.fromkeys(repeated)),
    )


def _labeled(groups: Sequence[Group]) -> list[Group]:
    """Make labels unique: by the method's name, then by the settings that differ, at last by a number."""
    names = {group.short: {other.method for other in groups if other.short == group.short} for group in groups}
    named = [
        replace(group, short=f"{group.short} ({group.method})") if len(names[group.short]) > 1 else group
        for group in groups
    ]
    differing: dict[str, set[str]] = {}
    for group in named:
        for other in named:
            if other.short == group.short and other.vary == group.vary:
                a, b = settings(group.first), settings(other.first)
                keys = {key for key in a.keys() | b.keys() if a.get(key) != b.get(key)}
                differing.setdefault(group.short, set()).update(keys)
    found: list[Group] = []
    for group in named:
        own = settings(group.first)
        extra = [f"{k.rpartition('.')[2]} = {value_text(own.get(k))}" for k in sorted(differing[group.short])]
        short = f"{group.short}, {', '.join(extra)}" if extra else group.short
        label = f"{short} ({vary_text(group.vary)})" if group.vary else short
        same = sum(other.label.partition(" [")[0] == label for other in found)
        label = f"{label} [{same + 1}]" if same else label
        found.append(replace(group, short=short, label=label))
    return found
