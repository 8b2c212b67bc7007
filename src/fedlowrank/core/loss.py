"""Losses that average over the real examples of a batch and never over its padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .errors import LossError
from .model import Model
from .task import Batch
from .tree import Params, map

IGNORE_INDEX = -100
"""Label of a token that does not count in the loss, as in ``torch.nn.functional.cross_entropy``."""


def pointwise_loss(scores: Tensor, y: Tensor) -> Tensor:
    """The loss of each example ``[b]``.

    Cross-entropy with labels ``[b]``; ½ ‖score - y‖² with real targets ``[b, d]``; and with labels of tokens
    ``[b, T]`` the mean over the tokens that count, where the scores ``[b, T, V]`` at position t - 1 predict
    the token at t.
    """
    if y.is_floating_point():
        return (scores - y).square().flatten(1).sum(1) / 2
    if y.ndim == 2:
        targets = y[:, 1:]
        each = functional.cross_entropy(
            scores[:, :-1].transpose(1, 2), targets, ignore_index=IGNORE_INDEX, reduction="none"
        )
        return each.sum(1) / (targets >= 0).sum(1).clamp(min=1)
    return functional.cross_entropy(scores, y, reduction="none")


def task_loss(scores: Tensor, batch: Batch) -> Tensor:
    """Mean over the batch (of texts, over tokens) of :func:`pointwise_loss`, which clients minimize."""
    return batch.mean(pointwise_loss(scores, batch.y))


def supervised_loss(model: Model) -> Callable[..., Tensor]:
    """The loss of a model's parameters on a batch: :func:`task_loss` of its scores. Constants are ignored."""

    def loss(params: Params, batch: Batch, *_: Any) -> Tensor:
        return task_loss(model.apply(params, batch.x), batch)

    return loss


def check_loss(value: Any) -> None:
    """Raise :class:`LossError` if a gradient cannot be taken of a loss."""
    if not isinstance(value, Tensor):
        raise LossError(f"the loss is a {type(value).__name__}; it must be a tensor of one number")
    if value.numel() != 1:
        raise LossError(f"the loss is a tensor {list(value.shape)}; it must be one number, see Batch.mean")
    if not value.requires_grad:
        raise LossError(
            "no gradient reaches what is trained here: the loss does not depend on it. Look for detach(), "
            "torch.no_grad(), torch.inference_mode(), argmax or rounding in the model and the loss."
        )


def gradient(risk: Callable[..., Tensor], theta: Params, batch: Batch) -> Params:
    """The gradient of a risk, as a constant.

    Args:
        risk: ``risk(params, batch)``, a scalar.
        theta: parameters at which it is taken.
        batch: of one client or of many.
    """
    at = map(lambda t: t.detach().requires_grad_(), theta)
    # a sum, for of a batch of many clients the risk is one number each
    value = risk(at, batch).sum()
    check_loss(value)
    found = torch.autograd.grad(value, list(at.values()), materialize_grads=True)
    return {n: g.to_dense() if g.is_sparse else g for n, g in zip(at, found, strict=True)}


def cross_entropy(scores: Tensor, batch: Batch) -> Tensor:
    """Mean cross-entropy of ``scores [b, classes]`` with the labels of the batch."""
    return batch.mean(functional.cross_entropy(scores, batch.y, reduction="none"))


def kl_divergence(teacher: Tensor, student: Tensor, batch: Batch) -> Tensor:
    """KL(teacher ‖ student) = Σ_j p_j log(p_j / q_j), the mean over the examples of the batch.

    Args:
        teacher: scores (not probabilities) ``[b, classes]`` of p; detach them where p is only a target.
        student: scores ``[b, classes]`` of q.
        batch: tells padding from examples.
    """
    p, q = functional.log_softmax(teacher, -1), functional.log_softmax(student, -1)
    return batch.mean((p.exp() * (p - q)).sum(-1))


def soft_cross_entropy(scores: Tensor, targets: Tensor) -> Tensor:
    """-Σ_j t_j log softmax(scores)_j of each example, ``[b]``, with target probabilities ``[b, classes]``."""
    return -(targets * functional.log_softmax(scores, -1)).sum(-1)


def square_error(a: Tensor, b: Tensor, batch: Batch) -> Tensor:
    """Mean over examples and features of (a - b)², both ``[b, d]``."""
    return batch.mean((a - b).square().mean(-1))
