"""Routers: shares of clusters, their largest, known clusters, and settings out of range."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedlowrank.adapters.mixtures.router import Router
from fedlowrank.core.contract import ClientInfo, Pass
from fedlowrank.core.errors import ConfigError, TaskError
from fedlowrank.core.learning.optimizer import SGD, Group
from fedlowrank.methods.ensemble import Ensemble
from fedlowrank.methods.floral import FederatedFloral
from fedlowrank.methods.shared.clusters import (
    compute_cluster_weights,
    require_known_cluster,
    zero_router_logits,
)
from fedlowrank.training.client_tensors.client_tensor import to_client_tensor
from tests.golden import floral_reference as reference


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lr": -0.1}, "router: lr and noise must be >= 0 and temperature > 0; they are -0.1"),
        ({"lr": float("nan")}, "lr and noise"),
        ({"lr": float("inf")}, "lr and noise"),
        ({"temperature": 0.0}, "temperature > 0"),
        ({"temperature": float("inf")}, "temperature > 0"),
        ({"noise": -1.0}, "noise must be >= 0"),
        ({"unseen_steps": -1}, "router: unseen_steps must be >= 0 and top >= 1; they are -1 and None"),
        ({"top": 0}, "unseen_steps must be >= 0 and top >= 1; they are 10 and 0"),
        ({"top": 1}, r"top = 1 .*no gradient.*top >= 2, or update = 'mfl'"),
        ({"routing": "best"}, "routing"),
        ({"update": "adam"}, "update"),
    ],
)
def test_a_router_out_of_range_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Router(**fields)


def test_shares_are_a_softmax_at_a_temperature() -> None:
    theta = torch.tensor([0.3, -1.0, 2.0], dtype=torch.float64)
    for temperature in (0.1, 1.0, 7.0):
        e = np.exp(theta.numpy() / temperature)
        np.testing.assert_allclose(Router(temperature=temperature).shares(theta), e / e.sum(), atol=1e-14)
    assert Router(temperature=0.01).shares(theta)[2] == 1
    assert torch.equal(Router().shares(zero_router_logits({"a": torch.zeros(4, 2)})), torch.full((4,), 0.25))


def test_the_largest_are_mixed_and_of_equal_ones_the_first() -> None:
    theta = torch.tensor([0.3, -1.0, 2.0, 0.1], dtype=torch.float64)
    pi = Router(top=2).shares(theta)
    np.testing.assert_allclose(pi, reference.shares(theta.numpy(), top=2), atol=1e-14)
    assert pi[[1, 3]].tolist() == [0, 0]
    assert torch.equal(Router(top=4).shares(theta), theta.softmax(0))
    assert torch.equal(Router(top=9).shares(theta), theta.softmax(0))
    for top in (2, 3):
        assert Router(top=top).shares(torch.zeros(5)).tolist() == pytest.approx(
            [1 / top] * top + [0.0] * (5 - top)
        )
    assert Router(top=2).shares(torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0])).tolist() == [0, 0.5, 0, 0.5, 0]
    assert Router(top=1, update="mfl").shares(torch.tensor([0.0, 1.0, 1.0])).tolist() == [0, 1, 0]
    # many clients at once choose alike
    many = torch.tensor([[0.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    assert Router(top=2).shares(to_client_tensor(many)).as_subclass(Tensor).tolist() == [
        [0, 0.5, 0.5, 0],
        [0.5, 0.5, 0, 0],
    ]
    # what is left out has no gradient, and no NaN
    x = theta.clone().requires_grad_()
    (Router(top=2).shares(x) ** 2).sum().backward()
    assert x.grad[[1, 3]].tolist() == [0, 0]
    assert bool(x.grad[[0, 2]].all())


def test_passes_of_a_router() -> None:
    assert list(Router().passes(Pass(2, 8))) == ["local", "router"]
    sweep = Router(unseen_steps=7).passes(Pass(2, 8))["router"]
    assert (sweep.epochs, sweep.batch_size, sweep.steps) == (7, 8, 7)
    assert Router(unseen_steps=0).passes(Pass(2, 8))["router"].steps == 1


def test_a_known_cluster_or_what_is_missing() -> None:
    assert require_known_cluster("X", ClientInfo(3, 5, "a", cluster=1), 2) == 1
    with pytest.raises(
        TaskError, match=r"^X: optimal routing needs .* of client 3 is unknown. Set \[concept\]"
    ):
        require_known_cluster("X", ClientInfo(3, 5, "a"), 2)
    with pytest.raises(TaskError, match=r"^X: client 3 is of cluster 2, but clusters is 2$"):
        require_known_cluster("X", ClientInfo(3, 5, "a", cluster=2), 2)


def test_weights_of_replies_are_shares_times_examples() -> None:
    assert compute_cluster_weights(
        "X", ClientInfo(0, 20, "a"), torch.tensor([0.5, 0.25, 0.25]), 3
    ).tolist() == [
        10,
        5,
        5,
    ]
    assert compute_cluster_weights("X", ClientInfo(1, 5, "a", cluster=2), None, 3).tolist() == [0, 0, 5]


@pytest.mark.parametrize("method", [Ensemble, FederatedFloral])
def test_the_settings_of_the_router_are_no_group_of_the_optimizer(method: Any) -> None:
    with pytest.raises(
        ConfigError, match=rf"{method.title}: optimizer.groups.theta does nothing.* router.lr"
    ):
        method(optimizer=SGD(groups={"theta": Group(lr=50.0)}))
