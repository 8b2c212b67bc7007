"""Runs whose server learns totals alone: the plain run's results to the grid, whoever is killed at whichever step."""

from __future__ import annotations

import dataclasses
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fedlowrank.core.errors import ConfigError, TaskError
from fedlowrank.network.client import ClientRuntime
from fedlowrank.network.deploy.keys import ClientKeys
from fedlowrank.network.enrollment.key_request import load_client_key
from fedlowrank.network.messages import Answer, Order, Registration
from fedlowrank.network.persistence.account import prepare_resume
from fedlowrank.network.secure.signing import MemberSigner
from fedlowrank.network.transport import NodeMessage, Response
from tests.network.secure.secure_sites import (
    SecureSites,
    is_close,
    make_secure_experiment,
    make_secure_sites,
    read_sent_orders,
    run_in_clear,
    run_secure,
)
from tests.support.local_network import (
    fault_on_orders,
    log_lines,
    serve_run,
)


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "method",
    ["fedavg", "ifca", "fedit", "scaffold", "feddyn", "floral", "fedrep", "pfedlora"],
)
def test_the_server_has_the_plain_runs_result_and_learns_nothing_of_a_client(
    method: str, tmp_path: Path
) -> None:
    made = make_secure_experiment(method)
    carrier, result = run_secure(made, tmp_path)
    assert [r.lost for r in result.rounds[1:]] == [{}, {}]
    assert is_close(result.run.state.server, run_in_clear(made, [{}, {}]).state.server, 1e-4)
    answers: list[Any] = []
    for node, runtime in carrier.alive.items():
        header, _ = runtime.make_registration()
        assert (header.examples, header.sizes) == (1, (0, 0))
        assert Registration.from_json(header.to_json()).client == node - 100
        answers += map(Answer.from_json, read_sent_orders(carrier.folders[node]))
    assert all((a.steps, a.flops, a.losses, a.evaluation) == (0, 0, {}, None) for a in answers)
    assert len(answers) == 3 * (2 * 5 + 1)
    assert not result.rounds[1].is_evaluated


STEPS = ["announce", "share", "mask", "agree", "reveal"]


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("step", STEPS)
def test_a_client_that_dies_at_a_step_costs_its_own_part_at_most(
    step: str, after: bool, tmp_path: Path
) -> None:
    """Killed before it takes the step, or when it has taken it and its reply has left."""

    def act(carrier: Any, message: NodeMessage, t: int, client: int) -> Any:
        if (t, client, Order.from_json(message.header).step) != (1, 2, step):
            return None
        reply = carrier.answered(message) if after else None
        carrier.alive.pop(message.node, None)
        return [reply] if reply else []

    made = make_secure_experiment("scaffold", clients=4)
    carrier, result = run_secure(made, tmp_path, fault_on_orders(act))
    place = STEPS.index(step) + after
    # whose vector arrived is in the sum, whatever became of it then
    gone = {} if place >= 3 else {"2": "gone"}
    assert [r.lost.keys() for r in result.rounds[1:]] == [gone.keys(), set()]
    run = run_in_clear(made, [gone, {}])
    assert is_close(result.run.state.server, run.state.server, 1e-4)
    assert carrier.trained.count((2, 0)) == (place >= 3)


def test_below_the_threshold_a_round_gives_nothing_and_the_run_goes_on(tmp_path: Path) -> None:
    def act(carrier: Any, message: NodeMessage, t: int, client: int) -> Any:
        return [] if t == 2 and client > 1 and Order.from_json(message.header).step == "agree" else None

    made = make_secure_experiment("fedavg", clients=4, rounds=3)
    _, result = run_secure(made, tmp_path, fault_on_orders(act))
    assert [set(r.lost) for r in result.rounds[1:]] == [set(), {"0", "1", "2", "3"}, set()]
    assert "2 clients signed who had replied, and 3 must" in result.rounds[2].lost["0"]
    everyone = dict.fromkeys("0123", "gone")
    assert is_close(result.run.state.server, run_in_clear(made, [{}, everyone, {}]).state.server, 1e-4)


def test_a_client_that_came_back_is_registered_again_before_a_round(tmp_path: Path) -> None:
    """Of three clients none may be missing: each round without it would be lost at its first step."""

    @dataclass
    class Returning(SecureSites):
        def nodes(self) -> set[int]:
            if self.clock.now > 60:
                self.away.clear()
            return super().nodes()

    def act(carrier: Any, message: NodeMessage, t: int, client: int) -> Any:
        if (t, client, Order.from_json(message.header).step) != (2, 2, "share") or carrier.clock.now > 60:
            return None
        carrier.away.add(message.node)
        return [Response(message.node, message.kind, problem="it went away", disconnected=True)]

    made = make_secure_experiment("fedavg", rounds=4)
    carrier, keys = make_secure_sites(made, tmp_path)
    carrier = Returning(carrier.folders, fault_on_orders(act), keys=carrier.keys)
    result = serve_run(carrier, made, tmp_path / "run", member_keys=keys)
    assert [set(r.lost) for r in result.rounds[1:]] == [set(), {"0", "1", "2"}, set(), set()]


def test_no_round_is_summed_twice(tmp_path: Path) -> None:
    """Two totals of one round, the second without client 1, would differ by what client 1 sent."""
    made = make_secure_experiment("fedavg", clients=4, rounds=3)
    carrier, keys = make_secure_sites(made, tmp_path)
    first = serve_run(carrier, made, tmp_path / "run", member_keys=keys)
    assert not first.rounds[2].lost
    prepare_resume(tmp_path / "run", 1, [1])
    again = serve_run(carrier, made, tmp_path / "run", member_keys=keys, resume=True)
    for record in again.rounds[2:]:
        assert set(record.lost) == {"0", "1", "2", "3"}
        assert "masks none of that round or an earlier one again" in record.lost["0"] + record.lost["2"]
    assert [message for message in carrier.trained if message[1] > 0] == [
        (c, t) for t in (1, 2) for c in range(4)
    ]


@pytest.mark.parametrize("kept", [True, False], ids=["another folder", "forgotten"])
def test_a_site_that_begins_anew_masks_no_round_again(kept: bool, tmp_path: Path) -> None:
    """In another folder of the site, or after `join --forget`, the server repeats the first round without client 3."""
    made = make_secure_experiment("fedavg", clients=4)
    carrier, keys = make_secure_sites(made, tmp_path)
    first = serve_run(carrier, made, tmp_path / "run", member_keys=keys)
    assert not first.rounds[1].lost
    run = first.run.engine.account.run  # type: ignore[attr-defined]
    if not kept:
        shutil.rmtree(carrier.folders[100] / run)
    else:
        (tmp_path / "again").mkdir()
        carrier = make_secure_sites(made, tmp_path / "again")[0]
    client = ClientRuntime(carrier.folders[100])
    client.signer = MemberSigner(load_client_key(ClientKeys.read(carrier.keys / "client-0").key))
    order = Order(run, 0, 0, False, False, False, branch=1, step="announce")
    answer, _ = client.answer(order, b"")
    assert "masks none of that round or an earlier one again" in answer.problem


def test_a_server_cannot_ask_for_an_update_without_a_mask(tmp_path: Path) -> None:
    made = make_secure_experiment("fedavg", rounds=2)
    carrier, keys = make_secure_sites(made, tmp_path)

    def act(carrier: Any, message: NodeMessage, t: int, client: int) -> Any:
        order = Order.from_json(message.header)
        if order.step != "mask" or client:
            return None
        bare = dataclasses.replace(message, header=dataclasses.replace(order, step="", parcel={}).to_json())
        return [carrier.answered(bare)]

    carrier.fault = fault_on_orders(act)
    result = serve_run(carrier, made, tmp_path / "run", member_keys=keys)
    assert "an order to train without masking came" in result.rounds[1].lost["0"]
    assert not any(client == 0 for client, _ in carrier.trained)


def test_a_vector_of_another_length_is_refused(tmp_path: Path) -> None:
    def act(carrier: Any, message: NodeMessage, t: int, client: int) -> Any:
        if Order.from_json(message.header).step != "mask" or client != 3:
            return None
        actual = carrier.answered(message)
        return [dataclasses.replace(actual, payload=actual.payload[:-8])]

    made = make_secure_experiment("fedavg", clients=4, rounds=1)
    _, result = run_secure(made, tmp_path, fault_on_orders(act))
    assert "numbers, and" in result.rounds[1].lost["3"]
    assert is_close(result.run.state.server, run_in_clear(made, [{"3": "gone"}]).state.server, 1e-4)


@pytest.mark.parametrize(
    ("method", "changes", "error", "says"),
    [
        ("fedavg", {"clients": 2}, ConfigError, "secure sums are for 3 to 20 clients; there are 2"),
        ("fedavg", {"run": {"participation": 0.5}}, ConfigError, "set run.participation = 1"),
        ("fd", {}, TaskError, "must see single replies"),
        ("fedproto", {}, ConfigError, "depends on their data"),
        ("fednova", {}, TaskError, "computes with each client's number of examples"),
    ],
)  # fmt: skip
def test_what_has_no_secure_sum_is_refused(
    method: str, changes: Any, error: Any, says: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=says):
        run_secure(make_secure_experiment(method, **changes), tmp_path)


def test_without_a_roster_it_is_refused(tmp_path: Path) -> None:
    made = make_secure_experiment("fedavg")
    carrier, _ = make_secure_sites(made, tmp_path)
    with pytest.raises(ConfigError, match=r"whose folder has roster\.json"):
        serve_run(carrier, made, tmp_path / "run")


def test_a_client_says_that_its_numbers_were_clipped(tmp_path: Path) -> None:
    made = make_secure_experiment("fedavg", clients=3, rounds=1)
    with log_lines() as lines:
        run_secure(made.overlay({"run": {"secure": {"bound": 0.1}}}), tmp_path / "low")
    assert sum("above secure.bound = 0.1 and were clipped" in line for line in lines) == 3
    with log_lines() as lines:
        run_secure(made, tmp_path / "high")
    assert not any("were clipped" in line for line in lines)
