"""Per-FedAvg: against NumPy, the halves of a batch, the Hessian-free step, and the step before inference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fedlowrank import Loss
from fedlowrank.core import tree
from fedlowrank.core.contract import Batch
from fedlowrank.core.learning.optimizer import SGD
from fedlowrank.engines.engine import Engine
from fedlowrank.engines.sequential import Sequential
from fedlowrank.methods.per_fedavg import PerFedAvg, split_batch
from tests.golden import personal_reference, reference

from .comparisons import assert_nested_close, to_layers
from .run_contents import (
    get_client_states,
    get_download,
    get_initial_networks,
    get_personal_parameters,
    get_train_data,
    list_batches,
    load_predictors,
    make_view,
    plan_rounds,
)
from .setting import LOCAL, LR, SAMPLE, SIZES, federate_one_model, run_rounds


def assert_first_order_equals_reference(weights: str, engine: type[Engine], **data: Any) -> None:
    """Compare a run with the reference; ``data`` are settings of the federation."""
    federation = federate_one_model(**data)
    run = run_rounds(PerFedAvg(alpha=0.4, weighting=weights, **LOCAL), federation, engine=engine, **SAMPLE)
    # one client's last batch is a single example
    assert any(
        len(step) == 1 for clients in plan_rounds(run) for steps, _ in clients.values() for step in steps
    )
    expected = personal_reference.per_fedavg(
        get_initial_networks(federation)[0],
        get_train_data(federation),
        plan_rounds(run),
        0.4,
        LR,
        weighted=weights == "examples",
    )
    assert_nested_close(to_layers(run.state.server), expected)
    assert all(s is None for s in get_client_states(run))


@pytest.mark.few(1)
@pytest.mark.parametrize("weights", ["uniform", "examples"])
def test_per_fedavg_of_first_order(weights: str, engine: type[Engine]) -> None:
    assert_first_order_equals_reference(weights, engine)


def test_per_fedavg_minimizes_the_loss_of_the_task(smoothed_loss: Loss) -> None:
    assert_first_order_equals_reference("examples", Sequential, loss=smoothed_loss)


@pytest.mark.parametrize("delta", [0.001, 0.1])
def test_hessian_free_per_fedavg(delta: float, engine: type[Engine]) -> None:
    federation = federate_one_model()
    method = PerFedAvg(alpha=0.4, variant="hessian_free", delta=delta, **LOCAL)
    run = run_rounds(method, federation, engine=engine, **SAMPLE)
    expected = personal_reference.per_fedavg(
        get_initial_networks(federation)[0],
        get_train_data(federation),
        plan_rounds(run),
        0.4,
        LR,
        delta=delta,
    )
    assert_nested_close(to_layers(run.state.server), expected)


@pytest.mark.parametrize("count", [1, 2, 3, 6, 7])
def test_the_halves_of_a_padded_batch_hold_the_examples_of_the_bare_one(count: int) -> None:
    x = torch.arange(float(count))[:, None]
    bare = Batch({"a": x, "b": -x}, torch.arange(count))
    padded = Batch(
        {n: functional.pad(t, (0, 0, 0, 9 - count)) for n, t in bare.x.items()},
        functional.pad(bare.y, (0, 9 - count)),
        torch.arange(9) < count,
    )
    seen = []
    for which in (0, 1):
        short, long = split_batch(bare, which), split_batch(padded, which)
        assert short.mask is None
        assert torch.equal(long.y[long.mask], short.y)
        for n, t in short.x.items():
            assert torch.equal(long.x[n][long.mask], t)
            torch.testing.assert_close(long.mean(long.x[n][:, 0]), short.mean(t[:, 0]))
        seen += short.y.tolist()
    assert sorted(seen) == (list(range(count)) if count > 1 else [0, 0])


def test_a_hessian_free_step_follows_the_gradient_through_the_inner_step() -> None:
    federation = federate_one_model()
    data, model = federation.clients[1].train, federation.architectures["small"]
    step = {}
    for variant in ("hessian_free", "first_order"):
        # all nine examples of the client in one batch
        step_size = {"delta": 1e-6} if variant == "hessian_free" else {}
        method = PerFedAvg(optimizer=SGD(lr=1.0), batch_size=9, alpha=0.5, variant=variant, **step_size)
        run = run_rounds(method, federation, steps=0)
        start = get_download(run, 1)
        step[variant] = tree.sub(start, method.local_update(None, start, make_view(run, 1))[1])
        ((order,), _) = plan_rounds(run)[0][1]
    one, two = torch.as_tensor(order[0::2].copy()), torch.as_tensor(order[1::2].copy())
    theta = {n: p.clone().requires_grad_() for n, p in start.items()}

    def risk(params: Any, index: Tensor) -> Tensor:
        return functional.cross_entropy(model.apply(params, data.x[index]), data.y[index])

    inner = torch.autograd.grad(risk(theta, one), list(theta.values()), create_graph=True)
    moved = {n: p - 0.5 * g for (n, p), g in zip(theta.items(), inner, strict=True)}
    exact = dict(zip(theta, torch.autograd.grad(risk(moved, two), list(theta.values())), strict=True))
    tree.map_leaves(
        lambda g, e: torch.testing.assert_close(g, e, rtol=0, atol=1e-7), step["hessian_free"], exact
    )
    # the second-order term is not a trifle
    assert max((step["first_order"][n] - g).abs().max() for n, g in exact.items()) > 1e-3


def test_per_fedavg_without_an_inner_step_is_sgd_on_every_second_example() -> None:
    federation = federate_one_model()
    runs = [
        run_rounds(PerFedAvg(alpha=0.0, variant=v, **LOCAL), federation, **SAMPLE)
        for v in ("first_order", "hessian_free")
    ]
    assert tree.equal(runs[0].state.server, runs[1].state.server)
    net = get_initial_networks(federation)[0]
    for clients in plan_rounds(runs[0]):
        replies = [
            reference.plain_sgd(
                net, *get_train_data(federation)[k], [s if len(s) == 1 else s[1::2] for s in steps], LR
            )
            for k, (steps, _) in clients.items()
        ]
        net = reference.weighted_mean(replies, [1] * len(replies))
    assert_nested_close(to_layers(runs[0].state.server), net)


@pytest.mark.few(1)
def test_per_fedavg_infers_after_one_step_on_a_batch_of_the_training_data(engine: type[Engine]) -> None:
    federation = federate_one_model()
    run = run_rounds(PerFedAvg(alpha=0.4, **LOCAL), federation, engine=engine, rounds=4, steps=2, **SAMPLE)
    net = to_layers(run.state.server)
    for k in range(len(SIZES)):
        x, y = get_train_data(federation)[k]
        (first,) = list_batches(run, run.round, federation.infos[k])[1]
        assert len(first) == 8
        expected = reference.descended(net, reference.gradient(net, x[first], y[first]), 0.4)
        assert_nested_close(to_layers(get_personal_parameters(run, k)), expected)
        actual = load_predictors(run, k)
        assert list(actual) == ["adapted", "global"]
        probe = federation.clients[k].test.x
        assert_nested_close(actual["adapted"](probe), reference.forward(expected, probe.double().numpy())[1])
        assert_nested_close(actual["global"](probe), reference.forward(net, probe.double().numpy())[1])
