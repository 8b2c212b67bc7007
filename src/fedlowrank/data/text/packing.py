"""Packing: several short samples of tokens in one row."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import NamedTuple

from ...core.learning.losses import IGNORE_INDEX


class Sample(NamedTuple):
    """Token ids and token labels of a text, or of several in a row.

    Attributes:
        ids: T token ids.
        labels: T labels: the token id where the loss counts, `IGNORE_INDEX` elsewhere.
        record: number of the record, of a row the first.
        lengths: numbers of tokens of the samples of a row, in order; empty for a single sample.
    """

    ids: list[int]
    labels: list[int]
    record: int = 0
    lengths: tuple[int, ...] = ()

    @property
    def positions(self) -> list[int]:
        """Position of each token in its own sample."""
        return [position for length in self.lengths or (len(self.ids),) for position in range(length)]


def pack_sequences(samples: Sequence[Sample], context: int) -> list[Sample]:
    """Join samples to rows of at most ``context`` tokens, for less padding.

    Each sample goes into the fullest row with room for it, long ones first (best fit decreasing), and stays
    whole with its labels. Its first token has no label, as nothing predicts it.

    A token is to attend to its own sample alone, and positions start again with each sample: the data set has
    ``position_ids``, from which `transformers` makes a block-diagonal attention mask
    (:func:`fedlowrank.language.packed_attention.use_packed_attention`). Each token has the
    loss that it has in a row of its own sample. An example of the data set is a row: batches and client sizes
    count rows, and as the loss of an example is the mean over its tokens, the tokens of a row weigh equally,
    whichever sample they are of.

    Args:
        samples: each of 1 to ``context`` tokens.
        context: tokens per row, at least 1.

    Returns:
        Rows in the order of their first samples; the samples of a row in their old order.
    """
    rows: list[list[int]] = []
    # (free tokens, row) in ascending order; of rows with equal room the oldest comes first.
    free_rows: list[tuple[int, int]] = []
    for i in sorted(range(len(samples)), key=lambda i: -len(samples[i].ids)):
        length = len(samples[i].ids)
        index = bisect_left(free_rows, (length, -1))
        if index < len(free_rows):
            free_tokens, fullest_row = free_rows.pop(index)
            rows[fullest_row].append(i)
            insort(free_rows, (free_tokens - length, fullest_row))
        else:
            rows.append([i])
            insort(free_rows, (context - length, len(rows) - 1))
    return [_join_samples([samples[i] for i in row]) for row in sorted(sorted(row) for row in rows)]


def _join_samples(samples: Sequence[Sample]) -> Sample:
    ids = [token for sample in samples for token in sample.ids]
    labels = [label for sample in samples for label in (IGNORE_INDEX, *sample.labels[1:])]
    return Sample(ids, labels, samples[0].record, tuple(len(sample.ids) for sample in samples))
