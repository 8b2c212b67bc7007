"""Wire format of factor pairs, exact or lossy.

The server must later subtract exactly the factors that a receiver decodes, so both use these functions. The
receiver gets factors in the type of the sender's factors: a client trains in the type of its module.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

import torch
from torch import Tensor

from ..core.errors import ConfigError, TaskError, did_you_mean
from ..core.tree import tree_dataclass
from ..linalg.pair import Factors, Pair

WireType = Literal["float32", "bfloat16", "int8"]
"""Type in which factors are sent: float32, in their own type; bfloat16, rounded to nearest; int8, :class:`Quantized`."""

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""Types that factors can have, by their names on the wire."""

LEVELS = 127
_BITS = 17
"""Significant bits of a scale: its product with a level of 7 bits is exact in the 24 bits of a float32."""
_SMALLEST = 2.0**-133
"""The smallest scale whose 17 bits are exact in a float32."""


@tree_dataclass
class Rounded:
    """A factor pair B ``[d, r]`` and A ``[r, k]`` in bfloat16, with the name of its original type."""

    b: Tensor
    a: Tensor
    dtype: str


@tree_dataclass
class Quantized:
    """A factor pair in int8, with one scale for each rank component of either factor.

    An entry x becomes the integer nearest to x / scale, so it is off by at most scale / 2; zeros stay zeros.

    Attributes:
        b: levels of B ``[d, r]``, int8 in ±127.
        b_scale: scale of each column of B, float32 ``[r]``.
        a: levels of A ``[r, k]``, int8 in ±127.
        a_scale: scale of each row of A, float32 ``[r]``.
        dtype: name of the factors' original type.
    """

    b: Tensor
    b_scale: Tensor
    a: Tensor
    a_scale: Tensor
    dtype: str


PackedFactors = dict[str, "Pair | Rounded | Quantized"]
"""Factor pairs in the form in which they are sent, by layer name."""


def pack_factors(pairs: Mapping[str, Pair], wire: WireType) -> PackedFactors:
    """Convert factor pairs to the form in which they are sent.

    Args:
        pairs: factor pairs by layer name, of any floating-point type.
        wire: type in which factors are sent. ``"float32"`` changes nothing: pairs in float64 or bfloat16 keep their
            type.

    Returns:
        The packed pairs, a tree. Packing the result of :func:`unpack_factors` again is exact, except in int8 for
        factors in half precision, to which the receiver rounds.

    Raises:
        TaskError: if a value is not finite, or too large for a lossy form, or if the type of factors is not in
            :data:`DTYPES`.
        ConfigError: if the wire is unknown.
    """
    if wire not in get_args(WireType):
        raise ConfigError(f"{wire!r} is no wire. {did_you_mean(str(wire), get_args(WireType))}")
    if wire == "float32":
        return dict(pairs)
    pack = _round_pair if wire == "bfloat16" else _quantize_pair
    packed_factors: PackedFactors = {name: pack(name, pair) for name, pair in pairs.items()}
    for name, pair in unpack_factors(packed_factors).items():
        # float16 has a smaller range than the lossy forms
        for t, factor in ((pair.b, "B"), (pair.a, "A")):
            if not bool(t.isfinite().all()):
                raise _range_error(name, factor, wire)
    return packed_factors


def unpack_factors(packed_factors: Mapping[str, Pair | Rounded | Quantized]) -> Factors:
    """Recover the factors that the receiver of :func:`pack_factors` uses, in their original dtype.

    Raises:
        TaskError: if the name of a type is not in :data:`DTYPES`.
    """
    return {name: p if isinstance(p, Pair) else _restore_pair(name, p) for name, p in packed_factors.items()}


def _restore_pair(name: str, p: Rounded | Quantized) -> Pair:
    if p.dtype not in DTYPES:
        raise TaskError(
            f"the factors of the layer {name!r} are of type {p.dtype!r}; known are {', '.join(DTYPES)}"
        )
    b, a = p.b, p.a
    if isinstance(p, Quantized):
        b, a = b.float() * p.b_scale, a.float() * p.a_scale[:, None]
    return Pair(b.to(DTYPES[p.dtype]), a.to(DTYPES[p.dtype]))


def _dtype(name: str, pair: Pair) -> str:
    dtype = str(torch.promote_types(pair.b.dtype, pair.a.dtype)).removeprefix("torch.")
    if dtype not in DTYPES:
        raise TaskError(
            f"the factors of the layer {name!r} are of type {dtype}; known are {', '.join(DTYPES)}"
        )
    return dtype


def _round_pair(name: str, pair: Pair) -> Pair | Rounded:
    b, a, dtype = pair.b.to(torch.bfloat16), pair.a.to(torch.bfloat16), _dtype(name, pair)
    return Pair(b, a) if dtype == "bfloat16" else Rounded(b, a, dtype)


def _quantize_pair(name: str, pair: Pair) -> Quantized:
    b, b_scale = _quantize_factor(pair.b, 0, name, "B")
    a, a_scale = _quantize_factor(pair.a, 1, name, "A")
    return Quantized(b, b_scale.flatten(), a, a_scale.flatten(), _dtype(name, pair))


def _quantize_factor(x: Tensor, dim: int, name: str, factor: str) -> tuple[Tensor, Tensor]:
    """Compute integers and scales ``[1, r]`` or ``[r, 1]``, one for each slice along ``dim``."""
    x = x.detach().double()
    max_magnitude = x.abs().amax(dim, keepdim=True)
    mantissa, exponent = torch.frexp(max_magnitude / LEVELS)
    # If a scale is rounded up to 17 bits, its product with a level is exact in float32: the bound then holds for
    # the received values, and quantizing these again gives the same scale.
    scale = torch.ldexp((mantissa * 2**_BITS).ceil() / 2**_BITS, exponent)
    scale = torch.where(max_magnitude > 0, scale.clamp(min=_SMALLEST), 0.0)
    # the largest entry is checked too, because a NaN is not > 0
    if not bool((max_magnitude.isfinite() & (scale * LEVELS <= torch.finfo(torch.float32).max)).all()):
        raise _range_error(name, factor, "int8")
    levels = torch.where(scale > 0, x / scale, 0.0).round()
    return levels.clamp(-LEVELS, LEVELS).to(torch.int8), scale.float()


def _range_error(name: str, factor: str, wire: str) -> TaskError:
    return TaskError(
        f"{factor} of the layer {name!r} has values that are not finite, or too large for {wire} or for their own type "
        "after rounding; lower "
        "the learning rate, clip the gradient, or set the wire to 'float32'."
    )
