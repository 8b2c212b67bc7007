"""The check that a method takes its learning rates from the schedule of its optimizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ..core import tree
from ..core.contract import AnyMethod, ClientView
from ..core.contract.training_request import Request, Trainer
from ..core.errors import ConfigError
from ..core.learning.optimizer import Group, Rates, Schedule
from .purity import CalledTwice

T = TypeVar("T")

_HALVING = Schedule("exponential", factor=0.5)
"""Schedule that halves the learning rate in every round."""


class _RateRecorder:
    """A trainer that records the learning rates of the passes of another one.

    Args:
        trainer: trainer that executes the passes.
        round: index of the round, from 0.
        recorded_rates: list to which the rates of each pass are appended.
    """

    def __init__(self, trainer: Trainer, round: int, recorded_rates: list[Rates]) -> None:
        self._trainer, self._round, self._recorded_rates = trainer, round, recorded_rates

    def train(self, request: Request) -> Any:
        """Execute a training pass, and record its learning rates."""
        paths = [path for path, _ in tree.leaves(request.start)]
        self._recorded_rates.append(request.optimizer.rates(paths, self._round))
        return self._trainer.train(request)

    def sum_over_data(self, statistic: Callable[..., T], params: Any, constants: tuple[Any, ...]) -> T:
        """Sum a statistic over the training data."""
        return self._trainer.sum_over_data(statistic, params, constants)

    def steps(self, name: str) -> int:
        """Number of steps in a pass."""
        return self._trainer.steps(name)


@dataclass(frozen=True)
class RecordedRates(CalledTwice):
    """A wrapper of a method that records the learning rates of all passes.

    Attributes:
        recorded_rates: rates of each pass, in order.
    """

    recorded_rates: list[Rates] = field(default_factory=list)

    def local_update(self, state: Any, down: Any, view: ClientView) -> tuple[Any, Any]:
        """Train with a trainer that records the learning rates."""
        recorder = _RateRecorder(view.trainer, view.round, self.recorded_rates)
        result: tuple[Any, Any] = self.inner.local_update(
            state, down, dataclasses.replace(view, trainer=recorder)
        )
        return result


def schedule_to_half(method: AnyMethod) -> AnyMethod | None:
    """Double the learning rates of a method and halve them in every round, so that round 1 has the original ones.

    Rounds count from 0. None if an optimizer of the method has a schedule already, or if the method refuses schedules.
    """
    optimizers = {
        f.name: value
        for f in dataclasses.fields(method)
        if hasattr(value := getattr(method, f.name), "learning_rate")
    }
    if any(optimizer.schedule != Schedule() for optimizer in optimizers.values()):
        return None
    scheduled_optimizers = {
        name: dataclasses.replace(o, lr=2 * o.lr, schedule=_HALVING, groups=_double_rates(o.groups))
        for name, o in optimizers.items()
    }
    try:
        return dataclasses.replace(method, **scheduled_optimizers)
    except ConfigError:
        return None


def _double_rates(groups: Mapping[str, Group]) -> dict[str, Group]:
    """Double the learning rates of the groups that have one of their own."""
    return {
        name: group if group.lr is None else dataclasses.replace(group, lr=2 * group.lr)
        for name, group in groups.items()
    }
