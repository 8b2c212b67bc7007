"""Losses of pairs of responses to one prompt: DPO and ORPO.

Scores are ``[b, 2]``, one number for each response of a pair; see :mod:`fedlowrank.language.objectives`:

- ``dpo``: log π(y|x) - log π_ref(y|x), summed over the tokens of the response.
- ``orpo``: log π(y|x), the mean over the tokens of the response.

Labels ``[b]`` are the index of the chosen response, 0 or 1.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

PREFERENCE_LOSSES = "dpo", "orpo"
"""Names of the losses of pairs of responses."""

RESPONSE_MASK, REFERENCE = "response_mask", "reference"
"""Further inputs of a pair: the mask of tokens that count, and the log-probabilities by the base model."""


def dpo_losses(log_ratios: Tensor, chosen_index: Tensor, beta: float, label_smoothing: float) -> Tensor:
    """-(1 - ε) log σ(βΔ) - ε log σ(-βΔ) of each pair ``[b]``, Δ the difference of log-ratios.

    Args:
        log_ratios: log π(y|x) - log π_ref(y|x) of both responses, ``[b, 2]``.
        chosen_index: index of the chosen response, 0 or 1, ``[b]``.
        beta: coefficient β > 0.
        label_smoothing: probability ε in [0, 0.5) that a pair is labeled the wrong way round.

    Source:
        Rafailov et al. 2023, arXiv:2305.18290, eq. 7; for ε Mitchell 2023, "A note on DPO with noisy preferences"
        (cDPO).
    """
    margin = beta * difference_of_chosen(log_ratios, chosen_index)
    values = -functional.logsigmoid(margin)
    if not label_smoothing:
        return values
    return (1 - label_smoothing) * values - label_smoothing * functional.logsigmoid(-margin)


def orpo_losses(log_means: Tensor, chosen_index: Tensor, odds_ratio_weight: float) -> Tensor:
    """Negative log-likelihood of the chosen response plus λ times the odds-ratio loss, of each pair ``[b]``.

    Args:
        log_means: log p, the mean log-probability of the tokens of both responses, ``[b, 2]``.
        chosen_index: index of the chosen response, 0 or 1, ``[b]``.
        odds_ratio_weight: weight λ of the odds-ratio loss.

    Source:
        Hong et al. 2024, arXiv:2403.07691, eq. 6 and 7: -log p_c - λ log σ(log odds_c - log odds_r) with the odds p/(1 - p).
    """
    likelihood = log_means.gather(1, chosen_index[:, None]).squeeze(1)
    ratio = difference_of_chosen(log_odds_of(log_means), chosen_index)
    return -likelihood - odds_ratio_weight * functional.logsigmoid(ratio)


def log_odds_of(log_p: Tensor) -> Tensor:
    """Compute log(p / (1 - p)) from log p, finite for p = 1."""
    # p = 1 occurs only by rounding, and then log(1 - p) and its derivative would be infinite
    log_p = log_p.clamp(max=-torch.finfo(log_p.dtype).eps)
    return log_p - torch.log(-torch.expm1(log_p))


def difference_of_chosen(scores: Tensor, chosen_index: Tensor) -> Tensor:
    """Score of the chosen response minus that of the other one, ``[b]``, for scores ``[b, 2]``."""
    difference = scores[:, 0] - scores[:, 1]
    return torch.where(chosen_index == 0, difference, -difference)


def mix_preferences(scores: Tensor, log_shares: Tensor, beta: float | None) -> Tensor:
    """Scores ``[b, 2]`` of a mixture of C models, from the scores of each model.

    For ``dpo`` it mixes the probabilities that a response is preferred, softmax(β scores); for ``orpo`` it mixes the
    probabilities of tokens, exp(scores).

    Args:
        scores: scores of each model, ``[b, C, 2]``.
        log_shares: logarithms of the shares of the models, ``[C]``.
        beta: coefficient β of ``dpo``; None for ``orpo``.
    """
    log_shares = log_shares[:, None]
    if beta is None:
        return (scores + log_shares).logsumexp(1)
    return ((beta * scores).log_softmax(-1) + log_shares).logsumexp(1) / beta
