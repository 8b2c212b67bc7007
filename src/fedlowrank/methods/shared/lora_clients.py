"""Hooks that LoRA methods share: those of the client, and those of a server that averages factors.

A method takes these functions as its own: ``local_update = train_factors``.
"""

from __future__ import annotations

from typing import Any, ClassVar, Protocol, TypedDict

from torch import Tensor

from ...adapters.lora.lora_factors import lora_of
from ...adapters.wire_format import unpack_factors
from ...core.contract import (
    ClientInfo,
    ClientModel,
    ClientView,
    Contribution,
    Each,
    Mean,
    ServerView,
    Task,
    Update,
)
from ...core.learning.optimizer import Optimizer
from ...core.tree import Params, tree_dataclass
from ...linalg.pair import Factors
from .factor_training import train_leaves
from .lora_family import (
    Leaves,
    LoRATraining,
    Message,
    build_starting_factors,
    insert_leaves,
    join_leaves,
    read_factors,
)

# ruff: noqa: D102 - the methods document their fields


class TrainsFactors(Protocol):
    """The fields that these functions read."""

    title: ClassVar[str]

    @property
    def optimizer(self) -> Optimizer: ...

    @property
    def training(self) -> LoRATraining: ...


@tree_dataclass
class MeanFactors:
    """The state of a server that averages factors entry by entry.

    Attributes:
        factors: factors B ``[d, r]`` and A ``[r, k]`` of every adapted weight. A factor that is not shared is
            empty: A has no rows, or B no columns.
        rest: shared parameters that are trained whole.
    """

    factors: Factors
    rest: Params


class CollectedFactors(TypedDict):
    """The total of :func:`collect_factors`: factors by client, and the mean of the shared parameters beside them."""

    factors: dict[int, Factors]
    rest: Params


# Hooks


def describe_ranks(method: TrainsFactors, task: Task) -> list[str]:
    """Warn of ranks above the largest rank of a layer."""
    return method.training.describe_ranks(task, method.title)


def initial_rest(method: TrainsFactors, client: ClientInfo, task: Task) -> Params:
    """Initial values of the personal parameters that are trained whole."""
    return method.training.read_initial_personal_rest(task.model(client))


def send_factors(method: TrainsFactors, server: MeanFactors, client: ClientInfo) -> Message:
    """The server's factors, and the shared parameters beside them."""
    return method.training.pack_message(server.factors, server.rest)


def train_factors(
    method: TrainsFactors, state: Params, down: Message, view: ClientView
) -> tuple[Params, Message]:
    """Train both factors."""
    start = read_leaves(down, state)
    return split_trained_leaves(
        method, train_leaves(view, start, method.training.compute_scale(view), method.optimizer)
    )


def average_factors(
    method: TrainsFactors, server: Any, upload: Message, client: ClientInfo
) -> Mean[tuple[Factors, Params]]:
    """The factors and the shared parameters beside them, weighted by n_i."""
    return Mean((unpack_factors(upload.factors), upload.rest), client.example_count)


def collect_factors(method: TrainsFactors, server: Any, upload: Message, client: ClientInfo) -> Contribution:
    """The factors of each client apart, because their products count, and the shared parameters, weighted by n_i."""
    return {"factors": Each(unpack_factors(upload.factors)), "rest": Mean(upload.rest, client.example_count)}


def store_mean_factors(
    method: TrainsFactors, server: MeanFactors, total: tuple[Factors, Params], view: ServerView
) -> MeanFactors:
    """Store the means of :func:`average_factors`, weighted by n_i, as the next factors."""
    factors, rest = total
    return MeanFactors(factors, rest)


def describe_factor_update(method: TrainsFactors, down: Message, client: ClientInfo, task: Task) -> Update:
    """The factors, relative to those that were sent, in the client's scale s."""
    return Update(down, method.training.compute_client_scale(task, client))


def model_with_factors(method: TrainsFactors, state: Params, down: Message, view: ClientView) -> ClientModel:
    """The model with the factors received."""
    return build_client_model(view, read_leaves(down, state), method.training.compute_scale(view))


# Parts of the hooks


def build_factors_of_rank(method: TrainsFactors, task: Task, rank: int) -> Factors:
    """Build the initial factors of clients of a rank, in the scale of that rank.

    Raises:
        TaskError: if models differ, or trained factors have a higher rank.
    """
    scale = method.training.build_scaling(lora_of(task.common_model(method.title))).scale_at(rank)
    return build_starting_factors(task, method.title, rank, scale)


def read_leaves(message: Message, personal_rest: Params) -> Leaves:
    """Read the leaves to train: the factors of a message, and its rest together with the client's personal rest."""
    return join_leaves(unpack_factors(message.factors), personal_rest | message.rest)


def split_trained_leaves(method: TrainsFactors, leaves: Leaves) -> tuple[Params, Message]:
    """Split trained leaves into the client's state and its upload."""
    upload = method.training.pack_message(read_factors(leaves), leaves["rest"])
    return method.training.select_personal_rest(leaves), upload


def build_client_model(
    view: ClientView,
    leaves: Leaves,
    scale: float | Tensor,
    frozen_factors: Factors | None = None,
    moved_weights: Params | None = None,
) -> ClientModel:
    """Build the model of a client; see :func:`~fedlowrank.methods.shared.lora_family.insert_leaves` for the arguments."""
    params = insert_leaves(view.model, leaves, scale, frozen_factors or {}, moved_weights or {})
    return ClientModel(view.model.initial | params)
