"""Steps of plain SGD taken inside the backward pass: a matrix moves by one product, and its gradient is never written down.

    backward of  y = x Wᵀ + b:      ∂x = g W,   then   W ← β W - η gᵀ x        β = 1 - η (weight decay + strength of a pull)

A matrix takes its step in there only if all that the loss does with it is one linear map, for then nobody needs its value
again. Which ones these are is seen in one evaluation of the loss that is thrown away (:class:`Watch`), once for every kind of
step, so that no result depends on what an engine has done before. In such a step a tensor subclass (:class:`Matrix`) stands in
for the parameter and lets nothing else use it: that ends in :class:`UnfusableError` before a number has changed, and the step is
taken by gradients. Engines do this for losses of this package on standard layers alone (:mod:`fedlowrank.models.standard`), which
a second evaluation does not change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ..core.method import Batch, Request
from ..core.optimizer import SGD
from .steps import Work, refill

SMALLEST = 1 << 18
"""Entries of a matrix from which on it pays: a round takes 9 to 14 % less CPU time with matrices of 400,000 to 1,000,000
entries, and more time with one of 100,000 (one client after another, plain SGD, batches of 32)."""

Places = frozenset[int]
"""Which of the tensors of a step, in their order, take it in the backward pass."""

_HARMLESS = {
    getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "requires_grad", "layout", "is_leaf")
} | {Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.stride, Tensor.is_contiguous}
"""What only asks for the form of a tensor."""


class UnfusableError(Exception):
    """A step uses a matrix in another way than the steps before."""


def _within(value: Any) -> list[Tensor]:
    """The tensors among the arguments of a function."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in _within(v)]
    if isinstance(value, dict):
        return [t for v in value.values() for t in _within(v)]
    return []


class Watch(TorchFunctionMode):
    """Sees what a loss does with its parameters; to be entered around it.

    Args:
        params: of the step.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        super().__init__()
        self._places = {id(p): i for i, p in enumerate(params) if p.ndim == 2 and p.numel() >= SMALLEST}
        self._linear = dict.fromkeys(self._places.values(), 0)
        self._other: set[int] = set()

    @property
    def found(self) -> frozenset[int]:
        """Places of the parameters that one linear map uses, and nothing else."""
        return frozenset(i for i, uses in self._linear.items() if uses == 1 and i not in self._other)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Execute, and remember which parameters took part."""
        del types
        kwargs = kwargs or {}
        if func in (torch.autograd.grad, torch.autograd.backward, Tensor.backward):
            # a backward pass within the loss would take the steps too early
            self._other.update(self._linear)
        if func not in _HARMLESS:
            used = [self._places[id(t)] for t in (*_within(args), *_within(kwargs)) if id(t) in self._places]
            for place in used:
                if len(used) == 1 and linear_of(func, args, kwargs) is not None and not _is_recomputed():
                    self._linear[place] += 1
                else:
                    self._other.add(place)
        return func(*args, **kwargs)


def linear_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """Input, matrix and constant of a linear map that can be fused, or None if the call is none."""
    if func is not functional.linear or kwargs.keys() - {"bias"} or len(args) not in (2, 3):
        return None
    x, weight, bias = args[0], args[1], args[2] if len(args) == 3 else kwargs.get("bias")
    plain = x.dtype == weight.dtype and x.ndim >= 2 and not torch.is_autocast_enabled(weight.device.type)
    # within vmap a call stands for many
    plain = plain and not torch._C._functorch.is_functorch_wrapped_tensor(x)
    return (x, weight, bias) if plain else None


def _is_recomputed() -> bool:
    """Whether what is computed now may be computed again in the backward pass, as ``torch.utils.checkpoint`` does."""
    return not torch.is_grad_enabled() or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


class Step:
    """A step of plain SGD that matrices take in the backward pass.

    Args:
        work: what is trained.
        places: of the matrices among its tensors.

    Attributes:
        moved: the matrices that have taken it, by place.
        begun: whether the loss is there; a backward pass before that is one within the loss.
    """

    def __init__(self, work: Work, places: frozenset[int]) -> None:
        lr, decay = work.rates.lr, work.rates.weight_decay
        self._factors = {i: (1.0 - lr[i] * (decay[i] + work.strength), -lr[i]) for i in places}
        self._borrowed = work.borrowed
        self._seen: set[int] = set()
        self.moved: dict[int, Tensor] = {}
        self.begun = False

    def disguise(self, params: list[Tensor]) -> list[Tensor]:
        """The parameters with stand-ins of the matrices."""
        return [Matrix.of(p, self, i) if i in self._factors else p for i, p in enumerate(params)]

    def claim(self, place: int) -> None:
        """A linear map uses the matrix at a place; raises UnfusableError if one has done so before."""
        if place in self._seen:
            raise UnfusableError
        self._seen.add(place)

    def take(self, place: int, weight: Tensor, g: Tensor, x: Tensor) -> None:
        """Let a matrix take the step.

        Args:
            place: of the matrix.
            weight: the matrix ``[out, in]``.
            g: gradient of the output ``[n, out]``.
            x: the input ``[n, in]``.
        """
        if not self.begun:
            raise UnfusableError
        beta, alpha = self._factors[place]
        out = None if place in self._borrowed else weight
        self.moved[place] = torch.addmm(weight, g.mT, x, beta=beta, alpha=alpha, out=out)

    def finish(self, work: Work, grads: Sequence[Tensor | None]) -> None:
        """What is left of the step after the backward pass."""
        for i, (beta, _) in self._factors.items():
            new = self.moved.get(i)
            if new is None:
                # the loss does not depend on it this time
                new = work.params[i] * beta if i in self._borrowed else work.params[i].mul_(beta)
            if work.towards is not None:
                new.add_(work.towards[i], alpha=work.rates.lr[i] * work.strength)
            if work.along is not None:
                new.add_(work.along[i], alpha=work.rates.lr[i])
            self.moved[i] = new
        work.step_some(grads, [i for i in range(len(work.params)) if i not in self._factors])
        work.replace({i: t for i, t in self.moved.items() if t is not work.params[i]})


class Matrix(Tensor):
    """Stands for a matrix in the parameters of a step, and lets nothing but one linear map use it."""

    plain: Tensor
    step: Step
    place: int

    @classmethod
    def of(cls, plain: Tensor, step: Step, place: int) -> Matrix:
        """The stand-in of a parameter."""
        made: Matrix = plain.detach().as_subclass(cls)
        made.plain, made.step, made.place = plain, step, place
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer questions of form; a linear map by the matrix has its other form; else raise UnfusableError."""
        kwargs = kwargs or {}
        if func in _HARMLESS:
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        matrix = args[1] if len(args) > 1 else None
        if func is not functional.linear or not isinstance(matrix, Matrix) or isinstance(args[0], Matrix):
            raise UnfusableError
        parts = linear_of(func, (args[0], matrix.plain, *args[2:]), kwargs)
        if parts is None:
            raise UnfusableError
        matrix.step.claim(matrix.place)
        return _Linear.apply(*parts, matrix.step, matrix.place)  # type: ignore[no-untyped-call]


class _Linear(torch.autograd.Function):
    """A linear map whose matrix takes its step in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, step: Step, place: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.step, ctx.place = step, place
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        rows = g.reshape(-1, g.shape[-1])
        below = g @ weight if ctx.needs_input_grad[0] else None
        bias = rows.sum(0) if ctx.needs_input_grad[2] else None
        ctx.step.take(ctx.place, weight, rows, x.reshape(-1, x.shape[-1]))
        return below, None, bias, None, None


def find_places(work: Work, batch: Batch) -> Places:
    """The matrices that can take a step in the backward pass, found in one evaluation of the loss that is thrown away.

    Only for losses of standard layers (:mod:`fedlowrank.models.standard`), which a further evaluation does not change.

    Args:
        work: the beginning of such a pass, left as it is.
        batch: one of the pass.
    """
    with Watch(work.params) as watch:
        work.loss(batch)
    places: Places = watch.found
    return places


def step_in_backward(work: Work, places: Places, batch: Batch) -> Tensor:
    """Take a step, in the backward pass for the matrices at some places, and return its loss."""
    step = Step(work, places)
    try:
        value = work.request.loss(refill(work.now, step.disguise(work.params)), batch, *work.given)
    except UnfusableError:
        value = work.loss(batch)
        work.step(work.gradient(value), 0)
        return value.detach()
    step.begun = True
    grads = work.gradient(value, allow_unused=True)
    with torch.no_grad():
        step.finish(work, grads)
    return value.detach()


def takes_plain_steps(request: Request) -> bool:
    """Whether the steps of a request are η times a gradient that nobody else needs."""
    how = request.optimizer
    return isinstance(how, SGD) and not how.momentum and how.clip is None and request.precondition is None
