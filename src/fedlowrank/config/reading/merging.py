"""Raw tables of an experiment before they are parsed: files that extend others, overrides, values."""

from __future__ import annotations

import copy
import json
import logging
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError
from ..sections.alternatives import find_alternatives
from .toml_files import advise_path, find_escaped_path, read_toml

logger = logging.getLogger(__name__)
_LIKE_TOML = re.compile(r"(?P<truth>[Tt]rue|[Ff]alse|TRUE|FALSE)|[+-]?(\d+\.|\.\d+)([eE][+-]?\d+)?")
"""Values that the command line accepts although TOML writes them differently: True, .5 and 5."""


@dataclass(frozen=True)
class LayeredTables:
    """Tables of an experiment, and the overrides that replace their values, independent of the order of overrides.

    Attributes:
        tables: tables of the file and of those that it extends.
        overrides: nested tables of all overrides; each field occurs once.
        varied: names of the overridden fields whose values differ between the runs of a comparison.
        logged: log messages that were written already, so that each is written once.
    """

    tables: Mapping[str, Any]
    overrides: Mapping[str, Any] = field(default_factory=dict)
    varied: tuple[str, ...] = ()
    logged: set[str] = field(default_factory=set, compare=False)

    @classmethod
    def read(cls, path: Path, overrides: Sequence[str] = ()) -> LayeredTables:
        """Read an experiment file and overrides. An experiment without a name gets the name of its file.

        Args:
            path: path of a TOML file.
            overrides: overrides ``section.field=value``; the value is TOML, or else a string.

        Raises:
            ConfigError: if a file is missing or is not TOML, or an override has another form or contradicts another
                one.
        """
        tables = _read_file(path, ())
        # if the file's name cannot be a folder's name, the experiment keeps its default name
        if "name" not in tables and is_folder_name(path.stem):
            tables = {"name": path.stem, **tables}
        return cls(tables, parse_overrides(overrides))

    def join(self, overrides: Sequence[str]) -> LayeredTables:
        """Add overrides; raise ConfigError if one contradicts another one."""
        all_overrides = copy.deepcopy(dict(self.overrides))
        for text in overrides:
            _join(all_overrides, parse_override(text), "")
        return replace(self, overrides=all_overrides)

    def overrides_field(self, name: str) -> bool:
        """Whether an override sets a field, given by its dotted name, or a part of the field."""
        value: Any = self.overrides
        for part in name.split("."):
            if not isinstance(value, Mapping) or part not in value:
                return False
            value = value[part]
        return True

    def merge(self) -> dict[str, Any]:
        """Merge the tables with the overrides, unchecked, and log the fields that the overrides discard."""
        merged = _expand_grids(self.tables)
        for text in lay_over(merged, _expand_grids(self.overrides)):
            if text not in self.logged:
                self.logged.add(text)
                logger.info(text)
        return merged


def is_folder_name(name: str) -> bool:
    """Whether a name can be that of a folder: a single part of a path on every system."""
    return bool(name.strip(".")) and not re.search(r"[/\\\x00-\x1f\x7f]", name)


def read_tables(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Read an experiment file, the files it extends, and overrides; see :class:`LayeredTables`.

    Returns:
        Merged tables, unchecked.
    """
    return LayeredTables.read(path, overrides).merge()


def _read_file(path: Path, parents: tuple[Path, ...]) -> dict[str, Any]:
    if path.resolve() in parents:
        raise ConfigError(f"{path} extends itself")
    tables = read_toml(path)
    base = tables.pop("extends", None)
    if base is None:
        return tables
    merged = _read_file(path.parent / str(base), (*parents, path.resolve()))
    for text in merge_tables(merged, tables):
        logger.info(text)
    return merged


def lay_over(base: dict[str, Any], overrides: Mapping[str, Any]) -> list[str]:
    """Merge overrides into the tables of an experiment in place.

    An override of a part of a method's table, such as ``methods.NAME.optimizer.momentum``, changes what the method has
    without it: the table ``[methods.NAME.optimizer]``, or else that of ``[defaults]``.

    Returns:
        The lines of :func:`merge_tables`.
    """
    lines = merge_tables(base, {name: value for name, value in overrides.items() if name != "methods"})
    for name, top in find_inherited(base, overrides):
        base.setdefault("methods", {}).setdefault(name, {})[top] = copy.deepcopy(base["defaults"][top])
    return lines + merge_tables(base, {"methods": overrides["methods"]} if "methods" in overrides else {})


def find_inherited(tables: Mapping[str, Any], overrides: Mapping[str, Any]) -> set[tuple[str, str]]:
    """Find the methods and fields of which an override changes a part and the tables have a default only."""
    defaults, methods = (tables.get(section, {}) for section in ("defaults", "methods"))
    overridden = overrides.get("methods", {})
    if not all(isinstance(table, Mapping) for table in (defaults, methods, overridden)):
        # refused with its name when the tables are parsed
        return set()
    return {
        (name, top)
        for name, fields in overridden.items()
        if isinstance(fields, Mapping) and isinstance(methods.get(name, {}), Mapping)
        for top, value in fields.items()
        if isinstance(value, Mapping)
        and isinstance(defaults.get(top), Mapping)
        and top not in methods.get(name, {})
    }


def merge_tables(base: dict[str, Any], overlay: Mapping[str, Any], path: str = "") -> list[str]:
    """Merge nested tables into others in place; the new values replace the old ones.

    If a table gets another ``kind``, ``source`` or value of another switch, fields that the new value does not read
    are removed.

    Args:
        base: tables that are changed.
        overlay: tables whose values are added or replace those of ``base``.
        path: path of both tables.

    Returns:
        A line for each table from which fields are removed.
    """
    lines = []
    for key, value in overlay.items():
        old_value, field_path = base.get(key), f"{path}.{key}" if path else key
        if not isinstance(old_value, dict) or not isinstance(value, Mapping):
            base[key] = copy.deepcopy(dict(value)) if isinstance(value, Mapping) else value
            continue
        if (alternatives := find_alternatives(field_path)) and (
            unread := alternatives.unread(old_value, value)
        ):
            lost_fields = ", ".join(f"{field_path}.{name} = {old_value.pop(name)!r}" for name in unread)
            tag = alternatives.switch.field
            lines.append(
                f"{field_path}.{tag} = {value[tag]!r} overrides the file, in which {lost_fields} has no effect then"
            )
        lines += merge_tables(old_value, value, field_path)
    return lines


def parse_overrides(texts: Sequence[str]) -> dict[str, Any]:
    """Turn overrides into nested tables, which do not depend on the order of the overrides.

    Raises:
        ConfigError: if one is not of the form ``a.b.c=value``, or two give one field different values.
    """
    overrides_by_part: dict[str, Any] = {}
    for text in texts:
        _join(overrides_by_part, parse_override(text), "")
    return overrides_by_part


def _expand_grids(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Copy tables with the dotted fields of ``[tune]`` as nested tables, so that either form overrides the other."""
    expanded = copy.deepcopy(dict(tables))
    tune = expanded.get("tune")
    if isinstance(tune, dict):
        if isinstance(tune.get("grid"), dict):
            tune["grid"] = join_fields(tune["grid"])
        methods = tune.get("methods")
        if isinstance(methods, dict):
            tune["methods"] = {
                n: join_fields(grid) if isinstance(grid, dict) else grid for n, grid in methods.items()
            }
    return expanded


def join_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Turn values by dotted field into nested tables; raise ConfigError if a field has two values."""
    tables: dict[str, Any] = {}
    for name, value in values.items():
        nested = value
        for part in reversed(name.split(".")):
            nested = {part: nested}
        _join(tables, nested, "")
    return tables


def _join(target: dict[str, Any], tables: Mapping[str, Any], path: str) -> None:
    """Merge nested tables into others in place; raise ConfigError if a field has two values."""
    for key, value in tables.items():
        field_path = f"{path}.{key}" if path else key
        if key not in target:
            target[key] = copy.deepcopy(value)
        elif isinstance(target[key], dict) and isinstance(value, Mapping):
            _join(target[key], value, field_path)
        elif (type(target[key]), target[key]) != (type(value), value):
            raise ConfigError(
                f"{field_path} is given twice, as {target[key]!r} and as {value!r}; leave one of them out"
            )


def parse_override(text: str) -> dict[str, Any]:
    """Turn ``a.b.c=value`` into nested tables; a part of the name may be quoted, as in ``a."b.c"``.

    Raises:
        ConfigError: if there is no ``=`` or no name.
    """
    name, sign, value = text.partition("=")
    parts = _split_name(name.strip())
    if not sign or not all(parts):
        raise ConfigError(f"{text!r} is not of the form section.field=value, such as run.rounds=20")
    parsed: Any = parse_value(value.strip(), name.strip())
    for part in reversed(parts):
        parsed = {part: parsed}
    result: dict[str, Any] = parsed
    return result


def _split_name(name: str) -> list[str]:
    """Split a dotted name into its parts, which may be quoted as in TOML."""
    if '"' not in name and "'" not in name:
        return name.split(".")
    try:
        nested: Any = tomllib.loads(f"{name} = 0")
    except tomllib.TOMLDecodeError:
        return name.split(".")
    parts = []
    while isinstance(nested, dict):
        ((part, nested),) = nested.items()
        parts.append(part)
    return parts


def parse_variation(text: str) -> tuple[str, list[str]]:
    """Split ``section.field=v1,v2,...`` into the field's name and the texts of its values.

    Commas in brackets and in quotes belong to a value, as in ``model.hidden=[8],[16,16]``.

    Raises:
        ConfigError: if the text has another form.
    """
    name, sign, values = text.partition("=")
    if not (sign and values and name.strip()):
        raise ConfigError(f"vary takes section.field=v1,v2,..., such as run.rounds=10,20; not {text!r}")
    return name.strip(), [value.strip() for value in _split_values(values)]


def _split_values(text: str) -> list[str]:
    """Split at commas outside of brackets and quotes, or at all commas if one of these is not closed."""
    values, depth, quote, is_escaped = [""], 0, "", False
    for character in text:
        if character == "," and not depth and not quote:
            values.append("")
            continue
        if quote:
            quote = "" if character == quote and not is_escaped else quote
        # inside a word, as in O'Neil, it is an apostrophe
        elif character in "\"'" and (depth or not values[-1].strip()):
            quote = character
        else:
            depth += (character in "[{") - (character in "]}")
        is_escaped = character == "\\" and not is_escaped and quote == '"'
        values[-1] += character
    return text.split(",") if depth or quote else values


def parse_value(text: str, name: str = "value") -> Any:
    """Parse a TOML value; any other text is a string, so that strings need no quotes.

    Args:
        text: text of the value.
        name: name of the field, for messages.

    Raises:
        ConfigError: if the text begins a quoted string that is not valid, or nests too deeply.
    """
    parsed: Any
    try:
        parsed = tomllib.loads(f"v = {text}")
    except tomllib.TOMLDecodeError as error:
        if (parsed := _LIKE_TOML.fullmatch(text)) is not None:
            return text.lower() == "true" if parsed["truth"] else float(text)
        if len(text) > 1 and text[0] == text[-1] == '"':
            raise ConfigError(f"{name}={text} is no text of TOML. {advise_path(text[1:-1])}") from error
        return text
    except RecursionError as error:
        raise ConfigError(f"the value {text[:40]}... nests arrays too deeply; write it flatter") from error
    value = parsed.pop("v")
    if parsed:
        # a line break in the text started another entry
        return text
    if isinstance(value, str) and (problem := find_escaped_path(value)):
        raise ConfigError(f"{name}={text} {problem}")
    return value


def format_toml(tables: Mapping[str, Any], path: tuple[str, ...] = ()) -> str:
    """Format nested tables as TOML, which ``tomllib`` parses to the same tables.

    Args:
        tables: tables of strings, numbers, booleans, lists and further tables.
        path: names of the enclosing tables.
    """
    nested = {key: value for key, value in tables.items() if isinstance(value, Mapping)}
    lines = [f"{format_key(key)} = {_format_value(tables[key])}\n" for key in tables if key not in nested]
    for key, value in nested.items():
        table_path = (*path, key)
        title = f"\n[{'.'.join(map(format_key, table_path))}]\n"
        # a table that holds only tables needs no title of its own
        has_only_tables = bool(value) and all(isinstance(inner, Mapping) for inner in value.values())
        lines.append(("" if has_only_tables else title) + format_toml(value, table_path))
    return "".join(lines)


def format_key(key: str) -> str:
    """Format a name as a key of TOML, in quotes where it needs them."""
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _format_value(key)


def _format_value(value: Any) -> str:
    if isinstance(value, str):
        # JSON escapes strings like TOML, but does not escape DEL
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{format_key(k)} = {_format_value(v)}" for k, v in value.items()) + " }"
    return f"[{', '.join(map(_format_value, value))}]" if isinstance(value, (list, tuple)) else repr(value)
