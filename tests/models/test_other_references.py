"""A model whose forward reads a parameter by another reference than its attribute is refused: it would not be trained."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedlowrank import SGD, Federation, methods, simulate
from fedlowrank.core.errors import TaskError

X = np.random.default_rng(0).normal(size=(4, 20, 6)).astype("float32")
DATA = [(x, np.arange(20) % 3) for x in X]


class List(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(6, 6))
        self.weights = [self.w]
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x @ self.weights[0])


class Closure(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
        self.call = functools.partial(functional.linear, weight=self.first.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.call(x) + self.first(x))


class NormalizedList(List):
    """In training mode one example is too few for it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


class Allowed(nn.Module):
    """Submodules in a list, a ParameterList, an LSTM (which keeps a list of its own), a tied and an unused weight."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.a, self.last = nn.LSTM(2, 6, batch_first=True), nn.Linear(6, 6), nn.Linear(6, 3)
        self.layers = [self.a]
        self.further = nn.ParameterList([torch.randn(6, 6)])
        self.unused = nn.Parameter(torch.randn(3))
        self.b = nn.Linear(6, 6)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.lstm(x.reshape(-1, 3, 2))[0][:, -1]
        return self.last(self.b(self.layers[0](h) @ self.further[0]))


@pytest.mark.parametrize(
    ("net", "names"), [(List, "reads w by"), (Closure, "first.weight"), (NormalizedList, "reads w by")]
)
def test_another_reference_is_refused_by_name(net: Callable[[], nn.Module], names: str) -> None:
    for model in (net, net()):
        with pytest.raises(TaskError, match=names):
            Federation.from_arrays(DATA, model, classes=3)


def test_every_parameter_that_forward_uses_is_trained_elsewhere() -> None:
    federation = Federation.from_arrays(DATA, Allowed, classes=3)
    start: dict[str, Any] = federation.architectures["model"].initial
    method = methods.FedAvg(batch_size=20, optimizer=SGD(lr=0.5))
    end = simulate(method, federation, rounds=1).run.state.server
    assert {n for n in start if torch.equal(start[n], end[n])} == {"unused"}


def test_frozen_parameters_may_be_read_by_any_reference() -> None:
    net = List()
    net.w.requires_grad_(False)
    Federation.from_arrays(DATA, net, classes=3)
