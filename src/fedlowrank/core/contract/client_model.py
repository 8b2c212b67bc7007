"""The model that a client would use now, as a value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..tree import Params

Predictor = Callable[[Any], Tensor]
"""Function from inputs ``[b, ...]`` to scores ``[b, classes]``."""

ModelSum = tuple[dict[str, Any], ...]
"""Parts whose sum is a model; each part holds weights by name as a tensor, factors or nonzero values
(:mod:`fedlowrank.linalg.matricize`)."""


@dataclass(frozen=True)
class ClientModel:
    """The model that a client would use now, for evaluation, export and deployment.

    Attributes:
        params: parameters of the whole model, or a function that computes them if that is expensive.
        series: models to evaluate by the name of the series, the headline first: parameters of a model, or a function
            from inputs ``[b, ...]`` to scores ``[b, classes]``. If empty, ``params`` alone is evaluated, as
            ``personal``.
        parts: parts that sum to a model, for each series whose model takes fewer numbers than its weights. They are
            counted by :func:`fedlowrank.linalg.matricize.count_parameters` and exported by
            :mod:`fedlowrank.adapters.deployment`.
        routes: share of each cluster ``[C]``; the shares sum to 1. None without clusters.
    """

    params: Params | Callable[[], Params]
    series: Mapping[str, Params | Predictor] = field(default_factory=dict)
    parts: Mapping[str, ModelSum] = field(default_factory=dict)
    routes: Tensor | None = None

    def whole(self) -> Params:
        """Parameters of the whole model."""
        return self.params() if callable(self.params) else self.params
