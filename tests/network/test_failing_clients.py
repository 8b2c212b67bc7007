"""Clients that die, fall silent, are slow, come late, go, forget, or run out of disk: nothing is lost, and
duals stay consistent.

The truth is always a run within one process whose replies are lost where the network lost them.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from fedlowrank.network.messages import Order
from fedlowrank.network.server import NetworkError
from fedlowrank.network.transport import NodeMessage, Response
from tests.support.local_network import (
    Fault,
    Hazard,
    LocalTransport,
    assert_equals_sequential_run,
    assert_same_record,
    assert_same_states,
    count_logged,
    fault_in_round,
    fault_on_orders,
    find_missed_rounds,
    intact,
    local,
    lost,
    lost_reply,
    run_sequentially,
    run_whole,
    serve_run,
    small,
)

DUAL = ["scaffold", "fedslr"]


def nothing(carrier: LocalTransport, message: NodeMessage) -> Any:
    return [lost_reply(message, "RuntimeError: out of memory\n12:00:00 finished")]


def worked_and_lost(carrier: LocalTransport, message: NodeMessage) -> Any:
    carrier.answered(message)
    return [lost_reply(message)]


def twice(carrier: LocalTransport, message: NodeMessage) -> Any:
    actual = carrier.answered(message)
    return [actual, actual, carrier.answered(message)]


def never(carrier: LocalTransport, message: NodeMessage) -> Any:
    carrier.answered(message)
    return []


# -- one reply that does not come


@pytest.mark.full
@pytest.mark.parametrize("method", DUAL)
@pytest.mark.parametrize("act", [nothing, worked_and_lost, twice, never])
def test_a_reply_that_is_lost_or_comes_twice(
    method: str, act: Fault, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = small(method)
    carrier, result = run_whole(made, tmp_path, fault_in_round(2, 1, act))
    assert assert_equals_sequential_run(result, carrier, made) == find_missed_rounds(result)
    assert lost(result) == ([set()] * 3 if act is twice else [set(), {1}, set()])
    assert all("\n" not in line for line in caplog.messages)
    # only a carrier that says nothing at all makes the server wait: a minute, for replies have come at once before
    assert carrier.clock.now == (pytest.approx(60, abs=3) if act is never else 0)


@pytest.mark.full
def test_a_client_that_dies_at_any_point_of_a_round(tmp_path: Path) -> None:
    """With half-written files left behind; its next process must find its way."""
    made = small("scaffold", 2, 2)
    for place in range(40):
        hazard = Hazard({place})
        carrier = local(
            made, tmp_path / str(place), fault_in_round(2, 1, functools.partial(perilous, hazard=hazard))
        )
        result = serve_run(carrier, made, tmp_path / str(place) / "run")
        assert assert_equals_sequential_run(result, carrier, made) == find_missed_rounds(result)
        if place == len(hazard.points):
            break
        assert "the client's process died" in result.rounds[2].lost["1"]
    # site.json not synced, not renamed, renamed, its folder not synced; training; the state likewise; the audit log
    assert place == 10


def perilous(carrier: LocalTransport, message: NodeMessage, hazard: Hazard) -> Any:
    carrier.hazards[message.node] = hazard
    actual = carrier.answered(message)
    del carrier.hazards[message.node]
    return [actual]


# -- late replies and slow clients


@pytest.mark.full
def test_a_reply_of_an_older_round_is_not_taken_for_a_new_one(tmp_path: Path) -> None:
    made = small("scaffold", rounds=4)
    kept: list[Response] = []

    def act(carrier: LocalTransport, message: NodeMessage, t: int, client: int) -> Any:
        if client != 1:
            return None
        kept.append(actual := carrier.answered(message))
        # round 2 is lost, and its reply comes in round 3; LocalTransport hands out the last one first
        return [] if t == 2 else [actual, kept[1]] if t == 3 else [actual]

    carrier, result = run_whole(made, tmp_path, fault_on_orders(act))
    assert assert_equals_sequential_run(result, carrier, made) == find_missed_rounds(result)
    assert lost(result) == [set(), {1}, {1}, set()]
    assert "it answers (1, " in result.rounds[3].lost["1"]


@pytest.mark.full
def test_slow_clients_are_left_out_and_the_rest_goes_on(tmp_path: Path) -> None:
    made = small("feddyn", network={"deadline": 60.0, "min_replies": 2})

    def act(carrier: LocalTransport, message: NodeMessage, t: int, client: int) -> Any:
        # client 0 takes 20 s and is in time; client 1 takes 90 s in the second round, and comes too late
        seconds = {(1, 0): 20.0, (2, 0): 20.0, (3, 0): 20.0, (2, 1): 90.0}.get((t, client), 0.0)
        return [(seconds, carrier.answered(message))]

    carrier, result = run_whole(made, tmp_path, fault_on_orders(act))
    assert assert_equals_sequential_run(result, carrier, made) == find_missed_rounds(result)
    assert result.rounds[2].lost == {"1": "client 1 did not reply within 60 s"}
    assert lost(result) == [set(), {1}, set()]
    assert carrier.clock.now == pytest.approx(20 + 60 + 20, abs=4)


@pytest.mark.full
def test_too_few_replies_are_asked_for_again_and_work_that_was_done_is_not_done_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = small("scaffold", network={"min_replies": 3, "attempts": 3})
    left: Counter[tuple[int, ...]] = Counter({(2, 2): 2})

    def act(carrier: LocalTransport, message: NodeMessage, *at: int) -> Any:
        actual = carrier.answered(message)
        left[at] -= 1
        return [lost_reply(message)] if left[at] >= 0 else [actual]

    carrier, result = run_whole(made, tmp_path, fault_on_orders(act))
    assert assert_equals_sequential_run(result, carrier, made) == set()
    assert lost(result) == [set()] * 3
    # only who did not reply is asked again, by the same bytes, and answers from its memory
    again = [
        p for p in carrier.log if p.kind == "order" and p.node == 102 and Order.from_json(p.header).round == 1
    ]
    assert len(again) == 3
    assert again[0] == again[1] == again[2]
    assert len(carrier.orders()) == 3 * 4 + 2
    assert sorted(carrier.trained) == sorted((c, t) for c in range(3) for t in range(3))
    assert count_logged(caplog, "2 good replies, 3 are needed: no reply of client 2: it was lost") == 2


@pytest.mark.full
def test_a_round_that_never_succeeds_ends_the_run_with_all_reasons_and_can_be_resumed(tmp_path: Path) -> None:
    made = small("scaffold", network={"min_replies": 2, "attempts": 2, "wait": 50.0})

    def act(there: LocalTransport, message: NodeMessage, *at: int) -> Any:
        if at == (2, 1):
            there.away.add(101)
            return [Response(101, "order", problem="the node is gone", disconnected=True)]
        if at == (2, 2):
            there.answered(message)
            return [lost_reply(message, "the line is bad")]
        return None

    carrier = local(made, tmp_path, fault_on_orders(act))
    with pytest.raises(NetworkError) as error:
        serve_run(carrier, made, tmp_path / "run")
    for text in ("round 2 was asked for 2 times and never brought 2 good replies of 3 clients", "client 1 is not connected",
                 "no reply of client 2: the line is bad", "Fix the cause and resume"):  # fmt: skip
        assert text in str(error.value)
    assert json.loads((tmp_path / "run" / "status.json").read_text())["message"] == str(error.value)
    # it was waited for once, between the attempts, and not after the last
    assert carrier.clock.now == pytest.approx(50)
    trained = list(carrier.trained)
    assert sorted(trained) == [(0, 0), (0, 1), (1, 0), (2, 0), (2, 1)]
    carrier.fault = intact
    carrier.away.clear()
    result = serve_run(carrier, made, tmp_path / "run", resume=True)
    assert assert_equals_sequential_run(result, carrier, made) == set()
    assert lost(result) == [set()] * 3


# -- coming, going and forgetting


def test_a_client_that_joins_between_two_attempts_does_not_change_the_round(tmp_path: Path) -> None:
    made = small("scaffold", network={"min_clients": 2, "min_replies": 2, "attempts": 4})
    carrier = local(made, tmp_path)
    carrier.away = {101}
    asked: list[NodeMessage] = []

    def act(there: LocalTransport, message: NodeMessage) -> Any:
        there.away.clear()
        asked.append(message)
        return intact(there, message) if len(asked) == 4 else [lost_reply(message)]

    carrier.fault = fault_in_round(2, 0, act)
    result = serve_run(carrier, made, tmp_path / "run")
    assert asked == asked[:1] * 4
    assert lost(result) == [{1}, {1}, set()]
    assert result.rounds[2].lost == {"1": "client 1 registered after the round had begun"}
    assert assert_equals_sequential_run(result, carrier, made) == {(0, 1), (1, 1)}


@pytest.mark.full
@pytest.mark.parametrize("method", ["scaffold", "fedhl"])
def test_a_client_that_joins_late(method: str, tmp_path: Path) -> None:
    made = small(method, rounds=4, network={"min_clients": 2})
    carrier = local(made, tmp_path)
    carrier.away = {101}

    def act(there: LocalTransport, message: NodeMessage, t: int, client: int) -> None:
        if t == 2:
            # there from the second round on: it is asked who it is along with the third round's orders
            there.away.clear()

    carrier.fault = fault_on_orders(act)
    result = serve_run(carrier, made, tmp_path / "run")
    assert lost(result) == [{1}, {1}, {1}, set()]
    assert result.rounds[1].lost == {"1": "client 1 is not connected"}
    assert assert_equals_sequential_run(result, carrier, made) == {(0, 1), (1, 1), (2, 1)}


@pytest.mark.parametrize(("rule", "late"), [("geometric_median", {3}), ("norm_bound", {2, 3})])
def test_a_client_that_joins_late_counts_under_a_robust_rule(
    rule: str, late: set[int], tmp_path: Path
) -> None:
    """Clients that have not registered yet have no examples, which must not lower the median of the others."""
    made = small(
        "fedavg",
        4,
        rounds=3,
        run={"robust": {"rule": rule, "weights": "examples"}},
        network={"min_clients": 4 - len(late), "limits": {"examples_ratio": 0.0}},
        partition={"kind": "dirichlet", "clients": 4, "alpha": 0.5},
    )
    carrier = local(made, tmp_path)
    carrier.away = {100 + client for client in late}

    def act(there: LocalTransport, message: NodeMessage, t: int, client: int) -> None:
        there.away.clear()

    carrier.fault = fault_on_orders(act)
    result = serve_run(carrier, made, tmp_path / "run")
    assert lost(result) == [late, late, set()]
    assert all(result.rounds[3].server_metrics["weight"][str(client)] > 0 for client in late)
    assert_equals_sequential_run(result, carrier, made)


def test_a_client_that_lost_its_folder_is_left_out(tmp_path: Path) -> None:
    made = small("scaffold", rounds=4)
    _, result = run_whole(made, tmp_path, forgetting(1, 2))
    assert "the server expects the state after round 1" in result.rounds[2].lost["1"]
    assert "the server expects the state after round 1" in result.rounds[3].lost["1"]
    assert lost(result) == [set(), {1}, {1}, {1}]
    run, records = run_sequentially(made, result.rounds)
    assert torch.equal(result.run.state.server.control["head.bias"], run.state.server.control["head.bias"])
    assert [assert_same_record(a, b) for a, b in zip(result.rounds, records, strict=True)] == [
        set(),
        *[{1}] * 4,
    ]


def forgetting(client: int, t: int) -> Fault:
    """Before round t that client's disk is replaced by an empty one."""

    def act(carrier: LocalTransport, message: NodeMessage) -> Any:
        folder = carrier.folders[100 + client]
        for path in folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
        return intact(carrier, message)

    return fault_in_round(t, client, act)


@pytest.mark.few(1)
@pytest.mark.parametrize("method", DUAL)
@pytest.mark.parametrize("needed", [1, 3])
def test_a_client_that_lost_its_folder_starts_again(
    method: str, needed: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = small(method, rounds=4, network={"forgotten": "begin", "min_replies": needed})
    carrier, result = run_whole(made, tmp_path, forgetting(1, 2))
    # it is asked again at once only where a round needs it
    assert lost(result) == ([set(), {1}, set(), set()] if needed == 1 else [set()] * 4)
    run, records = run_sequentially(made, result.rounds[:1])
    for t, record in enumerate(result.rounds[1:], 1):
        if t == (3 if needed == 1 else 2):
            run.restore(
                dataclasses.replace(run.state, clients={i: c for i, c in run.state.clients.items() if i != 1})
            )
        records.append(run.step(lost_replies=record.lost))
    assert_same_states(result, carrier, run)
    assert count_logged(caplog, "client 1 has lost its state, and starts again") == 1


@pytest.mark.full
def test_a_client_whose_disk_is_of_last_week_starts_again(tmp_path: Path) -> None:
    """A copy of before is no state to build on either, and must not keep the client out for ever."""
    made = small("scaffold", rounds=5, network={"forgotten": "begin"})

    memory = tmp_path

    def act(carrier: LocalTransport, message: NodeMessage, *at: int) -> Any:
        nonlocal memory
        if at == (4, 1):
            shutil.rmtree(memory)
            shutil.copytree(tmp_path / "week", memory)
        actual = intact(carrier, message)
        if at == (2, 1):
            memory = next(p for p in carrier.folders[101].iterdir() if p.is_dir())
            shutil.copytree(memory, tmp_path / "week")
        return actual

    carrier, result = run_whole(made, tmp_path, fault_on_orders(act))
    assert lost(result) == [set(), set(), set(), {1}, set()]
    run, _ = run_sequentially(made, result.rounds[:5])
    run.restore(
        dataclasses.replace(run.state, clients={i: c for i, c in run.state.clients.items() if i != 1})
    )
    run.step()
    assert_same_states(result, carrier, run)
