"""FedAvgM: measuring the effects of non-identical data distribution for federated visual classification.

T.-M. H. Hsu, H. Qi, M. Brown. 2019. arXiv:1909.06335, FedAvg with server momentum.

    server, each round t:   send w^t to each client k of the sample S_t                 download
    client k:               w_k ← SGD on F_k from w^t, E epochs; send w_k               local_update
    server:                 Δ = Σ_{k∈S_t} n_k (w^t - w_k) / Σ_{k∈S_t} n_k
                            v ← β v + Δ
                            w^{t+1} = w^t - η_s v                                       server_update

v begins at zero. Δ points from the clients' mean to the old model, as a gradient does; with β = 0 and η_s = 1 the
server takes the clients' mean, which is FedAvg. v grows to Δ / (1 - β) where Δ stays the same, so a large β asks for
a smaller learning rate of server or clients.

Choices: the paper has η_s = 1; the momentum is the plain one and not Nesterov's. BatchNorm is treated as in FedAvg.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..core.contract import ClientInfo, Method, ServerView, Task
from ..core.tree import Params, add, cast_like, sub, tree_dataclass, widen, zeros_like
from .shared.averaging import Weighting, average_models, train_model


@tree_dataclass
class ServerState:
    """The model w and its velocity v, in float32 for parameters of half precision."""

    model: Params
    velocity: Params


@dataclass(frozen=True)
class FedAvgM(Method[ServerState, None, Params, Params]):
    """FedAvg with momentum on the server.

    Use it where clients hold different classes or few of them take part in a round, so that FedAvg's model swings
    from round to round. Clients do the same work as in FedAvg.

    Attributes:
        server_momentum: β in [0, 1), factor on the velocity.
        server_lr: η_s > 0, learning rate of the server.
        weighting: weight of a reply in the mean: the client's number of training examples n_k, or uniform.
    """

    server_momentum: float = 0.9
    server_lr: float = 1.0
    weighting: Weighting = "examples"

    title = "FedAvgM"
    citation = "Hsu et al. 2019, arXiv:1909.06335"
    one_model = True
    bounds = {"server_momentum": ">= 0 and < 1", "server_lr": "> 0"}

    def server_init(self, task: Task) -> ServerState:
        """The common initial weights, and v = 0."""
        w = task.common_model(self.title).initial
        return ServerState(w, zeros_like(widen(w)))

    def download(self, server: ServerState, client: ClientInfo) -> Params:
        """The model w^t."""
        return server.model

    local_update = train_model
    contribution = average_models

    def server_update(self, server: ServerState, total: Params, view: ServerView) -> ServerState:
        """A step with momentum from w^t towards the mean of the replies."""
        # v <- β v + Δ with Δ = w^t - mean of w_k
        velocity = add(sub(server.model, total), server.velocity, self.server_momentum)
        return ServerState(cast_like(add(server.model, velocity, -self.server_lr), server.model), velocity)
