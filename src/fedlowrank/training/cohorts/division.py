"""Calls of a pure function: once for a cohort, for parts of it, or for each client alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ..client_tensors.client_tensor import NoRuleError, without_rows
from ..client_tensors.control_flow import DifferingError
from .cohort_trainer import CohortTrainer

M = TypeVar("M")
R = TypeVar("R")

MAX_PARTS = 8
"""Maximum number of parts into which any cohort may be divided."""

MIN_CLIENTS_OF_PART = 8
"""Minimum mean number of clients of a part if there are more than :data:`MAX_PARTS` parts."""


def divide(
    members: Sequence[M],
    call_for_cohort: Callable[[Sequence[M], Any], list[R]],
    call_for_client: Callable[[M, Any], R],
    trainer: CohortTrainer | None,
    log: Callable[[str], None],
) -> list[R]:
    """Call a pure function for all members; if that fails, for parts of them or for each of them.

    The cohort is divided where control flow needs one value and the members' values differ: each part has the
    members with the same value. If an operation has no rule, or there are too many parts, the function is called
    for each member.

    Args:
        members: members of the cohort.
        call_for_cohort: function that makes one call for several members.
        call_for_client: function that makes the call for one member.
        trainer: trainer of the members, for the function; parts and single members get the answers that it gave.
            None for a function that needs no trainer.
        log: function that logs why the function is called for each member.
    """
    parts: list[list[int]] = []
    reason: str | None = None
    try:
        with without_rows():
            return call_for_cohort(members, trainer)
    except DifferingError as differs:
        parts = [*differs.parts().values()]
    except NoRuleError as error:
        reason = str(error)
    except Exception as error:  # noqa: BLE001 - a client alone raises the method's own error, if it is one
        reason = f"{type(error).__name__}: {error}"
    if is_worth_dividing(len(parts), len(members)):
        return _divide_parts(members, parts, call_for_cohort, call_for_client, trainer, log)
    if len(parts) > 1:
        reason = f"{len(members)} clients give {len(parts)} answers to its control flow"
    if reason is not None:
        log(f"goes on with one client after another: {reason}")
    trainers = [None] * len(members) if trainer is None else trainer.split_by_client()
    return [call_for_client(*pair) for pair in zip(members, trainers, strict=True)]


def is_worth_dividing(part_count: int, member_count: int) -> bool:
    """Whether a call for each part takes less time than a call for each member.

    A call for a cohort takes as long as several calls for a single client, and a part may have to be divided again.
    So there must be few parts, or each must have many members.

    Args:
        part_count: number of parts, 0 if the cohort has none.
        member_count: number of members.
    """
    max_parts = max(MAX_PARTS, member_count // MIN_CLIENTS_OF_PART)
    return 1 < part_count < member_count and part_count <= max_parts


def _divide_parts(
    members: Sequence[M],
    parts: Sequence[Sequence[int]],
    call_for_cohort: Callable[[Sequence[M], Any], list[R]],
    call_for_client: Callable[[M, Any], R],
    trainer: CohortTrainer | None,
    log: Callable[[str], None],
) -> list[R]:
    """Call :func:`divide` for the members at the indices of each part."""
    results: list[R] = []
    for positions in parts:
        part_trainer = None if trainer is None else trainer.select(positions)
        results += divide(
            [members[k] for k in positions], call_for_cohort, call_for_client, part_trainer, log
        )
    return results
