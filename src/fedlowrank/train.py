"""The verb that engines supply: one pass of a client over its own data."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from . import tree
from .data.augment import UNCHANGED, Augment
from .data.dataset import Examples
from .errors import NonFiniteError, TaskError
from .key import Key
from .method import Batch, ClientInfo, Pass, Request
from .models.architecture import Architecture
from .optimiser import clip

T = TypeVar("T")

CHUNK = 256
"""Examples at once where no gradient is taken: large enough to keep a core busy, small enough for its cache."""


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


@dataclass(frozen=True)
class LocalData:
    """Training examples of one client and the order in which each pass sees them.

    Attributes:
        info: whose.
        examples: inputs and labels.
        passes: of the method.
        key: of this client and round; the order and the augmentation depend on the place of a pass among the passes
            and not on its name, so that all methods see the same.
        augment: what happens to the images of the batches of a pass.
        quarter_turns: by how many the images are turned already, so that they are mirrored along their own axis.
    """

    info: ClientInfo
    examples: Examples
    passes: Mapping[str, Pass]
    key: Key
    augment: Augment = UNCHANGED
    quarter_turns: int = 0
    _orders: dict[str, list[Tensor]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def of(self, name: str) -> Pass:
        """The pass of that name."""
        if name not in self.passes:
            raise TaskError(f"the method trains in a pass {name!r} but its passes() are {list(self.passes)}")
        return self.passes[name]

    def order(self, name: str) -> list[Tensor]:
        """Indices of the examples of every step."""
        if name not in self._orders:
            sweep = self.of(name)
            generator = self._generator("order", name)
            n = len(self.examples)
            epochs = (torch.randperm(n, generator=generator) for _ in range(sweep.epochs))
            steps = [i for whole in epochs for i in torch.split(whole, sweep.batch_size)]
            self._orders[name] = steps[: sweep.steps]
        return self._orders[name]

    def steps(self, name: str) -> int:
        """Steps of a pass."""
        sweep = self.of(name)
        whole = sweep.epochs * -(-len(self.examples) // sweep.batch_size)
        return whole if sweep.steps is None else min(whole, sweep.steps)

    def batches(self, name: str) -> Iterator[Batch]:
        """The batches of a pass, as it trains on them."""
        order = self.order(name)
        if not self.augment.active:
            yield from (gather(self.examples, index, step) for step, index in enumerate(order))
            return
        generator = self._generator("augment", name)
        for step, index in enumerate(order):
            batch = gather(self.examples, index, step)
            yield replace(batch, x=self.augment.apply(batch.x, generator, self.quarter_turns))

    def chunks(self) -> Iterator[Batch]:
        """All examples once, in their own order and as they are, in chunks of like sizes."""
        n = len(self.examples)
        for index in torch.arange(n).tensor_split(-(-n // CHUNK)):
            yield gather(self.examples, index)

    def _generator(self, purpose: str, name: str) -> torch.Generator:
        return (self.key / purpose / list(self.passes).index(name)).generator()


def gather(examples: Examples, index: Tensor, step: int = 0) -> Batch:
    """The batch of the examples at ``index [b]``, images in the layout in which convolutions are fastest."""
    index = index.to(examples.y.device)
    x, y = examples.x, examples.y.index_select(0, index)
    if isinstance(x, dict):
        return Batch({n: t.index_select(0, index) for n, t in x.items()}, y, step=step)
    return Batch(_channels_last(x.index_select(0, index)), y, step=step)


class FlopLedger:
    """Floating-point operations of a step, counted by torch once for each kind of step and shape of batch."""

    def __init__(self) -> None:
        self._known: dict[Any, int] = {}

    def count(self, kind: Any, sizes: Mapping[int, int], run: Callable[[int], object]) -> int:
        """Operations of a number of steps.

        Args:
            kind: everything but the batch size that the cost depends on.
            sizes: number of steps for each batch size.
            run: executes one step of that batch size; called under the counter when the size is new.
        """
        total = 0
        for size, steps in sizes.items():
            if (kind, size) not in self._known:
                with FlopCounterMode(display=False) as counter:
                    run(size)
                self._known[kind, size] = counter.get_total_flops()
            total += steps * self._known[kind, size]
        return total


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
    """

    def __init__(
        self,
        model: Architecture,
        models: Iterable[Architecture],
        data: LocalData,
        round: int,
        ledger: FlopLedger,
    ) -> None:
        self.model = model
        self.random = [m for m in models if m.random]
        self.data = data
        self.round = round
        self.ledger = ledger
        self.meter = Meter()

    def steps(self, name: str) -> int:
        """See :meth:`fedlowrank.method.ClientView.steps`."""
        return self.data.steps(name)

    def train(self, request: Request) -> Any:
        """See :meth:`fedlowrank.method.ClientView.train`."""
        name = request.name
        with in_training(self.random, self.data.key / name):
            end, losses = descend(request, self.data.batches(name), self.round)
        self.account(request, losses)
        check_finite(self.data.info, self.round, name, losses, end)
        return tree.canonical(end)

    def account(self, request: Request, losses: Tensor) -> None:
        """Enter a pass into the meter."""
        index = self.data.order(request.name)
        sizes: dict[int, int] = {}
        for i in index:
            sizes[len(i)] = sizes.get(len(i), 0) + 1
        inputs = shapes(self.data.examples.x)
        kind = (code_of(request.loss), self.model.name, inputs, shapes(request.start), shapes(request.given))

        def step(size: int) -> object:
            some = gather(self.data.examples, next(i for i in index if len(i) == size))
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
        sizes: dict[int, int] = {}
        params = _layout(params)
        with torch.no_grad():
            for batch in self.data.chunks():
                part = statistic(params, batch, *given)
                sizes[len(batch)] = sizes.get(len(batch), 0) + 1
                sums = [part if not sums else tree.add(sums[0], part)]
            inputs = shapes(self.data.examples.x)
            kind = (code_of(statistic), self.model.name, inputs, shapes(params), shapes(given))
            samples = {len(b): b for b in self.data.chunks()}
            self.meter.flops += self.ledger.count(kind, sizes, lambda n: statistic(params, samples[n], *given))
        return tree.canonical(sums[0])


def descend(request: Request, batches: Iterator[Batch], round: int) -> tuple[Any, Tensor]:
    """Take one step a batch.

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
        value = request.loss(now, batch, *given)
        grads = list(torch.autograd.grad(value, params, materialize_grads=True))
        losses.append(value.detach())
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


def _channels_last(t: Tensor) -> Tensor:
    return t.contiguous(memory_format=torch.channels_last) if t.ndim == 4 else t


def _layout(value: T) -> T:
    """The memory layout in which convolutions are fastest; no value changes."""
    return tree.map(_channels_last, value)


def _private(start: T) -> tuple[list[Tensor], T]:
    """Copies that may be changed in place, as a list and in their tree."""
    params = [_channels_last(t.detach().clone()).requires_grad_() for _, t in tree.leaves(start)]
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
