"""Directions of updates: the cosine of each with the mean of the others."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from .norms import difference_norm, iterate_floats, iterate_parts

UpdateTensors = Mapping[tuple[str, tuple[int, ...]], Tensor]
"""The tensors of an update, flattened in float64, by path and shape."""


def collect_update(upload: Any, down: Any, by_change: Mapping[str, bool]) -> UpdateTensors:
    """Collect the floating-point tensors of an update.

    Args:
        upload: upload of the client.
        down: download with which it is compared.
        by_change: whether a part is a difference from the download, by path.
    """
    update = {}
    for path, part, reference in iterate_parts(upload, down):
        references = dict(iterate_floats(reference)) if by_change.get(path) and reference is not None else {}
        for leaf_path, x in iterate_floats(part):
            if isinstance(x, Tensor):
                r = references.get(leaf_path, 0.0)
                difference = x.detach().double() - (r.double() if isinstance(r, Tensor) else r)
                update[path + leaf_path, tuple(x.shape)] = difference.reshape(-1)
    return update


def compute_cosines(
    get_update: Callable[[int], UpdateTensors], client_ids: Sequence[int]
) -> dict[int, float | None]:
    """Compute the cosine of each client's update with the mean of the others, all at unit length.

    Without scaling to unit length, one long update would determine the mean that the other clients are compared with. If
    clients have tensors of different shapes, only those that other clients also have are compared.

    Args:
        get_update: function that returns a client's update, see :func:`collect_update`; called twice for each client, so that
            only one update is in memory at a time.
        client_ids: identifiers of the clients to compare.

    Returns:
        The cosine of each client; None if an update is zero, or there is nothing to compare it with.
    """
    sums: dict[Any, Tensor] = {}
    norms = {}
    for client_id in client_ids:
        update = get_update(client_id)
        norm = norms[client_id] = math.hypot(*(difference_norm(t) for t in update.values()), 0.0)
        for key, t in update.items() if 0 < norm < math.inf else ():
            sums[key] = sums[key] + t / norm if key in sums else t / norm
    cosine_of: dict[int, float | None] = {}
    for client_id in client_ids:
        norm = norms[client_id]
        if not 0 < norm < math.inf:
            cosine_of[client_id] = None
            continue
        inner_product = squared_norm = 0.0
        for key, t in get_update(client_id).items():
            sum_of_others = sums[key] - t / norm
            inner_product += float(t @ sum_of_others) / norm
            squared_norm += float(sum_of_others @ sum_of_others)
        # only rounding errors remain if no other client has these tensors
        cosine_of[client_id] = inner_product / math.sqrt(squared_norm) if squared_norm > 1e-20 else None
    return cosine_of
