"""The server's effective update in federated LoRA: what is added to each frozen weight.

The delta W ``[d, k]`` of a weight is what uploads amount to once their scale is multiplied in, Σ w_b B_b A_b;
α/r appears nowhere here. A round of FedHL (Peng et al., Algorithm 1, line 17) is W ← Σ_i p_i [W + s_i B_i A_i
- W^{r_i}], with W^{r} the best approximation of rank r. In the basis of the singular vectors it needs no
matrix: the j-th singular value (j from 0) keeps the share 1 - Σ_{i: r_i > j} p_i, and the uploads are added
as factors (:mod:`fedlowrank.linalg.stacking`). FlexLoRA, FLoRA and the exact average of factor pairs are the
same sum without the first term, ``previous=0``.

A delta is in one of three states, which give the same values:

- exact: U diag(s) Vᵀ with all that is not rounding;
- capped: the same, but at most ``cap`` triplets; the energy that was cut off is on record;
- dense: W itself and its leading ``top`` triplets (:mod:`.randomized_svd`). They come from an iteration that
  begins at the last ones; unless it is proven that they are singular triplets and that none is missing (to
  the share given there) the eigenvectors of the Gram matrix take their place, and at last a full
  decomposition. What is subtracted for a client is precisely what it was sent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from ..core.arguments.field_checks import CheckedFields
from ..core.errors import ConfigError, TaskError, did_you_mean
from ..core.tree import tree_dataclass
from .factored import Factored
from .pair import Pair
from .randomized_svd import leading_triplets
from .stacking import REAL, add_low_rank, empty_rows

FormNow = Literal["exact", "capped", "dense"]
FactorSplit = Literal["sqrt", "B", "A"]
Blocks = Mapping[str, Sequence[tuple[float, Pair]]]
"""By layer name, weights and the factor pairs that they multiply."""
SentRanks = Mapping[str, Sequence[tuple[float, int]]]
"""By layer name, weights p_i and ranks r_i of the clients that were sent the truncation W^{r_i}."""

VANISHING = 1e-12
"""A singular value vanishes if its share of all weights is at most this: it is rounding."""
BATCH_ENTRIES = 2**20
"""Numbers of one factor of the stacks that are decomposed together; more layers are done in turn, to bound
the memory. On a CPU, larger ones are no faster, and what one layer of a batch needs by its condition is done
for all of them."""


@tree_dataclass
class DeltaForm(CheckedFields):
    """How the server stores a delta.

    Attributes:
        kind: exact, capped or dense, see the module; or auto, exact while the stacked width (rank kept +
            ranks of the blocks of a round) has factors no larger than the matrix, width·(d + k) ≤ d·k, and
            dense from then on. About there the steps of both cost the same, too
            (docs/results/server_step.md).
        cap: triplets that the capped form keeps; None for four times the largest rank of a client.
        dtype: of factors and matrices; singular values and energies are in float64.
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
        if type(self.cap) is not int or self.cap < 1:
            raise ConfigError(
                f"DeltaForm.cap must be a whole number of at least 1, or None; it is {self.cap!r}"
            )

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch knows it."""
        return torch.float64 if self.dtype == "float64" else torch.float32


@tree_dataclass
class Delta:
    """What is added to one frozen weight ``[d, k]``.

    Attributes:
        u: ``[d, r]`` with orthonormal columns; in the dense state the leading ones.
        s: singular values in float64, descending and above 0 ``[r]``.
        v: ``[k, r]`` with orthonormal columns.
        whole: W ``[d, k]`` in the dense state, else None.
        energy: ‖W‖_F², summed in float64.
        discarded: ‖·‖_F² of what the last step cut off to keep the cap.
        discarded_total: the sum of it over all steps.
        top: the largest rank that a client may ask for in the dense state.
        form: in which state it is stored.
    """

    u: Tensor
    s: Tensor
    v: Tensor
    whole: Tensor | None
    energy: float
    discarded: float
    discarded_total: float
    top: int
    form: DeltaForm

    @property
    def state(self) -> FormNow:
        """In which of the three states it is."""
        if self.whole is not None:
            return "dense"
        return "capped" if self.form.kind == "capped" else "exact"

    @property
    def shape(self) -> tuple[int, int]:
        """(d, k)."""
        return self.u.shape[0], self.v.shape[0]

    @property
    def rank(self) -> int:
        """Number of triplets stored: the rank of W, or ``top`` in the dense state if that is less."""
        return len(self.s)

    @property
    def complete(self) -> bool:
        """Whether the stored triplets are all nonzero ones."""
        return self.whole is None or self.rank < self.top or self.top == min(self.shape)

    def dense(self) -> Tensor:
        """W ``[d, k]``."""
        return (self.u * self.s.to(self.u.dtype)) @ self.v.mT if self.whole is None else self.whole


def initial_deltas(
    shapes: Mapping[str, tuple[int, int]], form: DeltaForm, r_max: int, device: torch.device | str = "cpu"
) -> dict[str, Delta]:
    """Updates of zero, of rank 0.

    Args:
        shapes: (d, k) of every adapted weight, by layer name.
        form: how to store them.
        r_max: the largest rank of a client.
        device: where they live and are computed.

    Raises:
        ConfigError: if ``r_max`` is not a whole number of at least 1.
        TaskError: if a weight has no entries.
    """
    if type(r_max) is not int or r_max < 1:
        raise ConfigError(
            f"r_max, the largest rank of a client, must be a whole number of at least 1; it is {r_max!r}"
        )
    out = {}
    for name, (d, k) in shapes.items():
        if min(d, k) < 1:
            raise TaskError(
                f"the layer {name!r} has a weight of shape ({d}, {k}), to which nothing can be added"
            )
        empty = torch.empty(0, dtype=form.torch_dtype, device=device)
        whole = empty.new_zeros(d, k) if form.kind == "dense" else None
        s = empty.new_zeros(0, dtype=REAL)
        top = min(r_max, d, k)
        out[name] = Delta(empty.reshape(d, 0), s, empty.reshape(k, 0), whole, 0.0, 0.0, 0.0, top, form)
        if form.kind == "capped" and form.cap is None:
            out[name] = replace(out[name], form=replace(form, cap=4 * r_max))
    return out


def update_deltas(
    deltas: Mapping[str, Delta], blocks: Blocks, *, sent_ranks: SentRanks | None = None, previous: float = 1.0
) -> dict[str, Delta]:
    """One step of the server: W' = previous·W - Σ_i p_i W^{r_i} + Σ_b w_b B_b A_b for every layer.

    In the factored states no tensor of d·k entries is made while the stack is narrower than d and k. Layers
    of one shape and one stacked width are decomposed together.

    Args:
        deltas: W by layer name.
        blocks: (w_b, pair) of every layer; a layer that is left out has none. The weight includes the scale
            of the upload. It may be negative: so a server subtracts what it sent over a lossy wire
            (:mod:`fedlowrank.adapters.wire_format`), to the last bit. Pairs of any floating-point type, on
            any device; they are computed in the dtype and on the device of W.
        sent_ranks: (p_i, r_i) of the clients that were sent :func:`truncate_delta` without loss.
        previous: 1 to add to the previous delta, 0 to replace it.

    Returns:
        W' by layer name, in the order of ``deltas``.

    Raises:
        TaskError: if a layer is unknown, a pair does not fit it, or the numbers are not finite.
        ConfigError: if a weight is not finite, or a rank in ``sent_ranks`` is one that :func:`truncate_delta`
            would have refused.
    """
    sent_ranks = sent_ranks or {}
    for given in (blocks, sent_ranks):
        for name in given:
            if name not in deltas:
                raise TaskError(f"the server has no layer {name!r}. {did_you_mean(name, deltas)}")
    out: dict[str, Delta] = {}
    groups: dict[tuple[object, ...], list[_Step]] = {}
    for name, delta in deltas.items():
        step = _Step(name, delta, blocks.get(name, ()), sent_ranks.get(name, ()), previous)
        (d, k), auto = delta.shape, delta.form.kind == "auto"
        if delta.whole is not None or (auto and step.width * (d + k) > d * k):
            out[name] = _dense_step(step, previous)
        else:
            key = (delta.shape, step.kept_rank, step.width, delta.u.dtype, delta.u.device, delta.form.cap)
            groups.setdefault(key, []).append(step)
    for steps in groups.values():
        count = max(1, BATCH_ENTRIES // max(1, max(steps[0].delta.shape) * steps[0].width))
        for i in range(0, len(steps), count):
            out.update(_factored_step(steps[i : i + count]))
    return {name: out[name] for name in deltas}


class _Step:
    """What a step does to one layer, checked."""

    def __init__(
        self,
        name: str,
        delta: Delta,
        blocks: Sequence[tuple[float, Pair]],
        sent_ranks: Sequence[tuple[float, int]],
        previous: float,
    ) -> None:
        self.name, self.delta = name, delta
        weights = [previous, *(w for w, _ in blocks), *(p for p, _ in sent_ranks)]
        if not all(math.isfinite(w) for w in weights):
            raise ConfigError(f"layer {name!r}: all weights must be finite; they are {weights}")
        (d, k), self.blocks = delta.shape, [(w, pair) for w, pair in blocks if w != 0 and pair.rank]
        for i, (_, pair) in enumerate(blocks):
            if pair.b.shape != (d, pair.rank) or pair.a.shape != (pair.rank, k):
                raise TaskError(
                    f"layer {name!r}, block {i}: B {tuple(pair.b.shape)} and A {tuple(pair.a.shape)} are no "
                    f"factors of an update ({d}, {k}); expected (d, r) and (r, k)"
                )
        self.subtracted = [0.0] * delta.rank
        for p, rank in sent_ranks:
            _check_rank(delta, rank)
            for j in range(min(rank, delta.rank)):
                self.subtracted[j] += p
        total = abs(previous) + sum(abs(p) for p, _ in sent_ranks)
        shares = [previous - c for c in self.subtracted]
        self.remaining = [j for j, share in enumerate(shares) if abs(share) > VANISHING * total]
        self.shares = [shares[j] for j in self.remaining]
        self.kept_rank = len(self.remaining)
        self.width = self.kept_rank + sum(pair.rank for _, pair in self.blocks)

    def write_blocks(self, left: Tensor, right: Tensor) -> None:
        """Write the blocks' weighted B and their A, both as rows, ``[M, d]`` and ``[M, k]``."""
        at = 0
        for w, pair in self.blocks:
            left[at : at + pair.rank].copy_(pair.b.detach().mT).mul_(w)
            right[at : at + pair.rank].copy_(pair.a.detach())
            at += pair.rank

    def overflow_error(self) -> TaskError:
        return TaskError(
            f"the update of the layer {self.name!r} is not finite: a client uploaded a NaN, an infinity, or "
            "numbers whose squares overflow. Lower the learning rate or clip the gradient (optimizer.clip)."
        )


def _factored_step(steps: list[_Step]) -> dict[str, Delta]:
    first = steps[0]
    like, (d, k), m = first.delta.u, first.delta.shape, first.width - first.kept_rank
    left, right = empty_rows(like, len(steps), m, d), empty_rows(like, len(steps), m, k)
    for i, step in enumerate(steps):
        step.write_blocks(left[i], right[i])
        # no singular value can exceed this product, so nothing below overflows
        norms = torch.linalg.vector_norm(left[i], dtype=REAL) * torch.linalg.vector_norm(right[i], dtype=REAL)
        if not bool(norms.square().isfinite()):
            raise step.overflow_error()
    u = _stack([_select_columns(step.delta.u, step.remaining) for step in steps])
    v = _stack([_select_columns(step.delta.v, step.remaining) for step in steps])
    s = torch.stack([step.delta.s[step.remaining] * step.delta.s.new_tensor(step.shares) for step in steps])
    out = {}
    found = add_low_rank(u, s, v, left.mT, right.mT, first.delta.form.cap)
    for step, (u1, s1, v1, cut) in zip(steps, found, strict=True):
        energy, lost = float(s1.square().sum()), float(cut.square().sum())
        total = step.delta.discarded_total + lost
        out[step.name] = replace(
            step.delta, u=u1, s=s1, v=v1, energy=energy, discarded=lost, discarded_total=total
        )  # fmt: skip
    return out


def _select_columns(u: Tensor, at: list[int]) -> Tensor:
    # those left are mostly the last ones, for which no copy is needed
    if at and at[-1] - at[0] == len(at) - 1:
        return u[:, at[0] : at[-1] + 1]
    return u[:, at]


def _stack(matrices: list[Tensor]) -> Tensor:
    return matrices[0][None] if len(matrices) == 1 else torch.stack(matrices)


def _dense_step(step: _Step, previous: float) -> Delta:
    delta, m = step.delta, step.width - step.kept_rank
    (d, k), like = delta.shape, delta.u
    left, right = like.new_empty(delta.rank + m, d), like.new_empty(delta.rank + m, k)
    left[: delta.rank] = (delta.u * (delta.s * delta.s.new_tensor(step.subtracted)).to(like.dtype)).mT.neg()
    right[: delta.rank] = delta.v.mT
    step.write_blocks(left[delta.rank :], right[delta.rank :])
    whole = torch.addmm(delta.dense(), left.mT, right, beta=previous)
    energy = float(torch.linalg.vector_norm(whole, dtype=REAL).square())
    if not math.isfinite(energy):
        raise step.overflow_error()
    u, s, v = leading_triplets(whole, delta.top, delta.v)
    return replace(delta, u=u, s=s, v=v, whole=whole, energy=energy, discarded=0.0)


def _check_rank(delta: Delta, rank: int) -> None:
    if type(rank) is not int or rank < 0:
        raise ConfigError(f"a rank must be a whole number of at least 0; it is {rank!r}")
    if rank > delta.rank and not delta.complete:
        raise ConfigError(
            f"rank {rank} was asked for, but in the dense state only the leading {delta.top} triplets are "
            "known; give start() the largest rank of a client as r_max, or use the form 'exact'"
        )


def truncate_delta(delta: Delta, rank: int) -> Factored:
    """W^{r}, the best approximation of that rank: the leading triplets, in the dtype of W.

    Args:
        delta: W.
        rank: r ≥ 0; if W has less rank there are fewer triplets.

    Raises:
        ConfigError: if the rank is negative, or above ``delta.top`` in the dense state.
    """
    _check_rank(delta, rank)
    u, s, v = delta.u[:, :rank], delta.s[:rank].to(delta.u.dtype), delta.v[:, :rank]
    return Factored(u.contiguous(), s.contiguous(), v.contiguous())


def tail_energy(delta: Delta, ranks: Sequence[int]) -> list[float]:
    """‖W - W^{r}‖_F² for every rank, in float64; see :func:`truncate_delta` for the ranks.

    It is the sum of the squares of the singular values left out (Eckart and Young). In the dense state these
    are not known, and it is ‖W‖_F² less the squares of those kept, never below 0.
    """
    for rank in ranks:
        _check_rank(delta, rank)
    squares = delta.s.to(REAL).square()
    # summed from the smallest up; so a tail far below the leading values is not rounded away
    tails = [*squares.flip(0).cumsum(0).flip(0).tolist(), 0.0]
    beyond = 0.0 if delta.complete else max(0.0, delta.energy - tails[0])
    return [beyond + tails[min(rank, delta.rank)] for rank in ranks]


def split_svd(f: Factored, rank: int, how: FactorSplit = "sqrt") -> Pair:
    """Factors of U diag(s) Vᵀ for a client to begin at.

    Args:
        f: triplets, descending; of more than ``rank`` the leading ones are taken.
        rank: number of columns of B. Missing triplets become zero columns of B and zero rows of A, where the
            gradient of both is zero: fill these rows of A with random numbers before training.
        how: where the singular values go: sqrt, B = U √S and A = √S Vᵀ (FedHL); B, B = U S and A = Vᵀ
            (FlexLoRA); A, B = U and A = S Vᵀ.

    Raises:
        ConfigError: if the word is unknown or the rank negative.
    """
    words: tuple[FactorSplit, ...] = ("sqrt", "B", "A")
    if how not in words:
        raise ConfigError(f"split: {how!r} is no choice. {did_you_mean(str(how), words)}")
    if type(rank) is not int or rank < 0:
        raise ConfigError(f"a rank must be a whole number of at least 0; it is {rank!r}")
    r = min(rank, f.rank)
    power = {"sqrt": 0.5, "B": 1.0, "A": 0.0}[how]
    b, a = f.u.new_zeros(f.u.shape[0], rank), f.v.new_zeros(rank, f.v.shape[0])
    b[:, :r] = f.u[:, :r] * f.s[:r] ** power
    a[:r] = f.s[:r, None] ** (1 - power) * f.v[:, :r].mT
    return Pair(b, a)


def product_norm(pair: Pair) -> float:
    """‖B A‖_F = √tr((BᵀB)(A Aᵀ)) in float64, without the product."""
    b, a = pair.b.detach().to(REAL), pair.a.detach().to(REAL)
    # rounding may take the trace below 0 where the components cancel
    return math.sqrt(max(0.0, float(((b.mT @ b) * (a @ a.mT)).sum())))


def product_norms(pairs: Sequence[Pair]) -> list[float]:
    """:func:`product_norm` of each pair."""
    return [product_norm(pair) for pair in pairs]
