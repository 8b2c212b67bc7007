"""Ablations of the evidence files, as methods of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedlowrank.core.contract import ClientInfo, ClientModel, ClientView, Method, Pass, ServerView, Task
from fedlowrank.methods.floral import FederatedFloral
from fedlowrank.methods.pfedlora import PFedLoRA

START = 0.97
"""The share that a router gives to the client's own cluster when it starts there."""


@dataclass(frozen=True)
class UnsharedAdapter(Method[None, dict[str, Any], None, None]):
    """pFedLoRA whose adapters never travel: each client trains its own, from the same first values.

    Attributes:
        mu: μ, weight of the model's own loss.
        width: hidden width of the adapter.
    """

    mu: float = 0.9
    width: int = 40

    title = "pFedLoRA, unshared adapter"
    heterogeneous = True
    needs_classes = True

    @property
    def shared(self) -> PFedLoRA:
        """The method whose parts this one uses."""
        return PFedLoRA(self.epochs, self.batch_size, self.optimizer, mu=self.mu, width=self.width)

    def passes(self) -> dict[str, Pass]:
        """As in pFedLoRA."""
        return self.shared.passes()

    def server_init(self, task: Task) -> None:
        """The server has nothing."""

    def client_init(self, client: ClientInfo, task: Task) -> dict[str, Any]:
        """ω_k and θ^0."""
        shared = self.shared
        return {"model": shared.client_init(client, task), "adapter": shared.server_init(task)}

    def download(self, server: None, client: ClientInfo) -> None:
        """Nothing."""

    def local_update(
        self, state: dict[str, Any], down: None, view: ClientView
    ) -> tuple[dict[str, Any], None]:
        """Model and adapter in turn; both stay."""
        del down
        model, adapter = self.shared.local_update(state["model"], state["adapter"], view)
        return {"model": model, "adapter": adapter}, None

    def server_update(self, server: None, total: None, view: ServerView) -> None:
        """Nothing."""

    def client_model(self, state: dict[str, Any], down: None, view: ClientView) -> ClientModel:
        """ω_k alone."""
        del down, view
        return ClientModel(state["model"])


@dataclass(frozen=True)
class StartedFloral(FederatedFloral):
    """FLoRAL whose learned routers start at the clients' true clusters, and may leave them."""

    title = "FLoRAL, routers start at the clusters"

    def client_init(self, client: ClientInfo, task: Task) -> Tensor:
        """θ with softmax(θ) = START at the client's cluster and equal shares elsewhere."""
        del task
        shares = torch.full((self.clusters,), (1 - START) / (self.clusters - 1))
        shares[client.cluster] = START
        return shares.log()
