"""What runs in a worker of Ray, and what is sent to it once. Nothing here imports Ray."""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..core import tree
from ..core.contract.method import AnyMethod, Task
from ..core.contract.model import without_data
from ..data.dataset import ClientData, Examples, Stored
from ..data.federation import Federation
from ..data.pixels import Pixels
from .processes import train_client
from .sequential import Sequential


@dataclass(frozen=True)
class Shared:
    """What all workers get: code and models, no examples.

    Attributes:
        method: of the run.
        federation: its clients have no examples.
        task: of the run.
        micro_batch: of the engine.
        device: ``cpu`` or ``cuda``.
        trees: classes of trees of a script or notebook, which a worker cannot import.
    """

    method: AnyMethod
    federation: Federation
    task: Task
    micro_batch: int | None
    device: str
    trees: tuple[type[Any], ...]


def share(method: AnyMethod, federation: Federation, task: Task, micro_batch: int | None) -> Shared:
    """What all workers of a run get."""
    first = federation.clients[0].train
    models = {}
    for name, model in federation.architectures.items():
        models[name] = without_data(model if first.y.device.type == "cpu" else model.to("cpu"))
    nothing = _decode_examples(tree.map_leaves(lambda t: t[:0].cpu().clone(), _plain(first)))
    clients = [ClientData(nothing, nothing, nothing)] * len(federation.clients)
    empty = replace(federation, clients=clients, architectures=models, here=frozenset())
    return Shared(
        method,
        empty,
        replace(task, architectures=models),
        micro_batch,
        first.y.device.type,
        tree.tree_classes("__main__"),
    )


def encode_partition(federation: Federation, clients: Sequence[int]) -> bytes:
    """The training examples of some clients as bytes; examples that clients share are there once."""
    parts: dict[int, tuple[int, Any]] = {}
    rows = []
    for client in clients:
        data = federation.clients[client]
        place, _ = parts.setdefault(id(data.train), (len(parts), data.train))
        rows.append([client, place, data.quarter_turns])
    return tree.encode({"clients": rows, "examples": [_plain(train) for _, train in parts.values()]})


def decode_partition(data: bytes) -> dict[int, tuple[Examples, int]]:
    """Training examples and quarter turns by client: the inverse of :func:`encode_partition`."""
    found = tree.decode(data)
    examples = [_decode_examples(e) for e in found["examples"]]
    return {client: (examples[place], turns) for client, place, turns in found["clients"]}


def _plain(examples: Examples) -> Any:
    """Examples as a tree: images that are stored as bytes are a tuple of codes and table."""
    x = examples.x
    return {"x": (x.codes, x.table) if isinstance(x, Pixels) else x, "y": examples.y}


def _decode_examples(found: Any) -> Examples:
    x: Stored = Pixels(*found["x"]) if isinstance(found["x"], tuple) else found["x"]
    return Examples(x, found["y"])


@dataclass
class _Placed(Sequential):
    """Sequential, with states and downloads on the worker's device."""

    device: str = "cpu"

    def boundary(self, value: Any) -> Any:
        """See the base class."""
        return tree.map_leaves(lambda t: t.detach().to(self.device).contiguous(), value)


class RayWorker:
    """Trains clients whose data it has, one by one on one thread or one GPU; an actor of the engine.

    Args:
        shared: code and models.
        partition: of the first clients whose data it gets.
    """

    def __init__(self, shared: Shared, partition: bytes) -> None:
        torch.set_num_threads(1)
        for cls in shared.trees:
            tree.register(cls)
        self._shared, self._stored = shared, shared.federation
        self._engine = _Placed(micro_batch=shared.micro_batch, device=shared.device)
        self.adopt(partition)

    def place(self) -> str:
        """Where it runs; answered once it has its data."""
        return f"process {os.getpid()} on {socket.gethostname()}"

    def adopt(self, partition: bytes) -> None:
        """Take the data of further clients."""
        clients = list(self._stored.clients)
        found = decode_partition(partition)
        for client, (train, turns) in found.items():
            clients[client] = replace(clients[client], train=train, quarter_turns=turns)
        here = (self._stored.here or frozenset()) | found.keys()
        self._stored = replace(self._stored, clients=clients, here=here)
        self._federation = self._stored.to(self._shared.device)
        self._task = replace(self._shared.task, architectures=self._federation.architectures)

    def train(self, round: int, clients: list[int], which: list[int], *payloads: bytes) -> list[Any]:
        """Train a block of clients.

        Args:
            round: of the run.
            clients: their identifiers.
            which: place of each client's download among the downloads.
            payloads: the encoded state of each client, and then the encoded downloads.

        Returns:
            The traceback of a failure or None, and for each client what :func:`.processes.train_client`
            returns.
        """
        states, downs = payloads[: len(clients)], payloads[len(clients) :]
        try:
            here = self._stored.here or frozenset()
            if missing := set(clients) - here:
                raise RuntimeError(f"the data of clients {sorted(missing)} did not arrive")
            found = [
                train_client(
                    self._engine,
                    self._shared.method,
                    self._federation,
                    self._task,
                    {"client": client, "round": round},
                    [downs[place], state],
                )
                for client, place, state in zip(clients, which, states, strict=True)
            ]
            return [None, *found]
        except Exception:  # noqa: BLE001 - whatever a method raises is told to the parent, which raises it
            return [traceback.format_exc()] + [None] * len(clients)
