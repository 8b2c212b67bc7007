"""What a client's upload has to look like, found without its data: ``local_update`` is run dry.

The method itself says what it sends. Its ``local_update`` is called as at a client, on a download without values and with a
trainer that trains nothing, and what it returns is the form of an upload. Where clients may differ,
:meth:`fedlowrank.core.method.Method.upload_form` says how.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...core import tree
from ...core.method import Batch, ClientInfo, ClientView, Method, Request, Task
from ...core.model import Model
from .forms import Template, erase_values

AnyMethod = Method[Any, Any, Any, Any]
T = TypeVar("T")


class TracingTrainer:
    """Does what an engine does for a client's ``local_update``, but trains nothing and needs no data.

    Args:
        method: gives the passes.
        task: says what the targets are.
        model: of the client.

    Attributes:
        trained: names of the passes that were trained, in their order.
    """

    def __init__(self, method: AnyMethod, task: Task, model: Model) -> None:
        self.passes = method.passes()
        self.classes = task.classes
        self.model = model
        self.trained: list[str] = []

    def train(self, request: Request) -> Any:
        """The start with every number changed, for a method may ask whether training changed anything."""
        self.trained.append(request.name)
        return tree.canonical(tree.map(lambda t: t.detach() + 1, request.start))

    def total(self, statistic: Callable[..., T], params: Any, constants: tuple[Any, ...]) -> T:
        """The statistic of the model's own example, twice, for one example alone cannot be normalized as a batch."""
        with torch.no_grad():
            return tree.canonical(statistic(params, self._batch(), *constants))

    def steps(self, name: str) -> int:
        """As if the client had a single example: what a client says of itself must not decide how much is computed here."""
        sweep = self.passes[name]
        return sweep.epochs if sweep.steps is None else min(sweep.epochs, sweep.steps)

    def _batch(self) -> Batch:
        held = self.model.example
        named = isinstance(held, dict)
        x: Any = {n: _twice(t) for n, t in held.items()} if named else _twice(held)
        if self.classes:
            first = next(iter(x.values())) if named else x
            return Batch(x, torch.zeros(2, dtype=torch.int64, device=first.device))
        scores = self.model.probe(x)
        # scores of every token are [b, T, V], those of a regression [b, d]
        return Batch(x, torch.zeros_like(x["input_ids"] if named and scores.ndim == 3 else scores))


def _twice(t: Tensor) -> Tensor:
    return torch.cat([t[:1], t[:1]])


def expected_upload(method: AnyMethod, task: Task, info: ClientInfo, down: Any) -> Template:
    """What a client sends back to what it was sent.

    Args:
        method: whose ``local_update`` is run dry; what that raises is not caught.
        task: what is to be learnt.
        info: of the client.
        down: what it was sent; its values are not looked at.
    """
    model = task.model(info)
    trainer = TracingTrainer(method, task, model)
    view = ClientView(info, task, model, 0, task.key / "dry", trainer)
    # without values nothing that a client once sent can matter here, and equal forms have equal templates
    _, upload = method.local_update(method.client_init(task, info), tree.zeros_like(down), view)
    return Template.of(method.upload_form(erase_values(upload), task), tuple(trainer.trained))
