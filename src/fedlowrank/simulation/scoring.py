"""Accuracy and loss of a predictor on sets of examples, found in one pass over all sets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.loss import pointwise_loss
from ..core.method import Batch
from ..data.dataset import Examples
from ..training.local_data import channels_last, chunk_size, gather


class Pool:
    """Sets of examples that are scored in one pass.

    Args:
        parts: the sets.
        whole: the examples of all sets, one after another; None to go through set by set.

    Attributes:
        bytes: of the concatenated inputs.
    """

    def __init__(self, parts: Sequence[Examples], whole: Examples | None = None) -> None:
        self.lengths = [len(part) for part in parts]
        self.regression = parts[0].regression
        self.passes = [part for part in parts if len(part)] if whole is None else [whole]
        self.bytes = 0 if whole is None else whole.inputs.nbytes  # type: ignore[union-attr]


def concatenate(parts: Sequence[Examples]) -> Pool | None:
    """Sets of examples as one, in the fastest memory layout; None where inputs are not one tensor."""
    filled = [part for part in parts if len(part)]
    inputs: list[Any] = [part.inputs for part in filled]
    if not filled or any(isinstance(x, dict) for x in inputs):
        return None
    return Pool(parts, Examples(channels_last(torch.cat(inputs)), torch.cat([part.y for part in filled])))


@dataclass(frozen=True)
class Scores:
    """What a predictor is worth on several sets of examples; None for a set without examples.

    Attributes:
        accuracy: share of examples whose highest score is their label's (of language models: of tokens that
            are predicted); None for a regression, too.
        risk: mean loss; of language models the exponential of it is the perplexity.
    """

    accuracy: list[float | None]
    risk: list[float | None]


def measure(predict: Callable[[Any], Tensor], pool: Pool) -> Scores:
    """Accuracy and mean loss of a predictor on each set of a pool; of language models, over the tokens that count."""
    tables = [_score_examples(predict, examples) for examples in pool.passes]
    if not tables:
        return Scores([None] * len(pool.lengths), [None] * len(pool.lengths))
    table = torch.cat(tables)
    lengths = torch.tensor(pool.lengths, device=table.device)
    # numbers stay on the device until this one read
    sums = torch.segment_reduce(table, "sum", lengths=lengths).tolist()
    # of texts in which no token is to be predicted the weight is zero
    return Scores(
        [right / weight if weight and not pool.regression else None for right, _, weight in sums],
        [lost / weight if weight else None for _, lost, weight in sums],
    )


def _score_examples(predict: Callable[[Any], Tensor], examples: Examples) -> Tensor:
    """For each example whether it is right, its loss and its weight ``[n, 3]``; for texts sums over tokens."""
    rows, n, size = [], len(examples), chunk_size(examples)
    for start in range(0, n, size):
        batch = _slice(examples, start, min(start + size, n))
        scores = predict(batch.x)
        lost, weights = pointwise_loss(scores, batch.y), batch.weights
        if weights is None:
            weights = torch.ones_like(lost)
        if examples.regression:
            right = torch.zeros_like(lost)
        elif examples.tokens:
            right = (scores[:, :-1].argmax(-1) == batch.y[:, 1:]).sum(1)
        else:
            right = scores.argmax(-1) == batch.y
        right, lost, weights = right.double(), lost.double(), weights.double()
        rows.append(torch.stack([right, lost * weights, weights], 1))
    return torch.cat(rows)


def _slice(examples: Examples, start: int, stop: int) -> Batch:
    """Consecutive examples; texts without needless padding, other inputs without a copy."""
    if isinstance(examples.x, dict):
        return gather(examples, torch.arange(start, stop, device=examples.y.device))
    return Batch(channels_last(examples.x[start:stop]), examples.y[start:stop])
