"""A client's memory: what the server acknowledged is there after any death, and nothing else counts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedlowrank.core import tree
from fedlowrank.core.errors import CheckpointError
from fedlowrank.network.persistence.client_memory import ClientMemory, ForgottenError
from tests.support.local_network import Hazard, Killed, LocalTransport, fuzz, no_space


def value(n: int) -> dict[str, Any]:
    return {"w": torch.tensor([n, n + 1]), "n": n}


def keep(memory: ClientMemory, stamp: int, n: int, base: int = 0) -> None:
    memory.propose(base, stamp, value(n), b"up%d" % n, f"order{n}", f"answer{n}")


def files(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir()}


def test_a_state_stays_until_one_that_came_after_it_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "run"
    memory = ClientMemory(folder)
    assert memory.read_state(0) is None
    assert memory.find_answer("order1") is None
    keep(memory, 1, 1)
    assert ClientMemory(folder).read_state(0) is None
    assert ClientMemory(folder).find_answer("order1") == ("answer1", b"up1")
    assert ClientMemory(folder).find_answer("order2") is None
    assert tree.equal(ClientMemory(folder).read_state(1), value(1))
    keep(ClientMemory(folder), 2, 2, base=1)
    # the reply was lost: the next round goes by the state of before
    assert tree.equal(ClientMemory(folder).read_state(1), value(1))
    keep(ClientMemory(folder), 3, 3, base=1)
    assert ClientMemory(folder).find_answer("order2") is None
    assert ClientMemory(folder).stamps == [1, 3]
    assert tree.equal(ClientMemory(folder).read_state(3), value(3))
    # it is there as often as it is asked for, and what came before is gone
    (folder / "000003.tree.part").write_bytes(b"half")
    assert tree.equal(ClientMemory(folder).read_state(3), value(3))
    assert ClientMemory(folder).stamps == [3]
    assert files(folder) == {"000003.tree"}
    keep(ClientMemory(folder), 5, 5, base=3)
    assert tree.equal(ClientMemory(folder).read_state(3), value(3))
    assert tree.equal(ClientMemory(folder).read_state(5), value(5))


def test_a_state_that_is_not_there_is_said_to_be_forgotten(tmp_path: Path) -> None:
    with pytest.raises(
        ForgottenError, match=r"expects the state after round 3, but those kept here are of round: none"
    ):
        ClientMemory(tmp_path).read_state(3)
    keep(ClientMemory(tmp_path), 4, 4)
    keep(ClientMemory(tmp_path), 6, 6, base=4)
    for stamp in (3, 5, 7):
        with pytest.raises(ForgottenError, match="of round: 4 and 6"):
            ClientMemory(tmp_path).read_state(stamp)
    # to have asked for what is not there took nothing away
    assert tree.equal(ClientMemory(tmp_path).read_state(4), value(4))
    assert tree.equal(ClientMemory(tmp_path).read_state(6), value(6))
    with pytest.raises(ForgottenError, match="of round: 6"):
        ClientMemory(tmp_path).read_state(4)


def test_a_client_that_is_told_to_start_again_does_so_whatever_it_remembers(tmp_path: Path) -> None:
    keep(ClientMemory(tmp_path), 4, 4)
    keep(ClientMemory(tmp_path), 6, 6, base=4)
    assert ClientMemory(tmp_path).read_state(0) is None
    keep(ClientMemory(tmp_path), 7, 7)
    # until the server has the reply, it may be sent back as well
    assert ClientMemory(tmp_path).read_state(0) is None
    assert tree.equal(ClientMemory(tmp_path).read_state(4), value(4))
    assert tree.equal(ClientMemory(tmp_path).read_state(7), value(7))
    assert files(tmp_path) == {"000007.tree"}


def fails(hazard: Hazard, act: Callable[[], object]) -> bool:
    carrier = LocalTransport({}, hazards={0: hazard})
    with carrier.world():
        try:
            act()
        except (CheckpointError, Killed):
            return True
    return False


def test_a_full_disk_changes_nothing_wherever_it_strikes(tmp_path: Path) -> None:
    keep(ClientMemory(tmp_path), 1, 1)
    keep(ClientMemory(tmp_path), 2, 2, base=1)

    def attempt(place: int) -> list[str]:
        memory, hazard = ClientMemory(tmp_path), Hazard({place}, no_space)
        assert fails(hazard, lambda: keep(memory, 3, 3, base=1))
        assert memory.stamps == [1, 2]
        return hazard.points[: place + 1]

    place = 0
    while "000003.tree renamed" not in attempt(place):
        assert ClientMemory(tmp_path).find_answer("order2") == ("answer2", b"up2")
        place += 1
    # not synced, not renamed, renamed, its folder not synced
    assert place == 2
    # from here on the disk has the new one, whatever it says; nothing is acknowledged
    assert ClientMemory(tmp_path).find_answer("order3") == ("answer3", b"up3")
    assert tree.equal(ClientMemory(tmp_path).read_state(1), value(1))


def test_what_cannot_be_removed_is_removed_the_next_time(tmp_path: Path) -> None:
    keep(ClientMemory(tmp_path), 1, 1)
    keep(ClientMemory(tmp_path), 2, 2, base=1)
    hazard = Hazard({0}, no_space)
    assert not fails(hazard, lambda: ClientMemory(tmp_path).read_state(2))
    assert hazard.points == ["000001.tree not removed"]
    assert "000001.tree" in files(tmp_path)
    assert tree.equal(ClientMemory(tmp_path).read_state(2), value(2))
    assert files(tmp_path) == {"000002.tree"}


def test_no_folder_and_no_disk_for_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot make .*file/run"):
        ClientMemory(tmp_path / "file" / "run")


@pytest.mark.parametrize("line", ["", "{", "[]", "3", "null", "{}", "\xff", '{"order": "o", "digest": "0"}'])
def test_a_damaged_first_line_is_named(tmp_path: Path, line: str) -> None:
    keep(ClientMemory(tmp_path), 1, 1)
    rest = (tmp_path / "000001.tree").read_bytes().partition(b"\n")[2]
    (tmp_path / "000001.tree").write_bytes(line.encode("latin-1") + b"\n" + rest)
    for act in (
        lambda: ClientMemory(tmp_path).find_answer("order1"),
        lambda: ClientMemory(tmp_path).read_state(1),
    ):
        with pytest.raises(CheckpointError, match=r"000001\.tree is damaged"):
            act()


@pytest.mark.full
def test_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    keep(ClientMemory(tmp_path), 1, 1)
    path = tmp_path / "000001.tree"
    whole = path.read_bytes()
    line, state = whole.index(b"\n"), len(tree.encode(value(1)))
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
        if place <= line + state:
            with pytest.raises(CheckpointError, match=r"000001\.tree is damaged"):
                ClientMemory(tmp_path).read_state(1)
        if not line < place <= line + state:
            with pytest.raises(CheckpointError, match=r"000001\.tree is damaged"):
                ClientMemory(tmp_path).find_answer("order1")


def test_acknowledged_states_stay_for_a_server_that_goes_back(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    # round 4 was lost: its state was never acknowledged
    for base, stamp in [(0, 1), (1, 2), (2, 3), (3, 4), (3, 5), (5, 6)]:
        keep(ClientMemory(folder, 3), stamp, stamp, base=base)
    assert files(folder) == {f"00000{n}.tree" for n in (2, 3, 5, 6)}
    assert tree.equal(ClientMemory(folder, 3).read_state(6), value(6))
    assert files(folder) == {f"00000{n}.tree" for n in (3, 5, 6)}
    # the server went back to the checkpoint after round 3
    assert tree.equal(ClientMemory(folder, 3).read_state(3), value(3))
    memory = ClientMemory(folder, 3)
    memory.propose(3, 4, value(40), b"up", "again", "answer", branch=1)
    assert (memory.stamps, memory.branch, ClientMemory(folder).branch) == ([3, 4], 1, 1)
    assert tree.equal(ClientMemory(folder, 3).read_state(4), value(40))


def test_files_that_were_taken_away_or_damaged_are_named(tmp_path: Path) -> None:
    keep(ClientMemory(tmp_path), 1, 1)
    path, memory = tmp_path / "000001.tree", ClientMemory(tmp_path)
    whole = path.read_bytes()
    for changed in (whole[:-1], whole + b"x"):
        path.write_bytes(changed)
        with pytest.raises(CheckpointError, match=r"000001\.tree is damaged"):
            memory.find_answer("order1")
    path.write_bytes(whole[: whole.index(b"\n") + 9])
    with pytest.raises(CheckpointError, match=r"000001\.tree is damaged"):
        memory.read_state(1)
    path.unlink()
    for act in (lambda: memory.find_answer("order1"), lambda: memory.read_state(1)):
        with pytest.raises(CheckpointError, match=r"cannot read .*000001\.tree"):
            act()


plans = st.tuples(
    # where the process dies or finds its disk full while it works, if it does; whether the reply is lost; who
    # asks again
    st.none() | st.integers(0, 20),
    st.sampled_from([Killed, no_space]),
    st.booleans(),
    st.integers(0, 2),
)


def work(folder: Path, round: int, stamp: int, n: int) -> tuple[str, bytes]:
    """A client's part in a round: from the value n of its state to 31 n + round."""
    memory, order = ClientMemory(folder), f"{round} on {stamp}"
    before = memory.find_answer(order)
    if before is not None:
        return before
    state = memory.read_state(stamp)
    assert (0 if state is None else state["n"]) == n
    answer = str(31 * n + round)
    memory.propose(stamp, round, value(31 * n + round), answer.encode(), order, answer)
    return answer, answer.encode()


@fuzz(100)
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
        actual = ClientMemory(folder).read_state(stamp)
        assert (0 if actual is None else actual["n"]) == n
