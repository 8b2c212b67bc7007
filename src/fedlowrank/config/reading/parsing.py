"""Builds dataclasses from tables with every field checked, and messages for a person."""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from types import UnionType
from typing import Any, Literal, TypeAlias, TypeVar

import pydantic

from ...core.arguments.field_checks import write_numbered
from ...core.errors import ConfigError, did_you_mean

T = TypeVar("T")
Kinds: TypeAlias = Mapping[str, type[Any]]
"""Dataclasses among which a table chooses, by the value of its tag."""

CONFIG_ERROR = "config_error"
"""Type of a pydantic error whose text is already that of a ConfigError."""

_ADAPTERS: dict[Any, pydantic.TypeAdapter[Any]] = {}


def build(cls: type[T], values: Any, path: str, origins: Mapping[str, str] | None = None) -> T:
    """Build a dataclass from a table, with every field checked.

    Args:
        cls: dataclass or pydantic model whose fields are numbers, strings, tuples or further such classes.
        values: table of the fields.
        path: path of the table, for messages.
        origins: path of the table that a field comes from, for fields from another table.

    Raises:
        ConfigError: if fields are unknown, missing or of the wrong type; the message has one line for each.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{path} must be a table of fields, not {values!r}")
    origins = origins or {}
    hints = _field_hints(cls)
    for name in values:
        if name in hints:
            refuse_conversions(hints[name], values[name], f"{origins.get(name, path)}.{name}")
    try:
        built: T = _adapter(cls).validate_python({path: dict(values)})[path]
    except pydantic.ValidationError as error:
        raise config_error(error, cls, 1, origins) from error
    return built


def build_tagged(
    classes: Kinds,
    values: Any,
    path: str,
    default: str,
    tag: str = "kind",
    other_fields: Sequence[str] = (),
    advice: str = "",
) -> Any:
    """Build one of several dataclasses from a table, chosen by the table's tag.

    Args:
        classes: dataclasses by the value of their tag.
        values: table of the fields.
        path: path of the table, for messages.
        default: tag of a table that has none.
        tag: name of the entry that chooses.
        other_fields: names of further fields of the table that other code reads.
        advice: further tags that are possible, for the message about an unknown one.

    Raises:
        ConfigError: if there is no such tag, or a field is wrong.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{path} must be a table of fields, not {values!r}")
    refuse_misspelled_tag(values, path, tag)
    name, fields = str(values.get(tag, default)), {n: _field_names(cls) for n, cls in classes.items()}
    if name not in classes:
        raise ConfigError(f"{path}: there is no {name!r}. {did_you_mean(name, classes)}{advice}")
    for key in values:
        if key == tag or key in fields[name]:
            continue
        if tags := [other_tag for other_tag in classes if key in fields[other_tag]]:
            raise ConfigError(
                f"{path}.{key}: there is no such field of {tag} {name!r}; it is one of "
                f"{', '.join(map(repr, tags))}. Set {path}.{tag}={tags[0]}, or leave it out."
            )
        if other_fields or not fields[name]:
            suggestion = did_you_mean(key, [tag, *fields[name], *other_fields])
            raise ConfigError(f"{path}.{key}: there is no such field of {tag} {name!r}. {suggestion}")
    return build(classes[name], {key: value for key, value in values.items() if key != tag}, path)


def refuse_misspelled_tag(values: Mapping[str, Any], path: str, tag: str) -> None:
    """Refuse a table without a tag if one of its keys resembles the tag, because the default tag would misread the other keys."""
    if tag not in values and (matches := difflib.get_close_matches(tag, values, n=1, cutoff=0.75)):
        raise ConfigError(
            f"{path}.{matches[0]}: there is no such field. Did you mean {path}.{tag}={values[matches[0]]}?"
        )


def refuse_conversions(hint: Any, value: Any, path: str) -> None:
    """Refuse values that pydantic would convert to another type, such as ``"2"`` to a number, and integers above 64 bits.

    Args:
        hint: type that the value is read as, such as a dataclass for a table.
        value: value from a file; a value of another form than the type is left to pydantic.
        path: path of the value, for messages.

    Raises:
        ConfigError: if there is such a value; the message names the first one and what to write.
    """
    options = list(_options(hint))
    for option in options if isinstance(value, Mapping | list | tuple) else ():
        origin, inner = typing.get_origin(option), typing.get_args(option)
        if isinstance(value, Mapping):
            hints = dict.fromkeys(value, inner[1]) if origin in (dict, Mapping) else _field_hints(option)
            for name in value:
                if name in hints:
                    refuse_conversions(hints[name], value[name], f"{path}.{name}")
        elif origin in (tuple, list, Sequence):
            for item in value:
                refuse_conversions(inner[0], item, path)
    if int in options and float not in options and type(value) is int and abs(value) >= 2**63:
        raise ConfigError(f"{path}: whole numbers have at most 64 bits, as in TOML; it is {value}")
    if type_name := _converted_to(options, value):
        name = path.rpartition(".")[2]
        advice = f". Write {name} = {value.strip().lower()} without quotes" if isinstance(value, str) else ""
        raise ConfigError(f"{path}: input should be a valid {type_name}; it is {value!r}{advice}")


def _converted_to(options: Sequence[Any], value: Any) -> str:
    """Name of the type to which pydantic would convert a value of another type; empty if it would not."""
    scalar_types = set(options) & {int, float, bool}
    takes_text = any(o in (str, Any) or typing.get_origin(o) is Literal for o in options)
    if not scalar_types or (takes_text and isinstance(value, str)):
        return ""
    if scalar_types == {bool}:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return "boolean"
        return "boolean" if isinstance(value, str) and value.strip().lower() in ("true", "false") else ""
    number = "number" if float in scalar_types else "integer"
    if isinstance(value, bool):
        return "" if bool in scalar_types else number
    return number if isinstance(value, str) and _is_number(value) else ""


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _options(hint: Any) -> Iterator[Any]:
    """Yield the types of a union, such as ``int`` and ``None`` for ``int | None``."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        yield from _options(inner[0])
    elif origin in (typing.Union, UnionType):
        for option in inner:
            yield from _options(option)
    else:
        yield hint


def _field_hints(cls: Any) -> Mapping[str, Any]:
    """Types of the fields of a dataclass or pydantic model by name; empty for any other type."""
    is_table = isinstance(cls, type) and (
        dataclasses.is_dataclass(cls) or issubclass(cls, pydantic.BaseModel)
    )
    hints = typing.get_type_hints(cls) if is_table else {}
    return {name: hints[name] for name in _field_names(cls)} if is_table else hints


def print_tagged(classes: Kinds, value: Any, short: bool, tag: str = "kind") -> dict[str, Any]:
    """Turn a dataclass into the table that :func:`build_tagged` makes it from."""
    name = next(name for name, cls in classes.items() if cls is type(value))
    return {tag: name, **print_fields(value, short)}


def print_fields(value: Any, short: bool) -> dict[str, Any]:
    """Turn a dataclass into a table; ``short`` leaves out fields at their defaults."""
    tables = _adapter(type(value)).dump_python({"": value}, mode="json", exclude_defaults=short)
    return dict(tables[""])


def _adapter(cls: Any) -> pydantic.TypeAdapter[Any]:
    """Make the validator of a dataclass once, because making it takes ten times as long as using it."""
    if cls not in _ADAPTERS:
        # a dataclass takes its configuration from the dict around it; by default unknown keys are ignored
        config = pydantic.ConfigDict(extra="forbid", ser_json_inf_nan="constants")
        _ADAPTERS[cls] = pydantic.TypeAdapter(dict[str, cls], config=config)
    return _ADAPTERS[cls]


def config_error(
    error: pydantic.ValidationError,
    cls: type[Any],
    depth: int = 0,
    origins: Mapping[str, str] | None = None,
) -> ConfigError:
    """Explain a validation error of pydantic with one line for each field.

    Args:
        error: error that pydantic raised.
        cls: class that was to be built.
        depth: number of leading entries of an error's location that lie above the class.
        origins: see :func:`build`.
    """
    return ConfigError("\n".join(_explain(cls, depth, e, origins or {}) for e in error.errors()))


def _explain(cls: type[Any], depth: int, error: Any, origins: Mapping[str, str]) -> str:
    value, context, error_type = error["input"], error.get("ctx", {}), error["type"]
    if error_type == CONFIG_ERROR:
        return str(context["text"])
    *parents, name = error["loc"]
    shown_path, owners = _locate(cls, parents[depth:])
    table = ".".join(map(str, parents[:depth]))
    origin = origins.get(str(error["loc"][depth]), table) if len(error["loc"]) > depth else table
    field_path = ".".join([*([origin] if origin else []), *shown_path, str(name)])
    if error_type in ("unexpected_keyword_argument", "extra_forbidden"):
        problem = (
            f"{field_path}: there is no such field" if "." in field_path else f"there is no section {name!r}"
        )
        if origin != table and not shown_path:
            problem = f"{field_path}: {table} has no such field"
        names = [n for owner in owners for n in _field_names(owner)]
        prefix = field_path.removesuffix(str(name))
        if numbered_fields := write_numbered(str(name), value, names, prefix):
            return f"{problem}. Write {numbered_fields}"
        if inner := _find_inner(owners, str(name)):
            return f"{problem}. Did you mean {prefix}{inner}={value}?"
        return f"{problem}. {did_you_mean(str(name), names)}"
    if error_type == "missing":
        return f"{field_path}: this field is needed"
    if error_type == "union_tag_invalid" and not isinstance(value, Mapping):
        tags = re.findall(r"'([^']*)'", context["expected_tags"])
        tag = (difflib.get_close_matches(str(value), tags, n=1) or tags)[0]
        return (
            f"{field_path} must be a table of fields, not {value!r}. Write {field_path}.kind={tag}, or in a file "
            f"{name} = {{ kind = {json.dumps(tag)} }}. {_suggest(value, context['expected_tags'])}"
        )
    if error_type == "union_tag_invalid":
        field_path, value, context = (
            f"{field_path}.kind",
            context["tag"],
            {"expected": context["expected_tags"]},
        )
    if error_type in ("literal_error", "union_tag_invalid"):
        return f"{field_path}: {value!r} is no choice. {_suggest(value, context['expected'])}"
    if error_type == "tuple_type" and isinstance(value, str | int | float):
        return f"{field_path}: a list is needed, such as [{json.dumps(value)}]; it is {value!r}"
    if error_type in ("dataclass_type", "model_type", "dict_type"):
        return f"{field_path} must be a table of fields, not {value!r}"
    return f"{field_path}: {error['msg'][0].lower()}{error['msg'][1:]}; it is {value!r}"


def _suggest(value: Any, expected: str) -> str:
    """Suggest the nearest known word, or list all; pydantic lists them as ``'a', 'b' or 'c'``."""
    choices = re.findall(r"'([^']*)'", expected)
    return f"Known: {expected}." if not choices else did_you_mean(str(value), choices)


def _locate(cls: type[Any], path: Sequence[str | int]) -> tuple[list[str], list[type[Any]]]:
    """Path of a table as its file writes it, and the classes that the table may be."""
    shown_path, owners = [], [cls]
    for key in path:
        all_hints = [typing.get_type_hints(owner) for owner in owners]
        hints = [class_hints[key] for class_hints in all_hints if key in class_hints]
        tagged = [owner for owner in owners if getattr(owner, "kind", None) == key]
        if tagged and not hints:
            # this key is the tag by which pydantic chose among several classes
            owners = tagged
            continue
        shown_path.append(str(key))
        owners = [inner for hint in hints for inner in classes_in(hint)] or owners
    return shown_path, owners


def _find_inner(owners: Sequence[type[Any]], name: str) -> str:
    """Path ``field.name`` of a field that is nested one table deeper; empty if there is none."""
    for owner in owners:
        hints = typing.get_type_hints(owner)
        for outer in _field_names(owner):
            if any(name in _field_names(inner) for inner in classes_in(hints[outer])):
                return f"{outer}.{name}"
    return ""


def classes_in(hint: Any) -> list[type[Any]]:
    """Dataclasses in a type, such as in ``Mapping[str, Group] | None``."""
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return [hint]
    return [cls for inner in typing.get_args(hint) for cls in classes_in(inner)]


def _field_names(cls: type[Any]) -> list[str]:
    if issubclass(cls, pydantic.BaseModel):
        return list(cls.model_fields)
    return [field.name for field in dataclasses.fields(cls) if field.init]
