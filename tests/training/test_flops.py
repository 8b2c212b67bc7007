"""The count of operations against torch's own counter, which is many times slower, and against formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fedlowrank.training.flops import FlopCounter, FlopLedger


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # with weights asked for, it is made of products that torch counts
        out: torch.Tensor = self.inner(x, x, x, need_weights=True)[0]
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
