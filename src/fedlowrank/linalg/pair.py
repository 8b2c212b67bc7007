"""The two factors of one LoRA update, which are trained and sent."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.arguments.bounds import check_minimum
from ..core.errors import TaskError
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
    check_factor_shapes(pair, "zero_pad_pair")
    padding = rank - pair.rank
    if padding <= 0:
        return pair
    return Pair(
        torch.cat([pair.b, pair.b.new_zeros(pair.b.shape[0], padding)], 1),
        torch.cat([pair.a, pair.a.new_zeros(padding, pair.a.shape[1])]),
    )


def keep_first_components(pair: Pair, rank: int) -> Pair:
    """Keep the first ``rank`` columns of B and rows of A, whatever their size.

    The best approximation of the product is :func:`fedlowrank.linalg.truncation.truncate_update`.

    Raises:
        ConfigError: if the rank is not an integer of at least 0.
        TaskError: if the sizes of B and A do not match.
    """
    check_factor_shapes(pair, "keep_first_components")
    rank = check_minimum("keep_first_components: rank", rank, 0)
    return Pair(pair.b[:, :rank].contiguous(), pair.a[:rank].contiguous())


def check_factor_shapes(pair: Pair, caller: str) -> None:
    """Refuse two tensors that are no factors of one update.

    Args:
        pair: factors to check.
        caller: name of the function that received them, for the message.

    Raises:
        TaskError: if they are not matrices ``[d, r]`` and ``[r, k]`` with the same r.
    """
    if pair.b.ndim != 2 or pair.a.ndim != 2 or pair.b.shape[1] != pair.a.shape[0]:
        raise TaskError(
            f"{caller}: B {[*pair.b.shape]} and A {[*pair.a.shape]} are no factors of an update B A; expected [d, r] and "
            "[r, k]. The order is Pair(b, a)"
        )
