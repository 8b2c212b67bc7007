"""One pass of a cohort: the tensors of its clients stacked over a leading axis, their steps taken together.

A method's functions are called with stacked tensors (:mod:`.stacked`), whose rules compute for all clients
what the functions compute for one. What has no rule, or gives another result than for a client alone, raises
:class:`UnsupportedError`; the engine then trains one client after another.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..core import tree
from ..core.contract.method import Batch
from ..core.contract.training_request import Request
from . import layer_rules, tensor_rules  # noqa: F401 - importing them adds their rules to the table
from .cohorts.control_flow import DifferingError
from .feed import BufferPool, Feed, flat
from .stacked import Stacked, UnsupportedError, stack, without_rows
from .steps import Work, refill, tensors_like
from .trainer import LocalTrainer


class Stack(Work):
    """The work of clients whose requests are equal but for their tensors.

    Args:
        whole: the request of all; its tensors have a leading axis of the clients ``[K, ...]`` and may be changed.
        round: counted from 0.
        compare: whether the functions are evaluated for single clients, too, in the first step, and their
            results compared.
        steps: of the pass, where a schedule within it depends on them.
    """

    def __init__(self, whole: Request, round: int, compare: bool = True, steps: int = 1) -> None:
        self._compare = compare
        # a stack is a copy already
        super().__init__(whole, round, steps, copy=False)
        self._all = self.params, self.constants, self.center, self.linear
        self.steps_in_backward = self.is_plain_sgd and self.request.prox is None and not self.is_scheduled
        self._stack()

    def _stack(self) -> None:
        """Make stacked parameters of the clients' tensors."""
        in_backward = self.steps_in_backward
        own = [p.detach() if in_backward else p for p in self.params]
        rates = [lr if in_backward else None for lr in self.rates.lr]
        self._leaves = [stack(p, lr) for p, lr in zip(own, rates, strict=True)]
        self._rows_now = refill(self.now, self._leaves)
        self._rows_constants = tree.map_leaves(stack, self.constants)

    @property
    def ends(self) -> Any:
        """The trained trees of all clients, padded dimensions included."""
        return refill(self.request.start, self._all[0])

    def narrow(self, clients: int) -> None:
        """Go on with the first clients alone; their parameters are leaves that share the memory of all."""
        params, constants, center, linear = self._all
        self.params = [p[:clients].detach().requires_grad_() for p in params]
        self.now = refill(self.now, self.params)
        self.constants = tree.map_leaves(lambda t: t[:clients], constants)
        self.center, self.linear = (
            None if ts is None else [t[:clients] for t in ts] for ts in (center, linear)
        )
        self.memory = [[None if m is None else m[:clients] for m in ms] for ms in self.memory]
        self._stack()

    def advance(self, batch: Batch, count: int) -> Tensor:
        """Take a step of each client.

        Args:
            batch: of all clients, ``[clients, rows, ...]``.
            count: steps taken before.

        Returns:
            The losses ``[clients]``.

        Raises:
            UnsupportedError: if a function has no result by rules, or another than for a client alone.
        """
        if self._compare:
            with _unsupported():
                self._compare_loss(batch)
        try:
            with _unsupported():
                value = self._loss_by_rows(self._rows_now, batch)
        except UnsupportedError:
            if not self.steps_in_backward:
                raise
            self.steps_in_backward = False
            self._stack()
            return self.advance(batch, count)
        if self.steps_in_backward:
            torch.autograd.backward(value.sum())
        else:
            self.step(self.gradient(value))
        self._compare = False
        return value.detach()

    def _loss_by_rows(self, now: Any, batch: Batch) -> Tensor:
        """The losses ``[clients]`` at stacked parameters."""
        rows = flat(batch)
        for leaf in self._leaves:
            leaf.uses = 0
        value: Tensor = self.request.loss(now, rows, *self._rows_constants)
        if isinstance(value, Stacked):
            value = value.as_subclass(Tensor)
        if value.shape != (rows.clients,):
            raise UnsupportedError("a loss that is no mean over the examples of each client")
        return value

    def _compare_loss(self, batch: Batch) -> None:
        """Compare the loss and the gradient of the first and the last client with those of each alone.

        What they cannot agree in is a loss that mixes the examples of a batch, or a constant tensor that
        looks like rows.
        """
        value = self._loss_by_rows(refill(self.now, [stack(p) for p in self.params]), batch)
        grads = self.gradient(value)
        for k in (0, len(value) - 1):
            now = tree.map_leaves(lambda t: t.detach().requires_grad_(), _of_client(self.now, k))
            params = tree.tensors(now)
            alone = self.request.loss(now, _batch_of_client(batch, k), *_of_client(self.constants, k))
            expected = torch.autograd.grad(alone, params, allow_unused=True, materialize_grads=True)
            found = [torch.zeros_like(e) if g is None else g[k] for g, e in zip(grads, expected, strict=True)]
            _check_equal([value[k], *found], [alone, *expected], "the loss")

    def gradient(self, value: Tensor) -> list[Tensor | None]:
        """Of each client's loss by its own parameters."""
        return super().gradient(value.sum())

    def mapped(self, f: Callable[..., Any], tensors: list[Tensor], params: list[Tensor]) -> list[Tensor]:
        """The tensors of ``f(a, p, *constants)`` of every client."""
        with _unsupported(), without_rows():
            stacks = [refill(self.now, [stack(t) for t in ts]) for ts in (tensors, params)]
            found = tensors_like(self.now, f(*stacks, *self._rows_constants))
            if any(not isinstance(t, Stacked) for t in found):
                raise UnsupportedError("a result that is the same for all clients")
            out = [t.as_subclass(Tensor) for t in found]
            for k in (0, len(out[0]) - 1) if self._compare else ():
                a = refill(self.now, [t[k] for t in tensors])
                p = refill(self.now, [t[k] for t in params])
                alone = f(a, p, *_of_client(self.constants, k))
                _check_equal([t[k] for t in out], tensors_like(self.now, alone), "precondition or prox")
        return out

    def clipped(self, grads: list[Tensor], bound: float) -> list[Tensor]:
        """Gradients scaled so that the norm of each client's is at most ``bound``."""
        square = torch.stack([g.flatten(1).square().sum(1) for g in grads]).sum(0)
        scale = torch.clamp(bound / (square.sqrt() + 1e-6), max=1.0)
        return [g * scale.reshape(-1, *[1] * (g.ndim - 1)) for g in grads]


@contextlib.contextmanager
def _unsupported() -> Iterator[None]:
    """Turn errors into :class:`UnsupportedError`, but for memory; a client alone raises the function's own."""
    try:
        yield
    except (torch.OutOfMemoryError, torch.linalg.LinAlgError):  # type: ignore[attr-defined]  # not exported
        raise
    except (Exception, DifferingError) as error:
        raise UnsupportedError(f"{type(error).__name__}: {error}") from error


def _of_client(stacked: Any, k: int) -> Any:
    """The tree of one client of many."""
    return tree.map_leaves(lambda t: t[k], stacked)


def _batch_of_client(batch: Batch, k: int) -> Batch:
    """The batch of one client of many."""
    x = {n: t[k] for n, t in batch.x.items()} if isinstance(batch.x, dict) else batch.x[k]
    return Batch(x, batch.y[k], None if batch.mask is None else batch.mask[k], batch.step, loss=batch.loss)


def _check_equal(found: Sequence[Tensor], expected: Sequence[Tensor], what: str) -> None:
    """Raise UnsupportedError if tensors differ by more than rounding.

    A wrong rule is wrong in the first digits. Rounding moves a few examples over the edge of a ReLU, and is
    as large as all of a gradient that should be zero; hence a bound by the norm of each tensor and of all.
    """
    pairs = [(a.detach().double(), b.detach().double()) for a, b in zip(found, expected, strict=True)]
    norms = torch.stack([torch.stack([(a - b).norm(), b.norm()]) for a, b in pairs])
    coarse = min((t.dtype for t in expected), key=lambda dtype: -torch.finfo(dtype).eps)
    noise = 100 * torch.finfo(coarse).eps
    bound = 0.02 * norms[:, 1] + noise * norms[:, 1].norm() + noise
    # of a client that diverges nothing can be compared
    if bool(((norms[:, 0] > bound) & norms.isfinite().all()).any()):
        raise UnsupportedError(f"{what} is another one for a client alone")


def train_cohort(
    trainers: Sequence[LocalTrainer],
    whole: Request,
    round: int,
    pool: BufferPool,
    compare: bool = True,
) -> tuple[Any, Tensor]:
    """Trains a cohort: takes the steps of all clients, batched. Clients with the most steps come first.

    Args:
        trainers: one a client.
        whole: their request; its tensors ``[K, ...]`` are those of all clients and may be changed.
        round: counted from 0.
        pool: buffers for batches.
        compare: see :class:`Stack`.

    Returns:
        The trained trees with a leading client axis, and the losses ``[clients, steps]``, 0 after a client's
        last step.

    Raises:
        UnsupportedError: if a function of the method cannot be computed for all clients together.
    """
    steps = [t.steps(whole.name) for t in trainers]
    feed = Feed([t.data for t in trainers], whole.name, pool)
    losses: list[Tensor] = []
    work = Stack(whole, round, compare, steps[0])
    active = len(trainers)
    for count in range(steps[0]):
        while steps[active - 1] <= count:
            active -= 1
            work.narrow(active)
        values = work.advance(feed.batch(count, active), count)
        losses.append(values if active == len(steps) else functional.pad(values, (0, len(steps) - active)))
    if whole.kept is not None:
        whole.kept.state = work.optimizer_state()
    return work.ends, torch.stack(losses, 1)
