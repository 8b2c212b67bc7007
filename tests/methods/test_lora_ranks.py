"""Ranks and scales in federated LoRA: each client trains at its own, and what it adds does not depend on its scale."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedlowrank import SGD, Federation
from fedlowrank.adapters.lora.lora_factors import lora_of
from fedlowrank.adapters.lora.lora_layers import add_lora
from fedlowrank.core import tree
from fedlowrank.core.errors import ConfigError, TaskError
from fedlowrank.engines.sequential import Sequential
from fedlowrank.engines.vectorized import Vectorized
from fedlowrank.methods.fedex_lora import FedExLoRA
from fedlowrank.methods.fedhl import FedHL
from fedlowrank.methods.fedit import FedIT
from fedlowrank.methods.fedsa_lora import FedSALoRA
from fedlowrank.methods.ffa_lora import FFALoRA
from fedlowrank.methods.flexlora import FlexLoRA
from fedlowrank.methods.flora import FLoRA
from fedlowrank.methods.hetlora import HetLoRA
from fedlowrank.methods.shared.lora_family import LoRATraining, Scaling
from fedlowrank.storage.state import State
from tests.golden import lora_reference as reference
from tests.golden.reference import forward
from tests.support.method_calls import Reply

from .comparisons import assert_parameters_close, get_shapes
from .lora_setting import (
    EQUAL_RANK_METHODS,
    FAST_LOCAL,
    LAYER_NAMES,
    LAYER_SHAPES,
    NO_EVALUATION,
    TRAINING,
    UNEQUAL_RANK_METHODS,
    assert_head_equal,
    assert_hetlora_equals_reference,
    assert_updates_equal,
    draw_initial_arrays,
    federate_lora,
    make_reference_setting,
    predict,
    run_lora,
    train_client,
    update_server,
)
from .setting import LOCAL, Net, run_rounds


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", UNEQUAL_RANK_METHODS, ids=lambda k: k.title)
def test_a_rank_may_equal_a_dimension_of_a_layer(kind: Any) -> None:
    ranks = (9, 1, 9, 4)
    if kind is HetLoRA:
        assert_hetlora_equals_reference(HetLoRA(training=TRAINING, **LOCAL), Sequential, ranks)
        return
    run = run_lora(kind, ranks=ranks, participation=0.75)
    s = make_reference_setting(run)
    if kind is FLoRA:
        key = run.federation.key / "client"
        net = reference.flora(
            s, [{k: draw_initial_arrays(key / k / t, ranks[k]) for k in c} for t, c in enumerate(s.rounds)]
        )
        assert_head_equal(run, net, 1e-9)
        np.testing.assert_allclose(
            predict(run, 1).numpy(),
            forward(net, run.federation.clients[1].test.x.double().numpy())[1],
            atol=1e-9,
        )
    else:
        ws, net, *_ = reference.fedhl(s) if kind is FedHL else reference.flexlora(s)
        assert_updates_equal(run, ws, net, ranks, 1e-9)


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", UNEQUAL_RANK_METHODS, ids=lambda k: k.title)
def test_the_server_holds_the_clients_own_scales(kind: Any) -> None:
    # of scale 2, 1, 2/3 and 1/2: α/r with ranks that differ, and a server padded to rank 4
    for client, rank in enumerate((1, 2, 3, 4)):
        run = run_lora(kind, 0)
        upload = train_client(run, client)[1]
        server = update_server(run, [Reply(run.federation.infos[client], upload)])
        for n in LAYER_NAMES:
            expected = 2 / rank * upload.factors[n].dense()
            held = (
                server.delta[n].dense()
                if kind in (FedHL, FlexLoRA)
                else (server.history.updates[0] if kind is FLoRA else server.factors)[n].dense()
            )
            torch.testing.assert_close(held, expected, rtol=0, atol=1e-14)
            assert float(expected.norm()) > 1e-3


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", UNEQUAL_RANK_METHODS, ids=lambda k: k.title)
def test_every_client_trains_at_its_own_rank(kind: Any) -> None:
    run = run_lora(kind, 2)
    for k, rank in enumerate((1, 2, 3, 4)):
        up = train_client(run, k)[1]
        assert {n: (p.b.shape, p.a.shape) for n, p in up.factors.items()} == {
            n: ((d, rank), (rank, w)) for n, (d, w) in zip(LAYER_NAMES, LAYER_SHAPES, strict=True)
        }
        assert all(np.linalg.matrix_rank(up.factors[n].dense()) == rank for n in LAYER_NAMES)
        if kind is not FLoRA:
            down = run.method.download(run.state.server, run.federation.infos[k])
            assert get_shapes(getattr(down, "message", down)) == get_shapes(up)


@pytest.mark.parametrize("kind", EQUAL_RANK_METHODS, ids=lambda k: k.title)
def test_unequal_ranks_are_refused_with_both_clients(kind: Any) -> None:
    with pytest.raises(
        TaskError, match=rf"{kind.title} .* client 0 has 2 and client 2 has 3.*fedhl, hetlora"
    ):
        run_lora(kind, 0, ranks=(2, 2, 3, 2))


@pytest.mark.few(8)
@pytest.mark.parametrize("engine", [Sequential, Vectorized])
@pytest.mark.parametrize("scaling", ["equal", "alpha"])
@pytest.mark.parametrize("kind", [FedHL, FlexLoRA, FLoRA, HetLoRA, FedIT, FFALoRA, FedSALoRA, FedExLoRA])
def test_a_common_rank_is_as_if_all_clients_brought_it(kind: Any, scaling: Any, engine: Any) -> None:
    common = LoRATraining(common_rank=3, scaling=scaling)
    a = run_lora(kind, ranks=(1, 4, 2, 3), engine=engine, participation=0.75, training=common)
    own = LoRATraining(rank=3, scaling=scaling)
    b = run_lora(kind, ranks=(3,) * 4, engine=engine, participation=0.75, training=own)
    for (path, x), (_, y) in zip(tree.leaves(a.state.server), tree.leaves(b.state.server), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-12, msg=path)
    for k in range(4):
        torch.testing.assert_close(predict(a, k), predict(b, k), rtol=0, atol=1e-12)


def federate_tokens(alpha: float, ranks: tuple[int, ...], is_trained: bool = False) -> Federation:
    """Clients of tokens with an adapted embedding, whose B is random and whose A begins at zero."""
    key = torch.Generator().manual_seed(0)
    clients = [(torch.randint(0, 11, (n, 4), generator=key), torch.arange(n) % 3) for n in (8, 14, 6)]
    base = nn.Sequential(nn.Embedding(11, 5), nn.Flatten(), nn.Linear(20, 3))
    made = add_lora(base, 3, alpha, target_modules=["0"], trainable=["2"])
    if is_trained:
        with torch.no_grad():
            dict(made.named_parameters())["0.lora_A"].uniform_(-0.1, 0.1, generator=key)
    return Federation.from_arrays(clients, made, head="2", classes=3, rank=ranks, val=0, test=0.25)


@pytest.mark.parametrize("is_trained", [False, True])
@pytest.mark.parametrize("alpha", [3.0, 24.0])
def test_hetlora_of_an_embedding_is_fedit_whatever_the_scale(alpha: float, is_trained: bool) -> None:
    federation = federate_tokens(alpha, (3, 3, 3), is_trained)
    a, b = (
        run_rounds(
            kind(epochs=2, batch_size=99, optimizer=SGD(lr=0.2)), federation, rounds=2, **NO_EVALUATION
        )
        for kind in (FedIT, HetLoRA)
    )
    for k in range(3):
        torch.testing.assert_close(predict(a, k), predict(b, k), rtol=0, atol=1e-6)


def test_every_client_of_hetlora_begins_at_the_random_factor_of_the_adapter() -> None:
    run = run_rounds(
        HetLoRA(training=LoRATraining(scaling="alpha")),
        federate_tokens(24.0, (3, 2, 1)),
        steps=0,
        **NO_EVALUATION,
    )
    expected = lora_of(run.task.common_model("")).draw_factors(3, run.task.key / "lora")["0"]
    for client, rank in zip(run.federation.infos, (3, 2, 1), strict=True):
        sent = run.method.download(run.state.server, client).factors["0"]
        assert torch.equal(sent.b, expected.b[:, :rank])
        assert not sent.a.any()


@pytest.mark.parametrize(
    "method", [FedHL(), FlexLoRA(split="sqrt"), FlexLoRA(split="B"), FlexLoRA(split="A")]
)
def test_a_negative_scale_keeps_the_update(method: Any) -> None:
    held = add_lora(Net(9, 10), 3, -2.0, trainable=("head",))
    method = dataclasses.replace(method, **FAST_LOCAL)
    run = run_rounds(method, federate_lora([3] * 4, held), rounds=2, **NO_EVALUATION)
    down = run.method.download(run.state.server, run.federation.infos[0])
    factors = getattr(down, "message", down).factors
    for name, delta in run.state.server.delta.items():
        u, s, vt = np.linalg.svd(delta.dense().numpy())
        assert s[2] > 1e-4
        product = -2 / 3 * factors[name].dense().numpy()
        np.testing.assert_allclose(product, u[:, :3] * s[:3] @ vt[:3], atol=1e-6)


def test_two_ranks_for_all_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"leave training\.rank out"):
        LoRATraining(rank=2, common_rank=2)
    with pytest.raises(ConfigError, match=r"training\.common_rank"):
        LoRATraining(common_rank=0)


@pytest.mark.parametrize("kind", [FedHL, FlexLoRA, FLoRA, HetLoRA, FedIT, FFALoRA, FedSALoRA, FedExLoRA])
def test_at_the_configured_rank_both_scalings_are_one(kind: Any) -> None:
    held = add_lora(Net(9, 10), 3, 2.0, trainable=("head",), rslora=True)
    a, b = (
        run_rounds(
            kind(training=LoRATraining(scaling=s), **FAST_LOCAL),
            federate_lora([3] * 4, held),
            rounds=2,
            **NO_EVALUATION,
        )
        for s in ("equal", "alpha")
    )
    skip = {f"/scaling{x}" for x in ("", "/power")}
    assert {p for p, _ in tree.leaves(a.state.server)} == {p for p, _ in tree.leaves(b.state.server)} - skip
    for (path, x), (_, y) in zip(tree.leaves(a.state.server), tree.leaves(b.state.server), strict=True):
        assert torch.equal(x, y), path
    for k in range(4):
        assert torch.equal(predict(a, k), predict(b, k))


@pytest.mark.parametrize(("rslora", "at_two"), [(False, 3.0), (True, 6 / 2**0.5)])
def test_alpha_falls_by_the_rank_or_by_its_root(rslora: bool, at_two: float) -> None:
    held = add_lora(Net(9, 10), 4, 6.0, trainable=("head",), rslora=rslora)
    model = federate_lora([None] * 4, held).architectures["model"]
    assert LoRATraining(scaling="alpha").build_scaling(lora_of(model)).scale_at(2) == pytest.approx(
        at_two, rel=1e-15
    )
    assert LoRATraining(scaling="equal").build_scaling(lora_of(model)).scale_at(2) == pytest.approx(
        6 / (2 if rslora else 4), rel=1e-15
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", [FedHL, FlexLoRA, HetLoRA])
def test_what_a_client_adds_does_not_depend_on_its_scale(kind: Any) -> None:
    run = run_rounds(
        kind(training=LoRATraining(rank=2), **FAST_LOCAL), federate_lora(), rounds=2, **NO_EVALUATION
    )
    before = [predict(run, k) for k in range(4)]
    run.method = kind(training=LoRATraining(rank=2, scaling="alpha"), **FAST_LOCAL)
    run.state = State(
        2, dataclasses.replace(run.state.server, scaling=Scaling(1.0, 2, 1.0)), run.state.clients
    )
    for k in range(4):
        assert_parameters_close(predict(run, k), before[k])
