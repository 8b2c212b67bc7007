"""What a server does with the mean of the replies: take it, or step towards it by an optimizer.

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
    """What a server's optimizer keeps from round to round.

    Attributes:
        tensors: its running means, in float32 for parameters of half precision.
        count: steps taken.
    """

    tensors: list[list[Tensor]]
    count: int


def initial_optimizer_state() -> ServerOptimizerState:
    """Before the first step."""
    return ServerOptimizerState([], 0)


def check_server_optimizer(path: str, optimizer: Optimizer, title: str) -> None:
    """Refuse settings of a client's optimizer that a server's does not read.

    Args:
        path: of the setting.
        optimizer: of the server.
        title: of the method.

    Raises:
        ConfigError: naming the setting.
    """
    refuse_keep(path, optimizer, title, "the server's optimizer always goes on from round to round")
    if not optimizer.local_schedule.is_constant:
        raise ConfigError(
            f"{title}: {path}.local_schedule does nothing, for the server takes one step a round. Use {path}.schedule"
        )


def server_step(
    optimizer: Optimizer, old: T, mean: T, state: ServerOptimizerState, round: int
) -> tuple[T, ServerOptimizerState]:
    """One step on the pseudo-gradient old - mean, computed in float32 for parameters of half precision.

    Args:
        optimizer: of the server; SGD with lr 1 and nothing else takes the mean, bit for bit.
        old: the server's tree.
        mean: of the replies, a tree like it; it may be of a wider type.
        state: of the optimizer.
        round: counted from 0, for its schedule.
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
    """Old minus mean; 0 where they differ by rounding alone, which adaptive optimizers would enlarge."""
    gap = old - mean
    return torch.where(gap.abs() <= 4 * torch.finfo(gap.dtype).eps * old.abs(), 0.0, gap)
