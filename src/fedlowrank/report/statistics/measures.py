"""Measures that runs are compared by: test accuracy or, if there are no classes, test loss."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ...core.io.text import on_one_line
from ...results.client_metrics import find_number
from ..number_formats import (
    MISSING,
    format_loss,
    format_loss_pair,
    format_percent,
    format_percent_pair,
    format_signed,
)


@dataclass(frozen=True)
class Measure:
    """A number that every evaluation has for every client."""

    name: Literal["accuracy", "loss"]  # name in :class:`fedlowrank.results.measurements.Measurements`
    sentence_name: str  # name in a sentence, such as ``test accuracy``
    title: str  # name in a heading
    unit: str = ""  # unit in which the number is shown; empty for none
    scale: float = 1.0  # factor that converts to the unit

    @property
    def is_loss(self) -> bool:
        """Whether lower is better."""
        return self.name == "loss"

    @property
    def bounds(self) -> tuple[float, float]:
        """Least and largest possible value. A loss has neither, because a log-likelihood may be negative."""
        return (-math.inf, math.inf) if self.is_loss else (0.0, 1.0)

    @property
    def axis_label(self) -> str:
        """Label of an axis: name with unit."""
        return f"{self.sentence_name} / {self.unit}" if self.unit else self.sentence_name

    @property
    def heading(self) -> str:
        """Title with unit."""
        return f"{self.title} / {self.unit}" if self.unit else self.title

    def format_number(self, value: float | None) -> str:
        """Format a value without its unit."""
        return format_loss(value) if self.is_loss else format_percent(value)

    def format_pair(self, value: float | None, spread: float | None) -> str:
        """Format a value and its spread without unit."""
        return (format_loss_pair if self.is_loss else format_percent_pair)(value, spread)

    def format(self, value: float | None) -> str:
        """Format a value with its unit."""
        return f"{self.format_number(value)} {self.unit}".rstrip()

    def format_short(self, value: float | None) -> str:
        """Format a value without its unit for a sentence: percent with one decimal, losses with three digits."""
        return format_loss(value, 3) if self.is_loss else format_percent(value, 1)

    def format_interval(self, low: float, high: float) -> str:
        """Format the ends of an interval without unit for a sentence, such as ``[92.0, 94.2]``."""
        return format_signed(f"[{self.format_short(low)}, {self.format_short(high)}]")

    def format_gap(self, mean: float, low: float, high: float) -> str:
        """Format a difference and its interval without unit, such as ``−1.90 [−3.41, −0.39]``."""
        sign = "+" if mean > 0 else ""
        interval_text = "" if math.isnan(low) else f" [{self.format_number(low)}, {self.format_number(high)}]"
        return (
            MISSING if math.isnan(mean) else format_signed(f"{sign}{self.format_number(mean)}{interval_text}")
        )

    def sort_key(self, value: float) -> float:
        """Compute a sort key that puts the best value first."""
        return value if self.is_loss else -value

    def column(self, name: str) -> str:
        """Name the column of the CSV for a statistic; columns of accuracy have shorter names for historical reasons."""
        if self.is_loss:
            return f"loss_{name}"
        long_names = ("last", "last_weighted", "unseen", "std_unseen")
        return f"accuracy_{name}" if name in long_names else name


TEST_ACCURACY = Measure("accuracy", "test accuracy", "Accuracy", "%", 100.0)
TEST_LOSS = Measure("loss", "test loss", "Test loss")
MEASURES = (TEST_ACCURACY, TEST_LOSS)
TOKEN_LOSS = Measure("loss", "loss per token", "Loss per token")


def metric_title(name: str) -> str:
    """Make a heading for a metric of ``run.metrics`` or a client number; for ``module:function`` the function's name."""
    number = find_number(name)
    return (number.title if number else "") or on_one_line(name.rpartition(":")[2]).replace("_", " ")
