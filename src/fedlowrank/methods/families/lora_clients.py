"""The client half that LoRA methods share, for methods that differ in what the server does with the factors.

A method takes these functions as its own: ``local_update = train_factors``.
"""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

from torch import Tensor

from ...adapters.wire_format import unpack_factors
from ...core.contract.client_model import ClientModel
from ...core.contract.contribution import Each, Mean
from ...core.contract.method import ClientInfo, ClientView, Task
from ...core.contract.update import Update
from ...core.learning.optimizer import Optimizer
from ...core.tree import Params
from ...linalg.pair import Factors
from .lora_family import (
    Leaves,
    Message,
    Tuning,
    factors_of,
    leaves_of,
    model_parameters,
    train_leaves,
)


class _Tuned(Protocol):
    """The fields that these functions read."""

    title: ClassVar[str]

    @property
    def optimizer(self) -> Optimizer: ...

    @property
    def tuning(self) -> Tuning: ...


class _MeanFactors(Protocol):
    """The state of a server that sends every client the same factors."""

    @property
    def factors(self) -> Factors: ...

    @property
    def rest(self) -> Params: ...


# Hooks


def describe_ranks(method: _Tuned, task: Task) -> list[str]:
    """Ranks that are above what a layer can have."""
    return method.tuning.remarks(task, method.title)


def initial_rest(method: _Tuned, task: Task, client: ClientInfo) -> Params:
    """What is trained whole, where it is personal."""
    return method.tuning.own_rest(task.model(client))


def send_factors(method: _Tuned, server: _MeanFactors, client: ClientInfo) -> Message:
    """The server's factors, and what is shared beside them."""
    return method.tuning.message(server.factors, server.rest)


def train_factors(method: _Tuned, state: Params, down: Message, view: ClientView) -> tuple[Params, Message]:
    """Train both factors."""
    start = leaves_of_message(down, state)
    return reply(method, train_leaves(view, start, method.tuning.scale(view), method.optimizer))


def average_factors(method: _Tuned, upload: Message, client: ClientInfo, server: Any) -> Mean:
    """The factors and what is shared beside them, weighted by n_i."""
    return Mean((unpack_factors(upload.factors), upload.rest), client.examples)


def collect_factors(method: _Tuned, upload: Message, client: ClientInfo, server: Any) -> dict[str, Any]:
    """The factors by themselves, for their products count; what is shared beside them, weighted by n_i."""
    return {"factors": Each(unpack_factors(upload.factors)), "rest": Mean(upload.rest, client.examples)}


def describe_factor_update(method: _Tuned, down: Message, client: ClientInfo, task: Task) -> Update:
    """Relative to what was sent, in the client's scale s."""
    return Update(down, method.tuning.scale_of(task, client))


def model_with_factors(method: _Tuned, state: Params, down: Message, view: ClientView) -> ClientModel:
    """The model with the factors received."""
    return adapted_model(view, leaves_of_message(down, state), method.tuning.scale(view))


# Their parts


def leaves_of_message(message: Message, own: Params) -> Leaves:
    """What is trained: the factors of a message, and its rest with the client's own."""
    return leaves_of(unpack_factors(message.factors), own | message.rest)


def reply(method: _Tuned, end: Leaves) -> tuple[Params, Message]:
    """What a client keeps of its trained leaves, and what it sends."""
    return method.tuning.personal_rest(end), method.tuning.message(factors_of(end), end["rest"])


def adapted_model(
    view: ClientView,
    leaves: Leaves,
    scale: float | Tensor,
    frozen: Factors | None = None,
    moved: Params | None = None,
) -> ClientModel:
    """The model of a client; the arguments are those of :func:`~fedlowrank.methods.families.lora_family.model_parameters`."""
    return ClientModel(
        view.model.initial | model_parameters(view.model, leaves, scale, frozen or {}, moved or {})
    )
