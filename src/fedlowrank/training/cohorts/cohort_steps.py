"""One pass of a cohort: each step is taken for all clients together.

The functions of a method are called with tensors of all clients
(:class:`~fedlowrank.training.client_tensors.client_tensor.ClientTensor`), whose rules compute for each client the
result that the functions compute for one. An operation without a rule, or a result that differs from that of a
single client, raises :class:`NoRuleError`. The engine then trains one client after another.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...core import tree
from ...core.contract import Batch
from ...core.contract.training_request import Request
from ..client_tensors.client_tensor import ClientTensor, NoRuleError, to_client_tensor, without_rows
from ..client_tensors.control_flow import DifferingError, unwrap_client_tensor
from ..steps import PassSteps, refill, tensors_like
from ..trainer import LocalTrainer
from .cohort_batches import BufferPool, CohortBatches, flatten_batch


class CohortSteps(PassSteps):
    """Takes the steps of clients whose requests differ only in their tensors.

    Args:
        request: request of all clients; its tensors ``[K, ...]`` have a slice for each client and may be changed.
        round: index of the round, from 0.
        compare: whether the first step also evaluates the functions for single clients and compares the results.
        steps: number of steps of the pass, for a schedule within it.
    """

    def __init__(self, request: Request, round: int, compare: bool = True, steps: int = 1) -> None:
        self._compare = compare
        # the tensors of the request are already copies
        super().__init__(request, round, steps, copy=False)
        self._of_all_clients = self.params, self.constants, self.center, self.linear
        self.steps_in_backward = self.is_plain_sgd and self.request.prox is None and not self.is_scheduled
        self._wrap_tensors()

    def _wrap_tensors(self) -> None:
        """Wrap parameters and constants as client tensors, for the functions of the method."""
        in_backward = self.steps_in_backward
        params = [p.detach() if in_backward else p for p in self.params]
        rates = [lr if in_backward else None for lr in self.rates.lr]
        self._client_params = [to_client_tensor(p, lr) for p, lr in zip(params, rates, strict=True)]
        self._client_now = refill(self.params_tree, self._client_params)
        self._client_constants = tree.map_leaves(to_client_tensor, self.constants)

    @property
    def ends(self) -> Any:
        """The trained trees of all clients, with padded dimensions."""
        return refill(self.request.start, self._of_all_clients[0])

    def narrow(self, client_count: int) -> None:
        """Keep only the first clients; their parameters share the memory of those of all clients."""
        params, constants, center, linear = self._of_all_clients
        self.params = [p[:client_count].detach().requires_grad_() for p in params]
        self.params_tree = refill(self.params_tree, self.params)
        self.constants = tree.map_leaves(lambda t: t[:client_count], constants)
        self.center, self.linear = (
            None if ts is None else [t[:client_count] for t in ts] for ts in (center, linear)
        )
        self.slots = [[None if m is None else m[:client_count] for m in ms] for ms in self.slots]
        self._wrap_tensors()

    def advance(self, batch: Batch, count: int) -> Tensor:
        """Take one step for each client.

        Args:
            batch: batch of all clients, ``[clients, rows, ...]``.
            count: number of steps taken before.

        Returns:
            The losses ``[clients]``.

        Raises:
            NoRuleError: if an operation has no rule, or a result differs from that of a single client.
        """
        if self._compare:
            with _as_no_rule_error():
                self._compare_loss(batch)
        try:
            with _as_no_rule_error():
                value = self._loss_by_rows(self._client_now, batch)
        except NoRuleError:
            if not self.steps_in_backward:
                raise
            self.steps_in_backward = False
            self._wrap_tensors()
            return self.advance(batch, count)
        if self.steps_in_backward:
            torch.autograd.backward(value.sum())
        else:
            self.step(self.gradient(value))
        self._compare = False
        return value.detach()

    def _loss_by_rows(self, params: Any, batch: Batch) -> Tensor:
        """The losses ``[clients]`` at parameters that are client tensors."""
        rows = flatten_batch(batch)
        for param in self._client_params:
            param.uses = 0
        value: Tensor = self.request.loss(params, rows, *self._client_constants)
        value = unwrap_client_tensor(value)
        if value.shape != (rows.client_count,):
            raise NoRuleError("a loss that is no mean over the examples of each client")
        return value

    def _compare_loss(self, batch: Batch) -> None:
        """Compare the loss and the gradient of the first and the last client with those of each client alone.

        They differ if the loss mixes the examples of a batch, or if a constant tensor has the shape of rows.
        """
        value = self._loss_by_rows(
            refill(self.params_tree, [to_client_tensor(p) for p in self.params]), batch
        )
        grads = self.gradient(value)
        for k in (0, len(value) - 1):
            client_tree = tree.map_leaves(
                lambda t: t.detach().requires_grad_(), _of_client(self.params_tree, k)
            )
            params = tree.tensors(client_tree)
            loss = self.request.loss(client_tree, _batch_of_client(batch, k), *_of_client(self.constants, k))
            expected = torch.autograd.grad(loss, params, allow_unused=True, materialize_grads=True)
            gradient = [
                torch.zeros_like(e) if g is None else g[k] for g, e in zip(grads, expected, strict=True)
            ]
            _check_equal([value[k], *gradient], [loss, *expected], "the loss")

    def gradient(self, value: Tensor) -> list[Tensor | None]:
        """The gradient of each client's loss with respect to this client's parameters."""
        return super().gradient(value.sum())

    def mapped(self, f: Callable[..., Any], tensors: list[Tensor], params: list[Tensor]) -> list[Tensor]:
        """The tensors of ``f(a, p, *constants)`` of every client."""
        with _as_no_rule_error(), without_rows():
            trees = [refill(self.params_tree, [to_client_tensor(t) for t in ts]) for ts in (tensors, params)]
            results = tensors_like(self.params_tree, f(*trees, *self._client_constants))
            if any(not isinstance(t, ClientTensor) for t in results):
                raise NoRuleError("a result that is the same for all clients")
            unwrapped = [unwrap_client_tensor(t) for t in results]
            for k in (0, len(unwrapped[0]) - 1) if self._compare else ():
                a = refill(self.params_tree, [t[k] for t in tensors])
                p = refill(self.params_tree, [t[k] for t in params])
                expected = tensors_like(self.params_tree, f(a, p, *_of_client(self.constants, k)))
                _check_equal([t[k] for t in unwrapped], expected, "precondition or prox")
        return unwrapped

    def clipped(self, grads: list[Tensor], bound: float) -> list[Tensor]:
        """Scale gradients so that the norm of each client's gradient is at most ``bound``."""
        square = torch.stack([g.flatten(1).square().sum(1) for g in grads]).sum(0)
        scale = torch.clamp(bound / (square.sqrt() + 1e-6), max=1.0)
        return [g * scale.reshape(-1, *[1] * (g.ndim - 1)) for g in grads]


@contextlib.contextmanager
def _as_no_rule_error() -> Iterator[None]:
    """Turn every error but those of memory and decompositions into :class:`NoRuleError`.

    An error of the method itself is raised again when the client is trained alone.
    """
    try:
        yield
    except (torch.OutOfMemoryError, torch.linalg.LinAlgError):  # type: ignore[attr-defined]  # not exported
        raise
    except (Exception, DifferingError) as error:
        raise NoRuleError(f"{type(error).__name__}: {error}") from error


def _of_client(trees: Any, k: int) -> Any:
    """The tree of one client, given trees ``[K, ...]``."""
    return tree.map_leaves(lambda t: t[k], trees)


def _batch_of_client(batch: Batch, k: int) -> Batch:
    """The batch of one client, given batches ``[K, ...]``."""
    x = {n: t[k] for n, t in batch.x.items()} if isinstance(batch.x, dict) else batch.x[k]
    return Batch(x, batch.y[k], None if batch.mask is None else batch.mask[k], batch.step, loss=batch.loss)


def _check_equal(results: Sequence[Tensor], expected: Sequence[Tensor], name: str) -> None:
    """Raise NoRuleError if tensors differ by more than rounding.

    The result of a wrong rule differs in the first digits. Rounding moves a few examples across the kink of a ReLU,
    and dominates a gradient that should be zero; hence a bound by the norm of each tensor and of all.
    """
    pairs = [(a.detach().double(), b.detach().double()) for a, b in zip(results, expected, strict=True)]
    norms = torch.stack([torch.stack([(a - b).norm(), b.norm()]) for a, b in pairs])
    coarse_type = min((t.dtype for t in expected), key=lambda dtype: -torch.finfo(dtype).eps)
    noise = 100 * torch.finfo(coarse_type).eps
    bound = 0.02 * norms[:, 1] + noise * norms[:, 1].norm() + noise
    # the values of a client that diverges cannot be compared
    if bool(((norms[:, 0] > bound) & norms.isfinite().all()).any()):
        raise NoRuleError(f"{name} is another one for a client alone")


def train_cohort(
    trainers: Sequence[LocalTrainer],
    request: Request,
    round: int,
    pool: BufferPool,
    compare: bool = True,
) -> tuple[Any, Tensor]:
    """Train a cohort in one pass, each step for all clients together.

    Args:
        trainers: trainer of each client; clients with the most steps come first.
        request: request of all clients; its tensors ``[K, ...]`` have a slice for each client and may be changed.
        round: index of the round, from 0.
        pool: buffers for batches.
        compare: whether the first step is compared with single clients, see :class:`CohortSteps`.

    Returns:
        The trained tree, its tensors ``[K, ...]``, and the losses ``[clients, steps]``, 0 after a client's last step.

    Raises:
        NoRuleError: if a function of the method cannot be computed for all clients together.
    """
    steps = [t.steps(request.name) for t in trainers]
    batches = CohortBatches([t.data for t in trainers], request.name, pool)
    losses: list[Tensor] = []
    cohort = CohortSteps(request, round, compare, steps[0])
    active_count = len(trainers)
    for count in range(steps[0]):
        while steps[active_count - 1] <= count:
            active_count -= 1
            cohort.narrow(active_count)
        values = cohort.advance(batches.batch(count, active_count), count)
        losses.append(
            values if active_count == len(steps) else functional.pad(values, (0, len(steps) - active_count))
        )
    if request.kept is not None:
        request.kept.state = cohort.optimizer_state()
    return cohort.ends, torch.stack(losses, 1)
