"""Settings that a state dict has beside its tensors, because the tensors give another model under other settings."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def is_readable(state: Tensor) -> bool:
    """Whether an entry of a state has numbers: it is not on the meta device, and was not converted to integers."""
    return state.is_floating_point() and not state.is_meta


def is_same_setting(state: Tensor, value: float) -> bool:
    """Whether a stored setting, one number, is a value up to rounding by conversions and means of states.

    A state that is not readable counts as the same.
    """
    return not is_readable(state) or math.isclose(
        float(state), value, rel_tol=max(1e-3, 4 * torch.finfo(state.dtype).eps)
    )
