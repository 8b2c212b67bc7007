"""Each partition gives the shares that its definition says, with every example at most once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedlowrank.core.errors import ConfigError, DataError
from fedlowrank.core.key import Key
from fedlowrank.data.partitioning.apportion import round_shares
from fedlowrank.data.partitioning.extended_dirichlet import ExtendedDirichlet
from fedlowrank.data.partitioning.partition import (
    PARTITIONS,
    Dirichlet,
    EqualDirichlet,
    Iid,
    LabelGroups,
    Natural,
    Pathological,
)
from fedlowrank.data.partitioning.rank_skew import RankSkew
from tests.data.made_datasets import balanced

KEY = Key((0, "test"))
LABELS = np.random.default_rng(0).integers(0, 10, 2000)

seeds = st.integers(0, 2**20)


def assert_disjoint(parts, n, cover):
    joined = np.concatenate(parts)
    assert len(np.unique(joined)) == len(joined)
    assert set(joined.tolist()) <= set(range(n))
    assert len(joined) == n or not cover
    assert all((np.diff(part) > 0).all() for part in parts)


ALL = {
    "rank_skew": RankSkew(7, (8, 4)),
    "iid": Iid(7),
    "dirichlet": Dirichlet(7, 0.5),
    "equal_dirichlet": EqualDirichlet(7, 0.5),
    "pathological": Pathological(7, 3),
    "natural": Natural(7),
    "label_groups": LabelGroups(5, 7),
    "extended_dirichlet": ExtendedDirichlet(7, 3, 0.5),
}


@pytest.mark.parametrize("name", sorted(PARTITIONS))
def test_equal_keys_give_equal_clients_and_others_do_not(name):
    natural = LABELS * 3 + np.arange(len(LABELS)) % 3
    first, again, other = (
        ALL[name].assign(LABELS, 10, key, natural) for key in (KEY, Key((0, "test")), Key((1,)))
    )
    assert len(first) == 7
    assert [p.tolist() for p in first] == [p.tolist() for p in again]
    assert [p.tolist() for p in first] != [p.tolist() for p in other]
    assert_disjoint(first, len(LABELS), cover=name not in ("equal_dirichlet", "natural"))


@pytest.mark.full
@given(st.integers(1, 30), st.integers(30, 200), seeds)
def test_iid_covers_with_sizes_that_differ_by_one(clients, n, seed):
    parts = Iid(clients).assign(np.zeros(n, dtype=np.int64), 1, Key((seed,)))
    assert_disjoint(parts, n, cover=True)
    assert np.ptp([len(p) for p in parts]) <= 1


@pytest.mark.full
@given(st.integers(1, 5), st.floats(0.3, 2), st.integers(1, 180), seeds)
def test_dirichlet_covers_and_respects_the_smallest_size(clients, alpha, min_size, seed):
    parts = Dirichlet(clients, alpha, min_size, max_redraws=2000).assign(LABELS, 10, Key((seed,)))
    assert_disjoint(parts, len(LABELS), cover=True)
    assert min(len(p) for p in parts) >= min_size


@given(st.integers(1, 30), st.floats(0.001, 100), st.integers(2, 12), seeds)
def test_equal_dirichlet_gives_every_client_the_same_number(clients, alpha, classes, seed):
    labels = np.random.default_rng(seed).integers(0, classes, 301)
    parts = EqualDirichlet(clients, alpha).assign(labels, classes, Key((seed,)))
    assert [len(p) for p in parts] == [301 // clients] * clients
    assert_disjoint(parts, 301, cover=301 % clients == 0)


@pytest.mark.full
@given(st.data(), st.integers(1, 12), st.integers(1, 25), seeds)
def test_pathological_gives_k_classes_and_spreads_owners_evenly(data, classes, clients, seed):
    k = data.draw(st.integers(1, classes))
    labels = balanced(classes, 100)
    parts = Pathological(clients, k).assign(labels, classes, Key((seed,)))
    assert_disjoint(parts, len(labels), cover=False)
    counts = np.array([np.bincount(labels[p], minlength=classes) for p in parts])
    assert (np.count_nonzero(counts, axis=1) == k).all()
    owners = np.count_nonzero(counts, axis=0)
    assert owners.max() - owners.min() <= 1
    for c in range(classes):
        mine = counts[counts[:, c] > 0, c]
        # All examples of a class that has an owner, none of one that has not.
        assert mine.sum() == (100 if len(mine) else 0)
        if len(mine) > 1:
            # Weights between 0.4 and 0.6; a whole number is less than 1 away from its exact share.
            assert (mine.max() - 1) / (mine.min() + 1) < 0.6 / 0.4


@pytest.mark.full
@given(st.data(), st.integers(1, 10), st.integers(1, 20), st.floats(0.5, 20), seeds)
def test_extended_dirichlet_gives_clients_k_classes_and_every_class_away(data, classes, clients, alpha, seed):
    k = data.draw(st.integers(-(-classes // clients), classes)) if clients >= 1 else 1
    labels = balanced(classes, 300)
    rule = ExtendedDirichlet(clients, k, alpha, min_size=1, max_redraws=20_000)
    parts = rule.assign(labels, classes, Key((seed,)))
    assert_disjoint(parts, len(labels), cover=True)
    assert min(map(len, parts)) >= 1
    assert max(len(np.unique(labels[p])) for p in parts) <= k


@pytest.mark.full
def test_extended_dirichlet_has_the_moments_of_the_paper():
    # each client draws its classes by itself: k of 4; with all 4, a client's share of a class is Beta(α, (K-1)α)
    labels = balanced(4, 600)
    alpha, clients = 2.0, 3
    shares, sets = [], []
    for seed in range(150):
        parts = ExtendedDirichlet(clients, 4, alpha, 1).assign(labels, 4, Key((seed,)))
        shares += [np.bincount(labels[p], minlength=4) / 600 for p in parts]
        few = ExtendedDirichlet(8, 2, 1e4, 1).assign(labels, 4, Key((seed,)))
        sets += [tuple(np.unique(labels[p])) for p in few]
        # a large α divides a class equally among its clients
        owners = np.bincount([c for s in sets[-8:] for c in s], minlength=4)
        for p, s in zip(few, sets[-8:], strict=True):
            counts = np.bincount(labels[p], minlength=4)
            assert all(abs(counts[c] - 600 / owners[c]) < 0.1 * 600 for c in s)
    expected = (1 / clients) * (1 - 1 / clients) / (clients * alpha + 1)
    assert np.mean(shares) == pytest.approx(1 / clients)
    assert np.var(shares) == pytest.approx(expected, rel=0.1)
    pairs, times = np.unique(sets, axis=0, return_counts=True)
    assert len(pairs) == 6
    # multinomial: 1,200 draws of 6 pairs, 200 each
    assert np.abs(times - 200).max() < 4 * np.sqrt(200 * 5 / 6)


def test_extended_dirichlet_says_what_does_not_fit():
    with pytest.raises(DataError, match="classes_per_client is 5, but only 4 classes"):
        ExtendedDirichlet(5, 5).assign(balanced(4, 50), 4, KEY)
    with pytest.raises(DataError, match="2 clients with 1 classes each cannot have all 4"):
        ExtendedDirichlet(2, 1).assign(balanced(4, 50), 4, KEY)
    with pytest.raises(DataError, match=r"in none of 3 draws did every class .*max_redraws"):
        ExtendedDirichlet(8, 1, max_redraws=3).assign(balanced(8, 50), 8, KEY)
    with pytest.raises(DataError, match=r"none of 2 draws of the partition .* at least 60"):
        ExtendedDirichlet(3, 2, 0.01, 60, 2).assign(balanced(4, 50), 4, KEY)


@pytest.mark.full
def test_pathological_weights_fill_their_range():
    labels = balanced(2, 2000)
    shares = []
    for seed in range(60):
        parts = Pathological(2, 2).assign(labels, 2, Key((seed,)))
        shares += [np.mean(labels[parts[0]] == c) * len(parts[0]) / 2000 for c in range(2)]
    # Of two owners with weights a, b from U(.4, .6), one has a / (a + b), between .4 and .6.
    assert 0.4 <= min(shares) < 0.44
    assert 0.56 < max(shares) <= 0.6
    assert abs(np.mean(shares) - 0.5) < 0.02


def test_pathological_shuffles_which_classes_go_together():
    pairs = set()
    for seed in range(30):
        parts = Pathological(2, 2).assign(balanced(4, 20), 4, Key((seed,)))
        pairs.add(tuple(np.unique(balanced(4, 20)[parts[0]])))
    assert len(pairs) == 6


def test_pathological_with_few_classes_or_examples():
    labels = np.array([0, 0, 2, 2, 0, 2])
    assert_disjoint(Pathological(2, 2).assign(labels, 3, KEY), 6, cover=True)
    with pytest.raises(DataError, match="only 2 classes"):
        Pathological(2, 3).assign(labels, 3, KEY)
    for seed in range(50):
        parts = Pathological(6, 3).assign(balanced(3, 6), 3, Key((seed,)))
        assert [len(p) for p in parts] == [3] * 6
    with pytest.raises(DataError, match="class 0 has 6 examples for 7 clients"):
        Pathological(7, 3).assign(balanced(3, 6), 3, KEY)


def test_natural_follows_the_ids():
    natural, labels = np.array([5, -1, 5, 9, 2, 9, 9]), np.zeros(7, dtype=np.int64)

    def parts(partition, seed=0, ids=natural):
        return [p.tolist() for p in partition.assign(labels, 1, Key((seed,)), ids)]

    assert parts(Natural()) == [[4], [0, 2], [3, 5, 6]]
    assert parts(Natural(min_examples=2)) == [[0, 2], [3, 5, 6]]
    assert {len(parts(Natural(1), seed)[0]) for seed in range(30)} == {1, 2, 3}
    with pytest.raises(DataError, match=r"3 natural clients .* 4 are required"):
        parts(Natural(4))
    with pytest.raises(DataError, match=r"no natural clients.*data\.client.*array 'client'"):
        parts(Natural(), ids=None)


@pytest.mark.full
@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 9), seeds)
def test_label_groups_share_their_own_classes_alone(groups, width, more, seed):
    clients, classes = groups + more, groups * width
    labels = np.random.default_rng(seed).integers(0, classes, 400)
    parts = LabelGroups(groups, clients).assign(labels, classes, Key((seed,)))
    assert len(parts) == clients
    assert_disjoint(parts, 400, cover=True)
    for k, part in enumerate(parts):
        first = k % groups * width
        assert set(labels[part].tolist()) <= set(range(first, first + width))
    for g in range(groups):
        sizes = [len(part) for part in parts[g::groups]]
        assert max(sizes) - min(sizes) <= 1


def test_label_groups_that_do_not_fit_are_refused():
    with pytest.raises(DataError, match="10 classes cannot be divided into 4 groups"):
        LabelGroups(4, 8).assign(LABELS, 10, KEY)
    with pytest.raises(DataError, match="the 3 clients of group 1 cannot share the 2 examples"):
        LabelGroups(2, 6).assign(np.array([0, 0, 0, 0, 1, 1]), 2, KEY)
    with pytest.raises(ConfigError, match="too few for one in each of 10 groups"):
        LabelGroups(10, 9)
    with pytest.raises(ConfigError, match="groups"):
        LabelGroups(0)


def test_only_partitions_that_ignore_labels_accept_a_regression():
    targets = np.random.default_rng(0).normal(size=(70, 3))
    natural = np.arange(70) % 7
    for name, partition in ALL.items():
        if name in ("iid", "natural"):
            parts = partition.assign(targets, 0, KEY, natural)
            assert_disjoint(parts, 70, cover=True)
            assert [len(p) for p in parts] == [10] * 7
        else:
            with pytest.raises(DataError, match=r"have none. Use partition 'iid' or 'natural'"):
                partition.assign(targets, 0, KEY, natural)


@pytest.mark.full
@pytest.mark.parametrize("alpha", [0.5, 5.0])
def test_dirichlet_shares_have_the_moments_of_the_distribution(alpha):
    # A client's share of a class is Beta(alpha, (K - 1) alpha): mean 1/K, variance (1/K)(1 - 1/K) / (K alpha + 1).
    clients, classes, per_class = 5, 20, 500
    labels, partition = balanced(classes, per_class), Dirichlet(clients, alpha, 1)
    drawn = [p for s in range(100) for p in partition.assign(labels, classes, Key((s,)))]
    shares = np.array([np.bincount(labels[p], minlength=classes) / per_class for p in drawn])
    shares = shares.reshape(100, clients, classes)
    mean, variance = 1 / clients, (1 / clients) * (1 - 1 / clients) / (clients * alpha + 1)
    draws = 100 * classes
    assert np.allclose(shares.mean((0, 2)), mean, atol=5 * (variance / draws) ** 0.5)
    assert np.allclose(shares.var((0, 2)), variance, rtol=0.2)


@pytest.mark.full
@pytest.mark.parametrize("alpha", [0.5, 5.0])
def test_equal_dirichlet_mixtures_have_the_moments_of_the_distribution(alpha):
    # The first of two clients takes its draws from a full store: it sees the distribution that the scheme defines, if
    # no class runs out; so the client is small.
    labels = np.repeat(np.arange(3), [600, 400, 200])
    size, draws = 120, 400
    first = [EqualDirichlet(10, alpha).assign(labels, 3, Key((s,)))[0] for s in range(draws)]
    shares = np.array([np.bincount(labels[p], minlength=3) for p in first])
    prior = np.array([3, 2, 1]) / 6
    spread = prior * (1 - prior) / (alpha + 1)
    variance = spread + (prior * (1 - prior) - spread) / size
    assert np.allclose((shares / size).mean(0), prior, atol=5 * (variance.max() / draws) ** 0.5)
    assert np.allclose((shares / size).var(0), variance, rtol=0.25)


@pytest.mark.parametrize("alpha", [0.01, 1e-3, 1e-5, 1e-100])
def test_equal_dirichlet_stays_skewed_where_its_mixture_underflows(alpha):
    labels, clients, classes = np.repeat(np.arange(10), 500), 10, 10
    actual, truth = [], []
    for seed in range(20):
        parts = EqualDirichlet(clients, alpha).assign(labels, classes, Key((seed,)))
        counts = np.array([np.bincount(labels[p], minlength=classes) for p in parts])
        assert (counts.sum(0) == 500).all()
        actual.append((counts > 0).sum(1).mean())
        # the documented rule with all mixtures in log space, which cannot underflow
        random, left = np.random.default_rng(seed), np.bincount(labels)
        for _ in range(clients):
            logs = np.log(random.random(classes)) / max(alpha / classes, 1e-300)
            own = np.zeros(classes, int)
            while missing := 500 - own.sum():
                remaining = np.where(left > own, logs, -np.inf)
                weights = np.exp(remaining - remaining.max())
                own = np.minimum(own + random.multinomial(missing, weights / weights.sum()), left)
            truth.append((own > 0).sum())
            left = left - own
    assert abs(np.mean(actual) - np.mean(truth)) < 0.15
    assert np.mean(actual) < 1.3


def test_errors_say_what_to_change():
    with pytest.raises(DataError, match=r"none of 5 draws .* in the best one .* Raise partition\.alpha"):
        Dirichlet(50, 0.001, 30, max_redraws=5).assign(LABELS, 10, KEY)
    with pytest.raises(DataError, match="2000 examples cannot give 100 clients 50 each"):
        Dirichlet(100, 0.5, 50).assign(LABELS, 10, KEY)
    for kind in (Iid, EqualDirichlet, Dirichlet, Pathological):
        with pytest.raises(DataError, match="5000 clients cannot share 2000 examples"):
            kind(5000).assign(LABELS, 10, KEY)
        with pytest.raises(ConfigError, match="clients"):
            kind(0)
    for alpha in (0, -1, float("nan"), float("inf")):
        for kind in (Dirichlet, EqualDirichlet):
            with pytest.raises(ConfigError, match="alpha"):
                kind(2, alpha)
    with pytest.raises(ConfigError, match="classes_per_client"):
        Pathological(2, 0)
    with pytest.raises(ConfigError, match="min_examples"):
        Natural(min_examples=0)


@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=20), st.integers(0, 1000))
def test_largest_remainder_adds_up_and_stays_near(weights, total):
    counts = round_shares(weights, total)
    assert counts.sum() == total
    assert (np.abs(counts - np.array(weights) / sum(weights) * total) < 1 + 1e-6).all()
