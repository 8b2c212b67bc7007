"""APFL: against NumPy, beside FedAvg and Standalone, its mixture and the share of it that adapts."""

from __future__ import annotations

import pytest

from fedlowrank.core import tree
from fedlowrank.core.learning.optimizer import SGD, Group, Schedule
from fedlowrank.engines.engine import Engine
from fedlowrank.methods.apfl import APFL
from fedlowrank.methods.fedavg import FedAvg
from fedlowrank.methods.standalone import Standalone
from tests.golden import dual_reference

from .comparisons import assert_parameters_close
from .run_contents import (
    get_client_states,
    get_initial_networks,
    get_personal_model_and_predictors,
    get_train_data,
    plan_rounds,
)
from .setting import FALLING_RATES, FLOAT32, LOCAL, LR, SAMPLE, SIZES, federate_one_model, run_rounds

TOLERANCE = 1e-10


# a moves as the paper says and meets a bound, moves slowly enough to meet none, or stays
@pytest.mark.parametrize(
    ("alpha", "pace", "bounds"),
    [(0.5, 1.0, {0.0}), (0.97, 1.0, {1.0}), (0.5, 0.05, set()), (0.2, 0.0, set())],
)
def test_apfl(alpha: float, pace: float, bounds: set[float], engine: type[Engine]) -> None:
    federation = federate_one_model()
    groups = {"a": Group(lr=pace * LR)} if pace not in (0.0, 1.0) else {}
    optimizer = SGD(lr=LR, schedule=Schedule("exponential", factor=0.5), groups=groups)
    method = APFL(alpha=alpha, adaptive=pace > 0, optimizer=optimizer, batch_size=8, epochs=2)
    run = run_rounds(method, federation, engine=engine, **SAMPLE)
    start = get_initial_networks(federation)
    w, own, shares, clipped = dual_reference.apfl(
        start[0], start, get_train_data(federation), plan_rounds(run), FALLING_RATES, alpha, pace
    )
    assert_parameters_close(run.state.server, w)
    for state, v, a in zip(get_client_states(run), own, shares, strict=True):
        assert_parameters_close(state.v, v)
        assert state.a.item() == pytest.approx(a, abs=TOLERANCE)
    assert clipped == bounds
    assert (shares == [alpha] * len(SIZES)) == (pace == 0)


def test_apfl_decays_its_weights_but_not_the_share_of_the_mixture() -> None:
    settings = {"batch_size": 8, "optimizer": SGD(lr=0.1, weight_decay=0.5)}
    run = run_rounds(APFL(adaptive=False, **settings), federate_one_model(), **SAMPLE)
    assert all(s.a.item() == 0.5 for s in get_client_states(run))
    averaged = run_rounds(FedAvg(**settings), federate_one_model(), **SAMPLE)
    assert_parameters_close(run.state.server, averaged.state.server)
    # a group of that name keeps its rate
    held = SGD(lr=0.1, weight_decay=0.5, groups={"a": Group(lr=0.0)})
    assert all(
        s.a.item() == 0.5
        for s in get_client_states(
            run_rounds(APFL(optimizer=held, batch_size=8), federate_one_model(), **SAMPLE)
        )
    )
    assert all(
        s.a.item() != 0.5
        for s in get_client_states(run_rounds(APFL(**settings), federate_one_model(), **SAMPLE))
    )


@pytest.mark.parametrize(("alpha", "adaptive"), [(0.0, False), (0.5, False), (0.5, True), (1.0, False)])
def test_the_global_model_of_apfl_is_that_of_fedavg_bit_for_bit(alpha: float, adaptive: bool) -> None:
    a = run_rounds(APFL(alpha=alpha, adaptive=adaptive, **LOCAL), federate_one_model(**FLOAT32), **SAMPLE)
    b = run_rounds(FedAvg(**LOCAL), federate_one_model(**FLOAT32), **SAMPLE)
    assert tree.equal(a.state.server, b.state.server)


def test_apfl_of_the_local_model_alone_is_standalone_bit_for_bit() -> None:
    a = run_rounds(APFL(alpha=1.0, adaptive=False, **LOCAL), federate_one_model(**FLOAT32), **SAMPLE)
    b = run_rounds(Standalone(**LOCAL), federate_one_model(**FLOAT32), **SAMPLE)
    for k, state in b.state.clients.items():
        assert tree.equal(a.state.clients[k].v, state)
        assert tree.equal(get_personal_model_and_predictors(a, k)[0], state)


def test_apfl_of_the_global_model_alone_infers_by_it_and_trains_no_other() -> None:
    run = run_rounds(APFL(alpha=0.0, adaptive=False, **LOCAL), federate_one_model(**FLOAT32), **SAMPLE)
    for k, state in run.state.clients.items():
        assert tree.equal(state.v, run.federation.architectures["small"].initial)
        assert tree.equal(get_personal_model_and_predictors(run, k)[0], run.state.server)


def test_apfl_infers_by_the_mixture_and_keeps_the_local_model_beside_it() -> None:
    slow = {**LOCAL, "optimizer": SGD(lr=LR, groups={"a": Group(lr=0.01)})}
    run = run_rounds(APFL(**slow), federate_one_model(), **SAMPLE)
    for k, state in run.state.clients.items():
        a = state.a.item()
        assert 0 < a < 1
        expected = {n: a * v + (1 - a) * run.state.server[n] for n, v in state.v.items()}
        assert_parameters_close(get_personal_model_and_predictors(run, k)[0], expected, 1e-14)
        assert tree.square_distance(state.v, expected) > 1e-3
