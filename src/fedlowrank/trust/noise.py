"""Gaussian noise of differential privacy, from a named key or from the operating system."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ..core.errors import ConfigError
from ..core.key import Key

Source = Key | Literal["system"]


def gaussian(like: Mapping[str, Tensor], std: float, source: Source) -> dict[str, Tensor]:
    """Draw independent N(0, std²) of the shapes, types and devices of some tensors.

    Numbers are drawn as float64 on the CPU and rounded to the type of the tensor. Attacks on the rounding of
    floating-point noise (Mironov 2012, "On significance of the least significant bits for differential
    privacy") are not covered; they would need the discrete Gaussian. The generator, PCG64, is no
    cryptographic one either.

    Args:
        like: floating tensors by name.
        std: standard deviation; 0 for zeros.
        source: a key gives the same noise each time. It is for simulations: who knows the key can take the
            noise away. ``"system"`` seeds a fresh generator for every tensor with 256 bits of
            ``os.urandom``; no seed of a run changes it.

    Returns:
        Noise by name.

    Raises:
        ConfigError: if ``std`` is negative or not finite, the source is unknown or a tensor is not floating.
    """
    if not (math.isfinite(std) and std >= 0):
        raise ConfigError(f"noise: the standard deviation must be finite and at least 0; it is {std}")
    return {name: _draw(tensor, std, source, name) for name, tensor in like.items()}


def _draw(tensor: Tensor, std: float, source: Source, name: str) -> Tensor:
    if not tensor.is_floating_point():
        raise ConfigError(f"noise: {name!r} has the type {tensor.dtype}; only floating tensors can be noised")
    drawn = std * _generator(source, name).standard_normal(tuple(tensor.shape))
    return torch.from_numpy(np.asarray(drawn)).to(dtype=tensor.dtype, device=tensor.device)


def _generator(source: Source, name: str) -> np.random.Generator:
    if isinstance(source, Key):
        return (source / name).numpy()
    if source != "system":
        raise ConfigError(f"noise: the source must be a key or 'system'; it is {source!r}")
    # the pool holds 4 words of 32 bits by default, which would halve the entropy
    seed = np.random.SeedSequence(int.from_bytes(os.urandom(32), "little"), pool_size=8)
    return np.random.Generator(np.random.PCG64(seed))
