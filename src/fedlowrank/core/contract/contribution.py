"""What a reply contributes to a round, and how contributions are reduced.

A server's half of a method is map, reduce, finish: :meth:`~fedlowrank.core.contract.method.Method.contribution` maps
one upload to a tree whose leaves are :class:`Mean`, :class:`Sum` or :class:`Each`; an :class:`Aggregator`
reduces these trees as replies arrive; :meth:`~fedlowrank.core.contract.method.Method.server_update` finishes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

import torch
from torch import Tensor

from .. import tree

T = TypeVar("T")


@dataclass(frozen=True)
class Mean(Generic[T]):
    """Contributes to a weighted mean; the total is None if all weights are zero.

    Attributes:
        value: a tree of floating-point tensors.
        weight: a number, at least 0; a tensor of one number becomes a float.
    """

    value: T
    weight: Any = 1.0

    def __post_init__(self) -> None:
        if type(self.weight) is Tensor:
            object.__setattr__(self, "weight", float(self.weight))


@dataclass(frozen=True)
class Sum(Generic[T]):
    """Contributes to a sum.

    Attributes:
        value: a tree of tensors.
        counts: whether the values are weights or counts, which no robust rule replaces.
    """

    value: T
    counts: bool = False


@dataclass(frozen=True)
class Each(Generic[T]):
    """Is not reduced: the total is a dict ``{client id: value}``, sorted by id. Secure sums refuse a method with it.

    Attributes:
        value: anything.
    """

    value: T


Leaf: TypeAlias = Mean[Any] | Sum[Any] | Each[Any]
"""A leaf of a contribution."""


class RunningMean(Generic[T]):
    """Weighted mean of trees that come one after another: m ← m + w/W (x - m), W the sum of weights.

    Equal trees have themselves as mean, bit for bit. Tensors of half precision are added up in float32, and
    the mean is rounded once to their type. Peak memory: one tree.

    Attributes:
        count: number of trees.
        total: sum of their weights.
    """

    def __init__(self) -> None:
        self.count, self.total = 0, 0.0
        self._mean: Any = None
        self._form: Any = None
        self._like: Any = None

    def add(self, value: T, weight: float = 1.0) -> None:
        """Add a tree.

        Raises:
            TreeError: if its structure differs from those before, or its weight is negative or not a number.
        """
        if not weight >= 0:
            raise tree.TreeError(f"a weight of a mean is at least 0; this one is {weight}")
        self.count += 1
        self.total += weight
        if self.count == 1:
            self._begin(value)
        means, tensors = tree.tensors(self._mean), tree.tensors(value)
        if tree.form(value) != self._form:
            # keys may come in another order; if structures differ, this says where
            tensors = []
            tree.map_leaves(lambda _, t: tensors.append(t), self._like, value)
            if any(
                (u.shape, u.dtype) != (t.shape, t.dtype)
                for u, t in zip(tree.tensors(self._like), tensors, strict=True)
            ):
                raise tree.TreeError("a mean needs trees whose tensors have the same shapes and types")
        if weight and means and self.count > 1:
            torch._foreach_lerp_(means, tree.widen(tensors), weight / self.total)

    def add_rows(self, rows: T, weights: Sequence[float]) -> None:
        """Add K trees whose tensors are stacked ``[K, ...]``, by one operation a tensor.

        Raises:
            TreeError: as :meth:`add`.
        """
        if not all(w >= 0 for w in weights):
            raise tree.TreeError(f"a weight of a mean is at least 0; these are {list(weights)}")
        used_indices = [k for k, w in enumerate(weights) if w > 0]
        if not used_indices:
            return
        shares = torch.tensor([weights[k] for k in used_indices], dtype=torch.float64)
        total = float(shares.sum())
        shares /= total

        def mean_of(template: Tensor, t: Tensor) -> Tensor:
            if (template.shape, template.dtype) != (t.shape[1:], t.dtype):
                raise tree.TreeError("a mean needs trees whose tensors have the same shapes and types")
            wide_rows = t if len(used_indices) == len(t) else t[torch.tensor(used_indices, device=t.device)]
            wide_rows = wide_rows.to(tree.wide_type(t.dtype))
            # relative to the first, so that equal tensors have themselves as mean
            mean: Tensor = wide_rows[0] + torch.tensordot(shares.to(wide_rows), wide_rows - wide_rows[0], 1)
            return mean

        if self._form is None:
            first_tree = tree.map_leaves(lambda t: t[0], rows)
            self._form, self._like = tree.form(first_tree), _empty(first_tree)
        self.count += len(used_indices)
        self.total += total
        means = tree.map_leaves(mean_of, self._like, rows)
        if self._mean is None:
            self._mean = means
        elif running := tree.tensors(self._mean):
            torch._foreach_lerp_(running, tree.tensors(means), total / self.total)

    def _begin(self, value: T) -> None:
        self._mean, self._form, self._like = (
            tree.map_leaves(_wide_copy, value),
            tree.form(value),
            _empty(value),
        )

    @property
    def value(self) -> T:
        """The mean; raises TreeError if all weights are 0."""
        if self.total <= 0:
            raise tree.TreeError(
                f"a mean needs at least one tree with a weight above 0; there were {self.count} trees"
            )
        value: T = tree.cast_like(self._mean, self._like)
        return value


def _wide_copy(t: Tensor) -> Tensor:
    return t.to(tree.wide_type(t.dtype), copy=True)


def _empty(value: T) -> T:
    """The tree with tensors of the same shapes and types that take no memory."""
    return tree.map_leaves(lambda t: t.new_zeros(()).expand(t.shape), value)


def mean(trees: Iterable[T], weights: Iterable[float]) -> T:
    """Weighted mean of trees of one structure.

    Args:
        trees: at least one tree of floating-point tensors.
        weights: one non-negative weight for each tree; they need not sum to one.

    Raises:
        TreeError: if there is no tree with a positive weight, a weight is negative, or the structures differ.
    """
    running: RunningMean[T] = RunningMean()
    for value, weight in zip(trees, weights, strict=True):
        running.add(value, float(weight))
    return running.value


_SKIPPED = object()


class Aggregator:
    """Reduces the contributions of a round: single ones in the order of its clients, whenever they arrive.

    A contribution that arrives early waits until those before it have arrived, so totals have the same bits
    in every engine that trains clients one by one, and over a network. Every other one is added and let go.
    :meth:`add_rows` adds those of a cohort at once; its totals differ in rounding.

    Args:
        client_ids: identifiers of the clients that take part, in the order of reduction.

    Attributes:
        contributed: identifiers of the clients whose contributions were added.
        reason: why the total is None although clients contributed; commonly empty.
    """

    accepts_rows: ClassVar[bool] = True
    """Whether :meth:`add_rows` may be called; False where contributions are needed one by one."""

    def __init__(self, client_ids: Sequence[int]) -> None:
        self.contributed: list[int] = []
        self.reason = ""
        self._positions = {client_id: position for position, client_id in enumerate(client_ids)}
        self._waiting = list(reversed(client_ids))
        self._early_contributions: dict[int, Any] = {}
        self._totals: dict[str, Any] = {}
        self._forms: dict[str, Any] = {}
        self._structure: Any = None

    def add(self, client_id: int, contribution: Any) -> None:
        """Add a client's contribution.

        Raises:
            TreeError: if it does not have the structure of those before.
        """
        self._early_contributions[client_id] = contribution
        self._reduce()

    def skip(self, client_id: int) -> None:
        """Leave out a client that does not reply."""
        self._early_contributions[client_id] = _SKIPPED
        self._reduce()

    def add_rows(
        self, client_ids: Sequence[int], contribution: Any, weights: Mapping[str, Sequence[float]]
    ) -> None:
        """Add the contributions of several clients, whose tensors are stacked ``[K, ...]``, at once.

        They are added now, and not in the order of the round.

        Args:
            client_ids: whose they are.
            contribution: with the values of all of them; of :class:`Each` a list of K values.
            weights: of each client, by the path of a :class:`Mean`, whose own weight is not read.

        Raises:
            TreeError: if it does not have the structure of those before.
        """
        self._check_structure(client_ids[0], contribution)
        for path, leaf in contribution_leaves(contribution):
            if isinstance(leaf, Mean):
                self._totals.setdefault(path, RunningMean()).add_rows(leaf.value, weights[path])
            elif isinstance(leaf, Sum):
                if path not in self._totals:
                    self._forms[path] = _empty(tree.map_leaves(lambda t: t[0], leaf.value))
                self._sum(path, tree.map_leaves(lambda t: t.sum(0), tree.widen(leaf.value)))
            else:
                self._totals.setdefault(path, {}).update(zip(client_ids, leaf.value, strict=True))
        self.contributed += client_ids
        added_ids = set(client_ids)
        self._waiting = [client_id for client_id in self._waiting if client_id not in added_ids]
        self._reduce()

    def finish(self) -> Any:
        """The total: the tree of contributions with every leaf reduced, or None without contributions.

        Raises:
            ValueError: if a client was neither added nor skipped.
        """
        if missing_ids := sorted(set(self._waiting) - self._early_contributions.keys()):
            raise ValueError(f"the round is not over: clients {missing_ids} neither replied nor were skipped")
        self.contributed.sort(key=self._positions.__getitem__)
        return None if self._structure is None else map_contributions(self._value, self._structure)

    def _reduce(self) -> None:
        while self._waiting and self._waiting[-1] in self._early_contributions:
            client_id = self._waiting.pop()
            contribution = self._early_contributions.pop(client_id)
            if contribution is _SKIPPED:
                continue
            self._check_structure(client_id, contribution)
            for path, leaf in contribution_leaves(contribution):
                self._add(path, leaf, client_id)
            self.contributed.append(client_id)

    def _check_structure(self, client_id: int, contribution: Any) -> None:
        structure = map_contributions(lambda _, leaf: type(leaf), contribution)
        if self._structure is None:
            self._structure = structure
        elif self._structure != structure:
            raise tree.TreeError(
                f"the contribution of client {client_id} has the form {structure}, not {self._structure}"
            )

    def _add(self, path: str, leaf: Leaf, client_id: int) -> None:
        if isinstance(leaf, Mean):
            self._totals.setdefault(path, RunningMean())
            if leaf.weight != 0:
                self._totals[path].add(leaf.value, leaf.weight)
        elif isinstance(leaf, Sum):
            if path not in self._totals:
                self._forms[path] = _empty(leaf.value)
            # of half precision in float32, rounded once at the end
            self._sum(path, tree.widen(leaf.value))
        else:
            self._totals.setdefault(path, {})[client_id] = leaf.value

    def _sum(self, path: str, value: Any) -> None:
        total = self._totals.get(path)
        self._totals[path] = value if total is None else tree.map_leaves(torch.add, total, value)

    def _value(self, path: str, leaf_type: type) -> Any:
        total = self._totals[path]
        if isinstance(total, RunningMean):
            return total.value if total.total > 0 else None
        if leaf_type is Each:
            return dict(sorted(total.items()))
        return tree.cast_like(total, self._forms[path])


def contribution_leaves(contribution: Any) -> Iterator[tuple[str, Leaf]]:
    """The leaves of a contribution with their paths."""
    leaves_by_path: list[tuple[str, Leaf]] = []
    map_contributions(lambda path, leaf: leaves_by_path.append((path, leaf)), contribution)
    yield from leaves_by_path


def map_contributions(f: Callable[[str, Any], Any], contribution: Any, path: str = "") -> Any:
    """A contribution with every leaf replaced by ``f(path, leaf)``.

    Raises:
        TreeError: if it holds anything but dicts and lists of leaves.
    """
    if isinstance(contribution, dict):
        return {
            key: map_contributions(f, value, tree.join_path(path, key)) for key, value in contribution.items()
        }
    if isinstance(contribution, list):
        return [
            map_contributions(f, value, tree.join_path(path, str(i))) for i, value in enumerate(contribution)
        ]
    if not isinstance(contribution, (Mean, Sum, Each, type)):
        raise tree.TreeError(
            f"a contribution consists of Mean, Sum and Each in dicts and lists; at {path or 'its top'} it "
            f"holds a {type(contribution).__name__}. Wrap it, such as Mean(upload, client.example_count)"
        )
    return f(path, contribution)


def fault_of(contribution: Any) -> str | None:
    """What is wrong with the numbers of a contribution, or None.

    Values of Each are not examined: only the method knows what they may hold.
    """
    for path, leaf in contribution_leaves(contribution):
        weight = leaf.weight if isinstance(leaf, Mean) else 0.0
        if not 0 <= weight < math.inf:
            return f"the weight of the mean at {path or 'its top'} is {weight:.4g}"
        if not isinstance(leaf, Each) and (leaf_path := tree.not_finite(leaf.value)) is not None:
            return f"a NaN or an infinity at {path}{leaf_path}"
    return None
