"""Weights as matrices and as factors."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from fedlowrank.core import tree
from fedlowrank.linalg.matricize import (
    LowRank,
    Sparse,
    Weights,
    count_parameters,
    matricize,
    matrix_shape,
    pack_low_rank,
    pack_sparse,
    to_sparse,
    unmatricize,
    unpack_weights,
)
from fedlowrank.linalg.nuclear_norm import apply_prox, apply_prox_dense
from fedlowrank.linalg.svt import threshold_singular_values

sizes = st.integers(1, 4)


@given(st.tuples(sizes, sizes, sizes, sizes))
def test_scheme_2_index_by_index(shape: tuple[int, int, int, int]) -> None:
    o_, i_, k1_, k2_ = shape
    w = np.random.default_rng(0).normal(size=shape)
    expected = np.empty((o_ * k1_, i_ * k2_))
    for o in range(o_):
        for i in range(i_):
            for k1 in range(k1_):
                for k2 in range(k2_):
                    expected[o * k1_ + k1, i * k2_ + k2] = w[o, i, k1, k2]
    actual = matricize(torch.from_numpy(w))
    assert matrix_shape(torch.Size(shape)) == expected.shape
    np.testing.assert_array_equal(actual.numpy(), expected)
    back = unmatricize(actual, torch.Size(shape))
    assert back.is_contiguous()
    np.testing.assert_array_equal(back.numpy(), w)


@pytest.mark.parametrize(
    ("shape", "wanted"), [((3, 5), (3, 5)), ((2, 3, 4), (8, 3)), ((2, 3, 4, 5, 6), (8, 90))]
)
def test_other_numbers_of_dimensions_go_there_and_back(
    shape: tuple[int, ...], wanted: tuple[int, int]
) -> None:
    w = torch.randn(shape)
    assert tuple(matricize(w).shape) == wanted == matrix_shape(w.shape)
    assert torch.equal(unmatricize(matricize(w), w.shape), w)


def test_factors_are_two_thinner_convolutions() -> None:
    """Rank r: a 1×k2 convolution to r channels, then a k1×1 one; the reason for this matrix and no other."""
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(6, 4, 3, 5, dtype=torch.float64, generator=generator)
    x = torch.randn(2, 4, 9, 11, dtype=torch.float64, generator=generator)
    f = threshold_singular_values(matricize(w), 4.0)
    assert 0 < f.rank < 18
    first = f.right.reshape(f.rank, 4, 1, 5)
    second = f.left.reshape(6, 3, f.rank).permute(0, 2, 1)[..., None]
    thin = functional.conv2d(functional.conv2d(x, first), second)
    torch.testing.assert_close(thin, functional.conv2d(x, unmatricize(f.dense(), w.shape)))


def test_factors_are_packed_where_they_are_fewer_numbers() -> None:
    shape = torch.Size((6, 12))
    for rank, packed in ((0, True), (3, True), (4, False), (6, False)):  # 4 · 18 = 72 = 6 · 12
        f = LowRank(torch.randn(6, rank), torch.randn(rank, 12))
        actual = pack_low_rank(f, shape)
        assert isinstance(actual, LowRank) == packed
        like = {"w": torch.empty(shape)}
        assert torch.equal(unpack_weights({"w": actual}, like)["w"], f.dense())


def test_factors_survive_their_bytes_even_of_rank_zero() -> None:
    weights = {"dead": LowRank(torch.zeros(4, 0), torch.zeros(0, 5)), "b": torch.ones(3)}
    back = tree.decode(tree.encode(weights))
    assert back["dead"].rank == 0
    assert tuple(back["dead"].dense().shape) == (4, 5)


@pytest.mark.parametrize("norm", ["low_rank", "sparse"])
def test_the_prox_of_a_model_leaves_vectors_and_excluded_weights(norm) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = {"conv": (4, 3, 3, 3), "scale": (4,), "head.weight": (5, 6), "head.weight_v": (5, 6)}
    params = {n: torch.randn(s, generator=generator) for n, s in shapes.items()}
    actual = apply_prox(params, 1.0, norm, ("head.weight",))
    dense = actual.dense(params)
    assert list(actual.ranks) == ["conv", "head.weight_v"]
    for name in ("scale", "head.weight"):
        assert torch.equal(dense[name], params[name])
    assert not torch.allclose(dense["head.weight_v"], params["head.weight_v"])
    in_step = apply_prox_dense(params, 1.0, norm, ("head.weight",))
    for name, p in in_step.items():
        torch.testing.assert_close(dense[name], p)
    assert apply_prox(params, 0.0, norm, ()).weights == params


@given(st.integers(0, 6), st.integers(1, 6), st.integers(1, 5), st.integers(0, 2**31))
def test_of_a_sparse_weight_the_entries_are_held_where_that_is_smaller(
    zeros_of_6: int, rows: int, columns: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    w = rng.normal(size=(rows, columns, 3)).astype(np.float32)
    w[rng.uniform(size=w.shape) < zeros_of_6 / 6] = 0.0
    held = pack_sparse(torch.from_numpy(w))
    there = np.count_nonzero(w)
    smaller = 4 * there + math.ceil(w.size / 8) < 4 * w.size
    assert isinstance(held, Sparse) == smaller
    message = tree.decode(tree.encode({"w": held}))
    back = unpack_weights(message, {"w": torch.from_numpy(w)})["w"]
    np.testing.assert_array_equal(back.numpy(), w)
    if smaller:
        assert tree.numel(message) == there
        assert count_parameters([{"w": held}], {"w": torch.from_numpy(w)}) == there


def test_of_a_dense_weight_all_entries_are_counted_of_a_sparse_one_those_that_are_not_zero() -> None:
    like = {"a": torch.zeros(4, 5), "b": torch.zeros(6)}
    few = torch.zeros(4, 5)
    few[0, :3] = 1
    dense: Weights = {"a": torch.zeros(4, 5), "b": torch.tensor([1.0, 0, 0, 0, 0, 0])}
    factors: Weights = {"a": LowRank(torch.zeros(4, 1), torch.ones(1, 5)), "b": torch.zeros(6)}
    sparse: Weights = {"a": to_sparse(few), "b": to_sparse(torch.eye(6)[0])}
    assert count_parameters([dense], like) == 20 + 6
    assert count_parameters([factors], like) == 9 + 6
    assert count_parameters([sparse], like) == 3 + 1
    assert count_parameters([factors, sparse], like) == 12 + 6
