"""Sets of examples that are scored in one pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ...core.contract import EngineModel
from ...core.learning.losses import AUTO, Loss
from ...data.dataset import ClientData, Examples
from ...data.federation import Federation
from ...models.coupling import mixes_examples
from ...training.local_data import channels_last, chunk_size
from ..client_numbers import SPLITS

MAX_CACHED_BYTES = 1 << 30
"""Bytes of concatenated inputs that are kept from one evaluation to the next."""


class ScoringPool:
    """Sets of examples that are scored in one pass.

    Args:
        sets: the sets.
        all_examples: the examples of all sets, one after another; None to go through set by set.
        one_batch_each: whether each set is one batch; only where they are gone through set by set.
        loss: of the task.
        vocabulary: of a language model; see :func:`fedlowrank.training.local_data.chunk_size`.

    Attributes:
        lengths: number of examples of each set.
        passes: the examples, as they are gone through: all sets as one, or the sets that are not empty.
        bytes: of the concatenated inputs.
    """

    def __init__(
        self,
        sets: Sequence[Examples],
        all_examples: Examples | None = None,
        one_batch_each: bool = False,
        loss: Loss = AUTO,
        vocabulary: int | None = None,
    ) -> None:
        self.one_batch_each, self.loss, self.vocabulary = one_batch_each, loss, vocabulary
        self.lengths = [len(examples) for examples in sets]
        self.passes = (
            [examples for examples in sets if len(examples)] if all_examples is None else [all_examples]
        )
        self.bytes = 0 if all_examples is None else all_examples.inputs.nbytes  # type: ignore[union-attr]  # one tensor

    def count_examples(self, set_count: int) -> list[int]:
        """Number of examples of each client, given the number of sets that every client has."""
        return [sum(self.lengths[k : k + set_count]) for k in range(0, len(self.lengths), set_count)]


def list_sets(data: ClientData) -> list[Examples]:
    """The sets on which a client is evaluated, one for each of :data:`SPLITS`."""
    return [getattr(data, split) for split in SPLITS]


def make_pool(model: EngineModel, sets: Sequence[Examples], loss: Loss = AUTO) -> ScoringPool:
    """Sets of examples, each of them one batch if the model mixes the examples of a batch."""
    is_long = any(len(examples) > chunk_size(examples, model.vocabulary) for examples in sets)
    mixes = is_long and mixes_examples(model)
    return ScoringPool(sets, one_batch_each=mixes, loss=loss, vocabulary=model.vocabulary)


def concatenate_sets(sets: Sequence[Examples], loss: Loss = AUTO) -> ScoringPool | None:
    """Sets of examples as one, in the fastest memory layout; None where inputs are not tensors of one form."""
    nonempty_sets = [examples for examples in sets if len(examples)]
    inputs: list[Any] = [examples.inputs for examples in nonempty_sets]
    if not nonempty_sets or any(isinstance(x, dict) for x in inputs):
        return None
    if len({(x.shape[1:], x.dtype) for x in inputs}) > 1:
        return None
    all_examples = Examples(
        channels_last(torch.cat(inputs)), torch.cat([examples.y for examples in nonempty_sets])
    )
    return ScoringPool(sets, all_examples, loss=loss)


class PoolCache:
    """Concatenated sets of clients, kept from one evaluation to the next.

    Args:
        federation: has the clients.

    Attributes:
        pools: of the last evaluation, by the identifiers of their clients.
    """

    def __init__(self, federation: Federation) -> None:
        self._federation = federation
        self.pools: dict[tuple[int, ...], ScoringPool] = {}
        self._earlier: dict[tuple[int, ...], ScoringPool] = {}

    @contextlib.contextmanager
    def begin_evaluation(self) -> Iterator[None]:
        """Keep those pools of the evaluation before that are used in this block."""
        self.pools, self._earlier = {}, self.pools
        try:
            yield
        finally:
            self._earlier = {}

    def concatenate(self, client_ids: Sequence[int]) -> ScoringPool | None:
        """The sets of clients, one client after another; None where inputs cannot be concatenated."""
        key = tuple(client_ids)
        pool = self._earlier.pop(key, None)
        if pool is None:
            sets = [examples for i in client_ids for examples in list_sets(self._federation.clients[i])]
            pool = concatenate_sets(sets, self._federation.loss)
        if pool is not None and sum(p.bytes for p in self.pools.values()) + pool.bytes <= MAX_CACHED_BYTES:
            self.pools[key] = pool
        return pool

    def make_single(self, client_id: int) -> ScoringPool:
        """The sets of one client, which are scored set by set."""
        data = self._federation.clients[client_id]
        return ScoringPool(list_sets(data), loss=self._federation.loss)
