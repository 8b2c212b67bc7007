"""Negative log-likelihood and perplexity of texts under a causal language model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...core.errors import ConfigError, DataError
from .generate import evaluating

IGNORED = -100
"""Label of a token whose likelihood does not count."""


@dataclass(frozen=True)
class Labeled:
    """Texts as tokens, right-padded, with a mask of what counts.

    Attributes:
        x: tokens, int64 ``[n, T]``.
        mask: 1 at tokens and 0 at padding, int64 ``[n, T]``.
        y: the token at the same place where its likelihood counts and -100 elsewhere, int64 ``[n, T]``, not
            shifted.
    """

    x: Tensor
    mask: Tensor
    y: Tensor


@dataclass(frozen=True)
class Likelihood:
    """How likely texts are.

    Attributes:
        nll: mean negative log-likelihood of a token that counts, in nats.
        tokens: how many count.
    """

    nll: float
    tokens: int

    @property
    def perplexity(self) -> float:
        """The exponential of the mean negative log-likelihood; infinite where that overflows."""
        return math.exp(self.nll) if self.nll < 709 else self.nll * math.inf


def label_tokens(
    tokenizer: Any,
    prompts: Sequence[str],
    texts: Sequence[str],
    context: int | None = None,
    end: bool = False,
) -> Labeled:
    """Tokens of texts that follow prompts; the likelihood of the text alone counts.

    Prompt and text are tokenized apart and joined, so that no token lies in both. The tokenizer adds its
    special tokens before the prompt only. The first token of a row is predicted by nothing and never counts;
    so the first token of a text counts only if a prompt or a begin token stands before it.

    Args:
        tokenizer: of transformers.
        prompts: what stands before each text; may be empty.
        texts: what counts.
        context: rows are cut on the right to so many tokens.
        end: whether the end token is appended, and counts.

    Raises:
        DataError: if the lengths differ, there is no text, or no token counts.
        ConfigError: if the context has no room, or an end token is asked for and the tokenizer has none.
    """
    if not texts or len(prompts) != len(texts):
        raise DataError(
            f"there are {len(prompts)} prompts and {len(texts)} texts; equally many are needed, one at least."
        )
    if context is not None and context < 2:
        raise ConfigError(f"context must be >= 2, it is {context}: the first token is predicted by nothing")
    eos = tokenizer.eos_token_id
    if end and eos is None:
        raise ConfigError("the tokenizer has no end token that could count; set end to false")
    rows: list[tuple[list[int], int]] = []
    for prompt, text in zip(prompts, texts, strict=True):
        before = list(tokenizer(prompt, add_special_tokens=True)["input_ids"])
        # some tokenizers close every text; the text goes on after this one
        if before and before[-1] == eos:
            before.pop()
        after = list(tokenizer(text, add_special_tokens=False)["input_ids"]) + ([eos] if end else [])
        rows.append(((before + after)[:context], len(before)))
    width = max(len(row) for row, _ in rows)
    x = torch.zeros(len(rows), width, dtype=torch.int64)
    mask, y = torch.zeros_like(x), torch.full_like(x, IGNORED)
    for i, (row, start) in enumerate(rows):
        x[i, : len(row)] = torch.tensor(row, dtype=torch.int64)
        mask[i, : len(row)] = 1
        y[i, start : len(row)] = x[i, start : len(row)]
    if not (y[:, 1:] != IGNORED).any():
        raise DataError(
            "no token of any text counts: they are empty, or the context is filled by the prompts."
        )
    return Labeled(x, mask, y)


def measure_likelihood(model: Any, data: Labeled, batch_size: int = 8) -> Likelihood:
    """Token-mean negative log-likelihood: the logits at t - 1 predict ``y[t]``.

    The number does not depend on the batch size nor on where the padding is, but for rounding: padding is
    moved to the right and cut. The model is in evaluation mode meanwhile.

    Args:
        model: a causal language model of transformers.
        data: tokens with what counts.
        batch_size: rows at a time.

    Raises:
        DataError: if no token counts, or padding does.
        ConfigError: if the batch size is below 1.
    """
    if batch_size < 1:
        raise ConfigError(f"batch_size must be >= 1, it is {batch_size}")
    if ((data.y != IGNORED) & (data.mask == 0)).any():
        raise DataError("a token counts where the mask is 0; padding has no likelihood.")
    device = next(model.parameters()).device
    total, tokens = 0.0, 0
    with evaluating(model), torch.no_grad():
        for rows in torch.split(torch.arange(len(data.x)), batch_size):
            mask, at = data.mask[rows].sort(dim=1, descending=True, stable=True)
            width = max(1, int(mask.sum(1).max()))
            x, y, mask = (
                data.x[rows].gather(1, at)[:, :width],
                data.y[rows].gather(1, at)[:, 1:width],
                mask[:, :width],
            )
            counts = int((y != IGNORED).sum())
            if counts == 0:
                continue
            logits = model(input_ids=x.to(device), attention_mask=mask.to(device)).logits[:, :-1].float()
            losses = functional.cross_entropy(
                logits.flatten(0, 1), y.flatten().to(device), ignore_index=IGNORED, reduction="none"
            )
            total += float(losses.double().sum())
            tokens += counts
    if tokens == 0:
        raise DataError("no token counts: every label is -100, or stands first in its row.")
    return Likelihood(total / tokens, tokens)
