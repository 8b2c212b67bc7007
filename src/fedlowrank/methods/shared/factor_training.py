"""Local training of LoRA factors, which all LoRA methods share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor

from ...adapters.lora.adapted_layers import AdaptedLayer
from ...adapters.lora.lora_factors import LoRA, lora_of
from ...core.contract import Batch, ClientView, EngineModel, PaddedDimensions
from ...core.errors import TaskError
from ...core.learning.batch_losses import task_loss
from ...core.learning.optimizer import Optimizer
from ...core.tree import Params, join_path, map_leaves
from ...core.tree import leaves as tree_leaves
from ...linalg.pair import Factors
from .lora_family import Leaves, insert_leaves

Penalty = Callable[[Leaves], Tensor]
"""A term of the loss that depends on the trained leaves alone."""


def train_leaves(
    view: ClientView,
    start: Leaves,
    scale: float,
    optimizer: Optimizer,
    *,
    fixed_leaves: Leaves | None = None,
    frozen_factors: Factors | None = None,
    moved_weights: Params | None = None,
    penalty: Penalty | None = None,
) -> Leaves:
    """Train leaves in the pass ``local``; the loss is that of the model with W_0 + s·B A.

    Args:
        view: view of the client.
        start: initial values of the leaves that are trained.
        scale: scale s of the product.
        optimizer: optimizer of the pass.
        fixed_leaves: further leaves of the model, which are not trained, such as A in FFA-LoRA.
        frozen_factors: factors of a second adapter that is not trained, see :func:`~.lora_family.insert_leaves`.
        moved_weights: weights W_0 that differ from the initial ones, by the name of their parameter.
        penalty: function of the trained leaves whose value is added to the loss.

    Returns:
        The trained leaves.

    Raises:
        TaskError: if no factor changed, see :func:`check_factors_changed`.
    """
    model, lora = view.model, lora_of(view.model)
    # A layer whose scale differs is trained in the module's own factors.
    rescaled_layers = {name: layer for name, layer in lora.layers.items() if layer.ratio != 1}

    def loss(
        trained_leaves: Leaves,
        batch: Batch,
        fixed_leaves: Leaves,
        frozen_factors: Factors,
        moved_weights: Params,
        client_scale: Tensor | None,
    ) -> Tensor:
        trained_leaves = _scale_layers(trained_leaves, rescaled_layers, 1)
        all_leaves = fixed_leaves | trained_leaves
        s = lora_of(model).scale if client_scale is None else client_scale
        params = insert_leaves(model, all_leaves, s, frozen_factors, moved_weights)
        value = task_loss(model.apply(params, batch.x), batch)
        return value if penalty is None else value + penalty(trained_leaves)

    # A tensor and not a number, so that clients with unequal scales are trained together.
    first_b = next(iter(start["b"].values()))
    client_scale = None if scale == lora.scale else first_b.new_tensor(scale, dtype=torch.float64)
    frozen_factors = frozen_factors or {}
    constants = fixed_leaves or {}, frozen_factors, moved_weights or {}, client_scale
    start = _scale_layers(start, rescaled_layers, -1)
    end: Leaves = view.train(
        loss, start, "local", optimizer, constants=constants, padded=_rank_dimensions(frozen_factors)
    )
    check_factors_changed(view, start, end, optimizer, fixed_leaves or {})
    return _scale_layers(end, rescaled_layers, 1)


def check_factors_changed(
    view: ClientView, start: Leaves, end: Leaves, optimizer: Optimizer, fixed_leaves: Leaves
) -> None:
    """Check that training changed a factor, unless the learning rate of all factors or their gradient is 0.

    Args:
        view: view of the client.
        start: leaves before the pass ``local``.
        end: leaves after the pass.
        optimizer: optimizer of the pass.
        fixed_leaves: further leaves of the model, which are not trained.

    Raises:
        TaskError: if no factor changed, because no gradient reaches them.
    """
    if (
        _has_learning_rate(view, start, optimizer)
        and not _has_changed_factor(lora_of(view.model), start, end)
        and not _reads_factors(view.task.architectures[view.model.name], end, fixed_leaves)
    ):
        raise TaskError(
            f"{view.info.title}, round {view.round + 1}: training changed no LoRA factor. No gradient "
            "reaches them; is the adapted layer used in the forward pass, and is the adapter active?"
        )


def _rank_dimensions(frozen_factors: Factors) -> PaddedDimensions:
    """The dimensions that differ between clients: the ranks of trained, fixed and frozen factors."""
    rank_axes = {"a": 0, "b": 1}
    leaf_axes = {f"/{factor}": axis for factor, axis in rank_axes.items()}
    frozen_axes = {
        f"{join_path('', name)}/{factor}": axis
        for name in frozen_factors
        for factor, axis in rank_axes.items()
    }
    # axes of the constants of train_leaves: of the fixed leaves and of the frozen factors
    return PaddedDimensions(leaf_axes, (leaf_axes, frozen_axes))


def _has_learning_rate(view: ClientView, start: Leaves, optimizer: Optimizer) -> bool:
    """Whether the learning rate of some factor is not 0 in some step of this round."""
    paths = [path for path, _ in tree_leaves(start)]
    rates = zip(paths, optimizer.rates(paths, view.round).lr, strict=True)
    if not any(lr for path, lr in rates if path.startswith(("/a/", "/b/"))):
        return False
    # a schedule over rounds or over steps may have ended
    steps, schedule = view.steps("local"), optimizer.local_schedule
    return any(schedule.scale(t, steps, view.round) for t in range(steps))


def _scale_layers(leaves: Leaves, layers: Mapping[str, AdaptedLayer], power: Literal[1, -1]) -> Leaves:
    """Multiply the factor that begins at zero by a power of its layer's ratio, in some layers."""
    if not layers:
        return leaves

    def scale_factor(factor: str, name: str, t: Tensor) -> Tensor:
        layer = layers.get(name)
        if layer is None or layer.zero != factor:
            return t
        return t * (layer.ratio if power == 1 else 1 / layer.ratio)

    return leaves | {
        factor: {name: scale_factor(factor, name, t) for name, t in leaves[factor].items()}
        for factor in ("a", "b")
        if factor in leaves
    }


def _has_changed_factor(lora: LoRA, start: Leaves, end: Leaves) -> bool:
    """Whether one of the factors that are zero at the start changed, or a layer has none that is zero.

    A layer has none after an earlier round that changed it. The other factor is no evidence: weight decay moves it without
    a gradient, and a large factor does not change if a step is below its rounding.
    """
    zero_factors = [
        (layer.zero, name)
        for name, layer in lora.layers.items()
        if name in start.get(layer.zero, {}) and not start[layer.zero][name].any()
    ]
    return len(zero_factors) < len(lora.layers) or any(
        not torch.equal(start[factor][name], end[factor][name]) for factor, name in zero_factors
    )


def _reads_factors(model: EngineModel, leaves: Leaves, fixed_leaves: Leaves) -> bool:
    """Whether the scores of the example are computed from a factor, so that a loss of zero has left all as they were."""
    leaves = map_leaves(lambda t: t.detach().clone().requires_grad_(), leaves)
    with torch.enable_grad():
        params = insert_leaves(model, fixed_leaves | leaves, lora_of(model).scale, {}, {})
        scores = model.apply(params, model.example)
    factors = [t for factor in ("a", "b") for t in leaves.get(factor, {}).values()]
    gradients = torch.autograd.grad(scores.sum(), factors, allow_unused=True) if scores.requires_grad else ()
    return any(g is not None for g in gradients)
