"""Proximal steps after an optimizer's step: which optimizers they suit, and their step size.

A step w ← prox of c R at w - η m has a fixed point where c ∂R + η m contains 0. There the running sum of gradients
m ← β m + g is m = g / (1 - β), also with Nesterov's momentum. So c = η λ / (1 - β) minimizes f + λ R, whereas c = η
λ would minimize f + (1 - β) λ R.
"""

from __future__ import annotations

from ...core.errors import ConfigError
from ...core.learning.optimizer import SGD, Optimizer


def check_proximal_optimizer(optimizer: Optimizer, title: str, weight: str) -> None:
    """Refuse an optimizer whose steps, followed by a prox with one threshold, minimize another objective.

    Args:
        optimizer: optimizer of the pass with the prox.
        title: title of the method.
        weight: name of the setting that is the weight of the penalty.

    Raises:
        ConfigError: for AdamW, and for groups with other learning rates.
    """
    if not isinstance(optimizer, SGD):
        raise ConfigError(
            f"{title} thresholds all entries of a weight by the learning rate times {weight}, and optimizer.kind = "
            f"{optimizer.kind!r} moves each entry at a rate of its own, so that {weight} would mean another penalty for "
            f"each. Use optimizer.kind = 'sgd', with or without momentum, or {weight} = 0"
        )
    if groups_with_lr := sorted(name for name, group in optimizer.groups.items() if group.lr is not None):
        raise ConfigError(
            f"{title} thresholds all weights by the one learning rate times {weight}, and optimizer.groups gives "
            f"{', '.join(groups_with_lr)} another learning rate. Leave lr out of optimizer.groups (weight_decay may stay), or "
            f"set {weight} = 0"
        )


def compute_proximal_step_size(optimizer: Optimizer, lr: float) -> float:
    """Compute the factor η / (1 - β) on the weight of a penalty, for a step at learning rate ``lr``, η."""
    return lr / (1 - optimizer.momentum) if isinstance(optimizer, SGD) else lr
