"""Small models of different architectures for scikit-learn's 8×8 digits, used by experiments/demo/pfedlora.toml.

An experiment file names such a function as ``"examples.small_models:narrow"``; run it from the folder that has
``examples``. The representation, the input of ``head``, has 32 features in all of them: pFedLoRA's adapter, FedProto's
prototypes and LG-FedAvg's head need one width.
"""

from __future__ import annotations

import math

from torch import nn

FEATURES = 32
"""Width of the representation, the input of ``head``."""
Shape = tuple[int, ...]


def narrow(shape: Shape, classes: int) -> nn.Module:
    """Make a model with one hidden layer."""
    return _with_head([nn.Flatten(), nn.Linear(math.prod(shape), FEATURES), nn.ReLU()], classes)


def wide(shape: Shape, classes: int) -> nn.Module:
    """Make a model with two hidden layers, the first of 128 units."""
    return _with_head(
        [nn.Flatten(), nn.Linear(math.prod(shape), 128), nn.ReLU(), nn.Linear(128, FEATURES), nn.ReLU()],
        classes,
    )


def convolutional(shape: Shape, classes: int) -> nn.Module:
    """Make a model with one convolution of 8 filters, a max-pool and one hidden layer."""
    channels, height, width = shape
    pooled = 8 * (height // 2) * (width // 2)
    layers = [nn.Conv2d(channels, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    return _with_head([*layers, nn.Linear(pooled, FEATURES), nn.ReLU()], classes)


def _with_head(layers: list[nn.Module], classes: int) -> nn.Module:
    model = nn.Sequential()
    for i, layer in enumerate(layers):
        model.add_module(str(i), layer)
    model.add_module("head", nn.Linear(FEATURES, classes))
    return model
