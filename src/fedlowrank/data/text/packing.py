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
    """

    ids: list[int]
    labels: list[int]
    record: int = 0


def pack_sequences(samples: Sequence[Sample], context: int, eos: int | None) -> list[Sample]:
    """Join samples to rows of at most ``context`` tokens, for less padding.

    Each sample goes into the fullest row with room for it, long ones first (best fit decreasing), and stays
    whole with its labels. An EOS separates two samples: the end of the first one, or one without a label.

    Packing changes training: a token attends to the earlier samples of its row, too, and positions count from
    the start of the row, as no attention mask separates the samples; the first token of a later sample, if it
    has a label, is predicted from the EOS before it; an example of the data set is a row, so batches and
    client sizes count rows.

    Args:
        samples: each of 1 to ``context`` tokens.
        context: tokens per row, at least 1.
        eos: token id between two samples, or None for no separator.

    Returns:
        Rows in the order of their first samples; the samples of a row in their old order.
    """
    rows: list[list[int]] = []
    # (free tokens, row) in ascending order; of rows with equal room the oldest comes first.
    free: list[tuple[int, int]] = []
    for i in sorted(range(len(samples)), key=lambda i: -len(samples[i].ids)):
        ids = samples[i].ids

        # The last sample of a row needs no separator, but which one is last is known only at the end.
        need = len(ids) + (eos is not None and ids[-1] != eos)
        at = bisect_left(free, (need, -1))
        if at < len(free):
            room, fullest = free.pop(at)
            rows[fullest].append(i)
            insort(free, (room - need, fullest))
        else:
            rows.append([i])
            insort(free, (context - need, len(rows) - 1))
    return [_join([samples[i] for i in row], eos) for row in sorted(sorted(row) for row in rows)]


def _join(samples: Sequence[Sample], eos: int | None) -> Sample:
    ids: list[int] = []
    labels: list[int] = []
    for sample in samples:
        if ids and eos is not None and ids[-1] != eos:
            ids.append(eos)
            labels.append(IGNORE_INDEX)
        ids += sample.ids
        labels += sample.labels
    return Sample(ids, labels, samples[0].record)
