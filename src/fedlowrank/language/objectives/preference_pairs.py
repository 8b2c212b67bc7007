"""Pairs of responses as examples of a federation: inputs with masks and reference, and two scores of each pair."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...core.errors import DataError
from ...core.learning.losses import Loss, finds_tokens
from ...core.learning.preference_losses import REFERENCE, RESPONSE_MASK
from ...core.tree import wide_type
from ...data.dataset import ClientData, Examples


def make_pairs(clients: Sequence[ClientData], loss: Loss, source: str) -> list[ClientData]:
    """Examples of pairs as a loss of preferences needs them.

    The labels of tokens ``[n, 2, T]`` become an input ``response_mask``, 1 where a token counts; the label of an example is
    0, the place of the chosen response.

    Args:
        clients: with labels of tokens ``[n, 2, T]``.
        loss: of preferences.
        source: name of the data, for the error.

    Raises:
        DataError: if the data are no pairs.
    """
    for data in clients:
        if data.train.y.ndim != 3 or not data.train.tokens:
            raise DataError(
                f"{source}: loss {loss.kind!r} learns from pairs of responses to one prompt, and these rows have none. Give "
                "rows with the columns 'prompt', 'chosen' and 'rejected', or choose loss 'next_token'."
            )
    return [
        replace(data, train=_make_pairs(data.train), val=_make_pairs(data.val), test=_make_pairs(data.test))
        for data in clients
    ]


def _make_pairs(examples: Examples) -> Examples:
    assert isinstance(examples.x, dict)
    # nothing predicts the first token
    counts = (examples.y >= 0).index_fill(-1, torch.tensor([0]), False)
    y = torch.zeros(len(examples), dtype=torch.int64)
    return Examples({**examples.x, RESPONSE_MASK: counts.long()}, y)


def score_pairs(model: Callable[[Any], Tensor], x: Any) -> Tensor:
    """Two scores of each pair ``[b, 2]``: of its chosen and of its rejected response.

    With an input ``reference`` the sum of log-probabilities of the response minus the reference; else their mean.

    Args:
        model: scores ``[b, T, V]`` of the next token, of inputs ``[b, T]``.
        x: ``input_ids``, ``attention_mask`` and ``response_mask`` ``[b, 2, T]``, and perhaps ``reference`` ``[b, 2]``.
            Without masks of responses the model's own scores are returned.
    """
    if not isinstance(x, dict) or RESPONSE_MASK not in x:
        return model(x)
    inputs = {name: t.flatten(0, 1) for name, t in x.items() if name not in (RESPONSE_MASK, REFERENCE)}
    counts = x[RESPONSE_MASK].flatten(0, 1)[:, 1:] != 0
    sums = _sum_log_probabilities(model(inputs), inputs["input_ids"][:, 1:], counts)
    found = sums if REFERENCE in x else sums / counts.sum(1).clamp(min=1)
    pairs: Tensor = found.unflatten(0, (-1, 2))
    return pairs - x[REFERENCE].to(pairs.dtype) if REFERENCE in x else pairs


def _sum_log_probabilities(scores: Tensor, targets: Tensor, counts: Tensor) -> Tensor:
    """Sums of log-probabilities ``[b]`` of the tokens that count, in float32 of half precision.

    Args:
        scores: ``[b, T, V]``; those at position t - 1 predict the token at t.
        targets: tokens from the second on, ``[b, T - 1]``.
        counts: which of them count.
    """
    wide = wide_type(scores.dtype)
    if finds_tokens(scores):
        # over a large vocabulary the other scores take most of the memory and time
        text, place = counts.nonzero(as_tuple=True)
        chosen = scores[text, place].to(wide)
        found = -functional.cross_entropy(chosen, targets[text, place], reduction="none")
        return found.new_zeros(len(counts)).index_add(0, text, found)
    each = functional.cross_entropy(scores[:, :-1].to(wide).transpose(1, 2), targets, reduction="none")
    return -each.where(counts, 0.0).sum(1)
