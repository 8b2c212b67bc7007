"""The partition by ranks: exact sums, and mixtures with the moments of the Dirichlet distribution."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedlowrank.core.errors import ConfigError, DataError
from fedlowrank.core.key import Key
from fedlowrank.data.partitioning.rank_skew import RankSkew, assign_ranks
from tests.data.made_datasets import balanced

KEY = Key((0, "test"))


@pytest.mark.full
@given(
    ranks=st.lists(st.integers(1, 64), min_size=1, max_size=6),
    times=st.integers(1, 4),
    classes=st.integers(1, 9),
    n=st.integers(24, 600),
    alpha=st.sampled_from([1e-3, 0.05, 0.3, 5.0]),
    exponent=st.sampled_from([0.0, 0.5, 1.0]),
    skew=st.sampled_from([0.0, 1.0, 3.0]),
    seed=st.integers(0, 2**20),
)
def test_all_examples_are_shared_out_once_and_sizes_follow_ranks(
    ranks: list[int], times: int, classes: int, n: int, alpha: float, exponent: float, skew: float, seed: int
) -> None:
    # some classes may be empty, and the last one nearly all
    labels = np.minimum(np.random.default_rng(seed).integers(0, 2 * classes, n), classes - 1)
    clients = times * len(ranks)
    held = np.repeat(ranks, times)
    share = held**exponent / (held**exponent).sum() * n
    partition = RankSkew(clients, tuple(ranks), alpha, exponent, skew)
    if share.min() < 1:
        return
    parts = partition.assign(labels, classes, Key((seed,)))
    assert sorted(np.concatenate(parts).tolist()) == list(range(n))
    sizes = np.array([len(p) for p in parts])
    assert (np.abs(sizes - share) < 1).all()
    order = np.argsort(held, kind="stable")
    # with exponent 0 sizes are equal, up to the rounding
    if exponent > 0:
        assert (np.diff(sizes[order])[np.diff(held[order]) > 0] >= 0).all()
    assert all((np.diff(p) > 0).all() for p in parts)


def test_sums_are_exact_with_many_examples_too() -> None:
    # the fit ends at a relative error, which here is many examples
    labels = balanced(4, 100_000)
    parts = RankSkew(6, (8, 4), alpha=0.3).assign(labels, 4, KEY)
    assert np.bincount(np.concatenate(parts), minlength=400_000).tolist() == [1] * 400_000
    expected = 400_000 * np.repeat([8, 4], 3) / 36
    assert (np.abs([len(p) for p in parts] - expected) < 1).all()


def test_which_examples_of_a_class_a_client_gets_is_random() -> None:
    labels = balanced(8, 300)
    parts = RankSkew().assign(labels, 8, KEY)
    for c in range(8):
        of_class = np.flatnonzero(labels == c)
        for places in (np.searchsorted(of_class, p[labels[p] == c]) for p in parts):
            # nobody has five or more in a row
            assert len(places) < 5 or np.ptp(places) >= len(places)


@pytest.mark.full
def test_mixtures_have_the_second_moment_of_their_dirichlet_distribution() -> None:
    classes = 8
    # E Σ q_c² = (a + 1) / (C·a + 1) for the symmetric Dir(a) of C classes; many examples, so that rounding is small
    labels = balanced(classes, 60_000 // classes)
    ranks = (32, 16, 8, 8)
    actual: dict[int, list[float]] = {}
    for seed in range(6):
        parts = RankSkew(200, ranks).assign(labels, classes, Key((seed,)))
        for rank, part in zip(assign_ranks(ranks, 200), parts, strict=True):
            mixture = np.bincount(labels[part], minlength=classes) / len(part)
            actual.setdefault(rank, []).append(float((mixture**2).sum()))
    for rank, values in actual.items():
        a = 0.3 * 16 / rank
        expected = (a + 1) / (classes * a + 1)
        # the fit to the class totals changes mixtures a little
        assert np.mean(values) == pytest.approx(expected, abs=0.025), rank


def test_ranks_are_stretched_evenly() -> None:
    assert assign_ranks((4, 2), 6) == [4, 4, 4, 2, 2, 2]
    assert assign_ranks((4, 3, 2), 5) == [4, 4, 3, 3, 2]
    paper = assign_ranks(RankSkew().ranks, 100)
    assert sum(paper) / 100 == 16
    assert [paper.count(r) for r in (32, 24, 20, 16, 12, 8)] == [10, 10, 10, 20, 30, 20]


def test_settings_and_data_that_do_not_fit_are_refused() -> None:
    for wrong, message in [
        ({"clients": 0}, "clients"),
        ({"alpha": 0.0}, "alpha"),
        ({"min_size": 0}, "min_size"),
        ({"size_exponent": -1.0}, "size_exponent"),
        ({"skew": float("inf")}, "skew"),
        ({"ranks": ()}, "at least one rank"),
        ({"ranks": (4, 0)}, r"^partition\.ranks, value 1 must be a whole number of at least 1; it is 0$"),
        ({"clients": 3, "ranks": (1, 2, 3, 4)}, "4 ranks for 3 clients"),
    ]:
        with pytest.raises(ConfigError, match=message):
            RankSkew(**wrong)
    with pytest.raises(DataError, match=r"clients of rank 1 0 each, less than partition\.min_size = 1"):
        RankSkew(2, (64, 1)).assign(balanced(2, 10), 2, KEY)
    with pytest.raises(DataError, match=r"min_size = 6"):
        RankSkew(4, (8, 8), min_size=6).assign(balanced(2, 10), 2, KEY)
    with pytest.raises(DataError, match="regression"):
        RankSkew(2, (1,)).assign(np.zeros((5, 1)), 0, KEY)
