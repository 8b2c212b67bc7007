"""Accuracy of every client's own model on its own validation and test examples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from . import tree
from .data.dataset import Examples
from .data.federation import Federation
from .engine.base import Engine, client_view
from .method import ClientInfo, Method, Task
from .record import Accuracy
from .train import CHUNK, gather

AnyMethod = Method[Any, Any, Any, Any]
SPLITS = ("val", "test")


def accuracy(
    method: AnyMethod,
    federation: Federation,
    task: Task,
    engine: Engine,
    server: Any,
    state_of: Callable[[ClientInfo], Any],
    round: int,
) -> Accuracy:
    """Accuracy of every client, those that never took part included.

    Args:
        method: says how a client infers.
        federation: the clients.
        task: what is learnt.
        engine: executes what a method does to its model before it infers (adaptation on *training* data).
        server: its state after the round.
        state_of: state of a client, fresh for one that never took part.
        round: counted from 0.

    Returns:
        Series by name, the headline first; in each the splits; in each one number a client.
    """
    found: dict[str, dict[str, list[float | None]]] = {}
    with torch.inference_mode():
        for info, data in zip(federation.infos, federation.clients, strict=True):
            predictors = predictors_of(method, federation, task, engine, server, state_of(info), info, round)
            for name, predict in predictors.items():
                series = found.setdefault(name, {s: [] for s in SPLITS})
                for split in SPLITS:
                    series[split].append(share_correct(predict, getattr(data, split)))
    return found


def predictors_of(
    method: AnyMethod,
    federation: Federation,
    task: Task,
    engine: Engine,
    server: Any,
    state: Any,
    info: ClientInfo,
    round: int,
) -> Mapping[str, Callable[[Any], Tensor]]:
    """How one client infers, by name of the series."""
    trainer = engine.trainer(method, federation, round, info)
    view = client_view(federation, task, round, info, trainer)
    with torch.inference_mode(False):
        down = tree.canonical(method.download(server, info))
        made = method.predictor(state, down, view)
    return made if isinstance(made, Mapping) else {"personal": made}


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
