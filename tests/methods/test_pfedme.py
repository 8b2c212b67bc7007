"""pFedMe: against NumPy, and its step along the gradient of the Moreau envelope."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedlowrank.core.learning.optimizer import SGD
from fedlowrank.data.federation import Federation
from fedlowrank.engines.engine import Engine
from fedlowrank.methods.pfedme import PFedMe
from tests.golden import contrast_and_mixture_reference as golden

from .comparisons import assert_nested_close, to_layers
from .run_contents import get_client_states, get_reference_inputs, plan_rounds
from .setting import LOCAL, SAMPLE, federate_one_model, run_rounds


@pytest.mark.parametrize(
    ("steps", "beta", "weighting", "rounds"), [(5, 1.0, "uniform", None), (1, 0.6, "examples", 7)]
)
def test_pfedme(steps: int, beta: float, weighting: Any, rounds: int | None, engine: type[Engine]) -> None:
    local = {**LOCAL, "epochs": 1} if rounds else LOCAL
    method = PFedMe(
        lam=2.0, inner_steps=steps, inner_lr=0.2, beta=beta, weighting=weighting, local_rounds=rounds, **local
    )
    run = run_rounds(method, federate_one_model(), engine=engine, **SAMPLE)
    # R local rounds at clients of any size: two epochs of the smallest have but four mini-batches
    taken = {len(local) for clients in plan_rounds(run) for local, _ in clients.values()}
    assert taken == {rounds} if rounds else len(taken) > 1
    w, personal = golden.pfedme(*get_reference_inputs(run), 2.0, steps, 0.2, beta, weighting == "examples")
    assert_nested_close(to_layers(run.state.server), w)
    assert_nested_close([to_layers(s) for s in get_client_states(run)], personal)


def test_a_step_of_pfedme_follows_the_gradient_of_the_moreau_envelope() -> None:
    # the envelope of a quadratic in closed form: f(θ) = ½‖θ - y‖² has F(w) = λ / (1 + λ) ½‖w - y‖²
    lam, y = 3.0, 2.0

    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.value = nn.Parameter(torch.full((1,), 5.0, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return self.value.expand(len(x), 1)

    data = [{"train": (np.zeros((6, 1), np.float32), np.full((6, 1), y, np.float32))}]
    federation = Federation.from_arrays(data, Constant, classes=0)
    # enough inner steps to arrive at the minimizer
    method = PFedMe(lam=lam, inner_steps=200, inner_lr=0.1, optimizer=SGD(lr=0.1), batch_size=6)
    run = run_rounds(method, federation, rounds=1)
    w = 5.0 - 0.1 * lam / (1 + lam) * (5.0 - y)
    assert run.state.server["value"].item() == pytest.approx(w, abs=1e-12)
    # and its proximal point (y + λ w) / (1 + λ)
    assert run.state.clients[0]["value"].item() == pytest.approx((y + lam * w) / (1 + lam), abs=1e-12)
