"""FedIT: against NumPy, as FedAvg of a module with LoRA layers, and as plain training of one client."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedlowrank.adapters.lora.lora_layers import add_lora
from fedlowrank.core import tree
from fedlowrank.core.learning.optimizer import SGD, AdamW
from fedlowrank.engines.engine import Engine
from fedlowrank.methods.fedavg import FedAvg
from fedlowrank.methods.fedit import FedIT
from fedlowrank.methods.shared.lora_family import LoRATraining
from fedlowrank.rounds.run import Run
from fedlowrank.storage.client_store import ClientStore
from fedlowrank.storage.state import State

from .lora_setting import (
    FAST_LOCAL,
    FAST_LR,
    NO_EVALUATION,
    assert_means_of_factors_equal,
    draw_initial_a,
    federate_lora,
    predict,
)
from .run_contents import list_batches
from .setting import Net, make_arrays, run_rounds


@pytest.mark.few(1)
def test_fedit(engine: type[Engine]) -> None:
    assert_means_of_factors_equal(FedIT, engine)


def add_lora_layers(run: Run, rank: int, drawn: dict[str, Tensor], alpha: float | None = None) -> nn.Module:
    """The federation's network with our LoRA layers, A as drawn."""
    base = Net(9, 10)
    base.load_state_dict(run.federation.architectures["model"].initial)
    made = add_lora(base, rank, alpha, trainable=("head",))
    with torch.no_grad():
        for name, a in drawn.items():
            made.get_submodule(name).lora_A.copy_(a)
    return made


def train_by_torch(module: nn.Module, run: Run, rounds: int) -> None:
    """Train client 0's data by torch's own SGD, in the order in which the run sees them."""
    info, data = run.federation.infos[0], run.federation.clients[0].train
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=FAST_LR)
    for t in range(rounds):
        for i in list_batches(run, t, info)[0]:
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(data.x[i]), data.y[i]).backward()
            optimizer.step()


def test_fedit_of_one_client_is_training_alone() -> None:
    run = run_rounds(
        FedIT(training=LoRATraining(rank=2), **FAST_LOCAL),
        federate_lora([2], clients=make_arrays()[:1]),
        **NO_EVALUATION,
    )
    module = add_lora_layers(run, 2, draw_initial_a(run.federation.key / "init", 2))
    train_by_torch(module, run, 3)
    torch.testing.assert_close(predict(run, 0), module(run.federation.clients[0].test.x), rtol=0, atol=1e-10)
    assert bool(module.body[0].lora_B.any())


@pytest.mark.parametrize("optimizer", [SGD(lr=0.2, momentum=0.9, weight_decay=0.01), AdamW(lr=0.01)])
def test_fedit_is_fedavg_of_a_module_with_lora_layers(optimizer: Any) -> None:
    local = {**FAST_LOCAL, "optimizer": optimizer}
    held = add_lora(Net(9, 10), 3, 5.0, trainable=("head",))
    a = run_rounds(FedIT(**local), federate_lora([3] * 4, held), steps=0, participation=0.75, **NO_EVALUATION)
    b = run_rounds(
        FedAvg(**local), federate_lora([3] * 4, held), steps=0, participation=0.75, **NO_EVALUATION
    )
    start = a.personal_params(a.federation.infos[0])
    assert start.keys() == b.state.server.keys()
    b.state = State(0, {n: start[n] for n in b.state.server}, ClientStore())
    for _ in range(3):
        a.step()
        b.step()
    assert tree.equal(
        {n: a.personal_params(a.federation.infos[0])[n] for n in b.state.server}, b.state.server
    )
    moved = [n for n, t in b.state.server.items() if not torch.equal(t, start[n])]
    assert len(moved) == 6
