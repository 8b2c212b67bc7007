"""Lists the examples of a client as the rows that TRL's trainers read."""

from __future__ import annotations

from typing import Any

import torch

from ...core.errors import TaskError
from ...core.learning.losses import IGNORE_INDEX
from ...core.learning.preference_losses import REFERENCE, RESPONSE_MASK
from ...data.dataset import Examples


def list_rows(examples: Examples) -> list[dict[str, list[int]]]:
    """List texts as rows of ``input_ids`` and ``labels`` without padding.

    Raises:
        TaskError: if the texts have other inputs, such as ``position_ids`` of packed rows.
    """
    x = examples.x
    assert isinstance(x, dict)
    if other_inputs := sorted(x.keys() - {"input_ids", "attention_mask"}):
        raise TaskError(
            f"a trainer of TRL takes texts without {other_inputs[0]!r}; set language.packing = false, or trainer = 'own'"
        )
    rows = []
    for tokens, mask, labels in zip(x["input_ids"], x["attention_mask"], examples.y, strict=True):
        # the mask also removes padding on the left
        is_text = mask.bool()
        rows.append(
            {
                "input_ids": tokens[is_text].tolist(),
                "labels": torch.where(labels < 0, IGNORE_INDEX, labels)[is_text].tolist(),
            }
        )
    return rows


def list_pairs(examples: Examples) -> list[dict[str, Any]]:
    """List pairs of responses as rows of TRL's ``DPOTrainer``, without padding.

    A row has ``prompt_ids``, the tokens that both texts begin with and that do not count; ``chosen_ids`` and ``rejected_ids``,
    the rest of both texts; ``chosen_mask`` and ``rejected_mask``, 1 where a token of the rest counts; and
    ``ref_chosen_logps`` and ``ref_rejected_logps``, log π_ref of both responses.

    Args:
        examples: examples of :func:`fedlowrank.language.objectives.preference_pairs.make_pairs` with a reference.
    """
    x = examples.x
    assert isinstance(x, dict)
    rows = []
    inputs = (x["input_ids"], x["attention_mask"], x[RESPONSE_MASK], x[REFERENCE], examples.y)
    for tokens, mask, response_mask, reference, chosen_index in zip(*inputs, strict=True):
        texts = [
            (tokens[i][mask[i].bool()].tolist(), response_mask[i][mask[i].bool()].tolist()) for i in (0, 1)
        ]
        start = _find_prompt_end(*texts)
        row: dict[str, Any] = {"prompt_ids": texts[0][0][:start]}
        for side, i in (("chosen", int(chosen_index)), ("rejected", 1 - int(chosen_index))):
            row[f"{side}_ids"], row[f"{side}_mask"] = texts[i][0][start:], texts[i][1][start:]
            row[f"ref_{side}_logps"] = float(reference[i])
        rows.append(row)
    return rows


def _find_prompt_end(
    first_text: tuple[list[int], list[int]], second_text: tuple[list[int], list[int]]
) -> int:
    """Find the number of tokens that two texts begin with and that count in neither."""
    end = 0
    for token, counts, other_token, other_counts in zip(*first_text, *second_text, strict=False):
        if token != other_token or counts or other_counts:
            break
        end += 1
    return end
