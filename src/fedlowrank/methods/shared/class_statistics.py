"""Statistics of each class that clients of different architectures exchange, such as mean outputs or prototypes."""

from __future__ import annotations

from torch import Tensor

from ...core.contract import Task


def zero_rows_per_class(title: str, task: Task, width: int) -> Tensor:
    """Create a row of zeros for each class ``[classes, width]``, in the type in which all architectures exchange numbers.

    Args:
        title: title of the method, for messages.
        task: task with the clients' models.
        width: length of a row.

    Raises:
        TaskError: if architectures have parameters of different types.
    """
    parameter = next(iter(task.model(task.clients[0]).initial.values()))
    return parameter.new_zeros(task.classes, width, dtype=task.common_type(title))
