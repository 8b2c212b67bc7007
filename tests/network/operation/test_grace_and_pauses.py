"""What the server waits for, and when it stops by itself: grace for slow clients, and a fall of validation."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch

from fedlowrank.cli.main import main
from fedlowrank.config.sections.network_section import NetworkSettings
from fedlowrank.core.errors import ConfigError
from fedlowrank.network.operation.activity import UpdateShape
from fedlowrank.network.operation.grace import Grace
from fedlowrank.network.operation.validation_decline import (
    Fall,
    PausedError,
    describe_fall,
    find_fall,
    find_suspects,
    find_worst_shapes,
)
from fedlowrank.network.persistence.account import Account
from fedlowrank.network.transport import NodeMessage
from fedlowrank.network.validation.directions import compute_cosines
from fedlowrank.results.records import RoundRecord
from fedlowrank.storage import checkpoint
from tests.network.lying_clients import LIAR, average_honest_accuracy, make_liar
from tests.support.client_tables import make_client_table
from tests.support.local_network import (
    LocalTransport,
    fault_on_orders,
    intact,
    local,
    lost,
    run_whole,
    serve_run,
    small,
)

# -- grace


def test_a_slow_client_costs_some_medians_and_not_the_deadline(tmp_path: Path) -> None:
    made = small("fedavg", 3, rounds=3, network={"deadline": 3600.0, "grace": 4.0, "silent_after": 0})

    def act(carrier: LocalTransport, message: NodeMessage, t: int, client: int) -> Any:
        # usual replies take 50 s; client 1 takes half an hour from the second round on
        return [(1800.0 if client == 1 and t in (2, 3) else 50.0, carrier.answered(message))]

    carrier, result = run_whole(made, tmp_path, fault_on_orders(act))
    assert lost(result) == [set(), {1}, {1}]
    # without it: 50 + 2 * 1800 + 50 s
    assert carrier.clock.now == pytest.approx(50 + 2 * 4 * 50 + 50, abs=12)
    assert "client 1 did not reply within 20" in result.rounds[2].lost["1"]
    assert "(network.grace)" in result.rounds[2].lost["1"]


@pytest.mark.parametrize(
    ("network", "seconds"),
    [
        ({"grace": 0.0}, 50 + 1000 + 50),
        ({"min_replies": 3, "attempts": 1}, 50 + 1000 + 50),
        ({}, 50 + 250 + 50),
    ],
)
def test_grace_begins_once_there_are_enough_replies(
    network: dict[str, Any], seconds: float, tmp_path: Path
) -> None:
    made = small("fedavg", 3, rounds=2, network={"deadline": 3600.0, **network})

    def act(carrier: LocalTransport, message: NodeMessage, t: int, client: int) -> Any:
        return [(1000.0 if client == 1 and t == 2 else 50.0, carrier.answered(message))]

    carrier, result = run_whole(made, tmp_path, fault_on_orders(act))
    assert carrier.clock.now == pytest.approx(seconds, abs=20)
    assert lost(result) == [set(), {1} if seconds < 1000 else set()]


def test_the_times_of_replies_are_known_after_a_restart_and_the_last_round_waits_for_all(
    tmp_path: Path,
) -> None:
    grace = Grace(5.0)
    assert grace.limit(3600) == 3600
    for seconds in (10, 30, 200, 40, 20):
        grace.add(seconds)
    assert grace.limit(3600) == 5 * median([10, 30, 200, 40, 20])
    assert grace.limit(100) == 100
    assert Grace(5.0, [0.1]).limit(3600) == 60
    assert Grace(0.0, [0.1]).limit(3600) == 3600
    made = small("fedavg", 3, rounds=1, network={"deadline": 3600.0})

    def act(carrier: LocalTransport, message: NodeMessage, t: int, client: int) -> Any:
        # the client writes its model when it is told that the run is over
        return [(900.0 if client == 1 and t == 2 else 40.0, carrier.answered(message))]

    carrier, _ = run_whole(made, tmp_path, fault_on_orders(act))
    assert carrier.clock.now == pytest.approx(40 + 900, abs=20)
    assert Account.read(tmp_path / "run").seconds == pytest.approx([40.0] * 3, abs=3)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"grace": 0.5}, "network.grace must be >= 1, or 0 for the whole deadline; it is 0.5"),
        ({"max_fall": 1.5}, r"network.max_fall is a share in \[0, 1\], 0 for never; it is 1.5"),
        ({"max_fall": float("nan")}, "network.max_fall is a share"),
    ],
)
def test_impossible_settings(fields: dict[str, float], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        NetworkSettings(**fields)  # type: ignore[arg-type]


# -- directions


def test_cosines_are_those_with_the_mean_of_the_others_at_unit_length() -> None:
    rng = np.random.default_rng(0)
    flat = {i: rng.normal(size=12) + 2 for i in range(5)}
    flat[3] *= -50
    flat[4] *= 0

    def update(client: int) -> Any:
        x = torch.from_numpy(flat[client])
        return {("/a", (2, 3)): x[:6], ("/b", (6,)): x[6:]}

    actual = compute_cosines(update, [*flat])
    unit = {i: x / np.linalg.norm(x) for i, x in flat.items() if i != 4}
    for i, x in unit.items():
        mean = sum(other for j, other in unit.items() if j != i)
        assert actual[i] == pytest.approx(float(x @ mean / np.linalg.norm(mean)))
    assert actual[4] is None
    assert [i for i in actual if (actual[i] or 0) < 0] == [3]


def test_tensors_of_other_shapes_are_compared_with_those_that_others_have() -> None:
    parts = {
        0: {("/a", (2,)): torch.tensor([1.0, 2.0]), ("/own", (1,)): torch.tensor([3.0])},
        1: {("/a", (2,)): torch.tensor([2.0, 1.0])},
        2: {("/b", (1,)): torch.tensor([1.0])},
    }
    actual = compute_cosines(lambda i: {k: t.double() for k, t in parts[i].items()}, [0, 1, 2])
    assert actual[0] == pytest.approx(4 / (14**0.5 * 5**0.5))
    assert actual[1] == pytest.approx(4 / (5**0.5 * 5**0.5))
    assert actual[2] is None


# -- a fall of validation


def record(t: int, *values: float | None, loss: bool = False) -> RoundRecord:
    none = [None] * len(values)
    table: Any = {"personal": {"val": [*values], "test": none}}
    empty: Any = {"personal": {"val": none, "test": none}}
    tables = {"accuracy": empty if loss else table, "loss": table if loss else empty}
    return RoundRecord(round=t, measured=make_client_table(tables))


def test_when_validation_has_fallen() -> None:
    up = [record(0, 0.1, 0.1, 0.2), record(1, 0.5, 0.6, 0.7), RoundRecord(round=2)]
    assert find_fall(up, 0, 0.2) is None
    fallen = [*up, record(3, 0.2, 0.3, 0.7)]
    actual = find_fall(fallen, 0, 0.2)
    assert actual is not None
    assert (actual.round, actual.best, actual.amount) == (3, 1, pytest.approx(0.3))
    assert find_fall(fallen, 0, 0.0) is None
    assert find_fall(fallen, 0, 0.31) is None
    # accepted by a person, and compared from then on
    assert find_fall(fallen, 3, 0.2) is None
    # one of three can neither feign a fall nor hide it
    assert find_fall([*up, record(3, 0.0, 0.6, 0.7)], 0, 0.2) is None
    assert find_fall([*up, record(3, 1.0, 0.3, 0.2)], 0, 0.2) is not None
    # who was not evaluated in both rounds is not compared
    assert find_fall([*up, record(3, None, None, 0.7)], 0, 0.2) is None
    assert find_fall([*up, record(3, None, None, None)], 0, 0.2) is None
    assert find_fall([record(0, 0.1)], 0, 0.2) is None
    # of a regression the loss is compared, relative to the loss before training
    losses = [record(0, 4.0, 4.0, loss=True), record(1, 1.0, 2.0, loss=True)]
    assert find_fall([*losses, record(2, 1.7, 2.7, loss=True)], 0, 0.2) is None
    assert find_fall([*losses, record(2, 2.0, 3.0, loss=True)], 0, 0.2) is not None
    assert find_fall([*losses, record(2, float("nan"), float("nan"), loss=True)], 0, 0.2) is not None


def test_who_is_named_is_a_minority() -> None:
    def shapes(*pairs: tuple[float, float | None]) -> Any:
        return {7: {i: UpdateShape(length, cosine) for i, (length, cosine) in enumerate(pairs)}}

    honest = (1.0, 0.6)
    assert [*find_suspects(shapes(honest, honest, (5.0, -0.9), honest, (1.0, -0.1)), [7], 3.0)] == [2, 4]
    assert [*find_suspects(shapes(honest, honest, (5.0, 0.9), honest, honest), [7], 3.0)] == [2]
    assert find_suspects(shapes(honest, (1.0, 0.2), honest), [6, 7], 3.0) == {}
    assert find_suspects(shapes(honest, (5.0, None), honest), [6, 7], 0.0) == {}
    assert [*find_worst_shapes(shapes(honest, (1.0, 0.2), (2.0, 0.2)), [6, 7])] == [2, 1, 0]
    assert [*find_suspects(shapes((1.0, -0.2), (1.0, -0.5), (1.0, -0.3)), [7], 3.0)] == [1]
    assert find_suspects(shapes(honest), [7], 3.0) == {}
    # one of one or of two is no minority
    assert find_suspects(shapes((5.0, -0.9)), [7], 3.0) == {}
    assert find_suspects(shapes((5.0, -0.9), honest), [7], 3.0) == {}
    assert find_suspects({}, [7], 3.0) == {}


def test_what_is_said_depends_on_what_is_known_and_kept() -> None:
    odd, usual = UpdateShape(5.0, -0.9), UpdateShape(None, None)
    fall, out = Fall(7, 4, 0.3, {3: 0.5, 4: 0.8, 6: 0.7, 7: 0.5}), Path("runs/a b")
    said = describe_fall(fall, {2: odd, 1: odd}, {}, out, [5, 6, 7, 8])
    assert "client 2: 5 times the usual length, cosine -0.90 with the mean of the others; client 1:" in said
    assert "To go on without them: fedlowrank resume 'runs/a b' --round 6 --without 1 --without 2" in said
    assert "spoiled" not in said
    said = describe_fall(fall, {}, {0: usual}, out, [5, 7, 8])
    assert "No update points away from the others or is long: client 0: of unknown length. " in said
    assert "To go back: fedlowrank resume 'runs/a b' --round 5, then" in said
    assert "The state after round 5 may be spoiled already" in said
    assert "raise run.keep_checkpoints" in describe_fall(fall, {}, {}, out, [7, 8])


def test_a_run_pauses_names_the_liar_and_goes_on_without_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, log = tmp_path / "run", tmp_path / "audit.jsonl"
    made = small(
        "fedavg", 5, 6,
        data={"source": "digits", "normalize": "none"}, model={"hidden": [32]},
        defaults={"epochs": 2, "batch_size": 32, "optimizer": {"lr": 0.2}},
        network={"max_fall": 0.15, "limits": {"update_ratio": 0.0}},
    )  # fmt: skip
    config = {**made.describe("fedavg"), "vary": {}}
    carrier = local(made, tmp_path, make_liar(-9.0, first=4))
    with pytest.raises(PausedError) as caught:
        serve_run(carrier, made, out, audit=log, config=config)
    said = str(caught.value)
    assert f"Updates that stand out: client {LIAR}: " in said
    assert "cosine -0." in said
    assert f"fedlowrank resume {out} --round 3 --without {LIAR}, then serve --resume" in said
    events = [json.loads(line) for line in log.read_text().splitlines()]
    (paused,) = (e for e in events if e["event"] == "paused")
    assert f"client {LIAR}: " in paused["why"]
    assert main(["status", str(out)]) == 0
    assert f"is paused: {said.removeprefix('paused: ')}" in capsys.readouterr().out
    assert checkpoint.rounds_kept(out / "checkpoint")[-1] == 5
    assert main(["resume", str(out), "--round", "3", "--without", str(LIAR)]) == 0
    result = serve_run(carrier, made, out, resume=True, config=config)
    assert lost(result) == [set()] * 3 + [{LIAR}] * 3
    assert average_honest_accuracy(result) > 0.8
    assert Account.read(out).paused == ""


@pytest.mark.full
def test_a_fall_can_be_accepted_or_not_looked_for(tmp_path: Path) -> None:
    network = {"max_fall": 0.05, "limits": {"update_ratio": 0.0}}
    made = small("fedavg", 5, 5, defaults={"optimizer": {"lr": 0.2}}, network=network)
    carrier = local(made, tmp_path, make_liar(-9.0, first=3))
    with pytest.raises(PausedError):
        serve_run(carrier, made, tmp_path / "run")
    done = served_to_the_end(carrier, made, tmp_path / "run")
    assert done.rounds[-1].round == 5
    off = small("fedavg", 5, 5, defaults={"optimizer": {"lr": 0.2}}, network={**network, "max_fall": 0.0})
    assert (
        lost(serve_run(local(off, tmp_path / "off", make_liar(-9.0, first=3)), off, tmp_path / "off" / "run"))
        == [set()] * 5
    )
    private = small(
        "fedavg", 5, 5, defaults={"optimizer": {"lr": 0.2}}, network=network,
        run={"privacy": {"kind": "central", "noise": 9.0, "delta": 1e-3}, "clipping": {"norm": 1.0}},
    )  # fmt: skip
    # clients send no evaluations, so no fall is seen
    carrier, result = run_whole(private, tmp_path / "private", intact)
    assert len(result.rounds) == 6


def served_to_the_end(carrier: LocalTransport, made: Any, out: Path) -> Any:
    """Accept every fall."""
    for _ in range(5):
        try:
            return serve_run(carrier, made, out, resume=True)
        except PausedError:
            continue
    raise AssertionError("it paused again and again")
