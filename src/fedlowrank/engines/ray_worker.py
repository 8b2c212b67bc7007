"""The worker of a Ray cluster, and what it gets once, at its start. Nothing here imports Ray."""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..core import tree
from ..core.contract import AnyMethod, Task
from ..core.contract.model import without_data
from ..data.dataset import ClientData, Examples, Stored
from ..data.federation import Federation
from ..data.pixels import Pixels
from .processes import train_client
from .sequential import Sequential


@dataclass(frozen=True)
class Shared:
    """Code and models that all workers get, without examples.

    Attributes:
        method: of the run.
        federation: its clients have no examples.
        task: of the run.
        micro_batch: of the engine.
        device: ``cpu`` or ``cuda``.
        trees: tree classes that a script or notebook defines, so that a worker cannot import them.
    """

    method: AnyMethod
    federation: Federation
    task: Task
    micro_batch: int | None
    device: str
    trees: tuple[type[Any], ...]


def share(method: AnyMethod, federation: Federation, task: Task, micro_batch: int | None) -> Shared:
    """Collect what all workers of a run get."""
    first = federation.clients[0].train
    models = {}
    for name, model in federation.architectures.items():
        models[name] = without_data(model if first.y.device.type == "cpu" else model.to("cpu"))
    no_examples = _decode_examples(tree.map_leaves(lambda t: t[:0].cpu().clone(), _to_tree(first)))
    clients = [ClientData(no_examples, no_examples, no_examples)] * len(federation.clients)
    without_examples = replace(federation, clients=clients, architectures=models, here=frozenset())
    return Shared(
        method,
        without_examples,
        replace(task, architectures=models),
        micro_batch,
        first.y.device.type,
        tree.tree_classes("__main__"),
    )


def encode_partition(federation: Federation, clients: Sequence[int]) -> bytes:
    """Encode the training examples of some clients as bytes; examples that clients share are encoded once."""
    parts: dict[int, tuple[int, Any]] = {}
    rows = []
    for client in clients:
        data = federation.clients[client]
        place, _ = parts.setdefault(id(data.train), (len(parts), data.train))
        rows.append([client, place, data.quarter_turns])
    return tree.encode({"clients": rows, "examples": [_to_tree(train) for _, train in parts.values()]})


def decode_partition(data: bytes) -> dict[int, tuple[Examples, int]]:
    """Decode the training examples and quarter turns by client from what :func:`encode_partition` returns."""
    partition = tree.decode(data)
    examples = [_decode_examples(e) for e in partition["examples"]]
    return {client: (examples[place], turns) for client, place, turns in partition["clients"]}


def _to_tree(examples: Examples) -> Any:
    """Examples as a tree, in which images that are stored as bytes are a tuple of codes and table."""
    x = examples.x
    return {"x": (x.codes, x.table) if isinstance(x, Pixels) else x, "y": examples.y}


def _decode_examples(parts: Any) -> Examples:
    x: Stored = Pixels(*parts["x"]) if isinstance(parts["x"], tuple) else parts["x"]
    return Examples(x, parts["y"])


@dataclass
class _Placed(Sequential):
    """Sequential, with states and downloads on the worker's device."""

    device: str = "cpu"

    def boundary(self, value: Any) -> Any:
        """See the base class."""
        return tree.map_leaves(lambda t: t.detach().to(self.device).contiguous(), value)


class RayWorker:
    """An actor that trains the clients of its partitions, one after another on one thread or one GPU.

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
        """The process and machine of this worker. A call returns once the worker has its data."""
        return f"process {os.getpid()} on {socket.gethostname()}"

    def adopt(self, partition: bytes) -> None:
        """Take the data of further clients."""
        clients = list(self._stored.clients)
        further = decode_partition(partition)
        for client, (train, turns) in further.items():
            clients[client] = replace(clients[client], train=train, quarter_turns=turns)
        here = (self._stored.here or frozenset()) | further.keys()
        self._stored = replace(self._stored, clients=clients, here=here)
        self._federation = self._stored.to(self._shared.device)
        self._task = replace(self._shared.task, architectures=self._federation.architectures)

    def train(self, round: int, clients: list[int], down_places: list[int], *payloads: bytes) -> list[Any]:
        """Train a block of clients.

        Args:
            round: of the run.
            clients: their identifiers.
            down_places: place of each client's download among the downloads.
            payloads: the encoded state of each client, and then the encoded downloads.

        Returns:
            The traceback of a failure or None, and the answer of :func:`.processes.train_client` for each client.
        """
        states, downs = payloads[: len(clients)], payloads[len(clients) :]
        try:
            here = self._stored.here or frozenset()
            if missing := set(clients) - here:
                raise RuntimeError(f"the data of clients {sorted(missing)} did not arrive")
            answers = [
                train_client(
                    self._engine,
                    self._shared.method,
                    self._federation,
                    self._task,
                    {"client": client, "round": round},
                    [downs[place], state],
                )
                for client, place, state in zip(clients, down_places, states, strict=True)
            ]
            return [None, *answers]
        except Exception:  # noqa: BLE001 - the driver raises what the method raised
            return [traceback.format_exc()] + [None] * len(clients)
