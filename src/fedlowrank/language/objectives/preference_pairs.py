"""A causal language model that scores pairs of responses, for the losses ``dpo`` and ``orpo``.

An example is a pair: inputs ``input_ids``, ``attention_mask`` and ``labels``, int64 ``[n, 2, T]``, and for ``dpo`` also
``reference``, float32 ``[n, 2]``, the log-probabilities of the responses under the base without adapter. These are computed once
from the data, so there is no second model. Its class is which response is preferred, always 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...core.learning.losses import IGNORE_INDEX, Loss, next_token_losses
from ...core.learning.preference_losses import OF_PAIRS
from ...data.dataset import Dataset, Examples

CLASSES = "chosen", "rejected"
"""Names of the classes: which response of a pair is preferred."""

PAIRS_AT_ONCE = 4
"""Pairs whose reference is computed at once."""


def learns_pairs(loss: Loss) -> bool:
    """Whether a loss is one of pairs of responses."""
    return loss.kind in OF_PAIRS


def score_pairs(model: Any, loss: Loss) -> None:
    """Make a causal model give two scores for each pair of responses, in place.

    Inputs ``[b, 2, T]`` with labels give the scores ``[b, 2]`` that the loss reads
    (:mod:`fedlowrank.core.learning.preference_losses`). Other inputs give what they gave before: the model still generates.

    Args:
        model: a ``peft.PeftModel`` of a causal model.
        loss: ``dpo`` or ``orpo``.
    """
    plain = type(model)

    def forward(self: Any, input_ids: Any = None, *args: Any, **inputs: Any) -> Any:
        if input_ids is None or input_ids.ndim < 3:
            return plain.forward(self, input_ids, *args, **inputs)
        labels, reference = inputs["labels"], inputs.get("reference")
        logits = plain.forward(
            self, input_ids.flatten(0, 1), attention_mask=inputs["attention_mask"].flatten(0, 1)
        ).logits
        total, mean = sum_log_probabilities(logits, labels.flatten(0, 1))
        if loss.kind == "dpo":
            return loss.beta * (total.unflatten(0, (-1, 2)) - reference)
        return (mean - torch.log(-torch.expm1(mean))).unflatten(0, (-1, 2))

    # a class and not an attribute, so that a copy of the model calls itself
    model.__class__ = type(plain.__name__, (plain,), {"forward": forward, "__module__": plain.__module__})


def sum_log_probabilities(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The log-probability of each response ``[b]``, and its mean over the response's tokens ``[b]``.

    Args:
        logits: at position t - 1 of the token at t ``[b, T, V]``.
        labels: the tokens of the response, -100 elsewhere ``[b, T]``.
    """
    mean = -next_token_losses(logits, labels)
    return mean * (labels[:, 1:] != IGNORE_INDEX).sum(1), mean


def make_preferences(dataset: Dataset, model: Any, loss: Loss) -> Dataset:
    """Make tokens of pairs into what :func:`score_pairs` takes.

    Args:
        dataset: of :func:`fedlowrank.data.text.tokens.tokenize`, labels ``[n, 2, T]``.
        model: a ``peft.PeftModel``, before or after :func:`score_pairs`.
        loss: ``dpo`` or ``orpo``.
    """

    def convert(examples: Examples) -> Examples:
        assert isinstance(examples.x, dict)
        x = {**examples.x, "labels": examples.y}
        if loss.kind == "dpo":
            x["reference"] = reference_log_probabilities(model, x)
        return Examples(x, torch.zeros(len(examples), dtype=torch.int64))

    test = None if dataset.test is None else convert(dataset.test)
    return dataclasses.replace(dataset, train=convert(dataset.train), test=test, classes=CLASSES)


def reference_log_probabilities(model: Any, x: dict[str, Tensor]) -> Tensor:
    """Log π_ref of both responses of each pair, float32 ``[n, 2]``: those of the base without adapter."""
    device, found = model.device, []
    forward: Callable[..., Any] = model.get_base_model()
    with torch.no_grad(), model.disable_adapter():
        for start in range(0, len(x["labels"]), PAIRS_AT_ONCE):
            ids, mask, labels = (
                x[name][start : start + PAIRS_AT_ONCE].flatten(0, 1).to(device)
                for name in ("input_ids", "attention_mask", "labels")
            )
            width = int(mask.sum(1).max())
            logits = forward(input_ids=ids[:, :width], attention_mask=mask[:, :width]).logits
            total, _ = sum_log_probabilities(logits.float(), labels[:, :width])
            found.append(total.unflatten(0, (-1, 2)).cpu())
    return torch.cat(found)
