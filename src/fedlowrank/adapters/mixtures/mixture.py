"""Mixtures of low-rank updates of one weight: C pairs of factors that every client mixes in its own shares.

FLoRAL (Almansoori, Horváth, Takáč, arXiv:2410.03497, §3.2, appendices D to F). An update of a matrix is U Vᵀ; an
update of a convolution is the same for the weight folded to a matrix, so stride, padding, dilation and groups stay
those of the layer. All updates are additive in the weight, so the mixture w + Σ_c π_c U_c V_cᵀ is one weight, and a
mixed model needs one forward pass, whatever C is.

Foldings of a convolution ``[O, I, k1, k2]``, rows × columns, and the parameter count of rank r:

    balanced    one kernel axis to O, the other to I: least rows + columns   (c_min k_max + c_max k_min) r
    filter      O k2 × I k1 at rank O r: r filters of two steps per output   (O k2 + I k1) O r (eq. 39)
    channel     O k1 k2 × I, or O × I k1 k2 where that is less               (c_min k1 k2 + c_max) r (eq. 38)
    reshaped    O k1 k2 × I                                                  (O k1 k2 + I) r (eq. 41)
    input       O × I k1 k2                                                  (O + I k1 k2) r (Table 4)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from ...core.arguments.field_checks import check_value
from ...core.errors import ConfigError
from ...core.key import Key
from ...core.tree import tree_dataclass, widen
from ...linalg.factored import thin_svd

Construction = Literal["balanced", "filter", "channel", "reshaped", "input"]
Factor = Literal["u", "v"]
EPS = 1e-5
"""ε of the preconditioner, as in the authors' code."""


@tree_dataclass
class Pairs:
    """C low-rank updates U_c V_cᵀ of one folded weight.

    Attributes:
        u: factors U_c, ``[C, rows, r]``.
        v: factors V_c, ``[C, columns, r]``.
    """

    u: Tensor
    v: Tensor

    @property
    def rank(self) -> int:
        """The rank of each update."""
        return self.u.shape[-1]

    def dense(self) -> Tensor:
        """The updates ``[C, rows, columns]``."""
        return self.u @ self.v.mT

    def mix(self, pi: Tensor) -> Tensor:
        """Compute Σ_c π_c U_c V_cᵀ for ``pi [C]`` as one product ``[rows, columns]``."""
        weighted_u = (self.u * pi[:, None, None]).movedim(0, 1).flatten(1)
        return weighted_u @ self.v.movedim(0, 1).flatten(1).mT


@dataclass(frozen=True)
class Fold:
    """The folding of a weight to a matrix: ``rows`` lists the axes that form its rows, the others form its columns.

    The rank is ``times`` the requested one (O for ``filter``).
    """

    shape: tuple[int, ...]
    rows: tuple[int, ...]
    times: int = 1

    @property
    def columns(self) -> tuple[int, ...]:
        """The axes that form the columns."""
        return tuple(i for i in range(len(self.shape)) if i not in self.rows)

    @property
    def size(self) -> tuple[int, int]:
        """The number of rows and of columns."""
        return math.prod(self.shape[i] for i in self.rows), math.prod(self.shape[i] for i in self.columns)

    def unfold(self, matrix: Tensor) -> Tensor:
        """Reshape a matrix ``[rows, columns]`` to the shape of the weight."""
        order = (*self.rows, *self.columns)
        back = [order.index(i) for i in range(len(order))]
        return matrix.reshape([self.shape[i] for i in order]).permute(back)

    def rank(self, rank_or_budget: float) -> int:
        """Compute the rank for an integer ≥ 1, or for a budget ρ in (0, 1).

        For a budget it is the largest r ≥ 1 with r (rows + columns) ≤ ρ numel, and at least 1.

        Raises:
            ConfigError: if the argument is neither.
        """
        rank_or_budget = check_rank_or_budget("rank", rank_or_budget)
        if rank_or_budget >= 1:
            return int(rank_or_budget) * self.times
        # ρ itself is rounded, so a value just above the bound counts as at the bound
        affordable_rank = rank_or_budget * math.prod(self.shape) / (sum(self.size) * self.times)
        return max(1, math.floor(affordable_rank + 1e-9)) * self.times


def choose_fold(shape: tuple[int, ...], construction: Construction = "balanced") -> Fold:
    """Choose the folding of a weight ``[O, I, kernel...]``, or transposed ``[I, O, kernel...]``."""
    if len(shape) == 2:
        return Fold(shape, (0,))
    kernel = range(2, len(shape))
    if construction == "filter":
        # a single kernel axis cannot be divided: it stays with the inputs, as k1 does
        return Fold(shape, (0, *list(kernel)[1:]), shape[0])
    axis_sets: list[tuple[int, ...]] = [()]
    if construction == "balanced":
        # both factors take an axis, even where one factor with all axes would be smaller (c_max / c_min > k_max):
        # that is "channel"
        kernel_dims = len(kernel)
        counts = range(1, kernel_dims) if kernel_dims > 1 else range(2)
        axis_sets = [c for n in counts for c in itertools.combinations(kernel, n)]
    elif construction == "channel":
        axis_sets = [(), tuple(kernel)]
    elif construction == "reshaped":
        axis_sets = [tuple(kernel)]
    folds = [Fold(shape, (0, *axes)) for axes in axis_sets]
    return min(folds, key=lambda f: sum(f.size))


def initial_pairs(
    fold: Fold,
    rank: float,
    cluster_count: int,
    key: Key,
    dtype: torch.dtype = torch.float32,
    random: Factor = "u",
    scale: float = 1.0,
) -> Pairs:
    """Create C initial updates of zero: one factor is uniform in ±scale·√(6 / columns), the other is zero.

    Args:
        fold: folding of the weight.
        rank: integer rank, or a budget; see :meth:`Fold.rank`.
        cluster_count: number C of updates.
        key: source of randomness; each update has a subkey.
        dtype: type of the weight.
        random: factor that is random; by default U, as in the paper.
        scale: factor on the range of the random values; 1 in the paper.
    """
    (rows, columns), r = fold.size, fold.rank(rank)
    size, other_size = (columns, rows) if random == "v" else (rows, columns)
    samples = [
        torch.rand(size, r, generator=(key / c).generator(), dtype=dtype) for c in range(cluster_count)
    ]
    random_factors = (2 * torch.stack(samples) - 1) * scale * math.sqrt(6 / columns)
    zero_factors = torch.zeros(cluster_count, other_size, r, dtype=dtype)
    return Pairs(zero_factors, random_factors) if random == "v" else Pairs(random_factors, zero_factors)


def precondition_matrix(gradient: Pairs, pairs: Pairs, eps: float = EPS) -> Pairs:
    """Compute G_U (VᵀV + εI)⁻¹ and G_V (UᵀU + εI)⁻¹ by one linear solve for all C updates (appendix D).

    So the step of U Vᵀ does not depend on how its norm is divided between the factors.
    """

    def solved(g: Tensor, factor: Tensor) -> Tensor:
        factor = widen(factor)
        gram = factor.mT @ factor + eps * torch.eye(pairs.rank, dtype=factor.dtype, device=factor.device)
        # The matrix is symmetric, so dividing from the right is solving for the transpose. If a client diverges, ε
        # may be rounded away: solve_ex then gives a NaN and not an error that names no client.
        solution: Tensor = torch.linalg.solve_ex(gram, widen(g).mT).result
        return solution.mT.to(g.dtype)

    return Pairs(solved(gradient.u, pairs.v), solved(gradient.v, pairs.u))


def precondition_convolution(gradient: Pairs, pairs: Pairs, eps: float = EPS) -> Pairs:
    """Compute G_U / (‖VᵀV‖ + ε) and G_V / (‖UᵀU‖ + ε) with Frobenius norms, for convolutions (appendix D)."""

    def scaled(g: Tensor, factor: Tensor) -> Tensor:
        factor = widen(factor)
        size: Tensor = torch.linalg.matrix_norm(factor.mT @ factor, keepdim=True)
        return (g / (size + eps)).to(g.dtype)

    return Pairs(scaled(gradient.u, pairs.v), scaled(gradient.v, pairs.u))


def center_pairs(pairs: Pairs, weights: Tensor) -> tuple[Tensor, Pairs]:
    """Compute the mean update E_c[U_c V_cᵀ], which moves into the base, and rank-r factors of the rest (eq. 37).

    Args:
        pairs: updates of a folded weight.
        weights: weights of the mean, ``[C]``, which sum to 1.

    Returns:
        The mean ``[rows, columns]``, and updates whose singular values are divided evenly between the factors.
        Components beyond rank r are lost. Where a singular value is only rounding, U is zero and V a unit vector:
        if both were zero, no gradient would move them again.
    """
    mean, dense = pairs.mix(weights), widen(pairs.dense())
    u, s, vt = thin_svd(dense - mean)
    r = pairs.rank
    s = s[:, None, :r]
    is_nonzero = s > 10 * torch.finfo(s.dtype).eps * torch.linalg.matrix_norm(dense).amax()
    left = u[..., :r] * torch.where(is_nonzero, s.sqrt(), 0.0)
    right = vt.mT[..., :r] * torch.where(is_nonzero, s.sqrt(), 1.0)
    missing_columns = r - left.shape[-1]
    if missing_columns > 0:
        left, right = (functional.pad(t, (0, missing_columns)) for t in (left, right))
    dtype = pairs.u.dtype
    return mean, Pairs(left.contiguous().to(dtype), right.contiguous().to(dtype))


Statistics = tuple[Tensor, Tensor]
"""Mean and variance with which a BatchNorm normalizes, ``[d]`` or ``[C, d]``."""


def reparameterize(
    gamma: Tensor, beta: Tensor, main: Statistics, adaptor: Statistics, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """Compute γ_i' and β_i' of the adaptor's own BatchNorm such that γ_i, β_i are offsets of the main one (eq. 42).

    With them BN(x; γ, β) + BN_i(x; γ_i', β_i') = x̂ (γ + γ_i) + β + β_i, where x̂ is normalized by the main
    statistics.

    Args:
        gamma: offset γ_i, ``[d]``, or those of C adaptors, ``[C, d]``.
        beta: offset β_i, with the shape of ``gamma``.
        main: mean and variance of the main BatchNorm ``[d]``.
        adaptor: mean and variance of the adaptor's BatchNorm, with the shape of ``gamma``.
        eps: constant ε of the layer, which is added to both variances.

    Returns:
        γ_i' = (σ_i/σ) γ_i and β_i' = β_i + ((μ_i - μ)/σ) sg(γ_i), with the paper's stop-gradient sg.
    """
    (mean, var), (adaptor_mean, adaptor_var) = main, adaptor
    deviation = (var + eps).sqrt()
    return (adaptor_var + eps).sqrt() / deviation * gamma, beta + (
        adaptor_mean - mean
    ) / deviation * gamma.detach()


def as_offsets(
    gamma: Tensor, beta: Tensor, main: Statistics, adaptor: Statistics, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """Invert :func:`reparameterize`: compute the offsets of the main γ and β that are equivalent to BN_i(x; γ_i, β_i).

    They are (σ/σ_i) γ_i and β_i + ((μ - μ_i)/σ_i) γ_i.
    """
    (mean, var), (adaptor_mean, adaptor_var) = main, adaptor
    slope = gamma / (adaptor_var + eps).sqrt()
    return (var + eps).sqrt() * slope, beta + (mean - adaptor_mean) * slope


def main_statistics(layer: _BatchNorm) -> Statistics:
    """The running mean and variance of a layer that keeps them."""
    return cast(Tensor, layer.running_mean), cast(Tensor, layer.running_var)


class LowRankAdaptor(nn.Module):
    """C low-rank updates of one parameter."""

    def __init__(self, pairs: Pairs) -> None:
        super().__init__()
        self.u, self.v = nn.Parameter(pairs.u), nn.Parameter(pairs.v)


class OffsetAdaptor(nn.Module):
    """C offsets of one parameter."""

    def __init__(self, offset: Tensor) -> None:
        super().__init__()
        self.offset = nn.Parameter(offset)


class BatchNormAdaptor(OffsetAdaptor):
    """γ_c ``[C, d]`` of a BatchNorm's adaptors, each with its own running statistics (app. F.2)."""

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(self, offset: Tensor, layer: _BatchNorm) -> None:
        super().__init__(offset)
        mean, var = main_statistics(layer)
        self.register_buffer("running_mean", mean.repeat(len(offset), 1))
        self.register_buffer("running_var", var.repeat(len(offset), 1))
        self.register_buffer(
            "num_batches_tracked", torch.zeros(len(offset), dtype=torch.long, device=mean.device)
        )

    @property
    def statistics(self) -> Statistics:
        """Running means and variances ``[C, d]``."""
        return self.running_mean, self.running_var

    def term(self, x: Tensor, beta: Tensor, pi: Tensor, layer: _BatchNorm, training: bool) -> Tensor:
        """Compute Σ_c π_c BN_c(x; γ_c, β_c) in one pass, with the batch's statistics in training, else with running ones."""
        pi = pi.to(self.offset.dtype)
        if not training:
            slope = self.offset / (self.running_var + layer.eps).sqrt()
            shift = beta - slope * self.running_mean
            form = (1, -1, *[1] * (x.ndim - 2))
            return x * (pi @ slope).view(form) + (pi @ shift).view(form)
        # with momentum 1 these become the statistics of the batch, which all adaptors share
        mean, var = torch.zeros_like(self.running_mean[0]), torch.ones_like(self.running_var[0])
        y = functional.batch_norm(x, mean, var, pi @ self.offset, pi @ beta, True, 1.0, layer.eps)
        with torch.no_grad():
            # an adaptor without a share takes no part in the layer, so its statistics do not change
            is_active = (pi > 0).to(mean.dtype)
            self.num_batches_tracked += pi > 0
            batch_counts = self.num_batches_tracked.clamp(min=1).to(mean.dtype)
            step = (is_active / batch_counts if layer.momentum is None else is_active * layer.momentum)[
                :, None
            ]
            self.running_mean += step * (mean - self.running_mean)
            self.running_var += step * (var - self.running_var)
        return y


def check_rank_or_budget(name: str, value: Any) -> float:
    """Check an integer rank ≥ 1 or a budget ρ in (0, 1); raises a ConfigError that begins with the name otherwise."""
    number: float = check_value(name, float, value)
    if not 0 < number < 1 and not (number >= 1 and float(number).is_integer()):
        raise ConfigError(
            f"{name} must be an integer >= 1, or a budget in (0, 1) of a layer's parameters; it is {number}"
        )
    return number


def check_ranks_or_budgets(owner: str, rank: float, pattern: Mapping[str, float]) -> None:
    """Check the arguments ``rank`` and ``rank_pattern`` of a constructor."""
    check_rank_or_budget(f"{owner}.rank", rank)
    for suffix, rank_or_budget in pattern.items():
        check_rank_or_budget(f"{owner}.rank_pattern[{suffix!r}]", rank_or_budget)
