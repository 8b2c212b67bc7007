"""Types that describe a federated task: batches, passes over data, clients, models."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..arguments.bounds import check_minimum
from ..arguments.shares import multiply_share
from ..errors import TaskError
from ..key import Key
from ..learning.losses import AUTO, Loss
from ..tree import wide_type
from .model import EngineModel


@dataclass(frozen=True)
class Batch:
    """Examples of one step.

    Attributes:
        x: inputs, a tensor ``[b, ...]`` or a dict of such tensors.
        y: targets: labels ``[b]``; real values ``[b, d]`` of a regression; int64 token labels ``[b, T]``, with -100
            for tokens that do not count; or labels or real values of pixels ``[b, H, W]``.
        mask: boolean mask ``[b]``: True for an example, False for padding; None if nothing is padded.
        step: index of the step in its pass, from 0, for values that a method draws anew at every step.
        client_count: K if the batch stacks the rows of K clients, one client after another with equally many rows
            each; sums and means are then those of each client, ``[K, ...]``. None for the batch of one client.
        loss: loss of the task, which ``task_loss`` of :mod:`..learning.batch_losses` computes.
        example_weight: mean weight of an example in the whole batch, set if this is a part of a batch whose loss has
            weights; see :func:`..learning.batch_losses.mean_loss`.
    """

    x: Any
    y: Tensor
    mask: Tensor | None = None
    step: int = 0
    client_count: int | None = None
    loss: Loss = AUTO
    example_weight: Tensor | None = None

    def __len__(self) -> int:
        return len(self.y)

    @property
    def weights(self) -> Tensor | None:
        """Weights of the examples in a mean ``[b]``: their numbers of predicted tokens; None if all weights are 1."""
        if not self.loss.predicts_tokens(self.y):
            return None
        return (self.y[:, 1:] >= 0).sum(1)

    def mean(self, values: Tensor) -> Tensor:
        """Mean of ``values [b]`` over the examples without padding. Every loss must average by this.

        For sequences of tokens it is the mean over tokens, if each value is a mean over its own tokens.
        Half-precision values are accumulated in float32, and their mean is rounded once.
        """
        weights = self.weights
        if weights is not None:
            weights = weights.to(wide_type(values.dtype))
            return (self.sum(values * weights) / self.sum(weights).clamp(min=1)).to(values.dtype)
        if self.mask is None:
            return values.mean() if self.client_count is None else self._by_client(values).mean(1)
        return (self.sum(values) / self.sum(self.mask.long()).clamp(min=1)).to(values.dtype)

    def sum(self, values: Tensor) -> Tensor:
        """Sum of ``values [b, ...]`` over the examples without padding; half precision is summed in float32."""
        values = values.to(wide_type(values.dtype))
        if self.mask is not None:
            mask = self.mask.reshape(-1, *[1] * (values.ndim - 1))
            # torch.where instead of a product: padding may hold infinities, and 0 * inf is NaN
            values = torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))
        return values.sum(0) if self.client_count is None else self._by_client(values).sum(1)

    def _by_client(self, values: Tensor) -> Tensor:
        """Reshape the values of all rows to ``[K, b, ...]``, by client."""
        client_count = self.client_count or 1
        return values.reshape(client_count, len(values) // client_count, *values.shape[1:])


@dataclass(frozen=True)
class Pass:
    """One training of a tree at a client: its epochs or steps, and its batch size.

    Attributes:
        epochs: number of times that every example is seen; None for as many as ``steps`` need.
        batch_size: number of examples in a step; the last step of an epoch takes the remaining ones.
        steps: number of steps after which the pass ends, or None.
        share: share of the examples that the pass uses, in (0, 1]. Below 1, each pass of a round sees its own random
            subset.
        drop_last: whether an epoch ends before an incomplete batch. Fewer examples than a batch still form one batch,
            so that every client takes a step.
    """

    epochs: int | None = 1
    batch_size: int = 64
    steps: int | None = None
    share: float = 1.0
    drop_last: bool = False

    def __post_init__(self) -> None:
        if self.epochs is None and self.steps is None:
            raise TaskError("Pass: a pass needs epochs or steps, and both are None")

    def examples_of(self, total: int) -> int:
        """Number of examples that the pass sees: its share of the total, rounded down, at least one."""
        return max(min(1, total), math.floor(multiply_share(self.share, total)))

    def steps_over(self, total: int) -> int:
        """Number of optimizer steps of the pass at a client with ``total`` examples."""
        full_batches, remainder = self._batches(total)
        steps = None if self.epochs is None else self.epochs * (full_batches + (remainder > 0))
        return min(n for n in (steps, self.steps) if n is not None)

    def has_batch_of_one(self, total: int) -> bool:
        """Whether a step at a client with ``total`` examples sees a single example."""
        full_batches, remainder = self._batches(total)
        return (self.batch_size == 1 and full_batches > 0) or (
            remainder == 1 and (self.steps is None or self.steps > full_batches)
        )

    def _batches(self, total: int) -> tuple[int, int]:
        """Number of full batches of an epoch, and number of examples of the incomplete batch after them, or 0."""
        full_batches, remainder = divmod(self.examples_of(total), self.batch_size)
        return full_batches, 0 if self.drop_last and full_batches else remainder

    def complete(self, batches: Sequence[Tensor]) -> list[Tensor]:
        """Select the batches of an epoch that are used; an incomplete one may be anywhere among them."""
        if not self.drop_last or len(batches) == 1:
            return list(batches)
        return [batch for batch in batches if len(batch) == self.batch_size]


@dataclass(frozen=True)
class ClientInfo:
    """Record of a client that both sides know.

    Attributes:
        id: identifier of the client, its index in the federation.
        example_count: number of training examples, the usual weight of the client's reply.
        architecture: name of the client's architecture.
        rank: rank of the client's low-rank parts, or None if the method decides.
        cluster: index of the ground-truth task of the client's data, or None if unknown. Methods with optimal routing
            use it, and reports compare learned routes with it.
        name: name that the user gave the client, such as a hospital; empty if clients have only numbers.
    """

    id: int
    example_count: int
    architecture: str
    rank: int | None = None
    cluster: int | None = None
    name: str = ""

    def __post_init__(self) -> None:
        if self.rank is not None:
            object.__setattr__(self, "rank", check_minimum(f"{self.title}: its rank", self.rank, 1))

    @property
    def title(self) -> str:
        """Name of the client in messages, such as ``client 2 (north)``."""
        return client_title(self.id, self.name)


def client_title(client_id: int, name: str = "") -> str:
    """Name of a client in messages: its number, and its name if it has one."""
    return f"client {client_id} ({name})" if name else f"client {client_id}"


@dataclass(frozen=True)
class Task:
    """A federated task: the available models, the clients, and the numbers of classes and rounds.

    Attributes:
        architectures: architectures by name, each with its initial parameters.
        clients: all clients of the federation.
        classes: number of classes; 0 for a regression.
        rounds: number of rounds of the whole run, for methods whose settings depend on progress.
        key: key of the initial values' randomness, common to server and clients.
        loss: loss that is minimized; batches carry it, too.
        target: empty tensor ``[0, ...]`` with the shape and type of targets; None if targets are labels ``[n]`` or
            have the shape of the scores.
    """

    architectures: Mapping[str, EngineModel]
    clients: Sequence[ClientInfo]
    classes: int
    rounds: int
    key: Key
    loss: Loss = AUTO
    target: Tensor | None = None

    def model(self, client: ClientInfo) -> EngineModel:
        """Architecture of a client."""
        return self.architectures[client.architecture]

    def common_model(self, method: str) -> EngineModel:
        """The one architecture that all clients share.

        Raises:
            TaskError: if the clients have different architectures.
        """
        if len(self.architectures) > 1:
            owners = {c.architecture: c for c in reversed(self.clients)}
            holders = ", ".join(
                f"{c.title} holds {a}" for a, c in sorted(owners.items(), key=lambda item: item[1].id)
            )
            raise TaskError(
                f"{method} averages whole models, so all clients must hold the same architecture, but "
                f"{holders}. Give model.names one name, or choose a method for heterogeneous models "
                "(`fedlowrank list` says which)."
            )
        return next(iter(self.architectures.values()))

    def common_width(self, method: str) -> int:
        """Width of the representation, which must be equal in all architectures.

        Raises:
            TaskError: if the widths differ; the message names clients and widths.
        """
        first_client = self.clients[0]
        for client in self.clients:
            if self.model(client).width != self.model(first_client).width:
                raise TaskError(
                    f"{method} needs representations of one width, but {first_client.title} "
                    f"({first_client.architecture}) has {self.model(first_client).width} and {client.title} "
                    f"({client.architecture}) has {self.model(client).width}. Choose another split point "
                    "(model.split) or other models."
                )
        return self.model(first_client).width

    def common_type(self, method: str) -> torch.dtype:
        """Type in which architectures exchange numbers: float32 for half precision.

        Raises:
            TaskError: if architectures have parameters of different types; float16, bfloat16 and float32 are one type.
        """
        types = {
            name: wide_type(next(iter(model.initial.values())).dtype)
            for name, model in sorted(self.architectures.items())
        }
        if len(set(types.values())) > 1:
            descriptions = ", ".join(f"{name} has {t}".replace("torch.", "") for name, t in types.items())
            raise TaskError(
                f"{method} exchanges numbers between models, so their parameters must have one type, but {descriptions}. "
                "Call .float() or .double() on the modules."
            )
        return next(iter(types.values()))

    def smallest_model(self, name: str | None = None) -> EngineModel:
        """The named architecture, or the one with the fewest parameters if no name is given."""
        if name is None:
            return min(self.architectures.values(), key=lambda a: a.parameter_count)
        if name not in self.architectures:
            raise TaskError(
                f"there is no model {name!r} in this federation; it holds {sorted(self.architectures)}"
            )
        return self.architectures[name]
