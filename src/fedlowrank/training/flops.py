"""Floating-point operations of a step, counted operator by operator."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch.utils._python_dispatch import TorchDispatchMode

from ..core.contract import EngineModel
from ..models.fused_inference import without_fused_inference
from .flop_formulas import FORMULAS, OF_LIBRARIES
from .local_data import BatchSize


class FlopCounter(TorchDispatchMode):
    """Counts the operations in its block as ``torch.utils.flop_counter.FlopCounterMode`` does, but many times faster.

    The formulas are those of :mod:`.flop_formulas`. ``FlopCounterMode`` imports torch's compiler, which takes seconds, and passes
    every operator through it.

    Attributes:
        total: number of operations counted so far.
    """

    def __init__(self) -> None:
        # the constructor has no type annotations in torch
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0
        self._blocks: list[AbstractContextManager[None]] = []

    def __enter__(self) -> FlopCounter:
        # there is no formula for the operator of fused inference
        self._blocks.append(without_fused_inference())
        self._blocks[-1].__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._blocks.pop().__exit__(None, None, None)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Execute one operator; a composite operator is counted by its parts."""
        kwargs = kwargs or {}
        count = _find_formula(func)
        if count is None and _is_made_of_others(func):
            with self:
                return func.decompose(*args, **kwargs)
        out = func(*args, **kwargs)
        if count is not None:
            # a product of complex numbers is four real ones
            factor = 4 if isinstance(out, Tensor) and out.is_complex() else 1
            self.total += factor * int(count(*args, **kwargs, out_val=out))
        return out


@cache
def _find_formula(func: Any) -> Callable[..., Any] | None:
    packet = func._overloadpacket
    return FORMULAS.get(packet) or OF_LIBRARIES.get(str(packet))


@cache
def _is_made_of_others(func: Any) -> bool:
    return bool(func.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd))


def forward_flops(model: EngineModel) -> int:
    """Floating-point operations of a forward pass of one example."""
    with torch.inference_mode(), FlopCounter() as counter:
        model.probe(model.example)
    return int(counter.total)


class FlopLedger:
    """Floating-point operations of steps, by the kind of step and the size of its batch."""

    def __init__(self) -> None:
        self._known: dict[Any, int] = {}
        self._fits: dict[Any, TextCost | None] = {}

    @contextlib.contextmanager
    def counting(self, kind: Any, size: BatchSize) -> Iterator[None]:
        """Count the operations of the step that is taken inside this block.

        Args:
            kind: key of everything but the batch on which the cost depends.
            size: size of the batch: examples, and tokens of each.
        """
        with FlopCounter() as counter:
            yield
        self._known[kind, size] = counter.total

    def knows(self, kind: Any, size: BatchSize) -> bool:
        """Whether a step of that kind and size has been counted."""
        return (kind, size) in self._known or self.is_fitted(kind)

    def has_tried(self, kind: Any) -> bool:
        """Whether :meth:`fit` has learnt the cost of that kind, or found that it cannot."""
        return kind in self._fits

    def fit(self, kind: Any, count: Callable[[int, int], int], max_tokens: int) -> bool:
        """Learn the cost of all steps of a kind on texts from a few short ones.

        A transformer takes b (c + α T + β T²) + γ + δ T operations for b texts of T tokens; γ and δ are those that
        the texts of a batch share, such as the rotations of positions where they are a matrix product. Counts for
        three lengths and for two texts determine the coefficients; they must predict the count for two texts of
        another length exactly, or nothing is learnt. Nothing is learnt either if γ or δ is negative, as where the
        texts of a batch attend to each other.

        Args:
            kind: kind of the steps, see :meth:`counting`.
            count: function that counts the operations of a step, given the number of texts and the tokens of each.
            max_tokens: number of tokens of the longest text.

        Returns:
            Whether the cost of every size is now known.
        """
        if not self.has_tried(kind):
            self._fits[kind] = None if max_tokens < 4 else _fit_texts(count, max(1, min(8, max_tokens // 4)))
        return self.is_fitted(kind)

    def is_fitted(self, kind: Any) -> bool:
        """Whether :meth:`fit` has learnt the cost of all sizes."""
        return self._fits.get(kind) is not None

    def total(self, kind: Any, sizes: Mapping[BatchSize, int]) -> int:
        """Total operations of a number of steps of each size, whose costs are known."""
        return sum(steps * self._of(kind, size) for size, steps in sizes.items())

    def _of(self, kind: Any, size: BatchSize) -> int:
        fitted = self._fits.get(kind)
        if (kind, size) in self._known or fitted is None:
            return self._known[kind, size]
        return fitted.of(*size)


class TextCost(NamedTuple):
    """Operations of a step on texts: b (each + each_token T + each_pair T²) + batch + batch_token T.

    Attributes:
        each: operations of a text, whatever its length.
        each_token: operations of a token.
        each_pair: operations of a pair of tokens of a text.
        batch: operations of a batch, whatever its size.
        batch_token: operations of a position, whatever the number of texts.
    """

    each: int
    each_token: int
    each_pair: int
    batch: int
    batch_token: int

    def of(self, texts: int, tokens: int) -> int:
        """Operations of a step on ``texts`` texts of ``tokens`` tokens each."""
        text = self.each + self.each_token * tokens + self.each_pair * tokens**2
        return texts * text + self.batch + self.batch_token * tokens


def _fit_texts(count: Callable[[int, int], int], unit: int) -> TextCost | None:
    """Fit the integer coefficients of the cost of texts; None if the cost does not have this form."""
    cost_one, cost_two, cost_three = (count(1, k * unit) for k in (1, 2, 3))
    batch_two = 2 * cost_two - count(2, 2 * unit)
    # usually texts share no operations, and one count is saved
    batch_one = 2 * cost_one - count(2, unit) if batch_two else 0
    square, square_remainder = divmod(cost_three - 2 * cost_two + cost_one, 2 * unit**2)
    linear, linear_remainder = divmod(cost_two - cost_one - 3 * square * unit**2, unit)
    constant = cost_one - linear * unit - square * unit**2
    batch_token, batch_remainder = divmod(batch_two - batch_one, unit)
    batch = batch_one - batch_token * unit
    cost = TextCost(constant - batch, linear - batch_token, square, batch, batch_token)
    is_exact = (
        not (square_remainder or linear_remainder or batch_remainder) and batch >= 0 and batch_token >= 0
    )
    return cost if is_exact and cost.of(2, 4 * unit) == count(2, 4 * unit) else None
