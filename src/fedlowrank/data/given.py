"""Arrays that users give from Python as examples, with errors that say what to pass instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.errors import DataError
from .dataset import Examples, Inputs

Array = np.ndarray[Any, Any] | Tensor
Pair = tuple[Array | Mapping[str, Array], Array]

ONE_HOT = (
    "the targets are one-hot rows, so they are learnt as a regression with the squared error. For a classification give "
    "the number of each class instead: y.argmax(1)."
)
"""What users should know where every row of real targets holds a single 1 among zeros."""


def examples_of(pair: Pair, client: int) -> Examples:
    """Examples from a pair of inputs and targets.

    Args:
        pair: inputs ``[n, ...]`` or a dict of such, and labels ``[n]`` or real targets ``[n, d]``: tensors, arrays of numpy,
            data frames, lists of numbers.
        client: whose they are, for messages.

    Raises:
        DataError: if they are of another type or shape, or not finite.
    """
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise DataError(f"client {client}: expected a pair (x, y) of arrays, not {_kind(pair)}")
    try:
        x, y = pair[0], _targets(tensor_of(pair[1], "the targets"), isinstance(pair[0], Mapping))
        if isinstance(x, Mapping):
            inputs: Inputs = {name: tensor_of(a, f"input {name!r}") for name, a in x.items()}
        else:
            inputs = tensor_of(x, "the inputs").to(torch.float32)
        made = Examples(inputs, y)
        named = inputs if isinstance(inputs, dict) else {"its inputs": inputs}
        for name, tensor in {**named, "its targets": y}.items():
            _check_finite(tensor, name)
    except DataError as error:
        raise DataError(f"client {client}: {error}") from error
    if not made.regression and not made.tokens and len(y) and int(y.min()) < 0:
        raise DataError(f"client {client}: label {int(y.min())} is negative")
    return made


def tensor_of(given: Any, what: str) -> Tensor:
    """Numbers as a tensor, from whatever numpy takes for an array.

    Raises:
        DataError: if these are no real numbers.
    """
    if isinstance(given, Tensor):
        if given.is_complex():
            raise DataError(f"{what} must be real numbers, not {given.dtype}")
        return given
    try:
        array = np.asarray(given)
        if array.dtype.kind not in "biuf":
            raise DataError(
                f"{what} must be an array of numbers, not {_kind(given)} of {array.dtype}; text is to be numbered first"
            )
        # a data frame hands out an array that may not be written to
        return torch.as_tensor(array if array.flags.writeable and array.flags.c_contiguous else array.copy(order="C"))
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{what} must be an array of numbers, not {_kind(given)}: {error}") from error


def is_one_hot(y: Tensor) -> bool:
    """Whether these are rows ``[n, d]`` of zeros with a single 1 each."""
    if y.ndim != 2 or y.shape[1] < 2 or not len(y):
        return False
    return bool(((y == 0) | (y == 1)).all()) and bool((y.sum(1) == 1).all())


def advice(y: Tensor) -> str:
    """What to give instead of targets of this type and shape; empty for what needs no advice."""
    if y.is_floating_point() and y.ndim == 1:
        return "For classes give whole numbers, y.long(); for a regression give targets [n, 1], y[:, None]."
    if y.ndim == 2 and y.shape[1] == 1 and not y.is_floating_point():
        return "For classes give labels [n], y[:, 0]; for a regression give real numbers, y.float()."
    if is_one_hot(y):
        return "These are one-hot rows: give the number of each class, y.argmax(1)."
    return ""


def _targets(y: Tensor, named: bool) -> Tensor:
    """Targets in the type that examples hold."""
    real = y.is_floating_point()
    if real and y.ndim == 2:
        return y.to(torch.float32)
    # labels of tokens stand beside inputs by name
    if real or (y.ndim == 2 and not named and advice(y)):
        form = f"{str(y.dtype).removeprefix('torch.')} {list(y.shape)}"
        hint = advice(y) or "Real targets of a regression are [n, d], labels of classes whole numbers [n]."
        raise DataError(f"the targets are {form}. {hint}")
    return y.to(torch.int64)


def _check_finite(tensor: Tensor, name: str) -> None:
    if not tensor.is_floating_point() or bool(torch.isfinite(tensor).all()):
        return
    wrong = (~torch.isfinite(tensor)).reshape(len(tensor), -1).any(1)
    first = int(wrong.nonzero()[0])
    raise DataError(
        f"there is a NaN or an infinity among {name}, in {int(wrong.sum())} of {len(tensor)} examples, first in example "
        f"{first} (counted from 0); leave such examples out, or fill the gap"
    )


def _kind(given: Any) -> str:
    return f"a {type(given).__name__}" + (f" of {len(given)}" if isinstance(given, tuple | list) else "")
