"""A share of a count is rounded as the share was written, against whole-number arithmetic of percents."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import nn

from fedlowrank import Federation
from fedlowrank.core.arguments.shares import multiply_share, round_half_up
from fedlowrank.core.contract import Pass
from fedlowrank.core.key import Key
from fedlowrank.data.clients import subsample_training
from fedlowrank.data.text.text_records import hold_out
from fedlowrank.methods.fedspa import next_mask
from fedlowrank.rounds.participation.participants import Participants, count_participants
from fedlowrank.rounds.run_settings import RunSettings
from fedlowrank.trust.attacks import hostile_clients
from fedlowrank.trust.robust import hostile_count

torch.set_num_threads(1)

KEY = Key((0, "shares"))


def round_down(percent: int, n: int) -> int:
    return percent * n // 100


def round_up(percent: int, n: int) -> int:
    return -(-percent * n // 100)


def round_half(percent: int, n: int) -> int:
    return (percent * n + 50) // 100


def round_half_even(percent: int, n: int) -> int:
    whole, rest = divmod(percent * n, 100)
    return whole + (rest > 50 or (rest == 50 and whole % 2 == 1))


def split_off(part: str) -> Callable[[float, int], int]:
    """Sizes of a part of a client's examples, divided by shares."""

    def size(share: float, n: int) -> int:
        shares = {"val": 0.0, "test": 0.0, part: share}
        federation = Federation.from_arrays(
            [(torch.zeros(n, 2), torch.arange(n) % 2)], nn.Linear(2, 2), classes=2, **shares
        )
        return len(getattr(federation.clients[0], part))

    return size


def subsample(share: float, n: int) -> int:
    federation = Federation.from_arrays(
        [(torch.zeros(n, 2), torch.arange(n) % 2)], nn.Linear(2, 2), val=0.0, test=0.0, classes=2
    )
    return len(subsample_training([*federation.clients], share, 1, KEY)[0].train)


def exchange(share: float, n: int) -> int:
    """Entries of a mask that its growth replaces."""
    mask = torch.cat([torch.ones(n), torch.zeros(n)]).bool()
    return int((mask & ~next_mask(mask, torch.arange(2.0 * n), torch.arange(2.0 * n), share)).sum())


COUNTS: dict[str, tuple[Callable[[float, int], int], Callable[[int, int], int], list[tuple[int, int]]]] = {
    "examples of a pass": (lambda s, n: Pass(1, 8, share=s).examples_of(n), round_down, [(70, 90), (57, 100), (29, 100)]),
    "participants": (count_participants, round_half, [(35, 90), (10, 25), (35, 30)]),
    "unseen clients": (
        lambda s, n: len(Participants(n, RunSettings(unseen=s), KEY).unseen), round_half, [(35, 90), (10, 25), (58, 75)]),
    "hostile replies": (hostile_count, round_up, [(7, 100), (14, 50), (20, 11)]),
    "hostile clients": (lambda s, n: len(hostile_clients(range(n), s, KEY)), round_half_even, [(35, 90), (57, 50), (50, 5)]),
    "validation examples": (split_off("val"), round_half_even, [(35, 90), (57, 50)]),
    "test examples": (split_off("test"), round_half_even, [(35, 90), (57, 50)]),
    "test records": (lambda s, n: len(hold_out([*range(n)], s, KEY)[1] or ()), round_half_even, [(35, 90), (57, 50)]),
    "subsampled examples": (subsample, round_half_even, [(35, 90), (57, 50)]),
    "exchanged weights": (exchange, round_up, [(7, 100), (14, 50)]),
}  # fmt: skip


@pytest.mark.parametrize("kind", COUNTS)
def test_a_count_is_that_of_the_written_share(kind: str) -> None:
    actual, expected, cases = COUNTS[kind]
    for percent, n in cases:
        assert actual(percent / 100, n) == expected(percent, n), (kind, percent, n)


def test_products_of_percents_are_exact() -> None:
    for percent in range(101):
        for n in range(0, 300, 7):
            product = multiply_share(percent / 100, n)
            assert product == Fraction(percent * n, 100)
            assert math.floor(product) == round_down(percent, n)
            assert round_half_up(product) == round_half(percent, n)
            assert round(product) == round_half_even(percent, n)


@pytest.mark.parametrize(
    ("share", "count", "expected"),
    [
        (1 / 3, 90, 30),
        (2 / 3, 9, 6),
        (5 / 6, 6, 5),
        (np.float32(0.7), 90, 63),
        (np.float64(0.7), 90, 63),
        (1, 7, 7),
        (0.1234567, 10**7, 1234567),
        (1e-9, 10**9, 1),
        (0.0, 5, 0),
    ],
)
def test_shares_may_be_computed_and_of_numpy(share: float, count: int, expected: int) -> None:
    assert multiply_share(share, count) == expected
