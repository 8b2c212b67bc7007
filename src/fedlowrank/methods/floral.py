"""FLoRAL: clients mix a few federated low-rank adaptors of one base model.

Almansoori, Horváth, Takáč, "Collaborative and Efficient Personalization with Mixtures of Adaptors",
arXiv:2410.03497.

    Algorithm 1, simple FLoRAL averaging (u the base, a_c the adaptors, w_c = (u, a_c))     here
     1  for τ = 0, H, 2H, ...: the server sends u and {a_c} to k ∈ S_τ                      download
     2  client k: for t = τ, ..., τ+H-1:                                                    local_update
     3      π^k = softmax(θ^k)                                                              Router.shares
     4      θ^k ← θ^k - η_θ ∇_θ f^k(Σ_c π^k_c w_c)                                          train_mixture
     5      (u^k, a^k_c) ← (u^k, a^k_c) - η ∇ f^k(Σ_c π^k_c w_c), preconditioned (app. D)   train_mixture
     6  server: u ← Σ_k N^k u^k / Σ_k N^k                                                   server_update
     7  server: a_c ← Σ_k π^k_c N^k a^k_c / Σ_k π^k_c N^k                                   average_clusters

θ^k never leaves the client; the C numbers π^k are sent, for line 7. With optimal routing π^k is the one-hot of the
client's known cluster, and only that cluster's adaptors are sent, both ways. With ``router.update = "mfl"`` eq. 4
and 5 replace line 4: the client computes π^k_c ∝ exp(-η f^k(w_c)) for the w_c that it receives, trains and sends it
unchanged, and computes it again for the next w_c; the first round's π^k is even. Adaptors are added to the weights,
so line 5 needs one forward pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TypedDict

import torch
from torch import Tensor

from ..adapters.mixtures.adapted_parameters import KINDS, Kind, warn_adapted_ranks
from ..adapters.mixtures.mixture import EPS, Construction, Factor, check_ranks_or_budgets
from ..adapters.mixtures.mixture_adaptors import Adaptors, center_adaptors, initial_adaptors, mix_weights
from ..adapters.mixtures.parameter_budget import adaptor_warnings
from ..adapters.mixtures.router import Router
from ..core.arguments.switch import Switch, check_switch
from ..core.contract import (
    NO_UPDATE,
    ClientInfo,
    ClientModel,
    ClientView,
    Contribution,
    Mean,
    Method,
    Pass,
    ServerView,
    Task,
    Update,
)
from ..core.learning.optimizer import SGD, Optimizer, refuse_keep
from ..core.learning.server_optimizer import (
    ServerOptimizerState,
    check_server_optimizer,
    initial_optimizer_state,
    refuse_memory,
    server_step,
)
from ..core.tree import Params, cast_like, leaves, tree_dataclass, widen
from .shared.adaptors import build_mixed_model, build_preconditioner, find_adapted
from .shared.clusters import (
    ClusterTotal,
    average_clusters,
    compute_cluster_weights,
    contribute_by_cluster,
    find_routes,
    find_weighted_clusters,
    keep_unweighted_clusters,
    learn_router,
    refuse_kept_router_momentum,
    refuse_router_group,
    require_known_cluster,
    select_cluster,
    train_mixture,
    zero_router_logits,
)

Theta = Tensor | None
"""Router logits θ of a client; None before it has trained."""


class AdaptorModel(TypedDict):
    """{u, a}: the base's parameters by name, and by the adapted parameter's name the adaptors of all clusters or of one."""

    base: Params
    adaptors: Adaptors


@tree_dataclass
class ServerState:
    """The model {u, a}, and the state of the server's optimizer."""

    model: AdaptorModel
    optimizer_state: ServerOptimizerState


@tree_dataclass
class Upload:
    """The trained {u, a}, and π^k where the server does not know it."""

    model: AdaptorModel
    pi: Tensor | None


class Total(TypedDict):
    """The reduced contributions of a round."""

    base: Params
    adaptors: ClusterTotal[Adaptors]


@dataclass(frozen=True)
class FederatedFloral(Method[ServerState, Theta, AdaptorModel, Upload]):
    """Federated low-rank adaptive learning.

    Attributes:
        clusters: C, number of clusters: each adapted parameter has C adaptors.
        rank: rank of an adaptor, an integer; or, below 1, its budget ρ, a share of the parameter's size (rank 1 at
            least). An integer above the largest rank of a weight is lowered for that weight, with a warning.
        rank_pattern: ranks or budgets of single layers, by suffix of their names, such as {head = 10}.
        alpha: α, factor on the adaptors.
        construction: construction of the adaptors of convolutions.
        kinds: kinds of parameters that are adapted: linear, convolution, embedding, bias, norm.
        random_factor: factor of U Vᵀ that is random at the start; the other one is zero.
        initial_scale: factor on the random factor's range ±√(6 / columns).
        router: settings by which a client finds its mixture.
        precondition: whether the gradients of low-rank factors are preconditioned (appendix D).
        eps: ε of the preconditioner.
        center: whether the server moves the mean adaptor into the base after each round (appendix E).
        server_optimizer: optimizer of the server's step; SGD with lr 1 averages.
    """

    clusters: int = 4
    rank: float = 0.01
    rank_pattern: Mapping[str, float] = field(default_factory=dict)
    alpha: float = 1.0
    construction: Construction = "balanced"
    kinds: tuple[Kind, ...] = KINDS
    random_factor: Factor = "u"
    initial_scale: float = 1.0
    router: Router = Router()
    precondition: bool = True
    eps: float = EPS
    center: bool = False
    server_optimizer: Optimizer = SGD(lr=1.0)

    title = "FLoRAL"
    citation = "Almansoori et al. 2024, arXiv:2410.03497"
    bounds = {"clusters": ">= 1", "alpha": "> 0", "initial_scale": "> 0", "eps": "> 0"}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranks_or_budgets(type(self).__name__, self.rank, self.rank_pattern)
        check_server_optimizer("server_optimizer", self.server_optimizer, self.title)
        refuse_router_group(self.optimizer, self.title)
        refuse_kept_router_momentum(self.router, self.optimizer, self.title)
        check_switch(self, Switch("precondition", {"eps": ()}), self.title)
        if self.center:
            reason = (
                "with center = true the server factorizes the adaptors anew in every round, and gradients of other factors "
                "say nothing of these"
            )
            refuse_keep("optimizer", self.optimizer, self.title, reason)
            refuse_memory("server_optimizer", self.server_optimizer, self.title, reason)

    def remarks(self, task: Task) -> list[str]:
        """Layers that are too small for the budget, and weight matrices without adaptors."""
        model = task.common_model(self.title)
        return adaptor_warnings(model.module, find_adapted(self, model))

    def passes(self) -> dict[str, Pass]:
        """Local training, and the steps in which a new client learns its router."""
        return self.router.passes(self.main_pass)

    def server_init(self, task: Task) -> ServerState:
        """The base u^0, and adaptors whose product is zero."""
        model, key = task.common_model(self.title), task.key / "adaptors"
        adapted_parameters, u = find_adapted(self, model), model.initial
        warn_adapted_ranks(self.title, adapted_parameters)
        a = initial_adaptors(
            adapted_parameters,
            self.clusters,
            key,
            self.construction,
            u,
            self.random_factor,
            self.initial_scale,
        )
        return ServerState({"base": u, "adaptors": a}, initial_optimizer_state())

    def client_init(self, client: ClientInfo, task: Task) -> Theta:
        """No θ until the client has trained."""
        if self.router.routing == "optimal":
            require_known_cluster(self.title, client, self.clusters)
        return None

    def download(self, server: ServerState, client: ClientInfo) -> AdaptorModel:
        """The base u and the adaptors; with optimal routing only the adaptors of the client's cluster."""
        if self.router.routing == "learned":
            return server.model
        cluster = require_known_cluster(self.title, client, self.clusters)
        return {"base": server.model["base"], "adaptors": select_cluster(server.model["adaptors"], cluster)}

    def local_update(self, state: Theta, down: AdaptorModel, view: ClientView) -> tuple[Theta, Upload]:
        """Lines 2 to 5: train θ, u and the adaptors."""
        theta = zero_router_logits(down["adaptors"]) if state is None else state
        apply, precondition = build_mixed_model(self, view.model), build_preconditioner(self)
        model, theta = train_mixture(self.router, down, theta, apply, self.optimizer, view, precondition)
        if self.router.routing == "optimal":
            return None, Upload(model, None)
        kept_theta = theta if self.router.keep and self.router.trains_theta else None
        return kept_theta, Upload(model, self.router.shares(theta))

    def contribution(self, server: ServerState, upload: Upload, client: ClientInfo) -> Contribution:
        """u^k weighted by N^k, and each a^k_c weighted by π^k_c N^k."""
        weights = compute_cluster_weights(self.title, client, upload.pi, self.clusters)
        model = widen(upload.model)
        base = Mean(model["base"], client.example_count)
        return {"base": base, "adaptors": contribute_by_cluster(model["adaptors"], weights)}

    def server_update(self, server: ServerState, total: Total, view: ServerView) -> ServerState:
        """Lines 6 and 7, and a step of the server's optimizer towards their result.

        A cluster without weight keeps its adaptors, and the optimizer's memory of them.
        """
        old_model = widen(server.model)
        mean_model: AdaptorModel = {
            "base": total["base"],
            "adaptors": average_clusters(old_model["adaptors"], total["adaptors"]),
        }
        model, optimizer_state = server_step(
            self.server_optimizer, old_model, mean_model, server.optimizer_state, view.round
        )
        has_weight = find_weighted_clusters(total["adaptors"])
        if not bool(has_weight.all()):
            kept_adaptors = keep_unweighted_clusters(model["adaptors"], old_model["adaptors"], has_weight)
            model = {"base": model["base"], "adaptors": kept_adaptors}
            optimizer_state = self._keep_unweighted_memory(server, optimizer_state, has_weight)
        if self.center:
            weights = total["adaptors"]["weights"]
            u, a = model["base"], model["adaptors"]
            u, a = center_adaptors(u, a, weights / weights.sum(), self.alpha, self.construction)
            model = {"base": u, "adaptors": a}
        return ServerState(cast_like(model, server.model), optimizer_state)

    def _keep_unweighted_memory(
        self, server: ServerState, state: ServerOptimizerState, has_weight: Tensor
    ) -> ServerOptimizerState:
        """Give the adaptors of clusters without weight the optimizer's memory of the round before."""
        paths = [path for path, _ in leaves(server.model)]
        zeros = [torch.zeros_like(t) for _, t in leaves(widen(server.model))]
        kept_tensors = [
            [
                keep_unweighted_clusters(new, old, has_weight) if path.startswith("/adaptors/") else new
                for path, new, old in zip(paths, slot, old_slot or zeros, strict=True)
            ]
            for slot, old_slot in zip_longest(state.tensors, server.optimizer_state.tensors)
        ]
        return ServerOptimizerState(kept_tensors, state.count)

    def describe_update(self, down: AdaptorModel, client: ClientInfo, task: Task) -> Update:
        """The model {u, a}, relative to {u, a} as it was sent; π^k is no update."""
        return Update({"model": down, "pi": NO_UPDATE})

    def client_model(self, state: Theta, down: AdaptorModel, view: ClientView) -> ClientModel:
        """The plain model with the weights Σ_c π^k_c w_c; a client without θ learns it first."""
        apply, initial_theta = build_mixed_model(self, view.model), zero_router_logits(down["adaptors"])
        theta = learn_router(self.router, down, initial_theta, apply, view) if state is None else state
        pi = self.router.shares(theta)
        params = mix_weights(down["base"], down["adaptors"], pi, self.alpha, self.construction)
        return ClientModel(params, routes=find_routes(self.title, self.router, view.info, pi, self.clusters))
