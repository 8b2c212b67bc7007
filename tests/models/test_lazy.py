"""Modules with lazy layers, whose shapes are known only after a forward pass."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedlowrank import Federation, simulate
from fedlowrank.adapters.lora.lora_layers import add_lora
from fedlowrank.core.errors import TaskError
from fedlowrank.core.key import Key

X = torch.randn(20, 5, generator=torch.Generator().manual_seed(0))
CLIENTS = [(X, torch.arange(20) % 3)] * 2


def lazy() -> nn.Sequential:
    return nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(3))


@pytest.mark.parametrize("given", [lazy, lazy()])
def test_initial_weights_are_those_of_one_forward_pass_under_the_seed(given: object) -> None:
    federation = Federation.from_arrays(CLIENTS, given, seed=3)  # type: ignore[arg-type]
    torch.manual_seed((Key((3,)) / "init" / "model").seed())
    plain = lazy().eval()
    _ = plain(X[:1])
    initial = federation.architectures["model"].initial
    assert initial.keys() == dict(plain.named_parameters()).keys()
    assert all(torch.equal(initial[n], p) for n, p in plain.named_parameters())
    result = simulate("fedavg", federation, rounds=1)
    # a lazy module of the user takes the trained weights
    loaded = lazy()
    loaded.load_state_dict(result.personal(client=1))
    assert torch.allclose(loaded.eval()(X), result.predict(1, X), atol=1e-5)


def test_a_lazy_layer_without_a_shape_is_named() -> None:
    unused = nn.Linear(5, 3)
    unused.extra = nn.LazyLinear(7)
    with pytest.raises(TaskError, match=r"extra\.weight of a lazy layer.*nn\.Linear\(8, 3\)"):
        Federation.from_arrays(CLIENTS, unused)
    with pytest.raises(TaskError, match=r"0\.weight.*lazy.*forward pass first"):
        add_lora(lazy(), rank=1, target_modules=["0"])
