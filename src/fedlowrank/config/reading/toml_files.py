"""TOML files that people write: explains which line is wrong, and what to type instead."""

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
"""A Windows path in which an escape, such as that of a line break, was read."""


def read_toml(path: Path, kind: str = "experiment file") -> dict[str, Any]:
    """Read a TOML file.

    Args:
        path: path of the file.
        kind: what the file is, for the message if it is missing.

    Raises:
        ConfigError: if the file is missing or is not TOML; the message names the line.
    """
    try:
        text = decode_text(path.read_bytes())
    except FileNotFoundError as error:
        raise ConfigError(f"there is no {kind} {path}") from error
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
        if problem := find_escaped_path(value):
            raise ConfigError(f"{path}: {key} {problem}")
    return tables


def find_escaped_path(value: str) -> str:
    """Explain that a Windows path written with a backslash holds a control character; empty if it does not."""
    if not _ESCAPED_PATH.match(value):
        return ""
    path_text = repr(value)[1:-1].replace("\\\\", "\\")
    return (
        f"holds a control character: in double quotes a backslash begins an escape. {advise_path(path_text)}"
    )


def _strings(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """Yield all strings in nested tables and lists, with their keys."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _strings(inner, f"{key}.{name}" if key else name)
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner, key)


def explain_toml(text: str, error: tomllib.TOMLDecodeError) -> str:
    """Explain a TOML error for a person if the line shows the cause; otherwise repeat the words of tomllib."""
    lines = text.replace("\r\n", "\n").rstrip("\n").split("\n")
    # the only other place that tomllib names is the end of the document
    match = re.search(r"at line (\d+)", str(error))
    number = int(match[1]) if match else len(lines)
    line = lines[min(number, len(lines)) - 1].strip()
    location, problem = f"line {number} ({line}):", re.sub(r" \(at .*\)$", "", str(error))
    key, _, value = (part.strip() for part in line.partition("="))
    bare_text = re.sub(r"\"[^\"]*\"|'[^']*'|#.*", "", line)
    if quotes := [c for c in bare_text if c in _QUOTES]:
        return f"{location} {quotes[0]} is a typographic quotation mark; type \" or '"
    quoted = re.search(r'"([^"]*\\.*?)("|$)', line)
    if quoted and re.search(r"hex value|Unescaped", problem):
        return f"{location} in double quotes a backslash begins an escape. {advise_path(quoted[1], key)}"
    if re.search(r"overwrite|twice|mutate", problem):
        return f"{location} this is in the file twice; remove one of the two ({problem})"
    if problem == "Invalid value" and not value:
        return f"{location} there is no value after the sign ="
    if problem == "Invalid value" and value in ("True", "False"):
        return f"{location} write {key} = {value.lower()}"
    if problem == "Invalid value" and re.fullmatch(r"[A-Za-z~/.][^\"'\[\]{}]*", value):
        return f'{location} text needs quotation marks: {key} = "{value}"'
    return f"{location} {problem[0].lower()}{problem[1:]}"


def advise_path(path_text: str, key: str = "") -> str:
    """Advise how to write a Windows path, given as the text between double quotes, for a key."""
    prefix = f"{key} = " if key else ""
    quoted_path, slash_path = f"'{path_text}'", path_text.replace("\\", "/")
    return f'Write {prefix}{quoted_path} in single quotes, or {prefix}"{slash_path}" with slashes'
