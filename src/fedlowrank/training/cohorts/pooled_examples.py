"""The training examples of all clients as rows of one tensor, from which a batch of a cohort is one selection of rows."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from ...data.dataset import Examples
from ..feed import common_base

POOL = 256 << 20
"""Bytes of training examples up to which they are copied."""


def pool_examples(parts: Sequence[Examples]) -> list[Examples]:
    """The examples of each client as views of one tensor of inputs and one of targets.

    They are copied, so that they take twice their memory; larger ones than :data:`POOL`, and inputs that are no tensors of
    one form, come back as they are.
    """
    unchanged, inputs = list(parts), [part.x for part in parts]
    columns: list[list[Any]] = [list(inputs), [part.y for part in parts]]
    if not all(isinstance(x, torch.Tensor) for x in inputs):
        return unchanged
    if any(len({(t.shape[1:], t.dtype, t.device) for t in column}) > 1 for column in columns):
        return unchanged
    if sum(t.nbytes for column in columns for t in column) > POOL or all(map(common_base, columns)):
        return unchanged
    ends = list(itertools.accumulate((len(part) for part in parts), initial=0))
    x, y = map(torch.cat, columns)
    return [Examples(x[a:b], y[a:b]) for a, b in itertools.pairwise(ends)]
