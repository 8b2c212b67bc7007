"""Arrays from Python code as examples of a client, with errors that say what to pass instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.errors import DataError
from ..core.key import Key
from .checks import check_finite, describe_array
from .dataset import ClientData, Examples, Inputs

Array = np.ndarray[Any, Any] | Tensor
ArrayPair = tuple[Array | Mapping[str, Array], Array]
"""Inputs and targets."""

ONE_HOT_WARNING = (
    "the targets are one-hot rows, so they are learnt as a regression with the squared error. For a "
    "classification give the number of each class instead: y.argmax(1)."
)


def client_from_arrays(
    arrays: ArrayPair | Mapping[str, ArrayPair], client: int, val: float, test: float, key: Key
) -> ClientData:
    """The data of one client.

    Args:
        arrays: a pair (x, y) to divide at random, or a dict of pairs under ``train``, ``val`` and ``test``.
        client: its number, for messages.
        val: share for validation, if there is one pair.
        test: share for the test, likewise.
        key: randomness of the division.
    """
    if isinstance(arrays, Mapping):
        unknown = set(arrays) - {"train", "val", "test"}
        if unknown or "train" not in arrays:
            raise DataError(
                f"client {client}: splits are 'train' and optionally 'val' and 'test', not {sorted(arrays)}"
            )
        parts = {name: examples_from_arrays(pair, client) for name, pair in arrays.items()}
        empty = parts["train"].take(torch.arange(0))
        return ClientData(parts["train"], parts.get("val", empty), parts.get("test", empty))
    examples = examples_from_arrays(arrays, client)
    n = len(examples)
    n_val, n_test = round(n * val), round(n * test)
    if n - n_val - n_test < 1:
        raise DataError(f"client {client} has {n} examples, too few for shares of {val} and {test}")
    order = torch.randperm(n, generator=key.generator())
    val_index, test_index, train_index = torch.split(order, [n_val, n_test, n - n_val - n_test])
    return ClientData(examples.take(train_index), examples.take(val_index), examples.take(test_index))


def examples_from_arrays(pair: ArrayPair, client: int) -> Examples:
    """Examples from a pair: inputs ``[n, ...]`` or a dict of them, and labels ``[n]`` or targets ``[n, d]``.

    These are tensors, numpy arrays, data frames or lists of numbers.
    """
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise DataError(f"client {client}: expected a pair (x, y) of arrays, not {_describe_type(pair)}")
    x, y = pair
    try:
        targets = _targets(to_tensor(y, "the targets"), isinstance(x, Mapping))
        if isinstance(x, Mapping):
            inputs: Inputs = {name: to_tensor(a, f"input {name!r}") for name, a in x.items()}
        else:
            inputs = to_tensor(x, "the inputs").to(torch.float32)
        examples = Examples(inputs, targets)
        named = inputs if isinstance(inputs, dict) else {"its inputs": inputs}
        for name, tensor in {**named, "its targets": targets}.items():
            check_finite(name, tensor)
    except DataError as error:
        raise DataError(f"client {client}: {error}") from error
    is_classification = not examples.regression and not examples.tokens
    if is_classification and len(targets) and int(targets.min()) < 0:
        raise DataError(f"client {client}: label {int(targets.min())} is negative")
    return examples


def to_tensor(array: Any, what: str) -> Tensor:
    """Convert whatever numpy accepts as an array of real numbers."""
    if isinstance(array, Tensor):
        if array.is_complex():
            raise DataError(f"{what} must be real numbers, not {array.dtype}")
        return array
    try:
        values = np.asarray(array)
        if values.dtype.kind not in "biuf":
            raise DataError(
                f"{what} must be an array of numbers, not {_describe_type(array)} of {values.dtype}; encode "
                "text as numbers first"
            )
        # torch needs writable memory; a data frame gives a read-only array
        is_usable = values.flags.writeable and values.flags.c_contiguous
        return torch.as_tensor(values if is_usable else values.copy("C"))
    except (TypeError, ValueError, RuntimeError) as error:
        kind = _describe_type(array)
        raise DataError(f"{what} must be an array of numbers, not {kind}: {error}") from error


def class_names(clients: Sequence[ClientData], classes: Sequence[str] | int | None) -> tuple[str, ...]:
    """Names of the classes: the given ones, or the numbers up to the largest label; none for a regression.

    Raises:
        DataError: if clients mix regression and classification, or the labels do not fit the classes.
    """
    is_regression = [c.train.regression for c in clients]
    if any(is_regression) and not all(is_regression):
        raise DataError(
            f"client {is_regression.index(True)} has real targets and client {is_regression.index(False)} "
            "class labels; all must learn the same task"
        )
    if all(is_regression):
        if classes:
            raise DataError(
                "client 0 has real targets, a regression, which has no classes; leave them out. For a "
                "classification give labels [n], whole numbers; of one-hot rows, y.argmax(1)."
            )
        return ()
    parts = [e.y for c in clients for e in (c.train, c.val, c.test) if len(e) and not e.regression]
    count = max(int(y.max()) for y in parts) + 1
    if classes is None:
        classes = count
    names = tuple(map(str, range(classes))) if isinstance(classes, int) else tuple(classes)
    if count > len(names):
        raise DataError(f"there is a label {count - 1} but only {len(names)} classes; labels count from 0")
    return names


def is_one_hot(y: Tensor) -> bool:
    """Whether the targets are rows ``[n, d]`` of zeros with a single 1 each."""
    if y.ndim != 2 or y.shape[1] < 2 or not len(y):
        return False
    return bool(((y == 0) | (y == 1)).all()) and bool((y.sum(1) == 1).all())


def target_hint(y: Tensor) -> str:
    """What to pass instead of targets of this type and shape; empty if they are fine."""
    if y.is_floating_point() and y.ndim == 1:
        return "For classes give whole numbers, y.long(); for a regression give targets [n, 1], y[:, None]."
    if y.ndim == 2 and y.shape[1] == 1 and not y.is_floating_point():
        return "For classes give labels [n], y[:, 0]; for a regression give real numbers, y.float()."
    if is_one_hot(y):
        return "These are one-hot rows: give the number of each class, y.argmax(1)."
    return ""


def _targets(y: Tensor, has_named_inputs: bool) -> Tensor:
    """Targets in the type of `Examples.y`."""
    is_real = y.is_floating_point()
    if is_real and y.ndim == 2:
        return y.to(torch.float32)
    # token labels [n, T] come with named inputs
    if is_real or (y.ndim == 2 and not has_named_inputs and target_hint(y)):
        hint = target_hint(y) or "Real targets are [n, d], labels of classes whole numbers [n]."
        raise DataError(f"the targets are {describe_array(y)}. {hint}")
    return y.to(torch.int64)


def _describe_type(value: Any) -> str:
    return f"a {type(value).__name__}" + (f" of {len(value)}" if isinstance(value, tuple | list) else "")
