"""Losses that average over the real examples of a batch and never over its padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..contract.model import Model
from ..contract.task import Batch
from ..errors import LossError
from ..tree import Params, map_leaves, wide_type
from .contrastive_losses import contrastive_losses


def example_losses(scores: Tensor, batch: Batch) -> Tensor:
    """Loss of each example ``[b]``, by the loss of the task; see :meth:`.losses.Loss.each`."""
    if batch.loss.couples:
        return contrastive_losses(scores, batch.loss.temperature, batch.mask, batch.client_count)
    return batch.loss.each(scores, batch.y)


def mean_loss(values: Tensor, batch: Batch) -> Tensor:
    """Mean of example losses ``[b]``, as :func:`example_losses` returns them, that a task minimizes.

    The mean is over the examples of the batch, or over tokens, pixels or class weights as the loss defines; see
    :mod:`.losses`.
    """
    if batch.loss.weigh(batch.y) is None:
        return batch.mean(values)
    total, weight = sum_losses(values, batch)
    if batch.example_weight is not None:
        # the weight of the whole batch, of which this is a part
        weight = (batch.example_weight * len(batch)).to(total.dtype)
    return (total / torch.where(weight > 0, weight, 1.0)).to(values.dtype)


def sum_losses(values: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Sum of losses ``[b, ...]`` over all labels or targets that count, and the sum of their weights.

    The quotient of these sums over a client's data is its mean loss f_k; for texts it is the mean over texts and not
    over tokens.
    """
    weights = batch.loss.weigh(batch.y)
    if weights is None:
        return batch.sum(values), batch.sum(torch.ones(len(batch.y), device=values.device))
    count, weight = weights
    values = values * count.reshape(-1, *[1] * (values.ndim - 1))
    return batch.sum(values), batch.sum(weight.to(wide_type(values.dtype)))


def task_loss(scores: Tensor, batch: Batch) -> Tensor:
    """Mean loss of a batch, which clients minimize: :func:`mean_loss` of :func:`example_losses`.

    The loss is that of the task (``batch.loss``). By default it is the cross-entropy for labels ``[b]``, ½ ‖score -
    y‖² for real targets ``[b, d]``, and for token labels ``[b, T]`` the cross-entropy of each token that counts,
    where the scores ``[b, T, V]`` at position t - 1 predict the token at t.
    """
    return mean_loss(example_losses(scores, batch), batch)


def supervised_loss(model: Model) -> Callable[..., Tensor]:
    """Loss of a model's parameters on a batch: :func:`task_loss` of its scores. Constants are ignored."""

    def loss(params: Params, batch: Batch, *_: Any) -> Tensor:
        return task_loss(model.apply(params, batch.x), batch)

    return loss


def check_loss(value: Any) -> None:
    """Raise :class:`LossError` if a loss has no gradient."""
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
    """Gradient of a risk, detached.

    Args:
        risk: function ``risk(params, batch)`` that returns a scalar.
        theta: parameters at which the gradient is taken.
        batch: batch of one client or of many.
    """
    params = map_leaves(lambda t: t.detach().requires_grad_(), theta)
    # the sum, because a batch of many clients has one risk for each client
    value = risk(params, batch).sum()
    check_loss(value)
    gradients = torch.autograd.grad(value, list(params.values()), materialize_grads=True)
    return {n: g.to_dense() if g.is_sparse else g for n, g in zip(params, gradients, strict=True)}


def cross_entropy(scores: Tensor, batch: Batch) -> Tensor:
    """Mean cross-entropy of ``scores [b, classes]`` with the labels of the batch, whatever the loss of the task is."""
    return batch.mean(functional.cross_entropy(scores, batch.y, reduction="none"))


def kl_divergence(teacher: Tensor, student: Tensor, batch: Batch) -> Tensor:
    """Mean of KL(teacher ‖ student) = Σ_j p_j log(p_j / q_j) over the examples of the batch.

    Args:
        teacher: scores (not probabilities) ``[b, classes]`` of p; detach them if p is only a target.
        student: scores ``[b, classes]`` of q.
        batch: batch whose mask separates examples from padding.
    """
    p, q = functional.log_softmax(teacher, -1), functional.log_softmax(student, -1)
    return batch.mean((p.exp() * (p - q)).sum(-1))


def soft_cross_entropy(scores: Tensor, targets: Tensor) -> Tensor:
    """-Σ_j t_j log softmax(scores)_j of each example, ``[b]``, for target probabilities t ``[b, classes]``."""
    return -(targets * functional.log_softmax(scores, -1)).sum(-1)


def square_error(a: Tensor, b: Tensor, batch: Batch) -> Tensor:
    """Mean over examples and features of (a - b)², both ``[b, d]``."""
    return batch.mean((a - b).square().mean(-1))
