"""Sums of half precision against the same sums in float64: they are rounded once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fedlowrank.core.contract import Batch, Mean, Sum
from fedlowrank.core.contract.contribution import Aggregator, RunningMean
from fedlowrank.core.learning.optimizer import SGD, AdamW
from fedlowrank.core.learning.server_optimizer import initial_optimizer_state, server_step
from fedlowrank.core.tree import TreeError

HALF = [torch.bfloat16, torch.float16]


def replies(dtype: torch.dtype, count: int = 1000) -> list[Tensor]:
    """Of 1,000 clients of which a tenth is far from the others: the mean moves by less than a digit a reply."""
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(5, generator=generator) * 0.01 + (0.6 if k % 10 else 1.1)).to(dtype)
        for k in range(count)
    ]


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("kind", ["mean", "sum"])
def test_many_replies_are_rounded_once(dtype: torch.dtype, kind: str) -> None:
    values = replies(dtype)
    aggregator = Aggregator(range(len(values)))
    for k, value in enumerate(values):
        aggregator.add(k, Mean(value, 1.0 + k % 3) if kind == "mean" else Sum(value))
    actual = aggregator.finish()
    exact = torch.stack(values).double()
    weights = torch.tensor([1.0 + k % 3 for k in range(len(values))]).double()
    expected = (weights @ exact) / weights.sum() if kind == "mean" else exact.sum(0)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected, rtol=torch.finfo(dtype).eps / 2 * 1.01, atol=0)


def test_means_of_float32_keep_their_bits() -> None:
    values, running = [v.float() for v in replies(torch.bfloat16, 50)], RunningMean[Tensor]()
    expected, total = values[0].clone(), 0.0
    for k, value in enumerate(values):
        running.add(value, 1.0 + k)
        total += 1.0 + k
        if k:
            expected.lerp_(value, (1.0 + k) / total)
    assert torch.equal(running.value, expected)


def test_a_mean_is_of_one_type() -> None:
    running = RunningMean[Tensor]()
    running.add(torch.ones(2))
    with pytest.raises(TreeError, match="same shapes and types"):
        running.add(torch.ones(2, dtype=torch.bfloat16))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("masked", [False, True])
def test_a_mean_over_tokens_is_rounded_once(dtype: torch.dtype, masked: bool) -> None:
    # 80 texts of 1,001 tokens: more than the largest number of float16, and than bfloat16 can count
    labels = torch.zeros(80, 1002, dtype=torch.int64)
    labels[::3, 1:500] = -100
    values = torch.linspace(0.1, 3, 80).to(dtype)
    mask = torch.arange(80) < 70 if masked else None
    actual = Batch(None, labels, mask).mean(values)
    counts = (labels[:, 1:] >= 0).sum(1).double() * (1.0 if mask is None else mask)
    expected = (values.double() @ counts) / counts.sum()
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected, rtol=torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (SGD(lr=0.5, momentum=0.9), lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9)),
        (AdamW(lr=0.01, weight_decay=0.1), lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1)),
    ],
)
def test_the_servers_optimizer_remembers_in_float32(
    dtype: torch.dtype, ours: Any, theirs: Callable[[Any], torch.optim.Optimizer]
) -> None:
    now = {"w": torch.linspace(0.5, 1.5, 6).to(dtype)}
    model, memory = now["w"].double().requires_grad_(), initial_optimizer_state()
    optimizer = theirs([model])
    for step in range(25):
        # a mean that is nearer than the next number of the type
        mean = {"w": now["w"].float() * (1 - 1e-4 * (1 + step % 4))}
        model.grad = now["w"].double() - mean["w"].double()
        now, memory = server_step(ours, now, mean, memory, step)
        optimizer.step()
        torch.testing.assert_close(
            now["w"].double(), model.detach(), rtol=torch.finfo(dtype).eps / 2 * 1.01, atol=0
        )
        with torch.no_grad():
            model.copy_(now["w"])
    assert {t.dtype for ts in memory.tensors for t in ts} == {torch.float32}
