"""Clipped, compressed and private updates over a network."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedlowrank.core import tree
from fedlowrank.core.errors import CheckpointError, ConfigError
from fedlowrank.network.messages import Answer, Order, Registration
from fedlowrank.network.persistence.account import prepare_resume
from fedlowrank.network.site.site_settings import SiteSettings
from fedlowrank.network.transport import NodeMessage
from fedlowrank.rounds.participation.participants import Participants
from fedlowrank.trust.privacy.accounting import local_epsilon
from fedlowrank.trust.privacy.ledger import PrivacyLedger
from tests.support.local_network import (
    LocalTransport,
    assert_equals_sequential_run,
    fault_on_orders,
    local,
    lose_replies,
    lost,
    lost_reply,
    replace_fields,
    run_sequentially,
    run_whole,
    serve_run,
    small,
)

PRIVATE: dict[str, Any] = {
    "privacy": {"kind": "central", "noise": 1.0, "delta": 1e-3},
    "clipping": {"norm": 0.1},
}
LOCAL: dict[str, Any] = {"privacy": {"kind": "local", "noise": 4.0, "delta": 1e-3}, "clipping": {"norm": 0.1}}


def vector(value: Any) -> np.ndarray:
    return np.concatenate([t.double().numpy().ravel() for t in tree.tensors(value)])


@pytest.mark.few(1)
@pytest.mark.parametrize("method", ["fedavg", "pfedlora", "fedhl", "fedslr"])
def test_compressed_runs_are_the_sequential_ones_bit_for_bit(method: str, tmp_path: Path) -> None:
    made = small(
        method, rounds=3, run={"compression": {"uplink": "top_k:0.3 + int8"}, "clipping": {"norm": 0.5}}
    )
    carrier, result = run_whole(made, tmp_path)
    assert assert_equals_sequential_run(result, carrier, made) == set()


@pytest.mark.full
def test_what_compression_lost_survives_a_lost_reply(tmp_path: Path) -> None:
    """A client whose reply was lost builds on the state of before: its residual is the acknowledged one."""
    made = small("fedavg", rounds=4, run={"compression": {"uplink": "top_k:0.2"}})
    carrier, result = run_whole(made, tmp_path, lose_replies({2: {0}, 3: {0, 1}}))
    assert lost(result) == [set(), {0}, {0, 1}, set()]
    assert_equals_sequential_run(result, carrier, made)


@pytest.mark.full
def test_a_robust_rule_holds_over_a_network(tmp_path: Path) -> None:
    for rule in ("median", "multi_krum", "norm_bound"):
        made = small("fedavg", 5, rounds=2, run={"robust": {"rule": rule}})
        carrier, result = run_whole(made, tmp_path / rule)
        assert assert_equals_sequential_run(result, carrier, made) == set()


@pytest.mark.full
def test_private_clients_send_neither_sizes_nor_losses_nor_evaluations(tmp_path: Path) -> None:
    made = small("fedavg", rounds=2, run=PRIVATE)
    answers: list[Answer] = []

    def watch(carrier: LocalTransport, message: NodeMessage, t: int, client: int) -> Any:
        actual = carrier.answered(message)
        answers.append(Answer.from_json(actual.header))
        return [actual]

    carrier, result = run_whole(made, tmp_path, fault_on_orders(watch))
    assert len(answers) >= 6
    for answer in answers:
        assert (answer.steps, answer.flops, answer.losses, answer.evaluation) == (0, 0, {}, None)
    assert all(info.example_count == 1 for info in result.run.federation.infos)
    assert all(not r.is_evaluated and not r.training_losses and not r.steps for r in result.rounds)
    for client in carrier.folders.values():
        header, _ = _runtime(client).make_registration()
        assert isinstance(header, Registration)
        assert (header.examples, header.sizes) == (1, (0, 0))


def _runtime(folder: Path) -> Any:
    from fedlowrank.network.client import ClientRuntime

    return ClientRuntime(folder)


@pytest.mark.full
def test_whether_a_private_client_counts_does_not_depend_on_the_others(tmp_path: Path) -> None:
    """A far reply is clipped and not refused: a refusal by the norms of others would tell of them."""
    quiet = {**PRIVATE, "privacy": {**PRIVATE["privacy"], "noise": 1e-6}}
    made = small("fedavg", 4, rounds=1, run=quiet)

    def far(carrier: LocalTransport, message: NodeMessage, t: int, client: int) -> Any:
        actual = carrier.answered(message)
        if client == 1 and Order.from_json(message.header).train:
            upload = tree.decode(actual.payload)
            actual = replace_fields(actual, payload=tree.encode(tree.map_leaves(lambda x: x + 1e3, upload)))
        return [actual]

    _, result = run_whole(made, tmp_path, fault_on_orders(far))
    assert lost(result) == [set()]
    start = vector(run_sequentially(made, [])[0].state.server)
    assert 0.01 < np.linalg.norm(vector(result.run.state.server) - start) <= 0.1 + 1e-4


@pytest.mark.full
def test_noise_over_a_network_is_not_that_of_a_seed(tmp_path: Path) -> None:
    """Two runs of one experiment differ, by about the noise that the settings say."""
    made = small("fedavg", rounds=1, run=PRIVATE)
    ends = [vector(run_whole(made, tmp_path / name)[1].run.state.server) for name in ("one", "two")]
    seeded = vector(run_sequentially(made, run_whole(made, tmp_path / "three")[1].rounds)[0].state.server)
    deviation = np.sqrt(2) * 0.1 / 3
    for a, b in ((ends[0], ends[1]), (ends[0], seeded)):
        assert np.std(a - b) == pytest.approx(deviation, rel=0.3)


@pytest.mark.full
def test_who_takes_part_is_not_foreseen_by_a_seed(tmp_path: Path) -> None:
    """Of eight clients, one draw in 256 would be the seed's in each of four rounds."""
    made = small("fedavg", 8, rounds=4, run={**PRIVATE, "sampling": "poisson", "participation": 0.5})
    _, result = run_whole(made, tmp_path)
    drawn = [r.participants for r in result.rounds[1:]]
    assert drawn != [
        [i.id for i in run_sequentially(made, result.rounds)[0].participants(t)] for t in range(4)
    ]


def test_every_client_keeps_its_own_ledger_and_stops_when_its_budget_is_spent(tmp_path: Path) -> None:
    privacy = {**LOCAL["privacy"], "epsilon": 3.6}
    made = small(
        "fedavg",
        rounds=6,
        run={**LOCAL, "privacy": privacy, "participation": 1.0},
        network={"min_replies": 0},
    )
    carrier, result = run_whole(made, tmp_path)
    most, budget = result.run.round, result.run.budget
    assert 1 <= most < 6
    assert budget is not None
    assert budget.epsilon_of(most) <= 3.6 < budget.epsilon_of(most + 1)
    for node, folder in carrier.folders.items():
        lines = [json.loads(line) for line in (folder / "privacy.jsonl").read_text().splitlines()]
        assert [line["clients"] for line in lines] == [[node - 100]] * most
    # a server that asks for more is refused
    order = Order(result.run.engine.account.run, most, most, True, False)  # type: ignore[attr-defined]
    down = tree.encode(result.run.method.download(result.run.state.server, result.run.federation.infos[0]))
    answer, payload = _runtime(carrier.folders[100]).answer(order, down)
    assert not payload
    assert "privacy budget" in answer.problem


@pytest.mark.full
def test_noise_without_a_budget_is_never_refused(tmp_path: Path) -> None:
    made = small("fedavg", rounds=2, run={**LOCAL, "participation": 1.0})
    carrier, result = run_whole(made, tmp_path)
    # a server that went back repeats the last round
    order = Order(result.run.engine.account.run, 1, 1, True, False, branch=1)  # type: ignore[attr-defined]
    down = tree.encode(result.run.method.download(result.run.state.server, result.run.federation.infos[0]))
    answer, payload = _runtime(carrier.folders[100]).answer(order, down)
    assert (answer.problem, bool(payload)) == ("", True)
    # a client that has lost its ledger trains no more
    (carrier.folders[100] / "privacy.jsonl").unlink()
    order = Order(result.run.engine.account.run, 1, 1, True, False, branch=2)  # type: ignore[attr-defined]
    answer, payload = _runtime(carrier.folders[100]).answer(order, down)
    assert not payload
    assert "CheckpointError, incident" in answer.problem
    assert "privacy.jsonl lacks round 2" in (carrier.folders[100] / "audit.jsonl").read_text()


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", [PRIVATE, LOCAL])
def test_the_rounds_of_a_network_are_agreed_on_before_the_first(kind: dict[str, Any], tmp_path: Path) -> None:
    made, more = (small("fedavg", rounds=rounds, run=kind) for rounds in (1, 3))
    carrier, _ = run_whole(made, tmp_path)
    with pytest.raises(CheckpointError, match=r"run\.rounds was 1 and is 3, but over a network"):
        serve_run(carrier, more, tmp_path / "run", resume=True)
    with pytest.raises(ConfigError, match=r"such as in run\.rounds"):
        local(more, tmp_path)


@pytest.mark.full
def test_an_order_that_is_sent_again_gets_the_same_bytes_and_is_charged_once(tmp_path: Path) -> None:
    made = small("fedavg", rounds=1, run=LOCAL)
    seen: list[bytes] = []

    def twice(carrier: LocalTransport, message: NodeMessage, t: int, client: int) -> Any:
        first, second = carrier.answered(message), carrier.answered(message)
        if Order.from_json(message.header).train:
            seen.extend([first.payload, second.payload])
        return [second]

    carrier, _ = run_whole(made, tmp_path, fault_on_orders(twice))
    assert len(seen) == 6
    assert all(a == b for a, b in zip(seen[::2], seen[1::2], strict=True))
    for folder in carrier.folders.values():
        assert len((folder / "privacy.jsonl").read_text().splitlines()) == 1


@dataclasses.dataclass
class LocalCharges:
    """What a run under local privacy has charged.

    Attributes:
        server: number of updates by client, in the server's ledger.
        sites: the same, each in the client's own ledger.
        epsilons: ε in the record of each round.
        expected: ε after the last round, of the client that has charged most.
    """

    server: list[int]
    sites: list[int]
    epsilons: list[float]
    expected: float


def _read_charges(carrier: LocalTransport, result: Any, out: Path) -> LocalCharges:
    ledger, noise = PrivacyLedger(out / "privacy.jsonl"), result.run.budget.noise
    files = {node - 100: folder / "privacy.jsonl" for node, folder in carrier.folders.items()}
    sites = [len(f.read_text().splitlines()) if f.exists() else 0 for _, f in sorted(files.items())]
    epsilons = [r.server_metrics["privacy"]["epsilon"] for r in result.rounds]
    expected = local_epsilon(noise, max(sites), 1e-3, "rdp")
    return LocalCharges([ledger.releases(client) for client in files], sites, epsilons, expected)


def _make_budgeted(clients: int = 3, rounds: int = 4, participation: float = 1.0, **network: Any) -> Any:
    privacy = {"kind": "local", "epsilon": 8.0, "delta": 1e-3}
    run = {"privacy": privacy, "clipping": {"norm": 0.3}, "participation": participation}
    return small("fedavg", clients, rounds=rounds, run=run, network=network)


def test_the_server_charges_the_updates_that_clients_made(tmp_path: Path) -> None:
    """Also those that were lost on their way; one that is asked for again after a restart is the same."""
    made, out, stops = _make_budgeted(), tmp_path / "run", [3, 2]

    def act(carrier: LocalTransport, message: NodeMessage, t: int, client: int) -> Any:
        if t == 2 and client == 2 and stops:
            stops.pop()
            carrier.answered(message)
            raise KeyboardInterrupt
        if t == 3 and client == 1:
            carrier.answered(message)
            return [lost_reply(message)]
        return None

    carrier = local(made, tmp_path, fault_on_orders(act), SiteSettings())
    for attempt in range(2):
        with pytest.raises(KeyboardInterrupt):
            serve_run(carrier, made, out, resume=attempt > 0)
    result = serve_run(carrier, made, out, resume=True)
    charges = _read_charges(carrier, result, out)
    assert lost(result) == [set(), set(), {1}, set()]
    assert charges.server == charges.sites == [4, 4, 4]
    assert charges.epsilons[-1] == pytest.approx(charges.expected)
    # σ is planned for an update in each of the four rounds
    assert 7.9 < charges.expected <= 8.0
    assert result.run.stopped == ""


def test_after_going_back_an_update_is_another_one_and_is_charged(tmp_path: Path) -> None:
    made, out = small("fedavg", rounds=3, run=LOCAL), tmp_path / "run"
    carrier = local(made, tmp_path, site=SiteSettings())
    serve_run(carrier, made, out)
    prepare_resume(out, 2, ())
    result = serve_run(carrier, made, out, resume=True)
    charges = _read_charges(carrier, result, out)
    assert charges.server == charges.sites == [4, 4, 4]
    assert charges.epsilons[-1] == pytest.approx(charges.expected)


def test_a_client_that_was_never_asked_has_spent_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def draw(self: Participants, round: int, *_: Any) -> list[int]:
        # half of the clients, client 3 always
        return sorted({3, round % 3})

    monkeypatch.setattr(Participants, "draw", draw)
    made = _make_budgeted(4, 6, 0.5, min_clients=3)

    def act(carrier: LocalTransport, message: NodeMessage, t: int, client: int) -> None:
        if t > 2:
            carrier.away.clear()

    carrier = local(made, tmp_path, fault_on_orders(act), SiteSettings())
    carrier.away = {103}
    result = serve_run(carrier, made, tmp_path / "run")
    charges = _read_charges(carrier, result, tmp_path / "run")
    assert charges.server == charges.sites == [2, 2, 2, 2]
    assert [r.participants for r in result.rounds[4:]] == [[0, 3], [1, 3], [2, 3]]
    assert charges.epsilons[-1] == pytest.approx(charges.expected)


def test_a_round_without_any_client_can_be_resumed(tmp_path: Path) -> None:
    made, out, everybody = _make_budgeted(rounds=3, min_replies=0), tmp_path / "run", {0, 1, 2}

    def leave(carrier: LocalTransport, message: NodeMessage, t: int, client: int) -> Any:
        answer = carrier.answered(message)
        if (t, client) == (1, 2):
            carrier.away = {100, 101, 102}
        return [answer]

    carrier = local(made, tmp_path, fault_on_orders(leave), SiteSettings())
    result = serve_run(carrier, made, out)
    assert lost(result) == [set(), everybody, everybody]
    assert [_read_charges(carrier, result, out).server, len(carrier.trained)] == [[1, 1, 1], 3]
    carrier.away = set()
    assert serve_run(carrier, made, out, resume=True).rounds == result.rounds


def test_attacks_are_for_simulations(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="simulations"):
        run_whole(small("fedavg", run={"attack": {"kind": "sign_flip"}}), tmp_path)


@pytest.mark.full
def test_server_and_clients_must_agree_on_the_protection(tmp_path: Path) -> None:
    made, other = small("fedavg", run=PRIVATE), small("fedavg", run={**PRIVATE, "clipping": {"norm": 9.0}})
    carrier = local(made, tmp_path)
    with pytest.raises(Exception, match=r"run|clipping"):
        serve_run(carrier, other.overlay({"network": {"wait": 1.0}}), tmp_path / "run")
