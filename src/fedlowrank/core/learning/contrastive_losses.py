"""The contrastive loss of pairs of texts: each anchor must find its positive among the positives of its batch.

Scores are embeddings ``[b, 2, d]`` of the anchor and the positive of each pair; see
:mod:`fedlowrank.language.objectives.text_embeddings`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

EVALUATION_BATCH = 32
"""Number of consecutive pairs that an evaluation compares with each other; the last batch of a set has the rest."""


def contrastive_losses(
    embeddings: Tensor, temperature: float, mask: Tensor | None = None, client_count: int | None = None
) -> Tensor:
    """-log softmax_j(cos(a_i, p_j) / τ)_i of each pair i ``[b]``, over the positives p_j of its batch.

    Args:
        embeddings: embeddings of anchors a and positives p, ``[b, 2, d]``.
        temperature: temperature τ > 0.
        mask: boolean mask ``[b]``, False for a pair that is padding and no negative.
        client_count: number of clients whose pairs are stacked, one client after another; each client has a batch of
            its own.

    Source:
        van den Oord et al. 2018, arXiv:1807.03748, eq. 4, with in-batch negatives (``MultipleNegativesRankingLoss`` of
        sentence-transformers with scale 1/τ).
    """
    scores = similarities(embeddings, mask, client_count) / temperature
    partners = torch.arange(scores.shape[-1], device=scores.device).expand(scores.shape[:2])
    return functional.cross_entropy(scores.flatten(0, 1), partners.flatten(), reduction="none")


def similarities(embeddings: Tensor, mask: Tensor | None = None, client_count: int | None = None) -> Tensor:
    """Cosines of every anchor with every positive of its batch, ``[K, b, b]`` for K clients; -∞ for padding."""
    unit_vectors = functional.normalize(embeddings, dim=-1).unflatten(0, (client_count or 1, -1))
    anchors, positives = unit_vectors.unbind(2)
    cosines: Tensor = anchors @ positives.mT
    if mask is None:
        return cosines
    is_pair = mask.reshape(len(cosines), 1, -1)
    # a padding pair keeps its own positive, so that its loss is finite
    is_own = torch.eye(cosines.shape[-1], dtype=torch.bool, device=cosines.device)
    return cosines.masked_fill(~(is_pair | is_own), -torch.inf)


def nearest_is_own(embeddings: Tensor) -> Tensor:
    """Whether each anchor is nearer to its own positive than to all others of the batch, ``[b]``."""
    cosines = similarities(embeddings)[0]
    own_cosines = cosines.diagonal()
    is_own = torch.eye(len(cosines), dtype=torch.bool, device=cosines.device)
    is_nearest: Tensor = (cosines.masked_fill(is_own, -torch.inf) < own_cosines[:, None]).all(1)
    return is_nearest
