"""Parameters of many clients in one ordinary forward pass.

The examples of K clients are one batch of K·B rows, so that reshaping, pooling and control flow in a module
mean what they always mean. Only parameters differ by client: a :class:`Stacked` tensor holds those of all
clients ``[K, ...]`` and looks like that of one. An operation on it goes through a table, :data:`RULES`, which
applies each client's parameter to that client's rows. An operation that is not in the table raises
:class:`UnsupportedError`. The rules are in :mod:`.layer_rules` and :mod:`.tensor_rules`, which add them to the
table when they are imported.

A tensor that is not stacked and has dimensions is taken for rows: its first dimension are the examples,
client by client, or the clients themselves, as in the result of ``batch.mean``. Where there is no batch, in
``precondition`` and ``prox``, it is a constant that all clients share, see :func:`without_rows`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.overrides import resolve_name


class UnsupportedError(BaseException):
    """An operation on stacked parameters that has no rule; for the engine, so that no ``except`` of a method takes it."""


class Stacked(Tensor):
    """A parameter of K clients, ``[K, ...]``.

    Attributes:
        lr: learning rate of a step that is taken in the backward pass; None where gradients are returned.
        uses: how often a forward pass has used it.
        number: the type of a number of Python that each client has in its place; None for a tensor.
    """

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
            raise UnsupportedError(f"{_name(func)} has no rule") from None
        try:
            with torch._C.DisableTorchFunctionSubclass():
                return rule(*args, **(kwargs or {}))
        except UnsupportedError as error:
            raise UnsupportedError(f"{_name(func)}: {error}") from None


def _name(func: Any) -> str:
    return resolve_name(func) or f"{func.__module__}.{func.__name__}"


RULES: dict[Any, Callable[..., Any]] = {}
"""By function: how it is applied to stacked parameters."""

_ROWS: ContextVar[bool] = ContextVar("rows", default=True)


@contextlib.contextmanager
def without_rows() -> Iterator[None]:
    """Within this block no tensor is a batch: one that is not stacked is a constant of all clients."""
    token = _ROWS.set(False)
    try:
        yield
    finally:
        _ROWS.reset(token)


@contextlib.contextmanager
def with_rows() -> Iterator[None]:
    """Within this block tensors are batches again, whatever block is around it."""
    token = _ROWS.set(True)
    try:
        yield
    finally:
        _ROWS.reset(token)


def has_rows() -> bool:
    """Whether a tensor that is not stacked is taken for rows of a batch."""
    return _ROWS.get()


def stack(t: Tensor, lr: float | None = None) -> Stacked:
    """A tensor ``[K, ...]`` as a parameter of K clients; it shares the memory."""
    with torch._C.DisableTorchFunctionSubclass():
        made = t.as_subclass(Stacked)
    made.lr, made.uses, made.number = lr, 0, None
    return made


def plain(t: Any, *, once: bool = False) -> Any:
    """The tensor ``[K, ...]`` of a stacked parameter.

    Args:
        t: the parameter, or None.
        once: whether the caller takes the step of a parameter that is used once.

    Raises:
        UnsupportedError: if it is not stacked, or a step in the backward pass would be wrong.
    """
    if t is None:
        return None
    if not isinstance(t, Stacked):
        raise UnsupportedError("a parameter that all clients share, beside one of each client")
    t.uses += 1
    if t.lr is not None and (t.uses > 1 or not once):
        raise UnsupportedError("a step in the backward pass of a parameter that is used otherwise than once")
    return t.as_subclass(Tensor)


def by_client(x: Tensor, clients: int) -> Tensor:
    """Rows ``[K·B, ...]`` by client, ``[K, B, ...]``."""
    if not has_rows() or isinstance(x, Stacked) or x.ndim < 1 or x.shape[0] % clients:
        raise UnsupportedError("rows that are not those of a batch")
    return x.reshape(clients, x.shape[0] // clients, *x.shape[1:])
