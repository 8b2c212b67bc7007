"""Detects modules whose behavior is known: built only of PyTorch's own layers or of this package's.

The engines have shortcuts, such as a step that is taken in the backward pass, or clients trained in one batched call.
They are exact only for a module that does the same in training as in evaluation, uses no random numbers, has no hook
and changes nothing but its output. This cannot be seen from outside for a module with a ``forward`` of the user's
own, so a shortcut runs only where :func:`is_standard` holds. All other modules are trained by plain steps, one client
after another.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.nn.modules.dropout import _DropoutNd

LAYERS: frozenset[type[nn.Module]] = frozenset(
    {
        *(
            nn.Sequential,
            nn.ModuleList,
            nn.ModuleDict,
            nn.ParameterList,
            nn.ParameterDict,
            nn.Identity,
            nn.Flatten,
            nn.Unflatten,
        ),
        *(nn.Linear, nn.Bilinear, nn.Conv1d, nn.Conv2d, nn.Conv3d),
        *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Embedding),
        *(nn.LayerNorm, nn.GroupNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
        *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
        *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish),
        *(
            nn.Sigmoid,
            nn.Tanh,
            nn.Softplus,
            nn.Softsign,
            nn.Softmax,
            nn.LogSoftmax,
            nn.Hardtanh,
            nn.Hardswish,
        ),
        *(nn.Hardsigmoid, nn.LogSigmoid, nn.Tanhshrink, nn.Hardshrink, nn.Softshrink),
        *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
        *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
        *(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
        *(
            nn.ZeroPad1d,
            nn.ZeroPad2d,
            nn.ConstantPad1d,
            nn.ConstantPad2d,
            nn.ReflectionPad2d,
            nn.ReplicationPad2d,
        ),
        *(nn.Upsample, nn.PixelShuffle, nn.PixelUnshuffle),
        *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    }
)
"""Deterministic layers of PyTorch, and dropout layers, whose rate must be 0.

A subclass does not count, because its behavior is unknown.
"""

OWN_MODULES = ("fedlowrank.models.", "fedlowrank.adapters.lora.lora_layers", "fedlowrank.testing.check")
"""Prefixes of the modules that define this package's layers. Their ``forward`` is deterministic."""

LIBRARY_MODULES = ("transformers.models.", "transformers.activations", "peft.")
"""Prefixes of library modules whose layers compute the same in training as in evaluation if all dropout rates are 0."""

HOOK_TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Names of a layer's tables of hooks."""


def is_standard(module: nn.Module) -> bool:
    """Whether a module's forward pass is deterministic, the same in both modes, and without side effects.

    Batch normalization counts as standard, because the engines set its mode themselves. The check runs anew for every
    pass, because a hook may be registered, or a layer replaced, between two rounds.
    """
    return find_other_layer(module) is None


def find_other_layer(module: nn.Module, allow_libraries: bool = False) -> str | None:
    """Name the first nonstandard layer or hook of a module, for a message; None if the module is standard.

    Args:
        module: module to check.
        allow_libraries: whether layers of :data:`LIBRARY_MODULES` without random numbers count as standard.
    """
    for name, layer in module.named_modules():
        if not _is_standard_layer(layer) and not (allow_libraries and _is_fixed_layer(layer)):
            return f"{f'layer {name!r}' if name else 'the model'} ({type(layer).__name__}) is not standard"
    return "a hook is registered on a layer" if has_hooks(module) else None


def has_hooks(module: nn.Module) -> bool:
    """Whether a forward or backward hook is registered on a layer, or on all modules."""
    return count_hooks(module) > 0


def count_hooks(module: nn.Module) -> int:
    """Count the forward and backward hooks that are registered on layers, and on all modules."""
    global_count = sum(len(getattr(torch_module, f"_global{name}")) for name in HOOK_TABLES)
    return global_count + sum(len(getattr(layer, name)) for layer in module.modules() for name in HOOK_TABLES)


def is_of_libraries(module: nn.Module) -> bool:
    """Whether all layers are of PyTorch, of :data:`LIBRARY_MODULES` or of this package, and none has a forward of its own."""
    prefixes = ("torch.", "fedlowrank.", *LIBRARY_MODULES)
    return all(
        type(layer).__module__.startswith(prefixes) and "forward" not in layer.__dict__
        for layer in module.modules()
    )


def takes_any_layout(module: nn.Module) -> bool:
    """Whether no code of the user sees the memory layout of its inputs, on which ``Tensor.view`` depends.

    All layers are PyTorch's or this package's, and no hook is registered.
    """
    return not has_hooks(module) and all(
        type(layer).__module__.startswith(("torch.", "fedlowrank.")) and "forward" not in layer.__dict__
        for layer in module.modules()
    )


def channels_last(t: Tensor) -> Tensor:
    """Convert images to the memory layout in which convolutions are fastest: 8 to 19 % less CPU time for a training step.

    It is for modules that take any layout (:func:`takes_any_layout`); a module of the user gets the usual one.
    """
    return t.contiguous(memory_format=torch.channels_last) if t.ndim == 4 else t


def remove_hooks(module: nn.Module) -> None:
    """Remove the user's forward and backward hooks from the layers of a module; the tables of hooks themselves stay unchanged.

    Hooks of transformers stay, because the forward pass needs them: by them it captures hidden states.
    """
    for layer in module.modules():
        for name in HOOK_TABLES:
            hooks = vars(layer)[name].items()
            own_hooks = (
                (k, h) for k, h in hooks if (getattr(h, "__module__", None) or "").startswith("transformers.")
            )
            vars(layer)[name] = OrderedDict(own_hooks)


def _is_standard_layer(layer: nn.Module) -> bool:
    layer_type = type(layer)
    if layer_type not in LAYERS and not layer_type.__module__.startswith(OWN_MODULES):
        return False
    if "forward" in layer.__dict__:
        return False
    if isinstance(layer, _DropoutNd):
        return layer.p == 0
    # max_norm rescales rows of the weight in place
    return not (isinstance(layer, nn.Embedding) and layer.max_norm is not None)


def _is_fixed_layer(layer: nn.Module) -> bool:
    """Whether a layer of a library has its own forward pass and no random numbers: no rate of dropout, jitter or noise."""
    if not type(layer).__module__.startswith(LIBRARY_MODULES) or "forward" in layer.__dict__:
        return False
    rates = [v for n, v in vars(layer).items() if any(word in n for word in ("drop", "jitter", "noise"))]
    return all(not rate for rate in rates if isinstance(rate, int | float))
