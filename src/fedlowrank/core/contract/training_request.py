"""A method's request for a training pass on a client's data as a value, and the interface that executes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from torch import Tensor

from ..learning.optimizer import Optimizer, OptimizerState

T = TypeVar("T")


@dataclass(frozen=True)
class PaddedDimensions:
    """Dimensions in which clients differ and that can be padded with zeros without changing loss or gradients.

    The LoRA rank is such a dimension: zero rows of A beside zero columns of B add nothing to B A, and plain SGD,
    momentum and Adam leave them 0.

    Attributes:
        start: padded dimension by the path (JSON pointer) of a part of the trained tree; all tensors in that part
            have it.
        constants: the same mapping for each of the constants, in their order; the last ones may be left out.
    """

    start: Mapping[str, int] = field(default_factory=dict)
    constants: tuple[Mapping[str, int], ...] = ()


NO_PADDING = PaddedDimensions()
"""All clients have the same dimensions."""


@dataclass(frozen=True)
class Request:
    """One call of :meth:`.method.ClientView.train`, which describes the arguments.

    Attributes:
        loss: loss function ``loss(params, batch, *constants)``.
        start: initial values of the trained tree.
        name: name of the pass.
        optimizer: optimizer that takes the steps.
        constants: further trees that the functions take as arguments.
        precondition: function that replaces the gradient, or None.
        prox: function applied after each step, or None.
        proximal_term: quadratic added to the loss, or None.
        padded: dimensions in which clients may differ and still train together.
        kept: holder of the optimizer state of the round before and of the next one; None if the state is not kept.
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
        strength: weight of the quadratic, at least 0.
        center: tree like the trained one, or None if the strength is 0.
        linear: tree like the trained one, or None for no linear term.
    """

    strength: float = 0.0
    center: Any = None
    linear: Any = None


@dataclass
class KeptState:
    """State of an optimizer that continues from the round before.

    Attributes:
        state: state after the round before, or None; after the pass, the new state.
    """

    state: OptimizerState | None = None


class Trainer(Protocol):
    """The engine's execution of what a method asks of a client's data; see :class:`.method.ClientView`."""

    def train(self, request: Request) -> Any:
        """Execute a training pass; returns a tree like its start."""
        ...

    def sum_over_data(self, statistic: Callable[..., T], params: Any, constants: tuple[Any, ...]) -> T:
        """Sum a statistic over the training data."""
        ...

    def steps(self, name: str) -> int:
        """Number of steps in a pass."""
        ...
