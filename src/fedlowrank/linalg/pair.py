"""The two factors of one LoRA update, as they are trained and sent."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.tree import tree_dataclass


@tree_dataclass
class Pair:
    """The update s·B A of one weight ``[d, k]``; the scale s stands beside it and not in it.

    Attributes:
        b: B ``[d, r]``.
        a: A ``[r, k]``.
    """

    b: Tensor
    a: Tensor

    @property
    def rank(self) -> int:
        """r, the number of columns of B."""
        return self.b.shape[1]

    def dense(self) -> Tensor:
        """B A ``[d, k]``."""
        return self.b @ self.a


Factors = dict[str, Pair]
"""A factor pair of every adapted weight, by the name of its layer."""


def zero_pad_pair(pair: Pair, rank: int) -> Pair:
    """The same product with zero columns of B and zero rows of A up to a rank."""
    padding = rank - pair.rank
    if padding <= 0:
        return pair
    return Pair(
        torch.cat([pair.b, pair.b.new_zeros(pair.b.shape[0], padding)], 1),
        torch.cat([pair.a, pair.a.new_zeros(padding, pair.a.shape[1])]),
    )


def truncate_pair(pair: Pair, rank: int) -> Pair:
    """The first columns of B and rows of A."""
    return Pair(pair.b[:, :rank].contiguous(), pair.a[:rank].contiguous())
