"""The best approximation of an update by factors of a given rank, and its error."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.arguments.bounds import check_minimum
from ..core.errors import TaskError
from .delta import split_svd
from .factored import Factored, check_real_matrix, not_finite_error, thin_svd
from .low_rank_sum import REAL
from .pair import Pair, check_factor_shapes
from .randomized_svd import leading_triplets


@dataclass(frozen=True)
class Truncation:
    """The best approximation W_r of an update W.

    Attributes:
        pair: factors of the approximation, W_r = B A, in float32.
        lost_energy: squared norm of the error, ‖W - W_r‖_F².
        energy: squared norm of the update, ‖W‖_F².
    """

    pair: Pair
    lost_energy: float
    energy: float

    @property
    def error(self) -> float:
        """The relative error ‖W - W_r‖_F / ‖W‖_F; 0 if W is zero."""
        return relative_error([self])


def truncate_update(update: Pair | Tensor, rank: int) -> Truncation:
    """Compute the truncated singular value decomposition of an update.

    An update of a lower rank gives zero columns of B and zero rows of A, whose gradients are both zero: fill these rows
    of A with random numbers before they are trained.

    Args:
        update: factor pair, whose product is never formed, or a matrix ``[d, k]``.
        rank: rank of the result, at least 1; it is limited to the smaller dimension.

    Raises:
        ConfigError: if the rank is below 1.
        TaskError: if the update holds a NaN or an infinity, is not a matrix, or is complex, has integers, or has factors beyond
            float32; or if the sizes of B and A do not match.
    """
    rank = check_minimum("rank", rank, 1)
    for w in (update.b, update.a) if isinstance(update, Pair) else (update,):
        check_real_matrix(w, "truncate_update")
        if not bool(w.isfinite().all()):
            raise not_finite_error(w.shape)
    if isinstance(update, Pair):
        check_factor_shapes(update, "truncate_update")
        u, s, v = _decompose_product(update)
        lost_energy, energy = (float(t.square().sum()) for t in (s[rank:], s))
        u, s, v = u[:, :rank], s[:rank], v[:, :rank]
    else:
        w = update.detach().to(REAL)
        u, s, v = leading_triplets(w, rank)
        lost_energy, energy = float((w - (u * s) @ v.mT).square().sum()), float(w.square().sum())
    pair = split_svd(Factored(u, s, v), min(rank, u.shape[0], v.shape[0]))
    truncated_pair = Pair(pair.b.float(), pair.a.float())
    if not all(bool(t.isfinite().all()) for t in (truncated_pair.b, truncated_pair.a)):
        raise TaskError(
            f"truncate_update: factors are float32, and an update with the singular value {float(s[0]):.3g} has larger ones. "
            "Scale the update"
        )
    return Truncation(truncated_pair, lost_energy, energy)


def relative_error(layers: Iterable[Truncation]) -> float:
    """Compute ‖W - W_r‖_F / ‖W‖_F over all layers together; 0 if there is no update."""
    truncations = list(layers)
    energy = sum(p.energy for p in truncations)
    return math.sqrt(sum(p.lost_energy for p in truncations) / energy) if energy > 0 else 0.0


def _decompose_product(pair: Pair) -> tuple[Tensor, Tensor, Tensor]:
    """Decompose B A by decomposing a core matrix of its rank."""
    left, upper = torch.linalg.qr(pair.b.detach().to(REAL))
    right, lower = torch.linalg.qr(pair.a.detach().to(REAL).mT)
    x, s, yt = thin_svd(upper @ lower.mT)
    return left @ x, s, right @ yt.mT
