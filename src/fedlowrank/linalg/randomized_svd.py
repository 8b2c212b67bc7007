"""The leading singular triplets of a dense matrix, computed from those of the previous round.

Block Lanczos (Golub, Luk and Overton, ACM TOMS 7, 1981) with all columns kept orthogonal: it begins at the previous
V and random columns and adds their products with WᵀW. Where the spectrum decays slowly, subspace iteration takes
many times as many products. Triplets are accepted only if

- each is a triplet of the matrix: ‖W v - σ u‖ and ‖Wᵀu - σ v‖ are at most 10 ε √max(d, k) σ₁;
- none is missing that exceeds the last one, σ_r, by more than a share τ (1e-6 in float64, 1e-3 in float32). The
  square of a missing singular value is at most g² + ‖W - Q Qᵀ W‖_F², with g the first Ritz value after σ_r and Q
  the basis of the block. Where that bound does not suffice, Sylvester's law of inertia counts the eigenvalues of
  the Gram matrix above ((1 + τ) σ_r)².

Otherwise the eigenvectors of the Gram matrix are tried, which take less than half the time of the decomposition of
W. They have to pass the same two tests: squaring loses small singular values, but not the leading triplets of a
spectrum that decays slowly, for which the iteration fails. If they do not pass, and always for small matrices, the
full decomposition is computed. So the result is always correct; only the time differs.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from ..core.key import Key
from ..core.tree import widen
from .factored import canonical_signs, compute_svd
from .low_rank_sum import REAL, orthogonalize, rounding_floor
from .svt import Triplets, compute_gram, count_above

OVERSAMPLE = 10
MAX_WIDTH_SHARE = 1 / 3
"""Maximum width of a block that is iterated, as a share of the smaller dimension."""
MAX_BLOCKS = 8
"""Maximum number of blocks in the basis.

A spectrum that needs more resembles noise, for which hardly any number of blocks would suffice.
"""
HALFWAY_POWER = 1 / 4
"""Power of the tolerance that the residuals must have reached when half of the basis is built; otherwise the other
half is not tried. Residuals fall ever faster: the slowest of the spectra that were finally proven had reached the
power 0.37 there, and noise 0.08."""
GROWTH = 1.2
"""Factor by which the basis grows between two decompositions of the projected matrix."""


def leading_triplets(w: Tensor, rank: int, warm_start: Tensor | None = None) -> Triplets:
    """Compute the ``rank`` leading triplets of a matrix ``[d, k]``; fewer if the others are rounding.

    Args:
        w: matrix with finite entries; for half precision, the triplets are those of the same numbers in float32.
        rank: number of triplets, at least 1.
        warm_start: initial columns ``[k, any]``, such as V of a similar matrix; random columns are added.

    Returns:
        U and V in the type of the matrix, in float32 for half precision, and s in float64, so that squares and sums of
        singular values are accurate: write ``(u * s.to(u)) @ v.mT`` for the product. The largest entry of each column of
        U, by magnitude, is positive.
    """
    w, rank = widen(w), min(rank, *w.shape)
    triplets = None
    if 2 * rank + OVERSAMPLE <= MAX_WIDTH_SHARE * min(w.shape):
        triplets = iterate_lanczos(w, rank, warm_start) or decompose_gram(w, rank)
        if triplets is None:
            logging.getLogger("fedlowrank").info(
                "the %d leading singular triplets of a %d × %d matrix could be proven neither by iteration "
                "nor by its Gram "
                "matrix; computed by its full decomposition", rank, *w.shape
            )  # fmt: skip
    if triplets is None:
        f = compute_svd(w)
        triplets = f.u[:, :rank], f.s[:rank].to(REAL), f.v[:, :rank]
    u, s, v = triplets
    new_rank = int((s > rounding_floor((w.shape[0], w.shape[1]), w.dtype) * s[:1]).sum())
    u, v = u[:, :new_rank], v[:, :new_rank]
    if new_rank:
        sign = canonical_signs(u)
        u, v = u * sign, v * sign
    return u.contiguous(), s[:new_rank].clone(), v.contiguous()


def iterate_lanczos(w: Tensor, rank: int, warm_start: Tensor | None = None) -> Triplets | None:
    """Compute :func:`leading_triplets` by iteration alone; None if they are not proven to be correct.

    Values may be rounding, and signs are not canonical.
    """
    (d, k), tolerance = w.shape, _tolerance(w)
    width = min(2 * rank + OVERSAMPLE, d, k)
    max_size = min(MAX_BLOCKS * width, d, k)
    # W P = Q R and WᵀQ = P Rᵀ + rest·T; a block is contiguous where the columns of P and Q are rows
    p, q, r = w.new_empty(max_size, k), w.new_empty(max_size, d), w.new_zeros(max_size, max_size, dtype=REAL)
    next_block = torch.linalg.qr(_initial_block(width, k, warm_start).to(w)).Q
    m = checked_size = 0
    while m + width <= max_size:
        block, m = slice(m, m + width), m + width
        p[block] = next_block.mT
        (image,), (c,) = orthogonalize(q[: block.start].mT[None], (w @ next_block)[None])
        q[block], r[:m, block] = image.mT, c.to(REAL)
        (next_block,), (c,) = orthogonalize(p[:m].mT[None], (w.mT @ image)[None])
        if m < GROWTH * checked_size and m + width <= max_size:
            continue
        checked_size, t = m, c[m:].to(REAL)
        x, s, yt = torch.linalg.svd(r[:m, :m])
        residual = float(torch.linalg.vector_norm(t @ x[block, :rank], dim=0).amax())
        if 2 * m >= max_size and residual > tolerance**HALFWAY_POWER * float(s[0]):
            return None
        if residual > tolerance * float(s[0]):
            continue
        u, v = q[:m].mT @ x[:, :rank].to(w.dtype), p[:m].mT @ yt[:rank].mT.to(w.dtype)
        if _residual(w, u, s[:rank], v) <= tolerance * float(s[0]):
            covered_energy = float(r[:m, :m].square().sum() + t.square().sum())
            return (u, s[:rank], v) if _is_complete(w, q[:m].mT, s, rank, covered_energy) else None
    return None


def decompose_gram(w: Tensor, rank: int) -> Triplets | None:
    """Compute :func:`leading_triplets` from eigenvectors of the smaller Gram matrix; None if they are not accurate."""
    flip = w.shape[0] < w.shape[1]
    a = w.mT if flip else w
    gram = _gram(w)
    v = torch.linalg.eigh(gram).eigenvectors[:, -rank:].to(w.dtype)
    q, r = torch.linalg.qr(a @ v)
    x, s, yt = torch.linalg.svd(r.to(REAL))
    u, v = q @ x.to(w.dtype), v @ yt.mT.to(w.dtype)
    if _residual(a, u, s, v) > _tolerance(w) * float(s[0]) or not _is_count_right(gram, s, rank, w.dtype):
        return None
    return (v, s, u) if flip else (u, s, v)


def _tolerance(w: Tensor) -> float:
    return float(10 * torch.finfo(w.dtype).eps * max(w.shape) ** 0.5)


def _residual(w: Tensor, u: Tensor, s: Tensor, v: Tensor) -> float:
    """The largest ‖W v - σ u‖ or ‖Wᵀu - σ v‖."""
    size = s.to(w.dtype)
    norms = torch.stack(
        [
            torch.linalg.vector_norm(w @ v - u * size, dim=0),
            torch.linalg.vector_norm(w.mT @ u - v * size, dim=0),
        ]
    )
    return float(norms.amax())


def _gram(w: Tensor) -> Tensor:
    """Compute the smaller of WᵀW and WWᵀ, see :func:`.svt.compute_gram`."""
    return compute_gram(w.to(REAL), of_rows=w.shape[0] < w.shape[1])


def _initial_block(width: int, k: int, warm_start: Tensor | None) -> Tensor:
    sample = torch.randn(k, width, generator=Key(("sketch", width, k)).generator(), dtype=REAL)
    if warm_start is None:
        return sample
    # the oversampling columns stay random, otherwise new directions would never enter
    warm_columns = warm_start[:, : width - OVERSAMPLE].to(sample)
    return torch.cat([warm_columns, sample[:, : width - warm_columns.shape[1]]], 1)


def _is_complete(w: Tensor, q: Tensor, s: Tensor, rank: int, covered_energy: float) -> bool:
    """Whether no triplet beyond the first ``rank`` exceeds the last of these by more than the share τ.

    Args:
        w: matrix of the triplets.
        q: basis of the iteration.
        s: all Ritz values of the basis.
        rank: number of requested triplets.
        covered_energy: estimate of ‖QᵀW‖_F² from the iteration, with which the first of the two bounds is skipped
            where it cannot hold.
    """
    tau = _tau(w.dtype)
    next_energy = float(s[rank]) ** 2 if rank < len(s) else 0.0
    first_energy, last_energy = float(s[0]) ** 2, float(s[rank - 1]) ** 2
    limit = max(last_energy * (1 + tau) ** 2, first_energy * _tolerance(w) ** 2)
    total_energy = float(torch.linalg.vector_norm(w, dtype=REAL)) ** 2
    if next_energy + (total_energy - covered_energy) / 2 <= limit:
        outside_energy = float(torch.linalg.vector_norm(w - q @ (q.mT @ w), dtype=REAL)) ** 2
        if next_energy + outside_energy <= limit:
            return True
    return _is_count_accurate(s, rank, w.dtype) and _is_count_right(_gram(w), s, rank, w.dtype)


def _tau(dtype: torch.dtype) -> float:
    return 1e-6 if dtype == REAL else 1e-3


def _is_count_accurate(s: Tensor, rank: int, dtype: torch.dtype) -> bool:
    """Whether rounding in the Gram matrix is below τ of the last squared singular value."""
    return 2 * _tau(dtype) * float(s[rank - 1]) ** 2 > 64 * torch.finfo(REAL).eps * float(s[0]) ** 2


def _is_count_right(gram: Tensor, s: Tensor, rank: int, dtype: torch.dtype) -> bool:
    limit = float(s[rank - 1]) ** 2 * (1 + _tau(dtype)) ** 2
    return _is_count_accurate(s, rank, dtype) and count_above(gram, limit) <= int(
        (s[:rank].square() > limit).sum()
    )
