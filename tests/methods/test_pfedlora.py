"""pFedLoRA: against NumPy, with the loss of the task, as Standalone at μ = 1, and how its adapter begins."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedlowrank import Loss
from fedlowrank.core.learning.optimizer import SGD, AdamW
from fedlowrank.data.federation import Federation
from fedlowrank.engines.engine import Engine
from fedlowrank.engines.sequential import Sequential
from fedlowrank.methods.pfedlora import PFedLoRA
from fedlowrank.methods.standalone import Standalone
from fedlowrank.models.architectures.cnn import CNN
from tests.golden import reference

from .comparisons import assert_bits_equal, assert_nested_close, to_layers
from .run_contents import get_client_states, get_initial_networks, get_train_data, plan_rounds
from .setting import (
    CLASSES,
    FLOAT32,
    LOCAL,
    LR,
    SAMPLE,
    SLOW_LOCAL,
    WIDTH,
    federate_one_model,
    federate_two_models,
    run_rounds,
)


def assert_pfedlora_equals_reference(
    relu: bool, mu: float, make: Any, engine: type[Engine], adapter_lr: float | None = 0.2, **data: Any
) -> None:
    """Compare a run with the reference.

    Args:
        relu: see the method.
        mu: see the method.
        make: makes the federation.
        engine: that trains.
        adapter_lr: learning rate of the adapter's optimizer; None to set none, so that it has the model's.
        data: settings of the federation.
    """
    federation = make(**data)
    adapter_optimizer = None if adapter_lr is None else SGD(lr=adapter_lr)
    method = PFedLoRA(mu=mu, width=5, relu=relu, adapter_optimizer=adapter_optimizer, **LOCAL)
    run = run_rounds(method, federation, engine=engine, **SAMPLE)
    start = method.server_init(run.task)
    adapter = to_layers({"a": start.a, "a_bias": start.a_bias, "b": start.b, "b_bias": start.b_bias})
    server, nets = reference.pfedlora(
        adapter,
        get_initial_networks(federation),
        get_train_data(federation),
        plan_rounds(run),
        LR,
        LR if adapter_lr is None else adapter_lr,
        mu,
        relu,
    )
    assert_nested_close(
        [run.state.server.a, run.state.server.a_bias, run.state.server.b, run.state.server.b_bias],
        [t for layer in server for t in layer],
    )
    assert_nested_close([to_layers(s) for s in get_client_states(run)], nets)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("relu", "mu", "make"),
    [(False, 0.7, federate_two_models), (True, 0.5, federate_two_models), (True, 0.9, federate_one_model)],
)
def test_pfedlora(relu: bool, mu: float, make: Any, engine: type[Engine]) -> None:
    assert_pfedlora_equals_reference(relu, mu, make, engine)


def test_pfedlora_minimizes_the_loss_of_the_task(smoothed_loss: Loss) -> None:
    assert_pfedlora_equals_reference(True, 0.5, federate_two_models, Sequential, loss=smoothed_loss)


def test_pfedlora_trains_the_adapter_with_the_optimizer_of_the_model_unless_told_otherwise(
    engine: type[Engine],
) -> None:
    assert_pfedlora_equals_reference(False, 0.7, federate_two_models, engine, adapter_lr=None)


@pytest.mark.few(1)
@pytest.mark.parametrize("optimizer", [SGD(lr=0.2), SGD(lr=0.1, momentum=0.9), AdamW(lr=0.01)])
def test_pfedlora_at_mu_one_trains_the_model_as_standalone_bit_for_bit(optimizer) -> None:
    settings = {"optimizer": optimizer, "batch_size": 8, "epochs": 2}
    a = run_rounds(PFedLoRA(mu=1.0, width=5, **settings), federate_two_models(**FLOAT32), **SAMPLE)
    b = run_rounds(Standalone(**settings), federate_two_models(**FLOAT32), **SAMPLE)
    assert sorted(a.state.clients) == sorted(b.state.clients)
    for k, state in b.state.clients.items():
        assert_bits_equal(a.state.clients[k], state)


def test_an_adapter_started_by_decomposition_of_the_head_begins_as_the_head() -> None:
    federation = federate_two_models()
    model = federation.architectures["deep"]
    r = torch.randn(6, WIDTH, dtype=torch.float64)
    for width in (CLASSES, CLASSES + 3):
        adapter = PFedLoRA(width=width, start="svd", **SLOW_LOCAL).server_init(federation.task(1))
        assert adapter.a.shape == (width, WIDTH)
        torch.testing.assert_close(
            adapter.apply(r, relu=False), model.head(model.initial, r), rtol=0, atol=1e-6
        )
    narrow = PFedLoRA(width=2, start="svd", **SLOW_LOCAL).server_init(federation.task(1))
    u, s, vt = np.linalg.svd(model.initial["head.weight"].numpy(), full_matrices=False)
    np.testing.assert_allclose((narrow.b @ narrow.a).numpy(), (u[:, :2] * s[:2]) @ vt[:2], atol=1e-6)


def test_an_adapter_that_starts_from_a_head_of_rank_one_has_no_dead_component() -> None:
    module = nn.Linear(6, 4)
    with torch.no_grad():
        module.weight.copy_(torch.outer(torch.arange(4.0), torch.arange(6.0)))
    for scale, own in ((1.0, 1), (0.0, 0)):
        with torch.no_grad():
            module.weight.mul_(scale)
        clients = [(np.zeros((8, 6), np.float32), np.arange(8) % 4)]
        federation = Federation.from_arrays(clients, {"linear": nn.Sequential(nn.ReLU(), module)}, head="1")
        adapter = PFedLoRA(width=3, start="svd", **SLOW_LOCAL).server_init(federation.task(1))
        torch.testing.assert_close(adapter.b @ adapter.a, module.weight.detach(), rtol=0, atol=1e-5)
        # the others have a random row, and a gradient reaches their columns of zeros
        assert (adapter.a.norm(dim=1) > 1e-3).all()
        assert not adapter.b[:, own:].any()


def test_an_adapter_of_a_head_of_two_layers_decomposes_the_first() -> None:
    x = np.zeros((8, 1, 8, 8), np.float32)
    make = {"cnn": lambda: CNN((1, 8, 8), 3, (2, 3), (20, 9), split="fc1")}
    federation = Federation.from_arrays([(x, np.arange(8) % 3)], make, classes=3)
    initial = federation.architectures["cnn"].initial
    w2, b2, w3, b3 = (p.double().numpy() for n, p in initial.items() if n.startswith("head."))
    adapter = PFedLoRA(width=4, start="svd", **SLOW_LOCAL).server_init(federation.task(1))
    u, s, vt = np.linalg.svd(w2, full_matrices=False)
    np.testing.assert_allclose((adapter.b @ adapter.a).numpy(), w3 @ (u[:, :4] * s[:4]) @ vt[:4], atol=1e-5)
    np.testing.assert_allclose(adapter.b_bias.numpy(), w3 @ b2 + b3, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*makes 5 scores")
def test_an_adapter_of_a_head_with_more_outputs_than_classes_begins_as_those_of_the_classes() -> None:
    clients = [(np.random.default_rng(0).normal(size=(8, 6)).astype("float32"), np.arange(8) % 3)]
    head = nn.Linear(6, 5)
    federation = Federation.from_arrays(
        clients, {"linear": nn.Sequential(nn.ReLU(), head)}, head="1", classes=3
    )
    adapter = PFedLoRA(width=2, start="svd", **SLOW_LOCAL).server_init(federation.task(1))
    u, s, vt = np.linalg.svd(head.weight.detach().numpy(), full_matrices=False)
    np.testing.assert_allclose((adapter.b @ adapter.a).numpy(), ((u[:, :2] * s[:2]) @ vt[:2])[:3], atol=1e-6)
    np.testing.assert_array_equal(adapter.b_bias, head.bias.detach()[:3])


def test_a_random_adapter_is_uniform_as_a_linear_layer_draws_it() -> None:
    federation = federate_two_models(**FLOAT32)
    adapter = PFedLoRA(width=400, **SLOW_LOCAL).server_init(federation.task(1))
    for t, fan_in in ((adapter.a, WIDTH), (adapter.a_bias, WIDTH), (adapter.b, 400), (adapter.b_bias, 400)):
        bound = fan_in**-0.5
        assert t.abs().max() <= bound
        if t.numel() > 300:
            assert abs(float(t.mean())) < 0.1 * bound
            assert float(t.std()) == pytest.approx(bound / 3**0.5, rel=0.1)
