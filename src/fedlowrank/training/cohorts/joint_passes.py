"""One pass for several cohorts, whose clients differ in padded dimensions such as the LoRA rank.

A cohort is called by itself, because its trees have a form of their own. Where it asks for a pass whose request declares
dimensions that zeros may pad (:class:`fedlowrank.core.contract.training_request.PaddedDimensions`), the call ends; the passes
of all cohorts are trained as one, and each cohort is called again with its part of the answer
(:mod:`.cohort_trainer` explains why a second call trains nothing again).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from ...core import tree
from ...core.contract.training_request import Request
from ..captured_variables import code_of
from ..stacked import Stacked, UnsupportedError, stack, without_rows
from ..steps import refill
from .cohort_trainer import CohortTrainer, PassAskedError, VerbAnswer
from .control_flow import DifferingError, expand_to_clients, unwrap_stacked
from .division import divide

M = TypeVar("M")
R = TypeVar("R")


def divide_jointly(
    cohorts: Sequence[tuple[Sequence[M], CohortTrainer]],
    together: Callable[[Sequence[M], Any], list[R]],
    alone: Callable[[M, Any], R],
    log: Callable[[str], None],
) -> list[R]:
    """Call ``together`` for each cohort, as :func:`.division.divide` does, and train their passes as one.

    Args:
        cohorts: the members of each and their trainer, which asks for passes.
        together: gives the results of some members.
        alone: gives the result of one.
        log: tells why members go on one by one.
    """
    found: list[R] = []
    waiting = [*cohorts]
    while waiting:
        asked: list[tuple[Sequence[M], CohortTrainer, Request]] = []
        parts: list[tuple[Sequence[M], CohortTrainer]] = []
        for members, trainer in waiting:
            try:
                with without_rows():
                    found += together(members, trainer)
            except PassAskedError as pass_:
                asked.append((members, trainer, pass_.request))
            except DifferingError as differs:
                own = differs.parts().values()
                if len(own) == 1:
                    # all would answer alike, and yet are not equal, as NaN is not equal to itself
                    found += divide(members, together, alone, trainer.again(), log)
                    continue
                parts += [([members[k] for k in places], trainer.part(places)) for places in own]
            except (Exception, UnsupportedError):  # noqa: BLE001 - divide finds out what it means
                found += divide(members, together, alone, trainer.again(), log)
        answers = _train_jointly([t for _, t, _ in asked], [r for _, _, r in asked])
        waiting = parts + [
            (members, trainer.again([answer], joins=True))
            for (members, trainer, _), answer in zip(asked, answers, strict=True)
        ]
    return found


def _train_jointly(trainers: Sequence[CohortTrainer], requests: Sequence[Request]) -> list[VerbAnswer]:
    """The answers to the requests of several cohorts, trained together as far as they differ in padded dimensions alone.

    Args:
        trainers: one a cohort.
        requests: what each asks for.
    """
    kinds: dict[Any, list[int]] = {}
    for place, request in enumerate(requests):
        kinds.setdefault(_kind(request), []).append(place)
    answers: dict[int, VerbAnswer] = {}
    for places in kinds.values():
        some = [trainers[k] for k in places], [requests[k] for k in places]
        found = _as_one(*some) if len(places) > 1 else None
        found = found or [trainer.answer(request) for trainer, request in zip(*some, strict=True)]
        answers |= zip(places, found, strict=True)
    return [answers[k] for k in range(len(requests))]


def _as_one(trainers: Sequence[CohortTrainer], requests: Sequence[Request]) -> list[VerbAnswer] | None:
    """The answers by one pass; None where the pass cannot be batched over clients."""
    sizes = [len(t.locals_) for t in trainers]
    clients = [(c, place) for c, size in enumerate(sizes) for place in range(size)]
    locals_ = [trainers[c].locals_[place] for c, place in clients]
    # clients with the most steps first
    order = sorted(range(len(clients)), key=lambda k: -len(locals_[k].data.examples))
    first = requests[0]

    def join(values: Sequence[Any], axes: Mapping[str, int]) -> Any:
        columns = zip(_axes(values[0], axes), *map(tree.tensors, values), strict=True)
        return refill(values[0], [_join(ts, sizes, axis, order) for axis, *ts in columns])

    whole = dataclasses.replace(
        first,
        start=join([r.start for r in requests], first.padded.start),
        constants=join([r.constants for r in requests], first.padded.constants),
    )
    joint = trainers[0].beside([locals_[k] for k in order])
    answer = joint.batched(whole, [requests[clients[k][0]] for k in order])
    if answer is None:
        return None
    for k, (_, error) in joint.errors.items():
        c, place = clients[order[k]]
        trainers[c].errors.setdefault(place, (len(trainers[c].answers), error))
    back = torch.tensor(order).argsort()
    rows = [unwrap_stacked(t)[back.to(t.device)] for t in tree.tensors(answer.value)]
    found, a = [], 0
    for request, size in zip(requests, sizes, strict=True):
        like = tree.tensors(request.start)
        cut = [_cut(t[a : a + size], _shape(one)) for t, one in zip(rows, like, strict=True)]
        found.append(VerbAnswer(refill(request.start, [stack(t.contiguous()) for t in cut])))
        a += size
    return found


def _kind(request: Request) -> Any:
    """What requests must have in common: all but their tensors and the sizes of padded dimensions."""
    padded = request.padded
    return (
        code_of(request.loss),
        request.name,
        repr(request.optimizer),
        _form(request.start, padded.start),
        _form(request.constants, padded.constants),
    )


def _form(value: Any, axes: Mapping[str, int]) -> Any:
    """The form of a tree but for the sizes of padded dimensions."""
    sizes = []
    for axis, t in zip(_axes(value, axes), tree.tensors(value), strict=True):
        shape = [*_shape(t)]
        if axis is not None:
            shape[axis] = -1
        sizes.append((t.dtype, *shape))
    return tuple(path for path, _ in tree.leaves(value)), tuple(sizes)


def _shape(t: Tensor) -> torch.Size:
    """Of one client."""
    return unwrap_stacked(t).shape[1:] if isinstance(t, Stacked) else t.shape


def _axes(value: Any, axes: Mapping[str, int]) -> list[int | None]:
    """The padded dimension of each tensor of a tree, None for those that have none."""

    def axis(path: str) -> int | None:
        return next((a for part, a in axes.items() if path == part or path.startswith(f"{part}/")), None)

    return [axis(path) for path, _ in tree.leaves(value)]


def _join(tensors: Sequence[Tensor], sizes: Sequence[int], axis: int | None, order: Sequence[int]) -> Tensor:
    """One tensor of each cohort as one of all clients, or as the one that all share."""
    if all(t is tensors[0] and not isinstance(t, Stacked) for t in tensors):
        return tensors[0]
    parts = [expand_to_clients(t, size) for t, size in zip(tensors, sizes, strict=True)]
    if axis is not None:
        most = max(p.shape[axis + 1] for p in parts)
        parts = [_pad(p, axis + 1, most) for p in parts]
    return stack(torch.cat(parts)[torch.tensor(order, device=parts[0].device)])


def _pad(t: Tensor, axis: int, size: int) -> Tensor:
    behind = [0, 0] * (t.ndim - 1 - axis)
    return functional.pad(t, [*behind, 0, size - t.shape[axis]])


def _cut(t: Tensor, shape: Sequence[int]) -> Tensor:
    """Tensors ``[K, ...]`` without what was padded."""
    return t[(slice(None), *(slice(n) for n in shape))]
