"""Data sets of Hugging Face: from the hub, saved to disk, or as parquet, csv and json files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from ..core.errors import DataError, did_you_mean
from .arrays import encode_clients, encode_labels, to_inputs
from .dataset import Dataset, Examples
from .images import check_image_settings, stack_images

_BUILDERS = {".parquet": "parquet", ".csv": "csv", ".tsv": "csv", ".json": "json", ".jsonl": "json"}


@dataclass(frozen=True)
class HuggingFace:
    """Any data set that the library ``datasets`` reads, with an image column or numeric columns.

    Needs ``pip install 'fedlowrank[huggingface]'``.

    Attributes:
        path: a folder written by ``save_to_disk``; a folder of parquet, csv, json or image files, sorted into splits as
            ``datasets.load_dataset`` does; one such file; or, if no such path exists, a name on the hub.
        name: configuration of the data set, for those that have several.
        train_split: split for training.
        test_split: split for the test part, or None for no test part. A data set saved without splits, or a single
            file, is the training part as a whole and has no test part, whatever stands here.
        features: columns of the inputs. None given: the one image column, or else all columns of numbers but the label
            and the client. One column of lists or arrays gives [n, ...], several columns of numbers [n, columns].
        label: column of the labels: classes, whole numbers from 0 on, truth values, or text.
        client: column of natural clients, whole numbers or text, or None.
        size: for images: height and width to which every image is resized, or None to keep the common size.
        channels: for images: 3 for color, 1 for gray levels.
        cache: folder for what the library keeps between runs, or None for its usual one.
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
        """The examples: images as [n, channels, height, width] in [0, 1], numbers as they are.

        Raises:
            DataError: if ``datasets`` is missing, nothing can be read from the path, or splits or columns do not fit.
        """
        library = _library()
        train, test = self._splits(library, self._open(library))
        parts = [train] if test is None else [train, test]
        for part in parts:
            self._check(part)
        columns = self._columns(library, train)
        inputs = [self._inputs(library, part, columns) for part in parts]
        labels, classes = self._labels(library, parts)
        ids = [None if self.client is None else _values(part, self.client) for part in parts]
        natural = [*encode_clients(ids, f"the column {self.client!r}"), None]
        examples = [Examples(x, y) for x, y in zip(inputs, labels, strict=True)]
        return Dataset(
            Path(self.path).name or self.path,
            examples[0],
            None if test is None else examples[1],
            classes,
            natural[0],
            natural[1],
        )

    def _open(self, library: Any) -> Any:
        where = Path(self.path).expanduser()
        try:
            if where.is_file():
                if where.suffix not in _BUILDERS:
                    raise DataError(f"{self.path!r} ends in none of {', '.join(_BUILDERS)}.")
                more = {"delimiter": "\t"} if where.suffix == ".tsv" else {}
                files = {"train": str(where)}
                return library.load_dataset(
                    _BUILDERS[where.suffix], data_files=files, split="train", cache_dir=self.cache, **more
                )
            if (where / "dataset_dict.json").is_file() or (where / "state.json").is_file():
                return library.load_from_disk(str(where))
            # Anything that looks like a path should not be asked for on the hub when it is merely misspelt.
            if not where.exists() and (where.is_absolute() or self.path.startswith((".", "~"))):
                raise DataError(f"{self.path!r} does not exist.")
            return library.load_dataset(str(where) if where.exists() else self.path, self.name, cache_dir=self.cache)
        # The library wraps the errors of a dozen readers; those of the network are all kinds of OSError.
        except (OSError, ValueError, TypeError, KeyError, RuntimeError, library.exceptions.DatasetsError) as error:
            raise DataError(f"datasets cannot read {self.path!r}: {type(error).__name__}: {error}") from error

    def _splits(self, library: Any, found: Any) -> tuple[Any, Any]:
        if isinstance(found, library.Dataset):
            return found, None
        for split in (self.train_split, self.test_split):
            if split is not None and split not in found:
                hint = " Set test_split to None if there is no test part." if split == self.test_split else ""
                raise DataError(f"{self.path!r} has no split {split!r}. {did_you_mean(split, found)}{hint}")
        return found[self.train_split], None if self.test_split is None else found[self.test_split]

    def _check(self, part: Any) -> None:
        for column in (self.label, self.client, *self.features):
            if column is not None and column not in part.features:
                raise DataError(f"{self.path!r} has no column {column!r}. {did_you_mean(column, part.features)}")

    def _columns(self, library: Any, part: Any) -> list[str]:
        if self.features:
            return list(self.features)
        free = {name: kind for name, kind in part.features.items() if name not in (self.label, self.client)}
        images = [name for name, kind in free.items() if isinstance(kind, library.Image)]
        if len(images) > 1:
            raise DataError(f"{self.path!r} has several image columns: {', '.join(images)}. Name one as data.features.")
        numbers = [name for name, kind in free.items() if _is_number(library, kind)]
        if not images and not numbers:
            kinds = ", ".join(f"{name}: {kind}" for name, kind in free.items())
            raise DataError(f"{self.path!r} has no column of images or of numbers ({kinds}). Set data.features.")
        return images or numbers

    def _inputs(self, library: Any, part: Any, columns: list[str]) -> Tensor:
        if len(columns) == 1 and isinstance(part.features[columns[0]], library.Image):
            images = part.select_columns(columns)
            return stack_images((row[columns[0]] for row in images), len(images), self.size, self.channels)
        where = f"the column {columns[0]!r}" if len(columns) == 1 else f"the columns {', '.join(columns)}"
        values = [_values(part, column) for column in columns]
        if len(values) > 1 and any(v.ndim != 1 for v in values):
            raise DataError(f"{where}: several columns must hold single numbers; name one column of lists alone.")
        x = np.stack(values, axis=1) if len(values) > 1 or values[0].ndim == 1 else values[0]
        # Three axes and more are pixels; a table may well have a feature that is stored in a byte. The library hands
        # out all whole numbers as int64, so the type on disk decides.
        if x.ndim > 2 and x.size and _stored_type(part.features[columns[0]]) == "uint8":
            x = x.astype(np.uint8)
        return to_inputs(x, where, bytes_are_pixels=x.ndim > 2)

    def _labels(self, library: Any, parts: list[Any]) -> tuple[list[Tensor], tuple[str, ...]]:
        labels, classes = encode_labels([_values(part, self.label) for part in parts], f"the column {self.label!r}")
        kind = parts[0].features[self.label]
        if isinstance(kind, library.ClassLabel):
            if any(part.features[self.label] != kind for part in parts):
                raise DataError(f"the column {self.label!r} has other classes in the test part.")
            classes = tuple(kind.names)
        return labels, classes


def _values(part: Any, column: str) -> np.ndarray:
    values = part.select_columns([column]).with_format("numpy")[:][column]
    array = np.asarray(values)
    if array.dtype.kind == "O":
        texts = array.tolist()
        if not all(isinstance(text, str) for text in texts):
            raise DataError(f"the column {column!r} has missing values or lists of different lengths.")
        array = np.array(texts)
    return array


def _stored_type(kind: Any) -> str:
    while hasattr(kind, "feature"):
        kind = kind.feature
    return str(getattr(kind, "dtype", ""))


def _is_number(library: Any, kind: Any) -> bool:
    return isinstance(kind, library.Value) and kind.dtype.startswith(("int", "uint", "float", "double", "bool"))


def _library() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise DataError("this source needs datasets: pip install 'fedlowrank[huggingface]'") from error
    return datasets
