"""Federations of clients in clusters, and what the tests of their methods read from a run."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedlowrank.adapters.mixtures.mixture import Pairs
from fedlowrank.adapters.mixtures.router import Router
from fedlowrank.data.federation import Federation
from tests.golden import floral_reference as reference

from .comparisons import to_layers

KNOWN_CLUSTERS = (0, 1, 0, 2)
OPTIMAL = Router(routing="optimal")
ADAPTED_LAYERS = ("body.0", "head")


def get_networks(models: dict[str, Tensor]) -> list[Any]:
    """Get every one of C models as the reference writes it."""
    count = len(next(iter(models.values())))
    return [to_layers({n: t[c] for n, t in models.items()}) for c in range(count)]


def get_adaptors(values: dict[str, Any]) -> reference.Adaptors:
    """Get adaptors as the reference writes them: (U, V, offset of the bias) a layer, each with the axis of
    clusters."""
    out = []
    for name in ADAPTED_LAYERS:
        pairs, offset = values[f"{name}.weight"], values[f"{name}.bias"]
        out.append(tuple(t.detach().double().numpy().copy() for t in (pairs.u, pairs.v, offset)))
    return out


def draw_tree(seed: int, count: int = 3) -> dict[str, Any]:
    """Draw a tree of factors and a vector, each with an axis of clusters."""
    g = torch.Generator().manual_seed(seed)
    return {
        "w": Pairs(*(torch.randn(count, n, 2, generator=g, dtype=torch.float64) for n in (5, 4))),
        "b": torch.randn(count, 5, generator=g, dtype=torch.float64),
    }


class Plain(nn.Module):
    """One layer, in which two adaptors are told apart by their sign."""

    head_name = "head"

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 2, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(x.double())
        return out


def federate_opposed_clusters(clients: int = 6) -> Federation:
    """Build a federation of two clusters with opposite labels."""
    rng = np.random.default_rng(0)
    data = []
    for k in range(clients):
        x = rng.normal(size=(20 + k, 2)).astype(np.float32)
        data.append(
            {
                "train": (x, (x[:, 0] > 0).astype(int) ^ (k % 2)),
                "test": (x, (x[:, 0] > 0).astype(int) ^ (k % 2)),
            }
        )
    return Federation.from_arrays(data, Plain, classes=2, cluster=[k % 2 for k in range(clients)])


def assign_two_clusters(make: Any) -> Any:
    """Change a maker of federations: its clients are of two clusters."""

    def make_clustered(*args: Any, **kwargs: Any) -> Federation:
        on = make(*args, **kwargs)
        infos = [dataclasses.replace(i, cluster=i.id % 2) for i in on.infos]
        return dataclasses.replace(on, infos=infos)

    return make_clustered
