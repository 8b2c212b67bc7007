"""A grid search: the runs that it needs, the setting that it chooses, and the experiment with the chosen settings."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..core.errors import CheckpointError, ConfigError
from ..results.client_numbers import ACCURACY, LOSS
from ..results.measurements import mean_over_clients
from ..results.ranking import find_best
from ..results.records import RoundRecord, RunRecord, describe_missing
from .comparison import PlannedRun, label_values
from .experiment import ExperimentConfig, MethodSettings
from .reading.merging import join_fields, merge_tables
from .reading.parsing import print_fields
from .sections.tune_section import TuneSettings

TUNED = "-tuned"
"""End of the name of an experiment with chosen settings."""


class ValidationScore(NamedTuple):
    """The validation result of one run.

    Attributes:
        value: mean over clients of an accuracy in [0, 1] or of a loss.
        round: index of the evaluated round.
        is_loss: whether the value is a loss, so that lower is better.
    """

    value: float
    round: int
    is_loss: bool


@dataclass(frozen=True)
class Setting:
    """One setting of a method that a grid search tries.

    Attributes:
        method: name of the method in the experiment.
        values: values of the setting by field.
        runs: planned runs, one for each tuning seed.
        scores: scores of these runs; None for a run that diverged or was not run.
        messages: reasons why runs have no score.
    """

    method: str
    values: dict[str, Any]
    runs: tuple[PlannedRun, ...] = ()
    scores: tuple[ValidationScore | None, ...] = ()
    messages: tuple[str, ...] = ()

    @property
    def mean(self) -> float | None:
        """Mean score over the tuning seeds; None, the worst score, if a run has no score."""
        values = [score.value for score in self.scores if score is not None]
        return math.fsum(values) / len(values) if values and len(values) == len(self.scores) else None


def plan_tuning(experiment: ExperimentConfig, out: Path) -> list[Setting]:
    """List the settings of all methods with their tuning runs, with every setting checked.

    A method whose grid has only one setting needs no tuning runs.

    Args:
        experiment: experiment with a section ``[tune]``.
        out: folder of the tuning, whose subfolder ``tuning`` holds the runs.

    Raises:
        ConfigError: if there is no such section, or a field or value is wrong.
    """
    tune = tune_settings(experiment)
    if experiment.vary:
        raise ConfigError(
            "the experiment varies fields (vary = ...), but [tune] chooses one setting. Remove vary."
        )
    plans = []
    for name in experiment.compared_methods:
        settings = list_settings(tune.grid_of(name))
        for values in settings:
            seeds = tune.seeds if len(settings) > 1 else ()
            runs = tuple(_plan_run(experiment, tune, name, values, seed, out / "tuning") for seed in seeds)
            plans.append(Setting(name, values, runs))
    return plans


def tune_settings(experiment: ExperimentConfig) -> TuneSettings:
    """Return the section ``[tune]`` of an experiment; raise ConfigError if it has none."""
    if experiment.tune is None:
        raise ConfigError(
            'the experiment has no section [tune]. Add one, such as [tune.grid] with "optimizer.lr" = [0.03, '
            "0.1]"
        )
    return experiment.tune


def list_settings(grid: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """List every combination of the values of a grid; the last field changes fastest."""
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def _plan_run(
    experiment: ExperimentConfig, tune: TuneSettings, name: str, values: dict[str, Any], seed: int, out: Path
) -> PlannedRun:
    rounds = experiment.run.rounds if tune.rounds is None else tune.rounds
    # leave out everything that only the test needs
    run = {"seed": seed, "rounds": rounds, "representations": 0, "adapters": [], "keep_best": False}
    tables = {"compare": [name], "run": run, "methods": {name: nest_values(experiment, name, values)}}
    label = label_values({field: _format_setting(value) for field, value in values.items()})
    return PlannedRun(_overlay(experiment, tables), name, values, out / f"{name}{label}-s{seed}")


def _format_setting(value: Any) -> str:
    """Format a value as an override of the command line writes it; JSON has another word for infinity."""
    return value if isinstance(value, str) else repr(value) if isinstance(value, float) else json.dumps(value)


def _overlay(experiment: ExperimentConfig, tables: Mapping[str, Any]) -> ExperimentConfig:
    """Parse the experiment with tables that override it, without its grid search."""
    merged = experiment.to_dict()
    del merged["tune"]
    merge_tables(merged, tables)
    return ExperimentConfig.parse(merged)


def nest_values(experiment: ExperimentConfig, name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``[methods.NAME]`` that give a method these values and leave its other fields unchanged.

    ``optimizer.lr`` changes only the learning rate: weight decay and the rest stay as in ``[defaults]``,
    ``[methods.NAME]`` or the method's own default.

    Args:
        experiment: experiment that holds the method.
        name: name of the method or variant.
        values: values by dotted field of the method.
    """
    own_fields = experiment.methods.get(name, MethodSettings()).model_extra or {}
    defaults, method = {**experiment.defaults, **own_fields}, experiment.build_method(name)
    tables: dict[str, Any] = {}
    # all values of a table together, because a kind and the fields of that kind belong together
    for top, value in join_fields(values).items():
        merged_table = {top: copy.deepcopy(defaults.get(top, _default_table(getattr(method, top, None))))}
        merge_tables(merged_table, {top: value})
        tables[top] = merged_table[top]
    return tables


def _default_table(value: Any) -> dict[str, Any]:
    """Table of a method's default optimizer, router and so on."""
    if not dataclasses.is_dataclass(value):
        return {}
    kind = {"kind": value.kind} if hasattr(value, "kind") else {}
    return {**kind, **print_fields(value, True)}


def score_run(run: RunRecord, round_choice: str, series: str | None = None) -> ValidationScore | None:
    """Score a run by validation: the mean over the clients that can train and are not hostile.

    Test results are not read.

    Args:
        run: record of a finished run.
        round_choice: evaluated round, ``last`` or ``best``; the state before any training is no candidate for the
            best.
        series: series of models to score; see :class:`.sections.tune_section.TuneSettings`.

    Returns:
        The score, or None if it is not finite or no reply was used.

    Raises:
        ConfigError: if no client has validation examples.
        CheckpointError: if records of rounds are missing.
    """
    if run.missing:
        raise CheckpointError(
            f"{run.folder}: {describe_missing(run.missing)}, so that it has no score. Remove the folder and tune again."
        )
    excluded_ids = {row["id"] for row in run.clients if row.get("unseen") or row.get("hostile")}
    scores = [
        score for record in run.rounds if (score := _validation(record, excluded_ids, series)) is not None
    ]
    if not scores:
        raise ConfigError(
            f"{run.folder}: no client has validation examples, by which settings are chosen. Set split.val, "
            "such as 0.1"
        )
    if run.has_used_no_reply:
        return None
    trained_scores = [score for score in scores if score.round > 0 and math.isfinite(score.value)]
    candidates = [scores[-1]] if round_choice == "last" else trained_scores
    best = find_best(map(_cost, candidates), lower_is_better=True)
    return candidates[best] if best is not None and math.isfinite(candidates[best].value) else None


def _validation(
    record: RoundRecord, excluded_ids: Collection[int], series: str | None
) -> ValidationScore | None:
    means = {}
    for name in (ACCURACY, LOSS):
        series_name = series if series in record.series(name) else None
        values = record.by_client(name, series=series_name, split="val")
        means[name] = mean_over_clients(v for client_id, v in values.items() if client_id not in excluded_ids)
    accuracy, loss = means[ACCURACY], means[LOSS]
    if accuracy is not None:
        # a model of NaN has an accuracy, of wrong answers
        has_diverged = loss is not None and not math.isfinite(loss)
        return ValidationScore(math.nan if has_diverged else accuracy, record.round, is_loss=False)
    return None if loss is None else ValidationScore(loss, record.round, is_loss=True)


def _cost(score: ValidationScore) -> float:
    return score.value if score.is_loss else -score.value


def _mean_cost(setting: Setting) -> float | None:
    mean, is_loss = setting.mean, any(score is not None and score.is_loss for score in setting.scores)
    return mean if mean is None or is_loss else -mean


def choose_setting(settings: Sequence[Setting]) -> Setting | None:
    """Choose the setting of a method with the best mean score; the first one in the grid if several are equal up to rounding.

    Args:
        settings: settings of one method, with scores unless there is only one setting.

    Returns:
        The setting, or None if every setting has a run that diverged or was not run.
    """
    if len(settings) == 1:
        return settings[0]
    best = find_best(map(_mean_cost, settings), lower_is_better=True)
    return None if best is None else settings[best]


def find_edges(setting: Setting, grid: Mapping[str, Sequence[Any]]) -> list[str]:
    """Warn of each numeric field whose chosen value is the smallest or largest of its grid.

    Args:
        setting: the chosen setting of a method.
        grid: grid of the method.
    """
    edges = []
    for field, values in grid.items():
        if len(values) < 2 or not all(isinstance(v, int | float) and not isinstance(v, bool) for v in values):
            continue
        value = setting.values[field]
        # no grid goes beyond infinity
        if value in (min(values), max(values)) and math.isfinite(value):
            side = "smallest" if value == min(values) else "largest"
            grid_text = ", ".join(map(str, sorted(values)))
            edges.append(
                f"{setting.method}: {field} = {value} is the {side} of {grid_text}; the optimum is at the edge of "
                "the grid: extend it"
            )
    return edges


def tuned_experiment(experiment: ExperimentConfig, settings: Sequence[Setting]) -> ExperimentConfig:
    """Experiment with the methods' chosen settings on the test seeds, which ``compare`` runs.

    Args:
        experiment: experiment that was tuned.
        settings: one setting for each method to compare.
    """
    methods = {
        setting.method: nest_values(experiment, setting.method, setting.values) for setting in settings
    }
    tables = {
        "name": experiment.name + TUNED,
        "title": experiment.title or experiment.name,
        "compare": [setting.method for setting in settings],
        "seeds": list(tune_settings(experiment).test_seeds),
        "methods": {name: fields for name, fields in methods.items() if fields},
    }
    return _overlay(experiment, tables)
