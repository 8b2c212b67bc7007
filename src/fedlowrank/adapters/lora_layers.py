"""LoRA layers for any module: y = W x + s·B (A x), on activations, over a frozen W (Hu et al. 2021)."""

from __future__ import annotations

import copy
import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..core.choices import check_rank
from ..core.errors import TaskError
from ..core.field_checks import check_arguments
from ..core.key import Key
from ..models.stateless import is_within
from .rank_limits import warn_lowered_ranks

ADAPTABLE = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding)
"""Layers that can be wrapped; convolutions without groups."""

_CONVOLVE = {nn.Conv1d: functional.conv1d, nn.Conv2d: functional.conv2d, nn.Conv3d: functional.conv3d}


class LoRALayer(nn.Module):
    """A frozen layer with trainable factors beside it, under the names that PEFT gives them.

    ``lora_A`` is A ``[r, k]``, random; of a convolution k = in · k1 · k2. ``lora_B`` is B ``[d, r]``, zero.
    Of an embedding k is the number of rows, A zero and B random. ``rslora``: whether s came from α/√r.
    """

    def __init__(self, base: nn.Module, rank: int, scaling: float, rslora: bool, key: Key) -> None:
        super().__init__()
        self.base_layer = base
        self.scaling, self.rslora = scaling, rslora
        weight: Tensor = base.weight  # type: ignore[assignment]  # its class is checked before
        d, k = weight.shape[0], math.prod(weight.shape[1:])
        if isinstance(base, nn.Embedding):
            d, k = k, d
        a, b = (torch.rand(rank, k, generator=key.generator()) * 2 - 1) / math.sqrt(k), torch.zeros(d, rank)
        if isinstance(base, nn.Embedding):
            a, b = torch.zeros(rank, k), torch.randn(d, rank, generator=key.generator())
        self.lora_A = nn.Parameter(a.to(weight))
        self.lora_B = nn.Parameter(b.to(weight))

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output with the update."""
        base: Any = self.base_layer
        a, b = self.lora_A, self.lora_B
        out: Tensor = base(x)
        if isinstance(base, nn.Embedding):
            return out + self.scaling * functional.linear(functional.embedding(x, a.mT), b)
        if isinstance(base, nn.Linear):
            return out + self.scaling * functional.linear(functional.linear(x, a), b)
        # the padding mode is the layer's: its own forward is asked for A x, with A for its weight and no bias
        inner = base._conv_forward(x, a.reshape(-1, *base.weight.shape[1:]), None)
        rank = a.shape[0]
        convolve = next(f for kind, f in _CONVOLVE.items() if isinstance(base, kind))
        return out + self.scaling * convolve(inner, b.reshape(-1, rank, *[1] * (inner.ndim - 2)))


@check_arguments
def add_lora(
    module: nn.Module,
    rank: int,
    alpha: float | None = None,
    *,
    target_modules: str | Sequence[str] = "all",
    rslora: bool = False,
    trainable: Sequence[str] = (),
    key: Key | None = None,
) -> nn.Module:
    """A copy of a module with LoRA layers, everything else frozen.

    Args:
        module: left as it is.
        rank: r. Above the largest that one of the layers can have it is lowered to that, α/r included; a layer
            that can have less gets fewer components under the same scale. Either is warned of.
        alpha: α; by default r, a scale of 1.
        target_modules: as PEFT reads it: names that equal a layer's or end it (``["fc1"]``), a regular
            expression for whole names, or ``"all"``.
        rslora: scale by α/√r instead of α/r.
        trainable: names of submodules that are trained whole, such as a head.
        key: of the initial A; by default ``Key((0,))``.

    Returns:
        The module; its output is at first the original's exactly.

    Raises:
        TaskError: if nothing matches, a layer cannot be adapted or is lazy.
        ConfigError: if the rank is no whole number of at least 1.
    """
    rank = check_rank(rank, "the rank of LoRA")
    for name, parameter in module.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise TaskError(f"{name} belongs to a lazy layer without a shape; run one forward pass first")
    made = copy.deepcopy(module)
    key = Key((0,)) if key is None else key
    inside = {n for n, m in made.named_modules() if isinstance(m, nn.MultiheadAttention)}
    layers = {
        n: m
        for n, m in made.named_modules()
        if isinstance(m, ADAPTABLE)
        and not any(n.startswith(f"{a}.") for a in inside)
        and not any(is_within(n, t) for t in trainable)
    }
    targets = [n for n in layers if _matches(n, target_modules)]
    if not targets:
        there = Counter(n.rsplit(".", 1)[-1] for n in layers)
        available = ", ".join(f"{n} × {c}" for n, c in there.items()) or "none"
        raise TaskError(
            f"target_modules = {target_modules!r} matches no layer that can be adapted; there are: "
            f"{available}"
        )
    for parameter in made.parameters():
        parameter.requires_grad_(False)
    shapes = {n: (len(w), w[0].numel()) for n in targets for w in [layers[n].weight]}
    warn_lowered_ranks("LoRA", dict.fromkeys(shapes, rank), shapes)
    rank = min(rank, max(min(shape) for shape in shapes.values()))
    scaling = (rank if alpha is None else alpha) / (math.sqrt(rank) if rslora else rank)
    wrapped: dict[nn.Module, LoRALayer] = {}
    for name in targets:
        layer = layers[name]
        if getattr(layer, "groups", 1) > 1:
            raise TaskError(
                f"layer {name} is a convolution with groups, whose LoRA is not one product B A; leave it out"
            )
        wrapped[layer] = LoRALayer(layer, min(rank, *shapes[name]), scaling, rslora, key / name)
    if made in wrapped:
        return wrapped[made]
    # a layer that the module uses under two names gets one pair of factors under both
    for name, layer in list(made.named_modules(remove_duplicate=False)):
        if layer in wrapped:
            made.set_submodule(name, wrapped[layer])
    for name in trainable:
        for parameter in _submodule(made, name).parameters():
            parameter.requires_grad_(True)
    return made


def _matches(name: str, target: str | Sequence[str]) -> bool:
    if target == "all":
        return True
    if isinstance(target, str):
        return re.fullmatch(target, name) is not None
    return any(name == t or name.endswith(f".{t}") for t in target)


def _submodule(module: nn.Module, name: str) -> nn.Module:
    try:
        return module.get_submodule(name)
    except AttributeError as error:
        there = sorted(n for n, _ in module.named_children())
        raise TaskError(f"trainable: there is no submodule {name!r}; the module has {there}") from error
