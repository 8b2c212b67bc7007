"""What a method asks of a client's data: a training pass as a value, and who executes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from torch import Tensor

from ..learning.optimizer import Optimizer, OptimizerState

T = TypeVar("T")


@dataclass(frozen=True)
class PaddedDimensions:
    """Dimensions in which clients differ and which zeros may pad without changing loss or gradients.

    Zero rows of A beside zero columns of B are such: they add nothing to B A, and plain SGD, momentum and Adam leave them 0.

    Attributes:
        start: the dimension, by the path (JSON pointer) of a part of the tree that is trained; all tensors in it have it.
        constants: likewise of each of the constants, in their order; those at the end may be left out.
    """

    start: Mapping[str, int] = field(default_factory=dict)
    constants: tuple[Mapping[str, int], ...] = ()


NO_PADDING = PaddedDimensions()
"""All clients have the same dimensions."""


@dataclass(frozen=True)
class Request:
    """One call of :meth:`.method.ClientView.train`, which describes the arguments.

    Attributes:
        loss: of a batch, given what is trained and the constants.
        start: the tree that is trained.
        name: of the pass.
        optimizer: of the steps.
        constants: trees that the functions take besides.
        precondition: of the gradient, or None.
        prox: after each step, or None.
        proximal_term: of the loss, or None.
        padded: dimensions in which clients may differ and are trained together all the same.
        kept: where the optimizer's state comes from and goes to; None if it starts afresh and is not kept.
    """

    loss: Callable[..., Tensor]
    start: Any
    name: str
    optimizer: Optimizer
    constants: tuple[Any, ...]
    precondition: Callable[..., Any] | None
    prox: Callable[..., Any] | None
    proximal_term: ProximalTerm | None = None
    padded: PaddedDimensions = NO_PADDING
    kept: KeptState | None = None


@dataclass(frozen=True)
class ProximalTerm:
    """A quadratic added to a loss: strength/2 ‖p - center‖² - ⟨linear, p⟩.

    Its gradient, strength (p - center) - linear, is added in closed form and not by automatic
    differentiation.

    Attributes:
        strength: at least 0.
        center: a tree like the one that is trained; None where the strength is 0.
        linear: a tree like it, or None for none.
    """

    strength: float = 0.0
    center: Any = None
    linear: Any = None


@dataclass
class KeptState:
    """The state of an optimizer that goes on from the round before.

    Attributes:
        state: of the round before, or None; once the pass is over, the next one.
    """

    state: OptimizerState | None = None


class Trainer(Protocol):
    """How an engine executes what a method asks of a client's data; see :class:`.method.ClientView`."""

    def train(self, request: Request) -> Any:
        """Execute a training pass; returns a tree like its start."""
        ...

    def sum_over_data(self, statistic: Callable[..., T], params: Any, constants: tuple[Any, ...]) -> T:
        """Sum a statistic over the training data."""
        ...

    def steps(self, name: str) -> int:
        """Number of steps in a pass."""
        ...
