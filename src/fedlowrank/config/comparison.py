"""The runs of ``compare``: every combination of method, seed and varied values."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.errors import CheckpointError, ConfigError
from ..results.records import RunRecord
from ..storage.digest import digest_of
from ..storage.run_folder import RunFolder
from .experiment import ExperimentConfig
from .reading.merging import LayeredTables, parse_value, parse_variation
from .reading.unread_overrides import NOT_VARIED

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PlannedRun:
    """One run of a comparison.

    Attributes:
        experiment: experiment with the seed and the varied values of this run.
        name: name of the method or variant.
        vary: varied fields and their values in this run; lists and tables as text.
        folder: folder of the run.
    """

    experiment: ExperimentConfig
    name: str
    vary: dict[str, Any]
    folder: Path


def read_varied(
    config_tables: LayeredTables, vary: Sequence[str], methods: Sequence[str]
) -> ExperimentConfig:
    """Parse an experiment with the first of its varied values, because they may choose a kind.

    Args:
        config_tables: tables of the experiment and overrides.
        vary: variations ``section.field=v1,v2,...``; empty for those of the experiment.
        methods: names of the methods that will run; empty for those that the experiment compares.

    Raises:
        ConfigError: if something is wrong, or nothing reads an override.
    """
    tables = config_tables.merge()
    file_vary: Any = tables.get("vary", [])
    variations = vary or ([file_vary] if isinstance(file_vary, str) else file_vary)
    if isinstance(variations, list) and all(isinstance(text, str) for text in variations):
        first_combination = list_combinations(variations)[0]
        config_tables = _join_varied(config_tables, first_combination)
    method = methods[0] if methods else None
    experiment = ExperimentConfig.parse_laid(config_tables, method, methods)
    names = methods or experiment.compared_methods
    for text in experiment.refuse_overrides_of_other_methods(config_tables, names):
        logger.info(text)
    return experiment


_MAX_LABEL_BYTES = 160
"""Largest length of :func:`label_values`; a name may have 255 bytes, and the method, seed and suffixes come to it."""


def plan_runs(
    experiment: ExperimentConfig,
    methods: Sequence[str],
    seeds: Sequence[int],
    vary: Sequence[str],
    out: Path,
    config_tables: LayeredTables | None = None,
) -> list[PlannedRun]:
    """List all runs of a comparison with every setting checked; runs of one experiment follow each other.

    Args:
        experiment: experiment with the settings that the runs have in common.
        methods: names of methods or variants.
        seeds: seeds of the runs.
        vary: variations ``section.field=v1,v2,...``; several variations run in every combination.
        out: folder that holds the run folders.
        config_tables: tables and overrides from which the experiment was read, to which the values of each run are
            added; by default those of :meth:`.experiment.ExperimentConfig.to_dict`.

    Raises:
        ConfigError: if a value or a name is wrong.
    """
    runs, config_tables = [], config_tables or LayeredTables(experiment.to_dict())
    for texts in list_combinations(vary):
        label = label_values(texts)
        values = {field: _label_value(text) for field, text in texts.items()}
        for seed in seeds:
            run_tables = _join_varied(config_tables, texts).join([f"run.seed={seed}"])
            run_experiment = experiment.parse_laid(run_tables, methods[0], methods, experiment.allow_code)
            for name in methods:
                run_experiment.build_method(name)
                runs.append(PlannedRun(run_experiment, name, values, out / f"{name}{label}-s{seed}"))
    return runs


def label_values(texts: Mapping[str, str]) -> str:
    """Make the part of a run folder's name that tells values apart: ``-lr=0.1-mu=0.9``.

    A slash is written as ``%2F``. A label that would be too long for a file system ends in a digest.
    """
    label = "".join(
        f"-{field.rpartition('.')[2]}={text.replace('%', '%25').replace('/', '%2F')}"
        for field, text in texts.items()
    )
    encoded_label = label.encode()
    if len(encoded_label) <= _MAX_LABEL_BYTES:
        return label
    return f"{encoded_label[: _MAX_LABEL_BYTES - 33].decode(errors='ignore')}-{digest_of(encoded_label)}"


def _label_value(text: str) -> Any:
    """A varied value as tables show it: a number, a boolean or text."""
    value = parse_value(text)
    return text if isinstance(value, list | dict) else value


def _join_varied(config_tables: LayeredTables, texts: Mapping[str, str]) -> LayeredTables:
    """Add the values of one run to the overrides; raise ConfigError if an override sets a varied field."""
    for field in texts:
        if field == "run.seed":
            raise ConfigError(
                "run.seed cannot be varied:",
                python="name the seeds, such as seeds=[0, 1].",
                command="name the seeds by --seeds, such as --seeds 0,1",
            )
        if reason := NOT_VARIED.get(field, NOT_VARIED.get(field.partition(".")[0])):
            raise ConfigError(f"{field} cannot be varied: {reason}")
        if config_tables.overrides_field(field):
            raise ConfigError(
                f"{field}: nothing reads this override, for the field is varied. Leave it out,",
                python=f"or vary it over other values: {field}=...",
                command=f"or vary it over other values by --vary {field}=...",
            )
    joined = config_tables.join([f"{field}={value}" for field, value in texts.items()])
    return dataclasses.replace(joined, varied=tuple(texts))


def list_combinations(vary: Sequence[str]) -> list[dict[str, str]]:
    """List the grid over all varied fields; each combination maps fields to the texts of their values.

    Raises:
        ConfigError: if a text has another form than ``section.field=v1,v2,...``, or two name the same field.
    """
    parsed = [parse_variation(text) for text in vary]
    fields = [field for field, _ in parsed]
    if duplicates := [field for field in fields if fields.count(field) > 1]:
        raise ConfigError(
            f"vary names {duplicates[0]} twice; put all its values into one, separated by commas"
        )
    combinations = itertools.product(*(values for _, values in parsed))
    return [dict(zip(fields, values, strict=True)) for values in combinations]


def refuse_conflicts(runs: Sequence[PlannedRun]) -> None:
    """Refuse to compare if a folder holds a run of another configuration, before anything is trained.

    Raises:
        CheckpointError: if there is such a folder; the message names it, what differs and the ways out.
    """
    for planned_run in runs:
        if changes := find_changes(planned_run):
            raise CheckpointError(
                f"{planned_run.folder} holds a run of another configuration: {'; '.join(changes)}. Choose another folder for "
                "the comparison",
                python="or move it aside (RunFolder.move_aside).",
                command="with -o, or pass --force to move such runs aside and train anew.",
            )


def find_changes(planned_run: PlannedRun) -> list[str]:
    """Compare a planned run with the one in its folder; empty if that run can continue or has not begun."""
    if not RunFolder.has_begun(planned_run.folder):
        return []
    return planned_run.experiment.changes_from(
        RunRecord.load(planned_run.folder).config, planned_run.name, planned_run.vary
    )
