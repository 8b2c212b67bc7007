"""Raw tables of an experiment before they are parsed: files that extend others, overrides, values."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..core.errors import ConfigError


def read_tables(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Read an experiment file, the files it extends, and overrides.

    Args:
        path: of a TOML file.
        overrides: ``section.field=value``, the value in TOML or else a string.

    Returns:
        The merged tables, unchecked.

    Raises:
        ConfigError: if a file is missing or is not TOML, or an override has another form.
    """
    merged = _read_file(path, ())
    for text in overrides:
        merge_tables(merged, parse_override(text))
    return merged


def _read_file(path: Path, above: tuple[Path, ...]) -> dict[str, Any]:
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
    merged = _read_file(path.parent / str(base), (*above, path.resolve()))
    merge_tables(merged, found)
    return merged


def merge_tables(into: dict[str, Any], new: Mapping[str, Any]) -> None:
    """Lay nested tables over others, in place; one that changes its ``kind`` or ``source`` starts afresh."""
    for key, value in new.items():
        old = into.get(key)
        tags = [t for t in ("kind", "source") if isinstance(value, Mapping) and t in value]
        if isinstance(old, dict) and isinstance(value, Mapping) and all(old.get(t) == value[t] for t in tags):
            merge_tables(old, value)
        else:
            into[key] = dict(value) if isinstance(value, Mapping) else value


def parse_override(text: str) -> dict[str, Any]:
    """Turn ``a.b.c=value`` into nested tables.

    Raises:
        ConfigError: if there is no ``=`` or no name.
    """
    name, sign, value = text.partition("=")
    parts = name.strip().split(".")
    if not sign or not all(parts):
        raise ConfigError(f"{text!r} is not of the form section.field=value, such as run.rounds=20")
    found: Any = parse_value(value.strip())
    for part in reversed(parts):
        found = {part: found}
    result: dict[str, Any] = found
    return result


def parse_variation(text: str) -> tuple[str, list[str]]:
    """Split ``section.field=v1,v2,...`` into the field's name and the texts of its values.

    Raises:
        ConfigError: if it has another form.
    """
    name, sign, values = text.partition("=")
    if not (sign and values and name.strip()):
        raise ConfigError(f"--vary takes section.field=v1,v2,..., such as run.rounds=10,20; not {text!r}")
    return name.strip(), [value.strip() for value in values.split(",")]


def parse_value(text: str) -> Any:
    """Parse a TOML value; what is none is a string, so that strings need no quotes."""
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return text
    except RecursionError as error:
        raise ConfigError(f"the value {text[:40]}... nests arrays too deeply; write it flatter") from error


def format_toml(tables: Mapping[str, Any], path: tuple[str, ...] = ()) -> str:
    """Format nested tables as TOML; ``tomllib`` reads the same tables from it.

    Args:
        tables: of strings, numbers, booleans, lists and further tables.
        path: names of the tables above.
    """
    nested = {key: value for key, value in tables.items() if isinstance(value, Mapping)}
    lines = [f"{_format_key(key)} = {_format_value(tables[key])}\n" for key in tables if key not in nested]
    for key, value in nested.items():
        here = (*path, key)
        title = f"\n[{'.'.join(map(_format_key, here))}]\n"
        # a table of tables alone needs no title of its own
        alone = bool(value) and all(isinstance(inner, Mapping) for inner in value.values())
        lines.append(("" if alone else title) + format_toml(value, here))
    return "".join(lines)


def _format_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _format_value(key)


def _format_value(value: Any) -> str:
    if isinstance(value, str):
        # JSON escapes as TOML does, but leaves DEL as it is
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_format_key(k)} = {_format_value(v)}" for k, v in value.items()) + " }"
    return f"[{', '.join(map(_format_value, value))}]" if isinstance(value, (list, tuple)) else repr(value)
