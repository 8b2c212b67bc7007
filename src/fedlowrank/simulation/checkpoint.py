"""The states of a run on disk, each written whole or not at all, with digests that are verified when a state is read.

    checkpoint/manifest.json        the commit point: round, file of the server, file of each client, digests of all files
    checkpoint/server-000012.tree   state of the server after round 12
    checkpoint/client-3-000010.tree state of client 3, which last changed in round 10

Only states that changed since the last checkpoint are written. The manifest is replaced last, by a rename;
files that it does not name are left-overs of a killed process and are removed. Under ``earlier`` it names the
checkpoints before the last one that are kept: of each the file of the server, and those files of clients that
differ from the last checkpoint's (null for a client that had no state yet).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..core import tree
from ..core.errors import CheckpointError
from ..core.files import as_checkpoint_error, write_atomically, write_json
from .client_store import ClientStore, LazyMapping
from .digest import KEY, check_seal, digest_of, sealed
from .run import State

MARKS = frozenset({"digests", "earlier", KEY})
"""Entries that every manifest has but those of versions without digests."""


def save(folder: Path, round: int, server: Any, changed: Mapping[int, Any], keep: int = 1) -> None:
    """Write a checkpoint.

    Args:
        folder: made if it does not exist.
        round: rounds completed.
        server: its state.
        changed: states of the clients that changed since the last checkpoint in this folder.
        keep: how many checkpoints to keep, this one included.

    Raises:
        CheckpointError: if the disk is full or cannot be written; the last checkpoint is then intact.
    """
    with as_checkpoint_error(f"cannot make {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
    before = _manifest(folder) if (folder / "manifest.json").exists() else None
    clients = {} if before is None else dict(before["clients"])
    digests: dict[str, str] = {} if before is None else dict(before.get("digests", {}))

    def write(name: str, state: Any) -> str:
        encoded = tree.encode(state)
        digests[name] = digest_of(encoded)
        write_atomically(folder / name, encoded)
        return name

    server_file = write(f"server-{round:06d}.tree", server)
    new = {
        str(client): write(f"client-{client}-{round:06d}.tree", state) for client, state in changed.items()
    }
    earlier = [] if before is None else _earlier(before, new, round)[: max(0, keep - 1)]
    manifest = {"round": round, "server": server_file, "clients": clients | new, "earlier": earlier}
    # files that a version without digests wrote get theirs now
    kept = {
        n: digests[n] if n in digests else digest_of(_bytes(folder / n)) for n in sorted(_files(manifest))
    }
    write_json(folder / "manifest.json", sealed({**manifest, "digests": kept}))
    tidy(folder)


def _earlier(before: Mapping[str, Any], changed: Mapping[str, str], round: int) -> list[dict[str, Any]]:
    """The checkpoints before a new one, newest first, where those clients' files are new."""
    found = []
    for entry in (
        {"round": before["round"], "server": before["server"], "clients": {}},
        *before.get("earlier", ()),
    ):
        if entry["round"] < round:
            old = {client: before["clients"].get(client) for client in changed}
            found.append({**entry, "clients": old | entry["clients"]})
    return found


def tidy(folder: Path) -> None:
    """Remove files that the manifest does not name."""
    named = {"manifest.json", *_files(_manifest(folder))}
    with as_checkpoint_error(f"cannot tidy {folder}"):
        for path in folder.iterdir():
            if path.name not in named:
                path.unlink()


def load(folder: Path, store: ClientStore | None = None) -> State:
    """Read a checkpoint.

    Args:
        folder: where it is.
        store: an empty one, for the states of clients; None for one that keeps all in memory.

    Raises:
        CheckpointError: if there is none, or a file of it is missing or has another digest than when it was
            written.
    """
    manifest = _manifest(folder)
    digests = manifest.get("digests", {})
    files = {int(c): name for c, name in manifest["clients"].items()}
    clients = LazyMapping(files, lambda c: _read(folder / files[c], digests.get(files[c])))
    server = _read(folder / manifest["server"], digests.get(manifest["server"]))
    return State(int(manifest["round"]), server, (ClientStore() if store is None else store) | clients)


def rounds_kept(folder: Path) -> list[int]:
    """The rounds of which a checkpoint is kept, ascending.

    Raises:
        CheckpointError: if there is no checkpoint or its manifest is damaged.
    """
    manifest = _manifest(folder)
    return sorted([manifest["round"], *(entry["round"] for entry in manifest.get("earlier", ()))])


def go_back(folder: Path, round: int) -> None:
    """Make an earlier checkpoint the last one; those after it are removed.

    Args:
        folder: of the checkpoints.
        round: rounds completed at that checkpoint.

    Raises:
        CheckpointError: if none of that round is kept, or a file of it is missing or damaged; nothing has
            changed then.
    """
    manifest = _manifest(folder)
    if round == manifest["round"]:
        return
    kept = rounds_kept(folder)
    if round not in kept:
        listed = ", ".join(map(str, kept))
        raise CheckpointError(
            f"{folder} keeps the checkpoints after rounds {listed}, and none after round {round}. Choose one of these; "
            "run.keep_checkpoints says how many later rounds keep."
        )
    entries = {entry["round"]: entry for entry in manifest["earlier"]}
    chosen = entries.pop(round)

    def clients_at(entry: Mapping[str, Any]) -> dict[str, str | None]:
        return {**manifest["clients"], **entry["clients"]}

    clients = {client: name for client, name in clients_at(chosen).items() if name is not None}
    earlier = [
        {**entry, "clients": {c: n for c, n in clients_at(entry).items() if clients.get(c) != n}}
        for entry in entries.values()
        if entry["round"] < round
    ]
    new = {"round": round, "server": chosen["server"], "clients": clients, "earlier": earlier}
    digests = {name: digest for name, digest in manifest["digests"].items() if name in _files(new)}
    for name in (chosen["server"], *clients.values()):
        _read(folder / name, digests.get(name))
    write_json(folder / "manifest.json", sealed({**new, "digests": digests}))
    tidy(folder)


def _files(manifest: Mapping[str, Any]) -> set[str]:
    """All files that a manifest names."""
    entries = [manifest, *manifest.get("earlier", ())]
    return {
        name
        for entry in entries
        for name in (entry["server"], *entry["clients"].values())
        if name is not None
    }


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / "manifest.json"
    try:
        found = json.loads(path.read_text())
        if MARKS & found.keys():
            # one that has none of these marks is of a version without digests
            check_seal(found, path)
        files = _files(found)
        sound = type(found["round"]) is int and all(isinstance(f, str) and "/" not in f for f in files)
        sound = sound and isinstance(found["server"], str) and all(found["clients"].values())
        sound = sound and all(c.isdigit() for c in found["clients"])
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{folder} holds no checkpoint: the run was stopped before its first one"
        ) from error
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error!r}") from error
    if not sound:
        raise CheckpointError(
            f"{path} is damaged: it does not name a round and the files of server and clients"
        )
    manifest: dict[str, Any] = found
    return manifest


def _read(path: Path, digest: str | None) -> Any:
    """The state in a file; ``digest`` is None in checkpoints of versions without digests."""
    encoded = _bytes(path)
    if digest is not None and digest_of(encoded) != digest:
        raise CheckpointError(
            f"the checkpoint file {path} is damaged: its digest is not the one that manifest.json has of it. Restore it "
            "from a copy, or go back to an earlier checkpoint (fedlowrank resume RUN --round N)."
        )
    try:
        return tree.decode(encoded)
    except tree.TreeError as error:
        raise CheckpointError(f"the checkpoint file {path} is damaged: {error}") from error


def _bytes(path: Path) -> bytes:
    with as_checkpoint_error(f"the checkpoint file {path} is missing or cannot be read"):
        return path.read_bytes()
