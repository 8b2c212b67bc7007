"""Statistics of each class that clients of different architectures exchange, such as mean outputs or prototypes."""

from __future__ import annotations

from torch import Tensor

from ...core.contract import ClientInfo, Task
from ...core.errors import TaskError


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


def check_class_scores(title: str, task: Task) -> None:
    """Refuse models without one score for each class, which only a loss of the user's own can train.

    Args:
        title: title of the method, for messages.
        task: task with the clients' models.

    Raises:
        TaskError: if a model has fewer scores than there are classes.
    """
    for name, model in sorted(task.architectures.items() if task.loss.is_custom else ()):
        shape = [*model.probe(model.example).shape]
        if len(shape) != 2 or shape[1] < task.classes:
            raise TaskError(
                f"{title} needs one score for each class, and model {name} makes {shape} of one example, but there are "
                f"{task.classes} classes. Give the model {task.classes} outputs and the loss one score for each, or choose "
                "another method"
            )


def count_outputs(title: str, task: Task) -> int:
    """Count the outputs of the clients' models, which a method averages or compares.

    Raises:
        TaskError: if models have other numbers of outputs.
    """
    counts = {name: m.probe(m.example).shape[-1] for name, m in sorted(task.architectures.items())}
    if len(set(counts.values())) > 1:
        counts_text = ", ".join(f"{name} has {count}" for name, count in counts.items())
        raise TaskError(
            f"{title} needs models with equally many outputs, and {counts_text}. Give each model one output a class, "
            f"{task.classes}"
        )
    return next(iter(counts.values()))


def check_class_labels(title: str, labels: Tensor, classes: int, client: ClientInfo) -> None:
    """Refuse labels of a client's statistics that are no class, or that name a class twice.

    Over a network a client could send any labels: a class that it names twice would count twice.

    Args:
        title: title of the method, for messages.
        labels: label of each row of the statistics ``[m]``.
        classes: number of classes.
        client: client that sent them.

    Raises:
        TaskError: if a label is out of range or occurs twice.
    """
    seen_labels: set[int] = set()
    for label in labels.tolist():
        if not 0 <= label < classes:
            raise TaskError(
                f"{title}: client {client.id} sent class {label} of {classes}, which count from 0"
            )
        if label in seen_labels:
            raise TaskError(f"{title}: client {client.id} sent class {label} twice")
        seen_labels.add(label)
