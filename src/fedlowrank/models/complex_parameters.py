"""Complex parameters as pairs of real numbers, their real and imaginary parts.

Outside a module's forward pass a complex parameter ``[...]`` is the real tensor ``[..., 2]`` of
``torch.view_as_real``. It is therefore trained, averaged, clipped, compressed and sent like any other parameter, and
optimizers treat it as torch's own do: by both parts.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..core.tree import Params


def complex_names(module: nn.Module) -> frozenset[str]:
    """List the names of the complex parameters of a module."""
    return frozenset([n for n, p in module.named_parameters() if p.is_complex()])


def as_real(t: Tensor) -> Tensor:
    """Convert a complex tensor ``[...]`` to a real one ``[..., 2]``; a real tensor stays unchanged."""
    return torch.view_as_real(t.resolve_conj()) if t.is_complex() else t


def with_complex(params: Params, names: frozenset[str]) -> Params:
    """Convert the parameters of the given names to complex tensors, as the module holds them."""
    complex_views = {
        # a view needs both parts adjacent in memory
        n: torch.view_as_complex(t.contiguous())
        for n, t in params.items()
        if n in names and not t.is_complex()
    }
    return {**params, **complex_views} if complex_views else params
