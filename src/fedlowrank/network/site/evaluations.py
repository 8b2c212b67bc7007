"""What a site tells of its validation and test examples: rounded numbers, once a round.

An evaluation answers a question about the examples, and whoever chooses the model chooses the question: some
hundred evaluations of crafted models read every feature of a small test set. So what is sent is rounded, and
:class:`.allowance.Allowance` counts how often.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ...data.dataset import ClientData
from ...simulation.evaluation import SPLITS, ClientEvaluation

FEWEST = 20
"""Examples of a split without which no number about it is sent."""

DIGITS = 3
"""Significant digits of a loss or of a further metric that is sent."""


def coarsen(found: ClientEvaluation, data: ClientData) -> ClientEvaluation:
    """An evaluation as it may leave a site.

    Of a split with fewer than :data:`FEWEST` examples no number is sent. An accuracy is rounded to a multiple of
    1/n, where n is the number of examples; losses and further metrics have :data:`DIGITS` significant digits.
    Shares of clusters are computed from training examples, and are sent with as many digits.

    Args:
        found: of a client.
        data: of the client.
    """
    sizes = {split: len(getattr(data, split)) for split in SPLITS}

    def table(values: Mapping[str, Mapping[str, float | None]], steps: bool = False) -> Any:
        return {
            name: {split: _rounded(value, sizes[split], steps) for split, value in of.items()}
            for name, of in values.items()
        }

    routes = found.routes
    if routes is not None:
        routes = [_significant(p) for p in routes] if len(data.train) >= FEWEST else None
    return ClientEvaluation(
        table(found.accuracy, steps=True),
        table(found.risk),
        found.parameters,
        routes,
        {name: table(values) for name, values in found.metrics.items()},
    )


def _rounded(value: float | None, examples: int, steps: bool) -> float | None:
    if value is None or examples < FEWEST:
        return None
    if not math.isfinite(value):
        return value
    return round(value * examples) / examples if steps else _significant(value)


def coarsen_losses(losses: Mapping[str, float], examples: int) -> dict[str, float]:
    """Mean losses of passes over training examples as they may leave a site; see :func:`coarsen`."""
    return {name: _significant(value) for name, value in losses.items()} if examples >= FEWEST else {}


def _significant(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
