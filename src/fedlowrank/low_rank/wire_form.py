"""Factor pairs on a lossy wire: what a receiver gets is what the server must later subtract, so both go through here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, get_args

import torch
from torch import Tensor

from ..errors import ConfigError, TaskError, did_you_mean
from ..tree import tree
from .pair import Factors, Pair

Wire = Literal["float32", "bfloat16", "int8"]
"""float32: as they are; bfloat16: rounded to nearest; int8: :class:`Quantised`."""

LEVELS = 127
_BITS = 17
"""Significant bits of a scale: times a level of 7 bits it is exact in the 24 bits of a float32."""
_SMALLEST = 2.0**-133
"""The least scale, of which 17 bits are exact in a float32."""


@tree
class Quantised:
    """A factor pair in int8, with one scale for each rank component of either factor.

    An entry x becomes the integer nearest to x / scale, so it is off by at most scale / 2; zeros stay zeros.

    Attributes:
        b: ``[d, r]``, int8 in ±127.
        b_scale: float32 ``[r]``, one for each column of B.
        a: ``[r, k]``, int8 in ±127.
        a_scale: float32 ``[r]``, one for each row of A.
    """

    b: Tensor
    b_scale: Tensor
    a: Tensor
    a_scale: Tensor


Packed = dict[str, "Pair | Quantised"]
"""Factor pairs by layer name, as they are sent."""


def pack(pairs: Mapping[str, Pair], wire: Wire) -> Packed:
    """Factor pairs in the form in which they are sent.

    Args:
        pairs: by layer name, of any floating-point type.
        wire: the form. ``"float32"`` changes nothing, so that pairs in float64 stay so.

    Returns:
        A tree; packing what :func:`unpack` gives loses nothing more.

    Raises:
        ConfigError: if the form is unknown.
        TaskError: if a value is not finite, or too large for a lossy form.
    """
    forms: dict[str, Callable[[str, Pair], Pair | Quantised]] = {
        "float32": lambda _, pair: pair,
        "bfloat16": _rounded,
        "int8": _quantised,
    }
    if wire not in forms:
        raise ConfigError(f"wire: {wire!r} is no choice. {did_you_mean(str(wire), get_args(Wire))}")
    return {name: forms[wire](name, pair) for name, pair in pairs.items()}


def unpack(packed: Mapping[str, Pair | Quantised]) -> Factors:
    """What the receiver of :func:`pack` works with: float32, or float64 where that was sent."""
    out: Factors = {}
    for name, p in packed.items():
        if isinstance(p, Quantised):
            out[name] = Pair(p.b.float() * p.b_scale, p.a.float() * p.a_scale[:, None])
        else:
            out[name] = Pair(*(t if t.dtype == torch.float64 else t.float() for t in (p.b, p.a)))
    return out


def _rounded(name: str, pair: Pair) -> Pair:
    b, a = pair.b.to(torch.bfloat16), pair.a.to(torch.bfloat16)
    for t, factor in ((b, "B"), (a, "A")):
        if not bool(t.isfinite().all()):
            raise _unfit(name, factor, "bfloat16")
    return Pair(b, a)


def _quantised(name: str, pair: Pair) -> Quantised:
    b, b_scale = _levels(pair.b, 0, name, "B")
    a, a_scale = _levels(pair.a, 1, name, "A")
    return Quantised(b, b_scale.flatten(), a, a_scale.flatten())


def _levels(x: Tensor, dim: int, name: str, factor: str) -> tuple[Tensor, Tensor]:
    """Integers and scales ``[1, r]`` or ``[r, 1]``, for each slice along ``dim``."""
    x = x.detach().double()
    largest = x.abs().amax(dim, keepdim=True)
    mantissa, exponent = torch.frexp(largest / LEVELS)
    # Rounded up to 17 bits, a scale times a level is exact in float32: the bound then holds for what is received, and
    # quantising that once more finds the same scale.
    scale = torch.ldexp((mantissa * 2**_BITS).ceil() / 2**_BITS, exponent)
    scale = torch.where(largest > 0, scale.clamp(min=_SMALLEST), 0.0)
    # asked of the largest entry too, for a NaN is not > 0
    if not bool((largest.isfinite() & (scale * LEVELS <= torch.finfo(torch.float32).max)).all()):
        raise _unfit(name, factor, "int8")
    levels = torch.where(scale > 0, x / scale, 0.0).round()
    return levels.clamp(-LEVELS, LEVELS).to(torch.int8), scale.float()


def _unfit(name: str, factor: str, wire: str) -> TaskError:
    return TaskError(
        f"{factor} of the layer {name!r} holds values that are not finite, or too large for {wire}; lower the learning "
        "rate, clip the gradient, or set the wire to 'float32'."
    )
