"""Operations whose result has a size that depends on values: the places of nonzero entries, and entries by place or by mask.

How many entries a client has is asked of it as control flow asks for a number: where all clients of a cohort have as many,
the result is theirs, and else the cohort is divided by the counts; see :mod:`.control_flow`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..stacked import RULES, Stacked, UnsupportedError, has_rows, plain, stack
from .control_flow import count_clients, expand_to_clients, require_agreement

_RULE_OF_STEPS = RULES[Tensor.__getitem__]


def _outside_of_steps() -> None:
    if has_rows():
        raise UnsupportedError("a size that depends on values, within a step")


def _count_of_all(mask: Tensor) -> int:
    """How many entries of a mask ``[K, ...]`` every client has."""
    return int(require_agreement(mask.flatten(1).sum(1).tolist()))


def _nonzero(t: Any, *, as_tuple: bool = False) -> Stacked:
    _outside_of_steps()
    if as_tuple:
        raise UnsupportedError("places as a tuple")
    p = plain(t)
    n = _count_of_all(p != 0)
    return stack(p.nonzero()[:, 1:].reshape(len(p), n, p.ndim - 1))


def _entries(t: Any, index: Any) -> Any:
    """``t[index]`` where an index is a tensor outside of steps: places or a mask, then perhaps None."""
    parts = index if isinstance(index, tuple) else (index,)
    if has_rows() or not any(isinstance(i, Tensor) for i in parts):
        return _RULE_OF_STEPS(t, index)
    first, more = parts[0], parts[1:]
    if not isinstance(first, Tensor) or any(i is not None for i in more):
        raise UnsupportedError("an index that is not places or a mask, and None behind it")
    clients = count_clients((t, first))
    p, i = expand_to_clients(t, clients), expand_to_clients(first, clients)
    if i.dtype == torch.bool:
        if p.shape[: i.ndim] != i.shape:
            raise UnsupportedError("a mask of another shape")
        n = _count_of_all(i)
        found, kept = p[i].reshape(clients, n, *p.shape[i.ndim :]), 2
    else:
        found, kept = p[torch.arange(clients, device=p.device).reshape(-1, *[1] * (i.ndim - 1)), i], i.ndim
    return stack(found[(*[slice(None)] * kept, *more)])


def _masked_scatter(t: Any, mask: Any, source: Any) -> Stacked:
    _outside_of_steps()
    clients = count_clients((t, mask, source))
    p, m, values = (expand_to_clients(v, clients) for v in (t, mask, source))
    if p.shape != m.shape or _count_of_all(m) != values[0].numel():
        raise UnsupportedError("a mask of another shape or with fewer entries than values")
    return stack(p.masked_scatter(m, values.contiguous()))


def _index_fill(t: Any, dim: int, index: Any, value: Any) -> Stacked:
    _outside_of_steps()
    clients = count_clients((t, index))
    p, i = expand_to_clients(t, clients), expand_to_clients(index, clients)
    if p.ndim != 2 or i.ndim != 2 or dim not in (0, -1) or isinstance(value, Tensor):
        raise UnsupportedError("places in a tensor of several dimensions")
    return stack(p.scatter(1, i, value))


def _index_add(t: Any, dim: int, index: Any, source: Any, *, alpha: float = 1) -> Stacked:
    _outside_of_steps()
    clients = count_clients((t, index, source))
    p, i, values = (expand_to_clients(v, clients) for v in (t, index, source))
    rows = p.shape[1]
    if dim != 0 or i.ndim != 2 or p.ndim < 2 or bool(((i < 0) | (i >= rows)).any()):
        raise UnsupportedError("places that are not rows")
    first = rows * torch.arange(clients, device=p.device)[:, None]
    whole = p.flatten(0, 1).index_add(0, (i + first).flatten(), values.flatten(0, 1), alpha=alpha)
    return stack(whole.unflatten(0, (clients, rows)))


def _argsort(t: Any, dim: int = -1, descending: bool = False, stable: bool = False) -> Stacked:
    _outside_of_steps()
    p = plain(t)
    if p.ndim != 2 or dim not in (0, -1):
        raise UnsupportedError("an order in a tensor of several dimensions")
    return stack(torch.argsort(p, dim=1, descending=descending, stable=stable))


RULES.update(
    {
        Tensor.__getitem__: _entries,
        **{
            getattr(place, name): rule
            for name, rule in (
                ("nonzero", _nonzero),
                ("masked_scatter", _masked_scatter),
                ("index_fill", _index_fill),
                ("index_add", _index_add),
                ("argsort", _argsort),
            )
            for place in (torch, Tensor)
        },
    }
)
