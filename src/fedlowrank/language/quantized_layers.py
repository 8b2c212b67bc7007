"""Layers that bitsandbytes quantizes: their settings, their arithmetic, the gradient through them, and their messages."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..core.errors import ConfigError
from ..models.packed_weights import is_of_bitsandbytes

_LOGGERS = ("bitsandbytes.autograd._functions", "bitsandbytes.nn.modules", "bitsandbytes.functional")
_TOLERANCE = 0.2
"""Relative error of a gradient that rounding in 8 bits stays far below, and a missing gradient does not."""


@dataclass(frozen=True)
class StoredQuantization:
    """Quantization of the weights in a model's files, which transformers takes whatever else is asked for.

    Attributes:
        kind: ``"4bit"`` or ``"8bit"`` of bitsandbytes, or the name of another method, such as ``"gptq"``.
        compute_dtype: dtype in which 4-bit layers compute; None for other kinds.
        config: the settings, which belong to the model's configuration.
    """

    kind: str
    compute_dtype: str | None
    config: Any

    @property
    def is_of_bitsandbytes(self) -> bool:
        """Whether the layers are those of bitsandbytes."""
        return self.kind in ("4bit", "8bit")

    def skip(self, names: Sequence[str]) -> None:
        """Keep modules, which the files do not hold, from being quantized by bitsandbytes."""
        name = "llm_int8_skip_modules"
        if isinstance(self.config, dict):
            self.config[name] = [*(self.config.get(name) or ()), *names]
        else:
            setattr(self.config, name, [*(getattr(self.config, name, None) or ()), *names])

    def describe(self) -> str:
        """Describe the weights in a note."""
        computed = "" if self.compute_dtype is None else f", which compute in {self.compute_dtype}"
        return f"The files hold quantized weights ({self.kind}{computed}): neither quantize nor dtype changes them."


def find_stored_quantization(config: Any) -> StoredQuantization | None:
    """Find the quantization of the files of a model in its configuration; None if they are not quantized.

    Args:
        config: configuration of transformers.
    """
    stored: Any = None
    for part in (config, getattr(config, "text_config", None)):
        stored = stored or getattr(part, "quantization_config", None)
    if not stored:
        return None
    values = stored if isinstance(stored, dict) else stored.to_dict()
    if values.get("load_in_4bit"):
        return StoredQuantization("4bit", str(values.get("bnb_4bit_compute_dtype", "float32")), stored)
    kind = "8bit" if values.get("load_in_8bit") else str(values.get("quant_method", "an unnamed method"))
    return StoredQuantization(kind, None, stored)


def prepare_bitsandbytes(reason: str) -> None:
    """Check that bitsandbytes is installed, and let it write each message once.

    Args:
        reason: what needs bitsandbytes, the subject of a sentence.

    Raises:
        ConfigError: if bitsandbytes is missing.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(f"{reason} needs bitsandbytes: pip install 'fedlowrank[quantize]'")
    for name in _LOGGERS:
        _log_once(logging.getLogger(name))


def make_quantization(
    library: Any, bits: Literal["4bit", "8bit"], dtype: torch.dtype, skipped: Sequence[str] | None = None
) -> Any:
    """Make the configuration with which transformers quantizes linear layers while it loads a model.

    Args:
        library: the module ``transformers``.
        bits: ``"4bit"`` (NF4 with quantized scales, as QLoRA; arXiv:2305.14314) or ``"8bit"`` (LLM.int8(); arXiv:2208.07339).
        dtype: dtype in which 4-bit layers compute.
        skipped: names of modules that are not quantized; None for those that transformers leaves out.

    Raises:
        ConfigError: if bitsandbytes is missing.
    """
    prepare_bitsandbytes(f"quantize = {bits!r}")
    # transformers reads this field for 4 bits, too
    skip: dict[str, Any] = {} if skipped is None else {"llm_int8_skip_modules": list(skipped)}
    if bits == "8bit":
        return library.BitsAndBytesConfig(load_in_8bit=True, **skip)
    return library.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        **skip,
    )


def refuse_quantized_parts(model: nn.Module, names: Sequence[str]) -> None:
    """Raise ConfigError if a module that is trained whole is quantized.

    Args:
        model: model that transformers loaded.
        names: names of the modules that are trained whole.

    Raises:
        ConfigError: if one of them has a quantized layer.
    """
    for name in names:
        if any(is_of_bitsandbytes(layer) for layer in model.get_submodule(name).modules()):
            raise ConfigError(
                f"the module {name!r} of the base is trained whole, because it is the head or the files lack its weights, but it "
                "is quantized, so it has no gradient. Leave out quantize, or name a base whose files hold that module"
            )


def keep_training_arithmetic(model: nn.Module) -> None:
    """Let 8-bit layers compute in evaluations what they compute in training.

    On a CPU, bitsandbytes 0.50 rounds the inputs of 8-bit layers to 8 bits in evaluation mode only. The reference of DPO, and
    each evaluation, would then be of another model than the one that is trained. On a GPU both modes round inputs.

    Args:
        model: model that transformers loaded.
    """
    for module in model.modules():
        state: Any = getattr(module, "state", None)
        if is_of_bitsandbytes(module) and hasattr(state, "is_training"):
            state_class: type = type(state)
            state.__class__ = _make_training_state(state_class)


@cache
def _make_training_state(state_class: type) -> type:
    """Make the class of a layer's state that keeps the arithmetic of training when the layer sets its mode."""
    is_training = property(lambda _: True, lambda _, __: None)
    return type(state_class.__name__, (state_class,), {"is_training": is_training})


def keep_gradients(model: nn.Module) -> None:
    """Let gradients pass through quantized layers after an evaluation, too, and check that they do.

    On CPUs with instructions for bfloat16, bitsandbytes 0.50 converts a 4-bit layer for good when it first computes without
    gradients, to a form through which no gradient passes; training then goes on without an error.

    Args:
        model: model that transformers loaded.

    Raises:
        ConfigError: if no gradient, or a wrong one, passes through a kind of layers; the message names one.
    """
    layers: dict[type[nn.Module], tuple[str, nn.Module]] = {}
    for name, module in model.named_modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
        if is_of_bitsandbytes(module) and hasattr(module, "in_features"):
            layers.setdefault(type(module), (name, module))
    for name, layer in layers.values():
        if not _passes_gradients(layer):
            raise ConfigError(
                f"no gradient passes through the quantized layer {name!r} ({type(layer).__name__} of bitsandbytes) on this "
                "machine, so the layers before it would not be trained. Leave out quantize, or use a GPU or another version of "
                "bitsandbytes."
            )


def _passes_gradients(layer: Any) -> bool:
    """Whether the gradient of <v, layer(x)> by x is v's image by the transposed weights, after a call without gradients."""
    x = torch.linspace(-1, 1, 3 * layer.in_features, device=layer.weight.device)
    x = x.reshape(3, -1).sin().requires_grad_()
    with torch.no_grad():
        images: Tensor = layer(x)
        offset: Tensor = layer(torch.zeros_like(x))
    out: Tensor = layer(x)
    if not out.requires_grad:
        return False
    v = images - offset
    gradient: Tensor | None = torch.autograd.grad(out, x, v, allow_unused=True)[0]
    if gradient is None:
        return False
    # for y = W x it is <Wᵀ v, x> = <v, W x>
    product, expected = float((gradient * x.detach()).sum()), float((v * v).sum())
    return abs(product - expected) <= _TOLERANCE * expected


def _log_once(logger: logging.Logger) -> None:
    """Write each message of a logger once; 8-bit layers write the same warning in every call."""
    if not any(isinstance(f, _FirstOnly) for f in logger.filters):
        logger.addFilter(_FirstOnly())


class _FirstOnly(logging.Filter):
    """Lets a message pass the first time."""

    def __init__(self) -> None:
        super().__init__()
        self._messages: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the message is new."""
        message = record.getMessage()
        is_new = message not in self._messages
        self._messages.add(message)
        return is_new
