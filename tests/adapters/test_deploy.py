"""Deployed models against the plain architecture with the dense weights w + p."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from fedlowrank.adapters import thin_layers as layers
from fedlowrank.adapters.deployment import (
    Size,
    compare_latency,
    deploy,
    load_deployed,
    measure_latency,
    measure_size,
    save_deployed,
)
from fedlowrank.adapters.thin_layers import CompressedLayer
from fedlowrank.core.errors import CheckpointError, ConfigError, TaskError
from fedlowrank.core.key import Key
from fedlowrank.core.tree import Params, decode, encode
from fedlowrank.linalg.matricize import LowRank, Weights
from fedlowrank.linalg.nuclear_norm import apply_prox
from fedlowrank.models.architecture import build_module
from fedlowrank.models.resnet import ResNet18
from fedlowrank.models.zoo import ModelSettings

LAYOUTS = ("small", "fast")
IMAGE = (3, 32, 32)


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def zoo(name: str) -> nn.Module:
    return build_module(ModelSettings((name,)).factories(IMAGE, 10)[name], Key((0,)))


def dense_of(w: Tensor | LowRank, shape: torch.Size) -> Tensor:
    """Scheme 2 by indices: entry (o, i, k1, k2) is row o·K1 + k1 of ``left`` times column i·K2 + k2 of ``right``."""
    if not isinstance(w, LowRank):
        return w
    o, i, k1, k2 = (*shape, 1, 1)[:4]
    left, right = w.left.reshape(o, k1, w.rank), w.right.reshape(w.rank, i, k2)
    return torch.einsum("oar,rib->oiab", left, right).reshape(shape)


def truth(module: nn.Module, weights: Weights, sparse: Params | None, x: Tensor) -> Tensor:
    params = {}
    for n, p in module.named_parameters():
        params[n] = dense_of(weights[n], p.shape) + (sparse or {}).get(n, 0)
    with torch.no_grad():
        out: Tensor = functional_call(module.eval(), params, (x,))
    return out


def draw(
    shape: tuple[int, ...], rank: int, g: torch.Generator, dtype: torch.dtype = torch.float64
) -> LowRank:
    rows = shape[0] * (*shape, 1, 1)[2]
    columns = math.prod(shape) // rows
    left = torch.randn(rows, rank, generator=g, dtype=dtype)
    return LowRank(left, torch.randn(rank, columns, generator=g, dtype=dtype) / max(1, rank * columns) ** 0.5)


def spread(
    shape: tuple[int, ...], density: float, g: torch.Generator, dtype: torch.dtype = torch.float64
) -> Tensor:
    p = torch.randn(shape, generator=g, dtype=dtype) * 0.1
    return torch.where(torch.rand(shape, generator=g) < density, p, 0.0)


def mixture(module: nn.Module, share: float, density: float, seed: int = 0) -> tuple[Weights, Params]:
    """Factors of every matrix at that share of the largest rank that pays, other parameters anew; and a
    sparse part."""
    g = torch.Generator().manual_seed(seed)
    weights: Weights = {}
    for n, p in module.named_parameters():
        weights[n] = torch.randn(p.shape, generator=g, dtype=p.dtype) * 0.1 + 0.5
        if p.ndim >= 2:
            rows = p.shape[0] * (*p.shape, 1, 1)[2]
            weights[n] = draw((*p.shape,), int(share * p.numel() / (rows + p.numel() / rows)), g, p.dtype)
    return weights, {n: spread((*p.shape,), density, g, p.dtype) for n, p in module.named_parameters()}


def compressed(module: nn.Module) -> dict[str, CompressedLayer]:
    return {n: m for n, m in module.named_modules() if isinstance(m, CompressedLayer)}


def forced(layer: nn.Module, f: LowRank, p: Tensor | None) -> nn.Module:
    """The compressed form of a layer, whether or not it pays."""
    made = copy.deepcopy(layer)
    shape = made.weight.shape
    layers.compress_layer(
        made, layers.compressed_tensors(f, torch.zeros(shape, dtype=f.left.dtype) if p is None else p)
    )
    return made.requires_grad_(False)


def check_layer(layer: nn.Module, rank: int, density: float, x: Tensor, seed: int = 0) -> CompressedLayer:
    g = torch.Generator().manual_seed(seed)
    w = layer.weight
    f, p = draw((*w.shape,), rank, g), spread((*w.shape,), density, g)
    made = forced(layer, f, p)
    weights: Weights = {n: f if n == "weight" else t for n, t in layer.named_parameters()}
    wanted = truth(layer, weights, {"weight": p}, x)
    found = made(x)
    assert found.shape == wanted.shape
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(made.weight, dense_of(f, w.shape) + p, rtol=1e-12, atol=1e-12)
    assert "weight" not in dict(made.named_parameters())
    return made


# ---- one layer, every form

two = st.tuples(st.integers(1, 3), st.integers(1, 3))
density = st.sampled_from([0.0, 0.0, 0.2, 1.0])


@settings(max_examples=80, deadline=None)
@given(
    st.integers(1, 3), two, st.tuples(st.integers(1, 4), st.integers(1, 4)), two, two,
    st.one_of(st.tuples(st.integers(0, 3), st.integers(0, 3)), st.sampled_from(["same", "valid"])),
    st.sampled_from(["zeros", "reflect", "replicate", "circular"]),
    st.integers(0, 12), density, st.booleans(), st.booleans(),
)  # fmt: skip
def test_a_convolution(
    groups, channels, kernel, stride, dilation, padding, mode, rank, density, bias, batched
) -> None:
    assume(padding != "same" or stride == (1, 1))
    i, o = (groups * c for c in channels)
    rank = min(rank, o * kernel[0], i // groups * kernel[1])
    g = torch.Generator().manual_seed(rank)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using padding='same' with even kernel lengths")
        layer = nn.Conv2d(
            i, o, kernel, stride, padding, dilation, groups, bias, mode, dtype=torch.float64
        ).requires_grad_(False)
        x = torch.randn(*[2] * batched, i, 12, 11, generator=g, dtype=torch.float64)
        check_layer(layer, rank, density, x)


@pytest.mark.parametrize("kernel", [1, 7, (1, 5), (5, 1)])
@pytest.mark.parametrize("density", [0.0, 0.1])
@pytest.mark.parametrize("size", [9, 40])
def test_a_convolution_with_both_ways_to_the_sparse_part(kernel, density, size) -> None:
    """Wide layers on a small map keep thin layers beside p, on a large one they merge the two."""
    layer = nn.Conv2d(40, 48, kernel, stride=(2, 3), padding=0, dtype=torch.float64).requires_grad_(False)
    x = torch.randn(1, 40, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for rank in (0, 1, 9):
        check_layer(layer, rank, density, x)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 2), two, st.integers(1, 4), st.integers(1, 3), st.integers(1, 2),
    st.sampled_from(["zeros", "reflect", "circular"]), st.integers(0, 6), density, st.booleans(),
)  # fmt: skip
def test_a_convolution_of_one_dimension(
    groups, channels, kernel, stride, dilation, mode, rank, density, batched
) -> None:
    i, o = (groups * c for c in channels)
    layer = nn.Conv1d(i, o, kernel, stride, 2, dilation, groups, padding_mode=mode, dtype=torch.float64)
    x = torch.randn(*[2] * batched, i, 13, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    check_layer(layer.requires_grad_(False), min(rank, o * kernel, i // groups), density, x)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 9), st.integers(1, 9), st.integers(0, 9), density, st.booleans(),
    st.lists(st.integers(0, 3), max_size=3),
)  # fmt: skip
def test_a_linear_layer(inputs, outputs, rank, density, bias, leading) -> None:
    layer = nn.Linear(inputs, outputs, bias, dtype=torch.float64).requires_grad_(False)
    x = torch.randn(*leading, inputs, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    check_layer(layer, min(rank, inputs, outputs), density, x)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "make", [lambda b: nn.Conv2d(4, 6, 3, 2, 1, bias=b), lambda b: nn.Linear(9, 5, bias=b)]
)
def test_rank_zero_gives_the_bias(make, bias) -> None:
    layer = make(bias).double().requires_grad_(False)
    x = torch.randn(2, 4, 9, 9, dtype=torch.float64)
    made = check_layer(layer, 0, 0.0, x)
    wanted = torch.zeros_like(layer(x))
    if bias:
        wanted += layer.bias.view(-1, 1, 1) if wanted.shape[1] == 6 else layer.bias
    assert torch.equal(made(x), wanted)
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


# ---- whole models


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
    found = made(x)
    torch.testing.assert_close(found, truth(module, weights, given, x), rtol=1e-9, atol=1e-9)
    # values and bits are fewer bytes than a dense weight down to one zero in 64 numbers of float64
    assert bool(compressed(made)) == (density in (None, 0.02) or (density == 0.6 and layout == "small"))
    # needs no gradient, and leaves the original as it was
    assert found.grad_fn is None
    assert not any(p.requires_grad for p in made.parameters())
    assert all(p.requires_grad for p in module.parameters())
    assert not compressed(module)
    assert {n: torch.equal(p, before[n]) for n, p in module.state_dict().items()} == dict.fromkeys(
        before, True
    )
    assert not made.training


def test_what_the_prox_of_fedslr_makes() -> None:
    module = build_module(lambda: ResNet18(IMAGE, 10, width=8), Key((0,)))
    params = {n: p.detach().double() for n, p in module.named_parameters()}
    shrunk = apply_prox(params, 1.5, "low_rank", ())
    assert 0.2 < sum(isinstance(w, LowRank) for w in shrunk.weights.values()) / 21 <= 1
    x = torch.randn(2, *IMAGE, dtype=torch.float64)
    made = deploy(module.double(), shrunk.weights)
    torch.testing.assert_close(made(x), truth(module, shrunk.weights, None, x), rtol=1e-9, atol=1e-9)
    held = sum(
        w.left.numel() + w.right.numel() if isinstance(w, LowRank) else w.numel()
        for w in shrunk.weights.values()
    )
    assert measure_size(made).parameters == held


def test_the_weights_given_stay_apart() -> None:
    layer = nn.Linear(9, 9)
    f, bias = LowRank(torch.ones(9, 1), torch.ones(1, 9)), torch.zeros(9)
    made, x = deploy(layer, {"weight": f, "bias": bias}), torch.ones(1, 9)
    f.left.fill_(5)
    f.right.fill_(5)
    bias.fill_(5)
    assert torch.equal(made(x), torch.full((1, 9), 9.0))


# ---- the form of least bytes


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


@settings(max_examples=100, deadline=None)
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


def test_every_form_occurs() -> None:
    layer, g = nn.Linear(40, 30, bias=False), torch.Generator().manual_seed(0)
    zero, p, full = (spread((30, 40), d, g, torch.float32) for d in (0.0, 0.05, 1.0))
    thin = draw((30, 40), 3, g, torch.float32)
    few = LowRank(torch.eye(30, 10), torch.eye(10, 40))  # ten ones
    found = {}
    for name, w, extra in (
        ("factors", thin, None), ("both", thin, p), ("sparse", p, None), ("dense", full, p), ("nothing", zero, zero),
        ("few", few, None), ("cancelled", thin, -thin.dense()), ("merged", thin, full),
        ("full rank", draw((30, 40), 30, g, torch.float32), None),
    ):  # fmt: skip
        made = deploy(layer, {"weight": w}, None if extra is None else {"weight": extra})
        thick = not isinstance(made, CompressedLayer)
        found[name] = None if thick else (len(made.right), len(made.values) > 0)
    assert found == {
        "factors": (3, False), "both": (3, True), "sparse": (0, True), "dense": None, "nothing": (0, False),
        "few": (0, True), "cancelled": (0, False),
        "merged": None, "full rank": None,
    }  # fmt: skip


def data_in(path: Path) -> dict[str, Tensor]:
    """Tensors of a file by the last part of their names; a safetensors file holds nothing else after its
    header."""
    with safetensors.safe_open(path, "pt") as file:
        found = {n.rsplit("/", 1)[1]: file.get_tensor(n) for n in file.keys()}  # noqa: SIM118
    whole, header = path.stat().st_size, int.from_bytes(path.read_bytes()[:8], "little")
    assert sum(t.nbytes for t in found.values()) == whole - 8 - header
    return found


@pytest.mark.parametrize(
    ("count", "form"),
    # of 12,000 places: 1500 bytes as bits; 4 · (count + 31) as indices
    [
        (343, {"indices", "starts"}),
        (344, {"indices", "starts"}),
        (345, {"mask"}),
        (11000, {"mask"}),
        (11700, None),
    ],
)
@pytest.mark.parametrize(
    "make", [lambda: nn.Linear(400, 30, bias=False), lambda: nn.Conv2d(16, 30, 5, bias=False)]
)
def test_places_are_written_as_indices_or_as_bits_whichever_is_smaller(
    make, count, form, tmp_path: Path
) -> None:
    layer, w = make(), torch.zeros(12000)
    at = torch.randperm(12000, generator=torch.Generator().manual_seed(0))[:count]
    w[at] = torch.randn(count, generator=torch.Generator().manual_seed(1))
    w = w.view(layer.weight.shape)
    made = deploy(layer, {"weight": w})
    save_deployed(made, tmp_path / "model")
    held = data_in(tmp_path / "model")
    assert measure_size(made).nbytes == sum(t.nbytes for t in held.values())
    if form is None:
        assert {*held} == {"weight"}
        return
    assert {*held} == {"left", "right", "values"} | form
    if form == {"mask"}:
        mask = np.unpackbits(held["mask"].numpy(), count=12000).astype(bool).reshape(w.shape)
        found = np.zeros(w.shape, np.float32)
        found[mask] = held["values"].numpy()
        np.testing.assert_array_equal(found, w.numpy())
    back = load_deployed(layer, tmp_path / "model")
    assert torch.equal(back.weight, w)
    assert measure_size(back) == measure_size(made)


def test_files_that_were_written_before_there_were_masks_are_read(tmp_path: Path) -> None:
    layer = nn.Linear(30, 20)
    weights, sparse = mixture(layer, 0.4, 0.4)
    made, x = deploy(layer, weights, sparse), torch.randn(4, 30)
    body = {"layers": {"": [20, 30]}, "state": dict(made.state_dict())}
    assert {*body["state"]} == {"bias", "left", "right", "values", "indices", "starts"}
    digest = hashlib.sha256(encode(body)).hexdigest()
    (tmp_path / "old").write_bytes(
        encode({"format": "fedlowrank.deployed.1", "sha256": digest, "body": body})
    )
    assert torch.equal(load_deployed(layer, tmp_path / "old")(x), made(x))
    save_deployed(made, tmp_path / "new")
    assert "mask" in data_in(tmp_path / "new")
    assert torch.equal(load_deployed(layer, tmp_path / "new")(x), made(x))


@pytest.mark.parametrize("change", ["missing", "bits", "shape"])
def test_a_mask_that_does_not_fit_its_values_is_refused(change: str, tmp_path: Path) -> None:
    layer, w = nn.Linear(30, 20, bias=False), torch.ones(20, 30)
    w[:, 5:] = 0
    save_deployed(deploy(layer, {"weight": w}), tmp_path / "model")
    body = decode((tmp_path / "model").read_bytes())["body"]
    mask = body["state"].pop("mask")
    if change != "missing":
        body["state"]["mask"] = ~mask if change == "bits" else mask.mT.contiguous()
    digest = hashlib.sha256(encode(body)).hexdigest()
    (tmp_path / "bad").write_bytes(
        encode({"format": "fedlowrank.deployed.2", "sha256": digest, "body": body})
    )
    with pytest.raises(CheckpointError, match=r"bad is damaged: layer '' has no (mask|'indices')"):
        load_deployed(layer, tmp_path / "bad")


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
    found = [
        isinstance(
            deploy(layer, {"weight": f}, {"weight": spread((64, 64), d, g, torch.float32)}, "fast"),
            CompressedLayer,
        )
        for d in (0.02, 0.4)
    ]
    assert found == [True, False]


def test_rows_strided_over_are_work() -> None:
    """The first of two thin convolutions makes all rows: with a stride, factors that save bytes may cost
    time."""
    g = torch.Generator().manual_seed(0)
    found = []
    for stride in (1, 4):
        layer = nn.Conv2d(128, 128, 3, stride, 1, bias=False)
        weights: Weights = {"weight": draw((128, 128, 3, 3), 90, g, torch.float32)}
        found.append([isinstance(deploy(layer, weights, layout=how), CompressedLayer) for how in LAYOUTS])
    assert found == [[True, True], [True, False]]


# ---- names, sharing, layers of other kinds


class Odd(nn.Module):
    """Whatever is no plain layer, or is used in more than one way."""

    def __init__(self) -> None:
        super().__init__()

        class Scaled(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                return 3 * super().forward(x)

        self.embedding = nn.Embedding(30, 12)
        self.table = nn.Parameter(torch.randn(12, 12))
        self.scaled = Scaled(12, 12)
        self.transposed = nn.ConvTranspose1d(12, 12, 3, padding=1)
        self.twice = nn.Linear(12, 12)
        self.again = self.twice
        self.weight = nn.Linear(12, 12)
        self.parts = nn.ModuleDict(
            {"left": nn.Linear(12, 12), "a/b~c é": nn.Linear(12, 12), "weight": nn.Linear(12, 12)}
        )
        self.hooked = nn.Linear(12, 12)
        self.hooked.register_forward_hook(_double)
        self.head = nn.Linear(12, 30)
        self.head.weight = self.embedding.weight
        self.unregistered = [self.parts["left"]]
        self.register_buffer("shift", torch.ones(12))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.scaled(self.embedding(x) @ self.table) + self.shift
        y = self.transposed(y.mT).mT
        y = self.weight(self.again(torch.tanh(self.twice(y))))
        for layer in (self.parts["a/b~c é"], self.parts["weight"], *self.unregistered, self.hooked):
            y = torch.tanh(layer(y))
        scores: Tensor = self.head(y)
        return scores


def _double(module: nn.Module, args: Any, out: Tensor) -> Tensor:
    return 2 * out


def odd(seed: int = 0) -> nn.Module:
    return build_module(Odd, Key((seed,))).double()


def test_layers_of_other_kinds_and_shared_weights_are_dense_and_right() -> None:
    module = odd()
    weights, sparse = mixture(module, 0.4, 0.01)
    assert "head.weight" not in weights  # tied to the embedding
    x = torch.arange(30).view(3, 10)
    made = deploy(module, weights, sparse)
    torch.testing.assert_close(made(x), truth(module, weights, sparse, x), rtol=1e-9, atol=1e-9)
    wanted = {"twice", "weight", "parts.left", "parts.a/b~c é", "parts.weight", "hooked"}
    assert {*compressed(made)} == wanted
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


def test_a_normalized_weight_is_dense() -> None:
    """A parametrized layer computes its weight from other parameters."""
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(12, 8)).double()
    weights, _ = mixture(layer, 0.3, 0.0)
    made, x = deploy(layer, weights), torch.randn(2, 12, dtype=torch.float64)
    torch.testing.assert_close(made(x), truth(layer, weights, None, x), rtol=1e-10, atol=1e-10)


# ---- the file


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["cnn", "resnet18_w16"])
def test_a_file_brings_back_the_same_bits(name, layout, tmp_path: Path) -> None:
    module = zoo(name)
    weights, sparse = mixture(module, 0.3, 0.02)
    made, x = deploy(module, weights, sparse, layout), torch.randn(3, *IMAGE)
    save_deployed(made, tmp_path / "model.safetensors")
    state = torch.get_rng_state()
    for start in (module, lambda: ModelSettings((name,)).factories(IMAGE, 10)[name]()):
        back = load_deployed(start, tmp_path / "model.safetensors")
        assert torch.equal(back(x), made(x))
        assert {n: type(m) for n, m in back.named_modules()} == {n: type(m) for n, m in made.named_modules()}
        assert measure_size(back) == measure_size(made)
        assert not back.training
        assert not any(p.requires_grad for p in back.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert not compressed(module)
    assert module.training
    size = (tmp_path / "model.safetensors").stat().st_size
    held = measure_size(made).nbytes
    assert held < size < held + 25_000
    if layout == "small":
        assert size < 0.6 * measure_size(module).nbytes


def test_the_file_is_read_without_this_package(tmp_path: Path) -> None:
    module = zoo("cnn")
    made = deploy(module, *mixture(module, 0.3, 0.02))
    save_deployed(made, tmp_path / "model")
    with safetensors.safe_open(tmp_path / "model", "pt") as file:
        text = json.dumps(json.loads(file.metadata()["tree"]))
        assert all(name in text for name in compressed(made))
    held = data_in(tmp_path / "model")
    assert {n: torch.equal(t, held[n]) for n, t in made.state_dict().items()} == dict.fromkeys(held, True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_odd_models_and_other_types_come_back(dtype, tmp_path: Path) -> None:
    module = odd().to(dtype)
    made, x = deploy(module, *mixture(module, 0.4, 0.01)), torch.arange(30).view(3, 10)
    made.shift.fill_(0.5)
    save_deployed(made, tmp_path / "model")
    back = load_deployed(odd(1), tmp_path / "model")
    assert torch.equal(back(x), made(x))
    assert back.head.weight is back.embedding.weight
    assert back(x).dtype == dtype


def test_a_deployed_model_is_a_module_as_any(tmp_path: Path) -> None:
    module, x = zoo("cnn"), torch.randn(3, *IMAGE)
    made = deploy(module, *mixture(module, 0.3, 0.02))
    wanted, state = made(x), made.state_dict()
    other = copy.deepcopy(made)
    for t in other.state_dict().values():
        t.zero_()
    other.load_state_dict(state)
    assert torch.equal(other(x), wanted)
    torch.testing.assert_close(other.double()(x.double()).float(), wanted, rtol=1e-4, atol=1e-4)
    assert {t.dtype for t in other.buffers()} == {torch.int32}
    # safetensors takes its state, as it takes any
    safetensors.torch.save_file(state, tmp_path / "state")
    made.load_state_dict(safetensors.torch.load_file(tmp_path / "state"))
    assert torch.equal(made(x), wanted)


def test_one_layer_is_a_model(tmp_path: Path) -> None:
    layer = nn.Linear(30, 20)
    made, x = deploy(layer, *mixture(layer, 0.4, 0.01)), torch.randn(4, 30)
    save_deployed(made, tmp_path / "model")
    assert isinstance(made, CompressedLayer)
    assert torch.equal(load_deployed(layer, tmp_path / "model")(x), made(x))


def test_damaged_and_other_files_are_refused(tmp_path: Path) -> None:
    layer = nn.Linear(30, 20)
    save_deployed(deploy(layer, *mixture(layer, 0.4, 0.01)), tmp_path / "model")
    data = (tmp_path / "model").read_bytes()
    other = safetensors.torch.save({"weight": torch.zeros(3)})
    flipped = [bytes([*data[:i], data[i] ^ 8, *data[i + 1 :]]) for i in range(0, len(data), 97)]
    cut = [data[:i] for i in (0, 7, 8, 100, len(data) // 2, len(data) - 1)]
    for bad in (*flipped, *cut, other, b"nonsense" * 9):
        (tmp_path / "bad").write_bytes(bad)
        with pytest.raises(CheckpointError, match="bad"):
            load_deployed(layer, tmp_path / "bad")
    with pytest.raises(CheckpointError, match=r"cannot read.*missing"):
        load_deployed(layer, tmp_path / "missing")
    with pytest.raises(CheckpointError, match="cannot write"):
        save_deployed(layer, tmp_path / "no" / "folder")


def test_a_file_of_a_later_format_is_refused(tmp_path: Path, monkeypatch) -> None:
    layer = nn.Linear(30, 20)
    with monkeypatch.context() as patch:
        patch.setattr("fedlowrank.adapters.deployment.FORMATS", ("fedlowrank.deployed.3",))
        save_deployed(layer, tmp_path / "model")
    with pytest.raises(CheckpointError, match=r"deployed\.2 or fedlowrank\.deployed\.1"):
        load_deployed(layer, tmp_path / "model")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Sequential(nn.Linear(30, 21), nn.LayerNorm(20)), "no plain layer '0'"),
        (lambda: nn.Sequential(nn.ReLU(), nn.LayerNorm(20)), "no plain layer '0'"),
        (lambda: nn.Sequential(nn.Linear(30, 20)), "1.bias is .20. in the file and missing"),
        (lambda: nn.Sequential(nn.Linear(30, 20, bias=False), nn.LayerNorm(20)), "0.bias"),
        (lambda: nn.Sequential(nn.Linear(30, 20), nn.LayerNorm(19)), "1.bias is .20. in the file and .19."),
        (lambda: nn.Sequential(nn.Linear(30, 20), nn.LayerNorm(20), nn.PReLU()), "2.weight is missing"),
        (nn.Sequential, "no plain layer '0'"),
    ],
)
def test_a_file_of_another_architecture_is_refused(make, message, tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(30, 20), nn.LayerNorm(20))
    save_deployed(deploy(module, *mixture(module, 0.4, 0.01)), tmp_path / "model")
    with pytest.raises(TaskError, match=message):
        load_deployed(make, tmp_path / "model")


def test_state_that_is_no_tensor_is_refused(tmp_path: Path) -> None:
    class Stateful(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"steps": 3}

        def set_extra_state(self, state: Any) -> None:
            pass

    with pytest.raises(TaskError, match="_extra_state"):
        save_deployed(Stateful(3, 3), tmp_path / "model")


# ---- what does not fit


def wrong(**change: Any) -> tuple[Weights, Params]:
    weights: Weights = {"weight": LowRank(torch.ones(20, 2), torch.ones(2, 30)), "bias": torch.ones(20)}
    return weights | change, {}


@pytest.mark.parametrize(
    ("weights", "sparse", "message"),
    [
        ({"wieght": torch.ones(20, 30)}, {}, "no parameter 'wieght'.*'weight'"),
        ({}, {"biass": torch.ones(20)}, "sparse.*no parameter 'biass'.*'bias'"),
        ({"weight": torch.ones(30, 20)}, {}, r"weight, of shape \[20, 30\].*\[30, 20\]"),
        ({"weight": LowRank(torch.ones(20, 2), torch.ones(2, 29))}, {}, r"weight.*\[2, 29\]"),
        ({"weight": LowRank(torch.ones(19, 2), torch.ones(2, 30))}, {}, r"weight.*\[19, 2\]"),
        ({"weight": LowRank(torch.ones(20, 2), torch.ones(3, 30))}, {}, r"weight.*\[3, 30\]"),
        ({"bias": LowRank(torch.ones(20, 1), torch.ones(1, 1))}, {}, r"bias, of shape \[20\]"),
        ({}, {"weight": torch.ones(20, 1)}, r"weight.*\[20, 1\]"),
        ({}, {"bias": torch.ones(1)}, r"bias.*\[1\]"),
        ({}, {"weight": torch.ones(20, 30, dtype=torch.float64)}, "weight.*types differ.*float64"),
        ({"weight": LowRank(torch.ones(20, 2), torch.ones(2, 30).double())}, {}, "weight.*types differ"),
    ],
)
def test_weights_that_do_not_fit_are_refused(weights, sparse, message) -> None:
    good: Weights = {"weight": LowRank(torch.ones(20, 2), torch.ones(2, 30)), "bias": torch.ones(20)}
    with pytest.raises(TaskError, match=message):
        deploy(nn.Linear(30, 20), good | weights, sparse)


def test_missing_weights_and_unknown_layouts_are_refused() -> None:
    with pytest.raises(TaskError, match="1 of 2 parameters are missing, such as 'bias'"):
        deploy(nn.Linear(3, 2), {"weight": torch.ones(2, 3)})
    with pytest.raises(ConfigError, match=r"'smal' is no layout.*'small'"):
        deploy(nn.Linear(3, 2, bias=False), {"weight": torch.ones(2, 3)}, layout="smal")  # type: ignore[arg-type]


# ---- measuring


def test_size_of_any_module() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3))
    module[1].weight = module[0].weight
    nn.init.zeros_(module[0].bias)
    # 9 + 3 + 3 + 6 numbers, of which 3 biases and the 3 of the norm are zero; running mean, variance and an int64 count
    assert measure_size(module) == Size(21, 21 - 6, 21 * 4 + 6 * 4 + 8)


class Logged(nn.Module):
    def __init__(self, log: list[str], name: str, turns: int) -> None:
        super().__init__()
        self.log, self.name, self.turns = log, name, turns

    def forward(self, x: Tensor) -> Tensor:
        assert torch.is_inference_mode_enabled()
        assert torch.get_num_threads() == 1
        self.log.append(self.name)
        for _ in range(self.turns):
            x = x @ x
        return x


def test_arms_take_turns() -> None:
    torch.set_num_threads(2)
    log: list[str] = []
    arms = {n: Logged(log, n, k) for n, k in (("a", 1), ("b", 40))}
    found = compare_latency(arms, torch.eye(150), 5)
    assert torch.get_num_threads() == 2
    assert log == ["a", "b"] * 7
    for t in found.values():
        assert 0 <= t.lower <= t.median <= t.upper
    assert found["b"].median > 5 * found["a"].median
    log.clear()
    one = measure_latency(arms["a"], {"x": torch.eye(3)}, 1)
    assert log == ["a"] * 3
    assert one.lower == one.median == one.upper
    with pytest.raises(ConfigError, match="repeats"):
        measure_latency(arms["a"], torch.eye(3), 0)


def test_threads_are_given_back_after_an_error() -> None:
    torch.set_num_threads(2)
    with pytest.raises(RuntimeError):
        measure_latency(nn.Linear(3, 3), torch.ones(4))
    assert torch.get_num_threads() == 2
