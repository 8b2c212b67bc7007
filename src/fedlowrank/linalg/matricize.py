"""Weights as matrices, and matrices as the product of two thinner ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.tree import Params, cast_like, nbytes, tree_dataclass, widen

Weights = dict[str, "Tensor | LowRank | Sparse"]
"""Parameters of a model by name, each dense, as factors of its matrix, or as its nonzero entries."""


@tree_dataclass
class LowRank:
    """A matrix of rank r as a product, the singular values shared evenly between the factors.

    Attributes:
        left: U √s, ``[rows, r]``, columns orthogonal and of descending norm.
        right: √s Vᵀ, ``[r, columns]``.
    """

    left: Tensor
    right: Tensor

    @property
    def rank(self) -> int:
        """Number of singular values."""
        return self.left.shape[1]

    @property
    def s(self) -> Tensor:
        """Singular values, descending ``[r]``."""
        return widen(self.left).square().sum(0)

    def dense(self) -> Tensor:
        """The matrix ``[rows, columns]``."""
        return self.left @ self.right


@tree_dataclass
class Sparse:
    """A tensor stored as some of its entries, all others being zero.

    Attributes:
        values: of these entries, in the order of the tensor's memory ``[n]``; those that are zero are not counted.
        mask: where they are, in the shape of the tensor; it travels as bits.
    """

    values: Tensor
    mask: Tensor

    def dense(self) -> Tensor:
        """The tensor."""
        return self.values.new_zeros(self.mask.shape).masked_scatter(self.mask, self.values)


def matrix_shape(shape: torch.Size) -> tuple[int, int]:
    """Rows and columns of :func:`matricize` for a weight of that shape."""
    rows = shape[0] * (shape[2] if len(shape) > 2 else 1)
    # not a quotient, for there may be no rows
    return rows, math.prod((*shape[1:2], *shape[3:]))


def matricize(w: Tensor) -> Tensor:
    """Scheme 2 of Idelbayev and Carreira-Perpiñán (CVPR 2020) for a weight of two or more dimensions.

    A convolution ``[O, I, K1, K2]`` becomes ``[O·K1, I·K2]``, entry (o, i, k1, k2) at row o·K1 + k1 and
    column i·K2 + k2, so that a rank-r factorization is a 1×K2 convolution followed by a K1×1 one. A matrix
    stays as it is. Where there is one kernel dimension it goes to the rows; a third one goes to the columns.
    """
    if w.ndim <= 2:
        return w
    order = (0, 2, 1, *range(3, w.ndim))
    return w.permute(order).reshape(matrix_shape(w.shape))


def unmatricize(matrix: Tensor, shape: torch.Size) -> Tensor:
    """Inverse of :func:`matricize` for a weight of that shape, contiguous."""
    if len(shape) <= 2:
        return matrix.contiguous()
    order = (0, 2, 1, *range(3, len(shape)))
    return matrix.reshape([shape[i] for i in order]).permute(order).contiguous()


def pack_low_rank(factors: LowRank, shape: torch.Size) -> Tensor | LowRank:
    """The factors if they are smaller than the weight, r (rows + columns) < numel, else the weight."""
    if factors.rank * sum(matrix_shape(shape)) < shape.numel():
        return factors
    return unmatricize(factors.dense(), shape)


def to_sparse(w: Tensor) -> Sparse:
    """A tensor as the entries that are not zero."""
    mask = w != 0
    return Sparse(w[mask], mask)


def pack_sparse(w: Tensor) -> Tensor | Sparse:
    """The nonzero entries and a bitmask if these are fewer bytes than the weight, else the weight."""
    sparse = to_sparse(w)
    return sparse if nbytes(sparse) < nbytes(w) else w


def unpack_weights(weights: Weights, params: Params) -> Params:
    """Tensors of the shapes of ``params`` from what :func:`pack_low_rank` and :func:`pack_sparse` made."""
    out: Params = {}
    for n, w in weights.items():
        if isinstance(w, LowRank):
            out[n] = unmatricize(w.dense(), params[n].shape)
        else:
            out[n] = (w.dense() if isinstance(w, Sparse) else w).contiguous()
    return out


def dense_weights(value: Any, params: Params) -> Any:
    """A tree with weights that are factors or sparse as whole tensors; dicts hold them by parameter.

    Args:
        value: any tree.
        params: parameters of the model, which tell the shapes.
    """
    if not isinstance(value, dict):
        return value
    return {
        n: unpack_weights({n: w}, params)[n] if isinstance(w, (LowRank, Sparse)) else dense_weights(w, params)
        for n, w in value.items()
    }


def count_parameters(parts: Sequence[Weights], params: Params) -> int:
    """Parameter count of a model that is the sum of ``parts``.

    Of each weight that is r (rows + columns) where it is given as factors, the entries that are not zero
    where it is :class:`Sparse`, and else all entries. A weight for which the sum over the parts exceeds its
    entries is counted as dense. So FedSLR counts parameters (Huang et al., arXiv:2302.11051, Table 2),
    but for that bound, without which its Table 5 has models above their dense size.
    """
    return sum(
        min(sum(_count_stored(part[n]) for part in parts if n in part), w.numel()) for n, w in params.items()
    )


def sum_parts(parts: Sequence[Weights], params: Params) -> Params:
    """The sum of the parts of a model, in the shapes of ``params``; a weight that no part has is zero.

    What is not in ``params``, such as a buffer, is that of the last part that has it.
    """
    sums, other_weights = {n: torch.zeros_like(w) for n, w in widen(params).items()}, {}
    for part in parts:
        for n, w in unpack_weights(part, params).items():
            if n in sums:
                sums[n] = sums[n] + w
            else:
                other_weights[n] = w
    return {**cast_like(sums, params), **other_weights}


def _count_stored(w: Tensor | LowRank | Sparse) -> int:
    if isinstance(w, LowRank):
        return w.left.numel() + w.right.numel()
    return int(w.values.count_nonzero()) if isinstance(w, Sparse) else w.numel()
