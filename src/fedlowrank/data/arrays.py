"""Data sets saved by the user as arrays of numpy."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from ..core.errors import ConfigError, DataError, did_you_mean
from .dataset import Dataset, Examples
from .files import pixels, whole_labels
from .given import ONE_HOT, advice, is_one_hot

Layout = Literal["as_is", "hw", "hwc"]


@dataclass(frozen=True)
class Arrays:
    """An ``.npz`` file with ``x_train`` and ``y_train``, and optionally ``x_test`` and ``y_test``; or ``x`` and ``y``.

    Inputs of unsigned bytes are taken for pixels and divided by 255; other numbers are taken as they are. Labels are
    whole numbers from 0 on, or text; floating-point targets ``y`` [n, d] make a regression. ``client_train`` and
    ``client_test`` (or ``client``, for the training part) hold the natural client of each example: whole numbers,
    negative for none, or text. ``classes``, text, names the classes. Arrays under unlike names are ignored. Pickled
    objects in the file are refused.

    Attributes:
        path: the file.
        layout: how the inputs lie: ``as_is`` for [n, features] and [n, channels, height, width]; ``hw`` for gray
            images [n, height, width]; ``hwc`` for images with the channels last.
    """

    path: str
    layout: Layout = "as_is"

    def __post_init__(self) -> None:
        if self.layout not in get_args(Layout):
            raise ConfigError(f"unknown layout {self.layout!r}. " + did_you_mean(self.layout, get_args(Layout)))

    def load(self) -> Dataset:
        """The arrays, inputs as float32.

        Raises:
            DataError: if the file is damaged, an array is missing, unknown or of the wrong type.
        """
        file = Path(self.path).expanduser()
        arrays = _read(file)
        where = repr(str(file))
        end = "_train" if "x_train" in arrays or "y_train" in arrays else ""
        known = {"x_train", "y_train", "x_test", "y_test", "client_train", "client_test"} if end else {"x", "y"}
        known |= {"client", "classes"}
        # Arrays under other names do no harm; one that looks like ours but is not would be missed without a word.
        for name in sorted(n for n in set(arrays) - known if n.startswith(("x", "y", "client", "class"))):
            raise DataError(f"{where} holds an unknown array {name!r}. " + did_you_mean(name, known))
        if "client" in arrays and "client_train" in arrays:
            raise DataError(f"{where} holds both 'client' and 'client_train'.")
        parts = [end, "_test"] if "x_test" in arrays or "y_test" in arrays else [end]
        inputs = [self._inputs(_get(arrays, "x" + part, where), where) for part in parts]
        given = [_get(arrays, "y" + part, where) for part in parts]
        if all(y.dtype.kind == "f" and y.ndim == 2 for y in given):
            if "classes" in arrays:
                raise DataError(f"{where} names classes, but its targets are real numbers, a regression.")
            targets = f"the targets in {where}"
            labels, classes = [to_inputs(y, targets, bytes_are_pixels=False) for y in given], tuple[str, ...]()
        else:
            if hint := next((h for y in given if y.dtype.kind in "biuf" and (h := advice(torch.as_tensor(y)))), ""):
                form = f"{given[0].dtype} {list(given[0].shape)}"
                raise DataError(f"the labels in {where} must be whole numbers [n] or text [n], not {form}. {hint}")
            labels, classes = encode_labels(given, f"the labels in {where}")
        if "classes" in arrays:
            classes = _named_classes(arrays, classes, where)
        ids = [arrays.get("client" + end, arrays.get("client")), arrays.get("client_test")]
        natural, natural_test = encode_clients(ids, f"the client ids in {where}")
        examples = [Examples(x, y) for x, y in zip(inputs, labels, strict=True)]
        test = examples[1] if len(examples) > 1 else None
        notes = () if classes or not is_one_hot(labels[0]) else (ONE_HOT,)
        return Dataset(file.stem, examples[0], test, classes, natural, natural_test, notes=notes)

    def _inputs(self, x: np.ndarray, where: str) -> Tensor:
        if self.layout != "as_is":
            dims = {"hw": 3, "hwc": 4}[self.layout]
            if x.ndim != dims:
                raise DataError(f"{where}: layout {self.layout!r} needs inputs of {dims} axes, found {list(x.shape)}.")
            x = x[:, None] if self.layout == "hw" else x.transpose(0, 3, 1, 2)
        return to_inputs(x, f"the inputs in {where}", bytes_are_pixels=True)


def to_inputs(x: np.ndarray, where: str, *, bytes_are_pixels: bool) -> Tensor:
    """Numbers as contiguous float32.

    Args:
        x: numbers [n, ...].
        where: what they are, for messages.
        bytes_are_pixels: whether unsigned bytes are to be divided by 255.

    Raises:
        DataError: if these are no real numbers, or if a number overflows float32.
    """
    if x.ndim == 0 or x.dtype.kind not in "biuf":
        raise DataError(f"{where} must be numbers [n, ...], not {x.dtype} {list(x.shape)}.")
    if bytes_are_pixels and x.dtype == np.uint8:
        return pixels(x)
    with np.errstate(over="ignore"):
        # An overflow becomes an infinity, which the data set refuses with the place where it is.
        return torch.from_numpy(np.array(x, dtype=np.float32, order="C"))


def encode_labels(parts: list[np.ndarray], where: str) -> tuple[list[Tensor], tuple[str, ...]]:
    """Labels as numbers, with the names of the classes.

    Args:
        parts: labels of the training part and others: whole numbers from 0 on, truth values, or text.
        where: what they are, for messages.

    Returns:
        int64 labels of each part; names of the classes: the texts in alphabetical order, or the numbers up to the
        largest.

    Raises:
        DataError: if they are of another type, or negative.
    """
    if all(part.dtype.kind == "U" and part.ndim == 1 for part in parts):
        names, codes = np.unique(np.concatenate(parts), return_inverse=True)
        ends = np.cumsum([len(part) for part in parts])[:-1]
        labels = [torch.from_numpy(y) for y in np.split(codes.astype(np.int64), ends)]
        return labels, tuple(str(name) for name in names)
    labels = [whole_labels(part, where) for part in parts]
    if not all(len(y) for y in labels):
        raise DataError(f"{where}: a part is empty.")
    if (low := min(int(y.min()) for y in labels)) < 0:
        raise DataError(f"{where} must count from 0; there is a {low}.")
    return labels, tuple(str(c) for c in range(1 + max(int(y.max()) for y in labels)))


def encode_clients(parts: list[np.ndarray | None], where: str) -> list[Tensor | None]:
    """Client ids as numbers; the same text gets the same number in all parts.

    Args:
        parts: ids of each part, whole numbers or text, or None.
        where: what they are, for messages.

    Raises:
        DataError: if they are of another type.
    """
    texts = [part for part in parts if part is not None and part.dtype.kind == "U"]
    if not texts:
        return [None if part is None else whole_labels(part, where) for part in parts]
    if any(part is not None and (part.dtype.kind != "U" or part.ndim != 1) for part in parts):
        raise DataError(f"{where} must be whole numbers [n] or text [n], the same in all parts.")
    names = np.unique(np.concatenate(texts))
    return [None if part is None else torch.from_numpy(np.searchsorted(names, part)) for part in parts]


def _named_classes(arrays: Mapping[str, np.ndarray], found: tuple[str, ...], where: str) -> tuple[str, ...]:
    names = arrays["classes"]
    if names.ndim != 1 or names.dtype.kind != "U" or arrays.get("y", arrays.get("y_train", names)).dtype.kind == "U":
        raise DataError(f"{where}: 'classes' must be text [classes], beside labels that are whole numbers.")
    if len(names) < len(found):
        raise DataError(f"{where}: 'classes' names {len(names)} classes, but the labels go up to {len(found) - 1}.")
    return tuple(str(name) for name in names)


def _read(file: Path) -> dict[str, np.ndarray]:
    try:
        # Opened here: numpy leaves a file that it cannot make sense of open.
        with file.open("rb") as stream:
            content = np.load(stream, allow_pickle=False)
            if isinstance(content, np.ndarray):
                raise DataError(f"{str(file)!r} holds a single array; save inputs and labels together: numpy.savez.")
            with content:
                return {name: content[name] for name in content.files}
    except (OSError, EOFError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{str(file)!r} cannot be read as an .npz file of plain arrays: {error}") from error


def _get(arrays: Mapping[str, np.ndarray], name: str, where: str) -> np.ndarray:
    if name not in arrays:
        raise DataError(f"{where} lacks the array {name!r}; it holds {', '.join(map(repr, sorted(arrays))) or 'none'}.")
    return arrays[name]
