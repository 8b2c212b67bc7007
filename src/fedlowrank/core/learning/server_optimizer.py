"""How a server uses the mean of the replies: it takes the mean, or steps towards it by an optimizer.

Reddi et al., "Adaptive Federated Optimization", arXiv:2003.00295: the gradient is the old value minus the
mean.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from .. import tree
from ..errors import ConfigError
from ..tree import tree_dataclass
from .optimizer import SGD, Optimizer, clip, refuse_keep

T = TypeVar("T")


@tree_dataclass
class ServerOptimizerState:
    """State of a server's optimizer, kept from round to round.

    Attributes:
        tensors: running means of the optimizer, in float32 for half-precision parameters.
        count: number of steps taken.
    """

    tensors: list[list[Tensor]]
    count: int


def initial_optimizer_state() -> ServerOptimizerState:
    """State of the optimizer before the first step."""
    return ServerOptimizerState([], 0)


def check_server_optimizer(path: str, optimizer: Optimizer, title: str) -> None:
    """Refuse settings of a client's optimizer that a server's optimizer does not read.

    Args:
        path: path of the setting.
        optimizer: optimizer of the server.
        title: title of the method.

    Raises:
        ConfigError: if such a setting is used; the message names it.
    """
    refuse_keep(path, optimizer, title, "the server's optimizer always goes on from round to round")
    if not optimizer.local_schedule.is_constant:
        raise ConfigError(
            f"{title}: {path}.local_schedule does nothing, for the server takes one step a round. Use {path}.schedule"
        )


def refuse_memory(path: str, optimizer: Optimizer, title: str, reason: str) -> None:
    """Refuse a server's optimizer that remembers earlier rounds, where their gradients are those of other parameters.

    Args:
        path: path of the setting.
        optimizer: optimizer of the server.
        title: title of the method.
        reason: reason why the method cannot use what is remembered.

    Raises:
        ConfigError: if the optimizer is AdamW, or SGD with momentum.
    """
    if not isinstance(optimizer, SGD) or optimizer.momentum:
        raise ConfigError(
            f"{title}: {path} may be plain SGD only, because {reason}. Leave {path}.momentum and kind out"
        )


def server_step(
    optimizer: Optimizer, old: T, mean: T, state: ServerOptimizerState, round: int
) -> tuple[T, ServerOptimizerState]:
    """Take one step on the pseudo-gradient old - mean, in float32 for half-precision parameters.

    Args:
        optimizer: optimizer of the server; SGD with lr 1 and no other settings returns the mean, bit for bit.
        old: tree of the server before the step.
        mean: mean of the replies, a tree like ``old``; it may be of a wider type.
        state: state of the optimizer.
        round: index of the round, from 0, for the optimizer's schedule.
    """
    if isinstance(optimizer, SGD) and optimizer == SGD(lr=1.0):
        return tree.cast_like(mean, old), state
    wide_tree = tree.widen(old)
    params = [t.detach().clone() for _, t in tree.leaves(wide_tree)]
    paths = [path for path, _ in tree.leaves(old)]
    mean_by_path = dict(tree.leaves(tree.widen(mean)))
    gradient = [_moved(p, mean_by_path[path]) for path, p in zip(paths, params, strict=True)]
    if optimizer.clip is not None:
        gradient = clip(gradient, optimizer.clip)
    kept_tensors = [[t.clone() for t in ts] for ts in state.tensors]
    with torch.no_grad():
        optimizer.step(params, gradient, kept_tensors, optimizer.rates(paths, round), state.count)
    tensor_iterator = iter(params)
    return tree.map_leaves(lambda t: next(tensor_iterator).to(t.dtype), old), ServerOptimizerState(
        kept_tensors, state.count + 1
    )


def _moved(old: Tensor, mean: Tensor) -> Tensor:
    """Old minus mean; 0 where they differ only by rounding, because adaptive optimizers would enlarge such differences."""
    gap = old - mean
    return torch.where(gap.abs() <= 4 * torch.finfo(gap.dtype).eps * old.abs(), 0.0, gap)
