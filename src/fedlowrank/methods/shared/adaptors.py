"""Functions that FLoRAL and Local Adaptor share: adapted parameters, the mixed model, and the preconditioner."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor

from ...adapters.mixtures.adapted_parameters import AdaptedParameter, Kind, find_trained_adapted_parameters
from ...adapters.mixtures.mixture import Construction
from ...adapters.mixtures.mixture_adaptors import mix_weights, precondition_adaptors
from ...core.contract import Model
from .clusters import Apply

# ruff: noqa: D102 - the methods document their fields


class HasAdaptors(Protocol):
    """Fields of a method whose model has low-rank adaptors."""

    @property
    def rank(self) -> float: ...
    @property
    def rank_pattern(self) -> Mapping[str, float]: ...
    @property
    def alpha(self) -> float: ...
    @property
    def construction(self) -> Construction: ...
    @property
    def kinds(self) -> tuple[Kind, ...]: ...
    @property
    def precondition(self) -> bool: ...
    @property
    def eps(self) -> float: ...


def find_adapted(method: HasAdaptors, model: Model) -> dict[str, AdaptedParameter]:
    """Find the trained parameters of a model that get adaptors, by name."""
    return find_trained_adapted_parameters(
        model, method.rank, method.construction, method.kinds, method.rank_pattern
    )


def build_mixed_model(method: HasAdaptors, model: Model) -> Apply:
    """Build the mixed model: scores under the weights w + α Σ_c π_c a_c, as a function of {base, adaptors}, π and inputs."""

    def apply(parts: dict[str, Any], pi: Tensor, x: Any) -> Tensor:
        weights = mix_weights(parts["base"], parts["adaptors"], pi, method.alpha, method.construction)
        return model.apply(weights, x)

    return apply


def build_preconditioner(method: HasAdaptors) -> Callable[..., Any] | None:
    """Build the function that preconditions gradients of adaptors (appendix D); None if the method does not use it."""
    if not method.precondition:
        return None

    def precondition(grads: dict[str, Any], p: dict[str, Any], *_: Tensor) -> dict[str, Any]:
        return {
            **grads,
            "adaptors": precondition_adaptors(p["base"], grads["adaptors"], p["adaptors"], method.eps),
        }

    return precondition
