"""Experiment files as people write them: what is wrong in which line, and what to type instead."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError
from ...core.io.text import decode_text

_QUOTES = "“”„‟‘’‚‛«»"
_ESCAPED_PATH = re.compile(r"(?:[A-Za-z]:|\\).*[\x08\t\n\f\r]", re.DOTALL)
"""A path of Windows in which an escape such as that of a line break was read."""


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file.

    Raises:
        ConfigError: if it is missing or is not TOML; the message names the line.
    """
    try:
        text = decode_text(path.read_bytes())
    except FileNotFoundError as error:
        raise ConfigError(f"there is no experiment file {path}") from error
    except IsADirectoryError as error:
        raise ConfigError(f"{path} is a folder; name a TOML file in it") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not a TOML file that can be read: {error}") from error
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"{path} is not a TOML file that can be read: {explain_toml(text, error)}"
        ) from error
    except RecursionError as error:
        raise ConfigError(f"{path} nests arrays or tables too deeply to be read; write it flatter") from error
    if not tables:
        raise ConfigError(f"{path} holds no settings; `fedlowrank fields` lists them")
    for key, value in _strings(tables, ""):
        if wrong := find_escaped_path(value):
            raise ConfigError(f"{path}: {key} {wrong}")
    return tables


def find_escaped_path(value: str) -> str:
    """Say that a path of Windows holds a control character where it was written with a backslash; else nothing."""
    if not _ESCAPED_PATH.match(value):
        return ""
    raw = repr(value)[1:-1].replace("\\\\", "\\")
    return f"holds a control character: in double quotes a backslash begins an escape. {advise_path(raw)}"


def _strings(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """All strings in nested tables and lists, with the keys that they stand at."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _strings(inner, f"{key}.{name}" if key else name)
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner, key)


def explain_toml(text: str, error: tomllib.TOMLDecodeError) -> str:
    """What is wrong in words for a person, where that can be told from the line; else as tomllib says it."""
    lines = text.replace("\r\n", "\n").rstrip("\n").split("\n")
    # the other place that tomllib names is the end of the document
    match = re.search(r"at line (\d+)", str(error))
    number = int(match[1]) if match else len(lines)
    line = lines[min(number, len(lines)) - 1].strip()
    where, problem = f"line {number} ({line}):", re.sub(r" \(at .*\)$", "", str(error))
    key, _, value = (part.strip() for part in line.partition("="))
    bare = re.sub(r"\"[^\"]*\"|'[^']*'|#.*", "", line)
    if quotes := [c for c in bare if c in _QUOTES]:
        return f"{where} {quotes[0]} is a typographic quotation mark; type \" or '"
    quoted = re.search(r'"([^"]*\\.*?)("|$)', line)
    if quoted and re.search(r"hex value|Unescaped", problem):
        return f"{where} in double quotes a backslash begins an escape. {advise_path(quoted[1], key)}"
    if re.search(r"overwrite|twice|mutate", problem):
        return f"{where} this is in the file twice; remove one of the two ({problem})"
    if problem == "Invalid value" and not value:
        return f"{where} there is no value after the sign ="
    if problem == "Invalid value" and value in ("True", "False"):
        return f"{where} write {key} = {value.lower()}"
    if problem == "Invalid value" and re.fullmatch(r"[A-Za-z~/.][^\"'\[\]{}]*", value):
        return f'{where} text needs quotation marks: {key} = "{value}"'
    return f"{where} {problem[0].lower()}{problem[1:]}"


def advise_path(raw: str, key: str = "") -> str:
    """How to write a path of Windows, given as it stands between double quotes, at a key."""
    start = f"{key} = " if key else ""
    single, slashes = f"'{raw}'", raw.replace("\\", "/")
    return f'Write {start}{single} in single quotes, or {start}"{slashes}" with slashes'
