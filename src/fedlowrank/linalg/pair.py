"""The two factors of one LoRA update, as they are trained and sent."""

from __future__ import annotations

from torch import Tensor

from ..core.tree import tree


@tree
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
