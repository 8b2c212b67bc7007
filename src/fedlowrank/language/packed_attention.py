"""Block-diagonal attention for rows that hold several samples."""

from __future__ import annotations

from typing import Any

import torch

from ..core.errors import ConfigError

_MAX_RELATIVE_DIFFERENCE = 1e-3
"""Maximum difference of logits in the check, relative to the largest logit."""


def use_packed_attention(model: Any) -> None:
    """Make a causal model treat each sample of a row as if the sample had its own row.

    The attention mask is removed from inputs with ``position_ids``. ``transformers`` then starts a new sequence wherever
    positions start at 0 again, for every implementation of attention: no token attends to an earlier sample. Padding is
    on the right, so no token of a sample attends to it.

    Args:
        model: causal model of ``transformers``.

    Raises:
        ConfigError: if the logits of a row of two samples differ from the logits of the samples in separate rows, as with
            models that build their own attention mask.
    """
    model.register_forward_pre_hook(_drop_mask, with_kwargs=True)
    packed_scores, single_scores = _score_packed_row(model), _score_single_rows(model)
    if (
        packed_scores.shape != single_scores.shape
        or (packed_scores - single_scores).abs().max() > _MAX_RELATIVE_DIFFERENCE * single_scores.abs().max()
    ):
        raise ConfigError(
            f"packing: {type(model).__name__} does not keep the samples of a row apart (it makes its attention "
            "mask without position_ids). Set packing = false."
        )


def _drop_mask(_module: Any, args: tuple[Any, ...], inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    if inputs.get("position_ids") is None or inputs.get("past_key_values") is not None:
        return args, inputs
    # with a cache, even an empty one, transformers ignores the positions
    return args, {**inputs, "attention_mask": None, "use_cache": False}


def _score_packed_row(model: Any) -> torch.Tensor:
    """Compute the logits of a row of two samples."""
    device = model.get_input_embeddings().weight.device
    ids = torch.arange(1, 8, device=device)[None]
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2]], device=device)
    return _compute_scores(model, ids, positions)[0]


def _score_single_rows(model: Any) -> torch.Tensor:
    """Compute the logits of the same samples in separate rows."""
    device = model.get_input_embeddings().weight.device
    rows = [torch.arange(1, 5, device=device)[None], torch.arange(5, 8, device=device)[None]]
    positions = [torch.arange(row.shape[1], device=device)[None] for row in rows]
    return torch.cat([_compute_scores(model, *pair)[0] for pair in zip(rows, positions, strict=True)])


def _compute_scores(model: Any, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    mask = torch.ones_like(ids)
    with torch.no_grad():
        output = model(input_ids=ids, attention_mask=mask, position_ids=positions)
    return torch.as_tensor(output.logits).float()
