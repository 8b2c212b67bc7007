"""FedAvg: against NumPy, in float32, and as plain SGD of one client with all data."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedlowrank.core.learning.optimizer import SGD
from fedlowrank.data.federation import Federation
from fedlowrank.engines.engine import Engine
from fedlowrank.methods.fedavg import FedAvg
from fedlowrank.models.architectures.mlp import MLP
from tests.golden import reference
from tests.support.method_calls import personal

from .comparisons import assert_nested_close, to_layers
from .run_contents import get_client_states, get_initial_networks, get_train_data, plan_rounds
from .setting import (
    CLASSES,
    INPUTS,
    LOCAL,
    LR,
    SAMPLE,
    SIZES,
    SLOW_LOCAL,
    WIDTH,
    Net,
    federate_one_model,
    make_arrays,
    run_rounds,
)


def test_fedavg(engine: type[Engine]) -> None:
    federation = federate_one_model()
    run = run_rounds(FedAvg(**LOCAL), federation, engine=engine, **SAMPLE)
    expected = reference.fedavg(
        get_initial_networks(federation)[0], get_train_data(federation), plan_rounds(run), LR
    )
    assert_nested_close(to_layers(run.state.server), expected)
    assert all(s is None for s in get_client_states(run))


def train_by_torch(
    initial: nn.Module, x: Tensor, y: Tensor, rounds: list[list[np.ndarray]], **settings: Any
) -> nn.Module:
    """Training as everyone writes it; the optimizer is new in every round because it keeps nothing between
    rounds."""
    for steps in rounds:
        optimizer = torch.optim.SGD(initial.parameters(), **settings)
        for i in steps:
            optimizer.zero_grad()
            functional.cross_entropy(initial(x[i]), y[i]).backward()
            optimizer.step()
    return initial


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_one_client_with_all_data_is_plain_sgd(momentum: float) -> None:
    parts = make_arrays()
    x = np.concatenate([p["train"][0] for p in parts])
    y = np.concatenate([p["train"][1] for p in parts])
    federation = federate_one_model(clients=[{"train": (x, y)}])
    method = FedAvg(optimizer=SGD(lr=0.1, momentum=momentum), batch_size=16, epochs=2)
    run = run_rounds(method, federation)
    model = Net(WIDTH)
    model.load_state_dict(federation.architectures["small"].initial)
    rounds = [clients[0][0] for clients in plan_rounds(run)]
    assert [len(r) for r in rounds] == [2 * -(-sum(SIZES) // 16)] * 3
    trained = train_by_torch(model, torch.as_tensor(x), torch.as_tensor(y), rounds, lr=0.1, momentum=momentum)
    view = run.engine.trainer(method, federation, 0, federation.infos[0])
    actual = personal(
        method,
        run.state_of(federation.infos[0]),
        method.download(run.state.server, federation.infos[0]),
        view,
    )
    for name, p in trained.named_parameters():
        torch.testing.assert_close(actual[name], p.detach(), rtol=0, atol=1e-12)


def test_a_federation_of_float32_models_matches_the_reference_to_single_precision() -> None:
    federation = Federation.from_arrays(
        make_arrays(), {"mlp": lambda: MLP(INPUTS, (WIDTH,), CLASSES)}, classes=CLASSES
    )
    run = run_rounds(FedAvg(**SLOW_LOCAL), federation, **SAMPLE)
    expected = reference.fedavg(
        get_initial_networks(federation)[0], get_train_data(federation), plan_rounds(run), 0.2
    )
    for actual, layer in zip(to_layers(run.state.server), expected, strict=True):
        np.testing.assert_allclose(actual[0], layer[0], rtol=0, atol=2e-5)
        np.testing.assert_allclose(actual[1], layer[1], rtol=0, atol=2e-5)
