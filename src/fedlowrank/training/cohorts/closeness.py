"""Comparison of a cohort's result with that of a single client, up to rounding."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...core import tree


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """Compute without TF32 in this block, and restore the user's setting afterwards.

    Convolutions on a GPU use TF32 by default, and their algorithm for many clients rounds differently from that for one
    client. The difference is about 1e-3, which is as large as the error of a wrong rule might be.
    """
    if not torch.cuda.is_available():
        yield
        return
    name: str
    value: str | bool
    switches: list[Any]
    if hasattr(torch.backends.cudnn, "conv"):
        switches = [torch.backends.cudnn.conv, torch.backends.cudnn.rnn, torch.backends.cuda.matmul]
        name, value = "fp32_precision", "ieee"
    else:  # before PyTorch 2.9
        switches, name, value = [torch.backends.cudnn, torch.backends.cuda.matmul], "allow_tf32", False
    previous_values = [getattr(switch, name) for switch in switches]
    try:
        for switch in switches:
            setattr(switch, name, value)
        yield
    finally:
        for switch, previous_value in zip(switches, previous_values, strict=True):
            setattr(switch, name, previous_value)


def is_close(result: Any, expected: Any) -> bool:
    """Whether trees are equal up to the rounding of a pass; plain numbers up to that of float64."""
    if isinstance(result, float) and isinstance(expected, float):
        return abs(result - expected) <= 1e-9 * abs(expected) or result == expected
    if tree.form(result) != tree.form(expected):
        return False
    pairs = zip(tree.tensors(result), tree.tensors(expected), strict=True)
    return all(_is_near(a, b) for a, b in pairs)


def _is_near(a: Tensor, b: Tensor) -> bool:
    if not a.numel() or not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    if a.shape == b.shape and bool(a.isinf().any()):
        # an infinity equals only itself
        is_equal = a == b
        if bool((a.isinf() & ~is_equal).any()):
            return False
        a, b = a.masked_fill(is_equal, 0), b.masked_fill(is_equal, 0)
    wide_type = tree.wide_type(a.dtype)
    bound = max(1e-3, 30 * torch.finfo(a.dtype).eps) * float(b.to(wide_type).abs().max()) + 1e-5
    return float((a.to(wide_type) - b.to(wide_type)).abs().max()) <= bound
