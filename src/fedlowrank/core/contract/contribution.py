"""Contributions of replies to a round, and their reduction.

The server's half of a method is map, reduce, finish: :meth:`~fedlowrank.core.contract.method.Method.contribution`
maps one upload to a tree whose leaves are :class:`Mean`, :class:`Sum` or :class:`Each`; an :class:`Aggregator`
reduces these trees as replies arrive; :meth:`~fedlowrank.core.contract.method.Method.server_update` finishes.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

import torch
from torch import Tensor

from .. import tree

T = TypeVar("T")

MAX_BLOCK = 1 << 17
"""Maximum number of elements whose mean over clients is computed at once on a CPU: half a megabyte in float32."""


@dataclass(frozen=True)
class Mean(Generic[T]):
    """A term of a weighted mean; the total is None if all weights are zero.

    Attributes:
        value: tree of floating-point tensors.
        weight: weight of the value, at least 0; a tensor of one number is converted to a float.

    Raises:
        TreeError: if the weight is no number.
    """

    value: T
    weight: Any = 1.0

    def __post_init__(self) -> None:
        if type(self.weight) is Tensor and self.weight.numel() == 1:
            object.__setattr__(self, "weight", float(self.weight))
        elif type(self.weight) is Tensor or not isinstance(self.weight, (Real, Tensor)):
            raise tree.TreeError(f"the weight of a Mean is a number, at least 0; this one is {self.weight!r}")


@dataclass(frozen=True)
class Sum(Generic[T]):
    """A term of a sum.

    Attributes:
        value: tree of tensors; whole numbers and booleans of any type are added as int64.
        counts: whether the values are weights or counts, which robust rules leave as they are.
    """

    value: T
    counts: bool = False


@dataclass(frozen=True)
class Each(Generic[T]):
    """A value that is not reduced: the total is a dict ``{client id: value}``, sorted by id. Secure sums refuse such methods.

    Attributes:
        value: any value, passed to the server unchanged.
    """

    value: T


Leaf: TypeAlias = Mean[Any] | Sum[Any] | Each[Any]
"""A leaf of a contribution."""

Contribution: TypeAlias = "Leaf | dict[str, Contribution] | list[Contribution]"
"""What one upload adds to a round: a tree of dicts and lists whose leaves are :class:`Mean`, :class:`Sum` and :class:`Each`."""


class RunningMean(Generic[T]):
    """Weighted mean of a stream of trees: m ← m + w/W (x - m), where W is the sum of the weights so far.

    The mean of equal trees is that tree, bit for bit. Half-precision tensors are accumulated in float32, and the mean
    is rounded once to their type. Peak memory: one tree.

    Args:
        path: path of the mean in a larger tree (JSON pointer), for error messages.

    Attributes:
        count: number of trees added.
        total: sum of the weights of these trees.
    """

    def __init__(self, path: str = "") -> None:
        self.count, self.total = 0, 0.0
        self._path = path
        self._mean: Any = None
        self._form: Any = None
        self._like: Any = None

    def add(self, value: T, weight: float = 1.0) -> None:
        """Add a tree to the mean.

        Raises:
            TreeError: if the tree differs in structure, shapes or types from those before, or its weight is negative or not a
                number.
        """
        if not weight >= 0:
            raise tree.TreeError(f"a weight of a mean is at least 0; this one is {weight}")
        self._begin(value)
        self.count += 1
        self.total += weight
        tensors = tree.tensors(value)
        if tree.form(value) != self._form:
            # the order of keys may differ
            tensors = match_tensors(self._like, value, self._path)
        if not weight:
            return
        if self._mean is None:
            self._mean = tree.map_leaves(lambda _, t: _wide_copy(t), self._like, value)
        elif means := tree.tensors(self._mean):
            torch._foreach_lerp_(means, tree.widen(tensors), weight / self.total)

    def add_rows(self, rows: T, weights: Sequence[float]) -> None:
        """Add K trees at once, given as one tree of stacked tensors ``[K, ...]``.

        Raises:
            TreeError: as in :meth:`add`.
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
            wide_rows = t if len(used_indices) == len(t) else t[torch.tensor(used_indices, device=t.device)]
            wide_rows = wide_rows.to(tree.wide_type(t.dtype)).reshape(len(used_indices), -1)
            row_shares, width = shares.to(wide_rows), wide_rows.shape[1]
            # in blocks of columns whose differences stay in the cache of a CPU
            block_width = max(1, MAX_BLOCK // len(used_indices) if t.device.type == "cpu" else width)
            # relative to the first row, so that the mean of equal tensors is exactly that tensor
            means = [rows[0] + row_shares @ (rows - rows[0]) for rows in wide_rows.split(block_width, 1)]
            return torch.cat(means).reshape(template.shape)

        first_tree = tree.map_leaves(lambda t: t[0], rows)
        self._begin(first_tree)
        match_tensors(self._like, first_tree, self._path)
        self.count += len(used_indices)
        self.total += total
        means = tree.map_leaves(mean_of, self._like, rows)
        if self._mean is None:
            self._mean = means
        elif running := tree.tensors(self._mean):
            torch._foreach_lerp_(running, tree.tensors(means), total / self.total)

    def _begin(self, value: T) -> None:
        """Take the form of the first tree, whatever its weight."""
        if self._form is None:
            _refuse_integers(value, self._path)
            self._form, self._like = tree.form(value), _empty(value)

    @property
    def value(self) -> T:
        """Mean of the trees; raises TreeError if all weights are 0."""
        if self.total <= 0:
            raise tree.TreeError(
                f"a mean needs at least one tree with a weight above 0; there were {self.count} trees"
            )
        value: T = tree.cast_like(self._mean, self._like)
        return value


def _refuse_integers(value: Any, path: str = "") -> None:
    """Raise TreeError if a tree whose mean is computed holds integers or booleans, whose mean is no such number."""
    for leaf_path, t in tree.leaves(value, path):
        if not (t.is_floating_point() or t.is_complex()):
            raise tree.TreeError(
                f"a mean needs floating-point tensors; at {leaf_path or 'its top'} there is {t.dtype}. Use .float(), or "
                "Sum for counts"
            )


def match_tensors(expected: Any, value: Any, path: str = "") -> list[Tensor]:
    """Return the tensors of a tree in the order of an expected tree.

    Args:
        expected: tree of the same structure, with tensors of the same shapes and types.
        value: tree whose tensors are returned.
        path: path of the trees in a larger tree (JSON pointer), for error messages.

    Raises:
        TreeError: if the trees differ in structure, or in the shape or the type of a tensor; the message names the place.
    """
    tensors: list[Tensor] = []
    tree.map_leaves(lambda _, t: tensors.append(t), expected, value, path=path)
    for (leaf_path, template), t in zip(tree.leaves(expected, path), tensors, strict=True):
        if (template.shape, template.dtype) != (t.shape, t.dtype):
            raise tree.TreeError(
                f"trees must have the same shapes and types; at {leaf_path or 'the top'} this one has {t.dtype} {[*t.shape]}, "
                f"those before it {template.dtype} {[*template.shape]}"
            )
    return tensors


def as_summand(t: Tensor) -> Tensor:
    """Convert whole numbers and booleans to int64, in which they are added; others stay."""
    return t if t.is_floating_point() or t.is_complex() else t.to(torch.int64)


def _wide_copy(t: Tensor) -> Tensor:
    return t.to(tree.wide_type(t.dtype), copy=True)


def _empty(value: T) -> T:
    """Copy a tree with tensors of the same shapes and types that take no memory."""
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
    """Reduces the contributions of a round in the order of its clients, whenever they arrive.

    A contribution that arrives early waits until those before it have arrived, so totals have the same bits in every
    engine that trains clients one by one, and over a network. All others are added and released at once.
    :meth:`add_rows` adds the contributions of a cohort together; its totals differ in rounding.

    Args:
        client_ids: identifiers of the clients that take part, in the order of reduction.

    Attributes:
        contributed: identifiers of the clients whose contributions were added.
        reason: why the total is None although clients contributed; usually empty.
    """

    accepts_rows: ClassVar[bool] = True
    """Whether :meth:`add_rows` may be called; False if contributions are needed one by one."""

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
            TreeError: if the contribution does not have the structure of those before, and the shapes and types of their
                tensors.
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
        """Add the contributions of several clients together, given as one contribution of stacked tensors ``[K, ...]``.

        They are added immediately and not in the order of the round.

        Args:
            client_ids: identifiers of the K clients that own the contributions.
            contribution: contribution whose leaves hold the values of all K clients; an :class:`Each` holds a list of
                K values.
            weights: weights of the K clients by the path of each :class:`Mean`, whose own ``weight`` is ignored.

        Raises:
            TreeError: as in :meth:`add`.
        """
        self._check_structure(client_ids[0], contribution)
        for path, leaf in contribution_leaves(contribution):
            if isinstance(leaf, Mean):
                for client_id, weight in zip(client_ids, weights[path], strict=True):
                    with _naming_client(client_id):
                        _check_weight(weight, path)
            # the tensors of all clients of a cohort have one form
            with _naming_client(client_ids[0]):
                self._add_leaf_rows(path, leaf, client_ids, weights)
        self.contributed += client_ids
        added_ids = set(client_ids)
        self._waiting = [client_id for client_id in self._waiting if client_id not in added_ids]
        self._reduce()

    def _add_leaf_rows(
        self, path: str, leaf: Leaf, client_ids: Sequence[int], weights: Mapping[str, Sequence[float]]
    ) -> None:
        """Add the values of several clients at one leaf, see :meth:`add_rows`."""
        if isinstance(leaf, Mean):
            if path not in self._totals:
                _refuse_integers(leaf.value, path)
            self._totals.setdefault(path, RunningMean(path)).add_rows(leaf.value, weights[path])
        elif isinstance(leaf, Sum):
            summands = tree.map_leaves(as_summand, leaf.value)
            self._match_summands(path, tree.map_leaves(lambda t: t[0], summands))
            self._sum(path, tree.map_leaves(lambda t: t.sum(0), tree.widen(summands)))
        else:
            self._totals.setdefault(path, {}).update(zip(client_ids, leaf.value, strict=True))

    def finish(self) -> Any:
        """Total of the round: the tree of contributions with every leaf reduced, or None without contributions.

        Raises:
            ValueError: if a client was neither added nor skipped.
        """
        if missing_ids := sorted(set(self._waiting) - self._early_contributions.keys()):
            raise ValueError(f"the round is not over: clients {missing_ids} neither replied nor were skipped")
        self.contributed.sort(key=self._positions.__getitem__)
        if self._structure is None:
            return None
        return map_contributions(lambda path, leaf: self._value(path, type(leaf)), self._structure)

    def _reduce(self) -> None:
        while self._waiting and self._waiting[-1] in self._early_contributions:
            client_id = self._waiting.pop()
            contribution = self._early_contributions.pop(client_id)
            if contribution is _SKIPPED:
                continue
            self._check_structure(client_id, contribution)
            with _naming_client(client_id):
                for path, leaf in contribution_leaves(contribution):
                    self._add(path, leaf, client_id)
            self.contributed.append(client_id)

    def _check_structure(self, client_id: int, contribution: Any) -> None:
        structure = map_contributions(lambda _, leaf: type(leaf)(None), contribution)
        if self._structure is None:
            self._structure = structure
        elif self._structure != structure:
            form, expected_form = (
                map_contributions(lambda _, leaf: type(leaf).__name__, s)
                for s in (structure, self._structure)
            )
            raise tree.TreeError(
                f"the contribution of client {client_id} has the form {form}, not {expected_form}"
            )

    def _add(self, path: str, leaf: Leaf, client_id: int) -> None:
        if isinstance(leaf, Mean):
            if path not in self._totals:
                _refuse_integers(leaf.value, path)
            self._totals.setdefault(path, RunningMean(path))
            _check_weight(leaf.weight, path)
            if leaf.weight != 0:
                self._totals[path].add(leaf.value, leaf.weight)
        elif isinstance(leaf, Sum):
            summands = tree.map_leaves(as_summand, leaf.value)
            self._match_summands(path, summands)
            # half precision is accumulated in float32 and rounded once at the end
            self._sum(path, tree.widen(summands))
        else:
            self._totals.setdefault(path, {})[client_id] = leaf.value

    def _match_summands(self, path: str, summands: Any) -> None:
        """Keep the form of the first tree of a sum; raise TreeError if a later one has another form."""
        form = tree.form(summands)
        if path not in self._forms:
            self._forms[path] = form, _empty(summands)
        elif form != self._forms[path][0]:
            # the order of keys may differ
            match_tensors(self._forms[path][1], summands, path)

    def _sum(self, path: str, value: Any) -> None:
        total = self._totals.get(path)
        self._totals[path] = value if total is None else tree.map_leaves(torch.add, total, value)

    def _value(self, path: str, leaf_type: type) -> Any:
        total = self._totals[path]
        if isinstance(total, RunningMean):
            return total.value if total.total > 0 else None
        if leaf_type is Each:
            return dict(sorted(total.items()))
        return tree.cast_like(total, self._forms[path][1])


@contextlib.contextmanager
def _naming_client(client_id: int) -> Iterator[None]:
    """Within this block, raise a TreeError again with the client whose contribution is added."""
    try:
        yield
    except tree.TreeError as error:
        raise tree.TreeError(f"the contribution of client {client_id}: {error}") from error


def _check_weight(weight: float, path: str) -> None:
    """Raise TreeError if the weight of a mean is negative or not finite."""
    if not 0 <= weight < math.inf:
        raise tree.TreeError(
            f"the weight of the mean at {path or 'the top'} is {weight}; it must be finite and at least 0"
        )


def contribution_leaves(contribution: Any) -> Iterator[tuple[str, Leaf]]:
    """Yield the leaves of a contribution with their paths."""
    leaves_by_path: list[tuple[str, Leaf]] = []
    map_contributions(lambda path, leaf: leaves_by_path.append((path, leaf)), contribution)
    yield from leaves_by_path


def map_contributions(f: Callable[[str, Any], Any], contribution: Any, path: str = "") -> Any:
    """Replace every leaf of a contribution by ``f(path, leaf)``.

    Raises:
        TreeError: if the contribution holds anything but dicts and lists of leaves.
    """
    if isinstance(contribution, dict):
        return {
            key: map_contributions(f, value, tree.join_path(path, key)) for key, value in contribution.items()
        }
    if isinstance(contribution, list):
        return [
            map_contributions(f, value, tree.join_path(path, str(i))) for i, value in enumerate(contribution)
        ]
    if not isinstance(contribution, (Mean, Sum, Each)):
        raise tree.TreeError(
            f"a contribution consists of Mean, Sum and Each in dicts and lists; at {path or 'its top'} it "
            f"holds a {type(contribution).__name__}. Wrap it, such as Mean(upload, client.example_count)"
        )
    return f(path, contribution)


def find_not_finite(contribution: Any) -> str | None:
    """Find the path of the first tensor in a contribution that holds a NaN or an infinity; None if there is none.

    Means without weight count for nothing, and values of :class:`Each` are not examined, because only the method knows
    what they may hold.
    """
    for path, leaf in contribution_leaves(contribution):
        if not isinstance(leaf, Each) and (isinstance(leaf, Sum) or leaf.weight != 0):
            # not tree.not_finite alone, whose error does not name the path of the leaf
            tensors = tree.map_leaves(lambda t: t, leaf.value, path=path)
            if (leaf_path := tree.not_finite(tensors)) is not None:
                return f"{path}{leaf_path}"
    return None


def select_row(contribution: Any, weights: Mapping[str, Sequence[float]], index: int) -> Any:
    """Select the contribution of one client from a contribution of several, see :meth:`Aggregator.add_rows`."""

    def select(path: str, leaf: Leaf) -> Leaf:
        if isinstance(leaf, Each):
            return Each(leaf.value[index])
        value = tree.map_leaves(lambda t: t[index], leaf.value)
        return Sum(value, leaf.counts) if isinstance(leaf, Sum) else Mean(value, weights[path][index])

    return map_contributions(select, contribution)


def fault_of(contribution: Any) -> str | None:
    """Describe what is wrong with the numbers of a contribution; None if nothing is.

    Values of :class:`Each` are not examined, because only the method knows what they may hold.
    """
    for path, leaf in contribution_leaves(contribution):
        weight = leaf.weight if isinstance(leaf, Mean) else 0.0
        if not 0 <= weight < math.inf:
            return f"the weight of the mean at {path or 'its top'} is {weight:.4g}"
        if not isinstance(leaf, Each) and (leaf_path := tree.not_finite(leaf.value)) is not None:
            return f"a NaN or an infinity at {path}{leaf_path}"
    return None
