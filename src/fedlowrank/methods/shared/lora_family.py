"""Ranks, scales, initial values and messages of federated LoRA (Hu et al. 2021); training is in :mod:`.factor_training`.

A client of rank r holds factors B ``[d, r]`` and A ``[r, k]`` of every adapted weight; its model is W_0 + s·B
A. A server works on updates in the unit of the weights: it multiplies an upload by s and divides a download by s,
so that no aggregator depends on α or r.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ...adapters.lora.lora_factors import LoRA, lora_of, parameters_beside_factors
from ...adapters.lora.rank_limits import describe_lowered_ranks
from ...adapters.wire_format import PackedFactors, Quantized, Rounded, WireType, pack_factors
from ...core.arguments.bounds import check_minimum
from ...core.arguments.field_checks import CheckedFields
from ...core.contract import ClientInfo, ClientView, Model, Task
from ...core.errors import ConfigError, LoweredRankWarning, TaskError, warn_user
from ...core.tree import Params, tree_dataclass
from ...linalg.pair import Factors, Pair, keep_first_components

Leaves = dict[str, dict[str, Tensor]]
"""Trained tensors: the factors ``a`` and ``b``, by layer, and ``rest``, parameters that are trained whole, by name."""


@tree_dataclass
class Scaling:
    """The scale s of a client's update by its rank: ``scale · (rank0 / r)^power``.

    It is part of a server's state where ``download``, which gets no task, divides by s.

    Attributes:
        scale: scale s at rank ``rank0``.
        rank0: rank in the adapter's configuration.
        power: exponent of rank0 / r: 0 for equal scales; 1 for α/r and 1/2 for α/√r with one α.
    """

    scale: float
    rank0: int
    power: float

    def scale_at(self, rank: int) -> float:
        """The scale s of a client of the given rank."""
        return self.scale * float((self.rank0 / rank) ** self.power)


@tree_dataclass
class Message:
    """A message between server and client: factors, and the shared parameters that are trained whole."""

    factors: PackedFactors
    rest: Params


DEFAULT_RANK = 8
"""Rank of clients if neither the client nor the method nor the model sets one."""


@dataclass(frozen=True)
class LoRATraining(CheckedFields):
    """How LoRA clients train and what they send.

    Attributes:
        rank: rank of clients that do not bring one; None for the rank of the model's LoRA layers (``lora.r``), or
            for 8 where the model has none. A rank above min(d, k) of a layer is lowered, with a warning: to the
            largest min(d, k) of the model's layers, so that the scale α/r is that of the lowered rank; and, in
            layers with a smaller min(d, k), to that, under the same scale.
        common_rank: rank of all clients, instead of the ranks that they bring; None for their own ranks. A method that
            needs one rank, such as FedIT, can so be compared with methods for unequal ranks in one experiment.
        scaling: scale of clients with unequal ranks: equal, all clients have the scale of the configuration, α_i =
            c·r_i; alpha, they have its α, so that the scale α/r_i (rsLoRA: α/√r_i) falls with the rank. With alpha all
            layers need one rank in the configuration: ``rank_pattern`` is refused.
        head: treatment of the parameters trained beside the factors, such as a classification head: shared,
            averaged by examples; personal, kept by each client; frozen, at its initial values.
        wire: type in which factors are sent: float32 (unchanged), bfloat16 or int8.
    """

    section = "training"

    rank: int | None = None
    common_rank: int | None = None
    scaling: Literal["equal", "alpha"] = "equal"
    head: Literal["shared", "personal", "frozen"] = "shared"
    wire: WireType = "float32"

    def __post_init__(self) -> None:
        if self.rank is not None:
            object.__setattr__(self, "rank", check_minimum("training.rank", self.rank, 1))
        if self.common_rank is not None:
            object.__setattr__(
                self, "common_rank", check_minimum("training.common_rank", self.common_rank, 1)
            )
            if self.rank is not None:
                raise ConfigError("training.common_rank is the rank of all clients; leave training.rank out")

    def find_rank(self, client: ClientInfo, lora: LoRA) -> int:
        """Find the rank of a client's factors.

        Args:
            client: client whose rank is wanted.
            lora: LoRA layers of the client's model. A rank above :attr:`LoRA.largest_rank` is lowered to it. A
                layer with a smaller largest rank has fewer components, under the same scale.
        """
        return min(self._find_requested_rank(client, lora), lora.largest_rank)

    def find_rank_within(self, client: ClientInfo, factors: Mapping[str, Pair]) -> int:
        """Find the same rank as :meth:`find_rank` from a server's factors, where the model is not available.

        Args:
            client: client whose rank is wanted.
            factors: factors of the client with the largest rank. If no client has a rank of its own and no rank is
                set, all clients have this rank, because :meth:`resolve_ranks` refuses clients of which only some
                have a rank.
        """
        largest_rank = measure_rank(factors)
        return min(self.find_set_rank(client) or largest_rank, largest_rank)

    def find_set_rank(self, client: ClientInfo) -> int | None:
        """Find the rank that the client or the method sets; it is at least 1."""
        return self.common_rank or client.rank or self.rank

    def _find_requested_rank(self, client: ClientInfo, lora: LoRA) -> int:
        return self.find_set_rank(client) or lora.rank or DEFAULT_RANK

    def describe_ranks(self, task: Task, method: str) -> list[str]:
        """Describe the ranks that are above the largest rank of a layer."""
        lora = lora_of(task.common_model(method))
        requested_ranks = {self._find_requested_rank(client, lora) for client in task.clients}
        return [
            text
            for rank in sorted(requested_ranks)
            for text in describe_lowered_ranks(dict.fromkeys(lora.shapes, rank), lora.shapes)
        ]

    def resolve_ranks(self, task: Task, method: str) -> list[int]:
        """Find the rank of every client, and warn of ranks above the largest rank of a layer.

        Raises:
            TaskError: if models differ, some clients bring a rank and others have none, or ``scaling`` is alpha and the
                model gives its layers unequal ranks.
        """
        lora = lora_of(task.common_model(method))
        if self.scaling == "alpha" and (names := lora.layers_of_own_rank):
            raise TaskError(
                f"{method}: with training.scaling = 'alpha' one factor, by the rank of the client, scales all of its layers, and "
                f"{names[0]} has another rank than other layers (lora.rank_pattern), so its scale would not be its α over its "
                "rank. Set training.scaling = 'equal', or leave rank_pattern out"
            )
        unranked_ids = [client.id for client in task.clients if client.rank is None]
        if self.rank is None and self.common_rank is None and 0 < len(unranked_ids) < len(task.clients):
            raise TaskError(
                f"{method}: client {unranked_ids[0]} has no rank, and others have one. Give all clients a rank, or set "
                "training.rank for those without"
            )
        for remark in self.describe_ranks(task, method):
            warn_user(f"{method}: {remark}", LoweredRankWarning)
        ranks = [self.find_rank(client, lora) for client in task.clients]
        min_rank = min(ranks)
        if lora.principal and lora.rank is not None and min_rank < lora.rank:
            client = task.clients[ranks.index(min_rank)]
            raise TaskError(
                f"{method}: the factors begin at the {lora.rank} principal components of each weight (init_lora_weights), and "
                f"client {client.id} of rank {min_rank} would begin without some of them. Give all clients rank {lora.rank} "
                "(training.common_rank), or take init_lora_weights = true"
            )
        return ranks

    def require_equal_rank(self, task: Task, method: str) -> int:
        """Find the one rank of all clients.

        Raises:
            TaskError: if ranks differ.
        """
        ranks = self.resolve_ranks(task, method)
        if len(set(ranks)) > 1:
            index = next(i for i, rank in enumerate(ranks) if rank != ranks[0])
            raise TaskError(
                f"{method} averages factors entry by entry, so all clients need one rank, but client "
                f"{task.clients[0].id} has {ranks[0]} and client {task.clients[index].id} has "
                f"{ranks[index]}. Set training.common_rank, or choose a method for unequal ranks: fedhl, "
                "hetlora, flexlora or flora."
            )
        return ranks[0]

    def build_scaling(self, lora: LoRA) -> Scaling:
        """Build the scaling by rank under a model's configuration."""
        power = 0.0 if self.scaling == "equal" else 0.5 if lora.rslora else 1.0
        configured_rank = (
            min(self.common_rank or self.rank or DEFAULT_RANK, lora.largest_rank)
            if lora.rank is None
            else lora.rank
        )
        return Scaling(lora.scale, configured_rank, power)

    def compute_scale(self, view: ClientView, rank: int | None = None) -> float:
        """Compute the scale s of the client of a view, at the client's own rank or at another one."""
        lora = lora_of(view.model)
        return self.build_scaling(lora).scale_at(self.find_rank(view.info, lora) if rank is None else rank)

    def compute_client_scale(self, task: Task, client: ClientInfo) -> float:
        """Compute the scale s of a client of a task, at the client's own rank."""
        lora = lora_of(task.model(client))
        return self.build_scaling(lora).scale_at(self.find_rank(client, lora))

    def select_personal_rest(self, leaves: Leaves) -> Params:
        """Select the personal rest of trained leaves, which the client keeps."""
        return leaves["rest"] if self.head == "personal" else {}

    def read_initial_shared_rest(self, model: Model) -> Params:
        """Read the initial values of the parameters that are trained whole and stored by the server."""
        return parameters_beside_factors(model) if self.head == "shared" else {}

    def read_initial_personal_rest(self, model: Model) -> Params:
        """Read the initial values of the parameters that are trained whole and stored by each client."""
        return parameters_beside_factors(model) if self.head == "personal" else {}

    def pack_message(self, factors: Factors, rest: Params) -> Message:
        """Pack the factors for the wire; a shared rest is sent with them, a personal one is not."""
        return Message(pack_factors(factors, self.wire), rest if self.head == "shared" else {})


def refuse_principal_start(task: Task, method: str, reason: str) -> None:
    """Refuse initial factors taken from the base's weights (PiSSA, OLoRA) for a method that does not support them.

    Args:
        task: task with the model.
        method: title of the method.
        reason: property of the method that excludes such factors, for the message.

    Raises:
        TaskError: if the initial factors of the model are taken from its weights.
    """
    if lora_of(task.common_model(method)).principal:
        raise TaskError(
            f"{method} {reason}, so factors cannot begin at a part of the base's weights. Take init_lora_weights = true, or "
            "another method"
        )


def measure_rank(factors: Mapping[str, Pair | Rounded | Quantized]) -> int:
    """Measure the rank of a client's factors: the largest of all layers, because some layers may have less."""
    return max(pair.b.shape[1] for pair in factors.values())


def draw_initial_factors(task: Task, rank: int) -> Factors:
    """Draw initial factors, the same for all clients and methods; see :meth:`LoRA.draw_factors`."""
    model = next(iter(task.architectures.values()))
    return lora_of(model).draw_factors(rank, task.key / "lora")


def build_starting_factors(task: Task, method: str, rank: int, scale: float) -> Factors:
    """Build the initial factors of clients: the trained factors of the model, and random ones beyond their rank.

    Args:
        task: task with the model.
        method: title of the method, for messages.
        rank: rank of all layers whose largest rank is not smaller.
        scale: scale s of the product.

    Raises:
        TaskError: if trained factors have a higher rank.
    """
    lora = lora_of(next(iter(task.architectures.values())))
    factors = draw_initial_factors(task, rank)
    scaled_factors = scale_product(lora.trained, lora.scale / scale, lora.embeddings)
    for name, trained_pair in scaled_factors.items():
        initial_pair = factors[name]
        if trained_pair.rank > initial_pair.rank:
            raise TaskError(
                f"{method}: the adapter that the model starts from has rank {trained_pair.rank} (layer {name}), and clients have "
                f"rank {rank}. Give them a rank of at least {trained_pair.rank} (training.common_rank where a method sets it, "
                "or lora.ranks), or choose fedhl, flexlora or flora, whose server holds an update of any rank"
            )
        # Beyond the trained rank B is zero (for an embedding, A is), so the product is that of the trained factors.
        b = torch.cat([trained_pair.b, initial_pair.b[:, trained_pair.rank :]], 1)
        factors[name] = Pair(b, torch.cat([trained_pair.a, initial_pair.a[trained_pair.rank :]]))
    return factors


def scale_product(factors: Factors, scale: float, embeddings: Collection[str] = ()) -> Factors:
    """Scale the product B A of every layer by the factor that begins at zero, so that the random one keeps its size.

    Args:
        factors: factors by layer.
        scale: by which B is multiplied; of an embedding, A.
        embeddings: names of the embedding layers.
    """
    return {
        n: Pair(p.b, p.a * scale) if n in embeddings else Pair(p.b * scale, p.a) for n, p in factors.items()
    }


def truncate_factors(factors: Factors, rank: int) -> Factors:
    """Keep the first ``rank`` columns of every B and rows of every A."""
    return {n: keep_first_components(p, rank) for n, p in factors.items()}


def join_leaves(factors: Factors, rest: Params) -> Leaves:
    """Join factors and rest into the leaves that are trained."""
    return {
        "a": {n: p.a for n, p in factors.items()},
        "b": {n: p.b for n, p in factors.items()},
        "rest": rest,
    }


def read_factors(leaves: Leaves) -> Factors:
    """Read the factors among trained leaves."""
    return {n: Pair(b, leaves["a"][n]) for n, b in leaves["b"].items()}


def insert_leaves(
    model: Model, leaves: Leaves, scale: float | Tensor, frozen_factors: Factors, moved_weights: Params
) -> Params:
    """Insert factors and rest into a model: the parameters under which it computes W_0 + s·B A.

    Args:
        model: model into which they are inserted.
        leaves: trained leaves: factors and rest.
        scale: scale s of the product.
        frozen_factors: factors of a second adapter of scale 1 that is not trained; may be empty.
        moved_weights: weights W_0 that differ from the initial ones, by the name of their parameter; may be empty.
    """
    factors = read_factors(leaves)
    return lora_of(model).insert_factors(factors, scale, frozen_factors, moved_weights) | leaves["rest"]
