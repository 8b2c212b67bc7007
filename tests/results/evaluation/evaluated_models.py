"""Clients and models to evaluate, and their measures computed by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedlowrank import Federation
from fedlowrank.results.records import RoundRecord
from fedlowrank.rounds.run import Run


def make_federation(
    model: Callable[[], nn.Module],
    clients: int = 7,
    examples: int = 12,
    held_out: int = 0,
    empty: tuple[int, ...] = (),
) -> Any:
    """Clients with unequal numbers of examples; client 3 has no test examples, client 5 none for validation.

    Args:
        model: of all clients.
        clients: number of clients.
        examples: of each client, to train on.
        held_out: more than a few examples of each client to test on.
        empty: clients without examples in either split.
    """
    g = torch.Generator().manual_seed(1)

    def some(n: int) -> tuple[Tensor, Tensor]:
        return torch.randn(n, 6, generator=g), torch.randint(3, (n,), generator=g)

    data = [
        {
            "train": some(examples),
            "val": some(0 if c == 5 or c in empty else 3 + c % 2),
            "test": some(0 if c == 3 or c in empty else 2 + c + held_out),
        }
        for c in range(clients)
    ]
    return Federation.from_arrays(data, model, classes=3)


def build_linear() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


class CountingModule(nn.Module):
    """A user's module that counts its forward passes."""

    def __init__(self, change: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.layer, self.change = nn.Linear(6, 3), change
        self.batches: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.batches.append(len(x))
        scores: Tensor = self.layer(self.change(x))
        return scores


def compute_measures(
    run: Run, split: str, scores: Callable[[Any, Tensor], Tensor]
) -> tuple[list[Any], list[Any]]:
    accuracy: list[Any] = []
    loss: list[Any] = []
    for info, data in zip(run.federation.infos, run.federation.clients, strict=True):
        part = getattr(data, split)
        if len(part) == 0:
            accuracy.append(None)
            loss.append(None)
            continue
        with torch.no_grad():
            out = scores(info, part.x)
        accuracy.append(float((out.argmax(1) == part.y).double().mean()))
        loss.append(float(functional.cross_entropy(out.double(), part.y)))
    return accuracy, loss


def assert_measures(
    record: RoundRecord, series: str, split: str, expected: tuple[list[Any], list[Any]]
) -> None:
    assert record.is_evaluated
    for name, wanted in zip(("accuracy", "loss"), expected, strict=True):
        actual = record.values(name, series=series, split=split)
        assert [v is None for v in actual] == [v is None for v in wanted]
        for value, right in zip(actual, wanted, strict=True):
            assert value == (None if right is None else pytest.approx(right, rel=1e-5))
