"""Draws clients by their sizes or losses: the draw, the weights that belong to it, and the methods that can use it.

**By size.** Client k among those that may train is drawn with probability exactly π_k = min(1, m n_k / n), m clients
in each round, without replacement: systematic sampling of clients in random order (Madow, "On the Theory of
Systematic Sampling, II", Annals of Mathematical Statistics 1949). A client with m n_k ≥ n takes part in every round,
and the rule applies to the others. A mean that a method weights by n_k is weighted by n_k / π_k instead (Horvitz and
Thompson 1952), so that its expectation is the mean over all clients, as in a round in which all take part. If no
client is in every round, all these weights are equal: with p ∝ n the plain mean is unbiased.

**By loss.** Power-of-Choice (Cho, Wang and Joshi, "Towards Understanding Biased Client Selection in Federated
Learning", AISTATS 2022, arXiv:2010.01243): d candidates are drawn by size, and the m with the highest loss train; the
server takes their plain mean. This is the variant rpow-d: the loss is the mean over the local steps of the round in
which the client trained last, so that no message is added; it may be old. A method with several passes uses the mean
of their losses. A client that was never drawn comes first, because its loss counts as infinite. A client whose reply
is lost counts with the mean of the others' losses until it replies; otherwise a client that cannot be reached would
be drawn in every round. The draw is biased on purpose: no weight compensates for it.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch

from ...core import tree
from ...core.contract import AnyMethod, ClientInfo, Each, Mean, ServerView, Task
from ...core.contract.contribution import contribution_leaves, map_contributions
from ...core.errors import TaskError
from ...training.tracing import trace_upload

_FINE = 2**53
"""Number of steps in which the random start of a systematic sample is drawn."""


_MANY = 10**6
"""Number of examples of a client in a trial: more than a batch, so that step counts that depend on it differ."""


def always_drawn(sizes: Sequence[int], count: int) -> set[int]:
    """Find the indices that are in every sample of ``count``, because of their size."""
    certain_indices: set[int] = set()
    while True:
        free_count = count - len(certain_indices)
        total = sum(n for i, n in enumerate(sizes) if i not in certain_indices)
        too_large = {
            i for i, n in enumerate(sizes) if i not in certain_indices and n and free_count * n >= total
        }
        if not too_large:
            return certain_indices
        certain_indices |= too_large


def draw_by_size(sizes: Sequence[int], count: int, generator: torch.Generator) -> list[int]:
    """Draw indices without replacement, each with a probability in proportion to its size, or 1.

    Args:
        sizes: sizes that are at least 0; an index of size 0 is never drawn.
        count: number of indices to draw; fewer are drawn if fewer have a positive size.
        generator: random generator of the draw.

    Returns:
        The indices in ascending order.
    """
    certain_indices = always_drawn(sizes, count)
    order = torch.randperm(len(sizes), generator=generator).tolist()
    start = int(torch.randint(_FINE, (), generator=generator))
    candidates, free_count = (
        [i for i in order if i not in certain_indices and sizes[i]],
        count - len(certain_indices),
    )
    if not candidates or free_count < 1:
        return sorted(certain_indices)
    # integers, because rounding could draw an index twice or one too few
    cumulative_sizes = list(accumulate(sizes[i] * free_count * _FINE for i in candidates))
    total = sum(sizes[i] for i in candidates)
    sampled_indices = {
        candidates[bisect_right(cumulative_sizes, (start + j * _FINE) * total)] for j in range(free_count)
    }
    return sorted(certain_indices | sampled_indices)


def weights_by_size(sizes: Sequence[int], count: int) -> list[int]:
    """Compute integers in proportion to n_k / π_k, the weights of a sample of :func:`draw_by_size`."""
    certain_indices = always_drawn(sizes, count)
    free_count = count - len(certain_indices)
    total = sum(n for i, n in enumerate(sizes) if i not in certain_indices)
    if not certain_indices:
        return [1] * len(sizes)
    # n_k / π_k is n_k for indices that are always drawn, and total / left for the others
    return [n * max(free_count, 1) if i in certain_indices else total for i, n in enumerate(sizes)]


def choose_by_loss(candidates: Sequence[int], losses: Mapping[int, float], count: int) -> list[int]:
    """Choose the candidates with the highest losses, the first among equal ones; those without a loss come first."""
    ranked = sorted(candidates, key=lambda i: -losses.get(i, math.inf))
    return sorted(ranked[:count])


def next_losses(
    previous_losses: Mapping[int, float], losses: Mapping[int, float], participant_ids: Sequence[int]
) -> dict[int, float]:
    """Compute the losses by which clients are drawn in the next round.

    Args:
        previous_losses: losses by which this round was drawn.
        losses: training losses of the clients that replied.
        participant_ids: identifiers of all clients of this round.
    """
    known_losses = {**previous_losses, **losses}
    missing_ids = [i for i in participant_ids if i not in losses]
    other_losses = [known_losses[i] for i in sorted(known_losses) if i not in missing_ids]
    if not other_losses:
        return known_losses
    return {**known_losses, **dict.fromkeys(missing_ids, math.fsum(other_losses) / len(other_losses))}


def check_weights(method: AnyMethod, task: Task, sampling: str) -> None:
    """Refuse a method whose weights do not suit the draw.

    A trial compares the update of one client whose examples count once with that of the same client counted three times.

    Args:
        method: method of the run.
        task: task of the run.
        sampling: name of the draw: ``size`` or ``loss``.

    Raises:
        TaskError: if the weights do not suit the draw; the message gives the reason.
    """
    if (reason := _misfit(method, task, sampling)) is not None:
        raise TaskError(
            f"run.sampling = {sampling!r}: {method.title} cannot be used with it: {reason}. Set run.sampling = 'fixed' or "
            "'poisson'."
        )


def _misfit(method: AnyMethod, task: Task, sampling: str) -> str | None:
    client, server = task.clients[0], method.server_init(task)
    upload = trace_upload(method, task, client, method.download(server, client))[0]
    if not tree.tensors(upload):
        return None
    infos = [dataclasses.replace(client, example_count=times * _MANY) for times in (1, 3)]
    contributions = [method.contribution(server, upload, info) for info in infos]
    pairs = list(
        zip(*([leaf for _, leaf in contribution_leaves(item)] for item in contributions), strict=True)
    )
    if sampling == "size" and any(isinstance(leaf, Each) for leaf, _ in pairs):
        return "its server weighs single replies by a rule of its own"
    if sampling == "size" and not all(_is_tripled(item, tripled_item) for item, tripled_item in pairs):
        return (
            "it does not weigh clients by their number of examples, so that large clients would count twice"
        )

    def total(info: ClientInfo, contribution: Any) -> Any:
        return map_contributions(
            lambda _, leaf: {info.id: leaf.value} if isinstance(leaf, Each) else leaf.value, contribution
        )

    states = [
        method.server_update(server, total(i, c), ServerView(task, 0, task.key / "sampling", [i]))
        for i, c in zip(infos, contributions, strict=True)
    ]
    if not _is_close(*states):
        return "its server needs the true number of examples of each client, and here weights stand in their place"
    return None


def _is_tripled(leaf: Any, tripled_leaf: Any) -> bool:
    """Whether the weight of a leaf is tripled."""
    if isinstance(leaf, Mean):
        return math.isclose(float(tripled_leaf.weight), 3 * float(leaf.weight), rel_tol=1e-6)
    return _is_close(tree.map_leaves(lambda t: 3 * t, leaf.value), tripled_leaf.value)


def _is_close(first: Any, second: Any) -> bool:
    pairs = zip(tree.tensors(first), tree.tensors(second), strict=True)
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in pairs)
