"""Singular-value thresholding against NumPy's decomposition in float64, by every way the code can take."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedlowrank.core.errors import ConfigError, TaskError
from fedlowrank.linalg import svt as threshold
from fedlowrank.linalg.factored import compute_svd
from fedlowrank.linalg.nuclear_norm import Norm
from fedlowrank.linalg.nuclear_norm import apply_prox as prox_of_model
from fedlowrank.linalg.svt import (
    count_above,
    soft_threshold,
    threshold_all,
    threshold_dense,
    threshold_singular_values,
)


def reference(w: np.ndarray, c: float) -> np.ndarray:
    u, s, vt = np.linalg.svd(w, full_matrices=False)
    return (u * np.maximum(s - c, 0.0)) @ vt


def of_values(rng: np.random.Generator, m: int, n: int, s: np.ndarray) -> np.ndarray:
    """A matrix with these singular values and random singular vectors."""
    k = min(m, n)
    u, v = (np.linalg.qr(rng.normal(size=(d, k)))[0] for d in (m, n))
    return (u * s[:k]) @ v.T


@st.composite
def matrices(draw: st.DrawFn) -> np.ndarray:
    m, n = draw(st.tuples(st.integers(1, 14), st.integers(1, 14)))
    k = min(m, n)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kind = draw(st.sampled_from(["gaussian", "deficient", "ill", "zero", "ties"]))
    s = {
        "gaussian": np.linalg.svd(rng.normal(size=(m, n)))[1],
        "deficient": np.where(np.arange(k) < k // 2, 2.0, 0.0),
        "ill": np.logspace(1, -14, k),
        "zero": np.zeros(k),
        "ties": np.repeat(3.0, k),
    }[kind]
    return of_values(rng, m, n, s)


thresholds = st.sampled_from([0.0, 1e-9, 1e-4, 0.03, 0.7, 2.5, 50.0])


def gap(found: torch.Tensor, wanted: np.ndarray) -> float:
    return float(np.abs(found.double().numpy() - wanted).max(initial=0.0))


@given(matrices(), thresholds)
def test_in_float64_it_is_numpys(w: np.ndarray, c: float) -> None:
    actual = threshold_singular_values(torch.from_numpy(w), c)
    assert gap(actual.dense(), reference(w, c)) <= 1e-13 * (1 + np.abs(w).max()) * len(w)
    values = np.linalg.svd(w)[1]
    # one at the threshold, up to rounding, may be counted or not
    assert (values > c + 1e-12).sum() <= actual.rank <= (values > c).sum()


@given(matrices(), thresholds)
def test_in_float32_it_is_numpys_to_the_rounding_of_float32(w: np.ndarray, c: float) -> None:
    single = torch.from_numpy(w).float()
    actual = threshold_singular_values(single, c)
    assert actual.left.dtype == actual.right.dtype == torch.float32
    top = np.linalg.norm(w, 2)
    # of the float32 matrix: what is lost by rounding the input is none of the prox's doing
    assert gap(actual.dense(), reference(single.double().numpy(), c)) <= 2e-6 * top
    assert gap(threshold_dense(single, c), reference(single.double().numpy(), c)) <= 1e-5 * top + 1e-12


@given(st.integers(1, 40), st.integers(1, 40), st.floats(5e-5, 0.9), st.integers(0, 2**32 - 1))
def test_by_gram_and_by_the_whole_decomposition_agree(m: int, n: int, share: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    top = 10.0 ** rng.uniform(-3, 3)
    w = torch.from_numpy(
        of_values(rng, m, n, np.sort(top * 10.0 ** rng.uniform(-6, 0, size=min(m, n)))[::-1])
    ).float()
    c = share * float(torch.linalg.matrix_norm(w.double(), 2))
    fast, sure = threshold_singular_values(w, c, "gram"), threshold_singular_values(w, c, "svd")
    assert fast.rank == sure.rank
    bound = 4 * torch.finfo(torch.float32).eps * top
    assert float((fast.dense() - sure.dense()).abs().max()) <= bound
    assert float((fast.s - sure.s).abs().max()) <= bound if sure.rank else True


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_threshold_too_small_for_a_gram_matrix_is_left_to_the_whole_decomposition(
    dtype: torch.dtype,
) -> None:
    s = np.array([10.0, 3.0, 5e-5, 2e-5, 1e-5])
    w = torch.from_numpy(of_values(np.random.default_rng(0), 9, 5, s))
    c = 3e-5
    with pytest.raises(ArithmeticError, match="Gram"):
        threshold_singular_values(w.to(dtype), c, "gram")
    actual = threshold_singular_values(w.to(dtype), c)
    if dtype == torch.float64:
        assert actual.rank == 3
        np.testing.assert_allclose(actual.s.numpy(), s[:3] - c, rtol=1e-9)
    assert torch.equal(actual.left, threshold_singular_values(w.to(dtype), c, "svd").left)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rotated", [False, True])
def test_a_value_at_the_threshold_becomes_zero(dtype: torch.dtype, rotated: bool) -> None:
    c = 0.1
    # in the weight's own type: 0.1 in float32 is a little more than in float64
    s = torch.tensor([4.0, c, c, 0.05], dtype=dtype)
    c = float(s[1])
    w = torch.diag(s)
    if rotated and dtype == torch.float64:
        w = torch.from_numpy(of_values(np.random.default_rng(1), 6, 4, s.numpy()))
    with pytest.raises(ArithmeticError, match="too close"):
        threshold_singular_values(w, c, "gram")
    assert threshold_singular_values(w, c).rank == 1
    assert threshold_singular_values(w, c * (1 - 1e-4)).rank == 3


def test_a_large_matrix_of_few_survivors_is_decomposed_only_above_the_threshold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = np.random.default_rng(0)
    w = of_values(rng, 310, 280, np.concatenate([np.linspace(5, 0.0102, 30), np.linspace(0.0099, 1e-5, 250)]))
    w = torch.from_numpy(w).float()
    actual: list[int] = []

    def spy(*args, **kwargs):
        values, vectors = plain(*args, **kwargs)
        actual.append(len(values))
        return values, vectors

    plain = scipy.linalg.eigh
    monkeypatch.setattr(scipy.linalg, "eigh", spy)
    for matrix in (w, w.mT):
        fast, sure = threshold_singular_values(matrix, 0.01), threshold_singular_values(matrix, 0.01, "svd")
        assert fast.rank == sure.rank == 30
        assert float((fast.dense() - sure.dense()).abs().max()) < 1e-6
    assert actual == [30, 30]


def test_a_survivor_missed_by_the_partial_decomposition_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    s = np.concatenate([np.linspace(5, 1, 20), np.linspace(0.0099, 1e-5, 250)])
    w = torch.from_numpy(of_values(np.random.default_rng(0), 270, 270, s)).float()
    plain = scipy.linalg.eigh

    def forgetful(*args, **kwargs):
        values, vectors = plain(*args, **kwargs)
        return values[1:], vectors[:, 1:]

    monkeypatch.setattr(scipy.linalg, "eigh", forgetful)
    assert threshold_singular_values(w, 0.01).rank == 20
    assert (
        float(
            (threshold_singular_values(w, 0.01).dense() - threshold_singular_values(w, 0.01, "svd").dense())
            .abs()
            .max()
        )
        < 1e-6
    )


@given(st.integers(1, 30), st.integers(0, 2**32 - 1), st.floats(-3, 3))
def test_inertia_counts_the_eigenvalues_above(n: int, seed: int, x: float) -> None:
    rng = np.random.default_rng(seed)
    h = rng.normal(size=(n, n))
    h = h + h.T
    lower = torch.from_numpy(np.tril(h) + np.triu(np.full_like(h, 7.0), 1))
    assert count_above(lower, x) == (np.linalg.eigvalsh(h) > x).sum()


@pytest.mark.parametrize("rank", [0, 1, 5, 8])
def test_eigenvalues_of_a_singular_matrix_are_counted(rank: int) -> None:
    # diagonal, so that the factorization meets exact zeros
    values = np.concatenate([np.arange(1.0, rank + 1), np.zeros(8 - rank)])
    assert count_above(torch.from_numpy(np.diag(values)), 0.0) == rank


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_wide_layer_with_a_dead_unit_is_thresholded(dtype: torch.dtype) -> None:
    w = torch.randn(600, 600, generator=torch.Generator().manual_seed(0)).to(dtype)
    w[:, 5] = 0
    values = np.linalg.svd(w.double().numpy(), compute_uv=False)
    c = float(values[300:302].mean())
    assert threshold_singular_values(w, c).rank == 301


@given(matrices(), st.sampled_from([1e-3, 0.1, 1.0, 3.0]))
def test_the_result_satisfies_the_condition_of_optimality(w: np.ndarray, c: float) -> None:
    """(W - X) / c is a subgradient of the nuclear norm at X: spectral norm at most 1, and ⟨·, X⟩ = ‖X‖_*."""
    x = threshold_singular_values(torch.from_numpy(w), c).dense().numpy()
    g = (w - x) / c
    slack = 1e-10 * (1 + np.linalg.norm(w, 2) / c)
    assert np.linalg.norm(g, 2) <= 1 + slack
    assert abs((g * x).sum() - np.linalg.norm(x, "nuc")) <= slack * (1 + np.linalg.norm(x))


@given(matrices(), thresholds, st.integers(0, 2**32 - 1))
def test_it_does_not_expand(w: np.ndarray, c: float, seed: int) -> None:
    other = w + np.random.default_rng(seed).normal(size=w.shape)
    a, b = (threshold_singular_values(torch.from_numpy(v), c).dense().numpy() for v in (w, other))
    assert np.linalg.norm(a - b) <= np.linalg.norm(w - other) * (1 + 1e-10)


@pytest.mark.parametrize("shape", [(5, 3), (3, 5), (1, 4), (4, 1)])
def test_rank_zero_has_factors_of_no_columns(shape: tuple[int, int]) -> None:
    for w in (torch.zeros(shape), torch.randn(shape, generator=torch.Generator().manual_seed(0))):
        f = threshold_singular_values(w, 100.0)
        assert (f.left.shape, f.right.shape) == ((shape[0], 0), (0, shape[1]))
        assert torch.equal(f.dense(), torch.zeros(shape))
    assert threshold_singular_values(torch.zeros(shape), 0.0).rank == 0


def test_a_threshold_of_zero_changes_nothing() -> None:
    w = torch.randn(7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert gap(threshold_singular_values(w, 0.0).dense(), w.numpy()) < 1e-14


def test_factors_are_balanced_descending_and_of_the_signs_of_svd() -> None:
    for shape in ((8, 5), (5, 8)):
        w = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
        f, whole = threshold_singular_values(w, 0.5), compute_svd(w)
        torch.testing.assert_close(f.s, whole.s[: f.rank] - 0.5)
        torch.testing.assert_close(f.right.square().sum(1), f.s)
        torch.testing.assert_close(f.left / f.s.sqrt(), whole.u[:, : f.rank])
        torch.testing.assert_close(f.right.mT / f.s.sqrt(), whole.v[:, : f.rank])


def test_many_at_once_are_those_one_by_one() -> None:
    generator = torch.Generator().manual_seed(0)
    ws = [torch.randn(s, generator=generator) for s in ((6, 4), (3, 9), (6, 4), (9, 3))]
    for f, w in zip(threshold_all(ws, 0.8), ws, strict=True):
        one = threshold_singular_values(w, 0.8)
        assert torch.equal(f.left, one.left)
        assert torch.equal(f.right, one.right)


@pytest.mark.parametrize("how", ["auto", "svd"])
@pytest.mark.parametrize("size", [5e-324, 1e-310, 1e-200, 1e-160, 1e160, 1e200, 2.0**1020])
def test_a_matrix_of_any_size_is_shrunk_as_one_of_size_one(size: float, how: threshold.Algorithm) -> None:
    s, c = np.array([3.0, 2.0, 0.75, 0.25]), 1.0
    u, v = np.array([[1, 1], [1, -1]]), np.array([[0, 1.0], [1, 0]])
    # Hadamard and permutation matrices: every product below is exact
    w = np.kron(u, u) / 2 * s @ np.kron(v, v)
    size = 8 * size if size < 1e-309 else size
    actual = threshold_singular_values(torch.from_numpy(w * size), c * size, how)
    assert actual.rank == 2
    expected = np.kron(u, u) / 2 * np.maximum(s - c, 0) @ np.kron(v, v)
    small = 2e-323 if size < 1e-300 else 0.0
    np.testing.assert_allclose(
        actual.dense().numpy(), expected * size, rtol=1e-14, atol=max(small, 1e-15 * size)
    )


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_matrix_that_is_not_finite_is_refused_in_words(bad: float) -> None:
    w = torch.eye(3, 2)
    w[1, 0] = bad
    for how in ("auto", "gram", "svd"):
        with pytest.raises(TaskError, match=r"shape \[3, 2\] holds a NaN or an infinity"):
            threshold_singular_values(w, 0.1, how)


@pytest.mark.parametrize("bad", [-1e-9, float("nan")])
def test_a_negative_threshold_is_refused_in_words(bad: float) -> None:
    for prox in (soft_threshold, threshold_singular_values, threshold_dense):
        with pytest.raises(ConfigError, match="threshold of a prox must be >= 0"):
            prox(torch.eye(3), bad)


@pytest.mark.parametrize("norm", ["low_rank", "sparse"])
def test_a_global_model_that_is_not_finite_is_named(norm: Norm) -> None:
    params = {"a": torch.eye(2), "b.weight": torch.full((2, 2), torch.inf)}
    with pytest.raises(TaskError, match=r"'b\.weight' of the global model"):
        prox_of_model(params, 0.1, norm, ())


@given(st.lists(st.floats(-5, 5), max_size=9), thresholds)
def test_soft_threshold(values: list[float], c: float) -> None:
    w = np.array(values)
    assert gap(soft_threshold(torch.from_numpy(w), c), np.sign(w) * np.maximum(np.abs(w) - c, 0)) == 0
