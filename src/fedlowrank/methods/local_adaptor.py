"""Local Adaptor: a common base, and at every client a low-rank adaptor that it never sends.

The baseline of Almansoori, Horváth, Takáč, arXiv:2410.03497, Table 1: FLoRAL with C = 1 whose adaptor stays
at the client.

    Each round                                                                              here
     1  the server sends u to k ∈ S_t                                                       download
     2  client k: SGD on (u^k, a_k) of f^k(u^k + a_k), the factors of a_k preconditioned    local_update
     3  server: u ← Σ_k N^k u^k / Σ_k N^k                                                   server_update
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..adapters.mixtures.adapted_parameters import KINDS, Kind, warn_adapted_ranks
from ..adapters.mixtures.mixture import EPS, Construction, check_ranks_or_budgets
from ..adapters.mixtures.mixture_adaptors import Adaptors, initial_adaptors, mix_weights
from ..adapters.mixtures.parameter_budget import adaptor_warnings
from ..core.arguments.switch import Switch, check_switch
from ..core.contract import Batch, ClientInfo, ClientModel, ClientView, Method, ServerView, Task
from ..core.learning.batch_losses import task_loss
from ..core.tree import Params
from .shared.adaptors import build_mixed_model, build_preconditioner, find_adapted


@dataclass(frozen=True)
class LocalAdaptor(Method[Params, Adaptors, Params, Params]):
    """One adaptor a client, which stays there.

    Attributes:
        rank: rank of an adaptor, an integer; or, below 1, its budget ρ, a share of the parameter's size (rank 1 at
            least). An integer above the largest rank of a weight is lowered for that weight, with a warning.
        rank_pattern: ranks or budgets of single layers, by suffix of their names, such as {head = 10}.
        alpha: α, factor on the adaptor.
        construction: construction of the adaptors of convolutions.
        kinds: kinds of parameters that are adapted: linear, convolution, embedding, bias, norm.
        precondition: whether the gradients of low-rank factors are preconditioned.
        eps: ε of the preconditioner.
    """

    rank: float = 0.01
    rank_pattern: Mapping[str, float] = field(default_factory=dict)
    alpha: float = 1.0
    construction: Construction = "balanced"
    kinds: tuple[Kind, ...] = KINDS
    precondition: bool = True
    eps: float = EPS

    title = "Local Adaptor"
    citation = "Almansoori et al. 2024, arXiv:2410.03497"
    bounds = {"alpha": "> 0", "eps": "> 0"}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranks_or_budgets(type(self).__name__, self.rank, self.rank_pattern)
        check_switch(self, Switch("precondition", {"eps": ()}), self.title)

    def remarks(self, task: Task) -> list[str]:
        """Layers that are too small for the budget, and weight matrices without adaptors."""
        model = task.common_model(self.title)
        return adaptor_warnings(model.module, find_adapted(self, model))

    def server_init(self, task: Task) -> Params:
        """The base u^0."""
        model = task.common_model(self.title)
        warn_adapted_ranks(self.title, find_adapted(self, model))
        return model.initial

    def client_init(self, client: ClientInfo, task: Task) -> Adaptors:
        """A zero adaptor; its random factors are the same at all clients, as FLoRAL's first cluster."""
        model = task.model(client)
        adapted_parameters, key = find_adapted(self, model), task.key / "adaptors"
        return initial_adaptors(adapted_parameters, 1, key, self.construction, model.initial)

    def local_update(self, state: Adaptors, down: Params, view: ClientView) -> tuple[Adaptors, Params]:
        """Line 2: joint SGD on the base and the adaptor."""
        apply = build_mixed_model(self, view.model)

        def loss(p: dict[str, Any], batch: Batch, pi: Tensor) -> Tensor:
            return task_loss(apply(p, pi, batch.x), batch)

        start: dict[str, Any] = {"base": down, "adaptors": state}
        precondition = build_preconditioner(self)
        trained_parts = view.train(
            loss, start, "local", self.optimizer, constants=(_unit_share(down),), precondition=precondition
        )
        return trained_parts["adaptors"], trained_parts["base"]

    def server_update(self, server: Params, total: Params, view: ServerView) -> Params:
        """Line 3: mean of the bases, weighted by N^k."""
        return total

    def client_model(self, state: Adaptors, down: Params, view: ClientView) -> ClientModel:
        """The model u + a_k."""
        return ClientModel(mix_weights(down, state, _unit_share(down), self.alpha, self.construction))


def _unit_share(weights: Params) -> Tensor:
    return next(iter(weights.values())).new_ones(1)
