"""The first blocks of a language model that have no adapter: their hidden states are computed once for each text."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence


def _unchanged(hidden: Tensor, **_: Any) -> Tensor:
    return hidden


class _Prefix:
    """Keys and values of tokens that texts have in common, by layer; the first call of a layer gives them."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys and values with those of the common tokens before them."""
        if layer not in self._known:
            self._known[layer] = keys, values
            return keys, values
        first_keys, first_values = (t.expand(len(keys), -1, -1, -1) for t in self._known[layer])
        return torch.cat([first_keys, keys], 2), torch.cat([first_values, values], 2)


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
        layers = list(self._decoder.layers)
        self._blocks, self._adapted = layers[:count], layers[count:]
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

    @torch.no_grad()
    def compute_states(self, texts: Sequence[Tensor], shared: int) -> Tensor:
        """Last hidden states ``[b, T - shared, width]`` of texts behind their first ``shared`` tokens, which all have in common.

        Attention is causal, so that the keys and values of the common tokens are computed once for all texts.
        """
        rows = [self._hidden_of(text, self._decoder.embed_tokens(text)) for text in texts]
        prefix = _Prefix()
        self._run_adapted(rows[0][None, :shared], 0, None, prefix)
        rest = pad_sequence([row[shared:] for row in rows], batch_first=True)
        size = rest.shape[1]
        seen = torch.ones(size, shared + size, dtype=torch.bool, device=rest.device).tril(shared)
        return self._decoder.norm(self._run_adapted(rest, shared, seen[None, None], prefix))

    def _run_adapted(self, hidden: Tensor, start: int, seen: Tensor | None, prefix: _Prefix) -> Tensor:
        positions = torch.arange(start, start + hidden.shape[1], device=hidden.device)[None]
        rotation = self._decoder.rotary_emb(hidden, position_ids=positions)
        for block in self._adapted:
            hidden = block(
                hidden,
                attention_mask=seen,
                position_ids=positions,
                position_embeddings=rotation,
                past_key_values=prefix,
            )
        return hidden

    def _hidden_of(self, tokens: Tensor, embedded: Tensor) -> Tensor:
        key = tokens.cpu().numpy().tobytes()
        if key not in self.hidden:
            self.hidden[key] = self._compute(embedded.detach())
        return self.hidden[key]

    def _recall(self, _: nn.Module, args: tuple[Tensor, ...], embedded: Tensor) -> Tensor:
        found = torch.zeros_like(embedded)
        for k, row in enumerate(args[0]):
            tokens = row[: int((row != self._pad).nonzero().max()) + 1]
            found[k, : len(tokens)] = self._hidden_of(tokens, embedded[k, : len(tokens)])
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
