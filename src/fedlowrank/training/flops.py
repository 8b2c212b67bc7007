"""Floating-point operations, counted by the formulas that torch keeps for its own operators."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch._C import DispatchKey
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from ..core.contract.model import Model
from .local_data import BatchSize


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))


def _attention_backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    count = sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape)
    return int(count)


FORMULAS: dict[Any, Callable[..., Any]] = {
    **flop_registry,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
"""By operator. Torch's own table knows fused attention on a GPU, but counts it as nothing on a CPU."""


class FlopCounter(TorchDispatchMode):
    """Counts in its block as ``torch.utils.flop_counter.FlopCounterMode`` does, many times faster.

    That one imports torch's compiler, which takes seconds, and passes every operator through it.

    Attributes:
        total: so far.
    """

    def __init__(self) -> None:
        # torch gives it no types
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Execute one operator; those made of others are counted by their parts."""
        kwargs = kwargs or {}
        count = FORMULAS.get(func._overloadpacket)
        if count is None and _is_made_of_others(func):
            with self:
                return func.decompose(*args, **kwargs)
        out = func(*args, **kwargs)
        if count is not None:
            self.total += int(count(*args, **kwargs, out_val=out))
        return out


@cache
def _is_made_of_others(func: Any) -> bool:
    return bool(func.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd))


def forward_flops(model: Model) -> int:
    """Floating-point operations of a forward pass of one example."""
    with torch.inference_mode(), FlopCounter() as counter:
        model.probe(model.example)
    return int(counter.total)


class FlopLedger:
    """Floating-point operations of a step, by the kind of step and the shape of its batch."""

    def __init__(self) -> None:
        self._known: dict[Any, int] = {}
        self._fits: dict[Any, tuple[int, int, int] | None] = {}

    @contextlib.contextmanager
    def counting(self, kind: Any, size: BatchSize) -> Iterator[None]:
        """Count the step that is taken inside.

        Args:
            kind: everything but the batch that the cost depends on.
            size: of the batch, examples and tokens.
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

    def fit(self, kind: Any, count: Callable[[int, int], int], widest: int) -> bool:
        """Learn the cost of all steps of a kind on texts from a few short ones.

        A transformer takes b (c + α T + β T²) operations for b texts of T tokens. Three lengths give the numbers; a fourth
        length and two texts must come to the same exactly, or nothing is learnt.

        Args:
            kind: see :meth:`counting`.
            count: counts a step of so many texts of so many tokens.
            widest: tokens of the longest text there is.

        Returns:
            Whether the cost of every size is known now.
        """
        if not self.has_tried(kind):
            self._fits[kind] = None if widest < 4 else _quadratic(count, max(1, min(8, widest // 4)))
        return self.is_fitted(kind)

    def is_fitted(self, kind: Any) -> bool:
        """Whether :meth:`fit` has learnt the cost of all sizes."""
        return self._fits.get(kind) is not None

    def total(self, kind: Any, sizes: Mapping[BatchSize, int]) -> int:
        """Operations of a number of steps of each size, all of which are known."""
        return sum(steps * self._of(kind, size) for size, steps in sizes.items())

    def _of(self, kind: Any, size: BatchSize) -> int:
        fitted = self._fits.get(kind)
        if (kind, size) in self._known or fitted is None:
            return self._known[kind, size]
        texts, tokens = size
        constant, linear, square = fitted
        return texts * (constant + linear * tokens + square * tokens**2)


def _quadratic(count: Callable[[int, int], int], unit: int) -> tuple[int, int, int] | None:
    """Whole numbers c, α, β of the cost c + α T + β T² of a text; None if the cost is no such number."""
    one, two, three, four = (count(1, k * unit) for k in (1, 2, 3, 4))
    square, rest = divmod(three - 2 * two + one, 2 * unit**2)
    linear, left = divmod(two - one - 3 * square * unit**2, unit)
    constant = one - linear * unit - square * unit**2
    found = constant + 4 * linear * unit + 16 * square * unit**2
    fits = not rest and not left and found == four and count(2, 2 * unit) == 2 * two
    return (constant, linear, square) if fits else None
