"""FedHL: line 17 and eq. 15 against float64 arithmetic in numpy, its limit cases, and what it keeps that FlexLoRA loses."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from contract import Reply, server_update
from fedlowrank.adapters.lora.lora_factors import lora_of
from fedlowrank.adapters.wire_format import unpack_factors
from fedlowrank.core.contract.method import ServerView
from fedlowrank.core.key import Key
from fedlowrank.engines.engine import Engine
from fedlowrank.engines.sequential import Sequential
from fedlowrank.linalg.delta import DeltaForm, update_deltas
from fedlowrank.linalg.pair import Pair
from fedlowrank.methods.families.effective_delta import Weighing
from fedlowrank.methods.families.lora_family import Tuning
from fedlowrank.methods.fedhl import FedHL
from fedlowrank.methods.flexlora import FlexLoRA
from fedlowrank.rounds.run import Run
from fedlowrank.rounds.run_settings import RunSettings
from golden import lora_reference as reference

from .setting import plan, run_of
from .test_lora_identities import (
    FULL,
    QUIET,
    REST,
    federation,
    random_pair,
    ranked,
    same_trees,
    whole,
    zero_step_settings,
)
from .test_lora_methods import (
    LOCAL,
    NAMES,
    RANKS,
    TUNING,
    go,
    head_is,
    predicts,
    same,
    setting_of,
    tolerance,
    updates_are,
)


@pytest.mark.full
def test_fedhl(engine: type[Engine]) -> None:
    run = go(FedHL(tuning=TUNING, **LOCAL), engine, RANKS)
    ws, net, history = reference.fedhl(setting_of(run))
    updates_are(run, ws, net, RANKS, tolerance(engine))
    found = run.method.metrics(run.state.server)
    ids = list(plan(run)[-1])
    assert found["weights"] == pytest.approx(
        {str(k): p for k, p in zip(ids, history[-1][0], strict=True)}, abs=1e-9
    )
    s = setting_of(run)
    w, _, _ = reference.fedhl(dataclasses.replace(s, rounds=s.rounds[:-1]))
    size = sum((x**2).sum() for x in w)
    cut = {str(k): sum(((x - reference.best(x, RANKS[k])) ** 2).sum() for x in w) / size for k in ids}
    assert found["truncation"] == pytest.approx(cut, abs=1e-9)
    assert found["energy"] == pytest.approx(
        {n: (x**2).sum() for n, x in zip(NAMES, ws, strict=True)}, rel=1e-9
    )
    assert found["discarded"] == dict.fromkeys(NAMES, 0.0)
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
    run = go(FedHL(weighing=Weighing(**weighing), tuning=TUNING, **LOCAL), Sequential, RANKS)
    ws, net, history = reference.fedhl(setting_of(run), **weighing)
    updates_are(run, ws, net, RANKS, 1e-9)
    # other weights than the default's by far more than the tolerance
    _, _, usual = reference.fedhl(setting_of(run))
    assert np.abs(np.array(history[-1]) - np.array(usual[-1])).max() > 1e-3


@pytest.mark.full
@pytest.mark.parametrize(
    "form",
    [DeltaForm("exact"), DeltaForm("dense"), DeltaForm("capped", cap=12), DeltaForm("auto")],
    ids=lambda f: f.kind,
)
def test_fedhl_with_equal_scales_in_every_form(form: DeltaForm) -> None:
    run = go(FedHL(form=form, tuning=Tuning(rank=2), **LOCAL), Sequential, RANKS)
    ws, net, _ = reference.fedhl(setting_of(run, "equal"))
    updates_are(run, ws, net, RANKS, 1e-9)


@pytest.mark.few(1)
def test_the_residual_makes_clients_begin_at_w(engine: type[Engine]) -> None:
    run = go(FedHL(residual=True, form=DeltaForm("exact"), tuning=TUNING, **LOCAL), engine, RANKS)
    ws, net, _ = reference.fedhl(setting_of(run), residual=True)
    for n, w in zip(NAMES, ws, strict=True):
        same(run.state.server.delta[n].dense(), w, tolerance(engine))
    head_is(run, net, tolerance(engine))
    for k in range(4):
        predicts(run, k, reference.added(net, ws), tolerance(engine))


def test_fedhl_at_full_rank_is_flexlora() -> None:
    alike = {"split": "B", **LOCAL}
    a = run_of(
        FedHL(weighing=Weighing(by_examples=True), **alike), federation(FULL), participation=0.75, **QUIET
    )
    b = run_of(FlexLoRA(**alike), federation(FULL), participation=0.75, **QUIET)
    same_trees(whole(a), whole(b))
    same_trees(a.state.server.rest, b.state.server.rest)
    # of lower rank it is not: the tail stays
    low = federation((2, 2, 2, 2))
    c = run_of(FedHL(weighing=Weighing(by_examples=True), **alike), low, participation=0.75, **QUIET)
    d = run_of(FlexLoRA(**alike), low, participation=0.75, **QUIET)
    assert max(float((whole(c)[n] - whole(d)[n]).norm()) for n in NAMES) > 1e-3


@pytest.mark.full
@pytest.mark.parametrize("wire", ["float32", "bfloat16", "int8"])
def test_a_round_without_training_keeps_w_in_fedhl_and_not_in_flexlora(wire: Any) -> None:
    tuning = Tuning(rank=2, scaling="alpha", wire=wire)
    run = run_of(FedHL(tuning=tuning, **LOCAL), federation(), rounds=9, steps=1, participation=0.75, **QUIET)
    assert zero_step_settings(FedHL(tuning=tuning, **REST), run) < 1e-12
    run = run_of(
        FlexLoRA(tuning=tuning, **LOCAL), federation(), rounds=9, steps=1, participation=0.75, **QUIET
    )
    assert zero_step_settings(FlexLoRA(tuning=tuning, **REST), run) > 1e-3


@pytest.mark.full
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
        weighing=weighing, split=split, form=form, tuning=Tuning(wire=wire, scaling="alpha"), **LOCAL
    )
    run = Run(method, ranked(ranks), RunSettings(rounds=1), Sequential())
    rng = np.random.default_rng(seed)
    blocks = {
        n: [(1.0, random_pair(rng, d, kept, k))]
        for n, (d, k) in lora_of(run.task.architectures["model"]).shapes.items()
    }
    server = dataclasses.replace(run.state.server, delta=update_deltas(run.state.server.delta, blocks))
    replies, changed = [], {n: [] for n in NAMES}
    for info in (run.federation.infos[k] for k in sorted(who)):
        sent = unpack_factors(method.download(server, info).message.factors)
        up = method.tuning.message(
            {
                n: Pair(p.b + torch.from_numpy(rng.normal(size=p.b.shape)).to(p.b), p.a)
                for n, p in sent.items()
            },
            server.rest,
        )
        replies.append(Reply(info, up))
        arrived = unpack_factors(up.factors)
        for n in NAMES:
            change = arrived[n].b.double() @ arrived[n].a.double() - sent[n].b.double() @ sent[n].a.double()
            changed[n].append(8 / ranks[info.id] * change)
    new = server_update(method, server, replies, ServerView(run.task, 0, Key((0,))))
    for n in NAMES:
        p = weighing.weigh(
            server.delta, [ranks[r.client.id] for r in replies], [r.client.examples for r in replies],
            {name: pair.rank for name, pair in server.drawn.items()},
        )  # fmt: skip
        assert sum(p.weights[n]) == pytest.approx(1, abs=1e-14)
        wanted = server.delta[n].dense() + sum(w * c for w, c in zip(p.weights[n], changed[n], strict=True))
        torch.testing.assert_close(new.delta[n].dense(), wanted, rtol=0, atol=1e-11)
