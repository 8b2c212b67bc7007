"""The mean of several LoRA adapters of one base as one adapter.

    ΔW = 1/K Σ_k s_k B_k A_k = [s_1/K B_1 … s_K/K B_K] [A_1; …; A_K]

The factors stand side by side, so the mean is exact and its rank is the sum of the ranks, as with PEFT's
``add_weighted_adapter(..., combination_type="cat")``. The product of mean factors would be another update.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...core.errors import ConfigError, DataError
from .stored_adapter import A_ENDS, B_ENDS, LAYER_FIELDS, TOKEN_FIELD, StoredAdapter, find_layer

_SHARED_FIELDS = ("lora_dropout", "modules_to_save", TOKEN_FIELD)
"""Fields of a configuration that the mean has from the adapters, which must have the same values."""


def average_adapters(adapters: Sequence[StoredAdapter], set_fields: Collection[str]) -> StoredAdapter:
    """Average adapters, each with the weight 1/K. A layer that an adapter lacks counts as an update of 0.

    Args:
        adapters: at least two adapters, all of one base.
        set_fields: fields that the section ``[lora]`` sets; the adapters may differ in them.

    Returns:
        The mean, with the scale 1 at every layer. Modules that were trained whole and rows of tokens are averaged entry
        by entry. Weights of the base, which PEFT stores with an adapter of the embedding, need not be in all files.

    Raises:
        ConfigError: if adapters have different settings.
        DataError: if tensors of one name have shapes of different bases.
    """
    for other in adapters[1:]:
        _check_comparable(adapters[0], other, set_fields)
    tensors = {}
    for name in dict.fromkeys(n for a in adapters for n in a.tensors):
        values = [a.tensors[name] for a in adapters if name in a.tensors]
        rank_axis = 0 if name.endswith(A_ENDS) else 1 if name.endswith(B_ENDS) else None
        shapes = {tuple(size for axis, size in enumerate(v.shape) if axis != rank_axis) for v in values}
        if len(shapes) > 1:
            raise DataError(
                f"lora.start: {name} has the shapes {sorted(shapes)}: the adapters are of different bases, or their heads of "
                "different numbers of classes"
            )
        if rank_axis == 1:
            scales = [a.scales[find_layer(name)] / len(adapters) for a in adapters if name in a.tensors]
            # in float32, because the scaled factors of an adapter in half precision are other numbers
            values = [v.float() * scale for v, scale in zip(values, scales, strict=True)]
        tensors[name] = _average(values) if rank_axis is None else torch.cat(values, rank_axis)
    ranks = _find_ranks(tensors)
    classes = next((a.classes for a in adapters if a.classes), ())
    title = f"the mean of {len(adapters)} adapters ({', '.join(a.title for a in adapters)})"
    return StoredAdapter(
        title,
        _describe_mean(adapters, ranks),
        tensors,
        dict.fromkeys(ranks, 1.0),
        classes,
        is_mean=True,
    )


def _find_ranks(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Find the rank of each layer, at most its smaller dimension."""
    ranks = {}
    for name, a in tensors.items():
        if name.endswith(A_ENDS):
            b = tensors[name.replace(".lora_A.", ".lora_B.").replace("_embedding_A", "_embedding_B")]
            ranks[find_layer(name)] = min(len(a), a[0].numel(), len(b))
    return ranks


def _average(values: Sequence[Tensor]) -> Tensor:
    """Average entry by entry, in float64: equal entries, such as those of the base, are their own mean."""
    mean = torch.stack([v.double() for v in values]).sum(0) / len(values)
    return mean.to(functools.reduce(torch.promote_types, (v.dtype for v in values), torch.float32))


def _describe_mean(adapters: Sequence[StoredAdapter], ranks: dict[str, int]) -> dict[str, Any]:
    """Make the configuration of the mean from that of the first adapter."""
    config, rank = dict(adapters[0].config), max(ranks.values())
    if any(a.config.get(n) != config.get(n) for a in adapters for n in LAYER_FIELDS):
        config |= dict.fromkeys(LAYER_FIELDS) | {"target_modules": sorted(ranks)}
    patterns: dict[str, Any] = {"rank_pattern": {}, "alpha_pattern": {}}
    return config | {"r": rank, "lora_alpha": rank, "use_rslora": False} | patterns


def _check_comparable(first: StoredAdapter, other: StoredAdapter, set_fields: Collection[str]) -> None:
    """Raise ConfigError if two adapters have no mean."""
    if first.classes and other.classes and first.classes != other.classes:
        raise ConfigError(
            f"lora.start: {first.title} has the classes {list(first.classes)}, and {other.title} {list(other.classes)}. The "
            "outputs of their heads do not have one order, so they have no mean"
        )
    for name in _SHARED_FIELDS:
        values = [
            sorted(v) if isinstance(v := a.config.get(name), list) else v or None for a in (first, other)
        ]
        if values[0] != values[1] and name not in set_fields:
            raise ConfigError(
                f"lora.start: {first.title} has {name} = {values[0]!r}, and {other.title} {values[1]!r}. "
                + (
                    "Set lora.lora_dropout"
                    if name == "lora_dropout"
                    else "Adapters with different values have no mean"
                )
            )
