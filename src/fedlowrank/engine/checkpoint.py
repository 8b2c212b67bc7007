"""The state of a run on disk, written whole or not at all.

    checkpoint/manifest.json        the commit point: round, file of the server, file of each client
    checkpoint/server-000012.tree   state of the server after round 12
    checkpoint/client-3-000010.tree state of client 3, which last changed in round 10

Only states that changed since the last checkpoint are written. The manifest is replaced last, by a rename; files that
it does not name are left-overs of a killed process and are removed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .. import tree
from ..errors import CheckpointError
from ..record import as_checkpoint_error, write_atomically, write_json
from .run import State
from .shelf import Lazily, Shelf


def save(folder: Path, round: int, server: Any, changed: Mapping[int, Any]) -> None:
    """Write a checkpoint.

    Args:
        folder: made if it does not exist.
        round: rounds completed.
        server: its state.
        changed: states of the clients that changed since the last checkpoint in this folder.

    Raises:
        CheckpointError: if the disk is full or cannot be written; the last checkpoint is then intact.
    """
    with as_checkpoint_error(f"cannot make {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
    clients = dict(_manifest(folder)["clients"]) if (folder / "manifest.json").exists() else {}
    server_file = f"server-{round:06d}.tree"
    write_atomically(folder / server_file, tree.encode(server))
    for client, state in changed.items():
        clients[str(client)] = f"client-{client}-{round:06d}.tree"
        write_atomically(folder / clients[str(client)], tree.encode(state))
    write_json(folder / "manifest.json", {"round": round, "server": server_file, "clients": clients})
    tidy(folder)


def tidy(folder: Path) -> None:
    """Remove files that the manifest does not name."""
    manifest = _manifest(folder)
    named = {"manifest.json", manifest["server"], *manifest["clients"].values()}
    with as_checkpoint_error(f"cannot tidy {folder}"):
        for path in folder.iterdir():
            if path.name not in named:
                path.unlink()


def load(folder: Path, shelf: Shelf | None = None) -> State:
    """Read a checkpoint.

    Args:
        folder: where it is.
        shelf: an empty one, for the states of clients; None for one that keeps all in memory.

    Raises:
        CheckpointError: if there is none or a file of it is missing or damaged.
    """
    manifest = _manifest(folder)
    files = {int(c): folder / name for c, name in manifest["clients"].items()}
    clients = (Shelf() if shelf is None else shelf) | Lazily(files, lambda c: _read(files[c]))
    return State(int(manifest["round"]), _read(folder / manifest["server"]), clients)


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / "manifest.json"
    try:
        found = json.loads(path.read_text())
        files = [found["server"], *found["clients"].values()]
        sound = type(found["round"]) is int and all(isinstance(f, str) and "/" not in f for f in files)
        sound = sound and all(c.isdigit() for c in found["clients"])
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} holds no checkpoint: the run was stopped before its first one") from error
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error!r}") from error
    if not sound:
        raise CheckpointError(f"{path} is damaged: it does not name a round and the files of server and clients")
    manifest: dict[str, Any] = found
    return manifest


def _read(path: Path) -> Any:
    try:
        return tree.decode(path.read_bytes())
    except (OSError, tree.TreeError) as error:
        raise CheckpointError(f"the checkpoint file {path} is missing or damaged: {error}") from error
