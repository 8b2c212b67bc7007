"""LPGD against NumPy. Its penalty under momentum is in test_proximal_steps.py."""

from __future__ import annotations

from fedlowrank.engines.engine import Engine
from fedlowrank.methods.lpgd import LPGD
from tests.golden import fedslr_reference as reference

from .comparisons import assert_nested_close, to_layers
from .fedslr_setting import DECAY, DECAYING_LOCAL, get_learning_rate, is_nonzero
from .run_contents import get_initial_networks, get_train_data, plan_rounds
from .setting import federate_one_model, run_rounds


def test_lpgd(engine: type[Engine]) -> None:
    federation = federate_one_model()
    run = run_rounds(LPGD(**DECAYING_LOCAL, lam=0.1), federation, engine=engine, participation=0.75)
    expected = reference.lpgd(
        get_initial_networks(federation)[0],
        get_train_data(federation),
        plan_rounds(run),
        get_learning_rate,
        DECAY,
        0.1,
    )
    assert is_nonzero(expected)
    assert_nested_close(to_layers(run.state.server), expected)
