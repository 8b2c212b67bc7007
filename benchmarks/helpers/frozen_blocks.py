"""The first blocks of a language model that have no adapter: their hidden states are computed once for each text."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn


def _unchanged(hidden: Tensor, **_: Any) -> Tensor:
    return hidden


class FrozenBlocks:
    """Remembers what the first blocks of a Llama-like model give for a text, where no weight of them changes.

    Attention is causal, so that padding to the right of a text and longer texts of a batch change nothing of it.

    Args:
        model: a causal model of transformers with ``sdpa`` attention and without dropout.
        count: of blocks without an adapter.
        hidden: hidden states of texts by the bytes of their tokens, one row a token; texts that are not there are added. Models
            with equal frozen blocks can share it.
    """

    def __init__(self, model: Any, count: int, hidden: dict[bytes, Tensor]) -> None:
        self._decoder: Any = model.model
        self._blocks = list(self._decoder.layers[:count])
        self._pad = model.config.pad_token_id
        self.hidden = hidden

    @contextlib.contextmanager
    def remembered(self) -> Iterator[None]:
        """Give the model its hidden states from memory. For texts that are padded on the right, without a key-value cache."""
        hook = self._decoder.embed_tokens.register_forward_hook(self._recall)
        for block in self._blocks:
            block.forward = _unchanged
        try:
            yield
        finally:
            hook.remove()
            for block in self._blocks:
                del block.forward

    def _recall(self, _: nn.Module, args: tuple[Tensor, ...], embedded: Tensor) -> Tensor:
        found = torch.zeros_like(embedded)
        for k, row in enumerate(args[0]):
            tokens = row[: int((row != self._pad).nonzero().max()) + 1]
            key = tokens.cpu().numpy().tobytes()
            if key not in self.hidden:
                self.hidden[key] = self._compute(embedded[k, : len(tokens)].detach())
            found[k, : len(tokens)] = self.hidden[key]
        return found

    @torch.no_grad()
    def _compute(self, embedded: Tensor) -> Tensor:
        hidden = embedded[None]
        positions = torch.arange(len(embedded), device=embedded.device)[None]
        rotation = self._decoder.rotary_emb(hidden, position_ids=positions)
        for block in self._blocks:
            hidden = type(block).forward(
                block, hidden, attention_mask=None, position_embeddings=rotation, position_ids=positions
            )
        return hidden[0]
