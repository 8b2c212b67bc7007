"""Truncates samples to a length limit, drops samples without a response, and counts both by client."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import takewhile
from typing import Literal, NamedTuple, TypeAlias

from ...core.errors import DataError
from ...core.learning.losses import IGNORE_INDEX
from .packing import Sample
from .text_records import Conversation

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
        conversation: the conversation of which it is made, or None for a record without turns.
    """

    sample: Sample
    response_start: int
    response_end: int
    location: str
    client: str | None
    conversation: Conversation | None = None


class LengthLimit(NamedTuple):
    """How many tokens an example has at most, and what happens to longer ones.

    Attributes:
        context: the largest number of tokens.
        truncate: ``right``: the end is cut off; ``left``: the beginning; ``turns``: whole turns are left out
            from the beginning, the system's and the last exchange stay, and if these are too long their end is
            cut off; ``refuse``: a longer one is an error. Both responses of a preference pair keep the same prompt.
    """

    context: int
    truncate: Truncate


DropTurns: TypeAlias = Callable[[Sequence[Draft], int], Sequence[Sample]]
"""Gives the samples of drafts without their oldest turns; the number is that of the record."""


def fit_samples(
    descriptions: Sequence[str],
    groups: Iterable[Sequence[Draft]],
    limit: LengthLimit,
    drop_turns: DropTurns | None,
    notes: list[str],
) -> Iterator[tuple[Sample | None, ...]]:
    """Shorten samples to the context, one group after another; those without a token left to learn are None.

    A group holds the samples of a record: one, or two responses to one prompt. Responses of a group keep the same
    prompt: what the longest one loses of it on the left, the others lose too.

    Args:
        descriptions: name of the data of each sample of a group, for messages.
        groups: samples of any length, read once.
        limit: the context and what to do.
        drop_turns: leaves out the same oldest turns in all samples of a group; None for samples that have no turns.
        notes: gets the numbers of samples that were shortened or dropped, in all and by client, after the last sample.

    Raises:
        DataError: if a sample is too long and ``truncate`` is ``refuse``, or nothing is left to learn.
    """
    fitters = [_SampleFitter(description, limit) for description in descriptions]
    for i, drafts in enumerate(groups):
        fitted_drafts, start = drafts, 0
        if any(len(draft.sample.ids) > limit.context for draft in drafts):
            _check_refusal(drafts, limit)
            if limit.truncate == "turns" and drop_turns is not None:
                fitted_drafts = [
                    draft._replace(sample=sample, response_start=0, response_end=len(sample.ids))
                    for draft, sample in zip(drafts, drop_turns(drafts, i), strict=True)
                ]
            elif limit.truncate == "left":
                start = _find_common_start(drafts, limit.context)
        yield tuple(
            fitter.fit(draft, fitted_draft, start)
            for fitter, draft, fitted_draft in zip(fitters, drafts, fitted_drafts, strict=True)
        )
    for fitter in fitters:
        fitter.add_notes(notes)


class _SampleFitter:
    """Cuts samples to the context, and counts by client what happened to them.

    Args:
        description: name of the data, for messages.
        limit: the context and what to do.
    """

    def __init__(self, description: str, limit: LengthLimit) -> None:
        self._description, self._limit = description, limit
        self._count = 0
        self._long_counts: Counter[str | None] = Counter()
        self._matched_counts: Counter[str | None] = Counter()
        self._dropped_counts: Counter[str | None] = Counter()

    def fit(self, draft: Draft, fitted_draft: Draft, start: int) -> Sample | None:
        """Cut a sample to the context; None without a token left to learn.

        Args:
            draft: the sample as it was.
            fitted_draft: the sample without the turns that were left out.
            start: at least so many tokens are cut off on the left.
        """
        sample, response_start, response_end, _, client, _ = fitted_draft
        low = max(start, len(sample.ids) - self._limit.context) if self._limit.truncate == "left" else 0
        high = min(len(sample.ids), low + self._limit.context)
        self._count += 1
        if len(draft.sample.ids) > self._limit.context:
            self._long_counts[client] += 1
        elif high - low < len(draft.sample.ids):
            self._matched_counts[client] += 1
        # Nothing predicts the first token of a sample.
        has_response = max(response_start, low + 1) < min(response_end, high)
        if has_response and any(label != IGNORE_INDEX for label in sample.labels[low + 1 : high]):
            return Sample(sample.ids[low:high], sample.labels[low:high], sample.record)
        self._dropped_counts[client] += 1
        return None

    def add_notes(self, notes: list[str]) -> None:
        """Add the numbers of samples that were shortened or dropped.

        Raises:
            DataError: if all were dropped.
        """
        description, count, context = self._description, self._count, self._limit.context
        if self._long_counts:
            notes.append(
                f"{description}: {self._long_counts.total()} of {count} samples are longer than {context} tokens and "
                f"{_DESCRIPTIONS[self._limit.truncate]}{_format_counts(self._long_counts)}"
            )
        if self._matched_counts:
            notes.append(
                f"{description}: {self._matched_counts.total()} of {count} samples lost the same part of the prompt as the "
                f"longer response of their pair{_format_counts(self._matched_counts)}"
            )
        if self._dropped_counts:
            notes.append(
                f"{description}: {self._dropped_counts.total()} of {count} samples dropped: no response token is left"
                f"{_format_counts(self._dropped_counts)}"
            )
        if self._dropped_counts.total() == count:
            raise DataError(
                f"{description}: within {context} tokens no sample has a token of its response. Raise context."
            )


def _check_refusal(drafts: Sequence[Draft], limit: LengthLimit) -> None:
    if limit.truncate != "refuse":
        return
    draft = next(draft for draft in drafts if len(draft.sample.ids) > limit.context)
    raise DataError(
        f"{draft.location} has {len(draft.sample.ids)} tokens, and the context is {limit.context}. Raise context, "
        "shorten the row, or set truncate to 'right', 'left' or 'turns'."
    )


def _find_common_start(drafts: Sequence[Draft], context: int) -> int:
    """How many tokens of their prompt all samples lose on the left: what the longest one loses of it."""
    excess = max(len(draft.sample.ids) for draft in drafts) - context
    columns = zip(*(draft.sample.ids for draft in drafts), strict=False)
    common_length = sum(1 for _ in takewhile(lambda tokens: len(set(tokens)) == 1, columns))
    return min(excess, common_length, *map(_measure_prompt, drafts))


def _measure_prompt(draft: Draft) -> int:
    """The number of tokens before the response; all tokens of a conversation of which every token is learnt."""
    if draft.conversation is None:
        return draft.response_start
    labels = draft.sample.labels
    first_target = next((t for t, label in enumerate(labels) if label != IGNORE_INDEX), len(labels))
    is_learnt_whole = first_target == 0 and IGNORE_INDEX not in labels
    return len(labels) if is_learnt_whole else first_target


def _format_counts(counts: Counter[str | None]) -> str:
    """The counts of natural clients in parentheses; empty without such clients."""
    client_counts = [(client, n) for client, n in counts.most_common() if client is not None]
    if not client_counts:
        return ""
    clients_text = ", ".join(f"{client} {n}" for client, n in client_counts[:_MAX_NAMED_CLIENTS])
    remaining_count = len(client_counts) - _MAX_NAMED_CLIENTS
    return f" (by client: {clients_text}{f', and {remaining_count} more clients' if remaining_count > 0 else ''})"
