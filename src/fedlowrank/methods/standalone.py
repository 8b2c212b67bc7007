"""Standalone: every client trains its own model on its own data; nothing is sent.

The lower bar of every comparison (``Local`` in FedSLR, Huang et al.; ``Standalone`` in pFedLoRA, Yi et al.).

    client k, each round:   θ_k ← SGD on F_k from θ_k, E epochs             local_update

Choices: only the sampled clients train in a round, as in the papers' tables, so that all methods take equally many
local steps; ``all_clients = true`` trains all clients in every round. Clients of one architecture begin with the
same initial weights.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..core.contract import ClientInfo, ClientModel, ClientView, Method, ServerView, Task
from ..core.learning.batch_losses import supervised_loss
from ..core.tree import Params


@dataclass(frozen=True)
class Standalone(Method[None, Params, None, None]):
    """Local training alone.

    Attributes:
        all_clients: whether all clients train in every round, and not only the sampled ones.
    """

    all_clients: bool = False

    title = "Standalone"
    citation = "local training, the lower bar of every table"
    heterogeneous = True

    def participants(self, sampled: list[int], available: list[int]) -> list[int]:
        """The sampled clients, or all clients."""
        return available if self.all_clients else sampled

    def server_init(self, task: Task) -> None:
        """The server has no state."""

    def client_init(self, client: ClientInfo, task: Task) -> Params:
        """θ_k starts at its architecture's initial weights."""
        return task.model(client).initial

    def local_update(self, state: Params, down: None, view: ClientView) -> tuple[Params, None]:
        """SGD on the client's model θ_k."""
        model = view.model
        return view.train(supervised_loss(model), state, "local", self.optimizer), None

    def server_update(self, server: None, total: None, view: ServerView) -> None:
        """The server does nothing."""

    def client_model(self, state: Params, down: None, view: ClientView) -> ClientModel:
        """The client's model θ_k."""
        return ClientModel(state)
