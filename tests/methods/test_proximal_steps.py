"""Proximal steps behind an optimizer's step: momentum leaves the penalty its weight; what has no one threshold is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedlowrank.core.errors import ConfigError
from fedlowrank.core.learning.optimizer import SGD, AdamW, Group
from fedlowrank.data.federation import Federation
from fedlowrank.engines.engine import Engine
from fedlowrank.engines.sequential import Sequential
from fedlowrank.engines.vectorized import Vectorized
from fedlowrank.methods.fedslr import FedSLR
from fedlowrank.methods.lpgd import LPGD

from .setting import run_of

INPUTS, OUTPUTS, EXAMPLES, WEIGHT = 3, 2, 40, 0.3


def regression() -> Federation:
    """Two clients with the same examples of a noisy linear map, and a linear model."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(EXAMPLES, INPUTS))
    y = x @ rng.normal(size=(OUTPUTS, INPUTS)).T + 0.05 * rng.normal(size=(EXAMPLES, OUTPUTS))
    data = torch.from_numpy(x).float(), torch.from_numpy(y).float()
    return Federation.from_arrays([{"train": data, "test": data}] * 2, nn.Linear(INPUTS, OUTPUTS, bias=False))


def minimizer(federation: Federation, weight: float, norm: str) -> np.ndarray:
    """The minimizer of the mean squared error plus ``weight`` times the norm of W, by proximal gradient descent."""
    train = federation.clients[0].train
    x, y = train.x.double().numpy(), train.y.double().numpy()
    hessian, target = 2 * x.T @ x / y.size, 2 * y.T @ x / y.size
    step, w = 1 / np.linalg.eigvalsh(hessian).max(), np.zeros((OUTPUTS, INPUTS))
    for _ in range(5000):
        w = w - step * (w @ hessian - target)
        if norm == "sparse":
            w = np.sign(w) * np.maximum(np.abs(w) - step * weight, 0)
        else:
            u, s, vt = np.linalg.svd(w, full_matrices=False)
            w = (u * np.maximum(s - step * weight, 0)) @ vt
    return w


@pytest.mark.parametrize("engine", [Sequential, Vectorized])
@pytest.mark.parametrize(
    "optimizer", [SGD(lr=0.1), SGD(lr=0.05, momentum=0.9), SGD(lr=0.05, momentum=0.8, nesterov=True)]
)
@pytest.mark.parametrize("norm", ["sparse", "low_rank"])
def test_momentum_leaves_the_penalty_of_lpgd_its_weight(
    norm: Any, optimizer: SGD, engine: type[Engine]
) -> None:
    fed = regression()
    run = run_of(
        LPGD(lam=WEIGHT, norm=norm, steps=600, batch_size=EXAMPLES, optimizer=optimizer),
        fed,
        1,
        engine=engine,
    )
    wanted = minimizer(fed, WEIGHT, norm)
    assert np.abs(wanted - minimizer(fed, WEIGHT / 10, norm)).max() > 0.1
    np.testing.assert_allclose(run.state.server["weight"].numpy(), wanted, atol=1e-4)


@pytest.mark.parametrize("engine", [Sequential, Vectorized])
@pytest.mark.parametrize("norm", ["sparse", "low_rank"])
def test_momentum_leaves_the_personal_penalty_of_fedslr_its_weight(norm: Any, engine: type[Engine]) -> None:
    fed = regression()
    method = FedSLR(
        lam=1e6,  # w is zero after the first round
        mu=WEIGHT,
        personal_norm=norm,
        epochs=1,
        fusion_epochs=600,
        batch_size=EXAMPLES,
        optimizer=SGD(lr=0.05, momentum=0.9),
    )
    run = run_of(method, fed, 2, engine=engine)
    like = {"weight": torch.zeros(OUTPUTS, INPUTS)}
    assert not run.state.server.w.dense(like)["weight"].any()
    np.testing.assert_allclose(
        run.state.clients[0].p["weight"].numpy(), minimizer(fed, WEIGHT, norm), atol=1e-4
    )


UNSUITED = {
    "kind = 'adamw'": AdamW(),
    "groups gives head": SGD(groups={"head": Group(lr=0.0), "body": Group(weight_decay=0.1)}),
}


@pytest.mark.parametrize("said", UNSUITED)
@pytest.mark.parametrize("make", [LPGD, FedSLR])
def test_an_optimizer_with_more_than_one_rate_is_refused_where_there_is_a_penalty(
    make: Any, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        make(optimizer=UNSUITED[said])
    make(**{"lam" if make is LPGD else "mu": 0.0}, optimizer=UNSUITED[said])
    make(optimizer=SGD(groups={"head": Group(weight_decay=0.1)}))
