"""Adaptors of a whole module: which parameters get them, what a mixture of them makes of the weights (FLoRAL, §3.2, app. F).

An adaptor of a matrix or a convolution is a low-rank update (:class:`~fedlowrank.low_rank.mixture.Pairs`); one of a bias or
of the γ, β of a normalisation is an offset. All of them add to the weights, so a mixture is one set of weights and costs one
forward pass, and a layer that is used twice, or a weight that two layers share, is adapted once.

BatchNorm is adapted with respect to the main statistics. That is the reparameterised form of eq. 42: with
γ_i → (σ̂_i/σ̂) γ_i and β_i → β_i + ((μ̂_i - μ̂)/σ̂) γ_i the output of the adapted layer is x̂ (γ + γ_i) + β + β_i.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from ..errors import ConfigError, TaskError
from ..key import Key
from ..tree import Params
from .mixture import EPS, Construction, Pairs, begin, centre, fold_of, precondition, precondition_convolution

Kind = Literal["linear", "convolution", "embedding", "bias", "norm"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Adaptors = dict[str, Pairs | Tensor]
"""C adaptors by name of the parameter they adapt: low-rank updates, or offsets ``[C, ...]``."""

Include = Callable[[str, nn.Module], bool]
"""Whether a layer is adapted, by its dotted name and the layer itself."""

_MATRICES: dict[type[nn.Module], Kind] = {
    nn.Linear: "linear",
    nn.MultiheadAttention: "linear",
    nn.modules.conv._ConvNd: "convolution",
    nn.Embedding: "embedding",
    nn.EmbeddingBag: "embedding",
}
_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


@dataclass(frozen=True)
class Spot:
    """One parameter that gets adaptors.

    Attributes:
        layer: dotted name of the layer that holds it; of a shared one, the first.
        kind: what it is.
        shape: of the parameter.
        rank: of each adaptor; 0 for an offset.
        numbers: that each adaptor takes.
    """

    layer: str
    kind: Kind
    shape: tuple[int, ...]
    rank: int
    numbers: int


def spots(
    module: nn.Module,
    rank: float,
    construction: Construction = "balanced",
    kinds: tuple[Kind, ...] = KINDS,
    include: Include | None = None,
) -> dict[str, Spot]:
    """The parameters of a module that get adaptors, by name.

    Args:
        module: any module; layers other than linear, attention, convolution, embedding and normalisation get none.
        rank: an integer, at most that of the weight; or a budget ρ in (0, 1), see :meth:`Fold.rank`.
        construction: of convolutions.
        kinds: what is adapted.
        include: which layers are; by default all.

    Raises:
        TaskError: if nothing is left to adapt, a parameter is not yet initialised, or an embedding renormalises its rows.
        ConfigError: if the rank is neither an integer nor a budget.
    """
    first: dict[int, str] = {id(p): name for name, p in module.named_parameters()}
    found: dict[str, Spot] = {}
    for name, layer in module.named_modules():
        if include is not None and not include(name, layer):
            continue
        for parameter in layer.parameters(recurse=False):
            kind = _kind(layer, parameter)
            if kind is None or kind not in kinds or first[id(parameter)] in found:
                continue
            _check(name, layer, parameter)
            found[first[id(parameter)]] = _spot(name, kind, tuple(parameter.shape), rank, construction)
    if not found:
        there = sorted(
            {type(m).__name__ for m in module.modules() if next(m.parameters(recurse=False), None) is not None}
        )
        raise TaskError(
            f"there is no layer to adapt: the module has parameters in {there or 'no layer'}, and linear layers, attention, "
            f"convolutions, embeddings and normalisations can be adapted (asked for: {', '.join(kinds)}"
            + (", by the predicate include)." if include is not None else ").")
        )
    return found


def _kind(layer: nn.Module, parameter: nn.Parameter) -> Kind | None:
    if isinstance(layer, _NORMS):
        return "norm"
    kinds = [kind for base, kind in _MATRICES.items() if isinstance(layer, base)]
    if not kinds:
        return None
    # uninitialised parameters of lazy layers have no dimensions; the check that follows says so
    return kinds[0] if isinstance(parameter, nn.parameter.UninitializedParameter) or parameter.ndim > 1 else "bias"


def _check(name: str, layer: nn.Module, parameter: nn.Parameter) -> None:
    where = f"layer {name or '(the module itself)'} ({type(layer).__name__})"
    if isinstance(parameter, nn.parameter.UninitializedParameter):
        raise TaskError(f"{where} is lazy and has no shape yet; run one forward pass through the module first")
    if getattr(layer, "max_norm", None) is not None:
        raise TaskError(
            f"{where} renormalises its rows in place (max_norm), which an adaptor cannot follow; exclude it"
        )
    if getattr(layer, "sparse", False):
        raise TaskError(f"{where} has sparse gradients, which do not reach its adaptor; set sparse=False or exclude it")


def _spot(layer: str, kind: Kind, shape: tuple[int, ...], rank: float, construction: Construction) -> Spot:
    if kind in ("bias", "norm"):
        return Spot(layer, kind, shape, 0, torch.Size(shape).numel())
    fold = fold_of(shape, construction)
    r = min(fold.rank(rank), *fold.size)
    return Spot(layer, kind, shape, r, r * sum(fold.size))


def adaptors(
    where: Mapping[str, Spot], count: int, key: Key, construction: Construction = "balanced", like: Tensor | None = None
) -> Adaptors:
    """C adaptors of every spot, all of which begin at zero; the draws of each differ.

    Args:
        where: see :func:`spots`.
        count: C ≥ 1.
        key: of the random factors.
        construction: of convolutions.
        like: a tensor with the dtype and device to have.

    Raises:
        ConfigError: if C < 1.
    """
    if count < 1:
        raise ConfigError(f"there must be at least one cluster of adaptors; clusters is {count}")
    like = torch.zeros(0) if like is None else like
    found: Adaptors = {}
    for name, spot in where.items():
        if spot.rank == 0:
            found[name] = like.new_zeros((count, *spot.shape))
            continue
        pairs = begin(fold_of(spot.shape, construction), spot.rank, count, key / name, like.dtype)
        found[name] = Pairs(pairs.u.to(like.device), pairs.v.to(like.device))
    return found


def mix(
    weights: Params, adapted: Adaptors, pi: Tensor, alpha: float = 1.0, construction: Construction = "balanced"
) -> Params:
    """The weights with w + α Σ_c π_c a_c in place of each adapted w.

    Args:
        weights: of the whole model.
        adapted: its adaptors.
        pi: shares ``[C]``.
        alpha: α.
        construction: of convolutions.
    """
    mixed = dict(weights)
    for name, a in adapted.items():
        w = weights[name]
        if isinstance(a, Pairs):
            mixed[name] = torch.add(w, fold_of(tuple(w.shape), construction).unfold(a.mixed(pi)), alpha=alpha)
        else:
            mixed[name] = torch.add(w, torch.tensordot(pi, a, 1), alpha=alpha)
    return mixed


def preconditioned(weights: Params, gradient: Adaptors, at: Adaptors, eps: float = EPS) -> Adaptors:
    """Gradients of adaptors, those of low-rank factors divided by what the other factor makes of them (appendix D).

    Args:
        weights: of the model, to tell convolutions from matrices.
        gradient: of the adaptors.
        at: the adaptors.
        eps: ε.
    """
    found: Adaptors = {}
    for name, a in at.items():
        g = gradient[name]
        if isinstance(a, Pairs) and isinstance(g, Pairs):
            how = precondition_convolution if weights[name].ndim > 2 else precondition
            found[name] = how(g, a, eps)
        else:
            found[name] = g
    return found


def centred(
    weights: Params, adapted: Adaptors, shares: Tensor, alpha: float = 1.0, construction: Construction = "balanced"
) -> tuple[Params, Adaptors]:
    """Move the mean adaptor into the weights (appendix E).

    Args:
        weights: of the whole model.
        adapted: its adaptors.
        shares: p(c), weights of the mean ``[C]``, adding up to 1.
        alpha: α.
        construction: of convolutions.

    Returns:
        New weights and adaptors. Of low-rank updates what their rank cannot hold is lost; offsets lose nothing.
    """
    base, left = dict(weights), dict(adapted)
    for name, a in adapted.items():
        w = weights[name]
        if isinstance(a, Pairs):
            fold = fold_of(tuple(w.shape), construction)
            # centre() adds the mean itself; α is taken out of the weight first and put back after
            moved, left[name] = centre(fold.fold(w) / alpha, a, shares)
            base[name] = fold.unfold(moved * alpha).contiguous()
        else:
            mean = torch.tensordot(shares, a, 1)
            base[name], left[name] = torch.add(w, mean, alpha=alpha), a - mean
    return base, left
