"""Image files in a folder per class, and the conversion of images to tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...core.arguments.bounds import check_minimum
from ...core.arguments.field_checks import CheckedFields
from ...core.errors import ConfigError, DataError, warn_user
from ..dataset import Dataset, Examples
from ..download.data_files import check_folder
from ..input_types import scale_bytes
from .image_folders import FolderLayout, FoundImages, ImageFile, find_images

if TYPE_CHECKING:
    from PIL.Image import Image


_ORIENTATION_TAG = 0x0112
"""EXIF tag of the camera's orientation."""

_MAX_DARK_VALUE = 2**15
"""Largest value of dark 16-bit images: below it, the upper 8 bits use less than half of the levels."""


@dataclass
class ImageLosses:
    """Counts of information lost when images become bytes, over all parts of a data set.

    Attributes:
        animated: number of images with several frames, of which the first is used.
        transparent: number of images with transparency, which is dropped.
        deep: number of 16-bit images, whose lower 8 bits are dropped.
        max_16_bit: largest value of the 16-bit images.
    """

    animated: int = 0
    transparent: int = 0
    deep: int = 0
    max_16_bit: int = 0

    def add(self, image: Image) -> None:
        """Count an opened image."""
        self.animated += getattr(image, "n_frames", 1) > 1
        self.transparent += image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info
        if image.mode.startswith("I;16"):
            self.deep += 1
            self.max_16_bit = max(self.max_16_bit, int(np.asarray(image).max()))

    def report(self) -> tuple[str, ...]:
        """Return notes on the losses; warn of images that become nearly black."""
        if self.deep and self.max_16_bit < _MAX_DARK_VALUE:
            warn_user(
                f"the {self.deep} images of 16 bits have no value above {self.max_16_bit}, and of 16 bits the upper 8 are kept: "
                "they become dark and lose most levels. Scale their values to 0..65535, or save them with 8 bits."
            )
        counts = (
            (self.animated, "have several frames, of which the first is used"),
            (self.transparent, "have transparency, which is dropped"),
        )
        return tuple(f"images that {loss}: {count}" for count, loss in counts if count)


@dataclass(frozen=True)
class Folder(CheckedFields):
    """Image files in a folder for each class, or for each client and class.

    The layout is ``CLASS/file``, as in ImageNet, or ``CLIENT/CLASS/file``, whose clients partition ``natural`` uses;
    clients may lack classes. Both may be in ``train/...`` with ``test/...`` (or ``testing``, ``val``, ``valid``,
    ``validation``, in this order) as the test part, and clients may have their own parts,
    ``CLIENT/train/CLASS/file``. Classes are in alphabetical order. Hidden files and folders, and files without the
    ending of an image, are ignored. Needs ``pip install 'fedlowrank[images]'``.

    Attributes:
        path: path of the folder.
        size: height and width to which every image is resized (bilinear; the aspect ratio is not kept), or None if
            all images have the same size already.
        channels: number of channels of images: 3 for color, 1 for gray levels.
        layout: ``class`` for CLASS/file; ``client_class`` for CLIENT/CLASS/file; ``auto`` decides by the locations of
            the images. It treats the folders of the first level as classes if they hold images directly, or all hold
            one and the same subfolder; and as clients if several hold a subfolder of the same name. Anything else is
            an error.
    """

    path: str
    size: int | None = 32
    channels: int = 3
    layout: FolderLayout = "auto"

    def __post_init__(self) -> None:
        check_image_settings(self.size, self.channels)

    def load(self) -> Dataset:
        """Load the images as [n, channels, height, width] in [0, 1].

        Raises:
            DataError: if pillow is missing, the folders do not determine the layout, a class has no images, an image
                is broken, sizes differ, or the test part has a class that the training part lacks.
        """
        root = check_folder(self.path)
        images, losses = find_images(root, self.layout), ImageLosses()
        train, train_clients = self._read_part(images, images.train, losses)
        test, test_clients = (
            (None, None) if images.test is None else self._read_part(images, images.test, losses)
        )
        return Dataset(
            root.resolve().name,
            train,
            test,
            images.classes,
            train_clients,
            test_clients,
            notes=(*images.notes, *losses.report()),
            natural_names=images.clients,
        )

    def _read_part(
        self, found_images: FoundImages, files: Sequence[ImageFile], losses: ImageLosses
    ) -> tuple[Examples, torch.Tensor | None]:
        """Read the images of a part, and the number of each image's client."""
        pillow = import_pillow()
        names = [f"image {str(file.path)!r}" for file in files]
        images = (pillow.open(file.path) for file in files)
        x = stack_images(images, names, self.size, self.channels, losses)
        label_numbers = {name: i for i, name in enumerate(found_images.classes)}
        client_numbers = {name: i for i, name in enumerate(found_images.clients)}
        y = torch.tensor([label_numbers[file.label] for file in files], dtype=torch.int64)
        owners = [client_numbers[file.client] for file in files if file.client is not None]
        return Examples(x, y), torch.tensor(owners, dtype=torch.int64) if owners else None


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
    images: Iterator[Image],
    names: Sequence[str],
    size: int | None,
    channels: int,
    losses: ImageLosses,
) -> torch.Tensor:
    """Convert pillow images, opened one at a time, to float32 [n, channels, height, width] in [0, 1].

    Args:
        images: iterator over n images.
        names: names of the images, for messages.
        size: height and width of the result, or None to keep the common size.
        channels: number of channels: 3 for color, 1 for gray levels.
        losses: counter to which the losses of these images are added.

    Raises:
        DataError: if an image cannot be decoded, or if sizes differ and ``size`` is None.
    """
    pillow = import_pillow()
    out: np.ndarray | None = None
    for i, name in enumerate(names):
        try:
            with next(images) as image:
                losses.add(image)
                converted_image = _to_bytes(image, name).convert("L" if channels == 1 else "RGB")
            if size is not None and converted_image.size != (size, size):
                converted_image = converted_image.resize((size, size), pillow.Resampling.BILINEAR)
        # Pillow's decoders report broken files by any of these errors
        except (OSError, SyntaxError, ValueError, EOFError, pillow.DecompressionBombError) as error:
            raise DataError(f"{name} cannot be decoded: {error}") from error
        values = np.asarray(converted_image, dtype=np.uint8)
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


def image_to_array(image: Image, name: str) -> np.ndarray:
    """Convert a pillow image to bytes [channels, height, width]; palettes become colors, one-bit pixels 0 and 255.

    Args:
        image: image of any mode with 8 bits a channel, or 16 bits of gray.
        name: name of the image, for messages.

    Raises:
        DataError: if the image has 32 bits a pixel, or cannot be decoded.
    """
    try:
        converted_image = _to_bytes(image, name)
        # other modes already have bytes
        if mode := {"P": "RGB", "PA": "RGBA", "1": "L"}.get(converted_image.mode):
            converted_image = converted_image.convert(mode)
    except (OSError, SyntaxError, ValueError) as error:
        raise DataError(f"{name} cannot be decoded: {error}") from error
    values = np.array(converted_image, dtype=np.uint8)
    return values[None] if values.ndim == 2 else values.transpose(2, 0, 1)


def _to_bytes(image: Image, name: str) -> Image:
    """Convert to an upright image of 8 bits a channel; 16-bit values keep their upper 8 bits, where pillow would clip at 255."""
    # calling exif_transpose alone would copy the pixels
    if image.getexif().get(_ORIENTATION_TAG, 1) != 1:
        image = import_module("PIL.ImageOps").exif_transpose(image)
    if image.mode.startswith("I;16"):
        values = np.asarray(image)
        byte_image: Image = import_pillow().fromarray((values // 256).astype(np.uint8))
        return byte_image
    if image.mode in ("I", "F"):
        raise DataError(
            f"{name} has pixels of 32 bits (mode {image.mode!r}), whose range is not known. Save it with 8 or 16 bits, "
            "or save the values as an .npz file for source = 'arrays'."
        )
    return image
