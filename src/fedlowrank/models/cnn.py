"""The five CNNs of pFedLoRA (Yi et al., arXiv:2310.13283, Table 3), for any input shape and number of classes."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from ..errors import ConfigError

FAMILY: dict[str, tuple[int, int, int, int]] = {
    "cnn1": (16, 32, 2000, 500),
    "cnn2": (16, 16, 2000, 500),
    "cnn3": (16, 32, 1000, 500),
    "cnn4": (16, 32, 800, 500),
    "cnn5": (16, 32, 500, 500),
}
"""Filters of the two convolutions and widths of the two hidden layers."""


class CNN(nn.Module):
    """conv → ReLU → max-pool → conv → ReLU → max-pool → FC1 → ReLU → FC2 → ReLU → FC3.

    Kernels are 5×5 without padding, as in the paper. Images too small for two of those (below 16 pixels, such as 8×8
    digits) keep the form with 3×3 kernels padded by one.

    Args:
        shape: of one image, channels × height × width.
        classes: number of classes.
        filters: of the two convolutions.
        hidden: widths of FC1 and FC2.
        split: the layer whose output, after ReLU, is the representation: ``fc2`` (500 in all five models of the family)
            or ``fc1``.
    """

    head_name = "head"

    def __init__(
        self,
        shape: tuple[int, int, int],
        classes: int,
        filters: tuple[int, int],
        hidden: tuple[int, int],
        split: Literal["fc1", "fc2"] = "fc2",
    ) -> None:
        super().__init__()
        channels, height, width = shape
        if min(height, width) < 4:
            raise ConfigError(f"a CNN needs images of at least 4×4 pixels; these are {height}×{width}")
        kernel, padding = (5, 0) if min(height, width) >= 16 else (3, 1)
        self.features = nn.Sequential(
            nn.Conv2d(channels, filters[0], kernel, padding=padding),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(filters[0], filters[1], kernel, padding=padding),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
        )
        with torch.no_grad():
            flat = self.features(torch.zeros(1, *shape)).shape[1]
        fc1 = [nn.Linear(flat, hidden[0]), nn.ReLU()]
        fc2 = [nn.Linear(hidden[0], hidden[1]), nn.ReLU()]
        fc3 = [nn.Linear(hidden[1], classes)]
        below, above = (fc1, [*fc2, *fc3]) if split == "fc1" else ([*fc1, *fc2], fc3)
        self.hidden = nn.Sequential(*below)
        self.head = nn.Sequential(*above)

    def forward(self, x: Tensor) -> Tensor:
        """Scores ``[b, classes]`` of images ``[b, channels, height, width]``."""
        scores: Tensor = self.head(self.hidden(self.features(x)))
        return scores
