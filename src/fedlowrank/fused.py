"""Steps of plain SGD taken inside the backward pass: a matrix moves by one product, and its gradient is never written down.

    backward of  y = x Wᵀ + b:      ∂x = g W,   then   W ← β W - η gᵀ x        β = 1 - η (weight decay + strength of a pull)

A matrix takes its step in there only if all that the loss does with it is one linear map, for then nobody needs its value
again. Which ones these are is seen in an ordinary step (:class:`Watch`), once for every kind of step; and looked at again in
every fused one, in which anything else ends in :class:`UnfusableError` before a number has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from .descent import Work, refill
from .method import Batch, Request
from .optimiser import SGD

SMALLEST = 4096
"""Numbers of a matrix for which it is worth the while."""

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
    """Sees what a step does with its parameters; to be entered around its loss and its backward pass.

    Args:
        params: of the step.

    Attributes:
        value: the loss, once it is there; that gradients of it are asked for is no use of a parameter.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        super().__init__()
        self.value: Tensor | None = None
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
        asked = func is torch.autograd.grad and any(t is self.value for t in _within(args[0]))
        if func not in _HARMLESS and not asked:
            used = [self._places[id(t)] for t in (*_within(args), *_within(kwargs)) if id(t) in self._places]
            for place in used:
                if len(used) == 1 and linear_of(func, args, kwargs) is not None:
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
    functorch = any(torch._C._functorch.is_functorch_wrapped_tensor(t) for t in (x, weight))
    return (x, weight, bias) if plain and not functorch else None


class Step:
    """A step of plain SGD that matrices take in the backward pass.

    Args:
        work: what is trained.
        places: of the matrices among its tensors.

    Attributes:
        moved: the matrices that have taken it, by place.
    """

    def __init__(self, work: Work, places: frozenset[int]) -> None:
        pull = work.request.pull
        strength = 0.0 if pull is None else pull.strength
        lr, decay = work.rates.lr, work.rates.weight_decay
        self._factors = {i: (1.0 - lr[i] * (decay[i] + strength), -lr[i]) for i in places}
        self._borrowed = work.borrowed
        self._seen: set[int] = set()
        self.moved: dict[int, Tensor] = {}
        matrices = [Matrix.of(p, self, i) if i in places else p for i, p in enumerate(work.params)]
        self.now = refill(work.now, matrices)

    def claim(self, place: int) -> None:
        """A linear map uses the matrix at a place; raises UnfusableError if one has done so before."""
        if place in self._seen:
            raise UnfusableError
        self._seen.add(place)

    def take(self, place: int, weight: Tensor, g: Tensor, x: Tensor) -> None:
        """Let a matrix take the step, given gᵀ ``[out, n]`` and x ``[n, in]``."""
        beta, alpha = self._factors[place]
        out = None if place in self._borrowed else weight
        self.moved[place] = torch.addmm(weight, g, x, beta=beta, alpha=alpha, out=out)

    def decay(self, place: int, weight: Tensor) -> None:
        """Let a matrix take the step that the loss does not depend on."""
        self.moved[place] = weight * self._factors[place][0]

    def again(self) -> None:
        """Begin the next step, of the same tensors."""
        self._seen.clear()
        self.moved.clear()


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
        ctx.step.take(ctx.place, weight, rows.t(), x.reshape(-1, x.shape[-1]))
        return below, None, bias, None, None


class Fusion:
    """How steps of one kind are taken.

    Args:
        work: the beginning of such a pass, left as it is.
        batch: one of the pass.

    Attributes:
        places: of the matrices that can take a step in the backward pass.
    """

    def __init__(self, work: Work, batch: Batch) -> None:
        with Watch(work.params) as watch:
            watch.value = work.loss(batch)
            torch.autograd.grad(watch.value, work.params, materialize_grads=True)
        self.places = watch.found


class FusedPass:
    """A pass whose steps are fused.

    Args:
        fusion: what is known of them.
        work: what is trained.
    """

    def __init__(self, fusion: Fusion, work: Work) -> None:
        self._places, self._work = fusion.places, work
        self._others = [i for i in range(len(work.params)) if i not in fusion.places]
        self._step: Step | None = None

    def step(self, batch: Batch) -> Tensor | None:
        """Take a step, and return its loss; None if it must be taken by gradients."""
        work = self._work
        if not self._places:
            return None
        if self._step is None:
            self._step = Step(work, self._places)
        try:
            value: Tensor = work.request.loss(self._step.now, batch, *work.given)
        except UnfusableError:
            self._step = None
            return None
        grads = torch.autograd.grad(value, work.params, allow_unused=True)
        self._finish(work, self._step, grads)
        return value.detach()

    @torch.no_grad()
    def _finish(self, work: Work, step: Step, grads: Sequence[Tensor | None]) -> None:
        """What is left of a step after the backward pass."""
        for i in self._places:
            if i not in step.moved:
                step.decay(i, work.params[i])
            lr, new = work.rates.lr[i], step.moved[i]
            if work.towards is not None and work.request.pull is not None:
                new.add_(work.towards[i], alpha=lr * work.request.pull.strength)
            if work.along is not None:
                new.add_(work.along[i], alpha=lr)
        work.step_some(grads, self._others)
        fresh = {i: t for i, t in step.moved.items() if t is not work.params[i]}
        work.replace(fresh)
        if fresh:
            self._step = None
        else:
            step.again()


def fusable(request: Request) -> bool:
    """Whether the steps of a request are η times a gradient that nobody else needs."""
    how = request.optimiser
    return isinstance(how, SGD) and not how.momentum and how.clip is None and request.precondition is None
