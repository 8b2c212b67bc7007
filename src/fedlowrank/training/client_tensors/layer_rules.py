"""Rules of network layers: each client's parameters are applied to the rows of that client.

Plain SGD takes its step in the backward pass of a linear layer: the product that would give the gradient of a
weight subtracts it instead. That is the optimizer in backward of torchtune. It is correct only if a parameter is
used once, so uses are counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from .client_tensor import ClientTensor, NoRuleError, split_rows_by_client, use_tensor


class _LinearStep(torch.autograd.Function):
    """A linear layer for each client, whose backward pass takes the SGD step on weight and bias.

    x ``[K, rows, in]``, w ``[K, out, in]``, b ``[K, out]`` or None; the result is ``[K, rows, out]``. Neither w nor
    b requires a gradient; ``anchor`` requires one, so that autograd calls this backward pass.
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
        # computed before the step changes w
        grad = torch.bmm(g, w) if ctx.needs_input_grad[0] else None
        w.data.baddbmm_(g.transpose(1, 2), x, alpha=-ctx.rates[0])
        if b is not None:
            b.data.sub_(g.sum(1), alpha=ctx.rates[1])
        return grad, None, None, None, None


ANCHOR = torch.zeros((), requires_grad=True)
"""An argument that requires a gradient, so that autograd calls the backward pass of :class:`_LinearStep`."""


def _product(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    if b is None:
        return torch.bmm(x, w.transpose(1, 2))
    return torch.baddbmm(b.unsqueeze(1), x, w.transpose(1, 2))


def _parameters(*parameters: Any, once: bool = False) -> tuple[Any, ...]:
    """Parameters of a layer as ordinary tensors ``[K, ...]``, or None; a parameter that all clients share is expanded."""
    client_counts = [len(p) for p in parameters if isinstance(p, ClientTensor)]
    if not client_counts:
        raise NoRuleError("inputs that are a parameter")
    return tuple(
        p.expand(client_counts[0], *p.shape)
        if isinstance(p, Tensor) and not isinstance(p, ClientTensor)
        else use_tensor(p, once=once)
        for p in parameters
    )


def _linear(x: Tensor, weight: Any, bias: Any = None) -> Tensor:
    w, b = _parameters(weight, bias, once=True)
    rates = [getattr(p, "lr", None) for p in (weight, bias) if p is not None]
    rows = split_rows_by_client(x, len(w)).reshape(len(w), -1, x.shape[-1])
    if all(rate is None for rate in rates):
        out = _product(rows, w, b)
    elif None in rates:
        raise NoRuleError("a step in the backward pass beside a parameter that all clients share")
    else:
        steps = rates[0], rates[-1]
        # apply has no type annotations in torch
        out = _LinearStep.apply(rows, w, b, steps, ANCHOR.to(w.device))  # type: ignore[no-untyped-call]
    return out.reshape(*x.shape[:-1], w.shape[1])


def _convolution(func: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def rule(
        x: Tensor,
        weight: Any,
        bias: Any = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor:
        w, b = _parameters(weight, bias)
        rows = split_rows_by_client(x, len(w))
        if x.device.type != "cpu":
            return grouped_convolution(func, rows, w, b, stride, padding, dilation, groups)
        # one client after another: one convolution with many groups takes longer on a CPU
        outputs = [
            func(rows[k], w[k], None if b is None else b[k], stride, padding, dilation, groups)
            for k in range(len(w))
        ]
        return torch.cat(outputs)

    return rule


def grouped_convolution(
    func: Callable[..., Tensor],
    rows: Tensor,
    w: Tensor,
    b: Tensor | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    groups: int,
) -> Tensor:
    """Compute the convolutions of all clients in one operation: the channels of each client form a group.

    Args:
        func: ``conv1d``, ``conv2d`` or ``conv3d``.
        rows: inputs ``[K, B, in, ...]``.
        w: weights ``[K, out, in / groups, ...]``.
        b: biases ``[K, out]`` or None.
        stride: stride of the convolution.
        padding: padding of the convolution.
        dilation: dilation of the convolution.
        groups: number of groups of each client's convolution.

    Returns:
        The outputs ``[K·B, out, ...]``.
    """
    client_count, batch = rows.shape[:2]
    channels = rows.transpose(0, 1).flatten(1, 2)
    bias = None if b is None else b.flatten()
    out = func(channels, w.flatten(0, 1), bias, stride, padding, dilation, groups * client_count)
    outputs = out.reshape(batch, client_count, w.shape[1], *out.shape[2:])
    return outputs.transpose(0, 1).flatten(0, 1)


def _layer_norm(x: Tensor, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Tensor:
    normal = functional.layer_norm(x, shape, None, None, eps)
    return _scaled(normal, weight, bias, len(shape))


def _group_norm(x: Tensor, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Tensor:
    normal = functional.group_norm(x, groups, None, None, eps)
    output = _scaled(normal.movedim(1, -1), weight, bias, 1)
    return output.movedim(-1, 1)


def _scaled(x: Tensor, weight: Any, bias: Any, dims: int) -> Tensor:
    """``x * weight + bias`` over the last ``dims`` dimensions of rows ``[K·B, ...]``."""
    combine: Any
    for p, combine in zip(_parameters(weight, bias), (torch.mul, torch.add), strict=True):
        if p is not None:
            rows = split_rows_by_client(x, len(p))
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
        raise NoRuleError("an embedding with options")
    w = use_tensor(weight)
    offsets = torch.arange(len(w), device=x.device) * w.shape[1]
    index = split_rows_by_client(x, len(w))
    # an index outside of the client's rows would select a row of another client
    is_row = (index >= 0) & (index < w.shape[1])
    index = torch.where(is_row, index + offsets.reshape(-1, *[1] * x.ndim), w.shape[0] * w.shape[1])
    return functional.embedding(index.flatten(0, 1), w.flatten(0, 1))


LAYER_RULES: dict[Any, Callable[..., Any]] = {
    functional.linear: _linear,
    functional.conv1d: _convolution(functional.conv1d),
    functional.conv2d: _convolution(functional.conv2d),
    functional.conv3d: _convolution(functional.conv3d),
    functional.layer_norm: _layer_norm,
    functional.group_norm: _group_norm,
    functional.embedding: _embedding,
}
"""The rule of each function of a layer."""
