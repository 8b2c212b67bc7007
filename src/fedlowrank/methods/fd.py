"""FD: communication-efficient on-device machine learning, federated distillation under non-IID private data.

E. Jeong, S. Oh, H. Kim, J. Park, M. Bennis, S.-L. Kim. 2018. arXiv:1811.11479, Algorithm 1 (FD, without
augmentation).

    server, each round t:   for every label j, send to client k the mean Ĝ_{k,j}
                            of the other clients' F_{i,j}                                       download
    client k:               θ_k ← SGD on CE + γ CE(·, Ĝ_{k,y}), E epochs
                            F_{k,j} = mean softmax output over its examples of label j;
                            keep θ_k; send F_k                                                  local_update
    server:                 remember F_k; leave one out: Ĝ_{k,j} = mean_{i≠k, i owns j} F_{i,j} server_update

Outputs are probabilities: raw logits as targets diverge. A label that no other client owns has no target and its term
is left out.

Differences from the paper: F is taken in one pass after training (the paper accumulates it during training); under
partial participation the mean is over each client's latest reply.

Choices: clients of one architecture begin with the same initial weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.contract import (
    NO_UPDATE,
    ZERO_REFERENCE,
    Batch,
    ClientInfo,
    ClientModel,
    ClientView,
    Each,
    Lengths,
    Method,
    ServerView,
    Task,
    Update,
)
from ..core.learning.batch_losses import soft_cross_entropy, task_loss
from ..core.tree import Params, tree_dataclass
from .shared.class_statistics import (
    check_class_labels,
    check_class_scores,
    count_outputs,
    zero_rows_per_class,
)


@tree_dataclass
class Outputs:
    """Mean outputs of one client: for each label it owns ``labels [m]`` a row of ``mean [m, outputs]``.

    They are statistics, so they are in float32 even for a model in half precision.
    """

    labels: Tensor
    mean: Tensor


@tree_dataclass
class Targets:
    """Soft target ``mean [classes, outputs]`` of each label in the mask ``is_known [classes]``."""

    mean: Tensor
    is_known: Tensor


@tree_dataclass
class ServerState:
    """The sum and the number of the outputs for each label, and each client's part of both."""

    total: Tensor
    count: Tensor
    latest: dict[str, Outputs]


@dataclass(frozen=True)
class FD(Method[ServerState, Params, Targets, Outputs]):
    """Federated distillation of mean outputs per label.

    Attributes:
        gamma: γ ≥ 0, weight of the distillation term.
    """

    gamma: float = 1.0

    title = "FD"
    citation = "Jeong et al. 2018, arXiv:1811.11479"
    bounds = {"gamma": ">= 0"}
    needs_classes = True
    heterogeneous = True

    def server_init(self, task: Task) -> ServerState:
        """No output is known; raises TaskError if models differ in their outputs or type, or lack outputs for classes."""
        check_class_scores(self.title, task)
        total = zero_rows_per_class(self.title, task, count_outputs(self.title, task))
        return ServerState(total, total.new_zeros(task.classes), {})

    def client_init(self, client: ClientInfo, task: Task) -> Params:
        """θ_k starts at its architecture's initial weights."""
        return task.model(client).initial

    def download(self, server: ServerState, client: ClientInfo) -> Targets:
        """Ĝ_k: the means over the other clients."""
        total, count = server.total, server.count
        latest_outputs = server.latest.get(str(client.id))
        if latest_outputs is not None:
            total = total.index_add(0, latest_outputs.labels, latest_outputs.mean, alpha=-1)
            count = count.index_add(
                0, latest_outputs.labels, torch.ones_like(latest_outputs.mean[:, 0]), alpha=-1
            )
        is_known = count > 0
        return Targets(torch.where(is_known[:, None], total / count.clamp(min=1)[:, None], 0.0), is_known)

    def local_update(self, state: Params, down: Targets, view: ClientView) -> tuple[Params, Outputs]:
        """SGD with distillation, then the mean output of each own label."""
        model, gamma = view.model, self.gamma

        def loss(theta: Params, batch: Batch, targets: Targets) -> Tensor:
            scores = model.apply(theta, batch.x)
            distillation = soft_cross_entropy(scores, targets.mean[batch.y]) * targets.is_known[batch.y]
            return task_loss(scores, batch) + gamma * batch.mean(distillation)

        def sum_by_label(theta: Params, batch: Batch, eye: Tensor) -> tuple[Tensor, Tensor]:
            one_hot = eye[batch.y]
            outputs = model.apply(theta, batch.x).softmax(-1)
            return batch.sum(one_hot[:, :, None] * outputs[:, None, :]), batch.sum(one_hot)

        theta = view.train(loss, state, "local", self.optimizer, constants=(down,))
        total, count = view.sum_over_data(
            sum_by_label, theta, constants=(torch.eye(view.task.classes).to(down.mean),)
        )
        labels = count.nonzero()[:, 0]
        return theta, Outputs(labels, total[labels] / count[labels, None])

    def contribution(self, server: ServerState, upload: Outputs, client: ClientInfo) -> Each[Outputs]:
        """The client's own outputs, kept apart so that the next download to it can leave them out."""
        check_class_labels(self.title, upload.labels, len(server.total), client)
        return Each(upload)

    def server_update(self, server: ServerState, total: dict[int, Outputs], view: ServerView) -> ServerState:
        """Replace the outputs of every client that replied."""
        latest = server.latest | {str(client_id): outputs for client_id, outputs in total.items()}
        sums, count = torch.zeros_like(server.total), torch.zeros_like(server.count)
        for client_outputs in latest.values():
            sums.index_add_(0, client_outputs.labels, client_outputs.mean)
            count.index_add_(0, client_outputs.labels, torch.ones_like(client_outputs.mean[:, 0]))
        return ServerState(sums, count, latest)

    def describe_update(self, down: Targets, client: ClientInfo, task: Task) -> Update:
        """The mean outputs themselves, not a difference; a row for every label that the client owns."""
        form = Lengths(Outputs(torch.zeros(0, dtype=torch.int64), down.mean[:0]), task.classes)
        return Update({"labels": NO_UPDATE, "mean": ZERO_REFERENCE}, form=form)

    def client_model(self, state: Params, down: Targets, view: ClientView) -> ClientModel:
        """The client's model θ_k."""
        return ClientModel(state)
