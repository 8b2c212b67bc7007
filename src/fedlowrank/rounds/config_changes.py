"""Whether a run can go on: in which fields two of its configurations differ, apart from those that change no result."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..core.contract import AnyMethod
from ..core.errors import CheckpointError
from ..core.learning.optimizer import LocalSchedule, Schedule
from ..models.fingerprint import compare_layers
from ..storage.run_files import FORMAT
from .stored_settings import add_defaults

FREE_TO_CHANGE = (
    "versions", "title", "paper", "reference", "experiment", "notes", "remarks", "plan", "working_folder",
    "callback_code",
    "run.checkpoint_every", "run.evaluate_every", "run.target", "run.representations", "run.adapters",
    "run.keep_best", "run.pixels", "run.keep_checkpoints", "run.metrics", "run.patience", "run.callbacks",
    "run.log",
)  # fmt: skip
"""Parts of the configuration that do not change results, or restate other parts."""


def changes_of(stored: Any, now: Any, method: AnyMethod) -> list[str]:
    """Fields of ``run.json`` in which two configurations differ so that one run cannot go on as the other.

    A run may get more rounds, for its rounds until now are those of a run that had as many from the start,
    unless the method plans them by their number. It gets none in which a learning rate is 0 by its schedule.

    Args:
        stored: the configuration of the run. Settings that it lacks count as their defaults
            (:func:`fedlowrank.rounds.stored_settings.add_defaults`).
        now: how it is to go on, or some sections of it.
        method: that it runs.
    """
    stored = add_defaults(stored, method) if isinstance(stored, dict) else stored
    stored, now = _leave_out_single_metrics(stored, now)
    before, after = (_rounds(c) for c in (stored, now))
    if not isinstance(before, int) or not isinstance(after, int) or before == after:
        return differences(stored, now)
    other_changes = differences({**stored, "run": {**stored["run"], "rounds": after}}, now)
    if after < before:
        return [f"run.rounds was {before} and is {after}, but a run can only get more rounds", *other_changes]
    for name, schedule in _find_schedules(method, ""):
        if schedule.is_over(after - 1):
            other_changes.append(
                f"run.rounds was {before} and is {after}, but {name} with rounds = {schedule.rounds} has fallen to a "
                f"learning rate of 0 before round {after}, which would train nothing"
            )
    if not method.uses_rounds:
        return other_changes
    why = f"{method.title} plans its rounds by how many there are"
    others = f"{before} of {after} are others than {before} of {before}"
    return [f"run.rounds was {before} and is {after}; {why}, so {others}", *other_changes]


def check_changes(folder: Path, stored: Any, now: Any, method: AnyMethod) -> None:
    """Raise CheckpointError if a run cannot go on with another configuration; the message names the fields."""
    if stored.get("format") != FORMAT:
        version = _table(stored, "versions").get("fedlowrank", "another version")
        raise CheckpointError(
            f"{folder} has format {stored.get('format')}, and this version of fedlowrank reads and writes format {FORMAT}. Go on "
            f"with the version that made it ({version}), or start a new run in another folder."
        )
    if changes := changes_of(stored, now, method):
        raise CheckpointError(
            f"{folder} cannot be resumed with another configuration: "
            + "; ".join(changes)
            + ". Set these back, or start a new run in another folder."
        )


def describe_version_changes(stored: Any, now: Any) -> str:
    """Say which software was another one when a run was made, such as ``torch 2.6.0 (now 2.7.0)``; empty if none was.

    It does not keep a run from going on: a new version may round differently, which no user can set back.
    """
    before, after = (_table(config, "versions") for config in (stored, now))
    return ", ".join(
        f"{name} {before[name]} (now {after[name]})"
        for name in after
        if name in before and before[name] != after[name]
    )


def find_changed_callbacks(stored: Any, now: Any) -> list[str]:
    """Names of ``run.callbacks`` whose code differs between two configurations.

    Such a change is worth a warning and no error, unlike one of a metric, whose values in the records would be of two
    definitions. A callback gets records and never the run, so every round has the same result under any code. It can
    only end the run in another round than it would have under one code from the start.

    Args:
        stored: the configuration of the run.
        now: how it goes on.
    """
    before, after = (_table(config, "callback_code") for config in (stored, now))
    return [name for name in after if name in before and before[name] != after[name]]


def _leave_out_single_metrics(stored: Any, now: Any) -> tuple[Any, Any]:
    """Two configurations without the code of metrics that only one of them has, for metrics may be added and dropped."""
    codes = [_table(config, "code") for config in (stored, now)]
    metrics = {name for config in (stored, now) for name in _table(config, "run").get("metrics") or ()}
    single = {name for name in metrics if any(name not in code for code in codes)}
    if not any(name in code for name in single for code in codes):
        return stored, now
    kept = [{name: text for name, text in code.items() if name not in single} for code in codes]
    # a configuration without any code of the user's own has no such section
    stored, now = (
        {**{key: value for key, value in config.items() if key != "code"}, **({"code": code} if code else {})}
        for config, code in zip((stored, now), kept, strict=True)
    )
    return stored, now


def _table(config: Any, section: str) -> dict[str, Any]:
    """A section of a configuration; empty if there is none."""
    found = config.get(section) if isinstance(config, dict) else None
    return found if isinstance(found, dict) else {}


def _rounds(config: Any) -> Any:
    run = config.get("run") if isinstance(config, dict) else None
    return run.get("rounds") if isinstance(run, dict) else None


def _find_schedules(settings: Any, path: str) -> Iterator[tuple[str, Schedule | LocalSchedule]]:
    """Schedules among settings and the settings within them, each with its dotted name."""
    if isinstance(settings, (Schedule, LocalSchedule)):
        yield path, settings
    elif dataclasses.is_dataclass(settings):
        for field in dataclasses.fields(settings):
            yield from _find_schedules(getattr(settings, field.name), f"{path}.{field.name}".lstrip("."))


def differences(stored: Any, now: Any, path: str = "") -> list[str]:
    """Dotted fields in which two configurations differ, each with both values."""
    if isinstance(stored, dict) and isinstance(now, dict):
        if path == "models":
            return _model_differences(stored, now)
        texts: list[str] = []
        for key in sorted({*stored, *now}, key=str):
            here = f"{path}.{key}" if path else str(key)
            if here in FREE_TO_CHANGE:
                continue
            if here == "columns" and not (key in stored and key in now):
                # arrays have no names, and their values are compared by digests
                continue
            if key not in stored or key not in now:
                texts.append(f"{here} is only in the {'stored' if key in stored else 'new'} configuration")
            else:
                texts += differences(stored[key], now[key], here)
        return texts
    if stored == now:
        return []
    if path.startswith("code."):
        return [f"the code of {path.removeprefix('code.')} was changed"]
    if path.startswith("columns.") and isinstance(stored, list) and isinstance(now, list):
        return [_column_difference(stored, now)]
    if path == "fingerprint" and isinstance(stored, list) and isinstance(now, list):
        changed = [i for i, (a, b) in enumerate(zip(stored, now, strict=False)) if a != b]
        return [
            f"data: the examples of client {changed[0] if changed else min(len(stored), len(now))} are others"
        ]
    return [f"{path} was {stored!r} and is {now!r}"]


def _column_difference(stored: list[str], now: list[str]) -> str:
    """How the columns of the inputs differ, though their values may be equal: renamed, swapped, or of another number."""
    if len(stored) != len(now):
        return f"data: the inputs had {len(stored)} columns and have {len(now)}"
    place = next(i for i, (a, b) in enumerate(zip(stored, now, strict=True)) if a != b)
    return f"data: column {place + 1} of the inputs was {stored[place]!r} and is {now[place]!r}"


def _model_differences(stored: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """In which layers the models of two configurations differ, by name of the architecture."""
    texts = []
    for name in sorted({*stored, *now}):
        if name not in stored or name not in now:
            texts.append(f"model {name} is only in the {'stored' if name in stored else 'new'} configuration")
            continue
        before, after = stored[name], now[name]
        layers = compare_layers(before.get("layers") or {}, after["layers"])
        texts += [f"model {name}: {text}" for text in layers]
        if not layers and before.get("frozen") != after.get("frozen"):
            texts.append(
                f"model {name}: its frozen parameters or buffers have other values. No checkpoint holds them; load "
                "the weights that the run was made with"
            )
        elif not layers:
            old, new = (
                {k: v for k, v in m.items() if k not in ("layers", "frozen")} for m in (before, after)
            )
            texts += differences(old, new, f"models.{name}")
    return texts
