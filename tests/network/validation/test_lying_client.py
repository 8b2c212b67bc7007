"""One liar of five: what it can do to the model by default, with updates of the wrong sign and a wrong n_k."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch

from fedlowrank.adapters.wire_format import pack_factors, unpack_factors
from fedlowrank.core import tree
from fedlowrank.linalg.pair import Pair
from fedlowrank.network.transport import NodeMessage, Response
from fedlowrank.network.validation.norm_clipping import shorten_upload
from fedlowrank.network.validation.norms import PRODUCTS_SUFFIX, NormBound, measure_norms
from fedlowrank.rounds.outcome.result import Result
from tests.network.lying_clients import LIAR, average_honest_accuracy, make_liar
from tests.support.local_network import (
    Fault,
    LocalTransport,
    assert_equals_sequential_run,
    count_logged,
    fault_in_round,
    intact,
    local,
    lost,
    replace_fields,
    run_whole,
    serve_run,
    small,
)


def five(tmp_path: Path, fault: Fault = intact, rounds: int = 10, **network: Any) -> Result:
    """FedAvg of five clients on handwritten digits."""
    made = small(
        "fedavg", 5, rounds,
        data={"source": "digits", "normalize": "none"}, model={"hidden": [32]},
        defaults={"epochs": 2, "batch_size": 32, "optimizer": {"lr": 0.2}}, network={"limits": {"update_ratio": 3.0}, **network},
    )  # fmt: skip
    return serve_run(local(made, tmp_path, fault), made, tmp_path / "run")


@functools.cache
def honest_accuracy() -> float:
    with TemporaryDirectory() as base:
        return average_honest_accuracy(five(Path(base)))


@pytest.mark.few(1)
@pytest.mark.parametrize("lie", [{"times": -5.0}, {"examples": 10**6}, {"times": -5.0, "examples": 10**6}])
def test_one_liar_of_five_does_not_take_the_model(lie: dict[str, Any], tmp_path: Path) -> None:
    """Without the bounds: 0.08, 0.91 and 0.08 of 0.94 on the honest clients' test examples."""
    result = five(tmp_path, make_liar(**lie))
    assert lost(result) == [set()] * 10
    assert average_honest_accuracy(result) > honest_accuracy() - 0.1


@pytest.mark.full
def test_a_liar_within_the_bounds_slows_the_run_and_does_not_turn_it_back(tmp_path: Path) -> None:
    result = five(tmp_path, make_liar(-2.9, 10**6), max_fall=0.0)
    # 0.08 without the bounds; at most 3 of 7 parts of the mean point backwards
    assert average_honest_accuracy(result) > 0.25


def test_a_long_update_is_shortened_and_a_persistent_one_is_held_to_the_median(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = tmp_path / "audit.jsonl"
    made, uploads = small("fedavg", 5, 5, network={"limits": {"update_ratio": 3.0}}), dict[int, list[Any]]()
    lie = make_liar(-20.0)

    def watched(carrier: LocalTransport, message: NodeMessage) -> Any:
        actual = lie(carrier, message)
        if isinstance(actual[0], Response) and actual[0].payload and message.kind == "order":
            t = json.loads(message.header)["round"]
            uploads.setdefault(t, []).append((message.node, flat(message.payload), flat(actual[0].payload)))
        return actual

    result = serve_run(local(made, tmp_path, watched), made, tmp_path / "run", audit=log)
    sizes = {100 + i: len(d.train) for i, d in enumerate(made.shares().data)}
    total, middle, medians = sum(sizes.values()), sorted(sizes.values())[2], list[float]()
    for t, replies in sorted(uploads.items()):
        norms = {node: float(np.linalg.norm(up - down)) for node, down, up in replies}
        medians.append(sorted(norms.values())[2])
        usual = max(medians[-1], sorted(medians[:-1])[(len(medians) - 2) // 2] if t else 0.0)
        # its strikes are of rounds 1 to 3
        bound = {n: usual * (1 if t >= 3 and n == 100 + LIAR else 3) for n in norms}
        factors = {n: min(1.0, bound[n] * min(1.0, middle / sizes[n]) / size) for n, size in norms.items()}
        kept = result.rounds[t + 1].server_metrics["shortened"]
        assert kept[str(LIAR)] == pytest.approx(factors[100 + LIAR], rel=1e-3)
        expected = (
            sum(sizes[node] * (down + factors[node] * (up - down)) for node, down, up in replies) / total
        )
        if t + 1 in uploads:
            np.testing.assert_allclose(uploads[t + 1][0][1], expected, atol=1e-6)
    assert count_logged(caplog, f"round 1: the update of client {LIAR} is") == 1
    assert count_logged(caplog, f"client {LIAR} is held to the usual norm: 3 of its last updates") == 1
    events = [json.loads(line) for line in log.read_text().splitlines()]
    assert [e["round"] for e in events if e["event"] == "shortened" and e["client"] == LIAR] == [
        1,
        2,
        3,
        4,
        5,
    ]


def flat(payload: bytes) -> Any:
    return np.concatenate(
        [t.double().flatten().numpy() for _, t in sorted(tree.leaves(tree.decode(payload)))]
    )


def test_honest_updates_are_used_as_they_are(tmp_path: Path) -> None:
    made = small("fedavg", 5, 3, network={"limits": {"update_ratio": 3.0}})
    carrier, result = run_whole(made, tmp_path)
    assert assert_equals_sequential_run(result, carrier, made) == set()
    assert all("shortened" not in r.server_metrics for r in result.rounds)


def test_a_count_of_examples_that_was_not_promised_does_not_lengthen_an_update(tmp_path: Path) -> None:
    """Its steps would: with 2^40 examples, 10^10 times the usual norm had been within the bound."""
    for times, examples in ((1e4, 2**40), (200.0, 10**6)):
        result = five(tmp_path / str(times), make_liar(times, examples), rounds=1)
        assert lost(result) == [{LIAR}]


def pairs(seed: int, times: float = 1.0) -> dict[str, Pair]:
    generator = torch.Generator().manual_seed(seed)
    return {n: Pair(times * torch.randn(5, 2, generator=generator), torch.randn(2, 4, generator=generator))
            for n in ("a", "b")}  # fmt: skip


def dense(value: dict[str, Pair]) -> Any:
    return np.concatenate([(p.b.double() @ p.a.double()).flatten().numpy() for p in value.values()])


def test_products_of_factors_are_measured_and_shortened() -> None:
    down = pairs(0)
    # A is as usual and B is short, so that most numbers of an update five times as long are usual
    up = {n: Pair(p.b + 0.01 * q.b, p.a) for (n, p), q in zip(down.items(), pairs(1).values(), strict=True)}
    fresh = pairs(2, 0.01)
    actual, alone = measure_norms(up, down), measure_norms(fresh, None)
    assert actual[PRODUCTS_SUFFIX].change == pytest.approx(np.linalg.norm(dense(up) - dense(down)), rel=1e-6)
    assert actual[PRODUCTS_SUFFIX].norm == pytest.approx(np.linalg.norm(dense(up)), rel=1e-6)
    assert alone[PRODUCTS_SUFFIX].norm == pytest.approx(np.linalg.norm(dense(fresh)), rel=1e-6)
    lie = {n: Pair(-5 * p.b, p.a) for n, p in fresh.items()}
    assert measure_norms(lie, None)[""].norm < 1.1 * alone[""].norm
    replies = {i: measure_norms(lie if i == 3 else fresh, None) for i in range(5)}
    bound, ones = NormBound(30.0), dict.fromkeys(range(5), 1.0)
    ((client, how),) = bound.plan_shortenings(replies, dict.fromkeys(range(5), 3.0), ones, 3.0, 0).items()
    assert (client, how.is_strike) == (3, True)
    assert how.length == pytest.approx(5, rel=1e-3)
    short = shorten_upload(lie, None, how.bounds)
    assert np.linalg.norm(dense(short)) == pytest.approx(3 * np.linalg.norm(dense(fresh)), rel=1e-5)
    # a change of products moves on the line of the factors
    far = {
        n: Pair(p.b + 9 * q.b, p.a + q.a) for (n, p), q in zip(down.items(), pairs(1).values(), strict=True)
    }
    limit = 0.3 * float(np.linalg.norm(dense(far) - dense(down)))
    moved = shorten_upload(far, down, {PRODUCTS_SUFFIX: (limit, True)})
    assert np.linalg.norm(dense(moved) - dense(down)) == pytest.approx(limit, rel=1e-5)
    t = ((moved["a"].a - down["a"].a) / (far["a"].a - down["a"].a)).mean()
    assert torch.allclose(moved["b"].b, down["b"].b + t * (far["b"].b - down["b"].b), atol=1e-4)


@pytest.mark.parametrize("wire", ["int8", "bfloat16"])
def test_factors_on_a_lossy_wire_are_measured_as_they_are_received(wire: Any) -> None:
    given = pairs(4)
    packed = pack_factors(given, wire)
    received = unpack_factors(packed)
    assert measure_norms(packed, None)[""].norm == pytest.approx(
        math.sqrt(sum(float(t.double().square().sum()) for p in received.values() for t in (p.b, p.a))),
        rel=1e-6,
    )
    short = shorten_upload(packed, None, {"": (1.0, False)})
    assert measure_norms(short, None)[""].norm == pytest.approx(1.0, rel=1e-5)
    assert torch.allclose(
        short["a"].b, received["a"].b * (short["a"].b[0, 0] / received["a"].b[0, 0]), rtol=1e-4
    )


def test_a_compressed_update_is_shortened_too(tmp_path: Path) -> None:
    made = small(
        "fedavg", 5, 1, run={"compression": {"uplink": "int8"}}, network={"limits": {"update_ratio": 3.0}}
    )

    def fault(carrier: LocalTransport, message: NodeMessage) -> Any:
        actual = carrier.answered(message)
        if message.node != 100 + LIAR or not actual.payload or message.kind != "order":
            return [actual]
        # the scales of the rows are its only floating-point numbers
        up = tree.map_leaves(lambda t: -20 * t if t.is_floating_point() else t, tree.decode(actual.payload))
        return [replace_fields(actual, payload=tree.encode(up))]

    result = serve_run(local(made, tmp_path, fault), made, tmp_path / "run")
    assert 0.05 < result.rounds[1].server_metrics["shortened"][str(LIAR)] < 0.5


# -- Krum


@pytest.mark.few(1)
@pytest.mark.parametrize("rule", ["krum", "multi_krum"])
def test_a_refused_reply_counts_as_one_of_the_hostile_ones(rule: str, tmp_path: Path) -> None:
    """f = 1 of 5: with one reply refused, four are left and none of them is assumed hostile; before, 2 f + 3 = 5 replies
    were needed and a refused lie gave rounds without any result."""
    made = small("fedavg", 5, 4, run={"robust": {"rule": rule}}, network={"limits": {"ban_after": 2}})

    def fault(carrier: LocalTransport, message: NodeMessage) -> Any:
        actual = carrier.answered(message)
        bad = message.kind == "order" and message.node == 100 + LIAR and actual.payload
        return [replace_fields(actual, payload=b"lies") if bad else actual]

    result = serve_run(local(made, tmp_path, fault), made, tmp_path / "run")
    # refused in rounds 1 and 2, and on the blocklist from then on
    assert lost(result) == [{LIAR}] * 4
    weights = [r.server_metrics["weight"] for r in result.rounds[1:]]
    assert [sorted(w) for w in weights] == [["0", "1", "2", "4"]] * 4
    assert [sum(w.values()) for w in weights] == [pytest.approx(1.0)] * 4
    if rule == "multi_krum":
        assert all(w == pytest.approx(0.25) for one in weights for w in one.values())


def test_a_client_that_is_only_silent_does_not_count_as_hostile(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = small("fedavg", 5, 1, run={"robust": {"rule": "krum"}})
    _, result = run_whole(made, tmp_path, fault_in_round(1, LIAR, lambda there, message: []))
    assert lost(result) == [{0, 1, 2, 3, 4}]
    assert count_logged(caplog, "krum needs at least 5 replies, and there were 4") >= 1
