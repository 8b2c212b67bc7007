"""A server's effective delta between rounds: downloads, weights of replies, the new delta, the server's model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from ...adapters.lora.lora_factors import lora_of
from ...core.arguments.bounds import check_bounds
from ...core.arguments.field_checks import CheckedFields
from ...core.arguments.switch import Switch, check_switch
from ...core.contract import Model
from ...core.errors import TaskError
from ...core.tree import Params
from ...linalg.delta import (
    Delta,
    DeltaForm,
    FactorSplit,
    initial_deltas,
    measure_tail_energy,
    split_svd,
    truncate_delta,
    update_deltas,
)
from ...linalg.factored import Factored
from ...linalg.pair import Factors, Pair


def build_client_factors(
    deltas: Mapping[str, Delta], initial_factors: Factors, rank: int, split: FactorSplit, scale: float
) -> Factors:
    """Build the initial factors of a client of rank r: s·B A = W^{r}, the best approximation of W of that rank.

    If W has a smaller rank, the other components are initial ones: a random row of A and a zero column of B (for an
    embedding, a zero row of A and a random column of B). The product is the same, and a gradient reaches them.

    Args:
        deltas: update W of every layer, by layer name.
        initial_factors: initial factors of the largest rank, in the type of the result.
        rank: rank r of the client.
        split: factor that takes the singular values.
        scale: scale s of the client.
    """
    factors: Factors = {}
    for name, delta in deltas.items():
        initial = initial_factors[name]
        # a layer whose largest rank is below r gets its largest rank
        layer_rank = min(rank, initial.rank)
        truncation = truncate_delta(delta, layer_rank)
        pair, r = split_svd(truncation, layer_rank, split, scale), truncation.rank
        b, a = pair.b.to(initial.b), pair.a.to(initial.a)
        b[:, r:], a[r:] = initial.b[:, r:layer_rank], initial.a[r:layer_rank]
        factors[name] = Pair(b.contiguous(), a.contiguous())
    return factors


def build_starting_deltas(model: Model, form: DeltaForm, rank: int) -> dict[str, Delta]:
    """Build W before the first round: the update of the model's trained factors, or zero.

    Args:
        model: model with adapted layers.
        form: form in which W is stored.
        rank: largest rank of a client.
    """
    lora = lora_of(model)
    zero_deltas = initial_deltas(lora.shapes, form, rank)
    trained_terms = {name: [(lora.scale, pair)] for name, pair in lora.trained.items()}
    return update_deltas(zero_deltas, trained_terms) if trained_terms else zero_deltas


def has_half_precision(factors: Factors) -> bool:
    """Whether factors are sent in half precision, so that a client does not begin at the exact truncation."""
    return any(torch.finfo(pair.a.dtype).bits < 32 for pair in factors.values())


def build_server_model(model: Model, deltas: Mapping[str, Delta], rest: Params) -> Params:
    """Build the parameters of the base with all of W: as factors where W is stored as factors, otherwise added to the weights.

    Where a weight cannot be changed, because it is quantized or not in memory, a matrix W becomes the factors I W or W I.
    """
    factors: Factors = {}
    dense_updates: dict[str, Tensor] = {}
    lora = lora_of(model)
    for name, delta in deltas.items():
        layer = lora.layers[name]
        device = lora.find_device(layer)
        if delta.matrix is not None and not lora.is_changeable(name):
            pair = _factorize_by_identity(delta.matrix)
        elif delta.matrix is not None:
            dense_updates[name] = delta.matrix.to(device, torch.promote_types(layer.dtype, torch.float32))
            # the layer's own adapter, if any, must add zero
            d, k = delta.shape
            pair = Pair(delta.matrix.new_zeros(d, 1), delta.matrix.new_zeros(1, k))
        else:
            pair = split_svd(truncate_delta(delta, delta.rank), max(delta.rank, 1))
        factors[name] = Pair(pair.b.to(device, layer.dtype), pair.a.to(device, layer.dtype))
    return lora.insert_factors(factors, 1.0, moved_weights=lora.add_to_weights(dense_updates)) | rest


def _factorize_by_identity(matrix: Tensor) -> Pair:
    """Write a matrix ``[d, k]`` as factors ``[d, r]`` and ``[r, k]`` of rank r = min(d, k), one of them the identity."""
    identity = torch.eye(min(matrix.shape), dtype=matrix.dtype, device=matrix.device)
    return Pair(identity, matrix) if len(matrix) == len(identity) else Pair(matrix, identity)


def factorize_residual(deltas: Mapping[str, Delta], rank: int, initial_factors: Factors) -> Factors:
    """Factorize W - W^{r} of every layer; W must be stored as factors.

    Args:
        deltas: update W of every layer, by layer name.
        rank: rank r of the client.
        initial_factors: initial factors of the largest rank, in the type of the result. A layer whose largest rank
            is below r was sent that rank.
    """
    residuals: Factors = {}
    for name, delta in deltas.items():
        sent_rank = min(rank, initial_factors[name].rank)
        s = delta.s[sent_rank:].to(delta.u.dtype)
        residual = Factored(delta.u[:, sent_rank:], s, delta.v[:, sent_rank:])
        pair = split_svd(residual, residual.rank)
        residuals[name] = Pair(pair.b.to(initial_factors[name].b), pair.a.to(initial_factors[name].a))
    return residuals


def build_update_terms(
    weights: Mapping[str, Sequence[float]], scales: Sequence[float], factors: Sequence[Factors]
) -> dict[str, list[tuple[float, Pair]]]:
    """Build the terms p_i s_i B_i A_i of every layer, for :func:`fedlowrank.linalg.delta.update_deltas`.

    Args:
        weights: weight p_i of every reply, by layer.
        scales: scale s_i of every reply.
        factors: factors B_i and A_i of every reply.
    """
    return {
        name: [
            (p * s, reply_factors[name])
            for p, s, reply_factors in zip(layer_weights, scales, factors, strict=True)
        ]
        for name, layer_weights in weights.items()
    }


class FactorReply(NamedTuple):
    """The reply of a client of rank r_i, and the truncation that it received.

    Attributes:
        rank: rank r_i to which the W that was sent to the client is truncated.
        scale: scale s_i of the client.
        factors: factors B_i and A_i of the reply, by layer.
        received_factors: factors of the truncation as they arrived over a lossy wire; None where they arrived
            exactly.
    """

    rank: int
    scale: float
    factors: Factors
    received_factors: Factors | None = None


def apply_replies(
    deltas: Mapping[str, Delta],
    weights: Mapping[str, Sequence[float]],
    replies: Sequence[FactorReply],
    max_ranks: Mapping[str, int],
) -> dict[str, Delta]:
    """Apply the replies of a round: W ← Σ_i p_i [W + (s_i B_i A_i - W^{r_i})] for every layer.

    The weights sum to 1, so this is W + Σ_i p_i s_i B_i A_i - Σ_i p_i W^{r_i}. The last sum is subtracted in one of
    two ways. Over an exact wire the rank alone determines W^{r_i} (:func:`_subtract_truncations`). Over a lossy
    wire W^{r_i} is what the client received (:func:`_subtract_received`).

    Args:
        deltas: update W of every layer, by layer name.
        weights: weight p_i of every reply, by layer; the weights of a layer sum to 1.
        replies: replies of the round; all of them have ``received_factors``, or none has.
        max_ranks: largest rank of the factors of each layer.
    """
    uploads = build_update_terms(
        weights, [reply.scale for reply in replies], [reply.factors for reply in replies]
    )
    is_lossy = any(reply.received_factors is not None for reply in replies)
    if is_lossy:
        return _subtract_received(deltas, weights, replies, uploads)
    return _subtract_truncations(deltas, weights, replies, uploads, max_ranks)


def _subtract_truncations(
    deltas: Mapping[str, Delta],
    weights: Mapping[str, Sequence[float]],
    replies: Sequence[FactorReply],
    uploads: Mapping[str, Sequence[tuple[float, Pair]]],
    max_ranks: Mapping[str, int],
) -> dict[str, Delta]:
    """Apply replies over an exact wire: each singular value j of W keeps the share 1 - Σ_{i: r_i > j} p_i."""
    sent_ranks = {
        name: [(p, min(reply.rank, max_ranks[name])) for p, reply in zip(layer_weights, replies, strict=True)]
        for name, layer_weights in weights.items()
    }
    return update_deltas(deltas, uploads, sent_ranks=sent_ranks)


def _subtract_received(
    deltas: Mapping[str, Delta],
    weights: Mapping[str, Sequence[float]],
    replies: Sequence[FactorReply],
    uploads: Mapping[str, Sequence[tuple[float, Pair]]],
) -> dict[str, Delta]:
    """Apply replies over a lossy wire: the rounded truncation that a client received is a term of weight -p_i s_i."""
    received_factors = [reply.received_factors for reply in replies if reply.received_factors is not None]
    negative_terms = build_update_terms(weights, [-reply.scale for reply in replies], received_factors)
    return update_deltas(deltas, {name: [*terms, *negative_terms[name]] for name, terms in uploads.items()})


@dataclass(frozen=True)
class ReplyWeights:
    """The weights of a round's replies.

    Attributes:
        weights: weight p_i of every reply, by layer; the weights of a layer sum to 1.
        errors: relative truncation error ‖W - W^{r_i}‖² / ‖W‖² of every reply, over all layers.
    """

    weights: dict[str, list[float]]
    errors: list[float]

    def reply_metrics(self, client_ids: Sequence[int]) -> dict[str, dict[str, float]]:
        """Weight (the mean over layers) and truncation error of every client, for the record."""
        layer_weights = list(self.weights.values())
        mean_weights = [sum(p[i] for p in layer_weights) / len(layer_weights) for i in range(len(client_ids))]
        return {
            "weights": {str(client_id): p for client_id, p in zip(client_ids, mean_weights, strict=True)},
            "truncation": {
                str(client_id): error for client_id, error in zip(client_ids, self.errors, strict=True)
            },
        }


@dataclass(frozen=True)
class Weighing(CheckedFields):
    """Weights p_i ∝ 1 / (r̂_i + ε), smoothed by softmax(p / T) (Peng et al., FedHL, eq. 15).

    Attributes:
        by: basis of the weights: truncation, as above; or, for comparison (Table VIII), examples or ranks: p_i ∝
            n_i or r_i, not smoothed.
        error: definition of r̂_i: relative, ‖W - W^{r_i}‖² / ‖W‖²; absolute, without the divisor; or squared, the
            square of the absolute one, as eq. 8 and eq. 15 read together.
        eps: constant ε that is added to r̂_i.
        temperature: temperature T of the softmax; 0 uses the weights of eq. 15 without it.
        per_layer: whether every layer has its own weights; otherwise errors are summed over layers.
        by_examples: whether p_i is multiplied by n_i.
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
        check_bounds(self, {"eps": "> 0", "temperature": ">= 0"}, "weighing")

    def weigh(
        self,
        deltas: Mapping[str, Delta],
        ranks: Sequence[int],
        example_counts: Sequence[float],
        max_ranks: Mapping[str, int],
    ) -> ReplyWeights:
        """Weigh the replies of a round.

        Args:
            deltas: update W_t of every layer, by layer name.
            ranks: rank r_i of every reply.
            example_counts: number of examples n_i of every reply.
            max_ranks: largest rank of the factors of each layer.

        Raises:
            TaskError: if the weights are by examples and no reply has any.
        """
        reads_examples = self.by == "examples" or self.by_examples
        if reads_examples and not sum(example_counts) > 0:
            raise TaskError(
                f"weighing by examples needs a client with examples; the {len(example_counts)} replies of this round "
                "have 0. Leave such clients out, or weigh without by_examples and by = 'examples'"
            )
        errors = {
            name: measure_tail_energy(delta, [min(rank, max_ranks[name]) for rank in ranks])
            for name, delta in deltas.items()
        }
        energies = {name: delta.energy for name, delta in deltas.items()}
        # sums over all layers
        total_errors, total_energy = (
            [sum(e) for e in zip(*errors.values(), strict=True)],
            sum(energies.values()),
        )
        if self.by != "truncation":
            counts = [float(rank) for rank in ranks] if self.by == "ranks" else example_counts
            weights = {name: [count / sum(counts) for count in counts] for name in deltas}
        elif self.per_layer:
            weights = {
                name: self._weights_from_errors(errors[name], energies[name], example_counts)
                for name in deltas
            }
        else:
            shared_weights = self._weights_from_errors(total_errors, total_energy, example_counts)
            weights = dict.fromkeys(deltas, shared_weights)
        return ReplyWeights(weights, [e / total_energy if total_energy > 0 else 0.0 for e in total_errors])

    def _weights_from_errors(
        self, errors: Sequence[float], energy: float, example_counts: Sequence[float]
    ) -> list[float]:
        """Compute p_i by eq. 15 from ‖W - W^{r_i}‖² of every reply and ‖W‖²."""
        # W = 0 truncates to itself at any rank: all errors are 0 and all weights equal
        unit = energy if self.error == "relative" and energy > 0 else 1.0
        r = torch.tensor(errors, dtype=torch.float64) / unit
        p = 1 / ((r.square() if self.error == "squared" else r) + self.eps)
        p = p / p.sum()
        if self.temperature > 0:
            p = torch.softmax(p / self.temperature, 0)
        if self.by_examples:
            p = p * torch.tensor(example_counts, dtype=torch.float64)
        weights: list[float] = (p / p.sum()).tolist()
        return weights


def measure_ranks(deltas: Mapping[str, Delta]) -> dict[str, int]:
    """Measure the rank of every layer's W; it is the smaller dimension if only the leading triplets of a dense W are known."""
    return {n: d.rank if d.has_all_triplets else min(d.shape) for n, d in deltas.items()}


def measure_energies(deltas: Mapping[str, Delta]) -> dict[str, float]:
    """Measure ‖W‖_F² of every layer."""
    return {n: d.energy for n, d in deltas.items()}


def measure_discarded_energies(deltas: Mapping[str, Delta]) -> dict[str, float]:
    """Measure ‖·‖_F² of the components of every layer's W that a cap on the rank cut off in the last round."""
    return {n: d.discarded_energy for n, d in deltas.items()}
