"""Layers whose weight is a product of thin factors plus a sparse tensor: linear ones and convolutions.

A linear layer of factors is two thin ones; a convolution is one of kernel 1×K2 to r channels, then one of
K1×1. The first has no bias, so stride, dilation and padding of any mode go dimension by dimension to the one
or the other. All groups of a convolution share ``right``: they are folded into the batch for the first one.
Rank 0 without a sparse tensor gives the bias, or zeros.

How the sparse tensor p computes is measured (one core with AVX-512, float32, densities 1 to 10 %). In a
linear layer, weighted sums of rows (``embedding_bag``) take 0.05 to 0.3 of the dense time at batch 20, less
than a sparse tensor or a p made dense at every call; at batch 1 they gain below 5 %. In a convolution either
needs a copy of every patch: 5 dense convolutions at 64 channels, level at 512. So there the dense weight is
made at every call, of w + p, or of p beside thin layers where the map is small; a convolution with a sparse
part saves bytes and *no time*.
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
"""Multiplications that cost as much as one value between two thin layers; 135 to 210 measured."""


class CompressedLayer(nn.Module):
    """A layer whose weight is left · right + a sparse tensor; rank, or number of values, may be 0.

    Attributes:
        shape: of the weight.
        left: weight of the second thin layer, ``[O, r]`` or ``[O, r, K1, 1]``.
        right: of the first, ``[r, I]`` or ``[r, I, 1, K2]``.
        values: of the sparse tensor, row by row (a row makes one output).
        indices: int32, place of each value in its row.
        starts: int32 ``[O + 1]``, where each row begins in ``values``, and its end; empty without values.
    """

    shape: torch.Size
    left: Tensor
    right: Tensor
    values: Tensor
    indices: Tensor
    starts: Tensor

    def sparse(self) -> Tensor:
        """The sparse tensor, made dense."""
        return self._scatter(self.values)

    def mask(self) -> Tensor:
        """Where the sparse tensor has values, in the shape of the weight."""
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
    """See :class:`CompressedLayer`."""

    def forward(self, x: Tensor) -> Tensor:
        """Outputs ``[..., O]`` of inputs ``[..., I]``."""
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
    """See :class:`CompressedLayer`; ``convolutions`` are the two convolutions without their weights."""

    convolutions: tuple[_ConvNd, _ConvNd]

    def forward(self, x: Tensor) -> Tensor:
        """Feature maps of inputs ``[b, I, ...]`` or ``[I, ...]``."""
        rank, n, (horizontal, vertical) = len(self.right), len(self.kernel_size), self.convolutions
        if not rank and not len(self.values):
            # the convolution itself, without data, knows and checks shapes
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
    """See :class:`CompressedLayer`; kernels 1 and K."""


class CompressedConv2d(CompressedConv, nn.Conv2d):  # type: ignore[override]  # weight is computed
    """See :class:`CompressedLayer`; kernels 1×K2 and K1×1."""


KINDS: dict[type, type] = {
    nn.Linear: CompressedLinear,
    nn.Conv1d: CompressedConv1d,
    nn.Conv2d: CompressedConv2d,
}


def count_multiplications(layer: Any, rank: int) -> int:
    """Multiplications of thin layers for one output position, with the cost of the values between them."""
    rows, columns = matrix_shape(layer.shape if isinstance(layer, CompressedLayer) else layer.weight.shape)
    # the first convolution makes the rows that the second one strides over, too
    times = layer.stride[0] * layer.groups if isinstance(layer, _ConvNd) else 1
    return int(rank * (rows + times * (columns + TRANSFER_COST)))


def compressed_tensors(factors: LowRank, sparse_part: Tensor) -> Params:
    """Tensors of a :class:`CompressedLayer` from the factors of its matrix and its sparse tensor."""
    shape, rank = sparse_part.shape, factors.rank
    return {
        "left": unmatricize(factors.left, torch.Size((shape[0], rank, *shape[2:3], 1)[: sparse_part.ndim])),
        "right": unmatricize(factors.right, torch.Size((rank, shape[1], 1, *shape[3:])[: sparse_part.ndim])),
        "values": sparse_part[sparse_part != 0],
        **sparse_indices(sparse_part != 0),
    }


def sparse_indices(mask: Tensor) -> Params:
    """Indices and starts of a :class:`CompressedLayer`, from where its sparse tensor has values."""
    rows = mask.reshape(len(mask), -1)
    columns = rows.nonzero(as_tuple=True)[1]
    starts = functional.pad(rows.count_nonzero(1).cumsum(0), (1, 0)).int()
    return {"indices": columns.int(), "starts": starts if len(columns) else starts[:0]}


def count_index_bytes(count: int, shape: torch.Size) -> tuple[int, int]:
    """Bytes of the positions of ``count`` values: as int32 indices with row starts, and as a bitmask."""
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
    """A copy with the strides of a new tensor, also of dimensions of size 1.

    ``contiguous`` and ``clone`` keep those, and a convolution picks its algorithm by them. A tensor from a file
    has new ones, so with others its layer would round otherwise.
    """
    return torch.empty(t.shape, dtype=t.dtype, device=device).copy_(t.detach())


def _thin_convolution(layer: Any, is_vertical: bool) -> _ConvNd:
    """The convolution over the kernel's first dimension alone, or over the others alone, without data."""

    def pick(values: Any, fill: int) -> Any:
        return [v if (d == 0) == is_vertical else fill for d, v in enumerate(values)]

    groups = layer.groups if is_vertical else 1
    kernel, stride, dilation = (pick(v, 1) for v in (layer.kernel_size, layer.stride, layer.dilation))
    padding = layer.padding if isinstance(layer.padding, str) else pick(layer.padding, 0)
    settings = kernel, stride, padding, dilation, groups, False, layer.padding_mode
    return cast("_ConvNd", type(layer)(groups, groups, *settings, device="meta"))
