"""IFCA: an efficient framework for clustered federated learning.

A. Ghosh, J. Chung, D. Yin, K. Ramchandran. NeurIPS 2020. arXiv:2006.04088, Algorithm 1, option II (model
averaging).

    server, each round t:   send θ_1, ..., θ_C to each client k of the sample S_t                download
    client k:               ĵ = argmin_j F_k(θ_j); s_k the one-hot of ĵ               find_nearest_model
                            θ_k ← SGD on F_k from θ_ĵ, E epochs; send θ_k - θ_ĵ and s_k          local_update
    server:                 θ_k = θ_ĵ + (θ_k - θ_ĵ)                                              contribution
                            θ_j ← Σ_k s_kj n_k θ_k / Σ_k s_kj n_k                                server_update
    inference:              θ_ĵ, with ĵ chosen anew from the models received                     client_model

F_k is the mean loss over all training examples of the client. A model that no client picked stays as it was.
The paper takes the plain mean of the members; so does ``weighting = "uniform"``. The paper's clients send θ_k itself;
its change is what clipping and rules against attacks bound. The models begin at different
draws and share no layers, and a client keeps no state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.contract import (
    NO_UPDATE,
    Batch,
    ClientInfo,
    ClientModel,
    ClientView,
    Contribution,
    Method,
    ServerView,
    Task,
    Update,
)
from ..core.learning.batch_losses import sum_losses, task_loss
from ..core.tree import Params, cast_like, map_leaves, sub, tree_dataclass, widen, zeros_like
from .shared.averaging import Weighting, reply_weight
from .shared.clusters import (
    ClusterTotal,
    average_clusters,
    clamp_shares,
    compute_model_losses,
    contribute_by_cluster,
    describe_draws,
    draw_models,
    select_cluster,
)


@tree_dataclass
class Upload:
    """The change of the trained model ``[1, ...]``, and the one-hot s_k ``[C]`` of its cluster."""

    change: Params
    choice: Tensor


def find_nearest_model(down: Params, view: ClientView) -> int:
    """Find the index of the model with the lowest loss on the client's training data; the first one wins ties.

    A loss of NaN counts as infinite.
    """
    model = view.model

    def sum_model_losses(models: Params, batch: Batch) -> Tensor:
        return sum_losses(compute_model_losses(model, models, batch), batch)[0]

    losses = view.sum_over_data(sum_model_losses, down)
    # a model that has diverged is the nearest of none; argmin takes NaN for the smallest number
    return int(losses.nan_to_num(nan=math.inf, posinf=math.inf).argmin())


@dataclass(frozen=True)
class IFCA(Method[Params, None, Params, Upload]):
    """C whole models, of which every client trains the one that fits it best.

    Attributes:
        clusters: C, number of models.
        weighting: weight of a reply in the mean: the client's number of training examples n_k, or uniform.
    """

    clusters: int = 4
    weighting: Weighting = "examples"

    title = "IFCA"
    citation = "Ghosh et al., NeurIPS 2020, arXiv:2006.04088"
    bounds = {"clusters": ">= 1"}
    keep_refusal = "a client may train the model of another cluster in the next round"

    def remarks(self, task: Task) -> list[str]:
        """Warn of models that do not begin at the weights of the user's module."""
        return describe_draws(self.title, task, self.clusters)

    def server_init(self, task: Task) -> Params:
        """C draws of the initial weights ``[C, ...]``."""
        return draw_models(self.title, task, self.clusters)

    def local_update(self, state: None, down: Params, view: ClientView) -> tuple[None, Upload]:
        """Choose a model, and train it."""
        model, cluster = view.model, find_nearest_model(down, view)

        def loss(p: Params, batch: Batch) -> Tensor:
            return task_loss(model.apply({n: t.squeeze(0) for n, t in p.items()}, batch.x), batch)

        start = select_cluster(down, cluster)
        change = sub(widen(view.train(loss, start, "local", self.optimizer)), start)
        return None, Upload(cast_like(change, start), self._one_hot(cluster, down))

    def contribution(self, server: Params, upload: Upload, client: ClientInfo) -> Contribution:
        """The trained model, in the mean of the cluster that the client chose."""
        weight = reply_weight(client, self.weighting)
        models = map_leaves(lambda t, change: t + change, widen(server), upload.change)
        return contribute_by_cluster(models, clamp_shares(upload.choice).double() * weight)

    def server_update(self, server: Params, total: ClusterTotal[Params], view: ServerView) -> Params:
        """The mean of the members of each cluster."""
        return average_clusters(server, total)

    def describe_update(self, down: Params, client: ClientInfo, task: Task) -> Update:
        """The change of the chosen model, relative to zeros; the choice is no update."""
        return Update({"change": zeros_like(select_cluster(down, 0)), "choice": NO_UPDATE})

    def client_model(self, state: None, down: Params, view: ClientView) -> ClientModel:
        """The model that fits the client's training data best."""
        cluster = find_nearest_model(down, view)
        return ClientModel(map_leaves(lambda t: t[cluster], down), routes=self._one_hot(cluster, down))

    def _one_hot(self, cluster: int, params: Params) -> Tensor:
        return torch.eye(self.clusters)[cluster].to(next(iter(params.values())))
