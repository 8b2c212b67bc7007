"""Rules of operations whose result has a size that depends on values, such as the indices of nonzero entries.

The number of entries of a client is read as control flow reads a number (:mod:`.control_flow`): if it is the same
for all clients of a cohort, the result has a slice for each; if not, the engine divides the cohort by these
numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .client_tensor import ClientTensor, NoRuleError, has_rows, to_client_tensor, use_tensor
from .control_flow import count_slices, expand_to_clients, require_agreement
from .tensor_rules import TENSOR_RULES


def _require_outside_of_steps() -> None:
    if has_rows():
        raise NoRuleError("a size that depends on values, within a step")


def _count_of_all(mask: Tensor) -> int:
    """Number of true entries of a mask ``[K, ...]``, which must be the same for every client."""
    return int(require_agreement(mask.flatten(1).sum(1).tolist()))


def _nonzero(t: Any, *, as_tuple: bool = False) -> ClientTensor:
    _require_outside_of_steps()
    if as_tuple:
        raise NoRuleError("indices as a tuple")
    p = use_tensor(t)
    n = _count_of_all(p != 0)
    return to_client_tensor(p.nonzero()[:, 1:].reshape(len(p), n, p.ndim - 1))


def _entries(t: Any, index: Any) -> Any:
    """The rule of ``t[index]`` outside of steps, where index is a tensor of indices or a mask, optionally followed by None."""
    indices = index if isinstance(index, tuple) else (index,)
    if has_rows() or not any(isinstance(i, Tensor) for i in indices):
        return TENSOR_RULES[Tensor.__getitem__](t, index)
    first_index, new_dims = indices[0], indices[1:]
    if not isinstance(first_index, Tensor) or any(i is not None for i in new_dims):
        raise NoRuleError("an index that is neither indices nor a mask, and None behind it")
    client_count = count_slices((t, first_index))
    p, i = expand_to_clients(t, client_count), expand_to_clients(first_index, client_count)
    if i.dtype == torch.bool:
        if p.shape[: i.ndim] != i.shape:
            raise NoRuleError("a mask of another shape")
        n = _count_of_all(i)
        entries, ndim = p[i].reshape(client_count, n, *p.shape[i.ndim :]), 2
    else:
        client_index = torch.arange(client_count, device=p.device).reshape(-1, *[1] * (i.ndim - 1))
        entries, ndim = p[client_index, i], i.ndim
    return to_client_tensor(entries[(*[slice(None)] * ndim, *new_dims)])


def _masked_scatter(t: Any, mask: Any, source: Any) -> ClientTensor:
    _require_outside_of_steps()
    client_count = count_slices((t, mask, source))
    p, m, values = (expand_to_clients(v, client_count) for v in (t, mask, source))
    if p.shape != m.shape or _count_of_all(m) != values[0].numel():
        raise NoRuleError("a mask of another shape or with fewer entries than values")
    return to_client_tensor(p.masked_scatter(m, values.contiguous()))


def _index_fill(t: Any, dim: int, index: Any, value: Any) -> ClientTensor:
    _require_outside_of_steps()
    client_count = count_slices((t, index))
    p, i = expand_to_clients(t, client_count), expand_to_clients(index, client_count)
    if p.ndim != 2 or i.ndim != 2 or dim not in (0, -1) or isinstance(value, Tensor):
        raise NoRuleError("indices in a tensor of several dimensions")
    return to_client_tensor(p.scatter(1, i, value))


def _index_add(t: Any, dim: int, index: Any, source: Any, *, alpha: float = 1) -> ClientTensor:
    _require_outside_of_steps()
    client_count = count_slices((t, index, source))
    p, i, values = (expand_to_clients(v, client_count) for v in (t, index, source))
    rows = p.shape[1]
    if dim != 0 or i.ndim != 2 or p.ndim < 2 or bool(((i < 0) | (i >= rows)).any()):
        raise NoRuleError("indices that are not rows")
    offsets = rows * torch.arange(client_count, device=p.device)[:, None]
    sums = p.flatten(0, 1).index_add(0, (i + offsets).flatten(), values.flatten(0, 1), alpha=alpha)
    return to_client_tensor(sums.unflatten(0, (client_count, rows)))


def _argsort(t: Any, dim: int = -1, descending: bool = False, stable: bool = False) -> ClientTensor:
    _require_outside_of_steps()
    p = use_tensor(t)
    if p.ndim != 2 or dim not in (0, -1):
        raise NoRuleError("an order in a tensor of several dimensions")
    return to_client_tensor(torch.argsort(p, dim=1, descending=descending, stable=stable))


VARYING_SIZE_RULES: dict[Any, Callable[..., Any]] = {
    Tensor.__getitem__: _entries,
    **{
        getattr(namespace, name): rule
        for name, rule in (
            ("nonzero", _nonzero),
            ("masked_scatter", _masked_scatter),
            ("index_fill", _index_fill),
            ("index_add", _index_add),
            ("argsort", _argsort),
        )
        for namespace in (torch, Tensor)
    },
}
"""The rule of each function whose result has a size that depends on values."""
