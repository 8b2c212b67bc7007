"""Steps of plain SGD taken inside the backward pass: a matrix moves by one product, and its gradient is never written down.

    backward of  y = x Wᵀ + b:      ∂x = g W,   then   W ← β W - η gᵀ x        β = 1 - η (weight decay + strength of a pull)

A matrix takes its step in there only if all that the loss does with it is one linear map, for then nobody needs its value
again. Which ones these are is seen in one evaluation of the loss that is thrown away (:class:`Watch`), once for every kind of
step, so that no result depends on what an engine has done before. In a fused step a stand-in (:class:`Matrix`) lets nothing
else use the matrix: that ends in :class:`UnfusableError` before a number has changed, and the step is taken by gradients.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from .descent import Work
from .method import Batch, Request
from .optimiser import SGD
from .tape import Tape, UnrepeatableError, captured, form

SMALLEST = 4096
"""Numbers of a matrix for which it is worth the while."""

OFTEN = 16
"""Steps of clients of one form after which it is recorded, which takes about as long as so many steps of a small model."""

TAPES = 64
"""Kept for one kind of steps at most."""

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
    return (x, weight, bias) if plain and _is_of_many(x) == _is_of_many(weight) else None


def _is_recomputed() -> bool:
    """Whether what is computed now may be computed again in the backward pass, as ``torch.utils.checkpoint`` does."""
    return not torch.is_grad_enabled() or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def _is_of_many(t: Tensor) -> bool:
    """Whether a tensor stands for those of many clients, within ``vmap``."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(t))


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
            weight: the matrix ``[out, in]``, or those of many clients ``[clients, out, in]``.
            g: gradient of the output ``[(clients,) n, out]``.
            x: the input ``[(clients,) n, in]``.
        """
        if not self.begun:
            raise UnfusableError
        beta, alpha = self._factors[place]
        out = None if place in self._borrowed else weight
        product = torch.addmm if weight.ndim == 2 else torch.baddbmm
        self.moved[place] = product(weight, g.mT, x, beta=beta, alpha=alpha, out=out)

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
        form = LinearOfMany if _is_of_many(matrix.plain) else _Linear
        return form.apply(*parts, matrix.step, matrix.place)  # type: ignore[no-untyped-call]


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


class LinearOfMany(torch.autograd.Function):
    """The same for many clients within ``vmap``; it leaves ``vmap`` for one product over all of them."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, step: Step, place: int) -> Tensor:
        """Never called: ``vmap`` calls the rule below."""
        del x, weight, bias, step, place
        raise UnfusableError

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing: the rule below is differentiated."""

    @staticmethod
    def vmap(
        info: Any,
        axes: tuple[int | None, ...],
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        step: Step,
        place: int,
    ) -> tuple[Tensor, int]:
        """The products of all clients ``[clients, n, in] × [clients, out, in]``."""
        # a matrix within a second vmap is not every client's own
        if axes[1] != 0 or axes[0] is None or _is_of_many(weight):
            raise UnfusableError
        x = x.movedim(axes[0], 0)
        if bias is not None:
            bias = bias.movedim(axes[2], 0) if axes[2] is not None else bias.expand(info.batch_size, *bias.shape)
        rows = x.reshape(len(x), -1, x.shape[-1])
        out: Tensor = _Products.apply(rows, weight, bias, step, place)  # type: ignore[no-untyped-call]
        return out.reshape(*x.shape[:-1], out.shape[-1]), 0


class _Products(torch.autograd.Function):
    """Linear maps of many clients, whose matrices take their step in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, step: Step, place: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.step, ctx.place = step, place
        return torch.bmm(x, weight.mT) if bias is None else torch.baddbmm(bias[:, None], x, weight.mT)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        below = torch.bmm(g, weight) if ctx.needs_input_grad[0] else None
        bias = g.sum(1) if ctx.needs_input_grad[2] else None
        ctx.step.take(ctx.place, weight, g, x)
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
            work.loss(batch)
        self.places = watch.found
        self._met: Counter[Any] = Counter()
        self._tapes: dict[Any, Tape | None] = {}

    def begin(self, work: Work) -> Callable[[Batch], Tensor]:
        """What takes the steps of a pass, and returns the loss of each."""
        rates, forms = work.rates, tuple(t.stride() for t in (*work.params, *work.constants))
        how = *rates.lr, *rates.weight_decay, work.strength, forms

        def step(batch: Batch) -> Tensor:
            try:
                # anew in every step, for a loss may count its calls
                key = captured(work.request.loss), how, work.borrowed, form(batch)
            except UnrepeatableError:
                return self.take(work, batch)
            tape = self._tapes.get(key)
            return self._counted(key, work, batch) if tape is None else tape.play(work, batch)

        return step

    def _counted(self, key: Any, work: Work, batch: Batch) -> Tensor:
        """Take a step that has no tape, and record it if such steps are many."""
        if key not in self._tapes and len(self._tapes) < TAPES:
            self._met[key] += work.clients
        if self._met[key] >= OFTEN and key not in self._tapes:
            try:
                self._tapes[key] = Tape(self.take, work, batch)
            except UnrepeatableError:
                self._tapes[key] = None
        return self.take(work, batch)

    def take(self, work: Work, batch: Batch) -> Tensor:
        """Take a step, in the backward pass where that can be, and return its loss."""
        if self.places:
            step = Step(work, self.places)
            try:
                value = work.loss(batch, step.disguise)
            except UnfusableError:
                pass
            else:
                step.begun = True
                grads = work.gradient(value, allow_unused=True)
                with torch.no_grad():
                    step.finish(work, grads)
                return value.detach()
        value = work.loss(batch)
        work.step(work.gradient(value), 0)
        return value.detach()


def fusable(request: Request) -> bool:
    """Whether the steps of a request are η times a gradient that nobody else needs."""
    how = request.optimiser
    return isinstance(how, SGD) and not how.momentum and how.clip is None and request.precondition is None
