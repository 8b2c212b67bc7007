"""The count of operations against torch's own counter, which is many times slower, and against formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fedlowrank.training.flops import FORMULAS, FlopCounter, FlopLedger


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # with weights asked for, it is made of products that torch counts
        out: torch.Tensor = self.inner(x, x, x, need_weights=True)[0]
        return out


class AttentionWithoutWeights(Attention):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x, x, x, need_weights=False)[0]
        return out


MODELS: dict[str, Any] = {
    "convolutions": lambda: (nn.Sequential(nn.Conv2d(3, 8, 3, groups=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(),
                                           nn.Linear(8 * 36, 5)), (4, 3, 8, 8)),
    "attention step by step": lambda: (Attention(), (2, 5, 16)),
    "a bilinear form": lambda: (nn.Sequential(nn.Unflatten(1, (2, 3)), nn.Conv1d(2, 4, 2)), (5, 6)),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("how", ["training", "no_grad", "inference"])
def test_as_torch_counts(name: str, how: str) -> None:
    model, shape = MODELS[name]()
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), requires_grad=how == "training")

    def step() -> None:
        if how == "training":
            model(x).square().sum().backward()
        else:
            with torch.no_grad() if how == "no_grad" else torch.inference_mode():
                model(x)

    with FlopCounter() as counter:
        step()
    with FlopCounterMode(display=False) as reference:
        step()
    assert counter.total == reference.get_total_flops() > 0


def test_fused_attention_counts_on_a_cpu() -> None:
    batch, heads, length, width = 2, 3, 7, 4
    x = torch.randn(batch, heads, length, width, requires_grad=True)
    product = 2 * batch * heads * length * length * width
    with FlopCounter() as forward:
        out = nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
    assert forward.total == 2 * product
    with FlopCounter() as backward:
        out.sum().backward()
    # the scores are computed anew; then gradients of values, of scores, of queries and of keys
    assert backward.total == 5 * product


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_lstm_counts_as_its_matrix_products(layers: int, bidirectional: bool) -> None:
    batch, length, width, hidden = 3, 5, 4, 6
    lstm = nn.LSTM(width, hidden, layers, batch_first=True, bidirectional=bidirectional)
    x = torch.randn(batch, length, width, requires_grad=True)
    directions = 2 if bidirectional else 1
    products = sum(
        2 * batch * length * directions * 4 * hidden * (n + hidden)
        for n in [width, *[directions * hidden] * (layers - 1)]
    )
    with FlopCounter() as forward:
        out = lstm(x)[0]
    assert forward.total == products
    with FlopCounter() as backward:
        out.sum().backward()
    assert backward.total == 2 * products


def test_lstm_of_cudnn_counts_by_its_matrices() -> None:
    batch, length, width, hidden = 3, 5, 4, 6
    weights = [p.detach() for p in nn.LSTM(width, hidden).parameters()]
    x = torch.zeros(length, batch, width)
    products = 2 * batch * length * 4 * hidden * (width + hidden)
    assert FORMULAS[torch.ops.aten._cudnn_rnn](x, weights, 4) == products
    assert FORMULAS[torch.ops.aten._cudnn_rnn_backward](x, weights, 4) == 2 * products


@pytest.mark.parametrize("make", [lambda: nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True),
                                  lambda: AttentionWithoutWeights()])  # fmt: skip
def test_attention_counts_the_same_in_evaluation(make: Callable[[], nn.Module]) -> None:
    model, x = make(), torch.randn(2, 5, 16)
    with FlopCounter() as training:
        model(x)
    model.eval()
    with torch.inference_mode(), FlopCounter() as evaluation:
        model(x)
    assert evaluation.total == training.total > 0
    assert torch.backends.mha.get_fastpath_enabled()


def test_every_kind_and_size_is_counted_once() -> None:
    ledger, b = FlopLedger(), torch.zeros(5, 2)
    for size in (3, 4):
        assert not ledger.knows("k", (size,))
        with ledger.counting("k", (size,)):
            torch.zeros(size, 5) @ b
    with ledger.counting("other", (3,)):
        torch.zeros(3, 5) @ b @ b.T
    assert ledger.total("k", {(3,): 2, (4,): 1}) == 2 * (2 * 3 * 5 * 2) + 2 * 4 * 5 * 2
    assert ledger.total("other", {(3,): 1}) == 2 * 3 * 5 * 2 * 2
