"""Makes examples from pairs of responses, and computes two scores for each pair."""

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
    """Make the examples that a preference loss needs from pairs of responses.

    The labels of tokens ``[n, 2, T]`` become an input ``response_mask``, 1 where a token counts; the label of an
    example is 0, the index of the chosen response.

    Args:
        clients: data of the clients, with labels of tokens ``[n, 2, T]``.
        loss: preference loss of the task.
        source: name of the data, for error messages.

    Raises:
        DataError: if the data are not pairs of responses.
    """
    for data in clients:
        if data.train.y.ndim != 3 or not data.train.has_token_labels:
            raise DataError(
                f"{source}: loss {loss.kind!r} learns from pairs of responses to one prompt, and these rows have none. Give "
                "rows with the columns 'prompt', 'chosen' and 'rejected', or choose loss 'next_token'."
            )
    return [
        replace(
            data,
            train=_add_response_mask(data.train),
            val=_add_response_mask(data.val),
            test=_add_response_mask(data.test),
        )
        for data in clients
    ]


def _add_response_mask(examples: Examples) -> Examples:
    assert isinstance(examples.x, dict)
    # no logits predict the first token
    mask = (examples.y >= 0).index_fill(-1, torch.tensor([0]), False)
    y = torch.zeros(len(examples), dtype=torch.int64)
    return Examples({**examples.x, RESPONSE_MASK: mask.long()}, y)


def score_pairs(model: Callable[[Any], Tensor], x: Any) -> Tensor:
    """Compute two scores for each pair ``[b, 2]``: one of the chosen and one of the rejected response.

    With an input ``reference`` a score is the sum of the response's log-probabilities minus the reference. Without it a
    score is the mean of the response's log-probabilities.

    Args:
        model: function that returns logits ``[b, T, V]`` of the next token for inputs ``[b, T]``.
        x: inputs ``input_ids``, ``attention_mask`` and ``response_mask`` ``[b, 2, T]``, and optionally ``reference``
            ``[b, 2]``. Without ``response_mask`` the model's logits are returned.
    """
    if not isinstance(x, dict) or RESPONSE_MASK not in x:
        return model(x)
    inputs = {name: t.flatten(0, 1) for name, t in x.items() if name not in (RESPONSE_MASK, REFERENCE)}
    mask = x[RESPONSE_MASK].flatten(0, 1)[:, 1:] != 0
    sums = _sum_log_probabilities(model(inputs), inputs["input_ids"][:, 1:], mask)
    text_scores = sums if REFERENCE in x else sums / mask.sum(1).clamp(min=1)
    pairs: Tensor = text_scores.unflatten(0, (-1, 2))
    return pairs - x[REFERENCE].to(pairs.dtype) if REFERENCE in x else pairs


def _sum_log_probabilities(scores: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    """Sum the log-probabilities ``[b]`` of the tokens that count; half precision is computed in float32.

    Args:
        scores: logits ``[b, T, V]``; the logits at position t - 1 predict the token at t.
        targets: tokens from the second on, ``[b, T - 1]``.
        mask: mask of the targets that count, ``[b, T - 1]``.
    """
    dtype = wide_type(scores.dtype)
    if finds_tokens(scores):
        # logits of tokens that do not count would take most of the memory and time with a large vocabulary
        rows, positions = mask.nonzero(as_tuple=True)
        token_scores = scores[rows, positions].to(dtype)
        log_probabilities = -functional.cross_entropy(
            token_scores, targets[rows, positions], reduction="none"
        )
        return log_probabilities.new_zeros(len(mask)).index_add(0, rows, log_probabilities)
    losses = functional.cross_entropy(scores[:, :-1].to(dtype).transpose(1, 2), targets, reduction="none")
    return -losses.where(mask, 0.0).sum(1)
