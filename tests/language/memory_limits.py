"""Devices that have room for a few examples alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedlowrank.models.architecture import Architecture


def limit_memory(monkeypatch: pytest.MonkeyPatch, most: int) -> list[int]:
    """A device that has room for so many training examples at once; returns the sizes that were asked for."""
    whole, asked = Architecture.apply, []

    def apply(self: Any, params: Any, x: Any) -> Any:
        rows = len(x["input_ids"])
        if torch.is_grad_enabled():
            asked.append(rows)
            if rows > most:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return whole(self, params, x)

    monkeypatch.setattr(Architecture, "apply", apply)
    return asked
