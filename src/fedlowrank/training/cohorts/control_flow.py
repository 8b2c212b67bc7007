"""What a method's control flow asks of a cohort: one answer where all clients agree, else a split.

A truth value, a number or an attribute of a client is asked for by reading it (``bool(t)``, ``.item()``,
``info.cluster``). If all clients of the cohort agree, the answer is theirs. If not, :class:`DifferingError` says what
each would answer; the engine divides the cohort by the answers and calls the pure function again for each part. So there
is no list of what control flow may depend on.

Outside of steps no tensor is a batch: one that is not stacked is a constant that all clients share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...core import tree
from ..stacked import RULES, Stacked, UnsupportedError, has_rows, plain, stack
from ..steps import refill
from ..tensor_rules import along_dimension

T = TypeVar("T")


class DifferingError(BaseException):
    """Control flow asks for one value, and the clients of the cohort have several.

    Attributes:
        values: of each client.
    """

    def __init__(self, values: Sequence[Any]) -> None:
        super().__init__("the clients of a cohort differ in what control flow asks for")
        self.values = list(values)

    def parts(self) -> dict[str, list[int]]:
        """The places of the clients that would answer alike."""
        found: dict[str, list[int]] = {}
        for k, value in enumerate(self.values):
            found.setdefault(repr(value), []).append(k)
        return found


def require_agreement(values: Sequence[T]) -> T:
    """The value that all clients have; raises :class:`DifferingError` if they differ."""
    first = values[0]
    if any(v != first for v in values[1:]):
        raise DifferingError(values)
    return first


class WholeNumbers(Stacked):
    """A whole number of each client, which is one where it is the key of a dict or is looked for in a set."""

    def __hash__(self) -> int:
        return hash(require_agreement(unwrap_stacked(self).tolist()))


def stack_numbers(values: Sequence[int]) -> Stacked:
    """A whole number of each client ``[K]``, to compute with; float64."""
    with torch._C.DisableTorchFunctionSubclass():
        made = torch.tensor(values, dtype=torch.float64).as_subclass(WholeNumbers)
    made.lr, made.uses, made.number = None, 0, int
    return made


def refuse_numbers(value: Any) -> None:
    """Refuse a tree that holds a number of each client, in whose place a client alone has a number of Python."""
    if any(getattr(t, "number", None) for t in tree.tensors(value)):
        raise UnsupportedError("a number of each client in a state or an upload")


def count_clients(tensors: Iterable[Any]) -> int:
    """How many clients the stacked tensors among these have; at least one is stacked."""
    return next(len(unwrap_stacked(t)) for t in tensors if isinstance(t, Stacked))


def unwrap_stacked(t: Tensor) -> Tensor:
    """A tensor without its meaning of clients."""
    if not isinstance(t, Stacked):
        return t
    with torch._C.DisableTorchFunctionSubclass():
        return t.as_subclass(Tensor)


def expand_to_clients(t: Tensor, clients: int) -> Tensor:
    """The tensor of each client ``[K, ...]``; not copied where all share it."""
    return unwrap_stacked(t) if isinstance(t, Stacked) else t.expand(clients, *t.shape)


def split_clients(value: T, clients: int) -> list[T]:
    """The tree of each client."""
    columns = [expand_to_clients(t, clients).unbind() for t in tree.tensors(value)]
    return [refill(value, [column[k] for column in columns]) for k in range(clients)]


def select_clients(value: T, places: Sequence[int]) -> T:
    """The tree of some clients of a cohort."""
    index = torch.tensor(places)

    def pick(t: Tensor) -> Tensor:
        return stack(unwrap_stacked(t).index_select(0, index.to(t.device))) if isinstance(t, Stacked) else t

    return tree.map_leaves(pick, value)


def stack_clients(trees: Sequence[T]) -> T:
    """One tree for clients of one form: a tensor that is the same at all stays one that they share.

    Raises:
        UnsupportedError: if the trees differ in form.
    """
    first, form = trees[0], tree.form(trees[0])
    if any(tree.form(t) != form for t in trees[1:]):
        raise UnsupportedError("clients whose trees differ in form")
    columns = zip(*(tree.tensors(t) for t in trees), strict=True)
    return refill(first, [_share(column) for column in columns])


def _share(tensors: Sequence[Tensor]) -> Tensor:
    first = tensors[0]
    place, strides = first.data_ptr(), first.stride()
    if all(t is first or (t.data_ptr() == place and t.stride() == strides) for t in tensors[1:]):
        return first
    return stack(torch.stack(list(tensors)).detach())


# Rules of what is asked outside of steps


def _tensors(args: Any) -> Iterator[Any]:
    for a in args:
        yield from a if isinstance(a, (tuple, list)) else (a,)


def _share_constants(rule: Callable[..., Any]) -> Callable[..., Any]:
    """A rule to which, outside of steps, a tensor that is not stacked is one that all clients share."""

    def shared(*args: Any, **kwargs: Any) -> Any:
        if not has_rows():
            clients = count_clients(_tensors(args))
            args = tuple(_stretch(a, clients) for a in args)
        return rule(*args, **kwargs)

    return shared


def _stretch(a: Any, clients: int) -> Any:
    if isinstance(a, (tuple, list)) and any(isinstance(t, Tensor) for t in a):
        return [_stretch(t, clients) for t in a]
    return stack(a.expand(clients, *a.shape)) if isinstance(a, Tensor) and not isinstance(a, Stacked) else a


def _convert(t: Any, *args: Any, **kwargs: Any) -> Tensor:
    args = tuple(unwrap_stacked(a) if isinstance(a, Tensor) else a for a in args)
    return stack(plain(t).to(*args, **kwargs)) if isinstance(t, Stacked) else t.to(*args, **kwargs)


def _values(t: Any) -> list[Any]:
    """A number of each client."""
    if has_rows():
        raise UnsupportedError("control flow within a step")
    p = plain(t)
    if p.numel() != len(p):
        raise UnsupportedError("a number of a tensor with several")
    found: list[Any] = p.reshape(len(p)).tolist()
    return found


def _new_tensor(t: Any, values: Any, **more: Any) -> Tensor:
    if any(isinstance(v, Stacked) for v in _tensors((values,))):
        raise UnsupportedError("a tensor made of a number of each client")
    like = plain(t) if isinstance(t, Stacked) else t
    made: Tensor = like.new_tensor(values, **more)
    return made


def _equal(a: Any, b: Any) -> bool:
    clients = count_clients((a, b))
    left, right = expand_to_clients(a, clients), expand_to_clients(b, clients)
    if left.shape != right.shape:
        return False
    return bool(require_agreement((left == right).reshape(clients, -1).all(1).tolist()))


for _func in (torch.matmul, Tensor.matmul, torch.cat, torch.stack, torch.tensordot, torch.linalg.svd):
    RULES[_func] = _share_constants(RULES[_func])

RULES.update(
    {
        Tensor.to: _convert,
        Tensor.__bool__: lambda t: bool(require_agreement(list(map(bool, _values(t))))),
        Tensor.__int__: lambda t: int(require_agreement(list(map(int, _values(t))))),
        Tensor.__index__: lambda t: int(require_agreement(list(map(int, _values(t))))),
        Tensor.__float__: lambda t: float(require_agreement(list(map(float, _values(t))))),
        Tensor.item: lambda t: require_agreement(_values(t)),
        Tensor.tolist: lambda t: require_agreement(plain(t).tolist()),
        torch.equal: _equal,
        Tensor.equal: _equal,
        Tensor.new_zeros: lambda t, *shape, **more: plain(t).new_zeros(*shape, **more),
        Tensor.new_ones: lambda t, *shape, **more: plain(t).new_ones(*shape, **more),
        Tensor.new_tensor: _new_tensor,
        Tensor.nbytes.__get__: lambda t: t.nbytes // len(t),  # type: ignore[attr-defined]  # a getter
        Tensor.element_size: lambda t: t.element_size(),
        Tensor.is_complex: lambda t: t.is_complex(),
        Tensor.is_contiguous: lambda t, **more: plain(t).is_contiguous(**more),
        Tensor.stride: lambda t: t.stride()[1:],
    }
)
for _name in ("argmax", "argmin", "cumsum"):
    RULES[getattr(torch, _name)] = RULES[getattr(Tensor, _name)] = along_dimension(
        getattr(torch, _name), (None,)
    )
