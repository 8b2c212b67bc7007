"""A client's tuple of parts in every documented form, beside pairs (x, y) that look alike."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedlowrank import Federation
from fedlowrank.core.errors import DataError

X = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32)
Y = np.arange(12) % 3
WORDS = [["cat", "ant", "bee"][k] for k in Y]
ROWS, LABELS = X.tolist(), Y.tolist()
TWO_ROWS = ROWS[:2]


@pytest.mark.parametrize("outer", [tuple, list])
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize(
    "take",
    [
        lambda rows: (X[rows], LABELS[rows]),
        lambda rows: (torch.from_numpy(X[rows]), tuple(LABELS[rows])),
        lambda rows: (ROWS[rows], LABELS[rows]),
        lambda rows: (ROWS[rows], Y[rows]),
        lambda rows: (list(X[rows]), LABELS[rows]),
        lambda rows: {"image": X[rows], "label": Y[rows]},
        lambda rows: {"image": ROWS[rows], "label": LABELS[rows]},
    ],
    ids=["labels", "tensor", "both", "inputs", "arrays in a list", "dict", "dict of lists"],
)
def test_parts_of_lists_and_dicts(take: Any, count: int, outer: Any) -> None:
    slices = [slice(0, 6), slice(6, 9), slice(9, 12)] if count == 3 else [slice(0, 6), slice(9, 12)]
    actual = Federation.from_arrays([outer(map(take, slices))] * 2, nn.Linear(4, 3))
    for client in actual.clients:
        assert len(client.val) == (3 if count == 3 else 0)
        parts = [client.train, client.val, client.test] if count == 3 else [client.train, client.test]
        for part, rows in zip(parts, slices, strict=True):
            np.testing.assert_array_equal(part.x, X[rows])  # type: ignore[arg-type]
            np.testing.assert_array_equal(part.y, Y[rows])


class Named(nn.Linear):
    def forward(self, a: Tensor) -> Tensor:
        return super().forward(a)


class SingleNumber(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:, None])


def test_parts_of_other_forms() -> None:
    words = Federation.from_arrays([((X, WORDS), (X[:2], WORDS[:2]))], nn.Linear(4, 3)).clients[0]
    assert words.test.y.tolist() == [2, 0]
    data = [(({"a": X}, LABELS), ({"a": ROWS[:2]}, LABELS[:2]))]
    named = Federation.from_arrays(data, lambda: Named(4, 3)).clients[0]
    assert isinstance(named.test.x, dict)
    np.testing.assert_array_equal(named.test.x["a"], X[:2])
    # inputs [n] and labels [n] have the form of two rows, but rows mix no numbers with text or booleans
    numbers = X[:, 0].tolist()
    pairs: list[tuple[Any, Any]] = [(numbers, ["a", "b"] * 6), (numbers, [False, True] * 6)]
    for inputs, labels in (*pairs, (X[:, 0], np.arange(12) % 2)):
        parts = (inputs, labels), (inputs[:2], labels[:2])
        single = Federation.from_arrays([parts], lambda: SingleNumber(1, 2)).clients[0]
        assert single.test.y.tolist() == [0, 1]
    mixed = [((X, LABELS), {"image": X[:3], "label": Y[:3]}), ({"image": X, "label": Y}, (X[:3], LABELS[:3]))]
    for client in Federation.from_arrays(mixed, nn.Linear(4, 3)).clients:
        assert client.test.y.tolist() == LABELS[:3]
    with pytest.raises(DataError, match=r"client 0 \(test\): there are 2 labels, but the input holds 12 ex"):
        Federation.from_arrays([((X, LABELS), (X, LABELS[:2]))], nn.Linear(4, 3))


@pytest.mark.parametrize(
    ("x", "y"),
    [
        (TWO_ROWS, [0, 1]),
        (TWO_ROWS, (0, 1)),
        (tuple(TWO_ROWS), (0, 1)),
        (TWO_ROWS, (torch.tensor(0), torch.tensor(1))),
        (tuple(TWO_ROWS), (torch.tensor(0), torch.tensor(1))),
        (TWO_ROWS, ["ant", "bee"]),
        (tuple(TWO_ROWS), ("ant", "bee")),
        (TWO_ROWS, [[0, 1], [1, 0]]),
        (tuple(TWO_ROWS), [[0, 1], [1, 0]]),
        (TWO_ROWS, ((0, 1), (1, 0))),
        ([X[0], X[1]], [np.array([0, 1]), np.array([1, 0])]),
        (X[:2], ((0, 1), (1, 0))),
        ((X[0], X[1]), torch.eye(2)),
    ],
)
def test_pairs_of_two_examples_stay_pairs(x: Any, y: Any) -> None:
    has_rows = len(np.shape(y)) == 2
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "1 of 1 client has no test part")
        actual = Federation.from_arrays(
            [(x, y)], nn.Linear(4, 2), loss="bce" if has_rows else "auto", test=0, val=0
        ).clients[0]
    assert [len(actual.train), len(actual.val), len(actual.test)] == [2, 0, 0]
    order = np.argsort(actual.train.x[:, 0].numpy())  # type: ignore[index]
    np.testing.assert_array_equal(actual.train.x[order], X[np.argsort(X[:2, 0])])  # type: ignore[index]
    truth = np.asarray(y) if has_rows else np.array([0, 1])
    np.testing.assert_array_equal(actual.train.y[order], truth[np.argsort(X[:2, 0])])


@pytest.mark.parametrize(
    "client",
    [
        (tuple(map(tuple, TWO_ROWS)), ((0, 1), (1, 0))),
        (([1.0, 2.0, 3.0], [0, 1, 0]), ([4.0, 5.0], [1, 0])),
        ({"a": X[:2], "label": Y[:2]}, ((0, 1), (1, 0))),
    ],
)
def test_what_can_be_parts_and_a_pair_is_refused(client: Any) -> None:
    says = r"client 1 \(south\): its data can be the parts .* or one pair .*\{\"train\": \.\.\., \"test\": \.\.\.\}"
    with pytest.raises(DataError, match=says):
        Federation.from_arrays({"north": (X, Y), "south": client}, nn.Linear(4, 3))
