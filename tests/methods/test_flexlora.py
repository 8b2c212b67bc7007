"""FlexLoRA against NumPy. What it shares with FedHL is in test_truncated_updates.py."""

from __future__ import annotations

from fedlowrank.engines.engine import Engine
from fedlowrank.methods.flexlora import FlexLoRA
from tests.golden import lora_reference as reference

from .lora_setting import (
    RANKS,
    TRAINING,
    assert_updates_equal,
    get_tolerance,
    make_reference_setting,
    run_three_rounds,
)
from .setting import LOCAL


def test_flexlora(engine: type[Engine]) -> None:
    run = run_three_rounds(FlexLoRA(training=TRAINING, **LOCAL), engine, RANKS)
    ws, net = reference.flexlora(make_reference_setting(run))
    assert_updates_equal(run, ws, net, RANKS, get_tolerance(engine))
