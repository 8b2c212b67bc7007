"""Checkpoints of a run's states on disk: one file for each checkpoint, written atomically.

    checkpoint/000012.checkpoint    server and the clients that changed since the checkpoint before
    checkpoint/000007.states        a former checkpoint, kept because it holds the last state of some client

A file holds encoded states one after another, then a table of contents (JSON: the round, the identifier of the run, and
for the server and each client offset, size and digest), then the size of that table in 8 bytes. Its rename is the commit
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
from .digest import digest_of, is_sealed, seal
from .state import State

KEPT, STATES = ".checkpoint", ".states"
_LENGTH = 8
"""Bytes of the size of the table of contents."""

MAX_READS = 10
"""Number of times that a folder is read when its files vanish: a run that goes on replaces its former checkpoints."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Entry:
    """Location of a state in a file: offset and size in bytes, and digest."""

    offset: int
    size: int
    digest: str


@dataclass(frozen=True)
class _File:
    """A file and its table of contents.

    Attributes:
        path: path of the file.
        round: number of rounds completed at the checkpoint.
        server: location of the server's state.
        clients: locations of the clients' states that are in this file, by identifier; None for a state that is None.
        ids_by_round: clients whose states are in older files, by the round of that file.
        run_id: identifier of the run that wrote the file; None if it had none.
    """

    path: Path
    round: int
    server: _Entry
    clients: dict[int, _Entry | None]
    ids_by_round: dict[int, list[int]]
    run_id: str | None

    @property
    def size(self) -> int:
        return sum(e.size for e in (self.server, *self.clients.values()) if e is not None)

    def read(self, entry: _Entry, owner: str) -> bytes:
        """Read the bytes of a state and compare their digest; ``owner`` is the server or a client, for messages."""
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

    def decode_client(self, client_id: int) -> Any:
        """The state of a client that is in this file."""
        entry = self.clients[client_id]
        return None if entry is None else self._decode(entry, f"client {client_id}")

    def _decode(self, entry: _Entry, owner: str) -> Any:
        try:
            return tree.decode(self.read(entry, owner))
        except tree.TreeError as error:
            raise CheckpointError(f"the checkpoint file {self.path} is damaged: {error}") from error


@dataclass(frozen=True)
class _Contents:
    """The checkpoint files of a folder.

    Attributes:
        folder: folder of the checkpoints.
        files: files whose table of contents can be read, oldest first.
        damaged: error of each file whose table cannot be read, by path; the file's name is its round.
    """

    folder: Path
    files: list[_File]
    damaged: dict[Path, CheckpointError]

    @property
    def kept(self) -> list[_File]:
        """The files that are checkpoints, oldest first."""
        return [file for file in self.files if file.path.suffix == KEPT]

    def last(self) -> _File:
        """Return the last checkpoint; raises CheckpointError if there is none, or it is damaged."""
        checkpoints = self.kept
        for path, error in self.damaged.items():
            if path.suffix == KEPT and (not checkpoints or _round_of(path) > checkpoints[-1].round):
                python = command = "train anew in another folder."
                if checkpoints:
                    python = f"remove it to go on from {checkpoints[-1].path.name}."
                    # clients of a network must be told that rounds are repeated
                    command = f"go back to the checkpoint before it (fedlowrank resume RUN --round {checkpoints[-1].round})."
                raise CheckpointError(
                    f"{error}. Restore it from a copy, or", python=python, command=command
                ) from error
        if not checkpoints:
            raise CheckpointError(
                f"{self.folder} holds no checkpoint: the run was stopped before its first one"
            )
        return checkpoints[-1]

    def lost_clients(self, file: _File) -> dict[int, list[int]]:
        """Clients whose states a checkpoint needs but no file holds, by the round of the file that held them."""
        stored_pairs = {(f.round, client_id) for f in self.files for client_id in f.clients}
        lost_ids = {
            t: [c for c in client_ids if (t, c) not in stored_pairs]
            for t, client_ids in file.ids_by_round.items()
        }
        return {t: client_ids for t, client_ids in lost_ids.items() if client_ids}

    def require_states(self, file: _File) -> None:
        """Raise CheckpointError, naming the clients, if a file with states that a checkpoint needs is missing."""
        for t, client_ids in self.lost_clients(file).items():
            name = f"{self.folder / f'{t:06d}{STATES}'}"
            problems = [str(error) for path, error in self.damaged.items() if _round_of(path) == t]
            problem = problems[0] if problems else f"the checkpoint file {name} is missing"
            restorable_rounds = [
                f.round for f in self.kept if f.round < file.round and not self.lost_clients(f)
            ]
            advice = (
                f"go back to an earlier checkpoint (fedlowrank resume RUN --round {restorable_rounds[-1]}), "
                if restorable_rounds
                else ""
            )
            raise CheckpointError(
                f"{problem}. It holds the last state of {_list_clients(client_ids)}, which the checkpoint after round "
                f"{file.round} needs, so do not remove it. Restore it from a copy,",
                python="or train anew in another folder.",
                command=f"{advice}or train anew in another folder.",
            )


def save(
    folder: Path,
    round: int,
    server: Any,
    changed_states: Mapping[int, Any],
    keep: int = 1,
    run_id: str | None = None,
) -> None:
    """Write a checkpoint.

    Args:
        folder: folder of the checkpoints, made if it does not exist.
        round: number of completed rounds.
        server: state of the server.
        changed_states: states of the clients that changed since the last checkpoint in this folder.
        keep: number of checkpoints to keep, including this one.
        run_id: identifier of the run, if it has any.

    Raises:
        CheckpointError: if the disk is full or cannot be written; the last checkpoint is then intact.
    """
    with as_checkpoint_error(f"cannot make {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
    contents = _read_folder(folder)
    files = contents.files
    kept_files = [f for f in contents.kept if f.round < round][::-1][: keep - 1]
    copied_entries = _to_copy([f for f in files if f not in kept_files], files, changed_states, round)
    ids_by_round: dict[int, list[int]] = {}
    for client_id, (file, _) in sorted(_newest(files, round).items()):
        if client_id not in changed_states and client_id not in copied_entries:
            ids_by_round.setdefault(file.round, []).append(client_id)

    def states() -> Iterator[tuple[int | None, bytes | None]]:
        yield None, tree.encode(server)
        for client_id in changed_states:
            state = changed_states[client_id]
            yield client_id, None if state is None else tree.encode(state)
        for client_id, (file, entry) in copied_entries.items():
            yield client_id, None if entry is None else file.read(entry, f"client {client_id}")

    table = {"round": round, "run": run_id, "elsewhere": ids_by_round}
    write_atomically(folder / f"{round:06d}{KEPT}", _packed(states(), table))
    tidy(folder, keep)


def _packed(states: Iterator[tuple[int | None, bytes | None]], table: Mapping[str, Any]) -> Iterator[bytes]:
    """Yield the parts of a file: states, table of contents, size of the table; the server's identifier is None."""
    entries: dict[int | None, list[Any] | None] = {}
    offset = 0
    for client_id, state in states:
        entries[client_id] = None if state is None else [offset, len(state), digest_of(state)]
        if state is not None:
            offset += len(state)
            yield state
    contents = json.dumps(seal({**table, "server": entries.pop(None), "clients": entries})).encode()
    yield contents
    yield len(contents).to_bytes(_LENGTH, "big")


def _to_copy(
    spare_files: Sequence[_File], files: Sequence[_File], changed_states: Mapping[int, Any], round: int
) -> dict[int, tuple[_File, _Entry | None]]:
    """States of unchanged clients that the new file holds, too.

    Args:
        spare_files: files that are no longer kept as checkpoints, oldest first.
        files: all files of the folder, oldest first.
        changed_states: states of the clients that changed, by identifier.
        round: number of completed rounds of the new file, which replaces a file of the same round.
    """
    current_entries = {
        c: location for c, location in _newest(files, round).items() if c not in changed_states
    }
    live_bytes = sum(entry.size for _, entry in current_entries.values() if entry is not None)
    excess_bytes = sum(file.size for file in spare_files) - live_bytes
    copied_rounds = {f.round for f in spare_files if f.round == round}
    for file in spare_files:
        if excess_bytes > 0:
            copied_rounds.add(file.round)
            excess_bytes -= file.size
    return {
        c: (f, entry)
        for c, (f, entry) in current_entries.items()
        if entry is None or f.round in copied_rounds
    }


def tidy(folder: Path, keep: int | None = None) -> None:
    """Remove what an interrupted process left behind, and checkpoints that are no longer kept.

    Args:
        folder: folder of the checkpoints.
        keep: number of checkpoints to keep; None for all.
    """
    with as_checkpoint_error(f"cannot tidy {folder}"):
        for path in folder.glob("*.part"):
            path.unlink()
        contents = _read_folder(folder)
        files, kept_files = contents.files, contents.kept
        for file in [] if keep is None else kept_files[:-keep]:
            # rename it first, so that it is no checkpoint any more: it may need files that are removed now
            file.path.rename(file.path.with_suffix(STATES))
        if keep is not None:
            kept_files = kept_files[-keep:]
        if not kept_files:
            # raises an error that names the file that cannot be read
            contents.last()
        needed_rounds = {f.round for f, _ in _newest(files, kept_files[0].round).values()}
        for file in files:
            if file.round < kept_files[0].round and file.round not in needed_rounds:
                file.path.with_suffix(STATES).unlink(missing_ok=True)
        for path in [] if keep is None else contents.damaged:
            if _round_of(path) < kept_files[0].round and _round_of(path) not in kept_files[0].ids_by_round:
                path.unlink()


def load(folder: Path, store: ClientStore | None = None, run_id: str | None = None) -> State:
    """Read the last checkpoint, and log a warning about damaged files that it does not need.

    The run may go on: if it replaces this checkpoint by the next one while it is read, the next one is read.

    Args:
        folder: folder of the checkpoints.
        store: empty store for the states of clients; None for one that keeps all states in memory.
        run_id: identifier of the run that the files must belong to; None to take those of any run.

    Raises:
        CheckpointError: if there is none, a file that it needs is missing or has another digest than when it was
            written, or a file belongs to another run; the message names the clients whose states are lost.
    """
    for _ in range(MAX_READS - 1):
        try:
            return _load_once(folder, store, run_id)
        except CheckpointError as error:
            if not _has_vanished(error):
                raise
    return _load_once(folder, store, run_id)


def _load_once(folder: Path, store: ClientStore | None, run_id: str | None) -> State:
    contents = _read_folder(folder)
    last_file = contents.last()
    for file in contents.files:
        if run_id is not None and file.run_id != run_id:
            raise CheckpointError(
                f"the checkpoint file {file.path} belongs to another run. Restore the folder {folder} of this run from a "
                "copy, or train anew in another folder."
            )
    contents.require_states(last_file)
    for error in contents.damaged.values():
        logger.warning(
            "%s. The last checkpoint, after round %d, does not need it and is whole. Restore it from a copy or remove it.",
            error,
            last_file.round,
        )
    locations = _newest(contents.files, last_file.round)
    states = LazyMapping(locations, lambda c: locations[c][0].decode_client(c))
    return State.from_stored(
        last_file.round, last_file.decode_server(), (ClientStore() if store is None else store) | states
    )


def exists(folder: Path) -> bool:
    """Whether a folder holds a checkpoint; raises CheckpointError if it may not be read."""
    with as_checkpoint_error(f"cannot read {folder}"):
        # glob yields nothing for a folder that may not be read
        return any(name.endswith(KEPT) for name in _list_names(folder))


def rounds_kept(folder: Path, require_last: bool = True) -> list[int]:
    """Rounds of the checkpoints whose table of contents can be read, ascending.

    Args:
        folder: folder of the checkpoints.
        require_last: whether a damaged last checkpoint is an error, and not only left out.

    Raises:
        CheckpointError: if there is no checkpoint that can be read, or the last one is damaged and required.
    """
    contents = _read_folder(folder)
    if require_last or not contents.kept:
        contents.last()
    return [file.round for file in contents.kept]


def has_later(folder: Path, round: int) -> bool:
    """Whether a folder holds a checkpoint after a round, which may be damaged."""
    paths = (Path(name) for name in _list_names(folder))
    return any(path.suffix == KEPT and _round_of(path) > round for path in paths)


def go_back(folder: Path, round: int) -> None:
    """Make an earlier checkpoint the last one, and remove the checkpoints after it, which may be damaged.

    Args:
        folder: folder of the checkpoints.
        round: number of rounds completed at that checkpoint.

    Raises:
        CheckpointError: if no checkpoint of that round is kept, or a file that it needs is missing or damaged;
            nothing has changed then.
    """
    stored_rounds = rounds_kept(folder, require_last=False)
    if round not in stored_rounds:
        round_text = ", ".join(map(str, stored_rounds))
        raise CheckpointError(
            f"{folder} keeps the checkpoints after rounds {round_text}, and none after round {round}. Choose one "
            "of these; run.keep_checkpoints says how many later rounds keep."
        )
    contents = _read_folder(folder)
    if has_later(folder, round):
        (target_file,) = (file for file in contents.kept if file.round == round)
        contents.require_states(target_file)
        target_file.decode_server()
        for client_id, (file, _) in _newest(contents.files, round).items():
            file.decode_client(client_id)
    with as_checkpoint_error(f"cannot remove the checkpoints after round {round} from {folder}"):
        # remove the newest file first: all files that the remaining checkpoints need are then still there
        for path in sorted([*(file.path for file in contents.files), *contents.damaged], reverse=True):
            if _round_of(path) > round:
                path.unlink()


def _read_folder(folder: Path) -> _Contents:
    """Read the tables of contents of all files of a folder, again if one of them has vanished since it was listed."""
    for _ in range(MAX_READS):
        with as_checkpoint_error(f"cannot read {folder}"):
            paths = [*folder.glob(f"*{KEPT}"), *folder.glob(f"*{STATES}")]
        files, errors_by_path = list[_File](), dict[Path, CheckpointError]()
        for path in sorted(paths):
            try:
                files.append(_read(path))
            except CheckpointError as error:
                errors_by_path[path] = error
        if not any(map(_has_vanished, errors_by_path.values())):
            break
    return _Contents(folder, sorted(files, key=lambda file: file.round), errors_by_path)


def _has_vanished(error: CheckpointError) -> bool:
    """Whether an error says that a file that was listed is no longer there."""
    return isinstance(error.__cause__, FileNotFoundError)


def _round_of(path: Path) -> int:
    """The round that a file's name states; -1 if the name is no number, and no checkpoint needs such a file."""
    return int(path.stem) if path.stem.isdecimal() else -1


def _list_clients(client_ids: Sequence[int]) -> str:
    """List clients for a message: ``client 3``, or ``clients 1, 2 and 7 more``."""
    return f"client{'' if len(client_ids) == 1 else 's'} {list_first(client_ids, 10)}"


def _list_names(folder: Path) -> list[str]:
    try:
        return [path.name for path in folder.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _newest(files: Sequence[_File], round: int) -> dict[int, tuple[_File, _Entry | None]]:
    """Newest file and location of each client's state, as of the checkpoint of a round."""
    return {c: (f, entry) for f in files if f.round <= round for c, entry in f.clients.items()}


def _read(path: Path) -> _File:
    try:
        with path.open("rb") as file:
            file_size = file.seek(0, 2)
            file.seek(max(0, file_size - _LENGTH))
            table_size = int.from_bytes(file.read(_LENGTH), "big")
            if not 0 < table_size <= file_size - _LENGTH:
                raise ValueError("it is cut off")
            file.seek(file_size - _LENGTH - table_size)
            table = json.loads(file.read(table_size))
        if not is_sealed(table):
            raise ValueError("its table of contents has another digest than when it was written")
        server = _Entry(*table["server"])
        entries = {int(c): None if e is None else _Entry(*e) for c, e in table["clients"].items()}
        ids_by_round = {int(t): [int(c) for c in client_ids] for t, client_ids in table["elsewhere"].items()}
        return _File(path, int(table["round"]), server, entries, ids_by_round, table.get("run"))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"the checkpoint file {path} is damaged or cannot be read: {error}") from error
