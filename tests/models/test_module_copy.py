"""Copies of modules compute with their own tensors, or are refused."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedlowrank import Floral
from fedlowrank.adapters.deployment import deploy
from fedlowrank.adapters.lora.lora_layers import add_lora, merge_lora
from fedlowrank.core.errors import TaskError

torch.set_num_threads(1)


class Doubled:
    def __init__(self, function: Any) -> None:
        self.function = function

    def __call__(self, z: Tensor) -> Tensor:
        doubled: Tensor = 2 * self.function(z)
        return doubled


old_forward: Any = None


def captured(layer: nn.Linear) -> dict[str, Any]:
    """Each computes with the layer, its weight or its former forward, which a copy of a function shares."""
    global old_forward
    old_forward = forward = layer.forward
    weight = layer.weight
    return {
        "free variable": lambda z: 2 * forward(z),
        "default value": lambda z, m=layer: 2 * z @ m.weight.T,
        "keyword": lambda z, *, w=layer.weight: 2 * z @ w.T,
        "global variable": lambda z: 2 * old_forward(z),
        "inner function": lambda z: (lambda: 2 * forward(z))(),
        "list": lambda z, layers=[layer]: 2 * layers[0].weight @ z,
        "method": types.MethodType(lambda _, z: 2 * forward(z), layer),
        "partial": functools.partial(lambda z, factor: factor * forward(z), factor=2),
        "object": Doubled(lambda z: forward(z)),
        "object in a closure": (lambda made: lambda z: made(z))(Doubled(forward)),
        "builtin": weight.matmul,
        "compiled": torch.compile(forward, backend="eager"),
    }


@pytest.mark.parametrize("kind", captured(nn.Linear(4, 3)))
def test_a_forward_that_has_captured_its_layer_is_not_copied(kind: str) -> None:
    model = nn.Sequential(nn.Linear(4, 3))
    model[0].forward = captured(model[0])[kind]
    copies: tuple[Callable[[], Any], ...] = (
        lambda: add_lora(model, 2),
        lambda: Floral(model, 1, 2).merge(),
        lambda: deploy(model, {}),
    )
    for function in copies:
        with pytest.raises(TaskError, match=r"layer 0 \(Linear\) has a forward .* types.MethodType"):
            function()


def test_a_copy_of_a_compiled_module_computes_with_its_own_weights() -> None:
    model, x = torch.compile(nn.Linear(4, 3), backend="eager"), torch.randn(5, 4)
    expected = functional.linear(x, model.weight, model.bias)
    zeros = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    assert not deploy(model, zeros)(x).any()
    torch.testing.assert_close(model(x), expected)


def test_other_forwards_that_were_assigned_are_copied() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(5, 4)
    layer, act, forward = model[0], nn.ReLU(), model[0].forward
    zeros = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    function = lambda m, z: 2 * nn.Linear.forward(m, z)  # noqa: E731
    for own in (types.MethodType(function, layer), functools.partial(function, layer), Doubled(forward)):
        layer.forward, model[1].forward = own, lambda z: z
        torch.testing.assert_close(merge_lora(model)(x), model(x))
        # a copy computes with its own weights
        assert not deploy(model, zeros)(x).any()
    for bypass in (
        lambda z: z,
        functional.relu,
        torch.relu,
        lambda z: act(z),
        functools.partial(torch.mul, 2),
    ):
        model[1].forward = bypass
        torch.testing.assert_close(merge_lora(model)(x), model(x))


class Caching(nn.Linear):
    """Keeps computed tensors in containers, in an object, and in a buffer."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.mean = self.mean + out.mean(0)
        self.table, self.nested, self.object = {"h": out}, [(out, {"h": [out]})], types.SimpleNamespace(h=out)
        return out


def test_computed_tensors_are_copied_wherever_they_are() -> None:
    layer = Caching()
    out = layer(torch.randn(5, 4))
    made: Any = merge_lora(layer)
    for t in (made.table["h"], made.nested[0][0], made.nested[0][1]["h"][0], made.object.h):
        assert torch.equal(t, out)
        assert not t.requires_grad
    assert made.table["h"] is made.object.h
    assert torch.equal(made.mean, layer.mean)
    assert made.table["h"].data_ptr() != out.data_ptr()


class Extractor(nn.Module):
    """Reads the features that a hook has kept, as the usual feature extractor does."""

    def __init__(self, *, is_method: bool) -> None:
        super().__init__()
        self.body, self.head, self.features = nn.Linear(4, 4), nn.Linear(4, 3), dict[str, Tensor]()

        def keep(layer: nn.Module, args: Any, out: Tensor) -> None:
            self.features["body"] = out

        self.body.register_forward_hook(self.keep if is_method else keep)

    def keep(self, layer: nn.Module, args: Any, out: Tensor) -> None:
        self.features["body"] = out

    def forward(self, x: Tensor) -> Tensor:
        self.body(x)
        scores: Tensor = self.head(self.features["body"].relu())
        return scores


def test_a_hook_that_has_captured_the_module_is_refused_in_a_copy() -> None:
    x = torch.randn(5, 4)
    bound = Extractor(is_method=True)
    torch.testing.assert_close(add_lora(bound, 2, trainable=[])(x), bound(x))
    for copied in (lambda m: add_lora(m, 2, trainable=[]), lambda m: deploy(m, {}, 1.0)):
        with pytest.raises(
            TaskError, match=r"layer body \(Linear\) has a hook that has captured a layer.*bound method"
        ):
            copied(Extractor(is_method=False))


def test_a_hook_that_keeps_values_elsewhere_is_copied_as_it_is() -> None:
    kept: list[Tensor] = []
    network = nn.Sequential(nn.Linear(4, 4))
    network[0].register_forward_hook(lambda layer, args, out: kept.append(out))
    merge_lora(add_lora(network, 2))(torch.randn(5, 4))
    assert len(kept) == 1
