"""Image files in a folder per class, and the conversion of images to tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..core.errors import ConfigError, DataError
from .checks import check_minimum
from .dataset import Dataset, Examples
from .files import check_folder
from .input_types import scale_bytes

if TYPE_CHECKING:
    from PIL.Image import Image

_ENDINGS = frozenset([".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"])
_TEST_NAMES = ("test", "val", "valid", "validation")


@dataclass(frozen=True)
class Folder:
    """Image files in a folder per class, as in ImageNet.

    Either ``train/CLASS/...`` with ``test/CLASS/...`` (or ``val``, ``valid``, ``validation``, in this order)
    as the test part, or just ``CLASS/...`` without a test part. Classes are in alphabetical order. Hidden
    files and files without the ending of an image are ignored. Needs ``pip install 'fedlowrank[images]'``.

    Attributes:
        path: the folder.
        size: height and width to which every image is resized (bilinear; the aspect ratio is not kept), or
            None if all images have the same size already.
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
            DataError: if pillow is missing, a class has no images, an image is broken, sizes differ, or the
                test part has a class that the training part lacks.
        """
        root = check_folder(self.path)
        has_parts = (root / "train").is_dir()
        train = root / "train" if has_parts else root
        test = next((root / name for name in _TEST_NAMES if has_parts and (root / name).is_dir()), None)
        classes = _class_folders(train)
        if test is not None and (unknown := sorted(set(_class_folders(test)) - set(classes))):
            raise DataError(f"{str(test)!r} has classes that {str(train)!r} lacks: {str(unknown)[1:-1]}.")
        test_part = None if test is None else self._read_part(test, classes)
        return Dataset(root.resolve().name, self._read_part(train, classes), test_part, tuple(classes))

    def _read_part(self, folder: Path, classes: list[str]) -> Examples:
        files, labels = [], []
        for label, name in enumerate(classes):
            found = _image_files(folder / name)
            files += found
            labels += [label] * len(found)
        pillow = import_pillow()
        names = [f"image {str(file)!r}" for file in files]
        x = stack_images((pillow.open(file) for file in files), names, self.size, self.channels)
        return Examples(x, torch.tensor(labels, dtype=torch.int64))


def check_image_settings(size: int | None, channels: int) -> None:
    """Reject a size below 1, and channels that are neither 1 nor 3."""
    if size is not None:
        check_minimum("size", size, 1)
    if channels not in (1, 3):
        raise ConfigError(f"channels must be 3 (color) or 1 (gray levels), not {channels!r}.")


def import_pillow() -> Any:
    """Import the module ``PIL.Image``."""
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError("reading images needs pillow: pip install 'fedlowrank[images]'") from error
    return Image


def stack_images(
    images: Iterator[Image], names: Sequence[str], size: int | None, channels: int
) -> torch.Tensor:
    """Convert images of pillow, opened one at a time, to float32 [n, channels, height, width] in [0, 1].

    Args:
        images: n images.
        names: their names for messages.
        size: height and width of the result, or None to keep the common size.
        channels: 3 for color, 1 for gray levels.

    Raises:
        DataError: if an image cannot be decoded, or if sizes differ and ``size`` is None.
    """
    pillow = import_pillow()
    out: np.ndarray | None = None
    for i, name in enumerate(names):
        try:
            with next(images) as image:
                converted = image.convert("L" if channels == 1 else "RGB")
            if size is not None and converted.size != (size, size):
                converted = converted.resize((size, size), pillow.Resampling.BILINEAR)
        # Pillow's decoders report broken files by any of these.
        except (OSError, SyntaxError, ValueError, EOFError, pillow.DecompressionBombError) as error:
            raise DataError(f"{name} cannot be decoded: {error}") from error
        values = np.asarray(converted, dtype=np.uint8)
        values = values[None] if channels == 1 else values.transpose(2, 0, 1)
        if out is None:
            out = np.empty((len(names), *values.shape), dtype=np.uint8)
        if values.shape != out.shape[1:]:
            (h, w), (first_h, first_w) = values.shape[1:], out.shape[2:]
            raise DataError(f"{name} is {h}x{w}, but the first one is {first_h}x{first_w}. Set data.size.")
        out[i] = values
    if out is None:
        raise DataError("there are no images.")
    return scale_bytes(out)


def _class_folders(folder: Path) -> list[str]:
    names = sorted(f.name for f in folder.iterdir() if f.is_dir() and not f.name.startswith("."))
    if not names:
        raise DataError(f"{str(folder)!r} holds no folder for any class.")
    return names


def _image_files(folder: Path) -> list[Path]:
    files = (f for f in folder.rglob("*") if f.suffix.lower() in _ENDINGS and not f.name.startswith("."))
    found = sorted(files)
    if not found and folder.is_dir():
        raise DataError(f"the folder {str(folder)!r} of a class holds no image.")
    return found
