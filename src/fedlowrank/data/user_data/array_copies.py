"""Copies of users' arrays, so that a later change of an array does not change a federation."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


class ArrayCopies:
    """Copies tensors that share memory with users' arrays; several tensors of the same memory get one copy.

    The arrays must exist as long as this object, because it recognizes them by their address.
    """

    def __init__(self) -> None:
        self._copies: dict[tuple[Any, ...], Tensor] = {}

    def copy_shared(self, tensor: Tensor, array: Any) -> Tensor:
        """Return a tensor, or a copy if it shares memory with the array that it was converted from."""
        if not _shares_memory(tensor, array):
            return tensor
        memory = tensor.device, tensor.dtype, tensor.data_ptr(), tensor.shape, tensor.stride()
        if memory not in self._copies:
            self._copies[memory] = tensor.clone(memory_format=torch.contiguous_format)
        return self._copies[memory]


def _shares_memory(tensor: Tensor, array: Any) -> bool:
    """Whether a tensor may share memory with the array that it was converted from."""
    if isinstance(array, Tensor):
        return tensor.untyped_storage().data_ptr() == array.untyped_storage().data_ptr()
    # numpy copies the values of lists
    return not isinstance(array, list | tuple) and np.may_share_memory(tensor.numpy(), np.asarray(array))
