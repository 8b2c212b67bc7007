"""The state of a run between two rounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..core import tree
from .client_store import ClientStore


@tree.tree_dataclass
class ServerStateWithLosses:
    """The state of a server as it is stored, with the losses that the draw of clients uses.

    Attributes:
        server: the state of the method.
        losses: last known training losses of the clients that have replied, by identifier.
    """

    server: Any
    losses: dict[str, float]


@dataclass(frozen=True)
class State:
    """The state of a run between two rounds.

    Attributes:
        round: number of completed rounds.
        server: state of the server.
        clients: states of the clients that have taken part.
        losses: last known training loss of each client, by identifier, if clients are drawn by their losses.
    """

    round: int
    server: Any
    clients: ClientStore
    losses: Mapping[int, float] = field(default_factory=dict)

    @property
    def stored_server(self) -> Any:
        """The server's state as a checkpoint stores it, with the losses if there are any."""
        if not self.losses:
            return self.server
        return ServerStateWithLosses(self.server, {str(i): x for i, x in self.losses.items()})

    @classmethod
    def from_stored(cls, round: int, server: Any, clients: ClientStore) -> State:
        """Build a state from the parts of a checkpoint, the server's as :attr:`stored_server` returns it."""
        if not isinstance(server, ServerStateWithLosses):
            return cls(round, server, clients)
        return cls(round, server.server, clients, {int(i): x for i, x in server.losses.items()})
