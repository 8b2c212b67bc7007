"""The server's effective update in federated LoRA: the delta that is added to each frozen weight.

The delta W ``[d, k]`` of a weight is a sum of uploads in the unit of the weight, Σ w_b B_b A_b; the scale α/r is
part of w_b and does not appear here. A round of FedHL (Peng et al., Algorithm 1, line 17) is

    W ← Σ_i p_i [W + s_i B_i A_i - W^{r_i}],    W^{r}: the best approximation of rank r.

:func:`update_deltas` computes this step without forming a matrix. All W^{r_i} have the singular vectors of W, so
the terms W - W^{r_i} only multiply each singular value by a share (:class:`_LayerStep`). The uploads are added as
factors (:mod:`fedlowrank.linalg.low_rank_sum`). FlexLoRA, FLoRA and the exact average of factor pairs are the same
sum without the first term, ``previous=0``.

A delta is stored in one of three states, which give the same values:

- exact: U diag(s) Vᵀ with every triplet above rounding;
- capped: the same with at most ``cap`` triplets; the energy that was cut off is recorded;
- dense: W itself and its leading triplets (:mod:`.randomized_svd`). An iteration that begins at the previous ones
  computes them. If it cannot prove that they are singular triplets and that none is missing (to the share given
  there), the eigenvectors of the Gram matrix replace them, or, as a last resort, a full decomposition. The
  truncation that is subtracted for a client is exactly the one that the client was sent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from ..core.arguments.bounds import check_minimum
from ..core.arguments.field_checks import CheckedFields
from ..core.errors import ConfigError, TaskError, did_you_mean
from ..core.tree import tree_dataclass
from .factored import Factored
from .low_rank_sum import REAL, add_low_rank, empty_rows
from .pair import Pair
from .randomized_svd import leading_triplets

FormNow = Literal["exact", "capped", "dense"]
FactorSplit = Literal["sqrt", "B", "A"]
LowRankTerms = Mapping[str, Sequence[tuple[float, Pair]]]
"""The terms w_b B_b A_b of a sum, by layer name: weights w_b and the factor pairs that they multiply."""
SentRanks = Mapping[str, Sequence[tuple[float, int]]]
"""Weights p_i and ranks r_i of the clients that were sent the truncation W^{r_i}, by layer name."""

MIN_KEPT_SHARE = 1e-12
"""A triplet is dropped if its kept share is at most this fraction of all weights, because such a share is rounding."""
BATCH_ENTRIES = 2**20
"""Maximum number of entries in one factor of the stacks that are decomposed together; further layers follow in turn, to
bound the memory. On a CPU larger batches are no faster, and the extra work of one ill-conditioned layer is done for all."""


@tree_dataclass
class DeltaForm(CheckedFields):
    """How the server stores a delta.

    Attributes:
        kind: state of the delta: exact, capped or dense, see the module; or auto: exact while factors of the
            stacked width (rank kept + ranks of the terms of a round) are no larger than the matrix, width·(d + k) ≤
            d·k, and dense from then on. At about this width a step costs the same in both states
            (docs/results/server-step.md).
        cap: maximum number of triplets in the capped form; None for four times the largest rank of a client.
        dtype: type of factors and matrices; singular values and energies are in float64.
    """

    kind: Literal["auto", "exact", "capped", "dense"] = "auto"
    cap: int | None = None
    dtype: Literal["float64", "float32"] = "float64"

    def __post_init__(self) -> None:
        if self.cap is None:
            return
        if self.kind != "capped":
            raise ConfigError(
                f"DeltaForm.cap is {self.cap!r}, but only kind = 'capped' has a cap; the kind is {self.kind!r}"
            )
        check_minimum("DeltaForm.cap", self.cap, 1)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as a ``torch.dtype``."""
        return torch.float64 if self.dtype == "float64" else torch.float32


@tree_dataclass
class Delta:
    """The update that is added to one frozen weight ``[d, k]``.

    Attributes:
        u: left singular vectors ``[d, r]`` with orthonormal columns; in the dense state only the leading ones.
        s: singular values in float64, descending and above 0 ``[r]``.
        v: right singular vectors ``[k, r]`` with orthonormal columns.
        matrix: matrix W ``[d, k]`` in the dense state, otherwise None.
        energy: squared norm ‖W‖_F², summed in float64.
        discarded_energy: squared norm ‖·‖_F² of the triplets that the last step cut off to keep the cap.
        total_discarded_energy: sum of ``discarded_energy`` over all steps.
        max_client_rank: largest rank of a client; in the dense state no more triplets are known.
        form: form in which the delta is stored.
    """

    u: Tensor
    s: Tensor
    v: Tensor
    matrix: Tensor | None
    energy: float
    discarded_energy: float
    total_discarded_energy: float
    max_client_rank: int
    form: DeltaForm

    @property
    def state(self) -> FormNow:
        """The state in which the delta is stored."""
        if self.matrix is not None:
            return "dense"
        return "capped" if self.form.kind == "capped" else "exact"

    @property
    def shape(self) -> tuple[int, int]:
        """The shape (d, k) of W."""
        return self.u.shape[0], self.v.shape[0]

    @property
    def rank(self) -> int:
        """The number of stored triplets: the rank of W; in the dense state at most ``max_client_rank``."""
        return len(self.s)

    @property
    def has_all_triplets(self) -> bool:
        """Whether all nonzero triplets are stored."""
        if self.matrix is None:
            return True
        return self.rank < self.max_client_rank or self.max_client_rank == min(self.shape)

    def dense(self) -> Tensor:
        """The matrix W ``[d, k]``."""
        return (self.u * self.s.to(self.u.dtype)) @ self.v.mT if self.matrix is None else self.matrix


def initial_deltas(
    shapes: Mapping[str, tuple[int, int]], form: DeltaForm, r_max: int, device: torch.device | str = "cpu"
) -> dict[str, Delta]:
    """Build zero deltas, which have rank 0.

    Args:
        shapes: shape (d, k) of every adapted weight, by layer name.
        form: form in which they are stored.
        r_max: largest rank of a client.
        device: device on which they are stored and computed.

    Raises:
        ConfigError: if ``r_max`` is not an integer of at least 1.
        TaskError: if a weight has no entries.
    """
    r_max = check_minimum("r_max, the largest rank of a client,", r_max, 1)
    deltas = {}
    for name, (d, k) in shapes.items():
        if min(d, k) < 1:
            raise TaskError(
                f"the layer {name!r} has a weight of shape ({d}, {k}), to which nothing can be added"
            )
        empty_tensor = torch.empty(0, dtype=form.torch_dtype, device=device)
        matrix = empty_tensor.new_zeros(d, k) if form.kind == "dense" else None
        s = empty_tensor.new_zeros(0, dtype=REAL)
        max_client_rank = min(r_max, d, k)
        deltas[name] = Delta(
            empty_tensor.reshape(d, 0),
            s,
            empty_tensor.reshape(k, 0),
            matrix,
            0.0,
            0.0,
            0.0,
            max_client_rank,
            form,
        )
        if form.kind == "capped" and form.cap is None:
            deltas[name] = replace(deltas[name], form=replace(form, cap=4 * r_max))
    return deltas


def update_deltas(
    deltas: Mapping[str, Delta],
    terms: LowRankTerms,
    *,
    sent_ranks: SentRanks | None = None,
    previous_weight: float = 1.0,
) -> dict[str, Delta]:
    """Compute one step of the server: W' = previous·W - Σ_i p_i W^{r_i} + Σ_b w_b B_b A_b for every layer.

    In the factored states no tensor of d·k entries is created while the stack is narrower than d and k. Layers with
    the same shape and the same stacked width are decomposed together.

    Args:
        deltas: current delta W of every layer, by layer name.
        terms: pairs (w_b, factor pair) of every layer; a missing layer has no terms. The weight includes the scale
            of the upload. It may be negative: in this way a server subtracts a truncation exactly as it was sent
            over a lossy wire (:mod:`fedlowrank.adapters.wire_format`). Factor pairs have any floating-point type
            and device; the computation has the dtype and the device of W.
        sent_ranks: weights p_i and ranks r_i of the clients that were sent :func:`truncate_delta` exactly, by layer
            name.
        previous_weight: weight of the previous delta: 1 to add to it, 0 to replace it.

    Returns:
        The new deltas W' by layer name, in the order of ``deltas``.

    Raises:
        TaskError: if a layer is unknown, the shape of a pair does not match it, or the numbers are not finite.
        ConfigError: if a weight is not finite, or :func:`truncate_delta` would have refused a rank in
            ``sent_ranks``.
    """
    sent_ranks = sent_ranks or {}
    for name in (*terms, *sent_ranks):
        if name not in deltas:
            raise TaskError(f"the server has no layer {name!r}. {did_you_mean(name, deltas)}")
    new_deltas: dict[str, Delta] = {}
    factored_steps: dict[tuple[object, ...], list[_LayerStep]] = {}
    for name, delta in deltas.items():
        step = _LayerStep(name, delta, terms.get(name, ()), sent_ranks.get(name, ()), previous_weight)
        (d, k), is_auto = delta.shape, delta.form.kind == "auto"
        if delta.matrix is not None or (is_auto and step.width * (d + k) > d * k):
            new_deltas[name] = _update_matrix(step, previous_weight)
        else:
            key = (delta.shape, step.kept_rank, step.width, delta.u.dtype, delta.u.device, delta.form.cap)
            factored_steps.setdefault(key, []).append(step)
    for steps in factored_steps.values():
        batch_size = max(1, BATCH_ENTRIES // max(1, max(steps[0].delta.shape) * steps[0].width))
        for i in range(0, len(steps), batch_size):
            new_deltas.update(_update_factors(steps[i : i + batch_size]))
    return {name: new_deltas[name] for name in deltas}


class _LayerStep:
    """A checked step of one layer, in the basis of the singular vectors of its W.

    With W = Σ_j s_j u_j v_jᵀ (j from 0), the truncation is W^{r} = Σ_{j < r} s_j u_j v_jᵀ. Hence

        previous·W - Σ_i p_i W^{r_i} = Σ_j (previous - Σ_{i: r_i > j} p_i) s_j u_j v_jᵀ.

    The j-th triplet keeps its vectors, and its singular value is multiplied by the share in parentheses. In FedHL
    ``previous`` and Σ_i p_i are 1. Then the share is 0 for a triplet that every client was sent: their uploads
    replace it. It is 1 for a triplet that no client was sent: the server keeps it. For all others it is the total
    weight of the clients that were not sent the triplet.

    Attributes:
        subtracted_shares: sum Σ_{i: r_i > j} p_i of every triplet j.
        kept_triplets: indices j of all triplets whose share exceeds rounding.
        kept_shares: share of each kept triplet.
        kept_rank: number of kept triplets.
        terms: added terms w_b B_b A_b that are not zero.
        width: number of columns of the stack of kept triplets and added factors.
    """

    def __init__(
        self,
        name: str,
        delta: Delta,
        terms: Sequence[tuple[float, Pair]],
        sent_ranks: Sequence[tuple[float, int]],
        previous_weight: float,
    ) -> None:
        self.name, self.delta = name, delta
        weights = [previous_weight, *(w for w, _ in terms), *(p for p, _ in sent_ranks)]
        if not all(math.isfinite(w) for w in weights):
            raise ConfigError(f"layer {name!r}: all weights must be finite; they are {weights}")
        _check_shapes(name, delta, terms)
        self.subtracted_shares = [0.0] * delta.rank
        for p, rank in sent_ranks:
            for j in range(min(_check_rank(delta, rank), delta.rank)):
                self.subtracted_shares[j] += p
        shares = [previous_weight - subtracted_share for subtracted_share in self.subtracted_shares]
        sum_of_weights = abs(previous_weight) + sum(abs(p) for p, _ in sent_ranks)
        self.kept_triplets = [
            j for j, share in enumerate(shares) if abs(share) > MIN_KEPT_SHARE * sum_of_weights
        ]
        self.kept_shares = [shares[j] for j in self.kept_triplets]
        self.kept_rank = len(self.kept_triplets)
        self.terms = [(w, pair) for w, pair in terms if w != 0 and pair.rank]
        self.width = self.kept_rank + sum(pair.rank for _, pair in self.terms)

    def write_terms(self, left: Tensor, right: Tensor) -> None:
        """Write the weighted B and the A of all terms, both as rows, ``[M, d]`` and ``[M, k]``."""
        start = 0
        for w, pair in self.terms:
            rows = slice(start, start + pair.rank)
            left[rows].copy_(pair.b.detach().mT).mul_(w)
            right[rows].copy_(pair.a.detach())
            start += pair.rank

    def overflow_error(self) -> TaskError:
        return TaskError(
            f"the update of the layer {self.name!r} is not finite: a client uploaded a NaN, an infinity, or "
            "numbers whose squares overflow. Lower the learning rate or clip the gradient (optimizer.clip)."
        )


def _check_shapes(name: str, delta: Delta, terms: Sequence[tuple[float, Pair]]) -> None:
    d, k = delta.shape
    for i, (_, pair) in enumerate(terms):
        if pair.b.shape != (d, pair.rank) or pair.a.shape != (pair.rank, k):
            raise TaskError(
                f"layer {name!r}, term {i}: B {tuple(pair.b.shape)} and A {tuple(pair.a.shape)} are no "
                f"factors of an update ({d}, {k}); expected (d, r) and (r, k)"
            )


def _update_factors(steps: list[_LayerStep]) -> dict[str, Delta]:
    """Compute the steps of layers stored as factors that have the same shape and the same stacked width."""
    first_step = steps[0]
    reference, (d, k), m = first_step.delta.u, first_step.delta.shape, first_step.width - first_step.kept_rank
    left, right = empty_rows(reference, len(steps), m, d), empty_rows(reference, len(steps), m, k)
    for i, step in enumerate(steps):
        step.write_terms(left[i], right[i])
        # no singular value can exceed this product, so the computation below does not overflow
        norms = torch.linalg.vector_norm(left[i], dtype=REAL) * torch.linalg.vector_norm(right[i], dtype=REAL)
        if not bool(norms.square().isfinite()):
            raise step.overflow_error()
    u = _stack([_select_columns(step.delta.u, step.kept_triplets) for step in steps])
    v = _stack([_select_columns(step.delta.v, step.kept_triplets) for step in steps])
    s = torch.stack(
        [step.delta.s[step.kept_triplets] * step.delta.s.new_tensor(step.kept_shares) for step in steps]
    )
    new_deltas = {}
    decompositions = add_low_rank(u, s, v, left.mT, right.mT, first_step.delta.form.cap)
    for step, (u1, s1, v1, discarded_values) in zip(steps, decompositions, strict=True):
        discarded_energy = float(discarded_values.square().sum())
        new_deltas[step.name] = replace(
            step.delta,
            u=u1,
            s=s1,
            v=v1,
            energy=float(s1.square().sum()),
            discarded_energy=discarded_energy,
            total_discarded_energy=step.delta.total_discarded_energy + discarded_energy,
        )
    return new_deltas


def _select_columns(u: Tensor, columns: list[int]) -> Tensor:
    # the columns are usually the last ones, which need no copy
    if columns and columns[-1] - columns[0] == len(columns) - 1:
        return u[:, columns[0] : columns[-1] + 1]
    return u[:, columns]


def _stack(matrices: list[Tensor]) -> Tensor:
    return matrices[0][None] if len(matrices) == 1 else torch.stack(matrices)


def _update_matrix(step: _LayerStep, previous_weight: float) -> Delta:
    """Compute the step of a layer that is stored as a matrix, or becomes one in this step."""
    delta, m = step.delta, step.width - step.kept_rank
    (d, k), reference = delta.shape, delta.u
    left, right = reference.new_empty(delta.rank + m, d), reference.new_empty(delta.rank + m, k)
    subtracted_values = delta.s * delta.s.new_tensor(step.subtracted_shares)
    left[: delta.rank] = (delta.u * subtracted_values.to(reference.dtype)).mT.neg()
    right[: delta.rank] = delta.v.mT
    step.write_terms(left[delta.rank :], right[delta.rank :])
    matrix = torch.addmm(delta.dense(), left.mT, right, beta=previous_weight)
    energy = float(torch.linalg.vector_norm(matrix, dtype=REAL).square())
    if not math.isfinite(energy):
        raise step.overflow_error()
    u, s, v = leading_triplets(matrix, delta.max_client_rank, delta.v)
    return replace(delta, u=u, s=s, v=v, matrix=matrix, energy=energy, discarded_energy=0.0)


def _check_rank(delta: Delta, rank: int) -> int:
    rank = check_minimum("rank", rank, 0)
    if rank > delta.rank and not delta.has_all_triplets:
        raise ConfigError(
            f"rank {rank} was asked for, but in the dense state only the leading {delta.max_client_rank} triplets are "
            "known; give initial_deltas the largest rank of a client as r_max, or use the form 'exact'"
        )
    return rank


def truncate_delta(delta: Delta, rank: int) -> Factored:
    """Truncate W to W^{r}, the best approximation of rank r: the leading triplets, in the dtype of W.

    Args:
        delta: delta W.
        rank: rank r ≥ 0; if W has a smaller rank, there are fewer triplets.

    Raises:
        ConfigError: if the rank is negative, or above ``delta.max_client_rank`` in the dense state.
    """
    rank = _check_rank(delta, rank)
    u, s, v = delta.u[:, :rank], delta.s[:rank].to(delta.u.dtype), delta.v[:, :rank]
    return Factored(u.contiguous(), s.contiguous(), v.contiguous())


def measure_tail_energy(delta: Delta, ranks: Sequence[int]) -> list[float]:
    """Measure ‖W - W^{r}‖_F² for every rank, in float64; see :func:`truncate_delta` for the ranks.

    It is the sum of the squares of the truncated singular values (Eckart and Young). In the dense state these are
    not known, and it is ‖W‖_F² minus the squares of the kept ones, but at least 0.
    """
    kept_ranks = [min(_check_rank(delta, rank), delta.rank) for rank in ranks]
    squares = delta.s.to(REAL).square()
    # summed from the smallest value up, so that a tail far below the leading values is not rounded away
    tails = [*squares.flip(0).cumsum(0).flip(0).tolist(), 0.0]
    unknown_energy = 0.0 if delta.has_all_triplets else max(0.0, delta.energy - tails[0])
    return [unknown_energy + tails[rank] for rank in kept_ranks]


def split_svd(f: Factored, rank: int, split: FactorSplit = "sqrt", scale: float = 1.0) -> Pair:
    """Split U diag(s) Vᵀ into the initial factors of a client: scale·B A is the leading part.

    Args:
        f: triplets, descending; only the leading ``rank`` triplets are used.
        rank: number of columns of B. Missing triplets become zero columns of B and zero rows of A, where the
            gradient of both is zero: fill these rows of A with random numbers before training.
        split: factor that takes the singular values: sqrt, B = U √S and A = √S Vᵀ (FedHL); B, B = U S and A = Vᵀ
            (FlexLoRA); A, B = U and A = S Vᵀ.
        scale: scale of the product, not 0. The factors are divided by it as ``split`` divides the singular values; of a
            negative scale, B takes the sign.

    Raises:
        ConfigError: if ``split`` is unknown or the rank is negative.
    """
    choices: tuple[FactorSplit, ...] = ("sqrt", "B", "A")
    if split not in choices:
        raise ConfigError(f"split: {split!r} is no choice. {did_you_mean(str(split), choices)}")
    rank = check_minimum("rank", rank, 0)
    r = min(rank, f.rank)
    power = {"sqrt": 0.5, "B": 1.0, "A": 0.0}[split]
    b, a = f.u.new_zeros(f.u.shape[0], rank), f.v.new_zeros(rank, f.v.shape[0])
    b[:, :r] = f.u[:, :r] * f.s[:r] ** power / math.copysign(abs(scale) ** power, scale)
    a[:r] = f.s[:r, None] ** (1 - power) * f.v[:, :r].mT / abs(scale) ** (1 - power)
    return Pair(b, a)


def measure_product_norm(pair: Pair) -> float:
    """Measure ‖B A‖_F = √tr((BᵀB)(A Aᵀ)) in float64, without forming the product."""
    b, a = pair.b.detach().to(REAL), pair.a.detach().to(REAL)
    # rounding may make the trace negative where the components cancel
    return math.sqrt(max(0.0, float(((b.mT @ b) * (a @ a.mT)).sum())))
