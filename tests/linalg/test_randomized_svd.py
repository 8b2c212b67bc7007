"""The leading triplets of a dense matrix of known spectrum: right whatever the spectrum and the start."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedlowrank.linalg import randomized_svd as sketch
from fedlowrank.linalg.randomized_svd import decompose_gram, iterate_lanczos, leading_triplets

Matrix = np.ndarray


def with_spectrum(s: Matrix, d: int, k: int, seed: int) -> tuple[Tensor, Matrix, Matrix]:
    rng = np.random.default_rng(seed)
    u, v = (np.linalg.qr(rng.normal(size=(n, len(s))))[0] for n in (d, k))
    return torch.from_numpy((u * s) @ v.T), u, v


@given(st.floats(0.5, 1.0), st.integers(1, 8), st.booleans(), st.booleans(), st.integers(0, 99))
def test_leading_triplets_whatever_the_spectrum(
    decay: float, rank: int, flip: bool, warm: bool, seed: int
) -> None:
    s = 3 * decay ** np.arange(90)
    w, _, v = with_spectrum(s, *((90, 160) if flip else (160, 90)), seed)
    # the worst warm start there is: singular vectors of the other end
    u1, s1, v1 = leading_triplets(w, rank, torch.from_numpy(v[:, -rank:].copy()) if warm else None)
    np.testing.assert_allclose(s1.numpy(), s[:rank], rtol=1e-5)
    # the best error there is, ties or not
    left = float(torch.linalg.matrix_norm(w - (u1 * s1) @ v1.mT))
    assert left == pytest.approx(np.linalg.norm(s[rank:]), rel=1e-8, abs=1e-12)


def test_the_iteration_is_used_where_it_pays_and_says_when_it_fails(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fedlowrank")
    falling, _, _ = with_spectrum(0.7 ** np.arange(90), 150, 90, 0)
    assert iterate_lanczos(falling, 5) is not None
    leading_triplets(falling, 5)
    assert not caplog.records
    # the last of the five is 1e-6 of the first, which a Gram matrix does not tell from those after it
    low, _, _ = with_spectrum(np.r_[1, 1e-6 * np.linspace(1, 0.9, 89)], 150, 90, 0)
    assert iterate_lanczos(low, 5) is None
    assert decompose_gram(low, 5) is None
    _, s, _ = leading_triplets(low, 5)
    np.testing.assert_allclose(s.numpy(), np.linalg.svd(low.numpy())[1][:5], rtol=1e-9)
    assert "full decomposition" in caplog.text


@pytest.mark.few(1)
@pytest.mark.parametrize("shape", [(400, 300), (300, 400)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_flat_spectra_need_no_full_decomposition(
    shape: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sketch, "compute_svd", lambda w: pytest.fail("decomposed in full"))
    # what the server holds after rounds of random uploads: a plateau, then a drop to a long tail; and noise alone
    plateau = np.r_[np.linspace(1, 0.6, 40), np.linspace(0.05, 1e-3, 260)]
    noise = np.linalg.svd(np.random.default_rng(6).normal(size=(300, 300)))[1] / 20
    rtol = 1e-12 if dtype == torch.float64 else 1e-5
    for s, by_iteration in ((plateau, True), (noise, False)):
        w, u, v = with_spectrum(s, *shape, 7)
        assert (iterate_lanczos(w.to(dtype), 10) is not None) == by_iteration
        with pytest.MonkeyPatch.context() as patch:
            if by_iteration:
                patch.setattr(
                    sketch, "decompose_gram", lambda w, rank: pytest.fail("eigenvectors of a Gram matrix")
                )
            actual = leading_triplets(w.to(dtype), 10)
        np.testing.assert_allclose(actual[1].numpy(), s[:10], rtol=rtol)
        for one, true in ((actual[0], u), (actual[2], v)):
            assert one.dtype == dtype
            torch.testing.assert_close(one.mT @ one, torch.eye(10, dtype=dtype), rtol=0, atol=100 * rtol)
            # gaps are about 1e-2, so vectors are that much less accurate
            np.testing.assert_allclose(np.abs(np.sum(one.numpy() * true[:, :10], 0)), 1, atol=1e3 * rtol)


def test_what_will_not_converge_is_given_up_halfway(monkeypatch: pytest.MonkeyPatch) -> None:
    columns: list[int] = []
    true = sketch.orthogonalize

    def counted(basis: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
        columns.append(new.shape[-1])
        return true(basis, new)

    monkeypatch.setattr(sketch, "orthogonalize", counted)
    w = torch.from_numpy(np.random.default_rng(10).normal(size=(600, 500)))
    assert iterate_lanczos(w, 10) is None
    # for both sides, half of the blocks
    assert sum(columns) == (2 * 10 + sketch.OVERSAMPLE) * sketch.MAX_BLOCKS


@pytest.mark.parametrize(
    ("last", "dtype", "believed"),
    [
        (0.1, torch.float64, True),
        # can be counted, but its vectors are off by ε (1e4)²
        (1e-4, torch.float64, False),
        (1e-4, torch.float32, True),
        # its vectors are as good as float32 asks for, but the Gram matrix does not tell its square from
        # rounding
        (1e-6, torch.float32, False),
    ],
)
def test_eigenvectors_of_a_gram_matrix_are_not_believed_where_squaring_lost_them(
    last: float, dtype: torch.dtype, believed: bool
) -> None:
    w, _, _ = with_spectrum(np.r_[1, 0.5, last, np.full(57, last / 100)], 80, 60, 8)
    for one in (w, w.mT):
        assert (decompose_gram(one.to(dtype), 3) is not None) == believed
        assert decompose_gram(one.to(dtype), 2) is not None


def test_no_gram_matrix_is_made_where_the_basis_holds_all_that_matters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sketch, "_gram", lambda w: pytest.fail("a Gram matrix"))
    w, _, _ = with_spectrum(0.8 ** np.arange(200), 240, 200, 11)
    assert iterate_lanczos(w, 5) is not None


def test_a_look_that_comes_too_early_is_not_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """The estimate of a residual is only a reason to compute it."""
    w, _, _ = with_spectrum(0.9 ** np.arange(200), 240, 200, 9)
    expected = iterate_lanczos(w, 4)
    assert expected is not None
    residuals = [1.0]
    true = sketch._residual
    monkeypatch.setattr(sketch, "_residual", lambda *given: residuals.pop() if residuals else true(*given))
    again = iterate_lanczos(w, 4)
    assert not residuals
    assert again is not None
    np.testing.assert_allclose(again[1].numpy(), expected[1].numpy(), rtol=1e-12)


def test_a_new_direction_beside_converged_ones_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    w, _, v = with_spectrum(np.r_[10, 9, 8, 7.5, np.full(60, 6.9)], 300, 200, 1)

    # every triplet of the start has converged, yet one that comes before the last of them is not among them
    def blind(width: int, k: int, warm: Tensor | None) -> Tensor:
        return torch.from_numpy(np.c_[v[:, :1], v[:, 2:4], v[:, 4 : width + 1]].copy())

    monkeypatch.setattr("fedlowrank.linalg.randomized_svd._initial_block", blind)
    assert iterate_lanczos(w, 3) is None
    _, s, _ = leading_triplets(w, 3)
    np.testing.assert_allclose(s.numpy(), [10, 9, 8], rtol=1e-12)


def test_a_matrix_of_less_rank_has_fewer_triplets() -> None:
    for dtype in (torch.float64, torch.float32):
        w, _, _ = with_spectrum(np.array([5.0, 3.0]), 120, 100, 2)
        u, s, v = leading_triplets(w.to(dtype), 6)
        assert (u.shape, s.shape, v.shape, s.dtype) == ((120, 2), (2,), (100, 2), torch.float64)
        assert leading_triplets(w.to(dtype) * 0, 6)[1].shape == (0,)


@pytest.mark.parametrize("shape", [(36, 36), (60, 36)])
def test_a_basis_of_all_columns_proves_the_triplets(shape: tuple[int, int]) -> None:
    u, v = (torch.linalg.qr(torch.randn(n, 36, dtype=torch.float64)).Q for n in shape)
    made = iterate_lanczos((u * 0.65 ** torch.arange(36)) @ v.mT, 1)
    assert made is not None
    torch.testing.assert_close(made[1], torch.ones(1, dtype=torch.float64))
    torch.testing.assert_close((made[2].mT @ v[:, :1]).abs(), torch.ones(1, 1, dtype=torch.float64))
