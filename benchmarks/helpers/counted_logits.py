"""Logits of a language model only at the positions that the loss counts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn


class CountedLogits:
    """Computes the logits of training texts only where they predict a token that the loss counts; others are 0 and not read.

    With a large vocabulary and short answers the last layer is half of a step, and a loss on a CPU reads few of its rows.

    Args:
        model: a causal model of transformers.
        texts: tokens and labels ``[T]`` of all training texts, labels -100 where a token does not count.
    """

    def __init__(self, model: Any, texts: Iterable[tuple[Tensor, Tensor]]) -> None:
        self._head, self._embedding = model.lm_head, model.model.embed_tokens
        self._pad = model.config.pad_token_id
        self._counted = {self._key(tokens): (labels >= 0).roll(-1) for tokens, labels in texts}
        self._mask = torch.zeros(0, dtype=torch.bool)

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Leave the other logits out in a block of steps on these texts, which are padded on the right."""
        hook = self._embedding.register_forward_hook(self._find)
        self._head.forward = self._compute
        try:
            yield
        finally:
            hook.remove()
            del self._head.forward

    def _key(self, tokens: Tensor) -> bytes:
        return tokens[: int((tokens != self._pad).nonzero().max()) + 1].cpu().numpy().tobytes()

    def _find(self, _: nn.Module, args: tuple[Tensor, ...], __: Tensor) -> None:
        tokens = args[0]
        length = tokens.shape[1]
        self._mask = torch.stack([self._counted[self._key(row)][:length] for row in tokens]).to(tokens.device)

    def _compute(self, hidden: Tensor) -> Tensor:
        scores = type(self._head).forward(self._head, hidden[self._mask])
        return scores.new_zeros((*hidden.shape[:2], scores.shape[-1])).index_put((self._mask,), scores)
