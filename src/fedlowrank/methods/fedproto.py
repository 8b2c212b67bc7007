"""FedProto: federated prototype learning across heterogeneous clients.

Y. Tan, G. Long, L. Liu, T. Zhou, Q. Lu, J. Jiang, C. Zhang. AAAI 2022. arXiv:2105.00243, Algorithm 1.

    server, each round t:   send the prototypes c̄_j of the classes seen so far          download
    client k:               θ_k ← SGD on CE + λ/d ‖f_k(x) - c̄_y‖², E epochs; d the width of f_k(x)
                            c_{k,j} = mean of f_k(x) over its n_{k,j} examples of class j
                            keep θ_k; send c_k and n_k                                  local_update
    server:                 c̄_j = Σ_k n_{k,j} c_{k,j} / Σ_k n_{k,j}, over the owners    server_update

The term of a class without a prototype is left out. Prototypes come from one pass after training. A class
that no reply covers keeps its last prototype. Inference is by the classifier (default, as tables of local
models need), or by the nearest prototype over all classes (the paper's) or over the client's own; before
there is any usable prototype, the classifier infers.

Choices: the squared distance is divided by d, as in the authors' code, where λ = 1; owners of a prototype
have the weights n_{k,j} (``weighting = "uniform"`` gives each the same); clients of one architecture begin
with the same initial weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ..core.contract import (
    NO_UPDATE,
    ZERO_REFERENCE,
    Batch,
    ClientInfo,
    ClientModel,
    ClientView,
    Contribution,
    Lengths,
    Method,
    ServerView,
    Sum,
    Task,
    Update,
)
from ..core.learning.batch_losses import task_loss
from ..core.tree import Params, tree_dataclass, widen
from .shared.averaging import Weighting
from .shared.class_statistics import check_class_labels, check_class_scores, zero_rows_per_class


@tree_dataclass
class Prototypes:
    """Global prototypes ``mean [classes, d]`` of the classes in the mask ``is_known [classes]``, at least in float32."""

    mean: Tensor
    is_known: Tensor


@tree_dataclass
class Upload:
    """Prototypes of one client: ``labels [m]`` of its classes with ``mean [m, d]`` and ``count [m]``."""

    labels: Tensor
    mean: Tensor
    count: Tensor


@tree_dataclass
class ClientState:
    """The client's model, and which classes its data have ``[classes]``."""

    model: Params
    is_owned: Tensor


@dataclass(frozen=True)
class FedProto(Method[Prototypes, ClientState, Prototypes, Upload]):
    """Exchange of class prototypes instead of weights.

    Attributes:
        lam: λ ≥ 0, weight of the distance to the global prototype.
        inference: rule of inference: the classifier, the nearest prototype of all classes, or that of the client's
            own classes.
        weighting: weight of a client in a prototype: the number of its examples of the class, or uniform.
    """

    lam: float = 1.0
    inference: Literal["classifier", "nearest", "nearest_own"] = "classifier"
    weighting: Weighting = "examples"

    title = "FedProto"
    citation = "Tan et al., AAAI 2022, arXiv:2105.00243"
    bounds = {"lam": ">= 0"}
    needs_classes = True
    heterogeneous = True

    def server_init(self, task: Task) -> Prototypes:
        """No prototype is known; raises TaskError if scores by prototypes are no scores of the models' form."""
        if self.inference != "classifier":
            check_class_scores(self.title, task)
        mean = zero_rows_per_class(self.title, task, task.common_width(self.title))
        return Prototypes(mean, torch.zeros(task.classes, dtype=torch.bool, device=mean.device))

    def client_init(self, client: ClientInfo, task: Task) -> ClientState:
        """θ_k starts at its architecture's initial weights."""
        initial = task.model(client).initial
        device = next(iter(initial.values())).device
        return ClientState(initial, torch.zeros(task.classes, dtype=torch.bool, device=device))

    def local_update(
        self, state: ClientState, down: Prototypes, view: ClientView
    ) -> tuple[ClientState, Upload]:
        """SGD towards the global prototypes, then the client's own."""
        model, lam = view.model, self.lam

        def loss(theta: Params, batch: Batch, protos: Prototypes) -> Tensor:
            r = model.represent(theta, batch.x)
            distances = (r - protos.mean[batch.y]).square().mean(-1) * protos.is_known[batch.y]
            return task_loss(model.head(theta, r), batch) + lam * batch.mean(distances)

        def sum_by_class(theta: Params, batch: Batch, eye: Tensor) -> tuple[Tensor, Tensor]:
            r, one_hot = model.represent(theta, batch.x), eye[batch.y]
            return batch.sum(one_hot[:, :, None] * r[:, None, :]), batch.sum(one_hot)

        theta = view.train(loss, state.model, "local", self.optimizer, constants=(down,))
        total, count = view.sum_over_data(
            sum_by_class, theta, constants=(torch.eye(view.task.classes).to(down.mean),)
        )
        labels = count.nonzero()[:, 0]
        return ClientState(theta, count > 0), Upload(
            labels, total[labels] / count[labels, None], count[labels].to(torch.int64)
        )

    def contribution(self, server: Prototypes, upload: Upload, client: ClientInfo) -> Contribution:
        """The sum of the prototypes of each class, and their weights."""
        check_class_labels(self.title, upload.labels, len(server.mean), client)
        # over a network a client could claim any count; it is at most its number of examples
        count = upload.count.clamp(max=client.example_count)
        weights = (count if self.weighting == "examples" else torch.ones_like(count)).to(server.mean)
        prototypes = torch.zeros_like(server.mean).index_add(0, upload.labels, weights[:, None] * upload.mean)
        return {
            "sum": Sum(prototypes),
            "weight": Sum(torch.zeros_like(server.mean[:, 0]).index_add(0, upload.labels, weights)),
        }

    def server_update(self, server: Prototypes, total: dict[str, Tensor], view: ServerView) -> Prototypes:
        """Mean over the owners of each class; a class without owners keeps its prototype."""
        has_owner = total["weight"] > 0
        mean = total["sum"] / torch.where(has_owner, total["weight"], 1.0)[:, None]
        return Prototypes(torch.where(has_owner[:, None], mean, server.mean), server.is_known | has_owner)

    def describe_update(self, down: Prototypes, client: ClientInfo, task: Task) -> Update:
        """The prototypes themselves, not a difference; a row for every class that the client owns."""
        no_integers = torch.zeros(0, dtype=torch.int64)
        form = Lengths(Upload(no_integers, down.mean[:0], no_integers), task.classes)
        return Update({"labels": NO_UPDATE, "mean": ZERO_REFERENCE, "count": NO_UPDATE}, form=form)

    def client_model(self, state: ClientState, down: Prototypes, view: ClientView) -> ClientModel:
        """θ_k with its classifier, or with minus the distance to each usable prototype as scores."""
        model = view.model
        is_usable = down.is_known & state.is_owned if self.inference == "nearest_own" else down.is_known
        if self.inference == "classifier" or not bool(is_usable.any()):
            return ClientModel(state.model)

        def score_by_distance(x: Any) -> Tensor:
            distances = torch.cdist(widen(model.represent(state.model, x)), down.mean)
            return torch.where(is_usable, -distances, -torch.inf)

        return ClientModel(state.model, {"personal": score_by_distance})
