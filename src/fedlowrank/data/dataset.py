"""Examples in memory, data sets with their official parts, and normalization."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..core.errors import ConfigError, DataError, did_you_mean
from ..core.key import Key
from .input_types import warn_of_rounding
from .partitioning.checks import check_finite_values, describe_array, split_rows
from .pixels import Pixels

Inputs: TypeAlias = Tensor | dict[str, Tensor]
"""Inputs of n examples: a float32 tensor [n, ...], or int64 if a model looks up whole numbers; or named
tensors [n, ...] (token ids, masks, ...)."""

Stored: TypeAlias = Inputs | Pixels
"""Inputs as examples store them: images may be stored as bytes."""

Normalization: TypeAlias = Literal["none", "scale", "standard", "standard_per_client"]

_INPUT_TYPES = torch.float32, torch.int64
_MIN_TARGET_DIMENSIONS = {torch.int64: 1, torch.float32: 2}
"""Types of targets, and their smallest number of dimensions."""


@dataclass(frozen=True, eq=False)
class Examples:
    """Inputs and targets of n examples (n may be 0: a client may have no validation data).

    Attributes:
        x: inputs, float32 [n, ...], or int64 [n, ...] that a model looks up; or images as bytes; or, for text, named
            tensors [n, ...].
        y: labels, int64 [n]; or real targets, float32 [n, d] of a regression or of several labels, [n, H, W] of
            pixels; or a label of each pixel, int64 [n, H, W], or of each token [n, T]. For language models it is the
            token's own id where the loss counts, -100 elsewhere, beside inputs ``input_ids`` [n, T]. These labels are
            not shifted: position t holds the label of token t. Pairs of responses to one prompt are [n, 2, T].

    Raises:
        DataError: on construction, if types or lengths are not as above.
    """

    x: Stored
    y: Tensor

    def __post_init__(self) -> None:
        min_dimensions = _MIN_TARGET_DIMENSIONS.get(self.y.dtype)
        if min_dimensions is None or self.y.ndim < min_dimensions or 0 in self.y.shape[1:]:
            raise DataError(
                "the labels must be int64 [n], or [n, ...] of pixels or tokens, or for a regression the targets "
                f"float32 [n, d], not {describe_array(self.y)}."
            )
        if isinstance(self.x, dict):
            if not self.x:
                raise DataError("the inputs are a dictionary without a tensor.")
            inputs: dict[str, Tensor | Pixels] = {f"input {name!r}": t for name, t in self.x.items()}
        else:
            inputs = {"input": self.x}
            if self.x.dtype not in _INPUT_TYPES:
                raise DataError(
                    f"the inputs must be float32 [n, ...], or int64 of a model that looks them up, not "
                    f"{describe_array(self.x)}."
                )
        for name, tensor in inputs.items():
            # .shape is used because len(tensor) runs Python code of torch
            count = tensor.shape[0] if tensor.ndim else 0
            if tensor.ndim == 0 or count != self.y.shape[0]:
                raise DataError(f"there are {len(self.y)} labels, but the {name} holds {count} examples.")

    def __repr__(self) -> str:
        inputs = self.x if isinstance(self.x, dict) else {"x": self.x}
        arrays = ", ".join(f"{name}={describe_array(t)}" for name, t in (*inputs.items(), ("y", self.y)))
        return f"Examples({arrays})"

    def __len__(self) -> int:
        return self.y.shape[0]

    @property
    def inputs(self) -> Inputs:
        """Inputs ``x``; images stored as bytes are converted to float32 [n, ...]."""
        return self.x.images() if isinstance(self.x, Pixels) else self.x

    @property
    def is_regression(self) -> bool:
        """Whether the targets are real numbers."""
        return self.y.is_floating_point()

    @property
    def is_dense(self) -> bool:
        """Whether every pixel or token has a label."""
        return self.y.ndim > 1 and not self.is_regression

    @property
    def has_token_labels(self) -> bool:
        """Whether every token of a text has a label, as for a language model."""
        ids = self.x.get("input_ids") if isinstance(self.x, dict) else None
        return self.is_dense and ids is not None and ids.shape == self.y.shape

    def take(self, index: Tensor | np.ndarray) -> Examples:
        """Copy the examples at positions [m] in 0..n-1 to new contiguous tensors, images as float32."""
        index = torch.as_tensor(index, dtype=torch.int64, device=self.y.device)
        y = self.y.index_select(0, index)
        if isinstance(self.x, dict):
            return Examples({name: t.index_select(0, index) for name, t in self.x.items()}, y)
        return Examples(self.x.index_select(0, index), y)


@dataclass(frozen=True, eq=False)
class ClientData:
    """The examples of one client.

    Attributes:
        train: examples for training.
        val: examples for choosing settings and rounds; may be empty.
        test: examples for the reported results.
        notes: warnings for the reader of results, e.g. that the client has a single class.
        quarter_turns: number of counter-clockwise quarter turns by which the images of all three parts were rotated,
            for :meth:`fedlowrank.data.augment.Augment.apply`.
        name: name of the client in the data, such as a hospital; empty if clients have only numbers.
    """

    train: Examples
    val: Examples
    test: Examples
    notes: tuple[str, ...] = ()
    quarter_turns: int = 0
    name: str = ""


@dataclass(frozen=True, eq=False)
class WideColumn:
    """A column of a table whose values are too close for float32 to distinguish, such as seconds since 1970.

    Attributes:
        name: name of the column.
        index: index of the column's input, from 0.
        parts: values of the column, float64 [n], of the training part and of the test part, if there is one.
    """

    name: str
    index: int
    parts: tuple[npt.NDArray[np.float64], ...]


@dataclass(frozen=True, eq=False)
class Dataset:
    """A data set in memory, for classification, regression or a language model.

    Attributes:
        name: name for messages and reports.
        train: the official training part, or all examples if the authors define no test part.
        test: the official test part, or None.
        classes: names of the classes; label k means ``classes[k]``. Empty without class labels.
        natural: natural client of each training example (a writer, a hospital, ...), int64 [n], or None. A
            negative number means no client.
        natural_test: the same for the test part, or None.
        strata: groups that partitions use if examples have no class labels (e.g. a category of the text): the number
            of the stratum of each training example, int64 [n], or None.
        strata_test: the same for the test part, or None.
        strata_names: names of the strata; stratum k means ``strata_names[k]``.
        notes: warnings for the reader of results, e.g. how many texts were truncated.
        natural_names: names of the natural clients; client k is ``natural_names[k]``. Empty if they have no names.
        wide_columns: columns of a table that :func:`normalize` maps in float64.

    Raises:
        DataError: on construction, if a part is empty, labels are out of range, inputs or targets are not finite, or
            lengths or shapes differ.
    """

    name: str
    train: Examples
    test: Examples | None
    classes: tuple[str, ...]
    natural: Tensor | None = None
    natural_test: Tensor | None = None
    strata: Tensor | None = None
    strata_test: Tensor | None = None
    strata_names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    natural_names: tuple[str, ...] = ()
    wide_columns: tuple[WideColumn, ...] = ()

    def __post_init__(self) -> None:
        name = f"data set {self.name!r}"
        if len(set(self.classes)) != len(self.classes):
            raise DataError(f"{name} names a class twice.")
        self._check_part("training", self.train, self.natural)
        if self.test is not None:
            self._check_part("test", self.test, self.natural_test)
            if (train := _input_shapes(self.train.x)) != (test := _input_shapes(self.test.x)):
                raise DataError(f"{name}: training inputs are {train}, but test inputs are {test}.")
            if (train := self.train.y.shape[1:]) != (test := self.test.y.shape[1:]):
                raise DataError(f"{name}: training targets are {[*train]}, but test targets {[*test]}.")
        elif self.natural_test is not None:
            raise DataError(f"{name} has client ids for a test part, but no test part.")

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(name={self.name!r}, train={self.train}, test={self.test}, classes={len(self.classes)}, "
            f"natural_clients={len(self.natural_names)})"
        )

    @property
    def outputs(self) -> int:
        """Width of a model's output: the number of classes, or of target values; 0 for tokens to predict."""
        if self.train.has_token_labels and not self.classes:
            return 0
        return len(self.classes) or self.train.y.shape[1]

    def _check_part(self, part: str, examples: Examples, natural_clients: Tensor | None) -> None:
        description, y = f"the {part} part of data set {self.name!r}", examples.y
        if len(examples) == 0:
            raise DataError(f"{description} is empty.")
        # for pixels and tokens, negative labels mark those without a label
        # a text without classes may be larger than memory
        is_invalid = (y >= len(self.classes)) | (y < 0 if y.ndim == 1 else False) if self.classes else y[:0]
        if len(invalid_index := is_invalid.nonzero()):
            first_row = int(invalid_index[0, 0])
            raise DataError(
                f"{description} has labels outside 0..{len(self.classes) - 1}: the first is {int(y[tuple(invalid_index[0])])}, "
                f"at example {first_row} (counted from 0)."
            )
        x = examples.inputs
        inputs = x if isinstance(x, dict) else {"the inputs": x}
        for name, tensor in [*inputs.items(), ("the targets", y)]:
            if tensor.numel() == 0:
                raise DataError(f"{description} has inputs without values: {describe_array(tensor)}.")
            check_finite_values(f"{name} of {description}", tensor)
        if natural_clients is not None and len(natural_clients) != len(y):
            raise DataError(
                f"{description} needs client ids int64 [{len(y)}], not {describe_array(natural_clients)}."
            )


def draw_subset(dataset: Dataset, example_count: int) -> Dataset:
    """Keep a random subset of the training examples, the same in every run; the test part stays complete."""
    n = len(dataset.train)
    if not 0 < example_count <= n:
        raise ConfigError(f"data.examples: {dataset.name!r} has {n} training examples; it is {example_count}")
    index = torch.from_numpy(Key(("subset",)).numpy().permutation(n)[:example_count]).sort().values
    natural_clients, strata = (None if t is None else t[index] for t in (dataset.natural, dataset.strata))
    return replace(dataset, train=dataset.train.take(index), natural=natural_clients, strata=strata)


def normalize(dataset: Dataset, mode: Normalization) -> Dataset:
    """Map the inputs to a common range by an affine map.

    The map is fitted only on the official training part and applied to both parts, so no information of the official
    test part leaks. It is fitted before the examples are divided among clients, so every client sees a few statistics
    of the others, and of those training examples that a split makes its validation or test examples.
    :func:`standardize_client` has neither leak. Axis 1 of the inputs holds the channels (of images [n, C, H, W]) or
    the features (of tables [n, d]). Constant values become 0. Columns of a table whose values float32 cannot
    distinguish are first shifted in float64, so that their smallest training value is 0; with ``none`` they get a
    warning.

    Args:
        dataset: data set with one input tensor.
        mode: ``none`` changes nothing; ``scale`` maps the smallest training value to 0 and the largest to 1 (one map
            for all channels of an image, which keeps its colors; one per feature of a table); ``standard`` gives each
            channel or feature mean 0 and standard deviation 1; ``standard_per_client`` leaves the normalization to
            :func:`standardize_client`.

    Raises:
        ConfigError: if ``mode`` is unknown, or if the inputs are a dictionary (token ids have no range).
    """
    if mode not in get_args(Normalization):
        raise ConfigError(f"unknown normalization {mode!r}. " + did_you_mean(mode, get_args(Normalization)))
    if dataset.wide_columns:
        dataset = _warn_of_rounded_columns(dataset) if mode == "none" else _shift_columns(dataset)
    if mode in ("none", "standard_per_client"):
        return dataset
    x = dataset.train.inputs
    if isinstance(x, dict):
        raise ConfigError(f"normalization {mode!r} needs one input tensor; {dataset.name!r} has named ones.")
    shift, scale = _measure_range(x) if mode == "scale" else _measure_moments(x)
    test = dataset.test
    if test is not None and isinstance(test.inputs, Tensor):
        test = Examples((test.inputs - shift).div_(scale), test.y)
    return replace(dataset, train=Examples((x - shift).div_(scale), dataset.train.y), test=test)


def _warn_of_rounded_columns(dataset: Dataset) -> Dataset:
    """Return the data set unchanged, with a warning for each column that float32 rounds too much."""
    for column in dataset.wide_columns:
        warn_of_rounding(column.parts[0], f"the column {column.name!r} of {dataset.name!r}")
    return replace(dataset, wide_columns=())


def _shift_columns(dataset: Dataset) -> Dataset:
    """Subtract the smallest training value of each wide column, in float64."""
    parts = [dataset.train] if dataset.test is None else [dataset.train, dataset.test]
    shifted_parts = []
    for k, examples in enumerate(parts):
        assert isinstance(examples.inputs, Tensor)
        x = examples.inputs.clone()
        for column in dataset.wide_columns:
            values = column.parts[k] - column.parts[0].min()
            x[:, column.index] = torch.from_numpy(values.astype(np.float32))
        shifted_parts.append(Examples(x, examples.y))
    return replace(
        dataset, train=shifted_parts[0], test=shifted_parts[1] if shifted_parts[1:] else None, wide_columns=()
    )


def standardize_client(client: ClientData) -> ClientData:
    """Give each channel or feature mean 0 and standard deviation 1 over the client's own training examples.

    Validation and test examples go through the same map. No information of other clients or of held-out examples
    leaks.

    Raises:
        ConfigError: if the inputs are a dictionary.
    """
    x = client.train.inputs
    if isinstance(x, dict):
        raise ConfigError("normalization 'standard_per_client' needs one input tensor, not named ones.")
    shift, scale = _measure_moments(x)

    def apply(examples: Examples) -> Examples:
        assert isinstance(examples.inputs, Tensor)
        return Examples((examples.inputs - shift).div_(scale), examples.y)

    return replace(client, train=apply(client.train), val=apply(client.val), test=apply(client.test))


def _measure_range(x: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest value and width of the range, per feature of a table, or over all channels of images."""
    low, high = _find_extremes(x)
    if x.ndim > 2:
        low, high = low.amin().expand_as(low), high.amax().expand_as(high)
    width = (high - low).where(high > low, torch.ones_like(low))
    return _broadcast_to_channels(low, x), _broadcast_to_channels(width, x)


def _measure_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation per channel or feature."""
    low, high = _find_extremes(x)
    count = x.numel() / len(low)
    # two passes in float64: the mean square minus the squared mean loses all digits if the mean is large
    mean, variance = torch.zeros_like(low, dtype=torch.float64), torch.zeros_like(low, dtype=torch.float64)
    for _, rows in split_rows(x):
        mean += _flatten_to_channels(rows.double()).sum(0) / count
    for _, rows in split_rows(x):
        variance += (_flatten_to_channels(rows.double()) - mean).square_().sum(0) / count
    # the extremes of a constant channel are equal; its computed deviation may differ from 0 by rounding
    deviation = variance.sqrt().where(high > low, torch.ones_like(mean))
    mean = mean.where(high > low, low.double())
    return _broadcast_to_channels(mean.float(), x), _broadcast_to_channels(deviation.float(), x)


def _find_extremes(x: Tensor) -> tuple[Tensor, Tensor]:
    lows, highs = zip(
        *(torch.aminmax(_flatten_to_channels(rows), dim=0) for _, rows in split_rows(x)), strict=True
    )
    return torch.stack(lows).amin(0), torch.stack(highs).amax(0)


def _flatten_to_channels(x: Tensor) -> Tensor:
    """Reshape [n, C, ...] to [values of a channel, C], and [n] to [n, 1]."""
    return x.unsqueeze(1) if x.ndim == 1 else x.movedim(1, -1).reshape(-1, x.shape[1])


def _broadcast_to_channels(values: Tensor, x: Tensor) -> Tensor:
    """Reshape values [C] so that they broadcast against x [n, C, ...]."""
    return values if x.ndim == 1 else values.reshape(1, -1, *[1] * (x.ndim - 2))


def _input_shapes(x: Stored) -> dict[str, tuple[int, ...]] | tuple[int, ...]:
    if isinstance(x, dict):
        return {name: tuple(t.shape[1:]) for name, t in x.items()}
    return tuple(x.shape[1:])
