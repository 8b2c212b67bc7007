"""FedEx-LoRA: the means of B and A, and what they miss of the mean update added to the base.

Singhal, Ponkshe, Vepakomma, "FedEx-LoRA: Exact Aggregation for Federated and Efficient Fine-Tuning of
Foundation Models", ACL 2025. arXiv:2410.09432.

    server, each round t:   send B, A and the residuals that client i lacks                download
    client i:               W_0 ← W_0 + each residual; train B_i, A_i by E epochs          local_update
    server:                 B = Σ p_i B_i,  A = Σ p_i A_i,  p_i = n_i / Σ n                 server_update
                            residual = s Σ p_i B_i A_i - s B A = s Σ p_i B_i (A_i - A)     server_update

The second form of the residual has rank Σ r_i, not Σ r_i + r. It travels as factors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..adapters.lora.lora_factors import LoRA, lora_of
from ..adapters.wire_format import PackedFactors, unpack_factors
from ..core.contract.client_model import ClientModel
from ..core.contract.contribution import Each, Mean
from ..core.contract.method import ClientInfo, ClientView, Method, ServerView, Task
from ..core.contract.update import Update
from ..core.tree import Params, cast_like, tree_dataclass, widen
from ..linalg.pair import Factors, Pair
from .families.base_updates import Base, Keep, UpdateHistory, weigh_factors
from .families.lora_clients import adapted_model, describe_ranks, leaves_of_message, reply
from .families.lora_family import (
    Leaves,
    Message,
    Tuning,
    leaves_of,
    model_parameters,
    starting_factors,
    train_leaves,
)


@tree_dataclass
class ServerState:
    """The mean factors, the residual of every round, and what is shared beside them."""

    factors: Factors
    history: UpdateHistory
    rest: Params


@tree_dataclass
class Download:
    """The mean factors and what is shared, and the residuals that a client lacks."""

    message: Message
    residuals: list[PackedFactors]


@tree_dataclass
class ClientState:
    """What a client keeps: the residuals so far, and its head where that is personal."""

    base: Base
    rest: Params


@dataclass(frozen=True)
class FedExLoRA(Method[ServerState, ClientState, Download, Message]):
    """Means of factors, with an exact residual.

    Attributes:
        keep: merged: a client adds residuals to its base weights; stacked: it keeps them as a frozen adapter
            beside.
        tuning: rank, scale, head and form on the wire.
    """

    keep: Keep = "merged"
    tuning: Tuning = Tuning()

    title = "FedEx-LoRA"
    citation = "Singhal et al., ACL 2025, arXiv:2410.09432"

    remarks = describe_ranks

    def server_init(self, task: Task) -> ServerState:
        """A random A and B = 0, or the model's trained factors; no residual."""
        rank, model = self.tuning.equal_rank(task, self.title), task.common_model(self.title)
        scale = self.tuning.scaling_of(lora_of(model)).at(rank)
        factors = starting_factors(task, self.title, rank, scale)
        return ServerState(factors, UpdateHistory([], {}), self.tuning.shared_rest(model))

    def client_init(self, task: Task, client: ClientInfo) -> ClientState:
        """The base as it is."""
        return ClientState(Base({}, []), self.tuning.own_rest(task.model(client)))

    def download(self, server: ServerState, client: ClientInfo) -> Download:
        """Factors, and the residuals that are missing."""
        return Download(self.tuning.message(server.factors, server.rest), server.history.missing(client))

    def local_update(
        self, state: ClientState, down: Download, view: ClientView
    ) -> tuple[ClientState, Message]:
        """Add the residuals, then train both factors."""
        base, start = self._now(state, down, lora_of(view.model))
        frozen, moved = base.frozen_factors_or_weights(self.keep, lora_of(view.model))
        end = train_leaves(view, start, self.tuning.scale(view), self.optimizer, frozen=frozen, moved=moved)
        kept, upload = reply(self, end)
        return ClientState(base, kept), upload

    def contribution(self, upload: Message, client: ClientInfo, server: ServerState) -> dict[str, Any]:
        """The factors, in their mean and each for the residual, and the shared rest, weighted by n_i."""
        factors, n = unpack_factors(upload.factors), client.examples
        return {"mean": Mean(factors, n), "each": Each(factors), "rest": Mean(upload.rest, n)}

    def server_update(self, server: ServerState, total: dict[str, Any], view: ServerView) -> ServerState:
        """Means, and what they miss: Σ_i p_i B_i A_i - B̄ Ā = Σ_i p_i B_i (A_i - Ā)."""
        means, weights = total["mean"], [float(c.examples) for c in view.replied]
        gaps = [
            {n: Pair(widen(p.b), widen(p.a) - means[n].a) for n, p in factors.items()}
            for factors in (total["each"][c.id] for c in view.replied)
        ]
        # all clients have one rank, and so one scale
        scale = self.tuning.scale_of(view.task, view.replied[0])
        residual = cast_like(weigh_factors(gaps, [scale * w / sum(weights) for w in weights]), means)
        history = server.history.with_update(residual, view.replied, self.tuning.wire)
        return ServerState(means, history, total["rest"])

    def describe_update(self, down: Download, client: ClientInfo, task: Task) -> Update:
        """Relative to the factors as they were sent, in the client's scale."""
        return Update(down.message, self.tuning.scale_of(task, client))

    def client_model(self, state: ClientState, down: Download, view: ClientView) -> ClientModel:
        """The base with all residuals, and the mean factors."""
        base, leaves = self._now(state, down, lora_of(view.model))
        frozen, moved = base.frozen_factors_or_weights(self.keep, lora_of(view.model))
        return adapted_model(view, leaves, self.tuning.scale(view), frozen, moved)

    def server_model(self, server: ServerState, state: ClientState, view: ClientView) -> Params:
        """The same as at every client that has all residuals."""
        leaves = leaves_of(server.factors, state.rest | server.rest)
        frozen, _ = Base({}, server.history.updates).frozen_factors_or_weights("stacked", lora_of(view.model))
        return model_parameters(view.model, leaves, self.tuning.scale(view), frozen, {})

    def _now(self, state: ClientState, down: Download, lora: LoRA) -> tuple[Base, Leaves]:
        base = state.base.with_updates(down.residuals, self.keep, lora)
        return base, leaves_of_message(down.message, state.rest)
