"""A module as a function of its parameters: torch's own answer, and the module as it was."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedlowrank.models.architecture import Architecture
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
