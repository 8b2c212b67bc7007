"""Models by name."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from ..core.arguments.field_checks import CheckedFields
from ..core.arguments.switch import Switch, refuse_unread_field
from ..core.arguments.user_code import import_named
from ..core.errors import ConfigError, did_you_mean
from .architectures.char_lstm import CharLSTM
from .architectures.cnn import CNN, FAMILY, FloralCNN
from .architectures.mlp import MLP, LinearModel
from .architectures.resnet import RESNETS, ResNet18
from .architectures.vgg import VGG8

Shape = tuple[int, ...]

SIGNATURE = "factory(shape: tuple[int, ...], classes: int) -> torch.nn.Module"
"""Signature of a user's factory, with the shape of one example and the number of classes or of regression targets."""

MODELS: dict[str, str] = {
    "cnn1": "CNN-1 of pFedLoRA: 2 convolutions (16, 32), FC 2000, FC 500",
    "cnn2": "CNN-2 of pFedLoRA: 2 convolutions (16, 16), FC 2000, FC 500",
    "cnn3": "CNN-3 of pFedLoRA: 2 convolutions (16, 32), FC 1000, FC 500",
    "cnn4": "CNN-4 of pFedLoRA: 2 convolutions (16, 32), FC 800, FC 500",
    "cnn5": "CNN-5 of pFedLoRA: 2 convolutions (16, 32), FC 500, FC 500",
    "cnn": "2 convolutions (16, 32), FC 500: 419,558 parameters at 3×32×32",
    "resnet18": "ResNet-18 of FedSLR: GroupNorm, 3×3 stem for CIFAR; 11,173,952 parameters for 10 classes",
    "resnet18_tiny": "ResNet-18 of FedSLR for TinyImageNet: the same with a 7×7 stem and a max-pool",
    "resnet18_w16": "ResNet-18 with a quarter of the channels: 701,456 parameters for 10 classes",
    "cnn_floral": "CNN of FLoRAL: convolutions 5×5 of 32 and 3×3 of 64, FC 64: 87,178 parameters at 3×32×32",
    "vgg8": "VGG-8 of FLoRAL: 5 convolutions, 2 × FC 512, dropout; 1,264,388 parameters at 3×32×32, 100 "
    "classes",
    "vgg8_bn": "VGG-8 with BatchNorm after each convolution",
    "char_lstm": "LSTM of LEAF for the next character: embedding 8, 2 layers of 256; takes source "
    "shakespeare",
    "char_lstm_w64": "LSTM of characters with an embedding of 8 and one layer of 64",
    "linear": "one linear layer, with or without a constant by model.bias",
    "mlp": "multi-layer perceptron, hidden widths by model.hidden",
}
"""Built-in models by name, with a line about each."""

CHARACTER_MODELS = {"char_lstm": (256, 2), "char_lstm_w64": (64, 1)}
"""Units of a layer and number of layers of each model of characters."""


@dataclass(frozen=True)
class ModelSettings(CheckedFields):
    """The models of the clients.

    Attributes:
        names: names of models; client k has the one with index k modulo the number of names. A name is a built-in
            model, or ``"package.module:factory"`` of your own. The factory is called as ``factory(shape, classes)``
            and returns a ``torch.nn.Module``; ``shape`` is that of one example, such as (3, 32, 32), and ``classes``
            the number of classes (in a regression, of targets).
        split: layer of the CNNs whose output is the representation: ``fc1`` or ``fc2`` (the default: the last hidden
            layer).
        hidden: widths of the hidden layers of the MLP.
        bias: whether the layers of ``mlp`` and ``linear`` add a constant.
        head: dotted name of the submodule that is the head of your own models, if the model does not declare it.
    """

    names: tuple[str, ...] = ("cnn1",)
    split: str | None = None
    hidden: tuple[int, ...] = (200,)
    bias: bool = True
    head: str | None = None

    switch: ClassVar[Switch] = Switch(
        "names", {"split": tuple(FAMILY), "hidden": ("mlp",), "bias": ("mlp", "linear")}
    )

    def __post_init__(self) -> None:
        if not self.names:
            raise ConfigError("model.names must name at least one model")
        for name, models in self.switch.reads.items():
            if not {*models} & {*self.names}:
                refuse_unread_field(
                    self,
                    name,
                    "model",
                    f"with model.names = {list(self.names)}",
                    f"name {' or '.join(models)} in model.names",
                )

    @property
    def own(self) -> tuple[str, ...]:
        """Names that stand for Python code of the user's own."""
        return tuple(name for name in self.names if ":" in name)

    def factories(self, shape: Shape, class_count: int) -> dict[str, Callable[[], nn.Module]]:
        """Make a factory of each named model.

        Args:
            shape: shape of one example, without the leading batch dimension.
            class_count: number of classes, or width of a regression's target.

        Raises:
            ConfigError: if a name is unknown.
        """
        return {name: self._factory(name, shape, class_count) for name in self.names}

    def _factory(self, name: str, shape: Shape, class_count: int) -> Callable[[], nn.Module]:
        if ":" in name:
            return _user_factory(name, shape, class_count)
        inputs = math.prod(shape)
        if name == "mlp":
            return lambda: MLP(inputs, self.hidden, class_count, self.bias)
        if name == "linear":
            return lambda: LinearModel(inputs, class_count, self.bias)
        if name in CHARACTER_MODELS:
            units, layers = CHARACTER_MODELS[name]
            return lambda: CharLSTM(class_count, hidden=units, layers=layers)
        if name not in MODELS:
            raise ConfigError(f"model.names: there is no model {name!r}. {did_you_mean(name, MODELS)}")
        if len(shape) != 3:
            raise ConfigError(
                f"model {name} takes images, channels × height × width, but an example has shape {shape}"
            )
        channels, height, width = shape
        if name in RESNETS:
            size = RESNETS[name]
            return lambda: ResNet18((channels, height, width), class_count, size.width, size.large)
        if name == "cnn_floral":
            return lambda: FloralCNN((channels, height, width), class_count)
        if name in ("vgg8", "vgg8_bn"):
            return lambda: VGG8((channels, height, width), class_count, batch_norm=name == "vgg8_bn")
        filters, hidden = FAMILY[name]
        return lambda: CNN((channels, height, width), class_count, filters, hidden, self.split)


def _user_factory(name: str, shape: Shape, class_count: int) -> Callable[[], nn.Module]:
    factory: Callable[[Shape, int], nn.Module] = import_named(name, "model.names")
    expectation = f"model.names: {name!r} must be a function that can be called as {SIGNATURE}"
    if not callable(factory) or isinstance(factory, nn.Module):
        raise ConfigError(f"{expectation}, not a {type(factory).__name__}")
    try:
        inspect.signature(factory).bind(shape, class_count)
    except TypeError as error:
        raise ConfigError(f"{expectation}: {error}") from error
    except ValueError:
        # some code has no signature that Python can show; calling it checks its arguments
        pass
    return lambda: factory(shape, class_count)
