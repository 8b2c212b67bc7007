"""Five clients of unequal ranks, and the network that they train."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import nn

from fedlowrank.data.federation import Federation

RANKS = (4, 1, 3, 2, 4)


def build_network() -> nn.Module:
    """A network of standard layers, which the engine trains for many clients at once."""
    body = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 7), nn.ReLU())
    module = nn.Sequential(OrderedDict(body=body, head=nn.Linear(7, 3)))
    module.head_name = "head"  # type: ignore[assignment]
    return module


def make_ranked_federation(make: Any) -> Federation:
    """Five clients of unequal ranks, with different numbers of examples."""
    generator = torch.Generator().manual_seed(0)
    data = []
    for i in range(len(RANKS)):
        x = torch.randn(20 + 3 * i, 6, generator=generator)
        data.append((x, (x[:, 0] + 0.5 * x[:, 1] > 0).long() + (x[:, 2] > 1).long()))
    return Federation.from_arrays(data, make, classes=3, rank=RANKS)
