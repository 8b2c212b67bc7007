"""Digests of checkpoints, and the earlier checkpoints that are kept: what is on the disk is read by hand and
compared."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedlowrank import Federation, simulate
from fedlowrank.cli.main import main
from fedlowrank.core import tree
from fedlowrank.core.errors import CheckpointError
from fedlowrank.results.records import RoundRecord, RunRecord
from fedlowrank.storage import checkpoint
from fedlowrank.storage.run_files import read_lines

HISTORY: list[tuple[dict[str, Any], dict[int, Any]]] = [
    ({"w": torch.full((3,), float(t))}, {c: {"v": torch.tensor([10.0 * t + c])} for c in changed})
    for t, changed in enumerate([(), (0, 1), (1, 2), (0,), (2, 3), ()])
]
"""Of every round the server's state, and the states of the clients that changed in it."""


def states_at(t: int) -> dict[int, Any]:
    """Every client's state after round t, by going over the history."""
    actual: dict[int, Any] = {}
    for _, changed in HISTORY[: t + 1]:
        actual |= changed
    return actual


def write(folder: Path, keep: int, rounds: int = len(HISTORY)) -> Path:
    for t, (server, changed) in enumerate(HISTORY[:rounds]):
        checkpoint.save(folder, t, server, changed, keep)
    return folder


def assert_is(folder: Path, t: int) -> None:
    actual = checkpoint.load(folder)
    assert actual.round == t
    assert tree.equal(actual.server, HISTORY[t][0])
    expected = states_at(t)
    assert actual.clients.keys() == expected.keys()
    assert all(tree.equal(actual.clients[c], expected[c]) for c in expected)


@pytest.mark.few(1)
@pytest.mark.parametrize("keep", [1, 2, 3, 9])
def test_the_last_checkpoints_are_kept_and_each_can_be_gone_back_to(tmp_path: Path, keep: int) -> None:
    rounds = list(range(max(0, 6 - keep), 6))
    for target in rounds:
        folder = write(tmp_path / str(target), keep)
        assert checkpoint.rounds_kept(folder) == rounds
        assert_is(folder, 5)
        checkpoint.go_back(folder, target)
        assert_is(folder, target)
        assert checkpoint.rounds_kept(folder) == [r for r in rounds if r <= target]
        # and from there on as if the later rounds had never been
        for t, (server, changed) in enumerate(HISTORY[target + 1 :], target + 1):
            checkpoint.save(folder, t, server, changed, keep)
        assert_is(folder, 5)
        again = checkpoint.rounds_kept(folder)
        checkpoint.go_back(folder, again[0])
        assert_is(folder, again[0])


def test_files_and_their_contents_by_hand(tmp_path: Path) -> None:
    folder = write(tmp_path / "all", 2)
    # client 0 last changed in round 3; client 1 did in round 2, whose file was the oldest and was copied from
    assert sorted(p.name for p in folder.iterdir()) == [
        "000003.states", "000004.checkpoint", "000005.checkpoint",
    ]  # fmt: skip
    whole = (folder / "000004.checkpoint").read_bytes()
    size = int.from_bytes(whole[-8:], "big")
    table = json.loads(whole[-8 - size : -8])
    assert table["round"] == 4
    assert sorted(table["clients"]) == ["1", "2", "3"]
    entries = {None: table["server"], **table["clients"]}
    assert sum(length for _, length, _ in entries.values()) == len(whole) - size - 8
    for client, (offset, length, digest) in entries.items():
        state = whole[offset : offset + length]
        assert hashlib.blake2b(state, digest_size=16).hexdigest() == digest
        expected = HISTORY[4][0] if client is None else states_at(4)[int(client)]
        assert tree.equal(tree.decode(state), expected)


def test_a_client_without_state_takes_no_bytes_and_keeps_no_file(tmp_path: Path) -> None:
    for t in range(6):
        checkpoint.save(tmp_path, t, {"w": torch.zeros(2)}, {t: None, t + 1: None})
    (only,) = tmp_path.iterdir()
    assert only.stat().st_size < 1000
    assert dict(checkpoint.load(tmp_path).clients) == dict.fromkeys(range(7))


@pytest.mark.full
@pytest.mark.parametrize("keep", [1, 3])
def test_states_of_clients_that_rarely_change_take_no_more_than_twice_their_bytes(
    tmp_path: Path, keep: int
) -> None:
    state, expected = torch.zeros(1000), {}
    for t in range(60):
        changed = {t % 17: {"v": state + t}, (5 * t) % 13: {"v": state - t}}
        expected |= changed
        checkpoint.save(tmp_path, t, {}, changed, keep)
        assert {c: float(s["v"][0]) for c, s in everything(tmp_path).items()} == {
            c: float(s["v"][0]) for c, s in expected.items()
        }
    live = sum(len(tree.encode(s)) for s in expected.values())
    on_disk = sum(p.stat().st_size for p in tmp_path.iterdir())
    # once for the states, once for what is out of date, and the checkpoints that are kept
    assert on_disk < (2.2 + keep) * live


def test_one_sync_of_a_file_and_one_of_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (synced.append(handle), fsync(handle))[1])
    checkpoint.save(tmp_path, 0, {"w": torch.zeros(2)}, {c: {"v": torch.ones(3)} for c in range(100)})
    assert len(synced) == 2


@pytest.mark.parametrize("opening", [1, 2], ids=["table of contents", "state"])
def test_a_checkpoint_that_a_running_run_replaces_while_it_is_read(
    opening: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder, openings = write(tmp_path, 1, rounds=5), 0
    open_file = Path.open

    def open_after_next_round(path: Path, *arguments: Any) -> Any:
        nonlocal openings
        openings += path.name == "000004.checkpoint"
        if path.name == "000004.checkpoint" and openings == opening:
            checkpoint.save(folder, 5, *HISTORY[5])
        return open_file(path, *arguments)

    monkeypatch.setattr(Path, "open", open_after_next_round)
    assert_is(folder, 5)
    assert not (folder / "000004.checkpoint").exists()
    assert caplog.messages == []


def test_a_round_that_is_not_kept_is_refused_with_those_that_are(tmp_path: Path) -> None:
    folder = write(tmp_path, 2)
    with pytest.raises(
        CheckpointError, match=r"keeps the checkpoints after rounds 4, 5, and none after round 2"
    ):
        checkpoint.go_back(folder, 2)
    assert_is(folder, 5)


def everything(folder: Path) -> dict[int, Any]:
    """What a checkpoint holds; clients' states are read one by one when they are asked for."""
    return dict(checkpoint.load(folder).clients.items())


@pytest.mark.full
def test_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    for t, (server, _) in enumerate(HISTORY[:2]):
        checkpoint.save(tmp_path, t, server, states_at(1))
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
        with pytest.raises(CheckpointError, match=f"{path.name}.*(damaged|cannot be read)"):
            everything(tmp_path)
    for end in range(0, len(whole), 7):
        path.write_bytes(whole[:end])
        with pytest.raises(CheckpointError, match=f"{path.name} is damaged"):
            everything(tmp_path)


def test_a_damaged_earlier_checkpoint_is_not_gone_back_to(tmp_path: Path) -> None:
    folder = write(tmp_path, 3)
    path = folder / "000003.checkpoint"
    data = path.read_bytes()
    path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    with pytest.raises(CheckpointError, match=r"000003\.checkpoint is damaged"):
        checkpoint.go_back(folder, 3)
    assert_is(folder, 5)
    checkpoint.go_back(folder, 4)
    assert_is(folder, 4)


def test_a_damaged_last_checkpoint_is_gone_back_from(tmp_path: Path) -> None:
    folder = write(tmp_path, 3)
    last = folder / "000005.checkpoint"
    last.write_bytes(last.read_bytes()[:50])
    with pytest.raises(
        CheckpointError, match=r"000005.* remove it to go on from 000004\.checkpoint\.$"
    ) as raised:
        checkpoint.load(folder)
    assert raised.value.for_command.endswith(
        "or go back to the checkpoint before it (fedlowrank resume RUN --round 4)."
    )
    with pytest.raises(CheckpointError, match="after rounds 3, 4, and none after round 5"):
        checkpoint.go_back(folder, 5)
    assert last.exists()
    assert checkpoint.has_later(folder, 4)
    checkpoint.go_back(folder, 4)
    assert not last.exists()
    assert not checkpoint.has_later(folder, 4)
    assert_is(folder, 4)


@pytest.mark.parametrize("is_removed", [False, True])
@pytest.mark.parametrize(
    ("round", "needed"), [(0, ""), (1, ""), (2, "client 1"), (3, "client 0"), (4, "clients 2, 3")]
)
def test_an_older_file_stops_a_run_only_if_its_last_checkpoint_needs_it(
    tmp_path: Path, round: int, needed: str, is_removed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write(tmp_path, 9)
    path = folder / f"{round:06d}.checkpoint"
    if is_removed:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1])
    if needed:
        # HISTORY says in which round each client changed last
        with pytest.raises(
            CheckpointError, match=rf"{path.stem}\..*holds the last state of {needed}, .*round 5"
        ):
            checkpoint.load(folder)
        with pytest.raises(CheckpointError) as stopped:
            checkpoint.load(folder)
        assert f"--round {round - 1})" in stopped.value.for_command
        checkpoint.go_back(folder, round - 1)
        assert_is(folder, round - 1)
        assert not path.exists()
    else:
        assert_is(folder, 5)
        named = [r.getMessage() for r in caplog.records if str(path) in r.getMessage()]
        assert len(named) == (0 if is_removed else 1)
        assert checkpoint.rounds_kept(folder) == [t for t in range(6) if t != round]
    # the run goes on, and what is out of date is removed
    t = checkpoint.rounds_kept(folder)[-1] + 1
    checkpoint.save(folder, t, {"w": torch.zeros(1)}, {c: {"v": torch.ones(1)} for c in range(4)}, keep=1)
    assert [p.name for p in folder.iterdir()] == [f"{t:06d}.checkpoint"]


def test_a_damaged_state_is_named_by_its_client(tmp_path: Path) -> None:
    folder = write(tmp_path, 9)
    path = folder / "000002.checkpoint"
    whole = path.read_bytes()
    size = int.from_bytes(whole[-8:], "big")
    place = json.loads(whole[-8 - size : -8])["clients"]["1"][0]
    path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    with pytest.raises(CheckpointError, match=r"000002\.checkpoint is damaged: the state of client 1"):
        checkpoint.load(folder)


EXPERIMENT = """
name = "small"
method = "scaffold"
[data]
source = "iris"
[partition]
kind = "iid"
clients = 3
[model]
names = ["mlp"]
hidden = [6]
[run]
rounds = 5
checkpoint_every = 1
representations = 0
"""


def test_a_local_run_goes_back_and_comes_to_the_same_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "small.toml").write_text(EXPERIMENT)
    folder = tmp_path / "run"
    assert main(["run", str(tmp_path / "small.toml"), "-o", str(folder)]) == 0
    whole = [r.untimed() for r in RunRecord.load(folder).rounds]
    end = {p.name: p.read_bytes() for p in (folder / "checkpoint").iterdir()}
    assert checkpoint.rounds_kept(folder / "checkpoint") == [3, 4, 5]
    assert main(["resume", str(folder), "--round", "1"]) == 1
    assert "rounds 3, 4, 5, and none after round 1" in capsys.readouterr().err
    assert main(["resume", str(folder), "--round", "3", "--without", "1"]) == 1
    assert "--without" in capsys.readouterr().err
    assert {p.name: p.read_bytes() for p in (folder / "checkpoint").iterdir()} == end
    append = read_lines(folder)
    assert main(["resume", str(folder), "--round", "3"]) == 0
    actual = RunRecord.load(folder)
    assert [r.untimed() for r in actual.rounds] == whole
    assert {p.name: p.read_bytes() for p in (folder / "checkpoint").iterdir()} == end
    # rounds 4 and 5 were done again: their seconds are others
    written = read_lines(folder)
    assert [a == b for a, b in zip(append, written, strict=True)] == [True] * 4 + [False] * 2


@pytest.mark.full
def test_an_interrupt_after_a_checkpoint_keeps_the_states_that_are_in_it(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    arrays = [(torch.randn(8, 3, generator=draw), torch.arange(8) % 2) for _ in range(4)]
    made = Federation.from_arrays([{"train": pair, "test": pair} for pair in arrays], nn.Linear(3, 2))
    settings: dict[str, Any] = {"rounds": 4, "participation": 0.5, "checkpoint_every": 1}

    def interrupted(record: RoundRecord) -> None:
        if record.round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate("standalone", made, folder=tmp_path / "a", on_round=interrupted, **settings)
    went_on = simulate("standalone", made, folder=tmp_path / "a", resume=True, **settings)
    whole = simulate("standalone", made, **settings)
    for k in range(4):
        assert torch.equal(went_on.personal(k)["weight"], whole.personal(k)["weight"])
