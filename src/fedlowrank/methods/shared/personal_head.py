"""Hooks and training of methods that treat the body and the head of a model as two parts: FedPer, FedRep and FedBABU.

A method takes a hook as its own: ``server_init = initial_body``.
"""

from __future__ import annotations

from torch import Tensor

from ...core.contract import AnyMethod, Batch, ClientInfo, ClientModel, ClientView, Task
from ...core.learning.batch_losses import task_loss
from ...core.learning.optimizer import Optimizer, drop_groups
from ...core.tree import Params, leaves


def initial_body(method: AnyMethod, task: Task) -> Params:
    """φ^0, the body of the common initial weights."""
    model = task.common_model(method.title)
    return model.body_of(model.initial)


def initial_head(method: AnyMethod, client: ClientInfo, task: Task) -> Params:
    """h_k, the head of the common initial weights."""
    model = task.model(client)
    return model.head_of(model.initial)


def body_with_head(method: AnyMethod, state: Params, down: Params, view: ClientView) -> ClientModel:
    """The body received with the client's own head."""
    return ClientModel(down | state)


def train_part(
    trained_part: Params, frozen_part: Params, pass_name: str, optimizer: Optimizer, view: ClientView
) -> Params:
    """Train one part of the client's model in a pass in which the other part is frozen.

    Args:
        trained_part: parameters that are trained, by name.
        frozen_part: all other parameters of the model.
        pass_name: name of the pass.
        optimizer: optimizer of the pass.
        view: what the client may use.

    Returns:
        The trained part.
    """
    model = view.model

    def loss(trained: Params, batch: Batch, frozen: Params) -> Tensor:
        return task_loss(model.apply(trained | frozen, batch.x), batch)

    frozen_paths, trained_paths = ([path for path, _ in leaves(part)] for part in (frozen_part, trained_part))
    optimizer = drop_groups(optimizer, frozen_paths, trained_paths)
    return view.train(loss, trained_part, pass_name, optimizer, constants=(frozen_part,))
