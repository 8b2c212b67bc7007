"""Computes embeddings of pairs of texts: the mean of the last hidden states over the tokens of each text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ...core.tree import wide_type


def embed_pairs(model: Callable[[Any], Tensor], x: Any) -> Tensor:
    """Compute embeddings ``[b, 2, d]`` of both texts of each pair; half precision is computed in float32.

    Args:
        model: function that returns the last hidden states ``[b, T, d]`` for inputs ``[b, T]``.
        x: inputs ``[b, 2, T]``, including ``attention_mask``; or inputs ``[b, T]`` of single texts, which give embeddings
            ``[b, d]``.
    """
    is_pair = x["attention_mask"].ndim == 3
    inputs = {name: t.flatten(0, 1) for name, t in x.items()} if is_pair else x
    states = model(inputs)
    states = states.to(wide_type(states.dtype))
    mask = inputs["attention_mask"].to(states.dtype)[..., None]
    means: Tensor = (states * mask).sum(1) / mask.sum(1).clamp(min=1)
    return means.unflatten(0, (-1, 2)) if is_pair else means


def return_hidden_states(model: nn.Module) -> None:
    """Make a model of ``transformers`` return only its last hidden states ``[b, T, d]``, in place."""
    model.register_forward_hook(_take_last_hidden_state)


def _take_last_hidden_state(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
    return getattr(output, "last_hidden_state", output)
