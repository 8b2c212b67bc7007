"""The folder of a Flower app, which consists of one ``pyproject.toml``, and settings in TOML."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from ...core.io.atomic_files import as_checkpoint_error, write_atomically

Value = str | int | float | bool
SERVER_REF, CLIENT_REF = "fedlowrank.network.flower:server", "fedlowrank.network.flower:client"
"""The components of the app that ``fedlowrank serve`` submits."""


def write_app(folder: Path, name: str, server_ref: str, client_ref: str, config: Mapping[str, Value]) -> None:
    """Write an app that consists of objects in installed packages, for :meth:`.server_processes.SuperLink.submit`.

    The packages must be installed on every machine: only this file is sent, to every client before its first
    message. Flower takes an app of at most 10 MiB.

    Args:
        folder: folder of the app, made if it does not exist; Flower sends all other files in it, too.
        name: name of the app: a letter, then letters, digits and hyphens; 32 characters at most.
        server_ref: reference to the ``ServerApp`` as ``package.module:name``; the module must assign it by a plain ``name
            = ...``.
        client_ref: reference to the ``ClientApp``, in the same form.
        config: settings that become ``context.run_config``.

    Raises:
        CheckpointError: if the file cannot be written.
    """
    text = (
        f'[project]\nname = "{name}"\nversion = "1.0.0"\n'
        f'description = "fedlowrank"\nlicense = "Apache-2.0"\n\n'
        f'[tool.flwr.app]\npublisher = "fedlowrank"\n\n'
        f'[tool.flwr.app.components]\nserverapp = "{server_ref}"\nclientapp = "{client_ref}"\n\n'
        f"[tool.flwr.app.config]\n{as_toml(config)}"
    )
    with as_checkpoint_error(f"cannot make {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "pyproject.toml", text.encode())


def write_own_app(folder: Path) -> str:
    """Write the app of ``fedlowrank serve``, the same bytes on every machine; returns publisher and name."""
    write_app(folder, "fedlowrank", SERVER_REF, CLIENT_REF, {})
    return "fedlowrank/fedlowrank"


def as_toml(settings: Mapping[str, Value]) -> str:
    """Format settings as lines of TOML."""
    # JSON writes these values in the same way as TOML, except for one control character
    lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in settings.items()]
    return "".join(lines).replace("\x7f", "\\u007f")
