"""Truncates samples to a length limit, drops samples without a response, and counts both by client."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Literal, NamedTuple, TypeAlias

from ...core.errors import DataError
from ...core.learning.losses import IGNORE_INDEX
from .packing import Sample

Truncate: TypeAlias = Literal["right", "left", "turns", "refuse"]

_MAX_NAMED_CLIENTS = 8
"""Clients that a note names with their counts."""

_DESCRIPTIONS = {
    "right": "were truncated on the right",
    "left": "were truncated on the left",
    "turns": "lost their oldest turns",
}


class Draft(NamedTuple):
    """A sample of any length.

    Attributes:
        sample: its tokens and labels.
        response_start: the first token of the response, or of all that may be learnt.
        response_end: the position after the last one.
        location: file and row of the record, for messages.
        client: natural client, or None.
    """

    sample: Sample
    response_start: int
    response_end: int
    location: str
    client: str | None


class LengthLimit(NamedTuple):
    """How many tokens an example has at most, and what happens to longer ones.

    Attributes:
        context: the largest number of tokens.
        truncate: ``right``: the end is cut off; ``left``: the beginning; ``turns``: whole turns are left out
            from the beginning, the system's and the last exchange stay, and if these are too long their end is
            cut off; ``refuse``: a longer one is an error.
    """

    context: int
    truncate: Truncate


def fit_samples(
    description: str,
    drafts: Iterable[Draft],
    limit: LengthLimit,
    drop_turns: Callable[[int], Sample] | None,
    notes: list[str],
) -> Iterator[Sample | None]:
    """Shorten samples to the context, one after another; those without a token left to learn are None.

    Args:
        description: name of the data, for messages.
        drafts: samples of any length, read once.
        limit: the context and what to do.
        drop_turns: gives sample ``i`` without its oldest turns; None for samples that have no turns.
        notes: gets the numbers of samples that were shortened or dropped, in all and by client, after the last sample.

    Raises:
        DataError: if a sample is too long and ``truncate`` is ``refuse``, or nothing is left to learn.
    """
    count = 0
    shortened_counts: Counter[str | None] = Counter()
    dropped_counts: Counter[str | None] = Counter()
    for i, draft in enumerate(drafts):
        count = i + 1
        sample, response_start, response_end, context = (
            draft.sample,
            draft.response_start,
            draft.response_end,
            limit.context,
        )
        if len(sample.ids) > context:
            if limit.truncate == "refuse":
                raise DataError(
                    f"{draft.location} has {len(sample.ids)} tokens, and the context is {context}. Raise context, "
                    "shorten the row, or set truncate to 'right', 'left' or 'turns'."
                )
            shortened_counts[draft.client] += 1
            if limit.truncate == "turns" and drop_turns is not None:
                sample = drop_turns(i)
                response_start, response_end = 0, len(sample.ids)
        low = max(0, len(sample.ids) - context) if limit.truncate == "left" else 0
        high = min(len(sample.ids), low + context)
        # Nothing predicts the first token of a sample.
        has_response = max(response_start, low + 1) < min(response_end, high)
        if has_response and any(label != IGNORE_INDEX for label in sample.labels[low + 1 : high]):
            yield Sample(sample.ids[low:high], sample.labels[low:high], sample.record)
        else:
            dropped_counts[draft.client] += 1
            yield None
    if shortened_counts:
        notes.append(
            f"{description}: {shortened_counts.total()} of {count} samples are longer than {limit.context} tokens and "
            f"{_DESCRIPTIONS[limit.truncate]}{_format_counts(shortened_counts)}"
        )
    if dropped_counts:
        notes.append(
            f"{description}: {dropped_counts.total()} of {count} samples dropped: no response token is left"
            f"{_format_counts(dropped_counts)}"
        )
    if dropped_counts.total() == count:
        raise DataError(
            f"{description}: within {limit.context} tokens no sample has a token of its response. Raise context."
        )


def _format_counts(counts: Counter[str | None]) -> str:
    """The counts of natural clients in parentheses; empty without such clients."""
    client_counts = [(client, n) for client, n in counts.most_common() if client is not None]
    if not client_counts:
        return ""
    clients_text = ", ".join(f"{client} {n}" for client, n in client_counts[:_MAX_NAMED_CLIENTS])
    remaining_count = len(client_counts) - _MAX_NAMED_CLIENTS
    return f" (by client: {clients_text}{f', and {remaining_count} more clients' if remaining_count > 0 else ''})"
