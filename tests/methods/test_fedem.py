"""FedEM: against NumPy, its shares of examples, what it sends, regression, dropout, and clients that never trained."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedlowrank import simulate
from fedlowrank.core import tree
from fedlowrank.core.errors import ConfigError
from fedlowrank.core.learning.optimizer import SGD
from fedlowrank.data.federation import Federation
from fedlowrank.engines.engine import Engine
from fedlowrank.methods import fedem
from fedlowrank.methods.fedavg import FedAvg
from fedlowrank.methods.fedem import FedEM, shares_of_examples
from tests.golden import floral_reference as reference
from tests.golden.reference import forward, softmax
from tests.support.method_calls import predictor, routes

from .cluster_setting import get_networks
from .comparisons import assert_nested_close, assert_trees_close, to_layers
from .run_contents import get_client_inputs, get_client_states, get_train_data, plan_rounds
from .setting import (
    CLASSES,
    INPUTS,
    LOCAL,
    LR,
    SAMPLE,
    SIZES,
    SMALL_PARAMETERS,
    WIDTH,
    Net,
    federate_one_model,
    make_arrays,
    run_rounds,
)


def test_fedem(engine: type[Engine]) -> None:
    federation = federate_one_model()
    run = run_rounds(FedEM(clusters=3, **LOCAL), federation, engine=engine, **SAMPLE)
    start = get_networks(run.method.server_init(run.task))
    models, pis = reference.fedem(start, get_train_data(federation), plan_rounds(run), LR)
    assert_nested_close(get_networks(run.state.server), models)
    assert_nested_close(get_client_states(run), [pis[k] for k in range(len(SIZES))])
    for k, info in enumerate(federation.infos):
        assert_nested_close(routes(run.method, *get_client_inputs(run, k)), pis[k])
        assert_nested_close(to_layers(run.personal_params(info)), models[int(pis[k].argmax())])
        x = get_train_data(federation)[k][0]
        mixture = sum(p * softmax(forward(net, x)[1]) for p, net in zip(pis[k], models, strict=True))
        assert_nested_close(
            predictor(run.method, *get_client_inputs(run, k))(federation.clients[k].train.x).detach(),
            np.log(mixture),
        )
    assert max(abs(pi - 1 / 3).max() for pi in pis.values()) > 0.05


def test_the_recorded_accuracy_of_fedem_is_that_of_the_mixture() -> None:
    federation = federate_one_model()
    run = run_rounds(FedEM(clusters=3, **LOCAL), federation, steps=2)
    record = run.step()
    models = get_networks(run.state.server)
    for k, data in enumerate(federation.clients):
        x, y = data.test.x.double().numpy(), data.test.y.numpy()
        pi = run.state.clients[k].numpy()
        mixture = sum(p * softmax(forward(net, x)[1]) for p, net in zip(pi, models, strict=True))
        assert (
            record.values("accuracy", series="personal", split="test")[k] == (mixture.argmax(1) == y).mean()
        )
        assert record.values("loss", series="personal", split="test")[k] == pytest.approx(
            -np.log(mixture[np.arange(len(y)), y]).mean(), rel=1e-5
        )
        assert [record.values("route", series=str(c), split="")[k] for c in range(3)] == pytest.approx(
            pi, abs=1e-4
        )


@pytest.mark.parametrize("steps", [0, 1, 10])
def test_a_newcomer_takes_em_steps_on_its_shares_alone(steps: int) -> None:
    federation = federate_one_model()
    run = run_rounds(FedEM(clusters=3, unseen_steps=steps, **LOCAL), federation, steps=1, participation=0.5)
    k = next(i for i in range(len(SIZES)) if i not in run.state.clients)
    pi = np.full(3, 1 / 3)
    for _ in range(steps):
        pi = reference.likelihoods(get_networks(run.state.server), pi, *get_train_data(federation)[k]).mean(0)
    assert_nested_close(routes(run.method, *get_client_inputs(run, k)), pi)
    assert (abs(pi - 1 / 3).max() > 1e-3) == (steps > 0)


def test_the_shares_of_examples_hold_while_the_models_move() -> None:
    # with one step a round or many, the weights of the examples are those of the models received
    federation = federate_one_model()
    a, b = (
        run_rounds(FedEM(clusters=2, optimizer=SGD(lr=LR), batch_size=n, epochs=1), federation, rounds=1)
        for n in (4, max(SIZES))
    )
    assert not torch.allclose(a.state.server["head.weight"], b.state.server["head.weight"], atol=1e-3)
    for k in range(len(SIZES)):
        assert torch.equal(a.state.clients[k], b.state.clients[k])


def test_fedem_keeps_its_shares_and_sends_every_component() -> None:
    run = run_rounds(FedEM(clusters=3, **LOCAL), federate_one_model(), steps=0, **SAMPLE)
    for _ in range(2):
        record = run.step()
        assert record.parameters_up == record.parameters_down == 3 * 3 * SMALL_PARAMETERS
    state, down, view = get_client_inputs(run, 0)
    assert {p: t.shape for p, t in tree.leaves(run.method.local_update(state, down, view)[1])} == {
        p: t.shape for p, t in tree.leaves(down)
    }


def test_fedem_of_a_regression_mixes_outputs() -> None:
    rng = np.random.default_rng(0)
    data = []
    for k in range(3):
        x = rng.normal(size=(12 + k, INPUTS)).astype(np.float32)
        data.append({"train": (x, x[:, :2] * (-1.0) ** k), "test": (x, x[:, :2] * (-1.0) ** k)})
    federation = Federation.from_arrays(data, lambda: Net(WIDTH, classes=2))
    run = run_rounds(FedEM(clusters=2, **LOCAL), federation, rounds=1)
    start = get_networks(run.method.server_init(run.task))
    for k, info in enumerate(federation.infos):
        x, y = federation.clients[k].train.x.double().numpy(), federation.clients[k].train.y.double().numpy()
        density = np.stack([np.exp(-((forward(net, x)[1] - y) ** 2).sum(1) / 2) for net in start], 1)
        pi = (density / density.sum(1, keepdims=True)).mean(0)
        assert_nested_close(run.state.clients[info.id], pi)
        mean = sum(p * forward(net, x)[1] for p, net in zip(pi, get_networks(run.state.server), strict=True))
        assert_nested_close(
            predictor(run.method, *get_client_inputs(run, k))(federation.clients[k].train.x).detach(), mean
        )


def ordinal(scores: Tensor, targets: Tensor) -> Tensor:
    """Thresholds: score k is the log-odds of a label above k."""
    is_above = (targets[:, None] > torch.arange(scores.shape[1])).float()
    return functional.binary_cross_entropy_with_logits(scores, is_above, reduction="none").mean(1)


@pytest.mark.parametrize("outputs", [1, CLASSES - 1, CLASSES])
def test_fedem_with_a_loss_of_the_users_own_mixes_outputs(outputs: int) -> None:
    federation = Federation.from_arrays(make_arrays(), lambda: Net(WIDTH, classes=outputs), loss=ordinal)
    run = run_rounds(FedEM(clusters=2, **LOCAL), federation, rounds=2)
    for k, client in enumerate(federation.clients):
        networks, pi = get_networks(run.state.server), run.state.clients[k]
        x = client.test.x.double().numpy()
        mean = sum(p * forward(net, x)[1] for p, net in zip(pi.tolist(), networks, strict=True))
        assert_nested_close(predictor(run.method, *get_client_inputs(run, k))(client.test.x).detach(), mean)
    # one component is FedAvg
    fedem, fedavg = (
        simulate(method, federation, rounds=2).rounds[-1].values("loss", split="test")
        for method in (FedEM(clusters=1, **LOCAL), FedAvg(**LOCAL))
    )
    np.testing.assert_allclose(fedem, fedavg, rtol=1e-5)


class WithDropout(Net):
    """A model with dropout before its head."""

    def __init__(self, modes: list[bool]) -> None:
        super().__init__(WIDTH)
        self.body.append(nn.Dropout(0.5))
        self.modes = modes

    def forward(self, x: Tensor) -> Tensor:
        self.modes.append(self.training)
        return super().forward(x)


def test_the_shares_of_examples_in_fedem_are_without_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    actual: list[tuple[Tensor, Tensor, Any]] = []

    def recorded(model: Any, models: Any, pi: Tensor, batch: Any) -> Tensor:
        q = shares_of_examples(model, models, pi, batch)
        actual.append((q.detach(), batch.x, batch.y))
        return q

    monkeypatch.setattr(fedem, "shares_of_examples", recorded)
    modes: list[bool] = []
    federation = Federation.from_arrays(make_arrays(), lambda: WithDropout(modes), classes=CLASSES)
    modes.clear()
    run = run_rounds(FedEM(clusters=2, **LOCAL), federation, rounds=1)
    start = get_networks(run.method.server_init(run.task))
    assert len(actual) > 2 * len(SIZES)
    for q, x, y in actual:
        scores = [torch.from_numpy(forward(net, x.double().numpy())[1]) for net in start]
        losses = torch.stack([functional.cross_entropy(z, y, reduction="none") for z in scores], 1)
        torch.testing.assert_close(q, (-losses).softmax(1), rtol=0, atol=1e-9)
    # the trained components are in training mode
    assert True in modes[modes.index(True) + 2 :]


def test_fedem_counts_steps_of_em() -> None:
    with pytest.raises(ConfigError, match="FedEM: unseen_steps must be >= 0; it is -1"):
        FedEM(unseen_steps=-1)


def test_an_impossible_component_stays_impossible_and_makes_no_nan() -> None:
    run = run_rounds(FedEM(clusters=2, **LOCAL), federate_one_model(), rounds=1)
    _, down, view = get_client_inputs(run, 0)
    one = torch.tensor([1.0, 0.0], dtype=torch.float64)
    after, up = run.method.local_update(one, down, view)
    assert after.tolist() == [1, 0]
    assert tree.equal({n: t[1] for n, t in up.items()}, {n: t[1] for n, t in down.items()})
    x = run.federation.clients[0].test.x
    alone = view.model.apply({n: t[0] for n, t in down.items()}, x).log_softmax(-1)
    assert_trees_close(predictor(run.method, one, down, view)(x), alone)
