"""Weights to which low-rank updates can be added: how to find them in a module, and why a layer has none."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils import parametrize
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from ..core.errors import TaskError

ATTENTION = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
"""Weights of ``nn.MultiheadAttention`` besides that of its output layer."""

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
"""Layers whose weight is a table of rows."""

_REMOVE = {
    WeightNorm: "torch.nn.utils.remove_weight_norm({layer}, {weight!r})",
    SpectralNorm: "torch.nn.utils.remove_spectral_norm({layer}, {weight!r})",
    BasePruningMethod: "torch.nn.utils.prune.remove({layer}, {weight!r})",
}
"""Hooks that compute a weight before every call, and the functions that remove them."""


@dataclass(frozen=True)
class AdaptableWeight:
    """A weight that can be adapted.

    Attributes:
        path: dotted name of the layer.
        layer: module that uses the weight.
        attribute: name of the weight in the layer.
    """

    path: str
    layer: nn.Module
    attribute: str

    @property
    def name(self) -> str:
        """The path, followed by ``in_proj``, ``q_proj`` and so on for weights of attention."""
        return name_adapted_layer(self.path, self.attribute)

    @property
    def is_embedding(self) -> bool:
        """Whether the weight is the table of an embedding."""
        return isinstance(self.layer, EMBEDDINGS)

    @property
    def is_transposed(self) -> bool:
        """Whether the weight is stored with the inputs first, ``[k, d]``, as in embeddings and GPT-2's ``Conv1D``."""
        return self.is_embedding or is_conv1d(self.layer)

    @property
    def is_computed(self) -> bool:
        """Whether the layer computes the weight from other parameters."""
        return self.layer._parameters.get(self.attribute) is None

    def parameter(self) -> nn.Parameter:
        """The parameter of the weight.

        Raises:
            TaskError: if the layer computes the weight from other parameters.
        """
        p = self.layer._parameters.get(self.attribute)
        if p is None:
            raise TaskError(
                f"no low-rank update can be added to a weight that is computed: {_describe_computed_weight(self)}, or "
                "leave the layer out (target_modules of LoRA layers, exclude of Floral)"
            )
        return p

    def floating_parameter(self) -> nn.Parameter:
        """The parameter of the weight, to which an update can be added.

        Raises:
            TaskError: if the layer computes the weight from other parameters, or its type is not floating-point.
        """
        p = self.parameter()
        if not (p.is_floating_point() or p.is_complex()):
            raise TaskError(
                f"layer {self.name} ({type(self.layer).__name__}) has a weight of type {p.dtype}, to which no "
                "low-rank update can be added; leave the layer out, or convert it to floating point"
            )
        return p


def find_adaptable_weights(module: nn.Module) -> Iterator[AdaptableWeight]:
    """Yield the weights of linear layers, attention, convolutions and embeddings, in the order of the modules.

    A ``Conv1D`` of Hugging Face counts as a linear layer.
    """
    for path, layer in module.named_modules():
        if isinstance(layer, nn.MultiheadAttention):
            for attribute in ATTENTION:
                # the three projections are one weight or three; the others are None
                if layer._parameters.get(attribute, layer) is not None:
                    yield AdaptableWeight(path, layer, attribute)
        elif isinstance(layer, (nn.Linear, _ConvNd, *EMBEDDINGS)) or is_conv1d(layer):
            yield AdaptableWeight(path, layer, "weight")


def refuse_computed_weights(module: nn.Module, names: Container[str], title: str) -> None:
    """Refuse to give a low-rank or sparse form to parameters from which a layer computes its weight.

    The weight would not have that form: with ``weight_norm`` a row of zeros becomes NaN, and an orthogonal weight
    has full rank.

    Args:
        module: any module.
        names: names of the parameters that get the form.
        title: title of the method.

    Raises:
        TaskError: if there is such a layer.
    """
    parameters = [n for n, _ in module.named_parameters(remove_duplicate=False)]
    for path, layer in module.named_modules():
        for attribute in _computed_attributes(layer):
            # weight_g and weight_v of weight_norm, weight_orig of spectral_norm and of pruning; parametrizations
            prefixes = tuple(
                f"{path}.{a}".lstrip(".") for a in (f"{attribute}_", f"parametrizations.{attribute}.")
            )
            if sources := [n for n in parameters if n.startswith(prefixes) and n in names]:
                raise TaskError(
                    f"{title} makes weights low-rank or sparse, but not one that is computed from "
                    f"{', '.join(sources)}: {_describe_computed_weight(AdaptableWeight(path, layer, attribute))}"
                )


def name_adapted_layer(path: str, weight: str) -> str:
    """Name an adapted layer by its path, followed by the weight's name unless that is ``weight``."""
    weight_name = "" if weight in ("weight", "base_layer.weight") else weight.removesuffix("_weight")
    return f"{path}.{weight_name}".strip(".")


def is_conv1d(layer: nn.Module) -> bool:
    """Whether a layer is GPT-2's linear layer in transformers, recognized without importing that library."""
    return (
        any(c.__name__ == "Conv1D" for c in type(layer).__mro__)
        and not isinstance(layer, (nn.Linear, _ConvNd))
        and getattr(getattr(layer, "weight", None), "ndim", 0) == 2
    )


def _computed_attributes(layer: nn.Module) -> list[str]:
    """Names of the tensors of a layer that hooks or parametrizations compute from other parameters."""
    chains = layer.parametrizations if parametrize.is_parametrized(layer) else ()
    return [*chains, *_computing_hooks(layer)]  # type: ignore[misc]  # torch types attributes as tensors


def _computing_hooks(layer: nn.Module) -> dict[str, Any]:
    """The hooks that compute tensors of a layer before every call, by the name of the tensor."""
    hooks: list[Any] = [h for h in layer._forward_pre_hooks.values() if isinstance(h, tuple(_REMOVE))]
    return {hook._tensor_name if isinstance(hook, BasePruningMethod) else hook.name: hook for hook in hooks}


def _describe_computed_weight(adaptable: AdaptableWeight) -> str:
    """Describe what computes a weight, and how to make the weight a parameter."""
    layer, weight, path = adaptable.layer, adaptable.attribute, f"model.get_submodule({adaptable.path!r})"
    title = f"layer {adaptable.path or '(the module itself)'} ({_class_name(layer)})"
    if parametrize.is_parametrized(layer, weight):
        chain = layer.parametrizations[weight]  # type: ignore[index]  # torch types attributes as tensors
        class_names = ", ".join(type(p).__name__.lstrip("_") for p in chain)
        removal = f"torch.nn.utils.parametrize.remove_parametrizations({path}, {weight!r})"
        return f"{title} has the parametrization {class_names} of its {weight}. Make it a plain weight by {removal}"
    if (hook := _computing_hooks(layer).get(weight)) is not None:
        removal = next(call for hook_class, call in _REMOVE.items() if isinstance(hook, hook_class))
        return (
            f"{title} has {type(hook).__name__} of its {weight}. Make it a plain weight by "
            f"{removal.format(layer=path, weight=weight)}"
        )
    return f"{title} has no parameter {weight!r}. Make it one"


def _class_name(layer: nn.Module) -> str:
    # parametrize replaces the class of a layer by a subclass of this name
    cls = type(layer)
    return cls.__mro__[1].__name__ if cls.__name__.startswith("Parametrized") else cls.__name__
