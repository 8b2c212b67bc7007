"""Image files in a folder for each class, and the conversion of images to tensors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..core.errors import ConfigError, DataError
from .counting import at_least
from .dataset import Dataset, Examples
from .files import folder_of, pixels

if TYPE_CHECKING:
    from PIL.Image import Image

_ENDINGS = frozenset([".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"])
_TEST_NAMES = ("test", "val", "valid", "validation")


@dataclass(frozen=True)
class Folder:
    """Image files in a folder for each class, as ImageNet is laid out.

    Either ``train/CLASS/...`` with ``test/CLASS/...`` (or ``val``, ``valid``, ``validation``, looked for in this
    order) as the test part, or just ``CLASS/...`` without a test part. Classes are in alphabetical order. Files that
    are no images by their endings, and hidden ones, are left out. Needs ``pip install 'fedlowrank[images]'``.

    Attributes:
        path: the folder.
        size: height and width to which every image is resized (bilinear; the aspect ratio is not kept), or None if all
            images have the same size already.
        channels: 3 for color, 1 for gray levels.
    """

    path: str
    size: int | None = 32
    channels: int = 3

    def __post_init__(self) -> None:
        check_image_settings(self.size, self.channels)

    def load(self) -> Dataset:
        """The images as [n, channels, height, width] in [0, 1].

        Raises:
            DataError: if pillow is missing, a class has no images, an image is broken, sizes differ, or the test part
                has a class that the training part lacks.
        """
        root = folder_of(self.path)
        whole = not (root / "train").is_dir()
        train = root if whole else root / "train"
        test = None if whole else next((root / name for name in _TEST_NAMES if (root / name).is_dir()), None)
        classes = _classes(train)
        if test is not None and (unknown := sorted(set(_classes(test)) - set(classes))):
            raise DataError(f"{str(test)!r} holds classes that {str(train)!r} lacks: {', '.join(map(repr, unknown))}.")
        return Dataset(
            root.resolve().name,
            self._part(train, classes),
            None if test is None else self._part(test, classes),
            tuple(classes),
        )

    def _part(self, folder: Path, classes: list[str]) -> Examples:
        files, labels = [], []
        for label, name in enumerate(classes):
            found = _images(folder / name)
            files += found
            labels += [label] * len(found)
        image = pillow()
        x = stack_images((_open(image, file) for file in files), len(files), self.size, self.channels, files)
        return Examples(x, torch.tensor(labels, dtype=torch.int64))


def check_image_settings(size: int | None, channels: int | None) -> None:
    """Refuse sizes and channels that no image has.

    Raises:
        ConfigError: if the size is below 1, or the channels are neither 1 nor 3.
    """
    if size is not None:
        at_least("size", size, 1)
    if channels not in (1, 3):
        raise ConfigError(f"channels must be 3 (color) or 1 (gray levels), not {channels!r}.")


def pillow() -> Any:
    """The module ``PIL.Image``.

    Raises:
        DataError: if pillow is not installed.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError("reading images needs pillow: pip install 'fedlowrank[images]'") from error
    return Image


def stack_images(
    images: Iterable[Image], count: int, size: int | None, channels: int, names: list[Path] | None = None
) -> torch.Tensor:
    """Images of pillow as one tensor.

    Args:
        images: ``count`` images, taken one at a time.
        count: how many.
        size: height and width of the result, or None to keep the common size of all.
        channels: 3 for color, 1 for gray levels.
        names: their names for messages, or None to name them by their place.

    Returns:
        float32 [count, channels, height, width] in [0, 1].

    Raises:
        DataError: if an image cannot be decoded, or if sizes differ and ``size`` is None.
    """
    image_module = pillow()
    out: np.ndarray | None = None
    for i, image in enumerate(images):
        where = f"image {str(names[i])!r}" if names else f"image {i} (counted from 0)"
        try:
            plain = image.convert("L" if channels == 1 else "RGB")
            if size is not None and plain.size != (size, size):
                plain = plain.resize((size, size), image_module.Resampling.BILINEAR)
        # Pillow's decoders report broken files in all of these ways.
        except (OSError, SyntaxError, ValueError, EOFError, image_module.DecompressionBombError) as error:
            raise DataError(f"{where} cannot be decoded: {error}") from error
        values = np.asarray(plain, dtype=np.uint8)
        values = values[None] if channels == 1 else values.transpose(2, 0, 1)
        if out is None:
            out = np.empty((count, *values.shape), dtype=np.uint8)
        if values.shape != out.shape[1:]:
            (h, w), (first_h, first_w) = values.shape[1:], out.shape[2:]
            raise DataError(f"{where} is {h}x{w}, but the first one is {first_h}x{first_w}. Set data.size.")
        out[i] = values
    if out is None:
        raise DataError("there are no images.")
    return pixels(out)


def _open(image_module: Any, file: Path) -> Image:
    try:
        # Decoded while the file is open: a large folder would otherwise run out of open files.
        with file.open("rb") as stream:
            image: Image = image_module.open(stream)
            image.load()
    except (OSError, SyntaxError, ValueError, EOFError, image_module.DecompressionBombError) as error:
        raise DataError(f"image {str(file)!r} cannot be decoded: {error}") from error
    return image


def _classes(folder: Path) -> list[str]:
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if not names:
        raise DataError(f"{str(folder)!r} holds no folder for any class.")
    return names


def _images(folder: Path) -> list[Path]:
    found = sorted(
        file for file in folder.rglob("*") if file.suffix.lower() in _ENDINGS and not file.name.startswith(".")
    )
    if not found and folder.is_dir():
        raise DataError(f"the folder {str(folder)!r} of a class holds no image.")
    return found
