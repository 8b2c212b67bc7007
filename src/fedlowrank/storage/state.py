"""Where a run stands between two rounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..core import tree
from .client_store import ClientStore


@tree.tree_dataclass
class ServerStateWithLosses:
    """The state of a server as it is stored, with the losses by which clients are drawn.

    Attributes:
        server: the state of the method.
        losses: of the clients that have replied, by identifier.
    """

    server: Any
    losses: dict[str, float]


@dataclass(frozen=True)
class State:
    """Where a run stands between two rounds.

    Attributes:
        round: rounds completed.
        server: state of the server.
        clients: states of clients that have taken part.
        losses: last known training loss of each client, where clients are drawn by it.
    """

    round: int
    server: Any
    clients: ClientStore
    losses: Mapping[int, float] = field(default_factory=dict)

    @property
    def stored_server(self) -> Any:
        """What a checkpoint holds of the server."""
        if not self.losses:
            return self.server
        return ServerStateWithLosses(self.server, {str(i): x for i, x in self.losses.items()})

    @classmethod
    def from_stored(cls, round: int, server: Any, clients: ClientStore) -> State:
        """The state of which a checkpoint holds these parts, the server's as of :attr:`stored_server`."""
        if not isinstance(server, ServerStateWithLosses):
            return cls(round, server, clients)
        return cls(round, server.server, clients, {int(i): x for i, x in server.losses.items()})
