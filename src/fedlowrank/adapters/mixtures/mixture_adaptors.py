"""Mixture adaptors of a whole module: initial values, mixing, preconditioning, centering (FLoRAL).

An adaptor of a matrix or a convolution is a low-rank update (:class:`~fedlowrank.adapters.mixtures.mixture.Pairs`);
an adaptor of a bias or of the γ, β of a normalization is an offset. All of them are added to the weights, so a
mixture is one set of weights and costs one forward pass, and a layer that is used twice, or a weight that two
layers share, is adapted once.

BatchNorm is adapted with respect to the main statistics. That is the reparameterized form of eq. 42: with γ_i
→ (σ̂_i/σ̂) γ_i and β_i → β_i + ((μ̂_i - μ̂)/σ̂) γ_i the output of the adapted layer is x̂ (γ + γ_i) + β +
β_i. In training, where both normalize by the batch, the two forms have the same gradients too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ...core.key import Key
from ...core.tree import Params
from .adapted_parameters import AdaptedParameter
from .mixture import (
    EPS,
    Construction,
    Factor,
    Pairs,
    center_pairs,
    choose_fold,
    initial_pairs,
    precondition_convolution,
    precondition_matrix,
)

_FLOAT32 = torch.zeros(0)
Adaptors = dict[str, Pairs | Tensor]
"""C adaptors by name of the adapted parameter: low-rank updates, or offsets ``[C, ...]``."""


def initial_adaptors(
    adapted_parameters: Mapping[str, AdaptedParameter],
    cluster_count: int,
    key: Key,
    construction: Construction = "balanced",
    reference: Tensor | Params = _FLOAT32,
    random: Factor = "u",
    scale: float = 1.0,
) -> Adaptors:
    """Create C adaptors of every adapted parameter, each initially zero, with its own random factors.

    Args:
        adapted_parameters: adapted parameters by name, see :func:`.adapted_parameters.find_adapted_parameters`.
        cluster_count: number C of adaptors of each parameter, at least 1.
        key: source of randomness.
        construction: construction of the adaptors of convolutions.
        reference: tensor whose dtype and device the adaptors get, or one for every parameter, by name.
        random: factor that is random, while the other one is zero; for embeddings always V, because a zero row of U
            stays zero, and with it the row of a padding token.
        scale: factor on the random factors.
    """
    adaptors: Adaptors = {}
    for name, parameter in adapted_parameters.items():
        t = reference[name] if isinstance(reference, dict) else reference
        if parameter.rank == 0:
            adaptors[name] = t.new_zeros((cluster_count, *parameter.shape))
            continue
        shape = parameter.shape[::-1] if parameter.transposed else parameter.shape
        # the rank given here is the final one, already multiplied by filter-wise construction
        fold = replace(choose_fold(shape, construction), times=1)
        factor = "v" if parameter.kind == "embedding" else random
        pairs = initial_pairs(fold, parameter.rank, cluster_count, key / name, t.dtype, factor, scale)
        u, v = pairs.u.to(t.device), pairs.v.to(t.device)
        adaptors[name] = Pairs(v, u) if parameter.transposed else Pairs(u, v)
    return adaptors


def mix_weights(
    weights: Params,
    adaptors: Adaptors,
    pi: Tensor,
    alpha: float = 1.0,
    construction: Construction = "balanced",
) -> Params:
    """Mix the weights of a model: each adapted w becomes w + α Σ_c π_c a_c, for shares ``pi [C]``.

    Each weight keeps its dtype; an adaptor may have another one, such as float32 beside half precision.
    """
    mixed_weights = dict(weights)
    for name, a in adaptors.items():
        w = weights[name]
        if isinstance(a, Pairs):
            update = choose_fold(tuple(w.shape), construction).unfold(a.mix(_convert_shares(pi, a.u)))
        else:
            update = torch.tensordot(_convert_shares(pi, a), a, 1)
        mixed_weights[name] = torch.add(w, update.to(w.dtype), alpha=alpha)
    return mixed_weights


def precondition_adaptors(
    weights: Params, gradient: Adaptors, adaptors: Adaptors, eps: float = EPS
) -> Adaptors:
    """Precondition the gradients of low-rank factors; gradients of offsets are unchanged (appendix D)."""
    directions = dict(gradient)
    for name, a in adaptors.items():
        g = gradient[name]
        if isinstance(a, Pairs) and isinstance(g, Pairs):
            precondition = precondition_convolution if weights[name].ndim > 2 else precondition_matrix
            directions[name] = precondition(g, a, eps)
    return directions


def center_adaptors(
    weights: Params,
    adaptors: Adaptors,
    shares: Tensor,
    alpha: float = 1.0,
    construction: Construction = "balanced",
) -> tuple[Params, Adaptors]:
    """Move the mean adaptor, under ``shares [C]`` p(c) that sum to 1, into the weights (appendix E).

    Returns:
        The new weights and adaptors. Low-rank updates lose the components beyond their rank; offsets are exact.
    """
    base, residual = dict(weights), dict(adaptors)
    for name, a in adaptors.items():
        w = weights[name]
        if isinstance(a, Pairs):
            fold = choose_fold(tuple(w.shape), construction)
            mean, residual[name] = center_pairs(a, _convert_shares(shares, a.u))
            base[name] = torch.add(w, fold.unfold(mean).to(w.dtype), alpha=alpha).contiguous()
        else:
            mean = torch.tensordot(_convert_shares(shares, a), a, 1)
            base[name], residual[name] = torch.add(w, mean.to(w.dtype), alpha=alpha), a - mean
    return base, residual


def _convert_shares(shares: Tensor, a: Tensor) -> Tensor:
    return shares.to(a.device, a.dtype)
