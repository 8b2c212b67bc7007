"""Layers that bitsandbytes quantizes: their settings, the gradient through them, and their messages."""

from __future__ import annotations

import importlib.util
import logging
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..core.errors import ConfigError

_LOGGERS = ("bitsandbytes.autograd._functions", "bitsandbytes.nn.modules", "bitsandbytes.functional")
_TOLERANCE = 0.2
"""Relative error of a gradient that rounding in 8 bits stays far below, and a missing gradient does not."""


def make_quantization(library: Any, bits: Literal["4bit", "8bit"], dtype: str) -> Any:
    """Make the configuration with which transformers quantizes linear layers while it loads a model.

    Args:
        library: the module ``transformers``.
        bits: ``"4bit"`` (NF4 with quantized scales, as QLoRA; arXiv:2305.14314) or ``"8bit"`` (LLM.int8(); arXiv:2208.07339).
        dtype: dtype of the base, in which 4-bit layers compute; ``"auto"`` is bfloat16.

    Raises:
        ConfigError: if bitsandbytes is missing.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(f"quantize = {bits!r} needs bitsandbytes: pip install 'fedlowrank[quantize]'")
    for name in _LOGGERS:
        _log_once(logging.getLogger(name))
    if bits == "8bit":
        return library.BitsAndBytesConfig(load_in_8bit=True)
    return library.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16 if dtype == "auto" else getattr(torch, dtype),
    )


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
        if type(module).__module__.startswith("bitsandbytes.") and hasattr(module, "in_features"):
            layers.setdefault(type(module), (name, module))
    for name, layer in layers.values():
        if not _passes_gradients(layer):
            raise ConfigError(
                f"no gradient passes through the quantized layer {name!r} ({type(layer).__name__} of bitsandbytes) on this "
                "machine, so the layers before it would not be trained. Leave out quantize, or use a GPU or another version of "
                "bitsandbytes."
            )


def _passes_gradients(layer: nn.Module) -> bool:
    """Whether the gradient of <v, layer(x)> by x is v's image by the transposed weights, after a call without gradients."""
    weight: Any = layer.weight
    x = torch.linspace(-1, 1, 3 * int(layer.in_features), device=weight.device)  # type: ignore[arg-type]
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
