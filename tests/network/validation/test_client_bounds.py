"""What bounds a client that lies in numbers: norms of updates, numbers of examples, silence, and a run that goes back."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from fedlowrank.cli.main import main
from fedlowrank.config.sections.network_section import Limits
from fedlowrank.core import tree
from fedlowrank.core.contract import ServerView, Task
from fedlowrank.core.errors import CheckpointError, ConfigError
from fedlowrank.core.learning.optimizer import SGD
from fedlowrank.data.federation import Federation
from fedlowrank.engines.engine import AnyMethod, ClientJob, ClientResult
from fedlowrank.engines.sequential import Sequential
from fedlowrank.methods import METHODS
from fedlowrank.methods.fedavg import FedAvg
from fedlowrank.methods.scaffold import ControlledModel
from fedlowrank.network.answers import steps_of
from fedlowrank.network.backoff import Backoff
from fedlowrank.network.messages import Registration
from fedlowrank.network.persistence.account import Account
from fedlowrank.network.transport import NodeMessage
from fedlowrank.network.validation.norms import NormBound, PartNorms, measure_norms
from fedlowrank.rounds.run import Run
from fedlowrank.rounds.run_settings import RunSettings
from fedlowrank.storage import checkpoint
from tests.methods.setting import KINDS, Net
from tests.support.local_network import (
    Fault,
    Killed,
    LocalTransport,
    assert_equals_sequential_run,
    assert_same_record,
    assert_same_states,
    count_logged,
    fault_in_round,
    fault_on_orders,
    intact,
    local,
    lost,
    lost_reply,
    open_client_memory,
    replace_fields,
    run_sequentially,
    run_whole,
    serve_run,
    small,
)

# -- norms


def test_the_update_is_measured_against_the_part_of_the_download_that_has_its_form() -> None:
    generator = torch.Generator().manual_seed(0)
    x, y, c, d = ({"w": torch.randn(300, 400, generator=generator), "b": torch.randn(7, generator=generator)}
                  for _ in range(4))  # fmt: skip

    def flat(params: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.cat([t.reshape(-1).double() for t in params.values()])

    actual = measure_norms(ControlledModel(y, d), ControlledModel(x, c))
    assert actual.keys() == {"/model", "/control"}
    for part, up, down in (("/model", y, x), ("/control", d, c)):
        assert actual[part].norm == pytest.approx(float(flat(up).norm()))
        assert actual[part].change == pytest.approx(float((flat(up) - flat(down)).norm()))
        assert actual[part].download == pytest.approx(float(flat(down).norm()))
    # an upload that is a field of the download
    assert measure_norms(y, ControlledModel(x, c))[""].change == pytest.approx(
        float((flat(y) - flat(x)).norm())
    )
    # nothing of its form was sent
    small_one = {"w": torch.full((2, 2), 3.0)}
    assert measure_norms(small_one, x) == {"": PartNorms(6.0)}
    # numbers whose squares exceed float64
    assert measure_norms({"w": torch.full((4,), 1e300, dtype=torch.float64)}, None)[""].norm == pytest.approx(
        2e300
    )


def bound(
    *sizes: float, past: Sequence[float] = (), steps: Sequence[int] = (), download: float = 100.0
) -> set[int]:
    """Who is refused, of clients that send weights whose changes have these norms; the ratio is 10."""
    judge = NormBound(10.0)
    for t, size in enumerate(past):
        judge.learn({0: {"": PartNorms(download, size, download)}}, t)
    replies = {i: {"": PartNorms(max(download, size), size, download)} for i, size in enumerate(sizes)}
    return set(judge.find_outliers(replies, dict(enumerate(steps or [1] * len(sizes))), len(past)))


def test_who_is_refused() -> None:
    assert bound(1, 2, 3, past=[1]) == set()
    assert bound(1, 2, 20.1, past=[1]) == {2}
    assert bound(1, 2, 19.9, past=[1]) == set()
    # the median of the past counts where it is larger
    assert bound(1, 2, 20.1, past=[1, 5, 9]) == set()
    # a client with more steps may go farther in proportion
    assert bound(1, 2, 59, past=[1], steps=[1, 1, 3]) == set()
    assert bound(1, 2, 61, past=[1], steps=[1, 1, 3]) == {2}
    # of two, the larger one cannot vouch for itself, and a single one is compared with the past alone
    assert bound(1, 1e30, past=[1]) == {1}
    assert bound(1e30, past=[1]) == {0}
    assert bound(9.9, past=[1]) == set()
    # a small one does not make others look large
    assert bound(0, 5, past=[4]) == set()
    # in the first round an update may be as long as the download
    assert bound(1, 2, 1e30) == {2}
    assert bound(1e-9, 99, download=100) == set()
    assert bound(1e30) == {0}
    assert bound(1e-9, 1e30) == {1}
    # also one that is nearer to zero than to the download, as a difference is
    assert set(NormBound(10.0).find_outliers({0: {"": PartNorms(0.9e30, 1e30, 100.0)}}, {0: 1}, 0)) == {0}
    # where all usual updates are zero
    assert bound(0, 0, 0, 50, past=[0]) == set()
    assert bound(0, 0, 0, 1e30, past=[0]) == {3}
    assert (
        NormBound(0).find_outliers({0: {"": PartNorms(1e30)}, 1: {"": PartNorms(1.0)}}, {0: 1, 1: 1}, 3) == {}
    )


def test_differences_are_told_from_weights_by_the_majority() -> None:
    judge, steps = NormBound(10.0), dict.fromkeys(range(4), 1)
    weights = {i: {"": PartNorms(100.0, 1.0, 100.0)} for i in range(3)}
    # far from the download though no longer than the weights
    assert set(judge.find_outliers({**weights, 3: {"": PartNorms(90.0, 190.0, 100.0)}}, steps, 0)) == {3}
    differences = {i: {"": PartNorms(1.0, 100.0, 100.0)} for i in range(3)}
    # as SCAFFOLD's: next to zero; the download itself would be a huge difference
    assert set(judge.find_outliers({**differences, 3: {"": PartNorms(100.0, 0.0, 100.0)}}, steps, 0)) == {3}
    assert judge.find_outliers({**differences, 3: {"": PartNorms(2.0, 101.0, 100.0)}}, steps, 0) == {}


def test_medians_are_remembered_for_ten_rounds_and_a_liar_moves_them_by_one_place() -> None:
    judge = NormBound(10.0)
    for t in range(30):
        judge.learn({i: {"": PartNorms(1e30 if i == 3 else float(t + i))} for i in range(4)}, t)
    assert sorted(judge.past) == list(range(20, 30))
    assert judge.past[29] == {"": (None, 30.0)}


@dataclass
class Measuring(Sequential):
    """The sequential engine, whose updates are compared as a server compares them."""

    judge: NormBound = field(default_factory=lambda: NormBound(Limits().refuse_ratio))
    refused: dict[int, str] = field(default_factory=dict)

    def run(
        self, method: AnyMethod, federation: Federation, task: Task, round: int, jobs: Sequence[ClientJob]
    ) -> Iterator[ClientResult]:
        norms = {}
        for job, outcome in zip(jobs, super().run(method, federation, task, round, jobs), strict=True):
            norms[job.client.id] = measure_norms(outcome.upload, job.down)
            yield outcome
        steps = {c: sum(steps_of(method.passes(), federation.infos[c].example_count).values()) for c in norms}
        self.refused |= self.judge.find_outliers(norms, steps, round)
        self.judge.learn(norms, round)


def skewed(unequal_ranks: bool) -> Federation:
    """Eight clients of 10 to 400 examples of two of four classes each."""
    generator = torch.Generator().manual_seed(0)
    weight, data = torch.randn(12, 4, generator=generator), []
    for i, n in enumerate([10, 15, 20, 40, 60, 90, 200, 400]):
        x = torch.randn(4 * n + 40, 12, generator=generator)
        y = (x @ weight).argmax(1)
        mine = (y == i % 4) | (y == (i + 1) % 4)
        data.append((x[mine][:n], y[mine][:n]))
    ranks = (1, 2, 4, 8, 1, 2, 4, 8) if unequal_ranks else (3,) * 8
    clusters = [i % 2 for i in range(8)]
    return Federation.from_arrays(
        data, lambda: Net(9, 10, dtype=torch.float32), classes=4, rank=ranks, cluster=clusters
    )


@pytest.mark.full
@pytest.mark.parametrize("name", KINDS)
def test_no_honest_reply_of_any_kind_of_method_is_refused(name: str) -> None:
    unequal = name in ("fedhl", "hetlora", "flexlora", "flora")
    method: AnyMethod = METHODS[name](optimizer=SGD(lr=0.1), batch_size=16, epochs=1)
    engine = Measuring()
    run = Run(method, skewed(unequal), RunSettings(rounds=6, evaluate_every=99, participation=0.4), engine)
    # three clients a round, the hardest case: two that differ are half of what is usual
    for _ in range(5):
        run.step()
    assert engine.judge.past or name == "standalone"
    assert engine.refused == {}


# -- a poisoned reply over the network


def poisoned(value: float, rounds: set[int], client: int = 1) -> Any:
    """All numbers of that client's uploads in these rounds, counted from 1, have that value."""

    def act(carrier: LocalTransport, message: NodeMessage, t: int, who: int) -> Any:
        actual = carrier.answered(message)
        if who != client or t not in rounds or not actual.payload:
            return [actual]
        upload = tree.decode(actual.payload)
        odd = tree.map_leaves(lambda t: torch.full_like(t, value) if t.is_floating_point() else t, upload)
        return [replace_fields(actual, payload=tree.encode(odd))]

    return fault_on_orders(act)


@pytest.mark.full
@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedproto", "fedhl"])
@pytest.mark.parametrize("t", [1, 3])
def test_a_finite_reply_of_1e30_is_refused_and_its_client_named_but_not_blocked(
    method: str, t: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = small(method, 4, rounds=4, network={"limits": {"ban_after": 1}})
    carrier, result = run_whole(made, tmp_path, poisoned(1e30, {t}))
    assert lost(result) == [{1} if r == t else set() for r in range(1, 5)]
    # as if that reply had been lost, and nothing that came with it is kept
    assert assert_equals_sequential_run(result, carrier, made) == {(t - 1, 1)}
    why = result.rounds[t].lost["1"]
    assert "the reply of client 1 was refused: its update has the norm" in why
    assert "is usual (network.limits.refuse_ratio = 30)" in why
    assert any(why in line for line in caplog.messages)
    account = json.loads((tmp_path / "run" / "network.json").read_text())
    assert account["refused"] == {}
    assert account["refusals"] == [{"round": t, "client": 1, "reason": why}]


@pytest.mark.full
def test_the_bound_can_be_switched_off(tmp_path: Path) -> None:
    made = small("fedavg", 4, rounds=2, network={"limits": {"refuse_ratio": 0}})
    result = serve_run(local(made, tmp_path, poisoned(1e4, {1})), made, tmp_path / "run")
    assert lost(result) == [set(), set()]
    assert max(float(t.abs().max()) for _, t in tree.leaves(result.run.state.server)) > 100


def test_past_norms_are_known_after_a_restart(tmp_path: Path) -> None:
    """One client a round: nothing but past rounds can tell that a reply is far too long."""
    made = small("fedavg", 3, rounds=4, run={"participation": 0.34}, network={"min_replies": 0})
    honest, lie = local(made, tmp_path), 0

    def act(carrier: LocalTransport, message: NodeMessage, t: int, client: int) -> Any:
        if t == 3 and not lie:
            raise Killed
        actual = carrier.answered(message)
        if not actual.payload or not lie:
            return [actual]
        return [
            replace_fields(
                actual, payload=tree.encode(tree.map_leaves(lambda t: t * 6.0, tree.decode(actual.payload)))
            )
        ]

    honest.fault = fault_on_orders(act)
    with pytest.raises(Killed):
        serve_run(honest, made, tmp_path / "run")
    lie = 1
    result = serve_run(honest, made, tmp_path / "run", resume=True)
    # in a first round, such an update would pass: it is shorter than thirty times the download
    assert [len(r.lost) for r in result.rounds[1:]] == [0, 0, 1, 1]


# -- numbers of examples


def boasting(carrier: LocalTransport, message: NodeMessage, examples: int = 2**40) -> Any:
    actual = carrier.answered(message)
    # it confirms a notice of its rejection as it is
    if message.kind == "order" or message.node != 101 or not actual.header:
        return [actual]
    return [
        replace_fields(
            actual,
            header=dataclasses.replace(Registration.from_json(actual.header), examples=examples).to_json(),
        )
    ]


def test_a_client_that_claims_2_to_the_40_examples_weighs_three_times_the_median(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = small("fedavg", rounds=1)
    carrier, result = run_whole(made, tmp_path, boasting)
    assert Limits().examples_ratio == 3
    sizes = [len(d.train) for d in made.shares().data]
    weights = torch.tensor([float(sizes[0]), 3.0 * min(sizes), float(sizes[2])])
    run, _ = run_sequentially(made, result.rounds)
    replies = [tree.decode(open_client_memory(result, carrier, i).find_answer(digest_of_last(result, carrier, i))[1])  # type: ignore[index]
               for i in range(3)]  # fmt: skip
    for name, actual in result.run.state.server.items():
        stacked = torch.stack([r[name].double() for r in replies])
        expected = (weights.double() / weights.sum()).reshape(-1, *[1] * actual.ndim) * stacked
        assert torch.allclose(actual.double(), expected.sum(0), atol=1e-6)
        assert run.state.server[name].shape == actual.shape
    assert count_logged(caplog, "client 1 registered 1099511627776 examples and is weighted by") == 1
    # and the record says by how many it was weighted
    assert result.rounds[1].server_metrics == {"capped_examples": {"1": 3.0 * min(sizes)}}


def digest_of_last(result: Any, carrier: LocalTransport, client: int) -> str:
    path = next(carrier.folders[100 + client].glob("*/000001.tree"))
    order: str = json.loads(path.read_bytes().partition(b"\n")[0])["order"]
    return order


def test_more_examples_than_promised_are_turned_away(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = [len(d.train) for d in small("fedavg").shares().data]
    made = small("fedavg", rounds=1, network={"examples": sizes, "min_clients": 2, "wait": 5.0})
    _, result = run_whole(made, tmp_path, lambda there, message: boasting(there, message, sizes[1] + 1))
    assert lost(result) == [{1}]
    assert count_logged(caplog, f"says it has {sizes[1] + 1} examples, but it promised {sizes[1]}") == 1
    wrong = small("fedavg", network={"examples": [3, 4]})
    with pytest.raises(
        ConfigError, match=r"network\.examples promises the examples of 2 clients, but there are 3"
    ):
        serve_run(local(wrong, tmp_path / "wrong"), wrong, tmp_path / "wrong" / "run")


@pytest.mark.full
def test_a_client_is_told_nothing_of_the_others(tmp_path: Path) -> None:
    made = small("scaffold", partition={"kind": "dirichlet", "alpha": 0.5, "clients": 3})
    carrier, result = run_whole(made, tmp_path)
    assert assert_equals_sequential_run(result, carrier, made) == set()
    sizes = [len(d.train) for d in made.shares().data]
    assert len(set(sizes)) == 3
    for message in carrier.log:
        others = {str(n) for i, n in enumerate(sizes) if i != message.node - 100}
        values = {str(v) for v in json.loads(message.header).values()}
        assert not others & values
    for node, folder in carrier.folders.items():
        texts = [p.read_text() for p in folder.rglob("*.json")]
        assert not any(
            f'"{n}"' in t or f" {n}," in t for i, n in enumerate(sizes) if i != node - 100 for t in texts
        )


# -- backoff


@pytest.mark.full
def test_a_client_that_never_replies_costs_few_deadlines(tmp_path: Path) -> None:
    made = small("scaffold", rounds=12, network={"deadline": 100.0, "grace": 0.0})

    carrier, result = run_whole(
        made, tmp_path, fault_on_orders(lambda _, m, t, client: [] if client == 1 else None)
    )
    assert lost(result) == [{1}] * 12
    # asked in rounds 1 and 2, after a pause of one round in 4, of two in 7, of four in 12; and when the run
    # was over
    asked = [o.round + 1 for c, o in carrier.orders() if c == 1]
    assert asked == [1, 2, 4, 7, 12, 13]
    assert carrier.clock.now == pytest.approx(6 * 100, abs=10)
    assert (
        "did not reply within 100 s; it is paused for 1 round (network.silent_after)"
        in result.rounds[2].lost["1"]
    )
    assert "is paused until round 7: it did not answer 3 orders in a row" in result.rounds[5].lost["1"]
    assert json.loads((tmp_path / "run" / "network.json").read_text())["silent"] == {"1": 5}
    assert json.loads((tmp_path / "run" / "network.json").read_text())["refused"] == {}


def test_a_client_that_was_silent_takes_part_again_and_starts_from_zero(tmp_path: Path) -> None:
    made = small("scaffold", rounds=6, network={"deadline": 100.0})

    silent = [(1, 1), (2, 1), (5, 1)]
    carrier, result = run_whole(
        made, tmp_path, fault_on_orders(lambda _, m, *at: [] if at in silent else None)
    )
    assert lost(result) == [{1}, {1}, {1}, set(), {1}, set()]
    assert assert_equals_sequential_run(result, carrier, made) == {(0, 1), (1, 1), (2, 1), (4, 1)}


def test_no_client_is_paused_if_the_round_needs_it(tmp_path: Path) -> None:
    made = small("scaffold", rounds=1, network={"deadline": 100.0, "min_replies": 3, "attempts": 4})
    tries: list[NodeMessage] = []

    def act(carrier: LocalTransport, message: NodeMessage) -> Any:
        tries.append(message)
        return intact(carrier, message) if len(tries) >= 4 else []

    carrier, result = run_whole(made, tmp_path, fault_in_round(1, 1, act))
    assert lost(result) == [set()]
    assert assert_equals_sequential_run(result, carrier, made) == set()


def test_a_client_that_times_out_pauses_for_doubling_numbers_of_rounds() -> None:
    backoff = Backoff(2)
    assert [backoff.record_timeout(3, t) for t in (0, 1)] == [0, 1]
    assert [backoff.list_paused(t) for t in (1, 2, 3)] == [{3}, {3}, set()]
    assert backoff.record_timeout(3, 3) == 2
    backoff.record_reply(3)
    assert backoff.counts == {}
    assert not backoff.list_paused(4)
    never = Backoff(0)
    assert [never.record_timeout(1, t) for t in range(9)] == [0] * 9


# -- bounds and faults in one round


def test_a_long_update_stays_shortened_where_another_reply_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reply on which the server's update fails is the same as a lost one: the bound of another client stays."""
    limits = {"update_ratio": 3.0, "examples_ratio": 0.0}
    made = small("fedavg", 5, rounds=2, network={"max_fall": 0.0, "limits": limits})
    update = FedAvg.server_update

    def fail_on_client_3(self: Any, server: Any, total: Any, view: ServerView) -> Any:
        if view.round == 1 and any(client.id == 3 for client in view.replied):
            raise ValueError("it cannot be used")
        return update(self, server, total, view)

    def make_fault(loses_client_3: bool) -> Fault:
        def act(carrier: LocalTransport, message: NodeMessage, t: int, client: int) -> Any:
            answer = carrier.answered(message)
            if t == 2 and client == 1:
                # an update twenty times as long
                down, up = tree.decode(message.payload), tree.decode(answer.payload)
                long = {name: down[name] + 20 * (up[name] - down[name]) for name in up}
                return [replace_fields(answer, payload=tree.encode(long))]
            return [lost_reply(message)] if loses_client_3 and (t, client) == (2, 3) else [answer]

        return fault_on_orders(act)

    _, expected = run_whole(made, tmp_path / "lost", make_fault(loses_client_3=True))
    monkeypatch.setattr(FedAvg, "server_update", fail_on_client_3)
    _, actual = run_whole(made, tmp_path / "fails", make_fault(loses_client_3=False))
    assert lost(actual) == lost(expected) == [set(), {3}]
    assert actual.rounds[2].server_metrics["shortened"].keys() == {"1"}
    assert tree.equal(actual.run.state.server, expected.run.state.server)


def test_a_paused_client_is_asked_where_the_others_are_away(tmp_path: Path) -> None:
    made = small("scaffold", 2, rounds=4, network={"deadline": 100.0, "grace": 0.0, "wait": 5.0})

    def act(carrier: LocalTransport, message: NodeMessage, t: int, client: int) -> Any:
        answer = carrier.answered(message)
        if (t, client) == (2, 0):
            carrier.away.add(100)
        return [] if client == 1 and t in (1, 2) else [answer]

    _, result = run_whole(made, tmp_path, fault_on_orders(act))
    assert lost(result) == [{1}, {1}, {0}, {0}]


# -- going back


def test_after_going_back_a_run_is_the_one_in_which_that_client_was_lost_from_then_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # a file that the command can load; the server and its clients live in this test
    made, out = small("scaffold", 3, rounds=6), tmp_path / "run"
    config = {**made.describe("scaffold"), "vary": {}}
    carrier, first = run_whole(made, tmp_path, config=config)
    assert checkpoint.rounds_kept(out / "checkpoint") == [4, 5, 6]
    main(["resume", str(out), "--round", "2", "--without", "1"])
    assert "keeps the checkpoints after rounds 4, 5, 6, and none after round 2" in capsys.readouterr().err
    assert main(["resume", str(out), "--round", "4", "--without", "9"]) == 1
    assert "--without 9: clients go from 0 to 2" in capsys.readouterr().err
    assert Account.read(out).excluded == {}
    assert main(["resume", str(out), "--round", "4", "--without", "1"]) == 0
    told = capsys.readouterr().err
    assert "the run stands after round 4" in told
    assert "client 1 is excluded from now on" in told
    assert "fedlowrank serve FILE.toml --resume" in told.replace("\n", " ")
    before = len(carrier.log)
    result = serve_run(carrier, made, out, resume=True, config=config)
    assert lost(result) == [set()] * 4 + [{1}] * 2
    assert "client 1 is excluded: the run went on without it after round 4" in result.rounds[5].lost["1"]
    assert [r.untimed() for r in result.rounds[:4]] == [r.untimed() for r in first.rounds[:4]]
    # it is the in-process run in which that client's replies were lost from round 5 on
    run, records = run_sequentially(made, result.rounds)
    assert_same_states(result, carrier, run)
    # the evaluation of round 4, to which the run went back, stays
    assert [assert_same_record(a, b) for a, b in zip(result.rounds, records, strict=True)] == [set()] * 5 + [
        {1}
    ] * 2
    assert not any(p.node == 101 for p in carrier.log[before:] if p.kind == "order")
    # what an operator reads afterwards
    account = Account.read(out)
    assert (account.branch, account.excluded) == (1, {1: 4})
    assert serve_run(carrier, made, out, resume=True, config=config).rounds == result.rounds
    # and the client that was excluded, which would wait for ever
    reason = (carrier.folders[101] / "rejected.txt").read_text()
    assert reason == "client 1 is excluded: the run went on without it after round 4"


def test_a_client_can_be_excluded_without_going_back(tmp_path: Path) -> None:
    made, out = small("scaffold", 3, rounds=3), tmp_path / "run"
    config = {**made.describe("scaffold"), "vary": {}}

    def stop(there: LocalTransport, message: NodeMessage) -> Any:
        raise Killed

    carrier = local(made, tmp_path, fault_in_round(3, 0, stop))
    with pytest.raises(Killed):
        serve_run(carrier, made, out, config=config)
    carrier.fault = intact
    # this process has not the clients' states
    assert main(["resume", str(out)]) == 1
    assert main(["resume", str(out), "--without", "2"]) == 0
    result = serve_run(carrier, made, out, resume=True, config=config)
    assert lost(result) == [set(), set(), {2}]
    assert Account.read(out).branch == 0


@pytest.mark.full
def test_a_damaged_account_is_noticed(tmp_path: Path) -> None:
    made = small("scaffold", rounds=1)
    run_whole(made, tmp_path)
    path = tmp_path / "run" / "network.json"
    whole = path.read_bytes()
    for place in range(0, len(whole), 5):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
        with pytest.raises(CheckpointError, match=r"network\.json is damaged"):
            Account.read(tmp_path / "run")
    path.write_bytes(whole)
    assert Account.read(tmp_path / "run").run
