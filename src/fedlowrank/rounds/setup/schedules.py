"""Finds the schedules of learning rates in settings, and refuses those that end before the run does."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator
from typing import Any

from ...core.contract import AnyMethod
from ...core.errors import ConfigError
from ...core.learning.optimizer import LocalSchedule, Schedule


def check_schedules(method: AnyMethod, rounds: int, example_counts: Collection[int] = ()) -> None:
    """Raise ConfigError if a schedule has set the learning rate of all clients to 0 before the last round.

    See :func:`find_ended_schedules`.
    """
    for name, schedule in find_ended_schedules(method, rounds, example_counts):
        raise ConfigError(
            f"{name} has fallen to a learning rate of 0 before the last of {rounds} rounds, which would train nothing. Set "
            f"its rounds to run.rounds, or its floor above 0. It is {schedule}"
        )


def find_ended_schedules(
    method: AnyMethod, rounds: int, example_counts: Collection[int] = ()
) -> list[tuple[str, Schedule | LocalSchedule]]:
    """Find the schedules that have set the learning rate of all clients to 0 before the last round, with their names.

    Args:
        method: method of the run.
        rounds: number of rounds of the run.
        example_counts: numbers of training examples of the clients, if they are known.
    """
    sizes = {count for count in example_counts if count}
    step_counts = [p.steps_over(size) for p in method.local_passes().values() for size in sizes]
    least_steps = min(step_counts, default=0)
    return [
        (name, schedule)
        for name, schedule in find_schedules(method)
        if schedule.is_over(rounds - 1, least_steps)
    ]


def find_schedules(settings: Any, path: str = "") -> Iterator[tuple[str, Schedule | LocalSchedule]]:
    """Yield the schedules among settings and nested settings, each with its dotted name."""
    if isinstance(settings, (Schedule, LocalSchedule)):
        yield path, settings
    elif dataclasses.is_dataclass(settings):
        for field in dataclasses.fields(settings):
            yield from find_schedules(getattr(settings, field.name), f"{path}.{field.name}".lstrip("."))
