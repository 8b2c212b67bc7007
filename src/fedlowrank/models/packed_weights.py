"""Weights that a library packs into whole numbers: how to tell them, and how many entries they stand for."""

from __future__ import annotations

import math

from torch import Tensor, nn

from .complex_parameters import as_real


def is_packed(weight: Tensor) -> bool:
    """Whether a weight is quantized: its numbers are codes, to which nothing can be added."""
    return not (weight.is_floating_point() or weight.is_complex())


def count_entries(parameter: Tensor) -> int:
    """Number of entries of a parameter; of a weight that bitsandbytes packs those before it was packed."""
    packed = getattr(parameter, "quant_state", None)
    return as_real(parameter.detach()).numel() if packed is None else int(math.prod(packed.shape))


def is_of_bitsandbytes(module: nn.Module) -> bool:
    """Whether a module is a layer of bitsandbytes."""
    return type(module).__module__.startswith("bitsandbytes.")
