"""FedEx-LoRA: against NumPy, and one round of it as the base with the mean update. What clients hold of its updates of the
base is in test_base_updates.py."""

from __future__ import annotations

import numpy as np

from fedlowrank.engines.engine import Engine
from fedlowrank.methods.fedex_lora import FedExLoRA
from fedlowrank.methods.shared.lora_family import LoRATraining
from tests.golden import lora_reference as reference

from .comparisons import assert_nested_close
from .lora_setting import (
    EQUAL_RANKS,
    FAST_LOCAL,
    LAYER_NAMES,
    NO_EVALUATION,
    TRAINING,
    assert_head_equal,
    assert_predictions_equal,
    collect_replies,
    federate_lora,
    get_tolerance,
    make_reference_setting,
    run_three_rounds,
)
from .run_contents import make_view
from .setting import LOCAL, run_rounds


def test_fedex_lora(engine: type[Engine]) -> None:
    run = run_three_rounds(FedExLoRA(training=TRAINING, **LOCAL), engine, EQUAL_RANKS)
    factors, net = reference.fedex(make_reference_setting(run))
    for n, (b, a) in zip(LAYER_NAMES, factors, strict=True):
        assert_nested_close(run.state.server.factors[n].b, b, get_tolerance(engine))
        assert_nested_close(run.state.server.factors[n].a, a, get_tolerance(engine))
    assert_head_equal(run, net, get_tolerance(engine))
    whole = reference.added(net, reference.products(factors, 2 / 3))
    for k in range(4):
        assert_predictions_equal(run, k, whole, get_tolerance(engine))
        assert_predictions_equal(run, k, whole, get_tolerance(engine), "server")


def test_fedex_of_one_round_is_the_base_with_the_mean_update() -> None:
    method = FedExLoRA(training=LoRATraining(rank=6, scaling="alpha"), **FAST_LOCAL)
    run = run_rounds(method, federate_lora([3] * 4), steps=0, **NO_EVALUATION)
    ups = collect_replies(run)
    run.step()
    actual = method.server_model(run.state.server, run.state.clients[0], make_view(run, 0))
    sizes = np.array([r.client.example_count for r in ups], dtype=float)
    for n in LAYER_NAMES:
        pairs = [r.upload.factors[n] for r in ups]
        update = sum(
            p * 2 * q.b.numpy() @ q.a.numpy() for p, q in zip(sizes / sizes.sum(), pairs, strict=True)
        )
        base = run.federation.architectures["model"].initial[f"{n}.weight"].numpy()
        np.testing.assert_allclose(actual[f"{n}.weight"].numpy(), base + update, rtol=0, atol=1e-13)
        # which the product of the means is not: the residual is there
        assert np.linalg.norm(update - 2 * run.state.server.factors[n].dense().numpy()) > 1e-3
