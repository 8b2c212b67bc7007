"""Checks whether a run can go on: which fields of its two configurations differ, apart from those that change no result."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ..core.contract import AnyMethod
from ..core.errors import ResumeRefusedError
from ..models.fingerprint import compare_layers
from ..storage.run_files import FORMAT
from .setup.schedules import find_ended_schedules
from .stored_settings import add_defaults

FREE_TO_CHANGE = (
    "versions", "title", "paper", "reference", "experiment", "notes", "remarks", "plan", "working_folder",
    "callback_code",
    "run.checkpoint_every", "run.evaluate_every", "run.target", "run.representations", "run.adapters",
    "run.keep_best", "run.pixels", "run.keep_checkpoints", "run.metrics", "run.patience", "run.callbacks",
    "run.log",
)  # fmt: skip
"""Parts of the configuration that do not change results or that restate other parts."""

MEASURED_IN_ROUNDS = ("metrics", "evaluate_every", "keep_best", "representations", "adapters")
"""Fields of ``[run]`` that name what rounds measure and keep, so that a run that has ended cannot follow a new value."""


def keep_measured_fields(stored_config: Mapping[str, Any], new_config: dict[str, Any]) -> list[str]:
    """Set the fields of :data:`MEASURED_IN_ROUNDS` in the configuration of a run that has ended back to their stored values.

    Otherwise ``run.json`` would say that the run has measured what it has not.

    Args:
        stored_config: configuration of the stored run.
        new_config: configuration that will be stored, which is changed in place.

    Returns:
        The names of the fields whose values differ.
    """
    stored_run, new_run = (_table(config, "run") for config in (stored_config, new_config))
    # an older run lacks fields that it could not have
    changed_names = [
        name for name in MEASURED_IN_ROUNDS if name in stored_run and stored_run[name] != new_run.get(name)
    ]
    if not changed_names:
        return []
    # a run that was made in Python has no tables
    stored_tables = _table(_table(stored_config, "experiment"), "run")
    new_tables = _table(new_config, "experiment").setdefault("run", {})
    for name in changed_names:
        new_run[name] = stored_run[name]
        new_tables.pop(name, None)
        new_tables |= {name: stored_tables[name]} if name in stored_tables else {}
    # the code of other metrics
    new_config.pop("code", None)
    new_config |= {"code": stored_config["code"]} if "code" in stored_config else {}
    return changed_names


def changes_of(
    stored_config: Any, new_config: Any, method: AnyMethod, example_counts: Collection[int] = ()
) -> list[str]:
    """List the fields of ``run.json`` whose differences keep a run from going on with a new configuration.

    A run may get more rounds, because its completed rounds equal those of a run that had as many from the start,
    unless the method plans its rounds by their number. It may not get rounds in which a schedule sets the learning
    rate to 0.

    Args:
        stored_config: configuration of the stored run. Settings that it lacks count as their defaults
            (:func:`fedlowrank.rounds.stored_settings.add_defaults`).
        new_config: configuration with which the run is to go on, or some sections of it.
        method: method that the run uses.
        example_counts: numbers of training examples of the clients, if they are known.
    """
    stored_config = add_defaults(stored_config, method) if isinstance(stored_config, dict) else stored_config
    stored_config, new_config = _leave_out_single_metrics(stored_config, new_config)
    stored_rounds, new_rounds = (_table(c, "run").get("rounds") for c in (stored_config, new_config))
    if not isinstance(stored_rounds, int) or not isinstance(new_rounds, int) or stored_rounds == new_rounds:
        return differences(stored_config, new_config)
    other_changes = differences(
        {**stored_config, "run": {**stored_config["run"], "rounds": new_rounds}}, new_config
    )
    if new_rounds < stored_rounds:
        return [
            f"run.rounds was {stored_rounds} and is {new_rounds}, but a run can only get more rounds",
            *other_changes,
        ]
    for name, schedule in find_ended_schedules(method, new_rounds, example_counts):
        other_changes.append(
            f"run.rounds was {stored_rounds} and is {new_rounds}, but {name} with rounds = {schedule.rounds} has fallen to a "
            f"learning rate of 0 before round {new_rounds}, which would train nothing"
        )
    if not method.uses_rounds:
        return other_changes
    reason = f"{method.title} plans its rounds by how many there are"
    consequence = f"{stored_rounds} of {new_rounds} are others than {stored_rounds} of {stored_rounds}"
    return [f"run.rounds was {stored_rounds} and is {new_rounds}; {reason}, so {consequence}", *other_changes]


def check_changes(
    folder: Path, stored_config: Any, new_config: Any, method: AnyMethod, example_counts: Collection[int] = ()
) -> None:
    """Raise ResumeRefusedError if a run cannot go on with another configuration; the message names the fields."""
    if stored_config.get("format") != FORMAT:
        version = _table(stored_config, "versions").get("fedlowrank", "another version")
        raise ResumeRefusedError(
            f"{folder} has format {stored_config.get('format')}, and this version of fedlowrank reads and writes format "
            f"{FORMAT}. Go on with the version that made it ({version}), or start a new run in another folder."
        )
    if changes := changes_of(stored_config, new_config, method, example_counts):
        raise ResumeRefusedError(
            f"{folder} cannot be resumed with another configuration: "
            + "; ".join(changes)
            + ". Set these back, or start a new run in another folder."
        )


def describe_version_changes(stored_config: Any, new_config: Any) -> str:
    """List software whose version has changed since a run was made, such as ``torch 2.6.0 (now 2.7.0)``; empty if none has.

    Such a change does not keep a run from going on: a new version may round differently, which no user can undo.
    """
    stored_versions, new_versions = (_table(config, "versions") for config in (stored_config, new_config))
    return ", ".join(
        f"{name} {stored_versions[name]} (now {new_versions[name]})"
        for name in new_versions
        if name in stored_versions and stored_versions[name] != new_versions[name]
    )


def find_changed_callbacks(stored_config: Any, new_config: Any) -> list[str]:
    """List the names of ``run.callbacks`` whose code differs between two configurations.

    Such a change causes a warning and no error. (A changed metric is an error, because its recorded values would
    follow two definitions.) A callback gets records and never the run, so every round has the same result under any
    code. It can only end the run in another round than it would have under the same code from the start.

    Args:
        stored_config: configuration of the stored run.
        new_config: configuration with which the run goes on.
    """
    stored_code, new_code = (_table(config, "callback_code") for config in (stored_config, new_config))
    return [name for name in new_code if name in stored_code and stored_code[name] != new_code[name]]


def _leave_out_single_metrics(stored_config: Any, new_config: Any) -> tuple[Any, Any]:
    """Remove the code of metrics that only one of two configurations has, because metrics may be added and dropped."""
    codes = [_table(config, "code") for config in (stored_config, new_config)]
    metrics = {
        name for config in (stored_config, new_config) for name in _table(config, "run").get("metrics") or ()
    }
    # functions that were passed in Python have no module in their names; methods and all other code have one
    metrics |= {name for code in codes for name in code if ":" not in name}
    unshared_metrics = {name for name in metrics if any(name not in code for code in codes)}
    if not any(name in code for name in unshared_metrics for code in codes):
        return stored_config, new_config
    shared_codes = [
        {name: text for name, text in code.items() if name not in unshared_metrics} for code in codes
    ]
    # a configuration without the user's own code has no such section
    stored_config, new_config = (
        {**{key: value for key, value in config.items() if key != "code"}, **({"code": code} if code else {})}
        for config, code in zip((stored_config, new_config), shared_codes, strict=True)
    )
    return stored_config, new_config


def _table(config: Any, section: str) -> dict[str, Any]:
    """Read a section of a configuration; empty if there is none."""
    table = config.get(section) if isinstance(config, dict) else None
    return table if isinstance(table, dict) else {}


def differences(stored_value: Any, new_value: Any, path: str = "") -> list[str]:
    """List the dotted names of fields in which two configurations differ, each with both values."""
    if isinstance(stored_value, dict) and isinstance(new_value, dict):
        if path == "models":
            return _model_differences(stored_value, new_value)
        texts: list[str] = []
        for key in sorted({*stored_value, *new_value}, key=str):
            field_path = f"{path}.{key}" if path else str(key)
            if field_path in FREE_TO_CHANGE:
                continue
            if field_path == "columns" and not (key in stored_value and key in new_value):
                # arrays have no names, and digests compare their values
                continue
            if key not in stored_value or key not in new_value:
                texts.append(
                    f"{field_path} is only in the {'stored' if key in stored_value else 'new'} configuration"
                )
            else:
                texts += differences(stored_value[key], new_value[key], field_path)
        return texts
    if stored_value == new_value:
        return []
    if path.startswith("code."):
        return [f"the code of {path.removeprefix('code.')} was changed"]
    if path.startswith("columns.") and isinstance(stored_value, list) and isinstance(new_value, list):
        return [_column_difference(stored_value, new_value)]
    if path == "fingerprint" and isinstance(stored_value, list) and isinstance(new_value, list):
        client_ids = [i for i, (a, b) in enumerate(zip(stored_value, new_value, strict=False)) if a != b]
        return [
            f"data: the examples of client {client_ids[0] if client_ids else min(len(stored_value), len(new_value))} are others"
        ]
    return [f"{path} was {stored_value!r} and is {new_value!r}"]


def _column_difference(stored_columns: list[str], new_columns: list[str]) -> str:
    """Describe how the columns of the inputs differ even if their values are equal: renamed, swapped, or of another number."""
    if len(stored_columns) != len(new_columns):
        return f"data: the inputs had {len(stored_columns)} columns and have {len(new_columns)}"
    index = next(i for i, (a, b) in enumerate(zip(stored_columns, new_columns, strict=True)) if a != b)
    return (
        f"data: column {index + 1} of the inputs was {stored_columns[index]!r} and is {new_columns[index]!r}"
    )


def _model_differences(stored_models: dict[str, Any], new_models: dict[str, Any]) -> list[str]:
    """List the layers in which the models of two configurations differ, by name of the architecture."""
    texts = []
    for name in sorted({*stored_models, *new_models}):
        if name not in stored_models or name not in new_models:
            texts.append(
                f"model {name} is only in the {'stored' if name in stored_models else 'new'} configuration"
            )
            continue
        stored_model, new_model = stored_models[name], new_models[name]
        layers = compare_layers(stored_model.get("layers") or {}, new_model["layers"])
        texts += [f"model {name}: {text}" for text in layers]
        if not layers and stored_model.get("frozen") != new_model.get("frozen"):
            texts.append(
                f"model {name}: its frozen parameters or buffers have other values. No checkpoint holds them; load "
                "the weights that the run was made with"
            )
        elif not layers:
            stored_fields, new_fields = (
                {k: v for k, v in m.items() if k not in ("layers", "frozen")}
                for m in (stored_model, new_model)
            )
            texts += differences(stored_fields, new_fields, f"models.{name}")
    return texts
