"""A federation of many clients is made and described with few calls of torch for each of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fedlowrank import Federation, Loss
from fedlowrank.core.errors import DataError
from fedlowrank.data.partitioning.checks import check_finite_values


class _Counter(TorchDispatchMode):
    """Counts operations of torch."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        self.count += 1
        return func(*args, **kwargs or {})


def operations(call: Callable[[], object]) -> int:
    with _Counter() as counter:
        call()
    return counter.count


def clients(count: int) -> list[dict[str, tuple[torch.Tensor, torch.Tensor]]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 6, 4, generator=generator)
    y = torch.randint(3, (count, 6), generator=generator)
    cut = {"train": slice(0, 4), "val": slice(4, 5), "test": slice(5, 6)}
    return [{part: (x[i, rows], y[i, rows]) for part, rows in cut.items()} for i in range(count)]


@pytest.mark.full
def test_operations_for_each_client() -> None:
    few, many = clients(10), clients(110)
    made = {len(c): Federation.from_arrays(c, nn.Linear(4, 3), classes=3) for c in (few, many)}
    count = [
        operations(lambda c=c: Federation.from_arrays(c, nn.Linear(4, 3), classes=3)) for c in (few, many)
    ]
    # for each of three parts: the sum of the inputs, its value, and copies of the inputs and the labels
    assert count[1] - count[0] <= 12 * 100
    assert operations(made[110].describe) == operations(made[10].describe)


def test_counts_are_those_of_every_client() -> None:
    given = clients(5)
    rows = Federation.from_arrays(given, nn.Linear(4, 4), classes=4).describe()
    for row, parts in zip(rows, given, strict=True):
        for part, (_, y) in parts.items():
            assert row["classes"][part] == [int((y == c).sum()) for c in range(4)]


@pytest.mark.parametrize("part", ["train", "val", "test"])
def test_a_negative_label_is_named_with_its_client(part: str) -> None:
    given = clients(4)
    given[2][part][1][0] = -3
    with pytest.raises(DataError, match=r"^client 2: label -3 is negative\. .*give y > 0$"):
        Federation.from_arrays(given, nn.Linear(4, 3))


@pytest.mark.parametrize(
    ("label", "loss", "advice", "cure"),
    [
        (-100, "auto", "set loss.kind = 'cross_entropy', which leaves out the label -100;", "cross_entropy"),
        (
            -1,
            "auto",
            "set loss.kind = 'cross_entropy' and loss.ignore_index = -1;",
            Loss("cross_entropy", ignore_index=-1),
        ),
        (-1, "focal", "set loss.ignore_index = -1;", Loss("focal", ignore_index=-1)),
    ],
)
def test_a_label_is_left_out_as_the_message_says(label: int, loss: str, advice: str, cure: Any) -> None:
    given = clients(4)
    given[2]["train"][1][0] = label
    with pytest.raises(DataError, match=f"label {label} is negative.*or {re.escape(advice)}"):
        Federation.from_arrays(given, nn.Linear(4, 3), loss=loss)
    Federation.from_arrays(given, nn.Linear(4, 3), loss=cure)


def test_finite_values_whose_sum_overflows_are_accepted() -> None:
    check_finite_values("x", torch.full((4, 2), 3e38))
    check_finite_values("x", torch.full((4, 2), 6e4, dtype=torch.float16))
    with pytest.raises(DataError, match=r"2 of 4 examples, first in example 1"):
        check_finite_values("x", torch.tensor([0.0, float("inf"), float("-inf"), 1.0])[:, None])
