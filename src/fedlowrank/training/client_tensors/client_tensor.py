"""A tensor with one slice for each client, which has the interface of one client's tensor.

In a forward pass, the examples of K clients are one batch of K·B rows, so that reshaping, pooling and control flow
in a module keep their meaning. Only parameters differ by client: a :class:`ClientTensor` ``[K, ...]`` holds those
of all clients. An operation on it is looked up in a table, :data:`RULES`, whose rule applies each client's slice to
the rows of that client. An operation that is not in the table raises :class:`NoRuleError`. The rules are in
:mod:`.layer_rules`, :mod:`.tensor_rules`, :mod:`.control_flow` and :mod:`.varying_sizes`; ``__init__.py`` of this
folder collects them in the table.

An ordinary tensor with dimensions is treated as rows: its first dimension is that of the examples, client by
client, or that of the clients, as in the result of ``batch.mean``. Where there is no batch, as in ``precondition``
and ``prox``, an ordinary tensor is a constant that all clients share, see :func:`without_rows`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import resolve_name


class NoRuleError(BaseException):
    """An operation on a :class:`ClientTensor` has no rule.

    The base class is not ``Exception``, so that no ``except Exception`` of a method catches the error before the
    engine does.
    """


class ClientTensor(Tensor):
    """A tensor ``[K, ...]`` with one slice for each of K clients.

    Attributes:
        plain: ordinary tensor ``[K, ...]`` with which rules compute.
        lr: learning rate of a step that is taken in the backward pass; None where gradients are returned.
        uses: number of times that a forward pass has used the tensor.
        number: type of a client's value if that is a Python number; None if it is a tensor.
    """

    plain: Tensor
    lr: float | None
    uses: int
    number: type[int] | type[float] | None

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Apply the rule of an operation."""
        try:
            rule = RULES[func]
        except KeyError:
            raise NoRuleError(f"{_name(func)} has no rule") from None
        try:
            with torch._C.DisableTorchFunctionSubclass():
                return rule(*args, **(kwargs or {}))
        except NoRuleError as error:
            raise NoRuleError(f"{_name(func)}: {error}") from None

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # declared without cls and func
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Refuse operations that bypass the rules and read the values of all clients, such as ``torch.tensor(t)``."""
        if func is torch.ops.aten.alias.default:
            # called by as_subclass
            return func(args[0].plain)
        raise NoRuleError(f"{func} makes a tensor without clients of one with a slice for each client")


def _name(func: Any) -> str:
    return resolve_name(func) or f"{func.__module__}.{func.__name__}"


RULES: dict[Any, Callable[..., Any]] = {}
"""The rule of each function: how it applies to :class:`ClientTensor` arguments."""

W = TypeVar("W", bound=ClientTensor)

_ROWS: ContextVar[bool] = ContextVar("rows", default=True)


@contextlib.contextmanager
def without_rows() -> Iterator[None]:
    """Within this block no tensor is a batch: an ordinary tensor is a constant that all clients share."""
    token = _ROWS.set(False)
    try:
        yield
    finally:
        _ROWS.reset(token)


@contextlib.contextmanager
def with_rows() -> Iterator[None]:
    """Within this block ordinary tensors are batches, also inside a block :func:`without_rows`."""
    token = _ROWS.set(True)
    try:
        yield
    finally:
        _ROWS.reset(token)


def has_rows() -> bool:
    """Whether an ordinary tensor is treated as rows of a batch."""
    return _ROWS.get()


def to_client_tensor(t: Tensor, lr: float | None = None) -> ClientTensor:
    """Wrap a tensor ``[K, ...]`` as a :class:`ClientTensor` that shares its memory."""
    return wrap_tensor(t, ClientTensor, lr)


def wrap_tensor(t: Tensor, kind: type[W], lr: float | None = None, number: type[int] | None = None) -> W:
    """Wrap a tensor ``[K, ...]`` as an instance of a subclass of :class:`ClientTensor` that shares its memory."""
    plain = t.plain if isinstance(t, ClientTensor) else t
    with torch._C.DisableTorchFunctionSubclass():
        wrapped = plain.as_subclass(kind)
    wrapped.plain, wrapped.lr, wrapped.uses, wrapped.number = plain, lr, 0, number
    return wrapped


def use_tensor(t: Any, *, once: bool = False) -> Any:
    """Return the ordinary tensor ``[K, ...]`` of a :class:`ClientTensor`, and count the use.

    Args:
        t: client tensor, or None.
        once: whether the caller takes the optimizer step of the parameter, which must then be used only once.

    Raises:
        NoRuleError: if ``t`` is an ordinary tensor, or a step in the backward pass would be wrong.
    """
    if t is None:
        return None
    if not isinstance(t, ClientTensor):
        raise NoRuleError("a parameter that all clients share, beside one of each client")
    t.uses += 1
    if t.lr is not None and (t.uses > 1 or not once):
        raise NoRuleError("a step in the backward pass of a parameter that is used otherwise than once")
    return t.plain


def split_rows_by_client(x: Tensor, client_count: int) -> Tensor:
    """Split rows ``[K·B, ...]`` into those of each client ``[K, B, ...]``."""
    if not has_rows() or isinstance(x, ClientTensor) or x.ndim < 1 or x.shape[0] % client_count:
        raise NoRuleError("rows that are not those of a batch")
    return x.reshape(client_count, x.shape[0] // client_count, *x.shape[1:])
