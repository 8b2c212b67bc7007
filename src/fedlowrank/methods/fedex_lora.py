"""FedEx-LoRA: averages B and A, and adds the difference between the mean update and their product to the base.

Singhal, Ponkshe, Vepakomma, "FedEx-LoRA: Exact Aggregation for Federated and Efficient Fine-Tuning of
Foundation Models", ACL 2025. arXiv:2410.09432.

    server, each round t:   send B, A and the residuals that client i lacks                download
    client i:               W_0 ← W_0 + each residual; train B_i, A_i by E epochs          local_update
    server:                 B = Σ p_i B_i,  A = Σ p_i A_i,  p_i = n_i / Σ n                 server_update
                            residual = s Σ p_i B_i A_i - s B A = s Σ p_i B_i (A_i - A)     server_update

The second form of the residual has rank Σ r_i, not Σ r_i + r. It is sent as factors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

from ..adapters.lora.lora_factors import LoRA, lora_of
from ..adapters.wire_format import PackedFactors, unpack_factors
from ..core.contract import (
    ClientInfo,
    ClientModel,
    ClientView,
    Contribution,
    Each,
    Mean,
    Method,
    ServerView,
    Task,
    Update,
)
from ..core.tree import Params, cast_like, tree_dataclass, widen
from ..linalg.pair import Factors, Pair
from .shared.base_updates import Base, UpdateForm, UpdateHistory, weigh_factors
from .shared.factor_training import train_leaves
from .shared.lora_clients import (
    build_client_model,
    build_factors_of_rank,
    describe_ranks,
    read_leaves,
    split_trained_leaves,
)
from .shared.lora_family import (
    Leaves,
    LoRATraining,
    Message,
    insert_leaves,
    join_leaves,
)


@tree_dataclass
class ServerState:
    """The mean factors, the residual of every round, and the shared parameters beside them."""

    factors: Factors
    history: UpdateHistory
    rest: Params


@tree_dataclass
class Download:
    """The mean factors, the shared parameters beside them, and the residuals that a client lacks."""

    message: Message
    residuals: list[PackedFactors]


@tree_dataclass
class ClientState:
    """The state of a client: the residuals so far, and its head where that is personal."""

    base: Base
    rest: Params


class Total(TypedDict):
    """The reduced contributions of a round."""

    mean: Factors
    each: dict[int, Factors]
    rest: Params


@dataclass(frozen=True)
class FedExLoRA(Method[ServerState, ClientState, Download, Message]):
    """Means of factors, with an exact residual.

    Attributes:
        base_updates: form in which a client stores residuals: merged into its base weights, or stacked as a frozen
            adapter beside them.
        training: settings of the LoRA factors: rank, scale, head and wire type.
    """

    base_updates: UpdateForm = "merged"
    training: LoRATraining = LoRATraining()

    title = "FedEx-LoRA"
    citation = "Singhal et al., ACL 2025, arXiv:2410.09432"

    remarks = describe_ranks

    def server_init(self, task: Task) -> ServerState:
        """A random A and B = 0, or the model's trained factors; no residual."""
        rank, model = self.training.require_equal_rank(task, self.title), task.common_model(self.title)
        factors = build_factors_of_rank(self, task, rank)
        return ServerState(factors, UpdateHistory([], {}), self.training.read_initial_shared_rest(model))

    def client_init(self, client: ClientInfo, task: Task) -> ClientState:
        """The base without residuals, and the client's head where that is personal."""
        model = task.model(client)
        base = Base.without_updates(self.base_updates, lora_of(model))
        return ClientState(base, self.training.read_initial_personal_rest(model))

    def download(self, server: ServerState, client: ClientInfo) -> Download:
        """The mean factors, and the residuals that the client lacks."""
        return Download(
            self.training.pack_message(server.factors, server.rest), server.history.missing_updates(client)
        )

    def local_update(
        self, state: ClientState, down: Download, view: ClientView
    ) -> tuple[ClientState, Message]:
        """Add the residuals, then train both factors."""
        base, start = self._catch_up(state, down, lora_of(view.model))
        frozen_factors, moved_weights = base.split_updates(self.base_updates, lora_of(view.model))
        leaves = train_leaves(
            view,
            start,
            self.training.compute_scale(view),
            self.optimizer,
            frozen_factors=frozen_factors,
            moved_weights=moved_weights,
        )
        personal_rest, upload = split_trained_leaves(self, leaves)
        return ClientState(base, personal_rest), upload

    def contribution(self, server: ServerState, upload: Message, client: ClientInfo) -> Contribution:
        """The factors, both for their mean and one by one for the residual, and the shared rest, weighted by n_i."""
        factors, n = unpack_factors(upload.factors), client.example_count
        return {"mean": Mean(factors, n), "each": Each(factors), "rest": Mean(upload.rest, n)}

    def server_update(self, server: ServerState, total: Total, view: ServerView) -> ServerState:
        """The means of the factors, and their residual Σ_i p_i B_i A_i - B̄ Ā = Σ_i p_i B_i (A_i - Ā)."""
        means, weights = total["mean"], [float(c.example_count) for c in view.replied]
        deviations = [
            {n: Pair(widen(p.b), widen(p.a) - means[n].a) for n, p in factors.items()}
            for factors in (total["each"][c.id] for c in view.replied)
        ]
        # all clients have the same rank, and so the same scale
        scale = self.training.compute_client_scale(view.task, view.replied[0])
        residual = cast_like(weigh_factors(deviations, [scale * w / sum(weights) for w in weights]), means)
        history = server.history.with_update(residual, view.replied, self.training.wire)
        return ServerState(means, history, total["rest"])

    def describe_update(self, down: Download, client: ClientInfo, task: Task) -> Update:
        """The factors, relative to the factors as they were sent, in the client's scale."""
        return Update(down.message, self.training.compute_client_scale(task, client))

    def client_model(self, state: ClientState, down: Download, view: ClientView) -> ClientModel:
        """The base with all residuals, and the mean factors."""
        base, leaves = self._catch_up(state, down, lora_of(view.model))
        frozen_factors, moved_weights = base.split_updates(self.base_updates, lora_of(view.model))
        return build_client_model(
            view, leaves, self.training.compute_scale(view), frozen_factors, moved_weights
        )

    def server_model(self, server: ServerState, state: ClientState, view: ClientView) -> Params:
        """The model that every client with all residuals has."""
        leaves = join_leaves(server.factors, state.rest | server.rest)
        frozen_factors, _ = Base({}, server.history.updates).split_updates("stacked", lora_of(view.model))
        return insert_leaves(view.model, leaves, self.training.compute_scale(view), frozen_factors, {})

    def _catch_up(self, state: ClientState, down: Download, lora: LoRA) -> tuple[Base, Leaves]:
        base = state.base.with_updates(down.residuals, self.base_updates, lora)
        return base, read_leaves(down.message, state.rest)
