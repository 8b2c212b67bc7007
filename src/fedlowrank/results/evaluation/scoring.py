"""Computes scores of models, and the results on each set of examples.

*Scores* are the outputs of a model, ``[n, classes]`` for n examples. *Results* of a set are the accuracy and the mean
loss, which are quotients of :class:`ExampleSums`, and further metrics. They are computed in one pass over all sets.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ...core.contract import Batch
from ...core.contract.client_model import Predictor
from ...core.errors import LossError
from ...core.learning.batch_losses import example_losses
from ...core.learning.contrastive_losses import EVALUATION_BATCH, nearest_is_own
from ...core.learning.losses import AUTO, Loss, class_axis
from ...core.learning.preference_losses import difference_of_chosen
from ...core.tree import wide_type
from ...data.dataset import ClientData, Examples
from ...training.local_data import MAX_CHUNK, chunk_size, gather
from ..client_metrics import Metric, compute_metric, has_standard_scores
from ..client_numbers import ACCURACY, PAIR_ACCURACY, RETRIEVAL, TOKEN_ACCURACY
from .pools import ScoringPool, list_sets

EXAMPLES_PER_LOSS_CALL = 4096
"""Number of examples whose losses are computed in one call."""

MAX_SMALL_INPUT = 1024
"""Maximum numbers in an input for which twice as many examples are scored at once, with fewer calls of layers."""

MIN_ADJACENT_CLASSES = 16
"""Minimum number of classes for which a softmax over adjacent scores fills the vector registers of a CPU."""


N = TypeVar("N", Tensor, float)


class ExampleSums(NamedTuple, Generic[N]):
    """Sums over the examples of a set: accuracy is ``correct / answers``, mean loss is ``loss / weight``.

    Before the sums are taken, the fields hold the terms of each example, ``[n]``.

    Attributes:
        correct: number of correct answers.
        answers: number of answers that count; 0 if there is no accuracy.
        loss: loss times ``weight``.
        weight: weight of the example in the mean loss; 0 for a text in which no token is to be predicted.
    """

    correct: N
    answers: N
    loss: N
    weight: N


@dataclass(frozen=True)
class SetResults:
    """Results on several sets of examples, one value for each set; None for a set without examples.

    Attributes:
        accuracy: share of examples whose highest score is that of their label. With several labels for each example
            it is the share of examples of which all labels are right; with a label for each pixel or token, the share
            of these; for language models, the share of tokens that are predicted correctly; for pairs of responses,
            the share of pairs whose chosen response has the higher score. Also None for a regression, and for scores
            that only a loss of the user's own understands.
        loss: mean loss of the task; the exponential of a language model's loss is its perplexity.
        metrics: further metrics by name; also None where a metric is not defined.
        accuracy_name: name by which the accuracy is recorded. It differs for language models that predict tokens or
            compare responses, because they are judged by their loss.
    """

    accuracy: list[float | None]
    loss: list[float | None]
    metrics: dict[str, list[float | None]] = field(default_factory=dict)
    accuracy_name: str = ACCURACY


def score_sets(predict: Predictor, pool: ScoringPool) -> Tensor:
    """Compute the scores of a predictor on all sets, which hold at least one example, ``[n, classes]`` or ``[n, d]``."""
    return torch.cat([predict(batch.x) for _, batch in _batches([(predict, len(pool.lengths))], pool)])


def measure_predictor(
    predict: Predictor, pool: ScoringPool, metrics: Mapping[str, Metric] | None = None
) -> SetResults:
    """Measure a predictor on each set of a pool.

    Args:
        predict: function from inputs to scores.
        pool: sets of examples.
        metrics: further metrics by name; with any, the scores of the whole pool are kept in memory.
    """
    return measure_predictors([(predict, len(pool.lengths))], pool, metrics)


def measure_predictors(
    predictors: Sequence[tuple[Predictor, int]],
    pool: ScoringPool,
    metrics: Mapping[str, Metric] | None = None,
) -> SetResults:
    """Measure several predictors, each on the next sets of a pool.

    Args:
        predictors: predictors with the numbers of their sets; more than one needs a concatenated pool.
        pool: sets of examples.
        metrics: further metrics by name, see :func:`measure_predictor`.
    """
    scored_batches = ((predict(batch.x), batch.y) for predict, batch in _batches(predictors, pool))
    return measure_scores(scored_batches, pool, metrics)


def measure_scores(
    scored_batches: Iterable[tuple[Tensor, Tensor]],
    pool: ScoringPool,
    metrics: Mapping[str, Metric] | None = None,
) -> SetResults:
    """Measure scores on each set of a pool.

    Args:
        scored_batches: scores and labels of the examples of all sets, one after another, in parts of any size.
        pool: sets of examples.
        metrics: further metrics by name, see :func:`measure_predictor`.
    """
    if not pool.passes:
        missing_values: list[float | None] = [None] * len(pool.lengths)
        return SetResults(missing_values, missing_values, dict.fromkeys(metrics or (), missing_values))
    terms: list[Tensor] = []
    entries: list[tuple[Tensor, Tensor, Tensor]] = []
    # a function of the user's own may compare the examples that it gets
    parts = _join_sets(scored_batches, pool.lengths) if pool.loss.is_custom else _join_parts(scored_batches)
    for scores, labels in parts:
        # one tensor [n, 4], with columns in the order of the fields
        terms.append(
            torch.stack(_sum_terms(scores, Batch(None, labels, loss=pool.loss), pool.class_count), 1)
        )
        if metrics:
            entries.append(labeled_entries(scores, labels, pool.loss))
    terms_of_examples = torch.cat(terms)
    lengths = torch.tensor(pool.lengths, device=terms_of_examples.device)
    # the only host synchronization: numbers stay on the device until here
    totals = torch.segment_reduce(terms_of_examples, "sum", lengths=lengths).tolist()
    sums: list[ExampleSums[float]] = [ExampleSums(*total) for total in totals]
    return SetResults(
        [set_sums.correct / set_sums.answers if set_sums.answers else None for set_sums in sums],
        [set_sums.loss / set_sums.weight if set_sums.weight else None for set_sums in sums],
        _compute_metrics(entries, pool.lengths, metrics) if metrics else {},
        _name_accuracy(pool),
    )


def _join_parts(scored_batches: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    """Join scores and labels into parts of at least EXAMPLES_PER_LOSS_CALL examples, except for the last one."""
    scores: list[Tensor] = []
    labels: list[Tensor] = []
    count = 0
    for batch_scores, targets in scored_batches:
        scores.append(batch_scores)
        labels.append(targets)
        count += len(targets)
        # texts are as wide as their batch, and pixels have many scores
        if count >= EXAMPLES_PER_LOSS_CALL or batch_scores.ndim > 2:
            yield torch.cat(scores), torch.cat(labels)
            scores, labels, count = [], [], 0
    if scores:
        yield torch.cat(scores), torch.cat(labels)


def _join_sets(
    scored_batches: Iterable[tuple[Tensor, Tensor]], lengths: Sequence[int]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Join scores and labels into one part for each set, or into parts of one set if each pixel or token has a target.

    Raises:
        LossError: if scores are not one row for each example.
    """
    set_lengths = iter([length for length in lengths if length])
    parts: list[tuple[Tensor, Tensor]] = []
    missing_count = 0
    for scores, labels in scored_batches:
        if len(scores) != len(labels):
            raise LossError(
                f"the model makes scores {[*scores.shape]} of {len(labels)} examples; with a loss of your own it must make one "
                f"row for each example, [{len(labels)}, ...]"
            )
        # texts are as wide as their batch, and pixels have many scores
        is_dense = scores.ndim > 2 and labels.ndim > (2 if labels.is_floating_point() else 1)
        start = 0
        while start < len(labels):
            missing_count = missing_count or next(set_lengths)
            end = min(start + missing_count, len(labels))
            parts.append((scores[start:end], labels[start:end]))
            missing_count -= end - start
            start = end
            if is_dense or not missing_count:
                part_scores, part_labels = zip(*parts, strict=True)
                yield torch.cat(part_scores), torch.cat(part_labels)
                parts = []


def _name_accuracy(pool: ScoringPool) -> str:
    if pool.loss.compares_texts:
        return PAIR_ACCURACY if pool.loss.is_preference else RETRIEVAL
    return (
        TOKEN_ACCURACY if any(pool.loss.predicts_tokens(examples.y) for examples in pool.passes) else ACCURACY
    )


def _compute_metrics(
    entries: Sequence[tuple[Tensor, Tensor, Tensor]], lengths: Sequence[int], metrics: Mapping[str, Metric]
) -> dict[str, list[float | None]]:
    """Compute the metrics of each set from the scores and labels of all sets, one after another."""
    scores, labels, counts = (torch.cat(arrays).cpu() for arrays in zip(*entries, strict=True))
    boundaries = np.append(0, np.cumsum(counts.numpy()))[np.cumsum(lengths)[:-1]]
    # float64 is exact, and NumPy has no bfloat16
    arrays = np.split(scores.double().numpy(), boundaries), np.split(labels.numpy(), boundaries)
    return {
        name: [
            compute_metric(name, metric, *map(np.copy, set_arrays))
            for set_arrays in zip(*arrays, strict=True)
        ]
        for name, metric in metrics.items()
    }


def _batches(
    predictors: Sequence[tuple[Predictor, int]], pool: ScoringPool
) -> Iterator[tuple[Predictor, Batch]]:
    """Yield the examples of a pool in order, each batch with its predictor."""
    lengths = iter(pool.lengths)
    counts = [(predict, sum(itertools.islice(lengths, set_count))) for predict, set_count in predictors]
    for examples in pool.passes:
        offset, size = 0, chunk_size(examples, pool.vocabulary)
        if not isinstance(examples.x, dict) and examples.x.shape[1:].numel() <= MAX_SMALL_INPUT:
            size *= 2
        if pool.one_batch_each:
            size = len(examples)
        if pool.loss.couples:
            size = EVALUATION_BATCH
        for predict, count in counts:
            end = min(offset + count, len(examples))
            for start in range(offset, end, size):
                yield predict, _slice(examples, start, min(start + size, end))
            offset = end


def count_labels_by_split(data: ClientData, loss: Loss) -> list[int] | None:
    """Count the labels of a client that count in each split of ``SPLITS``; None if these are the numbers of examples."""
    sets = list_sets(data)
    counts = [count_labels(examples, loss) for examples in sets]
    return None if counts == [len(examples) for examples in sets] else counts


def count_labels(examples: Examples, loss: Loss) -> int:
    """Count the labels over which the accuracy and the loss of a set are means, or the examples if there are no labels.

    With a label for each pixel or token, these are all labels that count (``loss.ignore_index``); for language
    models, the tokens that are predicted.
    """
    y = examples.y
    if loss.couples:
        # a batch of one pair is left out
        return len(y) - (len(y) % EVALUATION_BATCH == 1)
    if loss.compares_texts or (y.ndim == 1 and loss.kind == "auto"):
        return len(y)
    if (weights := Batch(None, y, loss=loss).weights) is not None:
        return int(weights.sum())
    if y.is_floating_point():
        return y.numel() if y.ndim > 2 and loss.is_binary(y) else len(y)
    return int((y != loss.ignore_index).sum())


def labeled_entries(scores: Tensor, y: Tensor, loss: Loss) -> tuple[Tensor, Tensor, Tensor]:
    """Get scores and labels for metrics, one row for each label that counts, and the number of rows of each example.

    Args:
        scores: scores of some examples.
        y: targets of the examples.
        loss: loss of the task; a function of the user's own gets all labels.

    Returns:
        Tensors ``[rows, classes]``, ``[rows]`` and ``[b]``; for pixels with real targets ``[rows, 1]`` twice. Scores
        and targets with one row for each example are returned unchanged.
    """
    row_counts = torch.ones(len(y), dtype=torch.int64, device=y.device)
    if y.is_floating_point():
        if y.ndim == 2 or scores.shape != y.shape:
            return scores, y, row_counts
        return scores.reshape(-1, 1), y.reshape(-1, 1), row_counts * y[0].numel()
    if y.ndim > 1 and scores.ndim == y.ndim + 1:
        scores = scores.movedim(class_axis(scores), -1)
        row_counts = row_counts * y[0].numel()
    elif y.ndim > 1:
        return scores, y, row_counts
    mask = y != loss.ignore_index
    if y.ndim == 1 and bool(mask.all()):
        return scores, y, row_counts
    return scores[mask], y[mask], mask.flatten(1).sum(1) if y.ndim > 1 else mask.long()


def _sum_terms(scores: Tensor, batch: Batch, class_count: int) -> ExampleSums[Tensor]:
    """Compute the terms of each example in the sums of its set, float64 ``[n]``; all are 0 for a pair without others."""
    y, loss = batch.y, batch.loss
    losses, weights = _each_loss(scores, batch), batch.weights
    # a pair that no other is compared with has loss 0 and is the nearest, whatever the model is
    is_alone = loss.couples and len(losses) == 1
    ones = torch.zeros_like(losses) if is_alone else torch.ones_like(losses)
    if loss.couples:
        correct_counts, answer_counts = nearest_is_own(scores) * ones, ones
    elif loss.is_preference:
        correct_counts, answer_counts = difference_of_chosen(scores, y) > 0, ones
    elif y.is_floating_point():
        correct_counts, answer_counts = (
            _right_entries(scores, y) if loss.is_binary(y) else (ones, torch.zeros_like(losses))
        )
    elif weights is not None:
        correct_counts, answer_counts = (scores[:, :-1].argmax(-1) == y[:, 1:]).sum(1), weights
    elif loss.is_custom and not has_standard_scores(scores, y, class_count):
        # only the function knows the meaning of the scores
        correct_counts, answer_counts = ones, torch.zeros_like(losses)
    else:
        mask = y != loss.ignore_index
        is_right = (scores.argmax(class_axis(scores)) == y) & mask
        correct_counts, answer_counts = (
            (is_right, mask) if y.ndim == 1 else (is_right.flatten(1).sum(1), mask.flatten(1).sum(1))
        )
    count, weight = (ones, ones) if weights is None else (weights, weights)
    if (class_weights := loss.weigh(y)) is not None:
        count, weight = class_weights
    # argmax of scores with a NaN gives the index of the NaN; a function of the user's own may be NaN for finite scores
    is_wrong = ~scores.reshape(len(y), -1).amax(1).isfinite() if loss.is_custom else losses.isnan()
    correct_counts = torch.where(is_wrong, 0.0, correct_counts.double())
    return ExampleSums(correct_counts, answer_counts.double(), losses.double() * count, weight.double())


def _right_entries(scores: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Count the right answers and all answers of each example.

    An example with several labels has one answer, which is right if all of them are; pixels with real targets have
    one each.
    """
    is_right = (scores > 0) == (y > 0.5)
    if y.ndim == 2:
        return is_right.all(1), torch.ones(len(y), device=y.device)
    return is_right.flatten(1).sum(1), torch.full((len(y),), y[0].numel(), device=y.device)


def _each_loss(scores: Tensor, batch: Batch) -> Tensor:
    """Compute the loss of each example; with few classes softmax is faster over adjacent scores of a class."""
    y = batch.y
    if batch.loss.is_custom:
        # clones, because a function of the user's own may change its arguments in place
        return example_losses(scores.clone(), replace(batch, y=y.clone()))
    if batch.loss != AUTO or y.ndim > 1 or scores.shape[1] >= MIN_ADJACENT_CLASSES or len(y) < MAX_CHUNK:
        return example_losses(scores, batch)
    class_scores = scores.to(wide_type(scores.dtype)).t().contiguous()
    return functional.cross_entropy(class_scores.unsqueeze(0), y.unsqueeze(0), reduction="none").squeeze(0)


def _slice(examples: Examples, start: int, stop: int) -> Batch:
    """Slice consecutive examples; texts without needless padding, other inputs without a copy."""
    if isinstance(examples.x, dict):
        return gather(examples, torch.arange(start, stop, device=examples.y.device))
    return Batch(examples.x[start:stop], examples.y[start:stop])
