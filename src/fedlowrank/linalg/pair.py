"""The two factors of one LoRA update, which are trained and sent."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.tree import tree_dataclass


@tree_dataclass
class Pair:
    """The factors of the update s·B A of one weight ``[d, k]``; the scale s is not part of them.

    Attributes:
        b: factor B ``[d, r]``.
        a: factor A ``[r, k]``.
    """

    b: Tensor
    a: Tensor

    @property
    def rank(self) -> int:
        """The rank r, the number of columns of B."""
        return self.b.shape[1]

    def dense(self) -> Tensor:
        """The product B A ``[d, k]``."""
        return self.b @ self.a


Factors = dict[str, Pair]
"""A factor pair for every adapted weight, by the name of its layer."""


def zero_pad_pair(pair: Pair, rank: int) -> Pair:
    """Pad B with zero columns and A with zero rows up to a rank; the product is the same."""
    padding = rank - pair.rank
    if padding <= 0:
        return pair
    return Pair(
        torch.cat([pair.b, pair.b.new_zeros(pair.b.shape[0], padding)], 1),
        torch.cat([pair.a, pair.a.new_zeros(padding, pair.a.shape[1])]),
    )


def truncate_pair(pair: Pair, rank: int) -> Pair:
    """Keep the first ``rank`` columns of B and rows of A."""
    return Pair(pair.b[:, :rank].contiguous(), pair.a[:rank].contiguous())
