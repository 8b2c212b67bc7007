"""FedPer against NumPy."""

from __future__ import annotations

from fedlowrank.engines.engine import Engine
from fedlowrank.methods.fedper import FedPer
from tests.golden import personal_reference

from .comparisons import assert_nested_close, to_layers
from .run_contents import (
    get_client_states,
    get_initial_networks,
    get_personal_parameters,
    get_train_data,
    plan_rounds,
)
from .setting import LOCAL, LR, SAMPLE, SIZES, federate_one_model, run_rounds


def test_fedper(engine: type[Engine]) -> None:
    federation = federate_one_model()
    run = run_rounds(FedPer(**LOCAL), federation, engine=engine, **SAMPLE)
    start = get_initial_networks(federation)
    body, heads = personal_reference.fedper(
        start[0][:-1], [s[-1:] for s in start], get_train_data(federation), plan_rounds(run), LR
    )
    assert_nested_close(to_layers(run.state.server), body)
    assert_nested_close([to_layers(s) for s in get_client_states(run)], heads)
    for k in range(len(SIZES)):
        assert_nested_close(to_layers(get_personal_parameters(run, k)), body + heads[k])
