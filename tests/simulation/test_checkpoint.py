"""Digests of checkpoints, and the earlier checkpoints that are kept: what is on the disk is read by hand and
compared."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fedlowrank.cli.main import main
from fedlowrank.core import tree
from fedlowrank.core.errors import CheckpointError
from fedlowrank.simulation import checkpoint
from fedlowrank.simulation.records import RunRecord

HISTORY: list[tuple[dict[str, Any], dict[int, Any]]] = [
    ({"w": torch.full((3,), float(t))}, {c: {"v": torch.tensor([10.0 * t + c])} for c in changed})
    for t, changed in enumerate([(), (0, 1), (1, 2), (0,), (2, 3), ()])
]
"""Of every round the server's state, and the states of the clients that changed in it."""


def states_at(t: int) -> dict[int, Any]:
    """Every client's state after round t, by going over the history."""
    found: dict[int, Any] = {}
    for _, changed in HISTORY[: t + 1]:
        found |= changed
    return found


def write(folder: Path, keep: int, rounds: int = len(HISTORY)) -> Path:
    for t, (server, changed) in enumerate(HISTORY[:rounds]):
        checkpoint.save(folder, t, server, changed, keep)
    return folder


def assert_is(folder: Path, t: int) -> None:
    found = checkpoint.load(folder)
    assert found.round == t
    assert tree.equal(found.server, HISTORY[t][0])
    wanted = states_at(t)
    assert found.clients.keys() == wanted.keys()
    assert all(tree.equal(found.clients[c], wanted[c]) for c in wanted)


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


def test_only_files_of_kept_checkpoints_stay_and_the_manifest_has_their_digests(tmp_path: Path) -> None:
    folder = write(tmp_path / "all", 2)
    manifest = json.loads((folder / "manifest.json").read_text())
    # after rounds 4 and 5, in which nobody changed
    wanted = {"server-000004.tree", "server-000005.tree", "client-0-000003.tree", "client-1-000002.tree",
              "client-2-000004.tree", "client-3-000004.tree"}  # fmt: skip
    assert {p.name for p in folder.iterdir()} == wanted | {"manifest.json"}
    assert manifest["digests"] == {
        name: hashlib.blake2b((folder / name).read_bytes(), digest_size=16).hexdigest() for name in wanted
    }


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


def test_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    folder = write(tmp_path, 1)
    for path in sorted(folder.iterdir()):
        whole = path.read_bytes()
        for place in range(0, len(whole), 1 if path.suffix == ".json" else 7):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
            with pytest.raises(CheckpointError, match=f"{path.name}.*(damaged|cannot be read)"):
                everything(folder)
        path.write_bytes(whole)
    assert_is(folder, 5)


def test_a_damaged_earlier_checkpoint_is_not_gone_back_to(tmp_path: Path) -> None:
    folder = write(tmp_path, 3)
    path = folder / "client-2-000002.tree"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=r"client-2-000002\.tree is damaged"):
        checkpoint.go_back(folder, 3)
    assert_is(folder, 5)
    checkpoint.go_back(folder, 4)
    assert_is(folder, 4)


def test_a_checkpoint_of_a_version_without_digests_is_read_and_gets_digests_with_the_next(
    tmp_path: Path,
) -> None:
    folder = write(tmp_path, 1, rounds=3)
    old = {"round": 2, "server": "server-000002.tree",
           "clients": {"0": "client-0-000001.tree", "1": "client-1-000002.tree", "2": "client-2-000002.tree"}}  # fmt: skip
    (folder / "manifest.json").write_text(json.dumps(old))
    assert_is(folder, 2)
    checkpoint.save(folder, 3, *HISTORY[3], keep=2)
    assert_is(folder, 3)
    assert len(json.loads((folder / "manifest.json").read_text())["digests"]) == 6
    checkpoint.go_back(folder, 2)
    assert_is(folder, 2)


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
    append, written = (folder / "metrics.jsonl").read_text().splitlines(), []
    assert main(["resume", str(folder), "--round", "3"]) == 0
    found = RunRecord.load(folder)
    assert [r.untimed() for r in found.rounds] == whole
    assert {p.name: p.read_bytes() for p in (folder / "checkpoint").iterdir()} == end
    # rounds 4 and 5 were done again: their seconds are others
    written = (folder / "metrics.jsonl").read_text().splitlines()
    assert [a == b for a, b in zip(append, written, strict=True)] == [True] * 4 + [False] * 2
