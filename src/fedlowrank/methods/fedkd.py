"""FedKD: communication-efficient federated learning via knowledge distillation.

C. Wu, F. Wu, L. Lyu, Y. Huang, X. Xie. Nature Communications 13, 2032 (2022). arXiv:2108.13323, Algorithm 1.

    server, each round t:   send to each client k of S_t the compressed updates
                            that bring its mentee to s^t                                         download
    client k:               from its mentor T_k, E epochs of simultaneous SGD on
                              T: CE_T + KL(s ‖ T) / (CE_T + CE_s) + MSE(H_T, W H_s) / (CE_T + CE_s)
                              s: CE_s + KL(T ‖ s) / (CE_T + CE_s) + MSE(H_T, W H_s) / (CE_T + CE_s)
                            keep T_k, W_k; send the update s_k - s^t, compressed                 local_update
    server:                 Δ = Σ n_k Δ_k / Σ n_k, compressed;  s^{t+1} = s^t + Δ                server_update

Compression is the SVD of each weight's update at the smallest rank that keeps a share of its energy; that
share rises linearly from ``energy_start`` to ``energy_end`` over the rounds
(:func:`fedlowrank.linalg.factored.compress_update`).

Differences from the paper: the update is that of a round, where the paper sends the gradient of a batch. The loss on
attention maps belongs to transformers and has no counterpart here. A client that missed rounds needs the updates of
those rounds too: the server keeps them and sends all that are missing, or the model itself once that is smaller.

Choices: denominators and teachers are detached (each loss moves only its own model; W moves with the mentee's);
*updates* are decomposed, not weights. Updates are averaged with the weights n_k, as in FedAvg, over the sampled
clients. Mentors of clients of one architecture begin with the same initial weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.contract import (
    Batch,
    ClientInfo,
    ClientModel,
    ClientView,
    Lengths,
    Mean,
    Method,
    OneOf,
    ServerView,
    Task,
    Update,
)
from ..core.errors import ConfigError
from ..core.learning.batch_losses import kl_divergence, square_error, task_loss
from ..core.tree import Params, add, nbytes, sub, tree_dataclass
from ..linalg.factored import CompressedUpdate, Factored, compress_update, decompress_update
from .shared.class_statistics import check_class_scores, count_outputs


@tree_dataclass
class ServerState:
    """The mentee s^t, the compressed update of every round, and the round of each client's copy."""

    mentee: Params
    updates: list[CompressedUpdate]
    update_counts: dict[str, int]


@tree_dataclass
class Download:
    """Updates to apply in order, or the mentee itself."""

    updates: list[CompressedUpdate]
    mentee: Params | None


@tree_dataclass
class ClientState:
    """The mentor T, the mentee s and the projection W ``[d_T, d_s]`` between their representations."""

    mentor: Params
    mentee: Params
    projection: Tensor


def factor_form(w: Tensor) -> Lengths:
    """The form of a weight's factors, as :func:`compress_update` makes them."""
    m, n = w.flatten(1).shape
    max_rank = min(m, n, (m * n - 1) // (m + n + 1))
    return Lengths(Factored(w.new_zeros(m, 0), w.new_zeros(0), w.new_zeros(n, 0)), max_rank)


@dataclass(frozen=True)
class FedKD(Method[ServerState, ClientState, Download, CompressedUpdate]):
    """Adaptive mutual distillation with updates sent as low-rank factors.

    Attributes:
        energy_start: T_start, share of each update's energy that is sent in the first round.
        energy_end: T_end, share of each update's energy that is sent in the last round; 1 sends updates whole.
        mentee: name of the shared architecture; None for the smallest one.
    """

    energy_start: float = 0.95
    energy_end: float = 0.98
    mentee: str | None = None

    title = "FedKD"
    citation = "Wu et al., Nature Communications 2022, arXiv:2108.13323"
    bounds = {"energy_start": "> 0 and <= 1", "energy_end": "> 0 and <= 1"}
    needs_classes = heterogeneous = uses_rounds = couples_examples = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.energy_start > self.energy_end:
            raise ConfigError(
                f"{self.title}: energy_start must be <= energy_end = {self.energy_end}; it is {self.energy_start}"
            )

    def _energy(self, view: ServerView | ClientView) -> float:
        rise = (self.energy_end - self.energy_start) * view.round / max(view.task.rounds - 1, 1)
        return self.energy_start + rise

    def server_init(self, task: Task) -> ServerState:
        """The mentee s^0, known to all clients; raises TaskError if models have fewer outputs than classes, or unequally many."""
        check_class_scores(self.title, task)
        count_outputs(self.title, task)
        return ServerState(task.smallest_model(self.mentee).initial, [], {})

    def client_init(self, client: ClientInfo, task: Task) -> ClientState:
        """T_k and s^0 at their initial weights, and W as the weight of a new linear layer."""
        mentor, mentee = task.model(client), task.smallest_model(self.mentee)
        generator = (task.key / "fedkd" / mentor.name).generator()
        w = (2 * torch.rand(mentor.width, mentee.width, generator=generator) - 1) / mentee.width**0.5
        return ClientState(mentor.initial, mentee.initial, w.to(next(iter(mentor.initial.values()))))

    def download(self, server: ServerState, client: ClientInfo) -> Download:
        """The updates since the client's copy, or the mentee where that is smaller."""
        missing_updates = server.updates[server.update_counts.get(str(client.id), 0) :]
        sends_mentee = nbytes(missing_updates) > nbytes(server.mentee)
        return Download([], server.mentee) if sends_mentee else Download(missing_updates, None)

    def local_update(
        self, state: ClientState, down: Download, view: ClientView
    ) -> tuple[ClientState, CompressedUpdate]:
        """Simultaneous SGD; detached teachers and denominators leave each loss its own gradient."""
        mentor, mentee = view.model, view.task.smallest_model(self.mentee)

        def loss(models: ClientState, batch: Batch) -> Tensor:
            h_t, h_s = mentor.represent(models.mentor, batch.x), mentee.represent(models.mentee, batch.x)
            t, s = mentor.head(models.mentor, h_t), mentee.head(models.mentee, h_s)
            ce_t, ce_s = task_loss(t, batch), task_loss(s, batch)
            # the two models may have different types
            projected = h_s.to(models.projection.dtype) @ models.projection.mT
            to_mentor = kl_divergence(s.detach(), t, batch) + square_error(h_t, projected.detach(), batch)
            to_mentee = kl_divergence(t.detach(), s, batch) + square_error(h_t.detach(), projected, batch)
            return ce_t + ce_s + (to_mentor + to_mentee) / (ce_t + ce_s).detach()

        start = self._mentee(state, down)
        trained_models = view.train(
            loss, ClientState(state.mentor, start, state.projection), "local", self.optimizer
        )
        new_state = ClientState(trained_models.mentor, start, trained_models.projection)
        return new_state, compress_update(sub(trained_models.mentee, start), self._energy(view))

    def _mentee(self, state: ClientState, down: Download) -> Params:
        mentee = state.mentee if down.mentee is None else down.mentee
        for update in down.updates:
            mentee = add(mentee, decompress_update(update, mentee))
        return mentee

    def describe_update(self, down: Download, client: ClientInfo, task: Task) -> Update:
        """The update of each weight, whole or as factors of any rank at which they are smaller."""
        mentee = task.smallest_model(self.mentee).initial
        form = {n: OneOf(w, factor_form(w)) if w.ndim >= 2 else w for n, w in mentee.items()}
        return Update(down, form=form)

    def contribution(self, server: ServerState, upload: CompressedUpdate, client: ClientInfo) -> Mean[Params]:
        """The update of the mentee, weighted by n_k."""
        return Mean(decompress_update(upload, server.mentee), client.example_count)

    def server_update(self, server: ServerState, total: Params, view: ServerView) -> ServerState:
        """The mentee s^{t+1}, which clients rebuild from the compressed mean update; clients that replied hold s^t."""
        update = compress_update(total, self._energy(view))
        update_counts = server.update_counts | {
            str(client.id): len(server.updates) for client in view.replied
        }
        mentee = add(server.mentee, decompress_update(update, server.mentee))
        return ServerState(mentee, [*server.updates, update], update_counts)

    def client_model(self, state: ClientState, down: Download, view: ClientView) -> ClientModel:
        """The client's mentor T_k."""
        return ClientModel(state.mentor)
