"""The fields of an experiment file and what they mean, from the docstrings of the settings."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from dataclasses import dataclass
from typing import Any

import pydantic

from ..adapters.router import Router
from ..core.optimizer import SGD, AdamW, Schedule
from ..data.sources import SOURCES
from ..data.text.sources import TEXT_SOURCES
from ..linalg.delta import DeltaForm
from ..methods import METHODS
from ..methods.families.effective_delta import Weighing
from ..methods.families.lora import Tuning
from .data_section import Preparation
from .experiment import TAGGED, ExperimentConfig
from .lora_section import LoraSettings
from .network_settings import Limits, NetworkSettings
from .parsing import classes_in


@functools.cache
def format_field_help() -> str:
    """Format the fields of every section, for ``--help``."""
    lines, meanings = (
        ["Fields of an experiment file, with their defaults:"],
        _meanings(inspect.getdoc(ExperimentConfig)),
    )
    found = [("at the top", [FieldHelp(n, "", repr(f.default), meanings[n]) for n, f in _header().items()])]
    found += [(f"[{title}]", list_fields(cls)) for title, cls in _sections()]
    for title, fields in found:
        if fields:
            lines += [f"\n{title}", *(f"  {f.name} = {f.default}\n      {f.meaning}" for f in fields)]
    return "\n".join(lines)


def _header() -> dict[str, pydantic.fields.FieldInfo]:
    """The fields before the first section."""
    fields = ExperimentConfig.model_fields
    return {name: fields[name] for name in list(fields)[: list(fields).index("language")]}


def _sections() -> list[tuple[str, type[Any]]]:
    """Every table of a file by its title, and the class that it configures."""
    special: dict[str, list[tuple[str, type[Any]]]] = {
        "data": [
            ("data, any source", Preparation),
            *((f"data, source = {n}", c) for n, c in SOURCES.items()),
            *((f"data, source = {n} (texts)", c) for n, c in TEXT_SOURCES.items()),
        ],
        "lora": [("lora; with [language] the fields of peft.LoraConfig, and ranks", LoraSettings)],
        "network": [("network", NetworkSettings), ("network.limits", Limits)],
        "defaults": [
            ("defaults.optimizer, kind = sgd", SGD),
            ("defaults.optimizer, kind = adamw", AdamW),
            ("defaults.optimizer.schedule", Schedule),
        ],
        "methods": [
            *((f"methods.{n}", c) for n, c in METHODS.items()),
            ("methods.floral.router, methods.ensemble.router", Router),
            ("methods.NAME.tuning, of federated LoRA", Tuning),
            ("methods.fedhl.weighing", Weighing),
            ("methods.fedhl.form, methods.flexlora.form", DeltaForm),
        ],
    }
    found: list[tuple[str, type[Any]]] = []
    for name, field in ExperimentConfig.model_fields.items():
        if name in TAGGED:
            found += [(f"{name}, kind = {kind}", cls) for kind, cls in TAGGED[name][0].items()]
        else:
            found += special.get(name) or [(name, cls) for cls in classes_in(field.annotation)]
    return found


@dataclass(frozen=True)
class FieldHelp:
    """What ``--help`` says of one field."""

    name: str
    type: str
    default: str
    meaning: str


def list_fields(cls: type[Any]) -> list[FieldHelp]:
    """List the fields of a dataclass, with the meaning that its docstring and those of its bases give."""
    meanings: dict[str, str] = {}
    for owner in reversed(cls.__mro__):
        meanings |= _meanings(inspect.getdoc(owner) if "__doc__" in vars(owner) else None)
    out = []
    for f in dataclasses.fields(cls):
        if f.default is not dataclasses.MISSING:
            default = _format_default(f.default)
        elif f.default_factory is not dataclasses.MISSING:
            default = repr(f.default_factory())
        else:
            default = "(needed)"
        kind = f.type if isinstance(f.type, str) else getattr(f.type, "__name__", str(f.type))
        out.append(FieldHelp(f.name, kind, default, meanings.get(f.name, "")))
    return out


def _format_default(value: Any) -> str:
    """A default as one would write it: of a dataclass the learning rate and what is not its default."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return repr(value)
    shown = [
        f"{f.name}={getattr(value, f.name)!r}"
        for f in dataclasses.fields(value)
        if f.name == "lr" or (f.default is not dataclasses.MISSING and getattr(value, f.name) != f.default)
    ]
    return f"{type(value).__name__}({', '.join(shown)})"


def _meanings(doc: str | None) -> dict[str, str]:
    """The entries of the section ``Attributes:`` of a Google docstring."""
    section = re.search(r"^Attributes:\n((?:[ ]{4}.*\n?|\n)*)", doc or "", re.MULTILINE)
    if section is None:
        return {}
    entries = re.findall(r"^ {4}(\w+): ((?:.*\n?)(?: {8}.*\n?)*)", section.group(1), re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}
