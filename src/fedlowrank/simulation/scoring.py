"""Accuracy and loss of a predictor on sets of examples, found in one pass over all sets."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..core.client_model import Predictor
from ..core.loss import pointwise_loss
from ..core.method import Batch
from ..data.dataset import Examples
from ..training.local_data import CHUNK, channels_last, chunk_size, gather

AT_ONCE = 4096
"""Examples whose losses are computed in one call."""

FEW = 16
"""Classes from which on a softmax over adjacent scores fills the vector registers of a CPU."""


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


def measure(predict: Predictor, pool: Pool) -> Scores:
    """Accuracy and mean loss of a predictor on each set of a pool; of language models, over the tokens that count."""
    return measure_each([(predict, len(pool.lengths))], pool)


def measure_each(predictors: Sequence[tuple[Predictor, int]], pool: Pool) -> Scores:
    """Accuracy and mean loss of several predictors, each on the next sets of a pool.

    Args:
        predictors: each with the number of its sets; more than one needs a pool that is concatenated.
        pool: the sets.
    """
    if not pool.passes:
        return Scores([None] * len(pool.lengths), [None] * len(pool.lengths))
    lengths = iter(pool.lengths)
    rows = [(predict, sum(itertools.islice(lengths, sets))) for predict, sets in predictors]
    tables = [
        _score_examples([(predict, min(n, len(examples))) for predict, n in rows], examples)
        for examples in pool.passes
    ]
    table = torch.cat(tables)
    # numbers stay on the device until this one read
    sums = torch.segment_reduce(
        table, "sum", lengths=torch.tensor(pool.lengths, device=table.device)
    ).tolist()
    # of texts in which no token is to be predicted the weight is zero
    return Scores(
        [right / weight if weight and not pool.regression else None for right, _, weight in sums],
        [lost / weight if weight else None for _, lost, weight in sums],
    )


def _score_examples(predictors: Sequence[tuple[Predictor, int]], examples: Examples) -> Tensor:
    """For each example whether it is right, its loss and its weight ``[n, 3]``; for texts sums over tokens.

    Args:
        predictors: each with the number of its examples.
        examples: of all predictors, one after another.
    """
    tables: list[Tensor] = []
    unscored: list[Tensor] = []
    first = scored = 0
    size = chunk_size(examples)
    for predict, n in predictors:
        end = first + n
        for start in range(first, end, size):
            stop = min(start + size, end)
            batch = _slice(examples, start, stop)
            unscored.append(predict(batch.x))
            # one call for many chunks; the labels of texts are as wide as their chunk
            if examples.tokens or stop - scored >= AT_ONCE or stop == len(examples):
                y = batch.y if examples.tokens else examples.y[scored:stop]
                tables.append(_table(torch.cat(unscored), Batch(None, y)))
                unscored, scored = [], stop
        first = end
    return torch.cat(tables)


def _table(scores: Tensor, batch: Batch) -> Tensor:
    """The rows of :func:`_score_examples` of a batch, given its scores."""
    lost, weights = _pointwise_loss(scores, batch.y), batch.weights
    if weights is None:
        weights = torch.ones_like(lost)
    if batch.y.is_floating_point():
        right = torch.zeros_like(lost)
    elif batch.y.ndim == 2:
        right = (scores[:, :-1].argmax(-1) == batch.y[:, 1:]).sum(1)
    else:
        right = scores.argmax(-1) == batch.y
    right, lost, weights = right.double(), lost.double(), weights.double()
    return torch.stack([right, lost * weights, weights], 1)


def _pointwise_loss(scores: Tensor, y: Tensor) -> Tensor:
    """The loss of each example; of few classes the softmax is faster where the examples of a class are adjacent."""
    if y.ndim > 1 or scores.shape[1] >= FEW or len(y) < CHUNK:
        return pointwise_loss(scores, y)
    by_class = scores.t().contiguous()
    return functional.cross_entropy(by_class.unsqueeze(0), y.unsqueeze(0), reduction="none").squeeze(0)


def _slice(examples: Examples, start: int, stop: int) -> Batch:
    """Consecutive examples; texts without needless padding, other inputs without a copy."""
    if isinstance(examples.x, dict):
        return gather(examples, torch.arange(start, stop, device=examples.y.device))
    return Batch(channels_last(examples.x[start:stop]), examples.y[start:stop])
