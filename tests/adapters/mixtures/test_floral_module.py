"""Floral in a plain training loop: parameters, routes, state, merging, preconditioning and centering of whole
models."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

import fedlowrank
from fedlowrank import Floral
from fedlowrank.adapters.mixtures.adapted_parameters import find_adapted_parameters
from fedlowrank.adapters.mixtures.mixture import Pairs
from fedlowrank.adapters.mixtures.mixture_adaptors import initial_adaptors, precondition_adaptors
from fedlowrank.adapters.mixtures.router import Router
from fedlowrank.core import tree
from fedlowrank.core.errors import ConfigError, TaskError
from fedlowrank.core.key import Key
from tests.adapters.mixtures.floral_networks import (
    REAL,
    TOLERANCES,
    AttributeOutput,
    TiedLanguageModel,
    build_network,
    draw_normal,
    draw_parameters,
)

torch.set_num_threads(1)


IDS = torch.tensor([[1, 4, 2], [8, 0, 4]])


def train(model: Floral, steps: int = 40, lr: float = 0.2) -> list[float]:
    x, y = draw_normal(12, 2, 5, 5), torch.arange(12) % 3
    optimizer = torch.optim.SGD(model.parameter_groups(), lr=lr)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        model.precondition_()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("reparameterize", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_a_plain_loop_learns_and_only_what_is_free_moves(frozen: bool, reparameterize: bool) -> None:
    base = build_network().requires_grad_(not frozen)
    before = copy.deepcopy(base)
    model = Floral(base, rank=2, num_clusters=3, reparameterize=reparameterize)
    start = copy.deepcopy(model.adaptors)
    losses = train(model)
    assert losses[-1] < 0.5 * losses[0]
    for (name, p), old in zip(base.named_parameters(), before.parameters(), strict=True):
        assert torch.equal(p, old) == frozen, name
        assert p.requires_grad != frozen
    for (name, p), old in zip(model.adaptors.named_parameters(), start.parameters(), strict=True):
        assert not torch.equal(p, old), name
    assert not torch.equal(model.theta, torch.zeros(3))
    # statistics of the base are its own business: they follow the batches in training
    assert int(base[1].num_batches_tracked) == 40
    model.eval()
    x = draw_normal(4, 2, 5, 5, seed=1)
    torch.testing.assert_close(model(x), model.merge()(x), **TOLERANCES)


def test_shared_weights_layers_used_twice_keywords_and_outputs_of_any_kind() -> None:
    base = TiedLanguageModel().double()
    before = base(IDS, labels=IDS)
    model = Floral(base, rank=2, num_clusters=3)
    out = model(input_ids=IDS, labels=IDS)
    assert isinstance(out, AttributeOutput)
    assert torch.equal(out.logits, before.logits)
    assert torch.equal(out.loss, before.loss)
    assert list(model.adapted()) == ["embed.weight", "block.weight", "block.bias"]
    draw_parameters(model)
    merged = model.merge()
    assert isinstance(merged, TiedLanguageModel)
    assert merged.lm_head.weight is merged.embed.weight
    assert merged.embed.weight is not base.embed.weight
    torch.testing.assert_close(model(IDS).hidden[0], merged(IDS).hidden[0], **TOLERANCES)
    # one set of weights, by hand: both uses of the block and both of the shared weight see the same
    pi = torch.softmax(model.theta, 0)
    w = dict(base.named_parameters())
    for name, a in model.adapted().items():
        dense = a.u @ a.v.mT if isinstance(a, Pairs) else a
        w[name] = w[name] + torch.einsum("c,c...->...", pi, dense)
    h = w["embed.weight"][IDS]
    for _ in range(2):
        h = torch.tanh(h @ w["block.weight"].T + w["block.bias"])
    out = model(IDS, labels=IDS)
    torch.testing.assert_close(out.logits, h @ w["embed.weight"].T, **TOLERANCES)
    out.loss.backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())


def test_state_goes_round_strictly_and_bit_for_bit() -> None:
    router = Router(noise=1.0, temperature=0.5)
    model = draw_parameters(
        Floral(build_network(), rank=2, num_clusters=3, router=router, reparameterize=False)
    )
    x = draw_normal(4, 2, 5, 5)
    model(x)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = Floral(build_network(), rank=2, num_clusters=3, router=router, reparameterize=False, seed=0)
    other.load_state_dict(torch.load(file, weights_only=True), strict=True)
    assert torch.equal(other.eval()(x), model.eval()(x))
    assert "adaptors.0.weight.u" in model.state_dict()
    assert all(isinstance(t, Tensor) for t in model.state_dict().values())
    model.route([0.25, 0.25, 0.5])
    other.load_state_dict(model.state_dict())
    assert other.pi.tolist() == [0.25, 0.25, 0.5]
    model.route(None)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other.pi, torch.softmax(2 * other.theta.detach(), 0))
    with pytest.raises(ConfigError, match=r"has the shape \[7\], but .* num_clusters=4 needs \[8\]"):
        Floral(nn.Linear(2, 2)).set_extra_state(model.get_extra_state())


def test_types_move_together() -> None:
    model = draw_parameters(Floral(build_network(), rank=2)).eval()
    x = draw_normal(4, 2, 5, 5)
    exact = model(x)
    single = model.to(torch.float32)
    assert {p.dtype for p in single.parameters()} == {torch.float32}
    torch.testing.assert_close(single(x.float()).double(), exact, rtol=1e-4, atol=1e-5)
    half = Floral(nn.Linear(4, 3, dtype=torch.bfloat16), rank=2)
    assert {p.dtype for p in half.adaptors.parameters()} == {torch.bfloat16}
    half(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
    half.precondition_()
    half.center_()
    # adaptors wider than their weights give results of the weights' type
    half.adaptors.float()
    assert half(torch.ones(2, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_modes_and_devices_reach_the_base() -> None:
    model = Floral(nn.Sequential(nn.Linear(4, 50), nn.Dropout(0.5)))
    x = torch.ones(1, 4)
    assert torch.equal(model.eval()(x), model.base[0](x))
    assert not model.base.training
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        assert int((model.train()(x) == 0).sum()) > 5
    assert {p.device.type for p in model.to("meta").parameters()} == {"meta"}


def test_the_adaptors_are_those_of_the_federated_method() -> None:
    model = Floral(build_network(), rank=0.2, num_clusters=2, seed=5)
    where = find_adapted_parameters(model.base, 0.2)
    expected = initial_adaptors(where, 2, Key((5,)) / "adaptors", reference=torch.zeros(0, dtype=REAL))
    assert tree.equal(tree.map_leaves(Tensor.detach, model.adapted()), expected)
    assert fedlowrank.METHODS["floral"] is not Floral
    assert issubclass(Floral, nn.Module)


def test_merging_leaves_the_wrapper_alone_and_no_trace_of_it() -> None:
    model = draw_parameters(Floral(build_network(), rank=2, num_clusters=2))
    model(draw_normal(4, 2, 5, 5)).sum().backward()
    before = copy.deepcopy(model.state_dict())
    merged = model.merge()
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items() if n != "_extra_state")
    assert {n for n, _ in merged.named_parameters()} == {n for n, _ in build_network().named_parameters()}
    assert all(p.grad is None and p.requires_grad and p.is_leaf for p in merged.parameters())
    assert not any(m._forward_hooks for m in [*model.base.modules(), *merged.modules()])


@given(
    st.integers(1, 6), st.integers(1, 6), st.sampled_from([1, 3, 0.5]), st.integers(1, 4), st.integers(0, 4)
)
@pytest.mark.filterwarnings("ignore::fedlowrank.core.errors.LoweredRankWarning")
def test_preconditioning_in_place(i: int, o: int, rank: float, clusters: int, without: int) -> None:
    model = draw_parameters(Floral(nn.Linear(i, o, dtype=REAL), rank, clusters), 1.0)
    model(draw_normal(3, i)).square().sum().backward()
    a: Any = model.adapted()["weight"]
    g = Pairs(a.u.grad.clone(), a.v.grad.clone())
    offset = model.adapted()["bias"].grad.clone()
    expected: Any = precondition_adaptors({"weight": model.base.weight}, {"weight": g}, {"weight": a})[
        "weight"
    ]
    if without == 1:
        a.u.grad = None
    if without == 2:
        a.v.grad = None
    if without == 3:
        model.zero_grad()
    model.precondition_()
    assert (a.u.grad is None, a.v.grad is None) == (without in (1, 3), without in (2, 3))
    for p, w in ((a.u, expected.u), (a.v, expected.v)):
        if p.grad is not None:
            torch.testing.assert_close(p.grad, w)
    if without != 3:
        assert torch.equal(model.adapted()["bias"].grad, offset)


@pytest.mark.parametrize("weights", [None, [0.7, 0.3]])
def test_centering_a_model(weights: list[float] | None) -> None:
    model = draw_parameters(Floral(build_network(), rank=2, num_clusters=2, alpha=1.5))
    with torch.no_grad():
        for a in model.adapted().values():
            if isinstance(a, Pairs):
                a.v[1] = a.v[0]
    each, before = [model.merge(c).state_dict() for c in range(2)], copy.deepcopy(model.base.state_dict())
    model.center_(weights)
    mean = model.merge([0.5, 0.5] if weights is None else weights).state_dict()
    for name in model.adapted():
        for c in range(2):
            torch.testing.assert_close(model.merge(c).state_dict()[name], each[c][name], **TOLERANCES)
        torch.testing.assert_close(mean[name], model.base.state_dict()[name], **TOLERANCES)
        assert not torch.equal(before[name], model.base.state_dict()[name])


def test_centering_leaves_frozen_parameters_alone() -> None:
    base = build_network()
    base[0].requires_grad_(False)
    model = draw_parameters(Floral(base, rank=2, num_clusters=2))
    before = copy.deepcopy(model.state_dict())
    model.center_()
    after = model.state_dict()
    changed = {n for n in after if n != "_extra_state" and not torch.equal(after[n], before[n])}
    assert not {n for n in changed if n.startswith(("base.0.", "adaptors.0."))}
    assert {"base.5.weight", "adaptors.5.weight.u", "base.6.bias"} <= changed
    base.requires_grad_(False)
    with pytest.raises(TaskError, match="frozen"):
        model.center_()
    with pytest.raises(ConfigError, match="2 numbers"):
        model.center_([1.0])


def test_predicates_and_the_budget() -> None:
    model = Floral(
        build_network(),
        rank=0.1,
        include=lambda _, m: not isinstance(m, nn.LayerNorm),
        exclude=lambda n, _: n == "8",
    )
    b = model.parameter_budget()
    assert [row.name for row in b.rows] == [f"{n}.{p}" for n in "015" for p in ("weight", "bias")]
    assert list(b.unadapted_shapes) == ["6.weight", "6.bias", "8.weight", "8.bias"]
    assert b.added == sum(p.numel() for p in model.adaptors.parameters())
    assert b.base == sum(p.numel() for p in model.base.parameters())
    assert "6.weight (12)" in str(b)


def test_functional_calls_of_the_wrapper() -> None:
    model = draw_parameters(Floral(build_network(), rank=2)).eval()
    x, params = draw_normal(4, 2, 5, 5), {n: p.detach() * 0.5 for n, p in model.named_parameters()}
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(0.5)
    assert torch.equal(functional_call(model, params, x), other(x))


def test_an_error_in_the_base_leaves_no_hooks() -> None:
    model = Floral(build_network(), reparameterize=False)
    with pytest.raises(RuntimeError):
        model(draw_normal(1, 5, 2, 2))
    assert not any(m._forward_hooks for m in model.modules())
    assert all(isinstance(p, nn.Parameter) for m in model.modules() for p in m.parameters())


def test_a_state_of_other_settings_is_not_loaded() -> None:
    state = Floral(nn.Conv2d(2, 2, 3), 1, 2, alpha=2.0).state_dict()
    others: dict[str, dict[str, Any]] = {
        "alpha": {},
        "construction": {"alpha": 2.0, "construction": "input"},
        "router.temperature": {"alpha": 2.0, "router": Router(temperature=2.0)},
        "router.top": {"alpha": 2.0, "router": Router(top=2)},
    }
    for name, settings in others.items():
        with pytest.raises(ConfigError, match=f"is of a model with another {name} "):
            Floral(nn.Conv2d(2, 2, 3), 1, 2, **settings).set_extra_state(state["_extra_state"])
    same = Floral(nn.Conv2d(2, 2, 3), 1, 2, alpha=2.0)
    same.load_state_dict(state)
    # after half precision, a mean in float32, and as entries without a number
    made = Floral(nn.Conv2d(2, 2, 3), 1, 2, alpha=0.3)
    made.route([0.25, 0.75])
    state = made.state_dict()
    for other in (
        {n: t.bfloat16() for n, t in state.items()},
        {n: sum(t.float() / 300 for _ in range(300)) for n, t in state.items()},
        {n: t.to("meta") if "extra" in n else t for n, t in state.items()},
    ):
        made.load_state_dict(other)
        torch.testing.assert_close(made.pi, torch.tensor([0.25, 0.75]), rtol=1e-3, atol=0.0)


def test_tied_weights_stay_tied_when_a_state_is_assigned() -> None:
    model, other = (draw_parameters(Floral(TiedLanguageModel(), 2, 3)) for _ in range(2))
    nn.init.zeros_(other.theta)
    state = model.state_dict()
    other.load_state_dict(state, assign=True)
    torch.testing.assert_close(other.eval()(IDS), model.eval()(IDS))
    assert len([*other.base.parameters()]) == len([*model.base.parameters()])
    (tied,) = model._tied_names
    for tied_name in tied:
        new = state[f"base.{tied_name}"] + 1
        other.load_state_dict({f"base.{tied_name}": new}, strict=False, assign=True)
        assert all(torch.equal(other.base.get_parameter(name), new) for name in tied)
        assert len([*other.base.parameters()]) == len([*model.base.parameters()])
    with pytest.raises(TaskError, match="are one parameter of the base, but the loaded state has two values"):
        other.load_state_dict(state | {f"base.{tied[1]}": state[f"base.{tied[1]}"] + 1}, assign=True)
