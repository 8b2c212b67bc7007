"""SCAFFOLD: against NumPy, and what a client's control variate is. What its dual conserves is in test_duals.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fedlowrank.core import tree
from fedlowrank.core.contract.contribution import mean
from fedlowrank.core.learning.optimizer import SGD, Schedule
from fedlowrank.engines.engine import Engine, client_key
from fedlowrank.methods.scaffold import SCAFFOLD
from fedlowrank.rounds.run import Run
from fedlowrank.training.local_data import LocalData
from tests.golden import dual_reference

from .comparisons import assert_parameters_close
from .run_contents import get_client_states, get_initial_networks, get_train_data, plan_rounds
from .setting import FALLING_RATES, LOCAL, LR, SAMPLE, SIZES, Net, federate_one_model, run_rounds


@pytest.mark.parametrize(("server_lr", "decay"), [(1.0, 0.0), (0.6, 0.05)])
def test_scaffold(server_lr: float, decay: float, engine: type[Engine]) -> None:
    federation = federate_one_model()
    optimizer = SGD(lr=LR, weight_decay=decay, schedule=Schedule("exponential", factor=0.5))
    method = SCAFFOLD(server_lr=server_lr, optimizer=optimizer, batch_size=8, epochs=2)
    run = run_rounds(method, federation, engine=engine, **SAMPLE)
    x, c, own = dual_reference.scaffold(
        get_initial_networks(federation)[0],
        len(SIZES),
        get_train_data(federation),
        plan_rounds(run),
        FALLING_RATES,
        server_lr,
        decay,
    )
    assert_parameters_close(run.state.server.model, x)
    assert_parameters_close(run.state.server.control, c)
    for actual, expected in zip(get_client_states(run), own, strict=True):
        assert_parameters_close(actual, expected)
    # the clients of a round take unlike numbers of steps, or a wrong τ would not show
    assert any(len({len(steps) for (steps,) in clients.values()}) > 1 for clients in plan_rounds(run))


def compute_mean_gradient(run: Run, client: int, weight_decay: float) -> dict[str, Tensor]:
    """What c_k claims to be, by autograd, of a first round from x = the initial weights and zero variates."""
    info, x = run.federation.infos[client], run.federation.architectures["small"].initial
    local = LocalData(
        info, run.federation.clients[client].train, run.method.passes(), client_key(run.federation, client, 0)
    )
    model, seen = Net(10), []
    model.load_state_dict(x)
    for batch in local.batches("local"):
        model.zero_grad()
        functional.cross_entropy(model(batch.x), batch.y).backward()
        with torch.no_grad():
            seen.append({n: p.grad + weight_decay * p for n, p in model.named_parameters()})
            for n, p in model.named_parameters():
                p.sub_(LR * seen[-1][n])
    return mean(seen, [1.0] * len(seen))


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_a_control_variate_is_the_mean_gradient_of_the_round_weight_decay_included(
    weight_decay: float,
) -> None:
    settings = {**LOCAL, "optimizer": SGD(lr=LR, weight_decay=weight_decay)}
    run = run_rounds(SCAFFOLD(**settings), federate_one_model(), steps=1)
    for k in range(len(SIZES)):
        assert_parameters_close(run.state.clients[k], compute_mean_gradient(run, k, weight_decay), 1e-12)


def test_a_round_without_a_learning_rate_leaves_every_variate_as_it_was() -> None:
    stops = SGD(lr=LR, schedule=Schedule("cosine", rounds=2))
    run = run_rounds(SCAFFOLD(optimizer=stops, batch_size=8), federate_one_model(), rounds=3, steps=2)
    before = run.state
    run.step()
    assert stops.learning_rate(2) == 0
    assert tree.equal(run.state.clients[0], before.clients[0])
    assert_parameters_close(run.state.server, before.server, 1e-15)
