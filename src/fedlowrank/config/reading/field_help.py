"""The fields of an experiment file and their meanings, from the docstrings of the settings."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pydantic

from ...adapters.mixtures.router import Router
from ...core.contract import Method
from ...core.errors import ConfigError, did_you_mean
from ...core.io.text import list_first
from ...data.sources import SOURCES
from ...data.text.text_sources import TEXT_SOURCES
from ...linalg.delta import DeltaForm
from ...methods import METHODS
from ...methods.shared.effective_delta import Weighing
from ...methods.shared.lora_family import LoRATraining
from ..experiment import TAGGED, ExperimentConfig
from ..sections.data_section import Preparation
from ..sections.lora_section import LoraSettings, PeftSettings
from .parsing import classes_in


@functools.cache
def format_field_help(path: str = "") -> str:
    """Format the fields of an experiment file, as ``fedlowrank fields`` prints them.

    Args:
        path: path of a section, table or field, such as ``run.privacy``; empty for all.

    Raises:
        ConfigError: if nothing has this path.
    """
    tables = find_tables(path) if path else list_tables()
    lines = ["Fields of an experiment file, with their defaults:"]
    for table in tables:
        if path and not table.fields:
            lines.append(f"\n{table.title}\n  no fields")
        elif table.fields:
            fields = (f"  {f.name} = {f.default}\n      {f.meaning}" for f in table.fields)
            lines += [f"\n{table.title}", *fields]
    paths = {table.path for table in tables}
    inner_paths = (
        [table.path for table in _every_table() if table.path.rpartition(".")[0] == path] if path else []
    )
    if further_tables := [inner_path for inner_path in dict.fromkeys(inner_paths) if inner_path not in paths]:
        lines.append(f"\nTables in it: {', '.join(further_tables)}")
    return "\n".join(lines)


@dataclass(frozen=True)
class FieldTable:
    """A table of an experiment file.

    Attributes:
        path: path in the file, such as ``run.privacy``; empty for the fields before the first section.
        kind: value of the entry that chooses among several tables of this path, such as ``dirichlet``.
        title: title that help shows.
        fields: fields of the table.
        settings: class that the table configures; None before the first section, and for fields of PEFT.
    """

    path: str
    kind: str
    title: str
    fields: tuple[FieldHelp, ...]
    settings: type[Any] | None = None


def find_tables(path: str) -> list[FieldTable]:
    """Find the tables that a path names; for a field, its table with only this field.

    Args:
        path: path such as ``run``, ``partition``, ``partition.dirichlet``, ``methods.floral.router``, ``run.rounds``.

    Raises:
        ConfigError: if nothing has this path; the message names the nearest.
    """
    all_tables = _every_table()
    if matches := [table for table in all_tables if path in (table.path, f"{table.path}.{table.kind}")]:
        return matches
    parent, _, name = path.rpartition(".")
    for owner in (parent, parent.rpartition(".")[0]):
        # a field of a table or of one of its kinds
        tables = [
            table for table in all_tables if owner and parent in (table.path, f"{table.path}.{table.kind}")
        ]
        if matches := [_keep_field(t, name) for t in tables if any(f.name == name for f in t.fields)]:
            return matches
    # the entry that chooses among the kinds of a table
    if name == ("source" if parent == "data" else "kind") and (
        matches := [table for table in all_tables if table.path == parent and table.kind]
    ):
        return matches
    if matches := [
        _keep_field(t, path) for t in all_tables if not t.path and any(f.name == path for f in t.fields)
    ]:
        return matches
    if matches := [table for table in list_tables() if table.path.startswith(f"{path}.")]:
        return matches
    raise ConfigError(f"there is no section or field {path!r}. {_suggest(path, all_tables)}")


def _keep_field(table: FieldTable, name: str) -> FieldTable:
    return dataclasses.replace(table, fields=tuple(f for f in table.fields if f.name == name))


def _suggest(path: str, tables: Sequence[FieldTable]) -> str:
    """Suggest paths for an unknown one: fields of that name in any table, the nearest path, or the sections."""
    paths = [table.path for table in tables if table.path]
    kind_paths = [f"{table.path}.{table.kind}" for table in tables if table.kind]
    field_paths = [f"{table.path}.{field.name}" for table in tables for field in table.fields if table.path]
    matches = [
        candidate
        for candidate in dict.fromkeys([*paths, *kind_paths, *field_paths])
        if candidate.endswith(f".{path}")
    ]
    if len(matches) == 1:
        return f"Did you mean {matches[0]!r}?"
    if matches:
        return f"There are {list_first(matches, MAX_SHOWN)}."
    if close_matches := difflib.get_close_matches(
        path, [*paths, *kind_paths, *field_paths], n=1, cutoff=0.75
    ):
        return f"Did you mean {close_matches[0]!r}?"
    return did_you_mean(path.partition(".")[0], [candidate.partition(".")[0] for candidate in paths])


MAX_SHOWN = 6
"""Largest number of tables and fields with one name that a message lists."""


@functools.cache
def list_tables() -> tuple[FieldTable, ...]:
    """List every table of a file; settings that several methods share are listed once."""
    meanings = _meanings(inspect.getdoc(ExperimentConfig))
    header = tuple(FieldHelp(n, "", repr(f.default), meanings[n]) for n, f in _header().items())
    return (FieldTable("", "", "at the top", header), *_sections())


@functools.cache
def _every_table() -> tuple[FieldTable, ...]:
    """List every table of a file, including those in the tables of each method."""
    tables = list_tables()
    paths = {table.path for table in tables}
    nested_tables = [nested_table for n, c in METHODS.items() for nested_table in _nested(f"methods.{n}", c)]
    return (*tables, *(table for table in nested_tables if table.path not in paths))


def _header() -> dict[str, pydantic.fields.FieldInfo]:
    """Fields before the first section, by name."""
    fields = ExperimentConfig.model_fields
    return {name: fields[name] for name in list(fields)[: list(fields).index("language")]}


def _table(path: str, cls: type[Any], kind: str = "", tag: str = "kind", scope: str = "") -> FieldTable:
    title = f"{path}, {tag} = {kind}" if kind else path
    return FieldTable(path, kind, f"[{title}{scope}]", tuple(list_fields(cls)), cls)


def _nested(path: str, cls: type[Any]) -> Iterator[FieldTable]:
    """Yield the tables that the fields of a table hold, and the tables nested in these."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        inner_classes = classes_in(hints[field.name])
        is_mapping = typing.get_origin(hints[field.name]) in (dict, Mapping)
        table_path = f"{path}.{field.name}{'.NAME' if is_mapping else ''}"
        tables = [
            _table(table_path, inner_class, inner_class.kind if len(inner_classes) > 1 else "")
            for inner_class in inner_classes
        ]
        deeper_tables = [table for inner_class in inner_classes for table in _nested(table_path, inner_class)]
        yield from (*tables, *{table.path: table for table in deeper_tables}.values())


def _sections() -> Iterator[FieldTable]:
    """Yield every table below the top, in the order of a file."""
    for name, field in ExperimentConfig.model_fields.items():
        if name in TAGGED:
            yield from (_table(name, cls, kind) for kind, cls in TAGGED[name][0].items())
        elif name == "data":
            yield _table("data", Preparation, scope=", any source")
            yield from (_table("data", c, n, "source") for n, c in SOURCES.items())
            yield from (_table("data", c, n, "source", " (texts)") for n, c in TEXT_SOURCES.items())
        elif name == "lora":
            yield _table("lora", LoraSettings)
            title = "[lora, with [language]: the fields of peft.LoraConfig, and]"
            yield FieldTable("lora", "", title, tuple(_list_peft_fields()), None)
        elif name == "defaults":
            yield _table("defaults", Method, scope=", of all methods")
            yield from _nested("defaults", Method)
        elif name == "methods":
            yield from (_table(f"methods.{n}", c) for n, c in METHODS.items())
            for title, cls in (
                ("methods.floral.router, methods.ensemble.router", Router),
                ("methods.NAME.training, of federated LoRA", LoRATraining),
                ("methods.fedhl.weighing", Weighing),
                ("methods.fedhl.delta_form, methods.flexlora.delta_form", DeltaForm),
            ):
                path, _, _ = title.partition(",")
                yield FieldTable(path, "", f"[{title}]", tuple(list_fields(cls)), cls)
        else:
            for cls in classes_in(field.annotation):
                yield from (table for table in (_table(name, cls), *_nested(name, cls)) if table.fields)


@dataclass(frozen=True)
class FieldHelp:
    """Help on one field."""

    name: str
    type: str
    default: str
    meaning: str


def list_fields(cls: type[Any]) -> list[FieldHelp]:
    """List the fields of a dataclass, with their meanings from its docstring and those of its bases."""
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
        type_name = f.type if isinstance(f.type, str) else getattr(f.type, "__name__", str(f.type))
        out.append(FieldHelp(f.name, type_name, default, meanings.get(f.name, "")))
    return out


def _list_peft_fields() -> list[FieldHelp]:
    """List the fields of the section ``[lora]`` of a language model that are not PEFT's."""
    meanings = _meanings(inspect.getdoc(PeftSettings))
    return [
        FieldHelp(name, str(field.annotation), repr(field.default), meanings[name])
        for name, field in PeftSettings.model_fields.items()
    ]


def _format_default(value: Any) -> str:
    """Format a default value as one would write it; a dataclass with its learning rate and its non-default fields."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return repr(value)
    arguments = [
        f"{f.name}={getattr(value, f.name)!r}"
        for f in dataclasses.fields(value)
        if f.name == "lr" or (f.default is not dataclasses.MISSING and getattr(value, f.name) != f.default)
    ]
    return f"{type(value).__name__}({', '.join(arguments)})"


def _meanings(doc: str | None) -> dict[str, str]:
    """Entries of the section ``Attributes:`` in a Google docstring, by name."""
    section = re.search(r"^Attributes:\n((?:[ ]{4}.*\n?|\n)*)", doc or "", re.MULTILINE)
    if section is None:
        return {}
    entries = re.findall(r"^ {4}(\w+): ((?:.*\n?)(?: {8}.*\n?)*)", section.group(1), re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}
