"""Defaults for settings that were added to this package after a stored run was made."""

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
    """Unwrap a method from the wrappers of its updates and statistics."""
    while isinstance(method, (Protected, AveragedStatistics)):
        method = method.inner
    return method


def add_defaults(stored_config: Mapping[str, Any], method: AnyMethod) -> dict[str, Any]:
    """Complete a stored configuration by settings that did not exist when it was written, at their defaults.

    A new setting changes nothing at its default value, so an older run was made as if with this default.

    Args:
        stored_config: contents of ``run.json`` of a run, or some sections of it.
        method: method with which the run is to go on. Its own nested settings, such as its optimizer, define the
            defaults.

    Returns:
        The configuration; a section that is missing as a whole stays missing.
    """
    config = dict(stored_config)
    default_settings: dict[str, Any] = {"run": RunSettings(), "model": ModelSettings()}
    for name, settings in default_settings.items():
        if isinstance(stored_config.get(name), dict):
            config[name] = _complete(stored_config[name], settings)
    method_table = stored_config.get("method")
    if isinstance(method_table, dict) and isinstance(method_table.get("fields"), dict):
        config["method"] = {**method_table, "fields": _complete(method_table["fields"], unwrap(method))}
    return config


def _complete(table: Mapping[str, Any], settings: Any) -> dict[str, Any]:
    """Add the fields of a dataclass that have a default and that a table lacks, also in nested tables."""
    full_table = dict(table)
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if field.name not in table:
            full_table |= _default(field)
        elif dataclasses.is_dataclass(value) and isinstance(table[field.name], dict):
            full_table[field.name] = _complete(table[field.name], value)
    return full_table


def _default(field: dataclasses.Field[Any]) -> dict[str, Any]:
    """Name and default of a field as in ``run.json``; empty for a field without default."""
    if field.default is not dataclasses.MISSING:
        default = field.default
    elif field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    else:
        return {}
    is_table = dataclasses.is_dataclass(default) and not isinstance(default, type)
    table = {field.name: dataclasses.asdict(default) if is_table else default}
    # as JSON reads it back: tuples become lists, keys become strings
    defaults: dict[str, Any] = json.loads(json.dumps(table))
    return defaults
