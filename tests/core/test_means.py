"""Weighted means in one pass, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedlowrank.core.contract.contribution import RunningMean, mean
from fedlowrank.core.tree import TreeError


@given(
    st.lists(st.tuples(st.integers(0, 10**6), st.floats(0, 1e6)), min_size=1, max_size=12).filter(
        lambda drawn: sum(w for _, w in drawn) > 1e-3
    )
)
def test_the_mean_of_many(drawn: list[tuple[int, float]]) -> None:
    trees = [
        torch.randn(3, 2, generator=torch.Generator().manual_seed(s), dtype=torch.float64) for s, _ in drawn
    ]
    weights = [w for _, w in drawn]
    actual = mean(iter(trees), iter(weights))
    expected = np.average(np.stack([t.numpy() for t in trees]), axis=0, weights=weights)
    np.testing.assert_allclose(actual.numpy(), expected, rtol=1e-12, atol=1e-12)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=9).filter(lambda ws: sum(ws) > 0), st.integers(0, 99))
def test_equal_trees_have_themselves_for_a_mean_bit_for_bit(weights: list[float], seed: int) -> None:
    x = torch.randn(5, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(mean([x] * len(weights), weights), x)


@given(
    st.lists(st.lists(st.floats(0, 1e6), min_size=1, max_size=5), min_size=1, max_size=4).filter(
        lambda parts: sum(map(sum, parts)) > 1e-3
    ),
    st.booleans(),
)
def test_rows_of_many_clients_are_added_at_once(parts: list[list[float]], begins_alone: bool) -> None:
    g = torch.Generator().manual_seed(len(parts))
    stacks = [torch.randn(len(ws), 3, 2, generator=g, dtype=torch.float64) for ws in parts]
    rows = torch.cat(stacks).numpy()
    for stack, ws in zip(stacks, parts, strict=True):
        # of a client without weight nothing counts, whatever it is
        stack[torch.tensor(ws, dtype=torch.float64) == 0] = torch.nan
    actual: RunningMean[dict[str, Tensor]] = RunningMean()
    for k, (stack, ws) in enumerate(zip(stacks, parts, strict=True)):
        if begins_alone and k == 0 and ws[0] > 0:
            for row, w in zip(stack, ws, strict=True):
                if w:
                    actual.add({"x": row}, w)
        else:
            actual.add_rows({"x": stack}, ws)
    flat = [w for ws in parts for w in ws]
    np.testing.assert_allclose(actual.value["x"].numpy(), np.average(rows, 0, flat), rtol=1e-9, atol=1e-9)
    assert actual.count == sum(w > 0 for w in flat)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=9).filter(lambda ws: sum(ws) > 0), st.integers(0, 99))
def test_equal_rows_have_themselves_for_a_mean_bit_for_bit(weights: list[float], seed: int) -> None:
    x = torch.randn(5, generator=torch.Generator().manual_seed(seed)).bfloat16()
    actual: RunningMean[Tensor] = RunningMean()
    actual.add_rows(x.expand(len(weights), 5), weights)
    assert torch.equal(actual.value, x)


@pytest.mark.parametrize(
    "rows", [torch.zeros(2, 4), torch.zeros(2, 3, dtype=torch.float64)], ids=["shape", "type"]
)
def test_rows_of_another_form_are_refused(rows: Tensor) -> None:
    actual: RunningMean[Tensor] = RunningMean()
    actual.add(torch.zeros(3))
    with pytest.raises(TreeError, match="the same shapes and types"):
        actual.add_rows(rows, [1.0, 2.0])
    with pytest.raises(TreeError, match="at least 0"):
        actual.add_rows(torch.zeros(2, 3), [1.0, -1.0])


def test_what_came_is_left_alone_and_not_kept() -> None:
    a, b = torch.ones(2), torch.zeros(2)
    actual: RunningMean[Tensor] = RunningMean()
    actual.add(a)
    actual.add(b, 3.0)
    assert torch.equal(actual.value, torch.full((2,), 0.25))
    assert torch.equal(a, torch.ones(2))
    assert torch.equal(b, torch.zeros(2))
    assert (actual.count, actual.total) == (2, 4.0)


def test_a_tree_whose_fields_come_in_another_order_is_the_same_tree() -> None:
    actual = mean(
        [{"a": torch.tensor(1.0), "b": torch.tensor(2.0)}, {"b": torch.tensor(4.0), "a": torch.tensor(3.0)}],
        [1, 1],
    )
    assert {n: float(t) for n, t in actual.items()} == {"a": 2.0, "b": 3.0}


@pytest.mark.parametrize(
    ("trees", "weights", "what"),
    [
        ([], [], "there were 0 trees"),
        ([torch.ones(1)], [0.0], "a weight above 0"),
        ([torch.ones(1), torch.ones(1)], [1.0, -1.0], "at least 0; this one is -1"),
        ([torch.ones(1)], [float("nan")], "this one is nan"),
        ([{"a": torch.ones(1)}, {"b": torch.ones(1)}], [1.0, 1.0], "differ"),
        ([{"a": torch.ones(2)}, {"a": torch.ones(1)}], [1.0, 1.0], "shape"),
        ([{"a": torch.ones(2)}, {"a": torch.ones(3)}], [1.0, 1.0], "shape"),
    ],
)
def test_what_has_no_mean_is_refused(trees: list[object], weights: list[float], what: str) -> None:
    with pytest.raises(TreeError, match=what):
        mean(trees, weights)


@pytest.mark.parametrize("place", range(3))
def test_a_tree_without_weight_does_not_count_wherever_it_stands(place: int) -> None:
    values, weights = [1.0, 3.0], [1.0, 3.0]
    values.insert(place, float("nan"))
    weights.insert(place, 0.0)
    assert mean([torch.tensor([v]) for v in values], weights).item() == 2.5
