"""The leading singular triplets of a dense matrix, from where they were a round ago.

Subspace iteration (Halko, Martinsson and Tropp, SIAM Review 53, 2011, algorithm 4.4, with a Rayleigh-Ritz step each time) on a
block that begins as the last V and random columns. It is believed only if

- every triplet is one of the matrix: ‖W v - σ u‖ ≤ 10 ε √max(d, k) σ₁ (and Wᵀu = σ v by construction);
- none is missing that would come before the last, σ_r, by more than a share τ (1e-6 in float64, 1e-3 in float32). A missing one
  has a square of at most g² + ‖W - Q Qᵀ W‖_F², with g the first Ritz value after σ_r and Q the basis of the block. Where that
  bound does not tell, Sylvester's law of inertia counts the eigenvalues of the Gram matrix above ((1 + τ) σ_r)².

Else, and for small matrices at once, the full decomposition is computed. So the answer is always right; the time differs.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from ..key import Key
from .factored import svd
from .stacking import REAL, floor_of
from .threshold import count_above

Triplets = tuple[Tensor, Tensor, Tensor]
"""U ``[d, r]``, singular values in float64, descending ``[r]``, V ``[k, r]``."""

OVERSAMPLE = 10
ITERATIONS = 50
"""Beyond these a full decomposition is about as fast."""
WIDEST = 1 / 3
"""Share of the smaller dimension up to which a block is iterated at all."""


def leading(w: Tensor, rank: int, warm: Tensor | None = None) -> Triplets:
    """The ``rank`` leading triplets of a matrix ``[d, k]``; fewer where the others are rounding.

    Args:
        w: the matrix, finite, in float32 or float64.
        rank: how many, at least 1.
        warm: ``[k, any]``, columns to begin with, such as V of a matrix nearby; random ones are added.

    Returns:
        U, s and V. The largest entry of each column of U, by magnitude, is positive.
    """
    rank = min(rank, *w.shape)
    found = None
    if 2 * rank + OVERSAMPLE <= WIDEST * min(w.shape):
        found = iterated(w, rank, warm)
        if found is None:
            logging.getLogger("fedlowrank").info(
                "the %d leading singular triplets of a %d × %d matrix were not proven after %d iterations; "
                "computed by its full decomposition", rank, *w.shape, ITERATIONS
            )  # fmt: skip
    if found is None:
        f = svd(w)
        found = f.u[:, :rank], f.s[:rank].to(REAL), f.v[:, :rank]
    u, s, v = found
    kept = int((s > floor_of((w.shape[0], w.shape[1]), w.dtype) * s[:1]).sum())
    u, v = u[:, :kept], v[:, :kept]
    if kept:
        sign = torch.where(u.gather(0, u.abs().argmax(0, keepdim=True)) < 0, -1.0, 1.0).to(u.dtype)
        u, v = u * sign, v * sign
    return u.contiguous(), s[:kept].clone(), v.contiguous()


def iterated(w: Tensor, rank: int, warm: Tensor | None = None) -> Triplets | None:
    """:func:`leading` by iteration alone, with values that are rounding and without canonical signs; None if not proven."""
    d, k = w.shape
    width = min(2 * rank + OVERSAMPLE, d, k)
    tolerance = 10 * torch.finfo(w.dtype).eps * max(d, k) ** 0.5
    block = _begin(width, k, warm).to(w)
    u = s = turn = None
    for _ in range(ITERATIONS):
        image = w @ block
        if u is not None and s is not None and turn is not None:
            # W v of the triplets of the last iteration comes for free: their V is the block, turned
            residual = image @ turn[:, :rank] - u[:, :rank] * s[:rank].to(u.dtype)
            if float(torch.linalg.vector_norm(residual, dim=0).amax()) <= tolerance * float(s[0]):
                v = block @ turn[:, :rank]
                return (u[:, :rank], s[:rank], v) if _complete(w, u, s, rank, tolerance) else None
        q = torch.linalg.qr(image).Q
        block, r = torch.linalg.qr(w.mT @ q)
        x, s, yt = torch.linalg.svd(r.mT.to(REAL))
        u, turn = q @ x.to(w.dtype), yt.mT.to(w.dtype)
    return None


def _begin(width: int, k: int, warm: Tensor | None) -> Tensor:
    drawn = torch.randn(k, width, generator=Key(("sketch", width, k)).generator(), dtype=REAL)
    if warm is None:
        return drawn
    # at least the oversampling stays random, or a direction that is new would never enter
    held = warm[:, : width - OVERSAMPLE].to(drawn)
    return torch.cat([held, drawn[:, : width - held.shape[1]]], 1)


def _complete(w: Tensor, u: Tensor, s: Tensor, rank: int, tolerance: float) -> bool:
    """Whether no triplet beyond the first ``rank`` is larger than the last of these, to the share τ."""
    tau = 1e-6 if w.dtype == REAL else 1e-3
    outside = float(torch.linalg.vector_norm(w - u @ (u.mT @ w), dtype=REAL)) ** 2
    missing = (float(s[rank]) ** 2 if rank < len(s) else 0.0) + outside
    first, last = float(s[0]) ** 2, float(s[rank - 1]) ** 2
    limit = last * (1 + tau) ** 2
    if missing <= max(limit, first * tolerance**2):
        return True
    # the squares in a Gram matrix are off by its rounding, which must not decide
    if 2 * tau * last <= 64 * torch.finfo(REAL).eps * first:
        return False
    a = w.to(REAL)
    gram = a.mT @ a if w.shape[0] >= w.shape[1] else a @ a.mT
    return count_above(gram, limit) <= int((s[:rank].square() > limit).sum())
