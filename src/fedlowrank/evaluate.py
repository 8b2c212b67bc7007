"""Accuracy of every client's own model on its own validation and test examples, and the size of that model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import tree
from .data.dataset import Examples
from .data.federation import Federation
from .engine.base import Engine, client_view
from .low_rank.matricise import Weights, numbers
from .method import ClientInfo, Method, Predictor, Task
from .models.architecture import Architecture
from .record import Accuracy
from .train import CHUNK, gather

AnyMethod = Method[Any, Any, Any, Any]
SPLITS = ("val", "test")


@dataclass(frozen=True)
class Evaluation:
    """What every client's model is worth, and what it takes.

    Attributes:
        accuracy: series by name, the headline first; in each the splits; in each one number a client.
        parameters: series by name; in each, how many numbers the model of each client takes.
    """

    accuracy: Accuracy
    parameters: dict[str, list[int]]


def evaluate(
    method: AnyMethod,
    federation: Federation,
    task: Task,
    engine: Engine,
    server: Any,
    state_of: Callable[[ClientInfo], Any],
    round: int,
) -> Evaluation:
    """Accuracy and size of every client's model, those that never took part included.

    Args:
        method: says how a client infers.
        federation: the clients.
        task: what is learnt.
        engine: executes what a method does to its model before it infers (adaptation on *training* data).
        server: its state after the round.
        state_of: state of a client, fresh for one that never took part.
        round: counted from 0.
    """
    found: Accuracy = {}
    sizes: dict[str, list[int]] = {}
    with torch.inference_mode():
        for info, data in zip(federation.infos, federation.clients, strict=True):
            client = at_client(method, federation, task, engine, server, state_of(info), info, round)
            for name, predict in client.predictors.items():
                series = found.setdefault(name, {s: [] for s in SPLITS})
                for split in SPLITS:
                    series[split].append(share_correct(predict, getattr(data, split)))
                sizes.setdefault(name, []).append(client.numbers(name))
    return Evaluation(found, sizes)


@dataclass(frozen=True)
class AtClient:
    """One client's inference.

    Attributes:
        predictors: by name of the series, the headline first.
        parts: see :meth:`fedlowrank.method.Method.parts`.
        model: its architecture.
    """

    predictors: Mapping[str, Predictor]
    parts: Mapping[str, tuple[Weights, ...]]
    model: Architecture

    def numbers(self, series: str) -> int:
        """How many numbers the model of a series takes."""
        return numbers(self.parts[series], self.model.initial) if series in self.parts else self.model.parameters


def at_client(
    method: AnyMethod,
    federation: Federation,
    task: Task,
    engine: Engine,
    server: Any,
    state: Any,
    info: ClientInfo,
    round: int,
) -> AtClient:
    """How one client infers, and what its models are made of."""
    trainer = engine.trainer(method, federation, round, info)
    view = client_view(federation, task, round, info, trainer)
    with torch.inference_mode(False):
        down = tree.canonical(method.download(server, info))
        made = method.predictor(state, down, view)
        parts = method.parts(state, down, view)
    return AtClient(made if isinstance(made, Mapping) else {"personal": made}, parts, view.model)


def share_correct(predict: Callable[[Any], Tensor], examples: Examples) -> float | None:
    """Share of examples whose highest score is their label's; None without examples."""
    n = len(examples)
    if n == 0:
        return None
    right = torch.zeros((), dtype=torch.int64, device=examples.y.device)
    for at in range(0, n, CHUNK):
        batch = gather(examples, torch.arange(at, min(at + CHUNK, n)))
        right += (predict(batch.x).argmax(-1) == batch.y).sum()
    return int(right) / n
