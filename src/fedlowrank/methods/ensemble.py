"""Ensemble: C whole models that every client mixes in its own shares.

The baseline of Almansoori, Horváth, Takáč, arXiv:2410.03497, Table 1: problem (FML) without weight sharing.

    Each round                                                                              here
     1  the server sends {w_c} to k ∈ S_t                                                   download
     2  client k: one SGD on θ^k and all w^k_c of the mixture's loss, π^k = softmax(θ^k)    local_update
     3  server: w_c ← Σ_k π^k_c N^k w^k_c / Σ_k π^k_c N^k                                   server_update

With optimal routing π^k is the one-hot of the known cluster and only that model is sent: FedAvg in every cluster.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ..adapters.mixtures.router import Router
from ..core.contract import (
    NO_UPDATE,
    ClientInfo,
    ClientModel,
    ClientView,
    Contribution,
    Method,
    Model,
    Pass,
    ServerView,
    Task,
    Update,
)
from ..core.tree import Params, map_leaves, tree_dataclass
from .shared.clusters import (
    Apply,
    ClusterTotal,
    average_clusters,
    compute_cluster_weights,
    contribute_by_cluster,
    describe_draws,
    draw_models,
    find_routes,
    learn_router,
    refuse_kept_router_momentum,
    refuse_router_group,
    require_known_cluster,
    select_cluster,
    train_mixture,
    unbind_models,
    zero_router_logits,
)


@tree_dataclass
class Upload:
    """The trained models, and π^k where the server does not know it."""

    models: Params
    pi: Tensor | None


@dataclass(frozen=True)
class Ensemble(Method[Params, Tensor | None, Params, Upload]):
    """C whole models and a router.

    Attributes:
        clusters: C, number of models.
        mix: mixed quantity: outputs, Σ_c π_c f(w_c; x), in C forward passes; or weights, f(Σ_c π_c w_c; x), in one.
        router: settings by which a client finds its mixture.
    """

    clusters: int = 4
    mix: Literal["outputs", "weights"] = "outputs"
    router: Router = Router()

    title = "Ensemble"
    citation = "Almansoori et al. 2024, arXiv:2410.03497"
    bounds = {"clusters": ">= 1"}

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_router_group(self.optimizer, self.title)
        refuse_kept_router_momentum(self.router, self.optimizer, self.title)

    def passes(self) -> dict[str, Pass]:
        """Local training, and the steps in which a new client learns its router."""
        return self.router.passes(self.main_pass)

    def remarks(self, task: Task) -> list[str]:
        """Warn of models that do not begin at the weights of the user's module."""
        return describe_draws(self.title, task, self.clusters)

    def server_init(self, task: Task) -> Params:
        """C draws of the initial weights ``[C, ...]``; the first is that of every other method."""
        return draw_models(self.title, task, self.clusters)

    def client_init(self, client: ClientInfo, task: Task) -> Tensor | None:
        """No θ until the client has trained."""
        if self.router.routing == "optimal":
            require_known_cluster(self.title, client, self.clusters)
        return None

    def download(self, server: Params, client: ClientInfo) -> Params:
        """All models; with optimal routing only the client's own."""
        optimal = self.router.routing == "optimal"
        return (
            select_cluster(server, require_known_cluster(self.title, client, self.clusters))
            if optimal
            else server
        )

    def local_update(
        self, state: Tensor | None, down: Params, view: ClientView
    ) -> tuple[Tensor | None, Upload]:
        """Line 2."""
        theta = zero_router_logits(down) if state is None else state
        apply = self._apply(view.model)
        parts, theta = train_mixture(self.router, {"models": down}, theta, apply, self.optimizer, view)
        if self.router.routing == "optimal":
            return None, Upload(parts["models"], None)
        return theta if self.router.keep and self.router.trains_theta else None, Upload(
            parts["models"], self.router.shares(theta)
        )

    def contribution(self, server: Params, upload: Upload, client: ClientInfo) -> Contribution:
        """Each w^k_c weighted by π^k_c N^k."""
        return contribute_by_cluster(
            upload.models, compute_cluster_weights(self.title, client, upload.pi, self.clusters)
        )

    def server_update(self, server: Params, total: ClusterTotal[Params], view: ServerView) -> Params:
        """Line 3."""
        return average_clusters(server, total)

    def describe_update(self, down: Params, client: ClientInfo, task: Task) -> Update:
        """The models, relative to the models as they were sent; π^k is no update."""
        return Update({"models": down, "pi": NO_UPDATE})

    def client_model(self, state: Tensor | None, down: Params, view: ClientView) -> ClientModel:
        """The mixture; for export the model with the largest share, since one model is not the mixture."""
        apply, theta = self._apply(view.model), state
        if theta is None:
            theta = learn_router(self.router, {"models": down}, zero_router_logits(down), apply, view)
        pi = self.router.shares(theta)
        routes = find_routes(self.title, self.router, view.info, pi, self.clusters)

        def params() -> Params:
            if self.mix == "outputs":
                return map_leaves(lambda t: t[int(pi.argmax())], down)
            return map_leaves(lambda t: torch.tensordot(pi.to(t.dtype), t, 1), down)

        return ClientModel(params, {"personal": lambda x: apply({"models": down}, pi, x)}, routes=routes)

    def _apply(self, model: Model) -> Apply:
        mixes_outputs = self.mix == "outputs"

        def apply(parts: dict[str, Any], pi: Tensor, x: Any) -> Tensor:
            models: Params = parts["models"]
            if not mixes_outputs:
                return model.apply({n: torch.tensordot(pi.to(t.dtype), t, 1) for n, t in models.items()}, x)
            scores = torch.stack([model.apply(params, x) for params in unbind_models(models)], -1)
            mixture: Tensor = scores @ pi.to(scores.dtype)
            return mixture

        return apply
