"""Where updates point: the cosine of each with the mean of the others."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from .norms import difference_norm, floats, numbers_of

UpdateTensors = Mapping[tuple[str, tuple[int, ...]], Tensor]
"""The tensors of an update, flat in float64, by path and shape."""


def update_by_place(upload: Any, down: Any, by_change: Mapping[str, bool]) -> UpdateTensors:
    """The floating-point tensors of an update.

    Args:
        upload: of the client.
        down: what it is compared with.
        by_change: whether a part is a difference from the download, by path.
    """
    found = {}
    for path, part, reference in numbers_of(upload, down):
        others = dict(floats(reference)) if by_change.get(path) and reference is not None else {}
        for place, x in floats(part):
            if isinstance(x, Tensor):
                r = others.get(place, 0.0)
                wide = x.detach().double() - (r.double() if isinstance(r, Tensor) else r)
                found[path + place, tuple(x.shape)] = wide.reshape(-1)
    return found


def cosines(updates: Callable[[int], UpdateTensors], clients: Sequence[int]) -> dict[int, float | None]:
    """The cosine of each client's update with the mean of the others, all at unit length.

    At their own length one long update would turn the mean of the others for everybody else. Where clients have
    tensors of different shapes, those are compared that others have, too.

    Args:
        updates: gives a client's update, see :func:`update_by_place`; called twice for each, so that one is in
            memory at a time.
        clients: to be compared.

    Returns:
        It by client; None if an update is zero, or there is nothing to compare it with.
    """
    sums: dict[Any, Tensor] = {}
    sizes = {}
    for client in clients:
        mine = updates(client)
        size = sizes[client] = math.hypot(*(difference_norm(t) for t in mine.values()), 0.0)
        for place, t in mine.items() if 0 < size < math.inf else ():
            sums[place] = sums[place] + t / size if place in sums else t / size
    found: dict[int, float | None] = {}
    for client in clients:
        size = sizes[client]
        if not 0 < size < math.inf:
            found[client] = None
            continue
        inner = rest = 0.0
        for place, t in updates(client).items():
            others = sums[place] - t / size
            inner += float(t @ others) / size
            rest += float(others @ others)
        # what is left of rounding where no other client has these tensors
        found[client] = inner / math.sqrt(rest) if rest > 1e-20 else None
    return found
