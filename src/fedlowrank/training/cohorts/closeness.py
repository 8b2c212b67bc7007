"""Whether what a cohort gives equals what a client gives alone, up to rounding."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...core import tree


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """Compute without TF32, as a comparison must.

    Convolutions on a GPU use it by default, and round by another algorithm for many clients than for one: by 1e-3, as much as
    a wrong rule might be off. What the user set holds again afterwards.
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
    before = [getattr(switch, name) for switch in switches]
    try:
        for switch in switches:
            setattr(switch, name, value)
        yield
    finally:
        for switch, was in zip(switches, before, strict=True):
            setattr(switch, name, was)


def is_close(found: Any, expected: Any) -> bool:
    """Whether trees are equal up to the rounding of a pass; plain numbers up to that of float64."""
    if isinstance(found, float) and isinstance(expected, float):
        return abs(found - expected) <= 1e-9 * abs(expected) or found == expected
    if tree.form(found) != tree.form(expected):
        return False
    pairs = zip(tree.tensors(found), tree.tensors(expected), strict=True)
    return all(_is_near(a, b) for a, b in pairs)


def _is_near(a: Tensor, b: Tensor) -> bool:
    if not a.numel() or not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    if a.shape == b.shape and bool(a.isinf().any()):
        # an infinity is as good as itself, and as nothing else
        same = a == b
        if bool((a.isinf() & ~same).any()):
            return False
        a, b = a.masked_fill(same, 0), b.masked_fill(same, 0)
    wide = tree.wide_type(a.dtype)
    bound = max(1e-3, 30 * torch.finfo(a.dtype).eps) * float(b.to(wide).abs().max()) + 1e-5
    return float((a.to(wide) - b.to(wide)).abs().max()) <= bound
