"""The best of several results, against exact fractions: equal means that differ by rounding are ties."""

from __future__ import annotations

import math
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fedlowrank import EarlyStopping
from fedlowrank.config.tuning import Setting, ValidationScore, choose_setting
from fedlowrank.results.ranking import exceeds, find_best
from fedlowrank.results.records import RoundRecord
from fedlowrank.rounds.outcome.result import Result
from fedlowrank.rounds.round_loop import _is_best
from tests.support.client_tables import make_client_table


def record(t: int, accuracies: list[float]) -> RoundRecord:
    return RoundRecord(t, measured=make_client_table({"accuracy": {"own": {"val": accuracies}}}))


def tied(seed: int, rounds: int = 6) -> list[RoundRecord]:
    """Rounds of which each client's correct answers are those of another client in another round."""
    g = np.random.default_rng(seed)
    right = g.integers(3, 10, size=20)
    return [record(t, [int(k) / 9 for k in g.permutation(right)]) for t in range(rounds)]


def test_rounds_with_the_same_answers_are_ties() -> None:
    runs = [tied(seed) for seed in range(40)]
    # the means of most runs differ in their last bits
    assert sum(len({r.validation() for r in records}) > 1 for records in runs) > 20
    for records in runs:
        actual: Any = SimpleNamespace(rounds=records)
        assert Result.best_round.fget(actual) == 0  # type: ignore[attr-defined]  # of a property
        assert [_is_best(records[: t + 1]) for t in range(len(records))] == [True] + [False] * 5
        stops = EarlyStopping(3)
        assert [bool(stops(r)) for r in records] == [False, False, False, True, True, True]
        settings = [
            Setting("m", {"lr": t}, scores=(ValidationScore(r.validation() or 0.0, 1, False),))
            for t, r in enumerate(records)
        ]
        chosen = choose_setting(settings)
        assert chosen is not None
        assert chosen.values == {"lr": 0}


def test_one_more_right_answer_is_better() -> None:
    # of 1,000 clients with 1,000 examples each, one answer is 1e-6
    records = [record(0, [0.5] * 1000), record(1, [0.501, *[0.5] * 999])]
    assert _is_best(records)
    stops = EarlyStopping(1)
    assert [stops(r) for r in records] == [False, False]


@pytest.mark.parametrize("lower", [False, True])
def test_the_best_is_that_of_exact_fractions(lower: bool) -> None:
    g = np.random.default_rng(1)
    for _ in range(200):
        exact = [Fraction(int(k), 7) * (-1) ** lower for k in g.integers(0, 6, size=8)]
        # sums of sevenths in another order
        noisy = [float(x) * (1 + 1e-15 * float(g.integers(-3, 4))) for x in exact]
        best = min(exact) if lower else max(exact)
        assert find_best(noisy, lower_is_better=lower) == exact.index(best)


def test_what_is_no_number_is_never_the_best() -> None:
    assert find_best([None, math.nan, -math.inf, 0.2, None, 0.3]) == 5
    assert find_best([math.nan, math.inf, 3.0], lower_is_better=True) == 2
    assert find_best([-math.inf, -math.inf]) == 0
    assert find_best([None, math.nan]) is None
    assert find_best([]) is None


def test_a_least_gain_is_to_be_exceeded_and_not_reached() -> None:
    # 0.1 + 0.2 is above 0.3 in its last bit, and -0.3 + 0.1 above -0.2 likewise
    assert 0.1 + 0.2 > 0.3
    assert not exceeds(0.1 + 0.2, 0.3)
    assert not exceeds(0.3, 0.2, margin=0.1)
    assert not exceeds(0.0, -0.1, margin=0.1)
    assert not exceeds(1e-17, -0.1, margin=0.1)
    assert exceeds(0.3 + 1e-9, 0.2, margin=0.1)
    assert exceeds(-1.0, -math.inf, margin=0.1)
