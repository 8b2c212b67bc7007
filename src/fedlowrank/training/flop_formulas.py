"""The floating-point operations of each operator: torch's own formulas, and those that it lacks or has wrong.

A multiplication and the addition after it are two operations. ``torch.utils.flop_counter`` counts as zero: fused layers of
recurrent networks, of experts, and of attention on a CPU; products with a vector, bilinear forms and distances. In its gradient
of a grouped convolution the weight counts once for each group.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import conv_flop_count, flop_registry, sdpa_backward_flop_count, sdpa_flop_count


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))


def _attention_backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    count = sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape)
    return int(count)


def _recurrent(x: Any, *weights: Any) -> int:
    # each step multiplies its input and the state before it by their matrices; biases are vectors
    steps = x.numel() // x.shape[-1]
    return int(2 * steps * sum(w.numel() for w in weights if w.ndim == 2))


def _mkldnn_lstm(x: Any, *args: Any, **_: Any) -> int:
    return _recurrent(x, *args[:2])


def _mkldnn_lstm_backward(x: Any, *args: Any, **_: Any) -> int:
    # gradients of inputs and of weights, whether they are needed or not
    return 2 * _recurrent(x, *args[:2])


def _cudnn_rnn(x: Any, weights: Any, *_: Any, **__: Any) -> int:
    return _recurrent(x, *weights)


def _cudnn_rnn_backward(x: Any, weights: Any, *_: Any, **__: Any) -> int:
    return 2 * _recurrent(x, *weights)


def _convolution_backward(grad: Any, x: Any, weight: Any, *args: Any, **_: Any) -> int:
    # arguments after the weight: sizes of the bias, stride, padding, dilation, transposed, output padding, groups, mask
    is_transposed, output_mask = args[4], args[7]
    forward = conv_flop_count(x.shape, weight.shape, grad.shape, transposed=is_transposed)
    return int(forward * sum(output_mask[:2]))


def _grouped_product(a: Any, b: Any, *_: Any, **__: Any) -> int:
    # one product for each expert: of its rows of a, of its columns of b, or of its part of the dimension that is summed
    rows = a.shape[-2] * (a.shape[0] if a.ndim == b.ndim == 3 else 1)
    return int(2 * rows * a.shape[-1] * b.shape[-1])


def _trilinear(a: Any, b: Any, c: Any, *args: Any, **_: Any) -> int:
    # the sum over products of three tensors, after each got the dimensions that it lacks
    shapes = []
    for tensor, dimensions in zip((a, b, c), args[:3], strict=True):
        for dimension in sorted(dimensions):
            tensor = tensor.unsqueeze(dimension)
        shapes.append(tensor.shape)
    return int(2 * math.prod(torch.broadcast_shapes(*shapes)))


def _matrix_by_vector(matrix: Any, *_: Any, **__: Any) -> int:
    return int(2 * matrix.numel())


def _add_matrix_by_vector(_sum: Any, matrix: Any, *_: Any, **__: Any) -> int:
    return int(2 * matrix.numel())


def _add_matrices(_sum: Any, a: Any, b: Any, *_: Any, **__: Any) -> int:
    return int(2 * a.numel() * b.shape[-1])


def _distances(a: Any, b: Any, *_: Any, **__: Any) -> int:
    return int(2 * a.numel() * b.shape[-2])


def _distances_backward(_grad: Any, a: Any, b: Any, *_: Any, **__: Any) -> int:
    return _distances(a, b)


def _product_4bit(x: Any, _weight: Any, shape: Any, *_: Any, **__: Any) -> int:
    # the shape of the weight before it was packed
    return int(2 * x.numel() * shape[0])


def _product_8bit(x: Any, weight: Any, *_: Any, **__: Any) -> int:
    return int(2 * x.numel() * weight.shape[0])


def _mixed_product_8bit(_x: Any, quantized_x: Any, weight: Any, *_: Any, **__: Any) -> int:
    # outliers, a few columns in 16 bits, are not counted again
    return _product_8bit(quantized_x, weight)


_ATEN = torch.ops.aten

FORMULAS: dict[Any, Callable[..., Any]] = {
    **flop_registry,
    _ATEN.convolution_backward: _convolution_backward,
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _attention,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    _ATEN.mkldnn_rnn_layer: _mkldnn_lstm,
    _ATEN.mkldnn_rnn_layer_backward: _mkldnn_lstm_backward,
    _ATEN._cudnn_rnn: _cudnn_rnn,
    _ATEN._cudnn_rnn_backward: _cudnn_rnn_backward,
    _ATEN._grouped_mm: _grouped_product,
    _ATEN._trilinear: _trilinear,
    _ATEN.mv: _matrix_by_vector,
    _ATEN.dot: _matrix_by_vector,
    _ATEN.vdot: _matrix_by_vector,
    _ATEN.addmv: _add_matrix_by_vector,
    _ATEN.addbmm: _add_matrices,
    _ATEN._addmm_activation: _add_matrices,
    _ATEN._euclidean_dist: _distances,
    _ATEN._cdist_forward: _distances,
    _ATEN._cdist_backward: _distances_backward,
}
"""Formula of each operator, by its arguments and ``out_val``, its result."""

OF_LIBRARIES: dict[str, Callable[..., Any]] = {
    "bitsandbytes.gemm_4bit": _product_4bit,
    "bitsandbytes.gemv_4bit": _product_4bit,
    "bitsandbytes.int8_linear_matmul": _product_8bit,
    "bitsandbytes.int8_scaled_mm": _product_8bit,
    "bitsandbytes.int8_mixed_scaled_mm": _mixed_product_8bit,
}
"""Formulas of operators that exist once their library is imported, by name."""
