"""VGG-8, with which FLoRAL learns CIFAR-100 (Almansoori et al.; Simonyan and Zisserman, arXiv:1409.1556)."""

from __future__ import annotations

from torch import Tensor, nn

from ...core.errors import ConfigError

CHANNELS = (16, 32, 64, 128, 512)
WIDTH = 512
DROPOUT = 0.5


class VGG8(nn.Module):
    """5 × (3×3 convolution → ReLU → max-pool 2) → 2 × (FC 512 → ReLU → dropout) → FC.

    Convolutions are padded by one and have 16, 32, 64, 128 and 512 channels: five convolutions and three
    linear layers make eight. Dropout is 1/2. With 3×32×32 images there are 1,264,388 parameters for 100
    classes; batch normalization adds 1,504. The representation is the input of the last layer.

    Args:
        shape: shape of one image, channels × height × width, at least 32×32.
        classes: number of classes.
        batch_norm: whether a BatchNorm2d follows each convolution.
    """

    head_name = "head"

    def __init__(self, shape: tuple[int, int, int], classes: int, batch_norm: bool = False) -> None:
        super().__init__()
        inputs, height, width = shape
        cells = (height // 2 ** len(CHANNELS)) * (width // 2 ** len(CHANNELS))
        if cells == 0:
            raise ConfigError(
                f"VGG-8 halves images five times, so they need 32×32 pixels; these are {height}×{width}"
            )
        layers: list[nn.Module] = []
        for outputs in CHANNELS:
            layers.append(nn.Conv2d(inputs, outputs, 3, padding=1))
            if batch_norm:
                layers.append(nn.BatchNorm2d(outputs))
            layers += [nn.ReLU(), nn.MaxPool2d(2)]
            inputs = outputs
        self.features = nn.Sequential(*layers, nn.Flatten())
        self.hidden = nn.Sequential(
            *(nn.Linear(CHANNELS[-1] * cells, WIDTH), nn.ReLU(), nn.Dropout(DROPOUT)),
            *(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Dropout(DROPOUT)),
        )
        self.head = nn.Linear(WIDTH, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Compute scores ``[b, classes]`` of images ``[b, channels, height, width]``."""
        scores: Tensor = self.head(self.hidden(self.features(x)))
        return scores
