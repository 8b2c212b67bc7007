"""FedDyn: against NumPy, its local objective, the sum rule of its server, and the models that it shows. What its dual
conserves is in test_duals.py."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from fedlowrank.core import tree
from fedlowrank.core.learning.optimizer import SGD
from fedlowrank.engines.engine import Engine, client_key, client_view
from fedlowrank.methods.feddyn import FedDyn
from fedlowrank.training.local_data import LocalData
from tests.golden import dual_reference

from .comparisons import assert_parameters_close
from .run_contents import (
    get_client_states,
    get_initial_networks,
    get_personal_model_and_predictors,
    get_train_data,
    plan_rounds,
)
from .setting import FALLING_LOCAL, FALLING_RATES, LOCAL, LR, SAMPLE, SIZES, federate_one_model, run_rounds


@pytest.mark.parametrize("alpha", [0.1, 0.7])
def test_feddyn(alpha: float, engine: type[Engine]) -> None:
    federation = federate_one_model()
    run = run_rounds(FedDyn(alpha=alpha, **FALLING_LOCAL), federation, engine=engine, **SAMPLE)
    theta, average, h, own = dual_reference.feddyn(
        get_initial_networks(federation)[0],
        len(SIZES),
        get_train_data(federation),
        plan_rounds(run),
        FALLING_RATES,
        alpha,
    )
    assert_parameters_close(run.state.server.model, theta)
    assert_parameters_close(run.state.server.mean, average)
    assert_parameters_close(run.state.server.h, h)
    for actual, expected in zip(get_client_states(run), own, strict=True):
        assert_parameters_close(actual, expected)


@pytest.mark.parametrize("alpha", [0.05, 0.8])
def test_a_local_step_of_feddyn_follows_the_derivative_of_its_objective(alpha: float) -> None:
    federation = federate_one_model()
    method = FedDyn(alpha=alpha, optimizer=SGD(lr=LR), batch_size=5)
    run = run_rounds(method, federation, steps=2)
    info, local = federation.infos[1], federation.clients[1].train
    state, down = run.state_of(info), run.method.download(run.state.server, info)
    view = client_view(federation, run.task, info, 2, run.engine.trainer(method, federation, 2, info))
    data = LocalData(info, local, method.passes(), client_key(federation, 1, 2))
    # two steps, for the first begins at the anchor, where the proximal term is zero
    theta = {n: p.clone().requires_grad_() for n, p in down.model.items()}
    batches = list(data.batches("local"))
    assert len(batches) == 2
    for batch in batches:
        scores = federation.architectures["small"].apply(theta, batch.x)
        fit = functional.cross_entropy(scores, batch.y)
        norm = tree.square_distance(theta, down.model)
        objective = fit - tree.dot(state, theta) + alpha / 2 * norm
        grads = torch.autograd.grad(objective, list(theta.values()))
        theta = {
            n: (p - LR * g).detach().requires_grad_() for (n, p), g in zip(theta.items(), grads, strict=True)
        }
    new, upload = method.local_update(state, down, view)
    expected = tree.canonical(theta)
    assert_parameters_close(upload, expected, 1e-13)
    assert_parameters_close(new, {n: state[n] - alpha * (expected[n] - down.model[n]) for n in state}, 1e-13)


def test_feddyn_keeps_the_sum_rule_of_its_server() -> None:
    run = run_rounds(FedDyn(alpha=0.4, **LOCAL), federate_one_model(), **SAMPLE)
    server = run.state.server
    assert_parameters_close(server.model, {n: server.mean[n] - server.h[n] / 0.4 for n in server.h}, 1e-14)


def test_feddyn_shows_the_mean_of_the_last_replies_as_well_and_pays_for_it() -> None:
    run = run_rounds(FedDyn(inference="mean_of_clients", **LOCAL), federate_one_model(), **SAMPLE)
    plain = run_rounds(FedDyn(**LOCAL), federate_one_model(), **SAMPLE)
    assert tree.equal(run.state.server, plain.state.server)
    x = run.federation.clients[1].test.x
    apply = run.federation.architectures["small"].apply
    series = get_personal_model_and_predictors(run, 1)[1]
    assert list(series) == ["mean_of_clients", "cloud"]
    torch.testing.assert_close(series["mean_of_clients"](x), apply(run.state.server.mean, x))
    torch.testing.assert_close(series["cloud"](x), apply(run.state.server.model, x))
    torch.testing.assert_close(
        get_personal_model_and_predictors(plain, 1)[1](x), apply(run.state.server.model, x)
    )
    assert not torch.allclose(series["cloud"](x), series["mean_of_clients"](x))
    assert tree.equal(get_personal_model_and_predictors(run, 1)[0], run.state.server.mean)
    assert tree.equal(get_personal_model_and_predictors(plain, 1)[0], run.state.server.model)
