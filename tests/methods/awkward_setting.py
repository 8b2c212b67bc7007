"""Images, and models for low-rank methods that break rules of thumb."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from fedlowrank import Federation
from fedlowrank.core.contract import Method
from fedlowrank.core.learning.optimizer import SGD
from fedlowrank.methods import METHODS


class MisleadingNames(nn.Module):
    """Matrices named as biases and norms, vectors named as weights of convolutions; groups, a bias, a kernel
    of 3×1."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Conv2d(2, 6, 3, padding=1, groups=2)
        self.norm = nn.Conv2d(6, 8, (3, 1), bias=True)
        self.conv_weight = nn.Parameter(torch.ones(8))
        self.fc = nn.ModuleDict({"downsample 1/β": nn.Linear(8, 5)})
        self.γ = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm(torch.relu(self.bias(x)))).mean((2, 3)) * self.conv_weight
        return self.γ(torch.relu(self.fc["downsample 1/β"](y)))


MATRICES = {
    # scheme 2: O·K1 rows, I·K2 columns, I being the channels of one group
    "bias.weight": (6 * 3, 1 * 3),
    "norm.weight": (8 * 3, 6 * 1),
    "fc.downsample 1/β.weight": (5, 8),
    "γ.weight": (3, 5),
}


def federate_images(model: Callable[[], nn.Module] = MisleadingNames) -> Federation:
    """Build a federation of four clients with images of two channels."""
    rng = np.random.default_rng(0)
    data = []
    for i in range(4):
        y = rng.integers(0, 3, 30)
        x = rng.normal(size=(30, 2, 6, 6)).astype(np.float32) + y[:, None, None, None].astype(np.float32) * (
            i % 2 - 0.5
        )
        data.append((x, y))
    return Federation.from_arrays(data, model, classes=3)


def make_low_rank_method(name: str) -> Method:
    """Make FedSLR, GPGD or LPGD."""
    return METHODS[name](batch_size=10, optimizer=SGD(lr=0.05), lam=0.03)
