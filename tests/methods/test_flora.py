"""FLoRA against NumPy. What clients hold of its updates of the base is in test_base_updates.py."""

from __future__ import annotations

from typing import Any

import pytest

from fedlowrank.engines.engine import Engine, client_key
from fedlowrank.engines.sequential import Sequential
from fedlowrank.methods.flora import FLoRA
from tests.golden import lora_reference as reference

from .lora_setting import (
    RANKS,
    TRAINING,
    assert_head_equal,
    assert_predictions_equal,
    draw_initial_arrays,
    get_tolerance,
    make_reference_setting,
    run_three_rounds,
)
from .setting import LOCAL


@pytest.mark.few(2)
@pytest.mark.parametrize("base_updates", ["merged", "stacked"])
def test_flora(base_updates: Any, engine: type[Engine]) -> None:
    if base_updates == "stacked" and engine is not Sequential:
        pytest.skip("the same boxes as merged")
    run = run_three_rounds(FLoRA(base_updates=base_updates, training=TRAINING, **LOCAL), engine, RANKS)
    s = make_reference_setting(run)
    draws = [
        {k: draw_initial_arrays(client_key(run.federation, k, t), s.ranks[k]) for k in clients}
        for t, clients in enumerate(s.rounds)
    ]
    net = reference.flora(s, draws)
    assert_head_equal(run, net, get_tolerance(engine))
    for k in range(4):
        # those absent in the last round catch up here
        assert_predictions_equal(run, k, net, get_tolerance(engine))
        assert_predictions_equal(run, k, net, get_tolerance(engine), "server")
