"""Robust rules against numpy, Flower and their breakdown points; products of factors; the aggregator."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedlowrank.adapters.mixtures.mixture import Pairs
from fedlowrank.core.contract import Each, Mean, Sum
from fedlowrank.core.errors import ConfigError, TaskError
from fedlowrank.core.tree import TreeError, tree_dataclass
from fedlowrank.linalg.pair import Pair
from fedlowrank.trust import robust
from fedlowrank.trust.robust import (
    RobustAggregator,
    coordinate_median,
    geometric_median_weights,
    hostile_count,
    krum_weights,
    norm_factors,
    robust_mean,
    trimmed_mean,
)

FAR = 1e6


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def gram_of(x: np.ndarray) -> Tensor:
    return torch.from_numpy(x @ x.T)


def ones(n: int) -> Tensor:
    return torch.ones(n)


@tree_dataclass
class Message:
    """Factors and a note, as methods send them."""

    factors: dict[str, Pair]
    note: str
    rest: tuple[Tensor, list[Tensor]]


# counts


@pytest.mark.parametrize(
    ("share", "n", "count"),
    [(0.2, 50, 10), (0.07, 100, 7), (0.1, 30, 3), (0.2, 11, 3), (0.2, 1, 1), (0.0, 5, 0), (0.49, 100, 49)],
)
def test_hostile_count_rounds_up_but_not_for_rounding(share: float, n: int, count: int) -> None:
    assert hostile_count(share, n) == count


# Krum


def numpy_krum(x: np.ndarray, f: int, select: int) -> set[int]:
    n = len(x)
    scores = []
    for i in range(n):
        distances = sorted(float(((x[i] - x[j]) ** 2).sum()) for j in range(n) if j != i)
        scores.append(sum(distances[: n - f - 2]))
    return set(np.argsort(scores)[:select].tolist())


@pytest.mark.parametrize(("n", "f"), [(7, 2), (9, 3), (12, 2), (3, 0)])
def test_krum_selects_as_numpy_does(n: int, f: int) -> None:
    for seed in range(5):
        x = random(n, 20, seed=seed)
        for select in {1, n - f}:
            weights = krum_weights(gram_of(x), f, select)
            assert set(weights.nonzero()[:, 0].tolist()) == numpy_krum(x, f, select)
            assert weights.sum().item() == pytest.approx(1)
            assert weights.max().item() == pytest.approx(1 / select)


def test_krum_selects_as_flower_does() -> None:
    aggregate = pytest.importorskip("flwr.server.strategy.aggregate")
    for seed in range(10):
        x = random(9, 15, seed=seed)
        results = [([row], 1) for row in x]
        for select, keep in ((1, 0), (7, 7)):
            ours = krum_weights(gram_of(x), 2, select).numpy() @ x
            (theirs,) = aggregate.aggregate_krum(results, 2, keep)
            np.testing.assert_allclose(ours, theirs, rtol=1e-12)


def test_krum_withstands_f_far_updates_and_refuses_fewer_than_2f_plus_3() -> None:
    for f in (1, 2, 3):
        n = 2 * f + 3
        x = random(n, 10, seed=f)
        # they stand close together, so that only their number gives them away
        x[:f] = FAR + random(f, 10, seed=9) * 1e-3
        for select in (1, n - f):
            assert not krum_weights(gram_of(x), f, select)[:f].any()
        with pytest.raises(TaskError, match=f"2 f \\+ 3 = {n}"):
            krum_weights(gram_of(x[1:]), f, 1)
    x = random(7, 10)
    x[:4] = FAR
    assert krum_weights(gram_of(x), 2, 1)[:4].any(), "four of seven are more than f = 2"


@pytest.mark.parametrize("select", [0, 6])
def test_krum_selects_at_most_those_that_are_honest(select: int) -> None:
    with pytest.raises(TaskError, match="selects 1 to n - f = 5"):
        krum_weights(gram_of(random(7, 3)), 2, select)


def test_a_gram_matrix_is_square_and_finite() -> None:
    for wrong in (torch.ones(3), torch.ones(3, 4), torch.ones(0, 0), torch.full((7, 7), float("nan"))):
        with pytest.raises(TaskError, match="square and finite"):
            krum_weights(wrong, 1, 1)
        with pytest.raises(TaskError, match="square and finite"):
            geometric_median_weights(wrong, ones(len(wrong)))


# geometric median


def numpy_weiszfeld(x: np.ndarray, w: np.ndarray, nu: float, steps: int) -> np.ndarray:
    z = w @ x / w.sum()
    for _ in range(steps):
        beta = w / np.maximum(nu, np.sqrt(((x - z) ** 2).sum(1)))
        z = beta @ x / beta.sum()
    return z


@pytest.mark.parametrize(("nu", "steps"), [(1e-6, 10), (1e-6, 0), (8.0, 10), (1e-6, 200)])
def test_the_geometric_median_is_that_of_weiszfeld_on_vectors(nu: float, steps: int) -> None:
    x, w = random(8, 30), np.arange(1.0, 9)
    x[0] = 100
    c = geometric_median_weights(gram_of(x), torch.from_numpy(w), nu, steps)
    assert c.sum().item() == pytest.approx(1)
    np.testing.assert_allclose(c.numpy() @ x, numpy_weiszfeld(x, w, nu, steps), rtol=1e-9, atol=1e-9)


def test_the_geometric_median_minimizes_the_sum_of_distances() -> None:
    x = random(9, 4)
    z = geometric_median_weights(gram_of(x), ones(9), steps=500).numpy() @ x

    def cost(point: np.ndarray) -> float:
        return float(np.sqrt(((x - point) ** 2).sum(1)).sum())

    assert all(cost(z) <= cost(z + 1e-3 * step) for step in random(50, 4, seed=1))


@pytest.mark.full
def test_the_geometric_median_breaks_down_at_half() -> None:
    x = random(9, 10)
    for f, holds in ((4, True), (5, False)):
        y = x.copy()
        y[:f] = FAR
        z = geometric_median_weights(gram_of(y), ones(9), steps=1000).numpy() @ y
        center = x[f:].mean(0)
        radius = np.sqrt(((x[f:] - center) ** 2).sum(1)).max()
        # Pillutla et al., Lemma 3: at most (2 - 2α) / (1 - 2α) times the radius of the honest ones
        alpha = 4 / 9
        bound = (2 - 2 * alpha) / (1 - 2 * alpha) * radius
        assert (np.linalg.norm(z - center) <= bound) == holds


def test_the_odds_of_far_updates_shrink_as_documented() -> None:
    x = np.zeros((10, 2))
    x[:4] = FAR
    c = geometric_median_weights(gram_of(x), ones(10), steps=10)[:4].sum().item()
    assert c / (1 - c) == pytest.approx((4 / 6) ** 11, rel=1e-6)


# norms


def test_norms_are_bounded_by_their_lower_median() -> None:
    norms = torch.tensor([1.0, 2.0, 4.0, 1e6])
    assert norm_factors(norms).tolist() == pytest.approx([1, 1, 0.5, 2e-6])
    assert norm_factors(torch.tensor([0.0, 0.0, 5.0])).tolist() == [1, 1, 0]
    for wrong in (torch.ones(0), torch.ones(2, 2), torch.tensor([1.0, float("inf")]), torch.tensor([-1.0])):
        with pytest.raises(TaskError, match="finite norms"):
            norm_factors(wrong)


# coordinates


@pytest.mark.parametrize("n", [1, 2, 5, 8, 10, 20])
def test_equal_weights_give_the_ordinary_median(n: int) -> None:
    x = random(n, 4, 3)
    # five weights of 0.1 are more than half of ten by rounding, and ten less than half of twenty
    for weight in (1.0, 0.1, 7.0):
        actual = coordinate_median(torch.from_numpy(x), torch.full((n,), weight, dtype=torch.float64))
        np.testing.assert_allclose(actual, np.median(x, axis=0), rtol=1e-15)


def test_whole_weights_give_the_median_of_repeated_values() -> None:
    for seed in range(20):
        generator = np.random.default_rng(seed)
        w = generator.integers(0, 4, size=7)
        w[0] += 1
        x = generator.normal(size=(7, 5))
        expected = np.median(np.repeat(x, w, axis=0), axis=0)
        np.testing.assert_allclose(
            coordinate_median(torch.from_numpy(x), torch.from_numpy(w)), expected, rtol=1e-15
        )


def test_flower_computes_the_same_median_and_trimmed_mean() -> None:
    aggregate = pytest.importorskip("flwr.server.strategy.aggregate")
    for n in (5, 10):
        x = random(n, 6, 2)
        results = [([row], 1) for row in x]
        values = torch.from_numpy(x)
        (median,) = aggregate.aggregate_median(results)
        np.testing.assert_allclose(coordinate_median(values, ones(n)), median, rtol=1e-15)
        (trimmed,) = aggregate.aggregate_trimmed_avg(results, 0.2)
        np.testing.assert_allclose(trimmed_mean(values, ones(n), n // 5), trimmed, rtol=1e-12)


def test_the_trimmed_mean_is_the_weighted_mean_of_those_that_stay() -> None:
    x, w = random(7, 3), np.arange(1.0, 8)
    actual = trimmed_mean(torch.from_numpy(x), torch.from_numpy(w), 2)
    for j in range(3):
        stay = np.argsort(x[:, j])[2:5]
        assert actual[j].item() == pytest.approx(np.average(x[stay, j], weights=w[stay]))
    np.testing.assert_allclose(
        trimmed_mean(torch.from_numpy(x), torch.from_numpy(w), 0), np.average(x, axis=0, weights=w)
    )


@pytest.mark.parametrize("rule", ["median", "trimmed_mean"])
def test_coordinate_rules_withstand_f_far_values_and_not_one_more(rule: str) -> None:
    # four of nine for the median, three (a share of 0.3) for the trimmed mean
    most = {"median": 4, "trimmed_mean": 3}[rule]
    for f, sign in ((most, 1), (most, -1), (most + 1, 1)):
        x = random(9, 50).astype(np.float32)
        x[:f] = sign * FAR
        z = robust_mean([torch.from_numpy(row) for row in x], [1.0] * 9, rule, 0.3).numpy()
        inside = (z >= x[f:].min(0)) & (z <= x[f:].max(0))
        assert inside.all() if f == most else not inside.any()


@pytest.mark.parametrize("rule", ["median", "trimmed_mean"])
def test_one_heavy_client_cannot_move_a_trimmed_mean_but_half_of_the_weight_moves_the_median(
    rule: str,
) -> None:
    trees = [torch.tensor([float(v)]) for v in (FAR, 1, 2, 3, 4)]
    actual = robust_mean(trees, [100.0, 1, 1, 1, 1], rule, 0.2).item()
    assert (actual <= 4) == (rule == "trimmed_mean")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_order_of_clients_does_not_matter(dtype: torch.dtype) -> None:
    x = torch.from_numpy(random(8, 40)).to(dtype)
    # ties, at the border of what is dropped, too
    x[:, ::2] = x[:, ::2].round()
    w = torch.arange(1.0, 9)
    for seed in range(5):
        p = torch.randperm(8, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(coordinate_median(x[p], w[p]), coordinate_median(x, w))
        torch.testing.assert_close(trimmed_mean(x[p], w[p], 2), trimmed_mean(x, w, 2))
        gram = x.double() @ x.double().T
        again = gram[p][:, p]
        torch.testing.assert_close(krum_weights(again, 2, 6), krum_weights(gram, 2, 6)[p])
        torch.testing.assert_close(
            geometric_median_weights(again, w[p]), geometric_median_weights(gram, w)[p]
        )
    assert coordinate_median(x, w).dtype == trimmed_mean(x, w, 2).dtype == dtype


def test_equal_values_stay_bit_for_bit() -> None:
    x = torch.rand(50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values, w = x.expand(7, -1), torch.rand(7, generator=torch.Generator().manual_seed(1))
    assert torch.equal(coordinate_median(values, w), x)
    assert torch.equal(trimmed_mean(values, w, 2), x)


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        (torch.ones(4), "need 5 finite weights"),
        (torch.zeros(5), "not all 0"),
        (torch.tensor([1, 1, 1, 1, -1.0]), "at least 0"),
        (torch.tensor([1, 1, 1, 1, float("nan")]), "finite"),
    ],
)
def test_wrong_weights_are_refused(weights: Tensor, says: str) -> None:
    for call in (
        lambda: coordinate_median(torch.ones(5, 2), weights),
        lambda: trimmed_mean(torch.ones(5, 2), weights, 1),
        lambda: geometric_median_weights(torch.eye(5), weights),
    ):
        with pytest.raises(TaskError, match=says):
            call()


def test_a_trimmed_mean_needs_more_values_than_it_drops() -> None:
    for trim in (3, -1):
        with pytest.raises(TaskError, match="at least"):
            trimmed_mean(torch.ones(6, 2), torch.ones(6), trim)
    with pytest.raises(TaskError, match="weights above 0"):
        trimmed_mean(torch.ones(3, 2), torch.tensor([1.0, 0, 1]), 1)


# trees


def pairs(n: int, d: int, k: int, r: int) -> list[Pair]:
    b, a = random(n, d, r, seed=1), random(n, r, k, seed=2)
    return [Pair(torch.from_numpy(x).float(), torch.from_numpy(y).float()) for x, y in zip(b, a, strict=True)]


def best(w: np.ndarray, rank: int) -> np.ndarray:
    u, s, vt = np.linalg.svd(w)
    return (u[:, :rank] * s[:rank]) @ vt[:rank]


@pytest.mark.parametrize("rule", ["median", "trimmed_mean"])
@pytest.mark.parametrize("block", [1, 100, 2**21])
def test_factors_are_reduced_by_their_products(
    rule: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(robust, "MAX_BLOCK_ENTRIES", block)
    given = pairs(7, 12, 9, 3)
    actual = robust_mean(given, [1.0] * 7, rule, 0.2)
    products = np.stack([p.b.numpy().astype(float) @ p.a.numpy().astype(float) for p in given])
    whole = np.median(products, axis=0) if rule == "median" else np.sort(products, axis=0)[2:5].mean(0)
    assert (actual.b.shape, actual.a.shape) == ((12, 3), (3, 9))
    assert (actual.b.dtype, actual.a.dtype) == (torch.float32, torch.float32)
    np.testing.assert_allclose(actual.dense(), best(whole, 3), atol=1e-5)
    # balanced: both Grams hold the singular values
    np.testing.assert_allclose(actual.b.T @ actual.b, actual.a @ actual.a.T, atol=1e-5)
    factors = np.median([p.b.numpy() for p in given], 0) @ np.median([p.a.numpy() for p in given], 0)
    assert np.linalg.norm(actual.dense().numpy() - factors) > 0.1 * np.linalg.norm(factors)


def test_the_same_product_in_other_factors_counts_as_the_same() -> None:
    one, *_ = pairs(1, 6, 5, 2)
    turn = torch.tensor([[2.0, 1.0], [0.0, 0.5]])
    given = [one, Pair(one.b @ turn, torch.linalg.inv(turn) @ one.a), Pair(-one.b, -one.a)]
    actual = robust_mean(given, [1.0] * 3, "median", 0.3)
    torch.testing.assert_close(actual.dense(), one.dense())


def test_rows_of_a_that_the_product_leaves_open_can_still_be_trained() -> None:
    given = [Pair(torch.zeros(4, 2), p.a) for p in pairs(5, 4, 6, 2)]
    actual = robust_mean(given, [1.0] * 5, "median", 0.2)
    assert not actual.b.any()
    torch.testing.assert_close(actual.a, torch.stack([p.a for p in given]).median(0).values)
    # rank 1 in factors of rank 3, more than the layer can have
    narrow = Pair(torch.eye(2, 3), torch.tensor([[1.0, 2], [0, 0], [5, 6]]))
    actual = robust_mean([narrow] * 3, [1.0] * 3, "trimmed_mean", 0.2)
    torch.testing.assert_close(actual.dense(), narrow.dense())
    torch.testing.assert_close(actual.a[1:], narrow.a[1:])
    assert not actual.b[:, 1:].any()


def test_trees_are_reduced_leaf_by_leaf_and_an_empty_factor_leaves_the_other_alone() -> None:
    def message(i: int) -> Message:
        shared = Pair(torch.full((3, 2), float(i)), torch.zeros(0, 1))
        only_a = Pair(torch.zeros(1, 0), torch.full((2, 3), 2.0 * i))
        rest = (torch.tensor(float(i)), [torch.zeros(0, 4), torch.full((2, 2), -1.0 * i)])
        return Message({"b": shared, "a": only_a}, "same", rest)

    actual = robust_mean([message(i) for i in (0, 1, 7)], [1.0] * 3, "median", 0.2)
    assert torch.equal(actual.factors["b"].b, torch.ones(3, 2))
    assert actual.factors["b"].a.shape == (0, 1)
    assert torch.equal(actual.factors["a"].a, torch.full((2, 3), 2.0))
    assert actual.note == "same"
    assert actual.rest[0].item() == 1
    assert actual.rest[0].shape == ()
    assert actual.rest[1][0].shape == (0, 4)
    assert torch.equal(actual.rest[1][1], -torch.ones(2, 2))


def test_trees_without_weight_are_no_replies() -> None:
    trees = [{"w": torch.tensor([float(v)])} for v in (1, 2, 3, 50, 60)]
    actual = robust_mean(trees, [1, 1, 1, 0, 0], "median", 0.2)
    assert actual["w"].item() == 2
    # of three replies one is dropped at each end; it would be two of five
    assert robust_mean(trees, [1, 1, 1, 0, 0], "trimmed_mean", 0.3)["w"].item() == 2
    # two replies leave none to drop
    assert robust_mean(trees, [1, 1, 0, 0, 0], "trimmed_mean", 0.2)["w"].item() == 1.5


@pytest.mark.parametrize(
    ("trees", "weights", "says"),
    [
        ([torch.ones(2), torch.ones(3)], [1, 1], r"\[2\] and torch.float32 \[3\]"),
        ([torch.ones(2), torch.ones(2).double()], [1, 1], "float64"),
        ([{"n": torch.ones(2, dtype=torch.int64)}], [1], "at /n there are torch.int64"),
        ([torch.ones(2, dtype=torch.bool)], [1], "floating-point"),
        ([{"a": torch.ones(2)}, {"b": torch.ones(2)}], [1, 1], "differ"),
        ([[torch.ones(2), 1], [torch.ones(2), 2]], [1, 1], "differ at /1"),
        ([torch.ones(2)], [0], "above 0"),
        ([], [], "above 0"),
        ([torch.ones(2)], [-1], "at least 0"),
        ([torch.ones(2)], [float("inf")], "finite"),
    ],
)
def test_trees_that_cannot_be_reduced_are_refused(trees: list[Any], weights: list[float], says: str) -> None:
    with pytest.raises(TreeError, match=says):
        robust_mean(trees, weights, "median", 0.2)


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'median'"):
        robust_mean([torch.ones(2)], [1], "medain", 0.2)
    with pytest.raises(ConfigError, match="Known: 'median', 'trimmed_mean'"):
        RobustAggregator([1], "krum", 0.2)


# the aggregator


def contribution(client: int) -> dict[str, Any]:
    x = torch.full((2,), float(client))
    return {
        "model": Mean({"w": x}, 2.0),
        "clusters": [Mean(x, float(client < 4)), Mean(x, 0.0)],
        "sum": Sum(x),
        "factors": Sum(Pair(x.reshape(2, 1), torch.ones(1, 3))),
    }


def test_the_aggregator_reduces_means_and_sums_in_any_order_of_arrival() -> None:
    totals = []
    for order in ([1, 2, 3, 4, 100, 5], [5, 100, 4, 3, 2, 1]):
        aggregator = RobustAggregator([1, 2, 3, 4, 100, 5], "median", 0.2)
        for client in order:
            if client == 5:
                aggregator.skip(client)
            else:
                aggregator.add(client, contribution(client))
        totals.append(aggregator.finish())
        assert aggregator.contributed == [1, 2, 3, 4, 100]
    for total in totals:
        assert total["model"]["w"].tolist() == [3, 3]
        assert total["clusters"][0].tolist() == [2, 2]
        assert total["clusters"][1] is None
        assert total["sum"].tolist() == [15, 15]
        # five times the product, not both factors times five
        torch.testing.assert_close(total["factors"].dense(), torch.full((2, 3), 15.0))


def test_counts_are_added_whatever_their_type() -> None:
    aggregator = RobustAggregator([0, 1, 2], "median", 0.2)
    for client in range(3):
        votes = torch.tensor([True, client == 0])
        aggregator.add(client, {"n": Sum(torch.tensor([100]), counts=True), "votes": Sum(votes, counts=True)})
    total = aggregator.finish()
    assert (total["n"].tolist(), total["votes"].tolist()) == ([300], [3, 1])


def test_the_weights_of_means_count() -> None:
    aggregator = RobustAggregator([0, 1, 2], "median", 0.2)
    for client, weight in enumerate((1.0, 1.0, 5.0)):
        aggregator.add(client, Mean(torch.tensor([float(client)]), weight))
    assert aggregator.finish().item() == 2


def test_the_aggregator_refuses_single_replies_and_says_what_works() -> None:
    aggregator = RobustAggregator([0], "median", 0.2)
    with pytest.raises(TaskError, match="'norm_bound', 'krum' or 'multi_krum'"):
        aggregator.add(0, {"x": Each(torch.ones(1))})


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"a": Mean(torch.full((1,), FAR)), "b": Mean(torch.ones(3))}, r"\[2\] and"),
        ({"a": Mean(torch.full((1,), FAR)), "b": Mean(torch.ones(2), -1.0)}, "at least 0"),
        ({"a": Mean(torch.full((1,), FAR)), "b": Mean(torch.ones(2, dtype=torch.int64))}, "int64"),
        ({"a": Mean(torch.full((1,), FAR)), "b": Sum(torch.ones(2))}, "has the form"),
    ],
)
def test_a_refused_contribution_leaves_no_half_behind(wrong: Any, says: str) -> None:
    aggregator = RobustAggregator([0, 1, 2], "median", 0.2)
    aggregator.add(0, {"a": Mean(torch.zeros(1)), "b": Mean(torch.zeros(2))})
    with pytest.raises(TreeError, match=says):
        aggregator.add(1, wrong)
    aggregator.add(2, {"a": Mean(torch.full((1,), 2.0)), "b": Mean(torch.zeros(2))})
    total = aggregator.finish()
    assert aggregator.contributed == [0, 2]
    assert total["a"].tolist() == [1]


def test_nobody_gives_nothing_and_a_round_must_be_over() -> None:
    aggregator = RobustAggregator([3, 4], "trimmed_mean", 0.2)
    aggregator.skip(3)
    with pytest.raises(ValueError, match=r"clients \[4\]"):
        aggregator.finish()
    aggregator.skip(4)
    assert aggregator.finish() is None


def test_the_adaptors_of_a_mixture_are_reduced_by_their_products() -> None:
    rng = np.random.default_rng(0)
    trees = [
        {
            "a": Pairs(
                torch.from_numpy(rng.normal(size=(2, 6, 2))), torch.from_numpy(rng.normal(size=(2, 4, 2)))
            )
        }
        for _ in range(5)
    ]
    actual = robust_mean(trees, [1.0] * 5, "median", 0.2)["a"]
    products = np.median(np.stack([t["a"].dense().numpy() for t in trees]), 0)
    for c in range(2):
        u, s, vt = np.linalg.svd(products[c])
        assert np.allclose(actual.dense()[c].numpy(), (u[:, :2] * s[:2]) @ vt[:2], atol=1e-8)
