"""Proximal steps behind an optimizer's step: momentum leaves the penalty its weight, and a model shrinks that nobody
trains; an optimizer without one threshold is refused, and a NaN before a step names its client."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedlowrank.core import tree
from fedlowrank.core.errors import ConfigError, NonFiniteError
from fedlowrank.core.learning.optimizer import SGD, AdamW, Group
from fedlowrank.data.federation import Federation
from fedlowrank.engines import ENGINES
from fedlowrank.engines.engine import Engine
from fedlowrank.engines.sequential import Sequential
from fedlowrank.engines.vectorized import Vectorized
from fedlowrank.methods.fedslr import FedSLR
from fedlowrank.methods.gpgd import GPGD
from fedlowrank.methods.lpgd import LPGD
from fedlowrank.rounds.run import Run
from fedlowrank.rounds.run_settings import RunSettings
from fedlowrank.testing.check import CHECKS

from .setting import federate_one_model, make_arrays, run_rounds

INPUTS, OUTPUTS, EXAMPLES, WEIGHT = 3, 2, 40, 0.3


def federate_regression() -> Federation:
    """Two clients with the same examples of a noisy linear map, and a linear model."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(EXAMPLES, INPUTS))
    y = x @ rng.normal(size=(OUTPUTS, INPUTS)).T + 0.05 * rng.normal(size=(EXAMPLES, OUTPUTS))
    data = torch.from_numpy(x).float(), torch.from_numpy(y).float()
    return Federation.from_arrays([{"train": data, "test": data}] * 2, nn.Linear(INPUTS, OUTPUTS, bias=False))


def minimize_by_proximal_gradient(federation: Federation, weight: float, norm: str) -> np.ndarray:
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


@pytest.mark.few(5)
@pytest.mark.parametrize("engine", [Sequential, Vectorized])
@pytest.mark.parametrize(
    "optimizer", [SGD(lr=0.1), SGD(lr=0.05, momentum=0.9), SGD(lr=0.05, momentum=0.8, nesterov=True)]
)
@pytest.mark.parametrize("norm", ["sparse", "low_rank"])
def test_momentum_leaves_the_penalty_of_lpgd_its_weight(
    norm: Any, optimizer: SGD, engine: type[Engine]
) -> None:
    fed = federate_regression()
    run = run_rounds(
        LPGD(lam=WEIGHT, norm=norm, steps=600, batch_size=EXAMPLES, optimizer=optimizer),
        fed,
        1,
        engine=engine,
    )
    expected = minimize_by_proximal_gradient(fed, WEIGHT, norm)
    assert np.abs(expected - minimize_by_proximal_gradient(fed, WEIGHT / 10, norm)).max() > 0.1
    np.testing.assert_allclose(run.state.server["weight"].numpy(), expected, atol=1e-4)


@pytest.mark.few(2)
@pytest.mark.parametrize("engine", [Sequential, Vectorized])
@pytest.mark.parametrize("norm", ["sparse", "low_rank"])
def test_momentum_leaves_the_personal_penalty_of_fedslr_its_weight(norm: Any, engine: type[Engine]) -> None:
    fed = federate_regression()
    method = FedSLR(
        lam=1e6,  # w is zero after the first round
        mu=WEIGHT,
        personal_norm=norm,
        epochs=1,
        fusion_epochs=600,
        batch_size=EXAMPLES,
        optimizer=SGD(lr=0.05, momentum=0.9),
    )
    run = run_rounds(method, fed, 2, engine=engine)
    like = {"weight": torch.zeros(OUTPUTS, INPUTS)}
    assert not run.state.server.w.dense(like)["weight"].any()
    np.testing.assert_allclose(
        run.state.clients[0].p["weight"].numpy(), minimize_by_proximal_gradient(fed, WEIGHT, norm), atol=1e-4
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


STILL = "a learning rate of 0 changes no model"


@pytest.mark.few(1)
@pytest.mark.parametrize("method", [FedSLR(), GPGD()], ids=["fedslr", "gpgd"])
def test_a_prox_goes_on_shrinking_the_model_when_nobody_learns(method) -> None:
    patched = type("AtWork", (type(method),), {"zero_step_settings": {}})
    assert CHECKS[STILL](patched()) is not None
    assert CHECKS[STILL](method) is None


DIVERGING = {"optimizer": SGD(lr=3e3), "batch_size": 100}
NUCLEAR = {
    "phase2": FedSLR(**DIVERGING, epochs=1, fusion_epochs=60, personal_norm="low_rank"),
    "local": LPGD(**DIVERGING, epochs=60),
}
"""Methods with a nuclear prox in every local step, by the pass in which they have it; one step an epoch."""


def federate_one_that_diverges():
    """Client 1 has larger inputs than the others, so that at the same learning rate it alone diverges."""
    clients = make_arrays()
    for k, client in enumerate(clients):
        x, y = client["train"]
        client["train"] = (x * (1e3 if k == 1 else 1e-6), y)
    return federate_one_model(torch.float32, clients=clients)


def find_step_of_divergence(federation) -> int:
    """First step whose loss is not finite, by plain PyTorch and NumPy."""
    model = copy.deepcopy(federation.architectures["small"].module)
    model.load_state_dict(federation.architectures["small"].initial)
    x, y = federation.clients[1].train.x, federation.clients[1].train.y
    for step in range(60):
        loss = torch.nn.functional.cross_entropy(model(x), y)
        if not torch.isfinite(loss):
            return step
        for p, g in zip(model.parameters(), torch.autograd.grad(loss, [*model.parameters()]), strict=True):
            p.data -= 3e3 * g
            if p.ndim > 1 and bool(p.isfinite().all()):
                u, s, vt = np.linalg.svd(p.detach().double().numpy(), full_matrices=False)
                p.data = torch.from_numpy((u * np.maximum(s - 3e3 * 1e-4, 0)) @ vt).float()
    raise AssertionError("it does not diverge")


@pytest.mark.few(1)
@pytest.mark.parametrize("executor", ["sequential", "vectorized"])
@pytest.mark.parametrize("name", NUCLEAR)
def test_a_nan_before_a_nuclear_prox_names_the_client_and_can_be_dropped(name: str, executor: str) -> None:
    federation = federate_one_that_diverges()
    run = Run(NUCLEAR[name], federation, RunSettings(rounds=1), ENGINES[executor]())
    with contextlib.closing(run.engine), pytest.raises(NonFiniteError) as caught:
        run.step()
    assert (caught.value.client_id, caught.value.round, caught.value.name) == (1, 0, name)
    if name == "local":
        assert caught.value.step == find_step_of_divergence(federation)
    else:
        assert caught.value.step
    run = Run(NUCLEAR[name], federation, RunSettings(rounds=1, on_nan="drop"), ENGINES[executor]())
    with contextlib.closing(run.engine):
        record = run.step()
    assert list(record.lost) == ["1"]
    assert "client 1, round 1" in record.lost["1"]
    assert all(bool(p.isfinite().all()) for p in tree.tensors(run.state.server))
