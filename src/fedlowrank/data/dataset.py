"""Examples in memory, data sets with their official parts, and normalization."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor

from ..core.errors import ConfigError, DataError, did_you_mean
from ..core.key import Key
from ..core.loss import IGNORE_INDEX
from .pixels import Pixels

Inputs: TypeAlias = Tensor | dict[str, Tensor]
"""Inputs of n examples: a float32 tensor [n, ...], or named tensors (token ids, masks, ...) that each start with n."""

Stored: TypeAlias = Inputs | Pixels
"""Inputs as examples keep them: images may be bytes."""

Normalization: TypeAlias = Literal["none", "scale", "standard"]

# Values that are looked at together: the temporaries of a check stay small beside a data set of many hundred megabytes.
_CHUNK = 2**20


@dataclass(frozen=True, eq=False)
class Examples:
    """Inputs and targets of n examples (n may be 0: a client may go without validation data).

    Attributes:
        x: inputs, float32 [n, ...]; or such images as bytes; or a dictionary of tensors of any type, each [n, ...], for
            text.
        y: labels, int64 [n]; or the real targets of a regression, float32 [n, d]; or the labels of tokens, int64
            [n, T], beside inputs ``input_ids`` [n, T]: the token's own id where the loss counts, -100 elsewhere. They
            are not shifted: position t holds the label of token t, which is predicted from the tokens before it.

    Raises:
        DataError: on construction, if the types or the lengths are not as above.
    """

    x: Stored
    y: Tensor

    def __post_init__(self) -> None:
        form = self.y.dtype, self.y.ndim
        known = (torch.int64, 1), (torch.float32, 2), *([(torch.int64, 2)] if isinstance(self.x, dict) else [])
        if form not in known or (self.y.ndim == 2 and self.y.shape[1] == 0):
            raise DataError(
                f"the labels must be int64 [n], or for a regression the targets float32 [n, d], not {_form(self.y)}. "
                "Labels of tokens are int64 [n, T], beside named inputs with the input_ids [n, T]."
            )
        if isinstance(self.x, dict):
            if not self.x:
                raise DataError("the inputs are a dictionary without a tensor.")
            parts: dict[str, Tensor | Pixels] = {f"input {name!r}": tensor for name, tensor in self.x.items()}
        else:
            parts = {"input": self.x}
            if self.x.dtype != torch.float32:
                raise DataError(f"the inputs must be float32 [n, ...], not {_form(self.x)}.")
        for name, tensor in parts.items():
            found = len(tensor) if tensor.ndim else 0
            if tensor.ndim == 0 or found != len(self.y):
                raise DataError(f"there are {len(self.y)} labels, but the {name} holds {found} examples.")
        if self.tokens and isinstance(self.x, dict):
            ids = self.x.get("input_ids")
            if ids is None or ids.shape != self.y.shape:
                found_ids = f"there are none but {sorted(self.x)}" if ids is None else f"these are {_form(ids)}"
                raise DataError(f"labels of tokens {_form(self.y)} need input_ids of their shape; {found_ids}.")

    def __len__(self) -> int:
        return len(self.y)

    @property
    def inputs(self) -> Inputs:
        """The inputs as numbers: ``x`` itself, but images that are kept as bytes become float32 [n, ...] here."""
        return self.x.images() if isinstance(self.x, Pixels) else self.x

    @property
    def regression(self) -> bool:
        """Whether the targets are real numbers."""
        return self.y.is_floating_point()

    @property
    def tokens(self) -> bool:
        """Whether every token has a label, as for a language model."""
        return self.y.ndim == 2 and not self.regression

    def take(self, index: Tensor | np.ndarray) -> Examples:
        """Copies of the examples at these positions, in this order.

        Args:
            index: positions, integers [m] in 0..n-1.

        Returns:
            m examples in contiguous tensors of their own, images as float32.

        Raises:
            DataError: if a position lies outside 0..n-1.
        """
        where = torch.as_tensor(index, dtype=torch.int64, device=self.y.device)
        if len(where) and (int(where.min()) < 0 or int(where.max()) >= len(self)):
            raise DataError(f"positions {int(where.min())}..{int(where.max())} were asked of {len(self)} examples.")
        if isinstance(self.x, dict):
            return Examples({name: t.index_select(0, where) for name, t in self.x.items()}, self.y[where])
        return Examples(self.x.index_select(0, where), self.y[where])


@dataclass(frozen=True, eq=False)
class ClientData:
    """What one client holds.

    Attributes:
        train: examples to train on.
        val: examples to choose settings and rounds by; may be empty.
        test: examples to report on.
        notes: what a reader of results should know about them, e.g. that there is a single class.
        quarter_turns: by how many quarter turns, counter-clockwise, the images of all three were turned, for
            :meth:`fedlowrank.data.augment.Augment.apply`.
    """

    train: Examples
    val: Examples
    test: Examples
    notes: tuple[str, ...] = ()
    quarter_turns: int = 0


@dataclass(frozen=True, eq=False)
class Dataset:
    """A data set for classification, regression or a language model, in memory.

    Attributes:
        name: name for messages and reports.
        train: the official training part, or all examples where the authors define no test part.
        test: the official test part, or None.
        classes: names of the classes; label k means ``classes[k]``. Empty for a regression and for labels of tokens.
        natural: client to whom each training example belongs by its origin (a writer, a hospital, ...), int64 [n], or
            None. A negative number says that the example belongs to no client.
        natural_test: the same for the test part, or None.
        strata: what partitions go by where examples have no class labels (a category of the text, ...): a number from 0
            on for each training example, int64 [n], or None.
        strata_test: the same for the test part; given with ``strata`` if there is a test part, else None.
        strata_names: names of the strata; stratum k means ``strata_names[k]``.
        notes: what a reader of results should know, e.g. how many texts were truncated.

    Raises:
        DataError: on construction: an empty part, labels out of range, inputs or targets that are not finite, lengths
            or shapes that differ.
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

    def __post_init__(self) -> None:
        if len(set(self.classes)) != len(self.classes):
            raise DataError(f"data set {self.name!r} names a class twice.")
        self._check_part("training", self.train, self.natural)
        if self.test is not None:
            self._check_part("test", self.test, self.natural_test)
            if (train := _shapes(self.train.x)) != (test := _shapes(self.test.x)):
                raise DataError(f"data set {self.name!r}: training inputs are {train}, but test inputs are {test}.")
            if (train := self.train.y.shape[1:]) != (test := self.test.y.shape[1:]):
                raise DataError(f"data set {self.name!r}: training targets are {[*train]}, but test targets {[*test]}.")
        elif self.natural_test is not None:
            raise DataError(f"data set {self.name!r} has client ids for a test part, but no test part.")
        self._check_strata()

    @property
    def outputs(self) -> int:
        """Width of a model's output: the number of classes, or of the target's numbers; 0 for labels of tokens."""
        if self.train.tokens:
            return 0
        return len(self.classes) or self.train.y.shape[1]

    def _check_part(self, part: str, examples: Examples, natural: Tensor | None) -> None:
        where = f"the {part} part of data set {self.name!r}"
        if len(examples) == 0:
            raise DataError(f"{where} is empty.")
        if (examples.regression or examples.tokens) != (not self.classes):
            kind = "labels of tokens" if examples.tokens else "real targets"
            found = f"{kind} but names classes" if self.classes else "class labels but names no classes"
            raise DataError(
                f"{where} has {found}; a regression or a language model has no classes, a classification has some."
            )
        low, high = (0, -1) if not self.classes else (int(v) for v in examples.y.aminmax())
        if examples.tokens:
            _check_tokens(where, examples.y)
        elif low < 0 or high >= len(self.classes):
            wrong = (examples.y < 0) | (examples.y >= len(self.classes))
            first = int(wrong.nonzero()[0])
            raise DataError(
                f"{where} has labels outside 0..{len(self.classes) - 1}: the first is {int(examples.y[first])}, "
                f"at example {first} (counted from 0)."
            )
        held = examples.inputs
        inputs = held if isinstance(held, dict) else {"x": held}
        for name, tensor in [*inputs.items(), ("the targets", examples.y)]:
            if tensor.numel() == 0:
                raise DataError(f"{where} has inputs without values: {_form(tensor)}.")
            for start, rows in _chunks(tensor):
                finite = torch.isfinite(rows)
                if not bool(finite.all()):
                    first = start + int((~finite).flatten(1).any(1).nonzero()[0]) if rows.ndim > 1 else start
                    raise DataError(f"{where} has a NaN or an infinity in {name}, first near example {first}.")
        if natural is not None and (natural.dtype != torch.int64 or natural.shape != (len(examples),)):
            raise DataError(f"{where} needs client ids int64 [{len(examples)}], not {_form(natural)}.")

    def _check_strata(self) -> None:
        name = f"data set {self.name!r}"
        if len(set(self.strata_names)) != len(self.strata_names):
            raise DataError(f"{name} names a stratum twice.")
        if self.strata is None:
            if self.strata_names or self.strata_test is not None:
                raise DataError(f"{name} names strata, but its training examples have none.")
            return
        if self.classes:
            raise DataError(
                f"{name} has strata beside class labels; partitions could go by either. Leave out the strata."
            )
        if (self.strata_test is None) != (self.test is None):
            raise DataError(
                f"{name} needs strata of the test part if there is one, as of the training part, else none."
            )
        for part, strata, examples in (("training", self.strata, self.train), ("test", self.strata_test, self.test)):
            if strata is None or examples is None:
                continue
            if strata.dtype != torch.int64 or strata.shape != (len(examples),):
                raise DataError(f"the {part} part of {name} needs strata int64 [{len(examples)}], not {_form(strata)}.")
            low, high = (int(v) for v in strata.aminmax())
            if low < 0 or high >= len(self.strata_names):
                raise DataError(
                    f"the {part} part of {name} has strata {low}..{high}, but strata_names names {len(self.strata_names)}."
                )


def subset(dataset: Dataset, examples: int) -> Dataset:
    """The data set with so many of its training examples, the same ones in every run; the test part stays whole.

    Raises:
        ConfigError: if the number is not between 1 and that of the training examples.
    """
    n = len(dataset.train)
    if not 0 < examples <= n:
        raise ConfigError(f"data.examples: {dataset.name!r} has {n} training examples; it is {examples}")
    index = torch.from_numpy(Key(("subset",)).numpy().permutation(n)[:examples]).sort().values
    natural, strata = (None if of is None else of[index] for of in (dataset.natural, dataset.strata))
    return replace(dataset, train=dataset.train.take(index), natural=natural, strata=strata)


def normalize(dataset: Dataset, how: Normalization) -> Dataset:
    """The data set with its inputs mapped to a common range by an affine map.

    The map is found on the training part alone and applied to both parts, so that nothing of the test part leaks.
    Axis 1 of the inputs holds the channels (of images [n, C, H, W]) or the features (of tables [n, d]). Values that do
    not vary are only shifted: to 0.

    Args:
        dataset: a data set with one input tensor.
        how: ``none`` changes nothing; ``scale`` takes the smallest training value to 0 and the largest to 1 (one map
            for all channels of an image, which keeps its colors; a map for each feature of a table; test values may
            lie outside); ``standard`` gives each channel or feature of the training part mean 0 and standard
            deviation 1.

    Returns:
        A data set with new inputs (the old ones are left alone), or ``dataset`` itself for ``none``.

    Raises:
        ConfigError: on another ``how``, or if the inputs are a dictionary (token ids have no range).
    """
    if how not in get_args(Normalization):
        raise ConfigError(f"unknown normalization {how!r}. " + did_you_mean(how, get_args(Normalization)))
    if how == "none":
        return dataset
    x = dataset.train.inputs
    if isinstance(x, dict):
        raise ConfigError(f"normalization {how!r} needs one input tensor; {dataset.name!r} has named ones: use 'none'.")
    shift, width = _range(x) if how == "scale" else _moments(x)
    test = dataset.test
    if test is not None and not isinstance(other := test.inputs, dict):
        test = Examples(_affine(other, shift, width), test.y)
    return replace(dataset, train=Examples(_affine(x, shift, width), dataset.train.y), test=test)


def _check_tokens(where: str, y: Tensor) -> None:
    """Refuse labels of tokens that no loss can be made of."""
    for start, rows in _chunks(y):
        wrong = (rows < 0) & (rows != IGNORE_INDEX)
        if bool(wrong.any()):
            i, t = wrong.nonzero()[0].tolist()
            raise DataError(
                f"{where}: a label of a token is its id or {IGNORE_INDEX}; example {start + i} has {int(rows[i, t])} at "
                f"position {t} (counted from 0)."
            )
        # Nothing predicts the first token.
        without = (rows[:, 1:] == IGNORE_INDEX).all(1)
        if bool(without.any()):
            i = int(without.nonzero()[0])
            raise DataError(f"{where}: example {start + i} (counted from 0) has no token to learn behind its first.")


def _affine(x: Tensor, shift: Tensor, width: Tensor) -> Tensor:
    return (x - shift).div_(width)


def _range(x: Tensor) -> tuple[Tensor, Tensor]:
    low, high = _extremes(x)
    if x.ndim > 2:
        low, high = low.amin().expand_as(low), high.amax().expand_as(high)
    width = (high - low).where(high > low, torch.ones_like(low))
    return _along_channels(low, x), _along_channels(width, x)


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    low, high = _extremes(x)
    count = x.numel() / len(low)
    # Two passes in float64: the difference of the mean square and the squared mean loses all digits when the mean is
    # large beside the deviation.
    mean, square = torch.zeros_like(low, dtype=torch.float64), torch.zeros_like(low, dtype=torch.float64)
    for _, rows in _chunks(x):
        mean += _channels(rows.double()).sum(0) / count
    for _, rows in _chunks(x):
        square += (_channels(rows.double()) - mean).square_().sum(0) / count
    # A channel is constant if its extremes agree; its computed deviation may differ from 0 by rounding.
    deviation = square.sqrt().where(high > low, torch.ones_like(mean))
    mean = mean.where(high > low, low.double())
    return _along_channels(mean.float(), x), _along_channels(deviation.float(), x)


def _extremes(x: Tensor) -> tuple[Tensor, Tensor]:
    lows, highs = zip(*(torch.aminmax(_channels(rows), dim=0) for _, rows in _chunks(x)), strict=True)
    return torch.stack(lows).amin(0), torch.stack(highs).amax(0)


def _channels(x: Tensor) -> Tensor:
    """[n, C, ...] as [values of a channel, C]; [n] as [n, 1]."""
    return x.unsqueeze(1) if x.ndim == 1 else x.movedim(1, -1).reshape(-1, x.shape[1])


def _along_channels(values: Tensor, x: Tensor) -> Tensor:
    return values if x.ndim == 1 else values.reshape(1, -1, *[1] * (x.ndim - 2))


def _chunks(x: Tensor) -> Iterator[tuple[int, Tensor]]:
    rows = max(1, _CHUNK // max(1, x[:1].numel()))
    for start in range(0, len(x), rows):
        yield start, x[start : start + rows]


def _shapes(x: Stored) -> dict[str, tuple[int, ...]] | tuple[int, ...]:
    if isinstance(x, dict):
        return {name: tuple(t.shape[1:]) for name, t in x.items()}
    return tuple(x.shape[1:])


def _form(x: Tensor | Pixels) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"
