"""Integer arithmetic of partitions and splits: rounding shares, and dealing out examples by class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

IntArray: TypeAlias = npt.NDArray[np.int64]
FloatArray: TypeAlias = npt.NDArray[np.float64]

Parts: TypeAlias = list[IntArray]
"""The sorted positions of each client's examples."""


def largest_remainder(weights: npt.ArrayLike, total: int) -> IntArray:
    """Round shares of a total to integers by the largest remainder method (Hamilton's method).

    Args:
        weights: non-negative numbers [k], not all 0.
        total: sum of the result, at least 0.

    Returns:
        Integers [k] in proportion to the weights; each differs from its exact share by less than 1. Among
        equal remainders the first is rounded up.
    """
    w = np.asarray(weights, dtype=np.float64)
    exact = w / w.sum() * total
    counts: IntArray = np.floor(exact).astype(np.int64)
    largest = np.argsort(-(exact - counts), kind="stable")[: total - int(counts.sum())]
    counts[largest] += 1
    return counts


def shuffle_classes(labels: np.ndarray, classes: int, generator: np.random.Generator) -> list[IntArray]:
    """Positions of the examples of each class, in random order."""
    return [generator.permutation(np.flatnonzero(labels == c)) for c in range(classes)]


def deal_classes(positions: Sequence[IntArray], counts: IntArray) -> Parts:
    """Give each client its number of examples of each class.

    Args:
        positions: positions of each class in the order in which clients take them, one array per class.
        counts: examples per client and class, [clients, classes]; what they leave stays unused.

    Returns:
        The sorted positions of each client.
    """
    pieces = [np.split(own, np.cumsum(counts[:, c]))[:-1] for c, own in enumerate(positions)]
    return [np.sort(np.concatenate(client)) for client in zip(*pieces, strict=True)]
