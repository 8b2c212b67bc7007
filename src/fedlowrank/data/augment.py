"""Random augmentation of the images that a client trains on: mirroring, and cropping after padding."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ..core.arguments.bounds import check_minimum
from ..core.arguments.field_checks import CheckedFields
from ..core.arguments.switch import Switch, check_switch
from ..core.errors import ConfigError, DataError
from .dataset import Inputs, Stored


@dataclass(frozen=True)
class Augment(CheckedFields):
    """Random changes of the images in training batches; by default none.

    Every image of every step gets its own draw, in each training pass (some methods also adapt before
    inference). Statistics over the training data, validation and test use the images unchanged.

    Attributes:
        flip: whether to mirror each image left to right with probability 1/2. Images rotated by quarter turns, as by
            concept 'rotation', are mirrored along the axis that was left to right before the rotation.
        crop: number of pixels of padding on each side before a random crop of the original size; 0 does not crop.
        fill: value of the padding in the units of the inputs. With data.normalize = "scale", 0 is the darkest value
            of the training part (black, if it has a black pixel), with "none" black and with "standard" the mean of
            each channel.
    """

    flip: bool = False
    crop: int = 0
    fill: float = 0.0

    def __post_init__(self) -> None:
        check_minimum("Augment.crop", self.crop, 0)
        if not math.isfinite(self.fill):
            raise ConfigError(f"Augment.fill must be a finite number; it is {self.fill}")
        check_switch(self, Switch("crop", {"fill": ()}), "Augment")

    @property
    def is_active(self) -> bool:
        """Whether any image is ever changed."""
        return self.flip or self.crop > 0

    def check(self, x: Stored) -> None:
        """Reject inputs that are not images [n, channels, height, width] larger than the padding.

        Any input is accepted if no augmentation is active.
        """
        if not self.is_active:
            return
        if isinstance(x, dict) or x.ndim != 4:
            shapes = f"named ones ({', '.join(x)})" if isinstance(x, dict) else str(list(x.shape))
            raise DataError(f"augment.flip and augment.crop need images [n, C, height, width], not {shapes}.")
        if self.crop >= min(x.shape[2:]):
            raise DataError(
                "augment.crop must be smaller than the images, or some show nothing but padding; it is "
                f"{self.crop}, they are {x.shape[2]}×{x.shape[3]}."
            )

    def apply(self, x: Inputs, generator: torch.Generator, quarter_turns: int = 0) -> Inputs:
        """Augment images at random.

        Args:
            x: images [b, channels, height, width] on any device; they stay unchanged.
            generator: CPU generator, so that every device sees the same draws. One number is drawn per image, in
                order, so two batches draw the same numbers as one batch that holds both.
            quarter_turns: number of quarter turns by which the images were rotated before; after an odd number they
                are mirrored top to bottom, so that the rotated image is mirrored as the upright one would be.

        Returns:
            New images of the same shape in channels-last layout, or ``x`` itself if no augmentation is active.
        """
        self.check(x)
        if isinstance(x, dict) or not self.is_active:
            return x
        return self.change(x, self.draw(len(x), generator).to(x.device), quarter_turns)

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw one augmentation (mirror, top, left) per image as a number, int64 [count, 1]."""
        return torch.randint((1 + self.flip) * (2 * self.crop + 1) ** 2, (count, 1), generator=generator)

    def change(self, x: Tensor, draw: Tensor, quarter_turns: int = 0) -> Tensor:
        """Augment images as :meth:`apply` does, with given draws of :meth:`draw` on their device."""
        b, channels, height, width = x.shape
        p, offset_count = self.crop, 2 * self.crop + 1
        is_mirrored, top_edge, left_edge = (
            draw >= offset_count**2,
            draw // offset_count % offset_count,
            draw % offset_count,
        )
        rows, columns = torch.arange(height, device=x.device), torch.arange(width, device=x.device)
        # rot90(mirror left to right) = (mirror top to bottom)(rot90)
        if quarter_turns % 2:
            rows = torch.where(is_mirrored, rows.flip(0), rows)
        else:
            columns = torch.where(is_mirrored, columns.flip(0), columns)
        # Positions in the padded images of the batch, flattened.
        row_index = torch.arange(b, device=x.device)[:, None] * (height + 2 * p) + top_edge + rows
        pixel_index = (row_index * (width + 2 * p))[:, :, None] + (columns + left_edge)[:, None, :]
        padded_images = functional.pad(x, (p, p, p, p), value=self.fill) if p else x
        out = padded_images.permute(0, 2, 3, 1).reshape(-1, channels).index_select(0, pixel_index.flatten())
        return out.reshape(b, height, width, channels).permute(0, 3, 1, 2)


NO_AUGMENT = Augment()
"""No augmentation: images stay unchanged."""
