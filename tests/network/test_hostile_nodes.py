"""Nodes that lie, hold others up, or are none of ours: they get nothing, spoil nothing, and are named."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.config.sections.network_section import NetworkSettings
from fedlowrank.core import tree
from fedlowrank.engines.sequential import Sequential
from fedlowrank.methods.scaffold import SCAFFOLD
from fedlowrank.network.messages import Answer, Order
from fedlowrank.network.network_run import NetworkRun
from fedlowrank.network.persistence.account import Account
from fedlowrank.network.persistence.registry import ClientRegistry
from fedlowrank.network.server import NetworkEngine, NetworkError
from fedlowrank.network.transport import NodeMessage, Response
from fedlowrank.results.records import RoundRecord
from fedlowrank.rounds.run import Run
from tests.support.client_tables import make_client_table, replace_values
from tests.support.local_network import (
    PLAIN,
    Killed,
    LocalTransport,
    assert_equals_sequential_run,
    count_logged,
    fault_in_round,
    fault_on_orders,
    find_missed_rounds,
    fuzz,
    local,
    log_lines,
    lost,
    replace_fields,
    run_whole,
    serve_run,
    small,
)

# -- answers that are none

Lie = Callable[[Response], Response]


def upload(change: Callable[[Any], Any]) -> Lie:
    return lambda d: replace_fields(d, payload=tree.encode(change(tree.decode(d.payload))))


def evaluation(**tables: Any) -> Lie:
    def lie(response: Response) -> Response:
        actual = Answer.from_json(response.header).evaluation
        assert actual is not None
        return replace_fields(response, evaluation=replace_values(actual, **tables))

    return lie


def half(name: str) -> dict[str, dict[str, float | None]]:
    return {name: {"val": 0.5, "test": 0.5}}


STEPS = r"it counts .* optimizer steps; [0-9]+ examples make [0-9]+ at most"
FLOPS = r"it counts .* floating-point operations; [0-9]+ are taken at most"

LOSSES = "it reports losses that cannot be"
EVALUATION = "its evaluation is impossible"

WORDS: dict[str, tuple[Lie, str]] = {
    "no JSON": (lambda d: replace_fields(d, header="{"), "the message is no valid Answer"),
    "nothing": (lambda d: replace_fields(d, header="", payload=b""), "the message is no valid Answer"),
    "other fields": (
        lambda d: replace_fields(d, header='{"a\\n": 1}'),
        "the message is no valid Answer: client: ",
    ),
    "another round": (lambda d: replace_fields(d, round=1), r"it answers \(1, '[0-9a-f]{16}', 1\) and not"),
    "another run": (lambda d: replace_fields(d, run="x"), r"it answers \(1, 'x', 0\) and not"),
    "another client": (lambda d: replace_fields(d, client=0), r"it answers \(0, '[0-9a-f]{16}', 0\) and not"),
    "giant words": (
        lambda d: replace_fields(d, problem="x" * (1 << 20)),
        "its header takes more than 1048576 bytes",
    ),
    "fewer steps than none": (lambda d: replace_fields(d, steps=-1), STEPS),
    "endless steps": (lambda d: replace_fields(d, steps=10**4000), STEPS),
    "one step more": (lambda d: replace_fields(d, steps=Answer.from_json(d.header).steps + 1), STEPS),
    "fewer operations": (lambda d: replace_fields(d, flops=-1), FLOPS),
    "endless operations": (lambda d: replace_fields(d, flops=10**31), FLOPS),
    "10^15 operations": (lambda d: replace_fields(d, flops=10**15), FLOPS),
    "a loss that is NaN": (lambda d: replace_fields(d, losses={"local": math.nan}), LOSSES),
    "a loss without end": (lambda d: replace_fields(d, losses={"local": -math.inf}), LOSSES),
    "a pass that is none": (lambda d: replace_fields(d, losses={"a\nb": 1.0}), LOSSES),
    "no series": (evaluation(accuracy={}, loss={}, parameters={}), EVALUATION),
    "more than all right": (evaluation(accuracy={"personal": {"val": 0.5, "test": 1.1}}), EVALUATION),
    "right by NaN": (evaluation(accuracy={"personal": {"val": 0.5, "test": math.nan}}), EVALUATION),
    "no test": (evaluation(loss={"personal": {"val": 0.5}}), EVALUATION),
    "two kinds of series": (evaluation(loss=half("other")), EVALUATION),
    "sizes of nothing": (evaluation(parameters={}), EVALUATION),
    "a model of less than nothing": (evaluation(parameters={"personal": {"": -1}}), EVALUATION),
    "a model without end": (evaluation(parameters={"personal": {"": 10**9}}), EVALUATION),
    "a route beyond": (evaluation(route={"0": {"": 0.5}, "1": {"": 1.5}}), EVALUATION),
}
BODIES: dict[str, tuple[Lie, str]] = {
    "no tree": (lambda d: replace_fields(d, payload=b"upload"), "its header has [0-9]+ bytes, where about"),
    "empty": (lambda d: replace_fields(d, payload=b""), "was refused: these 0 bytes are"),
    "a NaN": (upload(lambda u: tree.map_leaves(lambda t: t * math.nan, u)), "it holds a NaN or an infinity"),
    "an infinity": (
        upload(lambda u: tree.map_leaves(lambda t: t + math.inf, u)),
        "it holds a NaN or an infinity",
    ),
    "another shape": (upload(lambda u: tree.map_leaves(lambda t: t[..., :1], u)), "expected float32"),
    "more": (upload(lambda u: {"model": u, "more": u}), "was refused: expected a Controlled"),
    "large": (lambda d: replace_fields(d, payload=d.payload + bytes(1 << 17)), "bytes; at most"),
}


@pytest.mark.few(11)
@pytest.mark.parametrize("lie", [*WORDS, *BODIES])
def test_an_answer_that_cannot_be_is_refused_with_the_reason(lie: str) -> None:
    change, text = {**WORDS, **BODIES}[lie]
    _, _, kept = stage()
    told = change(kept[101][1])
    why, counts = judged(told.header, told.payload)
    assert re.search(text, why)
    assert why.startswith("the reply of client 1 was refused")
    assert counts == {1: 1}


@pytest.mark.full
@pytest.mark.parametrize("lie", ["a loss that is NaN", "no series", "a NaN", "large"])
def test_the_round_goes_on_and_the_liar_takes_part_in_the_next(lie: str, tmp_path: Path) -> None:
    change, _ = {**WORDS, **BODIES}[lie]
    made = small("scaffold")
    carrier, result = run_whole(
        made, tmp_path, fault_in_round(2, 1, lambda there, message: [change(there.answered(message))])
    )
    assert lost(result) == [set(), {1}, set()]
    # nothing of a refused reply is kept, also where its header was valid
    assert assert_equals_sequential_run(result, carrier, made) == {(1, 1)}
    assert json.loads((tmp_path / "run" / "network.json").read_text())["refused"] == {"1": 1}


DIVERGED: dict[str, Lie] = {
    "an update": BODIES["a NaN"][0],
    "a loss": WORDS["a loss that is NaN"][0],
    "training": lambda d: replace_fields(
        d, payload=b"", problem="the loss is not finite", kind="training", steps=0, flops=0, losses={}
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("what", [*DIVERGED, "nothing", "steps"])
def test_a_client_whose_numbers_are_not_finite_is_named_once(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a simulation; a reply that is lost or refused for another reason is no divergence."""
    change = {**DIVERGED, "nothing": WORDS["nothing"][0], "steps": WORDS["one step more"][0]}[what]
    made = small("fedavg", rounds=2)
    fault = fault_on_orders(
        lambda there, message, t, client: [change(there.answered(message))] if client == 1 and t < 3 else None
    )
    with caplog.at_level("WARNING"):
        _, result = run_whole(made, tmp_path, fault)
    assert lost(result) == [{1}, {1}]
    named = [r.getMessage() for r in caplog.records if "is left out" in r.getMessage()]
    assert [text.startswith("client 1 (") for text in named] == [True] * (what in DIVERGED)


@pytest.mark.full
def test_keys_in_another_order_change_nothing(tmp_path: Path) -> None:
    made = small("fedavg")
    backwards = upload(lambda u: dict(reversed(u.items())))
    carrier, result = run_whole(made, tmp_path, fault_in_round(1, 0, lambda t, p: [backwards(t.answered(p))]))
    assert lost(result) == [set()] * 3
    # the server's state as well, whose bytes tell the order of keys
    assert assert_equals_sequential_run(result, carrier, made) == set()


@pytest.mark.full
def test_a_problem_is_told_in_one_short_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = small("scaffold")
    problem = "\x1b[2J\n12:00:00 finished\n" * 99
    there = fault_in_round(
        2, 1, lambda there, message: [replace_fields(there.answered(message), problem=problem, kind="disk")]
    )
    carrier, result = run_whole(made, tmp_path, there)
    assert all(line.isprintable() and len(line) < 700 for line in caplog.messages)
    assert assert_equals_sequential_run(result, carrier, made) == find_missed_rounds(result) == {(1, 1)}
    assert json.loads((tmp_path / "run" / "network.json").read_text())["refused"] == {}


@pytest.mark.few(1)
@pytest.mark.parametrize("client", [0, 2])
def test_whoever_measures_other_things_is_left_out_of_the_table(
    client: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = small("floral", defaults={"clusters": 2})
    strange = evaluation(accuracy=half("x"), loss=half("x"), parameters={"x": {"": 3}})
    routed = evaluation(route={"0": {"": 1.0}})
    for i, lie in enumerate((strange, routed)):
        fault = fault_in_round(2, client, lambda there, message, lie=lie: [lie(there.answered(message))])  # type: ignore[misc]
        carrier = local(made, tmp_path / str(i), fault)
        caplog.clear()
        result = serve_run(carrier, made, tmp_path / str(i) / "run")
        assert assert_equals_sequential_run(result, carrier, made) == {(1, client)}
        assert lost(result) == [set()] * 3
        assert count_logged(caplog, f"client {client} measures other things than most clients") == 1
        # the table of shares has no rounds in which a client is missing
        assert 1 not in result.measurements.routes()
        assert 2 in result.measurements.routes()


@pytest.mark.full
def test_an_evaluation_that_nobody_asked_for_is_not_taken(tmp_path: Path) -> None:
    made = small("scaffold", rounds=4, run={"evaluate_every": 4})
    actual = make_client_table({"accuracy": {"personal": {"val": [0.5], "test": [0.5]}}})
    carrier, result = run_whole(
        made, tmp_path, fault_in_round(3, 1, lambda t, p: [replace_fields(t.answered(p), evaluation=actual)])
    )
    assert assert_equals_sequential_run(result, carrier, made) == set()
    assert [r.is_evaluated for r in result.rounds] == [True, True, False, False, True]


# -- who lies too often


@fault_on_orders
def liar(carrier: LocalTransport, message: NodeMessage, t: int, client: int) -> Any:
    actual = carrier.answered(message)
    return [replace_fields(actual, payload=b"lies") if client == 1 and actual.payload else actual]


@pytest.mark.full
def test_a_client_with_too_many_refusals_is_blocked_also_after_a_restart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = small("scaffold", rounds=5, network={"limits": {"ban_after": 2}})
    carrier = local(made, tmp_path, liar)

    def act(there: LocalTransport, message: NodeMessage, *at: int) -> Any:
        if at == (4, 2):
            raise Killed
        return liar(there, message)

    carrier.fault = fault_on_orders(act)
    with pytest.raises(Killed):
        serve_run(carrier, made, tmp_path / "run")
    assert "client 1 is on the blocklist: 2 of its replies were refused" in caplog.messages
    carrier.fault = liar
    result = serve_run(carrier, made, tmp_path / "run", resume=True)
    assert lost(result) == [{1}] * 5
    assert ["is on the blocklist" in r.lost["1"] for r in result.rounds[1:]] == [
        False,
        False,
        True,
        True,
        True,
    ]
    # it was sent nothing more, not even that the run is over
    assert [o.round for c, o in carrier.orders() if c == 1] == [0, 1]
    assert assert_equals_sequential_run(result, carrier, made) == {(t, 1) for t in range(6)}


def test_a_run_with_only_blocked_clients_ends_at_once(tmp_path: Path) -> None:
    made = small("scaffold", rounds=4, network={"limits": {"ban_after": 1}})
    everyone = local(made, tmp_path, lambda t, p: [d if p.kind == "registration" else replace_fields(d, payload=b"")]
                     if (d := t.answered(p)) else [])  # fmt: skip
    with pytest.raises(
        NetworkError,
        match="client 0 is on the blocklist: 1 of its replies were refused; client 1 is on the blocklist",
    ):
        serve_run(everyone, made, tmp_path / "run")
    assert len(everyone.orders()) == 3
    assert everyone.clock.now == 0


def test_a_reply_that_the_method_cannot_use_is_dropped_named_and_counted(tmp_path: Path) -> None:
    made = small("scaffold", rounds=3, network={"limits": {"ban_after": 2}})
    odd = upload(lambda u: tree.map_leaves(lambda t: torch.full_like(t, 0.0625), u))
    carrier = local(
        made, tmp_path, lambda t, p: [odd(t.answered(p)) if trains(p) and p.node == 101 else t.answered(p)]
    )
    contribution = SCAFFOLD.contribution

    def picky(self: Any, server: Any, upload: Any, client: Any) -> Any:
        if any(bool((t == 0.0625).any()) for _, t in tree.leaves(upload)):
            raise ArithmeticError("odd")
        return contribution(self, server, upload, client)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SCAFFOLD, "contribution", picky)
        result = serve_run(carrier, made, tmp_path / "run")
    assert lost(result) == [{1}] * 3
    assert "cannot use the reply of client 1: ArithmeticError: odd" in result.rounds[1].lost["1"]
    assert "is on the blocklist" in result.rounds[3].lost["1"]
    assert assert_equals_sequential_run(result, carrier, made) == {(t, 1) for t in range(4)}


def trains(message: NodeMessage) -> bool:
    return message.kind == "order" and Order.from_json(message.header).train


# -- anything at all


@functools.cache
def stage() -> tuple[ExperimentConfig, str, dict[int, list[Response]]]:
    """What three clients honestly say in the first round."""
    made, kept = small("scaffold", rounds=2), dict[int, list[Response]]()

    def fault(carrier: LocalTransport, message: NodeMessage) -> Any:
        actual = carrier.answered(message)
        kept.setdefault(message.node, []).append(actual)
        return [actual]

    with TemporaryDirectory() as base:
        result = serve_run(local(made, Path(base), fault), made, Path(base) / "run")
        engine: Any = result.run.engine
    return made, engine.account.run, kept


@dataclasses.dataclass
class Stub:
    """Hands out what it is given."""

    given: list[Response]

    def nodes(self) -> set[int]:
        return {100, 101, 102}

    def send(self, messages: Any, group: str, seconds: float) -> None:
        self.asked = {p.node for p in messages}

    def receive(self) -> list[Response]:
        actual, self.given = [d for d in self.given if d.node in self.asked], []
        return actual

    def cancel_orders(self) -> None:
        pass


@functools.cache
def world() -> tuple[Any, Any]:
    made, _, kept = stage()
    registry = admitted(made, kept)
    honest = Run(made.build_method("scaffold"), made.federation(), made.run, Sequential())
    honest.step(lost_replies={"1": "refused"})
    return registry.build_federation(), honest.state.server


def admitted(made: ExperimentConfig, kept: dict[int, list[Response]]) -> ClientRegistry:
    registry = ClientRegistry(made, 3)
    for node in (100, 101, 102):
        registry.register(kept[node][0], {100, 101, 102})
    registry.fix_form({100, 101, 102})
    return registry


def judged(header: str, payload: bytes) -> tuple[str, dict[int, int]]:
    """Why client 1's reply was lost, if it was; whatever it is, the round ends well and its record can be written."""
    made, run_id, kept = stage()
    federation, without = world()
    given = [kept[100][1], Response(101, "order", header, payload), kept[102][1]]
    engine = NetworkEngine(
        transport=Stub(given),
        registry=admitted(made, kept),
        settings=NetworkSettings(),
        account=Account(run_id),
    )
    run = NetworkRun(made.build_method("scaffold"), federation, made.run, engine)
    with log_lines() as lines:
        before = run.record_initial_models()
        record = run.step()
        actual = run.take_late_evaluation()
    assert actual is not None
    for r in (record, dataclasses.replace(before, measured=actual)):
        assert RoundRecord.from_line(r.to_line()).untimed() == r.untimed() or "NaN" in r.to_line()
        assert all(math.isfinite(x) for x in (*r.training_losses.values(), float(r.steps), float(r.flops)))
        assert all(line.isprintable() and len(line) < 1200 for line in (*lines, *r.lost.values()))
    assert tree.not_finite(run.state.server) is None
    assert set(record.lost) <= {"1"}
    if record.lost:
        assert tree.equal(run.state.server, without)
        assert run.state.clients == {0: {"stamp": 1}, 2: {"stamp": 1}}
    assert engine.blocklist.counts.keys() <= {1}
    return record.lost.get("1", ""), engine.blocklist.counts


values = st.recursive(
    PLAIN,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=9,
)


def test_what_is_honest_is_taken() -> None:
    _, _, kept = stage()
    assert judged(kept[101][1].header, kept[101][1].payload) == ("", {})


@pytest.mark.full
@fuzz(60)
@given(st.text(max_size=40), st.binary(max_size=60))
def test_any_header_and_any_payload(header: str, payload: bytes) -> None:
    _, _, kept = stage()
    assert judged(header, kept[101][1].payload)[0]
    assert judged(kept[101][1].header, payload)[0]


@pytest.mark.full
@fuzz(60)
@given(st.sampled_from([f.name for f in dataclasses.fields(Answer)]), values)
def test_an_answer_with_any_field(name: str, value: Any) -> None:
    _, _, kept = stage()
    judged(json.dumps({**json.loads(kept[101][1].header), name: value}), kept[101][1].payload)


@pytest.mark.full
@fuzz(60)
@given(
    st.sampled_from(["clients", "columns", "name", "series", "split", "values", "value", "more"]),
    st.integers(0, 4),
    values,
)
def test_an_answer_with_any_evaluation(field: str, place: int, value: Any) -> None:
    _, _, kept = stage()
    header = json.loads(kept[101][1].header)
    held = header["evaluation"]
    column = held["columns"][place]
    if field in held:
        held[field] = value
    elif field == "value":
        column["values"][0] = value
    elif field == "more":
        held["columns"].append({**column, "series": value})
    else:
        column[field] = value
    judged(json.dumps(header), kept[101][1].payload)


@pytest.mark.full
@fuzz(60)
@given(st.floats(width=32), st.sampled_from(["model", "control"]))
def test_an_upload_of_any_number(number: float, where: str) -> None:
    _, _, kept = stage()
    held = tree.decode(kept[101][1].payload)
    odd = dataclasses.replace(
        held, **{where: tree.map_leaves(lambda t: torch.full_like(t, number), getattr(held, where))}
    )
    why, counts = judged(kept[101][1].header, tree.encode(odd))
    # the bound on norms lies in between; a reply that only it refuses does not count towards a ban
    size = abs(number) if math.isfinite(number) else math.inf
    assert why == "" if size < 1e-3 else why != "" if size > 1e2 else True
    assert counts == ({1: 1} if size == math.inf else {})
