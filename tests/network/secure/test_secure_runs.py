"""Runs whose server learns totals alone: the plain run's results to the grid, whoever is killed at whichever step."""

from __future__ import annotations

import dataclasses
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from fedlowrank.core.errors import ConfigError, DataError, TaskError
from fedlowrank.network.client import ClientRuntime, prepare
from fedlowrank.network.deploy.keys import ClientKeys
from fedlowrank.network.enrollment.key_request import load_client_key
from fedlowrank.network.messages import Answer, Order, Registration
from fedlowrank.network.persistence.account import prepare_resume
from fedlowrank.network.secure.signing import MemberSigner
from fedlowrank.network.server import NetworkError
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
    LocalTransport,
    fault_on_orders,
    intact,
    log_lines,
    serve_run,
)


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "method",
    ["fedavg", "ifca", "fedit", "hetlora", "scaffold", "feddyn", "floral", "fedrep", "pfedlora"],
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
    # every client sends one number of 8 bytes for each that is summed
    for record in result.rounds[1:]:
        assert record.parameters_up == record.bytes_up / 8 > 0


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


def lose_announcements(round: int, clients: set[int], count: int) -> Any:
    """Lose the first ``count`` announcements of each of these clients in a round."""
    counts = dict.fromkeys(clients, count)

    def act(carrier: Any, message: NodeMessage, t: int, client: int) -> Any:
        if (t, Order.from_json(message.header).step) != (round, "announce") or not counts.get(client):
            return None
        counts[client] -= 1
        return []

    return fault_on_orders(act)


def test_a_round_that_too_few_clients_begin_is_repeated(tmp_path: Path) -> None:
    made = make_secure_experiment("fedavg", clients=4, rounds=2)
    _, result = run_secure(made, tmp_path, lose_announcements(2, {2, 3}, 2))
    assert [r.lost for r in result.rounds[1:]] == [{}, {}]
    assert is_close(result.run.state.server, run_in_clear(made, [{}, {}]).state.server, 1e-4)


@pytest.mark.parametrize(
    ("silent", "min_replies", "why"),
    [
        ({2, 3}, 1, "fewer than 3 of 4 clients began its secure sum"),
        ({3}, 4, "fewer than 4 of 4 clients began its secure sum"),
    ],
)
def test_a_run_stops_where_too_few_clients_begin_a_round(
    silent: set[int], min_replies: int, why: str, tmp_path: Path
) -> None:
    made = make_secure_experiment("fedavg", clients=4, network={"min_replies": min_replies})
    carrier, keys = make_secure_sites(made, tmp_path, lose_announcements(2, silent, 100))
    with pytest.raises(NetworkError, match=why):
        serve_run(carrier, made, tmp_path / "run", member_keys=keys)
    assert {t for _, t in carrier.trained} == {0}
    # no client has sent a masked vector, so the round can be repeated when all clients are connected
    carrier.fault = intact
    result = serve_run(carrier, made, tmp_path / "run", member_keys=keys, resume=True)
    assert [r.lost for r in result.rounds[1:]] == [{}, {}]


@pytest.mark.parametrize("clients", [3, 4])
def test_a_client_that_was_too_slow_is_no_loss_for_the_others(clients: int, tmp_path: Path) -> None:
    """Its pause begins with a round, before others count on its masks; where the sum needs it, it has none."""
    slow = clients - 1

    def act(carrier: LocalTransport, message: NodeMessage, t: int, client: int) -> Any:
        is_late = client == slow and t <= 2 and Order.from_json(message.header).step == "mask"
        return [] if is_late else None

    made = make_secure_experiment("fedavg", clients, 4)
    carrier, result = run_secure(made, tmp_path, fault_on_orders(act))
    lost_clients = [set(r.lost) for r in result.rounds[1:]]
    if clients == 3:
        # three clients can sum only together
        assert lost_clients == [{"0", "1", "2"}, {"0", "1", "2"}, set(), set()]
    else:
        assert lost_clients == [{"3"}, {"3"}, {"3"}, set()]
        assert "paused until round 4" in result.rounds[3].lost["3"]
        assert not [order for client, order in carrier.orders() if (client, order.round) == (3, 2)]
    truth = run_in_clear(made, [r.lost for r in result.rounds[1:]])
    assert is_close(result.run.state.server, truth.state.server, 1e-4)


def test_with_min_replies_0_rounds_without_a_result_are_accepted(tmp_path: Path) -> None:
    made = make_secure_experiment("fedavg", rounds=1, network={"min_replies": 0})
    _, result = run_secure(made, tmp_path, lose_announcements(1, {2}, 1))
    assert set(result.rounds[1].lost) == {"0", "1", "2"}


def test_a_run_without_any_result_is_no_success(tmp_path: Path) -> None:
    def act(carrier: Any, message: NodeMessage, t: int, client: int) -> Any:
        reply = carrier.answered(message)
        if Order.from_json(message.header).step == "announce" and client == 2:
            refusal = dataclasses.replace(
                Answer.from_json(reply.header), problem="it has no keys", kind="other"
            )
            return [dataclasses.replace(reply, header=refusal.to_json())]
        return [reply]

    made = make_secure_experiment("fedavg")
    carrier, keys = make_secure_sites(made, tmp_path, fault_on_orders(act))
    for resume in (False, True):
        with pytest.raises(NetworkError, match=r"no round of the run has a result: .*it has no keys"):
            serve_run(carrier, made, tmp_path / "run", member_keys=keys, resume=resume)
    assert not any(order.last for _, order in carrier.orders())


def test_a_first_round_waits_for_the_clients_that_it_needs(tmp_path: Path) -> None:
    @dataclass
    class Late(SecureSites):
        def nodes(self) -> set[int]:
            return super().nodes() - ({103} if self.clock.now < 60 else set())

    made = make_secure_experiment("fedavg", clients=4, network={"min_clients": 3, "min_replies": 4})
    carrier, keys = make_secure_sites(made, tmp_path)
    late = Late(carrier.folders, keys=carrier.keys)
    result = serve_run(late, made, tmp_path / "run", member_keys=keys)
    assert [r.lost for r in result.rounds[1:]] == [{}, {}]


def test_a_client_without_training_examples_does_not_join(tmp_path: Path) -> None:
    made = make_secure_experiment("fedavg")
    shares = made.shares()
    empty = dataclasses.replace(shares.data[1], train=shares.data[1].train.take(torch.arange(0)))
    shares = dataclasses.replace(shares, data=(shares.data[0], empty, shares.data[2]))
    prepare(tmp_path / "0", made, 0, shares)
    with pytest.raises(DataError, match="client 1 has no training examples"):
        prepare(tmp_path / "1", made, 1, shares)
    assert not (tmp_path / "1").exists()
    prepare(tmp_path / "1", made.overlay({"run": {"secure": {"on": False}}}), 1, shares)


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
    made = make_secure_experiment("fedavg", rounds=2, network={"min_replies": 0})
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
        ("fedavg", {"network": {"min_clients": 2}}, ConfigError, "Set network.min_clients to 3 or more"),
        ("fedavg", {"run": {"participation": 0.5}}, ConfigError, "set run.participation = 1"),
        ("fedavg", {"run": {"compression": {"uplink": "sparse"}}}, ConfigError, "masked numbers"),
        ("fedavg", {"run": {"patience": 2}}, ConfigError, "clients send no evaluations"),
        ("fedavg", {"run": {"keep_best": True}}, ConfigError, "keep_best"),
        ("fedavg", {"run": {"attack": {"kind": "scaled"}}}, ConfigError, "for simulations"),
        ("fedavg", {"run": {"devices": {"uplink": 1.0}}}, ConfigError, "clocks of their own"),
        ("fd", {}, TaskError, "must see single replies"),
        ("fedproto", {}, ConfigError, "depends on their data"),
        ("fednova", {}, TaskError, "computes with each client's number of examples"),
    ],
)  # fmt: skip
def test_what_has_no_secure_sum_is_refused_before_anybody_is_waited_for(
    method: str, changes: Any, error: Any, says: str, tmp_path: Path
) -> None:
    made = make_secure_experiment(method, **changes)
    carrier, keys = make_secure_sites(made, tmp_path)
    with pytest.raises(error, match=says):
        serve_run(carrier, made, tmp_path / "run", member_keys=keys)
    assert carrier.log == []
    assert carrier.clock.now == 0


def test_without_a_roster_it_is_refused(tmp_path: Path) -> None:
    made = make_secure_experiment("fedavg")
    carrier, _ = make_secure_sites(made, tmp_path)
    with pytest.raises(ConfigError, match=r"whose folder has roster\.json"):
        serve_run(carrier, made, tmp_path / "run")
    assert carrier.log == []


def test_a_client_says_that_its_numbers_were_clipped(tmp_path: Path) -> None:
    made = make_secure_experiment("fedavg", clients=3, rounds=1)
    with log_lines() as lines:
        run_secure(made.overlay({"run": {"secure": {"bound": 0.1}}}), tmp_path / "low")
    assert sum("above secure.bound = 0.1 and were clipped" in line for line in lines) == 3
    with log_lines() as lines:
        run_secure(made, tmp_path / "high")
    assert not any("were clipped" in line for line in lines)


WEIGHTED = """
from dataclasses import dataclass
from fedlowrank.core.contract import Mean
from fedlowrank.methods import FedAvg

@dataclass(frozen=True)
class Weighted(FedAvg):
    factor: float = 1.0

    def contribution(self, server, upload, client):
        return Mean(upload, self.factor * client.example_count)
"""


@pytest.mark.parametrize("factor", [1e-6, 1e-4, 1e6])
def test_a_client_whose_weight_does_not_fit_the_grid_takes_no_part(
    factor: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small weights were rounded, to 0 at last, and large ones clipped; the server does not learn the weight."""
    (tmp_path / "own_weighted.py").write_text(WEIGHTED)
    monkeypatch.syspath_prepend(str(tmp_path))
    made = make_secure_experiment(
        "own_weighted:Weighted", rounds=1, methods={"own_weighted:Weighted": {"factor": factor}},
        network={"min_replies": 0},
    )  # fmt: skip
    with log_lines() as lines:
        _, result = run_secure(made, tmp_path)
    assert sorted(result.rounds[1].lost) == ["0", "1", "2"]
    assert all("does not fit secure sums" in reason for reason in result.rounds[1].lost.values())
    weights = [f"{factor * info.example_count:.4g}" for info in made.federation().infos]
    named = [line for line in lines if "this client takes no part in the round" in line]
    assert len(named) == 3
    if factor < 1:
        assert all(f"weight in a mean is {w}, " in line for w, line in zip(weights, named, strict=True))
    assert not any(w in reason for w in weights for reason in result.rounds[1].lost.values())
