"""Names, shapes and types that do not fit a module to deploy, and files of convolutions of rank 1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedlowrank.adapters.deployment import deploy, load_deployed, save_deployed
from fedlowrank.adapters.lora.lora_layers import add_lora
from fedlowrank.core.errors import TaskError
from fedlowrank.linalg.matricize import LowRank, to_sparse

torch.set_num_threads(1)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2))


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))


WRONG: dict[str, tuple[dict[str, Any], dict[str, Any] | None, str]] = {
    "name": (
        {"0.weigth": randn(5, 6)},
        None,
        "weights names '0.weigth', which is no parameter or buffer.*Did you",
    ),
    "shape": ({"0.weight": randn(9, 6)}, None, r"'0.weight' in weights has the shape \[9, 6\].* \[5, 6\]"),
    "row": ({"0.weight": randn(1, 6)}, None, r"'0.weight' in weights has the shape \[1, 6\]"),
    "entries": ({"0.weight": to_sparse(randn(5, 7))}, None, r"'0.weight' in weights has the shape \[5, 7\]"),
    "rows": ({"0.weight": LowRank(randn(4, 1), randn(1, 6))}, None, r"factors of the shapes \[4, 1\] and"),
    "columns": ({"0.weight": LowRank(randn(5, 1), randn(1, 8))}, None, r"needs \[5, r\] and \[r, 6\]"),
    "ranks": ({"0.weight": LowRank(randn(5, 2), randn(1, 6))}, None, r"needs \[5, r\] and \[r, 6\]"),
    "bias": ({"0.bias": LowRank(randn(5, 1), randn(1, 1))}, None, "it takes no factors"),
    "type": (
        {"0.weight": randn(5, 6).double()},
        None,
        "is of torch.float64, but the module's is of torch.float32",
    ),
    "half": ({"0.weight": LowRank(randn(5, 1).half(), randn(1, 6).half())}, None, "is of torch.float16"),
    "buffer": ({"1.running_mean": randn(4)}, None, r"'1.running_mean' in weights has the shape \[4\]"),
    "sparse name": ({}, {"zz": randn(5, 6)}, "sparse names 'zz', which is no parameter of the module"),
    "sparse buffer": ({}, {"1.running_mean": randn(5)}, "sparse names '1.running_mean'"),
    "sparse row": ({}, {"0.weight": randn(1, 6)}, r"'0.weight' in sparse has the shape \[1, 6\]"),
    "sparse type": ({}, {"0.weight": randn(5, 6).double()}, "'0.weight' in sparse is of torch.float64"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_does_not_fit_the_module_is_refused(what: str) -> None:
    weights, sparse, message = WRONG[what]
    with pytest.raises(TaskError, match=message):
        deploy(net(), weights, sparse)


def test_names_of_shared_weights_and_of_lora_factors() -> None:
    tied: Any = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    tied["b"].weight = tied["a"].weight
    w = randn(4, 4)
    # a state dict has both names
    made: Any = deploy(tied, {"a.weight": w, "b.weight": w})
    assert made["a"].weight is made["b"].weight
    assert torch.equal(made["b"].weight, w)
    with pytest.raises(TaskError, match=r"'b.weight', which the module shares with 'a.weight'"):
        deploy(tied, {"b.weight": w})
    adapted: Any = add_lora(nn.Sequential(nn.Linear(4, 3)), 2)
    state = adapted.state_dict() | {n: torch.randn_like(t) for n, t in adapted.named_parameters()}
    layer: Any = deploy(adapted, state)[0]  # type: ignore[index]
    expected = state["0.weight"].double() + state["0.lora_B"].double() @ state["0.lora_A"].double()
    torch.testing.assert_close(layer.weight.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv2d])
@pytest.mark.parametrize("rank", [1, 3])
def test_a_loaded_convolution_has_the_same_strides_and_bits(kind: Any, rank: int, tmp_path: Path) -> None:
    layer = kind(8, 16, 3)
    n = layer.weight.ndim - 2
    f = LowRank(randn(48, rank), randn(rank, 8 * 3 ** (n - 1)))
    made = deploy(nn.Sequential(layer), {"0.weight": f})
    save_deployed(made, tmp_path / "model")
    loaded = load_deployed(nn.Sequential(kind(8, 16, 3)), tmp_path / "model")
    for (name, t), (other, u) in zip(made.state_dict().items(), loaded.state_dict().items(), strict=True):
        assert (name, t.stride()) == (other, u.stride())
        assert t.stride() == torch.empty(t.shape).stride()
    x = randn(2, 8, *(11, 12)[:n])
    with torch.no_grad():
        assert torch.equal(made(x), loaded(x))


def test_complex_weights_are_dense() -> None:
    layer = nn.Linear(6, 5, dtype=torch.complex64)
    w = layer.weight.detach() * (torch.rand(5, 6) < 0.1)
    made, x = deploy(layer, {"weight": w}), randn(3, 6).to(torch.complex64)
    assert type(made) is nn.Linear
    torch.testing.assert_close(made(x), x @ w.T + layer.bias.detach())
