"""Rules of operations on tensors of many clients: arithmetic, sums, shapes, indices, products.

Every rule returns the same result as a loop over the clients. A client tensor has the interface of one client's
tensor: its dimensions are counted without the leading one. If the meaning of an operation for one client is
ambiguous, a rule raises :class:`NoRuleError`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .client_tensor import (
    ClientTensor,
    NoRuleError,
    has_rows,
    split_rows_by_client,
    to_client_tensor,
    use_tensor,
)

Rule = Callable[..., Any]


def _ndim(t: Tensor) -> int:
    """Number of dimensions of one client's tensor."""
    return t.ndim - isinstance(t, ClientTensor)


def _wrap_all(result: Any) -> Any:
    """Wrap a result, or each of a tuple of results, as a client tensor."""
    if isinstance(result, Tensor):
        return to_client_tensor(result)
    items = [_wrap_all(item) for item in result]
    # named tuples of torch are constructed from one sequence
    return type(result)(items)


def _dim(dim: Any, ndim: int) -> int:
    """Convert a dimension of one client's tensor to the dimension of ``[K, ...]``."""
    if not isinstance(dim, int) or not -ndim <= dim < ndim:
        raise NoRuleError(f"the dimension {dim} of a tensor with {ndim} dimensions")
    return dim + 1 if dim >= 0 else dim


def _dims(dim: Any, ndim: int) -> Any:
    return [_dim(d, ndim) for d in dim] if isinstance(dim, (tuple, list)) else _dim(dim, ndim)


# Arithmetic


def _elementwise(func: Rule) -> Rule:
    """The rule of an elementwise function, which broadcasts its operands."""

    def rule(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(a, Tensor) for a in kwargs.values()):
            raise NoRuleError("a tensor that is given by name")
        tensors = [a for a in args if isinstance(a, Tensor)]
        ndim = max(map(_ndim, tensors))
        rows = [t for t in tensors if t.ndim and not isinstance(t, ClientTensor)]
        # a frozen weight beside its update: rows number as many as examples, which no parameter's shape does
        shapes = {t.shape[1:] for t in tensors if isinstance(t, ClientTensor)}
        common_type = _common_type(tensors)
        if common_type is not None:
            args = _promoted(args, common_type)
            rows = [a for a in args if isinstance(a, Tensor) and a.ndim and not isinstance(a, ClientTensor)]
        if rows and has_rows() and any(t.shape not in shapes for t in rows):
            return _as_type(func(*_beside_rows(args, rows, ndim), **kwargs), common_type).flatten(0, 1)
        result = to_client_tensor(_as_type(func(*[_aligned(a, ndim) for a in args], **kwargs), common_type))
        if all(getattr(t, "number", None) for t in tensors):
            result.number = float
        return result

    return rule


def _promoted(args: tuple[Any, ...], common_type: torch.dtype) -> tuple[Any, ...]:
    """Cast operands to the common type that they have for one client.

    Scalars beside half precision stay in single precision, in which torch computes; the caller casts the result.
    """
    is_narrow = torch.finfo(common_type).bits < 32 if common_type.is_floating_point else False

    def cast(a: Any) -> Any:
        if not isinstance(a, Tensor) or a.dtype == torch.bool or a.dtype == common_type:
            return a
        dtype = torch.float32 if is_narrow and not _ndim(a) and a.is_floating_point() else common_type
        return to_client_tensor(use_tensor(a).to(dtype)) if isinstance(a, ClientTensor) else a.to(dtype)

    return tuple([cast(a) for a in args])


def _common_type(tensors: list[Tensor]) -> torch.dtype | None:
    """The type in which one client computes with tensors of several types; None if they have one type, or are booleans.

    As in torch's type promotion, a tensor without dimensions, and after it a Python number, determines the type
    only if it is of a higher category.
    """
    numeric_tensors = [t for t in tensors if t.dtype != torch.bool]
    if len({t.dtype for t in numeric_tensors}) < 2:
        return None
    ranked: list[list[torch.dtype]] = [[], [], []]
    for t in numeric_tensors:
        number = getattr(t, "number", None)
        rank = 0 if _ndim(t) else 1 if number is None else 2
        ranked[rank].append(
            t.dtype if number is None else torch.int64 if number is int else torch.get_default_dtype()
        )
    common_type: torch.dtype | None = None
    for dtypes in reversed(ranked):
        if dtypes:
            promoted = functools.reduce(torch.promote_types, dtypes)
            common_type = (
                promoted
                if common_type is None or _category(promoted) >= _category(common_type)
                else common_type
            )
    return common_type


def _category(dtype: torch.dtype) -> int:
    return 2 if dtype.is_complex else 1 if dtype.is_floating_point else 0


def _as_type(result: Tensor, common_type: torch.dtype | None) -> Tensor:
    """Cast the result to the common type of the operands, if both are floating."""
    is_wide = common_type is not None and common_type.is_floating_point and result.is_floating_point()
    return result.to(common_type) if is_wide else result


def _aligned(a: Any, ndim: int) -> Any:
    """Give an operand ``ndim`` dimensions for each client, as broadcasting does with one client's tensor."""
    if not isinstance(a, ClientTensor):
        return a
    p = use_tensor(a)
    missing_dims = ndim + 1 - p.ndim
    return p.reshape(len(p), *[1] * missing_dims, *p.shape[1:]) if missing_dims else p


def _beside_rows(args: Any, rows: list[Tensor], ndim: int) -> list[Any]:
    """Reshape operands to ``[K, B, ...]``: rows by client, and parameters that broadcast over the rows of their client."""
    client_count = next(len(a) for a in args if isinstance(a, ClientTensor))
    if any(t.ndim != ndim or len(t) != len(rows[0]) for t in rows):
        raise NoRuleError("a parameter beside a tensor that is not the rows of a batch")
    operands = []
    for a in args:
        if isinstance(a, ClientTensor):
            p = _aligned(a, ndim)
            if p.shape[1] != 1:
                raise NoRuleError("a parameter with a value for each row")
            operands.append(p)
        else:
            operands.append(split_rows_by_client(a, client_count) if isinstance(a, Tensor) and a.ndim else a)
    return operands


def _clamped(func: Rule) -> Rule:
    """The rule of ``clamp``, whose bounds may be keyword arguments."""
    rule = _elementwise(func)
    return lambda t, min=None, max=None: rule(t, min, max)  # noqa: A006 - the names in torch


# Dimensions


def along_dimension(func: Rule, default: tuple[Any, ...] = (), count: int = 1) -> Rule:
    """Build the rule of a function whose first ``count`` arguments after the tensor are dimensions.

    A dimension of None means all of them.
    """

    def rule(t: Any, *args: Any, **kwargs: Any) -> Any:
        p = use_tensor(t)
        if "dim" in kwargs:
            args = (kwargs.pop("dim"), *args)
        args += default[len(args) :]
        if len(args) < count or any(isinstance(a, Tensor) for a in (*args, *kwargs.values())):
            raise NoRuleError("dimensions that are not given")
        if isinstance(args[0], (tuple, list)) and not args[0]:
            raise NoRuleError("no dimensions")
        if args[0] is None:
            if kwargs.get("keepdim") or any(args[1:]):
                raise NoRuleError("all dimensions, each kept")
            return _wrap_all(func(p.reshape(len(p), -1), 1, *args[1:], **kwargs))
        dims = [_dims(d, p.ndim - 1) for d in args[:count]]
        return _wrap_all(func(p, *dims, *args[count:], **kwargs))

    return rule


def _leading(func: Rule) -> Rule:
    """The rule of a function of the last dimensions, which treats all dimensions before them as a batch."""

    def rule(*args: Any, **kwargs: Any) -> Any:
        tensors = [a for a in args if isinstance(a, Tensor)]
        has_dims = "dim" in kwargs or any(isinstance(a, (tuple, list)) for a in args)
        if has_dims or len({t.ndim for t in tensors}) > 1 or any(t.ndim < 3 for t in tensors):
            raise NoRuleError("dimensions that are not the last ones")
        return _wrap_all(func(*[use_tensor(a) if isinstance(a, Tensor) else a for a in args], **kwargs))

    return rule


def _shaped(func: Rule) -> Rule:
    """The rule of functions that take a shape, such as ``reshape``."""

    def rule(t: Any, *shape: Any) -> ClientTensor:
        p = use_tensor(t)
        sizes = shape[0] if isinstance(shape[0], (tuple, list)) else shape
        return to_client_tensor(func(p, (len(p), *sizes)))

    return rule


def _unsqueezed(t: Any, dim: int) -> ClientTensor:
    # t.ndim + 1 dimensions: the new dimension counts
    return to_client_tensor(use_tensor(t).unsqueeze(_dim(dim, t.ndim)))


def _permuted(t: Any, *dims: Any) -> ClientTensor:
    order = dims[0] if isinstance(dims[0], (tuple, list)) else dims
    return to_client_tensor(use_tensor(t).permute(0, *_dims(tuple(order), t.ndim - 1)))


def _transposed(t: Any) -> ClientTensor:
    if t.ndim != 3:
        raise NoRuleError("a transpose of no matrix")
    return to_client_tensor(use_tensor(t).mT)


def _joined(func: Rule, new_dims: int) -> Rule:
    """The rule of ``cat``, which adds no dimension, and of ``stack``, which adds one."""

    def rule(tensors: Any, dim: int = 0) -> ClientTensor:
        return to_client_tensor(
            func([use_tensor(t) for t in tensors], _dim(dim, tensors[0].ndim - 1 + new_dims))
        )

    return rule


def _sorted(t: Any, dim: int = -1, descending: bool = False, *, stable: bool = False) -> Any:
    return _wrap_all(
        torch.sort(use_tensor(t), dim=_dim(dim, t.ndim - 1), descending=descending, stable=stable)
    )


def _scattered(t: Any, dim: int, index: Any, value: float) -> ClientTensor:
    return to_client_tensor(use_tensor(t).scatter(_dim(dim, t.ndim - 1), use_tensor(index), value))


# Indices


def _item(t: Any, index: Any) -> Any:
    """The rule of ``t[index]``: integers, slices and None; or a label for each row, which reads its client's t."""
    if isinstance(index, Tensor) and not isinstance(index, ClientTensor) and index.dtype == torch.int64:
        p = use_tensor(t)
        rows = split_rows_by_client(index, len(p))
        client_index = torch.arange(len(p), device=p.device).reshape(-1, *[1] * (rows.ndim - 1))
        return p[client_index, rows].flatten(0, 1)
    indices = index if isinstance(index, tuple) else (index,)
    if not all(i is None or i is ... or type(i) in (int, slice) for i in indices):
        raise NoRuleError("an index that is no number, slice or rows of labels")
    return to_client_tensor(use_tensor(t)[(slice(None), *indices)])


# Products


def _matmul(a: Any, b: Any) -> Any:
    if isinstance(a, ClientTensor) and isinstance(b, ClientTensor):
        left, right = use_tensor(a), use_tensor(b)
        vectors = left.ndim == 2, right.ndim == 2
        left, right = left.unsqueeze(1) if vectors[0] else left, right.unsqueeze(2) if vectors[1] else right
        ndim = max(left.ndim, right.ndim)
        left, right = (p.reshape(len(p), *[1] * (ndim - p.ndim), *p.shape[1:]) for p in (left, right))
        out = torch.matmul(left, right)
        out = out.squeeze(-1) if vectors[1] else out
        return to_client_tensor(out.squeeze(-1 if vectors[1] else -2) if vectors[0] else out)
    if isinstance(a, ClientTensor) or b.ndim not in (2, 3):
        raise NoRuleError("a product with parameters on the left")
    w = use_tensor(b)
    rows = split_rows_by_client(a, len(w)).reshape(len(w), -1, a.shape[-1])
    if w.ndim == 2:
        return torch.bmm(rows, w.unsqueeze(2)).reshape(a.shape[:-1])
    return torch.bmm(rows, w).reshape(*a.shape[:-1], w.shape[2])


def _tensordot(a: Any, b: Any, dims: Any = 2, out: None = None) -> ClientTensor:
    left, right = use_tensor(a), use_tensor(b)
    if out is not None or dims != 1 or left.ndim != 2 or right.ndim < 2:
        raise NoRuleError("a tensordot that is no sum over the first dimension")
    product = torch.bmm(left.unsqueeze(1), right.reshape(*right.shape[:2], -1))
    return to_client_tensor(product.reshape(len(right), *right.shape[2:]))


def _plain(value: Any) -> Any:
    """The ordinary tensor of a client tensor, or of each in a sequence; other values are unchanged."""
    if isinstance(value, (tuple, list)):
        return [_plain(v) for v in value]
    return value.plain if isinstance(value, ClientTensor) else value


def _gradient(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> tuple[ClientTensor, ...]:
    if not all(isinstance(t, ClientTensor) for t in inputs):
        raise NoRuleError("a gradient by a tensor that all clients share")
    grads = torch.autograd.grad(
        _plain(outputs), _plain(inputs), *map(_plain, args), **{n: _plain(v) for n, v in kwargs.items()}
    )
    return tuple([to_client_tensor(g) for g in grads])


def _require_gradient(t: Any, on: bool = True) -> Any:
    if on and not t.plain.requires_grad:
        # detach: the ordinary tensor may belong to other objects
        t.plain = t.plain.detach()
    t.plain.requires_grad_(on)
    return t


ELEMENTWISE = (
    *("add", "sub", "mul", "div", "neg", "pow", "square", "sqrt", "rsqrt", "reciprocal", "abs", "sign"),
    *("exp", "log", "sigmoid", "tanh", "relu", "maximum", "minimum", "where", "nan_to_num"),
    *("isfinite", "isnan", "eq", "__eq__", "ne", "lt", "le", "gt", "ge", "__and__", "__or__", "__invert__"),
    *("to", "float", "double", "contiguous", "clone", "detach", "zeros_like", "ones_like"),
    *("__pow__", "__rpow__", "__rsub__", "__rdiv__", "__rtruediv__"),
)
"""Names of elementwise functions, in ``torch`` and of tensors."""

_DEFAULT_DIMENSIONS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("all", "amax", "any", "mean", "sum"), (None,)),
    **dict.fromkeys(("log_softmax", "logsumexp", "softmax", "squeeze", "unflatten"), ()),
    "unbind": (0,),
}
"""Default arguments of functions of one dimension, by their names."""

_RULE_MAKERS: dict[str, Callable[[Rule], Rule]] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **{name: partial(along_dimension, default=default) for name, default in _DEFAULT_DIMENSIONS.items()},
    **dict.fromkeys(("movedim", "transpose"), lambda f: along_dimension(f, (), 2)),
    "flatten": lambda f: along_dimension(f, (0, -1), 2),
    **dict.fromkeys(("reshape", "view"), _shaped),
    "clamp": _clamped,
    "matmul": lambda _: _matmul,
    "t": lambda _: _transposed,
    "unsqueeze": lambda _: _unsqueezed,
    "permute": lambda _: _permuted,
    "sort": lambda _: _sorted,
    "scatter": lambda _: _scattered,
    "cat": lambda f: _joined(f, 0),
    "stack": lambda f: _joined(f, 1),
    "tensordot": lambda _: _tensordot,
}


def _make_named_rules() -> dict[Any, Rule]:
    """Build the rules of :data:`_RULE_MAKERS`, for each name's function in ``torch`` and its method of tensors."""
    pairs = [
        (func, make)
        for name, make in _RULE_MAKERS.items()
        for func in (getattr(torch, name, None), getattr(Tensor, name, None))
    ]
    # not callable: torch.float is a type
    return {func: make(func) for func, make in pairs if callable(func)}


def _getter(name: str) -> Any:
    """The getter of a tensor's attribute, the function on which torch dispatches."""
    return getattr(Tensor, name).__get__


TENSOR_RULES: dict[Any, Rule] = {
    **_make_named_rules(),
    functional.softmax: along_dimension(functional.softmax),
    functional.log_softmax: along_dimension(functional.log_softmax),
    torch.autograd.grad: _gradient,
    **{f: _leading(f) for f in (torch.linalg.matrix_norm, torch.linalg.solve_ex, torch.linalg.svd)},
    Tensor.__getitem__: _item,
    Tensor.requires_grad_: _require_gradient,
    # attributes of one client's tensor
    _getter("mT"): lambda t: to_client_tensor(use_tensor(t).mT) if t.ndim > 2 else _transposed(t),
    _getter("T"): _transposed,
    _getter("shape"): lambda t: t.shape[1:],
    Tensor.size: lambda t, dim=None: t.shape[1:] if dim is None else t.shape[_dim(dim, t.ndim - 1)],
    _getter("ndim"): lambda t: t.ndim - 1,
    Tensor.dim: lambda t: t.ndim - 1,
    Tensor.numel: lambda t: t.shape[1:].numel(),
    Tensor.__len__: lambda t: t.shape[_dim(0, t.ndim - 1)],
    _getter("dtype"): lambda t: t.dtype,
    _getter("is_sparse"): lambda t: t.is_sparse,
    _getter("device"): lambda t: t.device,
    Tensor.is_floating_point: lambda t: t.is_floating_point(),
    _getter("requires_grad"): lambda t: t.plain.requires_grad,
}
"""The rule of each function of tensors."""
