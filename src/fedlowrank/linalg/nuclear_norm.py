"""Proximal operators of norms that make the weights of a whole model low-rank or sparse."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Literal

import torch
from torch import Tensor

from ..core.errors import TaskError
from ..core.tree import Params, cast_like, map_leaves, not_finite, tree_dataclass
from .matricize import (
    LowRank,
    Sparse,
    Weights,
    matricize,
    matrix_shape,
    pack_low_rank,
    pack_sparse,
    unmatricize,
    unpack_weights,
)
from .svt import soft_threshold, threshold_all, threshold_dense

Norm = Literal["low_rank", "sparse"]
"""Penalty: nuclear norm of the matrices (:func:`fedlowrank.linalg.matricize.matricize`), or ℓ1 norm."""


@tree_dataclass
class PenalizedModel:
    """A model after a prox.

    Attributes:
        weights: weights by parameter name, as factors or as nonzero entries where these are smaller.
        ranks: rank of every penalized weight, also of dense ones; the full rank where none was computed.
    """

    weights: Weights
    ranks: dict[str, int]

    def dense(self, params: Params) -> Params:
        """The parameters in the shapes of ``params``."""
        return unpack_weights(self.weights, params)


def penalized_names(
    params: Params, exclude: tuple[str, ...] = (), complex_names: Collection[str] = ()
) -> list[str]:
    """List the names of the weights that have two or more dimensions in their module.

    Args:
        params: parameters of the model.
        exclude: exact names of parameters that are left out.
        complex_names: names of the complex parameters. They are stored as real ones with a further dimension, which
            does not count: a complex bias is a vector.
    """
    return [n for n, p in params.items() if p.ndim - (n in complex_names) >= 2 and n not in exclude]


def check_exclude(params: Params, exclude: tuple[str, ...]) -> None:
    """Raise TaskError if no parameter has an excluded name, because a parameter with a mistyped name would be penalized."""
    if unknown_names := sorted(set(exclude) - set(params)):
        raise TaskError(f"exclude: the model has no parameter {unknown_names}; it has {sorted(params)}")


def refuse_complex(title: str, names: Collection[str], norm: Norm, exclude: tuple[str, ...] = ()) -> None:
    """Raise TaskError if a nuclear norm would penalize complex parameters, given by their names.

    They are stored as real and imaginary parts, whose singular values differ from those of the complex matrix.
    """
    if norm == "low_rank" and (complex_names := sorted(set(names) - set(exclude))):
        raise TaskError(
            f"{title}: the parameter {complex_names[0]!r} is complex, and the nuclear norm is that of real matrices. Name "
            f"it in exclude = {complex_names}, or choose the norm 'sparse', which acts on real and imaginary parts."
        )


def unpenalized_model(
    params: Params, exclude: tuple[str, ...], complex_names: Collection[str] = ()
) -> PenalizedModel:
    """Build a model before any prox, with the weights of :func:`penalized_names`.

    Raises:
        TaskError: in the case of :func:`check_exclude`.
    """
    check_exclude(params, exclude)
    shapes = {n: params[n].shape for n in penalized_names(params, exclude, complex_names)}
    own_shapes = {n: shape[:-1] if n in complex_names else shape for n, shape in shapes.items()}
    return PenalizedModel({**params}, {n: min(matrix_shape(shape)) for n, shape in own_shapes.items()})


def apply_prox(
    params: Params,
    c: float,
    norm: Norm,
    exclude: tuple[str, ...],
    reference: Params | None = None,
    complex_names: Collection[str] = (),
) -> PenalizedModel:
    """Apply the prox of c times the sum of the norms of all penalized weights. With c = 0 nothing changes.

    Args:
        params: parameters of the model.
        c: factor on the norms, at least 0.
        norm: norm that is penalized.
        exclude: exact names of parameters that are not penalized.
        reference: tensors by name, to whose types the result is rounded; None keeps the types of ``params``.
        complex_names: names of the complex parameters, as in :func:`penalized_names`.

    Raises:
        TaskError: if a parameter holds a NaN or an infinity, or in the case of :func:`check_exclude`.
    """
    reference = params if reference is None else reference
    start = unpenalized_model(cast_like(params, reference), exclude, complex_names)
    if c == 0:
        return start
    if (path := not_finite(params)) is not None:
        raise TaskError(
            f"parameter {path.lstrip('/')!r} of the global model holds a NaN or an infinity after the "
            "average. Lower the learning rate."
        )
    if norm == "sparse":
        shrunk_params = cast_like(apply_prox_dense(params, c, norm, exclude, complex_names), reference)
        return PenalizedModel(
            {n: pack_sparse(w) if n in start.ranks else w for n, w in shrunk_params.items()}, start.ranks
        )
    factors = dict(
        zip(start.ranks, threshold_all([matricize(params[n]) for n in start.ranks], c), strict=True)
    )
    packed_weights = {
        n: map_leaves(lambda t, dtype=reference[n].dtype: t.to(dtype), pack_low_rank(f, params[n].shape))
        for n, f in factors.items()
    }
    return PenalizedModel({**start.weights, **packed_weights}, {n: f.rank for n, f in factors.items()})


def apply_prox_dense(
    params: Params, c: float, norm: Norm, exclude: tuple[str, ...], complex_names: Collection[str] = ()
) -> Params:
    """Do :func:`apply_prox` without data-dependent shapes, for steps batched over clients."""
    out = dict(params)
    for n in penalized_names(params, exclude, complex_names):
        p = params[n]
        out[n] = (
            soft_threshold(p, c)
            if norm == "sparse"
            else unmatricize(threshold_dense(matricize(p), c), p.shape)
        )
    return out


def as_model_part(params: Params, norm: Norm) -> Weights:
    """Convert penalized parameters to a part of a model; under the ℓ1 norm only the nonzero entries of a tensor count."""
    if norm != "sparse":
        return {**params}
    return {n: Sparse(p.flatten(), torch.ones_like(p, dtype=torch.bool)) for n, p in params.items()}


def warn_if_all_zero(title: str, before: PenalizedModel, after: PenalizedModel, round: int) -> None:
    """Warn in the round in which the last penalized weight becomes zero."""
    if _is_all_zero(after) and not _is_all_zero(before):
        logging.getLogger("fedlowrank").warning(
            "%s: after round %d every penalized weight is zero; choose a smaller lam or prox_step",
            title,
            round + 1,
        )


def _is_all_zero(model: PenalizedModel) -> bool:
    weights = [model.weights[n] for n in model.ranks]
    return bool(weights) and not any(_has_nonzero(w) for w in weights)


def _has_nonzero(w: Tensor | LowRank | Sparse) -> bool:
    if isinstance(w, LowRank):
        return w.rank > 0
    return bool((w.values if isinstance(w, Sparse) else w).any())
