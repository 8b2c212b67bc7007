"""A module as a function of its parameters: torch's own answer, and the module as it was."""

from __future__ import annotations

import copy
import threading
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedlowrank.adapters.deployment import deploy
from fedlowrank.adapters.lora.lora_layers import add_lora
from fedlowrank.core.errors import TaskError
from fedlowrank.models.architecture import Architecture
from fedlowrank.models.fused_inference import without_fused_inference
from fedlowrank.models.stateless import Stateless


class Tied(nn.Module):
    """One layer under two names, one parameter in two layers, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = self.a
        self.c = nn.Linear(4, 4)
        self.c.weight = self.a.weight
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.c(self.b(self.a(x))) * self.scale
        return out


class Recurrent(nn.Module):
    """A layer that keeps a list of its weights beside their names."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(4, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.cell(x[:, None])[0]
        return out


MODULES: dict[str, Any] = {
    "layers": lambda: nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 2, bias=False)),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 2, 3), nn.BatchNorm1d(2).eval()
    ),
    "tied": Tied,
    "recurrent": Recurrent,
    "a layer alone": lambda: nn.Linear(4, 3),
}


def others(module: nn.Module) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    named = [
        *module.named_parameters(),
        *((n, b) for n, b in module.named_buffers() if b.is_floating_point()),
    ]
    return {n: torch.rand(t.shape, generator=generator) for n, t in named}


@pytest.mark.parametrize("name", MODULES)
def test_as_torch_calls_it(name: str) -> None:
    module, x = MODULES[name](), torch.randn(6, 4)
    params, before = others(module), {n: t.clone() for n, t in module.state_dict().items()}
    plain = module(x)
    code = Stateless(module)
    torch.testing.assert_close(code(params, x), functional_call(module, params, (x,), tie_weights=False))
    # some of them only
    some = dict(list(params.items())[:1])
    torch.testing.assert_close(code(some, x), functional_call(module, some, (x,), tie_weights=False))
    assert {n: torch.equal(t, before[n]) for n, t in module.state_dict().items()} == dict.fromkeys(
        before, True
    )
    assert torch.equal(module(x), plain)


def test_gradients_flow_to_what_was_given() -> None:
    module, x = nn.Linear(4, 3), torch.randn(6, 4)
    params = {n: t.requires_grad_() for n, t in others(module).items()}
    grads = torch.autograd.grad(Stateless(module)(params, x).sum(), list(params.values()))
    torch.testing.assert_close(grads[0], x.sum(0).expand(3, 4))
    assert module.weight.grad is None


def test_a_failure_leaves_the_module_as_it_was() -> None:
    module = Tied()
    before = [id(p) for layer in module.modules() for p in layer._parameters.values()]
    code = Stateless(module)
    with pytest.raises(RuntimeError):
        code(others(module), torch.randn(6, 5))
    with pytest.raises(KeyError, match="wheight"):
        code({**others(module), "wheight": torch.ones(1)}, torch.randn(6, 4))
    # names of one layer that hold different tensors: the later one counts, and both are put back
    code({"a.weight": torch.zeros(4, 4), "b.weight": torch.ones(4, 4)}, torch.randn(6, 4))
    assert [id(p) for layer in module.modules() for p in layer._parameters.values()] == before


def test_a_copy_of_a_model_leaves_out_its_own_head() -> None:
    # as in another process: the copy's head is another object
    x = torch.ones(1, 3)
    made = Architecture("m", nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)), x, "2")
    made.set_training(False)
    twin = copy.deepcopy(made)
    expected = torch.relu(x @ made.initial["0.weight"].T + made.initial["0.bias"])
    for model in (made, twin):
        torch.testing.assert_close(model.represent(made.initial, x), expected)


def test_evaluation_calls_the_layers_that_fused_inference_would_bypass() -> None:
    peft = pytest.importorskip("peft")
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    wrapped: Any = peft.get_peft_model(
        layer, peft.LoraConfig(r=2, lora_alpha=8, target_modules=["linear1", "linear2"])
    )
    model, x = Architecture("layer", wrapped, torch.zeros(1, 3, 8)), torch.randn(4, 3, 8)
    params = {n: torch.randn_like(p) for n, p in model.initial.items()}
    with torch.inference_mode():
        actual = model.apply(params, x)
    # in training mode PyTorch calls each layer
    torch.testing.assert_close(actual, functional_call(wrapped.train(), params, (x,)))
    assert torch.backends.mha.get_fastpath_enabled()
    with pytest.raises(
        TaskError, match=r"deploy: layer .*linear1 \(Linear\) is of nn.Transformer.*merge_and_unload"
    ):
        deploy(wrapped, {})


class _Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 3 * super().forward(x)


class _ScaledEncoderLayer(nn.TransformerEncoderLayer):
    def _ff_block(self, x: Tensor) -> Tensor:
        return 3 * super()._ff_block(x)


def _encoder_layer(kind: str, activation: Any = nn.functional.relu) -> nn.Module:
    layer_class = _ScaledEncoderLayer if kind == "block" else nn.TransformerEncoderLayer
    layer = layer_class(8, 2, 16, 0.0, activation, batch_first=True)
    if kind in ("class", "lora"):
        layer.linear1 = _Scaled(8, 16)
    elif kind == "forward":
        layer.linear1.forward = types.MethodType(lambda m, x: 3 * nn.Linear.forward(m, x), layer.linear1)
    return add_lora(layer, 2) if kind == "lora" else layer


@pytest.mark.parametrize("kind", ["class", "forward", "lora", "block"])
def test_a_layer_with_its_own_forward_is_called_in_evaluation_and_not_deployed(kind: str) -> None:
    module, x = _encoder_layer(kind), torch.randn(4, 3, 8)
    model = Architecture("layer", module, torch.zeros(1, 3, 8))
    params = {n: torch.randn_like(p) for n, p in model.initial.items()}
    # in training mode PyTorch calls each layer
    expected = functional_call(module.train(), params, (x,))
    module.eval()
    with torch.inference_mode():
        torch.testing.assert_close(model.apply(params, x), expected)
    with pytest.raises(TaskError, match=r"has its own forward.*register_forward_pre_hook"):
        deploy(module, params)
    # PyTorch calls each layer if there is a hook, or with another activation
    module.register_forward_pre_hook(lambda *_: None)
    with torch.inference_mode():
        torch.testing.assert_close(deploy(module, params)(x), expected)
    other = _encoder_layer(kind, nn.functional.silu)
    with torch.no_grad():
        torch.testing.assert_close(deploy(other, {})(x), other.train()(x))


def test_fused_inference_computes_weights_of_factors_and_of_parametrizations() -> None:
    layer: Any = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    adapted, x = add_lora(layer, 2), torch.randn(4, 3, 8)
    nn.utils.parametrizations.weight_norm(layer.linear1)
    with torch.no_grad():
        for module in (adapted, layer):
            for p in module.parameters():
                p.copy_(torch.randn_like(p))
            torch.testing.assert_close(deploy(module, {})(x), module.train()(x))


class _Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.encoder(x, src_key_padding_mask=x[..., 0] > 0)
        return out.mean(1)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_model_of_pytorchs_own_layers_is_evaluated_as_pytorch_does() -> None:
    # fused inference gives zeros at masked positions, over which this model takes the mean
    module, x = _Masked().eval(), torch.randn(4, 5, 8)
    x[..., 0] = torch.tensor([-1.0, -1.0, -1.0, 1.0, 1.0])
    x[0, :, 0] = -1.0
    model = Architecture("masked", module, -torch.ones(1, 5, 8))
    with torch.inference_mode():
        torch.testing.assert_close(model.apply(model.initial, x), module.eval()(x))
        assert not torch.allclose(module.train()(x), module.eval()(x))


def test_the_setting_of_fused_inference_is_restored_after_the_last_block_of_all_threads() -> None:
    is_open, may_close, settings = threading.Event(), threading.Event(), []

    def hold() -> None:
        with without_fused_inference():
            is_open.set()
            may_close.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    is_open.wait(10)
    with without_fused_inference():
        may_close.set()
        thread.join()
        settings.append(torch.backends.mha.get_fastpath_enabled())
    assert [*settings, torch.backends.mha.get_fastpath_enabled()] == [False, True]
