"""Sums of a statistic over the training data of all clients of a cohort, in one pass over their examples."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...core import tree
from ...core.contract import Batch
from ..client_tensors.client_tensor import ClientTensor, NoRuleError, to_client_tensor, with_rows
from ..client_tensors.control_flow import unwrap_client_tensor
from ..trainer import LocalTrainer
from .cohort_batches import flatten_batch, join_batches, require_like_inputs


class CohortBatch(Batch):
    """Rows of several clients whose sums and means are client tensors, with which a statistic may compute."""

    def sum(self, values: Tensor) -> Tensor:
        """See the base class: for each client."""
        return to_client_tensor(super().sum(values))

    def mean(self, values: Tensor) -> Tensor:
        """See the base class: for each client."""
        return to_client_tensor(unwrap_client_tensor(super().mean(values)))


def sum_over_cohort(
    trainers: Sequence[LocalTrainer], statistic: Callable[..., Any], params: Any, constants: tuple[Any, ...]
) -> Any:
    """Sum ``statistic(params, batch, *constants)`` over the training data of each client, without gradients.

    Args:
        trainers: trainer of each client; clients with the most examples come first.
        statistic: function that sums over its batch by :meth:`Batch.sum`.
        params: first argument of the statistic; tensors that differ between clients are client tensors.
        constants: further arguments of the statistic, with client tensors as in ``params``.

    Returns:
        The sums, a tree of client tensors ``[K, ...]``.

    Raises:
        NoRuleError: if an operation has no rule, or a result is the same for all clients.
    """
    require_like_inputs([trainer.data.examples.x for trainer in trainers])
    chunks = [trainer.data.chunk_slices() for trainer in trainers]
    if any(len(a) < len(b) for a, b in itertools.pairwise(chunks)):
        raise NoRuleError("clients whose chunks are not in order of their number")
    sums: Any = None
    for step in range(len(chunks[0])):
        active_count = sum(step < len(slices) for slices in chunks)
        batches = [
            t.data.chunk(slices[step]) for t, slices in zip(trainers[:active_count], chunks, strict=False)
        ]
        rows = flatten_batch(join_batches(batches))
        batch = CohortBatch(**{f.name: getattr(rows, f.name) for f in dataclasses.fields(rows)})
        active_params, active_constants = tree.map_leaves(
            lambda t, n=active_count: _first_clients(t, n), (params, constants)
        )
        with torch.no_grad(), with_rows():
            partial_sums = tree.map_leaves(
                lambda t: _padded(t, len(trainers)), statistic(active_params, batch, *active_constants)
            )
        partial_sums = tree.widen(partial_sums)
        sums = partial_sums if sums is None else tree.add(sums, partial_sums)
    return tree.map_leaves(to_client_tensor, sums)


def _first_clients(t: Tensor, client_count: int) -> Tensor:
    return to_client_tensor(unwrap_client_tensor(t)[:client_count]) if isinstance(t, ClientTensor) else t


def _padded(t: Tensor, client_count: int) -> Tensor:
    """Pad sums ``[clients, ...]`` to all clients, with 0 for clients without further examples."""
    if not isinstance(t, ClientTensor):
        raise NoRuleError("a sum that is the same for all clients")
    sums = unwrap_client_tensor(t)
    missing_count = client_count - len(sums)
    return sums if not missing_count else torch.cat([sums, sums.new_zeros(missing_count, *sums.shape[1:])])
