"""Block-diagonal attention for rows that hold several samples."""

from __future__ import annotations

from typing import Any

import torch

from ..core.errors import ConfigError

_TOLERANCE = 1e-3
"""Largest difference of the check's scores, relative to the largest score."""


def use_packed_attention(model: Any) -> None:
    """Make a causal model treat the samples of a row as if each had a row of its own.

    Inputs with ``position_ids`` are given to the model without their attention mask: where positions start
    again, ``transformers`` then lets no token attend to what is before, for every implementation of attention.
    Padding is on the right, where no other token attends to it.

    Args:
        model: a causal model of ``transformers``.

    Raises:
        ConfigError: if the scores of a short row of two samples are not those of the samples alone, as with
            models that make their mask by themselves.
    """
    model.register_forward_pre_hook(_drop_mask, with_kwargs=True)
    first, second = _scores_of_packed(model), _scores_of_single(model)
    if first.shape != second.shape or (first - second).abs().max() > _TOLERANCE * second.abs().max():
        raise ConfigError(
            f"packing: {type(model).__name__} does not keep the samples of a row apart (it makes its attention "
            "mask without position_ids). Set packing = false."
        )


def _drop_mask(_module: Any, args: tuple[Any, ...], inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    if inputs.get("position_ids") is None or inputs.get("past_key_values") is not None:
        return args, inputs
    # with a cache, even an empty one, transformers does not look at the positions
    return args, {**inputs, "attention_mask": None, "use_cache": False}


def _scores_of_packed(model: Any) -> torch.Tensor:
    """Scores of a row of two samples."""
    device = model.get_input_embeddings().weight.device
    ids = torch.arange(1, 8, device=device)[None]
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2]], device=device)
    return _scores(model, ids, positions)[0]


def _scores_of_single(model: Any) -> torch.Tensor:
    """Scores of these samples alone."""
    device = model.get_input_embeddings().weight.device
    rows = [torch.arange(1, 5, device=device)[None], torch.arange(5, 8, device=device)[None]]
    positions = [torch.arange(row.shape[1], device=device)[None] for row in rows]
    return torch.cat([_scores(model, *pair)[0] for pair in zip(rows, positions, strict=True)])


def _scores(model: Any, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    mask = torch.ones_like(ids)
    with torch.no_grad():
        out = model(input_ids=ids, attention_mask=mask, position_ids=positions)
    return torch.as_tensor(out.logits).float()
