"""Proximal operators: the soft threshold of entries (ℓ1 norm) and of singular values (nuclear norm).

``prox of c‖·‖_*`` takes c from every singular value, and those at most c become 0. The computation is in float64,
whatever the type of the weight. The cheap way is the eigendecomposition of the smaller Gram matrix, AᵀA or AAᵀ,
restricted to eigenvalues above c² if these are few. Squaring loses small singular values: an eigenvalue has an
error of about ε64 σ₁², hence a singular value near c one of ε64 σ₁² / c. So the result is accepted only if

- that error, and the loss of orthogonality ε64 (σ₁/c)², stay below ε of the weight's own type: ε64 σ₁² ≤ ε
  c². A float32 weight passes down to c = 4e-5 σ₁; a float64 weight hardly ever, because it needs all its digits;
- no singular value lies within that error of c, where it could be misjudged;
- where only a part was computed, it has as many eigenvalues as Sylvester's law of inertia counts above c² in an
  independent LDLᵀ factorization: none above the threshold was missed.

Otherwise the full decomposition of A itself is used, again in float64. There a value within rounding of c, max(m,
n) ε64 σ₁, counts as equal to the threshold.

Squares of entries above 1e154 overflow and those of entries below 1e-162 underflow. So A and c are first divided by
a power of 4 near max|A|, which is exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ..core.errors import ConfigError, did_you_mean
from .factored import canonical_signs, check_real_matrix, not_finite_error, thin_svd
from .matricize import LowRank

Algorithm = Literal["auto", "gram", "svd"]
EPS = torch.finfo(torch.float64).eps
PARTIAL_ORDER = 256
"""Minimum order of a Gram matrix for which counting its eigenvalues before computing them saves time."""
PARTIAL_SHARE = 0.3
"""Maximum share of the eigenvalues for which computing only these is cheaper than computing all."""


def soft_threshold(w: Tensor, c: float) -> Tensor:
    """Apply the prox of c‖·‖₁, c ≥ 0: every entry, real or complex, moves by c towards 0 and stops there."""
    _check_threshold(c)
    return (w.sgn() if w.is_complex() else w.sign()) * (w.abs() - c).clamp(min=0)


def threshold_singular_values(w: Tensor, c: float, algorithm: Algorithm = "auto") -> LowRank:
    """Apply the prox of c‖·‖_* to a matrix ``[m, n]``; the result is factors, see the module's docstring.

    Args:
        w: matrix of any real floating-point type, on any device.
        c: threshold ≥ 0.
        algorithm: ``auto`` for the cheap way where it is safe; ``svd`` for the full decomposition always; or
            ``gram`` for the cheap way only, with an error where it is not safe.

    Returns:
        Factors with the type and device of ``w``, of rank 0 if no singular value is above the threshold. The
        largest entry of each column of the left factor, by magnitude, is positive.

    Raises:
        ArithmeticError: if ``algorithm`` is ``gram`` and the cheap way is not safe.
        ConfigError: if the threshold is negative or NaN, or the algorithm is unknown.
        TaskError: if ``w`` holds a NaN or an infinity, is not a matrix, or is complex or has integers.
    """
    return threshold_all([w], c, algorithm)[0]


def threshold_all(ws: Sequence[Tensor], c: float, algorithm: Algorithm = "auto") -> list[LowRank]:
    """Do :func:`threshold_singular_values` for many matrices; an accelerator batches those of the same shape."""
    _check_threshold(c)
    if algorithm not in get_args(Algorithm):
        raise ConfigError(
            f"threshold_all: {algorithm!r} is no algorithm. {did_you_mean(str(algorithm), get_args(Algorithm))}"
        )
    for w in ws:
        check_real_matrix(w, "threshold_all")
    groups: dict[object, list[int]] = {}
    for i, w in enumerate(ws):
        # LAPACK decomposes one matrix at a time in any case, and groups of one need less memory
        groups.setdefault((w.shape, w.dtype, w.device) if w.is_cuda else i, []).append(i)
    out: dict[int, LowRank] = {}
    for members in groups.values():
        stack = torch.stack([ws[i].detach().double() for i in members])
        eps = torch.finfo(ws[members[0]].dtype).eps
        roots = [_root_of_scale(w) for w in stack]
        for w, root in zip(stack, roots, strict=True):
            # divided twice, because the square of the root may overflow or underflow in float64
            w.div_(root).div_(root)
        flip, thresholds = stack.shape[1] < stack.shape[2], [c / root / root for root in roots]
        decompositions = _decompose_tall(stack.mT if flip else stack, thresholds, eps, algorithm)
        for i, threshold, root, (u, s, v) in zip(members, thresholds, roots, decompositions, strict=True):
            out[i] = _balanced_factors(
                v if flip else u, (s - threshold).sqrt() * root, u if flip else v, ws[i].dtype
            )
    return [out[i] for i in range(len(ws))]


def _check_threshold(c: float) -> None:
    if not c >= 0:
        raise ConfigError(f"the threshold of a prox must be >= 0; it is {c}")


def _root_of_scale(w: Tensor) -> float:
    """Compute a power of 2 whose square is near max|A|, or 1 for a matrix of zeros."""
    max_magnitude = float(w.abs().amax()) if w.numel() else 0.0
    if not math.isfinite(max_magnitude):
        raise not_finite_error(w.shape)
    return math.ldexp(1.0, math.frexp(max_magnitude)[1] // 2)


def threshold_dense(w: Tensor, c: float) -> Tensor:
    """Apply the prox of c‖·‖_* to matrices ``[..., m, n]``; the result is dense, without data-dependent shapes.

    Raises:
        ConfigError: if the threshold is negative or NaN.
        LinAlgError: if a matrix holds a NaN or an infinity; it is PyTorch's own error, which the steps of a client
            handle.
    """
    _check_threshold(c)
    u, s, vt = thin_svd(w)
    dense: Tensor = (u * (s - c).clamp(min=0)[..., None, :]) @ vt
    return dense.to(w.dtype)


Eigenpairs = tuple[Tensor, Tensor]
"""Ascending eigenvalues, and eigenvectors."""

Triplets = tuple[Tensor, Tensor, Tensor]
"""U ``[m, r]``, singular values descending ``[r]``, V ``[n, r]``."""


def _decompose_tall(
    a: Tensor, thresholds: Sequence[float], eps: float, algorithm: Algorithm
) -> list[Triplets]:
    """Compute the singular triplets of matrices ``[b, m, n]`` with m ≥ n, above a threshold for each matrix."""
    eigenpairs: Sequence[Eigenpairs | None] = (
        _eigh_all(a) if algorithm != "svd" and a.is_cuda else [None] * len(a)
    )
    out = []
    for matrix, c, pair in zip(a, thresholds, eigenpairs, strict=True):
        # no singular value exceeds the Frobenius norm
        if float(torch.linalg.vector_norm(matrix)) <= c:
            out.append((matrix[:, :0], matrix.new_empty(0), matrix.new_empty(matrix.shape[1], 0)))
            continue
        triplets = None if algorithm == "svd" else _decompose_by_gram(matrix, c, eps, pair)
        if triplets is None and algorithm == "gram":
            raise ArithmeticError(
                f"the threshold {c:g} is too small, or too close to a singular value, for a Gram matrix"
            )
        out.append(_decompose_by_svd(matrix, c) if triplets is None else triplets)
    return out


def _scipy_linalg() -> Any:
    """Import ``scipy.linalg`` at first use, because the import takes half a second."""
    import scipy.linalg

    return scipy.linalg


def _eigh_all(a: Tensor) -> list[Eigenpairs]:
    """Compute ascending eigenvalues and eigenvectors of the Gram matrices of ``[b, m, n]``."""
    values, vectors = torch.linalg.eigh(a.mT @ a)
    return list(zip(values, vectors, strict=True))


def _decompose_by_svd(a: Tensor, c: float) -> Triplets:
    u, s, vt = thin_svd(a)
    r = int((s > c + max(a.shape) * EPS * s[0]).sum())
    return u[:, :r], s[:r], vt[:r].mT


def _decompose_by_gram(a: Tensor, c: float, eps: float, pair: Eigenpairs | None) -> Triplets | None:
    """Compute the triplets from the Gram matrix; None if that is not safe."""
    if c <= 0:
        return None
    # low enough to include values just below c: n ε64 σ₁² / c < n ε c for all matrices that pass the next line
    values, vectors = pair or _eigenpairs_above(compute_gram(a), c * c * max(0.0, 1 - 2 * a.shape[1] * eps))
    largest_eigenvalue = float(values[-1]) if len(values) else 0.0
    if eps * c * c < EPS * largest_eigenvalue:
        return None
    s = values.clamp(min=0).sqrt()
    if bool(((s - c).abs() <= a.shape[1] * EPS * largest_eigenvalue / c).any()):
        return None
    indices = (s > c).nonzero().flatten().flip(0)
    v = vectors[:, indices]
    return a @ v / s[indices], s[indices], v


def compute_gram(a: Tensor, of_rows: bool = False) -> Tensor:
    """Compute AᵀA, or AAᵀ of the rows, in float64; on the CPU only its lower triangle is valid, for half the work."""
    if a.device.type != "cpu":
        return a @ a.mT if of_rows else a.mT @ a
    # a row-major matrix is the transpose in column-major order, which BLAS reads
    return torch.from_numpy(_scipy_linalg().blas.dsyrk(1.0, a.contiguous().numpy().T, trans=of_rows).T)


def _eigenpairs_above(h: Tensor, x: float) -> Eigenpairs:
    """Compute ascending eigenpairs of a symmetric matrix given by its lower triangle, at least all those above ``x``."""
    half = len(h) // 2
    # a principal submatrix has no more eigenvalues above x than the whole matrix (Cauchy), so models of early
    # rounds skip the whole count
    if (
        len(h) >= PARTIAL_ORDER
        and h.device.type == "cpu"
        and count_above(h[:half, :half], x) <= PARTIAL_SHARE * len(h)
    ):
        count = count_above(h, x)
        if count <= PARTIAL_SHARE * len(h):
            values, vectors = _scipy_linalg().eigh(
                h.numpy(), subset_by_value=(x, float("inf")), driver="evr", check_finite=False
            )
            # an eigenvalue within rounding of x may be in one count and not in the other: then compute all
            # eigenvalues
            if len(values) == count:
                return torch.from_numpy(values), torch.from_numpy(vectors)
    eigenpairs = torch.linalg.eigh(h)
    return eigenpairs.eigenvalues, eigenpairs.eigenvectors


def count_above(h: Tensor, x: float) -> int:
    """Count the eigenvalues above ``x`` of a symmetric matrix given by its lower triangle.

    By Sylvester's law of inertia, H - xI = LDLᵀ and D have the same number of positive eigenvalues.
    """
    shifted_matrix = h.clone()
    shifted_matrix.diagonal().sub_(x)
    # unlike ldl_factor it also factors singular matrices, whose D has zeros, which are not above 0
    ld, pivots, _ = torch.linalg.ldl_factor_ex(shifted_matrix)
    # a pair of negative pivots marks a 2×2 block of D, which has one eigenvalue of each sign
    is_single = pivots > 0
    return int((is_single & (ld.diagonal() > 0)).sum()) + int((~is_single).sum()) // 2


def _balanced_factors(u: Tensor, root: Tensor, v: Tensor, dtype: torch.dtype) -> LowRank:
    """Build factors that divide the singular values evenly, given the square roots of these."""
    root = root * canonical_signs(u)
    return LowRank((u * root).to(dtype).contiguous(), (v * root).mT.to(dtype).contiguous())
