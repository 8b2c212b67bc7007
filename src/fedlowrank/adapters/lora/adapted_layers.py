"""Layers that LoRA adapts: those of a module that have factors A and B, or could have them (Hu et al. 2021)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ...core.errors import TaskError
from ...core.tree import Params
from ...linalg.pair import Pair
from ...models.stateless import is_within
from ..adaptable import EMBEDDINGS, AdaptableWeight, find_adaptable_weights
from .lora_layers import LoRALayer, factor_name

PEFT_PREFIX = "base_model.model."
"""Prefix that PEFT adds to the names of the base model."""


@dataclass(frozen=True)
class AdaptedLayer:
    """A layer whose weight is adapted, W + s·B A.

    Attributes:
        weight: name of the parameter that holds the weight.
        shape: (d, k) of the weight as a matrix; the update is B A with factors ``[d, r]`` and ``[r, k]``.
        stored_shape: shape of the weight's parameter.
        transposed: whether the parameter is stored as ``[k, d]``.
        a: name of the parameter A, or None if the update is added to the weight.
        b: name of the parameter B, or None as for ``a``.
        a_tail: shape of parameter A after r (the kernel of a convolution).
        b_tail: shape of parameter B after (d, r).
        embedding: whether the layer is an embedding, whose initial A is zero and whose initial B is random.
        dtype: type of the factors, by default that of the weight; layers of one model may differ.
        limit: bound on the rank of the factors in addition to min(d, k), or None; it is set where the module gave
            the layer a lower rank than other layers (``rank_pattern`` of PEFT).
        ratio: ratio c of the module's own scale of this layer to that of the model (``alpha_pattern``). The update
            is s·B A with factors that include c; the parameter that begins at zero is the factor divided by c.
    """

    weight: str
    shape: tuple[int, int]
    stored_shape: tuple[int, ...]
    transposed: bool = False
    a: str | None = None
    b: str | None = None
    a_tail: tuple[int, ...] = ()
    b_tail: tuple[int, ...] = ()
    embedding: bool = False
    dtype: torch.dtype = torch.float32
    limit: int | None = None
    ratio: float = 1.0

    @property
    def zero(self) -> Literal["a", "b"]:
        """The factor that begins at zero."""
        return "a" if self.embedding else "b"

    @property
    def largest_rank(self) -> int:
        """The largest rank that the factors may have."""
        return min(self.shape) if self.limit is None else min(*self.shape, self.limit)

    def reshape_update(self, update: Tensor) -> Tensor:
        """Reshape an update ``[d, k]`` to the shape of the weight's parameter."""
        return (update.mT if self.transposed else update).reshape(self.stored_shape)

    def read_pair(self, params: Mapping[str, Tensor]) -> Pair:
        """Read the factors of this layer from a model's parameters."""
        pair = Pair(params[str(self.b)].flatten(1), params[str(self.a)].flatten(1))
        return self._times(pair, self.ratio)

    def as_parameters(self, pair: Pair) -> Params:
        """Convert factors of any rank to the two parameters of this layer."""
        return self.shape_parameters(self._times(pair, 1 / self.ratio))

    def _times(self, pair: Pair, factor: float) -> Pair:
        """Multiply the product by a number, applied to the factor that begins at zero."""
        if factor == 1.0:
            return pair
        return Pair(pair.b, pair.a * factor) if self.zero == "a" else Pair(pair.b * factor, pair.a)

    def shape_parameters(self, pair: Pair) -> Params:
        """Reshape two matrices of any rank to the shapes of the two parameters of this layer."""
        a, b = pair.a, pair.b
        return {
            str(self.a): a.reshape(-1, *self.a_tail) if self.a_tail else a,
            str(self.b): b.reshape(*b.shape, *self.b_tail) if self.b_tail else b,
        }


PRINCIPAL = ("pissa", "olora")
"""Values of PEFT's ``init_lora_weights`` that split the weight into initial factors and a base with the rest."""


def is_gaussian_initial(initial: Any) -> bool | None:
    """Whether a value of PEFT's ``init_lora_weights`` means a normal A; None if the value is not supported."""
    if initial is True or is_principal_initial(initial):
        return False
    return True if isinstance(initial, str) and initial.lower() == "gaussian" else None


def is_principal_initial(initial: Any) -> bool:
    """Whether a value of PEFT's ``init_lora_weights`` is one of :data:`PRINCIPAL`."""
    return isinstance(initial, str) and initial.lower() in PRINCIPAL


def find_initials(module: nn.Module) -> tuple[bool, bool]:
    """Find whether PEFT's configurations in a module mean a normal A, and whether a part of the weight (:data:`PRINCIPAL`).

    Raises:
        TaskError: if a configuration means another initialization.
    """
    are_gaussian, is_principal = set(), False
    for layer in module.modules():
        configs = getattr(layer, "peft_config", None)
        for config in configs.values() if isinstance(configs, Mapping) else ():
            initial = getattr(config, "init_lora_weights", True)
            are_gaussian.add(is_gaussian_initial(initial))
            is_principal |= is_principal_initial(initial)
            if None in are_gaussian:
                raise TaskError(
                    f"the model's adapter was made with init_lora_weights = {initial!r}, but in federated "
                    "training an adapter must begin as a zero update of an unchanged base, or as 'pissa' or 'olora'. "
                    "Make it with True (Kaiming uniform), 'gaussian' or one of those."
                )
    return True in are_gaussian, is_principal


class FactorParameters(NamedTuple):
    """The factors of a weight: the names of weight, A and B in the layer, s, r, whether s is α/√r, and the rate of dropout."""

    weight: str
    a: str
    b: str
    scale: float
    rank: int
    rslora: bool
    dropout: float = 0.0


def find_factors(layer: nn.Module) -> list[FactorParameters]:
    """Find the factors of a layer of PEFT or of :mod:`fedlowrank.adapters.lora.lora_layers`; attention has several.

    Raises:
        TaskError: if a PEFT layer has several adapters, or its update is not an update of the weight.
    """
    if isinstance(layer, LoRALayer):
        return [
            FactorParameters(
                name,
                factor_name(name, "A"),
                factor_name(name, "B"),
                layer.lora_scaling,
                layer.get_parameter(factor_name(name, "A")).shape[0],
                layer.lora_rslora,
            )
            for name in layer.lora_weights
        ]
    scaling: Any = getattr(layer, "scaling", None)
    if getattr(layer, "base_layer", None) is None or not isinstance(scaling, dict):
        return []
    peft: Any = layer
    adapters = [n for n in scaling if n in peft.lora_A or n in peft.lora_embedding_A]
    if len(adapters) != 1:
        raise TaskError(
            f"a PEFT layer has the adapters {sorted(scaling)}; keep one, clients have their own factors"
        )
    (n,) = adapters
    a, b = f"lora_embedding_A.{n}", f"lora_embedding_B.{n}"
    if n in peft.lora_A:
        a, b = f"lora_A.{n}.weight", f"lora_B.{n}.weight"
        _check_convolution(peft.base_layer, peft.lora_A[n])
    rslora = bool(getattr(layer, "use_rslora", {}).get(n, False))
    # PEFT has no dropout before the factors of an embedding
    dropout = float(getattr(peft.lora_dropout[n], "p", 0.0)) if n in peft.lora_A else 0.0
    return [FactorParameters("base_layer.weight", a, b, float(scaling[n]), int(peft.r[n]), rslora, dropout)]


def _check_convolution(base: Any, inner: Any) -> None:
    """Refuse a convolution of PEFT whose A reads other inputs than its weight."""
    if isinstance(base, nn.modules.conv._ConvNd):
        for setting in ("dilation", "padding_mode"):
            if getattr(base, setting) != getattr(inner, setting):
                raise TaskError(
                    f"PEFT's LoRA of a convolution ignores its {setting} = {getattr(base, setting)!r}, so it "
                    "is no update of the weight; leave the layer out of target_modules, or wrap the module "
                    "by fedlowrank.adapters.lora.lora_layers.add_lora"
                )


def describe_adapted_layer(
    name: str, layer: nn.Module, factors: FactorParameters, limit: int | None = None, ratio: float = 1.0
) -> AdaptedLayer:
    """Describe a layer with factors as an adapted layer; ``limit`` and ``ratio`` are those of :class:`AdaptedLayer`.

    Raises:
        TaskError: if the layer is a convolution of PEFT with groups, its weight is not a parameter, or its factors
            are complex.
    """
    is_lora_layer = isinstance(layer, LoRALayer)
    base: Any = layer if is_lora_layer else layer.base_layer
    parameters = dict(layer.named_parameters())
    path, attribute = f"{name}.{factors.weight}".lstrip(".").rpartition(".")[::2]
    # the parameter itself: the attribute of a layer of this package is W + s·B A
    weight = AdaptableWeight(path, base, attribute).parameter()
    a_shape, b_shape = parameters[factors.a].shape, parameters[factors.b].shape
    d, k = b_shape[0], math.prod(a_shape[1:])
    if b_shape[1] != a_shape[0]:
        raise TaskError(
            f"layer {name} is a convolution with groups, whose LoRA is not one product B A; leave it out"
        )
    dtype = parameters[factors.a].dtype
    if dtype.is_complex:
        raise TaskError(
            f"layer {name} has LoRA factors of type {dtype}, but federated LoRA is defined for real ones; leave it "
            "out of target_modules"
        )
    is_embedding = isinstance(base, EMBEDDINGS)
    # the weight of an embedding [V, D] and of GPT-2's Conv1D [k, d] is the transpose of B A
    is_transposed = (
        factors.weight in layer.lora_transposed
        if isinstance(layer, LoRALayer)
        else tuple(weight.shape) == (k, d) and (is_embedding or bool(getattr(layer, "fan_in_fan_out", 0)))
    )
    prefix = name + "." if name else ""
    return AdaptedLayer(
        prefix + factors.weight,
        (d, k),
        tuple(weight.shape),
        is_transposed,
        prefix + factors.a,
        prefix + factors.b,
        tuple(a_shape[1:]) if len(a_shape) > 2 else (),
        tuple(b_shape[2:]),
        is_embedding,
        dtype,
        limit,
        ratio,
    )


def find_plain_layers(module: nn.Module, head: str | None) -> dict[str, AdaptedLayer]:
    """Find linear layers, attention and convolutions outside the head, to whose weights an update can be added.

    A weight that several layers share gives one adapted layer, under the first of its names.

    Raises:
        TaskError: if there is no such layer, or a layer's weight is not a floating-point parameter.
    """
    layers, seen_ids = {}, set()
    names = {id(p): name for name, p in module.named_parameters()}
    for target in find_adaptable_weights(module):
        if target.is_embedding or is_within(target.name, head):
            continue
        weight = target.floating_parameter()
        if id(weight) in seen_ids:
            continue
        seen_ids.add(id(weight))
        shape = tuple(weight.shape)
        size = shape[0], math.prod(shape[1:])
        if target.is_transposed:
            size = size[1], size[0]
        layers[target.name] = AdaptedLayer(
            # the update of a complex weight is real
            names[id(weight)],
            size,
            shape,
            target.is_transposed,
            dtype=weight.dtype.to_real(),
        )
    if not layers:
        raise TaskError(
            "this model has no linear layer and no convolution outside its head, so there is nothing for LoRA to adapt. Choose a "
            "method for other layers, such as fedavg, fedslr or floral"
        )
    return layers
