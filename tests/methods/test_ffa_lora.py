"""FFA-LoRA: against NumPy, and that its mean of factors is the mean of updates."""

from __future__ import annotations

import numpy as np

from fedlowrank.engines.engine import Engine
from fedlowrank.methods.fedit import FedIT
from fedlowrank.methods.ffa_lora import FFALoRA

from .lora_setting import (
    FAST_LOCAL,
    LAYER_NAMES,
    NO_EVALUATION,
    assert_means_of_factors_equal,
    collect_replies,
    draw_initial_a,
    federate_lora,
)
from .setting import run_rounds


def test_ffa_lora(engine: type[Engine]) -> None:
    assert_means_of_factors_equal(FFALoRA, engine)


def test_the_mean_of_ffa_is_the_mean_of_its_updates_and_that_of_fedit_is_not() -> None:
    gaps = {}
    for kind in (FFALoRA, FedIT):
        run = run_rounds(kind(**FAST_LOCAL), federate_lora([3] * 4), steps=0, **NO_EVALUATION)
        ups = collect_replies(run)
        run.step()
        sizes, a0 = (
            np.array([r.client.example_count for r in ups], dtype=float),
            draw_initial_a(run.federation.key / "init", 3),
        )
        for n in LAYER_NAMES:
            held = [r.upload.factors[n] for r in ups]
            a = [a0[n] if kind is FFALoRA else p.a for p in held]
            update = sum(w * p.b @ q for w, p, q in zip(sizes / sizes.sum(), held, a, strict=True))
            server = run.state.server.factors[n]
            mean = server.b @ (a0[n] if kind is FFALoRA else server.a)
            gaps[kind, n] = float((update - mean).abs().max())
            assert tuple(server.a.shape) == ((0, 1) if kind is FFALoRA else a0[n].shape)
    assert max(gaps[FFALoRA, n] for n in LAYER_NAMES) < 1e-15
    assert min(gaps[FedIT, n] for n in LAYER_NAMES) > 1e-5
