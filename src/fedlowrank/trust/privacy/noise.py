"""Gaussian noise of differential privacy, from a named key or the operating system; also on integers, for secure sums."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...core.errors import ConfigError
from ...core.key import Key
from ..secure_sums import expand

NoiseSource = Key | Literal["system"]


def gaussian(tensors: Mapping[str, Tensor], std: float, source: NoiseSource) -> dict[str, Tensor]:
    """Draw independent N(0, std²) in the shapes, dtypes and devices of some tensors.

    Numbers are drawn as float64 on the CPU and rounded to the dtype of the tensor. Attacks on the rounding of
    floating-point noise (Mironov 2012, "On significance of the least significant bits for differential
    privacy") are not covered; they would need the discrete Gaussian. The generator, PCG64, is not
    cryptographic either.

    Args:
        tensors: floating-point tensors by name.
        std: standard deviation; 0 for zeros.
        source: a key, which gives the same noise each time and is for simulations: anyone who knows the key can subtract
            the noise. Or ``"system"``, which seeds a fresh generator for every tensor with 256 bits of
            ``os.urandom``; no seed of a run changes it.

    Returns:
        Noise tensors by name.

    Raises:
        ConfigError: if ``std`` is negative or not finite, the source is unknown or a tensor is not floating-point.
    """
    if not (math.isfinite(std) and std >= 0):
        raise ConfigError(f"noise: the standard deviation must be finite and at least 0; it is {std}")
    return {name: _draw(tensor, std, source, name) for name, tensor in tensors.items()}


def _draw(tensor: Tensor, std: float, source: NoiseSource, name: str) -> Tensor:
    if not tensor.is_floating_point():
        raise ConfigError(f"noise: {name!r} has the type {tensor.dtype}; only floating tensors can be noised")
    noise = std * _generator(source, name).standard_normal(tuple(tensor.shape))
    return torch.from_numpy(np.asarray(noise)).to(dtype=tensor.dtype, device=tensor.device)


def _generator(source: NoiseSource, name: str) -> np.random.Generator:
    if isinstance(source, Key):
        return (source / name).numpy()
    if source != "system":
        raise ConfigError(f"noise: the source must be a key or 'system'; it is {source!r}")
    # the default pool of 4 words of 32 bits would halve the entropy
    seed = np.random.SeedSequence(int.from_bytes(os.urandom(32), "little"), pool_size=8)
    return np.random.Generator(np.random.PCG64(seed))


def discrete_gaussian(size: int, std: float) -> NDArray[np.int64]:
    """Draw independent integers x with probabilities proportional to exp(-x²/2 std²): Canonne et al. 2020, Algorithm 3.

    The algorithm draws discrete Laplace numbers and rejects some of them. All randomness is a key stream of AES-256 under
    256 bits of ``os.urandom``. Probabilities are computed in float64, so those of each number differ from the exact ones by
    a relative 1e-15; OpenDP's exact sampler takes 17 s for a million numbers, and this one a fraction of a second.

    Args:
        size: number of integers.
        std: standard deviation, at least 1.

    Returns:
        The integers, int64 ``[size]``.

    Raises:
        ConfigError: if ``std`` is below 1 or not finite.
    """
    if not (math.isfinite(std) and 1 <= std < 2**48):
        raise ConfigError(
            f"noise: the standard deviation on integers must be at least 1 and below 2^48; it is {std}"
        )
    scale, samples, count = math.floor(std) + 1, np.empty(size, dtype=np.int64), 0
    while count < size:
        # about three quarters are accepted
        tries = 16 + (size - count) * 3 // 2
        words = expand(os.urandom(32), 3 * tries).reshape(3, tries)
        # uniform in (0, 1), with 52 bits
        magnitude, uniform = (
            ((row >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52 for row in words[:2]
        )
        laplace = np.floor(-scale * np.log(magnitude))
        is_negative = (words[2] & np.uint64(1)).astype(bool)
        mask = uniform < np.exp(-((laplace - std * std / scale) ** 2) / (2 * std * std))
        # zero with a minus sign is rejected, or zero would count twice
        mask &= ~(is_negative & (laplace == 0))
        values = np.where(is_negative, -laplace, laplace)[mask].astype(np.int64)[: size - count]
        samples[count : count + len(values)] = values
        count += len(values)
    return samples
