"""The CNNs of pFedLoRA (Yi et al., arXiv:2310.13283, Table 3) and FLoRAL, for any input shape."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...core.errors import ConfigError

FAMILY: dict[str, tuple[tuple[int, int], tuple[int, ...]]] = {
    "cnn1": ((16, 32), (2000, 500)),
    "cnn2": ((16, 16), (2000, 500)),
    "cnn3": ((16, 32), (1000, 500)),
    "cnn4": ((16, 32), (800, 500)),
    "cnn5": ((16, 32), (500, 500)),
    "cnn": ((16, 32), (500,)),
}
"""Filters of the two convolutions and widths of the hidden layers, by model. The last model is not in the paper."""


def pool_relu(size: int) -> tuple[nn.MaxPool2d, nn.ReLU]:
    """Make the papers' ReLU → max-pool in reverse order.

    The two commute, values and gradients alike, and after the pool there are ``size²`` times fewer numbers to rectify.
    """
    return nn.MaxPool2d(size), nn.ReLU()


class CNN(nn.Module):
    """conv → ReLU → max-pool → conv → ReLU → max-pool → FC1 → ReLU → ... → last FC.

    Kernels are 5×5 without padding, as in the paper. Images too small for two of those (below 16 pixels, such
    as 8×8 digits) keep the form with 3×3 kernels padded by one.

    Args:
        shape: shape of one image, channels × height × width.
        classes: number of classes.
        filters: numbers of filters of the two convolutions.
        hidden: widths of FC1, FC2, ...
        split: name of the layer whose output, after ReLU, is the representation: ``fc1``, ``fc2`` (500 wide in all
            five models of the family), ...; None for the last hidden layer.
    """

    head_name = "head"

    def __init__(
        self,
        shape: tuple[int, int, int],
        classes: int,
        filters: tuple[int, int],
        hidden: tuple[int, ...],
        split: str | None = None,
    ) -> None:
        super().__init__()
        channels, height, width = shape
        if min(height, width) < 4:
            raise ConfigError(f"a CNN needs images of at least 4×4 pixels; these are {height}×{width}")
        kernel, padding = (5, 0) if min(height, width) >= 16 else (3, 1)
        self.features = nn.Sequential(
            nn.Conv2d(channels, filters[0], kernel, padding=padding),
            *pool_relu(2),
            nn.Conv2d(filters[0], filters[1], kernel, padding=padding),
            *pool_relu(2),
            nn.Flatten(),
        )
        with torch.no_grad():
            flat_width = self.features(torch.zeros(1, *shape)).shape[1]
        layers = [f"fc{i + 1}" for i in range(len(hidden))]
        if not hidden or (split is not None and split not in layers):
            raise ConfigError(
                f"model.split: the representation can end at {', '.join(layers)}, not at {split!r}"
            )
        split_index = len(hidden) if split is None else layers.index(split) + 1
        blocks = [[nn.Linear(i, o), nn.ReLU()] for i, o in zip((flat_width, *hidden), hidden, strict=False)]
        self.hidden = nn.Sequential(*(m for block in blocks[:split_index] for m in block))
        self.head = nn.Sequential(
            *(m for block in blocks[split_index:] for m in block), nn.Linear(hidden[-1], classes)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Compute scores ``[b, classes]`` of images ``[b, channels, height, width]``."""
        scores: Tensor = self.head(self.hidden(self.features(x)))
        return scores


class FloralCNN(nn.Module):
    """The CNN of FLoRAL (Almansoori et al.) for CIFAR-10.

    conv 5×5, 32 → ReLU → max-pool 2 → conv 3×3, 64 → ReLU → max-pool 3 → FC 64 → ReLU → FC, without padding:
    32×32 images shrink to 28, 14, 12 and 4 pixels, so that FC 64 has 1,024 inputs, and there are 87,178
    parameters at 3×32×32 and 10 classes. Images too small for that (below 14 pixels) keep the form with
    padding by 2 and 1. The representation is the input of the last layer.

    Args:
        shape: shape of one image, channels × height × width, at least 6×6.
        classes: number of classes.
    """

    head_name = "head"

    def __init__(self, shape: tuple[int, int, int], classes: int) -> None:
        super().__init__()
        channels, height, width = shape
        if min(height, width) < 6:
            raise ConfigError(f"cnn_floral needs images of at least 6×6 pixels; these are {height}×{width}")
        padding = (0, 0) if min(height, width) >= 14 else (2, 1)
        self.features = nn.Sequential(
            *(nn.Conv2d(channels, 32, 5, padding=padding[0]), *pool_relu(2)),
            *(nn.Conv2d(32, 64, 3, padding=padding[1]), *pool_relu(3)),
            nn.Flatten(),
        )
        with torch.no_grad():
            flat_width = self.features(torch.zeros(1, *shape)).shape[1]
        self.hidden = nn.Sequential(nn.Linear(flat_width, 64), nn.ReLU())
        self.head = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Compute scores ``[b, classes]`` of images ``[b, channels, height, width]``."""
        scores: Tensor = self.head(self.hidden(self.features(x)))
        return scores
