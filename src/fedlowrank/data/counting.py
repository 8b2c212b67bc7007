"""Checks and whole-number arithmetic that partitions and splits have in common."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ..core.errors import ConfigError, DataError

Index: TypeAlias = npt.NDArray[np.int64]
Float: TypeAlias = npt.NDArray[np.float64]


def largest_remainder(weights: npt.ArrayLike, total: int) -> Index:
    """Whole numbers in proportion to weights (Hamilton's method): rounded down, the largest remainders rounded up.

    Args:
        weights: non-negative numbers [k], not all 0.
        total: what the result adds up to, at least 0.

    Returns:
        Whole numbers [k]; each is less than 1 away from its exact share. Among equal remainders the first wins.
    """
    w = np.asarray(weights, dtype=np.float64)
    exact = w / w.sum() * total
    down: Index = np.floor(exact).astype(np.int64)
    up = np.argsort(-(exact - down), kind="stable")[: total - int(down.sum())]
    down[up] += 1
    return down


def deal(pieces: Sequence[Sequence[Index]], clients: int) -> list[Index]:
    """Sorted positions of each client, from the pieces of every class.

    Args:
        pieces: for each class, a piece for each client.
        clients: number of clients.

    Returns:
        For each client its pieces together, sorted.
    """
    return [np.sort(np.concatenate([piece[client] for piece in pieces])) for client in range(clients)]


def check_labels(labels: np.ndarray, classes: int, clients: int, *, regression: bool = False) -> int:
    """Number of examples, after a look at what every partition takes for granted.

    Args:
        labels: label of each example; for a regression its targets.
        classes: number of classes; 0 for a regression.
        clients: number of clients, each of whom needs an example.
        regression: whether the partition looks at no labels, so that it serves a regression too.

    Returns:
        Number of examples.

    Raises:
        DataError: if labels are not integers [n] in 0..classes-1, if there are more clients than examples, or if a
            partition by labels is asked to share out a regression.
    """
    real = classes == 0 and labels.dtype.kind == "f"
    if real and not regression:
        raise DataError(
            "this partition goes by class labels or categories, but these data (a regression, or texts without categories) have "
            "none. Use partition 'iid' or 'natural'."
        )
    if not real and (labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer)):
        raise DataError(f"a partition needs integer labels [n], not {labels.dtype} {list(labels.shape)}.")
    if len(labels) == 0:
        raise DataError("there are no examples to share out.")
    if not real and (labels.min() < 0 or labels.max() >= classes):
        raise DataError(f"labels must lie in 0..{classes - 1}; these lie in {labels.min()}..{labels.max()}.")
    if clients > len(labels):
        raise DataError(f"{clients} clients cannot share {len(labels)} examples. Lower partition.clients.")
    return len(labels)


def at_least(name: str, value: int, low: int) -> None:
    """Refuse a whole number below ``low``.

    Raises:
        ConfigError: if ``value`` is not an integer or too small.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ConfigError(f"{name} must be a whole number of at least {low}, not {value!r}.")


def positive(name: str, value: float) -> None:
    """Refuse a number that is not above 0 and finite.

    Raises:
        ConfigError: if it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{name} must be a number above 0, not {value!r}.")
