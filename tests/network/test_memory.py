"""A client's memory: what the server acknowledged is there after any death, and nothing else counts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedlowrank import tree
from fedlowrank.errors import CheckpointError
from fedlowrank.network.memory import ForgottenError, Memory, Offer

from .local import Hazard, Killed, LocalTransport, no_space


def value(n: int) -> dict[str, Any]:
    return {"w": torch.tensor([n, n + 1]), "n": n}


def keep(memory: Memory, stamp: int, n: int) -> None:
    memory.propose(stamp, value(n), b"up%d" % n, f"order{n}", f"answer{n}")


def files(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir()}


def test_a_state_counts_once_its_stamp_is_named_and_not_before(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "run"
    memory = Memory(folder)
    assert memory.at(0) is None
    assert memory.answered("order1") is None
    keep(memory, 1, 1)
    assert Memory(folder).at(0) is None
    assert Memory(folder).answered("order1") == ("answer1", b"up1")
    assert Memory(folder).answered("order2") is None
    # the reply was lost: the next round goes by the state of before
    keep(Memory(folder), 2, 2)
    assert Memory(folder).answered("order1") is None
    assert Memory(folder).at(0) is None
    assert tree.equal(Memory(folder).at(2), value(2))
    # taken for good: it is there as often as it is asked for, and what came before is gone
    assert tree.equal(Memory(folder).at(2), value(2))
    assert Memory(folder).answered("order2") is None
    keep(Memory(folder), 5, 5)
    assert tree.equal(Memory(folder).at(2), value(2))
    assert tree.equal(Memory(folder).at(5), value(5))


def test_what_the_manifest_does_not_name_is_removed(tmp_path: Path) -> None:
    memory = Memory(tmp_path)
    keep(memory, 1, 1)
    memory.at(1)
    assert files(tmp_path) == {"manifest.json", "state-000001.tree"}
    keep(memory, 3, 3)
    assert files(tmp_path) == {"manifest.json", "state-000001.tree", "state-000003.tree", "upload-000003.tree"}
    left = ["state-000009.tree", "upload-000002.tree", "state-000003.tree.part", "manifest.json.part"]
    for name in left:
        (tmp_path / name).write_bytes(b"half")
    assert tree.equal(Memory(tmp_path).at(3), value(3))
    assert files(tmp_path) == {"manifest.json", "state-000003.tree"}


def test_a_state_that_is_not_there_is_said_to_be_forgotten(tmp_path: Path) -> None:
    with pytest.raises(ForgottenError, match=r"expects the state after round 3, but the last one .* is of round 0"):
        Memory(tmp_path).at(3)
    keep(Memory(tmp_path), 4, 4)
    for stamp in (3, 5):
        with pytest.raises(ForgottenError):
            Memory(tmp_path).at(stamp)
    # to have asked for what is not there took nothing away
    assert tree.equal(Memory(tmp_path).at(4), value(4))
    with pytest.raises(ForgottenError, match="of round 4"):
        Memory(tmp_path).at(2)
    assert tree.equal(Memory(tmp_path).at(4), value(4))


def test_a_client_that_is_told_to_begin_anew_does_so_whatever_it_remembers(tmp_path: Path) -> None:
    keep(Memory(tmp_path), 4, 4)
    Memory(tmp_path).at(4)
    keep(Memory(tmp_path), 6, 6)
    assert Memory(tmp_path).at(0) is None
    keep(Memory(tmp_path), 7, 7)
    # until the server has the reply, both ways are open
    assert Memory(tmp_path).at(0) is None
    assert tree.equal(Memory(tmp_path).at(7), value(7))
    assert files(tmp_path) == {"manifest.json", "state-000007.tree"}


def fails(hazard: Hazard, act: Callable[[], object]) -> bool:
    carrier = LocalTransport({}, hazards={0: hazard})
    with carrier.world():
        try:
            act()
        except (CheckpointError, Killed):
            return True
    return False


def test_a_full_disk_changes_nothing_wherever_it_strikes(tmp_path: Path) -> None:
    keep(Memory(tmp_path), 1, 1)
    Memory(tmp_path).at(1)
    keep(Memory(tmp_path), 2, 2)

    def attempt(place: int, act: Callable[[Memory], object]) -> list[str]:
        memory, hazard = Memory(tmp_path), Hazard({place}, no_space)
        if not fails(hazard, lambda: act(memory)):
            return []
        assert memory.stamp == 1
        assert memory.offer == Offer(2, "order2", "answer2")
        return hazard.points[: place + 1]

    place = 0
    while "manifest.json renamed" not in (points := attempt(place, lambda m: keep(m, 3, 3))):
        assert points
        assert Memory(tmp_path).answered("order2") == ("answer2", b"up2")
        place += 1
    # state, upload, manifest: each not synced, not renamed, renamed, its folder not synced
    assert place == 10
    # from here on the disk has the new one, whatever it says; neither is acknowledged
    assert Memory(tmp_path).answered("order3") == ("answer3", b"up3")
    assert Memory(tmp_path).stamp == 1
    keep(Memory(tmp_path), 2, 2)
    for place in range(2):
        assert attempt(place, lambda m: m.at(2))
        assert Memory(tmp_path).answered("order2") == ("answer2", b"up2")
        assert tree.equal(Memory(tmp_path).at(1), value(1))
    # renamed but not synced: committed all the same
    assert attempt(2, lambda m: m.at(2))
    assert tree.equal(Memory(tmp_path).at(2), value(2))


def test_what_cannot_be_removed_is_removed_the_next_time(tmp_path: Path) -> None:
    keep(Memory(tmp_path), 1, 1)
    hazard = Hazard({4}, no_space)
    assert not fails(hazard, lambda: Memory(tmp_path).at(1))
    assert hazard.points[4] == "upload-000001.tree not removed"
    assert "upload-000001.tree" in files(tmp_path)
    assert tree.equal(Memory(tmp_path).at(1), value(1))
    keep(Memory(tmp_path), 2, 2)
    assert "upload-000001.tree" not in files(tmp_path)


def test_no_folder_and_no_disk_for_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot make .*file/run"):
        Memory(tmp_path / "file" / "run")


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "3", "null", "{}", '{"stamp": 1}', '{"stamp": null, "offer": null}', '{"stamp": 1, "offer": 3}',
     '{"stamp": "x", "offer": null}', '{"stamp": 1, "offer": {"stamp": 2}}', '{"stamp": 1, "offer": {"a": 1}}'],
)  # fmt: skip
def test_a_damaged_manifest_is_named(tmp_path: Path, text: str) -> None:
    keep(Memory(tmp_path), 1, 1)
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged"):
        Memory(tmp_path)


def test_files_that_were_taken_away_or_damaged_are_named(tmp_path: Path) -> None:
    keep(Memory(tmp_path), 1, 1)
    (tmp_path / "upload-000001.tree").unlink()
    with pytest.raises(CheckpointError, match=r"cannot read .*upload-000001\.tree"):
        Memory(tmp_path).answered("order1")
    Memory(tmp_path).at(1)
    whole = (tmp_path / "state-000001.tree").read_bytes()
    (tmp_path / "state-000001.tree").write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match=r"state-000001\.tree is damaged"):
        Memory(tmp_path).at(1)
    (tmp_path / "state-000001.tree").unlink()
    with pytest.raises(CheckpointError, match=r"cannot read .*state-000001\.tree"):
        Memory(tmp_path).at(1)


def test_sizes_of_the_others_are_kept_and_asked_for_again_if_they_are_damaged(tmp_path: Path) -> None:
    assert Memory(tmp_path).sizes() is None
    Memory(tmp_path).learn_sizes((4, 0, 6))
    assert Memory(tmp_path).sizes() == (4, 0, 6)
    for text in ("", "3", "[", '["a"]', "null", "[null]"):
        (tmp_path / "sizes.json").write_text(text)
        assert Memory(tmp_path).sizes() is None


plans = st.tuples(
    # where the process dies or finds its disk full while it works, if it does; whether the reply is lost; who asks again
    st.none() | st.integers(0, 20),
    st.sampled_from([Killed, no_space]),
    st.booleans(),
    st.integers(0, 2),
)


def work(folder: Path, round: int, stamp: int, n: int) -> tuple[str, bytes]:
    """A client's part in a round: from the value n of its state to 31 n + round."""
    memory, order = Memory(folder), f"{round} on {stamp}"
    before = memory.answered(order)
    if before is not None:
        return before
    memory.learn_sizes((round,))
    state = memory.at(stamp)
    assert (0 if state is None else state["n"]) == n
    answer = str(31 * n + round)
    memory.propose(round, value(31 * n + round), answer.encode(), order, answer)
    return answer, answer.encode()


@settings(
    max_examples=100, derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
@given(st.lists(plans, min_size=1, max_size=8))
def test_deaths_full_disks_and_lost_replies_in_any_order(plan: list[Any]) -> None:
    with TemporaryDirectory() as base:
        folder, stamp, n = Path(base) / "run", 0, 0
        for t, (place, error, lost, again) in enumerate(plan, 1):
            for attempt in range(1 + again):
                hazard = Hazard(set() if place is None or attempt else {place}, error)
                replies: list[tuple[str, bytes]] = []
                act = functools.partial(work, folder, t, stamp, n)
                fails(hazard, lambda act=act, replies=replies: replies.append(act()))  # type: ignore[misc]
                assert replies in ([], [(str(31 * n + t), str(31 * n + t).encode())])
                if replies and not lost:
                    stamp, n = t, 31 * n + t
                    break
        found = Memory(folder).at(stamp)
        assert (0 if found is None else found["n"]) == n
