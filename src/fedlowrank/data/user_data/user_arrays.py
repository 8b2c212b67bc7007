"""Converts arrays from Python code to examples of a client, with errors that say what to pass instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...core.arguments.shares import multiply_share
from ...core.errors import DataError
from ...core.io.text import list_first
from ...core.key import Key
from ...core.learning.losses import AUTO, IGNORE_INDEX, OF_LABELS, OF_REAL_TARGETS, Loss
from ..dataset import ClientData, Examples, Inputs
from ..input_types import WIDE_TYPES, InputTypes, warn_of_rounding
from ..partitioning.checks import check_finite_values, check_unmasked, describe_array
from ..pixels import Pixels
from .array_copies import ArrayCopies
from .data_frames import convert_frame, is_frame
from .user_clients import GivenClient

Array = np.ndarray[Any, Any] | Tensor
ArrayPair = tuple[Array | Mapping[str, Array], Array]
"""Pair of inputs and targets."""

ONE_HOT_WARNING = (
    "the targets are one-hot rows, so they are learnt as a regression with the squared error. For a "
    "classification give the number of each class instead: y.argmax(1)."
)

MULTI_HOT_WARNING = (
    "the targets are rows of zeros and ones, several classes an example, and are learnt as a regression with the "
    "squared error. For several classes an example set loss='bce'. For one class an example give its number, whole "
    "numbers [n]."
)

BINARY_WARNING = (
    "the targets [n, 1] are zeros and ones, and are learnt as a regression with the squared error. For a "
    "classification set loss='bce'; or give a model with 2 outputs, and the number of each class: y[:, 0].long(), or for a "
    "data frame target='y'. A list of columns, target=['y'], is a regression."
)

_WHOLE_TARGETS = (
    "the targets are whole numbers that are stored as real numbers, such as 1.0, and are learnt as a regression with the "
    "squared error."
)

COLUMN_WARNING = (
    f"{_WHOLE_TARGETS} For a classification give whole numbers, frame[target].astype(int). For a regression name the column "
    "in a list, target=[...]."
)

TABLE_WARNING = f"{_WHOLE_TARGETS} Set data.task to 'classification' or to 'regression'."

HUB_WARNING = f"{_WHOLE_TARGETS} For a classification store whole numbers: dataset.cast_column(label, datasets.Value('int64'))."

TARGET_WARNINGS = (
    ONE_HOT_WARNING,
    MULTI_HOT_WARNING,
    BINARY_WARNING,
    COLUMN_WARNING,
    TABLE_WARNING,
    HUB_WARNING,
)
"""Warnings about targets that fit another loss better than the default."""


_MAX_WHOLE_CLASSES = 100
"""Largest number of different whole numbers that may be classes although they are stored as real numbers."""

_MAX_SHOWN_CLIENTS = 5
"""Largest number of clients that a message lists."""


def make_client(
    user_client: GivenClient,
    client_id: int,
    val: float,
    test: float,
    key: Key,
    types: InputTypes,
    copies: ArrayCopies,
    loss: Loss = AUTO,
) -> ClientData:
    """Make the data of one client.

    Args:
        user_client: arrays of the client, one pair to divide at random or several pairs by part.
        client_id: number of the client, which determines the division together with ``key``.
        val: share for validation, if there is one pair.
        test: share for the test, if there is one pair.
        key: root key of all randomness.
        types: converter of the inputs.
        copies: copies of the arrays of all clients, so that each is copied once.
        loss: loss of the task, which determines the kind of the targets.

    Raises:
        DataError: if an array does not fit the others, or the client has no training examples.
    """
    title = user_client.title
    # a part without examples has no types to check
    pairs = {part: pair for part, pair in user_client.parts.items() if not _is_empty(pair)}
    if "train" not in pairs and "" not in pairs:
        raise DataError(f"{title} has no training examples; leave it out")
    parts = {part: make_examples(pair, title, types, part, loss) for part, pair in pairs.items()}
    if "train" in parts:
        parts = {
            part: _copy_shared(examples, user_client.parts[part], copies) for part, examples in parts.items()
        }
        empty_examples = parts["train"].take(torch.arange(0)) if len(parts) < 3 else parts["train"]
        parts = {"val": empty_examples, "test": empty_examples, **parts}
        return ClientData(parts["train"], parts["val"], parts["test"])
    examples = parts[""]
    n = len(examples)
    n_val, n_test = round(multiply_share(val, n)), round(multiply_share(test, n))
    if n - n_val - n_test < 1:
        raise DataError(f"{title} has {n} examples, too few for shares of {val} and {test}")
    order = torch.randperm(n, generator=(key / "split" / client_id).generator())
    val_index, test_index, train_index = torch.split(order, [n_val, n_test, n - n_val - n_test])
    return ClientData(examples.take(train_index), examples.take(val_index), examples.take(test_index))


def _is_empty(pair: tuple[Any, Any]) -> bool:
    """Whether neither the inputs nor the targets have an example."""
    x, y = pair
    return all(_has_no_rows(array) for array in (*(x.values() if isinstance(x, Mapping) else (x,)), y))


def _has_no_rows(array: Any) -> bool:
    shape = getattr(array, "shape", None)
    return (
        len(shape) > 0 and shape[0] == 0
        if shape is not None
        else isinstance(array, list | tuple) and not array
    )


def _copy_shared(examples: Examples, pair: tuple[Any, Any], copies: ArrayCopies) -> Examples:
    """Copy what shares memory with the pair that the examples were made from."""
    x, y = pair
    assert not isinstance(examples.x, Pixels)
    inputs: Inputs = (
        {name: copies.copy_shared(tensor, x[name]) for name, tensor in examples.x.items()}
        if isinstance(examples.x, dict)
        else copies.copy_shared(examples.x, x)
    )
    return Examples(inputs, copies.copy_shared(examples.y, y))


def find_untested_warning(
    user_clients: Sequence[GivenClient], data: Sequence[ClientData], test: float
) -> str | None:
    """Warn of clients whose share for the test rounds to no example; None if there are none.

    Args:
        user_clients: clients as the user passed them.
        data: data of the clients.
        test: share of the examples for the test.
    """
    if not test:
        return None
    titles = [
        user_client.title
        for user_client, client_data in zip(user_clients, data, strict=True)
        if "" in user_client.parts and not len(client_data.test)
    ]
    if not titles:
        return None
    titles_text = list_first(titles, _MAX_SHOWN_CLIENTS)
    subject = "client has" if len(titles) == 1 else "clients have"
    return (
        f"{len(titles)} of {len(data)} {subject} no test part, for a share of {test:g} of so few examples rounds to none: "
        f"{titles_text}. Means of test scores leave them out. Raise test=, or give parts of your own."
    )


def make_examples(
    pair: tuple[Any, Any], title: str, types: InputTypes | None = None, part: str = "", loss: Loss = AUTO
) -> Examples:
    """Make examples from a pair: inputs ``[n, ...]`` or a dict of them, and labels ``[n]`` or targets ``[n, d]``.

    Inputs and targets are tensors, numpy arrays, data frames or lists of numbers. :func:`name_classes` checks the
    range of the labels, of all clients together. ``types`` converts the inputs; by default no model looks them up.
    The loss determines whether whole numbers are labels or real targets.
    """
    types = InputTypes() if types is None else types
    part_title = title + (f" ({part})" if part else "")
    x, y = pair
    try:
        target_tensor = to_tensor(y, "the targets")
        targets = _convert_targets(target_tensor, isinstance(x, Mapping), loss)
        if targets.is_floating_point() and target_tensor.dtype in WIDE_TYPES:
            warn_of_rounding(target_tensor.cpu().numpy(), part_title, "targets")
        if isinstance(x, Mapping):
            originals = {name: _to_rows(a, f"input {name!r}") for name, a in x.items()}
            inputs: Inputs = {name: types.convert(t, part_title, name) for name, t in originals.items()}
        else:
            originals = {"its inputs": _to_rows(x, "the inputs")}
            inputs = types.convert(originals["its inputs"], part_title)
        examples = Examples(inputs, targets)
        for name, original in originals.items():
            check_finite_values(name, inputs[name] if isinstance(inputs, dict) else inputs, original)
        check_finite_values("its targets", targets, target_tensor)
    except DataError as error:
        raise DataError(f"{part_title}: {error}") from error
    return examples


def _to_rows(array: Any, title: str) -> Tensor:
    """Convert inputs ``[n, ...]``."""
    tensor = to_input_tensor(array, title)
    if tensor.ndim == 0:
        raise DataError(f"{title} must be an array [n, ...] of n examples, not a single value")
    return tensor


def to_tensor(array: Any, title: str) -> Tensor:
    """Convert any value that numpy accepts as an array of real numbers; a tensor without its gradient graph."""
    if isinstance(array, Tensor):
        if array.is_complex():
            raise DataError(f"{title} must be real numbers, not {array.dtype}")
        if array.layout != torch.strided and not array.is_nested:
            raise DataError(
                f"{title} must be a dense tensor, not one of the layout {array.layout}; convert it with to_dense()"
            )
        return array.detach() if array.requires_grad else array
    try:
        check_unmasked(title, array)
        values = np.asarray(array)
        if values.dtype.kind not in "biuf":
            raise DataError(
                f"{title} must be an array of numbers, not {_describe_type(array)} of {values.dtype}; "
                + _advise_conversion(array, values)
            )
        if not values.dtype.isnative or values.dtype.type is np.longdouble:
            type_name = "float32" if values.dtype.kind == "f" else "int64"
            raise DataError(
                f"{title} must have a type that torch has, not {values.dtype.str} (extended precision, or bytes in another order "
                f'than this machine\'s); convert it with astype("{type_name}")'
            )
        # torch needs writable memory; the array of a data frame is read-only
        is_usable = values.flags.writeable and values.flags.c_contiguous
        return torch.as_tensor(values if is_usable else values.copy("C"))
    except (TypeError, ValueError, RuntimeError) as error:
        description = _describe_type(array)
        raise DataError(f"{title} must be an array of numbers, not {description}: {error}") from error


def _advise_conversion(array: Any, values: np.ndarray) -> str:
    """Advise what to pass instead of an array that holds no numbers."""
    if hasattr(array, "toarray"):
        return "a sparse matrix is given as toarray()"
    if values.dtype.kind in "mM":
        return "make a small number of times, the same for all clients, such as days since a fixed date"
    elements = values.ravel().tolist() if values.dtype.kind == "O" else []
    if elements and all(isinstance(element, int | float) for element in elements):
        return "give x.astype(float)"
    if elements and all(hasattr(element, "shape") for element in elements):
        shapes = sorted({str([*element.shape]) for element in elements})[:3]
        return f"its examples have the shapes {', '.join(shapes)}; give examples of one shape, numpy.stack(x)"
    return "encode text as numbers first"


def take_first_input(user_client: GivenClient) -> Tensor | dict[str, Tensor] | None:
    """First input ``[1, ...]`` of a client before conversion, or a dict of them; None if it is no array."""
    x, _ = user_client.parts["train" if "train" in user_client.parts else ""]
    try:
        inputs = (
            {n: to_input_tensor(a, n) for n, a in x.items()}
            if isinstance(x, Mapping)
            else to_input_tensor(x, "x")
        )
    except DataError:
        # the conversion of all clients reports the error with the client
        return None
    if isinstance(inputs, Tensor):
        return inputs[:1] if inputs.ndim and len(inputs) else None
    return {n: t[:1] for n, t in inputs.items()} if all(t.ndim and len(t) for t in inputs.values()) else None


def to_input_tensor(array: Any, title: str) -> Tensor:
    """Convert inputs to a tensor of their own type; a data frame to int64 or float64, even if it stores bytes."""
    return to_tensor(convert_frame(array) if is_frame(array) else array, title)


def name_classes(
    clients: Sequence[ClientData],
    classes: Sequence[str] | int | None,
    titles: Sequence[str],
    loss: Loss = AUTO,
) -> tuple[str, ...]:
    """Names of the classes: the given ones, or the numbers up to the largest label; empty for real targets.

    They are also empty if the loss predicts next tokens.

    ``titles`` are the names of the clients in messages.

    Raises:
        DataError: if clients mix regression and classification, or a label is negative or too large.
    """
    is_regression = [c.train.is_regression for c in clients]
    if any(is_regression) and not all(is_regression):
        raise DataError(
            f"{titles[is_regression.index(True)]} has real targets and {titles[is_regression.index(False)]} "
            "class labels; all must learn the same task"
        )
    if all(is_regression):
        if classes:
            raise DataError(
                f"{titles[0]} has real targets, a regression, which has no classes; leave them out. For a "
                "classification give labels [n], whole numbers; of one-hot rows, y.argmax(1). Several labels an example "
                "(loss='bce') are counted by the columns of the targets."
            )
        return ()
    if loss.kind == "next_token":
        return ()
    first_examples = clients[0].train
    if loss.kind == "auto" and first_examples.has_token_labels:
        raise DataError(
            f"{titles[0]} has a label for each token, {describe_array(first_examples.y)}. Set loss='cross_entropy' for the class "
            "of each token, or loss='next_token' for a language model, whose labels are the tokens themselves."
        )
    labels = concatenate_labels(clients)
    if first_examples.is_dense or loss.kind in ("cross_entropy", "focal"):
        labels = labels[labels != loss.ignore_index]
        if not len(labels):
            raise DataError(
                f"no label counts: all are {loss.ignore_index}, which loss.ignore_index leaves out"
            )
    class_count = int(labels.max()) + 1
    if int(labels.min()) < 0:
        _reject_negative_labels(clients, titles, loss)
    if classes is None:
        classes = class_count
    names = tuple(map(str, range(classes))) if isinstance(classes, int) else tuple(classes)
    if class_count > len(names):
        title = next(
            title
            for title, c in zip(titles, clients, strict=True)
            if bool((concatenate_labels([c]) == class_count - 1).any())
        )
        raise DataError(
            f"{title}: there is a label {class_count - 1} but only {len(names)} classes; labels count from 0. "
            "Leave classes= out to number labels in their order"
        )
    return names


def concatenate_labels(clients: Sequence[ClientData]) -> Tensor:
    """Concatenate all labels of all clients."""
    labels = [e.y for c in clients for e in (c.train, c.val, c.test) if not e.is_regression]
    # one concatenation, because min and max of every part of every client take longer
    return torch.cat([y.cpu() if y.ndim == 1 else y.cpu().flatten() for y in labels])


def _reject_negative_labels(clients: Sequence[ClientData], titles: Sequence[str], loss: Loss) -> None:
    """Raise an error for the first client with a negative class label, if there is one."""
    for title, data in zip(titles, clients, strict=True):
        for examples in (data.train, data.val, data.test):
            if examples.is_regression:
                continue
            leaves_out = loss.kind != "auto" or examples.is_dense
            y = examples.y[examples.y != loss.ignore_index] if leaves_out else examples.y
            if (y < 0).any():
                label = int(y.min())
                raise DataError(
                    f"{title}: label {label} is negative. Leave out examples without a label, or "
                    f"{_advise_to_ignore(label, loss)}; of the labels -1 and 1 give y > 0"
                )


def _advise_to_ignore(label: int, loss: Loss) -> str:
    """Advise what to set so that a label does not count."""
    if loss.kind in ("cross_entropy", "focal"):
        return f"set loss.ignore_index = {label}"
    if label == IGNORE_INDEX:
        return f"set loss.kind = 'cross_entropy', which leaves out the label {label}"
    return f"set loss.kind = 'cross_entropy' and loss.ignore_index = {label}"


def is_one_hot(y: Tensor) -> bool:
    """Whether the targets are rows ``[n, d]`` of zeros with a single 1 each."""
    if y.ndim != 2 or y.shape[1] < 2 or not len(y):
        return False
    return bool(((y == 0) | (y == 1)).all()) and bool((y.sum(1) == 1).all())


def are_whole_classes(parts: Sequence[Tensor]) -> bool:
    """Whether the real targets [n, 1] of all clients are whole numbers, few enough to be classes."""
    parts = [y for y in parts if len(y)]
    if not parts or not all(y.is_floating_point() and y.shape[1:] == (1,) for y in parts):
        return False
    if not all(bool((y == y.round()).all()) for y in parts):
        return False
    return 1 < len({value for y in parts for value in y.unique().tolist()}) <= _MAX_WHOLE_CLASSES


def find_target_warning(parts: Sequence[Tensor], column_warning: str = "") -> str | None:
    """Warn of real targets [n, d] of all clients that mean classes; None if they do not.

    Args:
        parts: targets of all clients.
        column_warning: warning of whole numbers, if the targets are a column of single numbers. Its name alone does not
            say whether the task is a regression; the shape [n, 1] of an array does.
    """
    parts = [y for y in parts if len(y)]
    if not parts or not parts[0].is_floating_point():
        return None
    if column_warning and are_whole_classes(parts):
        return column_warning
    if all(is_one_hot(y) for y in parts):
        return ONE_HOT_WARNING
    is_binary = all(bool(((y == 0) | (y == 1)).all()) for y in parts)
    if not is_binary or len({float(value) for y in parts for value in y.aminmax()}) < 2:
        return None
    return BINARY_WARNING if parts[0].shape[1] == 1 else MULTI_HOT_WARNING


def find_label_warning(parts: Sequence[Tensor]) -> str | None:
    """Warn of class labels of all clients that do not begin at 0; None if they do."""
    labels = [y for y in parts if len(y) and y.ndim == 1 and not y.is_floating_point()]
    min_label = min((int(y.min()) for y in labels), default=0)
    if min_label <= 0:
        return None
    return (
        f"the smallest label is {min_label}, but labels count from 0, so the model has scores that are never right. Give "
        f"y - {min_label}, or name all classes (classes=...)."
    )


def find_target_hint(y: Tensor) -> str:
    """Advise what to pass instead of targets of this type and shape; empty if they are fine."""
    if y.is_floating_point() and y.ndim == 1:
        return "For classes give whole numbers, y.long(); for a regression give targets [n, 1], y[:, None]."
    if y.ndim == 2 and y.shape[1] == 1 and not y.is_floating_point():
        return "For classes give labels [n], y[:, 0]; for a regression give real numbers, y.float()."
    if is_one_hot(y):
        return "These are one-hot rows: give the number of each class, y.argmax(1)."
    return ""


def _convert_targets(y: Tensor, has_named_inputs: bool, loss: Loss) -> Tensor:
    """Convert targets to the type of `Examples.y`."""
    is_real = y.is_floating_point()
    if loss.kind in OF_REAL_TARGETS and (is_real or loss.kind not in OF_LABELS):
        # one-dimensional numbers are targets of one output
        return _to_type(y if y.ndim != 1 else y[:, None], torch.float32)
    if is_real and y.ndim >= 2:
        return _to_type(y, torch.float32)
    # token labels [n, T] come with named inputs or a loss of labels; check_scores refuses one-hot rows then
    may_be_tokens = has_named_inputs or (loss.kind in OF_LABELS and y.ndim == 2 and y.shape[1] > 1)
    if is_real or (y.ndim == 2 and not may_be_tokens and find_target_hint(y)):
        hint = find_target_hint(y) or "Real targets are [n, d], labels of classes whole numbers [n]."
        raise DataError(f"the targets are {describe_array(y)}. {hint}")
    return _to_type(y, torch.int64)


def _to_type(x: Tensor, dtype: torch.dtype) -> Tensor:
    # calling .to, even without effect, takes longer than the comparison
    return x if x.dtype == dtype else x.to(dtype)


def _describe_type(value: Any) -> str:
    return f"a {type(value).__name__}" + (f" of {len(value)}" if isinstance(value, tuple | list) else "")
