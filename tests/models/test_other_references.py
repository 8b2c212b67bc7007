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


class Counter(nn.Module):
    def __init__(self, steps: Tensor) -> None:
        super().__init__()
        self.register_buffer("steps", steps)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
        return x


class Reader(Counter):
    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + self.steps)


def two_layers(shared: Tensor) -> nn.Module:
    return nn.Sequential(Counter(shared), Reader(shared), nn.Linear(6, 3))


def reader_first(shared: Tensor) -> nn.Module:
    return nn.Sequential(Reader(shared), Counter(shared), nn.Linear(6, 3))


class Alias(Counter):
    """Keeps the buffer in a list, too."""

    def __init__(self, steps: Tensor) -> None:
        super().__init__(steps)
        self.kept = [self.steps]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + self.kept[0])


class Part(Counter):
    """A second buffer is a part of the first one."""

    def __init__(self, steps: Tensor) -> None:
        super().__init__(steps.repeat(2))
        self.register_buffer("part", self.steps[1:])

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + self.part)


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (two_layers, r"0\.steps.*1\.steps"),
        (reader_first, r"0\.steps.*1\.steps"),
        (lambda shared: nn.Sequential(Alias(shared), nn.Linear(6, 3)), r"0\.steps.*0\.kept"),
        (lambda shared: nn.Sequential(Part(shared), nn.Linear(6, 3)), r"0\.steps.*0\.part"),
    ],
)
def test_another_reference_to_a_buffer_that_changes_is_refused_by_name(
    make: Callable[[Tensor], nn.Module], names: str
) -> None:
    with pytest.raises(TaskError, match=f"forward changes the buffer {names}"):
        Federation.from_arrays(DATA, make(torch.zeros(1)), classes=3)


def test_a_table_that_layers_share_and_do_not_change_is_allowed() -> None:
    class Scale(Counter):
        def forward(self, x: Tensor) -> Tensor:
            return x * self.steps

    table = torch.full((1,), 2.0)
    net = nn.Sequential(Scale(table), Scale(table), Counter(torch.zeros(1)), nn.Linear(6, 3))
    federation = Federation.from_arrays(DATA, net, classes=3)
    x = torch.from_numpy(X[0])
    result = simulate(methods.FedAvg(batch_size=20, optimizer=SGD(lr=0.5)), federation, rounds=1)
    weight, bias = (result.run.state.server[f"3.{n}"] for n in ("weight", "bias"))
    torch.testing.assert_close(result.predict(0, x), functional.linear(4 * x, weight, bias))


class Merging(nn.Linear):
    """A LoRA layer that adds its factors to the frozen weight in evaluation mode, as the one of loralib."""

    merges = True

    def __init__(self) -> None:
        super().__init__(6, 3)
        self.a, self.b = nn.Parameter(torch.randn(2, 6)), nn.Parameter(torch.zeros(3, 2))
        self.weight.requires_grad_(False)
        self.is_merged = False

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        if self.merges and mode == self.is_merged:
            self.weight.data += (-1 if mode else 1) * self.b @ self.a
            self.is_merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        scores = functional.linear(x, self.weight, self.bias)
        return scores if self.is_merged else scores + x @ self.a.T @ self.b.T


def test_a_layer_that_merges_for_evaluation_is_refused() -> None:
    with pytest.raises(TaskError, match=r"in evaluation mode.*'' \(Merging\).*merge_weights=False"):
        Federation.from_arrays(DATA, Merging(), classes=3)


def test_the_same_layer_without_merging_is_evaluated_as_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Merging, "merges", False)
    federation = Federation.from_arrays(DATA, Merging(), classes=3)
    result = simulate(methods.FedAvg(batch_size=20, optimizer=SGD(lr=0.5)), federation, rounds=2)
    network = Merging()
    network.weight.data.copy_(federation.architectures["model"].module.weight)
    network.load_state_dict(result.run.state.server, strict=False)
    x = torch.from_numpy(X[0])
    torch.testing.assert_close(result.predict(0, x), network(x).detach())
