"""A client store is a dictionary that never changes, however little of it is in memory."""

from __future__ import annotations

import gc
import os
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedlowrank.core import tree
from fedlowrank.core.errors import CheckpointError
from fedlowrank.methods import METHODS
from fedlowrank.rounds.simulate import simulate
from fedlowrank.storage.client_store import ClientStore, LazyMapping
from fedlowrank.testing.check import small_federation

changes = st.lists(
    st.dictionaries(st.integers(0, 6), st.tuples(st.integers(0, 9), st.integers(0, 30)), max_size=4)
)


def state(number: int, size: int) -> dict[str, Any]:
    return {"t": torch.full((size,), float(number)), "n": number, "none": None}


@pytest.mark.full
@given(changes, st.none() | st.integers(0, 400))
def test_is_a_dictionary_at_every_time(plan: list[dict[int, tuple[int, int]]], limit: int | None) -> None:
    shelf, plain = ClientStore(limit), {}
    past: list[tuple[ClientStore, dict[int, Any]]] = []
    for change in plan:
        past.append((shelf, plain))
        new = {c: state(*v) for c, v in change.items()}
        shelf, plain = shelf | new, plain | new
        assert limit is None or shelf.in_memory <= limit
    for actual, expected in [*past, (shelf, plain)]:
        assert set(actual) == set(expected)
        assert len(actual) == len(expected)
        assert all(c in actual and tree.equal(actual[c], expected[c]) for c in expected)
        assert all(c not in actual for c in range(7) if c not in expected)
        with pytest.raises(KeyError):
            actual[99]


def folder_of(shelf: ClientStore) -> Path:
    assert shelf._store is not None
    return shelf._store.path


@pytest.mark.full
def test_what_nobody_asks_for_any_more_leaves_the_disk() -> None:
    shelf = ClientStore(0) | {c: state(c, 5) for c in range(4)}
    folder = folder_of(shelf)
    assert len(list(folder.iterdir())) == 4
    before = shelf
    shelf = shelf | {1: state(9, 5)}
    assert len(list(folder.iterdir())) == 5
    assert before[1]["n"] == 1
    assert shelf[1]["n"] == 9
    del before
    gc.collect()
    assert len(list(folder.iterdir())) == 4
    del shelf
    gc.collect()
    assert not folder.exists()


@pytest.mark.full
def test_a_fork_removes_nothing() -> None:
    shelf = ClientStore(0) | {0: state(1, 5)}
    child = os.fork()
    if child == 0:
        del shelf
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    assert shelf[0]["n"] == 1


def test_those_that_were_longest_not_changed_go_first() -> None:
    shelf = ClientStore(3 * 20) | {c: state(c, 5) for c in range(3)}
    shelf = shelf | {0: state(7, 5)} | {3: state(3, 5)}
    assert list(shelf) == [1, 2, 0, 3]
    assert [type(shelf._entries[c]).__name__ for c in shelf] == [
        "_OnDisk",
        "_InMemory",
        "_InMemory",
        "_InMemory",
    ]


def test_a_file_that_is_gone_or_damaged_is_named() -> None:
    shelf = ClientStore(0) | {c: state(c, 5) for c in range(2)}
    files = sorted(folder_of(shelf).iterdir())
    files[0].write_bytes(files[0].read_bytes()[:-1])
    files[1].unlink()
    with pytest.raises(CheckpointError, match=r"the state of client 0 at .* is damaged"):
        shelf[0]
    with pytest.raises(CheckpointError, match="cannot read the state of client 1"):
        shelf[1]
    shutil.rmtree(folder_of(shelf))
    with pytest.raises(
        CheckpointError, match=r"cannot write the state of client 2 to disk \(run.client_memory\)"
    ):
        shelf | {2: state(1, 5)}


@pytest.mark.full
def test_many_states_are_taken_over_without_ever_being_in_memory_together() -> None:
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = 0

    def made(client: int) -> Any:
        nonlocal most
        alive.add(t := torch.full((3,), float(client)))
        most = max(most, len(alive))
        return {"t": t}

    shelf = ClientStore(0) | LazyMapping(range(700), made)
    assert most <= 256 + 1
    assert [float(shelf[c]["t"][0]) for c in (0, 300, 699)] == [0.0, 300.0, 699.0]


@pytest.mark.full
@pytest.mark.parametrize("name", ["ditto", "scaffold"])
def test_a_run_ends_the_same_whatever_is_in_memory(name: str, tmp_path: Path) -> None:
    def run(rounds: int, folder: str, **options: Any) -> Any:
        return simulate(
            METHODS[name](),
            small_federation(heterogeneous=False),
            rounds=rounds,
            representations=0,
            folder=tmp_path / folder,
            **options,
        )

    whole, spilled = run(3, "whole"), run(3, "spilled", client_memory=0)
    assert spilled.run.state.clients.in_memory == 0
    assert len(spilled.run.state.clients) > 1
    assert tree.equal(spilled.run.state.server, whole.run.state.server)
    for client, expected in whole.run.state.clients.items():
        assert tree.equal(spilled.run.state.clients[client], expected)
    again = run(3, "spilled", client_memory=0, resume=True)
    assert again.run.state.clients.in_memory == 0
    assert all(tree.equal(again.run.state.clients[c], s) for c, s in whole.run.state.clients.items())
