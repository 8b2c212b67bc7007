"""Parameters while they are trained: gradient, proximal terms, optimizer step, prox."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..core import tree
from ..core.contract import Batch, ProximalTerm
from ..core.contract.training_request import Request
from ..core.errors import TaskError
from ..core.learning.batch_losses import check_loss
from ..core.learning.optimizer import SGD, OptimizerState, Rates, clip
from .kept_optimizers import slot_like

T = TypeVar("T")


class PassSteps:
    """The parameters of a pass while they are trained: copies of its start, changed in place by every step.

    If all parameters of the trained part are frozen, there are no tensors to train, and steps have no effect.

    Args:
        request: request of the pass.
        round: index of the round, from 0.
        steps: number of steps of the pass, for a schedule within it.
        copy: whether the start is copied; False if it already belongs to this object.

    Attributes:
        params_tree: tree of the trained parameters.
        params: tensors of ``params_tree``.
        constants: constants of the request.
        rates: learning rate and weight decay of each tensor, before the schedule within the pass.
        is_scheduled: whether the learning rate changes within the pass.
        slots: values that the optimizer keeps, lists with an entry for each tensor; None before the tensor's first
            step.
        step_counts: number of steps of each tensor.
        center: tensors of the proximal term's center, or None.
        linear: tensors of the proximal term's linear part, or None.
        is_plain_sgd: whether a step only subtracts the gradient times the learning rate.
    """

    def __init__(self, request: Request, round: int, steps: int = 1, copy: bool = True) -> None:
        self.request = request
        start = list(tree.leaves(request.start))
        copies = [_writable_copy(t, copy) for _, t in start]
        self.params = [t.requires_grad_() for t in copies]
        self.params_tree = refill(request.start, self.params)
        self.constants = request.constants
        self.rates = request.optimizer.rates([path for path, _ in start], round)
        term = ProximalTerm() if request.proximal_term is None else request.proximal_term
        self.strength = term.strength
        self.center = None if not term.strength else tensors_like(request.start, term.center)
        self.linear = None if term.linear is None else tensors_like(request.start, term.linear)
        self.slots: list[list[Tensor | None]] = []
        self.step_counts = [0] * len(self.params)
        previous_state = None if request.kept is None else request.kept.state
        if previous_state is not None:
            self.step_counts = list(previous_state.step_counts)
            self.slots = [
                [_writable_copy(t, copy) for t in tensors_like(request.start, s)]
                for s in previous_state.slots
            ]
        self._is_half = any(tree.wide_type(p.dtype) != p.dtype for p in self.params)
        self._lr, self._round = request.optimizer.learning_rate(round), round
        self._step, self._steps = 0, steps
        self.is_scheduled = not request.optimizer.local_schedule.is_constant
        self.is_plain_sgd = self._is_plain_sgd()

    def _is_plain_sgd(self) -> bool:
        request, optimizer = self.request, self.request.optimizer
        other_terms = (request.precondition, self.center, self.linear, optimizer.clip)
        return (
            isinstance(optimizer, SGD)
            and not optimizer.momentum
            and not any(self.rates.weight_decay)
            and all(f is None for f in other_terms)
        )

    def optimizer_state(self) -> OptimizerState:
        """The state of the optimizer after the steps so far."""
        step_counts = [self.request.optimizer.count_kept(n) for n in self.step_counts]
        return OptimizerState([slot_like(self.request.start, slot) for slot in self.slots], step_counts)

    def loss(self, batch: Batch) -> Tensor:
        """The loss of a batch."""
        value: Tensor = self.request.loss(self.params_tree, batch, *self.constants)
        return value

    def gradient(self, value: Tensor) -> list[Tensor | None]:
        """The gradient of a loss; None for parameters that it does not depend on.

        The sparse gradient of an embedding stays sparse if it is only subtracted. Every other step acts on all
        rows, also on those that no example of the batch has.

        Raises:
            LossError: if the loss is not a single number, or depends on no parameter.
        """
        if not self.params:
            return []
        check_loss(value)
        grads = torch.autograd.grad(value, self.params, allow_unused=True)
        return list(grads) if self.is_plain_sgd else densify(grads)

    @torch.no_grad()
    def step(self, gradient: Sequence[Tensor | None]) -> None:
        """Take a step in place, given the gradient, and apply the request's prox.

        As in PyTorch, a parameter without a gradient is left out: no weight decay, no momentum. A proximal term is
        part of the loss and depends on all parameters.
        """
        request = self.request
        if not self.params:
            return
        unused_mask = [g is None for g in gradient]
        grads = [torch.zeros_like(p) if g is None else g for p, g in zip(self.params, gradient, strict=True)]
        if request.precondition is not None:
            grads = self._mapped_like("precondition", request.precondition, grads, self.params)
            unused_mask = [u and not bool(g.any()) for u, g in zip(unused_mask, grads, strict=True)]
        # half-precision parameters are updated in float32, so that a step with its prox is rounded once
        params, grads = (
            (tree.widen(self.params), tree.widen(grads)) if self._is_half else (self.params, grads)
        )
        if self.linear is not None:
            grads = list(torch._foreach_sub(grads, self.linear))
        if self.center is not None:
            distance = torch._foreach_sub(params, self.center)
            grads = list(torch._foreach_add(grads, distance, alpha=self.strength))
        if request.optimizer.clip is not None:
            grads = self.clipped(grads, request.optimizer.clip)
        depends_on_all = self.linear is not None or self.center is not None
        self._optimize(params, grads, [i for i, u in enumerate(unused_mask) if depends_on_all or not u])
        if request.prox is not None:
            params = self._after_prox(params, request.prox)
        self._step += 1
        if params is not self.params:
            torch._foreach_copy_(self.params, params)

    def _optimize(self, params: list[Tensor], grads: list[Tensor], indices: list[int]) -> None:
        """Take an optimizer step for some parameters, together for those with the same step count."""
        groups: dict[int, list[int]] = {}
        for i in indices:
            groups.setdefault(self.step_counts[i], []).append(i)
        scale = self._scale()
        for count, group in groups.items():
            rates = Rates(
                [scale * self.rates.lr[i] for i in group], [self.rates.weight_decay[i] for i in group]
            )
            memory = (
                [[m for i in group if (m := slot_tensors[i]) is not None] for slot_tensors in self.slots]
                if count
                else []
            )
            self.request.optimizer.step(
                [params[i] for i in group], [grads[i] for i in group], memory, rates, count
            )
            for slot, tensors in enumerate(memory):
                if slot == len(self.slots):
                    self.slots.append([None] * len(params))
                for i, t in zip(group, tensors, strict=True):
                    self.slots[slot][i] = t
            for i in group:
                self.step_counts[i] += 1

    def _scale(self) -> float:
        """The factor of the schedule within the pass on the learning rate of this step."""
        return self.request.optimizer.local_schedule.scale(self._step, self._steps, self._round)

    def _after_prox(self, params: list[Tensor], prox: Callable[..., Any]) -> list[Tensor]:
        """Apply the prox to parameters, in float32 for half precision.

        A decomposition raises on a NaN or an infinity. Then the prox leaves out the clients whose parameters are
        not all finite, the pass continues, and the check of its losses and parameters names the client and the
        step.
        """
        lr = self._scale() * self._lr

        def of_all(_: Any, p: Any, *constants: Any) -> Any:
            return prox(p, lr, *tree.widen(constants))

        def of_finite(_: Any, p: Any, *constants: Any) -> Any:
            is_finite = torch.stack([t.isfinite().all() for t in tree.tensors(p)]).all()
            result = of_all(_, tree.map_leaves(lambda t: torch.where(is_finite, t, 0.0), p), *constants)
            return tree.map_leaves(lambda t, q: torch.where(is_finite, q, t), p, result)

        try:
            return self._mapped_like("prox", of_all, params, params)
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # not exported
            return self._mapped_like("prox", of_finite, params, params)

    def _mapped_like(
        self, title: str, f: Callable[..., Any], tensors: list[Tensor], params: list[Tensor]
    ) -> list[Tensor]:
        """See :meth:`mapped`; raises TaskError if a tensor of the result has another shape than its parameter.

        PyTorch would broadcast it over the parameter.
        """
        try:
            results = self.mapped(f, tensors, params)
        except tree.TreeError as error:
            raise TaskError(
                f"{title}, in pass {self.request.name!r}: {error}. It must return a tree like its first argument"
            ) from error
        for i, (result, p) in enumerate(zip(results, params, strict=True)):
            if result.shape != p.shape:
                path, _ = list(tree.leaves(self.params_tree))[i]
                raise TaskError(
                    f"{title}, in pass {self.request.name!r}: at {path or 'the top'} it returned a tensor {[*result.shape]} for "
                    f"the parameter {[*p.shape]}. It must return a tree of the same shapes as its first argument"
                )
        return results

    def mapped(self, f: Callable[..., Any], tensors: list[Tensor], params: list[Tensor]) -> list[Tensor]:
        """The tensors of ``f(a, p, *constants)``, where a and p are the trees of some tensors and parameters."""
        trees = (refill(self.params_tree, ts) for ts in (tensors, params))
        return tensors_like(self.params_tree, f(*trees, *self.constants))

    def clipped(self, grads: list[Tensor], bound: float) -> list[Tensor]:
        """Scale gradients so that their joint norm is at most ``bound``."""
        return clip(grads, bound)


def _writable_copy(t: Tensor, copy: bool) -> Tensor:
    """Return a tensor that steps may change in place."""
    return t.detach().clone(memory_format=torch.contiguous_format) if copy else t.detach()


def densify(grads: Iterable[Tensor | None]) -> list[Tensor | None]:
    """Convert sparse gradients, such as those of ``nn.Embedding(sparse=True)``, to dense ones."""
    return [g.to_dense() if g is not None and g.is_sparse else g for g in grads]


def refill(template: T, tensors: Iterable[Tensor]) -> T:
    """Build a tree with the structure of ``template`` from these tensors."""
    tensor_iterator = iter(tensors)
    return tree.map_leaves(lambda _: next(tensor_iterator), template)


def tensors_like(template: Any, value: Any) -> list[Tensor]:
    """The tensors of ``value`` in the order of ``template``, matched by path."""
    out: list[Tensor] = []
    tree.map_leaves(lambda _, t: out.append(t), template, value)
    return out
