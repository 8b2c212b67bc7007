"""LoRA for the layers of any module: the weight W becomes W + s·B A, over a frozen W (Hu et al. 2021).

A layer stays the same object, with its class, options, hooks and buffers; W keeps the name of its parameter, and A
and B are parameters beside it. Reading ``layer.weight`` gives W + s·B A, for code that uses the weight without
calling the layer, such as tied output layers, attention, and PyTorch's fused inference of
``nn.TransformerEncoderLayer``.

A call of a linear layer, a convolution or an embedding does not form W + s·B A but computes W x + s·B (A x).
That is the same function where the layer's ``forward`` is PyTorch's own, and cheaper. With a weight
of 2048 × 2048, rank 8 and 1, 16 and 256 rows, forming the weight takes 9.9, 4.0 and 2.0 times its CPU time in
training, and 6.3, 2.3 and 1.1 times in inference (``benchmarks/speed/lora_layer_forms.py``). All other layers form the weight.
"""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.fx import _symbolic_trace
from torch.nn import functional

from ...core.arguments.bounds import check_minimum
from ...core.arguments.field_checks import check_arguments
from ...core.errors import ConfigError, TaskError
from ...core.key import Key
from ...models.module_copy import copy_module
from ...models.standard import LAYERS
from ...models.stateless import is_within
from ..adaptable import AdaptableWeight, find_adaptable_weights
from ..setting_comparison import is_same_setting
from .rank_limits import warn_lowered_ranks

_CONVOLVE = {nn.Conv1d: functional.conv1d, nn.Conv2d: functional.conv2d, nn.Conv3d: functional.conv3d}


class LoRALayer(nn.Module):
    """Mixin of a layer with low-rank updates, beside the layer's own class.

    ``lora_A`` is A ``[r, k]``, initially random; for a convolution, k = in · k1 · k2. ``lora_B`` is B ``[d, r]``,
    initially zero. For an embedding, k is the number of rows, A is zero and B is random. Each weight of
    ``nn.MultiheadAttention`` has its own factors: ``in_proj_lora_A`` and so on.

    The attribute of a weight is computed at every access. So changes of its value in place are lost, as with
    ``torch.nn.utils.parametrize``; :meth:`base_weight` is W itself. The attribute cannot be assigned or deleted:
    code that reads W + s·B A and writes it back would apply the update twice.

    ``torch.fx`` calls such a layer as a whole, like PyTorch's own layers.

    A state dict has the scale as the layer's ``_extra_state``, unless the layer's own class has an extra state. A state
    with another scale is not loaded, because its factors would give another update.

    Attributes:
        lora_scaling: scale s of the updates.
        lora_rslora: whether s is α/√r.
        lora_transposed: names of the weights that are W + s·(B A)ᵀ: those of embeddings and of GPT-2's ``Conv1D``,
            and weights that share their parameter with one of these.
        lora_class: own class of the layer.
        lora_weights: names of the layer's adapted weights.
    """

    lora_scaling: float
    lora_rslora: bool
    lora_transposed: frozenset[str]
    lora_class: ClassVar[type[nn.Module]]
    lora_weights: ClassVar[tuple[str, ...]]

    def base_weight(self, name: str = "weight") -> Tensor:
        """The frozen weight W."""
        # replicas of nn.DataParallel have plain attributes and no parameters. getattr is not used, because after an
        # AttributeError in a property nn.Module would find the parameter W.
        values: dict[str, Any] = self.__dict__ if name in self.__dict__ else self._parameters
        _refuse_symbolic_tracing(self, name)
        tensor: Tensor = values[name]
        return tensor

    def factors(self, name: str = "weight") -> tuple[Tensor, Tensor]:
        """Factors (b, a) whose product b a has the orientation of the weight: B and A, or Aᵀ and Bᵀ."""
        a, b = (self.base_weight(factor_name(name, f)) for f in "AB")
        return (a.mT, b.mT) if name in self.lora_transposed else (b, a)

    def adapted_weight(self, name: str = "weight") -> Tensor:
        """The adapted weight W + s·B A."""
        w = self.base_weight(name)
        b, a = self.factors(name)
        # s is multiplied into the smaller factor, which saves a pass over the weight
        return w + ((self.lora_scaling * b) @ a).reshape(w.shape).to(w.dtype)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.lora_weights:
            self._refuse_change(name, "assigned")
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.lora_weights:
            self._refuse_change(name, "deleted")
        super().__delattr__(name)

    def _refuse_change(self, name: str, attempted_change: str) -> None:
        """Refuse to change an adapted weight by its attribute.

        Two changes are allowed, because they concern W itself: ``load_state_dict(assign=True)``, and those of
        replicas of ``nn.DataParallel``.
        """
        caller = sys._getframe(2).f_globals.get("__name__")
        if caller == nn.Module.__module__ or getattr(self, "_is_replica", False):
            return
        raise TaskError(
            f"{name} of {type(self).__name__} cannot be {attempted_change}: it is computed, W + s·B A, from the frozen W and "
            "the LoRA factors. To change the layer, first make it a plain one with merge_lora(model). To set W "
            f"alone: with torch.no_grad(): layer.base_weight({name!r}).copy_(w)"
        )

    def get_extra_state(self) -> Any:
        """The scale, a tensor like all other entries of a state dict."""
        return torch.tensor(self.lora_scaling)

    def set_extra_state(self, state: Any) -> None:
        """Compare the scale of :meth:`get_extra_state` with the layer's own.

        Raises:
            TaskError: if it is another one.
        """
        if not is_same_setting(state, self.lora_scaling):
            raise TaskError(
                f"the state has the LoRA scale {float(state):g}, but the layer has {self.lora_scaling:g}, so its factors would "
                "give another update. Call add_lora with the alpha, rank and rslora of the model that the state is of"
            )

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        try:
            super()._load_from_state_dict(
                state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
            )
        except TaskError as error:
            raise TaskError(f"layer {prefix[:-1] or '(the module itself)'}: {error}") from error
        # a state without a scale is loaded, such as one of the factors alone
        if (name := f"{prefix}_extra_state") in missing_keys:
            missing_keys.remove(name)

    def extra_repr(self) -> str:
        """The layer's own representation, with the rank."""
        rank = self.base_weight(factor_name(self.lora_weights[0], "A")).shape[0]
        return ", ".join(filter(None, [super().extra_repr(), f"rank={rank}, scaling={self.lora_scaling:g}"]))

    def __reduce_ex__(self, protocol: Any) -> Any:
        # the class is created at run time, so a copy creates it again
        reduced: Any = super().__reduce_ex__(protocol)
        return _new_layer, (self.lora_class, self.lora_weights), *reduced[2:]


class _LinearLayer(LoRALayer):
    def forward(self, x: Tensor) -> Tensor:
        """Compute W x + s·B (A x)."""
        layer: Any = self
        b, a = self.factors()
        out = functional.linear(x, self.base_weight(), layer.bias)
        return out + self.lora_scaling * functional.linear(functional.linear(x, a), b)


class _Conv1DLayer(LoRALayer):
    def forward(self, x: Tensor) -> Tensor:
        """Compute x W + s·(x b) a, for GPT-2's linear layer with the weight ``[k, d]``."""
        layer: Any = self
        b, a = self.factors()
        out = functional.linear(x, self.base_weight().mT, layer.bias)
        return out + self.lora_scaling * functional.linear(functional.linear(x, b.mT), a.mT)


class _ConvolutionLayer(LoRALayer):
    def forward(self, x: Tensor) -> Tensor:
        """Compute W * x + s·B (A * x): A is a convolution with the layer's options, B one of kernel size 1."""
        layer: Any = self
        if layer.groups > 1:
            # with groups, B A updates the weight [out, in / groups, ...] and is not a chain of two convolutions
            return super().forward(x)  # type: ignore[no-any-return]  # of the layer's own class
        w, (b, a) = self.base_weight(), self.factors()
        out: Tensor = layer._conv_forward(x, w, layer.bias)
        inner = layer._conv_forward(x, a.reshape(-1, *w.shape[1:]), None)
        convolve = next(f for layer_class, f in _CONVOLVE.items() if isinstance(self, layer_class))
        return out + self.lora_scaling * convolve(inner, b.reshape(*b.shape, *[1] * (w.ndim - 2)))


class _EmbeddingLayer(LoRALayer):
    def forward(self, x: Tensor) -> Tensor:
        """Add rows of W and s times rows of (B A)ᵀ; padding gives no gradient, as the layer defines it.

        Gradients of A and B are dense even where those of W would be sparse.
        """
        layer: Any = self
        padding = layer.padding_idx
        if layer.max_norm is not None or layer.scale_grad_by_freq:
            # both options concern whole rows of W + s·(B A)ᵀ; max_norm then does not change the frozen W
            norm = layer.max_norm, layer.norm_type
            return functional.embedding(x, layer.weight, padding, *norm, layer.scale_grad_by_freq)
        b, a = self.factors()
        update = functional.linear(functional.embedding(x, b), a.mT)
        if padding is not None:
            update = torch.where((x == padding).unsqueeze(-1), update.detach(), update)
        return functional.embedding(x, self.base_weight(), padding) + self.lora_scaling * update


class _EmbeddingBagLayer(LoRALayer):
    def forward(
        self, x: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """Add bags of rows of W and s times bags of rows of (B A)ᵀ; padding is in no bag, as the layer defines it.

        Gradients of A and B are dense even where those of W would be sparse.
        """
        layer: Any = self

        def bags(table: Tensor) -> Tensor:
            output: Tensor = functional.embedding_bag(
                x,
                table,
                offsets,
                layer.max_norm,
                layer.norm_type,
                layer.scale_grad_by_freq,
                layer.mode,
                per_sample_weights=per_sample_weights,
                include_last_offset=layer.include_last_offset,
                padding_idx=layer.padding_idx,
            )
            return output

        if layer.max_norm is not None or layer.scale_grad_by_freq or layer.mode == "max":
            # these options concern whole rows of W + s·(B A)ᵀ; max_norm then does not change the frozen W
            return bags(layer.weight)
        b, a = self.factors()
        return bags(self.base_weight()) + self.lora_scaling * functional.linear(bags(b), a.mT)


def _refuse_symbolic_tracing(layer: LoRALayer, name: str) -> None:
    """Refuse symbolic tracing by ``torch.fx``, whose graph would read W + s·B A under the name of W."""
    # torch.compile, torch.export and make_fx are allowed, because they record tensors and not names
    if torch.compiler.is_compiling() or not getattr(_symbolic_trace, "_is_fx_tracing_flag", False):
        return
    from torch.fx.experimental.proxy_tensor import get_proxy_mode  # takes long to import

    if get_proxy_mode() is None:
        raise TaskError(
            f"torch.fx cannot trace into {type(layer).__name__}, whose {name} is computed, W + s·B A. Trace a "
            "plain module, merge_lora(model), or a module that calls this layer"
        )


def _product_form(base: type[nn.Module]) -> type[LoRALayer]:
    """The LoRA class for layers of a class: one that computes the product itself only where ``forward`` is known."""
    code: Any = base
    if code.forward is nn.Linear.forward:
        return _LinearLayer
    if code.forward is nn.Embedding.forward:
        return _EmbeddingLayer
    if code.forward is nn.EmbeddingBag.forward:
        return _EmbeddingBagLayer
    for layer_class in _CONVOLVE:
        if code.forward is layer_class.forward and code._conv_forward is layer_class._conv_forward:
            return _ConvolutionLayer
    return (
        _Conv1DLayer
        if f"{base.__module__}.{base.__name__}" == "transformers.pytorch_utils.Conv1D"
        else LoRALayer
    )


def factor_name(weight: str, factor: str) -> str:
    """Name a factor, ``"A"`` or ``"B"``, of a layer's weight, such as ``lora_A`` for ``weight``."""
    return f"{weight.removesuffix('weight')}lora_{factor}"


def _weight_property(name: str) -> property:
    def read(layer: LoRALayer) -> Tensor:
        return layer.adapted_weight(name)

    def write(layer: LoRALayer, value: Tensor) -> None:
        # only for replicas of nn.DataParallel: nn.Module itself assigns a parameter of that name
        layer.__dict__[name] = value

    return property(read, write)


@cache
def _lora_class(base: Any, weights: tuple[str, ...]) -> type[LoRALayer]:
    """Create the subclass of a layer's class whose weights are adapted."""
    # the forward of a user's class is unknown, so its subclass does not count as a layer of this package
    module = __name__ if base in LAYERS else base.__module__
    properties = {name: _weight_property(name) for name in weights}
    attributes = {"__module__": module, "lora_class": base, "lora_weights": weights}
    if base.get_extra_state is not nn.Module.get_extra_state:
        attributes |= {name: getattr(base, name) for name in ("get_extra_state", "set_extra_state")}
    return type(f"LoRA{base.__name__}", (_product_form(base), base), {**properties, **attributes})


def _new_layer(base: Any, weights: tuple[str, ...]) -> LoRALayer:
    lora_class = _lora_class(base, weights)
    return lora_class.__new__(lora_class)


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
    """Copy a module and add low-rank updates to its weights, with everything else frozen.

    Linear layers, attention (``nn.MultiheadAttention``: its projections and its output layer), convolutions and
    embeddings (also ``nn.EmbeddingBag``) can be adapted; other layers stay frozen. Adapted layers keep their class
    and all their options: ``isinstance``, hooks and the names of the frozen weights are as before, and
    ``layer.weight`` is W + s·B A; see :class:`LoRALayer`.
    A weight that several layers share has one update, which applies to all of them if one of them is a target.

    Args:
        module: module to copy, which is not changed.
        rank: rank r. A rank above the largest rank of all layers is lowered to that, also in α/r; a layer with a
            smaller largest rank gets fewer components under the same scale. Both cases cause a warning.
        alpha: scale numerator α, finite and not 0; by default r, for a scale of 1.
        target_modules: layers to adapt, as in PEFT: names that equal a layer's name or end it (``["fc1"]``), a
            regular expression for whole names, or ``"all"``. The name of an attention layer means all its weights.
        rslora: whether the scale is α/√r instead of α/r.
        trainable: names of submodules that are trained whole, such as a head.
        key: key from which the initial A is drawn; by default ``Key((0,))``.

    Returns:
        The copy, whose initial outputs equal those of the original exactly.

    Raises:
        TaskError: if no layer matches, or a layer cannot be adapted (its weight is parametrized, such as by
            ``weight_norm``, or has integers), is lazy, or already has LoRA factors; or if a layer cannot be copied because of
            a ``forward`` that was assigned to it (:func:`fedlowrank.models.module_copy.copy_module`).
        ConfigError: if the rank is not an integer of at least 1, α is 0 or not finite, or ``target_modules`` is not
            a valid regular expression.
    """
    rank = check_minimum("add_lora.rank", rank, 1)
    if alpha is not None and (alpha == 0 or not math.isfinite(alpha)):
        raise ConfigError(
            f"add_lora.alpha must be a finite number other than 0; it is {alpha}. The update is scaled by alpha "
            "/ rank; alpha=None gives the scale 1"
        )
    _check_pattern(target_modules)
    for name, parameter in module.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise TaskError(f"{name} belongs to a lazy layer without a shape; run one forward pass first")
    for name, layer in module.named_modules():
        if isinstance(layer, LoRALayer) or hasattr(layer, "lora_A"):
            raise TaskError(
                f"layer {name or '(the module itself)'} has LoRA factors already; add them once, to the module "
                "without them, for all layers together"
            )
    for adaptable in _find_targets(module, target_modules, trainable):
        if not adaptable.floating_parameter().numel():
            raise TaskError(
                f"layer {adaptable.name or '(the module itself)'} has a weight without entries, of shape "
                f"{[*adaptable.parameter().shape]}, so no rank fits it; leave it out of target_modules"
            )
    adapted_module = copy_module(module)
    key = Key((0,)) if key is None else key
    holders: dict[int, list[tuple[nn.Module, str]]] = {}
    for layer in adapted_module.modules():
        for attribute, p in layer._parameters.items():
            holders.setdefault(id(p), []).append((layer, attribute))
    targets = list(_find_targets(adapted_module, target_modules, trainable))
    shapes = {t.name: (len(w), w[0].numel()) for t in targets for w in [t.parameter()]}
    warn_lowered_ranks("LoRA", dict.fromkeys(shapes, rank), shapes)
    rank = min(rank, max(min(shape) for shape in shapes.values()))
    scaling = (rank if alpha is None else alpha) / (math.sqrt(rank) if rslora else rank)
    adapted_weights: dict[nn.Module, dict[str, tuple[nn.Parameter, nn.Parameter, bool]]] = {}
    for target in targets:
        weight, name = target.parameter(), target.name
        if target.attribute in adapted_weights.get(target.layer, {}):
            continue
        if getattr(target.layer, "sparse", False) and _product_form(type(target.layer)) is LoRALayer:
            raise TaskError(
                f"layer {name} ({type(target.layer).__name__}) has sparse gradients, which do not reach LoRA "
                "factors in a forward pass of its own; set sparse=False, or leave it out"
            )
        a, b = _initial_factors(target, min(rank, *shapes[name]), key / name)
        for layer, attribute in holders[id(weight)]:
            adapted_weights.setdefault(layer, {})[attribute] = a, b, target.is_transposed
    for parameter in adapted_module.parameters():
        parameter.requires_grad_(False)
    for layer, weights in adapted_weights.items():
        _adapt(layer, weights, scaling, rslora)
    for name in trainable:
        for parameter in _submodule(adapted_module, name).parameters():
            # other types have no gradient
            if parameter.is_floating_point() or parameter.is_complex():
                parameter.requires_grad_(True)
    return adapted_module


def merge_lora(module: nn.Module) -> nn.Module:
    """Copy a module of :func:`add_lora` as a plain module: each layer has its own class and the weight W + s·B A.

    Weights that layers share stay shared. A module without low-rank updates is only copied.
    """
    merged_module = copy_module(module)
    merge_lora_(merged_module)
    return merged_module


def merge_lora_(module: nn.Module) -> None:
    """Do :func:`merge_lora` in place."""
    layers = [layer for layer in module.modules() if isinstance(layer, LoRALayer)]
    with torch.no_grad():
        # computed for all layers before the first change, because layers may share W
        merged_weights = [
            (layer._parameters[n], layer.adapted_weight(n)) for layer in layers for n in layer.lora_weights
        ]
        for p, value in merged_weights:
            if p is not None:
                p.copy_(value)
    for layer in layers:
        for name in layer.lora_weights:
            for factor in "AB":
                delattr(layer, factor_name(name, factor))
        del layer.lora_scaling, layer.lora_rslora, layer.lora_transposed
        layer.__dict__.pop("__module__", None)
        layer.__class__ = layer.lora_class  # type: ignore[assignment]  # the class before add_lora


def _adapt(
    layer: Any,
    weights: dict[str, tuple[nn.Parameter, nn.Parameter, bool]],
    scaling: float,
    rslora: bool,
) -> None:
    """Adapt some weights of a layer in place; the object stays the same, with its references and hooks."""
    base: Any = type(layer)
    layer.__class__ = _lora_class(base, tuple(weights))
    layer.lora_scaling, layer.lora_rslora = scaling, rslora
    layer.lora_transposed = frozenset(name for name, (_, _, transposed) in weights.items() if transposed)
    for name, (a, b, _) in weights.items():
        layer.register_parameter(factor_name(name, "A"), a)
        layer.register_parameter(factor_name(name, "B"), b)
    # torch.fx calls modules that claim to be of torch.nn as a whole and does not trace into them
    layer.__dict__["__module__"] = nn.Module.__module__


def _initial_factors(target: AdaptableWeight, rank: int, key: Key) -> tuple[nn.Parameter, nn.Parameter]:
    """Create a random A and a zero B; for an embedding, a zero A and a random B."""
    weight, generator = target.parameter(), key.generator()
    d, k = weight.shape[0], math.prod(weight.shape[1:])
    if target.is_transposed:
        d, k = k, d
    if target.is_embedding:
        a, b = torch.zeros(rank, k), torch.randn(d, rank, generator=generator)
    else:
        a, b = (torch.rand(rank, k, generator=generator) * 2 - 1) / math.sqrt(k), torch.zeros(d, rank)
    return nn.Parameter(a.to(weight)), nn.Parameter(b.to(weight))


def _find_targets(
    module: nn.Module, target_modules: str | Sequence[str], trainable: Iterable[str]
) -> list[AdaptableWeight]:
    trainable_ids = {id(p) for name in trainable for p in _submodule(module, name).parameters()}
    layers = [
        target
        for target in find_adaptable_weights(module)
        if id(target.layer._parameters.get(target.attribute)) not in trainable_ids
        and not any(is_within(target.name, t) for t in trainable)
    ]
    attention_names = {n for n, m in module.named_modules() if isinstance(m, nn.MultiheadAttention)}

    def is_target(name: str) -> bool:
        parent = name.rpartition(".")[0]
        return _matches(name, target_modules) or (
            parent in attention_names and _matches(parent, target_modules)
        )

    targets = [target for target in layers if is_target(target.name)]
    if not targets:
        counts = Counter(target.name.rsplit(".", 1)[-1] for target in layers)
        available = ", ".join(f"{n} × {c}" for n, c in counts.items()) or "none"
        raise TaskError(
            f"target_modules = {target_modules!r} matches no layer that can be adapted; there are: "
            f"{available}"
        )
    return targets


def _matches(name: str, target: str | Sequence[str]) -> bool:
    if target == "all":
        return True
    if isinstance(target, str):
        return re.fullmatch(target, name) is not None
    return any(name == t or name.endswith(f".{t}") for t in target)


def _check_pattern(target: str | Sequence[str]) -> None:
    if not isinstance(target, str):
        return
    try:
        re.compile(target)
    except re.error as error:
        raise ConfigError(
            f"add_lora.target_modules = {target!r} is no regular expression: {error}. To match the ends of "
            'names give a list, such as ["fc1"]'
        ) from error


def _submodule(module: nn.Module, name: str) -> nn.Module:
    try:
        return module.get_submodule(name)
    except AttributeError as error:
        children = sorted(n for n, _ in module.named_children())
        raise TaskError(f"trainable: there is no submodule {name!r}; the module has {children}") from error
