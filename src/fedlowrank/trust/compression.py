"""Compression of an update in stages, with error feedback.

An *update* is a dict of floating tensors by path. A stage makes fewer or smaller tensors of it; stages run
from left to right and are undone from right to left. Decoding calls no matrix product, whose order of sums
depends on the machine: a client that decodes its own message has the server's bits.

The form of a compressed update (paths, types, shapes) depends on that of the update and on the stages, never
on values. All is computed on the CPU.
"""

# ruff: noqa: ARG002, D102 - Stage documents what all stages do, and not all need every argument

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..adapters.wire_format import DTYPES, LEVELS
from ..core import tree
from ..core.choices import check_bounds
from ..core.errors import ConfigError, TaskError, did_you_mean
from ..core.key import Key
from ..core.tree import Params, TreeError
from ..linalg.randomized_svd import leading_triplets

REAL = torch.float64
# of int8: 17 significant bits times the 7 of a level are exact in the 24 of a float32, down to this scale
_SCALE_BITS, _SMALLEST_SCALE = 17, 2.0**-133


class Stage(ABC):
    """One step of compression, a frozen dataclass of its parameters."""

    word: ClassVar[str]

    @property
    def name(self) -> str:
        """The stage as :func:`parse_stages` reads it."""
        return ":".join([self.word, *map(str, vars(self).values())])

    @abstractmethod
    def encode(self, values: Params, key: Key) -> tuple[Params, Any]:
        """Compress finite tensors, given in the order of paths.

        Returns values for the next stage, and a *side*: a tree of what else :meth:`decode` needs. Raises
        TaskError if a value is too large.
        """

    @abstractmethod
    def decode(self, values: Params, side: Any, like: Params) -> Params:
        """Undo :meth:`encode`.

        Takes finite numbers in the form that :meth:`encode` gives for ``like``, whose own are not read.
        Raises TreeError if ``side`` holds impossible positions.
        """


@dataclass(frozen=True)
class BFloat16(Stage):
    """Round to the nearest bfloat16; tensors of a type of two bytes stay as they are."""

    word = "bfloat16"

    def encode(self, values: Params, key: Key) -> tuple[Params, Any]:
        return {p: x.to(torch.bfloat16) if x.element_size() > 2 else x for p, x in values.items()}, ()

    def decode(self, values: Params, side: Any, like: Params) -> Params:
        return _shape_as([values[path] for path in like], like)


@dataclass(frozen=True)
class Int8(Stage):
    """Round at random to one of the two nearest multiples of a scale, so that the mean is the value itself.

    A row is a slice along the first dimension of a tensor of two or more, and the whole of any other tensor.
    Its scale is max|row| / 127, rounded up to 17 bits. Side: the scales, float32 ``[rows of all tensors]``.
    """

    word = "int8"

    def encode(self, values: Params, key: Key) -> tuple[Params, Any]:
        levels: Params = {}
        scales = [torch.zeros(0)]
        for path, x in values.items():
            rows = _as_rows(x).to(REAL)
            largest = rows.abs().amax(1) if rows.shape[1] else rows.new_zeros(len(rows))
            mantissa, exponent = torch.frexp(largest / LEVELS)
            scale = torch.ldexp((mantissa * 2**_SCALE_BITS).ceil() / 2**_SCALE_BITS, exponent)
            scale = torch.where(largest > 0, scale.clamp(min=_SMALLEST_SCALE), 0.0)
            if bool((scale * LEVELS > torch.finfo(torch.float32).max).any()):
                raise TaskError(f"the update of {path!r} has values that are too large for int8")
            # a row of zeros is divided by 1
            share = rows / torch.where(scale > 0, scale, 1.0)[:, None]
            uniform = torch.rand(rows.shape, dtype=REAL, generator=(key / "int8" / path).generator())
            level = share.floor() + (uniform < share - share.floor())
            levels[path] = level.to(torch.int8).reshape(x.shape)
            scales.append(scale.float())
        return levels, torch.cat(scales)

    def decode(self, values: Params, side: Any, like: Params) -> Params:
        rows = [_as_rows(values[path]) for path in like]
        scales = side.split([len(r) for r in rows])
        return _shape_as([r.float() * scale[:, None] for r, scale in zip(rows, scales, strict=True)], like)


@dataclass(frozen=True)
class TopK(Stage):
    """Keep the k = ⌈share · n⌉ entries of largest magnitude of all n together; of equal ones the first.

    Entries are counted through the tensors in the order of paths. The kept ones become one vector ``[k]``.
    Side: their positions, as a mask, a bit each ``[n]``, or as ascending indices, int32 ``[k]``, whichever is
    smaller.

    Attributes:
        share: of the entries, in (0, 1].
    """

    share: float
    word = "top_k"

    def __post_init__(self) -> None:
        check_bounds(self, {"share": "> 0 and <= 1"}, "top_k")

    def encode(self, values: Params, key: Key) -> tuple[Params, Any]:
        dtype = functools.reduce(torch.promote_types, [x.dtype for x in values.values()] or [torch.float32])
        flat = torch.cat([torch.zeros(0, dtype=dtype), *[x.flatten() for x in values.values()]])
        # the share as it is written, for 0.07 * 100 is more than 7 in floating point
        n, k = len(flat), math.ceil(Fraction(str(self.share)) * len(flat))
        mask = torch.ones(n, dtype=torch.bool)
        if k < n:
            magnitude = flat.abs()
            threshold = magnitude.kthvalue(n - k + 1).values
            mask = magnitude > threshold
            ties = (magnitude == threshold).nonzero().flatten()
            mask[ties[: k - int(mask.sum())]] = True
        as_mask = -(-n // 8) <= 4 * k or n > 2**31
        return {"entries": flat[mask]}, mask if as_mask else mask.nonzero().flatten().int()

    def decode(self, values: Params, side: Any, like: Params) -> Params:
        entries, sizes = values["entries"], [x.numel() for x in like.values()]
        at = side.nonzero().flatten() if side.dtype == torch.bool else side.long()
        flat = entries.new_zeros(sum(sizes))
        if len(at) != len(entries):
            raise TreeError(f"top_k: {len(at)} positions are marked for {len(entries)} entries")
        if len(at) and (at[0] < 0 or at[-1] >= len(flat) or bool((at[1:] <= at[:-1]).any())):
            raise TreeError(f"top_k: the positions are not ascending numbers from 0 to {len(flat) - 1}")
        flat[at] = entries
        return _shape_as(flat.split_with_sizes(sizes), like)


@dataclass(frozen=True)
class LowRank(Stage):
    """Truncate the singular value decomposition U S Vᵀ of each tensor as a matrix ``[d0, rest]``.

    A tensor becomes ``PATH/left``, (U √S)ᵀ ``[rank, d0]``, and ``PATH/right``, (V √S)ᵀ ``[rank, rest]``, so
    rows are singular vectors. If these would be no smaller, the tensor stays as it is, as ``PATH/whole``.

    Attributes:
        rank: of all factors, at least 1; those of a tensor of lower rank are zero-padded.
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
            largest = matrix.abs().max()
            if largest > 0:
                # divided, for the decomposition squares, which numbers above 1e154 do not survive
                u, s, v = leading_triplets(matrix / largest, self.rank)
                root = (s * largest).sqrt()
                left[: len(s)], right[: len(s)] = (u * root).mT, (v * root).mT
        return out, ()

    def decode(self, values: Params, side: Any, like: Params) -> Params:
        out: list[Tensor] = []
        for path, x in like.items():
            if not self._is_factored(x):
                out.append(values[f"{path}/whole"])
                continue
            dtype = torch.promote_types(x.dtype, torch.float32)
            left, right = (values[f"{path}/{name}"].to(dtype) for name in ("left", "right"))
            # not by a matrix product: see the head of this file
            out.append(torch.zeros(left.shape[1], right.shape[1], dtype=dtype))
            for column, row in zip(left, right, strict=True):
                out[-1] += column[:, None] * row
        return _shape_as(out, like)

    def _is_factored(self, x: Tensor) -> bool:
        return x.ndim >= 2 and self.rank * sum(_as_rows(x).shape) < x.numel()


def _as_rows(x: Tensor) -> Tensor:
    rows = x.shape[0] if x.ndim >= 2 else 1
    return x.reshape(rows, x.numel() // max(rows, 1))


def _shape_as(parts: Iterable[Tensor], like: Params) -> Params:
    return {p: part.to(x.dtype).reshape(x.shape) for part, (p, x) in zip(parts, like.items(), strict=True)}


_STAGES: dict[str, tuple[Any, Any, int, str]] = {
    "low_rank": (LowRank, int, 0, "low_rank:RANK with a whole number of at least 1, such as low_rank:4"),
    "top_k": (TopK, float, 1, "top_k:SHARE with a share in (0, 1], such as top_k:0.05"),
    "bfloat16": (BFloat16, None, 2, "bfloat16"),
    "int8": (Int8, None, 2, "int8"),
}
"""By name: the class, the type of its number, its place among stages, how it is written."""


def parse_stages(text: str) -> tuple[Stage, ...]:
    """Stages from a text such as ``"top_k:0.05 + int8"``; none from an empty one.

    Raises:
        ConfigError: if a name is unknown, a number is missing, superfluous or out of range, or a stage cannot
            follow the one before it.
    """
    stages: list[Stage] = []
    last, last_place = "", -1
    for part in text.split("+") if text.strip() else []:
        word, colon, number = part.strip().partition(":")
        if word not in _STAGES:
            raise ConfigError(f"compression: {word!r} is no stage. {did_you_mean(word, _STAGES)}")
        kind, convert, place, usage = _STAGES[word]
        try:
            if bool(colon) != (convert is not None):
                raise ValueError
            stages.append(kind(convert(number)) if convert else kind())
        except (ValueError, ConfigError):
            raise ConfigError(f"compression: {part.strip()!r} is no stage; write {usage}") from None
        if place <= last_place:
            order = "low_rank, top_k, then bfloat16 or int8, each at most once"
            raise ConfigError(f"compression: {word} cannot follow {last}. The order is {order}")
        last, last_place = word, place
    return tuple(stages)


def is_unbiased(stages: tuple[Stage, ...]) -> bool:
    """Whether the mean of what is decoded is the update: so for int8 and for no stage.

    Updates in half precision are rounded to nearest once more, which this leaves out.
    """
    return all(isinstance(stage, Int8) for stage in stages)


@tree.tree
class Compressed:
    """An update as it is sent.

    Attributes:
        values: what the last stage gave, by path.
        sides: what else each stage needs for decoding, in the order of stages.
    """

    values: Params
    sides: list[Any]


def compress(stages: tuple[Stage, ...], update: Params, key: Key) -> Compressed:
    """Compress an update.

    Args:
        stages: of :func:`parse_stages`.
        update: finite tensors in float64, float32, bfloat16 or float16, of any shape.
        key: of this update's random numbers.

    Raises:
        TaskError: if a tensor is of another type, or a value is not finite or too large for a stage.
    """
    *_, last = _encode(stages, update, key)
    return last


def stage_bytes(stages: tuple[Stage, ...], update: Params, key: Key) -> dict[str, int]:
    """Bytes of the encoded update: by itself as ``"update"``, then after each stage, by the stage's name.

    Raises TaskError as :func:`compress` does.
    """
    names = ["update", *(stage.name for stage in stages)]
    _, *steps = _encode(stages, update, key)
    return dict(zip(names, map(tree.encoded_size, [update, *steps]), strict=True))


def _encode(stages: tuple[Stage, ...], update: Params, key: Key) -> Iterator[Compressed]:
    """The update as it is before the first stage and after each."""
    for path, x in update.items():
        if not isinstance(x, Tensor) or x.dtype not in DTYPES.values():
            found = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise TaskError(f"the update of {path!r} is of type {found}; known are {', '.join(DTYPES)}")
    step = Compressed({path: update[path].detach().cpu() for path in sorted(update)}, [])
    for stage in (None, *stages):
        if stage is not None:
            values, side = stage.encode(step.values, key)
            step = Compressed(values, [*step.sides, side])
        bad = tree.not_finite(step.values)
        if bad is not None:
            what = f"too large for {stage.name}" if stage else "not finite"
            raise TaskError(
                f"the update has values at {bad} that are {what}; lower the learning rate, or clip"
            )
        yield step


@functools.lru_cache(maxsize=256)
def _forms(stages: tuple[Stage, ...], form: Any) -> list[Compressed]:
    """Steps of :func:`_encode` for an update of a form, as tensors that take no memory."""
    zeros = {path: torch.zeros(shape, dtype=dtype) for path, dtype, shape in form}
    steps = list(_encode(stages, zeros, Key(())))
    return [tree.map(lambda t: t.new_zeros(()).expand(t.shape), step) for step in steps]


def decompress(stages: tuple[Stage, ...], compressed: Compressed, like: Params) -> Params:
    """Undo :func:`compress`, on whatever a peer may have sent.

    Args:
        stages: by which it was compressed.
        compressed: the decoded message.
        like: tensors of the types, shapes and devices of the update.

    Returns:
        A dict like ``like``, the same bits on every machine.

    Raises:
        TreeError: if the message has another form than that of such an update, or holds impossible positions
            or numbers that are not finite.
    """
    forms = _forms(stages, tuple([(path, like[path].dtype, like[path].shape) for path in sorted(like)]))
    _check_form(forms[-1], compressed)
    _check_finite(compressed)
    values = compressed.values
    for stage, side, step in zip(stages[::-1], compressed.sides[::-1], forms[-2::-1], strict=True):
        values = stage.decode(values, side, step.values)
    _check_finite(values)
    return {path: values[path].to(x.device) for path, x in like.items()}


def _check_form(expected: Any, found: Any) -> None:
    ordered = tree.map(lambda _, t: t, expected, found)
    for (path, a), b in zip(tree.leaves(expected), tree.tensors(ordered), strict=True):
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            want, got = (f"{str(t.dtype)[6:]} {list(t.shape)}" for t in (a, b))
            raise TreeError(f"{path} is {got} where {want} is expected")


def _check_finite(value: Any) -> None:
    path = tree.not_finite(value)
    if path is not None:
        raise TreeError(f"a compressed update has numbers at {path} that are not finite")


def with_feedback(
    stages: tuple[Stage, ...], update: Params, residual: Params | None, key: Key
) -> tuple[Compressed, Params]:
    """Compress an update and what earlier ones lost, e ← D + e - decode(encode(D + e)).

    Source: Karimireddy et al., Error Feedback Fixes SignSGD and Other Gradient Compression Schemes, 2019.

    Args:
        stages: of :func:`parse_stages`.
        update: D.
        residual: e, of the form of the update; None in the first round.
        key: of this update's random numbers.

    Returns:
        The message and the next residual, which holds once the message has been accepted.

    Raises:
        TaskError: see :func:`compress`.
        TreeError: if the residual has another form than the update.
    """
    total = tree.canonical(update)
    if residual is not None:
        _check_form(update, residual)
        total = tree.add(total, residual)
    compressed = compress(stages, total, key)
    return compressed, tree.sub(total, decompress(stages, compressed, total))
