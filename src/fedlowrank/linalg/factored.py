"""Matrices as U diag(s) Vᵀ: truncation by energy, and updates sent as factors where these are smaller."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..core.arguments.bounds import check_minimum
from ..core.errors import ConfigError, TaskError
from ..core.tree import Params, map_leaves, tree_dataclass, wide_type, widen

CompressedUpdate = dict[str, "Tensor | Factored"]


@tree_dataclass
class Factored:
    """A matrix of rank r as U diag(s) Vᵀ.

    Attributes:
        u: left singular vectors ``[m, r]`` with orthonormal columns.
        s: singular values ``[r]``, descending, not negative.
        v: right singular vectors ``[n, r]`` with orthonormal columns.
    """

    u: Tensor
    s: Tensor
    v: Tensor

    @property
    def rank(self) -> int:
        """The number of singular values."""
        return len(self.s)

    def dense(self) -> Tensor:
        """The matrix ``[m, n]``; half precision is computed in float32 and rounded once."""
        wide_factors = widen(self)
        return ((wide_factors.u * wide_factors.s) @ wide_factors.v.mT).to(self.u.dtype)


def check_real_matrix(w: Tensor, caller: str) -> None:
    """Refuse a tensor that is not a real matrix.

    Args:
        w: any tensor.
        caller: name of the function that received it, for the message.

    Raises:
        TaskError: if the tensor does not have two dimensions, or is complex or has integers.
    """
    if w.ndim != 2 or not w.is_floating_point():
        raise TaskError(
            f"{caller} takes matrices [m, n] of real floating-point numbers; it was given a tensor of shape "
            f"{[*w.shape]} and type {w.dtype}. Reshape it to two dimensions, convert integers with .float(), and "
            "pass real and imaginary parts separately"
        )


def not_finite_error(shape: Sequence[int]) -> TaskError:
    """Create the error for a matrix with a NaN or an infinity."""
    return TaskError(
        f"a matrix of shape {[*shape]} holds a NaN or an infinity, so it has no singular values. Check it with "
        "torch.isfinite; in training, lower the learning rate."
    )


def canonical_signs(u: Tensor) -> Tensor:
    """Compute the sign, 1 or -1, of each column ``[1, r]`` that makes its largest entry by magnitude positive.

    Of several entries of that magnitude, the first one becomes positive.
    """
    if u.numel() == 0:
        return u.new_ones(1, u.shape[1])
    positive_peak, negative_peak = u.amax(0, keepdim=True), -u.amin(0, keepdim=True)
    if bool((positive_peak == negative_peak).any()):
        positive_peak, negative_peak = u.gather(0, u.abs().argmax(0, keepdim=True)), u.new_zeros(())
    return torch.where(positive_peak < negative_peak, -1.0, 1.0).to(u.dtype)


def thin_svd(w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute U, s and Vᵀ of matrices ``[..., m, n]``, in float32 for half precision, which LAPACK does not support."""
    u, s, vt = torch.linalg.svd(w.to(wide_type(w.dtype)), full_matrices=False)
    return u, s, vt


def compute_svd(w: Tensor) -> Factored:
    """Compute the full singular value decomposition of a matrix ``[m, n]``, with canonical signs.

    The largest entry of each column of U, by magnitude, is made positive, so that equal inputs give equal factors.
    The factors of a half-precision matrix are in float32, and the caller rounds them.
    """
    u, s, vt = thin_svd(w)
    sign = canonical_signs(u)
    return Factored(u * sign, s, vt.mT * sign)


def truncate_svd(f: Factored, rank: int) -> Factored:
    """Truncate to the best approximation of the given rank, at least 0: the leading triplets."""
    rank = check_minimum("truncate_svd: rank", rank, 0)
    return Factored(f.u[:, :rank].contiguous(), f.s[:rank].contiguous(), f.v[:, :rank].contiguous())


def rank_of_energy(s: Tensor, energy: float) -> int:
    """Find the smallest r ≥ 1 with Σ_{i<r} s_i² ≥ energy · Σ_i s_i².

    Args:
        s: singular values, descending ``[k]``.
        energy: share in [0, 1] of the squared Frobenius norm to keep.

    Raises:
        ConfigError: if the energy is not in [0, 1].
        TaskError: if there are no singular values, or one is not finite.
    """
    if not 0 <= energy <= 1:
        raise ConfigError(f"rank_of_energy: energy must be a share from 0 to 1; it is {energy}")
    if not len(s):
        raise TaskError("rank_of_energy: there are no singular values; a matrix without entries has no rank")
    if not bool(s.isfinite().all()):
        raise TaskError(
            f"rank_of_energy: the {len(s)} singular values hold a NaN or an infinity. Check the matrix with "
            "torch.isfinite; in training, lower the learning rate."
        )
    # relative to the largest, because squares of very large or very small values overflow or underflow in float64
    square = (s.double() / s[0].double().clamp(min=torch.finfo(torch.float64).tiny)).square()
    # summed from the smallest value up, so that a tail far below the leading value is not rounded away
    tail = square.flip(0).cumsum(0).flip(0)
    allowed = (1 - energy) * float(tail[0])
    return max(1, int((tail > allowed).sum()))


def compress_update(update: Params, energy: float) -> CompressedUpdate:
    """Compress each weight of an update to the smallest rank that keeps the energy (FedKD, Wu et al., eq. 8).

    A weight of two or more dimensions is a matrix of its first dimension by all others, so a convolution is ``[O,
    I·k1·k2]``. The tensor itself is kept where factors would be no smaller than the matrix, r (m + n + 1) ≥ m n,
    and for vectors and tensors without entries. Factors have the type of their tensor.

    Args:
        update: tensors by name.
        energy: share of each weight's squared Frobenius norm to keep; 1 keeps every tensor unchanged.

    Raises:
        ConfigError: if the energy is not above 0 and at most 1.
        TaskError: if a weight that would be decomposed holds a NaN or an infinity, or is complex or has integers.
    """
    if not 0 < energy <= 1:
        raise ConfigError(f"compress_update: energy must be above 0 and at most 1; it is {energy}")
    out: CompressedUpdate = {}
    for name, w in update.items():
        out[name] = w
        if w.ndim >= 2 and energy < 1 and w.numel():
            matrix = w.reshape(w.shape[0], -1)
            check_real_matrix(matrix, f"compress_update, of {name!r},")
            if not bool(matrix.isfinite().all()):
                raise not_finite_error(w.shape)
            svd = compute_svd(matrix)
            rank = rank_of_energy(svd.s, energy)
            if rank * (sum(matrix.shape) + 1) < matrix.numel():
                out[name] = map_leaves(lambda t, dtype=w.dtype: t.to(dtype), truncate_svd(svd, rank))
    return out


def decompress_update(compressed: CompressedUpdate, params: Params) -> Params:
    """Rebuild the tensors, with the shapes of ``params``, from the result of :func:`compress_update`."""
    return {
        n: (c.dense() if isinstance(c, Factored) else c).reshape(params[n].shape).contiguous()
        for n, c in compressed.items()
    }
