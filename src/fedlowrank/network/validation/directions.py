"""Directions of updates: the cosine of each with the mean of the others."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from .norms import difference_norm, iterate_floats, iterate_parts

UpdateTensors = Mapping[tuple[str, tuple[int, ...]], Tensor]
"""The tensors of an update, flat in float64, by path and shape."""


def collect_update(upload: Any, down: Any, by_change: Mapping[str, bool]) -> UpdateTensors:
    """The floating-point tensors of an update.

    Args:
        upload: of the client.
        down: what it is compared with.
        by_change: whether a part is a difference from the download, by path.
    """
    update = {}
    for path, part, reference in iterate_parts(upload, down):
        references = dict(iterate_floats(reference)) if by_change.get(path) and reference is not None else {}
        for place, x in iterate_floats(part):
            if isinstance(x, Tensor):
                r = references.get(place, 0.0)
                wide = x.detach().double() - (r.double() if isinstance(r, Tensor) else r)
                update[path + place, tuple(x.shape)] = wide.reshape(-1)
    return update


def compute_cosines(
    updates: Callable[[int], UpdateTensors], clients: Sequence[int]
) -> dict[int, float | None]:
    """The cosine of each client's update with the mean of the others, all at unit length.

    At their own length one long update would turn the mean of the others for everybody else. Where clients have
    tensors of different shapes, those are compared that others have, too.

    Args:
        updates: gives a client's update, see :func:`collect_update`; called twice for each, so that one is in
            memory at a time.
        clients: to be compared.

    Returns:
        The cosine of each client; None if an update is zero, or there is nothing to compare it with.
    """
    sums: dict[Any, Tensor] = {}
    sizes = {}
    for client in clients:
        update = updates(client)
        size = sizes[client] = math.hypot(*(difference_norm(t) for t in update.values()), 0.0)
        for place, t in update.items() if 0 < size < math.inf else ():
            sums[place] = sums[place] + t / size if place in sums else t / size
    cosine_of: dict[int, float | None] = {}
    for client in clients:
        size = sizes[client]
        if not 0 < size < math.inf:
            cosine_of[client] = None
            continue
        inner = rest = 0.0
        for place, t in updates(client).items():
            sum_of_others = sums[place] - t / size
            inner += float(t @ sum_of_others) / size
            rest += float(sum_of_others @ sum_of_others)
        # what is left of rounding where no other client has these tensors
        cosine_of[client] = inner / math.sqrt(rest) if rest > 1e-20 else None
    return cosine_of
