"""Parameters that the loss does not use, in all steps or in some, against PyTorch's optimizers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedlowrank import SGD, AdamW, Federation, simulate
from fedlowrank.methods import FedAvg, FedProx

OPTIMIZERS: dict[str, tuple[Any, Any]] = {
    "decay": (SGD(lr=0.1, weight_decay=0.2), lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.2)),
    "momentum": (
        SGD(lr=0.1, momentum=0.9, weight_decay=0.2),
        lambda p: torch.optim.SGD(p, 0.1, 0.9, weight_decay=0.2),
    ),
    "nesterov": (
        SGD(lr=0.1, momentum=0.9, weight_decay=0.2, nesterov=True),
        lambda p: torch.optim.SGD(p, 0.1, 0.9, weight_decay=0.2, nesterov=True),
    ),
    "adamw": (AdamW(lr=0.1, weight_decay=0.2), lambda p: torch.optim.AdamW(p, 0.1, weight_decay=0.2)),
}


class Net(nn.Module):
    """A layer that is never used, one with a gradient of zero, and one that is used in every second step."""

    step: Tensor

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))
        self.spare, self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        if self.kind == "zero":
            h = h + 0.0 * self.spare(x)
        if self.kind == "sometimes" and self.training:
            h = h + self.spare(x) if self.step % 2 else h
            self.step += 1
        scores: Tensor = self.last(h)
        return scores


def data() -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(0)
    return [(torch.randn(8, 4, generator=g), torch.arange(8) % 3) for _ in range(2)]


def module(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return Net(kind)


@pytest.mark.few(12)
@pytest.mark.parametrize("settings", [{}, {"engine": "vectorized"}, {"micro_batch": 3}], ids=str)
@pytest.mark.parametrize("kind", ["never", "zero", "sometimes"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_parameter_without_a_gradient_is_left_out(name: str, kind: str, settings: dict[str, Any]) -> None:
    if kind == "sometimes" and "micro_batch" in settings:
        pytest.skip("the module counts its calls")
    ours, theirs = OPTIMIZERS[name]
    start = module(kind)
    made = Federation.from_arrays([{"train": d} for d in data()], copy.deepcopy(start), classes=3)
    actual = simulate(FedAvg(epochs=4, batch_size=8, optimizer=ours), made, rounds=1, **settings).personal(0)
    ends = []
    for x, y in data():
        net = copy.deepcopy(start)
        optimizer = theirs(net.parameters())
        for _ in range(4):
            optimizer.zero_grad()
            functional.cross_entropy(net(x), y).backward()
            optimizer.step()
        ends.append(dict(net.named_parameters()))
    for n in ends[0]:
        torch.testing.assert_close(actual[n], (ends[0][n] + ends[1][n]).detach() / 2, rtol=1e-4, atol=1e-6)
    if kind == "never":
        assert torch.equal(actual["spare.weight"], start.spare.weight)


def test_a_proximal_term_uses_all_parameters() -> None:
    start = module("never")
    made = Federation.from_arrays([{"train": d} for d in data()], copy.deepcopy(start), classes=3)
    method = FedProx(mu=0.5, batch_size=8, optimizer=SGD(lr=0.1, weight_decay=0.2))
    actual = simulate(method, made, rounds=1).personal(0)
    torch.testing.assert_close(actual["spare.weight"], start.spare.weight.detach() * (1 - 0.1 * 0.2))
