"""Buffers that forward passes change: they belong to the client, beside its method's state.

A module may update a buffer in ``forward``: a moving average, the vectors of ``spectral_norm``, a counter.
Methods know nothing of buffers. So an engine gives every client buffers of its own, which start at the
module's values, go on from round to round, and are neither averaged nor sent. Inference begins with a copy,
so evaluation changes no later result.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from ...core.contract import Task
from ...core.tree import Params, tree_dataclass


@tree_dataclass
class StateWithBuffers:
    """What a client keeps when its forward passes have changed buffers.

    Attributes:
        state: of the method.
        buffers: that differ from the module's initial ones, by architecture and name.
    """

    state: Any
    buffers: dict[str, Params]


def install_buffers(task: Task, client_state: Any) -> tuple[Any, Task]:
    """Separate what a client keeps into the method's state and a task whose models use the client's buffers.

    Args:
        task: as the server sees it.
        client_state: the state of a method, or a :class:`StateWithBuffers`.
    """
    buffers: dict[str, Params] = {}
    if isinstance(client_state, StateWithBuffers):
        client_state, buffers = client_state.state, client_state.buffers
    if not any(a.buffers for a in task.architectures.values()):
        return client_state, task
    models = {n: a.with_buffers(buffers.get(n, {})) for n, a in task.architectures.items()}
    return client_state, dataclasses.replace(task, architectures=models)


def collect_buffers(task: Task, state: Any) -> Any:
    """What a client stores: the method's state, and the buffers that its models have changed, if any."""
    changed_buffers = {n: a.changed_buffers for n, a in task.architectures.items()}
    changed_buffers = {n: buffers for n, buffers in changed_buffers.items() if buffers}
    return StateWithBuffers(state, changed_buffers) if changed_buffers else state
