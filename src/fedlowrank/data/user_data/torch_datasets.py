"""Reads map-style torch data sets, whose examples are pairs or dicts, into arrays."""

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
from ..partitioning.checks import describe_array, find_masked_rows
from .columns import Columns


def is_torch_data(value: Any) -> bool:
    """Whether a value is a torch data set or loader."""
    return isinstance(value, Dataset | DataLoader)


def read_dataset(dataset: Any, title: str, columns: Columns, key: Key) -> tuple[Any, Any]:
    """Read every example of a data set once, in order, as inputs and targets ``[n, ...]``.

    Pillow images become bytes ``[channels, height, width]``, as by torchvision's ``PILToTensor``. Random draws of a
    data set (augmentations) are made once, from ``key``.

    Args:
        dataset: ``torch.utils.data.Dataset`` with a length, whose examples are dicts or pairs ``(x, y)``, where x may
            be a dict of inputs.
        title: name of the client, for messages.
        columns: keys of the target and of the inputs, for examples that are dicts.
        key: root key of all randomness.

    Raises:
        DataError: if the data set is a stream or a loader, is empty, fails, or its examples do not fit together.
    """
    type_name = type(dataset).__name__
    if isinstance(dataset, DataLoader):
        raise DataError(
            f"{title}: a DataLoader cannot be divided into batches again. Give its data set, loader.dataset; the "
            "batch size is a setting of the method."
        )
    if isinstance(dataset, IterableDataset):
        raise DataError(
            f"{title}: its {type_name} is an IterableDataset, a stream without positions, so it can be neither divided nor "
            "shuffled. Read it once: x, y = map(torch.stack, zip(*stream)), or give a data set with __len__ and "
            "__getitem__."
        )
    try:
        count = len(dataset)
    except (TypeError, NotImplementedError, AttributeError) as error:
        raise DataError(f"{title}: its data set {type_name} has no length; define __len__") from error
    if not count:
        raise DataError(f"{title}: its data set {type_name} has no examples; leave this client out")
    examples = []
    with key.global_generators():
        for i in range(count):
            try:
                examples.append(dataset[i])
            except Exception as error:
                raise DataError(
                    f"{title}: example {i} of its data set {type_name} cannot be read: {type(error).__name__}: {error}"
                ) from error
    return _stack_pairs(examples, f"{title}: ", type_name, columns)


_DICT_HINT = 'Several inputs go into a dict: ({"image": image, "age": age}, y).'


def _stack_pairs(examples: Sequence[Any], prefix: str, type_name: str, columns: Columns) -> tuple[Any, Any]:
    """Stack the inputs and the targets of examples."""
    first_example = examples[0]
    for i, example in enumerate(examples):
        is_pair = isinstance(example, tuple | list) and len(example) == 2
        if not is_pair and not isinstance(example, Mapping):
            description = f"a {type(example).__name__}" + (
                f" of {len(example)}" if isinstance(example, tuple | list) else ""
            )
            raise DataError(
                f"{prefix}examples of a data set are pairs (x, y) or dicts, but example {i} of its {type_name} is {description}. "
                f"{_DICT_HINT}"
            )
        if isinstance(example, Mapping) != isinstance(first_example, Mapping) or (
            isinstance(example, Mapping) and example.keys() != first_example.keys()
        ):
            raise DataError(f"{prefix}example {i} of its {type_name} has another form than example 0")
    if isinstance(first_example, Mapping):
        target, features = columns.choose(list(first_example), prefix, "its examples have the keys")
        inputs = {
            key: _stack([example[key] for example in examples], f"{prefix}input {key!r}") for key in features
        }
        x: Any = inputs if len(features) > 1 else inputs[features[0]]
        return x, _stack([example[target] for example in examples], f"{prefix}target {target!r}")
    columns.refuse(prefix, "are pairs (x, y)")
    xs, ys = [example[0] for example in examples], [example[1] for example in examples]
    if isinstance(xs[0], tuple) and any(getattr(value, "ndim", 0) for value in xs[0]):
        raise DataError(
            f"{prefix}the input of an example of its {type_name} is a tuple of {len(xs[0])} tensors. {_DICT_HINT}"
        )
    return _stack(xs, f"{prefix}the input"), _stack(ys, f"{prefix}the target")


def _stack(values: list[Any], title: str) -> Any:
    """Stack values of examples into one array or tensor ``[n, ...]``, or a dict of them."""
    if isinstance(values[0], Mapping):
        keys = values[0].keys()
        if invalid_indices := [
            i for i, value in enumerate(values) if not isinstance(value, Mapping) or value.keys() != keys
        ]:
            raise DataError(
                f"{title} of example {invalid_indices[0]} lacks some of the names {[*keys]} of example 0"
            )
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
    if np.ma.is_masked(value) or find_masked_rows(value):
        raise DataError(f"{title} has a masked value; leave such examples out, or fill the gaps: filled(...)")
    try:
        return np.asarray(value)
    except ValueError as error:
        raise DataError(f"{title} is no array: {error}") from error
