"""Robust replacements of the mean, which a minority of hostile clients cannot move arbitrarily.

Krum, multi-Krum, the geometric median and norm bounding weight clients by the inner products of the updates
(their Gram matrix) or their norms. The median and the trimmed mean work by coordinate. Medians of B and of A
do not give the median of B A, so these two rules form the products, one layer at a time.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..adapters.mixtures.mixture import Pairs
from ..core import tree
from ..core.arguments.shares import multiply_share
from ..core.contract import Each, Mean, Sum
from ..core.contract.contribution import Aggregator, Leaf, as_summand
from ..core.errors import ConfigError, TaskError, did_you_mean
from ..linalg.delta import split_svd
from ..linalg.factored import Factored
from ..linalg.pair import Pair
from ..linalg.randomized_svd import leading_triplets
from .updates import split_products

CoordinateRule = Callable[[Tensor, Tensor], Tensor]
"""Maps values ``[n, ...]`` and weights ``[n]`` to ``[...]``."""
COORDINATE_RULES = ("median", "trimmed_mean")
REAL = torch.float64
# relative difference below which two sums of weights count as equal, because of rounding
TIE_TOLERANCE = 1e-12
# number of entries, over all clients, that a coordinate rule processes at a time, to bound the memory of its copies
MAX_BLOCK_ENTRIES = 2**21


def hostile_count(share: float, n: int) -> int:
    """⌈share·n⌉, the largest number of hostile clients among n; 7 for 0.07·100, which in floats is above 7."""
    return math.ceil(multiply_share(share, n))


def krum_weights(gram: Tensor, max_hostile: int, select_count: int) -> Tensor:
    """Weights of Krum and multi-Krum, float64 ``[n]``: 1 / select for the updates of least score, otherwise 0.

    The score of an update is the sum of its squared distances from the n - f - 2 nearest others. Numbers of
    examples do not count. If scores are equal, the first update wins.

    Args:
        gram: inner products of the updates ``[n, n]``.
        max_hostile: f, the largest number of hostile clients.
        select_count: number of updates to select: 1 for Krum, n - f for multi-Krum.

    Raises:
        TaskError: if n < 2 f + 3, ``select_count`` is not in 1..n - f, or the Gram matrix is not finite.

    Source: Blanchard et al., "Machine Learning with Adversaries", NIPS 2017.
    """
    gram, n = _check_gram(gram), len(gram)
    if max_hostile < 0 or n < 2 * max_hostile + 3:
        raise TaskError(
            f"Krum with f = {max_hostile} hostile needs at least 2 f + 3 = {2 * max_hostile + 3} replies, not {n}. "
            "Sample more clients, or lower robust.hostile."
        )
    if not 1 <= select_count <= n - max_hostile:
        raise TaskError(f"multi-Krum selects 1 to n - f = {n - max_hostile} updates, not {select_count}")
    norms = gram.diagonal()
    # rounding may take a square below 0 where the terms cancel
    squared_distances = (norms[:, None] + norms - 2 * gram).clamp(min=0).fill_diagonal_(math.inf)
    scores = squared_distances.sort(1).values[:, : n - max_hostile - 2].sum(1)
    return torch.zeros_like(scores).index_fill_(
        0, scores.argsort(stable=True)[:select_count], 1 / select_count
    )


def geometric_median_weights(gram: Tensor, weights: Tensor, nu: float = 1e-6, steps: int = 100) -> Tensor:
    """Weights with which the updates' mean is their geometric median (RFA), float64 ``[n]``; they sum to 1.

    Smoothed Weiszfeld algorithm: from the weighted mean z = Σ c_i x_i, c = weights / Σ weights, it repeats
    c_i ∝ weight_i / max(ν, ‖z - x_i‖), with distances from the Gram matrix. If updates with the share α of
    the weight lie far away together, Σ c / (1 - Σ c) of them shrinks by α / (1 - α) a step: with α = 0.4, ten
    steps leave 1 % of their distance, forty 1e-7. A step costs n², so more of them are cheap.

    Args:
        gram: inner products of the updates ``[n, n]``.
        weights: weights of the updates ``[n]``, at least 0 and not all 0.
        nu: ν, the smallest distance that counts, in units of the updates.
        steps: number of steps; 0 gives the weighted mean.

    Raises:
        TaskError: if the weights do not fit the Gram matrix, or numbers are not finite.

    Source: Pillutla et al., "Robust Aggregation for Federated Learning", IEEE TSP 2022, Algorithm 2.
    """
    gram = _check_gram(gram)
    initial_shares = _check_weights(weights, gram)
    shares = initial_shares = initial_shares / initial_shares.sum()
    for _ in range(steps):
        products = gram @ shares
        squared_distances = gram.diagonal() - 2 * products + shares @ products
        nearness = initial_shares / squared_distances.clamp(min=0).sqrt().clamp(min=nu)
        shares = nearness / nearness.sum()
    return shares


def norm_factors(norms: Tensor) -> Tensor:
    """Factors min(1, median / norm), float64 ``[n]``, that scale every update to at most the median norm.

    Args:
        norms: norms of the updates ``[n]``; for even n, the median is the lower of the two in the middle.

    Raises:
        TaskError: if there are no norms, or they are negative or not finite.
    """
    norms = norms.detach().to(REAL)
    if norms.ndim != 1 or not len(norms) or not (norms.isfinite() & (norms >= 0)).all():
        raise TaskError(f"norm bounding needs finite norms [n] of at least one update, not {norms.tolist()}")
    return torch.where(norms > 0, norms.median() / norms, 1.0).clamp(max=1)


def coordinate_median(values: Tensor, weights: Tensor) -> Tensor:
    """The weighted median of each coordinate ``[...]``, in the dtype of the values.

    This is the mean of the lower and the upper weighted median: the smallest value such that it and all smaller ones have
    at least half of the weight, and the smallest such that they have more. Equal weights give the ordinary median.

    Args:
        values: values of the n clients ``[n, ...]``.
        weights: weights of the clients ``[n]``, at least 0 and not all 0.

    Raises:
        TaskError: if the weights do not fit the values.
    """
    w = _check_weights(weights, values)
    sorted_values, order = values.sort(0)
    cumulative_weights = w[order].cumsum(0)
    half_weight = cumulative_weights[-1:] / 2
    lower = sorted_values.gather(
        0, (cumulative_weights < half_weight * (1 - TIE_TOLERANCE)).sum(0, keepdim=True)
    )
    upper = sorted_values.gather(
        0, (cumulative_weights <= half_weight * (1 + TIE_TOLERANCE)).sum(0, keepdim=True)
    )
    return ((lower.to(REAL) + upper.to(REAL)) / 2)[0].to(values.dtype)


def trimmed_mean(values: Tensor, weights: Tensor, trim: int) -> Tensor:
    """The weighted mean of each coordinate ``[...]`` without its smallest and largest values, in their dtype.

    Args:
        values: values of the n clients ``[n, ...]``.
        weights: weights of the clients ``[n]``, above 0; which values are dropped does not depend on them.
        trim: number of values to drop at each end.

    Raises:
        TaskError: if n ≤ 2 trim, or the weights do not fit the values.

    Source: Yin et al., "Byzantine-Robust Distributed Learning", ICML 2018.
    """
    n, w = len(values), _check_weights(weights, values)
    if trim < 0 or n <= 2 * trim:
        raise TaskError(
            f"a trimmed mean that drops {trim} values at each end needs at least {2 * trim + 1}, not {n}. "
            "Sample more clients, lower robust.hostile, or set robust.rule = 'median'."
        )
    if not w.all():
        raise TaskError("a trimmed mean needs weights above 0; leave out values with weight 0")
    # equal values are dropped by weight, so that the order of clients does not matter
    weight_order = w.argsort(stable=True)
    sorted_values, order = torch.sort(values[weight_order], dim=0, stable=True)
    shares = w[weight_order][order[trim : n - trim]]
    mean = (shares * sorted_values[trim : n - trim]).sum(0) / shares.sum(0)
    # rounding must not leave the range of the values either
    return mean.to(values.dtype).clamp(sorted_values[trim], sorted_values[n - trim - 1])


def robust_mean(
    trees: list[Any], weights: list[float], rule: str, hostile_share: float, scale: float = 1.0
) -> Any:
    """Reduce trees of one structure by a coordinate rule.

    If trees hold a :class:`~fedlowrank.linalg.pair.Pair`, the rule is applied to the products B A of that layer.
    The result is the best approximation of the same rank, B = U √S and A = √S Vᵀ; beside zero columns of B, A has the result
    of the rule for the clients' A, so that it can be trained. Pairs with an empty factor are reduced tensor by tensor.

    Args:
        trees: trees of floating-point tensors, one for each client.
        weights: weights of the trees, at least 0; a tree with weight 0 is left out and is no reply.
        rule: ``median`` or ``trimmed_mean``, which drops :func:`hostile_count` values at either end; if there are too few
            trees, it drops as many as leave at least one.
        hostile_share: share of the trees that may be hostile.
        scale: factor by which the result is multiplied.

    Raises:
        TreeError: if forms differ, a tensor holds integers or booleans, or weights are negative or all 0.
        ConfigError: if the rule is unknown.
    """
    _check_rule(rule)
    for value, weight in zip(trees, weights, strict=True):
        _check_leaf(trees[0], value, weight)
    weighted_trees = [value for value, weight in zip(trees, weights, strict=True) if weight > 0]
    if not weighted_trees:
        raise tree.TreeError(f"a robust mean needs a weight above 0; there were {len(trees)} trees")
    shares = torch.tensor([w for w in weights if w > 0], dtype=REAL)
    trim = min(hostile_count(hostile_share, len(weighted_trees)), (len(weighted_trees) - 1) // 2)

    def apply(values: Tensor, w: Tensor) -> Tensor:
        # in half precision a sum would be rounded before it is scaled
        wide_values = values if scale == 1 else tree.widen(values)
        result = coordinate_median(wide_values, w) if rule == "median" else trimmed_mean(wide_values, w, trim)
        return result if scale == 1 else (scale * result).to(values.dtype)

    return _reduce_nodes(weighted_trees, shares, apply)


class RobustAggregator(Aggregator):
    """Reduces the contributions of a round by a coordinate rule.

    A ``Mean`` becomes the :func:`robust_mean` of its values; a ``Sum`` becomes the number of clients times the robust
    mean with equal weights, or the plain sum if it counts something. All values stay in memory until :meth:`finish`: one
    contribution for each client.

    Args:
        client_ids: identifiers of the clients that take part, in the order of reduction.
        rule: name of the rule, as in :func:`robust_mean`; others raise ConfigError.
        hostile_share: share of the replies that may be hostile.
    """

    accepts_rows = False

    def __init__(self, client_ids: Sequence[int], rule: str, hostile_share: float) -> None:
        super().__init__(client_ids)
        _check_rule(rule)
        self._rule, self._hostile = rule, hostile_share
        self._counts: set[str] = set()

    def _add(self, path: str, leaf: Leaf, client_id: int) -> None:
        if isinstance(leaf, Each):
            raise TaskError(
                f"robust.rule = {self._rule!r} replaces means, but this method looks at single replies (at "
                f"{path or 'the top'}). Set robust.rule to 'norm_bound', 'krum' or 'multi_krum'."
            )
        contributions = self._totals.setdefault(path, {})
        weight = leaf.weight if isinstance(leaf, Mean) else 1.0
        is_count = isinstance(leaf, Sum) and leaf.counts
        _check_leaf(
            contributions[self.contributed[0]][0] if self.contributed else leaf.value,
            leaf.value,
            weight,
            is_count,
        )
        contributions[client_id] = leaf.value, weight
        if is_count:
            self._counts.add(path)

    def _value(self, path: str, leaf_type: type) -> Any:
        # a client whose contribution was rejected at a later leaf did not contribute
        contributions = [self._totals[path][client] for client in self.contributed]
        values, weights = [value for value, _ in contributions], [weight for _, weight in contributions]
        if path in self._counts:
            return tree.map_leaves(
                lambda *ts: torch.stack([*map(as_summand, ts)]).sum(0), values[0], *values[1:]
            )
        scale = len(contributions) if leaf_type is Sum else 1.0
        return robust_mean(values, weights, self._rule, self._hostile, scale) if any(weights) else None


def _reduce_nodes(nodes: Sequence[Any], weights: Tensor, rule: CoordinateRule) -> Any:
    """Reduce subtrees of the same form."""
    first_node = nodes[0]
    if isinstance(first_node, Tensor):
        flat_tensors = [t.detach().reshape(-1) for t in nodes]
        blocks = _row_blocks(len(flat_tensors[0]), len(flat_tensors))
        return torch.cat([rule(torch.stack([t[i] for t in flat_tensors]), weights) for i in blocks]).view_as(
            first_node
        )
    if split_products(first_node):
        columns = zip(*(split_products(node) for node in nodes), strict=True)
        reduced_pairs = [_reduce_products(pairs, weights, rule) for pairs in columns]
        if isinstance(first_node, Pair):
            return reduced_pairs[0]
        return Pairs(torch.stack([p.b for p in reduced_pairs]), torch.stack([p.a.mT for p in reduced_pairs]))
    if isinstance(first_node, (list, tuple)):
        return type(first_node)(
            _reduce_nodes(children, weights, rule) for children in zip(*nodes, strict=True)
        )
    if isinstance(first_node, dict) or dataclasses.is_dataclass(first_node):
        node_type: Any = type(first_node)
        fields = [node if isinstance(node, dict) else vars(node) for node in nodes]
        return node_type(**{key: _reduce_nodes([f[key] for f in fields], weights, rule) for key in fields[0]})
    return first_node


def _reduce_products(pairs: Sequence[Pair], weights: Tensor, rule: CoordinateRule) -> Pair:
    b, a = (torch.stack(ts).detach().to(REAL) for ts in zip(*[(p.b, p.a) for p in pairs], strict=True))
    blocks = _row_blocks(b.shape[1], len(a) * a.shape[2])
    product = torch.cat([rule(b[:, rows] @ a, weights) for rows in blocks])
    triplets = Factored(*leading_triplets(product, pairs[0].rank))
    pair = split_svd(triplets, pairs[0].rank)
    pair.a[triplets.rank :] = rule(a[:, triplets.rank :], weights)
    return Pair(pair.b.to(pairs[0].b), pair.a.to(pairs[0].a))


def _row_blocks(rows: int, width: int) -> list[slice]:
    """Blocks of rows with ``width`` entries each; at least one block, so that a tensor without rows keeps its form."""
    step = max(1, MAX_BLOCK_ENTRIES // width)
    return [slice(i, i + step) for i in range(0, max(1, rows), step)]


def _check_rule(rule: str) -> None:
    if rule not in COORDINATE_RULES:
        raise ConfigError(f"{rule!r} is no coordinate rule. {did_you_mean(rule, COORDINATE_RULES)}")


def _check_leaf(expected: Any, value: Any, weight: float, is_count: bool = False) -> None:
    if not 0 <= weight < math.inf:
        raise tree.TreeError(f"a weight of a mean is finite and at least 0; this one is {weight}")
    # raises an error that says where structures differ
    tree.map_leaves(lambda *_: None, expected, value)
    forms = dict(tree.leaves(expected))
    for path, t in tree.leaves(value):
        is_number = t.is_floating_point() or is_count
        if not is_number or (t.shape, t.dtype) != (forms[path].shape, forms[path].dtype):
            raise tree.TreeError(
                f"a robust rule needs floating-point tensors of one form; at {path or 'the top'} there are "
                f"{forms[path].dtype} {list(forms[path].shape)} and {t.dtype} {list(t.shape)}"
            )


def _check_gram(gram: Tensor) -> Tensor:
    if gram.ndim != 2 or gram.shape[0] != gram.shape[1] or not len(gram) or not gram.isfinite().all():
        raise TaskError(f"a Gram matrix is square and finite; this one {list(gram.shape)} is not")
    return gram.detach().to(REAL)


def _check_weights(weights: Tensor, values: Tensor) -> Tensor:
    n, w = len(values), weights.to(values.device, REAL)
    if w.shape != (n,) or not (w.isfinite() & (w >= 0)).all() or not w.any():
        raise TaskError(f"{n} values need {n} finite weights, at least 0, not all 0; not {weights.tolist()}")
    return w
