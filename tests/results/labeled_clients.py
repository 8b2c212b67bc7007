"""Clients whose labels follow their inputs, for metrics of their scores."""

from __future__ import annotations

import torch
from torch import nn

from fedlowrank import Federation

CLASSES = 7


def make_labeled_federation(targets: int = 0) -> Federation:
    """Six clients with labels that follow their inputs; client 2 tests on one class, client 3 on nothing."""
    g = torch.Generator().manual_seed(3)

    def some(n: int, few: int = CLASSES) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(n, CLASSES, generator=g)
        if targets:
            return x, x[:, :targets] + 0.3 * torch.randn(n, targets, generator=g)
        return x, (x + 0.7 * torch.randn(n, CLASSES, generator=g))[:, :few].argmax(1)

    data = [
        {"train": some(40), "val": some(20), "test": some(0 if c == 3 else 20 + c, 1 if c == 2 else CLASSES)}
        for c in range(6)
    ]
    width = targets or CLASSES
    return Federation.from_arrays(
        data, lambda: nn.Linear(CLASSES, width), classes=None if targets else CLASSES
    )
