"""Local Adaptor: a common base, and at every client a low-rank adaptor that it never sends.

The baseline of Almansoori, Horváth, Takáč, arXiv:2410.03497, Table 1: FLoRAL with C = 1 whose adaptor stays
at the client.

    Each round                                                                              here
     1  the server sends u to k ∈ S_t                                                       download
     2  client k: SGD on (u^k, a_k) of f^k(u^k + a_k), the factors of a_k preconditioned    local_update
     3  server: u ← Σ_k N^k u^k / Σ_k N^k                                                   server_update
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..adapters.adapted_parameters import KINDS, Kind, find_trained_adapted_parameters
from ..adapters.budget import adaptor_warnings
from ..adapters.mixture import Construction
from ..adapters.mixture_adaptors import Adaptors, initial_adaptors, mix_weights, precondition_adaptors
from ..core.client_model import ClientModel
from ..core.loss import task_loss
from ..core.method import Batch, ClientInfo, ClientView, Method, ServerView, Task
from ..core.tree import Params


@dataclass(frozen=True)
class LocalAdaptor(Method[Params, Adaptors, Params, Params]):
    """One adaptor a client, which stays there.

    Attributes:
        rank: of an adaptor, an integer; or below 1 its budget ρ, a share of the parameter's size (rank 1 at
            least).
        alpha: α, factor on the adaptor.
        construction: of adaptors of convolutions.
        kinds: what is adapted: linear, convolution, embedding, bias, norm.
        precondition: whether the gradients of low-rank factors are preconditioned.
    """

    rank: float = 0.01
    alpha: float = 1.0
    construction: Construction = "balanced"
    kinds: tuple[Kind, ...] = KINDS
    precondition: bool = True

    title = "Local Adaptor"
    citation = "Almansoori et al. 2024, arXiv:2410.03497"

    def remarks(self, task: Task) -> list[str]:
        """Layers that are too small for the budget, and weight matrices without adaptors."""
        model = task.common_model(self.title)
        return adaptor_warnings(
            model.module, find_trained_adapted_parameters(model, self.rank, self.construction, self.kinds)
        )

    def server_init(self, task: Task) -> Params:
        """u^0."""
        return task.common_model(self.title).initial

    def client_init(self, task: Task, client: ClientInfo) -> Adaptors:
        """A zero adaptor; its random factors are the same at all clients, as FLoRAL's first cluster."""
        model = task.model(client)
        where = find_trained_adapted_parameters(model, self.rank, self.construction, self.kinds)
        return initial_adaptors(
            where, 1, task.key / "adaptors", self.construction, next(iter(model.initial.values()))
        )

    def local_update(self, state: Adaptors, down: Params, view: ClientView) -> tuple[Adaptors, Params]:
        """Line 2: one SGD on both."""
        model, alpha, construction = view.model, self.alpha, self.construction

        def loss(p: dict[str, Any], batch: Batch, one: Tensor) -> Tensor:
            return task_loss(
                model.apply(mix_weights(p["base"], p["adaptors"], one, alpha, construction), batch.x), batch
            )

        def scaled(grads: dict[str, Any], p: dict[str, Any], _: Tensor) -> dict[str, Any]:
            return {**grads, "adaptors": precondition_adaptors(p["base"], grads["adaptors"], p["adaptors"])}

        start: dict[str, Any] = {"base": down, "adaptors": state}
        how = scaled if self.precondition else None
        end = view.train(loss, start, "local", self.optimizer, constants=(_one(down),), precondition=how)
        return end["adaptors"], end["base"]

    def server_update(self, server: Params, total: Params, view: ServerView) -> Params:
        """Line 3."""
        del server, view
        return total

    def client_model(self, state: Adaptors, down: Params, view: ClientView) -> ClientModel:
        """U + a_k."""
        del view
        return ClientModel(mix_weights(down, state, _one(down), self.alpha, self.construction))


def _one(weights: Params) -> Tensor:
    return next(iter(weights.values())).new_ones(1)
