"""Data-dependent control flow in a method that is called once for many clients.

Control flow reads a truth value, a number or an attribute of a client (``bool(t)``, ``.item()``, ``info.cluster``).
If all clients have the same value, the function continues with it. If not, :class:`DifferingError` carries the
value of each client; the engine divides the cohort by these values and calls the pure function again for each part.
So control flow may depend on any value.

Outside of steps there are no batches: an ordinary tensor is a constant that all clients share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...core import tree
from ..steps import refill
from .client_tensor import ClientTensor, NoRuleError, has_rows, to_client_tensor, use_tensor, wrap_tensor
from .tensor_rules import TENSOR_RULES, along_dimension

T = TypeVar("T")


class DifferingError(BaseException):
    """Control flow needs one value, but the values of the cohort's clients differ.

    Attributes:
        values: value of each client.
    """

    def __init__(self, values: Sequence[Any]) -> None:
        super().__init__("the clients of a cohort differ in what control flow asks for")
        self.values = list(values)

    def parts(self) -> dict[str, list[int]]:
        """The indices of the clients with equal values, by the ``repr`` of the value."""
        positions: dict[str, list[int]] = {}
        for k, value in enumerate(self.values):
            positions.setdefault(repr(value), []).append(k)
        return positions


def require_agreement(values: Sequence[T]) -> T:
    """Return the value that all clients have; raises :class:`DifferingError` if the values differ."""
    first_value = values[0]
    if any(v != first_value for v in values[1:]):
        raise DifferingError(values)
    return first_value


class ClientIntegers(ClientTensor):
    """An integer of each client, which is hashable where all clients have the same one."""

    def __hash__(self) -> int:
        return hash(require_agreement(unwrap_client_tensor(self).tolist()))


def stack_numbers(values: Sequence[int]) -> ClientTensor:
    """Stack an integer of each client into a tensor ``[K]``, in float64 so that functions can compute with it."""
    return wrap_tensor(torch.tensor(values, dtype=torch.float64), ClientIntegers, number=int)


def refuse_numbers(value: Any) -> None:
    """Raise NoRuleError if a tree holds a tensor of integers where a single client's tree holds a Python number."""
    if any(getattr(t, "number", None) for t in tree.tensors(value)):
        raise NoRuleError("a number of each client in a state or an upload")


def count_slices(tensors: Iterable[Any]) -> int:
    """Count the clients (K) of the client tensors among these arguments, of which there is at least one."""
    return next(len(unwrap_client_tensor(t)) for t in tensors if isinstance(t, ClientTensor))


def unwrap_client_tensor(t: Tensor) -> Tensor:
    """Return the ordinary tensor of a client tensor, or an ordinary tensor unchanged; no use is counted."""
    return t.plain if isinstance(t, ClientTensor) else t


def expand_to_clients(t: Tensor, client_count: int) -> Tensor:
    """Expand a tensor to an ordinary tensor ``[K, ...]`` with a slice for each client; shared tensors are not copied."""
    return unwrap_client_tensor(t) if isinstance(t, ClientTensor) else t.expand(client_count, *t.shape)


def split_clients(value: T, client_count: int) -> list[T]:
    """Split a tree into the trees of the clients."""
    columns = [expand_to_clients(t, client_count).unbind() for t in tree.tensors(value)]
    return [refill(value, [column[k] for column in columns]) for k in range(client_count)]


def select_clients(value: T, positions: Sequence[int]) -> T:
    """Select the clients at some indices of a cohort from a tree."""
    index = torch.tensor(positions)

    def pick(t: Tensor) -> Tensor:
        return (
            to_client_tensor(unwrap_client_tensor(t).index_select(0, index.to(t.device)))
            if isinstance(t, ClientTensor)
            else t
        )

    return tree.map_leaves(pick, value)


def stack_clients(trees: Sequence[T]) -> T:
    """Join the trees of clients into one tree of client tensors; a tensor that all clients share stays as it is.

    Raises:
        NoRuleError: if the trees differ in form.
    """
    first_tree, form = trees[0], tree.form(trees[0])
    if any(tree.form(t) != form for t in trees[1:]):
        raise NoRuleError("clients whose trees differ in form")
    columns = zip(*(tree.tensors(t) for t in trees), strict=True)
    return refill(first_tree, [_share(column) for column in columns])


def _share(tensors: Sequence[Tensor]) -> Tensor:
    first_tensor = tensors[0]
    address, strides = first_tensor.data_ptr(), first_tensor.stride()
    if all(t is first_tensor or (t.data_ptr() == address and t.stride() == strides) for t in tensors[1:]):
        return first_tensor
    return to_client_tensor(torch.stack(list(tensors)).detach())


# Rules of operations outside of steps


def _tensors(args: Any) -> Iterator[Any]:
    for a in args:
        yield from a if isinstance(a, (tuple, list)) else (a,)


def _share_constants(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a rule so that, outside of steps, it treats an ordinary tensor as a constant that all clients share."""

    def shared(*args: Any, **kwargs: Any) -> Any:
        if not has_rows():
            client_count = count_slices(_tensors(args))
            args = tuple(_expand(a, client_count) for a in args)
        return rule(*args, **kwargs)

    return shared


def _expand(a: Any, client_count: int) -> Any:
    if isinstance(a, (tuple, list)) and any(isinstance(t, Tensor) for t in a):
        return [_expand(t, client_count) for t in a]
    return (
        to_client_tensor(a.expand(client_count, *a.shape))
        if isinstance(a, Tensor) and not isinstance(a, ClientTensor)
        else a
    )


def _convert(t: Any, *args: Any, **kwargs: Any) -> Tensor:
    args = tuple(unwrap_client_tensor(a) if isinstance(a, Tensor) else a for a in args)
    return (
        to_client_tensor(use_tensor(t).to(*args, **kwargs))
        if isinstance(t, ClientTensor)
        else t.to(*args, **kwargs)
    )


def _values(t: Any) -> list[Any]:
    """The number of each client in a tensor with one number a client."""
    if has_rows():
        raise NoRuleError("control flow within a step")
    p = use_tensor(t)
    if p.numel() != len(p):
        raise NoRuleError("a number of a tensor with several")
    numbers: list[Any] = p.reshape(len(p)).tolist()
    return numbers


def _new_tensor(t: Any, values: Any, **options: Any) -> Tensor:
    if any(isinstance(v, ClientTensor) for v in _tensors((values,))):
        raise NoRuleError("a tensor made of a number of each client")
    source = use_tensor(t) if isinstance(t, ClientTensor) else t
    tensor: Tensor = source.new_tensor(values, **options)
    return tensor


def _equal(a: Any, b: Any) -> bool:
    client_count = count_slices((a, b))
    left, right = expand_to_clients(a, client_count), expand_to_clients(b, client_count)
    if left.shape != right.shape:
        return False
    return bool(require_agreement((left == right).reshape(client_count, -1).all(1).tolist()))


_SHARING_FUNCTIONS = (torch.matmul, Tensor.matmul, torch.cat, torch.stack, torch.tensordot, torch.linalg.svd)
"""Functions whose operands may be constants that all clients share."""

CONTROL_FLOW_RULES: dict[Any, Callable[..., Any]] = {
    **{func: _share_constants(TENSOR_RULES[func]) for func in _SHARING_FUNCTIONS},
    **{
        getattr(namespace, name): along_dimension(getattr(torch, name), (None,))
        for name in ("argmax", "argmin", "cumsum")
        for namespace in (torch, Tensor)
    },
    Tensor.to: _convert,
    Tensor.__bool__: lambda t: bool(require_agreement(list(map(bool, _values(t))))),
    Tensor.__int__: lambda t: int(require_agreement(list(map(int, _values(t))))),
    Tensor.__index__: lambda t: int(require_agreement(list(map(int, _values(t))))),
    Tensor.__float__: lambda t: float(require_agreement(list(map(float, _values(t))))),
    Tensor.item: lambda t: require_agreement(_values(t)),
    Tensor.tolist: lambda t: require_agreement(use_tensor(t).tolist()),
    torch.equal: _equal,
    Tensor.equal: _equal,
    Tensor.new_zeros: lambda t, *shape, **options: use_tensor(t).new_zeros(*shape, **options),
    Tensor.new_ones: lambda t, *shape, **options: use_tensor(t).new_ones(*shape, **options),
    Tensor.new_tensor: _new_tensor,
    Tensor.nbytes.__get__: lambda t: t.nbytes // len(t),  # type: ignore[attr-defined]  # a getter
    Tensor.element_size: lambda t: t.element_size(),
    Tensor.is_complex: lambda t: t.is_complex(),
    Tensor.is_contiguous: lambda t, **options: use_tensor(t).is_contiguous(**options),
    Tensor.stride: lambda t: t.stride()[1:],
}
"""The rule of each function that control flow uses; they replace those of :data:`.tensor_rules.TENSOR_RULES`."""
