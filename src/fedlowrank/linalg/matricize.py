"""Weights as matrices, and matrices as products of two thinner matrices."""

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
    """A matrix of rank r as a product, with the singular values divided evenly between the factors.

    Attributes:
        left: left factor U √s, ``[rows, r]``, whose columns are orthogonal and of descending norm.
        right: right factor √s Vᵀ, ``[r, columns]``.
    """

    left: Tensor
    right: Tensor

    @property
    def rank(self) -> int:
        """The number of singular values."""
        return self.left.shape[1]

    @property
    def s(self) -> Tensor:
        """The singular values ``[r]``, descending."""
        return widen(self.left).square().sum(0)

    def dense(self) -> Tensor:
        """The matrix ``[rows, columns]``."""
        return self.left @ self.right


@tree_dataclass
class Sparse:
    """A tensor stored as some of its entries; all other entries are zero.

    Attributes:
        values: values of the stored entries ``[n]``, in the order of the tensor's memory; zeros among them do not
            count.
        mask: mask of the stored entries, in the shape of the tensor; it is sent as a bitmask.
    """

    values: Tensor
    mask: Tensor

    def dense(self) -> Tensor:
        """The dense tensor."""
        return self.values.new_zeros(self.mask.shape).masked_scatter(self.mask, self.values)


def matrix_shape(shape: torch.Size) -> tuple[int, int]:
    """Compute the rows and columns of :func:`matricize` for a weight of the given shape."""
    rows = shape[0] * (shape[2] if len(shape) > 2 else 1)
    # a product and not a quotient, because there may be no rows
    return rows, math.prod((*shape[1:2], *shape[3:]))


def matricize(w: Tensor) -> Tensor:
    """Reshape a weight of two or more dimensions to a matrix, by scheme 2 of Idelbayev and Carreira-Perpiñán (CVPR 2020).

    A convolution ``[O, I, K1, K2]`` becomes ``[O·K1, I·K2]``, entry (o, i, k1, k2) at row o·K1 + k1 and
    column i·K2 + k2, so that a rank-r factorization is a 1×K2 convolution followed by a K1×1 convolution. A matrix
    is unchanged. A single kernel dimension goes to the rows; a third one goes to the columns.
    """
    if w.ndim <= 2:
        return w
    order = (0, 2, 1, *range(3, w.ndim))
    return w.permute(order).reshape(matrix_shape(w.shape))


def unmatricize(matrix: Tensor, shape: torch.Size) -> Tensor:
    """Invert :func:`matricize` for a weight of the given shape; the result is contiguous."""
    if len(shape) <= 2:
        return matrix.contiguous()
    order = (0, 2, 1, *range(3, len(shape)))
    return matrix.reshape([shape[i] for i in order]).permute(order).contiguous()


def pack_low_rank(factors: LowRank, shape: torch.Size) -> Tensor | LowRank:
    """Return the factors if they are smaller than the weight, r (rows + columns) < numel, otherwise the weight."""
    if factors.rank * sum(matrix_shape(shape)) < shape.numel():
        return factors
    return unmatricize(factors.dense(), shape)


def to_sparse(w: Tensor) -> Sparse:
    """Convert a tensor to its nonzero entries."""
    mask = w != 0
    return Sparse(w[mask], mask)


def pack_sparse(w: Tensor) -> Tensor | Sparse:
    """Return the nonzero entries and a bitmask if these are fewer bytes than the weight, otherwise the weight."""
    sparse = to_sparse(w)
    return sparse if nbytes(sparse) < nbytes(w) else w


def unpack_weights(weights: Weights, params: Params) -> Params:
    """Rebuild tensors, with the shapes of ``params``, from the results of :func:`pack_low_rank` and :func:`pack_sparse`."""
    out: Params = {}
    for n, w in weights.items():
        if isinstance(w, LowRank):
            out[n] = unmatricize(w.dense(), params[n].shape)
        else:
            out[n] = (w.dense() if isinstance(w, Sparse) else w).contiguous()
    return out


def dense_weights(value: Any, params: Params) -> Any:
    """Replace the factored and sparse weights in a tree by dense tensors; dicts hold the weights by parameter name.

    Args:
        value: any tree.
        params: parameters of the model, which determine the shapes.
    """
    if not isinstance(value, dict):
        return value
    return {
        n: unpack_weights({n: w}, params)[n] if isinstance(w, (LowRank, Sparse)) else dense_weights(w, params)
        for n, w in value.items()
    }


def count_parameters(parts: Sequence[Weights], params: Params) -> int:
    """Count the parameters of a model that is the sum of ``parts``.

    A weight counts r (rows + columns) if it is given as factors, its nonzero entries if it is :class:`Sparse`, and
    otherwise all entries. A weight for which the sum over the parts exceeds its entries counts as dense. FedSLR
    counts parameters in this way (Huang et al., arXiv:2302.11051, Table 2), except for that bound, without which
    its Table 5 has models above their dense size.
    """
    return sum(
        min(sum(_count_stored(part[n]) for part in parts if n in part), w.numel()) for n, w in params.items()
    )


def sum_parts(parts: Sequence[Weights], params: Params) -> Params:
    """Sum the parts of a model, in the shapes of ``params``; a weight that no part has is zero.

    An entry that is not in ``params``, such as a buffer, is taken from the last part that has it.
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
