"""Reduction of contributions: any order of arrival, every kind of leaf, wrong trees."""

from __future__ import annotations

import itertools
import weakref
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from fedlowrank.core.contract import Each, Mean, Sum
from fedlowrank.core.contract.contribution import Aggregator, RunningMean, fault_of, find_not_finite
from fedlowrank.core.tree import TreeError

VALUES = {c: torch.randn(5, generator=torch.Generator().manual_seed(c)) for c in (3, 5, 8, 9)}


def contribution(client: int) -> dict[str, Any]:
    x = VALUES[client]
    return {
        "model": Mean({"w": x}, client),
        "clusters": [Mean(x, float(client == 5)), Mean(x, 0.0)],
        "sum": Sum({"n": x}),
        "each": Each(("of", client)),
    }


def test_all_orders_of_arrival_give_the_same_bits() -> None:
    totals = []
    for order in itertools.permutations(VALUES):
        aggregator = Aggregator(list(VALUES))
        for client in order:
            aggregator.add(client, contribution(client))
        assert aggregator.contributed == list(VALUES)
        totals.append(aggregator.finish())
    first = totals[0]
    x = np.stack([v.numpy() for v in VALUES.values()]).astype(np.float64)
    np.testing.assert_allclose(
        first["model"]["w"], np.average(x, axis=0, weights=list(VALUES)), rtol=1e-5, atol=1e-6
    )
    np.testing.assert_allclose(first["sum"]["n"], x.sum(0), rtol=1e-5, atol=1e-6)
    assert torch.equal(first["clusters"][0], VALUES[5])
    assert first["clusters"][1] is None
    assert first["each"] == {c: ("of", c) for c in VALUES}
    for other in totals[1:]:
        assert torch.equal(other["model"]["w"], first["model"]["w"])
        assert torch.equal(other["sum"]["n"], first["sum"]["n"])
        assert list(other["each"]) == list(VALUES)


@pytest.mark.parametrize("many", [[3, 5, 8, 9], [9, 3], [8], [5, 8]], ids=str)
def test_rows_of_a_cohort_count_as_their_clients_do(many: list[int]) -> None:
    aggregator, expected = Aggregator(list(VALUES)), Aggregator(list(VALUES))
    for client in VALUES:
        expected.add(client, contribution(client))
    x = torch.stack([VALUES[c] for c in many])
    rows = {
        "model": Mean({"w": x}),
        "clusters": [Mean(x), Mean(x)],
        "sum": Sum({"n": x}),
        "each": Each([("of", c) for c in many]),
    }
    weights = {"/model": many, "/clusters/0": [float(c == 5) for c in many], "/clusters/1": [0.0] * len(many)}
    others = [c for c in VALUES if c not in many]
    for client in others[:1]:
        aggregator.add(client, contribution(client))
    aggregator.add_rows(many, rows, weights)
    for client in others[1:]:
        aggregator.add(client, contribution(client))
    actual, wanted = aggregator.finish(), expected.finish()
    assert aggregator.contributed == list(VALUES)
    torch.testing.assert_close(actual["model"], wanted["model"])
    torch.testing.assert_close(actual["sum"], wanted["sum"])
    assert torch.equal(actual["clusters"][0], VALUES[5])
    assert actual["clusters"][1] is None
    assert list(actual["each"].items()) == list(wanted["each"].items())
    with pytest.raises(TreeError, match="the contribution of client 3 has the form"):
        aggregator.add_rows([3], {"model": Mean(x)}, {"/model": [1.0]})


def test_a_contribution_is_let_go_as_soon_as_those_before_it_arrived() -> None:
    aggregator, seen = Aggregator([0, 1, 2]), []
    for client in (1, 0, 2):
        value = torch.ones(3)
        seen.append(weakref.ref(value))
        aggregator.add(client, Mean(value))
        del value
        # the first of a mean is copied; only one that is early waits
        assert sum(ref() is not None for ref in seen) == (1 if client == 1 else 0)


def test_skipped_clients_do_not_count_and_nobody_gives_nothing() -> None:
    aggregator = Aggregator([1, 2])
    aggregator.skip(2)
    with pytest.raises(ValueError, match=r"clients \[1\] neither replied nor were skipped"):
        aggregator.finish()
    aggregator.add(1, Mean(VALUES[3]))
    assert torch.equal(aggregator.finish(), VALUES[3])
    assert aggregator.contributed == [1]
    empty = Aggregator([4])
    empty.skip(4)
    assert empty.finish() is None


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"a": torch.ones(1)}, "at /a it holds a Tensor"),
        (None, "at /0 it holds a NoneType"),
        ({"b": Mean(torch.ones(1))}, "has the form"),
        ({"a": Sum(torch.ones(1))}, "has the form"),
        ({"a": Mean({"x": torch.ones(1)})}, "differ"),
        ({"a": Mean(torch.ones(2))}, "shape"),
        ({"a": Mean(torch.ones(1), -1.0)}, "at least 0"),
    ],
)
def test_what_cannot_be_reduced_is_refused(wrong: Any, says: str) -> None:
    aggregator = Aggregator([0, 1])
    aggregator.add(0, {"a": Mean(torch.ones(1))})
    with pytest.raises(TreeError, match=says):
        aggregator.add(1, [wrong] if wrong is None else wrong)


@pytest.mark.parametrize(
    ("contribution", "fault"),
    [
        (Mean(torch.ones(2), 3.0), None),
        ({"a": [Sum(torch.ones(2))], "b": Each(torch.tensor(float("nan")))}, None),
        ({"a": [Mean(torch.ones(2), -2.7e39)]}, "the weight of the mean at /a/0 is -2.7e+39"),
        (Mean(torch.ones(2), float("nan")), "the weight of the mean at its top is nan"),
        ({"s": Sum({"x": torch.tensor([1.0, float("inf")])})}, "a NaN or an infinity at /s/x"),
    ],
)
def test_faults_of_numbers(contribution: Any, fault: str | None) -> None:
    assert fault_of(contribution) == fault


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool])
@pytest.mark.parametrize("is_cohort", [False, True])
def test_a_mean_of_whole_numbers_is_refused_where_it_stands(dtype: torch.dtype, is_cohort: bool) -> None:
    """A share of a client is no whole number, so such a mean would be 0 or the first client's value."""
    aggregator = Aggregator([0, 1])
    value = {"n": Mean([torch.ones(2, 3, dtype=dtype)])}
    add = partial(aggregator.add_rows, [0, 1], value, {"/n": [1.0, 1.0]})
    with pytest.raises(TreeError, match=f"at /n/0 there is {dtype}.*or Sum for counts"):
        add() if is_cohort else aggregator.add(0, value)
    running: RunningMean[Any] = RunningMean()
    with pytest.raises(TreeError, match="floating-point"):
        running.add(torch.ones(3, dtype=dtype))
    with pytest.raises(TreeError, match="floating-point"):
        running.add_rows(torch.ones(2, 3, dtype=dtype), [1.0, 1.0])


@pytest.mark.parametrize("is_cohort", [False, True])
def test_a_sum_of_narrow_whole_numbers_and_votes_does_not_overflow(is_cohort: bool) -> None:
    count = 7
    bytes_, votes = torch.full((count, 2), 200, dtype=torch.uint8), torch.ones(count, 2, dtype=torch.bool)
    votes[3:, 1] = False
    aggregator = Aggregator(range(count))
    if is_cohort:
        aggregator.add_rows(range(count), {"bytes": Sum(bytes_), "votes": Sum(votes)}, {})
    for k in () if is_cohort else range(count):
        aggregator.add(k, {"bytes": Sum(bytes_[k]), "votes": Sum(votes[k])})
    total = aggregator.finish()
    assert total["bytes"].tolist() == [1400, 1400]
    assert total["votes"].tolist() == [7, 3]


def test_a_weight_that_is_none_is_refused_with_its_client() -> None:
    for weight in (None, "a", [1.0]):
        with pytest.raises(TreeError, match="weight of a Mean is a number"):
            Mean(torch.ones(1), weight)
    for weight in (-1.0, float("nan"), float("inf")):
        said = rf"the contribution of client 5: the weight of the mean at /m is {weight}"
        with pytest.raises(TreeError, match=said):
            Aggregator([5]).add(5, {"m": Mean(torch.ones(1), weight)})
        with pytest.raises(TreeError, match=said):
            Aggregator([3, 5]).add_rows([3, 5], {"m": Mean(torch.ones(2, 1))}, {"/m": [1.0, weight]})


@pytest.mark.parametrize("kind", [Mean, Sum])
@pytest.mark.parametrize("is_cohort", [False, True])
@pytest.mark.parametrize(
    ("value", "form"),
    [
        (torch.ones(1), r"torch.float32 \[1\]"),
        (torch.tensor(1.0), r"torch.float32 \[\]"),
        (torch.ones(8).half(), r"torch.float16 \[8\]"),
        (torch.ones(8).long(), r"torch.int64 \[8\]"),
    ],
    ids=["broadcast", "number", "half", "whole"],
)
def test_a_value_of_another_form_is_refused_with_its_client_and_place(
    kind: Any, is_cohort: bool, value: torch.Tensor, form: str
) -> None:
    """PyTorch would add them all, and the sum would be wrong."""
    aggregator = Aggregator([0, 1, 2])
    aggregator.add(0, {"m": kind({"0.bias": torch.ones(8)})})
    said = rf"^the contribution of client 1: .*; at /m/0.bias this one has {form}, those before it torch.float32 \[8\]$"
    rows = {"m": kind({"0.bias": torch.stack([value, value])})}
    add_rows = partial(aggregator.add_rows, [1, 2], rows, {"/m": [1.0, 1.0]})
    with pytest.raises(TreeError, match=said):
        add_rows() if is_cohort else aggregator.add(1, {"m": kind({"0.bias": value})})


@pytest.mark.parametrize("kind", [Mean, Sum])
def test_a_missing_key_is_named_with_its_client(kind: Any) -> None:
    aggregator = Aggregator([0, 3])
    aggregator.add(0, kind({"w": torch.ones(2), "b": torch.ones(1)}))
    said = "^the contribution of client 3: trees differ at the top: the second dict lacks 'b'$"
    with pytest.raises(TreeError, match=said):
        aggregator.add(3, kind({"w": torch.ones(2)}))


@pytest.mark.parametrize("is_cohort", [False, True])
def test_a_sum_takes_keys_in_any_order_and_whole_numbers_of_any_type(is_cohort: bool) -> None:
    aggregator = Aggregator([0, 1])
    aggregator.add(0, Sum({"a": torch.tensor([1.0]), "n": torch.tensor([2], dtype=torch.int16)}))
    second = {"n": torch.tensor([True]), "a": torch.tensor([10.0])}
    if is_cohort:
        aggregator.add_rows([1], Sum({key: t[None] for key, t in second.items()}), {})
    else:
        aggregator.add(1, Sum(second))
    assert {key: float(t) for key, t in aggregator.finish().items()} == {"a": 11.0, "n": 3.0}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_looked_for_where_they_count(bad: float) -> None:
    t = torch.tensor([1.0, bad])
    assert find_not_finite({"a": [Mean({"w": t})]}) == "/a/0/w"
    assert find_not_finite(Sum(t)) == ""
    assert find_not_finite([Mean(t, 0.0), Each(t), Mean(torch.ones(2))]) is None
