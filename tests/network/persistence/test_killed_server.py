"""A server that dies at any point of a run, and is started again, ends where the unbroken run ends, to the last bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.core.errors import CheckpointError
from fedlowrank.network.messages import Order
from fedlowrank.network.persistence.account import prepare_resume
from fedlowrank.network.persistence.client_memory import ClientMemory
from fedlowrank.network.server import NetworkError
from fedlowrank.network.transport import NodeMessage
from fedlowrank.rounds.outcome.result import Result
from fedlowrank.storage import checkpoint
from fedlowrank.storage.run_files import RECORDS_FILE
from fedlowrank.storage.run_folder import RunFolder
from tests.support.local_network import (
    Hazard,
    Killed,
    LocalTransport,
    assert_equals_sequential_run,
    fault_on_orders,
    find_missed_rounds,
    intact,
    local,
    lost,
    lost_reply,
    no_space,
    serve_run,
    small,
)


def watched(out: Path, lose: set[tuple[int, int]], double: set[tuple[int, int]]) -> Any:
    """Loses and doubles replies by round and client, and sees that no order is ahead of what is on the server's disk."""

    def act(carrier: LocalTransport, message: NodeMessage, t: int, client: int) -> Any:
        order, state = Order.from_json(message.header), checkpoint.load(out / "checkpoint")
        assert state.round == order.round
        assert state.clients.get(client, {"stamp": 0}) == {"stamp": order.stamp}
        actual = carrier.answered(message)
        if (t, client) in lose and order.train:
            return [lost_reply(message)]
        return [actual] * (2 if (t, client) in double else 1)

    return fault_on_orders(act)


def not_ahead(carrier: LocalTransport, out: Path) -> None:
    """Whatever state of a client the server's disk knows of, the client has it."""
    if not checkpoint.exists(out / "checkpoint"):
        return
    known = checkpoint.load(out / "checkpoint").clients
    for node, folder in carrier.folders.items():
        for path in {p.parent for p in folder.glob("*/*.tree")}:
            assert known.get(node - 100, {"stamp": 0})["stamp"] in (0, *ClientMemory(path).stamps)


def seen_through(carrier: LocalTransport, made: ExperimentConfig, out: Path, deaths: list[Any]) -> Result:
    """Start the server again after each of its deaths, as whoever runs it does."""
    for at in [*deaths, None]:
        carrier.hazards[0] = Hazard(set() if at is None else {at})
        try:
            return serve_run(carrier, made, out, resume=(out / "run.json").exists())
        except Killed:
            not_ahead(carrier, out)
        if out.exists() and not checkpoint.exists(out / "checkpoint"):
            # before its first checkpoint nothing was sent but registrations, and nothing is lost
            assert not carrier.orders()
            shutil.rmtree(out)
    raise AssertionError("the last life has no hazard")


def second_round(points: list[str]) -> int:
    """Where in the life of a server its second round begins."""
    first = points.index("sending", points.index(f"{RECORDS_FILE} not renamed") + 1)
    return points.index("sending", first + 1)


def test_a_server_that_dies_at_any_point_of_a_round(tmp_path: Path) -> None:
    made = small("scaffold", 2, 2)
    carrier = local(made, tmp_path / "whole")
    carrier.hazards[0] = whole = Hazard()
    serve_run(carrier, made, tmp_path / "whole" / "run")
    second = second_round(whole.points)
    # once of every kind in the second round, and all of what comes after
    names = {f"{name} {whole.points[:i].count(name) - whole.points[:second].count(name)}": i
             for i, name in enumerate(whole.points) if i >= second}  # fmt: skip
    chosen = [i for name, i in names.items() if not name.startswith("not synced")]
    assert len(chosen) > 12
    for place in chosen[::2]:
        base = tmp_path / str(place)
        carrier = local(made, base, watched(base / "run", set(), set()))
        result = seen_through(carrier, made, base / "run", [place])
        assert assert_equals_sequential_run(result, carrier, made) == set()
        assert lost(result) == [set(), set()]


PLAN = settings(
    max_examples=10,
    derandomize=True,
    deadline=None,
    database=None,
    # to make a failing plan smaller takes minutes
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)
places = st.sets(st.tuples(st.integers(1, 3), st.integers(0, 2)), max_size=4)


@pytest.mark.full
@PLAN
@example("feddyn", [60, 61], {(2, 0), (2, 1), (2, 2)}, set())
@given(
    st.sampled_from(["scaffold", "feddyn", "fedhl"]),
    st.lists(st.integers(0, 150), max_size=3),
    places,
    places,
)
def test_deaths_losses_and_doubles_in_any_order(
    method: str, deaths: list[int], lose: set[tuple[int, int]], double: set[tuple[int, int]]
) -> None:
    made = small(method, network={"min_replies": 0})
    with TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        carrier = local(made, Path(folder), watched(out, lose, double))
        result = seen_through(carrier, made, out, deaths)
        not_ahead(carrier, out)
        assert assert_equals_sequential_run(result, carrier, made) == find_missed_rounds(result)
        assert {(t, c) for t, clients in enumerate(lost(result), 1) for c in clients} == lose


@pytest.mark.full
@PLAN
@given(
    st.sampled_from(["scaffold", "fedhl"]),
    st.lists(st.integers(20, 120), max_size=2),
    st.dictionaries(st.integers(100, 102), st.tuples(st.sets(st.integers(0, 60), max_size=3), st.booleans())),
)
def test_deaths_and_full_disks_on_both_sides(
    method: str, deaths: list[int], clients: dict[int, tuple[set[int], bool]]
) -> None:
    made = small(method, network={"min_replies": 0})
    with TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        carrier = local(made, Path(folder), watched(out, set(), set()))
        for node, (at, full) in clients.items():
            carrier.hazards[node] = Hazard(at, no_space if full else Killed)
        result = seen_through(carrier, made, out, deaths)
        not_ahead(carrier, out)
        # besides what a lost reply took along, the last round trip's may be missing
        assert assert_equals_sequential_run(result, carrier, made) <= find_missed_rounds(result) | {
            (3, node - 100) for node in clients
        }


@pytest.mark.full
def test_a_record_that_was_written_by_half_is_written_again(tmp_path: Path) -> None:
    made = small("scaffold")
    carrier = local(made, tmp_path)
    append = RunFolder.append

    def torn(folder: RunFolder, record: Any) -> None:
        append(folder, record)
        if json.loads(record)["round"] == 2:
            path = folder.path / RECORDS_FILE
            path.write_bytes(path.read_bytes()[:-40])
            raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunFolder, "append", torn)
        with pytest.raises(Killed):
            serve_run(carrier, made, tmp_path / "run")
    result = serve_run(carrier, made, tmp_path / "run", resume=True)
    assert assert_equals_sequential_run(result, carrier, made) == set()


@pytest.mark.full
@pytest.mark.parametrize("where", ["sent", f"{RECORDS_FILE} renamed", "000002.checkpoint not renamed"])
def test_an_interrupt_by_hand_leaves_a_run_that_says_so_and_goes_on(where: str, tmp_path: Path) -> None:
    made = small("feddyn")
    carrier = local(made, tmp_path, watched(tmp_path / "run", set(), set()))

    class Stopping(Hazard):
        def __call__(self, place: str) -> None:
            super().__call__(place)
            if place == where and carrier.orders() and not self.at:
                self.at.add(1)
                raise KeyboardInterrupt

    carrier.hazards[0] = Stopping()
    with pytest.raises(KeyboardInterrupt):
        serve_run(carrier, made, tmp_path / "run")
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["state"], status["message"]) == ("stopped", "interrupted")
    not_ahead(carrier, tmp_path / "run")
    del carrier.hazards[0]
    result = serve_run(carrier, made, tmp_path / "run", resume=True)
    assert assert_equals_sequential_run(result, carrier, made) == set()
    assert lost(result) == [set()] * 3


@pytest.mark.full
def test_a_full_disk_at_the_server_stops_the_run_which_then_goes_on(tmp_path: Path) -> None:
    made = small("scaffold", 2, 2)
    carrier = local(made, tmp_path / "whole", watched(tmp_path / "whole" / "run", set(), set()))
    carrier.hazards[0] = whole = Hazard(error=no_space)
    serve_run(carrier, made, tmp_path / "whole" / "run")
    for place in range(whole.points.index("000001.checkpoint renamed"), len(whole.points) - 4, 5):
        base = tmp_path / str(place)
        carrier = local(made, base, watched(base / "run", set(), set()))
        carrier.hazards[0] = Hazard(set(range(place, 999)), no_space)
        with pytest.raises(CheckpointError, match="No space left"):
            serve_run(carrier, made, base / "run")
        not_ahead(carrier, base / "run")
        del carrier.hazards[0]
        result = serve_run(carrier, made, base / "run", resume=True)
        assert assert_equals_sequential_run(result, carrier, made) == set()


@pytest.mark.parametrize("is_removed", [False, True])
def test_a_run_whose_last_checkpoint_is_damaged_goes_on_from_the_one_before(
    is_removed: bool, tmp_path: Path
) -> None:
    """Its clients are ahead of it, and accept repeated rounds once an operator has named the checkpoint."""
    made, out = small("scaffold", rounds=4, network={"attempts": 1, "min_replies": 3}), tmp_path / "run"
    carrier = local(made, tmp_path)

    def kill_in_round_4(carrier: LocalTransport, message: NodeMessage, t: int, client: int) -> Any:
        if t == 4 and client == 2:
            raise Killed
        return None

    carrier.fault = fault_on_orders(kill_in_round_4)
    with pytest.raises(Killed):
        serve_run(carrier, made, out)
    carrier.fault = intact
    last = out / "checkpoint" / "000003.checkpoint"
    last.write_bytes(last.read_bytes()[:50])
    with pytest.raises(CheckpointError) as raised:
        serve_run(carrier, made, out, resume=True)
    assert "fedlowrank resume RUN --round 2" in raised.value.for_command
    if is_removed:
        last.unlink()
        # clients must not repeat rounds because of a server that lost its place, or was taken over
        with pytest.raises(
            NetworkError, match=r"round 4 had been answered.*`fedlowrank resume RUN --round 2`"
        ):
            serve_run(carrier, made, out, resume=True)
    assert not prepare_resume(out, 2, [])
    result = serve_run(carrier, made, out, resume=True)
    assert assert_equals_sequential_run(result, carrier, made) == set()
    assert lost(result) == [set()] * 4


def test_a_server_whose_folder_is_restored_from_a_copy_repeats_its_rounds(tmp_path: Path) -> None:
    made, out = small("feddyn", rounds=4, network={"attempts": 1}), tmp_path / "run"
    carrier = local(made, tmp_path)

    def run_until(end: int, **more: Any) -> None:
        def act(carrier: LocalTransport, message: NodeMessage, t: int, client: int) -> Any:
            if t == end:
                raise Killed

        carrier.fault = fault_on_orders(act)
        with pytest.raises(Killed):
            serve_run(carrier, made, out, **more)

    run_until(2)
    shutil.copytree(out, tmp_path / "copy")
    run_until(4, resume=True)
    shutil.rmtree(out)
    (tmp_path / "copy").rename(out)
    carrier.fault = intact
    with pytest.raises(
        NetworkError, match=r"folder was restored from a copy.*`fedlowrank resume RUN --round 1`"
    ):
        serve_run(carrier, made, out, resume=True)
    assert not prepare_resume(out, 1, [])
    result = serve_run(carrier, made, out, resume=True)
    assert assert_equals_sequential_run(result, carrier, made) == set()
