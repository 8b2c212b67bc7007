"""The leading triplets of a dense matrix of known spectrum: right whatever the spectrum and the start."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedlowrank.low_rank.sketch import iterated, leading

Matrix = np.ndarray


def with_spectrum(s: Matrix, d: int, k: int, seed: int) -> tuple[Tensor, Matrix, Matrix]:
    rng = np.random.default_rng(seed)
    u, v = (np.linalg.qr(rng.normal(size=(n, len(s))))[0] for n in (d, k))
    return torch.from_numpy((u * s) @ v.T), u, v


@settings(max_examples=25, deadline=None)
@given(st.floats(0.5, 1.0), st.integers(1, 8), st.booleans(), st.booleans(), st.integers(0, 99))
def test_leading_triplets_whatever_the_spectrum(decay: float, rank: int, flip: bool, warm: bool, seed: int) -> None:
    s = 3 * decay ** np.arange(90)
    w, _, v = with_spectrum(s, *((90, 160) if flip else (160, 90)), seed)
    # the worst warm start there is: singular vectors of the other end
    u1, s1, v1 = leading(w, rank, torch.from_numpy(v[:, -rank:].copy()) if warm else None)
    np.testing.assert_allclose(s1.numpy(), s[:rank], rtol=1e-5)
    # the best error there is, ties or not
    left = float(torch.linalg.matrix_norm(w - (u1 * s1) @ v1.mT))
    assert left == pytest.approx(np.linalg.norm(s[rank:]), rel=1e-8, abs=1e-12)


def test_the_iteration_is_used_where_it_pays_and_says_when_it_fails(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fedlowrank")
    falling, _, _ = with_spectrum(0.7 ** np.arange(90), 150, 90, 0)
    assert iterated(falling, 5) is not None
    leading(falling, 5)
    assert not caplog.records
    flat, _, _ = with_spectrum(np.ones(90), 150, 90, 0)
    flat += 1e-3 * falling
    assert iterated(flat, 5) is None
    _, s, _ = leading(flat, 5)
    np.testing.assert_allclose(s.numpy(), np.linalg.svd(flat.numpy())[1][:5], rtol=1e-12)
    assert "full decomposition" in caplog.text


def test_a_new_direction_beside_converged_ones_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    w, _, v = with_spectrum(np.r_[10, 9, 8, 7.5, np.full(60, 6.9)], 300, 200, 1)

    # every triplet of the start has converged, yet one that comes before the last of them is not among them
    def blind(width: int, k: int, warm: Tensor | None) -> Tensor:
        return torch.from_numpy(np.c_[v[:, :1], v[:, 2:4], v[:, 4 : width + 1]].copy())

    monkeypatch.setattr("fedlowrank.low_rank.sketch._begin", blind)
    assert iterated(w, 3) is None
    _, s, _ = leading(w, 3)
    np.testing.assert_allclose(s.numpy(), [10, 9, 8], rtol=1e-12)


def test_a_matrix_of_less_rank_has_fewer_triplets() -> None:
    for dtype in (torch.float64, torch.float32):
        w, _, _ = with_spectrum(np.array([5.0, 3.0]), 120, 100, 2)
        u, s, v = leading(w.to(dtype), 6)
        assert (u.shape, s.shape, v.shape, s.dtype) == ((120, 2), (2,), (100, 2), torch.float64)
        assert leading(w.to(dtype) * 0, 6)[1].shape == (0,)
