"""Converts users' labels (text, booleans or any whole numbers) to numbers of classes from 0 on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...core.errors import DataError, did_you_mean
from ...core.io.text import list_first
from ...core.learning.losses import OF_LABELS, OF_REAL_TARGETS, Loss
from ..dataset import ClientData, Examples
from ..partitioning.checks import check_unmasked
from .user_arrays import concatenate_labels
from .user_clients import GivenClient

_MAX_SHOWN_LABELS = 6
"""Largest number of labels that a message lists."""

_MAX_OWN_LABEL = 1 << 16
"""Largest label that a loss of the user's own gets unchanged, because each number up to it is a class."""


def number_text_labels(
    clients: Sequence[GivenClient], classes: Sequence[str] | int | None, loss: Loss
) -> tuple[list[GivenClient], Sequence[str] | int | None]:
    """Replace labels that are text or booleans by the numbers of their classes, over all clients.

    Args:
        clients: clients with arrays as the user gave them.
        classes: names or number of the classes, if the user gave them.
        loss: loss of the task; if it learns real targets only, booleans are numbers and no classes.

    Returns:
        The clients, and the classes: as given, or the sorted labels for text, or False and True for booleans.

    Raises:
        DataError: if labels are missing, are text at some clients only or with a loss of real targets, or are no given
            class; the message names the client.
    """
    labels = {
        (i, part): _to_labels(y, _describe_part(client, part))
        for i, client in enumerate(clients)
        for part, (_, y) in client.parts.items()
    }
    # a part without examples fits all kinds
    kinds = {key: _find_kind(y) for key, y in labels.items() if 0 not in getattr(y, "shape", ())}
    text_keys = [key for key, kind in kinds.items() if kind == "U"]
    learns_numbers = loss.kind in OF_REAL_TARGETS and loss.kind not in OF_LABELS
    if text_keys:
        i, part = text_keys[0]
        if learns_numbers:
            label = labels[i, part].tolist()[0]
            raise DataError(
                f"the labels of {_describe_part(clients[i], part)} are text, such as {label!r}, but loss {loss.kind!r} learns "
                f"numbers. Set loss='cross_entropy' for text labels, or give numbers, such as numpy.asarray(y) == {label!r}"
            )
        if other_keys := [key for key, kind in kinds.items() if kind != "U"]:
            text_title, number_title = (
                _describe_part(clients[i], part) for i, part in (text_keys[0], other_keys[0])
            )
            raise DataError(
                f"the labels of {text_title} are text, but those of {number_title} are not. Give all as text: y.astype(str)."
            )
        names = _name_text_classes(clients, labels, classes)
        number_by_name = {name: i for i, name in enumerate(names)}
        numbered_labels = {
            key: np.array([number_by_name[word] for word in y.tolist()], np.int64)
            for key, y in labels.items()
        }
        return _replace_labels(clients, numbered_labels), names
    are_booleans = {*kinds.values()} == {"b"} and all(labels[p].ndim == 1 for p in kinds)
    if classes is None and are_booleans and not learns_numbers:
        # numbers of the labels are 0 and 1
        classes = ("False", "True")
    return _replace_labels(clients, labels), classes


def number_labels(
    data: Sequence[ClientData], output_count: int, loss: Loss
) -> tuple[list[ClientData], tuple[str, ...] | None, str | None]:
    """Number whole labels from 0 on, in their order, if a label is no index of the scores of the models.

    Args:
        data: data of all clients.
        output_count: number of scores of the models.
        loss: loss of the task; if some labels do not count in it, labels stay unchanged. So they do for a function of
            the user's own, to which they may be counts or ranks.

    Returns:
        The data; the classes, which are the labels as text; and a note for the user. The last two are None if the
        labels stay unchanged. Negative labels stay for :func:`.user_arrays.name_classes`, which names the client.

    Raises:
        DataError: if a label for a function of the user's own is so large that it is no class.
    """
    if any(e.is_regression or e.y.ndim != 1 for c in data for e in (c.train, c.val, c.test)):
        return list(data), None, None
    values = concatenate_labels(data).unique()
    min_label, max_label = int(values[0]), int(values[-1])
    if loss.is_custom and max_label > _MAX_OWN_LABEL:
        raise DataError(
            f"the largest label is {max_label}, and whole numbers [n] count classes from 0. Give numbers that are no classes "
            "to your loss as real targets [n, 1]: y.astype(numpy.float32)[:, None]"
        )
    leaves_out = loss.kind in ("cross_entropy", "focal") and bool((values == loss.ignore_index).any())
    if min_label < 0 or max_label < output_count or leaves_out or loss.is_custom:
        return list(data), None, None

    def number(examples: Examples) -> Examples:
        return replace(examples, y=torch.searchsorted(values.to(examples.y.device), examples.y))

    numbered_data = [replace(c, train=number(c.train), val=number(c.val), test=number(c.test)) for c in data]
    names = tuple(map(str, values.tolist()))
    pairs = list_first([f"{name} is class {i}" for i, name in enumerate(names)], _MAX_SHOWN_LABELS)
    note = (
        f"the labels do not count from 0 to {len(names) - 1}, so they are numbered in their order: {pairs}. "
        "Federation.classes names them. Give labels from 0 on to number them otherwise."
    )
    return numbered_data, names, note


def _to_labels(y: Any, title: str) -> Any:
    """Convert labels to a tensor or an array without objects; other values are returned unchanged."""
    if isinstance(y, Tensor):
        return y
    check_unmasked(f"the labels of {title}", y)
    try:
        array = np.asarray(y)
    except ValueError:
        # the conversion of numbers reports the error
        return y
    if array.dtype.kind == "S":
        raise DataError(f"the labels of {title} are bytes; decode them: y.astype(str)")
    if array.dtype.kind == "O" and array.ndim == 1:
        array = _convert_objects(array, title)
    if array.dtype.kind == "U" and array.ndim != 1:
        raise DataError(
            f"the labels of {title} are text {list(array.shape)}; one label an example is needed, [n]: y[:, 0]"
        )
    return array if array.ndim else y


def _find_kind(y: Any) -> str:
    """Numpy kind of labels; "" for tensors other than booleans."""
    if isinstance(y, Tensor):
        return "b" if y.dtype == torch.bool else ""
    return y.dtype.kind if isinstance(y, np.ndarray) else ""


def _convert_objects(array: np.ndarray, title: str) -> np.ndarray:
    """Convert an array of objects, such as a pandas column, to one of text or numbers."""
    values = array.tolist()
    missing_rows = [
        i
        for i, value in enumerate(values)
        if value is None or type(value).__name__ == "NAType" or value != value
    ]
    if missing_rows:
        raise DataError(
            f"{len(missing_rows)} of the {len(values)} labels of {title} {'are' if len(missing_rows) > 1 else 'is'} missing, "
            f"first that of example {missing_rows[0]} (counted from 0); leave such examples out"
        )
    types = {type(value) for value in values}
    if any(
        all(issubclass(value_type, base) for value_type in types)
        for base in (str, bool | int | float | np.number)
    ):
        return np.array(values)
    names = sorted(value_type.__name__ for value_type in types)
    raise DataError(
        f"the labels of {title} are objects of the types {', '.join(names)}; give text or whole numbers [n], such as "
        "y.astype(str)"
    )


def _name_text_classes(
    clients: Sequence[GivenClient], labels: dict[tuple[int, str], Any], classes: Sequence[str] | int | None
) -> tuple[str, ...]:
    """Names of the classes of text labels."""
    words = {word for y in labels.values() for word in np.unique(y).tolist()}
    if classes is None or (isinstance(classes, int) and classes == len(words)):
        return tuple(sorted(words))
    if isinstance(classes, int):
        raise DataError(
            f"there are {len(words)} different text labels, but classes={classes}; leave classes out, or name them "
            "all: classes=[...]"
        )
    for (i, part), y in labels.items():
        if unknown := sorted({*y.tolist()} - {*classes}):
            raise DataError(
                f"{_describe_part(clients[i], part)} has the label {unknown[0]!r}, which is none of classes=. "
                + did_you_mean(unknown[0], classes)
            )
    return tuple(classes)


def _describe_part(client: GivenClient, part: str) -> str:
    return client.title + (f" ({part})" if part else "")


def _replace_labels(clients: Sequence[GivenClient], labels: dict[tuple[int, str], Any]) -> list[GivenClient]:
    return [
        replace(client, parts={part: (x, labels[i, part]) for part, (x, _) in client.parts.items()})
        for i, client in enumerate(clients)
    ]
