"""Weights of LoRA layers that are read as W + s·B A: what assigns, deletes, exchanges or traces them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.ao.quantization import get_default_qconfig_mapping
from torch.ao.quantization.quantize_fx import prepare_fx
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import fusion, parametrizations, spectral_norm

from fedlowrank.adapters.deployment import deploy
from fedlowrank.adapters.lora.lora_layers import LoRALayer, add_lora, merge_lora
from fedlowrank.core.errors import ConfigError, TaskError

torch.set_num_threads(1)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape)))


def adapted(module: nn.Module) -> Any:
    """A module with LoRA factors that are not zero, in evaluation mode."""
    made = add_lora(module.double(), 2, 3.0).eval()
    draw = torch.Generator().manual_seed(3)
    for name, p in made.named_parameters():
        if "lora_" in name:
            nn.init.normal_(p, generator=draw)
    return made


def by_hand(layer: Any, x: Tensor) -> Tensor:
    """The output of a linear layer with the weight W + s·B A."""
    table = layer._parameters
    return x @ (table["weight"] + layer.lora_scaling * table["lora_B"] @ table["lora_A"]).T + table["bias"]


class Squashed(nn.Linear):
    """A linear layer with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh()


def old_weight_norm(layer: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        nn.utils.weight_norm(layer)


def write_back(layer: nn.Module) -> None:
    layer.weight = nn.Parameter(layer.weight.detach().clone())


def write_tensor(layer: nn.Module) -> None:
    layer.weight = torch.zeros(3, 4, dtype=torch.float64)  # type: ignore[assignment]


CHANGES: dict[str, Callable[[Any], Any]] = {
    "parameter": write_back,
    "tensor": write_tensor,
    "none": lambda layer: setattr(layer, "weight", None),
    "delete": lambda layer: delattr(layer, "weight"),
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "old spectral_norm": spectral_norm,
}


@pytest.mark.parametrize("how", CHANGES)
def test_an_adapted_weight_is_not_assigned_or_deleted(how: str) -> None:
    layer, x = adapted(nn.Linear(4, 3)), randn(5, 4)
    before = by_hand(layer, x)
    with pytest.raises(
        TaskError, match=r"weight of LoRALinear cannot be .* merge_lora\(model\).*base_weight"
    ):
        CHANGES[how](layer)
    torch.testing.assert_close(layer(x), before)
    # what the message advises
    with torch.no_grad():
        layer.base_weight("weight").copy_(torch.ones(3, 4))
    update = layer.lora_scaling * layer.lora_B @ layer.lora_A
    torch.testing.assert_close(layer(x), x @ (1 + update).T + layer.bias)
    CHANGES["parameter"](merge_lora(layer))


def test_fully_sharded_training_is_refused(tmp_path: Path) -> None:
    # it reads the attribute, and would shard W + s·B A as W
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = adapted(nn.Sequential(nn.Linear(4, 3)))
        with pytest.raises(TaskError, match=r"weight of .* cannot be assigned.*merge_lora"):
            fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    finally:
        dist.destroy_process_group()


def test_the_old_weight_norm_is_refused() -> None:
    with pytest.raises(TaskError, match="merge_lora"):
        old_weight_norm(adapted(nn.Linear(4, 3)))
    layer, x = adapted(nn.Linear(4, 3)), randn(5, 4)
    before, plain = by_hand(layer, x), merge_lora(layer)
    old_weight_norm(plain)
    torch.testing.assert_close(plain(x), before)


def test_fusion_with_a_batch_normalization_is_refused_or_right() -> None:
    model = adapted(nn.Sequential(nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3)))
    model[1].running_mean.fill_(0.3), model[1].running_var.fill_(2.0)
    x = randn(2, 2, 4, 4)
    with pytest.raises(TaskError, match="merge_lora"):
        fusion.fuse_conv_bn_eval(model[0], model[1])
    plain: Any = merge_lora(model)
    torch.testing.assert_close(fusion.fuse_conv_bn_eval(plain[0], plain[1])(x), model(x))


def test_other_attributes_and_attention() -> None:
    layer = adapted(nn.Linear(4, 3))
    layer.bias = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    layer.lora_A = nn.Parameter(layer.lora_A.detach() * 2)
    layer.note = "kept"
    x = randn(5, 4)
    torch.testing.assert_close(layer(x), by_hand(layer, x))
    attention = adapted(nn.MultiheadAttention(6, 2))
    with pytest.raises(TaskError, match=r"in_proj_weight of LoRA.*base_weight\('in_proj_weight'\)"):
        attention.in_proj_weight = nn.Parameter(randn(18, 6))


@pytest.mark.parametrize("assign", [False, True])
def test_pytorch_exchanges_whole_parameters(assign: bool) -> None:
    model, x = adapted(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))), randn(5, 4)
    state = {n: randn(*p.shape) for n, p in model.named_parameters()}
    loaded = copy.deepcopy(model)
    loaded.load_state_dict({n: t.clone() for n, t in state.items()}, assign=assign)
    expected = by_hand(loaded[2], by_hand(loaded[0], x).tanh())
    assert torch.equal(loaded[0]._parameters["weight"], state["0.weight"])
    torch.testing.assert_close(loaded(x), expected)
    torch.testing.assert_close(functional_call(model, state, (x,)), expected)
    for moved in (copy.deepcopy(loaded).float().double(), loaded.to(torch.float32).to(torch.float64)):
        torch.testing.assert_close(moved(x), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(TaskError, match="merge_lora"):
        loaded[0].weight = nn.Parameter(state["0.weight"])
    empty = model.to("meta").to_empty(device="cpu")
    empty.load_state_dict(state)
    torch.testing.assert_close(empty(x), expected)


class Nest(nn.Module):
    """Layers of PyTorch's own class and of the user's, one of them called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.own, self.last = nn.Linear(4, 4), Squashed(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.own(self.first(self.first(x))))


@pytest.mark.parametrize("how", ["fx", "prepare_fx"])
def test_fx_graphs_are_right_and_follow_the_factors(how: str) -> None:
    model, x = adapted(Nest()).float(), randn(5, 4).float()
    if how == "fx":
        graph: Any = fx.symbolic_trace(model)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            graph = prepare_fx(copy.deepcopy(model), get_default_qconfig_mapping("x86"), (x,))
    for scale in (1.0, 2.0):
        for made in (model, graph):
            for name in ("first", "own", "last"):
                layer: Any = made.get_submodule(name)
                nn.init.constant_(layer.lora_B, scale)
        inner = by_hand(model.first, by_hand(model.first, x))
        expected = by_hand(model.last, by_hand(model.own, inner).tanh())
        # applied twice, the update would move them by their own size
        torch.testing.assert_close(graph(x), expected, rtol=1e-4, atol=1e-4)
    assert {n for n, _ in graph.named_parameters()} == {n for n, _ in model.named_parameters()}
    assert not any("weight" in n for n, _ in graph.named_buffers())
    merged: Any = merge_lora(graph)
    assert not any(isinstance(m, LoRALayer) for m in merged.modules())
    assert merge_lora(model).last.__module__ == nn.Linear.__module__


class Tracer(fx.Tracer):
    """Traces into every layer."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return False


class Tied(nn.Module):
    """A model that reads its table's weight without calling the table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.table(x), self.table.weight)


def test_fx_does_not_trace_into_a_layer() -> None:
    for module in (nn.Linear(4, 3), Squashed(4, 3), Tied()):
        with pytest.raises(TaskError, match=r"torch.fx cannot trace into LoRA.*merge_lora\(model\)"):
            fx.symbolic_trace(adapted(module))
    with pytest.raises(TaskError, match=r"torch.fx cannot trace"):
        Tracer().trace(adapted(nn.Sequential(nn.Linear(4, 3))))
    # graphs of tensors, not of names, are right
    layer, x = adapted(nn.Linear(4, 3)), randn(5, 4)
    torch.testing.assert_close(make_fx(layer)(x)(x), by_hand(layer, x))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        traced = torch.jit.trace(layer, x)
    torch.testing.assert_close(traced(x), by_hand(layer, x))
    for strict in (False, True):
        exported = torch.export.export(layer, (x,), strict=strict)
        torch.testing.assert_close(exported.module()(x), by_hand(layer, x))
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), by_hand(layer, x))


def test_scales_patterns_and_weights_that_fit_nothing_are_refused() -> None:
    for alpha in (0.0, float("nan"), float("inf"), -float("inf")):
        with pytest.raises(ConfigError, match=r"add_lora.alpha must be a finite number other than 0; it is"):
            add_lora(nn.Linear(4, 3), 1, alpha)
    with pytest.raises(ConfigError, match=r"add_lora.target_modules = '\[' is no regular expression"):
        add_lora(nn.Linear(4, 3), 1, target_modules="[")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's own, of tensors without entries
        empties = nn.Linear(0, 3), nn.Linear(3, 0)
    for empty in empties:
        with pytest.raises(
            TaskError, match=r"layer 0 has a weight without entries, of shape .* leave it out"
        ):
            add_lora(nn.Sequential(empty, nn.Linear(3, 3)), 1)
        assert isinstance(
            add_lora(nn.Sequential(empty, nn.Linear(3, 3)), 1, target_modules=["1"])[1],  # type: ignore[index]
            LoRALayer,
        )


def test_a_state_of_another_scale_is_not_loaded() -> None:
    base = nn.Sequential(nn.Linear(4, 3))
    state, factors = adapted(base).state_dict(), ["0.lora_A", "0.lora_B"]
    for other in (add_lora(base, 2), add_lora(base, 2, 4.0), add_lora(base, 2, 3.0, rslora=True)):
        for load in (other.load_state_dict, lambda weights, made=other: deploy(made, weights)):
            with pytest.raises(TaskError, match=r"layer 0: the state has the LoRA scale 1\.5, but the layer"):
                load(state)
    same, x = add_lora(base, 2, 3.0), randn(5, 4)
    # after half precision and 300 additions in it, without the scale, the factors alone, and entries without a number
    same.load_state_dict({n: t.half() for n, t in state.items()})
    same.load_state_dict({n: sum(t.float() / 300 for _ in range(300)) for n, t in state.items()})
    same.load_state_dict({n: t for n, t in state.items() if "extra" not in n})
    same.load_state_dict({n: state[n] for n in factors}, strict=False)
    same.load_state_dict({n: t.to("meta") if "extra" in n else t for n, t in state.items()})
    copy.deepcopy(same).load_state_dict({n: t.to(torch.int16) for n, t in state.items()})
    torch.testing.assert_close(same(x), by_hand(same[0], x))
    assert base.load_state_dict(merge_lora(same).state_dict()).missing_keys == []
    torch.testing.assert_close(functional_call(same, state, (x,)), same(x))
    assert get_model_state_dict(same).keys() == state.keys()


class Counting(nn.Linear):
    count = 0

    def get_extra_state(self) -> int:
        return self.count

    def set_extra_state(self, state: int) -> None:
        self.count = state


def test_a_layer_keeps_the_extra_state_of_its_own_class() -> None:
    layer = Counting(4, 3)
    layer.count = 7
    made, other = add_lora(layer, 2), add_lora(Counting(4, 3), 2)
    other.load_state_dict(made.state_dict())
    assert other.count == 7
