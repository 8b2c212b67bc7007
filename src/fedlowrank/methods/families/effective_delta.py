"""A server's effective delta between rounds: downloads, weights of replies, the whole model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from ...adapters.lora.lora_factors import lora_of
from ...core.arguments.field_checks import CheckedFields
from ...core.arguments.switch import Switch, check_switch
from ...core.contract.model import Model
from ...core.errors import ConfigError, TaskError
from ...core.tree import Params
from ...linalg.delta import (
    Delta,
    DeltaForm,
    FactorSplit,
    initial_deltas,
    split_svd,
    tail_energy,
    truncate_delta,
    update_deltas,
)
from ...linalg.factored import Factored
from ...linalg.pair import Factors, Pair


def first_components(
    deltas: Mapping[str, Delta], drawn: Factors, rank: int, how: FactorSplit, scale: float
) -> Factors:
    """Factors of the best approximation of a rank, for a client of scale s: s·B A = W^{r}.

    Where W has less rank, the components that nothing fills are those that were drawn, a random row of A and
    a column of B of zeros (of an embedding the other way round): the product is the same, and a gradient
    reaches them.

    Args:
        deltas: W by layer.
        drawn: factors of the largest rank to begin with, in the type that factors have.
        rank: r.
        how: which factor takes the singular values.
        scale: s.
    """
    power = {"sqrt": 0.5, "B": 1.0, "A": 0.0}[how]
    found: Factors = {}
    for name, delta in deltas.items():
        first = drawn[name]
        # of a layer that can have less, all that it can have
        own = min(rank, first.rank)
        triplets = truncate_delta(delta, own)
        pair, r = split_svd(triplets, own, how), triplets.rank
        b, a = (pair.b / scale**power).to(first.b), (pair.a / scale ** (1 - power)).to(first.a)
        b[:, r:], a[r:] = first.b[:, r:own], first.a[r:own]
        found[name] = Pair(b.contiguous(), a.contiguous())
    return found


def starting_deltas(model: Model, form: DeltaForm, rank: int) -> dict[str, Delta]:
    """W before the first round: the update of the model's trained factors, or zero.

    Args:
        model: with its adapted layers.
        form: how W is held.
        rank: the largest of a client.
    """
    lora = lora_of(model)
    blocks = {name: [(lora.scale, pair)] for name, pair in lora.trained.items()}
    zero = initial_deltas(lora.shapes, form, rank)
    return update_deltas(zero, blocks) if blocks else zero


def has_half_precision(drawn: Factors) -> bool:
    """Whether factors are sent in half precision, so that a client does not begin at the truncation."""
    return any(torch.finfo(pair.a.dtype).bits < 32 for pair in drawn.values())


def model_with_update(model: Model, deltas: Mapping[str, Delta], rest: Params) -> Params:
    """Parameters of the base with all of W: as factors where it is held so, else added to the weights."""
    factors: Factors = {}
    dense: dict[str, Tensor] = {}
    lora = lora_of(model)
    for name, delta in deltas.items():
        layer = lora.layers[name]
        base = lora.base[layer.weight]
        if delta.whole is not None:
            # the layer's own adapter, if it has one, must add nothing
            dense[name] = delta.whole.to(base.device, torch.promote_types(layer.dtype, torch.float32))
            d, k = delta.shape
            b, a = delta.whole.new_zeros(d, 1), delta.whole.new_zeros(1, k)
        else:
            pair = split_svd(truncate_delta(delta, delta.rank), max(delta.rank, 1))
            b, a = pair.b, pair.a
        factors[name] = Pair(b.to(base.device, layer.dtype), a.to(base.device, layer.dtype))
    return lora.insert_factors(factors, 1.0, weights=lora.add_to_weights(dense)) | rest


def untruncated_tail(deltas: Mapping[str, Delta], rank: int, like: Factors) -> Factors:
    """Factors of W - W^{r} by layer; W must be stored as factors.

    Args:
        deltas: W by layer.
        rank: r.
        like: factors of the largest rank, with the type of the result. A layer that can have less was sent less.
    """
    found: Factors = {}
    for name, d in deltas.items():
        own = min(rank, like[name].rank)
        left = Factored(d.u[:, own:], d.s[own:].to(d.u.dtype), d.v[:, own:])
        pair = split_svd(left, left.rank)
        found[name] = Pair(pair.b.to(like[name].b), pair.a.to(like[name].a))
    return found


def weighted_blocks(
    weights: Mapping[str, Sequence[float]], scales: Sequence[float], factors: Sequence[Factors]
) -> dict[str, list[tuple[float, Pair]]]:
    """The terms p_i s_i B_i A_i of every layer, for :func:`fedlowrank.linalg.delta.update_deltas`.

    Args:
        weights: p_i of every reply, by layer.
        scales: s_i of every reply.
        factors: of every reply.
    """
    return {
        n: [(p * s, f[n]) for p, s, f in zip(ps, scales, factors, strict=True)] for n, ps in weights.items()
    }


class FactorReply(NamedTuple):
    """What a client of rank r_i was sent, and what it replied.

    Attributes:
        rank: r_i: it was sent the truncation of W to it.
        scale: s_i.
        factors: B_i and A_i by layer.
        received: the truncation as it arrived over a lossy wire; None where it arrived exactly.
    """

    rank: int
    scale: float
    factors: Factors
    received: Factors | None = None


def weighted_sum(
    deltas: Mapping[str, Delta],
    weights: Mapping[str, Sequence[float]],
    replies: Sequence[FactorReply],
    limits: Mapping[str, int],
) -> dict[str, Delta]:
    """Σ_i p_i [W + (s_i B_i A_i - truncate(W, r_i))] of every layer.

    W - truncate(W, r) is never formed: it is W without its first r singular triplets, the form in which W is
    stored.

    Args:
        deltas: W by layer.
        weights: p_i of every reply by layer, summing to 1.
        replies: all with a truncation as it arrived, or none.
        limits: the most components that the factors of a layer may have.
    """
    scales = [reply.scale for reply in replies]
    blocks = weighted_blocks(weights, scales, [reply.factors for reply in replies])
    received = [reply.received for reply in replies if reply.received is not None]
    if received:
        minus = weighted_blocks(weights, [-s for s in scales], received)
        return update_deltas(deltas, {n: terms + minus[n] for n, terms in blocks.items()})
    ranks = [reply.rank for reply in replies]
    return update_deltas(
        deltas,
        blocks,
        sent_ranks={
            n: [(w, min(r, limits[n])) for w, r in zip(p, ranks, strict=True)] for n, p in weights.items()
        },
    )


@dataclass(frozen=True)
class ClientWeights:
    """The weights of a round's replies.

    Attributes:
        weights: p_i of every reply by layer, each adding up to 1.
        errors: ‖W - W^{r_i}‖² / ‖W‖² over all layers, of every reply.
    """

    weights: dict[str, list[float]]
    errors: list[float]

    def reply_metrics(self, clients: Sequence[int]) -> dict[str, dict[str, float]]:
        """For the record: weight (the mean over layers) and truncation error of every client."""
        rows = list(self.weights.values())
        mean = [sum(p[i] for p in rows) / len(rows) for i in range(len(clients))]
        return {
            "weights": {str(c): p for c, p in zip(clients, mean, strict=True)},
            "truncation": {str(c): e for c, e in zip(clients, self.errors, strict=True)},
        }


@dataclass(frozen=True)
class Weighing(CheckedFields):
    """Weights p_i ∝ 1 / (r̂_i + ε), smoothed by softmax(p / T) (Peng et al., FedHL, eq. 15).

    Attributes:
        by: truncation, as above; or, for comparison (Table VIII), examples or ranks: p_i ∝ n_i or r_i, not
            smoothed.
        error: r̂_i: relative ‖W - W^{r_i}‖² / ‖W‖²; absolute, without the divisor; or squared, the square of
            the absolute one, as eq. 8 and eq. 15 read together.
        eps: ε.
        temperature: T; 0 leaves eq. 15 as it is.
        per_layer: weights of their own for every layer; else errors are summed over layers.
        by_examples: multiply p_i by n_i.
    """

    by: Literal["truncation", "examples", "ranks"] = "truncation"
    error: Literal["relative", "absolute", "squared"] = "relative"
    eps: float = 1e-2
    temperature: float = 1.0
    per_layer: bool = False
    by_examples: bool = False

    switch: ClassVar[Switch] = Switch(
        "by",
        dict.fromkeys(("error", "eps", "temperature", "per_layer", "by_examples"), ("truncation",)),
    )

    def __post_init__(self) -> None:
        check_switch(self, self.switch, "weighing")
        if self.eps <= 0 or self.temperature < 0:
            raise ConfigError(
                f"weighing: need eps > 0 and temperature >= 0; they are {self.eps} and {self.temperature}"
            )

    def weigh(
        self,
        deltas: Mapping[str, Delta],
        ranks: Sequence[int],
        examples: Sequence[float],
        limits: Mapping[str, int],
    ) -> ClientWeights:
        """The weights of replies.

        Args:
            deltas: W_t by layer.
            ranks: r_i of every reply.
            examples: n_i of every reply.
            limits: the most components that the factors of a layer may have.

        Raises:
            TaskError: if the weights are by examples and no reply has any.
        """
        reads_examples = self.by == "examples" or self.by_examples
        if reads_examples and not sum(examples) > 0:
            raise TaskError(
                f"weighing by examples needs a client with examples; the {len(examples)} replies of this round "
                "have 0. Leave such clients out, or weigh without by_examples and by = 'examples'"
            )
        errors = {n: tail_energy(d, [min(r, limits[n]) for r in ranks]) for n, d in deltas.items()}
        energy = {n: d.energy for n, d in deltas.items()}
        together, total = [sum(e) for e in zip(*errors.values(), strict=True)], sum(energy.values())
        if self.by != "truncation":
            plain = [float(r) for r in ranks] if self.by == "ranks" else examples
            weights = {n: [w / sum(plain) for w in plain] for n in deltas}
        elif self.per_layer:
            weights = {n: self._of(errors[n], energy[n], examples) for n in deltas}
        else:
            weights = dict.fromkeys(deltas, self._of(together, total, examples))
        return ClientWeights(weights, [e / total if total > 0 else 0.0 for e in together])

    def _of(self, errors: Sequence[float], energy: float, examples: Sequence[float]) -> list[float]:
        # W = 0 truncates to itself at any rank: all errors are 0 and all weights equal
        unit = energy if self.error == "relative" and energy > 0 else 1.0
        r = torch.tensor(errors, dtype=torch.float64) / unit
        p = 1 / ((r.square() if self.error == "squared" else r) + self.eps)
        p = p / p.sum()
        if self.temperature > 0:
            p = torch.softmax(p / self.temperature, 0)
        if self.by_examples:
            p = p * torch.tensor(examples, dtype=torch.float64)
        weights: list[float] = (p / p.sum()).tolist()
        return weights


def measure_ranks(deltas: Mapping[str, Delta]) -> dict[str, int]:
    """Rank of every layer's W; of a dense W with only its leading triplets, the smaller dimension."""
    return {n: d.rank if d.complete else min(d.shape) for n, d in deltas.items()}


def measure_energies(deltas: Mapping[str, Delta]) -> dict[str, float]:
    """‖W‖_F² of every layer."""
    return {n: d.energy for n, d in deltas.items()}


def truncation_energy(deltas: Mapping[str, Delta]) -> dict[str, float]:
    """‖·‖_F² of what a cap on the rank cut off in the last round, of every layer."""
    return {n: d.discarded for n, d in deltas.items()}
