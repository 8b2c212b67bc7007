"""A whole run over messages is the run within one process: states, records, one round trip a round, and a resume where it was."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedlowrank import average_by_examples, load_runs
from fedlowrank.cli.main import main
from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.config.sections.network_section import NetworkSettings
from fedlowrank.config.stored_run import open_run
from fedlowrank.core import tree
from fedlowrank.core.errors import CheckpointError, ConfigError
from fedlowrank.network import drive
from fedlowrank.network.client import prepare
from fedlowrank.network.messages import Order
from fedlowrank.network.operation.client_count import count_clients
from fedlowrank.network.operation.validation_decline import PausedError
from fedlowrank.network.persistence.account import prepare_resume
from fedlowrank.network.server import NetworkError, RunIsOverError
from fedlowrank.network.transport import NodeMessage, Response
from fedlowrank.results.records import RunRecord
from fedlowrank.rounds import plan
from fedlowrank.rounds.simulate import simulate
from fedlowrank.storage.digest import seal
from fedlowrank.storage.run_folder import RunFolder
from tests.support.local_network import (
    Killed,
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
    lose_replies,
    lost,
    open_client_memory,
    run_sequentially,
    run_whole,
    serve_run,
    small,
)

METHODS = ["scaffold", "feddyn", "fedhl", "fedslr", "per_fedavg", "floral"]


@pytest.mark.few(3)
@pytest.mark.parametrize("method", METHODS)
def test_a_run_is_the_sequential_one_bit_for_bit_with_one_round_trip_a_round(
    method: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = small(method, 4, run={"participation": 0.5, "evaluate_every": 2, "unseen": 0.25, "rounds": 4})
    carrier, result = run_whole(made, tmp_path)
    assert assert_equals_sequential_run(result, carrier, made) == set()
    assert [r.is_evaluated for r in result.rounds] == [True, True, True, False, True]
    # nobody is asked twice in a round, and those who do not train only where the models are to be evaluated
    round_trips = [{c: o for c, o in carrier.orders() if o.round == t} for t in range(5)]
    assert sum(map(len, round_trips)) == len(carrier.orders())
    trained = [set(r.participants) for r in result.rounds[1:]]
    assert [{c for c, o in orders.items() if o.train} for orders in round_trips] == [*trained, set()]
    assert all(len(t) == 2 for t in trained)
    assert [len(orders) for orders in round_trips] == [4, 4, 4, 2, 4]
    assert [{o.evaluate for o in orders.values()} for orders in round_trips] == [
        {True},
        {True},
        {True},
        {False},
        {True},
    ]
    assert carrier.trained == [(c, t) for t, clients in enumerate(trained) for c in sorted(clients)]
    # each was asked once who it is, and learns nothing of the others
    assert Counter(p.kind for p in carrier.log) == {"registration": 4, "order": 18}
    fields = {"run", "round", "stamp", "train", "evaluate", "last", "branch", "step", "parcel", "repeats"}
    assert all(json.loads(p.header).keys() == fields for p in carrier.log if p.kind == "order")
    assert carrier.clock.now == 0
    assert count_logged(caplog, "replies") == 4


def test_without_a_set_interval_a_network_evaluates_after_the_same_rounds_as_a_simulation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "MIN_EVALUATIONS", 1)
    split = {"kind": "local", "train": 0.3, "val": 0.3, "test": 0.4}
    made = small("fedavg", rounds=6, split=split)
    stops = iter([3])

    def die_in_round_3(_: LocalTransport, __: NodeMessage, round: int, ___: int) -> None:
        if round == 3 and next(stops, None):
            raise Killed("server")

    carrier = local(made, tmp_path, fault_on_orders(die_in_round_3))
    with pytest.raises(Killed):
        serve_run(carrier, made, tmp_path / "run")
    # the next server has the sizes of the clients from its folder
    result = serve_run(carrier, made, tmp_path / "run", resume=True)
    run, records = run_sequentially(made, result.rounds)
    assert run.evaluate_every > 1
    assert [r.is_evaluated for r in result.rounds] == [r.is_evaluated for r in records]


def test_a_network_evaluates_the_clients_that_the_settings_choose(tmp_path: Path) -> None:
    made = small("fedavg", 5, run={"evaluate_clients": 2, "participation": 0.6})
    carrier, result = run_whole(made, tmp_path)
    _, records = run_sequentially(made, result.rounds)
    expected = [list(r.measured.client_ids) for r in records if r.measured is not None]
    assert [list(r.measured.client_ids) for r in result.rounds if r.measured is not None] == expected
    assert {c for c, order in carrier.orders() if order.evaluate} == set(expected[0])


@pytest.mark.full
def test_clients_keep_the_states_of_their_optimizers_on_their_own_disks(tmp_path: Path) -> None:
    optimizer = {"kind": "adamw", "keep": True}
    made = small("fedavg", 4, run={"participation": 0.5, "rounds": 4}, defaults={"optimizer": optimizer})
    carrier, result = run_whole(made, tmp_path, lose_replies({2: {0, 1, 2}}))
    # the lost message held the evaluation after round 1, too
    assert assert_equals_sequential_run(result, carrier, made) == {(1, 0)}
    assert result.rounds[2].lost.keys() == {"0"}


@pytest.mark.full
@pytest.mark.parametrize("sampling", ["size", "loss"])
def test_clients_are_drawn_by_the_sizes_and_losses_that_they_report(sampling: str, tmp_path: Path) -> None:
    made = small("fedavg", 4, run={"participation": 0.5, "rounds": 4, "sampling": sampling})
    carrier, result = run_whole(made, tmp_path)
    assert assert_equals_sequential_run(result, carrier, made) == set()


@pytest.mark.full
def test_the_last_wave_makes_every_state_count_and_writes_every_model(tmp_path: Path) -> None:
    made = small("ditto", run={"participation": 0.67})
    carrier, result = run_whole(made, tmp_path)
    assert [o.last for _, o in carrier.orders()].count(True) == 3
    run, _ = run_sequentially(made, result.rounds)
    for i in range(3):
        memory = open_client_memory(result, carrier, i)
        stamp = result.run.state.clients.get(i, {"stamp": 0})["stamp"]
        # the last is acknowledged; those of the checkpoints that the server keeps stay beside it
        trained = [r.round for r in result.rounds if i in r.participants]
        assert memory.stamps == trained
        assert memory.stamps[-1:] == ([stamp] if stamp else [])
        assert (memory.folder / "model" / "model.safetensors").exists()
    assert_same_states(result, carrier, run)


@pytest.mark.full
def test_the_run_folder_is_that_of_the_sequential_run(tmp_path: Path) -> None:
    made = small("feddyn", run={"engine": "sequential"})
    _, result = run_whole(made, tmp_path)
    method = made.build_method("feddyn")
    # a run over a network saves every round
    settings = {**vars(made.run), "checkpoint_every": 1}
    sequential = simulate(
        method, made.federation(), folder=tmp_path / "seq", config=made.describe("feddyn"), **settings
    )
    actual, expected = RunRecord.load(tmp_path / "run"), RunRecord.load(tmp_path / "seq")
    assert [r.untimed() for r in actual.rounds] == [r.untimed() for r in result.rounds]
    assert [assert_same_record(a, b) for a, b in zip(actual.rounds, expected.rounds, strict=True)] == [
        set()
    ] * 4
    assert actual.status == {"state": "finished", "rounds": 3, "message": ""}
    # what classes a client's examples have is not told
    assert actual.clients == [{**row, "classes": {}} for row in expected.clients]
    assert actual.config.keys() == expected.config.keys()
    differ = {k for k in actual.config if actual.config[k] != expected.config[k]}
    assert differ == {"fingerprint"}
    assert tree.equal(result.run.state.server, sequential.run.state.server)
    account = json.loads((tmp_path / "run" / "network.json").read_text())
    assert account["clients"] == {
        str(i): {k: row[k] for k in ("train", "val", "test")} for i, row in enumerate(expected.clients)
    }
    assert account["refused"] == {}
    assert account["settings"]["min_replies"] == 1


def _sent_for_training(carrier: LocalTransport, t: int) -> list[int]:
    """Bytes of the downloads of the orders to train in a round, from 0."""
    orders = [(Order.from_json(p.header), p.payload) for p in carrier.log if p.kind == "order"]
    return [len(payload) for order, payload in orders if order.train and order.round == t]


def test_bytes_are_those_of_the_orders_that_were_sent(tmp_path: Path) -> None:
    made = small("fedavg", rounds=3, run={"participation": 0.67}, network={"min_replies": 2, "attempts": 2})

    def leaves(there: LocalTransport, message: NodeMessage, t: int, client: int) -> Any:
        there.away.discard(102)
        if t == 2 and Order.from_json(message.header).train and client == first_client:
            # a reply is lost, so that the round is asked for again
            there.fault = intact
            return [Response(message.node, message.kind, problem="it was lost")]
        return None

    sequential = made.federation()
    first_client = next(i for i in simulate("fedavg", sequential, **vars(made.run)).rounds[2].participants)
    carrier = local(made, tmp_path, fault_on_orders(leaves))
    result = serve_run(carrier, made, tmp_path / "run")
    by_round = [_sent_for_training(carrier, t) for t in range(3)]
    # the model is as large in every round, and one order of round 2 was sent twice
    assert list(map(len, by_round)) == [2, 3, 2]
    assert [r.bytes_down for r in result.rounds[1:]] == list(map(sum, by_round))
    parameters = result.rounds[1].parameters_down // 2
    assert [r.parameters_down for r in result.rounds[1:]] == [parameters * n for n in (2, 3, 2)]
    # the third client is only evaluated, and every client is sent the last model
    account = json.loads((tmp_path / "run" / "network.json").read_text())
    all_sent = sum(len(p.payload) for p in carrier.log if p.kind == "order")
    assert account["sent"]["down"] == all_sent > sum(map(sum, by_round))


def test_a_client_that_is_not_asked_is_sent_nothing(tmp_path: Path) -> None:
    made = small("fedavg", rounds=2, network={"min_clients": 2, "wait": 1.0})
    carrier = local(made, tmp_path)
    carrier.away.add(102)
    result = serve_run(carrier, made, tmp_path / "run")
    assert [set(r.lost) for r in result.rounds[1:]] == [{"2"}, {"2"}]
    for t, record in enumerate(result.rounds[1:]):
        assert len(_sent_for_training(carrier, t)) == 2
        assert sum(_sent_for_training(carrier, t)) == record.bytes_down


@pytest.mark.full
def test_what_is_sent_is_what_is_counted(tmp_path: Path) -> None:
    made = small("scaffold", run={"evaluate_every": 99})
    carrier, result = run_whole(made, tmp_path)
    for t, record in enumerate(result.rounds[1:]):
        assert sum(_sent_for_training(carrier, t)) == record.bytes_down
    engine: Any = result.run.engine
    sent = engine.account.sent
    assert json.loads((tmp_path / "run" / "network.json").read_text())["sent"] == sent
    assert sent["down"] == sum(len(p.payload) for p in carrier.log if p.kind == "order")
    assert sent["up"] == sum(r.bytes_up for r in result.rounds)
    assert sent["header"] > sum(len(p.header) for p in carrier.log if p.kind == "order")


@pytest.mark.full
def test_a_resumed_run_goes_on_where_it_was(tmp_path: Path) -> None:
    made = small("scaffold", rounds=4)
    carrier = local(made, tmp_path, lose_replies({2: {1}}))
    append = RunFolder.append

    def stop(folder: RunFolder, record: Any) -> None:
        if json.loads(record)["round"] == 3:
            raise Killed
        append(folder, record)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunFolder, "append", stop)
        with pytest.raises(Killed):
            serve_run(carrier, made, tmp_path / "run")
    before = len(carrier.log)
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "running"
    result = serve_run(carrier, made, tmp_path / "run", resume=True)
    # a reply that is lost takes along what its client found of the round before
    assert assert_equals_sequential_run(result, carrier, made) == {(1, 1)}
    assert [set(r.lost) for r in result.rounds] == [set(), set(), {"1"}, set(), set()]
    rounds = [Order.from_json(p.header).round for p in carrier.log[before:] if p.kind == "order"]
    assert sorted(set(rounds)) == [2, 3, 4]
    # a finished one reaches those who were not told that it is over, and trains nobody
    trained = len(carrier.trained)
    again = serve_run(carrier, made, tmp_path / "run", resume=True)
    assert assert_equals_sequential_run(again, carrier, made) == {(1, 1)}
    assert len(carrier.trained) == trained
    assert [r.untimed() for r in again.rounds] == [r.untimed() for r in result.rounds]


def test_a_client_that_missed_the_end_is_told_when_the_run_is_resumed(tmp_path: Path) -> None:
    made = small("scaffold")

    def leaves(there: LocalTransport, message: NodeMessage) -> Any:
        there.away.add(102)
        return []

    carrier, result = run_whole(made, tmp_path, fault_in_round(4, 2, leaves))
    assert assert_equals_sequential_run(result, carrier, made) == {(3, 2)}
    carrier.fault = intact
    carrier.away.clear()
    assert (
        assert_equals_sequential_run(serve_run(carrier, made, tmp_path / "run", resume=True), carrier, made)
        == set()
    )


def test_a_finished_run_that_is_resumed_keeps_its_results(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    made = small("fedavg", rounds=2, network={"wait": 30.0, "min_clients": 1})

    def leaves(there: LocalTransport, message: NodeMessage) -> Any:
        there.away.add(102)
        return []

    carrier, first = run_whole(made, tmp_path, fault_in_round(3, 2, leaves))
    last = first.rounds[-1].by_client()
    assert last.keys() == {0, 1}
    # the client that missed the end comes back a while after another one
    carrier.fault, carrier.away = intact, {100, 102}
    began, nodes = carrier.clock.now, LocalTransport.nodes
    with pytest.MonkeyPatch.context() as patch:

        def comes(there: LocalTransport) -> set[int]:
            there.away = {100} if there.clock.now > began + 20 else {100, 102}
            return nodes(there)

        patch.setattr(LocalTransport, "nodes", comes)
        result = serve_run(carrier, made, tmp_path / "run", resume=True)
    _, records = run_sequentially(made, result.rounds)
    assert assert_same_record(result.rounds[-1], records[-1]) == set()
    assert result.rounds[-1].by_client() == {**last, 2: records[-1].by_client()[2]}
    assert RunRecord.load(tmp_path / "run").rounds[-1].by_client().keys() == {0, 1, 2}
    # nobody comes
    carrier.away = {100, 101, 102}
    with pytest.raises(RunIsOverError, match="is finished, and no client came within 30 s"):
        serve_run(carrier, made, tmp_path / "run", resume=True)
    assert RunRecord.load(tmp_path / "run").status["state"] == "finished"
    assert count_logged(caplog, "clients that come within 30 s (network.wait) are told so") == 2


@pytest.mark.parametrize("is_back", [False, True])
def test_a_server_that_was_killed_while_it_told_of_the_end_ends_its_run(
    is_back: bool, tmp_path: Path
) -> None:
    """The clients that have their models have ended, so fewer than network.min_clients come back."""
    made, out = small("scaffold", rounds=2, network={"wait": 5.0}), tmp_path / "run"
    carrier = local(made, tmp_path)

    def act(there: LocalTransport, message: NodeMessage, t: int, client: int) -> Any:
        if t == 3 and client == 2:
            raise Killed

    carrier.fault = fault_on_orders(act)
    with pytest.raises(Killed):
        serve_run(carrier, made, out)
    assert RunRecord.load(out).status["state"] != "finished"
    carrier.fault, carrier.away = intact, {100, 101} if is_back else {100, 101, 102}
    trained = len(carrier.trained)
    if is_back:
        result = serve_run(carrier, made, out, resume=True)
        # the last evaluations of the others were not on the server's disk
        assert assert_equals_sequential_run(result, carrier, made) == {(2, 0), (2, 1)}
    else:
        with pytest.raises(RunIsOverError, match="is finished, and no client came within 5 s"):
            serve_run(carrier, made, out, resume=True)
    assert RunRecord.load(out).status == {"state": "finished", "rounds": 2, "message": ""}
    models = {p.parts[-4] for p in tmp_path.glob("client-*/*/model/model.safetensors")}
    assert models == {"client-0", "client-1", *(["client-2"] if is_back else [])}
    # those that come later get their evaluations recorded, too
    carrier.away = set()
    result = serve_run(carrier, made, out, resume=True)
    assert assert_equals_sequential_run(result, carrier, made) == set()
    assert len(carrier.trained) == trained


def kill_while_it_ends(carrier: LocalTransport, made: ExperimentConfig, out: Path) -> None:
    """The server dies while it tells client 2 of the end; clients 0 and 1 have their models and end."""

    def act(there: LocalTransport, message: NodeMessage, t: int, client: int) -> Any:
        if Order.from_json(message.header).last and client == 2:
            raise Killed

    carrier.fault = fault_on_orders(act)
    with pytest.raises(Killed):
        serve_run(carrier, made, out)
    carrier.fault, carrier.away = intact, {100, 101}


def test_a_run_that_stopped_early_ends_after_its_server_was_killed(tmp_path: Path) -> None:
    still = {"optimizer": {"kind": "sgd", "lr": 1e-9}}
    run = {"patience": 2, "rounds": 9, "evaluate_every": 1}
    made, out = small("fedavg", run=run, defaults=still, network={"wait": 5.0}), tmp_path / "run"
    carrier = local(made, tmp_path)
    kill_while_it_ends(carrier, made, out)
    rounds = len(serve_run(carrier, made, out, resume=True).rounds) - 1
    assert rounds < 9
    status = RunRecord.load(out).status
    assert (status["state"], status["rounds"]) == ("finished", rounds)
    assert len([*tmp_path.glob("client-2/*/model/model.safetensors")]) == 1


def test_a_run_that_paused_at_its_last_round_stays_paused_if_no_client_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, out = small("fedavg", rounds=2, network={"wait": 2.0}), tmp_path / "run"
    carrier = local(made, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(drive, "_find_fall", lambda e, r, p: "paused: x" if r[-1].round == 2 else "")
        with pytest.raises(PausedError):
            serve_run(carrier, made, out)
    status = RunRecord.load(out).status
    carrier.away = {100, 101, 102}
    with pytest.raises(NetworkError, match="only 0 of 3 clients came"):
        serve_run(carrier, made, out, resume=True)
    assert RunRecord.load(out).status == status
    assert status["state"] == "stopped"


def test_a_finished_run_without_its_last_checkpoint_repeats_the_round_with_all_clients(
    tmp_path: Path,
) -> None:
    made, out = (
        small("scaffold", rounds=3, run={"keep_checkpoints": 3}, network={"wait": 2.0}),
        tmp_path / "run",
    )
    carrier = local(made, tmp_path)
    serve_run(carrier, made, out)
    (out / "checkpoint" / "000003.checkpoint").unlink()
    carrier.away = {100, 101}
    with pytest.raises(NetworkError, match="only 1 of 3 clients came"):
        serve_run(carrier, made, out, resume=True)
    prepare_resume(out, 2, [])
    assert RunRecord.load(out).status["state"] == "stopped"
    carrier.away = set()
    result = serve_run(carrier, made, out, resume=True)
    assert assert_equals_sequential_run(result, carrier, made) == set()


@pytest.mark.full
def test_other_settings_of_the_network_do_not_make_another_run(tmp_path: Path) -> None:
    made = small("scaffold", network={"min_replies": 3, "attempts": 1})
    carrier = local(made, tmp_path, lose_replies({2: {1}}))
    with pytest.raises(NetworkError, match=r"lower network\.min_replies"):
        serve_run(carrier, made, tmp_path / "run")
    other = small("scaffold", network={"min_replies": 2, "deadline": 5.0, "min_clients": 2})
    result = serve_run(carrier, other, tmp_path / "run", resume=True)
    assert assert_equals_sequential_run(result, carrier, other) == {(1, 1)}
    assert set(result.rounds[2].lost) == {"1"}
    # but another seed does, and says so before anything is sent
    changed = small("scaffold", run={"seed": 8})
    rejections = local(changed, tmp_path / "others")
    with pytest.raises(CheckpointError, match=r"run\.seed was 0 and is 8"):
        serve_run(rejections, changed, tmp_path / "run", resume=True)
    assert not rejections.orders()


def test_a_server_that_resumes_with_another_configuration_asks_no_client(tmp_path: Path) -> None:
    made = small("scaffold", rounds=2)

    def stop(carrier: LocalTransport, message: NodeMessage, t: int, client: int) -> Any:
        if t == 2:
            raise Killed

    carrier = local(made, tmp_path, fault_on_orders(stop))
    with pytest.raises(Killed):
        serve_run(carrier, made, tmp_path / "run")
    carrier.fault, carrier.log = intact, []
    for other, why in (
        (small("fedavg", rounds=2), "method.name was 'scaffold' and is 'fedavg'"),
        (
            small("scaffold", rounds=2, defaults={"optimizer": {"lr": 0.06}}),
            "optimizer.lr was 0.01 and is 0.06",
        ),
        (
            small("scaffold", rounds=2, data={"normalize": "none"}),
            "data.normalize was 'standard' and is 'none'",
        ),
        (
            small("scaffold", rounds=2, loss={"kind": "mse"}),
            r"section\(s\) loss differ from those with which its cl",
        ),
        (small("scaffold", rounds=2, network={"clients": 4}), "number of clients was 3 and is 4"),
    ):
        with pytest.raises(CheckpointError, match=rf"cannot be resumed with another configuration: .*{why}"):
            serve_run(carrier, other, tmp_path / "run", resume=True)
    assert not carrier.log
    assert not [*tmp_path.rglob("rejected.txt")]
    # settings of the server alone may change
    result = serve_run(
        carrier, small("scaffold", rounds=2, network={"wait": 5.0}), tmp_path / "run", resume=True
    )
    assert len(result.rounds) == 3


@pytest.mark.full
def test_a_folder_that_exists_is_not_overwritten(tmp_path: Path) -> None:
    made = small("scaffold", rounds=1)
    carrier = local(made, tmp_path)
    serve_run(carrier, made, tmp_path / "run")
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    with pytest.raises(CheckpointError, match="exists already"):
        serve_run(carrier, made, tmp_path / "run")
    assert {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()} == before


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", json.dumps(seal({"run": 3})), json.dumps(seal({"refused": {"5": 1.0}}))]
)
def test_a_damaged_account_is_named(tmp_path: Path, text: str) -> None:
    made = small("scaffold", rounds=1)
    (tmp_path / "run").mkdir()
    with pytest.raises(CheckpointError, match=r"cannot read .*network\.json"):
        serve_run(local(made, tmp_path), made, tmp_path / "run", resume=True)
    (tmp_path / "run" / "network.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"network\.json is damaged"):
        serve_run(local(made, tmp_path), made, tmp_path / "run", resume=True)


def test_a_run_of_before_its_first_checkpoint_cannot_be_resumed_and_says_so(tmp_path: Path) -> None:
    made = small("scaffold", rounds=1)
    carrier = local(made, tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunFolder, "save", lambda *_: (_ for _ in ()).throw(Killed()))
        with pytest.raises(Killed):
            serve_run(carrier, made, tmp_path / "run")
    with pytest.raises(CheckpointError, match="stopped before its first one"):
        serve_run(carrier, made, tmp_path / "run", resume=True)


def test_the_best_round_cannot_be_kept(tmp_path: Path) -> None:
    made = small("scaffold", run={"keep_best": True})
    carrier = local(made, tmp_path)
    with pytest.raises(ConfigError, match=r"run\.keep_best: over a network"):
        serve_run(carrier, made, tmp_path / "run")
    assert not carrier.orders()
    assert not (tmp_path / "run").exists()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of libraries that flwr imports
@pytest.mark.parametrize("command", ["run", "serve", "join", "app"])
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["run.adapters=[1]"], "run.adapters writes models of simulated clients"),
        (["run.keep_best=true"], "run.keep_best: over a network"),
        (["partition.kind=natural"], "set network.clients"),
    ],
)
def test_what_no_network_can_do_is_refused_before_data_are_read(
    command: str, overrides: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("flwr")
    file, out = tmp_path / "e.toml", tmp_path / "out"
    # there is no such file of data
    file.write_text(
        f'method = "fedavg"\n[data]\nsource = "csv"\npath = "{tmp_path / "none.csv"}"\nlabel = "y"\n'
    )
    options = {
        "run": ["--engine", "flower", "-o", str(out)],
        "serve": ["--insecure", "-o", str(out)],
        "join": ["--client", "0", "--server", "localhost:1", "--insecure", "--folder", str(out)],
        "app": ["-o", str(out)],
    }[command]
    assert main([command, str(file), *overrides, *options]) == 1
    assert message in " ".join(capsys.readouterr().err.split())
    assert list(tmp_path.iterdir()) == [file]


def test_how_many_clients_there_are() -> None:
    assert count_clients(small("scaffold", 4)) == 4
    assert count_clients(small("scaffold", 4, network={"clients": 7})) == 7
    natural = small("scaffold").overlay({"partition": {"kind": "natural", "clients": None}})
    with pytest.raises(ConfigError, match=r"set network\.clients"):
        count_clients(natural)


@pytest.mark.parametrize(
    ("fields", "text"),
    [({"clients": 0}, "network.clients must be >= 1"), ({"min_clients": 0}, "network.min_clients must be >= 1"),
     ({"attempts": 0}, "network.attempts must be >= 1"), ({"min_replies": -1}, "network.min_replies must be >= 0"),
     ({"wait": 0.0}, "network.wait is a number of seconds above 0"), ({"deadline": -1.0}, "network.deadline is a number"),
     ({"deadline": float("nan")}, "network.deadline is a number"), ({"wait": float("inf")}, "network.wait is a number"),
     ({"clients": 2, "min_clients": 3}, "network.min_clients is 3, but there are 2"), ({"forgotten": "x"}, "forgotten")],
)  # fmt: skip
def test_settings_that_cannot_be(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        NetworkSettings(**fields)


def test_with_how_many_clients_a_run_begins() -> None:
    assert NetworkSettings().min_registered(5) == 5
    assert NetworkSettings(min_clients=2).min_registered(5) == 2
    assert NetworkSettings(min_clients=9).min_registered(5) == 5


def test_clients_that_do_not_come_are_named(tmp_path: Path) -> None:
    made = small("scaffold", network={"wait": 30.0})
    carrier = local(made, tmp_path)
    carrier.away = {100, 102}
    with pytest.raises(
        NetworkError, match=r"only 1 of 3 clients came within 30 s; missing: 0, 2\. Start them"
    ):
        serve_run(carrier, made, tmp_path / "run")
    assert carrier.clock.now == pytest.approx(30)
    assert not carrier.orders()
    assert not (tmp_path / "run").exists()


# -- nodes that hold others up


def test_a_node_that_says_nothing_does_not_hold_up_the_rounds_and_is_asked_again(tmp_path: Path) -> None:
    made = small("scaffold", rounds=4, network={"min_clients": 2, "wait": 50.0})
    carrier = local(made, tmp_path)

    def fault(there: LocalTransport, message: NodeMessage) -> Any:
        if message.node == 101 and message.kind == "registration":
            return intact(there, message) if sum(p.node == 101 for p in there.log) > 1 else []
        # every round takes 30 s
        return (
            [(30.0, there.answered(message))]
            if message.kind == "order" and message.node == 100
            else intact(there, message)
        )

    carrier.fault = fault
    result = serve_run(carrier, made, tmp_path / "run")
    # it is asked when the run begins, and again when 25 s have passed, with the orders of the second round
    assert lost(result) == [{1}, {1}, set(), set()]
    assert assert_equals_sequential_run(result, carrier, made) == {(t, 1) for t in range(2)}
    assert carrier.clock.now == pytest.approx(5 * 30, abs=10)


@pytest.mark.full
@pytest.mark.parametrize("needed", [3, 2])
def test_a_registration_that_takes_minutes_is_accepted_and_asked_for_once(
    needed: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As of a client that hashes a large base model."""
    made = small("scaffold", rounds=5, network={"min_clients": needed})
    carrier = local(made, tmp_path)

    def fault(there: LocalTransport, message: NodeMessage) -> Any:
        actual = there.answered(message)
        if message.kind == "registration":
            return [(200.0 if message.node == 101 else 0.0, actual)]
        return [(80.0, actual)]

    carrier.fault = fault
    result = serve_run(carrier, made, tmp_path / "run")
    # the run waits for it, or begins and takes it in once it is there: after two rounds of 80 s, in the third
    assert lost(result) == ([set()] * 5 if needed == 3 else [{1}, {1}, {1}, set(), set()])
    assert assert_equals_sequential_run(result, carrier, made) == (
        set() if needed == 3 else {(0, 1), (1, 1), (2, 1)}
    )
    assert sum(p.kind == "registration" and p.node == 101 for p in carrier.log) == 1
    assert count_logged(caplog, "still waiting for the registration of node 101") == (3 if needed == 3 else 2)
    assert carrier.clock.now == pytest.approx((200 if needed == 3 else 0) + 6 * 80, abs=10)


@pytest.mark.full
def test_a_second_node_of_a_client_takes_its_place_when_the_first_is_gone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = small("scaffold", rounds=4)
    carrier = local(made, tmp_path)
    carrier.folders[201] = carrier.folders[101]
    carrier.away = {201}

    def act(there: LocalTransport, message: NodeMessage, *at: int) -> Any:
        there.away.discard(201)
        if at != (3, 1):
            return None
        there.away.add(101)
        return [Response(101, "order", problem="the node is gone", disconnected=True)]

    carrier.fault = fault_on_orders(act)
    result = serve_run(carrier, made, tmp_path / "run")
    # it is asked again in every round, rejected as long as the first is there, and says so once
    assert count_logged(caplog, "a node was rejected: client 1 is connected already") == 1
    assert not any(
        p.kind == "order" and p.node == 201 and Order.from_json(p.header).round < 3 for p in carrier.log
    )
    assert lost(result) == [set(), set(), {1}, set()]
    assert assert_equals_sequential_run(result, carrier, made) == find_missed_rounds(result)


@pytest.mark.full
def test_unregistered_nodes_are_never_sent_an_order(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made, other = small("scaffold"), small("scaffold", run={"seed": 3})
    carrier = local(made, tmp_path)
    prepare(tmp_path / "other", other, 1, other.shares())
    carrier.folders[300] = tmp_path / "other"
    keys = {100: 0, 101: 1, 102: 2, 300: 1}
    result = serve_run(carrier, made, tmp_path / "run", keys=keys)
    assert assert_equals_sequential_run(result, carrier, made) == set()
    sent = [p for p in carrier.log if p.node == 300]
    # it is asked who it is, and then told why it takes no part
    assert [(p.kind, p.payload) for p in sent] == [("registration", b"")] * 2
    assert sent[0].header == "{}"
    assert "section(s) run differ" in json.loads(sent[1].header)["rejection"]
    assert count_logged(caplog, "section(s) run differ") == 1


def test_the_log_has_the_result_of_each_round(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = small("fedavg")
    with caplog.at_level("INFO", "fedlowrank.network"):
        serve_run(local(made, tmp_path), made, tmp_path / "run")
    means = [record.mean(split="test") for record in RunRecord.load(tmp_path / "run").rounds]
    expected = [
        f"evaluation after round {t}: test {100 * (mean or 0):5.1f} %" for t, mean in enumerate(means)
    ]
    assert [text for text in caplog.messages if "evaluation after" in text] == expected


@pytest.mark.full
def test_a_wrong_key_keeps_a_client_out(tmp_path: Path) -> None:
    made = small("scaffold", network={"min_clients": 1})
    carrier, result = run_whole(made, tmp_path, keys={100: 0, 101: 2, 102: 1})
    assert [len(r.lost) for r in result.rounds[1:]] == [2] * 3
    assert all(p.kind == "registration" for p in carrier.log if p.node != 100)


def test_a_client_that_comes_back_between_two_attempts_is_asked_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = small("feddyn", network={"min_replies": 3, "wait": 100.0})

    def act(there: LocalTransport, message: NodeMessage) -> Any:
        # its node is replaced by another one, as after a restart
        there.folders[201] = there.folders.pop(101)
        return [Response(101, "order", problem="the node is gone", disconnected=True)]

    carrier, result = run_whole(made, tmp_path, fault_in_round(2, 1, act))
    carrier.folders[101] = carrier.folders[201]
    assert assert_equals_sequential_run(result, carrier, made) == set()
    assert lost(result) == [set()] * 3
    assert caplog.messages.count("client 1 is registered, with 40 examples") == 2
    assert carrier.clock.now == 0


@pytest.mark.parametrize("is_back", [True, False])
def test_a_client_that_comes_while_the_others_are_waited_for_at_the_end_is_asked_or_told(
    is_back: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One that took part is asked again and writes its model; one that never did learns that the run is over."""
    made = small("fedavg", rounds=2, network={"min_clients": 2})
    carrier = local(made, tmp_path)
    carrier.away = set() if is_back else {102}

    def act(there: LocalTransport, message: NodeMessage, t: int, client: int) -> Any:
        if t == 2 and client == 2:
            there.away.add(102)
        if t == 3 and client == 0:
            there.away.discard(102)
        return None

    carrier.fault = fault_on_orders(act)
    serve_run(carrier, made, tmp_path / "run")
    models = {p.parts[-4] for p in tmp_path.glob("client-*/*/model/model.safetensors")}
    assert ("client-2" in models) is is_back
    assert {"client-0", "client-1"} <= models
    told = tmp_path / "client-2" / "rejected.txt"
    assert told.exists() is not is_back
    if not is_back:
        assert told.read_text() == "the run was over before client 2 took part, so it gets no model"
        assert count_logged(caplog, "the run was over before client 2") == 1
    # nor does it get a model, or a result, where the finished run is resumed
    before = RunRecord.load(tmp_path / "run").rounds[-1]
    told.unlink(missing_ok=True)
    carrier.fault = intact
    serve_run(carrier, made, tmp_path / "run", resume=True)
    assert told.exists() is not is_back
    assert (tmp_path / "client-2" / "rejected.txt").exists() is not is_back
    assert RunRecord.load(tmp_path / "run").rounds[-1] == before


def test_a_client_that_joined_late_counts_with_its_examples(tmp_path: Path) -> None:
    sizes = {"kind": "dirichlet", "alpha": 0.5, "clients": 3}
    made = small("fedavg", rounds=3, network={"min_clients": 2, "wait": 1.0}, partition=sizes)
    carrier = local(made, tmp_path)
    carrier.away = {102}

    def comes(there: LocalTransport, message: NodeMessage, t: int, client: int) -> Any:
        if t == 2:
            there.away.discard(102)

    carrier.fault = fault_on_orders(comes)
    result = serve_run(carrier, made, tmp_path / "run")
    counts = [float(len(data.test)) for data in made.shares().data]
    assert len(set(counts)) > 1
    last = result.rounds[-1]
    assert last.by_client().keys() == {0, 1, 2}
    expected = np.average(last.values(), weights=counts)
    record = RunRecord.load(tmp_path / "run")
    assert [row["test"] for row in record.clients] == counts
    weighted = record.measurements.over_clients("accuracy", "personal").iloc[-1]["weighted"]
    assert weighted == pytest.approx(expected)
    rows = load_runs(tmp_path / "run").query("split == 'test'").assign(all=1)
    assert average_by_examples(rows[rows["round"] == 3], "all").item() == pytest.approx(expected)


def test_a_run_over_a_network_that_is_opened_says_where_the_models_are(tmp_path: Path) -> None:
    run_whole(small("fedavg", rounds=1), tmp_path)
    with pytest.raises(CheckpointError, match=r"was served over a network.*FOLDER/RUN/model.*clients/small"):
        open_run(tmp_path / "run", "")


def test_a_run_of_the_engine_flower_that_is_opened_says_where_the_models_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_whole(small("fedavg", rounds=1, run={"engine": "flower"}), tmp_path)
    for command in (["predict", "-o", str(tmp_path / "p.csv")], ["export", "--client", "0"]):
        assert main([command[0], str(tmp_path / "run"), *command[1:]]) == 1
        assert ".clients/CLIENT/RUN/model" in "".join(capsys.readouterr().err.split())
