"""Computes negative log-likelihood and perplexity of texts under a causal language model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from ...core.errors import DataError
from ...core.learning.losses import IGNORE_INDEX
from .text_generation import encode_prompt, use_evaluation_mode


@dataclass(frozen=True)
class TokenRow:
    """Tokens of a prompt and of the text that follows it; the first ``start`` tokens do not count."""

    tokens: list[int]
    start: int


@dataclass(frozen=True)
class Likelihood:
    """Mean negative log-likelihood of the tokens that count, in nats per token, and their number."""

    nll: float
    tokens: int

    @property
    def perplexity(self) -> float:
        """The exponential of the mean negative log-likelihood; infinity if it overflows."""
        return math.exp(self.nll) if self.nll < 709 else self.nll * math.inf


def tokenize_texts(
    tokenizer: Any,
    prompts: Sequence[str],
    texts: Sequence[str],
    context: int | None = None,
    end_token: int | None = None,
    special_tokens: bool = True,
) -> list[TokenRow]:
    """Tokenize texts that follow prompts.

    Prompt and text are tokenized separately and joined, so that no token spans both. See `encode_prompt` for the
    prompt.

    Args:
        tokenizer: tokenizer of transformers.
        prompts: prompt before each text; may be empty.
        texts: texts, one for each prompt.
        context: maximum number of tokens of a row; longer rows are truncated on the right.
        end_token: id of an end token that is appended to each text and counts; None for none.
        special_tokens: whether the tokenizer adds its special tokens to the prompt.
    """
    end_tokens = [] if end_token is None else [end_token]
    rows = []
    for prompt, text in zip(prompts, texts, strict=True):
        prompt_tokens = encode_prompt(tokenizer, prompt, special_tokens)
        text_tokens = list(tokenizer(text, add_special_tokens=False)["input_ids"]) + end_tokens
        rows.append(TokenRow((prompt_tokens + text_tokens)[:context], len(prompt_tokens)))
    return rows


def measure_likelihood(model: Any, rows: Sequence[TokenRow], batch_size: int = 8) -> Likelihood:
    """Compute the mean negative log-likelihood of a token: the logits at t - 1 predict token t.

    No logits predict the first token of a row, so it never counts. The result does not depend on the batch size, except
    by rounding. The model is in evaluation mode during the computation.

    Raises:
        DataError: if no token counts.
    """
    device = next(model.parameters()).device
    total_nll, total_count = 0.0, 0
    with use_evaluation_mode(model), torch.no_grad():
        for begin in range(0, len(rows), batch_size):
            examples = [
                (torch.tensor(r.tokens, dtype=torch.int64), r.start) for r in rows[begin : begin + batch_size]
            ]
            labels = [torch.where(torch.arange(len(x)) < start, IGNORE_INDEX, x) for x, start in examples]
            x = pad_sequence([x for x, _ in examples], batch_first=True)
            mask = pad_sequence([torch.ones_like(x) for x, _ in examples], batch_first=True)
            y = pad_sequence(labels, batch_first=True, padding_value=IGNORE_INDEX)[:, 1:]
            count = int((y != IGNORE_INDEX).sum())
            if count == 0:
                continue
            logits = model(input_ids=x.to(device), attention_mask=mask.to(device)).logits[:, :-1].float()
            losses = functional.cross_entropy(
                logits.flatten(0, 1), y.flatten().to(device), ignore_index=IGNORE_INDEX, reduction="none"
            )
            total_nll += float(losses.double().sum())
            total_count += count
    if total_count == 0:
        raise DataError(
            "no token of any text counts: they are empty, or the context is filled by the prompts."
        )
    return Likelihood(total_nll / total_count, total_count)
