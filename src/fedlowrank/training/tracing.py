"""Shape tracing: finds what a client would send by calling ``local_update`` without data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..core import tree
from ..core.contract import AnyMethod, Batch, ClientInfo, ClientView, EngineModel, Task
from ..core.contract.hook_results import check_pair
from ..core.contract.training_request import Request

T = TypeVar("T")


class TracingTrainer:
    """Replaces the engine in a client's ``local_update``; it trains nothing and needs no data.

    Attributes:
        trained: names of the passes that were trained, in order.
    """

    def __init__(self, method: AnyMethod, task: Task, model: EngineModel) -> None:
        self.passes = method.local_passes()
        self.task = task
        self.model = model
        self.trained: list[str] = []

    def train(self, request: Request) -> Any:
        """Return the start plus one, because a method may check whether training changed anything."""
        self.trained.append(request.name)
        return tree.canonical(tree.map_leaves(lambda t: t.detach() + 1, request.start))

    def sum_over_data(self, statistic: Callable[..., T], params: Any, constants: tuple[Any, ...]) -> T:
        """Evaluate the statistic on the model's example, repeated because batch normalization fails on one example."""
        with torch.no_grad():
            return tree.canonical(statistic(params, self._batch(), *constants))

    def steps(self, name: str) -> int:
        """Number of steps of a client with one example, so that the cost does not depend on its registered example count."""
        return self.passes[name].steps_over(1)

    def _batch(self) -> Batch:
        example = self.model.example
        is_dict = isinstance(example, dict)
        x: Any = {n: _twice(t) for n, t in example.items()} if is_dict else _twice(example)
        first_input, loss, target = next(iter(x.values())) if is_dict else x, self.task.loss, self.task.target
        if target is not None and not loss.predicts_tokens(target):
            y = torch.zeros(2, *target.shape[1:], dtype=target.dtype, device=first_input.device)
            return Batch(x, y, loss=loss)
        if self.task.classes:
            return Batch(x, torch.zeros(2, dtype=torch.int64, device=first_input.device), loss=loss)
        scores = self.model.probe(x)
        # scores of tokens are [b, T, V], outputs of a regression [b, d]
        return Batch(
            x, torch.zeros_like(x["input_ids"] if is_dict and scores.ndim == 3 else scores), loss=loss
        )


def _twice(t: Tensor) -> Tensor:
    return torch.cat([t[:1], t[:1]])


def trace_upload(method: AnyMethod, task: Task, info: ClientInfo, down: Any) -> tuple[Any, tuple[str, ...]]:
    """Trace the upload of a client as if training changed every parameter by 1.

    Args:
        method: method of the client.
        task: task that is learnt.
        info: info of the client.
        down: download that the client received.

    Returns:
        The upload, and the names of the passes that were trained, in order. Errors of the method are not
        caught.
    """
    model = task.model(info)
    trainer = TracingTrainer(method, task, model)
    view = ClientView(info, task, model, 0, task.key / "dry", trainer)
    with view.key.global_generators():
        _, upload = check_pair(method, method.local_update(method.client_init(info, task), down, view))
    return upload, tuple(trainer.trained)
