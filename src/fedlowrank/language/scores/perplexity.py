"""Negative log-likelihood and perplexity of texts under a causal language model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from ...core.errors import ConfigError, DataError
from .generate import encode_prompt, evaluating

IGNORED = -100
"""Label of a token whose likelihood does not count."""


@dataclass(frozen=True)
class TokenRow:
    """Tokens of a prompt and of the text that follows it; the first ``start`` do not count."""

    tokens: list[int]
    start: int


@dataclass(frozen=True)
class Likelihood:
    """Mean negative log-likelihood of a token that counts, in nats, and how many count."""

    nll: float
    tokens: int

    @property
    def perplexity(self) -> float:
        """The exponential of the mean negative log-likelihood; infinite where that overflows."""
        return math.exp(self.nll) if self.nll < 709 else self.nll * math.inf


def tokenize_texts(
    tokenizer: Any,
    prompts: Sequence[str],
    texts: Sequence[str],
    context: int | None = None,
    end: bool = False,
    special_tokens: bool = True,
) -> list[TokenRow]:
    """Tokens of texts that follow prompts.

    Prompt and text are tokenized apart and joined, so that no token lies in both.

    Args:
        tokenizer: of transformers.
        prompts: what stands before each text; may be empty.
        texts: one for each prompt.
        context: rows are cut on the right to so many tokens.
        end: whether the end token is appended, and counts.
        special_tokens: whether the tokenizer adds its special tokens, before the prompt only.

    Raises:
        ConfigError: if an end token is asked for and the tokenizer has none.
    """
    eos = tokenizer.eos_token_id
    if end and eos is None:
        raise ConfigError("the tokenizer has no end token that could count; set end to false")
    rows = []
    for prompt, text in zip(prompts, texts, strict=True):
        before = encode_prompt(tokenizer, prompt, special_tokens)
        # some tokenizers close every text; the text goes on after this one
        if special_tokens and before and before[-1] == eos:
            before.pop()
        after = list(tokenizer(text, add_special_tokens=False)["input_ids"]) + ([eos] if end else [])
        rows.append(TokenRow((before + after)[:context], len(before)))
    return rows


def measure_likelihood(model: Any, rows: Sequence[TokenRow], batch_size: int = 8) -> Likelihood:
    """Token-mean negative log-likelihood: the logits at t - 1 predict token t.

    The first token of a row is predicted by nothing and never counts. The number does not depend on the batch
    size, but for rounding. The model is in evaluation mode meanwhile.

    Raises:
        DataError: if no token counts.
    """
    device = next(model.parameters()).device
    total, tokens = 0.0, 0
    with evaluating(model), torch.no_grad():
        for begin in range(0, len(rows), batch_size):
            found = [
                (torch.tensor(r.tokens, dtype=torch.int64), r.start) for r in rows[begin : begin + batch_size]
            ]
            labels = [torch.where(torch.arange(len(x)) < start, IGNORED, x) for x, start in found]
            x = pad_sequence([x for x, _ in found], batch_first=True)
            mask = pad_sequence([torch.ones_like(x) for x, _ in found], batch_first=True)
            y = pad_sequence(labels, batch_first=True, padding_value=IGNORED)[:, 1:]
            count = int((y != IGNORED).sum())
            if count == 0:
                continue
            logits = model(input_ids=x.to(device), attention_mask=mask.to(device)).logits[:, :-1].float()
            losses = functional.cross_entropy(
                logits.flatten(0, 1), y.flatten().to(device), ignore_index=IGNORED, reduction="none"
            )
            total += float(losses.double().sum())
            tokens += count
    if tokens == 0:
        raise DataError(
            "no token of any text counts: they are empty, or the context is filled by the prompts."
        )
    return Likelihood(total / tokens, tokens)
