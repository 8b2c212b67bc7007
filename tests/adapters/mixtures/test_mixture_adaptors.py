"""Adaptors of whole modules: which parameters get them, with which rank, and what becomes of the weights."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from fedlowrank.adapters.mixtures.adapted_parameters import AdaptedParameter, find_adapted_parameters
from fedlowrank.adapters.mixtures.floral_module import Floral
from fedlowrank.adapters.mixtures.mixture import (
    Construction,
    Factor,
    Pairs,
    as_offsets,
    center_pairs,
    choose_fold,
    precondition_matrix,
    reparameterize,
)
from fedlowrank.adapters.mixtures.mixture_adaptors import (
    Adaptors,
    center_adaptors,
    initial_adaptors,
    mix_weights,
    precondition_adaptors,
)
from fedlowrank.adapters.mixtures.parameter_budget import adaptor_warnings, compute_budget
from fedlowrank.core import tree
from fedlowrank.core.errors import ConfigError, TaskError
from tests.adapters.mixtures.floral_networks import CONSTRUCTIONS, KEY, REAL, draw_normal


def shaken(
    where: dict[str, AdaptedParameter], count: int, construction: Construction = "balanced"
) -> Adaptors:
    made = initial_adaptors(where, count, KEY, construction, torch.zeros(0, dtype=REAL))
    return tree.map_leaves(lambda t: draw_normal(*t.shape, seed=t.numel()), made)


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    return {n: p.detach() for n, p in module.named_parameters()}


class Special(nn.Linear):
    """A subclass of a layer with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__(3, 4)
        self.size = nn.Parameter(torch.ones(4))


class Diagonal(nn.Linear):
    """A subclass whose weight is no matrix, so that nothing of it is low-rank."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.weight = nn.Parameter(torch.ones(3))


LAYERS: list[tuple[nn.Module, dict[str, str]]] = [
    (nn.Linear(3, 4), {"weight": "linear", "bias": "bias"}),
    (nn.Linear(3, 4, bias=False), {"weight": "linear"}),
    (Diagonal(), {"weight": "bias", "bias": "bias"}),
    (Special(), {"weight": "linear", "bias": "bias"}),
    (
        nn.MultiheadAttention(4, 2, add_bias_kv=True),
        {"in_proj_weight": "linear", "in_proj_bias": "bias", "bias_k": "bias", "bias_v": "bias"}
        | {"out_proj.weight": "linear", "out_proj.bias": "bias"},
    ),
    (
        nn.MultiheadAttention(4, 2, kdim=3, vdim=5, bias=False),
        {f"{n}_proj_weight": "linear" for n in "qkv"} | {"out_proj.weight": "linear"},
    ),
    *((conv(2, 4, 3, groups=2), {"weight": "convolution", "bias": "bias"})
      for conv in (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)),
    (nn.Embedding(7, 3), {"weight": "embedding"}),
    (nn.EmbeddingBag(7, 3), {"weight": "embedding"}),
    *((norm, {"weight": "norm", "bias": "norm"}) for norm in (
        nn.LayerNorm((2, 3)), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True), nn.BatchNorm1d(4),
        nn.BatchNorm2d(4), nn.BatchNorm3d(4), nn.SyncBatchNorm(4))),
    (nn.RMSNorm(4), {"weight": "norm"}),
]  # fmt: skip


@pytest.mark.parametrize(("layer", "kinds"), LAYERS, ids=lambda v: type(v).__name__)
def test_what_each_layer_offers(layer: nn.Module, kinds: dict[str, str]) -> None:
    actual = find_adapted_parameters(layer, 2)
    assert {name: s.kind for name, s in actual.items()} == kinds
    parameters = dict(layer.named_parameters())
    for name, s in actual.items():
        assert s.shape == parameters[name].shape
        assert (s.rank == 0) == (s.kind in ("bias", "norm"))
        a = initial_adaptors(actual, 3, KEY)[name]
        assert 3 * s.parameter_count == sum(t.numel() for _, t in tree.leaves(a))
        assert s.layer == name.rpartition(".")[0]


def test_kinds_and_predicates_choose() -> None:
    m = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Linear(2, 3))
    assert list(find_adapted_parameters(m, 1)) == [n for n, _ in m.named_parameters()]
    assert list(find_adapted_parameters(m, 1, kinds=("norm", "linear"))) == ["1.weight", "1.bias", "2.weight"]
    chosen = find_adapted_parameters(
        m, 1, include=lambda name, layer: name == "2" and isinstance(layer, nn.Linear)
    )
    assert list(chosen) == ["2.weight", "2.bias"]


def test_shared_weights_and_layers_used_twice_are_adapted_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(7, 3)
            self.again = self.embed
            self.head = nn.Linear(3, 7)
            self.head.weight = self.embed.weight

    m = Tied()
    actual = find_adapted_parameters(m, 2)
    assert list(actual) == ["embed.weight", "head.bias"]
    assert actual["embed.weight"].kind == "embedding"
    assert actual["embed.weight"].note == "shared with head"
    # asked for by either of its layers, it goes by its own name
    assert list(find_adapted_parameters(m, 2, kinds=("linear",))) == ["embed.weight"]
    assert list(find_adapted_parameters(m, 2, include=lambda name, _: name == "head")) == [
        "embed.weight",
        "head.bias",
    ]


def test_ranks_budgets_and_what_is_said_about_them() -> None:
    m = nn.Sequential(nn.Linear(30, 20), nn.Linear(3, 20))
    actual = find_adapted_parameters(m, 0.3)
    assert actual["0.weight"].rank == int(0.3 * 600 / 50)
    assert actual["0.weight"].note == ""
    assert actual["1.weight"].rank == 1
    assert actual["1.weight"].note == "rank = 0.3 gives less than rank 1; rank 1 is used"
    wide = find_adapted_parameters(m, 8)
    assert [s.rank for s in wide.values()] == [8, 0, 3, 0]
    assert wide["0.weight"].note == ""
    assert "rank 8 is more than the weight has; rank 3 is used" in wide["1.weight"].note
    # of one kernel axis and of matrices filter-wise construction is what the others are
    assert find_adapted_parameters(m, 2, "filter")["0.weight"].rank == 2
    assert find_adapted_parameters(nn.Conv2d(3, 2, 3), 1, "filter")["weight"].rank == 2


def test_the_table_adds_up() -> None:
    m = nn.Sequential(nn.Conv2d(1, 2, 3), nn.PReLU(), nn.Linear(30, 20))
    b = compute_budget(m, find_adapted_parameters(m, 0.1), 4)
    assert b.base == sum(p.numel() for p in m.parameters())
    assert b.adaptor_size == sum(
        t[0].numel() for _, t in tree.leaves(initial_adaptors(find_adapted_parameters(m, 0.1), 4, KEY))
    )
    assert b.added == 4 * b.adaptor_size == sum(row.added for row in b.rows)
    assert b.unadapted_shapes == {"1.weight": (1,)}
    row = next(r for r in b.rows if r.name == "2.weight")
    assert (row.parameter.rank, row.parameter.parameter_count, row.added, row.share) == (1, 50, 200, 50 / 600)
    text = str(b)
    assert text.splitlines()[3].split() == ["2.weight", "linear", "20×30", "1", "50", "200", "8.3%"]
    assert "Not adapted: 1.weight (1)" in text
    assert "less than rank 1" in text
    assert text.splitlines()[-2].split()[:3] == ["total", f"{b.adaptor_size:,}", f"{b.added:,}"]


def test_remarks_name_small_layers_and_matrices_without_adaptors() -> None:
    m = nn.Sequential(nn.Linear(3, 4), nn.GRUCell(4, 5))
    share = 15 * (4 + 5) / sum(p.numel() for p in m.parameters())
    assert adaptor_warnings(m, find_adapted_parameters(m, 9)) == [
        "rank 9 is more than the weight has; rank 3 is used (in 0.weight)",
        f"no adaptors for 1.weight_ih (GRUCell), 1.weight_hh (GRUCell): {share:.1%} of the parameters",
    ]
    assert adaptor_warnings(m[0], find_adapted_parameters(m[0], 1)) == []


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_refusals() -> None:
    for make, match in (
        (lambda: nn.Sequential(nn.PReLU(), nn.ReLU()), r"no layer to adapt.*\['PReLU'\]"),
        (lambda: nn.ReLU(), "no layer to adapt.*no layer"),
        (lambda: nn.Sequential(nn.LazyLinear(3)), "layer 0 .*lazy.*forward pass first"),
        (lambda: nn.LazyBatchNorm2d(), "the module itself.*lazy"),
        (lambda: nn.Embedding(4, 3, max_norm=1.0), "max_norm.*exclude"),
        (lambda: nn.Embedding(4, 3, sparse=True), "sparse"),
        (lambda: nn.Linear(2, 2, dtype=torch.complex64), "complex64.*exclude"),
    ):
        with pytest.raises(TaskError, match=match):
            find_adapted_parameters(make(), 1)
    for options, match in (
        ({"include": lambda *_: False}, "predicates"),
        ({"kinds": ("norm",)}, "asked for: norm"),
    ):
        with pytest.raises(TaskError, match=match):
            find_adapted_parameters(nn.Linear(2, 2), 1, **options)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"rank": r}, f"^rank must be an integer >= 1, .*; it is {r}$") for r in (0, -3, 1.5)
    ]
    wrong += [({"kinds": ("liner",)}, "Did you mean 'linear'"), ({"construction": "balance"}, "'balanced'")]
    for options, match in wrong:
        # the rank is checked even if only offsets are adapted
        with pytest.raises(ConfigError, match=match):
            find_adapted_parameters(nn.LayerNorm(2), **{"rank": 1, **options})


def test_adaptors_begin_at_zero_by_name_with_the_type_of_their_weight() -> None:
    m = nn.Sequential(nn.Linear(3, 4), nn.Linear(3, 4).double())
    a: Any = initial_adaptors(find_adapted_parameters(m, 2), 3, KEY, reference=weights_of(m))
    one, other = a["0.weight"], a["1.weight"]
    assert (one.u.dtype, other.u.dtype) == (torch.float32, torch.float64)
    assert not torch.equal(one.u.double(), other.u)
    for pi in torch.eye(3):
        mixed = mix_weights(weights_of(m), a, pi)
        assert all(torch.equal(mixed[n], p) and mixed[n].dtype == p.dtype for n, p in m.named_parameters())


def test_the_random_factor_is_the_one_asked_for_but_of_embeddings_v() -> None:
    m = nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 4))
    expected: dict[Factor, tuple[Factor, Factor]] = {"u": ("v", "u"), "v": ("v", "v")}
    for random, drawn in expected.items():
        a = initial_adaptors(find_adapted_parameters(m, 2), 2, KEY, random=random)
        for name, factor in zip(("0.weight", "1.weight"), drawn, strict=True):
            other = "u" if factor == "v" else "v"
            assert bool(getattr(a[name], factor).all())
            assert not bool(getattr(a[name], other).any())


def by_entries(u: Tensor, v: Tensor, shape: tuple[int, ...], rows: tuple[int, ...]) -> Tensor:
    """Σ_k U V of every entry of the weight, with the axes ``rows`` counted in U and the others in V."""
    columns = [i for i in range(len(shape)) if i not in rows]
    out = torch.empty(shape, dtype=u.dtype)
    for at in np.ndindex(*shape):
        r = np.ravel_multi_index([at[i] for i in rows], [shape[i] for i in rows])
        c = np.ravel_multi_index([at[i] for i in columns], [shape[i] for i in columns])
        out[at] = (u[int(r)] * v[int(c)]).sum()
    return out


@pytest.mark.parametrize(
    ("construction", "rows"),
    [
        ("balanced", (0, 3)),
        ("filter", (0, 3)),
        ("channel", (0, 2, 3)),
        ("reshaped", (0, 2, 3)),
        ("input", (0,)),
    ],
)
def test_the_mixed_weights_of_a_module_entry_by_entry(
    construction: Construction, rows: tuple[int, ...]
) -> None:
    # 3·10 + 4 rows and columns of the one channel-wise way are less than 3 + 4·10 of the other
    m = nn.Sequential(nn.Conv2d(4, 3, (2, 5)), nn.Linear(3, 2), nn.GroupNorm(1, 3)).double()
    if construction == "balanced":
        assert sum(choose_fold((3, 4, 2, 5)).size) == min(3 * a + 4 * 10 // a for a in (1, 2, 5, 10))
        rows = choose_fold((3, 4, 2, 5)).rows
    where = find_adapted_parameters(m, 1 if construction == "filter" else 2, construction)
    a, pi, w = shaken(where, 3, construction), torch.tensor([0.2, 0.5, 0.3], dtype=REAL), weights_of(m)
    mixed = mix_weights(w, a, pi, 0.7, construction)
    assert set(mixed) == set(w)
    for name, by in (("0.weight", rows), ("1.weight", (0,))):
        p = a[name]
        assert isinstance(p, Pairs)
        updates = [by_entries(p.u[c], p.v[c], tuple(w[name].shape), by) for c in range(3)]
        torch.testing.assert_close(mixed[name], w[name] + 0.7 * sum(pi[c] * updates[c] for c in range(3)))
    for name in ("0.bias", "1.bias", "2.weight", "2.bias"):
        offsets = a[name]
        assert isinstance(offsets, Tensor)
        torch.testing.assert_close(mixed[name], w[name] + 0.7 * sum(pi[c] * offsets[c] for c in range(3)))


@given(
    st.tuples(*[st.integers(1, 4)] * 4), st.sampled_from(CONSTRUCTIONS), st.sampled_from([1, 2, 0.3]), st.integers(1, 4)
)  # fmt: skip
def test_what_a_rank_takes_is_what_is_made(
    shape: tuple[int, ...], construction: Construction, rank: float, c: int
) -> None:
    o, i, *k = shape
    m = nn.Conv2d(i, o, tuple(k), bias=False, dtype=REAL)
    (s,) = find_adapted_parameters(m, rank, construction).values()
    (a,) = initial_adaptors({"weight": s}, c, KEY, construction).values()
    assert isinstance(a, Pairs)
    assert (a.rank, a.u.numel() + a.v.numel()) == (s.rank, c * s.parameter_count)
    assert a.rank <= min(a.u.shape[1], a.v.shape[1])


def test_preconditioning_against_numpy() -> None:
    m = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(6, 5), nn.Embedding(7, 4)).double()
    where = find_adapted_parameters(m, 2)
    at, g = shaken(where, 3), tree.map_leaves(lambda t: t.cos(), shaken(where, 3))
    made = precondition_adaptors(weights_of(m), g, at, eps=1e-3)
    for name, c in itertools.product(where, range(3)):
        a, b, d = at[name], g[name], made[name]
        if not isinstance(a, Pairs) or not isinstance(b, Pairs) or not isinstance(d, Pairs):
            assert d is b
            continue
        for mine, slope, other in ((d.u, b.u, a.v), (d.v, b.v, a.u)):
            gram = other[c].numpy().T @ other[c].numpy()
            if name == "0.weight":
                expected = slope[c].numpy() / (np.linalg.norm(gram) + 1e-3)
            else:
                expected = slope[c].numpy() @ np.linalg.inv(gram + 1e-3 * np.eye(len(gram)))
            np.testing.assert_allclose(mine[c].numpy(), expected, rtol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_decomposed_in_single(dtype: torch.dtype) -> None:
    p, g = (
        Pairs(draw_normal(2, 6, 2, seed=s).to(dtype), draw_normal(2, 5, 2, seed=s + 9).to(dtype))
        for s in (0, 1)
    )
    made, exact = (
        precondition_matrix(g, p),
        precondition_matrix(tree.map_leaves(Tensor.float, g), tree.map_leaves(Tensor.float, p)),
    )
    assert made.u.dtype == dtype
    torch.testing.assert_close(made.u.float(), exact.u, rtol=1e-2, atol=1e-3)
    mean, left = center_pairs(p, torch.full((2,), 0.5, dtype=dtype))
    assert (mean.dtype, left.u.dtype) == (dtype, dtype)


@pytest.mark.parametrize("construction", CONSTRUCTIONS)
def test_centering_keeps_every_merged_model_that_the_rank_can_hold(construction: Construction) -> None:
    alpha = 2.5
    m = nn.Sequential(nn.Conv2d(6, 6, 3), nn.Linear(9, 8), nn.LayerNorm(8)).double()
    where = find_adapted_parameters(m, 1 if construction == "filter" else 2, construction)
    a, w = shaken(where, 2, construction), weights_of(m)
    # two adaptors that share V: their differences from any mean have the rank of one
    a = {n: Pairs(p.u, p.v[:1].expand_as(p.v)) if isinstance(p, Pairs) else p for n, p in a.items()}
    shares = torch.tensor([0.25, 0.75], dtype=REAL)
    base, left = center_adaptors(w, a, shares, alpha, construction)
    for pi in (*torch.eye(2, dtype=REAL), torch.tensor([0.6, 0.4], dtype=REAL)):
        torch.testing.assert_close(
            mix_weights(base, left, pi, alpha, construction), mix_weights(w, a, pi, alpha, construction)
        )
    still = mix_weights(base, left, shares, alpha, construction)
    for name in where:
        torch.testing.assert_close(still[name], base[name])
        assert base[name].is_contiguous()
        assert not torch.equal(base[name], w[name])


def normed(x: Tensor, mean: Tensor, var: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    return functional.batch_norm(x, mean, var, gamma, beta, False, 0.0, 1e-3)


def test_equation_42() -> None:
    x, (g, b, gi, bi) = draw_normal(6, 3), draw_normal(4, 3, seed=1)
    main, own = (
        (draw_normal(3, seed=2), draw_normal(3, seed=3).exp()),
        (draw_normal(3, seed=4), draw_normal(3, seed=5).exp()),
    )
    made = reparameterize(gi, bi, main, own, eps=1e-3)
    unit = (x - main[0]) / (main[1] + 1e-3).sqrt()
    torch.testing.assert_close(normed(x, *main, g, b) + normed(x, *own, *made), unit * (g + gi) + b + bi)
    # by hand: twice the deviation, the mean one main deviation above
    hand = reparameterize(
        torch.tensor([3.0]), torch.tensor([1.0]), (torch.tensor([5.0]), torch.tensor([4.0])),
        (torch.tensor([7.0]), torch.tensor([16.0])), eps=0.0,
    )  # fmt: skip
    assert [t.item() for t in hand] == [6.0, 4.0]


def test_equation_42_stops_the_gradient_through_beta() -> None:
    x, weight = draw_normal(6, 3), draw_normal(6, 3, seed=9)
    main, own = (
        (draw_normal(3, seed=2), draw_normal(3, seed=3).exp()),
        (draw_normal(3, seed=4), draw_normal(3, seed=5).exp()),
    )
    gi, bi = draw_normal(3, seed=6).requires_grad_(), draw_normal(3, seed=7).requires_grad_()
    (normed(x, *own, *reparameterize(gi, bi, main, own, eps=1e-3)) * weight).sum().backward()
    deviation = (main[1] + 1e-3).sqrt()
    torch.testing.assert_close(gi.grad, (weight * (x - own[0]) / deviation).sum(0))
    torch.testing.assert_close(bi.grad, weight.sum(0))


def test_offsets_of_an_adaptor_with_its_own_statistics_undo_equation_42() -> None:
    main, own = (
        (draw_normal(3), draw_normal(3, seed=1).exp()),
        (draw_normal(4, 3, seed=2), draw_normal(4, 3, seed=3).exp()),
    )
    gamma, beta, x = draw_normal(4, 3, seed=4), draw_normal(4, 3, seed=5), draw_normal(6, 3, seed=6)
    offsets = as_offsets(gamma, beta, main, own, eps=1e-3)
    torch.testing.assert_close(reparameterize(*offsets, main, own, eps=1e-3), (gamma, beta))
    for c in range(4):
        expected = normed(x, own[0][c], own[1][c], gamma[c], beta[c])
        torch.testing.assert_close(normed(x, *main, offsets[0][c], offsets[1][c]), expected)


def test_ranks_of_single_layers_by_the_end_of_their_names() -> None:
    module = nn.Sequential(nn.Linear(6, 5), nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 4)))
    actual = find_adapted_parameters(module, 1, kinds=("linear",), rank_pattern={"1.1": 3, "1.0": 0.9})
    # budget: the largest r with r (5 + 5) <= 0.9 · 25
    assert {n: a.rank for n, a in actual.items()} == {"0.weight": 1, "1.0.weight": 2, "1.1.weight": 3}
    wrapped = Floral(module, 1, 2, rank_pattern={"1.1": 3})
    assert {n: tuple(a.u.shape) for n, a in wrapped.adapted().items() if isinstance(a, Pairs)} == {
        "0.weight": (2, 5, 1),
        "1.0.weight": (2, 5, 1),
        "1.1.weight": (2, 4, 3),
    }
    with pytest.raises(ConfigError, match=r"ends in 'head'; they are '0', '1\.0', '1\.1'"):
        find_adapted_parameters(module, 1, rank_pattern={"head": 3})
    with pytest.raises(ConfigError, match=r"rank must be an integer"):
        find_adapted_parameters(module, 1, rank_pattern={"0": 1.5})
