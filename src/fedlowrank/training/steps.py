"""A tree of parameters on its way through the steps of a pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..core import tree
from ..core.method import Batch, Pull, Request
from ..core.optimizer import Rates, clip
from .local_data import channels_last

T = TypeVar("T")


class Work:
    """A tree on its way: copies of a start that may be changed in place, and what steps do with them.

    Args:
        request: what is trained.
        round: counted from 0.
        borrowed: places of tensors that are still the start's own, for the first step will not change them in place.

    Attributes:
        now: the tree.
        params: its tensors.
        given: the request's, in the fastest layout.
        rates: of each tensor.
        towards: tensors of the request's pull, or None.
        along: likewise.
        borrowed: as above.
    """

    def __init__(self, request: Request, round: int, borrowed: frozenset[int] = frozenset()) -> None:
        self.request = request
        start = list(tree.leaves(request.start))
        self.borrowed = borrowed
        self.params = [
            channels_last(t.detach() if i in borrowed else t.detach().clone()).requires_grad_()
            for i, (_, t) in enumerate(start)
        ]
        self.now = refill(request.start, self.params)
        self.given = layout(request.given)
        self.rates = request.optimizer.rates([path for path, _ in start], round)
        pull = Pull() if request.pull is None else request.pull
        self.towards = None if not pull.strength else tensors_like(request.start, layout(pull.towards))
        self.along = None if pull.along is None else tensors_like(request.start, layout(pull.along))
        self.memory: list[list[Tensor]] = []
        self._lr = request.optimizer.learning_rate(round)

    @property
    def strength(self) -> float:
        """Of the pull."""
        return 0.0 if self.request.pull is None else self.request.pull.strength

    def replace(self, new: dict[int, Tensor]) -> None:
        """Other tensors in some places."""
        if new:
            self.params = [new[i].requires_grad_() if i in new else p for i, p in enumerate(self.params)]
            self.now = refill(self.now, self.params)
            self.borrowed = self.borrowed.difference(new)

    def own(self) -> None:
        """Copy what is still the start's."""
        self.replace({i: self.params[i].detach().clone() for i in self.borrowed})

    def loss(self, batch: Batch) -> Tensor:
        """Of a batch."""
        value: Tensor = self.request.loss(self.now, batch, *self.given)
        return value

    def gradient(self, value: Tensor, allow_unused: bool = False) -> list[Tensor]:
        """Of a loss; None for what it does not depend on, if that is allowed, and else zeros."""
        return list(torch.autograd.grad(value, self.params, allow_unused=True, materialize_grads=not allow_unused))

    @torch.no_grad()
    def step(self, grads: list[Tensor], count: int) -> None:
        """Move in place, given the gradient and the number of steps before."""
        self.own()
        request = self.request
        if request.precondition is not None:
            grads = self.mapped(request.precondition, grads)
        grads = self.pulled(grads, range(len(grads)))
        if request.optimizer.clip is not None:
            grads = self.clipped(grads, request.optimizer.clip)
        request.optimizer.step(self.params, grads, self.memory, self.rates, count)

    @torch.no_grad()
    def step_some(self, grads: Sequence[Tensor | None], places: Sequence[int]) -> None:
        """Move the tensors at some places by a step that depends on nothing but their gradients (no gradient is 0)."""
        params = [self.params[i] for i in places]
        own = [torch.zeros_like(p) if g is None else g for p, g in zip(params, (grads[i] for i in places), strict=True)]
        rates = Rates([self.rates.lr[i] for i in places], [self.rates.weight_decay[i] for i in places])
        self.request.optimizer.step(params, self.pulled(own, places), [], rates, 0)

    def pulled(self, grads: list[Tensor], places: Sequence[int]) -> list[Tensor]:
        """Gradients at some places with the derivative of the request's pull added."""
        if self.along is not None:
            grads = list(torch._foreach_sub(grads, [self.along[i] for i in places]))
        if self.towards is not None:
            apart = torch._foreach_sub([self.params[i] for i in places], [self.towards[i] for i in places])
            grads = list(torch._foreach_add(grads, apart, alpha=self.strength))
        return grads

    @torch.no_grad()
    def proximal(self) -> None:
        """Apply the request's prox, as after every step.

        A decomposition raises on a NaN or an infinity. Then the prox leaves out the clients whose parameters are not all finite,
        the pass goes on, and the check of its losses and parameters names the client and the step.
        """
        prox, lr = self.request.prox, self._lr
        if prox is None:
            return

        def of_finite(_: Any, p: Any, *given: Any) -> Any:
            finite = torch.stack([t.isfinite().all() for t in tree.tensors(p)]).all()
            new = prox(tree.map(lambda t: torch.where(finite, t, 0.0), p), lr, *given)
            return tree.map(lambda t, q: torch.where(finite, q, t), p, new)

        try:
            new = self.mapped(lambda _, p, *given: prox(p, lr, *given), self.params)
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            new = self.mapped(of_finite, self.params)
        for p, q in zip(self.params, new, strict=True):
            p.copy_(q)

    def mapped(self, f: Callable[..., Any], tensors: list[Tensor]) -> list[Tensor]:
        """The tensors of ``f(a, now, *given)``, where a is the tree of some tensors."""
        return tensors_like(self.now, f(refill(self.now, tensors), self.now, *self.given))

    def clipped(self, grads: list[Tensor], bound: float) -> list[Tensor]:
        """Gradients whose common norm is at most ``bound``."""
        return clip(grads, bound)


def layout(value: T) -> T:
    """The memory layout in which convolutions are fastest; no value changes."""
    return tree.map(channels_last, value)


def refill(like: T, tensors: list[Tensor]) -> T:
    """A tree of that structure with these tensors."""
    new = iter(tensors)
    return tree.map(lambda _: next(new), like)


def tensors_like(like: Any, value: Any) -> list[Tensor]:
    """The tensors of a tree in the order of another, matched by path."""
    out: list[Tensor] = []
    tree.map(lambda _, t: out.append(t), like, value)
    return out
