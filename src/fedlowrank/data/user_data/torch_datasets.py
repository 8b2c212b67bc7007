"""Data sets of torch read into arrays: map-style ones, whose examples are pairs or dicts."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ...core.errors import DataError
from ...core.key import Key
from ..datasets.images import image_to_array
from ..partitioning.checks import describe_array
from .columns import Columns


def is_torch_data(value: Any) -> bool:
    """Whether this is a data set or a loader of torch."""
    return isinstance(value, Dataset | DataLoader)


def read_dataset(dataset: Any, who: str, columns: Columns, key: Key) -> tuple[Any, Any]:
    """Every example of a data set, read once in order, as inputs and targets ``[n, ...]``.

    Images of pillow become bytes ``[channels, height, width]``, as torchvision's ``PILToTensor`` makes them.
    What a data set draws at random (augmentations) is drawn once, from ``key``.

    Args:
        dataset: a ``torch.utils.data.Dataset`` with a length, whose examples are ``(x, y)``, where x may be a
            dict of inputs, or dicts.
        who: the client, for messages.
        columns: which keys of examples that are dicts are target and inputs.
        key: root of all randomness.

    Raises:
        DataError: if it is a stream or a loader, is empty, fails, or its examples do not fit together.
    """
    name = type(dataset).__name__
    if isinstance(dataset, DataLoader):
        raise DataError(
            f"{who}: a DataLoader cannot be divided into batches again. Give its data set, loader.dataset; the "
            "batch size is a setting of the method."
        )
    if isinstance(dataset, IterableDataset):
        raise DataError(
            f"{who}: its {name} is an IterableDataset, a stream without positions, so it can be neither divided nor "
            "shuffled. Read it once: x, y = map(torch.stack, zip(*stream)), or give a data set with __len__ and "
            "__getitem__."
        )
    try:
        count = len(dataset)
    except (TypeError, NotImplementedError, AttributeError) as error:
        raise DataError(f"{who}: its data set {name} has no length; define __len__") from error
    if not count:
        raise DataError(f"{who}: its data set {name} has no examples; leave this client out")
    items = []
    with key.global_generators():
        for i in range(count):
            try:
                items.append(dataset[i])
            except Exception as error:
                raise DataError(
                    f"{who}: example {i} of its data set {name} cannot be read: {type(error).__name__}: {error}"
                ) from error
    return _stack_pairs(items, f"{who}: ", name, columns)


def _stack_pairs(items: Sequence[Any], who: str, name: str, columns: Columns) -> tuple[Any, Any]:
    """Stacked inputs and targets of examples."""
    first = items[0]
    for i, item in enumerate(items):
        is_pair = isinstance(item, tuple | list) and len(item) == 2
        if not is_pair and not isinstance(item, Mapping):
            described = f"a {type(item).__name__}" + (
                f" of {len(item)}" if isinstance(item, tuple | list) else ""
            )
            raise DataError(
                f"{who}examples of a data set are pairs (x, y) or dicts, but example {i} of its {name} is {described}. "
                'Several inputs go into a dict: ({"image": image, "age": age}, y).'
            )
        if isinstance(item, Mapping) != isinstance(first, Mapping) or (
            isinstance(item, Mapping) and item.keys() != first.keys()
        ):
            raise DataError(f"{who}example {i} of its {name} has another form than example 0")
    if isinstance(first, Mapping):
        target, features = columns.choose(list(first), who, "its examples have the keys")
        inputs = {key: _stack([item[key] for item in items], f"{who}input {key!r}") for key in features}
        x: Any = inputs if len(features) > 1 else inputs[features[0]]
        return x, _stack([item[target] for item in items], f"{who}target {target!r}")
    columns.refuse(who, "are pairs (x, y)")
    xs, ys = [item[0] for item in items], [item[1] for item in items]
    return _stack(xs, f"{who}the input"), _stack(ys, f"{who}the target")


def _stack(values: list[Any], title: str) -> Any:
    """Values of examples as one array or tensor ``[n, ...]``, or a dict of them."""
    if isinstance(values[0], Mapping):
        keys = values[0].keys()
        if wrong := [
            i for i, value in enumerate(values) if not isinstance(value, Mapping) or value.keys() != keys
        ]:
            raise DataError(f"{title} of example {wrong[0]} lacks some of the names {[*keys]} of example 0")
        return {key: _stack([value[key] for value in values], f"{title} {key!r}") for key in keys}
    arrays = [_to_array(value, f"{title} of example {i}") for i, value in enumerate(values)]
    for i, array in enumerate(arrays):
        if array.shape != arrays[0].shape:
            raise DataError(
                f"{title} of example {i} is {describe_array(array)}, but that of example 0 is "
                f"{describe_array(arrays[0])}. Examples of a client need one shape: resize, pad or convert them in the "
                "data set's __getitem__ or transform."
            )
    if all(isinstance(array, Tensor) for array in arrays):
        return torch.stack(arrays)
    return np.stack([np.asarray(array) for array in arrays])


def _to_array(value: Any, title: str) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    pillow = sys.modules.get("PIL.Image")
    if pillow is not None and isinstance(value, pillow.Image):
        return image_to_array(value, title)
    try:
        return np.asarray(value)
    except ValueError as error:
        raise DataError(f"{title} is no array: {error}") from error
