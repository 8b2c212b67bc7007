"""FedAvgM: against NumPy, and as FedAvg without momentum."""

from __future__ import annotations

from typing import Any

import pytest

from fedlowrank.engines.engine import Engine
from fedlowrank.methods.fedavg import FedAvg
from fedlowrank.methods.fedavgm import FedAvgM
from tests.golden import baseline_reference

from .comparisons import assert_nested_close, assert_trees_close, to_layers
from .run_contents import get_initial_networks, get_train_data, plan_rounds
from .setting import LOCAL, LR, SAMPLE, federate_one_model, run_rounds


@pytest.mark.parametrize(("momentum", "server_lr"), [(0.9, 1.0), (0.6, 0.4)])
def test_fedavgm(momentum: float, server_lr: float, engine: type[Engine]) -> None:
    federation = federate_one_model()
    method = FedAvgM(server_momentum=momentum, server_lr=server_lr, **LOCAL)
    run = run_rounds(method, federation, engine=engine, rounds=4, **SAMPLE)
    model, velocity = baseline_reference.fedavgm(
        get_initial_networks(federation)[0],
        get_train_data(federation),
        plan_rounds(run),
        LR,
        momentum,
        server_lr,
    )
    assert_nested_close(to_layers(run.state.server.model), model)
    assert_nested_close(to_layers(run.state.server.velocity), velocity)


@pytest.mark.parametrize("weighting", ["examples", "uniform"])
def test_fedavgm_without_momentum_is_fedavg(weighting: Any) -> None:
    method = FedAvgM(server_momentum=0.0, weighting=weighting, **LOCAL)
    run = run_rounds(method, federate_one_model(), **SAMPLE)
    assert_trees_close(
        run.state.server.model,
        run_rounds(FedAvg(weighting=weighting, **LOCAL), federate_one_model(), **SAMPLE).state.server,
    )
