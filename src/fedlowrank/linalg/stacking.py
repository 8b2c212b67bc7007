"""A sum of low-rank matrices as one decomposition, without the matrix itself: W' = U diag(s) Vᵀ + L Rᵀ.

U and V are orthonormal already, so only the new columns L ``[d, M]`` and R ``[k, M]`` are made orthogonal to
them; what is decomposed is a core of R + M rows and columns. Block Gram-Schmidt loses orthogonality where the
new columns lie nearly in the span of the old ones, which is the usual case in federated LoRA: clients begin
at the server's own factors. So it is done twice.

Both passes are products of matrices and Cholesky factors of Gram matrices (:func:`extend_basis`); Householder
QRs of such tall matrices take several times as long. A Gram matrix squares the condition. So the first pass
only has to leave columns that are well conditioned, for which float32 is often enough; the second measures in
the dtype of the factors what the first left and refuses it where that is too much. Then the first is done
again with more care, and at last both by Householder QRs (BCGS2: Barlow and Smoktunowicz, Numer. Math. 123,
2013). The orthonormal columns of the second pass are never formed: its triangular factor goes into the
rotation at the end.

Where the stack is as wide as the matrix has rows or columns, the matrix is no larger than the stack and is
decomposed itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .factored import thin_svd

REAL = torch.float64
"""Dtype of singular values, energies and cores, for any dtype of the factors."""
WELL_CONDITIONED = 10.0
"""‖S⁻¹‖₁ of a Gram matrix S with unit diagonal up to which its Cholesky factor loses only rounding."""
SINGLE, PART = 1e4, 1e-4
"""Up to the one, and with at least the other as the share of their squared norms that the new columns have
outside the old ones, a first pass in float32 is worth trying; the inverses of its triangular factors are
harmless then."""
BLOCK = 40
"""Rows of one triangular solve; the rest is a product of matrices, which takes half the time."""
PAD = 8
"""Numbers between the rows of a buffer."""


@dataclass(frozen=True)
class ExtendedBasis:
    """Orthonormal columns [old Q] that begin with given ones, Q in factors: new = old·inner + Q·triangle.

    Attributes:
        old: ``[L, n, R]`` with orthonormal columns.
        new: ``[L, M, n]``, one row a column; with the old columns they span the same space as the columns
            that were given.
        inner: ``[L, R, M]`` in float64.
        triangle: ``[L, M, M]``, upper triangular, in float64.
        coordinates: C ``[L, R + M, M]`` in float64 of the columns that were given: they are [old Q] C.
    """

    old: Tensor
    new: Tensor
    inner: Tensor
    triangle: Tensor
    coordinates: Tensor

    def times(self, i: int, x: Tensor) -> Tensor:
        """[old Q] X of the i-th matrix, for X ``[R + M, r]`` in float64."""
        old, r = self.old[i], self.old.shape[-1]
        low = torch.linalg.solve_triangular(self.triangle[i], x[r:], upper=True)
        high = x[:r] - self.inner[i] @ low
        out: Tensor = self.new[i].mT @ low.to(old.dtype)
        return out.addmm_(old, high.to(old.dtype))


def empty_rows(like: Tensor, *shape: int) -> Tensor:
    """A tensor with a gap after each row.

    At distances of a power of two, as of most weights, few rows fit a cache at once, and some products took
    twice the time.
    """
    *above, n = shape
    return like.new_empty(*above, n + PAD)[..., :n]


def extend_basis(old: Tensor, given: Tensor) -> ExtendedBasis:
    """Extend orthonormal columns by the span of others.

    Args:
        old: ``[L, n, R]`` with orthonormal columns, R = 0 allowed.
        given: ``[L, M, n]``, one row a new column, R + M ≤ n.
    """
    for first in (_first_pass_float32, _first_pass) if given.shape[1] else ():
        found = first(old, given)
        extended = found and _second_pass(old, *found)
        if extended is not None:
            return extended
    q, c = orthogonalize(old, given.mT)
    # in this case the triangle is the identity
    eye = torch.eye(q.shape[-1], dtype=REAL, device=q.device).expand(len(q), -1, -1)
    inner = eye.new_zeros(len(q), old.shape[-1], q.shape[-1])
    return ExtendedBasis(old, q.mT, inner, eye, c.to(REAL))


_First = tuple[Tensor, Tensor, Tensor | None]
"""Rows N, C ``[L, t, M]`` and an upper triangle T (None: identity) with given = old[:, :t] C + Nᵀ T."""


def _first_pass_float32(old: Tensor, given: Tensor) -> _First | None:
    """The first pass from products in float32, or None if these are too coarse for it.

    Only the leading old columns are subtracted, as many as the new ones lean on: clients are sent the leading
    triplets. On the others the second pass does the same, as long as their part is no larger than what
    remains.
    """
    o, n = old.float(), given.float()
    c, gram = (o.mT @ n.mT).to(REAL), (n @ n.mT).to(REAL)
    s = gram - c.mT @ c
    part = _diagonal(s) / _diagonal(gram)
    if not bool((part > PART).all()):
        return None
    t, worst = _cholesky(s)
    if not worst <= SINGLE:
        return None
    lean = torch.linalg.solve_triangular(t, c, upper=True, left=False).square()
    beyond = lean.flip(-2).cumsum(-2).flip(-2).amax((0, -1))
    c = c[:, : int((beyond > 1).sum())]
    if c.shape[1] == 0 and worst <= WELL_CONDITIONED:
        return given, c, None
    return _solve(t, _subtract_projection(given, old, c)), c, t


def _first_pass(old: Tensor, given: Tensor) -> _First | None:
    """The first pass in the dtype of the factors; None if the columns are numerically dependent."""
    c = (old.mT @ given.mT).to(REAL)
    rest = _subtract_projection(given, old, c)
    t, worst = _cholesky((rest @ rest.mT).to(REAL))
    if not worst * torch.finfo(old.dtype).eps <= PART:
        return None
    # by an inverse, the error would grow with the condition
    rest = torch.linalg.solve_triangular(t.to(rest.dtype), rest.mT, upper=True, left=False).mT
    return rest, c, t


def _second_pass(old: Tensor, rows: Tensor, c: Tensor, t: Tensor | None) -> ExtendedBasis | None:
    inner, gram = (old.mT @ rows.mT).to(REAL), (rows @ rows.mT).to(REAL)
    s = gram - inner.mT @ inner
    triangle, worst = _cholesky(s)
    if not (worst <= WELL_CONDITIONED and bool((_diagonal(s) * WELL_CONDITIONED > _diagonal(gram)).all())):
        return None
    low, high = (triangle, inner) if t is None else (triangle @ t, inner @ t)
    if c.shape[1]:
        high = high.clone()
        high[:, : c.shape[1]] += c
    return ExtendedBasis(old, rows, inner, triangle, torch.cat([high, low], -2))


def _subtract_projection(rows: Tensor, old: Tensor, c: Tensor) -> Tensor:
    """``rows`` minus their projection, given by C, on the leading old columns, as a new tensor."""
    out = empty_rows(rows, *rows.shape)
    if c.shape[1] == 0:
        return out.copy_(rows)
    return torch.baddbmm(rows, c.mT.to(rows.dtype), old[..., : c.shape[1]].mT, alpha=-1, out=out)


def _diagonal(s: Tensor) -> Tensor:
    return s.diagonal(dim1=-2, dim2=-1)


def _cholesky(s: Tensor) -> tuple[Tensor, float]:
    """T, upper triangular, with S = Tᵀ T, and the largest ‖·‖₁ of the inverses of S scaled to unit diagonal.

    That norm is no less than the spectral one; it is NaN or infinite where there is no factor.
    """
    size = _diagonal(s).sqrt()
    low, info = torch.linalg.cholesky_ex(s / (size[..., :, None] * size[..., None, :]))
    if bool(info.any()):
        return s, float("inf")
    worst = torch.cholesky_inverse(low).abs().sum(-1).max() if s.numel() else s.new_zeros(())
    return (low * size[..., :, None]).mT, float(worst)


def _solve(t: Tensor, rows: Tensor) -> Tensor:
    """Rows N with Nᵀ T = ``rows``ᵀ, in their place, for a T that is not ill-conditioned."""
    low = t.mT.to(rows.dtype)
    for i in range(0, rows.shape[1], BLOCK):
        at = slice(i, i + BLOCK)
        if i:
            rows[:, at].baddbmm_(low[:, at, :i], rows[:, :i], alpha=-1)
        block = low[:, at, at]
        eye = torch.eye(block.shape[-1], dtype=rows.dtype, device=rows.device)
        rows[:, at] = torch.linalg.solve_triangular(block, eye, upper=False) @ rows[:, at]
    return rows


def orthogonalize(basis: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """Extend orthonormal columns by new ones.

    Args:
        basis: ``[L, n, R]`` with orthonormal columns, R = 0 allowed.
        new: ``[L, n, M]``, R + M ≤ n.

    Returns:
        Q ``[L, n, M]``, orthonormal and orthogonal to the basis, and C ``[L, R + M, M]`` with new = [basis Q]
        C.
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


def rounding_floor(shape: tuple[int, int], dtype: torch.dtype) -> float:
    """Singular values below this share of the largest addend are rounding.

    max(d, k)·ε in float64. In float32 that would be 5e-4 for a matrix of 4096 rows, and cut what is real:
    there it is 32 ε.
    """
    eps = torch.finfo(dtype).eps
    return eps * (max(shape) if dtype == REAL else 32)


def add_low_rank(
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
        For each matrix U' ``[d, r]``, s' ``[r]`` in float64, V' ``[k, r]``, and the values that ``cap`` cut
        off. Values that are rounding (:func:`rounding_floor`) are dropped. The largest entry of each column
        of U', by magnitude, is positive.
    """
    (d, r), (k, m) = u.shape[-2:], right.shape[-2:]
    if r + m >= min(d, k):
        core = (u.to(REAL) * s[:, None, :]) @ v.to(REAL).mT + left.to(REAL) @ right.to(REAL).mT
        bases: list[ExtendedBasis] = []
    else:
        bases = [extend_basis(u, left.mT), extend_basis(v, right.mT)]
        core = bases[0].coordinates @ bases[1].coordinates.mT
        core.diagonal(dim1=-2, dim2=-1)[:, :r] += s
    # A difference of large addends is no more accurate than they are, so they set the scale and not the
    # result.
    columns = torch.linalg.vector_norm(left, dim=1, dtype=REAL) * torch.linalg.vector_norm(
        right, dim=1, dtype=REAL
    )
    scale = torch.cat([s.abs(), columns, s.new_zeros(len(s), 1)], -1).amax(-1)
    x, values, yt = thin_svd(core)
    least = torch.maximum(scale, values[:, 0] if values.shape[1] else scale) * rounding_floor((d, k), u.dtype)
    ranks = (values > least[:, None]).sum(-1).tolist()
    out = []
    for i, rank in enumerate(ranks):
        new_rank = rank if cap is None else min(rank, cap)
        xi, yi = x[i, :, :new_rank], yt[i, :new_rank].mT
        # a clone, as it would else keep the columns that are dropped alive
        u1 = (
            bases[0].times(i, xi)
            if bases
            else xi.to(u.dtype, memory_format=torch.contiguous_format, copy=True)
        )
        sign = _canonical_signs(u1)
        u1.mul_(sign)
        yi = yi * sign
        v1 = bases[1].times(i, yi) if bases else yi.to(v.dtype, memory_format=torch.contiguous_format)
        out.append((u1, values[i, :new_rank].clone(), v1, values[i, new_rank:rank].clone()))
    return out


def _canonical_signs(u: Tensor) -> Tensor:
    """1 or -1 for each column that makes its largest entry by magnitude, the first of equals, positive."""
    if u.shape[1] == 0:
        return u.new_ones(0)
    high, low = u.amax(0), -u.amin(0)
    if bool((high == low).any()):
        high, low = u.gather(0, u.abs().argmax(0, keepdim=True))[0], u.new_zeros(())
    return torch.where(high < low, -1.0, 1.0).to(u.dtype)
