"""The training examples of all clients as rows of one tensor, from which a batch of a cohort is one selection of rows."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from ...data.dataset import Examples
from ...data.pixels import Pixels
from .cohort_batches import common_base

MAX_POOLED_BYTES = 256 << 20
"""Maximum bytes of training examples that are copied into one tensor."""


def pool_examples(client_examples: Sequence[Examples]) -> list[Examples]:
    """Return the examples of each client as views of one tensor of inputs and one tensor of targets.

    The examples are copied, so they take twice their memory. Examples of more than :data:`MAX_POOLED_BYTES`, and
    inputs that are neither tensors of one form nor images of one table, are returned unchanged.
    """
    originals, inputs = list(client_examples), [examples.x for examples in client_examples]
    table = inputs[0].table if isinstance(inputs[0], Pixels) else None
    if table is not None:
        inputs = [x.codes for x in inputs if isinstance(x, Pixels) and x.table is table]
    columns: list[list[Any]] = [list(inputs), [examples.y for examples in client_examples]]
    if len(inputs) < len(client_examples) or not all(isinstance(x, torch.Tensor) for x in inputs):
        return originals
    if any(len({(t.shape[1:], t.dtype, t.device) for t in column}) > 1 for column in columns):
        return originals
    if sum(t.nbytes for column in columns for t in column) > MAX_POOLED_BYTES or all(
        map(common_base, columns)
    ):
        return originals
    bounds = list(itertools.accumulate((len(examples) for examples in client_examples), initial=0))
    x, y = map(torch.cat, columns)
    return [
        Examples(x[a:b] if table is None else Pixels(x[a:b], table), y[a:b])
        for a, b in itertools.pairwise(bounds)
    ]
