"""FedAdagrad, FedAdam and FedYogi: against NumPy, and their first step by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedlowrank.core import tree
from fedlowrank.core.contract import ServerView
from fedlowrank.engines.engine import Engine
from fedlowrank.methods.fedopt import FedAdagrad, FedAdam, FedYogi, ServerState
from tests.golden import baseline_reference

from .comparisons import assert_nested_close, to_layers
from .run_contents import get_initial_networks, get_train_data, plan_rounds
from .setting import LOCAL, LR, SAMPLE, federate_one_model, run_rounds


@pytest.mark.parametrize("make", [FedAdagrad, FedAdam, FedYogi])
def test_fedopt(make: Any, engine: type[Engine]) -> None:
    federation, beta1, beta2, tau = federate_one_model(), 0.7, 0.8, 0.01
    rest = {} if make is FedAdagrad else {"beta2": beta2}
    run = run_rounds(
        make(server_lr=0.05, beta1=beta1, tau=tau, **rest, **LOCAL), federation, engine=engine, **SAMPLE
    )
    kind = make.__name__.removeprefix("Fed").lower()
    expected = baseline_reference.fedopt(
        kind,
        get_initial_networks(federation)[0],
        get_train_data(federation),
        plan_rounds(run),
        LR,
        0.05,
        beta1,
        beta2,
        tau,
    )
    server = run.state.server
    assert_nested_close([to_layers(server.model), to_layers(server.m), to_layers(server.v)], expected)


@pytest.mark.parametrize(
    ("method", "m", "v"),
    [
        (FedAdagrad(server_lr=2.0, beta1=0.5, tau=0.5), 0.5 * 0.3, 0.25 + 0.09),
        (FedAdam(server_lr=2.0, beta1=0.5, beta2=0.8, tau=0.5), 0.5 * 0.3, 0.8 * 0.25 + 0.2 * 0.09),
        # v = 0.25 is above 0.09 and falls; v = 0.01 is below and grows
        (FedYogi(server_lr=2.0, beta1=0.5, beta2=0.8, tau=0.5), 0.5 * 0.3, 0.25 - 0.2 * 0.09),
        (FedYogi(server_lr=2.0, beta1=0.5, beta2=0.8, tau=0.1), 0.5 * 0.3, 0.01 + 0.2 * 0.09),
    ],
    ids=["adagrad", "adam", "yogi falls", "yogi grows"],
)
def test_the_first_step_of_fedopt_by_hand(method: Any, m: float, v: float) -> None:
    federation = federate_one_model()
    task = federation.task(1)
    server = method.server_init(task)
    moved = tree.map_leaves(lambda t: t + 0.3, server.model)
    after: ServerState = method.server_update(server, moved, ServerView(task, 0, federation.key))
    step = 2.0 * m / (v**0.5 + method.tau)
    for name, start in server.model.items():
        for actual, expected in ((after.m, m), (after.v, v), (after.model, start + step)):
            torch.testing.assert_close(
                actual[name],
                torch.as_tensor(expected, dtype=torch.float64).expand_as(start),
                rtol=0,
                atol=1e-12,
            )
