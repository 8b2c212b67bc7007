"""Rounds the evaluations that leave a site, so that they reveal little of its validation and test examples.

An evaluation reveals something about the examples, and the server chooses the model: a few hundred evaluations of
crafted models reveal every feature of a small test set. Therefore evaluations are rounded, and
:class:`.allowance.Allowance` limits their number.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from ...data.dataset import ClientData
from ...results.client_numbers import ACCURACY, COUNTED_LABELS, ROUTE
from ...results.measurements import ClientTable, Column

MIN_EXAMPLES = 20
"""Smallest number of examples of a split for which results are sent."""

SIGNIFICANT_DIGITS = 3
"""Number of significant digits of a loss or of a further metric that is sent."""


def coarsen(evaluation: ClientTable, data: ClientData) -> ClientTable:
    """Round an evaluation so that it may leave a site.

    Values of a split with fewer than :data:`MIN_EXAMPLES` examples are not sent. An accuracy is rounded to a multiple of
    1/n, where n is the number of examples or, if some labels do not count, of those that do. Losses, further metrics,
    numbers of labels that count, and accuracies on several labels an example have :data:`SIGNIFICANT_DIGITS` significant
    digits. Shares of clusters are computed from training examples, and are sent with the same number of digits.

    Args:
        evaluation: evaluation of a client.
        data: data of the client.
    """
    columns = []
    label_counts = {
        column.split: column.values[0] for column in evaluation.columns if column.name == COUNTED_LABELS
    }
    for column in evaluation.columns:
        if column.name == ROUTE and len(data.train) < MIN_EXAMPLES:
            continue
        values = [
            _coarsen_value(column, value, data, label_counts.get(column.split)) for value in column.values
        ]
        columns.append(dataclasses.replace(column, values=values))
    return ClientTable(evaluation.client_ids, columns)


def _coarsen_value(
    column: Column, value: float | None, data: ClientData, label_count: float | None
) -> float | None:
    """Round one value, or return None if it must not leave; ``label_count`` is None if each example has one label."""
    if column.name == ROUTE and value is not None:
        return _round_significant(value)
    if value is None or not column.split:
        # sizes of models reveal nothing about examples
        return value
    example_count = len(getattr(data, column.split))
    if example_count < MIN_EXAMPLES:
        return None
    if not math.isfinite(value):
        return value
    divisor = example_count if label_count is None else label_count
    if column.name != ACCURACY or not 0 < divisor <= example_count:
        return _round_significant(value)
    return round(value * divisor) / divisor


def coarsen_losses(losses: Mapping[str, float], example_count: int) -> dict[str, float]:
    """Round mean losses of passes over training examples so that they may leave a site; see :func:`coarsen`."""
    return (
        {name: _round_significant(value) for name, value in losses.items()}
        if example_count >= MIN_EXAMPLES
        else {}
    )


def _round_significant(value: float) -> float:
    return float(f"{value:.{SIGNIFICANT_DIGITS}g}")
