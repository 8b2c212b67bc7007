"""The states of a run on disk: one file for each checkpoint, written whole or not at all.

    checkpoint/000012.checkpoint    server and the clients that changed since the checkpoint before
    checkpoint/000007.states        a former checkpoint, kept because it holds the last state of some client

A file holds encoded states one after another, then a table of contents (JSON: the round, and for the server
and each client offset, size and digest), then the size of that table in 8 bytes. Its rename is the commit
point. A client's state at a checkpoint is the one in the newest file up to it. The table also names the files
that hold the states of all other clients, so that a file which is missing or damaged stops a run only if its
last checkpoint needs it. A client whose state is None takes an entry of the table and no bytes.

A checkpoint that is no longer kept is first renamed to ``.states``, then removed once newer files hold the
states of all its clients. Where such files take more than the states that they are kept for, the next
checkpoint copies the states of the oldest.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core import tree
from ..core.errors import CheckpointError
from ..core.io.atomic_files import as_checkpoint_error, write_atomically
from ..core.io.text import list_first
from .client_store import ClientStore, LazyMapping
from .digest import check_seal, digest_of, seal
from .state import State

KEPT, STATES = ".checkpoint", ".states"
_LENGTH = 8
"""Bytes of the size of the table of contents."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Entry:
    """Where a state lies in a file."""

    offset: int
    size: int
    digest: str


@dataclass(frozen=True)
class _File:
    """A file and its table of contents.

    Attributes:
        path: of the file.
        round: of the checkpoint.
        server: its state.
        clients: their states, those that are in this file.
        elsewhere: clients whose states are in older files, by the round of that file.
    """

    path: Path
    round: int
    server: _Entry
    clients: dict[int, _Entry | None]
    elsewhere: dict[int, list[int]]

    @property
    def size(self) -> int:
        return sum(e.size for e in (self.server, *self.clients.values()) if e is not None)

    def read(self, entry: _Entry, owner: str) -> bytes:
        """The bytes of a state, compared with their digest; ``owner`` is the server or a client, for messages."""
        problem = f"the checkpoint file {self.path} is missing or cannot be read"
        with as_checkpoint_error(problem), self.path.open("rb") as file:
            file.seek(entry.offset)
            content = file.read(entry.size)
        if digest_of(content) != entry.digest:
            raise CheckpointError(
                f"the checkpoint file {self.path} is damaged: the state of {owner} has another digest than when it was "
                "written.",
                python="Restore it from a copy, or train anew in another folder.",
                command="Restore it from a copy, or go back to an earlier checkpoint (fedlowrank resume RUN --round N).",
            )
        return content

    def decode_server(self) -> Any:
        """The state of the server."""
        return self._decode(self.server, "the server")

    def decode_client(self, client: int) -> Any:
        """The state of a client that is in this file."""
        entry = self.clients[client]
        return None if entry is None else self._decode(entry, f"client {client}")

    def _decode(self, entry: _Entry, owner: str) -> Any:
        try:
            return tree.decode(self.read(entry, owner))
        except tree.TreeError as error:
            raise CheckpointError(f"the checkpoint file {self.path} is damaged: {error}") from error


@dataclass(frozen=True)
class _Contents:
    """The files of a folder.

    Attributes:
        folder: where they are.
        files: those whose table of contents can be read, oldest first.
        damaged: the others with what is wrong, by path; the round is the name of the file.
    """

    folder: Path
    files: list[_File]
    damaged: dict[Path, CheckpointError]

    @property
    def kept(self) -> list[_File]:
        """The files that are checkpoints, oldest first."""
        return [file for file in self.files if file.path.suffix == KEPT]

    def last(self) -> _File:
        """The last checkpoint; raises CheckpointError if there is none, or it is damaged."""
        kept = self.kept
        for path, error in self.damaged.items():
            if path.suffix == KEPT and (not kept or _round_of(path) > kept[-1].round):
                instead = (
                    f"remove it to go on from {kept[-1].path.name}"
                    if kept
                    else "train anew in another folder"
                )
                advice = f"Restore it from a copy, or {instead}."
                raise CheckpointError(f"{error}. {advice}") from error
        if not kept:
            raise CheckpointError(
                f"{self.folder} holds no checkpoint: the run was stopped before its first one"
            )
        return kept[-1]

    def lost_clients(self, file: _File) -> dict[int, list[int]]:
        """Clients whose states a checkpoint needs and no file holds, by the round of the file that held them."""
        held = {(f.round, client) for f in self.files for client in f.clients}
        lost = {t: [c for c in clients if (t, c) not in held] for t, clients in file.elsewhere.items()}
        return {t: clients for t, clients in lost.items() if clients}

    def require_states(self, file: _File) -> None:
        """Raise CheckpointError, which names the clients, if a file with states that a checkpoint needs is gone."""
        for t, clients in self.lost_clients(file).items():
            name = f"{self.folder / f'{t:06d}{STATES}'}"
            problems = [str(error) for path, error in self.damaged.items() if _round_of(path) == t]
            problem = problems[0] if problems else f"the checkpoint file {name} is missing"
            restorable = [f.round for f in self.kept if f.round < file.round and not self.lost_clients(f)]
            go_back = (
                f"go back to an earlier checkpoint (fedlowrank resume RUN --round {restorable[-1]}), "
                if restorable
                else ""
            )
            raise CheckpointError(
                f"{problem}. It holds the last state of {_list_clients(clients)}, which the checkpoint after round "
                f"{file.round} needs, so do not remove it. Restore it from a copy,",
                python="or train anew in another folder.",
                command=f"{go_back}or train anew in another folder.",
            )


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
    contents = _read_folder(folder)
    files = contents.files
    whole_files = [f for f in contents.kept if f.round < round][::-1][: keep - 1]
    copied = _to_copy([f for f in files if f not in whole_files], files, changed, round)
    elsewhere: dict[int, list[int]] = {}
    for client, (file, _) in sorted(_newest(files, round).items()):
        if client not in changed and client not in copied:
            elsewhere.setdefault(file.round, []).append(client)

    def states() -> Iterator[tuple[int | None, bytes | None]]:
        yield None, tree.encode(server)
        for client in changed:
            state = changed[client]
            yield client, None if state is None else tree.encode(state)
        for client, (file, entry) in copied.items():
            yield client, None if entry is None else file.read(entry, f"client {client}")

    write_atomically(folder / f"{round:06d}{KEPT}", _packed(round, states(), elsewhere))
    tidy(folder, keep)


def _packed(
    round: int, states: Iterator[tuple[int | None, bytes | None]], elsewhere: Mapping[int, list[int]]
) -> Iterator[bytes]:
    """The parts of a file: states, table of contents, size of the table; the server has None for a number."""
    entries: dict[int | None, list[Any] | None] = {}
    offset = 0
    for client, state in states:
        entries[client] = None if state is None else [offset, len(state), digest_of(state)]
        if state is not None:
            offset += len(state)
            yield state
    table = {"round": round, "server": entries.pop(None), "clients": entries, "elsewhere": elsewhere}
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
        contents = _read_folder(folder)
        files, whole_files = contents.files, contents.kept
        for file in [] if keep is None else whole_files[:-keep]:
            # first it stops being a checkpoint, for it may need files that are removed now
            file.path.rename(file.path.with_suffix(STATES))
        if keep is not None:
            whole_files = whole_files[-keep:]
        needed = {f.round for f, _ in _newest(files, whole_files[0].round).values()}
        for file in files:
            if file.round < whole_files[0].round and file.round not in needed:
                file.path.with_suffix(STATES).unlink(missing_ok=True)
        for path in [] if keep is None else contents.damaged:
            if _round_of(path) < whole_files[0].round and _round_of(path) not in whole_files[0].elsewhere:
                path.unlink()


def load(folder: Path, store: ClientStore | None = None) -> State:
    """Read the last checkpoint. A warning names damaged files that it does not need.

    Args:
        folder: where it is.
        store: an empty one, for the states of clients; None for one that keeps all in memory.

    Raises:
        CheckpointError: if there is none, or a file that it needs is missing or has another digest than when it was
            written; the message names the clients whose states are lost.
    """
    contents = _read_folder(folder)
    last = contents.last()
    contents.require_states(last)
    for error in contents.damaged.values():
        logger.warning(
            "%s. The last checkpoint, after round %d, does not need it and is whole. Restore it from a copy or remove it.",
            error,
            last.round,
        )
    newest = _newest(contents.files, last.round)
    clients = LazyMapping(newest, lambda c: newest[c][0].decode_client(c))
    return State.from_stored(
        last.round, last.decode_server(), (ClientStore() if store is None else store) | clients
    )


def exists(folder: Path) -> bool:
    """Whether a folder holds a checkpoint; raises CheckpointError if it may not be read."""
    with as_checkpoint_error(f"cannot read {folder}"):
        # glob says nothing of a folder that may not be read
        return any(name.endswith(KEPT) for name in _list_names(folder))


def rounds_kept(folder: Path) -> list[int]:
    """The rounds of which a checkpoint is kept whose table of contents can be read, ascending.

    Raises:
        CheckpointError: if there is no checkpoint or the last one is damaged.
    """
    contents = _read_folder(folder)
    contents.last()
    return [file.round for file in contents.kept]


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
    contents = _read_folder(folder)
    if round != stored_rounds[-1]:
        (chosen,) = (file for file in contents.kept if file.round == round)
        contents.require_states(chosen)
        chosen.decode_server()
        for client, (file, _) in _newest(contents.files, round).items():
            file.decode_client(client)
    with as_checkpoint_error(f"cannot remove the checkpoints after round {round} from {folder}"):
        # the newest first: whichever remains after an interruption has all its files
        for path in sorted([*(file.path for file in contents.files), *contents.damaged], reverse=True):
            if _round_of(path) > round:
                path.unlink()


def _read_folder(folder: Path) -> _Contents:
    """Read the tables of contents of all files of a folder."""
    with as_checkpoint_error(f"cannot read {folder}"):
        paths = [*folder.glob(f"*{KEPT}"), *folder.glob(f"*{STATES}")]
    files, damaged = [], {}
    for path in sorted(paths):
        try:
            files.append(_read(path))
        except CheckpointError as error:
            damaged[path] = error
    return _Contents(folder, sorted(files, key=lambda file: file.round), damaged)


def _round_of(path: Path) -> int:
    """The round of a file by its name; -1 of a name that is no number, which no checkpoint needs."""
    return int(path.stem) if path.stem.isdecimal() else -1


def _list_clients(clients: Sequence[int], limit: int = 10) -> str:
    """Clients for a message: ``client 3``, or ``clients 1, 2 and 7 more``."""
    return f"client{'' if len(clients) == 1 else 's'} {list_first(clients, limit)}"


def _list_names(folder: Path) -> list[str]:
    try:
        return [path.name for path in folder.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _newest(files: Sequence[_File], round: int) -> dict[int, tuple[_File, _Entry | None]]:
    """Where the state of each client lies, as of a checkpoint."""
    return {c: (f, entry) for f in files if f.round <= round for c, entry in f.clients.items()}


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
        server = _Entry(*table["server"])
        entries = {int(c): None if e is None else _Entry(*e) for c, e in table["clients"].items()}
        elsewhere = {int(t): [int(c) for c in clients] for t, clients in table["elsewhere"].items()}
        return _File(path, int(table["round"]), server, entries, elsewhere)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"the checkpoint file {path} is damaged or cannot be read: {error}") from error
