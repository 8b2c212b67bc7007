"""The settings of a run as text: settings in which two runs of one method may differ, and their names for readers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from hashlib import blake2b
from typing import Any

from ...core.io.text import on_one_line
from ...results.records import NOT_SETTINGS, SECTIONS, STORAGE_SETTINGS, RunRecord
from ...results.varied_settings import name_varied
from ...rounds.run_settings import RunSettings

CODE = "code."
"""Prefix of the settings that hold digests of the user's own code: ``code.module:attribute``."""


def settings_of(run: RunRecord) -> dict[str, str]:
    """List the settings, except the seed, in which two runs may differ, as ``section.key`` to JSON text."""
    settings: dict[str, str] = {}
    # Defaults of settings that an older run does not record, so that old and new runs form one group.
    _flatten("run", asdict(RunSettings()), settings)
    _flatten("method", run.section("method", "fields"), settings)
    for name in SECTIONS:
        _flatten(name, run.section(name), settings)
    # one entry for each name, which may contain dots
    settings |= {f"{CODE}{name}": json.dumps(text) for name, text in run.section("code").items()}
    for name, model in run.section("models").items():
        text = f"{model['parameters']:,} parameters" if "parameters" in model else ""
        _flatten(f"models.{name}", f"{text} [{_digest(model.get('layers'))}]".lstrip(), settings)
    excluded_keys = (*NOT_SETTINGS, *STORAGE_SETTINGS)
    return {key: value for key, value in settings.items() if key not in excluded_keys}


def _digest(value: object) -> str:
    return blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=2).hexdigest()


def _flatten(prefix: str, value: object, settings: dict[str, str]) -> None:
    if isinstance(value, Mapping):
        for key, inner_value in value.items():
            _flatten(f"{prefix}.{key}", inner_value, settings)
    else:
        settings[prefix] = json.dumps(value, sort_keys=True)


def vary_text(vary: Sequence[tuple[str, Any]], method: str = "") -> str:
    """Describe varied settings, such as ``classes_per_client = 4``; empty for none.

    Args:
        vary: names of the settings with their values.
        method: see :func:`fedlowrank.results.varied_settings.name_varied`.
    """
    names = name_varied([key for key, _ in vary], method)
    return ", ".join(f"{name} = {value_text(value)}" for name, (_, value) in zip(names, vary, strict=True))


def value_text(value: object) -> str:
    """Format a setting's value on one line: text unchanged, ``inf`` as in a file, any other value as JSON."""
    if isinstance(value, float):
        return repr(value)
    return on_one_line(value if isinstance(value, str) else json.dumps(value, sort_keys=True))
