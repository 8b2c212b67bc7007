"""FedBN: federated learning on non-IID features via local batch normalization.

X. Li, M. Jiang, X. Zhang, M. Kamp, Q. Dou. ICLR 2021. arXiv:2102.07623, Algorithm 1.

    server, each round t:   send all parameters but those of normalizations, θ^t        download
    client k:               (θ_k, b_k) ← SGD on F_k from (θ^t, b_k), jointly, E epochs;
                            keep the scales and shifts b_k; send θ_k                    local_update
    server:                 θ^{t+1} = Σ_{k∈S_t} n_k θ_k / Σ_{k∈S_t} n_k                 server_update

A client infers with θ as aggregated after the round and its own b_k. The running statistics, which the paper keeps
local too, are each client's own in every method of this package (:mod:`fedlowrank.models.statistics.normalization`);
FedBN adds local scales and shifts.

Differences from the paper: the paper's mean is uniform; here it is weighted by n_k, as for FedAvg.

Choices: all b_k begin at the common initial weights. ``layers = "all"`` keeps those of group, layer and instance
normalization local as well. A model without such layers is accepted with a warning and not refused: nothing stays
at the client, so the run equals FedAvg, and one comparison can cover models with and without normalization.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..core.contract import ClientInfo, ClientModel, ClientView, Method, Model, ServerView, Task
from ..core.learning.batch_losses import supervised_loss
from ..core.tree import Params
from ..models.statistics.normalization import normalization_parameters


@dataclass(frozen=True)
class FedBN(Method[Params, Params, Params, Params]):
    """FedAvg but for the scales and shifts of normalization layers, which stay at each client.

    Use it where the inputs of one class differ between clients, as with other scanners, cameras, sensors or pens.

    Attributes:
        layers: layers whose scales and shifts stay local: batch normalization as in the paper, or all
            normalization.
    """

    layers: Literal["batch", "all"] = "batch"

    title = "FedBN"
    citation = "Li et al., ICLR 2021, arXiv:2102.07623"

    def remarks(self, task: Task) -> list[str]:
        """Warn if the model has no parameter that stays local."""
        model = task.common_model(self.title)
        if self._names(model):
            return []
        other_names = normalization_parameters(model.module, "all") & model.initial.keys()
        advice = (
            " methods.fedbn.layers = 'all' keeps those of its other normalizations." if other_names else ""
        )
        return [
            f"no scale or shift of a {'batch ' * (self.layers == 'batch')}normalization is trained in model "
            f"{model.name}, so nothing stays at the clients and the run is FedAvg's.{advice}"
        ]

    def server_init(self, task: Task) -> Params:
        """θ^0, the shared part of the common initial weights."""
        model = task.common_model(self.title)
        local_names = self._names(model)
        return {n: p for n, p in model.initial.items() if n not in local_names}

    def client_init(self, client: ClientInfo, task: Task) -> Params:
        """b_k, the scales and shifts of the common initial weights."""
        model = task.model(client)
        local_names = self._names(model)
        return {n: p for n, p in model.initial.items() if n in local_names}

    def local_update(self, state: Params, down: Params, view: ClientView) -> tuple[Params, Params]:
        """Joint SGD on θ and b_k."""
        params = view.train(supervised_loss(view.model), down | state, "local", self.optimizer)
        return {n: params[n] for n in state}, {n: params[n] for n in down}

    def server_update(self, server: Params, total: Params, view: ServerView) -> Params:
        """Mean of the replies, weighted by n_k."""
        return total

    def client_model(self, state: Params, down: Params, view: ClientView) -> ClientModel:
        """The common parameters as received, with the client's own scales and shifts."""
        return ClientModel(down | state)

    def _names(self, model: Model) -> set[str]:
        """Names of the parameters that stay local."""
        return normalization_parameters(model.module, self.layers) & model.initial.keys()
