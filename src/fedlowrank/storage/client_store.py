"""Client-state store: above a memory limit, the least recent states move to disk and are loaded lazily."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core import tree
from ..core.errors import CheckpointError
from ..core.io.atomic_files import as_checkpoint_error

_STATES_BETWEEN_CHECKS = 256
"""Number of states that are added between two checks of the memory limit."""


class _OnDisk:
    """A state on disk; its file is removed when the last reference to this object is gone."""

    def __init__(self, path: Path, folder: _Folder) -> None:
        self.path, self._folder = path, folder
        weakref.finalize(self, _remove, path, os.getpid())


class _Folder:
    """A temporary folder, removed when the last store that uses it is gone."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="fedlowrank-"))
        weakref.finalize(self, _remove, self.path, os.getpid())


@dataclass(frozen=True)
class _InMemory:
    """A state in memory and its size in bytes."""

    value: Any
    bytes: int


class LazyMapping(Mapping[int, Any]):
    """A mapping from clients to states that are loaded when they are accessed.

    Args:
        client_ids: identifiers of the clients.
        load_state: function that loads the state of a client, given its identifier.
    """

    def __init__(self, client_ids: Iterable[int], load_state: Callable[[int], Any]) -> None:
        self._clients, self._of = dict.fromkeys(client_ids), load_state

    def __getitem__(self, client_id: int) -> Any:
        """Load the state of a client."""
        return self._of(client_id)

    def __contains__(self, client_id: object) -> bool:
        """Whether it is one of these clients, even if ``load_state`` could load others."""
        return client_id in self._clients

    def __iter__(self) -> Iterator[int]:
        """Iterate over the identifiers of the clients."""
        return iter(self._clients)

    def __len__(self) -> int:
        """Number of clients."""
        return len(self._clients)


class ClientStore(Mapping[int, Any]):
    """An immutable mapping from clients to states; ``store | {client: state}`` returns a new one.

    Args:
        limit: largest number of bytes of states in memory, or None for no limit.
        device: device of the tensors that are loaded from disk.
    """

    def __init__(self, limit: int | None = None, device: str = "cpu") -> None:
        self._limit, self._device = limit, device
        self._entries: dict[int, _InMemory | _OnDisk] = {}
        self._store: _Folder | None = None
        self._names = itertools.count()

    @property
    def in_memory(self) -> int:
        """Bytes of the states in memory."""
        return sum(p.bytes for p in self._entries.values() if isinstance(p, _InMemory))

    def __getitem__(self, client_id: int) -> Any:
        """Return the state of a client.

        Raises:
            KeyError: if the client has no state.
            CheckpointError: if the state's file is missing or damaged.
        """
        entry = self._entries[client_id]
        if isinstance(entry, _InMemory):
            return entry.value
        try:
            with as_checkpoint_error(f"cannot read the state of client {client_id} at {entry.path}"):
                state = tree.decode(entry.path.read_bytes())
        except tree.TreeError as error:
            raise CheckpointError(
                f"the state of client {client_id} at {entry.path} is damaged: {error}"
            ) from error
        return tree.map_leaves(lambda t: t.to(self._device), state)

    def __iter__(self) -> Iterator[int]:
        """Iterate over the clients, in the order in which their states last changed."""
        return iter(self._entries)

    def __len__(self) -> int:
        """Number of clients that have a state."""
        return len(self._entries)

    def __contains__(self, client_id: object) -> bool:
        """Whether a client has a state; does not load it."""
        return client_id in self._entries

    def empty(self) -> ClientStore:
        """An empty store that uses the same folder."""
        store = ClientStore(self._limit, self._device)
        store._store, store._names = self._store, self._names
        return store

    def only(self, client_ids: Set[int]) -> ClientStore:
        """The store restricted to the states of these clients."""
        store = self.empty()
        store._entries = {c: p for c, p in self._entries.items() if c in client_ids}
        return store

    def __or__(self, new_states: Mapping[int, Any]) -> ClientStore:
        """Return a store with new states of some clients.

        Raises:
            CheckpointError: if the states exceed the memory limit and the disk is full.
        """
        store = self.empty()
        store._entries = {c: p for c, p in self._entries.items() if c not in new_states}
        if isinstance(new_states, ClientStore):
            # states on disk stay there
            store._entries |= new_states._entries
            store._store, store._names = (
                new_states._store or self._store,
                new_states._names if new_states._store else self._names,
            )
            store._spill()
            return store
        for batch in _batched(new_states):
            for client_id in batch:
                value = new_states[client_id]
                store._entries[client_id] = _InMemory(value, 0 if self._limit is None else tree.nbytes(value))
            store._spill()
        return store

    def _spill(self) -> None:
        """Move states to disk until the rest fits the limit."""
        if self._limit is None:
            return
        excess_bytes = self.in_memory - self._limit
        for client_id, entry in self._entries.items():
            if excess_bytes <= 0:
                return
            if isinstance(entry, _InMemory) and entry.bytes:
                self._entries[client_id] = self._stored(client_id, entry.value)
                excess_bytes -= entry.bytes

    def _stored(self, client_id: int, value: Any) -> _OnDisk:
        with as_checkpoint_error(f"cannot write the state of client {client_id} to disk (run.client_memory)"):
            if self._store is None:
                self._store = _Folder()
            path = self._store.path / f"{next(self._names)}.tree"
            path.write_bytes(tree.encode(value))
        return _OnDisk(path, self._store)


def _remove(path: Path, owner_pid: int) -> None:
    """Remove a file or folder, unless this process is a fork of its owner."""
    if os.getpid() != owner_pid:
        return
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
        return
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def _batched(new_states: Mapping[int, Any]) -> Iterator[tuple[int, ...]]:
    client_ids = iter(new_states)
    while batch := tuple(itertools.islice(client_ids, _STATES_BETWEEN_CHECKS)):
        yield batch
