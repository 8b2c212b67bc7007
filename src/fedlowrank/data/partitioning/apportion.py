"""Integer arithmetic of partitions and splits: rounding shares, and dealing out examples by class."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ...core.errors import DataError

IntArray: TypeAlias = npt.NDArray[np.int64]
FloatArray: TypeAlias = npt.NDArray[np.float64]

Parts: TypeAlias = list[IntArray]
"""Sorted positions of each client's examples."""


def round_shares(weights: npt.ArrayLike, total: int) -> IntArray:
    """Round shares of a total to integers by the largest remainder method (Hamilton's method).

    Args:
        weights: non-negative numbers [k], not all 0.
        total: sum of the result, at least 0.

    Returns:
        Integers [k] in proportion to the weights; each differs from its exact share by less than 1. Among equal
        remainders the first is rounded up.
    """
    w = np.asarray(weights, dtype=np.float64)
    exact_shares = w / w.sum() * total
    counts: IntArray = np.floor(exact_shares).astype(np.int64)
    indices = np.argsort(-(exact_shares - counts), kind="stable")[: total - int(counts.sum())]
    counts[indices] += 1
    return counts


def shuffle_classes(labels: np.ndarray, class_count: int, generator: np.random.Generator) -> list[IntArray]:
    """Positions of the examples of each class, in random order."""
    return [generator.permutation(np.flatnonzero(labels == c)) for c in range(class_count)]


def spread_classes(shares: FloatArray, totals: IntArray) -> IntArray:
    """Compute the number of examples of each class for each client, from shares of the classes.

    Args:
        shares: shares of each class, [classes, clients]; each row adds up to 1, or is 0 if the class has no examples.
        totals: number of examples of each class, [classes].

    Returns:
        Integers [clients, classes] that add up to the totals; rounding gives each example to exactly one client.
    """
    class_totals = totals[:, None]
    boundaries = np.rint(np.cumsum(shares, axis=1)[:, :-1] * class_totals).astype(np.int64)
    counts: IntArray = np.diff(boundaries, axis=1, prepend=0, append=class_totals).T
    return counts


def redraw_until_large(
    draw: Callable[[], IntArray], n: int, client_count: int, min_size: int, max_redraws: int, alpha: float
) -> IntArray:
    """Draw counts until every client is large enough.

    Args:
        draw: function that draws examples per client and class, [clients, classes].
        n: number of all examples.
        client_count: number of clients.
        min_size: smallest number of examples of a client.
        max_redraws: number of draws before giving up.
        alpha: concentration with which the counts are drawn, for messages.

    Raises:
        DataError: if no draw is large enough.
    """
    if client_count * min_size > n:
        raise DataError(
            f"{n} examples cannot give {client_count} clients {min_size} each. "
            "Lower partition.clients or partition.min_size."
        )
    best_size = -1
    for _ in range(max_redraws):
        counts = draw()
        smallest = int(counts.sum(axis=1).min())
        best_size = max(best_size, smallest)
        if smallest >= min_size:
            return counts
    raise DataError(
        f"none of {max_redraws} draws of the partition gave each of {client_count} clients at least "
        f"{min_size} examples; in the best one the smallest client had {best_size}. Raise "
        f"partition.alpha (now {alpha:g}) or partition.max_redraws, or lower partition.clients or "
        "partition.min_size."
    )


def deal_classes(positions: Sequence[IntArray], counts: IntArray) -> Parts:
    """Give each client its number of examples of each class.

    Args:
        positions: positions of each class in the order in which clients take them, one array per class.
        counts: examples per client and class, [clients, classes]; remaining examples stay unused.

    Returns:
        The sorted positions of each client.
    """
    class_splits = [
        np.split(class_positions, np.cumsum(counts[:, c]))[:-1] for c, class_positions in enumerate(positions)
    ]
    return [np.sort(np.concatenate(client_positions)) for client_positions in zip(*class_splits, strict=True)]
