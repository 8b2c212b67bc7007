"""The training examples of one client, in the order and form in which its passes use them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.contract import Batch, ClientInfo, Pass
from ..core.errors import TaskError
from ..core.key import Key
from ..core.learning.losses import AUTO, Loss
from ..data.augment import NO_AUGMENT, Augment
from ..data.dataset import Examples
from ..data.text.batches import (
    draw_length_buckets,
    measure_lengths,
    round_up_width,
    trim_padding,
    truncate_columns,
)

MAX_CHUNK = 256
"""Maximum number of examples evaluated together without a gradient: enough to keep a core busy, few enough for its cache."""

MAX_CHUNK_TOKENS = 4096
"""Maximum number of tokens evaluated together without a gradient."""

MAX_CHUNK_SCORES = MAX_CHUNK_TOKENS << 15
"""Maximum number of token scores computed together without a gradient: half a gigabyte. A vocabulary of 32,768
allows :data:`MAX_CHUNK_TOKENS` tokens."""


def chunk_size(examples: Examples, vocabulary: int | None = None) -> int:
    """Number of examples that are evaluated together where no gradient is taken.

    Args:
        examples: examples that are divided into chunks.
        vocabulary: vocabulary size of a language model, the number of scores for each token that has a label.
    """
    width = _width(examples)
    if width is None or not isinstance(examples.x, dict):
        return MAX_CHUNK
    # a pair has the tokens of both responses
    tokens = examples.x["attention_mask"].shape[1:].numel()
    max_tokens = (
        MAX_CHUNK_TOKENS
        if vocabulary is None or examples.y.ndim < 2
        else min(MAX_CHUNK_TOKENS, MAX_CHUNK_SCORES // vocabulary)
    )
    return max(1, min(MAX_CHUNK, max_tokens // tokens))


def _width(examples: Examples) -> int | None:
    """Tokens of the longest example, or None if the examples are not texts."""
    mask = examples.x.get("attention_mask") if isinstance(examples.x, dict) else None
    return None if mask is None or mask.ndim not in (2, 3) else mask.shape[-1]


@dataclass(frozen=True)
class LocalData:
    """Training examples of one client and the order in which each pass uses them.

    Attributes:
        info: info of the client.
        examples: inputs and labels of the client.
        passes: passes of the method, by name.
        key: key of this client and round; the order and the augmentation depend on the position of a pass among the
            passes and not on its name, so that they are the same for all methods.
        augment: augmentation of the images in the batches of a pass.
        quarter_turns: number of quarter turns by which the images are already rotated, so that they are mirrored
            along their own axis.
        by_length: whether the texts of a batch have similar lengths, with the batches in random order.
        loss: loss of the task.
    """

    info: ClientInfo
    examples: Examples
    passes: Mapping[str, Pass]
    key: Key
    augment: Augment = NO_AUGMENT
    quarter_turns: int = 0
    by_length: bool = False
    loss: Loss = AUTO
    _orders: dict[str, list[Tensor]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _placed: dict[str, list[Tensor]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def of(self, name: str) -> Pass:
        """The pass of the given name."""
        if name not in self.passes:
            raise TaskError(f"the method trains in a pass {name!r} but its passes() are {list(self.passes)}")
        return self.passes[name]

    def order(self, name: str) -> list[Tensor]:
        """Indices of the examples of every step, on the CPU."""
        if name not in self._orders:
            training_pass = self.of(name)
            generator, n = self._generator("order", name), training_pass.examples_of(len(self.examples))
            # indices of the examples that the pass uses; None for all of them
            subset = None if n == len(self.examples) else self._draw(n, name)
            lengths = self.lengths if self.by_length else None
            steps: list[Tensor] = []
            for _ in itertools.count() if training_pass.epochs is None else range(training_pass.epochs):
                if lengths is not None:
                    subset_lengths = lengths if subset is None else lengths[subset]
                    batches = draw_length_buckets(subset_lengths, training_pass.batch_size, generator)
                else:
                    permutation, size = torch.randperm(n, generator=generator), training_pass.batch_size
                    batches = (
                        [permutation[a : a + size] for a in range(0, n, size)] if n > size else [permutation]
                    )
                steps += training_pass.complete(batches)
                if training_pass.steps is not None and len(steps) >= training_pass.steps:
                    break
            steps = steps[: training_pass.steps]
            self._orders[name] = steps if subset is None else [subset[i] for i in steps]
        return self._orders[name]

    def _draw(self, n: int, name: str) -> Tensor:
        """Draw the indices of n random examples, for a pass that uses a share of the examples."""
        return torch.randperm(len(self.examples), generator=self._generator("share", name))[:n]

    def indices(self, name: str) -> list[Tensor]:
        """The :meth:`order` on the device of the examples, copied in one transfer so that no step waits."""
        order, device = self.order(name), self.examples.y.device
        if device.type == "cpu" or not order:
            return order
        if name not in self._placed:
            self._placed[name] = list(torch.split(torch.cat(order).to(device), [len(i) for i in order]))
        return self._placed[name]

    def steps(self, name: str) -> int:
        """Number of steps of a pass."""
        return self.of(name).steps_over(len(self.examples))

    def columns(self, name: str) -> list[int | None]:
        """Columns of the batch of every step of a pass, for texts; None if the examples are not texts."""
        return [self._columns(i.numpy()) for i in self.order(name)]

    def batches(self, name: str) -> Iterator[Batch]:
        """The batches of a pass, as it trains on them."""
        order, indices = self.order(name), self.indices(name)
        if not self.augment.is_active:
            for step, (index, columns) in enumerate(zip(indices, self.columns(name), strict=True)):
                yield gather(self.examples, index, step, columns, self.loss)
            return
        self.augment.check(self.examples.x)
        # for all steps together: a copy to the device within a step would wait for all previous steps
        sizes = [len(index) for index in order]
        draws = self.augment.draw(sum(sizes), self._generator("augment", name)).to(self.examples.y.device)
        for step, (index, draw) in enumerate(zip(indices, torch.split(draws, sizes), strict=True)):
            batch = gather(self.examples, index, step, loss=self.loss)
            yield replace(batch, x=self.augment.change(batch.x, draw, self.quarter_turns))

    def chunks(self, equal_width: bool = False, in_one: bool = False) -> Iterator[Batch]:
        """All examples once, in their own order and without augmentation, in chunks of similar sizes.

        Args:
            equal_width: whether texts are padded to the width of one batch of all examples.
            in_one: whether all examples form a single chunk.
        """
        for rows in self.chunk_slices(in_one):
            yield self.chunk(rows, equal_width)

    def chunk_slices(self, in_one: bool = False) -> list[slice]:
        """The slice of examples of each chunk."""
        n = len(self.examples)
        chunk_count = 1 if in_one else -(-n // chunk_size(self.examples))
        size, longer_count = divmod(n, max(1, chunk_count))
        bounds = [k * size + min(k, longer_count) for k in range(chunk_count + 1)]
        return [slice(a, b) for a, b in itertools.pairwise(bounds)]

    def chunk(self, rows: slice, equal_width: bool = False) -> Batch:
        """The examples of one chunk."""
        index = torch.arange(rows.start, rows.stop, device=self.examples.y.device)
        columns = self._columns(slice(None) if equal_width else rows)
        return gather(self.examples, index, columns=columns, loss=self.loss)

    def chunk_shape(self, rows: slice) -> BatchSize:
        """The size of a chunk, on which its cost depends, see :func:`size_of`."""
        columns = self._columns(rows)
        return (rows.stop - rows.start,) if columns is None else (rows.stop - rows.start, columns)

    @cached_property
    def form(self) -> Any:
        """The name, shape and type of each input of an example."""
        x = self.examples.x
        return tuple(
            [(n, t.shape[1:], t.dtype) for n, t in (x.items() if isinstance(x, dict) else [("", x)])]
        )

    @property
    def width(self) -> int | None:
        """Tokens of a row of texts, padding included, or None if the examples are not texts."""
        return _width(self.examples)

    @cached_property
    def lengths(self) -> Tensor | None:
        """Tokens of each example ``[n]``, on the CPU, or None if the examples are not texts."""
        if _width(self.examples) is None or not isinstance(self.examples.x, dict):
            return None
        lengths = self.examples.x["attention_mask"].sum(-1)
        # a pair has the length of its longer response
        return (lengths if lengths.ndim == 1 else lengths.amax(1)).cpu()

    @cached_property
    def _ends(self) -> np.ndarray | None:
        """The column after the last token of each example ``[n]``, or None if the examples are not texts."""
        if _width(self.examples) is None or not isinstance(self.examples.x, dict):
            return None
        ends = measure_lengths(self.examples.x["attention_mask"])
        last_tokens: np.ndarray = (ends if ends.ndim == 1 else ends.amax(1)).cpu().numpy()
        return last_tokens

    def _columns(self, index: np.ndarray | slice) -> int | None:
        """Columns of the batch of some examples, without a host synchronization; None if the examples are not texts."""
        return None if self._ends is None else round_up_width(int(self._ends[index].max()))

    def size(self, index: Tensor) -> BatchSize:
        """The size of the batch of these examples."""
        columns = self._columns(index.numpy())
        return (index.numel(),) if columns is None else (len(index), min(columns, _width(self.examples) or 0))

    def _generator(self, purpose: str, name: str) -> torch.Generator:
        return (self.key / purpose / list(self.passes).index(name)).generator()


def gather(
    examples: Examples, index: Tensor, step: int = 0, columns: int | None = None, loss: Loss = AUTO
) -> Batch:
    """Gather the batch of some examples, texts without needless padding.

    Args:
        examples: all examples.
        index: indices of the examples in the batch ``[b]``; they are copied to the device of the examples if
            necessary.
        step: step of the batch, see :class:`Batch`.
        columns: number of columns that texts need; None to compute it, which on a GPU is a host synchronization.
        loss: loss of the task.
    """
    index = index.to(examples.y.device)
    x, y = examples.x, examples.y.index_select(0, index)
    if isinstance(x, dict):
        picked = {n: t.index_select(0, index) for n, t in x.items()}
        if _width(examples) is not None:
            picked, y = trim_padding(picked, y) if columns is None else truncate_columns(picked, y, columns)
        return Batch(picked, y, step=step, loss=loss)
    return Batch(x.index_select(0, index), y, step=step, loss=loss)


BatchSize = tuple[int, ...]
"""Number of examples of a batch; for texts, also the number of tokens of each."""


def size_of(batch: Batch) -> BatchSize:
    """The size of a batch, on which the cost of a step depends."""
    return (len(batch), batch.x["attention_mask"].shape[-1]) if _text(batch.x) else (len(batch),)


def _text(x: Any) -> bool:
    return isinstance(x, dict) and "attention_mask" in x and x["attention_mask"].ndim in (2, 3)
