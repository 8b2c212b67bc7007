"""Linear layers and convolutions whose weight is a product of thin factors plus a sparse tensor.

A linear layer of factors is two thin linear layers; a convolution is one with kernel 1×K2 to r channels, then one
with kernel K1×1. The first has no bias, so each dimension's stride, dilation and padding (of any mode) belongs to
one of the two. All groups of a convolution share ``right``: they are folded into the batch for the first
convolution. Rank 0 without a sparse tensor gives the bias, or zeros.

The computation with the sparse tensor p was chosen by measurements (one core with AVX-512, float32, densities 1 to
10 %). In a linear layer, weighted sums of rows (``embedding_bag``) take 0.05 to 0.3 of the dense time at batch 20,
less than a sparse tensor or a p that is made dense at every call; at batch 1 they gain below 5 %. In a convolution
both need a copy of every patch: the time of 5 dense convolutions at 64 channels, and of one at 512. So a
convolution forms the dense weight at every call, that of w + p, or of p beside thin layers where the map is small;
a convolution with a sparse part saves bytes and *no time*.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.conv import _ConvNd

from ..core.tree import Params
from ..linalg.matricize import LowRank, matricize, matrix_shape, unmatricize

TRANSFER_COST = 160
"""Number of multiplications that cost as much as one value between two thin layers; 135 to 210 measured."""


class CompressedLayer(nn.Module):
    """A layer whose weight is left · right + a sparse tensor; the rank, or the number of values, may be 0.

    Attributes:
        shape: shape of the weight.
        left: weight of the second thin layer, ``[O, r]`` or ``[O, r, K1, 1]``.
        right: weight of the first thin layer, ``[r, I]`` or ``[r, I, 1, K2]``.
        values: values of the sparse tensor, row by row (each row gives one output).
        indices: index of each value in its row, int32.
        starts: first index of each row in ``values``, and the end of the last row, int32 ``[O + 1]``; empty without
            values.
    """

    shape: torch.Size
    left: Tensor
    right: Tensor
    values: Tensor
    indices: Tensor
    starts: Tensor

    def sparse(self) -> Tensor:
        """The sparse tensor as a dense one."""
        return self._scatter(self.values)

    def mask(self) -> Tensor:
        """The mask of the sparse tensor's values, in the shape of the weight."""
        return self._scatter(torch.ones_like(self.values, dtype=torch.bool))

    def _scatter(self, values: Tensor) -> Tensor:
        w = values.new_zeros(self.shape)
        if len(values):
            row_starts = torch.arange(0, w.numel(), w[0].numel(), device=w.device)
            indices = row_starts.repeat_interleave(self.starts.diff(), output_size=len(values)) + self.indices
            w.view(-1).scatter_(0, indices, values)
        return w

    @property
    def weight(self) -> Tensor:
        """The dense weight, for convolutions and for code that reads the weight without calling the layer."""
        if not len(self.right):
            return self.sparse()
        w = unmatricize(matricize(self.left) @ matricize(self.right), self.shape)
        return w.add_(self.sparse()) if len(self.values) else w


class CompressedLinear(CompressedLayer, nn.Linear):  # type: ignore[override]  # weight is computed
    """A compressed ``nn.Linear``, see :class:`CompressedLayer`."""

    def forward(self, x: Tensor) -> Tensor:
        """Compute outputs ``[..., O]`` of inputs ``[..., I]``."""
        y = functional.linear(functional.linear(x, self.right), self.left, self.bias)
        if not len(self.values):
            return y
        table = x.reshape(-1, self.in_features).mT.contiguous()
        sums = functional.embedding_bag(
            self.indices,
            table,
            self.starts,
            mode="sum",
            per_sample_weights=self.values,
            include_last_offset=True,
        )
        return y + sums.mT.reshape(y.shape)


class CompressedConv(CompressedLayer, _ConvNd):  # type: ignore[override]  # weight is computed
    """A compressed convolution, see :class:`CompressedLayer`; ``convolutions`` are its two convolutions without weights."""

    convolutions: tuple[_ConvNd, _ConvNd]

    def forward(self, x: Tensor) -> Tensor:
        """Compute feature maps of inputs ``[b, I, ...]`` or ``[I, ...]``."""
        rank, n, (horizontal, vertical) = len(self.right), len(self.kernel_size), self.convolutions
        if not rank and not len(self.values):
            # the convolution on the meta device infers and checks shapes
            meta_input, meta_weight = (
                torch.empty(s, dtype=x.dtype, device="meta") for s in (x.shape, self.shape)
            )
            zero = x.new_zeros(self._conv_forward(meta_input, meta_weight, None).shape)
            return zero if self.bias is None else zero + self.bias.view(-1, *[1] * n)
        positions = x.numel() // self.in_channels // math.prod(self.stride)
        if len(self.values) and self.shape.numel() * rank <= positions * count_multiplications(self, rank):
            return self._conv_forward(x, self.weight, self.bias)
        z = horizontal._conv_forward(x.reshape(-1, self.shape[1], *x.shape[-n:]), self.right, None)
        z = z.reshape(*x.shape[: -n - 1], self.groups * rank, *z.shape[-n:])
        y = vertical._conv_forward(z, self.left, self.bias)
        return y + self._conv_forward(x, self.sparse(), None) if len(self.values) else y


class CompressedConv1d(CompressedConv, nn.Conv1d):  # type: ignore[override]  # weight is computed
    """A compressed ``nn.Conv1d``, see :class:`CompressedLayer`, with kernels 1 and K."""


class CompressedConv2d(CompressedConv, nn.Conv2d):  # type: ignore[override]  # weight is computed
    """A compressed ``nn.Conv2d``, see :class:`CompressedLayer`, with kernels 1×K2 and K1×1."""


KINDS: dict[type, type] = {
    nn.Linear: CompressedLinear,
    nn.Conv1d: CompressedConv1d,
    nn.Conv2d: CompressedConv2d,
}


def count_multiplications(layer: Any, rank: int) -> int:
    """Count the multiplications of thin layers for one output position, with the cost of the values between them."""
    rows, columns = matrix_shape(layer.shape if isinstance(layer, CompressedLayer) else layer.weight.shape)
    # the first convolution also computes the rows that the second one strides over
    times = layer.stride[0] * layer.groups if isinstance(layer, _ConvNd) else 1
    return int(rank * (rows + times * (columns + TRANSFER_COST)))


def compressed_tensors(factors: LowRank, sparse_part: Tensor) -> Params:
    """Build the tensors of a :class:`CompressedLayer` from the factors of its matrix and its sparse tensor."""
    shape, rank = sparse_part.shape, factors.rank
    return {
        "left": unmatricize(factors.left, torch.Size((shape[0], rank, *shape[2:3], 1)[: sparse_part.ndim])),
        "right": unmatricize(factors.right, torch.Size((rank, shape[1], 1, *shape[3:])[: sparse_part.ndim])),
        "values": sparse_part[sparse_part != 0],
        **sparse_indices(sparse_part != 0),
    }


def sparse_indices(mask: Tensor) -> Params:
    """Build indices and starts of a :class:`CompressedLayer` from the mask of its sparse tensor."""
    rows = mask.reshape(len(mask), -1)
    columns = rows.nonzero(as_tuple=True)[1]
    starts = functional.pad(rows.count_nonzero(1).cumsum(0), (1, 0)).int()
    return {"indices": columns.int(), "starts": starts if len(columns) else starts[:0]}


def count_index_bytes(count: int, shape: torch.Size) -> tuple[int, int]:
    """Count the bytes of the positions of ``count`` values: as int32 indices with row starts, and as a bitmask."""
    return 4 * (count + shape[0] + 1) if count else 0, -(-shape.numel() // 8)


def compress_layer(layer: Any, tensors: Params) -> None:
    """Turn a plain layer into a compressed one.

    The object stays the same, with its references and hooks.
    """
    shape, device = layer.weight.shape, layer.weight.device
    if type(layer) is not nn.Linear:
        layer.convolutions = _thin_convolution(layer, False), _thin_convolution(layer, True)
    del layer.weight
    layer.__class__, layer.shape = KINDS[type(layer)], shape
    for name, t in tensors.items():
        value = copy_row_major(t, device)
        if value.is_floating_point():
            layer.register_parameter(name, nn.Parameter(value, requires_grad=False))
        else:
            layer.register_buffer(name, value)


def copy_row_major(t: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor with the strides of a new tensor, also in dimensions of size 1.

    ``contiguous`` and ``clone`` keep the strides of such dimensions, and a convolution chooses its algorithm by
    them. A tensor from a file has new strides, so with other strides the layer would round differently.
    """
    return torch.empty(t.shape, dtype=t.dtype, device=device).copy_(t.detach())


def _thin_convolution(layer: Any, is_vertical: bool) -> _ConvNd:
    """Create the convolution over the kernel's first dimension alone, or over the others alone, without data."""

    def pick(values: Any, fill: int) -> Any:
        return [v if (d == 0) == is_vertical else fill for d, v in enumerate(values)]

    groups = layer.groups if is_vertical else 1
    kernel, stride, dilation = (pick(v, 1) for v in (layer.kernel_size, layer.stride, layer.dilation))
    padding = layer.padding if isinstance(layer.padding, str) else pick(layer.padding, 0)
    settings = kernel, stride, padding, dilation, groups, False, layer.padding_mode
    return cast("_ConvNd", type(layer)(groups, groups, *settings, device="meta"))
