"""LoRA factors of a whole module: the layers that have them, and the resulting parameters (Hu et al., arXiv:2106.09685).

An adapted weight is W + s·B A. Three kinds of modules are described by the same :class:`LoRA`:

- modules wrapped by PEFT: the factors are parameters of its layers, and the update is applied to activations;
- modules of :func:`fedlowrank.adapters.lora.lora_layers.add_lora`, with this package's layers: the update is
  applied to activations, or to the weight where other code reads it;
- all other modules: s·B A is added to the weight itself, for every linear layer, attention and convolution outside
  the head.

The scale s is not part of the factors. A wrapped module multiplies by its own scale, so its parameter B is B times
the ratio of both scales.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...core.contract import Model
from ...core.errors import TaskError
from ...core.key import Key
from ...core.tree import Params
from ...linalg.pair import Factors, Pair, keep_first_components, zero_pad_pair
from ...models.packed_weights import is_packed
from ...models.placement import is_placed, offloaded_error
from ..adaptable import name_adapted_layer
from .adapted_layers import (
    PEFT_PREFIX,
    AdaptedLayer,
    FactorParameters,
    describe_adapted_layer,
    find_factors,
    find_initials,
    find_plain_layers,
)
from .peft_settings import refuse_other_adapters


@dataclass(frozen=True)
class LoRA:
    """The adapted layers of a module.

    Attributes:
        layers: adapted layers by their name in the base model.
        base: frozen weights W, by the name of their parameter.
        scale: scale s by which the module itself multiplies B A; 1 if the update is added to the weight.
        rank: rank r of the module's own factors, or None.
        rslora: whether α is divided by √r instead of r.
        gaussian: whether the initial A is normal (``init_lora_weights = "gaussian"`` of PEFT), not uniform.
        principal: whether the module's own factors begin at a part of the weights (PiSSA, OLoRA) that the base
            lacks.
        trained: module's own factors where their product is not zero, from which clients continue.
        device: device of all factors if accelerate has placed the layers; None for that of each layer.
        dropout: largest rate of dropout of the inputs of A in training (``lora_dropout`` of PEFT).
        cache: values derived from this object, shared by all clients.
    """

    layers: Mapping[str, AdaptedLayer]
    base: Mapping[str, Tensor]
    scale: float = 1.0
    rank: int | None = None
    rslora: bool = False
    gaussian: bool = False
    principal: bool = False
    trained: Factors = field(default_factory=dict)
    device: torch.device | None = None
    dropout: float = 0.0
    cache: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """The shape (d, k) of every adapted weight."""
        return {name: layer.shape for name, layer in self.layers.items()}

    @property
    def embeddings(self) -> tuple[str, ...]:
        """The names of the embedding layers, whose A begins at zero and not B."""
        return tuple(name for name, layer in self.layers.items() if layer.embedding)

    @property
    def layers_of_own_rank(self) -> tuple[str, ...]:
        """The names of the layers to which the module gives another rank than to most (``rank_pattern`` of PEFT).

        A layer that only has a smaller maximum rank is not among them, because its scale is that of the others.
        """
        return tuple(
            name
            for name, layer in self.layers.items()
            if layer.limit is not None and (layer.limit < min(layer.shape) or layer.ratio != 1)
        )

    @property
    def largest_rank(self) -> int:
        """The largest rank that an update of one of the layers can have; a higher rank has no effect."""
        return max(layer.largest_rank for layer in self.layers.values())

    def find_device(self, layer: AdaptedLayer) -> torch.device:
        """Find the device of a layer's factors."""
        return self.base[layer.weight].device if self.device is None else self.device

    def draw_factors(self, rank: int, key: Key) -> Factors:
        """Draw random initial factors whose product is zero, as PEFT does.

        A ``[rank, k]`` is uniform in ±1/√k, or with ``gaussian`` N(0, 1/rank²), and B ``[d, rank]`` is zero. For an
        embedding, A is zero and B is N(0, 1). Clients of lower rank take the first components; a normal A then has the
        standard deviation 1/rank of the largest rank, the one given here. Factors have the type and the device of their
        layer.

        Args:
            rank: rank r, at most :attr:`largest_rank`; a layer with a smaller largest rank gets fewer components.
            key: source of randomness; each layer has its own subkey.
        """
        factors: Factors = {}
        for name, layer in self.layers.items():
            (d, k), layer_key = layer.shape, key / name
            r = min(rank, layer.largest_rank)
            if layer.embedding:
                b, a = layer_key.draw(partial(_normal, d), r).mT, torch.zeros(r, k)
            elif self.gaussian:
                b, a = torch.zeros(d, r), layer_key.draw(partial(_normal, k), r) / rank
            else:
                b, a = torch.zeros(d, r), (layer_key.draw(partial(_uniform, k), r) * 2 - 1) / math.sqrt(k)
            device = self.find_device(layer)
            factors[name] = Pair(b.to(device, layer.dtype).contiguous(), a.to(device, layer.dtype))
        return factors

    def insert_factors(
        self,
        factors: Factors,
        scale: float | Tensor,
        frozen_factors: Factors | None = None,
        moved_weights: Params | None = None,
    ) -> Params:
        """Build the parameters with which the module computes W + s·B A (+ B' A' of a frozen second adapter).

        Args:
            factors: factors B and A of every layer, of any rank.
            scale: scale s of the product.
            frozen_factors: factors of a further update, with a scale of 1. In training a module with dropout must not have
                them: it would drop their inputs, too.
            moved_weights: weights W that differ from the module's own, by the name of their parameter.
        """
        params: Params = dict(moved_weights or {})
        for name, pair in factors.items():
            layer = self.layers[name]
            frozen_pair = None if frozen_factors is None else frozen_factors.get(name)
            if layer.a is None:
                update = pair.dense() * scale
                if frozen_pair is not None:
                    update = update + frozen_pair.dense().to(update.dtype)
                self.check_changeable([name])
                w = params.get(layer.weight, self.base[layer.weight])
                params[layer.weight] = w + layer.reshape_update(update).to(w.dtype)
                continue
            has_module_scale = not isinstance(scale, Tensor) and scale == self.scale
            a, b = pair.a, pair.b if has_module_scale else pair.b * (scale / self.scale)
            if frozen_pair is not None and frozen_pair.rank:
                a = torch.cat([frozen_pair.a.to(a.dtype), a])
                b = torch.cat([(frozen_pair.b / self.scale).to(b.dtype), b], 1)
            params |= layer.as_parameters(Pair(b, a))
        return params

    def add_to_weights(self, updates: Mapping[str, Tensor]) -> Params:
        """Add dense updates ``[d, k]`` to the weights W, in the weights' own dtype.

        Raises:
            TaskError: if a weight is not in memory, or quantized.
        """
        self.check_changeable(updates)
        weights = {}
        for name, update in updates.items():
            layer = self.layers[name]
            w = self.base[layer.weight]
            weights[layer.weight] = (w + layer.reshape_update(update).to(w.device)).to(w.dtype)
        return weights

    def is_changeable(self, name: str) -> bool:
        """Whether an update can be added to the weight of a layer: it is in memory and not quantized."""
        w = self.base[self.layers[name].weight]
        return not w.is_meta and not is_packed(w)

    def check_changeable(self, names: Iterable[str]) -> None:
        """Refuse layers to whose weights nothing can be added.

        Raises:
            TaskError: if a weight is not in memory, or quantized.
        """
        for name in names:
            if not self.is_changeable(name):
                weight = self.layers[name].weight
                raise offloaded_error(weight) if self.base[weight].is_meta else _quantized_error(weight)

    def refuse_dropout(self, setting: str) -> None:
        """Refuse dropout beside a frozen update, which is stacked on the factors and would lose inputs with them.

        Args:
            setting: setting by which a client trains beside a frozen update.

        Raises:
            TaskError: if the module has dropout.
        """
        if self.dropout:
            raise TaskError(
                f"lora_dropout = {self.dropout:g} would drop inputs of the frozen update, too, which {setting} puts beside the "
                "factors, so that a client would train on another model than the one it got. Set lora.lora_dropout = 0, or leave "
                f"{setting} out"
            )

    def match_module_ranks(self, params: Params, module_params: Params) -> Params:
        """Convert the factors of a model to the ranks of the module's own factors; the function of the model does not change.

        Factors of a lower rank are zero-padded. For factors of a higher rank, s·B A is added to the weight and the
        factors are zero.
        """
        matched_params = dict(params)
        for name, layer in self.layers.items():
            if layer.a is None or layer.a not in params or layer.b not in params:
                continue
            pair, rank = layer.read_pair(params), module_params[layer.a].shape[0]
            if pair.rank > rank:
                if not self.is_changeable(name):
                    raise TaskError(
                        f"the update of {layer.weight} has rank {pair.rank}, above the rank {rank} of the module's factors, and "
                        "cannot be added to the weight, which is quantized or not in memory. `fedlowrank adapters` writes "
                        "the model"
                    )
                weight = params.get(layer.weight, module_params[layer.weight])
                update = layer.reshape_update(pair.dense() * self.scale)
                matched_params[layer.weight] = (weight + update.to(weight.device)).to(weight.dtype)
                pair = keep_first_components(pair, 0)
            matched_params |= layer.as_parameters(zero_pad_pair(pair, rank))
        return matched_params


def _quantized_error(weight: str) -> TaskError:
    return TaskError(
        f"the method adds an update to {weight}, which is quantized. Leave out quantize, or let the method keep its updates as "
        "factors: base_updates = 'stacked' for flora and fedex_lora"
    )


def _normal(columns: int, generator: torch.Generator, rank: int) -> Tensor:
    return torch.randn(rank, columns, generator=generator)


def _uniform(columns: int, generator: torch.Generator, rank: int) -> Tensor:
    return torch.rand(rank, columns, generator=generator)


def lora_of(model: Model) -> LoRA:
    """Return the :class:`LoRA` of a model, which is found once; raises TaskError as :func:`find_lora`."""
    if "lora" not in model.cache:
        lora = find_lora(model.module, model.head_name)
        if is_placed(model.module):
            device = next(iter(model.initial.values())).device
            trained = {n: Pair(p.b.to(device), p.a.to(device)) for n, p in lora.trained.items()}
            lora = replace(lora, device=device, trained=trained)
        model.cache["lora"] = lora
    cached_lora: LoRA = model.cache["lora"]
    return cached_lora


def parameters_beside_factors(model: Model) -> Params:
    """Initial values of the parameters trained beside LoRA factors: the head, and all others that are not frozen."""
    factors = {n for layer in lora_of(model).layers.values() for n in (layer.a, layer.b) if n is not None}
    if factors:
        return {n: p for n, p in model.initial.items() if n not in factors}
    return {} if model.head_name is None else model.head_of(model.initial)


def find_lora(module: nn.Module, head: str | None) -> LoRA:
    """Find the LoRA factors of a module; if it has none, its linear layers and convolutions outside the head.

    Args:
        module: any module.
        head: name of the module's head, which is trained whole.

    Raises:
        TaskError: if no layer can be adapted, or an adapter of PEFT does not begin as a zero update of an unchanged base, or is
            none of the form s·B A (:func:`.peft_settings.refuse_other_adapters`).
    """
    refuse_other_adapters(module)
    parameters = dict(module.named_parameters(remove_duplicate=False))
    adapted_layers: dict[str, tuple[str, nn.Module, FactorParameters]] = {}
    seen_factors = set()
    for path, layer in module.named_modules():
        for factor_parameters in find_factors(layer):
            # layers that share a weight share its factors, which are one adapted layer
            if (a := id(parameters[f"{path}.{factor_parameters.a}".lstrip(".")])) not in seen_factors:
                seen_factors.add(a)
                adapted_layers[name_adapted_layer(path, factor_parameters.weight)] = (
                    path,
                    layer,
                    factor_parameters,
                )
    if not adapted_layers:
        plain_layers = find_plain_layers(module, head)
        return LoRA(
            plain_layers, {layer.weight: parameters[layer.weight].detach() for layer in plain_layers.values()}
        )
    factors = [f for _, _, f in adapted_layers.values()]
    # the scale of most layers; the others have a ratio to it
    scale, rank = Counter(f.scale for f in factors).most_common(1)[0][0], max(f.rank for f in factors)
    layers = {
        n.removeprefix(PEFT_PREFIX): describe_adapted_layer(
            *entry, entry[2].rank if entry[2].rank < rank else None, entry[2].scale / scale
        )
        for n, entry in adapted_layers.items()
    }
    module_factors = {
        name: layer.read_pair({n: p.detach() for n, p in parameters.items()})
        for name, layer in layers.items()
    }
    return LoRA(
        layers,
        {layer.weight: parameters[layer.weight] for layer in layers.values()},
        scale,
        rank,
        any(f.rslora for f in factors),
        *find_initials(module),
        {name: pair for name, pair in module_factors.items() if pair.a.any() and pair.b.any()},
        dropout=max(f.dropout for f in factors),
    )


def average_present_components(
    means: Factors, previous_factors: Factors, component_weights: Tensor
) -> Factors:
    """Average each component of zero-padded factors only over the clients that have it.

    Args:
        means: weighted means of the zero-padded factors of all clients.
        previous_factors: factors that give the value of a component that no client has.
        component_weights: sum of the weights of the clients that have each component ``[rank]``, descending; the
            first is that of all clients.
    """
    shares = (component_weights / component_weights[0]).tolist()
    divided: Factors = {}
    for name, pair in means.items():
        share = pair.a.new_tensor(shares[: pair.rank])
        divided[name] = Pair(pair.b / share, pair.a / share[:, None])
    return keep_absent_components(divided, previous_factors, component_weights)


def keep_absent_components(means: Factors, previous_factors: Factors, component_weights: Tensor) -> Factors:
    """Give each component that no client has its previous value.

    A component of which both columns of B and rows of A are zero has no gradient and would stay zero for ever.

    Args:
        means: means of the clients' factors.
        previous_factors: factors of the round before.
        component_weights: sum of the weights of the clients that have each component ``[rank]``.
    """
    factors: Factors = {}
    for name, pair in means.items():
        is_held = component_weights[: pair.rank].to(pair.a.device) > 0
        b = torch.where(is_held, pair.b, previous_factors[name].b)
        factors[name] = Pair(b, torch.where(is_held[:, None], pair.a, previous_factors[name].a))
    return factors
