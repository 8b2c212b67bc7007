"""FedHL: line 17 and eq. 15 against float64 arithmetic in NumPy, its limit cases, and what it keeps that FlexLoRA loses."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedlowrank.adapters.lora.lora_factors import lora_of
from fedlowrank.adapters.lora.lora_layers import add_lora
from fedlowrank.adapters.wire_format import unpack_factors
from fedlowrank.core.contract import AnyMethod, ServerView
from fedlowrank.core.key import Key
from fedlowrank.core.learning.optimizer import SGD
from fedlowrank.data.federation import Federation
from fedlowrank.engines.engine import Engine
from fedlowrank.engines.sequential import Sequential
from fedlowrank.linalg.delta import DeltaForm, update_deltas
from fedlowrank.linalg.pair import Pair
from fedlowrank.methods.fedhl import FedHL
from fedlowrank.methods.flexlora import FlexLoRA
from fedlowrank.methods.shared.effective_delta import Weighing
from fedlowrank.methods.shared.lora_family import LoRATraining
from fedlowrank.rounds.run import Run
from fedlowrank.rounds.run_settings import RunSettings
from tests.golden import lora_reference as reference
from tests.support.method_calls import Reply, server_update

from .comparisons import assert_nested_close, assert_parameters_close
from .lora_setting import (
    FAST_LOCAL,
    LAYER_NAMES,
    NO_EVALUATION,
    RANKS,
    TRAINING,
    assert_head_equal,
    assert_predictions_equal,
    assert_updates_equal,
    federate_lora,
    get_dense_updates,
    get_tolerance,
    make_reference_setting,
    run_three_rounds,
)
from .run_contents import plan_rounds
from .setting import LOCAL, Net, make_arrays, run_rounds


def test_fedhl(engine: type[Engine]) -> None:
    run = run_three_rounds(FedHL(training=TRAINING, **LOCAL), engine, RANKS)
    ws, net, history = reference.fedhl(make_reference_setting(run))
    assert_updates_equal(run, ws, net, RANKS, get_tolerance(engine))
    actual = run.method.server_metrics(run.state.server)
    ids = list(plan_rounds(run)[-1])
    assert actual["weights"] == pytest.approx(
        {str(k): p for k, p in zip(ids, history[-1][0], strict=True)}, abs=1e-9
    )
    s = make_reference_setting(run)
    w, _, _ = reference.fedhl(dataclasses.replace(s, rounds=s.rounds[:-1]))
    size = sum((x**2).sum() for x in w)
    cut = {str(k): sum(((x - reference.best(x, RANKS[k])) ** 2).sum() for x in w) / size for k in ids}
    assert actual["truncation"] == pytest.approx(cut, abs=1e-9)
    assert actual["energy"] == pytest.approx(
        {n: (x**2).sum() for n, x in zip(LAYER_NAMES, ws, strict=True)}, rel=1e-9
    )
    assert actual["discarded"] == dict.fromkeys(LAYER_NAMES, 0.0)
    # the weights differ, or eq. 15 would not show
    assert np.ptp(history[-1][0]) > 0.01


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "weighing",
    [
        {"error": "absolute"},
        {"error": "squared", "eps": 1e-3},
        {"eps": 0.3},
        {"temperature": 0.0},
        {"temperature": 0.2},
        {"per_layer": True, "temperature": 0.0},
        {"per_layer": True, "error": "squared", "temperature": 0.0},
        {"by_examples": True},
        {"by": "examples"},
        {"by": "ranks"},
        {"by_examples": True, "per_layer": True, "temperature": 0.0, "error": "absolute"},
    ],
    ids=str,
)
def test_weights_of_eq_15(weighing: dict[str, Any]) -> None:
    run = run_three_rounds(
        FedHL(weighing=Weighing(**weighing), training=TRAINING, **LOCAL), Sequential, RANKS
    )
    ws, net, history = reference.fedhl(make_reference_setting(run), **weighing)
    assert_updates_equal(run, ws, net, RANKS, 1e-9)
    # other weights than the default's by far more than the tolerance
    _, _, usual = reference.fedhl(make_reference_setting(run))
    assert np.abs(np.array(history[-1]) - np.array(usual[-1])).max() > 1e-3


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "form",
    [DeltaForm("exact"), DeltaForm("dense"), DeltaForm("capped", cap=12), DeltaForm("auto")],
    ids=lambda f: f.kind,
)
def test_fedhl_with_equal_scales_in_every_form(form: DeltaForm) -> None:
    run = run_three_rounds(FedHL(delta_form=form, training=LoRATraining(rank=2), **LOCAL), Sequential, RANKS)
    ws, net, _ = reference.fedhl(make_reference_setting(run, "equal"))
    assert_updates_equal(run, ws, net, RANKS, 1e-9)


@pytest.mark.few(1)
def test_the_residual_makes_clients_begin_at_w(engine: type[Engine]) -> None:
    run = run_three_rounds(
        FedHL(residual=True, delta_form=DeltaForm("exact"), training=TRAINING, **LOCAL), engine, RANKS
    )
    ws, net, _ = reference.fedhl(make_reference_setting(run), residual=True)
    for n, w in zip(LAYER_NAMES, ws, strict=True):
        assert_nested_close(run.state.server.delta[n].dense(), w, get_tolerance(engine))
    assert_head_equal(run, net, get_tolerance(engine))
    for k in range(4):
        assert_predictions_equal(run, k, reference.added(net, ws), get_tolerance(engine))


FULL_RANKS = (9, 9, 9, 9)


def test_fedhl_at_full_rank_is_flexlora() -> None:
    alike = {"split": "B", **LOCAL}
    a = run_rounds(
        FedHL(weighing=Weighing(by_examples=True), **alike),
        federate_lora(FULL_RANKS),
        participation=0.75,
        **NO_EVALUATION,
    )
    b = run_rounds(FlexLoRA(**alike), federate_lora(FULL_RANKS), participation=0.75, **NO_EVALUATION)
    assert_parameters_close(get_dense_updates(a), get_dense_updates(b))
    assert_parameters_close(a.state.server.rest, b.state.server.rest)
    # of lower rank it is not: the tail stays
    low = federate_lora((2, 2, 2, 2))
    c = run_rounds(
        FedHL(weighing=Weighing(by_examples=True), **alike), low, participation=0.75, **NO_EVALUATION
    )
    d = run_rounds(FlexLoRA(**alike), low, participation=0.75, **NO_EVALUATION)
    assert max(float((get_dense_updates(c)[n] - get_dense_updates(d)[n]).norm()) for n in LAYER_NAMES) > 1e-3


def measure_change_without_training(method: AnyMethod, run: Run, steps: int = 3) -> float:
    """By how much W changes in rounds in which nobody trains, from where the run stands."""
    before = get_dense_updates(run)
    run.method = method
    for _ in range(steps):
        run.step()
    return max(float((get_dense_updates(run)[n] - before[n]).abs().max()) for n in LAYER_NAMES)


NO_TRAINING: dict[str, Any] = {**FAST_LOCAL, "optimizer": SGD(lr=0.0)}


@pytest.mark.parametrize("wire", ["float32", "bfloat16", "int8"])
def test_a_round_without_training_keeps_w_in_fedhl_and_not_in_flexlora(wire: Any) -> None:
    training = LoRATraining(rank=2, scaling="alpha", wire=wire)
    run = run_rounds(
        FedHL(training=training, **LOCAL),
        federate_lora(),
        rounds=9,
        steps=1,
        participation=0.75,
        **NO_EVALUATION,
    )
    assert measure_change_without_training(FedHL(training=training, **NO_TRAINING), run) < 1e-12
    run = run_rounds(
        FlexLoRA(training=training, **LOCAL),
        federate_lora(),
        rounds=9,
        steps=1,
        participation=0.75,
        **NO_EVALUATION,
    )
    assert measure_change_without_training(FlexLoRA(training=training, **NO_TRAINING), run) > 1e-3


@functools.cache
def federate_once() -> Federation:
    return federate_lora()


def federate_with_ranks(ranks: Sequence[int]) -> Federation:
    infos = [dataclasses.replace(i, rank=r) for i, r in zip(federate_once().infos, ranks, strict=True)]
    return dataclasses.replace(federate_once(), infos=infos)


def draw_pair(rng: np.random.Generator, d: int, r: int, k: int) -> Pair:
    return Pair(torch.from_numpy(rng.normal(size=(d, r))), torch.from_numpy(rng.normal(size=(r, k))))


@given(
    ranks=st.lists(st.integers(1, 9), min_size=4, max_size=4),
    who=st.sets(st.integers(0, 3), min_size=1),
    kept=st.integers(0, 9),
    wire=st.sampled_from(["float32", "bfloat16", "int8"]),
    split=st.sampled_from(["sqrt", "B", "A"]),
    weighing=st.builds(Weighing, error=st.sampled_from(["relative", "absolute", "squared"]), per_layer=st.booleans(),
                       by_examples=st.booleans(), temperature=st.sampled_from([0.0, 1.0])),
    form=st.sampled_from([DeltaForm("exact"), DeltaForm("dense"), DeltaForm("capped", cap=9), DeltaForm("auto")]),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_a_step_of_fedhl_adds_what_clients_changed(
    ranks: list[int],
    who: set[int],
    kept: int,
    wire: Any,
    split: Any,
    weighing: Weighing,
    form: DeltaForm,
    seed: int,
) -> None:
    method = FedHL(
        weighing=weighing,
        split=split,
        delta_form=form,
        training=LoRATraining(wire=wire, scaling="alpha"),
        **LOCAL,
    )
    run = Run(method, federate_with_ranks(ranks), RunSettings(rounds=1), Sequential())
    rng = np.random.default_rng(seed)
    blocks = {
        n: [(1.0, draw_pair(rng, d, kept, k))]
        for n, (d, k) in lora_of(run.task.architectures["model"]).shapes.items()
    }
    server = dataclasses.replace(run.state.server, delta=update_deltas(run.state.server.delta, blocks))
    replies, changed = [], {n: [] for n in LAYER_NAMES}
    for info in (run.federation.infos[k] for k in sorted(who)):
        sent = unpack_factors(method.download(server, info).message.factors)
        up = method.training.pack_message(
            {
                n: Pair(p.b + torch.from_numpy(rng.normal(size=p.b.shape)).to(p.b), p.a)
                for n, p in sent.items()
            },
            server.rest,
        )
        replies.append(Reply(info, up))
        arrived = unpack_factors(up.factors)
        for n in LAYER_NAMES:
            change = arrived[n].b.double() @ arrived[n].a.double() - sent[n].b.double() @ sent[n].a.double()
            changed[n].append(8 / ranks[info.id] * change)
    new = server_update(method, server, replies, ServerView(run.task, 0, Key((0,))))
    for n in LAYER_NAMES:
        p = weighing.weigh(
            server.delta, [ranks[r.client.id] for r in replies], [r.client.example_count for r in replies],
            {name: pair.rank for name, pair in server.initial_factors.items()},
        )  # fmt: skip
        assert sum(p.weights[n]) == pytest.approx(1, abs=1e-14)
        expected = server.delta[n].dense() + sum(w * c for w, c in zip(p.weights[n], changed[n], strict=True))
        torch.testing.assert_close(new.delta[n].dense(), expected, rtol=0, atol=1e-11)


def test_fedhl_subtracts_what_it_sent_to_a_module_in_half_precision() -> None:
    made = federate_lora(
        module=add_lora(Net(9, 10, dtype=torch.bfloat16), 2, 3.0, trainable=("head",)),
        clients=make_arrays(sizes=(12, 9, 10, 8)),
    )
    run = run_rounds(FedHL(optimizer=SGD(lr=0.3), batch_size=8), made, rounds=9, steps=2, evaluate_every=9)
    before = {n: d.dense() for n, d in run.state.server.delta.items()}
    assert all(float(w.norm()) > 1e-3 for w in before.values())
    # nobody trains: W stays, though what clients were sent was rounded to eight bits
    run.method = FedHL(optimizer=SGD(lr=0.0), batch_size=8)
    for _ in range(3):
        run.step()
    for n, w in before.items():
        torch.testing.assert_close(run.state.server.delta[n].dense(), w, rtol=0, atol=1e-12)
