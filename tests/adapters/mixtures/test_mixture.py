"""Mixtures of low-rank updates against convolutions in two steps, numpy, and the identities of the paper."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from fedlowrank.adapters.mixtures.mixture import (
    Factor,
    Fold,
    Pairs,
    center_pairs,
    choose_fold,
    initial_pairs,
    precondition_matrix,
)
from fedlowrank.core import tree
from fedlowrank.core.errors import ConfigError
from tests.adapters.mixtures.floral_networks import CONSTRUCTIONS, KEY

torch.set_num_threads(1)
sizes = st.integers(1, 5)


def pairs(fold: Fold, rank: int, count: int = 3, seed: int = 0) -> Pairs:
    g = torch.Generator().manual_seed(seed)
    rows, columns = fold.size
    return Pairs(
        torch.randn(count, rows, rank, generator=g, dtype=torch.float64),
        torch.randn(count, columns, rank, generator=g, dtype=torch.float64),
    )


def two_steps(
    fold: Fold, p: Pairs, x: torch.Tensor, stride: tuple[int, int], padding: tuple[int, int]
) -> torch.Tensor:
    """Convolve by V and then by U, each with the kernel axes, strides and paddings that it owns."""
    _, inputs, *_ = fold.shape
    rank = p.rank
    owned = [(2 + a) in fold.rows for a in range(2)]
    first = [1 if o else fold.shape[2 + a] for a, o in enumerate(owned)]
    second = [fold.shape[2 + a] if o else 1 for a, o in enumerate(owned)]
    v = p.v[0].mT.reshape(rank, inputs, *first)
    u = p.u[0].reshape(fold.shape[0], *[k for k, o in zip(second, owned, strict=True) if o], rank)
    u = u.movedim(-1, 1).reshape(fold.shape[0], rank, *second)
    z = functional.conv2d(
        x, v, stride=[1 if o else s for s, o in zip(stride, owned, strict=True)],
        padding=[0 if o else q for q, o in zip(padding, owned, strict=True)],
    )  # fmt: skip
    return functional.conv2d(
        z, u, stride=[s if o else 1 for s, o in zip(stride, owned, strict=True)],
        padding=[q if o else 0 for q, o in zip(padding, owned, strict=True)],
    )  # fmt: skip


@pytest.mark.parametrize("construction", CONSTRUCTIONS)
@pytest.mark.parametrize("shape", [(4, 3, 3, 5), (3, 6, 2, 2), (5, 5, 1, 3)])
@pytest.mark.parametrize(("stride", "padding"), [((1, 1), (0, 0)), ((2, 1), (1, 2))])
def test_an_update_is_two_convolutions_one_after_the_other(construction, shape, stride, padding) -> None:
    fold = choose_fold(shape, construction)
    p = pairs(fold, 2, count=1)
    x = torch.randn(2, shape[1], 9, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    merged = functional.conv2d(
        x, fold.unfold(p.mix(torch.ones(1, dtype=torch.float64))), stride=stride, padding=padding
    )
    torch.testing.assert_close(merged, two_steps(fold, p, x, stride, padding))


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 5), st.integers(1, 5))
def test_numbers_for_a_rank_are_those_of_the_paper(o: int, i: int, k1: int, k2: int) -> None:
    per_rank = {c: sum((f := choose_fold((o, i, k1, k2), c)).size) * f.times for c in CONSTRUCTIONS}
    low, high = min(o, i), max(o, i)
    assert per_rank["balanced"] == low * max(k1, k2) + high * min(k1, k2)
    assert per_rank["filter"] == (o * k2 + i * k1) * o
    assert per_rank["channel"] == low * k1 * k2 + high
    assert per_rank["reshaped"] == o * k1 * k2 + i
    assert per_rank["input"] == o + i * k1 * k2


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        # three inputs and 32 outputs, as of a first layer: channel-wise would take 3 · 25 + 32
        ((32, 3, 5, 5), {3 * 5, 32 * 5}),
        ((2, 40, 3, 7), {2 * 7, 40 * 3}),
        # of one axis the smaller side takes it; of three each side takes one at least
        ((32, 3, 5), {3 * 5, 32}),
        ((3, 32, 5), {3 * 5, 32}),
        ((40, 2, 2, 3, 5), {2 * 15, 40 * 2}),
    ],
)
def test_each_factor_of_a_balanced_update_has_an_axis_of_the_kernel(
    shape: tuple[int, ...], size: set[int]
) -> None:
    fold = choose_fold(shape)
    assert set(fold.size) == size
    if len(shape) > 3:
        assert len(fold.rows) > 1
        assert len(fold.columns) > 1


@given(st.integers(1, 300), st.integers(1, 300), st.floats(0.001, 0.999))
def test_a_budget_is_used_up_and_never_exceeded_but_for_rank_one(m: int, n: int, budget: float) -> None:
    r = choose_fold((m, n)).rank(budget)
    assert r >= 1
    assert r == 1 or r * (m + n) <= budget * m * n * (1 + 1e-6)
    assert (r + 1) * (m + n) > budget * m * n * (1 - 1e-6)


@pytest.mark.parametrize("asked", [0, -1, 2.5, 1.5, float("nan"), float("inf")])
def test_a_rank_is_a_whole_number_or_a_budget(asked: float) -> None:
    with pytest.raises(ConfigError, match="budget"):
        choose_fold((4, 5)).rank(asked)


@pytest.mark.parametrize("random", ["u", "v"])
def test_updates_begin_at_zero_and_differ_between_clusters(random: Factor) -> None:
    fold = choose_fold((20, 30))
    p = initial_pairs(fold, 3, 4, KEY, random=random)
    assert not p.dense().any()
    drawn: Tensor = getattr(p, random)
    # the range of a weight of 30 inputs, whichever factor is drawn
    assert float(drawn.abs().max()) <= np.sqrt(6 / 30)
    assert float(drawn.abs().max()) > 0.9 * np.sqrt(6 / 30)
    for a, b in itertools.combinations(range(4), 2):
        assert not torch.equal(drawn[a], drawn[b])
    # a cluster's draw does not depend on how many there are
    assert torch.equal(getattr(initial_pairs(fold, 3, 2, KEY, random=random), random), drawn[:2])
    assert tree.equal(initial_pairs(fold, 3, 4, KEY, random=random), p)


def test_factors_so_large_that_the_gram_matrix_is_singular_give_no_finite_step() -> None:
    large = torch.full((1, 3, 2), 1e12, dtype=torch.float64)
    actual = precondition_matrix(Pairs(torch.ones_like(large), torch.ones_like(large)), Pairs(large, large))
    assert not any(bool(t.isfinite().any()) for t in (actual.u, actual.v))


def test_a_preconditioned_step_does_not_depend_on_how_the_factors_share_their_size() -> None:
    base = pairs(choose_fold((6, 5)), 2)
    slope = torch.randn(3, 6, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)

    def change(scale: float) -> torch.Tensor:
        at = Pairs(base.u * scale, base.v / scale)
        step = precondition_matrix(Pairs(slope @ at.v, slope.mT @ at.u), at, eps=0.0)
        # to first order in the learning rate
        return step.u @ at.v.mT + at.u @ step.v.mT

    torch.testing.assert_close(change(1.0), change(7.0))


def test_centering_loses_what_the_rank_cannot_hold_and_keeps_the_shape() -> None:
    weights = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    for shape, rank in (((9, 8), 2), ((2, 5), 4)):
        p = pairs(choose_fold(shape), rank)
        mean, left = center_pairs(p, weights)
        torch.testing.assert_close(mean, p.mix(weights))
        assert (left.u.shape, left.v.shape) == (p.u.shape, p.v.shape)
        for c in range(3):
            rest = p.dense()[c] - mean
            lost = torch.linalg.matrix_norm(rest - left.dense()[c])
            exact = torch.linalg.svdvals(rest)[rank:].square().sum().sqrt()
            torch.testing.assert_close(lost, exact, rtol=1e-9, atol=1e-10)
        # both factors hold the root of each singular value
        held = [torch.linalg.vector_norm(f[..., : min(rank, *shape)], dim=1) for f in (left.u, left.v)]
        torch.testing.assert_close(*held)


def test_centering_equal_updates_leaves_them_able_to_learn() -> None:
    g = torch.Generator().manual_seed(3)
    u, v = torch.randn(1, 6, 2, generator=g), torch.randn(1, 5, 2, generator=g)
    same = Pairs(u.expand(3, -1, -1).clone(), v.expand(3, -1, -1).clone())
    mean, left = center_pairs(same, torch.full((3,), 1 / 3))
    torch.testing.assert_close(mean, u[0] @ v[0].T)
    assert float(left.dense().abs().max()) < 1e-5
    # the gradient of U is G V: it vanishes only if V does
    assert float(torch.linalg.vector_norm(left.v, dim=1).min()) > 0.9
