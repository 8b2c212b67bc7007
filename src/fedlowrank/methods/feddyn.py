"""FedDyn: federated learning based on dynamic regularization.

D. A. E. Acar, Y. Zhao, R. Matas Navarro, M. Mattina, P. N. Whatmough, V. Saligrama. ICLR 2021.
arXiv:2111.04263, Algorithm 1.

    server, each round t:   send θ^t to each client k of the sample S                   download
    client k:               θ_k ≈ argmin F_k(θ) - ⟨g_k, θ⟩ + α/2 ‖θ - θ^t‖² by SGD from θ^t
                            g_k ← g_k - α (θ_k - θ^t); keep g_k; send θ_k               local_update
    server:                 h ← h - α 1/M Σ_{k∈S} (θ_k - θ^t)
                            θ^{t+1} = mean_S θ_k - h / α                                server_update

M is the number of all clients that can train (those of ``run.unseen`` never do), so that h is the mean of all their
g_k in every round, also of those that were not sampled; all start at zero. At an exact solution g_k = ∇F_k(θ_k).
Both added terms enter by their derivative, α (θ - θ^t) - g_k, added to the gradient; the norm is squared. All
clients have the same weight, as in the paper, whose objective is the plain mean over clients. Weight decay is part
of F_k. The server subtracts h / α even if the clients hardly move, so a learning rate that falls to 0 does not suit
this method. The model is θ, the paper's cloud model. ``inference = "mean_of_clients"`` infers with the plain mean
of the last replies, and θ is the second series; the clients cannot compute that mean, so it is sent to them beside
θ, and its bytes count. α = 0.1 as in FedSLR's comparisons, where it is the inverse of the proximal step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..core.contract import (
    ClientInfo,
    ClientModel,
    ClientView,
    Mean,
    Method,
    ProximalTerm,
    ServerView,
    Task,
    Update,
)
from ..core.learning.batch_losses import supervised_loss
from ..core.tree import Params, add, cast_like, sub, tree_dataclass, widen, zeros_like


@tree_dataclass
class ServerState:
    """θ, the plain mean of the last replies, and h, in float32 for parameters of half precision."""

    model: Params
    mean: Params
    h: Params


@tree_dataclass
class Download:
    """θ^t, and the mean of the last replies if clients infer with it."""

    model: Params
    mean: Params | None


@dataclass(frozen=True)
class FedDyn(Method[ServerState, Params, Download, Params]):
    """Local objectives whose linear term makes their minimizers agree with that of the mean objective.

    Attributes:
        alpha: α > 0, weight of the proximal term towards the global model.
        inference: model that clients infer with: the cloud model θ, or the mean of the last replies.
    """

    alpha: float = 0.1
    inference: Literal["cloud", "mean_of_clients"] = "cloud"

    title = "FedDyn"
    citation = "Acar et al., ICLR 2021, arXiv:2111.04263"
    one_model = True
    bounds = {"alpha": "> 0"}

    def server_init(self, task: Task) -> ServerState:
        """θ^0, the common initial weights, and h = 0."""
        theta = task.common_model(self.title).initial
        return ServerState(theta, theta, zeros_like(widen(theta)))

    def client_init(self, client: ClientInfo, task: Task) -> Params:
        """The dual variable g_k is 0."""
        return zeros_like(widen(task.model(client).initial))

    def download(self, server: ServerState, client: ClientInfo) -> Download:
        """θ^t, and the mean of the last replies if clients infer with it."""
        return Download(server.model, None if self.inference == "cloud" else server.mean)

    def local_update(self, state: Params, down: Download, view: ClientView) -> tuple[Params, Params]:
        """SGD on F_k(θ) - ⟨g_k, θ⟩ + α/2 ‖θ - θ^t‖²."""
        loss = supervised_loss(view.model)
        proximal_term = ProximalTerm(self.alpha, center=down.model, linear=state)
        theta = view.train(loss, down.model, "local", self.optimizer, proximal_term=proximal_term)
        return self.follow_upload(state, state, down, theta, view), theta

    def follow_upload(
        self, before: Params, after: Params, down: Download, upload: Params, view: ClientView
    ) -> Params:
        """Compute g_k - α (θ_k - θ^t) with θ_k as it was sent, so that h stays the mean of all g_k."""
        return add(before, sub(widen(upload), down.model), -self.alpha)

    def contribution(self, server: ServerState, upload: Params, client: ClientInfo) -> Mean[Params]:
        """θ_k, all with the same weight."""
        return Mean(widen(upload))

    def server_update(self, server: ServerState, total: Params, view: ServerView) -> ServerState:
        """The dual h moves in proportion to the share of clients that replied; θ is their mean minus h / α."""
        h = add(server.h, sub(total, server.model), -self.alpha * view.share)
        model = cast_like(add(total, h, -1 / self.alpha), server.model)
        return ServerState(model, cast_like(total, server.mean), h)

    def describe_update(self, down: Download, client: ClientInfo, task: Task) -> Update:
        """The model θ_k, relative to θ^t."""
        return Update(down.model)

    def client_model(self, state: Params, down: Download, view: ClientView) -> ClientModel:
        """The model θ; or the mean of the last replies, with θ as a second series."""
        if down.mean is None:
            return ClientModel(down.model)
        return ClientModel(down.mean, {"mean_of_clients": down.mean, "cloud": down.model})
