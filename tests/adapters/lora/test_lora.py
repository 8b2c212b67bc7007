"""Where LoRA factors go: the output of every kind of module equals that of a copy whose weight was changed by
hand."""

from __future__ import annotations

import copy
import re
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call

from fedlowrank.adapters.lora.lora_factors import (
    LoRA,
    average_present_components,
    find_lora,
    lora_of,
    parameters_beside_factors,
)
from fedlowrank.adapters.lora.lora_layers import add_lora
from fedlowrank.core.errors import TaskError
from fedlowrank.core.key import Key
from fedlowrank.linalg.pair import Factors, Pair, keep_first_components, zero_pad_pair
from fedlowrank.models.architecture import Architecture

torch.set_num_threads(1)


class SelfAttention(nn.MultiheadAttention):
    """Attention of a sequence to itself, with one argument and one result as of other layers."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x, x, x, need_weights=False)[0]


def conv1d_of_gpt2() -> nn.Module:
    return pytest.importorskip("transformers.pytorch_utils").Conv1D(5, 6)


LAYERS: dict[str, Any] = {
    "linear": lambda: nn.Linear(6, 5),
    "conv1d": lambda: nn.Conv1d(3, 4, 3, stride=2, padding=1, padding_mode="circular"),
    "conv2d": lambda: nn.Conv2d(3, 4, (2, 3), stride=(1, 2), padding=(2, 1), dilation=(2, 1)),
    "conv3d": lambda: nn.Conv3d(2, 5, (1, 2, 3), padding=(0, 1, 2), bias=False),
    "embedding": lambda: nn.Embedding(11, 6, padding_idx=3),
    "image": lambda: nn.Conv2d(3, 4, (2, 3), stride=(1, 2), padding=(2, 1)),
    "gpt2": conv1d_of_gpt2,
    "grouped": lambda: nn.Conv2d(4, 6, 3, padding="same", padding_mode="circular", groups=2),
    "turned": lambda: nn.ConvTranspose2d(3, 4, (2, 3), stride=2, dilation=(1, 2), output_padding=1),
    "attention": lambda: SelfAttention(4, 2),
}
INPUTS: dict[str, Any] = {
    "linear": lambda g: torch.randn(4, 6, generator=g),
    "conv1d": lambda g: torch.randn(2, 3, 9, generator=g),
    "conv2d": lambda g: torch.randn(2, 3, 7, 8, generator=g),
    "conv3d": lambda g: torch.randn(2, 2, 3, 4, 5, generator=g),
    "embedding": lambda g: torch.randint(0, 11, (3, 4), generator=g),
    "image": lambda g: torch.randn(2, 3, 7, 8, generator=g),
    "gpt2": lambda g: torch.randn(4, 6, generator=g),
    "grouped": lambda g: torch.randn(2, 4, 5, 6, generator=g),
    "turned": lambda g: torch.randn(2, 3, 4, 5, generator=g),
    "attention": lambda g: torch.randn(2, 5, 4, generator=g),
}
TURNED = ("embedding", "gpt2")
SHAPES = dict(
    zip(
        LAYERS,
        [(5, 6), (4, 9), (4, 18), (5, 12), (6, 11), (4, 18), (5, 6), (6, 18), (3, 24), (12, 4)],
        strict=True,
    )
)


class Two(nn.Module):
    """A layer under test, and another that is not a square either, behind a nonlinearity."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.one, self.two, self.head = LAYERS[kind](), nn.Linear(3, 7), nn.Linear(7, 2)
        draw = torch.Generator().manual_seed(3)
        for p in self.parameters():
            nn.init.normal_(p, std=0.5, generator=draw)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x).tanh().flatten(1)
        return self.head(self.two(torch.stack([y.mean(1), y.square().mean(1), y[:, 0]], 1)).tanh())


def of_peft(module: nn.Module, rank: int, alpha: float, **kwargs: Any) -> nn.Module:
    peft = pytest.importorskip("peft")
    settings = {"fan_in_fan_out": type(module.one).__name__ == "Conv1D"}
    config = peft.LoraConfig(r=rank, lora_alpha=alpha, target_modules=["one", "two"], **(settings | kwargs))
    # of a linear layer beside a Conv1D, and of groups, PEFT warns
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.get_peft_model(copy.deepcopy(module), config)


def made(kind: str, how: str, rank: int = 2, alpha: float = 3.0) -> tuple[Two, nn.Module]:
    """The module, and the same as it is wrapped."""
    plain = Two(kind)
    if how == "plain":
        return plain, plain
    if how == "ours":
        return plain, add_lora(plain, rank, alpha, target_modules=["one", "two"])
    return plain, of_peft(plain, rank, alpha)


def random_factors(found: LoRA, rank: int, seed: int = 0) -> Factors:
    g = torch.Generator().manual_seed(seed)
    return {
        n: Pair(*(torch.randn(*s, generator=g, dtype=torch.float64) * 0.3 for s in ((d, rank), (rank, k))))
        for n, (d, k) in found.shapes.items()
    }


def changed(plain: Two, kind: str, updates: dict[str, np.ndarray]) -> Two:
    """A copy with d × k updates added to its weights."""
    copied = copy.deepcopy(plain)
    for name, update in updates.items():
        weights = dict(copied.named_parameters())
        weight = weights[f"{name}_weight" if name.endswith("in_proj") else f"{name}.weight"]
        if name == "one" and kind in TURNED:
            update = update.T
        weight.data += torch.from_numpy(np.ascontiguousarray(update)).reshape(weight.shape)
    return copied


def product(factors: Factors, scale: float) -> dict[str, np.ndarray]:
    return {n: scale * p.b.numpy() @ p.a.numpy() for n, p in factors.items()}


# PEFT's convolutions know neither padding modes nor dilation
NONE = {
    ("embedding", "plain"),
    *((kind, "peft") for kind in ("conv1d", "conv2d", "grouped", "turned", "attention")),
}
CASES = [(kind, how) for kind in LAYERS for how in ("plain", "ours", "peft") if (kind, how) not in NONE]


@pytest.mark.few(8)
@pytest.mark.parametrize(("kind", "how"), CASES)
def test_factors_of_any_rank_are_the_weight_with_their_product(kind: str, how: str) -> None:
    plain, module = made(kind, how)
    actual = find_lora(module, "head")
    names = ("one.in_proj", "one.out_proj") if kind == "attention" else ("one",)
    assert actual.shapes == {**dict(zip(names, (SHAPES[kind], (4, 4)), strict=False)), "two": (7, 3)}
    assert (actual.scale, actual.rank) == ((1.0, None) if how == "plain" else (1.5, 2))
    x = INPUTS[kind](torch.Generator().manual_seed(1))
    x = 0.3 * x.double() if x.is_floating_point() else x
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    for rank, scale in ((1, 1.5), (3, 0.7), (3, 1.0)):
        factors = random_factors(actual, rank)
        copied = changed(plain, kind, product(factors, scale))
        out = functional_call(module, actual.insert_factors(factors, scale), (x,))
        torch.testing.assert_close(out, copied(x), rtol=0, atol=1e-12)
        assert float((out - plain(x)).detach().abs().max()) > 1e-2
        # with a second adapter that is frozen, of another rank and a scale of 1
        frozen = random_factors(actual, 2, seed=5)
        both = product(factors, scale)
        sums = {n: both[n] + u for n, u in product(frozen, 1.0).items()}
        out = functional_call(module, actual.insert_factors(factors, scale, frozen), (x,))
        torch.testing.assert_close(out, changed(plain, kind, sums)(x), rtol=0, atol=1e-12)
        empty = {n: Pair(p.b[:, :0], p.a[:0]) for n, p in frozen.items()}
        out = functional_call(module, actual.insert_factors(factors, scale, empty), (x,))
        torch.testing.assert_close(out, copied(x), rtol=0, atol=1e-12)
        # on weights that have moved
        away = {n: torch.from_numpy(u) for n, u in product(random_factors(actual, 1, seed=7), 2.0).items()}
        moved = actual.add_to_weights(away)
        sums = {n: both[n] + u.numpy() for n, u in away.items()}
        out = functional_call(module, actual.insert_factors(factors, scale, moved_weights=moved), (x,))
        torch.testing.assert_close(out, changed(plain, kind, sums)(x), rtol=0, atol=1e-12)
    # nothing was changed in place
    assert all(torch.equal(p, before[n]) for n, p in module.named_parameters())


@pytest.mark.parametrize("how", ["plain", "ours", "peft"])
def test_gradients_reach_the_factors(how: str) -> None:
    plain, module = made("linear", how)
    actual = find_lora(module, "head")
    x = INPUTS["linear"](torch.Generator().manual_seed(1)).double()
    factors = random_factors(actual, 2)
    pair = factors["one"]
    b, a = pair.b.requires_grad_(), pair.a.requires_grad_()
    functional_call(module, actual.insert_factors(factors, 0.7), (x,)).square().sum().backward()
    copied = changed(
        plain, "linear", {n: (pair.dense() * 0.7).detach().numpy() for n, pair in factors.items()}
    )
    copied(x).square().sum().backward()
    grad = copied.one.weight.grad
    torch.testing.assert_close(b.grad, 0.7 * grad @ a.detach().mT, rtol=0, atol=1e-11)
    torch.testing.assert_close(a.grad, 0.7 * b.detach().mT @ grad, rtol=0, atol=1e-11)


class Tied(nn.Module):
    """Two layers of one weight, or one layer under two names."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.one = nn.Linear(4, 4)
        self.other, self.head = self.one if shared else nn.Linear(4, 4), nn.Linear(4, 2)
        self.other.weight = self.one.weight
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.other(self.one(x).tanh()).tanh())


@pytest.mark.parametrize("shared", [False, True])
def test_tied_weights_are_one_site_and_move_together(shared: bool) -> None:
    module, x = Tied(shared), torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).double()
    actual = find_lora(module, "head")
    assert list(actual.layers) == ["one"]
    factors, copied = random_factors(actual, 2), copy.deepcopy(module)
    copied.one.weight.data += 0.5 * factors["one"].dense()
    assert copied.other.weight is copied.one.weight
    out = functional_call(module, actual.insert_factors(factors, 0.5), (x,))
    torch.testing.assert_close(out, copied(x), rtol=0, atol=1e-13)


def test_a_layer_under_two_names_keeps_its_own_weight() -> None:
    module, x = Tied(True), torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).double()
    before = module.one.weight.detach().clone()
    model = Architecture("tied", module, x)
    model.apply(lora_of(model).insert_factors(random_factors(lora_of(model), 2), 0.5), x)
    assert torch.equal(module.one.weight, before)
    assert isinstance(module.one.weight, nn.Parameter)


def test_an_architecture_finds_its_sites_once() -> None:
    module = Tied(False)
    model = Architecture("tied", module, torch.zeros(1, 4).double(), "head")
    assert lora_of(model) is lora_of(model)
    assert list(lora_of(model).layers) == ["one"]
    assert sorted(parameters_beside_factors(model)) == ["head.bias", "head.weight"]
    wrapped = Architecture(
        "wrapped", add_lora(module, 2, trainable=["head"]), torch.zeros(1, 4).double(), "head"
    )
    assert sorted(parameters_beside_factors(wrapped)) == ["head.bias", "head.weight"]
    assert (
        parameters_beside_factors(Architecture("none", nn.Sequential(nn.Linear(4, 2)), torch.zeros(1, 4)))
        == {}
    )


@pytest.mark.parametrize(
    ("kind", "setting"), [("conv1d", "padding_mode = 'circular'"), ("conv2d", "dilation = (2, 1)")]
)
def test_convolutions_that_peft_does_not_compute_are_refused(kind: str, setting: str) -> None:
    with pytest.raises(
        TaskError, match=f"ignores its {re.escape(setting)}, so it is no update of the weight"
    ):
        find_lora(of_peft(Two(kind), 2, 2), None)


def test_sites_are_named_by_the_base_model_and_outside_the_head() -> None:
    net = nn.ModuleDict(
        {"a": nn.Sequential(nn.Linear(3, 4), nn.Conv1d(2, 3, 2)), "head": nn.Sequential(nn.Linear(4, 2))}
    )
    assert find_lora(net, "head").shapes == {"a.0": (4, 3), "a.1": (3, 4)}
    assert find_lora(net, None).shapes == {"a.0": (4, 3), "a.1": (3, 4), "head.0": (2, 4)}
    # a name that only begins like the head's is no part of it
    net["header"] = nn.Linear(2, 2)
    assert "header" in find_lora(net, "head").shapes
    assert find_lora(nn.Linear(3, 4), None).shapes == {"": (4, 3)}
    with pytest.raises(TaskError, match="no linear layer and no convolution outside its head"):
        find_lora(nn.ModuleDict({"norm": nn.LayerNorm(3), "head": nn.Linear(3, 2)}), "head")


def test_scales_of_layers_and_one_adapter() -> None:
    module = Two("linear")
    module.one, module.two = (add_lora(m, 2, alpha) for m, alpha in ((module.one, 2.0), (module.two, 4.0)))
    mixed = find_lora(module, "head")
    assert {n: mixed.scale * layer.ratio for n, layer in mixed.layers.items()} == {"one": 1.0, "two": 2.0}
    wrapped = of_peft(Two("linear"), 2, 4, use_rslora=True)
    actual = find_lora(wrapped, None)
    assert actual.rslora
    assert actual.scale == pytest.approx(4 / 2**0.5, rel=1e-15)
    assert actual.layers["two"].weight == "base_model.model.two.base_layer.weight"
    import peft

    wrapped.add_adapter("more", peft.LoraConfig(r=1, target_modules=["one"]))
    with pytest.raises(TaskError, match=r"adapters \['default', 'more'\]; keep one"):
        find_lora(wrapped, None)


def test_a_peft_convolution_with_groups_is_refused() -> None:
    module = Two("linear")
    module.one = nn.Conv1d(4, 6, 3, groups=2)
    with pytest.raises(TaskError, match=r"layer base_model\.model\.one is a convolution with groups"):
        find_lora(of_peft(module, 2, 2), None)


def test_a_layer_has_as_many_components_as_its_weight_can_have() -> None:
    actual = find_lora(Two("conv2d"), "head")
    # 4 × 18 and 7 × 3
    assert actual.largest_rank == 4
    for rank, expected in ((3, {"one": 3, "two": 3}), (4, {"one": 4, "two": 3}), (900, {"one": 4, "two": 3})):
        assert {n: p.rank for n, p in actual.draw_factors(rank, Key((0,))).items()} == expected


def test_a_is_drawn_by_name_from_the_key() -> None:
    actual = find_lora(nn.ModuleDict({"a": nn.Linear(400, 30), "b": nn.Linear(400, 30)}), None)
    state = torch.get_rng_state()
    drawn, again, other = (actual.draw_factors(20, Key((s,))) for s in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(drawn[n].a, again[n].a) for n in drawn)
    assert not torch.equal(drawn["a"].a, drawn["b"].a)
    assert not torch.equal(drawn["a"].a, other["a"].a)


def test_factors_have_the_type_of_their_layer() -> None:
    layers = {"a": nn.Linear(4, 3).bfloat16(), "b": nn.Linear(3, 5), "c": nn.Linear(5, 2).double()}
    expected = {"a": torch.bfloat16, "b": torch.float32, "c": torch.float64}
    for module in (nn.ModuleDict(layers), add_lora(nn.ModuleDict(layers), 2)):
        drawn = find_lora(module, None).draw_factors(2, Key((0,)))
        assert {n: p.a.dtype for n, p in drawn.items()} == expected
        assert {n: p.b.dtype for n, p in drawn.items()} == expected


def test_complex_factors_are_refused_by_name() -> None:
    module = nn.ModuleDict({"a": nn.Linear(4, 3, dtype=torch.complex64), "b": nn.Linear(3, 5)})
    with pytest.raises(TaskError, match=r"layer a has LoRA factors of type torch\.complex64.*target_modules"):
        find_lora(add_lora(module, 2), None)
    assert find_lora(module, None).draw_factors(2, Key((0,)))["a"].a.dtype == torch.float32


def test_moved_weights_keep_the_finer_type() -> None:
    for base, update in ((torch.float64, torch.float32), (torch.bfloat16, torch.float32)):
        layer = nn.Linear(5, 4).to(base)
        actual = find_lora(nn.ModuleDict({"a": layer}), None)
        u = torch.randn(4, 5, generator=torch.Generator().manual_seed(0)).to(update) * 0.01
        w = actual.add_to_weights({"a": u})["a.weight"]
        assert w.dtype == base
        # rounded once, to the type of the weight
        assert torch.equal(w, (layer.weight.detach().double() + u.double()).to(base))


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 5), st.integers(0, 4), st.integers(0, 99))
def test_padding_keeps_the_product_and_is_undone(d: int, k: int, r: int, more: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    pair = Pair(torch.randn(d, r, generator=g), torch.randn(r, k, generator=g))
    wide = zero_pad_pair(pair, r + more)
    assert wide.rank == r + more
    torch.testing.assert_close(wide.dense(), pair.dense())
    back = keep_first_components(wide, r)
    assert torch.equal(back.b, pair.b)
    assert torch.equal(back.a, pair.a)
    assert zero_pad_pair(pair, max(r - 1, 0)) is pair


def test_means_over_the_holders_alone() -> None:
    b, a = (torch.full(s, float("nan"), dtype=torch.float64) for s in ((2, 4), (4, 3)))
    replies = [
        Pair(torch.full((2, r), v).double(), torch.full((r, 3), -v).double()) for r, v in ((1, 1.0), (3, 4.0))
    ]
    weights = [1.0, 3.0]
    wide = [zero_pad_pair(p, 4) for p in replies]
    mean_b, mean_a = (
        sum(w * getattr(p, f) for w, p in zip(weights, wide, strict=True)) / 4 for f in ("b", "a")
    )
    means = {"l": Pair(mean_b, mean_a)}
    actual = average_present_components(
        means,
        {"l": Pair(b.nan_to_num(9), a.nan_to_num(8))},
        torch.tensor([4.0, 3.0, 3.0, 0.0], dtype=torch.float64),
    )["l"]
    # (1 + 3·4)/4, then the second client's own, then what nobody holds
    torch.testing.assert_close(actual.b, torch.tensor([[3.25, 4, 4, 9]] * 2, dtype=torch.float64))
    torch.testing.assert_close(
        actual.a, torch.tensor([[-3.25] * 3, [-4] * 3, [-4] * 3, [8] * 3], dtype=torch.float64)
    )
