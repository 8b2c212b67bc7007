"""Hooks of methods with a shared body and personal heads, FedPer and FedRep.

A method takes these functions as its own: ``server_init = initial_body``.
"""

from __future__ import annotations

from ...core.contract import AnyMethod, ClientInfo, ClientModel, ClientView, Task
from ...core.tree import Params


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
