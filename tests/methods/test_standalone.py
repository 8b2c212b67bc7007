"""Standalone against NumPy."""

from __future__ import annotations

from fedlowrank.engines.engine import Engine
from fedlowrank.methods.standalone import Standalone
from tests.golden import reference

from .comparisons import assert_nested_close, to_layers
from .run_contents import get_client_states, get_initial_networks, get_train_data, plan_rounds
from .setting import LOCAL, LR, SAMPLE, SIZES, federate_two_models, run_rounds


def test_standalone(engine: type[Engine]) -> None:
    federation = federate_two_models()
    run = run_rounds(Standalone(**LOCAL), federation, engine=engine, **SAMPLE)
    expected = reference.standalone(
        get_initial_networks(federation), get_train_data(federation), plan_rounds(run), LR
    )
    assert_nested_close([to_layers(s) for s in get_client_states(run)], expected)


def test_standalone_of_everyone_trains_all_clients_in_every_round(engine: type[Engine]) -> None:
    federation = federate_two_models()
    run = run_rounds(Standalone(all_clients=True, **LOCAL), federation, engine=engine, **SAMPLE)
    assert all(len(r) == len(SIZES) for r in plan_rounds(run))
    expected = reference.standalone(
        get_initial_networks(federation), get_train_data(federation), plan_rounds(run), LR
    )
    assert_nested_close([to_layers(run.state.clients[k]) for k in range(len(SIZES))], expected)
