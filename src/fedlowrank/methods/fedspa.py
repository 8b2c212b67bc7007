"""FedSpa: achieving personalized federated learning with sparse local models.

T. Huang, S. Liu, L. Shen, F. He, W. Lin, D. Tao. 2022. arXiv:2201.11380, Algorithms 1 and 2 (dynamic sparse
training).

    server, each round t:   send m_k ⊙ w^t to each client k of the sample S_t               download
    client k:               w_k ← masked SGD on F_k from m_k ⊙ w^t: w ← w - η m_k ⊙ ∇F_k(w)
                            U_k = m_k ⊙ w^t - w_k
                            in each layer with n active weights, p = ⌈n · α/2 (1 + cos(π t / T))⌉:
                              m_k loses its p smallest |w_k| and gains the p largest |∇F_k(w_k)|
                              (the dense gradient of one batch) outside the remaining mask
                            keep m_k; send U_k and the new m_k                              local_update
    server:                 w^{t+1} = w^t - 1/|S_t| Σ_{k∈S_t} U_k                           server_update
    inference:              m_k ⊙ w^{t+1}                                                   client_model

The mean is over all of S_t for every entry, also over clients whose mask does not hold it. The layers' densities
are Erdős-Rényi-kernel: a weight of shape (o, i, k1, k2) has density min(1, ε (o + i + k1 + k2) / (o i k1 k2)), with
ε such that all parameters together have the requested density; vectors (biases, scales of norms) are dense and
count. n never changes.

Only the values on the mask are sent of each masked weight, in row-major order. Both sides know m_k: each client's
first mask is drawn from the common randomness (``task.key``); afterwards the client sends its new mask, as bits,
beside the update. If a reply is lost, both sides keep the old mask. Static masks (α = 0) are never sent.

Choices: a pruned weight may grow again, as in public code. Where all gradients are equal (zero), the pruned weights
grow again, so the mask does not change where nothing is learnt. The gradient comes from one step of plain SGD on a
change that starts at zero.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import NotRequired, TypedDict

import torch
from torch import Tensor

from ..adapters.adaptable import refuse_computed_weights
from ..core.arguments.shares import multiply_share
from ..core.contract import (
    NO_UPDATE,
    ZERO_REFERENCE,
    Batch,
    ClientInfo,
    ClientModel,
    ClientView,
    Contribution,
    Each,
    Mean,
    Method,
    Pass,
    ServerView,
    Task,
    Update,
)
from ..core.errors import TaskError
from ..core.learning.batch_losses import supervised_loss, task_loss
from ..core.learning.optimizer import SGD
from ..core.tree import Params, add, cast_like, sub, tree_dataclass, widen, zeros_like
from ..linalg.matricize import Sparse
from ..linalg.nuclear_norm import penalized_names

Masks = dict[str, Tensor]


@tree_dataclass
class ServerState:
    """The dense model w, and the mask of every client."""

    model: Params
    masks: dict[str, Masks]


@tree_dataclass
class Upload:
    """Values of the update on the mask that was trained, and the next mask (nothing if masks are static)."""

    update: Params
    masks: Masks


def layer_counts(params: Params, density: float, complex_names: Collection[str] = ()) -> dict[str, int]:
    """Count the active entries of every weight of two or more dimensions, by Erdős-Rényi-kernel densities.

    A weight without entries has no mask. Complex parameters, given by their names, have one dimension more than in
    their module.
    """
    names = penalized_names(params, complex_names=complex_names)
    weights, counts = {n: params[n] for n in names if params[n].numel()}, {}
    # a complex entry is two real ones
    sizes = {n: 2 * sum(p.shape[:-1]) if n in complex_names else sum(p.shape) for n, p in weights.items()}
    vectors = sum(p.numel() for n, p in params.items() if n not in names)
    budget = density * sum(p.numel() for p in params.values()) - vectors
    if budget < len(weights):
        raise TaskError(
            f"at density {density} the dense vectors leave nothing for the weights; raise density"
        )
    # weights that are full at the smallest ε come first; the others share the entries that do not fit
    for name in sorted(weights, key=lambda n: weights[n].numel() / sizes[n]):
        share = sizes[name] / sum(size for n, size in sizes.items() if n not in counts)
        exact_count = min(budget * share, weights[name].numel())
        counts[name], budget = max(1, round(exact_count)), budget - exact_count
    return counts


def next_mask(mask: Tensor, weight: Tensor, gradient: Tensor, rate: float) -> Tensor:
    """Replace the smallest weights of the mask by as many entries with the largest gradients."""
    flat_mask, weight_magnitudes, gradient_magnitudes = (
        mask.flatten(),
        weight.abs().flatten(),
        gradient.abs().flatten(),
    )
    active_indices, exchange_count = (
        flat_mask.nonzero()[:, 0],
        math.ceil(multiply_share(rate, int(mask.sum()))),
    )
    pruned_indices = active_indices[weight_magnitudes[active_indices].argsort(stable=True)[:exchange_count]]
    # the sort is stable, so the entries that were just pruned come first and win ties
    inactive_indices = torch.cat([pruned_indices, (~flat_mask).nonzero()[:, 0]])
    grown_indices = inactive_indices[
        gradient_magnitudes[inactive_indices].argsort(descending=True, stable=True)[:exchange_count]
    ]
    return (
        flat_mask.index_fill(0, pruned_indices, False).index_fill(0, grown_indices, True).reshape(mask.shape)
    )


def gather_values(params: Params, masks: Masks) -> Params:
    """Gather the values on the mask ``[n]``; vectors stay whole."""
    return {n: p[masks[n]] if n in masks else p for n, p in params.items()}


def scatter_values(values: Params, masks: Masks) -> Params:
    """Inverse of :func:`gather_values`, zero outside the mask."""
    return {n: Sparse(v, masks[n]).dense() if n in masks else v for n, v in values.items()}


class Total(TypedDict):
    """The reduced contributions of a round."""

    update: Params
    masks: NotRequired[dict[int, Masks]]


@dataclass(frozen=True)
class FedSpa(Method[ServerState, Masks, Params, Upload]):
    """Personal sparse masks on one dense model.

    Attributes:
        density: share of the parameters that a client trains, in (0, 1].
        prune: α in [0, 1], share of a layer's active weights that is exchanged after the first round; it falls to 0
            along half a cosine. 0 keeps the masks.
    """

    density: float = 0.5
    prune: float = 0.5

    title = "FedSpa"
    citation = "Huang et al. 2022, arXiv:2201.11380"
    keep_refusal = "the momentum of earlier rounds would move weights that the new mask leaves out"
    bounds = {"density": "> 0 and <= 1", "prune": ">= 0 and <= 1"}
    uses_rounds = True

    def passes(self) -> dict[str, Pass]:
        """Masked training, and the batch whose gradient determines which entries grow."""
        return {"local": self.main_pass, "grow": Pass(1, self.batch_size, steps=1)}

    def server_init(self, task: Task) -> ServerState:
        """w^0, and the same initial masks that the clients draw."""
        model = task.common_model(self.title)
        initial = model.initial
        refuse_computed_weights(model.module, layer_counts(initial, self.density, model.complex), self.title)
        return ServerState(initial, {str(c.id): self.client_init(c, task) for c in task.clients})

    def client_init(self, client: ClientInfo, task: Task) -> Masks:
        """The mask m_k, random in every layer."""
        model, key = task.model(client), task.key / "fedspa" / client.id
        initial, counts = model.initial, layer_counts(model.initial, self.density, model.complex)
        order = {n: torch.randperm(initial[n].numel(), generator=(key / n).generator()) for n in counts}
        return {n: (o.reshape(initial[n].shape) < counts[n]).to(initial[n].device) for n, o in order.items()}

    def download(self, server: ServerState, client: ClientInfo) -> Params:
        """The values of m_k ⊙ w^t."""
        return gather_values(server.model, server.masks[str(client.id)])

    def local_update(self, state: Masks, down: Params, view: ClientView) -> tuple[Masks, Upload]:
        """Masked SGD, then the exchange of small weights for entries with large gradients."""
        model, start = view.model, scatter_values(down, state)

        def mask_gradients(grads: Params, _: Params, masks: Masks) -> Params:
            return {n: torch.where(masks[n], g, 0.0) if n in masks else g for n, g in grads.items()}

        def loss_after_change(change: Params, batch: Batch, theta: Params) -> Tensor:
            return task_loss(model.apply(cast_like(add(widen(theta), change), theta), batch.x), batch)

        loss = supervised_loss(model)
        params = view.train(
            loss, start, "local", self.optimizer, constants=(state,), precondition=mask_gradients
        )
        update = gather_values(sub(start, params), state)
        if self.prune == 0:
            return state, Upload(update, {})
        sgd = SGD(self.optimizer.learning_rate(view.round))
        # in float32, where a learning rate times a small gradient is not 0
        step = view.train(loss_after_change, zeros_like(widen(params)), "grow", sgd, constants=(params,))
        rate = self.prune / 2 * (1 + math.cos(math.pi * view.round / view.task.rounds))
        next_masks = {n: next_mask(m, params[n], step[n], rate) for n, m in state.items()}
        return next_masks, Upload(update, next_masks)

    def contribution(self, server: ServerState, upload: Upload, client: ClientInfo) -> Contribution:
        """The update, zero outside the client's mask, all with the same weight; and its next mask."""
        update = Mean(widen(scatter_values(upload.update, server.masks[str(client.id)])))
        return {"update": update, "masks": Each(upload.masks)} if self.prune > 0 else {"update": update}

    def server_update(self, server: ServerState, total: Total, view: ServerView) -> ServerState:
        """One step along the mean update."""
        masks = {str(client_id): masks for client_id, masks in total.get("masks", {}).items()}
        model = cast_like(sub(server.model, total["update"]), server.model)
        return ServerState(model, server.masks | masks)

    def describe_update(self, down: Params, client: ClientInfo, task: Task) -> Update:
        """The values of the update on the mask, relative to zeros; masks are no update.

        With static masks the zeros have the form of an upload, so that the server can compute its contribution.
        """
        if self.prune == 0:
            return Update(Upload(zeros_like(down), {}))
        return Update({"update": ZERO_REFERENCE, "masks": NO_UPDATE})

    def client_model(self, state: Masks, down: Params, view: ClientView) -> ClientModel:
        """The model m_k ⊙ w; only the values on the mask are stored."""
        sparse_params = {n: Sparse(v, state[n]) if n in state else v for n, v in down.items()}
        return ClientModel(scatter_values(down, state), parts={"personal": (sparse_params,)})
