"""The folder of a Flower app, which is one ``pyproject.toml``, and settings in TOML."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from ...core.errors import ConfigError
from ...core.files import as_checkpoint_error, write_atomically

Value = str | int | float | bool
SERVER, CLIENT = "fedlowrank.network.flower:server", "fedlowrank.network.flower:client"
"""The components of the app that ``fedlowrank serve`` submits."""
LONGEST = 10 << 20
"""Bytes of an app, which Flower packs without compressing it."""
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9-]{0,31}")
_KEY = re.compile(r"[A-Za-z0-9_-]+")
_REFERENCE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def write_app(folder: Path, name: str, server_ref: str, client_ref: str, config: Mapping[str, Value]) -> None:
    """Write an app that consists of objects in installed packages, for :meth:`.processes.SuperLink.submit`.

    The packages must be installed on every machine: only this file is sent, to every client before its first
    message. Flower takes an app of at most 10 MiB. Every process of the run reads the file, a megabyte in
    some seconds.

    Args:
        folder: made if it does not exist; Flower sends whatever else is in it.
        name: a letter, then letters, digits and hyphens; 32 characters at most.
        server_ref: the ``ServerApp`` as ``package.module:name``; the module must assign it by a plain ``name
            = ...``.
        client_ref: the ``ClientApp``, likewise.
        config: becomes ``context.run_config``.

    Raises:
        ConfigError: if an argument is not as described, or the app is too long.
        CheckpointError: if the file cannot be written.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} cannot name an app: it must be a letter followed by letters, digits and hyphens, 32 "
            "in all at most"
        )
    for reference in (server_ref, client_ref):
        if not _REFERENCE.fullmatch(reference):
            raise ConfigError(
                f"{reference!r} is no reference to an object; write it as in package.module:name"
            )
    text = (
        f'[project]\nname = "{name}"\nversion = "1.0.0"\n'
        f'description = "fedlowrank"\nlicense = "Apache-2.0"\n\n'
        f'[tool.flwr.app]\npublisher = "fedlowrank"\n\n'
        f'[tool.flwr.app.components]\nserverapp = "{server_ref}"\nclientapp = "{client_ref}"\n\n'
        f"[tool.flwr.app.config]\n{as_toml(config)}"
    )
    content = text.encode()
    if len(content) > LONGEST:
        raise ConfigError(
            f"the settings of app {name!r} take {len(content)} bytes; Flower takes an app of {LONGEST} at "
            "most"
        )
    with as_checkpoint_error(f"cannot make {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "pyproject.toml", content)


def write_own_app(folder: Path) -> str:
    """Write the app of ``fedlowrank serve``, the same bytes on every machine; returns publisher and name."""
    write_app(folder, "fedlowrank", SERVER, CLIENT, {})
    return "fedlowrank/fedlowrank"


def as_toml(settings: Mapping[str, Value]) -> str:
    """Settings as TOML that Flower reads back unchanged; raises ConfigError if that is impossible."""
    return "".join(f"{_key(key)} = {_value(key, value)}\n" for key, value in settings.items())


def _key(key: str) -> str:
    if not _KEY.fullmatch(key):
        raise ConfigError(f"{key!r} cannot name a setting: use letters, digits, hyphens and underscores")
    return key


def _value(key: str, value: Value) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(f"setting {key!r} is no text that can be written: {error}") from None
        # JSON escapes as TOML does, but for one control character
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, int):
        if not -(2**63) <= value < 2**63:
            raise ConfigError(f"setting {key!r} is {value}, which does not fit into 64 bits")
        return str(int(value))
    if isinstance(value, float):
        # numbers of numpy are floats, but do not print as such
        return repr(float(value))
    raise ConfigError(
        f"setting {key!r} is of type {type(value).__name__}; it must be str, int, float or bool"
    )
