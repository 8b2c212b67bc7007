"""FedAvg's local training and the weight of a reply, for FedAvg and methods that share these two.

A method takes these functions as its own: ``local_update = train_model``.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

from ...core.contract import ClientInfo, ClientView, Mean
from ...core.learning.batch_losses import supervised_loss
from ...core.learning.optimizer import Optimizer
from ...core.tree import Params, widen

Weighting = Literal["examples", "uniform"]


class _Averaging(Protocol):
    """The fields that these functions read."""

    @property
    def optimizer(self) -> Optimizer: ...

    @property
    def weighting(self) -> Weighting: ...


def train_model(method: _Averaging, state: None, down: Params, view: ClientView) -> tuple[None, Params]:
    """Train the model received by SGD on F_k."""
    return None, view.train(supervised_loss(view.model), down, "local", method.optimizer)


def average_models(method: _Averaging, server: Any, upload: Params, client: ClientInfo) -> Mean[Params]:
    """The client's model, weighted by n_k or uniformly; the mean is in float32, because the server computes with it."""
    return Mean(widen(upload), reply_weight(client, method.weighting))


def reply_weight(client: ClientInfo, weighting: Weighting) -> float:
    """The weight of a client's reply in a mean: n_k, or 1 for every client."""
    return client.example_count if weighting == "examples" else 1.0
