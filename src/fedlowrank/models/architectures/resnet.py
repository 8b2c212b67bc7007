"""ResNet-18 with group normalization, as FedSLR trains it (Huang et al.; He et al., arXiv:1512.03385)."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional

from ...core.errors import ConfigError

GROUPS = 2


@dataclass(frozen=True)
class ResNetSize:
    """Settings of a ResNet: channels of the first stage, and whether the stem is large."""

    width: int = 64
    large: bool = False


RESNETS: dict[str, ResNetSize] = {
    "resnet18": ResNetSize(),
    "resnet18_tiny": ResNetSize(large=True),
    "resnet18_w16": ResNetSize(width=16),
}
"""ResNets by name; FedSLR uses the first on CIFAR and the second on TinyImageNet."""


class ResidualBlock(nn.Module):
    """Two 3×3 convolutions with a shortcut around them.

    Args:
        inputs: number of input channels.
        outputs: number of output channels.
        stride: stride of the first convolution.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.GroupNorm(GROUPS, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.GroupNorm(GROUPS, outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.GroupNorm(GROUPS, outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Compute feature maps ``[b, outputs, height / stride, width / stride]``."""
        y = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet18(nn.Module):
    """Stem → 4 stages of 2 blocks → mean over the image → classifier without bias.

    At width 64 and 3 input channels it has 11,173,952 parameters for 10 classes and 11,220,032 for 100.

    Args:
        shape: shape of one image, channels × height × width.
        classes: number of classes.
        width: number of channels of the first stage, doubled by each further stage; even, for two groups. The
            representation is 8 times as wide.
        large: whether the stem is the one for large images, a 7×7 convolution of stride 2 and a max-pool, instead of
            a 3×3 convolution of stride 1.
    """

    head_name = "head"

    def __init__(
        self, shape: tuple[int, int, int], classes: int, width: int = 64, large: bool = False
    ) -> None:
        super().__init__()
        if width < GROUPS or width % GROUPS:
            raise ConfigError(f"the width of a ResNet must be a positive multiple of {GROUPS}; it is {width}")
        stem: list[nn.Module] = [
            nn.Conv2d(shape[0], width, 7, 2, 3, bias=False)
            if large
            else nn.Conv2d(shape[0], width, 3, 1, 1, bias=False),
            nn.GroupNorm(GROUPS, width),
            nn.ReLU(),
        ]
        if large:
            stem.append(nn.MaxPool2d(3, 2, 1))
        widths = [width, width, 2 * width, 4 * width, 8 * width]
        stages = [
            nn.Sequential(ResidualBlock(a, b, 1 if a == b else 2), ResidualBlock(b, b, 1))
            for a, b in itertools.pairwise(widths)
        ]
        self.stem = nn.Sequential(*stem)
        self.stages = nn.Sequential(*stages)
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(8 * width, classes, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Compute scores ``[b, classes]`` of images ``[b, channels, height, width]``."""
        scores: Tensor = self.head(self.pool(self.stages(self.stem(x))))
        return scores
