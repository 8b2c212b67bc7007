"""FedNova: against NumPy, as FedAvg where all clients take equally many steps, and the optimizers that it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from fedlowrank.core.errors import ConfigError
from fedlowrank.core.learning.optimizer import SGD, AdamW
from fedlowrank.engines.engine import Engine
from fedlowrank.methods.fedavg import FedAvg
from fedlowrank.methods.fednova import FedNova
from tests.golden import baseline_reference

from .comparisons import assert_nested_close, assert_trees_close, to_layers
from .run_contents import get_initial_networks, get_train_data, plan_rounds
from .setting import LR, SAMPLE, federate_one_model, make_arrays, run_rounds


@pytest.mark.parametrize(("momentum", "mu"), [(0.0, 0.0), (0.9, 0.0), (0.0, 0.5)])
def test_fednova(momentum: float, mu: float, engine: type[Engine]) -> None:
    federation = federate_one_model()
    lr = LR / 5 if momentum else LR
    method = FedNova(mu=mu, optimizer=SGD(lr=lr, momentum=momentum), batch_size=8, epochs=2)
    run = run_rounds(method, federation, engine=engine, **SAMPLE)
    counts = {len(steps) for clients in plan_rounds(run) for (steps,) in clients.values()}
    assert counts == {4, 6, 8}
    expected = baseline_reference.fednova(
        get_initial_networks(federation)[0], get_train_data(federation), plan_rounds(run), lr, momentum, mu
    )
    assert_nested_close(to_layers(run.state.server), expected)


@pytest.mark.parametrize("optimizer", [SGD(lr=LR, weight_decay=0.1, clip=0.5), SGD(lr=0.05, momentum=0.9)])
def test_fednova_of_equal_numbers_of_steps_is_fedavg(optimizer: SGD) -> None:
    # unequal numbers of examples, and three steps an epoch for each of them
    data = make_arrays(sizes=(23, 17, 24, 20))
    settings: dict[str, Any] = {"optimizer": optimizer, "batch_size": 8, "epochs": 2}
    nova, plain = (
        run_rounds(make(**settings), federate_one_model(clients=data), **SAMPLE) for make in (FedNova, FedAvg)
    )
    assert_trees_close(nova.state.server, plain.state.server)
    # with other numbers of steps it is another model
    nova, plain = (run_rounds(make(**settings), federate_one_model(), **SAMPLE) for make in (FedNova, FedAvg))
    assert any((nova.state.server[n] - p).abs().max() > 1e-3 for n, p in plain.state.server.items())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"optimizer": AdamW(lr=0.01)}, "adamw"),
        ({"optimizer": SGD(lr=0.1, momentum=0.9, nesterov=True)}, "nesterov"),
        ({"optimizer": SGD(lr=0.1, momentum=0.9), "mu": 0.1}, "mu = 0.1 and optimizer has momentum"),
        ({"optimizer": AdamW(lr=0.01), "mu": 0.1}, "adamw"),
        ({"mu": -1.0}, "mu"),
    ],
)
def test_fednova_refuses_steps_whose_weights_it_does_not_know(settings: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        FedNova(**settings)
