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
from ...data.text.packing import Sample
from ...data.text.tokens import find_added_prefix, join_responses
from ..base_model import check_positions
from .text_generation import use_evaluation_mode


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
    end_token: int | None = None,
    special_tokens: bool = True,
) -> list[Sample]:
    """Tokenize texts that follow prompts, as in training; the tokens of the texts count.

    Args:
        tokenizer: tokenizer of transformers.
        prompts: prompt before each text; may be empty.
        texts: texts, one for each prompt.
        end_token: id of the token that ends each text and counts; not written twice. None for none.
        special_tokens: whether the tokenizer adds its special tokens before the prompt.
    """
    prefix = find_added_prefix(tokenizer) if special_tokens else []
    end = [] if end_token is None else [end_token]
    rows = join_responses(tokenizer, list(zip(prompts, texts, strict=True)), prefix, end)
    return [Sample(ids, [IGNORE_INDEX] * start + ids[start:]) for ids, start, _ in rows]


def cut_row(row: Sample, context: int | None = None, end_token: int | None = None) -> Sample:
    """Shorten a row on the right.

    Args:
        row: tokens and labels.
        context: maximum number of tokens; None for no maximum.
        end_token: id of the token that ends the text and is cut off with all that follows it; None cuts off none.
    """
    length = len(row.ids)
    if end_token in row.labels:
        length -= row.labels[::-1].index(end_token) + 1
    length = length if context is None else min(length, context)
    return Sample(row.ids[:length], row.labels[:length])


def has_counted_token(row: Sample) -> bool:
    """Whether a token of a row counts; nothing predicts the first one."""
    return any(label != IGNORE_INDEX for label in row.labels[1:])


def measure_likelihood(model: Any, rows: Sequence[Sample], batch_size: int = 8) -> Likelihood:
    """Compute the mean negative log-likelihood of a token: the logits at t - 1 predict token t.

    The tokens with a label count, except the first token of a row, which no logits predict. The result does not depend on
    the batch size, except by rounding. The model is in evaluation mode during the computation.

    Raises:
        ConfigError: if a row is longer than the table of the model's positions.
        DataError: if no token counts.
    """
    check_positions(model, max((len(row.ids) for row in rows), default=0))
    device = next(model.parameters()).device
    total_nll, total_count = 0.0, 0
    with use_evaluation_mode(model), torch.no_grad():
        for begin in range(0, len(rows), batch_size):
            batch = rows[begin : begin + batch_size]
            x = pad_sequence([torch.tensor(row.ids, dtype=torch.int64) for row in batch], batch_first=True)
            mask = pad_sequence(
                [torch.ones(len(row.ids), dtype=torch.int64) for row in batch], batch_first=True
            )
            labels = [torch.tensor(row.labels, dtype=torch.int64) for row in batch]
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
