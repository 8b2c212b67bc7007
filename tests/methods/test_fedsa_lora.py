"""FedSA-LoRA against NumPy."""

from __future__ import annotations

from fedlowrank.engines.engine import Engine
from fedlowrank.methods.fedsa_lora import FedSALoRA
from tests.golden import lora_reference as reference

from .comparisons import assert_nested_close
from .lora_setting import (
    EQUAL_RANKS,
    LAYER_NAMES,
    TRAINING,
    assert_head_equal,
    assert_predictions_equal,
    get_tolerance,
    make_reference_setting,
    run_three_rounds,
)
from .setting import LOCAL


def test_fedsa_lora(engine: type[Engine]) -> None:
    run = run_three_rounds(FedSALoRA(training=TRAINING, **LOCAL), engine, EQUAL_RANKS)
    own, net = reference.fedsa(make_reference_setting(run))
    for k, factors in enumerate(own):
        for i, n in enumerate(LAYER_NAMES):
            assert_nested_close(run.state.clients[k].b[n], factors[i][0], get_tolerance(engine))
            assert_nested_close(run.state.server.factors[n].a, factors[i][1], get_tolerance(engine))
        assert_predictions_equal(
            run, k, reference.added(net, reference.products(factors, 2 / 3)), get_tolerance(engine)
        )
    assert_head_equal(run, net, get_tolerance(engine))
