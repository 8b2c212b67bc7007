"""Comparisons of parameters with those of the NumPy references, and with one another."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedlowrank.core import tree


def to_layers(params: dict[str, Tensor]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Write parameters as the references do: (weight, bias) a layer."""
    values = [p.detach().double().numpy().copy() for p in params.values()]
    return list(zip(values[::2], values[1::2], strict=True))


def assert_nested_close(found: Any, wanted: Any, atol: float = 1e-10) -> None:
    """Require nested lists of arrays to agree up to rounding; what is found may hold tensors."""
    if isinstance(wanted, (list, tuple)):
        assert len(found) == len(wanted)
        for f, w in zip(found, wanted, strict=True):
            assert_nested_close(f, w, atol)
        return
    found = found.detach().double().numpy() if isinstance(found, Tensor) else found
    assert found.shape == wanted.shape
    np.testing.assert_allclose(found, wanted, rtol=0, atol=atol)


def assert_trees_close(a: Any, b: Any, atol: float = 1e-12) -> None:
    """Require two trees of tensors to agree up to rounding."""
    tree.map_leaves(lambda x, y: torch.testing.assert_close(x, y, rtol=0, atol=atol), a, b)


def assert_parameters_close(found: Any, wanted: Any, atol: float = 1e-10) -> None:
    """Require parameters to agree up to rounding with the layers of a reference, or with a tree."""
    if isinstance(wanted, list):
        assert_nested_close(to_layers(found), wanted, atol)
    else:
        assert_trees_close(found, wanted, atol)


def assert_bits_equal(a: Any, b: Any) -> None:
    """Require two trees to be the same bit for bit."""
    assert tree.equal(a, b)


def get_shapes(value: Any) -> dict[str, tuple[int, ...]]:
    """Get the shape of each leaf of a tree by its path."""
    return {path: tuple(t.shape) for path, t in tree.leaves(value)}
