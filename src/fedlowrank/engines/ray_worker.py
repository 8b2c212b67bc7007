"""The worker of a Ray cluster, and the setup that it gets once at its start. Nothing here imports Ray."""

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
from .processes import describe_worker_error, train_client
from .sequential import Sequential


@dataclass(frozen=True)
class WorkerSetup:
    """Code and models for all workers, without examples.

    Attributes:
        method: method of the run.
        federation: federation whose clients have no examples.
        task: task of the run.
        micro_batch: micro batch of the engine.
        device: device of the workers: ``cpu`` or ``cuda``.
        trees: tree classes that a script or notebook defines, which a worker therefore cannot import.
    """

    method: AnyMethod
    federation: Federation
    task: Task
    micro_batch: int | None
    device: str
    trees: tuple[type[Any], ...]


def share(method: AnyMethod, federation: Federation, task: Task, micro_batch: int | None) -> WorkerSetup:
    """Collect the setup that all workers of a run get."""
    first_examples = federation.clients[0].train
    models = {}
    for name, model in federation.architectures.items():
        models[name] = without_data(model if first_examples.y.device.type == "cpu" else model.to("cpu"))
    empty_examples = _decode_examples(
        tree.map_leaves(lambda t: t[:0].cpu().clone(), _to_tree(first_examples))
    )
    clients = [ClientData(empty_examples, empty_examples, empty_examples)] * len(federation.clients)
    empty_federation = replace(federation, clients=clients, architectures=models, local_ids=frozenset())
    return WorkerSetup(
        method,
        empty_federation,
        replace(task, architectures=models),
        micro_batch,
        first_examples.y.device.type,
        tree.tree_classes("__main__"),
    )


def encode_partition(federation: Federation, client_ids: Sequence[int]) -> bytes:
    """Encode the training examples of some clients as bytes; examples that clients share are encoded once."""
    example_sets: dict[int, tuple[int, Any]] = {}
    rows = []
    for client_id in client_ids:
        data = federation.clients[client_id]
        index, _ = example_sets.setdefault(id(data.train), (len(example_sets), data.train))
        rows.append([client_id, index, data.quarter_turns])
    return tree.encode({"clients": rows, "examples": [_to_tree(train) for _, train in example_sets.values()]})


def decode_partition(data: bytes) -> dict[int, tuple[Examples, int]]:
    """Decode the training examples and quarter turns by client from what :func:`encode_partition` returns."""
    partition = tree.decode(data)
    examples = [_decode_examples(e) for e in partition["examples"]]
    return {client_id: (examples[index], turns) for client_id, index, turns in partition["clients"]}


def _to_tree(examples: Examples) -> Any:
    """Convert examples to a tree, in which images that are stored as bytes are a tuple of codes and table."""
    x = examples.x
    return {"x": (x.codes, x.table) if isinstance(x, Pixels) else x, "y": examples.y}


def _decode_examples(example_tree: Any) -> Examples:
    x: Stored = Pixels(*example_tree["x"]) if isinstance(example_tree["x"], tuple) else example_tree["x"]
    return Examples(x, example_tree["y"])


@dataclass
class _IndexedEngine(Sequential):
    """Sequential engine with states and downloads on the worker's device."""

    device: str = "cpu"

    def boundary(self, value: Any) -> Any:
        """See the base class."""
        return tree.map_leaves(lambda t: t.detach().to(self.device).contiguous(), value)


class RayWorker:
    """Actor that trains the clients of its partitions, one after another on one thread or one GPU.

    Args:
        worker_setup: code and models of the run.
        partition: encoded data of the actor's first clients.
    """

    def __init__(self, worker_setup: WorkerSetup, partition: bytes) -> None:
        torch.set_num_threads(1)
        for cls in worker_setup.trees:
            tree.register(cls)
        self._shared, self._stored = worker_setup, worker_setup.federation
        self._engine = _IndexedEngine(micro_batch=worker_setup.micro_batch, device=worker_setup.device)
        self.adopt(partition)

    def describe_location(self) -> str:
        """Describe the process and machine of this worker. A call returns once the worker has its data."""
        return f"process {os.getpid()} on {socket.gethostname()}"

    def adopt(self, partition: bytes) -> None:
        """Add the data of further clients."""
        clients = list(self._stored.clients)
        new_examples = decode_partition(partition)
        for client_id, (train, turns) in new_examples.items():
            clients[client_id] = replace(clients[client_id], train=train, quarter_turns=turns)
        loaded_ids = (self._stored.local_ids or frozenset()) | new_examples.keys()
        self._stored = replace(self._stored, clients=clients, local_ids=loaded_ids)
        self._federation = self._stored.to(self._shared.device)
        self._task = replace(self._shared.task, architectures=self._federation.architectures)

    def train(
        self, round: int, client_ids: list[int], download_indices: list[int], *payloads: bytes
    ) -> list[Any]:
        """Train a block of clients.

        Args:
            round: index of the round, from 0.
            client_ids: identifiers of the clients.
            download_indices: index of each client's download among the encoded downloads.
            payloads: encoded state of each client, followed by the encoded downloads.

        Returns:
            None, followed by the answer of :func:`.processes.train_client` for each client; or after a failure its
            traceback and the description of its error, followed by None for each client.
        """
        states, downloads = payloads[: len(client_ids)], payloads[len(client_ids) :]
        try:
            loaded_ids = self._stored.local_ids or frozenset()
            if missing_ids := set(client_ids) - loaded_ids:
                raise RuntimeError(f"the data of clients {sorted(missing_ids)} did not arrive")
            answers = [
                train_client(
                    self._engine,
                    self._shared.method,
                    self._federation,
                    self._task,
                    {"client": client_id, "round": round},
                    [downloads[index], state],
                )
                for client_id, index, state in zip(client_ids, download_indices, states, strict=True)
            ]
            return [None, *answers]
        except Exception as error:  # noqa: BLE001 - the driver raises what the method raised
            return [(traceback.format_exc(), describe_worker_error(error))] + [None] * len(client_ids)
