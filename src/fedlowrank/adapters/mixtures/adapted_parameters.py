"""Parameters of a module that mixture adaptors adapt (FLoRAL, §3.2)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ...core.errors import ConfigError, TaskError, did_you_mean
from ..adaptable import ATTENTION, find_adaptable_weights, is_conv1d
from ..lora.rank_limits import warn_lowered_ranks
from .mixture import Construction, check_rank_or_budget, choose_fold

if TYPE_CHECKING:
    from ...core.contract import Model

Kind = Literal["linear", "convolution", "embedding", "bias", "norm"]
KINDS: tuple[Kind, ...] = get_args(Kind)
NO_PATTERN: Mapping[str, float] = MappingProxyType({})
Include = Callable[[str, nn.Module], bool]
"""Predicate of a layer's dotted name and the layer itself: whether the layer is adapted."""

_MATRICES: dict[type[nn.Module], Kind] = {
    nn.Linear: "linear",
    nn.MultiheadAttention: "linear",
    nn.modules.conv._ConvNd: "convolution",
    nn.Embedding: "embedding",
    nn.EmbeddingBag: "embedding",
}
_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
_WEIGHTS = ("weight", *ATTENTION)
_BIASES = ("bias", "in_proj_bias", "bias_k", "bias_v")


@dataclass(frozen=True)
class AdaptedParameter:
    """One parameter that gets adaptors.

    Attributes:
        layer: dotted name of the layer with the parameter; the first one if layers share it.
        kind: kind of the parameter.
        shape: shape of the parameter.
        rank: rank of each adaptor; 0 for an offset.
        parameter_count: parameter count of each adaptor.
        transposed: whether the weight is stored with the inputs first, as in GPT-2's ``Conv1D``; U and V then
            change places.
        note: text for a warning: a rank that differs from the requested one, other layers that share the parameter.
        requested_rank: rank that was requested; it exceeds :attr:`rank` where the weight as a matrix cannot have
            it.
        matrix: rows and columns of the weight as a matrix; (0, 0) for an offset.
    """

    layer: str
    kind: Kind
    shape: tuple[int, ...]
    rank: int
    parameter_count: int
    note: str = ""
    transposed: bool = False
    requested_rank: int = 0
    matrix: tuple[int, int] = (0, 0)


def find_adapted_parameters(
    module: nn.Module,
    rank: float,
    construction: Construction = "balanced",
    kinds: tuple[Kind, ...] = KINDS,
    include: Include | None = None,
    rank_pattern: Mapping[str, float] = NO_PATTERN,
) -> dict[str, AdaptedParameter]:
    """Find the parameters of a module that get adaptors, by name.

    Args:
        module: any module; layers other than linear, attention, convolution, embedding and normalization get no
            adaptors, and neither do parameters that a subclass of these adds. A ``Conv1D`` of Hugging Face counts
            as a linear layer; a layer that has only vectors and "norm" in its class name, such as ``LlamaRMSNorm``,
            counts as a normalization.
        rank: integer rank, lowered for weights whose largest rank is smaller; or a budget ρ in (0, 1), see
            :meth:`.mixture.Fold.rank`.
        construction: construction of the adaptors of convolutions.
        kinds: kinds of parameters that are adapted.
        include: predicate of the layers to adapt, called for each layer that holds a parameter; by default all. A
            parameter that several layers share is adapted if one of them is.
        rank_pattern: ranks or budgets of single layers, by suffix of their names, such as ``{"head": 10}``; the
            first match counts. All other layers have ``rank``.

    Raises:
        TaskError: if there is no parameter to adapt, a parameter is not yet initialized or not floating-point, a
            weight is computed from other parameters (``weight_norm``, a parametrization), or an embedding
            renormalizes its rows or has sparse gradients.
        ConfigError: if a rank is neither an integer nor a budget, a kind or the construction is unknown, or a name
            of ``rank_pattern`` matches no layer with adaptors.
    """
    _check_choices(kinds, construction)
    # check ranks even if only offsets are adapted
    for rank_or_budget in (rank, *rank_pattern.values()):
        check_rank_or_budget("rank", rank_or_budget)
    for weight in find_adaptable_weights(module):
        is_requested = _matrix_kind(weight.layer) in kinds and (
            include is None or include(weight.path, weight.layer)
        )
        if is_requested and weight.is_computed:
            # raises TaskError for a computed weight
            weight.parameter()
    unused_suffixes: set[str | None] = {*rank_pattern}
    first_names: dict[int, str] = {id(p): name for name, p in module.named_parameters()}
    adapted_parameters: dict[str, AdaptedParameter] = {}
    for name, layer in module.named_modules():
        for attribute, parameter in layer.named_parameters(recurse=False):
            if isinstance(parameter, nn.parameter.UninitializedParameter):
                raise TaskError(
                    f"{_describe_layer(name, layer)} is lazy and has no shape yet; run one forward pass first"
                )
            kind = kind_of(layer, attribute, parameter)
            if kind is None or kind not in kinds or (include is not None and not include(name, layer)):
                continue
            _check_adaptable(name, layer, parameter)
            canonical_name = first_names[id(parameter)]
            if canonical_name in adapted_parameters:
                adapted_parameters[canonical_name] = replace(
                    adapted_parameters[canonical_name],
                    note=_join_notes(adapted_parameters[canonical_name].note, f"shared with {name}"),
                )
            else:
                suffix = next((suffix for suffix in rank_pattern if f".{name}".endswith(f".{suffix}")), None)
                r = rank if suffix is None else rank_pattern[suffix]
                unused_suffixes.discard(suffix)
                adapted_parameter = _adapted_parameter(name, kind, tuple(parameter.shape), r, construction)
                adapted_parameters[canonical_name] = replace(
                    adapted_parameter, transposed=kind == "linear" and is_conv1d(layer)
                )
    if not adapted_parameters:
        layer_types = sorted(
            {type(m).__name__ for m in module.modules() if any(True for _ in m.parameters(recurse=False))}
        )
        raise TaskError(
            f"there is no layer to adapt: the module has parameters in {layer_types or 'no layer'}, and linear "
            "layers, attention, convolutions, embeddings and normalizations can be adapted (asked for: "
            f"{', '.join(kinds) or 'nothing'}"
            + (", of the layers that the predicates let through)." if include is not None else ").")
        )
    if unused_suffixes:
        layers = dict.fromkeys(name.rpartition(".")[0] for name in adapted_parameters)
        raise ConfigError(
            f"rank_pattern: no layer with adaptors has a name that ends in {min(map(str, unused_suffixes))!r}; they are "
            f"{', '.join(map(repr, layers))}"
        )
    return adapted_parameters


def find_trained_adapted_parameters(
    model: Model,
    rank: float,
    construction: Construction,
    kinds: tuple[Kind, ...],
    rank_pattern: Mapping[str, float] = NO_PATTERN,
) -> dict[str, AdaptedParameter]:
    """Do :func:`find_adapted_parameters` among the trained parameters of an architecture.

    Raises:
        TaskError: if no such parameter is trained, or in the cases of :func:`find_adapted_parameters`.
    """
    adapted_parameters = find_adapted_parameters(model.module, rank, construction, kinds, None, rank_pattern)
    trained_parameters = {n: s for n, s in adapted_parameters.items() if n in model.initial}
    if not trained_parameters:
        raise TaskError(
            "all parameters that adaptors could be added to are frozen (requires_grad=False); let some "
            "train, or choose a LoRA method such as fedhl"
        )
    return trained_parameters


def warn_adapted_ranks(owner: str, adapted_parameters: Mapping[str, AdaptedParameter]) -> None:
    """Warn of ranks above the largest rank of a parameter."""
    ranks = {name: parameter.requested_rank for name, parameter in adapted_parameters.items()}
    warn_lowered_ranks(owner, ranks, {n: parameter.matrix for n, parameter in adapted_parameters.items()})


def _check_choices(kinds: tuple[Kind, ...], construction: Construction) -> None:
    for choice, choices in [*((k, KINDS) for k in kinds), (construction, get_args(Construction))]:
        if choice not in choices:
            setting = "construction" if choices is not KINDS else "kinds"
            raise ConfigError(f"{setting}: {choice!r} is no choice. {did_you_mean(str(choice), choices)}")


def kind_of(layer: nn.Module, attribute: str, parameter: nn.Parameter) -> Kind | None:
    """The kind of a layer's parameter, by its name in the layer; None if it can have no adaptors."""
    # by name, because a subclass may have further parameters to which nothing can be added, such as the norm of a
    # normalized weight
    if attribute not in _WEIGHTS + _BIASES or parameter.numel() == 0:
        return None
    if isinstance(layer, _NORMS):
        return "norm"
    kind = _matrix_kind(layer)
    if kind is None:
        return "norm" if _is_named_norm(layer) else None
    return kind if attribute in _WEIGHTS and parameter.ndim > 1 else "bias"


def _matrix_kind(layer: nn.Module) -> Kind | None:
    kinds = [kind for base, kind in _MATRICES.items() if isinstance(layer, base)]
    return kinds[0] if kinds else "linear" if is_conv1d(layer) else None


def _is_named_norm(layer: nn.Module) -> bool:
    has_norm_name = any("norm" in c.__name__.lower() for c in type(layer).__mro__)
    return has_norm_name and all(p.ndim <= 1 for p in layer.parameters(recurse=False))


def _describe_layer(name: str, layer: nn.Module) -> str:
    return f"layer {name or '(the module itself)'} ({type(layer).__name__})"


def _join_notes(*notes: str) -> str:
    return "; ".join(note for note in notes if note)


def _check_adaptable(name: str, layer: nn.Module, parameter: nn.Parameter) -> None:
    description = _describe_layer(name, layer)
    if not parameter.is_floating_point():
        raise TaskError(
            f"{description} has a parameter of type {parameter.dtype}, to which no adaptor can be added; exclude "
            "it, or convert the module to floating point"
        )
    if getattr(layer, "max_norm", None) is not None:
        raise TaskError(
            f"{description} renormalizes its rows in place (max_norm), which an adaptor cannot follow; exclude it"
        )
    if getattr(layer, "sparse", False):
        raise TaskError(
            f"{description} has sparse gradients, which do not reach its adaptor; set sparse=False or exclude it"
        )


def _adapted_parameter(
    layer: str, kind: Kind, shape: tuple[int, ...], rank: float, construction: Construction
) -> AdaptedParameter:
    if kind in ("bias", "norm"):
        return AdaptedParameter(layer, kind, shape, 0, torch.Size(shape).numel())
    fold = choose_fold(shape, construction)
    requested_rank, max_rank = fold.rank(rank), min(fold.size)
    r, note = min(requested_rank, max_rank), ""
    if rank < 1 and sum(fold.size) * fold.times > rank * torch.Size(shape).numel() * (1 + 1e-9):
        note = f"rank = {rank:g} gives less than rank {fold.times}; rank {fold.times} is used"
    if requested_rank > max_rank:
        note = _join_notes(
            note, f"rank {requested_rank} is more than the weight has; rank {max_rank} is used"
        )
    return AdaptedParameter(
        layer, kind, shape, r, r * sum(fold.size), note, requested_rank=requested_rank, matrix=fold.size
    )


def find_norms_with_statistics(
    module: nn.Module, adapted_parameters: Mapping[str, AdaptedParameter]
) -> dict[str, tuple[str, str]]:
    """Find the names of γ and β, by layer, of the adapted BatchNorm layers that normalize by running statistics.

    A layer without running statistics always normalizes by the batch, as its adaptors would, so an offset is
    equivalent.

    Raises:
        TaskError: if such a layer shares γ or β with another, or spans processes.
    """
    holders = Counter(id(p) for m in module.modules() for p in m.parameters(recurse=False))
    norms: dict[str, tuple[str, str]] = {}
    for name, layer in module.named_modules():
        if not isinstance(layer, _BatchNorm):
            continue
        if any(t is None for t in (layer.running_mean, layer.weight, layer.bias)):
            continue
        gamma, beta = (f"{name}.{attribute}".lstrip(".") for attribute in ("weight", "bias"))
        is_shared = holders[id(layer.weight)] > 1 or holders[id(layer.bias)] > 1
        if is_shared or isinstance(layer, nn.SyncBatchNorm):
            raise TaskError(
                f"{_describe_layer(name, layer)}: adaptors with statistics of their own "
                "(reparameterize=False) need a BatchNorm of one process that shares no parameter with "
                "another layer; use reparameterize=True or exclude it"
            )
        if gamma in adapted_parameters and beta in adapted_parameters:
            norms[name] = (gamma, beta)
    return norms
