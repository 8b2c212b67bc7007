"""One pass of a cohort: the tensors of its clients stacked over a leading axis, their steps taken together.

The loss is computed by rows (:mod:`.stacked`); where an operation has no rule, and for ``precondition`` and
``prox``, ``vmap`` computes for all clients what a method's functions compute for one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..core import tree
from ..core.errors import TaskError
from ..core.method import Batch, ProximalTerm, Request
from ..core.optimizer import SGD
from .feed import BufferPool, Feed, flat
from .stacked import UnsupportedError, stack
from .steps import Work, refill, tensors_like
from .trainer import LocalTrainer


class Stack(Work):
    """The work of clients whose requests are equal but for their tensors.

    Args:
        requests: one a client.
        round: counted from 0.
        compared: kinds of requests whose loss was compared with that of a single client, and whether it was
            equal; entries are added.
        kind: of the requests.
    """

    def __init__(self, requests: Sequence[Request], round: int, compared: dict[Any, bool], kind: Any) -> None:
        first = requests[0]
        self._compared, self._kind = compared, kind
        term = None
        if first.proximal_term is not None:
            center, linear = (
                stacked(zero_padded([getattr(r.proximal_term, n) for r in requests], first.padded.start))
                for n in ("center", "linear")
            )
            term = ProximalTerm(first.proximal_term.strength, center, linear)
        start = stacked(zero_padded([r.start for r in requests], first.padded.start))
        constants = stacked(zero_padded([r.constants for r in requests], first.padded.constants))
        whole = Request(
            first.loss, start, first.name, first.optimizer, constants, first.precondition, first.prox, term
        )
        # a stack is a copy already
        super().__init__(whole, round, copy=False)
        self._all = self.params, self.constants, self.center, self.linear
        self.by_rows = True
        self.steps_in_backward = self._is_plain_sgd()
        self._stack()

    def _is_plain_sgd(self) -> bool:
        """Whether a step only subtracts the gradient times the learning rate."""
        request, optimizer = self.request, self.request.optimizer
        further = (request.precondition, request.prox, self.center, self.linear, optimizer.clip)
        return (
            isinstance(optimizer, SGD)
            and not optimizer.momentum
            and not any(self.rates.weight_decay)
            and all(f is None for f in further)
        )

    def _stack(self) -> None:
        """Make stacked parameters of the clients' tensors."""
        in_backward = self.steps_in_backward
        own = [p.detach() if in_backward else p for p in self.params]
        rates = [lr if in_backward else None for lr in self.rates.lr]
        self._leaves = [stack(p, lr) for p, lr in zip(own, rates, strict=True)]
        self._rows_now = refill(self.now, self._leaves)
        self._rows_constants = tree.map(stack, self.constants)

    @property
    def ends(self) -> Any:
        """The trained trees of all clients, padded dimensions included."""
        return refill(self.request.start, self._all[0])

    def narrow(self, clients: int) -> None:
        """Go on with the first clients alone; their parameters are leaves that share memory with those of all."""
        params, constants, center, linear = self._all
        self.params = [p[:clients].detach().requires_grad_() for p in params]
        self.now = refill(self.now, self.params)
        self.constants = tree.map(lambda t: t[:clients], constants)
        self.center, self.linear = (
            None if ts is None else [t[:clients] for t in ts] for ts in (center, linear)
        )
        self.memory = [[m[:clients] for m in ms] for ms in self.memory]
        self._stack()

    def advance(self, batch: Batch, count: int) -> Tensor:
        """Take a step of each client.

        Args:
            batch: of all clients, ``[clients, rows, ...]``.
            count: steps taken before.

        Returns:
            The losses ``[clients]``.
        """
        value = self._loss_by_rows(batch) if self.by_rows else self.loss(batch)
        if self.by_rows and count == 0 and not self._agrees(value, batch):
            self.by_rows, value = False, self.loss(batch)
        if self.by_rows and self.steps_in_backward:
            torch.autograd.backward(value.sum())
        else:
            self.step(self.gradient(value), count)
        self.proximal()
        return value.detach()

    def _agrees(self, value: Tensor, batch: Batch) -> bool:
        """Whether the first client's loss is its loss alone: a loss may mix the examples of a batch.

        Looked at once for a pass of a kind, for it costs a forward pass.
        """
        if self._kind not in self._compared:
            x = {n: t[0] for n, t in batch.x.items()} if isinstance(batch.x, dict) else batch.x[0]
            mask = None if batch.mask is None else batch.mask[0]
            now, constants = (
                tree.map(lambda t: t[0].detach(), value) for value in (self.now, self.constants)
            )
            alone = self.request.loss(now, Batch(x, batch.y[0], mask, batch.step), *constants)
            equal = bool(torch.isclose(value[0], alone, rtol=1e-3, atol=1e-5, equal_nan=True))
            self._compared[self._kind] = equal
        return self._compared[self._kind]

    def _loss_by_rows(self, batch: Batch) -> Tensor:
        """The loss by stacked parameters; where an operation has no rule, that of ``vmap`` from now on."""
        rows = flat(batch)
        for leaf in self._leaves:
            leaf.uses = 0
        try:
            value: Tensor = self.request.loss(self._rows_now, rows, *self._rows_constants)
            if value.shape != (rows.clients,):
                raise UnsupportedError("a loss that is no mean over the examples of each client")
        except (UnsupportedError, RuntimeError, TypeError, ValueError):
            # whatever else is wrong with a loss comes out once more, of vmap
            if self.steps_in_backward:
                self.steps_in_backward = False
                self._stack()
                return self._loss_by_rows(batch)
            self.by_rows = False
            return self.loss(batch)
        return value

    def loss(self, batch: Batch) -> Tensor:
        """Of a batch of each client ``[clients]``."""
        like, step = (self.now, self.constants), batch.step

        def one(
            params: list[Tensor], constants: list[Tensor], x: Any, y: Tensor, mask: Tensor | None
        ) -> Tensor:
            return self.request.loss(
                refill(like[0], params), Batch(x, y, mask, step), *refill(like[1], constants)
            )

        constants = tree.tensors(self.constants)
        over = (0, 0, 0, 0, None if batch.mask is None else 0)
        value: Tensor = torch.vmap(one, in_dims=over)(self.params, constants, batch.x, batch.y, batch.mask)
        return value

    def gradient(self, value: Tensor) -> list[Tensor]:
        """Of each client's loss by its own parameters."""
        return super().gradient(value.sum())

    def mapped(self, f: Callable[..., Any], tensors: list[Tensor]) -> list[Tensor]:
        """The tensors of ``f(a, now, *constants)`` client by client."""
        like, inner = self.now, self.constants

        def one(a: list[Tensor], now: list[Tensor], constants: list[Tensor]) -> list[Tensor]:
            return tensors_like(like, f(refill(like, a), refill(like, now), *refill(inner, constants)))

        result: list[Tensor] = torch.vmap(one)(tensors, self.params, tree.tensors(inner))
        return result

    def clipped(self, grads: list[Tensor], bound: float) -> list[Tensor]:
        """Gradients scaled so that the norm of each client's is at most ``bound``."""
        square = torch.stack([g.flatten(1).square().sum(1) for g in grads]).sum(0)
        scale = torch.clamp(bound / (square.sqrt() + 1e-6), max=1.0)
        return [g * scale.reshape(-1, *[1] * (g.ndim - 1)) for g in grads]


def train_cohort(
    title: str,
    trainers: Sequence[LocalTrainer],
    requests: Sequence[Request],
    round: int,
    pool: BufferPool,
    compared: dict[Any, bool],
) -> tuple[Any, Tensor]:
    """Trains a cohort: takes the steps of all clients, batched. Clients with the most steps come first.

    Args:
        title: of the method, for messages.
        trainers: one a client.
        requests: equal but for their tensors.
        round: counted from 0.
        pool: buffers for batches.
        compared: see :class:`Stack`.

    Returns:
        The trained trees with a leading client axis, and the losses ``[clients, steps]``, 0 after a client's
        last step.

    Raises:
        TaskError: if a function of the method is not one that ``vmap`` can handle.
    """
    name = requests[0].name
    steps = [t.steps(name) for t in trainers]
    feed = Feed([t.data for t in trainers], name, pool)
    losses: list[Tensor] = []
    work = Stack(requests, round, compared, trainers[0].kind(requests[0]))
    active = len(trainers)
    for count in range(steps[0]):
        while steps[active - 1] <= count:
            active -= 1
            work.narrow(active)
        batch = feed.batch(count, active)
        try:
            values = work.advance(batch, count)
        except RuntimeError as error:
            raise TaskError(
                f"{title}: the pass {name!r} cannot be vectorized ({error}). Use engine = 'sequential'."
            ) from error
        losses.append(values if active == len(steps) else functional.pad(values, (0, len(steps) - active)))
    return work.ends, torch.stack(losses, 1)


def stacked(trees: list[Any]) -> Any:
    """Stacks equal trees over a leading client axis."""
    return tree.map(lambda *ts: torch.stack(ts).detach(), trees[0], *trees[1:])


def zero_padded(trees: list[Any], padded: Mapping[str, int]) -> list[Any]:
    """Zero-pads trees that differ in padded dimensions alone to the largest of each.

    Args:
        trees: one a client.
        padded: the dimension by the path of a part, see :class:`fedlowrank.core.method.PaddedDimensions`.
    """
    if not padded or all(tree.form(t) == tree.form(trees[0]) for t in trees[1:]):
        return trees
    columns = zip(padded_axes(trees[0], padded), *(tree.tensors(t) for t in trees), strict=True)
    full = [ts if axis is None else _to_one_size(ts, axis) for axis, *ts in columns]
    return [refill(t, [ts[i] for ts in full]) for i, t in enumerate(trees)]


def padded_axes(value: Any, padded: Mapping[str, int]) -> list[int | None]:
    """The padded dimension of each tensor of a tree, None for those that have none."""

    def axis(path: str) -> int | None:
        return next((a for part, a in padded.items() if path == part or path.startswith(f"{part}/")), None)

    return [axis(path) for path, _ in tree.leaves(value)]


def _to_one_size(tensors: list[Tensor], axis: int) -> list[Tensor]:
    most = max(t.shape[axis] for t in tensors)
    return [
        torch.cat([t, t.new_zeros(*t.shape[:axis], most - t.shape[axis], *t.shape[axis + 1 :])], axis)
        for t in tensors
    ]
