"""Federated LoRA of modules in every floating-point type, on every wire: what is trained keeps the type of
the module."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedlowrank.adapters.lora.lora_layers import add_lora
from fedlowrank.core import tree
from fedlowrank.core.learning.optimizer import SGD
from fedlowrank.data.federation import Federation
from fedlowrank.engines.sequential import Sequential, Wire
from fedlowrank.methods.fedex_lora import FedExLoRA
from fedlowrank.methods.fedhl import FedHL
from fedlowrank.methods.fedit import FedIT
from fedlowrank.methods.fedsa_lora import FedSALoRA
from fedlowrank.methods.ffa_lora import FFALoRA
from fedlowrank.methods.flexlora import FlexLoRA
from fedlowrank.methods.flora import FLoRA
from fedlowrank.methods.hetlora import HetLoRA
from fedlowrank.methods.local_adaptor import LocalAdaptor
from fedlowrank.methods.shared.lora_family import LoRATraining

from .setting import CLASSES, INPUTS, Net, make_arrays, run_rounds

KINDS = (FedHL, FlexLoRA, FLoRA, HetLoRA, FedIT, FFALoRA, FedSALoRA, FedExLoRA)
MIXED = (FedHL, FlexLoRA, FLoRA, HetLoRA)


@functools.cache
def data() -> Any:
    return make_arrays(sizes=(12, 9, 10, 8))


WIRES = ("float32", "bfloat16", "int8")


def federation(kind: Any, dtype: torch.dtype, wrapped: bool) -> Federation:
    def made() -> nn.Module:
        module = Net(9, 10, dtype=dtype)
        return add_lora(module, 2, 3.0, trainable=("head",)) if wrapped else module

    ranks = (1, 2, 3, 4) if kind in MIXED else (2, 2, 2, 2)
    return Federation.from_arrays(data(), made, classes=CLASSES, rank=ranks)


def dtypes(value: Any) -> set[torch.dtype]:
    return {t.dtype for _, t in tree.leaves(value)}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("kind", "dtype", "wire"),
    [
        # every type on every wire for one method, the furthest ones for the others
        *((FedHL, d, w) for d in (torch.float64, torch.float32, torch.bfloat16) for w in WIRES),
        *((k, torch.float64, "int8") for k in KINDS if k is not FedHL),
        *((k, torch.bfloat16, "float32") for k in KINDS if k is not FedHL),
    ],
    ids=str,
)
def test_a_module_keeps_its_type_on_every_wire(kind: Any, dtype: torch.dtype, wire: Any) -> None:
    runs = []
    for engine in (Sequential, Wire):
        made = federation(kind, dtype, wrapped=wire != "bfloat16")
        method = kind(training=LoRATraining(rank=2, wire=wire), optimizer=SGD(lr=0.1), batch_size=8)
        runs.append(run_rounds(method, made, rounds=2, engine=engine, evaluate_every=2, participation=0.75))
    a, b = runs
    for info in a.federation.infos:
        one, other = a.personal_params(info), b.personal_params(info)
        assert dtypes(one) == {dtype}
        assert tree.equal(one, other)
        assert any(not torch.equal(one[n], p) for n, p in a.federation.architectures["model"].initial.items())
    # nothing travels in a wider type than the wire or the module has
    down = a.method.download(a.state.server, a.federation.infos[0])
    widest = {"float32": dtype, "bfloat16": torch.bfloat16, "int8": torch.int8}[wire]
    factors: list[Tensor] = [t for p, t in tree.leaves(down) if "rest" not in p and "scale" not in p]
    assert {t.dtype for t in factors} == {widest}


class TwoTypes(nn.Module):
    """A layer in bfloat16 beside one in float32, in either order."""

    head_name = "head"

    def __init__(self, types: tuple[torch.dtype, torch.dtype]) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(INPUTS, 7).to(types[0]), nn.Linear(7, 6).to(types[1])
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.one(x.to(self.one.bias.dtype)))
        scores: Tensor = self.head(torch.tanh(self.two(h.to(self.two.bias.dtype))).float())
        return scores


@pytest.mark.few(8)
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("types", list(itertools.permutations((torch.bfloat16, torch.float32))), ids=str)
@pytest.mark.parametrize("kind", [*KINDS, LocalAdaptor])
def test_layers_of_different_types_have_factors_of_their_own(kind: Any, types: Any, wrapped: bool) -> None:
    def made() -> nn.Module:
        module = TwoTypes(types)
        return add_lora(module, 2, 3.0, trainable=("head",)) if wrapped else module

    federation = Federation.from_arrays(data(), made, classes=CLASSES, rank=[2] * 4)
    run = run_rounds(kind(optimizer=SGD(lr=0.1), batch_size=8), federation, rounds=2, evaluate_every=2)
    info = federation.infos[0]
    for n, p in run.personal_params(info).items():
        if not n.startswith("head"):
            assert p.dtype == types["two" in n], n
    sent = (run.method.download(run.state.server, info), run.state.clients.get(info.id))
    factors = {path: t.dtype for path, t in tree.leaves(sent) if path.endswith(("/a", "/b", "/u", "/v"))}
    assert {d for path, d in factors.items() if "one" in path} <= {types[0]}
    assert {d for path, d in factors.items() if "two" in path} <= {types[1]}
