"""The ResNets of FedSLR: sizes, form, and the same function written without modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from fedlowrank.core.errors import ConfigError
from fedlowrank.core.key import Key
from fedlowrank.models.architecture import Architecture, build_module
from fedlowrank.models.architectures.resnet import RESNETS, ResNet18
from fedlowrank.models.zoo import MODELS, ModelSettings
from fedlowrank.training.client_tensors.client_tensor import to_client_tensor

CIFAR, TINY = (3, 32, 32), (3, 64, 64)


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def small(large: bool = False, shape: tuple[int, int, int] = CIFAR, classes: int = 10) -> ResNet18:
    return build_module(lambda: ResNet18(shape, classes, width=4, large=large), Key((0,)))


def images(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("classes", "parameters"), [(10, 11_173_952), (100, 11_220_032)])
def test_the_size_is_that_of_fedslr(classes: int, parameters: int) -> None:
    with torch.device("meta"):
        assert count(ResNet18(CIFAR, classes)) == parameters


def by_hand(width: int, classes: int, channels: int, kernel: int) -> int:
    total = channels * kernel**2 * width + 2 * width
    for stage in range(4):
        a, b = width * 2 ** max(stage - 1, 0), width * 2**stage
        total += 9 * a * b + 9 * b * b + 2 * 9 * b * b + 4 * 2 * b
        total += a * b + 2 * b if stage else 0
    return total + 8 * width * classes


@pytest.mark.parametrize("width", [4, 16, 64])
@pytest.mark.parametrize(("large", "kernel"), [(False, 3), (True, 7)])
def test_the_size_at_other_widths_and_stems(width: int, large: bool, kernel: int) -> None:
    with torch.device("meta"):
        assert count(ResNet18((1, 28, 28), 7, width, large)) == by_hand(width, 7, 1, kernel)


def test_the_zoo_makes_them_by_name() -> None:
    expected = {
        "resnet18": by_hand(64, 10, 3, 3),
        "resnet18_tiny": by_hand(64, 10, 3, 7),
        "resnet18_w16": by_hand(16, 10, 3, 3),
    }
    assert set(RESNETS) == set(expected) == {n for n in MODELS if n.startswith("resnet")}
    with torch.device("meta"):
        made = ModelSettings(names=tuple(expected)).factories(CIFAR, 10)
        assert {n: count(f()) for n, f in made.items()} == expected
    assert f"{expected['resnet18']:,}" in MODELS["resnet18"]
    assert f"{expected['resnet18_w16']:,}" in MODELS["resnet18_w16"]
    with pytest.raises(ConfigError, match="resnet18 takes images"):
        ModelSettings(names=("resnet18",)).factories((12,), 10)


def written_out(p: dict[str, Tensor], x: Tensor, large: bool) -> Tensor:
    """The network by functions alone; GroupNorm by its definition."""

    def norm(name: str, y: Tensor) -> Tensor:
        b, c, h, w = y.shape
        g = y.reshape(b, 2, -1)
        g = (g - g.mean(2, keepdim=True)) / (g.var(2, unbiased=False, keepdim=True) + 1e-5).sqrt()
        return g.reshape(b, c, h, w) * p[f"{name}.weight"][:, None, None] + p[f"{name}.bias"][:, None, None]

    stride, pad = (2, 3) if large else (1, 1)
    x = norm("stem.1", functional.conv2d(x, p["stem.0.weight"], stride=stride, padding=pad)).clamp(min=0)
    if large:
        x = functional.max_pool2d(x, 3, 2, 1)
    for stage in range(4):
        for block in range(2):
            at = f"stages.{stage}.{block}"
            stride = 2 if stage and not block else 1
            y = norm(
                f"{at}.norm1", functional.conv2d(x, p[f"{at}.conv1.weight"], stride=stride, padding=1)
            ).clamp(min=0)
            y = norm(f"{at}.norm2", functional.conv2d(y, p[f"{at}.conv2.weight"], padding=1))
            if stride == 2:
                x = norm(f"{at}.shortcut.1", functional.conv2d(x, p[f"{at}.shortcut.0.weight"], stride=2))
            x = (x + y).clamp(min=0)
    return x.mean((2, 3)) @ p["head.weight"].T


@pytest.mark.parametrize(("large", "shape"), [(False, CIFAR), (True, TINY), (False, (3, 8, 8))])
def test_it_is_the_network_of_the_paper(large: bool, shape: tuple[int, int, int]) -> None:
    model = small(large, shape).double()
    generator = torch.Generator().manual_seed(1)
    # scales and shifts of norms too, which start at one and zero
    params = {
        n: p.detach() + 0.1 * torch.randn(p.shape, generator=generator) for n, p in model.named_parameters()
    }
    x = images(3, *shape).double()
    torch.testing.assert_close(functional_call(model, params, (x,)), written_out(params, x, large))


@pytest.mark.parametrize(
    ("large", "shape", "sides"), [(False, CIFAR, [32, 16, 8, 4]), (True, TINY, [16, 8, 4, 2])]
)
def test_the_stem_keeps_small_images_whole(large: bool, shape: Any, sides: list[int]) -> None:
    model = small(large, shape)
    x, seen = model.stem(images(1, *shape)), []
    for stage in model.stages:
        x = stage(x)
        seen.append(x.shape[2])
    assert seen == sides


def test_only_groups_of_two_normalize_and_no_layer_but_they_has_a_bias() -> None:
    model = small()
    norms = [m for m in model.modules() if isinstance(m, nn.GroupNorm)]
    assert len(norms) == 20
    assert {m.num_groups for m in norms} == {2}
    assert not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())
    assert all(m.bias is None for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear))


def test_the_classifier_is_the_head() -> None:
    model = Architecture("r", small(), images(1, *CIFAR))
    assert model.width == 32
    assert set(model.head_of(model.initial)) == {"head.weight"}
    x = images(2, *CIFAR)
    torch.testing.assert_close(
        model.head(model.initial, model.represent(model.initial, x)), model.apply(model.initial, x)
    )


def test_many_clients_at_once_compute_what_each_computes() -> None:
    model = Architecture("r", small(shape=(3, 8, 8)), images(1, 3, 8, 8))
    params = [{n: p * s for n, p in model.initial.items()} for s in (1.0, 0.7)]
    x = images(2, 4, 3, 8, 8)
    stacked = {n: to_client_tensor(torch.stack([p[n] for p in params])) for n in model.initial}
    both = model.apply(stacked, x.flatten(0, 1)).unflatten(0, x.shape[:2])
    for one, p, b in zip(both, params, x, strict=True):
        torch.testing.assert_close(one, model.apply(p, b), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("width", [0, -2, 3])
def test_a_width_that_two_groups_cannot_share_is_refused(width: int) -> None:
    with pytest.raises(ConfigError, match=str(width)):
        ResNet18(CIFAR, 10, width)
