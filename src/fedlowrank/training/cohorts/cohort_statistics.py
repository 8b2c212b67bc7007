"""Sums of a statistic over the training data of all clients of a cohort, in one pass over their examples."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...core import tree
from ...core.contract.method import Batch
from ..feed import flat, join_batches, require_like_inputs
from ..stacked import Stacked, UnsupportedError, stack, with_rows
from ..trainer import LocalTrainer
from .control_flow import unwrap_stacked


class CohortBatch(Batch):
    """Rows of several clients whose sums and means are stacked tensors, so that a statistic may compute with them."""

    def total(self, values: Tensor) -> Tensor:
        """See the base class: of each client."""
        return stack(super().total(values))

    def mean(self, values: Tensor) -> Tensor:
        """See the base class: of each client."""
        return stack(unwrap_stacked(super().mean(values)))


def total_cohort(
    trainers: Sequence[LocalTrainer], statistic: Callable[..., Any], params: Any, constants: tuple[Any, ...]
) -> Any:
    """Sum ``statistic(params, batch, *constants)`` over the training data of each client, without gradients.

    Args:
        trainers: one a client, those with the most examples first.
        statistic: sums over its batch by :meth:`Batch.total`.
        params: its first argument; tensors that differ between clients are stacked.
        constants: its last arguments, likewise.

    Returns:
        The sums; every tensor is stacked ``[K, ...]``.

    Raises:
        UnsupportedError: if an operation has no rule, or a result is the same for all clients.
    """
    require_like_inputs([trainer.data.examples.x for trainer in trainers])
    chunks = [trainer.data.chunk_places() for trainer in trainers]
    if any(len(a) < len(b) for a, b in itertools.pairwise(chunks)):
        raise UnsupportedError("clients whose chunks are not in order of their number")
    sums: Any = None
    for step in range(len(chunks[0])):
        active = sum(step < len(own) for own in chunks)
        batches = [t.data.chunk(own[step]) for t, own in zip(trainers[:active], chunks, strict=False)]
        rows = flat(join_batches(batches))
        batch = CohortBatch(**{f.name: getattr(rows, f.name) for f in dataclasses.fields(rows)})
        given = tree.map_leaves(lambda t, n=active: _first_clients(t, n), (params, constants))
        with torch.no_grad(), with_rows():
            part = tree.map_leaves(lambda t: _padded(t, len(trainers)), statistic(given[0], batch, *given[1]))
        part = tree.widen(part)
        sums = part if sums is None else tree.add(sums, part)
    return tree.map_leaves(stack, sums)


def _first_clients(t: Tensor, clients: int) -> Tensor:
    return stack(unwrap_stacked(t)[:clients]) if isinstance(t, Stacked) else t


def _padded(t: Tensor, clients: int) -> Tensor:
    """A sum of each client; 0 of those that have no more examples."""
    if not isinstance(t, Stacked):
        raise UnsupportedError("a sum that is the same for all clients")
    own = unwrap_stacked(t)
    missing = clients - len(own)
    return own if not missing else torch.cat([own, own.new_zeros(missing, *own.shape[1:])])
