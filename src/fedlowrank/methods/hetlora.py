"""HetLoRA: unequal ranks by zero padding and truncation, with rank self-pruning and sparsity-weighted means.

Cho et al., "Heterogeneous LoRA for Federated Fine-tuning of On-Device Foundation Models", EMNLP 2024.
arXiv:2401.06432, Algorithm 1. Without pruning and with weights n_i it is the baseline Zero-padding of FedHL.

    server, each round t:   send the first r_i columns of B, rows of A to each client i of S_t download
    client i:               minimize f_i + λ ‖B[:, γr_i:]‖ ‖A[γr_i:, :]‖ by E epochs           local_update
                            if the tail became smaller than it was received: r_i ← γ r_i       local_update
    server:                 pad every B_i, A_i with zeros to r_max = max r_i of S_t,
                            B = Σ p_i B_i, A = Σ p_i A_i,  p_i ∝ n_i or ‖s_i B_i A_i‖_F        server_update

The server's factors have scale 1: the B of an upload (of an embedding, the A) is multiplied by s_i, the scale of the
rank that the client was sent, pruned or not. With equal ranks and weights n_i this is FedIT, whatever the scale.
A component that few clients hold is diluted by the zeros of the others; ``per_index`` divides each component by the
weight of the clients that hold it. r_max is the largest rank of the round: a component that none of its clients holds
stays as it is, because with zeros in both A and B it would have no gradient any more. γ r_i is rounded down, but a rank
falls by at least one and never below one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NotRequired, TypedDict

import torch
from torch import Tensor

from ..adapters.lora.lora_factors import average_present_components, keep_absent_components, lora_of
from ..adapters.wire_format import unpack_factors
from ..core.arguments.shares import multiply_share
from ..core.arguments.switch import refuse_unread_field
from ..core.contract import (
    ClientInfo,
    ClientModel,
    ClientView,
    Contribution,
    Each,
    Mean,
    Method,
    OneOf,
    ServerView,
    Sum,
    Task,
    Update,
)
from ..core.learning.optimizer import refuse_keep
from ..core.tree import Params, cast_like, tree_dataclass, widen
from ..linalg.delta import measure_product_norm
from ..linalg.pair import Factors, zero_pad_pair
from .shared.factor_training import train_leaves
from .shared.lora_clients import build_client_model, describe_ranks, initial_rest, read_leaves
from .shared.lora_family import (
    Leaves,
    LoRATraining,
    Message,
    Scaling,
    build_starting_factors,
    insert_leaves,
    join_leaves,
    measure_rank,
    read_factors,
    scale_product,
    truncate_factors,
)


@tree_dataclass
class ServerState:
    """Mean factors of rank r_max and scale 1, the shared rest, and the ranks of clients that pruned.

    Attributes:
        factors: mean factors.
        rest: shared parameters beside the factors.
        scaling: scale of each rank.
        ranks: rank of each client that pruned, by its id.
        embeddings: names of the embedding layers, of which A is scaled and not B.
    """

    factors: Factors
    rest: Params
    scaling: Scaling
    ranks: dict[str, int]
    embeddings: tuple[str, ...]


class Total(TypedDict):
    """The reduced contributions of a round."""

    factors: Factors | None
    reached: Tensor
    rest: Params
    pruned: NotRequired[dict[int, int | None]]


@dataclass(frozen=True)
class HetLoRA(Method[ServerState, Params, Message, Message]):
    """Zero padding, truncation and self-pruning.

    Attributes:
        weighting: weights p_i of the replies: by examples, or by the norm of each client's update.
        per_index: whether each component is averaged only over the clients that hold it.
        prune: γ, share of its rank that a client keeps when it prunes; 1 never prunes.
        penalty: weight λ of the penalty on the tail of the factors, the components that may be pruned.
        training: settings of the LoRA factors: rank, scale, head and wire type.
    """

    weighting: Literal["examples", "norm"] = "examples"
    per_index: bool = False
    prune: float = 1.0
    penalty: float = 1e-3
    training: LoRATraining = LoRATraining()

    title = "HetLoRA"
    citation = "Cho et al., EMNLP 2024, arXiv:2401.06432"
    bounds = {"prune": "> 0 and <= 1", "penalty": ">= 0"}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prune == 1:
            refuse_unread_field(
                self, "penalty", self.title, f"with {self.title}.prune = {self.prune}", "set prune below 1"
            )
        else:
            reason = (
                f"with prune = {self.prune} a client that has pruned trains smaller factors in the next round"
            )
            refuse_keep("optimizer", self.optimizer, self.title, reason)

    remarks = describe_ranks
    client_init = initial_rest

    def server_init(self, task: Task) -> ServerState:
        """A random A of the largest rank and B = 0, or the model's trained factors."""
        rank, model = max(self.training.resolve_ranks(task, self.title)), task.common_model(self.title)
        lora, rest = lora_of(model), self.training.read_initial_shared_rest(model)
        factors = build_starting_factors(task, self.title, rank, 1.0)
        return ServerState(factors, rest, self.training.build_scaling(lora), {}, lora.embeddings)

    def download(self, server: ServerState, client: ClientInfo) -> Message:
        """The first r_i components, in the client's scale."""
        rank = self._sent_rank(server, client)
        scale = server.scaling.scale_at(rank)
        factors = scale_product(truncate_factors(server.factors, rank), 1 / scale, server.embeddings)
        return self.training.pack_message(factors, server.rest)

    def local_update(self, state: Params, down: Message, view: ClientView) -> tuple[Params, Message]:
        """Train, and prune where the tail has shrunk."""
        start = read_leaves(down, state)
        rank = measure_rank(read_factors(start))
        kept_rank = max(1, math.floor(multiply_share(self.prune, rank))) if self.prune < 1 else rank
        penalty = _penalty(self.penalty, kept_rank) if kept_rank < rank and self.penalty > 0 else None
        leaves = train_leaves(
            view, start, self.training.compute_scale(view, rank), self.optimizer, penalty=penalty
        )
        factors = read_factors(leaves)
        if kept_rank < rank and float(_tail(leaves, kept_rank)) < float(_tail(start, kept_rank)):
            factors = truncate_factors(factors, kept_rank)
        return self.training.select_personal_rest(leaves), self.training.pack_message(factors, leaves["rest"])

    def contribution(self, server: ServerState, upload: Message, client: ClientInfo) -> Contribution:
        """The weighted zero-padded factors of scale 1, the weight of each component, and the pruned rank."""
        factors, n = unpack_factors(upload.factors), float(client.example_count)
        rank, max_rank = measure_rank(factors), measure_rank(server.factors)
        # a pruned upload has the scale of the rank that was sent, not that of its own rank
        scale = server.scaling.scale_at(self._sent_rank(server, client))
        unit_factors = scale_product(widen(factors), scale, server.embeddings)
        weight = (
            n
            if self.weighting == "examples"
            else math.hypot(*map(measure_product_norm, unit_factors.values()))
        )
        component_weights = torch.full((max_rank,), weight, dtype=torch.float64) * (
            torch.arange(max_rank) < rank
        )
        padded_factors = {
            name: zero_pad_pair(p, server.factors[name].rank) for name, p in unit_factors.items()
        }
        contributions: dict[str, Any] = {
            "factors": Mean(padded_factors, weight),
            "reached": Sum(component_weights, counts=True),
            "rest": Mean(upload.rest, n),
        }
        pruned_rank = Each(None if rank == self.training.find_rank_within(client, server.factors) else rank)
        return {**contributions, "pruned": pruned_rank} if self.prune < 1 else contributions

    def server_update(self, server: ServerState, total: Total, view: ServerView) -> ServerState:
        """Weighted means of the padded factors."""
        factors = server.factors
        # if the weights sum to zero, as where all products are zero, the factors stay
        if total["factors"] is not None:
            average = average_present_components if self.per_index else keep_absent_components
            factors = average(total["factors"], server.factors, total["reached"])
        factors = cast_like(factors, server.factors)
        pruned_ranks = {str(i): rank for i, rank in total.get("pruned", {}).items() if rank is not None}
        return replace(server, factors=factors, rest=total["rest"], ranks=server.ranks | pruned_ranks)

    def describe_update(self, down: Message, client: ClientInfo, task: Task) -> Update:
        """The factors relative to those sent, in the scale of their rank; of that rank, or of the rank after pruning."""
        rank = measure_rank(down.factors)
        scale = self.training.build_scaling(lora_of(task.model(client))).scale_at(rank)
        if self.prune == 1:
            return Update(down, scale)
        kept_rank = max(1, math.floor(multiply_share(self.prune, rank)))
        pruned_message = self.training.pack_message(
            truncate_factors(unpack_factors(down.factors), kept_rank), down.rest
        )
        return Update(down, scale, OneOf(down, pruned_message))

    def _sent_rank(self, server: ServerState, client: ClientInfo) -> int:
        """The rank that a client is sent: its own, or its rank after pruning."""
        return server.ranks.get(str(client.id), self.training.find_rank_within(client, server.factors))

    def client_model(self, state: Params, down: Message, view: ClientView) -> ClientModel:
        """The model with the first r_i components."""
        rank = measure_rank(down.factors)
        return build_client_model(view, read_leaves(down, state), self.training.compute_scale(view, rank))

    def server_model(self, server: ServerState, state: Params, view: ClientView) -> Params:
        """The model with all r_max components."""
        return insert_leaves(view.model, join_leaves(server.factors, state | server.rest), 1.0, {}, {})


def _penalty(weight: float, kept_rank: int) -> Callable[[Leaves], Tensor]:
    def penalty(leaves: Leaves) -> Tensor:
        return weight * _tail(leaves, kept_rank)

    return penalty


def _tail(leaves: Leaves, kept_rank: int) -> Tensor:
    """Σ over layers of ‖B[:, kept:]‖_F ‖A[kept:, :]‖_F."""
    norms = [_norm(b[:, kept_rank:]) * _norm(leaves["a"][n][kept_rank:]) for n, b in leaves["b"].items()]
    return torch.stack(norms).sum()


def _norm(x: Tensor) -> Tensor:
    # the norm of zeros has no gradient; B is zero at the start
    return (x.square().sum() + 1e-12).sqrt()
