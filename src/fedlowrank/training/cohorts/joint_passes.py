"""One pass for several cohorts, whose clients differ in padded dimensions such as the LoRA rank.

A function is called for each cohort separately, because the trees of each cohort have another form. A call ends
where it requests a pass with dimensions that may be padded with zeros
(:class:`fedlowrank.core.contract.training_request.PaddedDimensions`). The passes of all cohorts are trained as one, and the
function is called again for each cohort, with its part of the answer
(:mod:`.cohort_trainer` explains why a second call does not train again).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from ...core import tree
from ...core.contract.training_request import PaddedDimensions, Request
from ..captured_variables import code_of
from ..client_tensors.client_tensor import ClientTensor, NoRuleError, to_client_tensor, without_rows
from ..client_tensors.control_flow import DifferingError, expand_to_clients, unwrap_client_tensor
from ..steps import refill
from .cohort_trainer import CohortTrainer, PassAskedError, TrainerAnswer
from .division import divide

M = TypeVar("M")
R = TypeVar("R")


def divide_jointly(
    cohorts: Sequence[tuple[Sequence[M], CohortTrainer]],
    call_for_cohort: Callable[[Sequence[M], Any], list[R]],
    call_for_client: Callable[[M, Any], R],
    log: Callable[[str], None],
) -> list[R]:
    """Call a pure function for each cohort, as :func:`.division.divide` does, and train their passes as one.

    Args:
        cohorts: members of each cohort and their trainer, which requests passes.
        call_for_cohort: function that makes one call for several members.
        call_for_client: function that makes the call for one member.
        log: function that logs why the function is called for each member.
    """
    results: list[R] = []
    queue = [*cohorts]
    while queue:
        requests: list[tuple[Sequence[M], CohortTrainer, Request]] = []
        parts: list[tuple[Sequence[M], CohortTrainer]] = []
        for members, trainer in queue:
            try:
                with without_rows():
                    results += call_for_cohort(members, trainer)
            except PassAskedError as pass_:
                requests.append((members, trainer, pass_.request))
            except DifferingError as differs:
                position_groups = differs.parts().values()
                if len(position_groups) == 1:
                    # the values have the same representation and yet differ, as NaN does not equal itself
                    results += divide(members, call_for_cohort, call_for_client, trainer.make_replay(), log)
                    continue
                parts += [
                    ([members[k] for k in positions], trainer.select(positions))
                    for positions in position_groups
                ]
            except (Exception, NoRuleError):  # noqa: BLE001 - divide meets it again, and handles it
                results += divide(members, call_for_cohort, call_for_client, trainer.make_replay(), log)
        answers = _train_jointly([t for _, t, _ in requests], [r for _, _, r in requests])
        queue = parts + [
            (members, trainer.make_replay([answer], joins=True))
            for (members, trainer, _), answer in zip(requests, answers, strict=True)
        ]
    return results


def _train_jointly(trainers: Sequence[CohortTrainer], requests: Sequence[Request]) -> list[TrainerAnswer]:
    """Train the passes of several cohorts; requests that differ only in padded dimensions become one pass.

    Args:
        trainers: trainer of each cohort.
        requests: request of each cohort.
    """
    positions_by_kind: dict[Any, list[int]] = {}
    for position, request in enumerate(requests):
        positions_by_kind.setdefault(_kind_of(request), []).append(position)
    answers: dict[int, TrainerAnswer] = {}
    for positions in positions_by_kind.values():
        group = [trainers[k] for k in positions], [requests[k] for k in positions]
        group_answers = _train_as_one(*group) if len(positions) > 1 else None
        group_answers = group_answers or [
            trainer.answer(request) for trainer, request in zip(*group, strict=True)
        ]
        answers |= zip(positions, group_answers, strict=True)
    return [answers[k] for k in range(len(requests))]


def _train_as_one(
    trainers: Sequence[CohortTrainer], requests: Sequence[Request]
) -> list[TrainerAnswer] | None:
    """Train the passes of several cohorts as one; None where this pass cannot be batched over clients."""
    sizes = [len(t.client_trainers) for t in trainers]
    members = [(c, position) for c, size in enumerate(sizes) for position in range(size)]
    locals_ = [trainers[c].client_trainers[position] for c, position in members]
    # clients with the most steps first
    order = sorted(range(len(members)), key=lambda k: -len(locals_[k].data.examples))
    first_request = requests[0]

    def join(values: Sequence[Any], axes: Mapping[str, int]) -> Any:
        columns = zip(_axes(values[0], axes), *map(tree.tensors, values), strict=True)
        return refill(values[0], [_join(ts, sizes, axis, order) for axis, *ts in columns])

    joint_request = dataclasses.replace(
        first_request,
        start=join([r.start for r in requests], first_request.padded.start),
        constants=join([r.constants for r in requests], _axes_of_constants(first_request.padded)),
    )
    joint_trainer = trainers[0].for_other_clients([locals_[k] for k in order])
    answer = joint_trainer.train_batched(joint_request, [requests[members[k][0]] for k in order])
    if answer is None:
        return None
    for k, divergence in joint_trainer.errors.items():
        c, position = members[order[k]]
        own_divergence = dataclasses.replace(divergence, answer_count=len(trainers[c].answers))
        trainers[c].errors.setdefault(position, own_divergence)
    inverse_order = torch.tensor(order).argsort()
    rows = [unwrap_client_tensor(t)[inverse_order.to(t.device)] for t in tree.tensors(answer.value)]
    answers, offset = [], 0
    for request, size in zip(requests, sizes, strict=True):
        templates = tree.tensors(request.start)
        unpadded_tensors = [
            _remove_padding(t[offset : offset + size], _shape(template))
            for t, template in zip(rows, templates, strict=True)
        ]
        answers.append(
            TrainerAnswer(refill(request.start, [to_client_tensor(t.contiguous()) for t in unpadded_tensors]))
        )
        offset += size
    return answers


def _kind_of(request: Request) -> Any:
    """Key of requests that can become one pass: all their parts but tensors and the sizes of padded dimensions."""
    padding = request.padded
    return (
        code_of(request.loss),
        request.name,
        repr(request.optimizer),
        _form(request.start, padding.start),
        _form(request.constants, _axes_of_constants(padding)),
    )


def _form(value: Any, axes: Mapping[str, int]) -> Any:
    """The form of a tree, without the sizes of padded dimensions."""
    sizes = []
    for axis, t in zip(_axes(value, axes), tree.tensors(value), strict=True):
        shape = [*_shape(t)]
        if axis is not None:
            shape[axis] = -1
        sizes.append((t.dtype, *shape))
    return tuple(path for path, _ in tree.leaves(value)), tuple(sizes)


def _shape(t: Tensor) -> torch.Size:
    """The shape of one client's tensor."""
    return unwrap_client_tensor(t).shape[1:] if isinstance(t, ClientTensor) else t.shape


def _axes_of_constants(padding: PaddedDimensions) -> dict[str, int]:
    """The padded dimensions of all constants, by the path in the tuple of constants."""
    return {
        f"/{index}{path}": axis for index, axes in enumerate(padding.constants) for path, axis in axes.items()
    }


def _axes(value: Any, axes: Mapping[str, int]) -> list[int | None]:
    """The padded dimension of each tensor of a tree; None for a tensor without one."""

    def axis(path: str) -> int | None:
        return next(
            (a for prefix, a in axes.items() if path == prefix or path.startswith(f"{prefix}/")), None
        )

    return [axis(path) for path, _ in tree.leaves(value)]


def _join(tensors: Sequence[Tensor], sizes: Sequence[int], axis: int | None, order: Sequence[int]) -> Tensor:
    """Join the tensors of cohorts into one tensor of all clients, zero-padded; a shared tensor stays as it is."""
    if all(t is tensors[0] and not isinstance(t, ClientTensor) for t in tensors):
        return tensors[0]
    stacks = [expand_to_clients(t, size) for t, size in zip(tensors, sizes, strict=True)]
    if axis is not None:
        max_size = max(p.shape[axis + 1] for p in stacks)
        stacks = [_pad(p, axis + 1, max_size) for p in stacks]
    return to_client_tensor(torch.cat(stacks)[torch.tensor(order, device=stacks[0].device)])


def _pad(t: Tensor, axis: int, size: int) -> Tensor:
    later_axes = [0, 0] * (t.ndim - 1 - axis)
    return functional.pad(t, [*later_axes, 0, size - t.shape[axis]])


def _remove_padding(t: Tensor, shape: Sequence[int]) -> Tensor:
    """Cut a padded tensor down to ``[K, *shape]``."""
    return t[(slice(None), *(slice(n) for n in shape))]
