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
        first: the first token of the response, or of all that may be learnt.
        last: the position after the last one.
        place: file and row of the record, for messages.
        client: natural client, or None.
    """

    sample: Sample
    first: int
    last: int
    place: str
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
    where: str,
    drafts: Iterable[Draft],
    limit: LengthLimit,
    drop_turns: Callable[[int], Sample] | None,
    notes: list[str],
) -> Iterator[Sample | None]:
    """Shorten samples to the context, one after another; those without a token left to learn are None.

    Args:
        where: name of the data, for messages.
        drafts: samples of any length, read once.
        limit: the context and what to do.
        drop_turns: gives sample ``i`` without its oldest turns; None for samples that have no turns.
        notes: gets the numbers of samples that were shortened or dropped, in all and by client, after the last sample.

    Raises:
        DataError: if a sample is too long and ``truncate`` is ``refuse``, or nothing is left to learn.
    """
    count = 0
    shortened: Counter[str | None] = Counter()
    dropped: Counter[str | None] = Counter()
    for i, draft in enumerate(drafts):
        count = i + 1
        sample, first, last, context = draft.sample, draft.first, draft.last, limit.context
        if len(sample.ids) > context:
            if limit.truncate == "refuse":
                raise DataError(
                    f"{draft.place} has {len(sample.ids)} tokens, and the context is {context}. Raise context, "
                    "shorten the row, or set truncate to 'right', 'left' or 'turns'."
                )
            shortened[draft.client] += 1
            if limit.truncate == "turns" and drop_turns is not None:
                sample = drop_turns(i)
                first, last = 0, len(sample.ids)
        low = max(0, len(sample.ids) - context) if limit.truncate == "left" else 0
        high = min(len(sample.ids), low + context)
        # Nothing predicts the first token of a sample.
        has_response = max(first, low + 1) < min(last, high)
        if has_response and any(label != IGNORE_INDEX for label in sample.labels[low + 1 : high]):
            yield Sample(sample.ids[low:high], sample.labels[low:high], sample.record)
        else:
            dropped[draft.client] += 1
            yield None
    if shortened:
        notes.append(
            f"{where}: {shortened.total()} of {count} samples are longer than {limit.context} tokens and "
            f"{_DESCRIPTIONS[limit.truncate]}{_format_counts(shortened)}"
        )
    if dropped:
        notes.append(
            f"{where}: {dropped.total()} of {count} samples dropped: no response token is left"
            f"{_format_counts(dropped)}"
        )
    if dropped.total() == count:
        raise DataError(
            f"{where}: within {limit.context} tokens no sample has a token of its response. Raise context."
        )


def _format_counts(counts: Counter[str | None]) -> str:
    """The counts of natural clients in parentheses; empty without such clients."""
    named = [(client, n) for client, n in counts.most_common() if client is not None]
    if not named:
        return ""
    shown = ", ".join(f"{client} {n}" for client, n in named[:_MAX_NAMED_CLIENTS])
    rest = len(named) - _MAX_NAMED_CLIENTS
    return f" (by client: {shown}{f', and {rest} more clients' if rest > 0 else ''})"
