"""What runs are judged by: test accuracy or, where there are no classes, test loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..simulation.records import Accuracy, RoundRecord, RunRecord
from .units import loss, percent


@dataclass(frozen=True)
class Measure:
    """A number that every evaluation has of every client.

    Attributes:
        field: of a :class:`fedlowrank.simulation.records.RoundRecord`.
        noun: its name in a sentence, such as ``test accuracy``.
        title: its name at the head of a title.
        unit: in which it is shown; empty for none.
        scale: factor to that unit.
        higher: whether more is better.
    """

    field: Literal["accuracy", "risk"]
    noun: str
    title: str
    unit: str
    scale: float
    higher: bool

    @property
    def bounds(self) -> tuple[float, float]:
        """The least and the largest value that it can have. A loss has none: a log-likelihood may be negative."""
        return (0.0, 1.0) if self.field == "accuracy" else (-math.inf, math.inf)

    @property
    def axis(self) -> str:
        """Label of an axis."""
        return f"{self.noun} / {self.unit}" if self.unit else self.noun

    def of(self, record: RoundRecord) -> Accuracy:
        """What a round recorded of it; empty without evaluation."""
        found: Accuracy | None = getattr(record, self.field)
        return found or {}

    def number(self, value: float | None) -> str:
        """A value without its unit."""
        return percent(value) if self.field == "accuracy" else loss(value)

    def text(self, value: float | None) -> str:
        """A value with its unit."""
        return f"{self.number(value)} {self.unit}".rstrip()

    def rank(self, value: float) -> float:
        """A number by which the best value comes first."""
        return -value if self.higher else value


ACCURACY = Measure("accuracy", "test accuracy", "Accuracy", "%", 100.0, higher=True)
LOSS = Measure("risk", "test loss", "Test loss", "", 1.0, higher=False)
MEASURES = (ACCURACY, LOSS)


def judged(run: RunRecord) -> Measure | None:
    """Accuracy where some client ever had one, else loss where some client ever had one, else nothing."""
    for measure in MEASURES:
        for record in run.rounds:
            for splits in measure.of(record).values():
                if any(value is not None for value in splits.get("test", ())):
                    return measure
    return None


def spans(values: Sequence[float], factor: float) -> bool:
    """Whether the values are positive and the largest is more than so many times the smallest."""
    return bool(values) and all(v > 0 and math.isfinite(v) for v in values) and max(values) > factor * min(values)
