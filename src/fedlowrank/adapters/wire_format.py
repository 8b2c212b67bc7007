"""Factor pairs on a lossy wire.

What a receiver gets is what the server must later subtract, so both use these functions.

The receiver gets factors of the type that the sender's had: a client trains in the type of its module.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from ..core.errors import TaskError
from ..core.tree import tree_dataclass
from ..linalg.pair import Factors, Pair

WireType = Literal["float32", "bfloat16", "int8"]
"""float32: as they are, in their own type; bfloat16: rounded to nearest; int8: :class:`Quantized`."""

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""Types that factors can have, by the names that they have on the wire."""

LEVELS = 127
_BITS = 17
"""Significant bits of a scale: times a level of 7 bits it is exact in the 24 bits of a float32."""
_SMALLEST = 2.0**-133
"""The least scale, of which 17 bits are exact in a float32."""


@tree_dataclass
class Rounded:
    """A factor pair B ``[d, r]`` and A ``[r, k]`` in bfloat16, with the name of the type that it had."""

    b: Tensor
    a: Tensor
    dtype: str


@tree_dataclass
class Quantized:
    """A factor pair in int8, with one scale for each rank component of either factor.

    An entry x becomes the integer nearest to x / scale, so it is off by at most scale / 2; zeros stay zeros.

    Attributes:
        b: ``[d, r]``, int8 in ±127.
        b_scale: float32 ``[r]``, one for each column of B.
        a: ``[r, k]``, int8 in ±127.
        a_scale: float32 ``[r]``, one for each row of A.
        dtype: name of the type that the factors had.
    """

    b: Tensor
    b_scale: Tensor
    a: Tensor
    a_scale: Tensor
    dtype: str


PackedFactors = dict[str, "Pair | Rounded | Quantized"]
"""Factor pairs by layer name, as they are sent."""


def pack_factors(pairs: Mapping[str, Pair], wire: WireType) -> PackedFactors:
    """Factor pairs in the form in which they are sent.

    Args:
        pairs: by layer name, of any floating-point type.
        wire: the form. ``"float32"`` changes nothing, so that pairs in float64 or bfloat16 stay so.

    Returns:
        A tree. Packing what :func:`unpack_factors` gives loses nothing more, but for int8 of factors in half
        precision, to which the receiver rounds.

    Raises:
        TaskError: if a value is not finite, or too large for a lossy form; if factors are of a type that is
            not in :data:`DTYPES`.
    """
    if wire == "float32":
        return dict(pairs)
    pack = _round_pair if wire == "bfloat16" else _quantize_pair
    return {name: pack(name, pair) for name, pair in pairs.items()}


def unpack_factors(packed_factors: Mapping[str, Pair | Rounded | Quantized]) -> Factors:
    """The factors that the receiver of :func:`pack_factors` works with, in their original dtype.

    Raises:
        TaskError: if a type has a name that is not in :data:`DTYPES`.
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
    b, a = pair.b.to(torch.bfloat16), pair.a.to(torch.bfloat16)
    for t, factor in ((b, "B"), (a, "A")):
        if not bool(t.isfinite().all()):
            raise _range_error(name, factor, "bfloat16")
    dtype = _dtype(name, pair)
    return Pair(b, a) if dtype == "bfloat16" else Rounded(b, a, dtype)


def _quantize_pair(name: str, pair: Pair) -> Quantized:
    b, b_scale = _quantize_factor(pair.b, 0, name, "B")
    a, a_scale = _quantize_factor(pair.a, 1, name, "A")
    return Quantized(b, b_scale.flatten(), a, a_scale.flatten(), _dtype(name, pair))


def _quantize_factor(x: Tensor, dim: int, name: str, factor: str) -> tuple[Tensor, Tensor]:
    """Integers and scales ``[1, r]`` or ``[r, 1]``, for each slice along ``dim``."""
    x = x.detach().double()
    max_magnitude = x.abs().amax(dim, keepdim=True)
    mantissa, exponent = torch.frexp(max_magnitude / LEVELS)
    # Rounded up to 17 bits, a scale times a level is exact in float32: the bound then holds for what is
    # received, and quantizing that once more finds the same scale.
    scale = torch.ldexp((mantissa * 2**_BITS).ceil() / 2**_BITS, exponent)
    scale = torch.where(max_magnitude > 0, scale.clamp(min=_SMALLEST), 0.0)
    # asked of the largest entry too, for a NaN is not > 0
    if not bool((max_magnitude.isfinite() & (scale * LEVELS <= torch.finfo(torch.float32).max)).all()):
        raise _range_error(name, factor, "int8")
    levels = torch.where(scale > 0, x / scale, 0.0).round()
    return levels.clamp(-LEVELS, LEVELS).to(torch.int8), scale.float()


def _range_error(name: str, factor: str, wire: str) -> TaskError:
    return TaskError(
        f"{factor} of the layer {name!r} has values that are not finite, or too large for {wire}; lower "
        "the learning rate, clip the gradient, or set the wire to 'float32'."
    )
