"""The verb that engines supply: one pass of a client over its own data."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from . import tree
from .closures import code_of
from .descent import Work, layout
from .errors import NonFiniteError
from .flops import FlopLedger
from .fused import Fusion, fusable
from .key import Key
from .local_data import LocalData, Size, gather, size_of
from .method import Batch, ClientInfo, Request
from .models.architecture import Architecture

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


class LocalTrainer:
    """Executes training passes for one client, one after another.

    Args:
        model: architecture of the client.
        models: all architectures of the task, for layers that behave differently in training (dropout).
        data: of the client.
        round: counted from 0.
        ledger: shared by all clients of a run.
        fusions: likewise, by the kind of steps.
        micro_batch: examples at once in a step, or None for all of its batch.
    """

    def __init__(
        self,
        model: Architecture,
        models: Iterable[Architecture],
        data: LocalData,
        round: int,
        ledger: FlopLedger,
        fusions: dict[Any, Fusion] | None = None,
        micro_batch: int | None = None,
    ) -> None:
        self.model = model
        self.random = [m for m in models if m.random]
        self.data = data
        self.round = round
        self.ledger = ledger
        self.fusions = {} if fusions is None else fusions
        self.micro_batch = micro_batch
        self.meter = Meter()

    def steps(self, name: str) -> int:
        """See :meth:`fedlowrank.method.ClientView.steps`."""
        return self.data.steps(name)

    def train(self, request: Request) -> Any:
        """See :meth:`fedlowrank.method.ClientView.train`."""
        name, kind = request.name, self.kind(request)
        fusion = self.fusion(request, kind)
        with in_training(self.random, self.data.key / name):
            end, losses = descend(request, self.data.batches(name), self.round, self.micro_batch, fusion)
        self.account(request, kind, float(losses.mean()))
        check_finite(self.data.info, self.round, name, losses, end)
        return tree.canonical(end)

    def account(self, request: Request, kind: Any, loss: float) -> None:
        """Enter a pass of that :meth:`kind` into the meter, with its mean loss."""
        index = self.data.order(request.name)
        where: dict[Size, Tensor] = {}
        sizes: dict[Size, int] = {}
        for i in index:
            size = self.data.size(i)
            where.setdefault(size, i)
            sizes[size] = sizes.get(size, 0) + 1

        def step(size: Size) -> object:
            some = gather(self.data.examples, where[size])
            work = Work(request, self.round)
            return work.gradient(work.loss(some))

        with in_training(self.random, self.data.key / "flops"):
            self.meter.flops += self.ledger.count(kind, sizes, step)
        self.meter.steps += len(index)
        self.meter.losses[request.name] = loss

    def fusion(self, request: Request, kind: Any) -> Fusion | None:
        """How steps of a request of that :meth:`kind` are fused, None if they cannot be."""
        if not fusable(request):
            return None
        if kind not in self.fusions:
            with in_training(self.random, self.data.key / "fusion"):
                self.fusions[kind] = Fusion(Work(request, self.round), next(self.data.batches(request.name)))
        return self.fusions[kind]

    def kind(self, request: Request) -> Any:
        """What the cost of a step depends on, but for its batch."""
        return self._kind(request.loss, request.start, request.given)

    def _kind(self, function: Callable[..., Any], params: Any, given: Any) -> Any:
        forms = [tree.form(t, plain=False) for t in (params, given)]
        return code_of(function), self.model.name, self.data.form, *forms

    def total(self, statistic: Callable[..., T], params: Any, given: tuple[Any, ...]) -> T:
        """See :meth:`fedlowrank.method.ClientView.total`."""
        sums: list[T] = []
        sizes: dict[Size, int] = {}
        params = layout(params)
        with torch.no_grad():
            for batch in self.data.chunks():
                part = statistic(params, batch, *given)
                sizes[size_of(batch)] = sizes.get(size_of(batch), 0) + 1
                sums = [part if not sums else tree.add(sums[0], part)]
            kind = self._kind(statistic, params, given)
            samples = {size_of(b): b for b in self.data.chunks()}
            self.meter.flops += self.ledger.count(kind, sizes, lambda n: statistic(params, samples[n], *given))
        return tree.canonical(sums[0])


def descend(
    request: Request,
    batches: Iterator[Batch],
    round: int,
    micro_batch: int | None = None,
    fusion: Fusion | None = None,
) -> tuple[Any, Tensor]:
    """Take one step a batch.

    Args:
        request: what is trained.
        batches: one a step.
        round: counted from 0.
        micro_batch: examples of which a gradient is taken at once; those of a batch add up to its own.
        fusion: how matrices can take their steps in the backward pass; None to take all steps by gradients.

    Returns:
        The trained tree, and the loss of every step ``[steps]``.
    """
    work = Work(request, round, frozenset() if fusion is None else fusion.places)
    take = None if fusion is None else fusion.begin(work)
    losses: list[Tensor] = []
    for count, batch in enumerate(batches):
        if take is not None and (micro_batch is None or len(batch) <= micro_batch):
            value = take(batch)
        else:
            value, grads = _gradient(work, batch, micro_batch)
            work.step(grads, count)
        work.proximal()
        losses.append(value)
    return work.now, torch.stack(losses)


def _gradient(work: Work, batch: Batch, micro_batch: int | None) -> tuple[Tensor, list[Tensor]]:
    """The loss of a batch and its gradient."""
    if micro_batch is None or len(batch) <= micro_batch:
        value = work.loss(batch)
        return value.detach(), work.gradient(value)
    weights, device = batch.weights, batch.y.device
    total, grads = torch.zeros((), device=device), [torch.zeros_like(p) for p in work.params]
    for part in torch.split(torch.arange(len(batch), device=device), micro_batch):
        x = {n: t[part] for n, t in batch.x.items()} if isinstance(batch.x, dict) else batch.x[part]
        value = work.loss(Batch(x, batch.y[part], step=batch.step))
        if weights is None:
            value = value * (len(part) / len(batch))
        else:
            # stays on the device: a number of Python would wait for the steps before
            value = value * (weights[part].sum().double() / weights.sum().clamp(min=1)).to(value.dtype)
        torch._foreach_add_(grads, work.gradient(value))
        total = total + value.detach()
    return total, grads


def check_finite(client: ClientInfo, round: int, name: str, losses: Tensor, end: Any) -> None:
    """Raise :class:`NonFiniteError` if a loss or a parameter is NaN or infinite."""
    if all_finite(losses, end):
        return
    bad = (~torch.isfinite(losses)).nonzero()
    raise NonFiniteError(client.id, round, name, int(bad[0]) if len(bad) else None)


def all_finite(losses: Tensor, ends: Any) -> bool:
    """Whether losses and parameters, of one client or of many, are finite."""
    return tree.not_finite([losses, ends]) is None


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
