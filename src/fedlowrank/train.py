"""The verb that engines supply: one pass of a client over its own data."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from . import tree
from .errors import NonFiniteError
from .flops import FlopLedger
from .key import Key
from .local_data import LocalData, Size, channels_last, gather, size_of
from .method import Batch, ClientInfo, Request
from .models.architecture import Architecture
from .optimiser import clip

T = TypeVar("T")


@dataclass
class Meter:
    """What one client's work of a round cost.

    Attributes:
        steps: optimiser steps.
        flops: floating-point operations of training passes and statistics.
        losses: of each pass, the mean over its steps.
    """

    steps: int = 0
    flops: int = 0
    losses: dict[str, float] = field(default_factory=dict)


def code_of(function: Callable[..., Any]) -> Any:
    """Identity of a function's code, equal for the same method at different clients."""
    inner = getattr(function, "__func__", function)
    return getattr(inner, "__code__", inner)


def shapes(value: Any) -> tuple[Any, ...]:
    """Paths, shapes and dtypes of a tree's tensors."""
    return tuple((path, tuple(t.shape), t.dtype) for path, t in tree.leaves(value))


class LocalTrainer:
    """Executes training passes for one client, one after another.

    Args:
        model: architecture of the client.
        models: all architectures of the task, for layers that behave differently in training (dropout).
        data: of the client.
        round: counted from 0.
        ledger: shared by all clients of a run.
        micro_batch: examples at once in a step, or None for all of its batch.
    """

    def __init__(
        self,
        model: Architecture,
        models: Iterable[Architecture],
        data: LocalData,
        round: int,
        ledger: FlopLedger,
        micro_batch: int | None = None,
    ) -> None:
        self.model = model
        self.random = [m for m in models if m.random]
        self.data = data
        self.round = round
        self.ledger = ledger
        self.micro_batch = micro_batch
        self.meter = Meter()

    def steps(self, name: str) -> int:
        """See :meth:`fedlowrank.method.ClientView.steps`."""
        return self.data.steps(name)

    def train(self, request: Request) -> Any:
        """See :meth:`fedlowrank.method.ClientView.train`."""
        name = request.name
        with in_training(self.random, self.data.key / name):
            end, losses = descend(request, self.data.batches(name), self.round, self.micro_batch)
        self.account(request, losses)
        check_finite(self.data.info, self.round, name, losses, end)
        return tree.canonical(end)

    def account(self, request: Request, losses: Tensor) -> None:
        """Enter a pass into the meter."""
        index = self.data.order(request.name)
        where: dict[Size, Tensor] = {}
        sizes: dict[Size, int] = {}
        for i in index:
            size = self.data.size(i)
            where.setdefault(size, i)
            sizes[size] = sizes.get(size, 0) + 1
        inputs = shapes(self.data.examples.x)
        kind = (code_of(request.loss), self.model.name, inputs, shapes(request.start), shapes(request.given))

        def step(size: Size) -> object:
            some = gather(self.data.examples, where[size])
            params, rebuilt = _private(request.start)
            value = request.loss(rebuilt, some, *request.given)
            return torch.autograd.grad(value, params, materialize_grads=True)

        with in_training(self.random, self.data.key / "flops"):
            self.meter.flops += self.ledger.count(kind, sizes, step)
        self.meter.steps += len(losses)
        self.meter.losses[request.name] = float(losses.mean())

    def total(self, statistic: Callable[..., T], params: Any, given: tuple[Any, ...]) -> T:
        """See :meth:`fedlowrank.method.ClientView.total`."""
        sums: list[T] = []
        sizes: dict[Size, int] = {}
        params = _layout(params)
        with torch.no_grad():
            for batch in self.data.chunks():
                part = statistic(params, batch, *given)
                sizes[size_of(batch)] = sizes.get(size_of(batch), 0) + 1
                sums = [part if not sums else tree.add(sums[0], part)]
            inputs = shapes(self.data.examples.x)
            kind = (code_of(statistic), self.model.name, inputs, shapes(params), shapes(given))
            samples = {size_of(b): b for b in self.data.chunks()}
            self.meter.flops += self.ledger.count(kind, sizes, lambda n: statistic(params, samples[n], *given))
        return tree.canonical(sums[0])


def descend(
    request: Request, batches: Iterator[Batch], round: int, micro_batch: int | None = None
) -> tuple[Any, Tensor]:
    """Take one step a batch.

    Args:
        request: what is trained.
        batches: one a step.
        round: counted from 0.
        micro_batch: examples of which a gradient is taken at once; those of a batch add up to its own.

    Returns:
        The trained tree, and the loss of every step ``[steps]``.
    """
    params, now = _private(request.start)
    given = _layout(request.given)
    rates = request.optimiser.rates([path for path, _ in tree.leaves(request.start)], round)
    lr = request.optimiser.learning_rate(round)
    memory: list[list[Tensor]] = []
    losses: list[Tensor] = []
    for count, batch in enumerate(batches):
        value, grads = _gradient(request, now, params, batch, given, micro_batch)
        losses.append(value)
        with torch.no_grad():
            if request.precondition is not None:
                grads = tensors_like(now, request.precondition(refill(now, grads), now, *given))
            if request.optimiser.clip is not None:
                grads = clip(grads, request.optimiser.clip)
            request.optimiser.step(params, grads, memory, rates, count)
            if request.prox is not None:
                for p, q in zip(params, tensors_like(now, request.prox(now, lr, *given)), strict=True):
                    p.copy_(q)
    return now, torch.stack(losses)


def _gradient(
    request: Request, now: Any, params: list[Tensor], batch: Batch, given: Any, micro_batch: int | None
) -> tuple[Tensor, list[Tensor]]:
    """The loss of a batch and its gradient."""
    if micro_batch is None or len(batch) <= micro_batch:
        value = request.loss(now, batch, *given)
        return value.detach(), list(torch.autograd.grad(value, params, materialize_grads=True))
    weights = torch.ones(len(batch)) if batch.weights is None else batch.weights
    whole = max(1, int(weights.sum()))
    total, grads = torch.zeros(()), [torch.zeros_like(p) for p in params]
    for part in torch.split(torch.arange(len(batch)), micro_batch):
        share = int(weights[part].sum()) / whole
        x = {n: t[part] for n, t in batch.x.items()} if isinstance(batch.x, dict) else batch.x[part]
        value = request.loss(now, Batch(x, batch.y[part], step=batch.step), *given) * share
        torch._foreach_add_(grads, list(torch.autograd.grad(value, params, materialize_grads=True)))
        total = total.to(value.device) + value.detach()
    return total, grads


def check_finite(client: ClientInfo, round: int, name: str, losses: Tensor, end: Any) -> None:
    """Raise :class:`NonFiniteError` if a loss or a parameter is NaN or infinite."""
    bad = (~torch.isfinite(losses)).nonzero()
    if len(bad):
        raise NonFiniteError(client.id, round, name, int(bad[0]))
    # a sum is finite only if all it adds is, and is many times cheaper than to look at every element
    sums = torch.stack([t.detach().sum() for _, t in tree.leaves(end)])
    if not bool(torch.isfinite(sums).all()):
        raise NonFiniteError(client.id, round, name, None)


@contextlib.contextmanager
def in_training(models: list[Architecture], key: Key) -> Iterator[None]:
    """Let the random layers (dropout) of models draw from ``key``; torch's own generator is put back afterwards."""
    if not models:
        yield
        return
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(key.seed())
        for model in models:
            model.training(True)
        try:
            yield
        finally:
            for model in models:
                model.training(False)


def _layout(value: T) -> T:
    """The memory layout in which convolutions are fastest; no value changes."""
    return tree.map(channels_last, value)


def _private(start: T) -> tuple[list[Tensor], T]:
    """Copies that may be changed in place, as a list and in their tree."""
    params = [channels_last(t.detach().clone()).requires_grad_() for _, t in tree.leaves(start)]
    return params, refill(start, params)


def refill(like: T, tensors: list[Tensor]) -> T:
    """A tree of that structure with these tensors."""
    new = iter(tensors)
    return tree.map(lambda _: next(new), like)


def tensors_like(like: Any, value: Any) -> list[Tensor]:
    """The tensors of a tree in the order of another, matched by path."""
    out: list[Tensor] = []
    tree.map(lambda _, t: out.append(t), like, value)
    return out
