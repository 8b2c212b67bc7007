"""Proximal operators: the soft threshold of entries (ℓ1 norm) and of singular values (nuclear norm).

``prox of c‖·‖_*`` takes c from every singular value, and those at most c become 0. All of it is computed in
float64, whatever the type of the weight. The cheap way is the eigendecomposition of the smaller Gram matrix,
AᵀA or AAᵀ, and of that only the part above c² where that part is small. Squaring loses small singular values:
an eigenvalue is off by about ε64 σ₁², hence a singular value near c by ε64 σ₁² / c. So the result is taken
only if

- that error, and the loss of orthogonality ε64 (σ₁/c)², stay below ε of the weight's own type: ε64 σ₁² ≤ ε
  c². A float32 weight passes down to c = 4e-5 σ₁; a float64 weight hardly ever, for it deserves all its
  digits;
- no singular value lies within that error of c, where it could be misjudged;
- where only a part was computed, it has as many eigenvalues as Sylvester's law of inertia counts above c² in
  an independent LDLᵀ factorization: nothing above the threshold was missed.

Else the full decomposition of A itself decides, again in float64. There a value within rounding of c, max(m,
n) ε64 σ₁, counts as being at the threshold.

Squares of entries above 1e154 overflow and those below 1e-162 vanish. So A and c are first divided by a power
of 4 near max|A|, which rounds nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from ..core.errors import ConfigError
from .factored import check_real_matrix, not_finite_error, thin_svd
from .matricize import LowRank

Algorithm = Literal["auto", "gram", "svd"]
EPS = torch.finfo(torch.float64).eps
PARTIAL_ORDER = 256
"""Order of a Gram matrix from which on counting its eigenvalues before computing any pays."""
PARTIAL_SHARE = 0.3
"""Share of the eigenvalues up to which computing only these is cheaper than all of them."""


def soft_threshold(w: Tensor, c: float) -> Tensor:
    """The prox of c‖·‖₁, c ≥ 0: every entry, real or complex, moves by c towards 0 and stops there."""
    _check_threshold(c)
    return (w.sgn() if w.is_complex() else w.sign()) * (w.abs() - c).clamp(min=0)


def threshold_singular_values(w: Tensor, c: float, algorithm: Algorithm = "auto") -> LowRank:
    """The prox of c‖·‖_* of a matrix ``[m, n]``, as factors; see the module's docstring.

    Args:
        w: the matrix, of any real floating-point type, on any device.
        c: threshold ≥ 0.
        algorithm: auto; or ``svd``, always the full decomposition; or ``gram``, to raise where that way is not
            safe.

    Returns:
        Factors of type and device of ``w``, of rank 0 if nothing is above the threshold. The largest entry of
        each column of the left factor, by magnitude, is positive.

    Raises:
        ArithmeticError: if ``algorithm`` is ``gram`` and it is not safe.
        ConfigError: if the threshold is negative or NaN.
        TaskError: if the matrix holds a NaN or an infinity, is no matrix, or is complex or of integers.
    """
    return threshold_all([w], c, algorithm)[0]


def threshold_all(ws: Sequence[Tensor], c: float, algorithm: Algorithm = "auto") -> list[LowRank]:
    """:func:`threshold_singular_values` of many matrices; an accelerator batches those of one shape."""
    _check_threshold(c)
    for w in ws:
        check_real_matrix(w, "threshold_singular_values")
    groups: dict[object, list[int]] = {}
    for i, w in enumerate(ws):
        # LAPACK takes one matrix at a time in any case, and one at a time needs less memory
        groups.setdefault((w.shape, w.dtype, w.device) if w.is_cuda else i, []).append(i)
    out: dict[int, LowRank] = {}
    for members in groups.values():
        stack = torch.stack([ws[i].detach().double() for i in members])
        eps = torch.finfo(ws[members[0]].dtype).eps
        roots = [_root_of_scale(w) for w in stack]
        for w, root in zip(stack, roots, strict=True):
            # twice, for the square of the root may be no number of float64
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
    """A power of 2 whose square is near max|A|, or 1 for a matrix of zeros."""
    max_magnitude = float(w.abs().amax()) if w.numel() else 0.0
    if not math.isfinite(max_magnitude):
        raise not_finite_error(w.shape)
    return math.ldexp(1.0, math.frexp(max_magnitude)[1] // 2)


def threshold_dense(w: Tensor, c: float) -> Tensor:
    """The prox of c‖·‖_* of matrices ``[..., m, n]`` as dense matrices, without data-dependent shapes.

    Raises:
        ConfigError: if the threshold is negative or NaN.
        LinAlgError: if a matrix holds a NaN or an infinity; PyTorch's own, for which the steps of a client
            are prepared.
    """
    _check_threshold(c)
    u, s, vt = thin_svd(w)
    dense: Tensor = (u * (s - c).clamp(min=0)[..., None, :]) @ vt
    return dense.to(w.dtype)


Eigenpairs = tuple[Tensor, Tensor]
"""Eigenvalues, ascending, and eigenvectors."""

Triplets = tuple[Tensor, Tensor, Tensor]
"""U ``[m, r]``, singular values descending ``[r]``, V ``[n, r]``."""


def _decompose_tall(
    a: Tensor, thresholds: Sequence[float], eps: float, algorithm: Algorithm
) -> list[Triplets]:
    """Singular triplets above a threshold each of matrices ``[b, m, n]`` with m ≥ n."""
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
    """The module, which takes half a second to import, so that only those who need it wait."""
    import scipy.linalg

    return scipy.linalg


def _eigh_all(a: Tensor) -> list[Eigenpairs]:
    """Eigenvalues, ascending, and eigenvectors of the Gram matrices of ``[b, m, n]``."""
    values, vectors = torch.linalg.eigh(a.mT @ a)
    return list(zip(values, vectors, strict=True))


def _decompose_by_svd(a: Tensor, c: float) -> Triplets:
    u, s, vt = thin_svd(a)
    r = int((s > c + max(a.shape) * EPS * s[0]).sum())
    return u[:, :r], s[:r], vt[:r].mT


def _decompose_by_gram(a: Tensor, c: float, eps: float, pair: Eigenpairs | None) -> Triplets | None:
    """From the Gram matrix; None if that is not safe."""
    if c <= 0:
        return None
    # low enough to see the values just below c, too: n ε64 σ₁² / c < n ε c for all that passes the next line
    values, vectors = pair or _eigenpairs_above(_gram(a), c * c * max(0.0, 1 - 2 * a.shape[1] * eps))
    largest_eigenvalue = float(values[-1]) if len(values) else 0.0
    if eps * c * c < EPS * largest_eigenvalue:
        return None
    s = values.clamp(min=0).sqrt()
    if bool(((s - c).abs() <= a.shape[1] * EPS * largest_eigenvalue / c).any()):
        return None
    indices = (s > c).nonzero().flatten().flip(0)
    v = vectors[:, indices]
    return a @ v / s[indices], s[indices], v


def _gram(a: Tensor) -> Tensor:
    """AᵀA; on the CPU only its lower triangle is right, for half the work."""
    if a.device.type != "cpu":
        return a.mT @ a
    # what is row by row in memory is the transpose column by column, as BLAS takes it
    return torch.from_numpy(_scipy_linalg().blas.dsyrk(1.0, a.contiguous().numpy().T).T)


def _eigenpairs_above(h: Tensor, x: float) -> Eigenpairs:
    """Eigenpairs, ascending, of a symmetric matrix given by its lower triangle: at least all above ``x``."""
    half = len(h) // 2
    # a principal submatrix has no more eigenvalues above x than the whole (Cauchy): so early models skip the
    # whole count
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
            # an eigenvalue within rounding of x may be counted by one and not by the other: then compute them
            # all
            if len(values) == count:
                return torch.from_numpy(values), torch.from_numpy(vectors)
    eigenpairs = torch.linalg.eigh(h)
    return eigenpairs.eigenvalues, eigenpairs.eigenvectors


def count_above(h: Tensor, x: float) -> int:
    """Number of eigenvalues above ``x`` of a symmetric matrix, given by its lower triangle.

    By Sylvester's law of inertia: H - xI = LDLᵀ and D have equally many positive eigenvalues.
    """
    shifted_matrix = h.clone()
    shifted_matrix.diagonal().sub_(x)
    ld, pivots, *_ = torch.linalg.ldl_factor(shifted_matrix)
    # a pair of negative pivots marks a 2×2 block of D; such a block has one eigenvalue of either sign
    is_single = pivots > 0
    return int((is_single & (ld.diagonal() > 0)).sum()) + int((~is_single).sum()) // 2


def _balanced_factors(u: Tensor, root: Tensor, v: Tensor, dtype: torch.dtype) -> LowRank:
    """Factors that share singular values, given by their roots."""
    if len(root):
        root = torch.where(u.gather(0, u.abs().argmax(0, keepdim=True)) < 0, -root, root)
    return LowRank((u * root).to(dtype).contiguous(), (v * root).mT.to(dtype).contiguous())
