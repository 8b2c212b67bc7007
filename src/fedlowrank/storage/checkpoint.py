"""The states of a run on disk: one file for each checkpoint, written whole or not at all.

    checkpoint/000012.checkpoint    server and the clients that changed since the checkpoint before
    checkpoint/000007.states        a former checkpoint, kept because it holds the last state of some client

A file holds encoded states one after another, then a table of contents (JSON: the round, and for the server
and each client offset, size and digest), then the size of that table in 8 bytes. Its rename is the commit
point. A client's state at a checkpoint is the one in the newest file up to it. A client whose state is None
takes an entry of the table and no bytes.

A checkpoint that is no longer kept is first renamed to ``.states``, then removed once newer files hold the
states of all its clients. Where such files take more than the states that they are kept for, the next
checkpoint copies the states of the oldest.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core import tree
from ..core.errors import CheckpointError
from ..core.io.atomic_files import as_checkpoint_error, write_atomically
from .client_store import ClientStore, LazyMapping
from .digest import check_seal, digest_of, seal
from .state import State

KEPT, STATES = ".checkpoint", ".states"
_LENGTH = 8
"""Bytes of the size of the table of contents."""


@dataclass(frozen=True)
class _Entry:
    """Where a state lies in a file."""

    offset: int
    size: int
    digest: str


@dataclass(frozen=True)
class _File:
    """A file and its table of contents."""

    path: Path
    round: int
    server: _Entry
    clients: dict[int, _Entry | None]

    @property
    def size(self) -> int:
        return sum(e.size for e in (self.server, *self.clients.values()) if e is not None)

    def read(self, entry: _Entry) -> bytes:
        """The bytes of a state, compared with their digest."""
        problem = f"the checkpoint file {self.path} is missing or cannot be read"
        with as_checkpoint_error(problem), self.path.open("rb") as file:
            file.seek(entry.offset)
            content = file.read(entry.size)
        if digest_of(content) != entry.digest:
            raise CheckpointError(
                f"the checkpoint file {self.path} is damaged: a state has another digest than when it was "
                "written.",
                python="Restore it from a copy, or train anew in another folder.",
                command="Restore it from a copy, or go back to an earlier checkpoint (fedlowrank resume RUN --round N).",
            )
        return content

    def decode(self, entry: _Entry | None) -> Any:
        """A state."""
        if entry is None:
            return None
        try:
            return tree.decode(self.read(entry))
        except tree.TreeError as error:
            raise CheckpointError(f"the checkpoint file {self.path} is damaged: {error}") from error


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
    files = _files(folder)
    whole_files = [f for f in files if f.path.suffix == KEPT and f.round < round][::-1][: keep - 1]
    copied = _to_copy([f for f in files if f not in whole_files], files, changed, round)

    def states() -> Iterator[tuple[int | None, bytes | None]]:
        yield None, tree.encode(server)
        for client in changed:
            state = changed[client]
            yield client, None if state is None else tree.encode(state)
        for client, (file, entry) in copied.items():
            yield client, None if entry is None else file.read(entry)

    write_atomically(folder / f"{round:06d}{KEPT}", _packed(round, states()))
    tidy(folder, keep)


def _packed(round: int, states: Iterator[tuple[int | None, bytes | None]]) -> Iterator[bytes]:
    """The parts of a file: states, table of contents, size of the table; the server has None for a number."""
    entries: dict[int | None, list[Any] | None] = {}
    offset = 0
    for client, state in states:
        entries[client] = None if state is None else [offset, len(state), digest_of(state)]
        if state is not None:
            offset += len(state)
            yield state
    table = {"round": round, "server": entries.pop(None), "clients": entries}
    contents = json.dumps(seal(table)).encode()
    yield contents
    yield len(contents).to_bytes(_LENGTH, "big")


def _to_copy(
    spare: Sequence[_File], files: Sequence[_File], changed: Mapping[int, Any], round: int
) -> dict[int, tuple[_File, _Entry | None]]:
    """States of clients that did not change, but which a new file holds, too.

    Args:
        spare: files that are no longer kept as checkpoints, oldest first.
        files: all.
        changed: clients that changed.
        round: of the new file, which replaces a file of that round.
    """
    current = {c: found for c, found in _newest(files, round).items() if c not in changed}
    live = sum(entry.size for _, entry in current.values() if entry is not None)
    excess = sum(file.size for file in spare) - live
    copied = {f.round for f in spare if f.round == round}
    for file in spare:
        if excess > 0:
            copied.add(file.round)
            excess -= file.size
    return {c: (f, entry) for c, (f, entry) in current.items() if entry is None or f.round in copied}


def tidy(folder: Path, keep: int | None = None) -> None:
    """Remove what an interrupted process left, and checkpoints that are no longer kept.

    Args:
        folder: of the checkpoints.
        keep: how many to keep; None for all.
    """
    with as_checkpoint_error(f"cannot tidy {folder}"):
        for path in folder.glob("*.part"):
            path.unlink()
        files = _files(folder)
        whole_files = [f for f in files if f.path.suffix == KEPT]
        for file in [] if keep is None else whole_files[:-keep]:
            # first it stops being a checkpoint, for it may need files that are removed now
            file.path.rename(file.path.with_suffix(STATES))
        if keep is not None:
            whole_files = whole_files[-keep:]
        needed = {f.round for f, _ in _newest(files, whole_files[0].round).values()}
        for file in files:
            if file.round < whole_files[0].round and file.round not in needed:
                file.path.with_suffix(STATES).unlink(missing_ok=True)


def load(folder: Path, store: ClientStore | None = None) -> State:
    """Read a checkpoint.

    Args:
        folder: where it is.
        store: an empty one, for the states of clients; None for one that keeps all in memory.

    Raises:
        CheckpointError: if there is none, or a file of it is missing or has another digest than when it was
            written.
    """
    files = _files(folder)
    last = _last(folder, files)
    newest = _newest(files, last.round)
    clients = LazyMapping(newest, lambda c: newest[c][0].decode(newest[c][1]))
    return State.from_stored(
        last.round, last.decode(last.server), (ClientStore() if store is None else store) | clients
    )


def exists(folder: Path) -> bool:
    """Whether a folder holds a checkpoint; raises CheckpointError if it may not be read."""
    with as_checkpoint_error(f"cannot read {folder}"):
        # glob says nothing of a folder that may not be read
        return any(name.endswith(KEPT) for name in _list_names(folder))


def rounds_kept(folder: Path) -> list[int]:
    """The rounds of which a checkpoint is kept, ascending.

    Raises:
        CheckpointError: if there is no checkpoint or one is damaged.
    """
    files = _files(folder)
    _last(folder, files)
    return [f.round for f in files if f.path.suffix == KEPT]


def go_back(folder: Path, round: int) -> None:
    """Make an earlier checkpoint the last one; those after it are removed.

    Args:
        folder: of the checkpoints.
        round: rounds completed at that checkpoint.

    Raises:
        CheckpointError: if none of that round is kept, or a file of it is missing or damaged; nothing has
            changed then.
    """
    stored_rounds = rounds_kept(folder)
    if round not in stored_rounds:
        listed = ", ".join(map(str, stored_rounds))
        raise CheckpointError(
            f"{folder} keeps the checkpoints after rounds {listed}, and none after round {round}. Choose one "
            "of these; run.keep_checkpoints says how many later rounds keep."
        )
    files = _files(folder)
    if round != stored_rounds[-1]:
        (chosen,) = (f for f in files if f.round == round)
        chosen.decode(chosen.server)
        for file, entry in _newest(files, round).values():
            file.decode(entry)
    with as_checkpoint_error(f"cannot remove the checkpoints after round {round} from {folder}"):
        # the newest first: whichever remains after an interruption has all its files
        for file in reversed(files):
            if file.round > round:
                file.path.unlink()


def _files(folder: Path) -> list[_File]:
    """All files of a folder, oldest first."""
    with as_checkpoint_error(f"cannot read {folder}"):
        paths = [*folder.glob(f"*{KEPT}"), *folder.glob(f"*{STATES}")]
    checkpoints = sorted(path for path in paths if path.suffix == KEPT)
    files = []
    for path in paths:
        try:
            files.append(_read(path))
        except CheckpointError as error:
            raise CheckpointError(f"{error}. {_advise(path, checkpoints)}") from error
    return sorted(files, key=lambda file: file.round)


def _advise(path: Path, checkpoints: Sequence[Path]) -> str:
    """What to do about a damaged file of a folder with these checkpoints, oldest first."""
    if len(checkpoints) > 1 and path == checkpoints[-1]:
        return f"Restore it from a copy, or remove it to go on from {checkpoints[-2].name}."
    return (
        "Restore it from a copy, or train anew in another folder: later checkpoints may need the states of clients "
        "that it holds, so do not remove it."
    )


def _list_names(folder: Path) -> list[str]:
    try:
        return [path.name for path in folder.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _newest(files: Sequence[_File], round: int) -> dict[int, tuple[_File, _Entry | None]]:
    """Where the state of each client lies, as of a checkpoint."""
    return {c: (f, entry) for f in files if f.round <= round for c, entry in f.clients.items()}


def _last(folder: Path, files: Sequence[_File]) -> _File:
    for file in reversed(files):
        if file.path.suffix == KEPT:
            return file
    raise CheckpointError(f"{folder} holds no checkpoint: the run was stopped before its first one")


def _read(path: Path) -> _File:
    try:
        with path.open("rb") as file:
            end = file.seek(0, 2)
            file.seek(max(0, end - _LENGTH))
            size = int.from_bytes(file.read(_LENGTH), "big")
            if not 0 < size <= end - _LENGTH:
                raise ValueError("it is cut off")
            file.seek(end - _LENGTH - size)
            table = json.loads(file.read(size))
        check_seal(table, path)
        server, clients = _Entry(*table["server"]), table["clients"].items()
        entries = {int(c): None if e is None else _Entry(*e) for c, e in clients}
        return _File(path, int(table["round"]), server, entries)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"the checkpoint file {path} is damaged or cannot be read: {error}") from error
