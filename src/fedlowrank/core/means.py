"""Weighted means, in one pass: what comes is added and let go, so that a server holds one tree however many clients reply."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

import torch

from . import tree
from .method import Reply

T = TypeVar("T")
U = TypeVar("U")


class Mean(Generic[T]):
    """The weighted mean of trees that come one after another, none of which is kept: m ← m + w/W (x - m), W the sum of weights.

    Equal trees have themselves for a mean, bit for bit.

    Attributes:
        count: how many came.
        total: of their weights.
    """

    def __init__(self) -> None:
        self.count, self.total = 0, 0.0
        self._mean: Any = None
        self._form: Any = None

    def add(self, value: T, weight: float = 1.0) -> None:
        """One more tree of floating-point tensors, of the structure of those before.

        Raises:
            TreeError: if its structure differs, or its weight is negative or no number.
        """
        if not weight >= 0:
            raise tree.TreeError(f"a weight of a mean is at least 0; this one is {weight}")
        self.count += 1
        self.total += weight
        if self.count == 1:
            self._mean, self._form = tree.map(torch.clone, value), tree.form(value)
        mine, new = tree.tensors(self._mean), tree.tensors(value)
        if tree.form(value) != self._form:
            # its fields may come in another order; if they are others, this says where
            new = []
            tree.map(lambda _, t: new.append(t), self._mean, value)
            if any(m.shape != t.shape for m, t in zip(mine, new, strict=True)):
                raise tree.TreeError("a mean needs trees whose tensors have the same shapes")
        if weight and mine and self.count > 1:
            torch._foreach_lerp_(mine, new, weight / self.total)

    @property
    def value(self) -> T:
        """The mean; raises TreeError if no tree came, or all weights are 0."""
        if self.total <= 0:
            raise tree.TreeError(f"a mean needs at least one tree with a weight above 0; there were {self.count} trees")
        found: T = self._mean
        return found


def mean(trees: Iterable[T], weights: Iterable[float]) -> T:
    """Weighted mean of trees of one structure, which is gone over once.

    Args:
        trees: at least one tree; floating-point tensors.
        weights: one non-negative weight a tree; they need not sum to one.

    Returns:
        A tree of like structure.

    Raises:
        TreeError: if there is no tree, if no weight is positive or one is negative, or if the structures differ.
    """
    found: Mean[T] = Mean()
    for value, weight in zip(trees, weights, strict=True):
        found.add(value, float(weight))
    return found.value


def mean_of(replies: Iterable[Reply[U]], part: Callable[[U], T] | None = None, *, equally: bool = False) -> T:
    """The mean of replies, which are gone over once.

    Args:
        replies: at least one.
        part: what of an upload; all of it if None.
        equally: whether all weigh the same, and not by their numbers of examples n_k as in FedAvg.

    Raises:
        TreeError: as :func:`mean`.
    """
    found: Mean[Any] = Mean()
    for reply in replies:
        found.add(
            reply.upload if part is None else part(reply.upload), 1.0 if equally else float(reply.client.examples)
        )
    value: T = found.value
    return value
