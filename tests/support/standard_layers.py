"""Layers of tests that the engines take for standard ones while a block runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from torch import nn

from fedlowrank.models import standard


@contextmanager
def standard_layers(*kinds: type[nn.Module]) -> Iterator[None]:
    """Treat modules of these kinds as standard: their forward pass is deterministic, so clients may be batched."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(standard, "LAYERS", standard.LAYERS | {*kinds})
        yield
