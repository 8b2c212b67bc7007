"""A pure function called once for a cohort, for parts of it, or for each client alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ..stacked import UnsupportedError, without_rows
from .cohort_trainer import CohortTrainer
from .control_flow import DifferingError

M = TypeVar("M")
R = TypeVar("R")


def divide(
    members: Sequence[M],
    together: Callable[[Sequence[M], Any], list[R]],
    alone: Callable[[M, Any], R],
    trainer: CohortTrainer | None,
    log: Callable[[str], None],
) -> list[R]:
    """Call ``together`` for all members, or for parts of them wherever control flow needs one answer, or one by one.

    Args:
        members: of the cohort.
        together: gives the results of some members.
        alone: gives the result of one.
        trainer: of the members, which is handed on; parts and single clients get the answers that it gave. None
            for a function without verbs.
        log: tells why members go on one by one.
    """
    parts: dict[str, list[int]] = {}
    try:
        with without_rows():
            return together(members, trainer)
    except DifferingError as differs:
        parts = differs.parts()
    except UnsupportedError as reason:
        log(f"goes on with one client after another: {reason}")
    except Exception as error:  # noqa: BLE001 - a client alone raises the method's own error, if it is one
        log(f"goes on with one client after another: {type(error).__name__}: {error}")
    if 1 < len(parts) <= max(8, len(members) // 8) and len(parts) < len(members):
        found: list[R] = []
        for places in parts.values():
            own = None if trainer is None else trainer.part(places)
            found += divide([members[k] for k in places], together, alone, own, log)
        return found
    if len(parts) > 1:
        log(
            f"goes on with one client after another: {len(members)} clients give {len(parts)} answers to its control flow"
        )
    singles = [None] * len(members) if trainer is None else trainer.singles()
    return [alone(*pair) for pair in zip(members, singles, strict=True)]
