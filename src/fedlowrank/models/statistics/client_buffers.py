"""Buffers that forward passes change; they belong to the client, beside its method's state.

A module may update a buffer in ``forward``: a moving average, the vectors of ``spectral_norm``, a counter. Methods do
not see buffers. An engine gives every client its own buffers, which start at the module's values, persist from round
to round, and are neither averaged nor sent. Inference works on a copy, so evaluation changes no later result.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from ...core.contract import Task
from ...core.tree import Params, tree_dataclass


@tree_dataclass
class StateWithBuffers:
    """A client's stored state if its forward passes have changed buffers.

    Attributes:
        state: state of the method.
        buffers: buffers that differ from the module's initial ones, by architecture and name.
    """

    state: Any
    buffers: dict[str, Params]


def install_buffers(task: Task, client_state: Any) -> tuple[Any, Task]:
    """Separate a client's stored state into the method's state and a task whose models use the client's buffers.

    Args:
        task: task as the server sees it.
        client_state: state of a method, or a :class:`StateWithBuffers`.
    """
    buffers: dict[str, Params] = {}
    if isinstance(client_state, StateWithBuffers):
        client_state, buffers = client_state.state, client_state.buffers
    if not any(a.buffers for a in task.architectures.values()):
        return client_state, task
    models = {n: a.with_buffers(buffers.get(n, {})) for n, a in task.architectures.items()}
    return client_state, dataclasses.replace(task, architectures=models)


def collect_buffers(task: Task, state: Any) -> Any:
    """Combine the method's state with the buffers that the client's models have changed, if any, for storage."""
    changed_buffers = {n: a.changed_buffers for n, a in task.architectures.items()}
    changed_buffers = {n: buffers for n, buffers in changed_buffers.items() if buffers}
    return StateWithBuffers(state, changed_buffers) if changed_buffers else state
