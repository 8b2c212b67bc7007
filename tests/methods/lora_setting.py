"""Federated LoRA in the small federation: two layers of unequal shape are adapted, by ranks that differ between clients."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedlowrank.core import tree
from fedlowrank.core.contract import AnyMethod, ServerView
from fedlowrank.core.learning.optimizer import SGD
from fedlowrank.data.federation import Federation
from fedlowrank.engines.engine import Engine
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
from fedlowrank.methods.shared.lora_family import LoRATraining
from fedlowrank.rounds.run import Run
from tests.golden import lora_reference as reference
from tests.golden.reference import Array, Layers, forward
from tests.support.method_calls import Reply, server_update

from .comparisons import assert_nested_close, to_layers
from .run_contents import get_client_inputs, get_initial_networks, get_train_data, plan_rounds
from .setting import CLASSES, LOCAL, LR, Net, make_arrays, run_rounds

RANKS = (1, 2, 3, 4)
EQUAL_RANKS = (3, 3, 3, 3)
LAYER_NAMES = ("body.0", "body.2")
LAYER_SHAPES = ((9, 12), (10, 9))
# scales 2, 1, 2/3 and 1/2 at ranks 1 to 4
TRAINING = LoRATraining(rank=2, scaling="alpha")
FAST_LR = 0.5
FAST_LOCAL: dict[str, Any] = {**LOCAL, "optimizer": SGD(lr=FAST_LR)}
NO_EVALUATION: dict[str, Any] = {"evaluate_every": 99}
UNEQUAL_RANK_METHODS: list[Any] = [FedHL, FlexLoRA, HetLoRA, FLoRA]
EQUAL_RANK_METHODS: list[Any] = [FedIT, FFALoRA, FedSALoRA, FedExLoRA]
every_lora_method = pytest.mark.parametrize(
    "kind", UNEQUAL_RANK_METHODS + EQUAL_RANK_METHODS, ids=lambda k: k.title
)


def federate_lora(
    ranks: Sequence[int | None] = RANKS, module: Any = lambda: Net(9, 10), clients: Any = None
) -> Federation:
    """Build a federation of clients with these ranks: layers of 9 × 12 and 10 × 9, and a head."""
    return Federation.from_arrays(clients or make_arrays(), module, classes=CLASSES, rank=ranks)


def draw_initial_a(key: Any, rank: int) -> dict[str, Tensor]:
    """Draw A as it is defined: uniform in ±1/√k, of each layer by its name."""
    widths = dict(zip(LAYER_NAMES, (12, 9), strict=True))
    return {
        n: ((torch.rand(rank, k, generator=(key / "lora" / n).generator()) * 2 - 1) / k**0.5).double()
        for n, k in widths.items()
    }


def draw_initial_arrays(key: Any, rank: int) -> list[Array]:
    """Draw A of each layer as the references take it."""
    return [a.numpy() for a in draw_initial_a(key, rank).values()]


def make_reference_setting(run: Run, scaling: str = "alpha") -> reference.Setting:
    """Make what the references know of a run."""
    federation = run.federation
    ranks = [i.rank or 0 for i in federation.infos]
    return reference.Setting(
        get_initial_networks(federation)[0],
        get_train_data(federation),
        plan_rounds(run),
        LR,
        ranks,
        (lambda r: 2 / r) if scaling == "alpha" else lambda r: 1.0,
        draw_initial_arrays(federation.key / "init", max(ranks)),
    )


def get_tolerance(engine: type[Engine]) -> float:
    """Get the absolute difference that rounding explains."""
    return 1e-7 if engine is Vectorized else 1e-9


def run_three_rounds(method: AnyMethod, engine: type[Engine], ranks: Sequence[int], **kwargs: Any) -> Run:
    """Run three rounds, by default, in which three of the four clients take part."""
    run = run_rounds(
        method, federate_lora(ranks), engine=engine, **NO_EVALUATION, **{"participation": 0.75, **kwargs}
    )
    # every client takes part, and none in all rounds, or absences would not show
    if not kwargs:
        assert set().union(*plan_rounds(run)) == set(range(4))
        assert all(len(r) == 3 for r in plan_rounds(run))
    return run


def get_ranks_for(kind: Any) -> Sequence[int]:
    """Get ranks that a method accepts, unequal ones where it does."""
    return RANKS if kind in UNEQUAL_RANK_METHODS else (2,) * 4


def run_lora(
    kind: Any, steps: int | None = None, ranks: Sequence[int] = (), engine: Any = Sequential, **kwargs: Any
) -> Run:
    """Run so many rounds of a method at ranks that it accepts; ``kwargs`` are its fields or settings of the
    run."""
    fields = {f.name for f in dataclasses.fields(kind)}
    method = kind(**{**LOCAL, "training": TRAINING, **{k: v for k, v in kwargs.items() if k in fields}})
    rest = {**NO_EVALUATION, **{k: v for k, v in kwargs.items() if k not in fields}}
    return run_rounds(method, federate_lora(ranks or get_ranks_for(kind)), steps=steps, engine=engine, **rest)


def train_client(run: Run, client: int) -> tuple[Any, Any]:
    """Train a client once more, and get its next state and what it would send."""
    return run.method.local_update(*get_client_inputs(run, client))


def collect_replies(run: Run, clients: Sequence[int] = range(4)) -> list[Reply]:
    """Collect what these clients would send now."""
    return [Reply(run.federation.infos[k], train_client(run, k)[1]) for k in clients]


def update_server(run: Run, replies: list[Reply]) -> Any:
    """Compute the server's next state of these replies."""
    view = ServerView(run.task, run.round, run.federation.key / "server" / run.round)
    return tree.canonical(server_update(run.method, run.state.server, replies, view))


def predict(run: Run, client: int, series: str = "personal") -> Tensor:
    """Compute a client's scores on its test examples."""
    return (
        run.local_model(run.federation.infos[client])
        .predictors[series](run.federation.clients[client].test.x)
        .detach()
    )


def get_dense_updates(run: Run) -> dict[str, Tensor]:
    """Get W of every layer."""
    return {n: run.state.server.delta[n].dense() for n in LAYER_NAMES}


def assert_head_equal(run: Run, net: Layers, atol: float) -> None:
    """Require the server's head to be that of a network."""
    (actual,) = to_layers(run.state.server.rest)
    for f, w in zip(actual, net[-1], strict=True):
        assert_nested_close(f, w, atol)


def assert_predictions_equal(
    run: Run, client: int, net: Layers, atol: float, series: str = "personal"
) -> None:
    """Require a client's scores on its test examples to be those of a network."""
    x = run.federation.clients[client].test.x
    assert_nested_close(predict(run, client, series), forward(net, x.double().numpy())[1], atol)


def assert_updates_equal(run: Run, ws: list[Array], net: Layers, ranks: Sequence[int], atol: float) -> None:
    """Require the server to hold these updates and this head, and clients to predict by their best
    approximations."""
    for n, w in zip(LAYER_NAMES, ws, strict=True):
        assert_nested_close(run.state.server.delta[n].dense(), w, atol)
    assert_head_equal(run, net, atol)
    for k, r in enumerate(ranks):
        assert_predictions_equal(run, k, reference.added(net, [reference.best(w, r) for w in ws]), atol)
        assert_predictions_equal(run, k, reference.added(net, ws), atol, "server")


def assert_means_of_factors_equal(kind: Any, engine: type[Engine]) -> None:
    """Require FedIT, or FFA-LoRA, to hold the means of the clients' factors, A included in FedIT alone."""
    run = run_three_rounds(kind(training=TRAINING, **LOCAL), engine, EQUAL_RANKS)
    s, atol = make_reference_setting(run), get_tolerance(engine)
    factors, net = reference.fedit(s, move_a=kind is FedIT)
    held = run.state.server.factors
    for n, (b, a) in zip(LAYER_NAMES, factors, strict=True):
        assert_nested_close(held[n].b, b, atol)
        assert_nested_close(held[n].a, a if kind is FedIT else np.zeros((0, 1)), atol)
    assert_head_equal(run, net, atol)
    for k in range(4):
        assert_predictions_equal(run, k, reference.added(net, reference.products(factors, 2 / 3)), atol)


def assert_hetlora_equals_reference(
    method: HetLoRA, engine: type[Engine], ranks: Sequence[int] = RANKS, rounds: int = 3, **wanted: Any
) -> list[int]:
    """Require rounds of HetLoRA to be those of its reference, and get the ranks that are left."""
    run = run_three_rounds(method, engine, ranks, **({"rounds": rounds} if rounds != 3 else {}))
    s, atol = make_reference_setting(run), get_tolerance(engine)
    server, net, left = reference.hetlora(s, **wanted)
    for n, (b, a) in zip(LAYER_NAMES, server, strict=True):
        assert_nested_close(run.state.server.factors[n].b, b, atol)
        assert_nested_close(run.state.server.factors[n].a, a, atol)
    assert_head_equal(run, net, atol)
    assert {int(k): r for k, r in run.state.server.ranks.items()} == {
        k: r for k, r in enumerate(left) if r != ranks[k]
    }
    for k, r in enumerate(left):
        cut = [b[:, :r] @ a[:r] for b, a in server]
        assert_predictions_equal(run, k, reference.added(net, cut), atol)
        assert_predictions_equal(run, k, reference.added(net, reference.products(server)), atol, "server")
    return left
