"""The models of FLoRAL: their layers and sizes counted by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fedlowrank.core.errors import ConfigError, TaskError
from fedlowrank.core.key import Key
from fedlowrank.models.architecture import Architecture, build_architecture, build_module
from fedlowrank.models.zoo import MODELS, ModelSettings

CIFAR = (3, 32, 32)


def model(name: str, shape: tuple[int, ...] = CIFAR, classes: int = 10, **kwargs: Any) -> nn.Module:
    return build_module(ModelSettings((name,), **kwargs).factories(shape, classes)[name], Key((0,)))


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def layers(module: nn.Module) -> list[nn.Module]:
    return [m for m in module.modules() if not list(m.children())]


def test_the_cnn_has_the_layers_of_the_paper() -> None:
    made = model("cnn_floral")
    conv, relu, pool, linear = nn.Conv2d, nn.ReLU, nn.MaxPool2d, nn.Linear
    kinds = [type(m) for m in layers(made)]
    # the pool comes first because that is faster; see the next test
    assert kinds == [conv, pool, relu, conv, pool, relu, nn.Flatten, linear, relu, linear]
    actual = layers(made)
    assert [(m.kernel_size, m.out_channels) for m in actual if isinstance(m, conv)] == [
        ((5, 5), 32),
        ((3, 3), 64),
    ]
    assert [m.kernel_size for m in actual if isinstance(m, pool)] == [2, 3]
    assert [(m.in_features, m.out_features) for m in actual if isinstance(m, linear)] == [
        (1024, 64),
        (64, 10),
    ]
    # 3·25·32 + 32, 32·9·64 + 64, 1024·64 + 64, 64·10 + 10
    assert count(made) == 2432 + 18_496 + 65_600 + 650 == 87_178
    assert f"{count(made):,}" in MODELS["cnn_floral"]
    a = Architecture("cnn_floral", made, torch.zeros(1, *CIFAR))
    assert a.width == 64


@pytest.mark.parametrize("name", ["cnn_floral", "cnn", "cnn3"])
def test_the_pool_before_the_relu_is_the_papers_model_bit_by_bit(name: str) -> None:
    made = model(name)
    a = layers(made)
    swapped = [a[0], a[2], a[1], a[3], a[5], a[4], *a[6:]]
    as_written = nn.Sequential(*swapped)
    x = torch.randn(16, *CIFAR, generator=torch.Generator().manual_seed(0))
    x[:3] = 0  # whole windows of equal numbers
    own, theirs = made(x), as_written(x)
    assert torch.equal(own, theirs)
    params = list(made.parameters())
    for g, h in zip(torch.autograd.grad(own.square().sum(), params), torch.autograd.grad(theirs.square().sum(), params),
                    strict=True):  # fmt: skip
        assert torch.equal(g, h)
        assert bool(g.any())


@pytest.mark.parametrize(
    ("shape", "flat"),
    [((1, 28, 28), 64 * 3 * 3), ((1, 14, 14), 64), ((1, 13, 13), 64 * 2 * 2), ((1, 8, 8), 64)],
)
def test_the_cnn_takes_smaller_images(shape: tuple[int, int, int], flat: int) -> None:
    made = model("cnn_floral", shape, 7)
    assert count(made) == (25 + 1) * 32 + (32 * 9 + 1) * 64 + (flat + 1) * 64 + 65 * 7
    assert made(torch.zeros(2, *shape)).shape == (2, 7)
    with pytest.raises(ConfigError, match="6×6"):
        model("cnn_floral", (1, 5, 9))


def test_vgg8_has_eight_layers_with_weights() -> None:
    made = model("vgg8", classes=100)
    block = [nn.Conv2d, nn.ReLU, nn.MaxPool2d]
    top = [nn.Linear, nn.ReLU, nn.Dropout]
    assert [type(m) for m in layers(made)] == [*block * 5, nn.Flatten, *top * 2, nn.Linear]
    convolutions = [m for m in layers(made) if isinstance(m, nn.Conv2d)]
    assert [m.out_channels for m in convolutions] == [16, 32, 64, 128, 512]
    assert {(m.kernel_size, m.padding) for m in convolutions} == {((3, 3), (1, 1))}
    assert {m.p for m in layers(made) if isinstance(m, nn.Dropout)} == {0.5}
    convolved = 28 * 16 + 145 * 32 + 289 * 64 + 577 * 128 + 1153 * 512
    assert count(made) == convolved + 513 * 512 + 513 * 512 + 513 * 100 == 1_264_388
    assert f"{count(made):,}" in MODELS["vgg8"]
    a = Architecture("vgg8", made, torch.zeros(1, *CIFAR))
    assert a.width == 512
    assert not a.is_standard
    assert made(torch.zeros(2, *CIFAR)).shape == (2, 100)
    with pytest.raises(ConfigError, match="32×32"):
        model("vgg8", (1, 28, 28))


def test_vgg8_with_batch_norm_is_the_same_with_a_norm_after_each_convolution() -> None:
    made = model("vgg8_bn", classes=100)
    kinds = [type(m) for m in layers(made)]
    assert kinds[:20] == [nn.Conv2d, nn.BatchNorm2d, nn.ReLU, nn.MaxPool2d] * 5
    assert [t for t in kinds if t is not nn.BatchNorm2d] == [
        type(m) for m in layers(model("vgg8", classes=100))
    ]
    assert count(made) == 1_264_388 + 2 * (16 + 32 + 64 + 128 + 512)


@pytest.mark.parametrize("bias", [True, False])
def test_the_linear_model_is_one_product(bias: bool) -> None:
    made = model("linear", (2, 5), 3, bias=bias)
    assert count(made) == 30 + 3 * bias
    a = Architecture("linear", made, torch.zeros(1, 2, 5))
    assert a.head_name is None
    x = torch.randn(4, 2, 5, generator=torch.Generator().manual_seed(0))
    expected = x.flatten(1) @ a.initial["linear.weight"].T + (a.initial["linear.bias"] if bias else 0)
    torch.testing.assert_close(a.apply(a.initial, x), expected)
    with pytest.raises(TaskError, match="names no head"):
        a.width  # noqa: B018


@pytest.mark.parametrize("bias", [True, False])
def test_the_mlp_goes_without_constants(bias: bool) -> None:
    made = model("mlp", (10,), 1, hidden=(20,), bias=bias)
    assert count(made) == 10 * 20 + 20 + 21 * bias
    assert all((m.bias is not None) == bias for m in layers(made) if isinstance(m, nn.Linear))


def test_models_for_images_refuse_other_shapes() -> None:
    for name in ("cnn_floral", "vgg8", "vgg8_bn"):
        with pytest.raises(ConfigError, match="takes images"):
            model(name, (10,))
        (factory,) = ModelSettings((name,)).factories(CIFAR, 10).values()
        assert build_architecture(name, factory, torch.zeros(1, *CIFAR), None, Key((0,))).width in (64, 512)
