"""A sum of low-rank matrices as one decomposition, without the matrix itself: W' = U diag(s) Vᵀ + L Rᵀ.

U and V are orthonormal already, so only the new columns L ``[d, M]`` and R ``[k, M]`` are made orthogonal to them; what is
decomposed is a core of R + M rows and columns. Block Gram-Schmidt loses orthogonality where the new columns lie nearly in the
span of the old ones, which is the usual case in federated LoRA: clients begin at the server's own factors. So it is done twice,
with a QR between (BCGS2: Barlow and Smoktunowicz, Numer. Math. 123, 2013), after which U' is orthonormal to rounding.

Where the stack is as wide as the matrix has rows or columns, the matrix is no larger than the stack and is decomposed itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

REAL = torch.float64
"""Singular values, energies and cores are held in it, whatever the type of the factors."""


def orthogonal_to(basis: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """Extend orthonormal columns by new ones.

    Args:
        basis: ``[L, n, R]`` with orthonormal columns, R = 0 allowed.
        new: ``[L, n, M]``, R + M ≤ n.

    Returns:
        Q ``[L, n, M]``, orthonormal and orthogonal to the basis, and C ``[L, R + M, M]`` with new = [basis Q] C.
    """
    if basis.shape[-1] == 0:
        return _qr(new)
    inside = basis.mT @ new
    q, t = _qr(new - basis @ inside)
    again = basis.mT @ q
    q, t2 = _qr(q - basis @ again)
    return q, torch.cat([inside + again @ t, t2 @ t], -2)


def _qr(a: Tensor) -> tuple[Tensor, Tensor]:
    q, r = torch.linalg.qr(a)
    return q, r


def floor_of(shape: tuple[int, int], dtype: torch.dtype) -> float:
    """Singular values below this share of the largest addend are rounding.

    max(d, k)·ε in float64. In float32 that would be 5e-4 for a matrix of 4096 rows, and cut what is real: there it is 32 ε.
    """
    eps = torch.finfo(dtype).eps
    return eps * (max(shape) if dtype == REAL else 32)


def add_stack(
    u: Tensor, s: Tensor, v: Tensor, left: Tensor, right: Tensor, cap: int | None
) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """The singular value decompositions of U diag(s) Vᵀ + L Rᵀ for L matrices of one shape.

    Args:
        u: ``[L, d, R]`` with orthonormal columns.
        s: ``[L, R]`` in float64, of any sign and order.
        v: ``[L, k, R]`` with orthonormal columns.
        left: ``[L, d, M]``.
        right: ``[L, k, M]``.
        cap: how many triplets to keep at most, or None.

    Returns:
        For each matrix U' ``[d, r]``, s' ``[r]`` in float64, V' ``[k, r]``, and the values that ``cap`` cut off. Values that are
        rounding (:func:`floor_of`) are dropped. The largest entry of each column of U', by magnitude, is positive.
    """
    (d, r), (k, m) = u.shape[-2:], right.shape[-2:]
    if r + m >= min(d, k):
        core = (u.to(REAL) * s[:, None, :]) @ v.to(REAL).mT + left.to(REAL) @ right.to(REAL).mT
        bases: tuple[list[Tensor], list[Tensor]] = ([], [])
    else:
        (q, c), (p, e) = orthogonal_to(u, left), orthogonal_to(v, right)
        core = c.to(REAL) @ e.to(REAL).mT
        core.diagonal(dim1=-2, dim2=-1)[:, :r] += s
        bases = ([u, q], [v, p])
    # A difference of large addends is no more accurate than they are, so they set the scale and not the result.
    columns = torch.linalg.vector_norm(left, dim=1, dtype=REAL) * torch.linalg.vector_norm(right, dim=1, dtype=REAL)
    scale = torch.cat([s.abs(), columns, s.new_zeros(len(s), 1)], -1).amax(-1)
    x, values, yt = torch.linalg.svd(core, full_matrices=False)
    least = torch.maximum(scale, values[:, 0] if values.shape[1] else scale) * floor_of((d, k), u.dtype)
    ranks = (values > least[:, None]).sum(-1).tolist()
    out = []
    for i, rank in enumerate(ranks):
        kept = rank if cap is None else min(rank, cap)
        u1 = _times([b[i] for b in bases[0]], x[i, :, :kept].to(u.dtype))
        v1 = _times([b[i] for b in bases[1]], yt[i, :kept].mT.to(u.dtype))
        if kept:
            sign = torch.where(u1.gather(0, u1.abs().argmax(0, keepdim=True)) < 0, -1.0, 1.0).to(u1.dtype)
            u1, v1 = u1.mul_(sign), v1.mul_(sign)
        out.append((u1, values[i, :kept].clone(), v1, values[i, kept:rank].clone()))
    return out


def _times(blocks: list[Tensor], x: Tensor) -> Tensor:
    """[blocks] X without the concatenation; X itself where there is no block."""
    if not blocks:
        return x.clone(memory_format=torch.contiguous_format)
    first, second = blocks
    r = first.shape[1]
    return (second @ x[r:]).addmm_(first, x[:r])
