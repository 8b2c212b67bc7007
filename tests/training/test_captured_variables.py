"""The code of two functions is told apart by their instructions and captured numbers, not by captured objects."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from fedlowrank.training.captured_variables import code_of


@dataclasses.dataclass(frozen=True)
class Frozen:
    """Settings."""

    scale: float

    def scaled(self, x: float) -> float:
        """A function of settings."""
        return x * self.scale


def make(value: Any) -> Callable[[], Any]:
    return lambda: value


def test_code_of_ignores_objects_and_keeps_numbers() -> None:
    assert code_of(make(torch.zeros(1))) == code_of(make(torch.ones(2)))
    assert code_of(make(1)) != code_of(make(2))
    assert code_of(Frozen(1.0).scaled) == code_of(Frozen(2.0).scaled)
    assert code_of(torch.relu) == code_of(torch.relu) != code_of(torch.abs)
