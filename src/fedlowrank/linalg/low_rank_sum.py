"""The singular value decomposition of U diag(s) Vᵀ + L Rᵀ without the matrix itself.

U and V are orthonormal already. Only the new columns L ``[d, M]`` and R ``[k, M]`` are made orthogonal to them, and
a core of r + M rows and columns is decomposed, with r the number of columns of U. Block Gram-Schmidt loses
orthogonality where the new columns lie nearly in the span of the old ones. That is the usual case in federated
LoRA, since clients begin at the server's own factors. So there are two passes.

Both passes are products of matrices and Cholesky factors of Gram matrices (:func:`extend_basis`); Householder QRs
of such tall matrices take several times as long. A Gram matrix squares the condition number. So the first pass only
has to produce well-conditioned columns, for which float32 is often enough. The second pass measures the result of
the first pass in the dtype of the factors, and rejects it if it is too ill-conditioned. Then the first pass is
repeated in that dtype, and as a last resort both passes are Householder QRs (BCGS2: Barlow and Smoktunowicz, Numer.
Math. 123, 2013), or one QR of all columns where a new column depends on the others. The orthonormal columns of the
second pass are never formed: its triangular factor goes into the rotation at the end.

If the stack is as wide as the matrix has rows or columns, the matrix is no larger than the stack and is decomposed
itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .factored import canonical_signs, thin_svd

REAL = torch.float64
"""Dtype of singular values, energies and cores, for any dtype of the factors."""
MAX_INVERSE_NORM = 10.0
"""Maximum ‖S⁻¹‖₁ of a Gram matrix S with unit diagonal whose Cholesky factor loses only rounding."""
MAX_INVERSE_NORM_FLOAT32 = 1e4
"""Maximum ‖S⁻¹‖₁ for a first pass in float32, where inverses of triangular factors are accurate enough."""
MIN_OUTSIDE_SHARE = 1e-4
"""Minimum share of their squared norms that new columns must have outside the old ones for a first pass in float32; in
other dtypes, the bound on the rounding of a first pass."""
MIN_SECOND_PASS = 0.5
"""Minimum part of an orthonormal column that a second Gram-Schmidt pass must leave; two passes are then enough."""
TRIANGLE_ROWS = 40
"""Number of rows of one triangular solve; the rest is a matrix product, which takes half the time."""
ROW_GAP = 8
"""Number of unused entries between the rows of a buffer."""


@dataclass(frozen=True)
class ExtendedBasis:
    """The orthonormal columns [basis Q]. Q is not stored; it is defined by new_rowsᵀ = basis·overlap + Q·triangle.

    Attributes:
        basis: orthonormal columns ``[L, n, R]``.
        new_rows: rows ``[L, M, n]``, one for each column of Q; with the basis they span the same space as the added
            columns.
        overlap: components of the new rows in the basis, ``[L, R, M]`` in float64.
        triangle: upper triangular factor ``[L, M, M]`` in float64.
        coordinates: coordinates C ``[L, R + M, M]`` in float64 of the added columns, which are [basis Q] C.
    """

    basis: Tensor
    new_rows: Tensor
    overlap: Tensor
    triangle: Tensor
    coordinates: Tensor

    def multiply(self, i: int, x: Tensor) -> Tensor:
        """Multiply [basis Q] X for the i-th matrix, for X ``[R + M, r]`` in float64."""
        basis, r = self.basis[i], self.basis.shape[-1]
        new_coordinates = torch.linalg.solve_triangular(self.triangle[i], x[r:], upper=True)
        old_coordinates = x[:r] - self.overlap[i] @ new_coordinates
        out: Tensor = self.new_rows[i].mT @ new_coordinates.to(basis.dtype)
        return out.addmm_(basis, old_coordinates.to(basis.dtype))


def empty_rows(reference: Tensor, *shape: int) -> Tensor:
    """Allocate a tensor with a gap after each row.

    Without the gap the rows of most weights are a power of two apart. Then only few rows fit into a cache together,
    and some products take twice the time.
    """
    *batch_shape, n = shape
    return reference.new_empty(*batch_shape, n + ROW_GAP)[..., :n]


def extend_basis(basis: Tensor, new_rows: Tensor) -> ExtendedBasis:
    """Extend orthonormal columns by the span of other columns.

    Args:
        basis: orthonormal columns ``[L, n, R]``, R = 0 allowed.
        new_rows: rows ``[L, M, n]``, one for each new column, R + M ≤ n.
    """
    for run_first_pass in (_first_pass_float32, _first_pass) if new_rows.shape[1] else ():
        first_pass = run_first_pass(basis, new_rows)
        extended_basis = first_pass and _second_pass(basis, *first_pass)
        if extended_basis is not None:
            return extended_basis
    q, c = orthogonalize(basis, new_rows.mT)
    # the new columns are orthonormal here, so the triangle is the identity
    eye = torch.eye(q.shape[-1], dtype=REAL, device=q.device).expand(len(q), -1, -1)
    inner = eye.new_zeros(len(q), basis.shape[-1], q.shape[-1])
    return ExtendedBasis(basis, q.mT, inner, eye, c.to(REAL))


_FirstPass = tuple[Tensor, Tensor, Tensor | None]
"""Rows N, C ``[L, t, M]`` and an upper triangle T (None: identity) with columns = basis[:, :t] C + Nᵀ T."""


def _first_pass_float32(basis: Tensor, new_rows: Tensor) -> _FirstPass | None:
    """Do the first pass with products in float32; None if float32 is too coarse.

    Only the leading columns of the basis are subtracted, those in which the new columns have large components,
    because clients are sent the leading triplets. The second pass subtracts the others; their components must be no
    larger than the remainder.
    """
    o, n = basis.float(), new_rows.float()
    c, gram = (o.mT @ n.mT).to(REAL), (n @ n.mT).to(REAL)
    s = gram - c.mT @ c
    outside_shares = _diagonal(s) / _diagonal(gram)
    if not bool((outside_shares > MIN_OUTSIDE_SHARE).all()):
        return None
    t, inverse_norm = _cholesky(s)
    if not inverse_norm <= MAX_INVERSE_NORM_FLOAT32:
        return None
    # squared norms of the components in the columns of the basis from the j-th one on, relative to the remainder
    components = torch.linalg.solve_triangular(t, c, upper=True, left=False).square()
    remaining_norms = components.flip(-2).cumsum(-2).flip(-2).amax((0, -1))
    c = c[:, : int((remaining_norms > 1).sum())]
    if c.shape[1] == 0 and inverse_norm <= MAX_INVERSE_NORM:
        return new_rows, c, None
    return _solve(t, _subtract_projection(new_rows, basis, c)), c, t


def _first_pass(basis: Tensor, new_rows: Tensor) -> _FirstPass | None:
    """Do the first pass in the dtype of the factors; None if the columns are numerically dependent."""
    c = (basis.mT @ new_rows.mT).to(REAL)
    residual = _subtract_projection(new_rows, basis, c)
    t, inverse_norm = _cholesky((residual @ residual.mT).to(REAL))
    if not inverse_norm * torch.finfo(basis.dtype).eps <= MIN_OUTSIDE_SHARE:
        return None
    # a solve and not an inverse, whose error would grow with the condition number
    residual = torch.linalg.solve_triangular(t.to(residual.dtype), residual.mT, upper=True, left=False).mT
    return residual, c, t


def _second_pass(basis: Tensor, rows: Tensor, c: Tensor, t: Tensor | None) -> ExtendedBasis | None:
    inner, gram = (basis.mT @ rows.mT).to(REAL), (rows @ rows.mT).to(REAL)
    s = gram - inner.mT @ inner
    triangle, inverse_norm = _cholesky(s)
    if not (
        inverse_norm <= MAX_INVERSE_NORM and bool((_diagonal(s) * MAX_INVERSE_NORM > _diagonal(gram)).all())
    ):
        return None
    new_coordinates, old_coordinates = (triangle, inner) if t is None else (triangle @ t, inner @ t)
    if c.shape[1]:
        old_coordinates = old_coordinates.clone()
        old_coordinates[:, : c.shape[1]] += c
    return ExtendedBasis(basis, rows, inner, triangle, torch.cat([old_coordinates, new_coordinates], -2))


def _subtract_projection(rows: Tensor, basis: Tensor, c: Tensor) -> Tensor:
    """Subtract from rows their projection, given by C, on the leading columns of the basis; the result is a new tensor."""
    out = empty_rows(rows, *rows.shape)
    if c.shape[1] == 0:
        return out.copy_(rows)
    return torch.baddbmm(rows, c.mT.to(rows.dtype), basis[..., : c.shape[1]].mT, alpha=-1, out=out)


def _diagonal(s: Tensor) -> Tensor:
    return s.diagonal(dim1=-2, dim2=-1)


def _cholesky(s: Tensor) -> tuple[Tensor, float]:
    """Factorize S: T, upper triangular, with S = Tᵀ T, and the largest ‖·‖₁ of the inverses of S scaled to unit diagonal.

    That norm is at least the spectral norm; it is NaN or infinite where there is no factor.
    """
    size = _diagonal(s).sqrt()
    lower, info = torch.linalg.cholesky_ex(s / (size[..., :, None] * size[..., None, :]))
    if bool(info.any()):
        return s, float("inf")
    inverse_norm = torch.cholesky_inverse(lower).abs().sum(-1).max() if s.numel() else s.new_zeros(())
    return (lower * size[..., :, None]).mT, float(inverse_norm)


def _solve(t: Tensor, rows: Tensor) -> Tensor:
    """Solve Nᵀ T = ``rows``ᵀ for N, in place; T must not be ill-conditioned."""
    lower = t.mT.to(rows.dtype)
    for i in range(0, rows.shape[1], TRIANGLE_ROWS):
        solved_rows, block_rows = slice(i), slice(i, i + TRIANGLE_ROWS)
        if i:
            rows[:, block_rows].baddbmm_(lower[:, block_rows, solved_rows], rows[:, solved_rows], alpha=-1)
        block = lower[:, block_rows, block_rows]
        eye = torch.eye(block.shape[-1], dtype=rows.dtype, device=rows.device)
        rows[:, block_rows] = torch.linalg.solve_triangular(block, eye, upper=False) @ rows[:, block_rows]
    return rows


def orthogonalize(basis: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """Extend orthonormal columns by new columns.

    Args:
        basis: orthonormal columns ``[L, n, R]``, R = 0 allowed.
        columns: new columns ``[L, n, M]``.

    Returns:
        Q ``[L, n, min(M, n - R)]``, orthonormal and orthogonal to the basis also where the columns depend on it, and C
        ``[L, min(R + M, n), M]`` with columns = [basis Q] C.
    """
    if basis.shape[-1] == 0:
        return _qr(columns)
    coordinates = basis.mT @ columns
    q, t = _qr(columns - basis @ coordinates)
    correction = basis.mT @ q
    q, t2 = _qr(q - basis @ correction)
    if bool((_diagonal(t2).abs() > MIN_SECOND_PASS).all()):
        return q, torch.cat([coordinates + correction @ t, t2 @ t], -2)
    # A new column lies in the span of the others up to rounding. A QR of all columns completes them: its first columns
    # are the basis times the inverse of a triangle.
    q, t = _qr(torch.cat([basis, columns], -1))
    width = basis.shape[-1]
    coordinates = torch.linalg.solve_triangular(t[:, :width, :width], t[:, :width, width:], upper=True)
    return q[..., width:], torch.cat([coordinates, t[:, width:, width:]], -2)


def _qr(a: Tensor) -> tuple[Tensor, Tensor]:
    q, r = torch.linalg.qr(a)
    return q, r


def rounding_floor(shape: tuple[int, int], dtype: torch.dtype) -> float:
    """Compute the share of the largest addend below which a singular value is rounding.

    It is max(d, k)·ε in float64. In float32 it is 32 ε, because max(d, k)·ε would be 5e-4 for a matrix of 4096 rows
    and would drop true singular values.
    """
    eps = torch.finfo(dtype).eps
    return eps * (max(shape) if dtype == REAL else 32)


def add_low_rank(
    u: Tensor, s: Tensor, v: Tensor, left: Tensor, right: Tensor, cap: int | None
) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Compute the singular value decompositions of U diag(s) Vᵀ + L Rᵀ for L matrices of the same shape.

    Args:
        u: left vectors ``[L, d, R]`` with orthonormal columns.
        s: diagonal values ``[L, R]`` in float64, of any sign and order.
        v: right vectors ``[L, k, R]`` with orthonormal columns.
        left: left factors ``[L, d, M]``.
        right: right factors ``[L, k, M]``.
        cap: maximum number of triplets to keep, or None.

    Returns:
        For each matrix, U' ``[d, r]``, s' ``[r]`` in float64, V' ``[k, r]``, and the singular values that ``cap``
        cut off. Values that are rounding (:func:`rounding_floor`) are dropped. The largest entry of each column
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
    # A difference of large addends is no more accurate than the addends, so these determine the scale.
    column_norms = torch.linalg.vector_norm(left, dim=1, dtype=REAL) * torch.linalg.vector_norm(
        right, dim=1, dtype=REAL
    )
    scale = torch.cat([s.abs(), column_norms, s.new_zeros(len(s), 1)], -1).amax(-1)
    x, values, yt = thin_svd(core)
    threshold = torch.maximum(scale, values[:, 0] if values.shape[1] else scale) * rounding_floor(
        (d, k), u.dtype
    )
    ranks = (values > threshold[:, None]).sum(-1).tolist()
    decompositions = []
    for i, rank in enumerate(ranks):
        new_rank = rank if cap is None else min(rank, cap)
        xi, yi = x[i, :, :new_rank], yt[i, :new_rank].mT
        # a clone, because a view would keep the dropped columns in memory
        u1 = (
            bases[0].multiply(i, xi)
            if bases
            else xi.to(u.dtype, memory_format=torch.contiguous_format, copy=True)
        )
        sign = canonical_signs(u1)
        u1.mul_(sign)
        yi = yi * sign
        v1 = bases[1].multiply(i, yi) if bases else yi.to(v.dtype, memory_format=torch.contiguous_format)
        decompositions.append((u1, values[i, :new_rank].clone(), v1, values[i, new_rank:rank].clone()))
    return decompositions
