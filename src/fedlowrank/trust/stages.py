"""The stages that compress an update: bfloat16, int8, the largest entries, low rank.

An *update* is a dict of floating-point tensors by path; a stage makes fewer or smaller tensors from it. The form of
its result depends on the form of the update, never on values. Decoding uses no matrix product, because its order of
sums depends on the machine: a client that decodes its own message gets the same bits as the server.
"""

# ruff: noqa: ARG002, D102 - Stage documents what all stages do, and not all need every argument

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..adapters.wire_format import LEVELS
from ..core.arguments.bounds import check_bounds
from ..core.arguments.shares import multiply_share
from ..core.errors import ConfigError, TaskError
from ..core.key import Key
from ..core.tree import Params, TreeError
from ..linalg.randomized_svd import leading_triplets

REAL = torch.float64
# for int8: the product of 17 significant bits and the 7 of a level is exact in the 24 of a float32, down to this scale
_SCALE_BITS, _SMALLEST_SCALE = 17, 2.0**-133


class Stage(ABC):
    """One step of compression, a frozen dataclass of its parameters."""

    word: ClassVar[str]

    @property
    def name(self) -> str:
        """The stage as text, in the form that :func:`.compression.parse_stages` reads."""
        return ":".join([self.word, *map(str, vars(self).values())])

    @abstractmethod
    def encode(self, values: Params, key: Key) -> tuple[Params, Any]:
        """Compress finite tensors, given in the order of paths.

        Returns values for the next stage, and a *side*: a tree of what else :meth:`decode` needs. Raises
        TaskError if a value is too large.
        """

    @abstractmethod
    def decode(self, values: Params, side: Any, template: Params) -> Params:
        """Undo :meth:`encode`.

        Takes finite numbers in the form that :meth:`encode` returns for ``template``, whose values are not read.
        Raises TreeError if ``side`` holds impossible positions.
        """


@dataclass(frozen=True)
class BFloat16(Stage):
    """Round to the nearest bfloat16; tensors of a dtype of two bytes stay as they are."""

    word = "bfloat16"

    def encode(self, values: Params, key: Key) -> tuple[Params, Any]:
        return {p: x.to(torch.bfloat16) if x.element_size() > 2 else x for p, x in values.items()}, ()

    def decode(self, values: Params, side: Any, template: Params) -> Params:
        return _shape_as([values[path] for path in template], template)


@dataclass(frozen=True)
class Int8(Stage):
    """Round stochastically to one of the two nearest multiples of a scale, so that the mean is the value itself.

    A row is a slice along the first dimension of a tensor with two or more dimensions, but along the shorter dimension of a
    matrix (for LoRA's factors, that is the rank), and the whole of any other tensor. Its scale is max|row| / 127,
    rounded up to 17 bits. Side: the scales, float32 ``[rows of all tensors]``.
    """

    word = "int8"

    def encode(self, values: Params, key: Key) -> tuple[Params, Any]:
        levels: Params = {}
        scales = [torch.zeros(0)]
        for path, x in values.items():
            rows = _as_scaled_rows(x).to(REAL)
            row_maxima = rows.abs().amax(1) if rows.shape[1] else rows.new_zeros(len(rows))
            mantissa, exponent = torch.frexp(row_maxima / LEVELS)
            scale = torch.ldexp((mantissa * 2**_SCALE_BITS).ceil() / 2**_SCALE_BITS, exponent)
            scale = torch.where(row_maxima > 0, scale.clamp(min=_SMALLEST_SCALE), 0.0)
            if bool((scale * LEVELS > torch.finfo(torch.float32).max).any()):
                raise TaskError(f"the update of {path!r} has values that are too large for int8")
            # divide a row of zeros by 1
            share = rows / torch.where(scale > 0, scale, 1.0)[:, None]
            uniform = torch.rand(rows.shape, dtype=REAL, generator=(key / "int8" / path).generator())
            level = share.floor() + (uniform < share - share.floor())
            levels[path] = _from_scaled_rows(level.to(torch.int8), x)
            scales.append(scale.float())
        return levels, torch.cat(scales)

    def decode(self, values: Params, side: Any, template: Params) -> Params:
        rows = [_as_scaled_rows(values[path]) for path in template]
        scales = side.split([len(r) for r in rows])
        scaled_rows = [r.float() * scale[:, None] for r, scale in zip(rows, scales, strict=True)]
        return _shape_as(
            [_from_scaled_rows(r, values[path]) for r, path in zip(scaled_rows, template, strict=True)],
            template,
        )


@dataclass(frozen=True)
class TopK(Stage):
    """Keep the k = ⌈share · n⌉ entries of largest magnitude among all n; among equal ones, the first.

    Entries are counted through the tensors in the order of paths. The kept ones form one vector ``[k]``.
    Side: their positions, either as a bitmask ``[n]`` or as ascending indices, int32 ``[k]``, whichever is
    smaller.

    Attributes:
        share: share of the entries to keep, in (0, 1].
    """

    share: float
    word = "top_k"

    def __post_init__(self) -> None:
        check_bounds(self, {"share": "> 0 and <= 1"}, "top_k")

    def encode(self, values: Params, key: Key) -> tuple[Params, Any]:
        dtype = functools.reduce(torch.promote_types, [x.dtype for x in values.values()] or [torch.float32])
        flat = torch.cat([torch.zeros(0, dtype=dtype), *[x.flatten() for x in values.values()]])
        n, k = len(flat), math.ceil(multiply_share(self.share, len(flat)))
        mask = torch.ones(n, dtype=torch.bool)
        if k < n:
            magnitude = flat.abs()
            threshold = magnitude.kthvalue(n - k + 1).values
            mask = magnitude > threshold
            ties = (magnitude == threshold).nonzero().flatten()
            mask[ties[: k - int(mask.sum())]] = True
        is_mask_smaller = -(-n // 8) <= 4 * k or n > 2**31
        return {"entries": flat[mask]}, mask if is_mask_smaller else mask.nonzero().flatten().int()

    def decode(self, values: Params, side: Any, template: Params) -> Params:
        entries, sizes = values["entries"], [x.numel() for x in template.values()]
        indices = side.nonzero().flatten() if side.dtype == torch.bool else side.long()
        flat = entries.new_zeros(sum(sizes))
        if len(indices) != len(entries):
            raise TreeError(f"top_k: {len(indices)} positions are marked for {len(entries)} entries")
        if len(indices) and (
            indices[0] < 0 or indices[-1] >= len(flat) or bool((indices[1:] <= indices[:-1]).any())
        ):
            raise TreeError(f"top_k: the positions are not ascending numbers from 0 to {len(flat) - 1}")
        flat[indices] = entries
        return _shape_as(flat.split_with_sizes(sizes), template)


@dataclass(frozen=True)
class LowRankStage(Stage):
    """Truncate the singular value decomposition U S Vᵀ of each tensor as a matrix ``[d0, rest]``.

    A tensor becomes ``PATH/left``, (U √S)ᵀ ``[rank, d0]``, and ``PATH/right``, (V √S)ᵀ ``[rank, rest]``, whose rows are
    scaled singular vectors. If these would not be smaller, the tensor stays as it is, as ``PATH/whole``.

    Attributes:
        rank: rank of all factors, at least 1; those of a tensor of lower rank are zero-padded.
    """

    rank: int
    word = "low_rank"

    def __post_init__(self) -> None:
        if type(self.rank) is not int or self.rank < 1:
            raise ConfigError(f"low_rank: rank must be a whole number of at least 1; it is {self.rank!r}")

    def encode(self, values: Params, key: Key) -> tuple[Params, Any]:
        out: Params = {}
        for path, x in values.items():
            if not self._is_factored(x):
                out[f"{path}/whole"] = x
                continue
            matrix = _as_rows(x).to(REAL)
            left = out[f"{path}/left"] = x.new_zeros(self.rank, matrix.shape[0])
            right = out[f"{path}/right"] = x.new_zeros(self.rank, matrix.shape[1])
            max_value = matrix.abs().max()
            if max_value > 0:
                # scaled to at most 1, because the decomposition squares numbers, which overflows above 1e154
                u, s, v = leading_triplets(matrix / max_value, self.rank)
                root = (s * max_value).sqrt()
                left[: len(s)], right[: len(s)] = (u * root).mT, (v * root).mT
        return out, ()

    def decode(self, values: Params, side: Any, template: Params) -> Params:
        out: list[Tensor] = []
        for path, x in template.items():
            if not self._is_factored(x):
                out.append(values[f"{path}/whole"])
                continue
            dtype = torch.promote_types(x.dtype, torch.float32)
            left, right = (values[f"{path}/{name}"].to(dtype) for name in ("left", "right"))
            # computed without a matrix product: see the head of this file
            out.append(torch.zeros(left.shape[1], right.shape[1], dtype=dtype))
            for column, row in zip(left, right, strict=True):
                out[-1] += column[:, None] * row
        return _shape_as(out, template)

    def _is_factored(self, x: Tensor) -> bool:
        return x.ndim >= 2 and self.rank * sum(_as_rows(x).shape) < x.numel()


def _as_rows(x: Tensor) -> Tensor:
    rows = x.shape[0] if x.ndim >= 2 else 1
    return x.reshape(rows, x.numel() // max(rows, 1))


def _is_tall(x: Tensor) -> bool:
    return x.ndim == 2 and 0 < x.shape[1] < x.shape[0]


def _as_scaled_rows(x: Tensor) -> Tensor:
    """The tensor as rows, each of which has its own scale."""
    return x.mT if _is_tall(x) else _as_rows(x)


def _from_scaled_rows(rows: Tensor, template: Tensor) -> Tensor:
    return rows.mT.contiguous() if _is_tall(template) else rows.reshape(template.shape)


def _shape_as(tensors: Iterable[Tensor], template: Params) -> Params:
    return {
        p: tensor.to(x.dtype).reshape(x.shape)
        for tensor, (p, x) in zip(tensors, template.items(), strict=True)
    }
