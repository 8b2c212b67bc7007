"""Experiment files: TOML whose sections are the fields of dataclasses, checked with messages for a person."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import re
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pydantic

from ..core.errors import ConfigError, did_you_mean

T = TypeVar("T")

SECTIONS = (
    "name", "title", "paper", "method", "compare", "seeds", "vary", "data", "partition", "split", "concept", "augment",
    "model", "language", "lora", "run", "network", "defaults", "methods", "reference",
)  # fmt: skip
"""What an experiment file may hold at its top level; ``extends`` besides, which names a file to start from."""


def read(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Read an experiment file, the files it extends, and overrides.

    Args:
        path: of a TOML file.
        overrides: ``section.field=value``, the value in TOML or else a string.

    Returns:
        The merged tables; sections and fields are checked when the experiment is loaded.

    Raises:
        ConfigError: if a file is missing or is not TOML, or an override has another form.
    """
    merged = _file(path, ())
    for text in overrides:
        merge(merged, override(text))
    return merged


def check_sections(tables: Mapping[str, Any]) -> None:
    """Refuse what an experiment file does not know at its top level.

    Raises:
        ConfigError: naming the nearest section.
    """
    for section in tables:
        if section not in SECTIONS:
            raise ConfigError(f"there is no section {section!r}. {did_you_mean(section, SECTIONS)}")


def _file(path: Path, above: tuple[Path, ...]) -> dict[str, Any]:
    if path.resolve() in above:
        raise ConfigError(f"{path} extends itself")
    try:
        found = tomllib.loads(path.read_text())
    except FileNotFoundError as error:
        raise ConfigError(f"there is no experiment file {path}") from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} is not a TOML file that can be read: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{path} nests arrays or tables too deeply to be read; write it flatter") from error
    base = found.pop("extends", None)
    if base is None:
        return found
    merged = _file(path.parent / str(base), (*above, path.resolve()))
    merge(merged, found)
    return merged


def override(text: str) -> dict[str, Any]:
    """``a.b.c=value`` as nested tables.

    Raises:
        ConfigError: if there is no ``=`` or no name.
    """
    name, sign, value = text.partition("=")
    parts = name.strip().split(".")
    if not sign or not all(parts):
        raise ConfigError(f"{text!r} is not of the form section.field=value, such as run.rounds=20")
    found: Any = literal(value.strip())
    for part in reversed(parts):
        found = {part: found}
    result: dict[str, Any] = found
    return result


def varied(text: str) -> tuple[str, list[Any]]:
    """``section.field=v1,v2,...`` as the field's name and its values; no values for an empty text.

    Raises:
        ConfigError: if it has another form.
    """
    name, sign, values = text.partition("=")
    if text and not (sign and values and name.strip()):
        raise ConfigError(f"--vary takes section.field=v1,v2,..., such as run.participation=0.1,0.5,1.0; not {text!r}")
    return name.strip(), [literal(v.strip()) for v in values.split(",")] if values else []


def literal(text: str) -> Any:
    """A TOML value, or the text itself where it is none (so that strings need no quotes)."""
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return text
    except RecursionError as error:
        raise ConfigError(f"the value {text[:40]}... nests arrays too deeply to be read; write it flatter") from error


def merge(into: dict[str, Any], new: Mapping[str, Any]) -> None:
    """Lay nested tables over others, in place. A table that changes its ``kind`` or ``source`` starts afresh."""
    for key, value in new.items():
        old = into.get(key)
        tags = [t for t in ("kind", "source") if isinstance(value, Mapping) and t in value]
        if isinstance(old, dict) and isinstance(value, Mapping) and all(old.get(t) == value[t] for t in tags):
            merge(old, value)
        else:
            into[key] = dict(value) if isinstance(value, Mapping) else value


def build(cls: type[T], values: Any, path: str) -> T:
    """Make a dataclass from a table, every field checked.

    Args:
        cls: a dataclass whose fields are numbers, strings, tuples or further such dataclasses.
        values: the table.
        path: of the table, for messages.

    Raises:
        ConfigError: for every field that is unknown, missing or of the wrong type; one line each.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{path} must be a table of fields, not {values!r}")
    kind: Any = cls  # mypy takes no class for hashable
    try:
        found: T = _adapter(kind).validate_python(dict(values))
    except pydantic.ValidationError as error:
        lines = [_line(cls, path, e) for e in error.errors()]
        raise ConfigError("\n".join(lines)) from error
    return found


@functools.lru_cache(maxsize=256)
def _adapter(cls: type[Any]) -> pydantic.TypeAdapter[Any]:
    """What checks the fields of a dataclass; to make it takes ten times as long as to use it."""
    for each in _nested(cls):
        # pydantic would pass over unknown keys in silence
        if "__pydantic_config__" not in vars(each):
            each.__pydantic_config__ = pydantic.ConfigDict(extra="forbid")
    return pydantic.TypeAdapter(cls)


def _line(cls: type[Any], path: str, error: Any) -> str:
    tags = _tags(cls)
    where = ".".join([path, *(str(p) for p in error["loc"] if p not in tags)])
    given, context = error["input"], error.get("ctx", {})
    if error["type"] == "unexpected_keyword_argument":
        name = str(error["loc"][-1])
        owners = [cls] if len(error["loc"]) == 1 else _nested(cls)[1:]
        known = [f.name for owner in owners for f in dataclasses.fields(owner) if f.init]
        return f"{where}: there is no such field. {did_you_mean(name, known)}"
    if error["type"] == "missing":
        return f"{where}: this field is needed"
    if error["type"] == "literal_error":
        return f"{where}: {given!r} is no choice. {_choice(given, context['expected'])}"
    if error["type"] == "union_tag_invalid":
        return f"{where}.kind: {context['tag']!r} is no choice. {_choice(context['tag'], context['expected_tags'])}"
    if error["type"] == "tuple_type" and isinstance(given, str | int | float):
        return f"{where}: a list is needed, such as [{json.dumps(given)}]; it is {given!r}"
    return f"{where}: {error['msg'][0].lower()}{error['msg'][1:]}; it is {given!r}"


def _choice(given: Any, expected: str) -> str:
    """The word that was meant, or all that are known; pydantic lists them as ``'a', 'b' or 'c'``."""
    words = re.findall(r"'([^']*)'", expected)
    return f"Known: {expected}." if not words else did_you_mean(str(given), words)


def _tags(cls: type[Any]) -> set[str]:
    """Values of ``kind`` by which pydantic chooses a dataclass; it names them in the path of a field, where no file does."""
    kinds = [f.default for c in _nested(cls)[1:] for f in dataclasses.fields(c) if f.name == "kind"]
    return {k for k in kinds if isinstance(k, str)}


def _nested(cls: type[Any]) -> list[type[Any]]:
    """A dataclass and every dataclass among the types of its fields."""
    found: list[type[Any]] = []

    def visit(hint: Any) -> None:
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            if hint not in found:
                found.append(hint)
                for inner in typing.get_type_hints(hint).values():
                    visit(inner)
        elif typing.get_origin(hint) is not None or isinstance(hint, types.UnionType):
            for inner in typing.get_args(hint):
                visit(inner)

    visit(cls)
    return found


@dataclasses.dataclass(frozen=True)
class Field:
    """What ``--help`` says of one field."""

    name: str
    type: str
    default: str
    meaning: str


def fields_of(cls: type[Any]) -> list[Field]:
    """The fields of a dataclass, with the meaning that its docstring and those of its bases give."""
    meanings: dict[str, str] = {}
    for owner in reversed(cls.__mro__):
        meanings |= _meanings(inspect.getdoc(owner) if "__doc__" in vars(owner) else None)
    out = []
    for f in dataclasses.fields(cls):
        if f.default is not dataclasses.MISSING:
            default = _short(f.default)
        elif f.default_factory is not dataclasses.MISSING:
            default = repr(f.default_factory())
        else:
            default = "(needed)"
        kind = f.type if isinstance(f.type, str) else getattr(f.type, "__name__", str(f.type))
        out.append(Field(f.name, kind, default, meanings.get(f.name, "")))
    return out


def _short(value: Any) -> str:
    """A default as one would write it: of a dataclass the learning rate and what is not its default."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return repr(value)
    told = [
        f"{f.name}={getattr(value, f.name)!r}"
        for f in dataclasses.fields(value)
        if f.name == "lr" or (f.default is not dataclasses.MISSING and getattr(value, f.name) != f.default)
    ]
    return f"{type(value).__name__}({', '.join(told)})"


def _meanings(doc: str | None) -> dict[str, str]:
    """The entries of the section ``Attributes:`` of a Google docstring."""
    section = re.search(r"^Attributes:\n((?:[ ]{4}.*\n?|\n)*)", doc or "", re.MULTILINE)
    if section is None:
        return {}
    entries = re.findall(r"^ {4}(\w+): ((?:.*\n?)(?: {8}.*\n?)*)", section.group(1), re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}
