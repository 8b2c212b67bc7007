"""Parameters of many clients in one ordinary forward pass.

The examples of K clients are one batch of K·B rows, so that reshaping, pooling and control flow in a module
mean what they always mean. Only parameters differ by client: a :class:`Stacked` tensor holds those of all
clients ``[K, ...]`` and looks like that of one. An operation on it goes through a table, :data:`RULES`, which
applies each client's parameter to that client's rows. An operation that is not in the table raises
:class:`UnsupportedError`.

Plain SGD takes its step in the backward pass: the product that would give the gradient of a weight subtracts
it instead. That is the optimizer in backward of torchtune, and right only where a parameter is used once, which
is counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional


class UnsupportedError(Exception):
    """An operation on stacked parameters that has no rule."""


class Stacked(Tensor):
    """A parameter of K clients, ``[K, ...]``.

    Attributes:
        lr: learning rate of a step that is taken in the backward pass; None where gradients are returned.
        uses: how often a forward pass has used it.
    """

    lr: float | None
    uses: int

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Apply the rule of an operation."""
        rule = RULES.get(func)
        if rule is None:
            raise UnsupportedError(str(func))
        with torch._C.DisableTorchFunctionSubclass():
            return rule(*args, **(kwargs or {}))


def stack(t: Tensor, lr: float | None = None) -> Stacked:
    """A tensor ``[K, ...]`` as a parameter of K clients; it shares the memory."""
    with torch._C.DisableTorchFunctionSubclass():
        made = t.as_subclass(Stacked)
    made.lr, made.uses = lr, 0
    return made


class _LinearStep(torch.autograd.Function):
    """A linear layer of each client whose backward pass takes the step of SGD on its weight and bias.

    x ``[K, rows, in]``, w ``[K, out, in]``, b ``[K, out]`` or None; the result is ``[K, rows, out]``. Neither
    w nor b requires a gradient, so ``anchor`` does, which lets the backward pass come here.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, rates: tuple[float, float], anchor: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x, w, b)
        del anchor
        ctx.rates = rates
        return _product(x, w, b)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w, b = ctx.saved_tensors
        # before the step changes w
        grad = torch.bmm(g, w) if ctx.needs_input_grad[0] else None
        w.data.baddbmm_(g.transpose(1, 2), x, alpha=-ctx.rates[0])
        if b is not None:
            b.data.sub_(g.sum(1), alpha=ctx.rates[1])
        return grad, None, None, None, None


ANCHOR = torch.zeros((), requires_grad=True)


def _product(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    if b is None:
        return torch.bmm(x, w.transpose(1, 2))
    return torch.baddbmm(b.unsqueeze(1), x, w.transpose(1, 2))


def _plain(t: Any, *, once: bool = False) -> Any:
    """The tensor ``[K, ...]`` of a stacked parameter.

    Args:
        t: the parameter, or None.
        once: whether the caller takes the step of a parameter that is used once.
    """
    if t is None:
        return None
    if not isinstance(t, Stacked):
        raise UnsupportedError("a parameter that all clients share, beside one of each client")
    t.uses += 1
    if t.lr is not None and (t.uses > 1 or not once):
        raise UnsupportedError("a step in the backward pass of a parameter that is used otherwise than once")
    return t.as_subclass(Tensor)


def _by_client(x: Tensor, clients: int) -> Tensor:
    """Rows ``[K·B, ...]`` by client, ``[K, B, ...]``."""
    if isinstance(x, Stacked) or x.ndim < 1 or x.shape[0] % clients:
        raise UnsupportedError("rows that are not those of a batch")
    return x.reshape(clients, x.shape[0] // clients, *x.shape[1:])


def _linear(x: Tensor, weight: Any, bias: Any = None) -> Tensor:
    w, b = _plain(weight, once=True), _plain(bias, once=True)
    rows = _by_client(x, len(w)).reshape(len(w), -1, x.shape[-1])
    if weight.lr is None:
        out = _product(rows, w, b)
    else:
        rates = weight.lr, 0.0 if bias is None else bias.lr
        out = _LinearStep.apply(rows, w, b, rates, ANCHOR.to(w.device))  # type: ignore[no-untyped-call]
    return out.reshape(*x.shape[:-1], w.shape[1])


def _conv2d(
    x: Tensor,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    w, b = _plain(weight), _plain(bias)
    rows = _by_client(x, len(w))
    if x.device.type != "cpu":
        return grouped_conv2d(rows, w, b, stride, padding, dilation, groups)
    # one client after another: a CPU takes longer for many groups
    parts = [
        functional.conv2d(rows[k], w[k], None if b is None else b[k], stride, padding, dilation, groups)
        for k in range(len(w))
    ]
    return torch.cat(parts)


def grouped_conv2d(
    rows: Tensor, w: Tensor, b: Tensor | None, stride: Any, padding: Any, dilation: Any, groups: int
) -> Tensor:
    """The convolutions of all clients in one operation: the channels of a client are a group.

    Args:
        rows: ``[K, B, in, H, W]``.
        w: ``[K, out, in / groups, ...]``.
        b: ``[K, out]`` or None.
        stride: as of ``conv2d``, and so on.
        padding: likewise.
        dilation: likewise.
        groups: of each client.

    Returns:
        The outputs ``[K·B, out, H', W']``.
    """
    clients, batch = rows.shape[:2]
    channels = rows.transpose(0, 1).flatten(1, 2)
    bias = None if b is None else b.flatten()
    out = functional.conv2d(channels, w.flatten(0, 1), bias, stride, padding, dilation, groups * clients)
    by_client = out.reshape(batch, clients, w.shape[1], *out.shape[2:])
    return by_client.transpose(0, 1).flatten(0, 1)


def _layer_norm(x: Tensor, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Tensor:
    normal = functional.layer_norm(x, shape, None, None, eps)
    return _scaled(normal, weight, bias, len(shape))


def _group_norm(x: Tensor, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Tensor:
    normal = functional.group_norm(x, groups, None, None, eps)
    moved = _scaled(normal.movedim(1, -1), weight, bias, 1)
    return moved.movedim(-1, 1)


def _scaled(x: Tensor, weight: Any, bias: Any, dims: int) -> Tensor:
    """``x * weight + bias`` over the last dimensions of rows ``[K·B, ...]``."""
    for parameter, combine in ((weight, torch.mul), (bias, torch.add)):
        if parameter is not None:
            p = _plain(parameter)
            rows = _by_client(x, len(p))
            x = combine(rows, p.reshape(len(p), *[1] * (rows.ndim - 1 - dims), *p.shape[1:])).flatten(0, 1)
    return x


def _embedding(
    x: Tensor,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    del norm_type
    if padding_idx is not None or max_norm is not None or scale_grad_by_freq or sparse:
        raise UnsupportedError("an embedding with options")
    w = _plain(weight)
    first = torch.arange(len(w), device=x.device) * w.shape[1]
    index = _by_client(x, len(w)) + first.reshape(-1, *[1] * x.ndim)
    return functional.embedding(index.flatten(0, 1), w.flatten(0, 1))


def _matmul(a: Any, b: Any) -> Any:
    if isinstance(a, Stacked) and isinstance(b, Stacked):
        left, right = _plain(a), _plain(b)
        if left.ndim != 3 or right.ndim != 3:
            raise UnsupportedError("a product of parameters that are no matrices")
        return stack(torch.bmm(left, right))
    if isinstance(a, Stacked) or b.ndim != 3:
        raise UnsupportedError("a product with parameters on the left")
    w = _plain(b)
    rows = _by_client(a, len(w)).reshape(len(w), -1, a.shape[-1])
    return torch.bmm(rows, w).reshape(*a.shape[:-1], w.shape[2])


def _elementwise(func: Callable[..., Any]) -> Callable[..., Any]:
    """The rule of a sum or product of parameters of one shape, or of a parameter and a number."""

    def rule(a: Any, b: Any, **more: Any) -> Any:
        shapes = {t.shape for t in (a, b) if isinstance(t, Stacked)}
        numbers = all(isinstance(t, (int, float)) for t in (a, b) if not isinstance(t, Stacked))
        if len(shapes) > 1 or not numbers:
            raise UnsupportedError("a parameter beside a tensor of another shape")
        return stack(func(*(_plain(t) if isinstance(t, Stacked) else t for t in (a, b)), **more))

    return rule


def _transposed(t: Stacked) -> Stacked:
    if t.ndim != 3:
        raise UnsupportedError("a transpose of no matrix")
    return stack(_plain(t).mT)


RULES: dict[Any, Callable[..., Any]] = {
    functional.linear: _linear,
    functional.conv2d: _conv2d,
    functional.layer_norm: _layer_norm,
    functional.group_norm: _group_norm,
    functional.embedding: _embedding,
    torch.matmul: _matmul,
    Tensor.matmul: _matmul,
    Tensor.__matmul__: _matmul,
    Tensor.__rmatmul__: lambda a, b: _matmul(b, a),
    Tensor.mT.__get__: _transposed,  # type: ignore[attr-defined]
    Tensor.t: _transposed,
    Tensor.T.__get__: _transposed,  # type: ignore[attr-defined]
    # what a parameter of one client would say of itself
    Tensor.shape.__get__: lambda t: t.shape[1:],  # type: ignore[attr-defined]
    Tensor.ndim.__get__: lambda t: t.ndim - 1,  # type: ignore[attr-defined]
    Tensor.dtype.__get__: lambda t: t.dtype,  # type: ignore[attr-defined]
    Tensor.device.__get__: lambda t: t.device,
    **{
        f: _elementwise(f)
        for f in (torch.add, torch.sub, torch.mul, Tensor.add, Tensor.sub, Tensor.mul, Tensor.__rsub__)
    },
}
"""By function: how it is applied to stacked parameters."""
