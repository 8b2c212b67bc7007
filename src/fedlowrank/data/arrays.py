"""Data sets that the user saved as numpy arrays, and the conversion of arrays to examples."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ..core.arguments.field_checks import CheckedFields
from ..core.errors import DataError, did_you_mean
from .dataset import Dataset, Examples
from .download.data_files import check_file, expand_path
from .input_types import InputTypes, warn_of_rounding
from .partitioning.checks import check_finite_values, describe_array
from .user_data.user_arrays import find_label_warning, find_target_hint, find_target_warning

MAX_UNSEEN_CLASSES = 10_000
"""Number of classes up to which there may be more of them than labels."""

ImageLayout = Literal["as_is", "hw", "hwc"]


@dataclass(frozen=True)
class Arrays(CheckedFields):
    """An ``.npz`` file with ``x_train``, ``y_train``, optionally ``x_test``, ``y_test``; or ``x`` and ``y``.

    Unsigned bytes as inputs are pixels and are divided by 255; other numbers stay unchanged (save ids of words or
    characters as int64). Labels are whole numbers from 0 on, or text; labels [n, ...] of pixels or tokens are whole
    numbers, with a negative number where there is no label. Floating-point targets ``y`` [n, d] or [n, ...] make a
    regression, or several labels with ``loss.kind = "bce"``. ``client_train`` and ``client_test`` (or ``client``, for
    the training part) hold the natural client of each example: whole numbers, negative for none, or text. ``classes``
    holds the names of the classes as text. Arrays under unrelated names are ignored. Pickled objects are rejected.

    Attributes:
        path: path of the file.
        layout: axes of the inputs: ``as_is`` for [n, features] and [n, channels, height, width]; ``hw`` for gray
            images [n, height, width]; ``hwc`` for images with the channels last.
    """

    path: str
    layout: ImageLayout = "as_is"

    def load(self) -> Dataset:
        """Read the arrays, with inputs as float32.

        Raises:
            DataError: if the file is damaged, or an array is missing, unknown or of the wrong type.
        """
        file = Path(expand_path(self.path))
        arrays, source = _read(file), repr(str(file))
        suffix = "_train" if "x_train" in arrays or "y_train" in arrays else ""
        array_names = {"x", "y", "client", "classes"}
        if suffix:
            parts = ("train", "test")
            array_names = {
                "client",
                "classes",
                *(f"{n}_{part}" for n in ("x", "y", "client") for part in parts),
            }
        # A misspelt name must not be ignored silently.
        for name in sorted(
            n for n in set(arrays) - array_names if n.startswith(("x", "y", "client", "class"))
        ):
            raise DataError(f"{source} holds an unknown array {name!r}. " + did_you_mean(name, array_names))
        if "client" in arrays and "client_train" in arrays:
            raise DataError(f"{source} holds both 'client' and 'client_train'.")
        suffixes = [suffix, "_test"] if "x_test" in arrays or "y_test" in arrays else [suffix]
        types = InputTypes()
        inputs = [
            self._inputs(_find_array(arrays, "x" + e, source), f"'x{e}' in {source}", types) for e in suffixes
        ]
        targets, classes = _convert_targets(
            [_find_array(arrays, "y" + e, source) for e in suffixes], inputs, arrays, source
        )
        ids = [arrays.get("client" + suffix, arrays.get("client")), arrays.get("client_test")]
        (train_clients, test_clients), client_names = encode_clients(ids, f"the client ids in {source}")
        try:
            train, *test_parts = [Examples(x, y) for x, y in zip(inputs, targets, strict=True)]
        except DataError as error:
            raise DataError(f"{source}: {error}") from error
        test = test_parts[0] if test_parts else None
        warnings = [types.warning(), find_target_warning([train.y])]
        if "classes" not in arrays:
            warnings.append(find_label_warning([train.y, *(part.y for part in test_parts)]))
        notes = tuple(note for note in warnings if note)
        return Dataset(
            file.stem,
            train,
            test,
            classes,
            train_clients,
            test_clients,
            notes=notes,
            natural_names=client_names,
        )

    def _inputs(self, x: np.ndarray, description: str, types: InputTypes) -> Tensor:
        if self.layout != "as_is":
            axes = {"hw": 3, "hwc": 4}[self.layout]
            if x.ndim != axes:
                raise DataError(
                    f"{description}: layout {self.layout!r} needs {axes} axes, found {list(x.shape)}."
                )
            x = x[:, None] if self.layout == "hw" else x.transpose(0, 3, 1, 2)
        return convert_array(x, description, types)


def convert_array(x: np.ndarray, description: str, types: InputTypes) -> Tensor:
    """Convert inputs [n, ...] to a contiguous float32 tensor; see :mod:`fedlowrank.data.input_types`."""
    if x.dtype == np.uint8 and x.ndim:
        return types.convert(torch.from_numpy(np.array(x, order="C")), description)
    return types.convert(to_float32(x, description), description)


def to_float32(x: np.ndarray, description: str, role: Literal["inputs", "targets"] = "inputs") -> Tensor:
    """Convert real numbers [n, ...] to a contiguous float32 tensor, with a warning of those that it cannot distinguish."""
    if x.ndim == 0 or x.dtype.kind not in "biuf":
        raise DataError(f"{description} must be numbers [n, ...], not {describe_array(x)}.")
    warn_of_rounding(x, description, role)
    with np.errstate(over="ignore"):
        numbers = torch.from_numpy(np.array(x, dtype=np.float32, order="C"))
    # the data set rejects what is not finite before, with its position
    if x.dtype == np.float64 and np.isfinite(x).all():
        check_finite_values(description, numbers, torch.from_numpy(np.ascontiguousarray(x)))
    return numbers


def encode_labels(parts: list[np.ndarray], description: str) -> tuple[list[Tensor], tuple[str, ...]]:
    """Encode labels as numbers.

    Args:
        parts: labels of each part: whole numbers from 0 on, booleans, or text.
        description: description of the labels, for messages.

    Returns:
        int64 labels of each part, and the names of the classes: the sorted texts, or the numbers up to the largest.
    """
    if all(part.dtype.kind == "U" and part.ndim == 1 for part in parts):
        names = np.unique(np.concatenate(parts))
        return [torch.from_numpy(np.searchsorted(names, part)) for part in parts], tuple(map(str, names))
    labels = [_to_int64(part, description) for part in parts]
    if not all(len(y) for y in labels):
        raise DataError(f"{description}: a part is empty.")
    if (min_label := min(int(y.min()) for y in labels)) < 0:
        raise DataError(f"{description} must count from 0; there is a {min_label}.")
    label_count, max_label = sum(map(len, labels)), max(int(y.max()) for y in labels)
    if max_label >= max(MAX_UNSEEN_CLASSES, label_count):
        raise DataError(
            f"{description} are the indices of classes, from 0 on; there is a {max_label}, and only {label_count} labels. Number "
            "them, such as by numpy.unique(y, return_inverse=True), or give them as text."
        )
    return labels, tuple(map(str, range(1 + max_label)))


def _encode_dense(parts: list[np.ndarray], description: str) -> tuple[list[Tensor], tuple[str, ...]]:
    """Encode labels [n, ...] of pixels or tokens; the names of the classes are their numbers.

    Negative labels mark pixels or tokens without a label, which the loss leaves out.
    """
    labels = [torch.from_numpy(part.astype(np.int64)) for part in parts]
    if not all(y.numel() for y in labels):
        raise DataError(f"{description}: a part is empty.")
    if (max_label := max(int(y.max()) for y in labels)) < 0:
        raise DataError(f"{description} are all negative, which marks pixels or tokens without a label.")
    return labels, tuple(map(str, range(1 + max_label)))


def encode_clients(
    parts: list[np.ndarray | None], description: str
) -> tuple[list[Tensor | None], tuple[str, ...]]:
    """Encode client ids, whole numbers or text; the same text gets the same number in all parts.

    Returns:
        The ids of each part, and the names of the clients if they are text.
    """
    texts = [part for part in parts if part is not None and part.dtype.kind == "U"]
    if not texts:
        return [None if part is None else _to_int64(part, description) for part in parts], ()
    if any(part is not None and (part.dtype.kind != "U" or part.ndim != 1) for part in parts):
        raise DataError(f"{description} must be whole numbers [n] or text [n], the same in all parts.")
    names = np.unique(np.concatenate(texts))
    encoded = [None if part is None else torch.from_numpy(np.searchsorted(names, part)) for part in parts]
    return encoded, tuple(map(str, names))


def _convert_targets(
    parts: list[np.ndarray], inputs: list[Tensor], arrays: Mapping[str, np.ndarray], source: str
) -> tuple[list[Tensor], tuple[str, ...]]:
    """Convert real targets, which have no classes, or encode labels with the names of their classes."""
    if all(y.dtype.kind == "f" and y.ndim > 1 for y in parts):
        if "classes" in arrays:
            raise DataError(f"{source} names classes, but its targets are real numbers, a regression.")
        return [to_float32(y, f"the targets in {source}", "targets") for y in parts], ()
    for y, x in zip(parts, inputs, strict=True):
        # rows with a single 1 are labels of tokens if the inputs have as many places
        if y.ndim == 2 and y.dtype.kind in "iu" and x.shape[1:2] == y.shape[1:] != (1,):
            continue
        if y.dtype.kind in "biuf" and (hint := find_target_hint(torch.as_tensor(y))):
            raise DataError(f"the labels in {source} must not be {describe_array(y)}. {hint}")
    if all(y.dtype.kind in "iu" and y.ndim > 1 for y in parts):
        labels, classes = _encode_dense(parts, f"the labels in {source}")
    else:
        labels, classes = encode_labels(parts, f"the labels in {source}")
    if "classes" not in arrays:
        return labels, classes
    names = arrays["classes"]
    if names.ndim != 1 or names.dtype.kind != "U" or parts[0].dtype.kind == "U":
        raise DataError(f"{source}: 'classes' must be text [classes], beside labels that are whole numbers.")
    if len(names) < len(classes):
        raise DataError(
            f"{source}: 'classes' has {len(names)} names, but labels go up to {len(classes) - 1}."
        )
    return labels, tuple(map(str, names))


def _to_int64(values: np.ndarray, description: str) -> Tensor:
    if values.ndim != 1 or values.dtype.kind not in "iub":
        raise DataError(f"{description} must be whole numbers [n], not {describe_array(values)}.")
    return torch.from_numpy(values.astype(np.int64))


def _read(file: Path) -> dict[str, np.ndarray]:
    check_file(file)
    try:
        # numpy does not close a file that it cannot read
        with file.open("rb") as stream:
            content = np.load(stream, allow_pickle=False)
            if isinstance(content, np.ndarray):
                raise DataError(f"{str(file)!r} holds a single array; save x and y with numpy.savez.")
            with content:
                return {name: content[name] for name in content.files}
    except (OSError, EOFError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{str(file)!r} cannot be read as an .npz file of plain arrays: {error}") from error


def _find_array(arrays: Mapping[str, np.ndarray], name: str, source: str) -> np.ndarray:
    if name not in arrays:
        array_names = ", ".join(map(repr, sorted(arrays))) or "none"
        raise DataError(f"{source} lacks the array {name!r}; it holds {array_names}.")
    return arrays[name]
