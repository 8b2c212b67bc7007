"""Random changes of the images that a client trains on: mirrored, and cropped at a random place after padding."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ..core.errors import ConfigError, DataError
from .counting import at_least
from .dataset import Inputs, Stored


@dataclass(frozen=True)
class Augment:
    """How the images of training batches are changed at random; by default not at all.

    Every image of every step gets a draw of its own, at each pass of training (the adaptation that some methods do
    before inference is one). Statistics over the training data, validation and test see the images as they are.

    Attributes:
        flip: mirror each image left to right with probability 1/2. Images that were turned by a quarter before, as
            concept 'rotation' does, are mirrored along the axis that was left to right before the turn.
        crop: pixels of padding on each side before a crop of the original size at a random place; 0 does not crop.
        fill: value of the padding in the units of the inputs. 0 is the darkest value of the training part with
            data.normalize = "scale" (black, where it has a black pixel), black with "none" and the mean of each channel
            with "standard".
    """

    flip: bool = False
    crop: int = 0
    fill: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.flip, bool):
            raise ConfigError(f"augment.flip must be true or false, not {self.flip!r}.")
        at_least("augment.crop", self.crop, 0)
        if isinstance(self.fill, bool) or not isinstance(self.fill, int | float) or not math.isfinite(self.fill):
            raise ConfigError(f"augment.fill must be a finite number, not {self.fill!r}.")

    @property
    def active(self) -> bool:
        """Whether any image is ever changed."""
        return self.flip or self.crop > 0

    def check(self, x: Stored) -> None:
        """Refuse inputs whose pixels cannot be moved.

        Args:
            x: inputs [n, ...] or several by name.

        Raises:
            DataError: if they are no images [n, channels, height, width], or so small that a crop could lie wholly in
                the padding. Never, if nothing is to be changed.
        """
        if not self.active:
            return
        if isinstance(x, dict) or x.ndim != 4:
            found = f"named ones ({', '.join(x)})" if isinstance(x, dict) else str(list(x.shape))
            raise DataError(
                f"augment.flip and augment.crop need images [n, channels, height, width] as inputs, not {found}."
            )
        if self.crop >= min(x.shape[2:]):
            raise DataError(
                f"augment.crop must be smaller than the images, or some show nothing but padding; it is {self.crop}, "
                f"they are {x.shape[2]}×{x.shape[3]}."
            )

    def apply(self, x: Inputs, generator: torch.Generator, quarter_turns: int = 0) -> Inputs:
        """Images changed at random.

        Args:
            x: images [b, channels, height, width] on any device; they are left alone.
            generator: on the CPU, so that every device sees the same draws. One number is drawn for each image, in
                order: two batches draw like one that holds both.
            quarter_turns: by which the images were turned before; after an odd number of them they are mirrored top to
                bottom, so that the turned image is mirrored as the upright one would be.

        Returns:
            New images of the same shape in channels-last layout; ``x`` itself if nothing is to be changed.

        Raises:
            DataError: see :meth:`check`.
        """
        self.check(x)
        if isinstance(x, dict) or not self.active:
            return x
        return self.change(x, self.draw(len(x), generator).to(x.device), quarter_turns)

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """What befalls so many images, int64 [count, 1]; see :meth:`apply`."""
        return torch.randint((1 + self.flip) * (2 * self.crop + 1) ** 2, (count, 1), generator=generator)

    def change(self, x: Tensor, draw: Tensor, quarter_turns: int = 0) -> Tensor:
        """Images changed as was drawn.

        Args:
            x: images [b, channels, height, width]; they are left alone.
            draw: of these images, by :meth:`draw`, on their device.
            quarter_turns: see :meth:`apply`.

        Returns:
            New images of the same shape in channels-last layout.
        """
        b, channels, height, width = x.shape
        p, places = self.crop, 2 * self.crop + 1
        mirrored, top, left = draw >= places**2, draw // places % places, draw % places
        down, across = torch.arange(height, device=x.device), torch.arange(width, device=x.device)
        # rot90(mirror left to right) = (mirror top to bottom)(rot90)
        if quarter_turns % 2:
            down = torch.where(mirrored, down.flip(0), down)
        else:
            across = torch.where(mirrored, across.flip(0), across)
        across = across + left
        rows = torch.arange(b, device=x.device)[:, None] * (height + 2 * p) + top + down
        pixels = (rows * (width + 2 * p))[:, :, None] + across[:, None, :]
        padded = functional.pad(x, (p, p, p, p), value=self.fill) if p else x
        out = padded.permute(0, 2, 3, 1).reshape(-1, channels).index_select(0, pixels.flatten())
        return out.reshape(b, height, width, channels).permute(0, 3, 1, 2)


UNCHANGED = Augment()
"""Images as they are."""
