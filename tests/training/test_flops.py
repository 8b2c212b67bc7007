"""The count of operations against torch's own counter, which is many times slower, and against formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fedlowrank.training.flop_formulas import FORMULAS
from fedlowrank.training.flops import FlopCounter, FlopLedger


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


@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("needs_input_gradient", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_grouped_convolutions_count_each_gradient_like_the_forward_pass(
    groups: int, needs_input_gradient: bool, transposed: bool
) -> None:
    make = nn.ConvTranspose2d if transposed else nn.Conv2d
    layer, x = make(8, 16, 3, groups=groups), torch.randn(2, 8, 6, 6, requires_grad=needs_input_gradient)
    # each output (each input, if transposed) is multiplied by the weights of its group
    products = 2 * 2 * (36 if transposed else 16) * 8 * 16 // groups * 9
    with FlopCounter() as forward:
        out = layer(x)
    assert forward.total == products
    with FlopCounter() as backward:
        out.sum().backward()
    assert backward.total == products * (2 if needs_input_gradient else 1)


def test_vectorized_gradients_of_a_convolution_count_once() -> None:
    layer, x = nn.Conv2d(3, 4, 3), torch.randn(5, 2, 3, 6, 6)

    def loss(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.conv2d(x, weight).square().sum()

    weights = layer.weight.detach().expand(5, 4, 3, 3, 3)
    with FlopCounter() as counter:
        torch.vmap(torch.func.grad(loss))(weights, x)
    assert counter.total == 2 * (5 * 2 * 2 * 16 * 4 * 3 * 9)


PRODUCTS: dict[str, tuple[Callable[..., torch.Tensor], list[tuple[int, ...]], int]] = {
    "matrix by vector": (lambda a, b: a @ b, [(4, 6), (6,)], 2 * 24),
    "batch by vector": (lambda a, b: a @ b, [(3, 4, 6), (6,)], 2 * 72),
    "vectors": (torch.dot, [(8,), (8,)], 2 * 8),
    "sum and vector": (torch.addmv, [(4,), (4, 6), (6,)], 2 * 24),
    "sum of a batch": (torch.addbmm, [(4, 5), (3, 4, 6), (3, 6, 5)], 2 * 3 * 4 * 6 * 5),
    "distances": (torch.cdist, [(30, 8), (40, 8)], 2 * 30 * 40 * 8),
    "bilinear form": (nn.functional.bilinear, [(3, 6), (3, 5), (4, 6, 5)], 2 * 3 * 4 * 6 * 5),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_operators_that_torch_does_not_count(name: str) -> None:
    call, shapes, products = PRODUCTS[name]
    tensors = [torch.randn(shape, generator=torch.Generator().manual_seed(0)) for shape in shapes]
    with FlopCounter() as counter:
        call(*tensors)
    assert counter.total == products


def test_bilinear_layers_count_their_gradients() -> None:
    layer = nn.Bilinear(6, 5, 4)
    with FlopCounter() as counter:
        layer(torch.randn(3, 6), torch.randn(3, 5)).sum().backward()
    # the forward pass and the gradient of the weight
    assert counter.total == 2 * (2 * 3 * 4 * 6 * 5)


def test_complex_products_count_four_real_ones() -> None:
    a, b = (torch.randn(shape, dtype=torch.complex64) for shape in ((3, 4), (4, 5)))
    with FlopCounter() as counter:
        a @ b
    assert counter.total == 4 * 2 * 3 * 4 * 5


def test_grouped_products_of_experts_count_each_row_once() -> None:
    rows, width, out, experts = 16, 8, 32, 4
    a, b = torch.zeros(rows, width), torch.zeros(experts, width, out)
    count = FORMULAS[torch.ops.aten._grouped_mm]
    assert count(a, b) == 2 * rows * width * out
    # the gradients of the rows and of the matrices
    assert count(torch.zeros(rows, out), b.mT) == 2 * rows * width * out
    assert count(a.mT, torch.zeros(rows, out)) == 2 * rows * width * out
    assert count(torch.zeros(experts, 3, width), b) == 2 * experts * 3 * width * out


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
