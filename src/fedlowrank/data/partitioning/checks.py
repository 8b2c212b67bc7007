"""Checks that several partitions, splits and sources share."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...core.errors import ConfigError, DataError


def check_positive(name: str, value: float, *, allow_zero: bool = False) -> None:
    """Reject a setting that is not a finite number above 0, or of at least 0 with ``allow_zero``."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < 0 or (value == 0 and not allow_zero):
        raise ConfigError(
            f"{name} must be a number {'of at least' if allow_zero else 'above'} 0, not {value!r}."
        )


def check_labels(
    labels: np.ndarray, class_count: int, client_count: int, *, ignores_labels: bool = False
) -> int:
    """Reject examples without the class labels that a partition needs, and more clients than examples.

    Args:
        labels: labels, one row per example.
        class_count: number of classes; 0 for a regression.
        client_count: number of clients.
        ignores_labels: whether the partition ignores labels.

    Returns:
        The number of examples.
    """
    if class_count == 0 and not ignores_labels:
        raise DataError(
            "this partition needs class labels or categories, but these data (a regression, labels of pixels or "
            "tokens, or texts without categories) have none. Use partition 'iid' or 'natural'."
        )
    if client_count > len(labels):
        raise DataError(
            f"{client_count} clients cannot share {len(labels)} examples. Lower partition.clients."
        )
    return len(labels)


def describe_array(x: Any) -> str:
    """Describe type and shape of a tensor or an array for messages, e.g. ``float32 [3, 2]``."""
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"


def check_finite_values(name: str, x: Tensor, original: Tensor | None = None) -> None:
    """Reject values [n, ...] with a NaN or an infinity; the DataError has their number and the first one.

    Args:
        name: description of the values.
        x: values as models get them.
        original: values before their conversion to float32, to name those that are infinite only afterwards.
    """
    # a sum is finite only if all its terms are; if it is not, the terms are tested, because the sum may overflow
    if not x.is_floating_point() or math.isfinite(x.sum().item()):
        return
    if rows := _find_invalid_rows(x if original is None else original):
        raise DataError(
            f"there is a NaN or an infinity in {name}, {_describe_rows(rows, len(x))}; leave such examples out, or fill the gap."
        )
    if original is not None and (rows := _find_invalid_rows(x)):
        first_value = original.reshape(x.shape)[rows[0]][torch.isinf(x[rows[0]])][0].item()
        raise DataError(
            f"there is a number beyond the range of float32 in {name}, {first_value:g}, {_describe_rows(rows, len(x))}. Models "
            f"compute in float32, up to {torch.finfo(torch.float32).max:.2g}: divide such values by a constant, the same at all "
            "clients, or correct them."
        )


def _find_invalid_rows(x: Tensor) -> list[int]:
    """Indices of the examples with a NaN or an infinity."""
    return [
        start + i
        for start, rows in split_rows(x)
        if not bool((finite := torch.isfinite(rows)).all())
        for i in (~finite).reshape(len(rows), -1).any(1).nonzero()[:, 0].tolist()
    ]


def check_unmasked(name: str, array: Any) -> None:
    """Reject a NumPy masked array [n, ...], or a list of such examples, with masked values, which conversions unmask.

    Args:
        name: description of the values.
        array: values of any type, as the user gave them.
    """
    if rows := find_masked_rows(array):
        raise DataError(
            f"there is a masked value in {name}, {_describe_rows(rows, len(array))}; leave such examples out, or fill the gaps: "
            "filled(...)."
        )


def find_masked_rows(array: Any) -> list[int]:
    """Indices of the examples with a masked value, of a NumPy masked array [n, ...] or of a list of examples."""
    if isinstance(array, np.ma.MaskedArray) and array.ndim and np.ma.is_masked(array):
        is_masked = np.ma.getmaskarray(array).reshape(len(array), -1).any(1)
        return [int(i) for i in np.flatnonzero(is_masked)]
    rows = array if isinstance(array, list | tuple) else ()
    return [i for i, row in enumerate(rows) if isinstance(row, np.ma.MaskedArray) and np.ma.is_masked(row)]


def _describe_rows(rows: list[int], count: int) -> str:
    return f"in {len(rows)} of {count} examples, first in example {rows[0]} (counted from 0)"


def split_rows(x: Tensor, max_values: int = 2**20) -> Iterator[tuple[int, Tensor]]:
    """Yield consecutive rows of x with at most ``max_values`` values, each with the position of its first row.

    Temporary results of a chunk stay small beside a data set of many hundred megabytes.
    """
    row_count = max(1, max_values // max(1, x[:1].numel()))
    for start in range(0, len(x), row_count):
        yield start, x[start : start + row_count]
