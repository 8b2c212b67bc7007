"""Deployed models against the plain architecture with the dense weights w + p."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fedlowrank.adapters.deployment import (
    deploy,
    measure_size,
)
from fedlowrank.adapters.thin_layers import CompressedLayer, compress_layer, compressed_tensors
from fedlowrank.core.errors import ConfigError
from fedlowrank.linalg.matricize import LowRank, Weights
from tests.adapters.deployed_models import (
    IMAGE,
    LAYOUTS,
    compressed,
    dense_of,
    draw,
    mixture,
    odd,
    spread,
    truth,
    zoo,
)

torch.set_num_threads(1)


def check_layer(layer: nn.Module, rank: int, density: float, x: Tensor, seed: int = 0) -> CompressedLayer:
    g = torch.Generator().manual_seed(seed)
    w = layer.weight
    f, p = draw((*w.shape,), rank, g), spread((*w.shape,), density, g)
    made: Any = copy.deepcopy(layer).requires_grad_(False)
    compress_layer(made, compressed_tensors(f, p))
    weights: Weights = {n: f if n == "weight" else t for n, t in layer.named_parameters()}
    expected = truth(layer, weights, {"weight": p}, x)
    actual = made(x)
    assert actual.shape == expected.shape
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(made.weight, dense_of(f, w.shape) + p, rtol=1e-12, atol=1e-12)
    assert "weight" not in dict(made.named_parameters())
    return made


density = st.sampled_from([0.0, 0.0, 0.2, 1.0])


@given(
    st.data(), st.integers(1, 2), st.integers(1, 3), st.integers(0, 12), density, st.booleans(), st.booleans()
)
def test_a_convolution(data, dimensions, groups, rank, density, bias, batched) -> None:
    def draw(low: int, high: int) -> tuple[int, ...]:
        return data.draw(st.tuples(*[st.integers(low, high)] * dimensions))

    kernel, stride, dilation = draw(1, 4), draw(1, 3), draw(1, 3)
    padding = data.draw(st.sampled_from(["same", "valid", draw(0, 3)]))
    mode = data.draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"]))
    assume(padding != "same" or max(stride) == 1)
    i, o = groups * data.draw(st.integers(1, 3)), groups * data.draw(st.integers(1, 3))
    columns = i // groups * math.prod(kernel[1:])
    kind = nn.Conv1d if dimensions == 1 else nn.Conv2d
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using padding='same' with even kernel lengths")
        layer = kind(i, o, kernel, stride, padding, dilation, groups, bias, mode, dtype=torch.float64)
        g = torch.Generator().manual_seed(rank)
        x = torch.randn(*[2] * batched, i, *(13, 12)[:dimensions], generator=g, dtype=torch.float64)
        check_layer(layer.requires_grad_(False), min(rank, o * kernel[0], columns), density, x)


@pytest.mark.parametrize("kernel", [7, (1, 5), (5, 1)])
@pytest.mark.parametrize("density", [0.0, 0.1])
@pytest.mark.parametrize("size", [9, 40])
def test_a_convolution_with_both_ways_to_the_sparse_part(kernel, density, size) -> None:
    """Wide layers on a small map keep thin layers beside p, on a large one they merge the two."""
    layer = nn.Conv2d(40, 48, kernel, stride=(2, 3), padding=0, dtype=torch.float64).requires_grad_(False)
    x = torch.randn(1, 40, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for rank in (0, 9):
        check_layer(layer, rank, density, x)


@given(
    st.integers(1, 9), st.integers(1, 9), st.integers(0, 9), density, st.booleans(),
    st.lists(st.integers(0, 3), max_size=3),
)  # fmt: skip
def test_a_linear_layer(inputs, outputs, rank, density, bias, leading) -> None:
    layer = nn.Linear(inputs, outputs, bias, dtype=torch.float64).requires_grad_(False)
    x = torch.randn(*leading, inputs, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    check_layer(layer, min(rank, inputs, outputs), density, x)


@pytest.mark.parametrize("make", [lambda: nn.Conv2d(4, 6, 3, 2, 1), lambda: nn.Linear(9, 5)])
def test_rank_zero_gives_the_bias_of_inputs_that_fit(make) -> None:
    layer = make().double().requires_grad_(False)
    x = torch.randn(2, 4, 9, 9, dtype=torch.float64)
    made = check_layer(layer, 0, 0.0, x)
    bias = layer.bias if isinstance(layer, nn.Linear) else layer.bias.view(-1, 1, 1)
    assert torch.equal(made(x), torch.zeros_like(layer(x)) + bias)
    with pytest.raises(RuntimeError):  # of another number of channels, or inputs
        made(x[:, :3, :, :8])


def test_what_reads_the_weight_gets_it() -> None:
    """An encoder's fused inference reads ``linear1.weight`` and never calls the layer."""
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, dtype=torch.float64).eval()
    weights, sparse = mixture(layer, 0.4, 0.02)
    made = deploy(layer, weights, sparse)
    assert {*compressed(made)} == {"linear1", "linear2"}
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(made(x), truth(layer, weights, sparse, x), rtol=1e-10, atol=1e-10)


@pytest.mark.few(3)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("density", [None, 0.02, 0.6, 0.99])
@pytest.mark.parametrize("name", ["cnn", "resnet18_w16", "mlp"])
def test_a_model_of_the_zoo(name, density, layout) -> None:
    module = zoo(name).double()
    before = {n: p.clone() for n, p in module.state_dict().items()}
    x = torch.randn(3, *IMAGE, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weights, sparse = mixture(module, 0.3, density or 0.0)
    given = None if density is None else sparse
    made = deploy(module, weights, given, layout)
    actual = made(x)
    torch.testing.assert_close(actual, truth(module, weights, given, x), rtol=1e-9, atol=1e-9)
    # values and bits are fewer bytes than a dense weight down to one zero in 64 numbers of float64
    assert bool(compressed(made)) == (density in (None, 0.02) or (density == 0.6 and layout == "small"))
    # needs no gradient, and leaves the original as it was
    assert actual.grad_fn is None
    assert not any(p.requires_grad for p in made.parameters())
    assert all(p.requires_grad for p in module.parameters())
    assert not compressed(module)
    assert {n: torch.equal(p, before[n]) for n, p in module.state_dict().items()} == dict.fromkeys(
        before, True
    )
    assert not made.training


def test_the_weights_given_stay_apart() -> None:
    layer = nn.Linear(9, 9)
    f, bias = LowRank(torch.ones(9, 1), torch.ones(1, 9)), torch.zeros(9)
    made, x = deploy(layer, {"weight": f, "bias": bias}), torch.ones(1, 9)
    f.left.fill_(5)
    f.right.fill_(5)
    bias.fill_(5)
    assert torch.equal(made(x), torch.full((1, 9), 9.0))


def bytes_of_forms(w: Tensor | LowRank, p: Tensor, shape: torch.Size) -> dict[str, int]:
    e = p.element_size()

    def sparse(t: Tensor) -> int:
        n = int((t != 0).sum())
        return n * e + min(n * 4 + (shape[0] + 1) * 4, math.ceil(t.numel() / 8)) if n else 0

    total = dense_of(w, shape) + p
    forms = {"dense": total.numel() * e, "sparse": sparse(total)}
    if isinstance(w, LowRank):
        rows = shape[0] * (*shape, 1, 1)[2]
        forms["factors"] = w.rank * (rows + math.prod(shape) // rows) * e + sparse(p)
    return forms


LAYERS: list[Any] = [
    lambda t: nn.Linear(24, 10, bias=False, dtype=t),
    lambda t: nn.Conv2d(8, 6, 3, bias=False, dtype=t),
    lambda t: nn.Conv2d(8, 6, (5, 1), groups=2, bias=False, dtype=t),
    lambda t: nn.Conv1d(8, 6, 3, bias=False, dtype=t),
]


@given(
    st.sampled_from(LAYERS), st.sampled_from([torch.float64, torch.float32, torch.bfloat16]), st.integers(0, 10),
    st.sampled_from([0.0, 0.01, 0.1, 0.3, 0.5, 0.9]), st.booleans(),
)  # fmt: skip
def test_the_form_has_the_least_bytes(make, dtype, rank, density, factored) -> None:
    layer, g = make(dtype), torch.Generator().manual_seed(rank)
    shape = layer.weight.shape
    f = draw((*shape,), rank, g, dtype)
    w = f if factored else spread((*shape,), density, g, dtype)
    p = spread((*shape,), density, g, dtype)
    forms = bytes_of_forms(w, p, shape)
    made = deploy(layer, {"weight": w}, {"weight": p})
    assert measure_size(made).nbytes == min(forms.values())
    assert isinstance(made, CompressedLayer) == (forms["dense"] > min(forms.values()))
    torch.testing.assert_close(made.weight, dense_of(w, shape) + p, rtol=2e-2, atol=2e-2)


def flops(module: nn.Module, x: Tensor) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(x)
    return counter.get_total_flops()


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.Conv2d(64, 64, 3, 1, 1), (4, 64, 16, 16)),
        (lambda: nn.Conv2d(64, 128, 3, 2, 1), (4, 64, 16, 16)),
        (lambda: nn.Conv2d(64, 64, 5, 1, 2, groups=16), (4, 64, 16, 16)),
        (lambda: nn.Conv2d(64, 128, 1, 2), (4, 64, 16, 16)),
        (lambda: nn.Linear(128, 256), (4, 128)),
    ],
)
def test_fast_is_thin_only_where_that_saves_work(make, shape) -> None:
    layer, x, g = make(), torch.randn(shape), torch.Generator().manual_seed(0)
    thin = {}
    for rank in (1, 10, 20, 30, 40, 50, 60, 70, 97):
        f = draw((*layer.weight.shape,), rank, g, torch.float32)
        weights: Weights = {"weight": f, "bias": layer.bias}
        made = deploy(layer, weights, layout="fast")
        thin[rank] = isinstance(made, CompressedLayer)
        assert not thin[rank] or flops(made, x) < flops(layer, x)
        if isinstance(layer, nn.Conv2d):  # any sparse part is computed as a dense convolution
            p = spread((*layer.weight.shape,), 0.01, g, torch.float32)
            assert not compressed(deploy(layer, weights, {"weight": p}, "fast"))
    assert thin[1]
    assert not thin[97]
    assert [*thin.values()] == sorted(thin.values(), reverse=True)


def test_fast_keeps_a_sparse_linear_layer_where_few_values_are_left() -> None:
    layer, g = nn.Linear(64, 64, bias=False), torch.Generator().manual_seed(0)
    f = draw((64, 64), 2, g, torch.float32)
    actual = [
        isinstance(
            deploy(layer, {"weight": f}, {"weight": spread((64, 64), d, g, torch.float32)}, "fast"),
            CompressedLayer,
        )
        for d in (0.02, 0.4)
    ]
    assert actual == [True, False]


def test_rows_strided_over_are_work() -> None:
    """The first of two thin convolutions makes all rows: with a stride, factors that save bytes may cost
    time."""
    g = torch.Generator().manual_seed(0)
    actual = []
    for stride in (1, 4):
        layer = nn.Conv2d(128, 128, 3, stride, 1, bias=False)
        weights: Weights = {"weight": draw((128, 128, 3, 3), 90, g, torch.float32)}
        actual.append([isinstance(deploy(layer, weights, layout=how), CompressedLayer) for how in LAYOUTS])
    assert actual == [[True, True], [True, False]]


def test_layers_of_other_kinds_and_shared_weights_are_dense_and_right() -> None:
    module = odd()
    weights, sparse = mixture(module, 0.4, 0.01)
    assert "head.weight" not in weights  # tied to the embedding
    x = torch.arange(30).view(3, 10)
    made = deploy(module, weights, sparse)
    torch.testing.assert_close(made(x), truth(module, weights, sparse, x), rtol=1e-9, atol=1e-9)
    expected = {"twice", "weight", "parts.left", "parts.a/b~c é", "parts.weight", "hooked"}
    assert {*compressed(made)} == expected
    assert made.twice is made.again
    assert made.head.weight is made.embedding.weight
    assert isinstance(made.unregistered[0], CompressedLayer)


def test_a_forward_of_its_own_keeps_a_layer_dense() -> None:
    layer = nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 12))
    layer[0].forward = torch.tanh  # type: ignore[method-assign]
    weights, _ = mixture(layer, 0.4, 0.0)
    made = deploy(layer, weights)
    assert {*compressed(made)} == {"1"}
    assert torch.equal(made[0](torch.ones(3)), torch.ones(3).tanh())


def test_a_weight_shared_by_two_layers_stays_shared() -> None:
    module = nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 12)).double()
    module[1].weight = module[0].weight
    weights, sparse = mixture(module, 0.4, 0.01)
    made, x = deploy(module, weights, sparse), torch.randn(2, 12, dtype=torch.float64)
    torch.testing.assert_close(made(x), truth(module, weights, sparse, x), rtol=1e-10, atol=1e-10)
    assert not compressed(made)
    assert made[0].weight is made[1].weight
    assert measure_size(made).parameters == 144 + 24


def test_an_unknown_layout_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'smal' is no layout.*'small'"):
        deploy(nn.Linear(3, 2, bias=False), {"weight": torch.ones(2, 3)}, layout="smal")  # type: ignore[arg-type]
