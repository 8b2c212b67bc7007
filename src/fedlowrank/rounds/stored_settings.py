"""Settings of a stored run that were added to this package after the run was made."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from ..core.contract import AnyMethod
from ..models.zoo import ModelSettings
from ..trust.protection import Protected
from .run_settings import RunSettings
from .setup.averaged_statistics import AveragedStatistics


def unwrap(method: AnyMethod) -> AnyMethod:
    """The method itself, without what its updates and statistics are wrapped in."""
    while isinstance(method, (Protected, AveragedStatistics)):
        method = method.inner
    return method


def add_defaults(stored: Mapping[str, Any], method: AnyMethod) -> dict[str, Any]:
    """Complete a stored configuration by settings that did not exist when it was written, at their defaults.

    A new setting changes nothing at its default value, so that a run from before it was made by this default.

    Args:
        stored: ``run.json`` of a run, or some sections of it.
        method: that the run is to go on with. The defaults of nested settings, such as its optimizer, are those
            of its own kind.

    Returns:
        The configuration; a section that is missing as a whole stays missing.
    """
    completed = dict(stored)
    known: dict[str, Any] = {"run": RunSettings(), "model": ModelSettings()}
    for name, settings in known.items():
        if isinstance(stored.get(name), dict):
            completed[name] = _complete(stored[name], settings)
    own = stored.get("method")
    if isinstance(own, dict) and isinstance(own.get("fields"), dict):
        completed["method"] = {**own, "fields": _complete(own["fields"], unwrap(method))}
    return completed


def _complete(stored: Mapping[str, Any], settings: Any) -> dict[str, Any]:
    """Add the fields of a dataclass that a table lacks and that have a default, also within nested tables."""
    completed = dict(stored)
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if field.name not in stored:
            completed |= _default(field)
        elif dataclasses.is_dataclass(value) and isinstance(stored[field.name], dict):
            completed[field.name] = _complete(stored[field.name], value)
    return completed


def _default(field: dataclasses.Field[Any]) -> dict[str, Any]:
    """Name and default of a field as ``run.json`` holds them; empty for a field without default."""
    if field.default is not dataclasses.MISSING:
        default = field.default
    elif field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    else:
        return {}
    is_table = dataclasses.is_dataclass(default) and not isinstance(default, type)
    table = {field.name: dataclasses.asdict(default) if is_table else default}
    # as it is read back: tuples become lists, keys become strings
    defaults: dict[str, Any] = json.loads(json.dumps(table))
    return defaults
