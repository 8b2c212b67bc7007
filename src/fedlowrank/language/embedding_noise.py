"""NEFTune: adds uniform noise to token embeddings while a language model trains."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def add_embedding_noise(model: Any, alpha: float) -> None:
    """Add noise from U(-1, 1) · α/√(T d) to embeddings ``[b, T, d]`` in training, and none in evaluation.

    The noise is drawn from torch's generators, which the engine seeds for every client, round and pass.

    Args:
        model: model of ``transformers``.
        alpha: noise strength α; the paper uses 5 to 15.

    Source:
        Jain et al., "NEFTune: Noisy Embeddings Improve Instruction Finetuning", ICLR 2024, arXiv:2310.05914, Algorithm 1. T is
        the width of the batch, padding included, as in the authors' code.
    """

    def add_noise(module: torch.nn.Module, _: Any, embeddings: Tensor) -> Tensor:
        if not module.training:
            return embeddings
        bound = alpha / math.sqrt(embeddings.shape[1] * embeddings.shape[2])
        return embeddings + torch.empty_like(embeddings).uniform_(-bound, bound)

    model.get_input_embeddings().register_forward_hook(add_noise)
