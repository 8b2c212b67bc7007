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
from ...models.standard import channels_last
from ...training.local_data import chunk_size
from ..client_numbers import SPLITS

MAX_CACHED_BYTES = 1 << 30
"""Maximum bytes of concatenated inputs that are kept from one evaluation to the next."""


class ScoringPool:
    """Sets of examples that are scored in one pass.

    Args:
        sets: sets of examples.
        all_examples: examples of all sets, one after another; None to score set by set.
        one_batch_each: whether each set is one batch; only used if the sets are scored set by set.
        loss: loss of the task.
        vocabulary: vocabulary size of a language model; see :func:`fedlowrank.training.local_data.chunk_size`.
        class_count: number of classes, which a loss of the user's own needs; see :func:`..client_metrics.has_standard_scores`.

    Attributes:
        lengths: numbers of examples of the sets.
        passes: examples of each scoring pass: all sets as one, or each set that is not empty.
        bytes: size of the concatenated inputs in bytes.
    """

    def __init__(
        self,
        sets: Sequence[Examples],
        all_examples: Examples | None = None,
        one_batch_each: bool = False,
        loss: Loss = AUTO,
        vocabulary: int | None = None,
        class_count: int = 0,
    ) -> None:
        self.one_batch_each, self.loss, self.vocabulary = one_batch_each, loss, vocabulary
        self.class_count = class_count
        self.lengths = [len(examples) for examples in sets]
        self.passes = (
            [examples for examples in sets if len(examples)] if all_examples is None else [all_examples]
        )
        self.bytes = 0 if all_examples is None else all_examples.inputs.nbytes  # type: ignore[union-attr]  # one tensor

    def count_examples(self, set_count: int) -> list[int]:
        """Count the examples of each client, given the number of sets that every client has."""
        return [sum(self.lengths[k : k + set_count]) for k in range(0, len(self.lengths), set_count)]


def list_sets(data: ClientData) -> list[Examples]:
    """List the sets on which a client is evaluated, one for each of :data:`SPLITS`."""
    return [getattr(data, split) for split in SPLITS]


def make_pool(
    model: EngineModel, sets: Sequence[Examples], loss: Loss = AUTO, class_count: int = 0
) -> ScoringPool:
    """Make a pool of sets, each of them one batch if the model mixes the examples of a batch."""
    is_long = any(len(examples) > chunk_size(examples, model.vocabulary) for examples in sets)
    mixes = is_long and mixes_examples(model)
    return ScoringPool(
        sets, one_batch_each=mixes, loss=loss, vocabulary=model.vocabulary, class_count=class_count
    )


def concatenate_sets(sets: Sequence[Examples], loss: Loss = AUTO, class_count: int = 0) -> ScoringPool | None:
    """Concatenate sets of examples, in the fastest memory layout; None if inputs are not tensors of one form."""
    nonempty_sets = [examples for examples in sets if len(examples)]
    inputs: list[Any] = [examples.inputs for examples in nonempty_sets]
    if not nonempty_sets or any(isinstance(x, dict) for x in inputs):
        return None
    if len({(x.shape[1:], x.dtype) for x in inputs}) > 1:
        return None
    all_examples = Examples(
        channels_last(torch.cat(inputs)), torch.cat([examples.y for examples in nonempty_sets])
    )
    return ScoringPool(sets, all_examples, loss=loss, class_count=class_count)


class PoolCache:
    """Caches the concatenated sets of clients from one evaluation to the next.

    Args:
        federation: clients and their data.

    Attributes:
        pools: pools of the last evaluation, by the identifiers of their clients.
    """

    def __init__(self, federation: Federation) -> None:
        self._federation = federation
        self.pools: dict[tuple[int, ...], ScoringPool] = {}
        self._earlier: dict[tuple[int, ...], ScoringPool] = {}

    @contextlib.contextmanager
    def begin_evaluation(self) -> Iterator[None]:
        """Keep only those pools of the previous evaluation that are used in this block."""
        self.pools, self._earlier = {}, self.pools
        try:
            yield
        finally:
            self._earlier = {}

    def concatenate(self, client_ids: Sequence[int]) -> ScoringPool | None:
        """Concatenate the sets of clients, one client after another; None if inputs cannot be concatenated."""
        key = tuple(client_ids)
        pool = self._earlier.pop(key, None)
        if pool is None:
            sets = [examples for i in client_ids for examples in list_sets(self._federation.clients[i])]
            pool = concatenate_sets(sets, self._federation.loss, len(self._federation.classes))
        if pool is not None and sum(p.bytes for p in self.pools.values()) + pool.bytes <= MAX_CACHED_BYTES:
            self.pools[key] = pool
        return pool

    def make_single(self, client_id: int) -> ScoringPool:
        """Make a pool of the sets of one client, which are scored set by set."""
        federation = self._federation
        sets = list_sets(federation.clients[client_id])
        return ScoringPool(sets, loss=federation.loss, class_count=len(federation.classes))
