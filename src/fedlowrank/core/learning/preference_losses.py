"""Losses of pairs of responses, of which people prefer one.

A model gives two scores for each pair. Their difference is the log-odds that the first response is preferred, as in a
classification of two classes, so accuracy is the share of pairs in the right order:

- ``dpo``: the scores are implicit rewards β (log π(y|x) - log π_ref(y|x)).
- ``orpo``: the scores are log-odds log p/(1 - p), where p is the geometric mean of the probabilities of a response's tokens.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

OF_PAIRS = "dpo", "orpo"
"""Names of these losses."""


def dpo_losses(rewards: Tensor, preferred: Tensor, label_smoothing: float) -> Tensor:
    """-(1 - ε) log σ(Δ) - ε log σ(-Δ) of each pair ``[b]``, where Δ is the preferred reward minus the other.

    Args:
        rewards: of both responses ``[b, 2]``.
        preferred: which one is preferred, 0 or 1 ``[b]``.
        label_smoothing: ε in [0, 1/2), the share of preferences that are wrong.

    Source:
        Rafailov et al., "Direct Preference Optimization", NeurIPS 2023, arXiv:2305.18290, eq. 7. With ε: Mitchell, "A note on
        DPO with noisy preferences" (2023), eq. 3.
    """
    margin = _margin(rewards, preferred)
    right = functional.softplus(-margin)
    return right if label_smoothing == 0 else right + label_smoothing * margin


def orpo_losses(log_odds: Tensor, preferred: Tensor, odds_ratio_weight: float) -> Tensor:
    """-log p - λ log σ(Δ) of each pair ``[b]``: p of the preferred response, Δ its log-odds minus those of the other.

    Args:
        log_odds: of both responses ``[b, 2]``, so that p = σ(log_odds).
        preferred: which one is preferred, 0 or 1 ``[b]``.
        odds_ratio_weight: λ ≥ 0.

    Source:
        Hong et al., "ORPO: Monolithic Preference Optimization without Reference Model", EMNLP 2024, arXiv:2403.07691, eq. 6, 7.
    """
    own = log_odds.gather(1, preferred[:, None])[:, 0]
    return functional.softplus(-own) + odds_ratio_weight * functional.softplus(-_margin(log_odds, preferred))


def _margin(scores: Tensor, preferred: Tensor) -> Tensor:
    """The score of the preferred response minus that of the other."""
    return scores.gather(1, preferred[:, None])[:, 0] - scores.gather(1, 1 - preferred[:, None])[:, 0]
