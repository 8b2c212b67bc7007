"""Images and tables from data sets of Hugging Face."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from ...core.arguments.field_checks import CheckedFields
from ...core.errors import DataError, did_you_mean
from ...core.key import Key
from ..arrays import convert_array, encode_clients, encode_labels, to_float32
from ..dataset import Dataset, Examples
from ..input_types import InputTypes
from ..partitioning.checks import describe_array
from ..user_data.user_arrays import HUB_WARNING, find_target_warning
from .hub import open_dataset
from .images import ImageLosses, check_image_settings, stack_images


@dataclass(frozen=True)
class HuggingFace(CheckedFields):
    """Any data set that the library ``datasets`` reads, with an image column or numeric columns.

    Needs ``pip install 'fedlowrank[huggingface]'``.

    Attributes:
        path: folder written by ``save_to_disk``; folder of parquet, csv, json or image files, sorted into splits as
            by ``datasets.load_dataset``; one such file; or, if no such path exists, a name on the hub.
        name: configuration of the data set, for data sets that have several.
        train_split: name of the split for training.
        test_split: name of the split for the test part, or None for no test part. A data set saved without splits, or
            a single file, is the training part and has no test part, whatever this setting is.
        features: columns of the inputs. By default the one image column, or else all numeric columns but the label
            and the client. One column of lists or arrays gives [n, ...], several columns of numbers [n, columns].
        label: column of the labels: classes, whole numbers from 0 on, booleans, or text; or of real targets, numbers or lists
            of numbers with a decimal point.
        client: column of natural clients, whole numbers or text, or None.
        size: height and width to which every image is resized, or None to keep the common size.
        channels: number of channels of images: 3 for color, 1 for gray levels.
        cache: folder of the library's cache, or None for the default folder.
    """

    path: str
    name: str | None = None
    train_split: str = "train"
    test_split: str | None = "test"
    features: tuple[str, ...] = ()
    label: str = "label"
    client: str | None = None
    size: int | None = None
    channels: int = 3
    cache: str | None = None

    def __post_init__(self) -> None:
        check_image_settings(self.size, self.channels)

    def load(self) -> Dataset:
        """Load the examples: images as [n, channels, height, width] in [0, 1], numbers unchanged.

        A column of lists of unsigned bytes holds pixels, too, and is divided by 255.

        Raises:
            DataError: if ``datasets`` is missing, nothing can be read from the path, or splits or columns do not fit.
        """
        library, dataset = open_dataset(self.path, self.name, self.cache, "huggingface")
        parts = [dataset] if isinstance(dataset, library.Dataset) else self._choose_splits(dataset)
        (train, *test), classes, notes = self.read_parts(library, parts)
        ids = [None if self.client is None else _read_column(part, self.client) for part in parts]
        client_numbers, client_names = encode_clients(ids, f"the column {self.client!r}")
        natural_clients = [*client_numbers, None]
        name = Path(self.path).name or self.path
        test_part = test[0] if test else None
        if warning := find_target_warning([train.y], HUB_WARNING):
            notes = (*notes, warning)
        return Dataset(
            name,
            train,
            test_part,
            classes,
            natural_clients[0],
            natural_clients[1],
            notes=notes,
            natural_names=client_names,
        )

    def read_parts(
        self,
        library: Any,
        parts: Sequence[Any],
        *,
        learns_numbers: bool = False,
        key: Key = Key(("transform",)),  # noqa: B008 - a key is a constant
    ) -> tuple[list[Examples], tuple[str, ...], tuple[str, ...]]:
        """Read the examples of several ``datasets.Dataset`` with the same columns, the names of the classes, and notes.

        Args:
            library: the module ``datasets``.
            parts: data sets to read; classes are numbered over all of them.
            learns_numbers: whether whole numbers are real targets, too.
            key: key of the random draws of transforms (``with_transform``), which are applied once to each example.

        Raises:
            DataError: if a column is missing or cannot be used, or a transform fails.
        """
        stored_parts = parts
        parts = [self._apply_transform(library, part, key / i) for i, part in enumerate(parts)]
        for part in parts:
            for column in (self.label, self.client, *self.features):
                if column is not None and column not in part.features:
                    hint = did_you_mean(column, part.features)
                    raise DataError(f"{self.path!r} has no column {column!r}. {hint}")
        columns = self._choose_columns(library, parts[0], stored_parts[0])
        types, losses = InputTypes(), ImageLosses()
        inputs = [self._read_inputs(library, part, columns, types, losses) for part in parts]
        notes = ((warning,) if (warning := types.warning()) else ()) + losses.report()
        labels, classes = self._read_labels(library, parts, stored_parts, learns_numbers)
        return [Examples(x, y) for x, y in zip(inputs, labels, strict=True)], classes, notes

    def _choose_splits(self, splits: Any) -> list[Any]:
        """Choose the training part, and the test part if there is one."""
        names = [name for name in (self.train_split, self.test_split) if name is not None]
        for name in names:
            if name not in splits:
                hint = " Set test_split to None if there is no test part." if name == self.test_split else ""
                raise DataError(f"{self.path!r} has no split {name!r}. {did_you_mean(name, splits)}{hint}")
        return [splits[name] for name in names]

    def _apply_transform(self, library: Any, part: Any, key: Key) -> Any:
        """Read a data set once through the user's transform, if it has one."""
        if part.format["type"] != "custom" or not len(part):
            return part
        rows = []
        with key.global_generators():
            for i in range(len(part)):
                try:
                    rows.append({name: _to_plain(value) for name, value in part[i].items()})
                except Exception as error:
                    raise DataError(
                        f"the transform of {self.path!r} (with_transform) fails at example {i}: {type(error).__name__}: {error}"
                    ) from error
                if rows[i].keys() != rows[0].keys():
                    raise DataError(
                        f"the transform of {self.path!r} (with_transform) makes the columns {[*rows[0]]} of example 0 and "
                        f"{[*rows[i]]} of example {i}. Return the same columns for all"
                    )
        return library.Dataset.from_dict({name: [row[name] for row in rows] for name in rows[0]})

    def _choose_columns(self, library: Any, part: Any, stored_part: Any) -> list[str]:
        """Choose the columns of the inputs; a transform may have made arrays of the images of the stored part."""
        if self.features:
            return list(self.features)
        candidates = {
            name: feature for name, feature in part.features.items() if name not in (self.label, self.client)
        }
        images = [
            name
            for name, feature in candidates.items()
            if isinstance(stored_part.features.get(name, feature), library.Image)
        ]
        if len(images) > 1:
            raise DataError(f"{self.path!r} has several image columns, {images}. Set data.features.")
        numbers = [name for name, feature in candidates.items() if _is_number(library, feature)]
        if not images and not numbers:
            column_types = ", ".join(f"{name}: {feature}" for name, feature in candidates.items())
            raise DataError(
                f"{self.path!r} has no column of images or numbers ({column_types}). Set data.features."
            )
        return images or numbers

    def _read_inputs(
        self, library: Any, part: Any, columns: list[str], types: InputTypes, losses: ImageLosses
    ) -> Tensor:
        description = f"the column{'s' if len(columns) > 1 else ''} {', '.join(map(repr, columns))}"
        if len(columns) == 1 and isinstance(part.features[columns[0]], library.Image):
            images = (row[columns[0]] for row in part.select_columns(columns).with_format(None))
            names = [f"image {i} (counted from 0)" for i in range(len(part))]
            return stack_images(images, names, self.size, self.channels, losses)
        values = [_read_column(part, column) for column in columns]
        if len(values) > 1 and any(v.ndim != 1 for v in values):
            raise DataError(
                f"{description}: several columns must hold single numbers. Name one of lists alone."
            )
        if values[0].ndim == 1:
            # a table may store a feature in a byte
            return to_float32(np.stack(values, axis=1), description)
        # the library returns all whole numbers as int64, so the stored type decides
        x, stored_type = values[0], _find_stored_type(part.features[columns[0]])
        return convert_array(x.astype(np.uint8) if stored_type == "uint8" else x, description, types)

    def _read_labels(
        self, library: Any, parts: Sequence[Any], stored_parts: Sequence[Any], learns_numbers: bool
    ) -> tuple[list[Tensor], tuple[str, ...]]:
        description = f"the column {self.label!r}"
        values = [_read_column(part, self.label) for part in parts]
        if learns_numbers or all(v.dtype.kind == "f" for v in values):
            # a column of single numbers is the target of one output
            return [to_float32(v if v.ndim > 1 else v[:, None], description, "targets") for v in values], ()
        if any(v.ndim > 1 for v in values):
            raise DataError(
                f"{description} holds lists of whole numbers, {describe_array(values[0])}. For several labels an example set "
                "loss='bce' in Federation.from_partitions, or store them with a decimal point; for one class an example store "
                "its number."
            )
        labels, classes = encode_labels(values, description)
        feature = stored_parts[0].features.get(self.label)
        # labels that a transform changed are not those that have the names
        if isinstance(feature, library.ClassLabel) and all(
            part is stored or np.array_equal(labels_of_part, _read_column(stored, self.label))
            for part, stored, labels_of_part in zip(parts, stored_parts, values, strict=True)
        ):
            if any(part.features[self.label] != feature for part in stored_parts):
                raise DataError(f"{description} has other classes in the test part or in another partition.")
            classes = tuple(feature.names)
        return labels, classes


def _read_column(part: Any, column: str) -> np.ndarray:
    """Read a column as an array."""
    array = np.asarray(part.select_columns([column]).with_format("numpy")[:][column])
    if array.dtype.kind == "O":
        texts = array.tolist()
        if not all(isinstance(text, str) for text in texts):
            raise DataError(f"the column {column!r} has missing values or lists of different lengths.")
        array = np.array(texts)
    return array


def _to_plain(value: Any) -> Any:
    """Convert a tensor of one example to an array or a number, as the library stores them."""
    array = value.detach().cpu().numpy() if isinstance(value, Tensor) else value
    return array.item() if isinstance(array, np.ndarray) and not array.ndim else array


def _find_stored_type(feature: Any) -> str:
    """Type of the numbers in nested lists or arrays."""
    while hasattr(feature, "feature"):
        feature = feature.feature
    return str(getattr(feature, "dtype", ""))


def _is_number(library: Any, feature: Any) -> bool:
    types = ("int", "uint", "float", "double", "bool")
    return isinstance(feature, library.Value) and feature.dtype.startswith(types)
