"""Ditto: against NumPy, beside FedAvg and Standalone, and the models that it shows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedlowrank.core import tree
from fedlowrank.core.learning.optimizer import SGD, AdamW
from fedlowrank.engines.engine import Engine
from fedlowrank.methods.ditto import Ditto
from fedlowrank.methods.fedavg import FedAvg
from fedlowrank.methods.standalone import Standalone
from tests.golden import dual_reference, reference

from .comparisons import assert_parameters_close
from .run_contents import (
    get_client_states,
    get_initial_networks,
    get_personal_model_and_predictors,
    get_train_data,
    plan_rounds,
)
from .setting import FALLING_LOCAL, FALLING_RATES, FLOAT32, LOCAL, LR, SAMPLE, federate_one_model, run_rounds


@pytest.mark.few(2)
@pytest.mark.parametrize("lam", [0.1, 1.5])
def test_ditto(lam: float, engine: type[Engine]) -> None:
    federation = federate_one_model()
    run = run_rounds(Ditto(lam=lam, **FALLING_LOCAL), federation, engine=engine, **SAMPLE)
    start = get_initial_networks(federation)
    w, own = dual_reference.ditto(
        start[0], start, get_train_data(federation), plan_rounds(run), FALLING_RATES, lam
    )
    assert_parameters_close(run.state.server, w)
    for actual, expected in zip(get_client_states(run), own, strict=True):
        assert_parameters_close(actual, expected)


@pytest.mark.parametrize("optimizer", [SGD(lr=0.2), SGD(lr=0.1, momentum=0.9, clip=0.5), AdamW(lr=0.01)])
@pytest.mark.parametrize("lam", [0.0, 0.5])
def test_the_global_model_of_ditto_is_that_of_fedavg_bit_for_bit(lam: float, optimizer: Any) -> None:
    settings = {"optimizer": optimizer, "batch_size": 8, "epochs": 2}
    a, b = (
        run_rounds(m, federate_one_model(**FLOAT32), **SAMPLE)
        for m in (Ditto(lam=lam, **settings), FedAvg(**settings))
    )
    assert tree.equal(a.state.server, b.state.server)


def test_ditto_without_a_proximal_term_is_standalone_but_for_the_order_of_examples() -> None:
    # by the reference of Standalone in the order of the second pass
    federation = federate_one_model()
    run = run_rounds(Ditto(lam=0.0, **LOCAL), federation, **SAMPLE)
    second = [{k: [passes[1]] for k, passes in clients.items()} for clients in plan_rounds(run)]
    expected = reference.standalone(get_initial_networks(federation), get_train_data(federation), second, LR)
    for actual, net in zip(get_client_states(run), expected, strict=True):
        assert_parameters_close(actual, net)
    # in one step on all examples there is no order: Standalone itself
    whole = {"optimizer": SGD(lr=LR), "batch_size": 64}
    a, b = (
        run_rounds(m, federate_one_model(), **SAMPLE) for m in (Ditto(lam=0.0, **whole), Standalone(**whole))
    )
    for k, state in b.state.clients.items():
        assert_parameters_close(a.state.clients[k], state, 1e-13)


def test_ditto_shows_both_models() -> None:
    run = run_rounds(Ditto(**LOCAL), federate_one_model(), **SAMPLE)
    x, apply, series = (
        run.federation.clients[2].test.x,
        run.federation.architectures["small"].apply,
        get_personal_model_and_predictors(run, 2)[1],
    )
    assert list(series) == ["personal", "global"]
    torch.testing.assert_close(series["personal"](x), apply(run.state.clients[2], x))
    torch.testing.assert_close(series["global"](x), apply(run.state.server, x))
    assert tree.equal(get_personal_model_and_predictors(run, 2)[0], run.state.clients[2])
