"""What a site tells of its validation and test examples: rounded numbers, once a round.

An evaluation answers a question about the examples, and whoever chooses the model chooses the question: some
hundred evaluations of crafted models read every feature of a small test set. So what is sent is rounded, and
:class:`.allowance.Allowance` counts how often.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from ...data.dataset import ClientData
from ...results.measurements import ACCURACY, ROUTE, Block, Column

FEWEST = 20
"""Examples of a split without which no number about it is sent."""

DIGITS = 3
"""Significant digits of a loss or of a further metric that is sent."""


def coarsen(found: Block, data: ClientData) -> Block:
    """An evaluation as it may leave a site.

    Of a split with fewer than :data:`FEWEST` examples no number is sent. An accuracy is rounded to a multiple of
    1/n, where n is the number of examples; losses and further metrics have :data:`DIGITS` significant digits.
    Shares of clusters are computed from training examples, and are sent with as many digits.

    Args:
        found: of a client.
        data: of the client.
    """
    columns = []
    for column in found.columns:
        if column.name == ROUTE and len(data.train) < FEWEST:
            continue
        values = [_coarse(column, value, data) for value in column.values]
        columns.append(dataclasses.replace(column, values=values))
    return Block(found.clients, columns)


def _coarse(column: Column, value: float | None, data: ClientData) -> float | None:
    """One value as it may leave."""
    if column.name == ROUTE and value is not None:
        return _significant(value)
    if value is None or not column.split:
        # sizes of models tell nothing of examples
        return value
    examples = len(getattr(data, column.split))
    if examples < FEWEST:
        return None
    if not math.isfinite(value):
        return value
    return round(value * examples) / examples if column.name == ACCURACY else _significant(value)


def coarsen_losses(losses: Mapping[str, float], examples: int) -> dict[str, float]:
    """Mean losses of passes over training examples as they may leave a site; see :func:`coarsen`."""
    return {name: _significant(value) for name, value in losses.items()} if examples >= FEWEST else {}


def _significant(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
