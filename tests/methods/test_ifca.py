"""IFCA: against NumPy, with the loss of the task, what it sends, models that nobody picks, and separated clusters."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from fedlowrank import Loss
from fedlowrank.core import tree
from fedlowrank.core.learning.optimizer import SGD
from fedlowrank.engines.engine import Engine
from fedlowrank.engines.sequential import Sequential
from fedlowrank.methods.ifca import IFCA, find_nearest_model
from fedlowrank.methods.shared.clusters import select_cluster
from fedlowrank.rounds.run import Run
from fedlowrank.rounds.run_settings import RunSettings
from fedlowrank.storage.client_store import ClientStore
from fedlowrank.storage.state import State
from fedlowrank.trust.updates import clip_update
from tests.golden import floral_reference as reference
from tests.golden.reference import cross_entropy, fedavg, forward
from tests.support.method_calls import routes

from .cluster_setting import federate_opposed_clusters, get_networks
from .comparisons import assert_nested_close, to_layers
from .run_contents import (
    get_client_inputs,
    get_client_states,
    get_initial_networks,
    get_train_data,
    plan_rounds,
)
from .setting import LOCAL, LR, SAMPLE, SMALL_PARAMETERS, federate_one_model, run_rounds


def assert_ifca_equals_reference(weights: str, engine: type[Engine], **data: Any) -> None:
    """Compare a run with the reference; ``data`` are settings of the federation."""
    federation = federate_one_model(**data)
    method = IFCA(clusters=2, weighting=weights, **LOCAL)
    run = run_rounds(method, federation, engine=engine, **SAMPLE)
    models, chosen = reference.ifca(
        get_networks(method.server_init(run.task)),
        get_train_data(federation),
        plan_rounds(run),
        LR,
        weights == "examples",
    )
    # both models have members in some round, and one has several
    assert {c for row in chosen for c in row} == {0, 1}
    assert any(row.count(c) > 1 for row in chosen for c in row)
    assert_nested_close(get_networks(run.state.server), models)
    assert all(s is None for s in get_client_states(run))
    for k, info in enumerate(federation.infos):
        own = int(
            np.argmin(
                [
                    cross_entropy(forward(net, x)[1], y)
                    for net in models
                    for x, y in [get_train_data(federation)[k]]
                ]
            )
        )
        assert_nested_close(to_layers(run.personal_params(info)), models[own])
        assert routes(method, *get_client_inputs(run, k)).tolist() == np.eye(2)[own].tolist()
        assert find_nearest_model(*get_client_inputs(run, k)[1:]) == own


@pytest.mark.few(1)
@pytest.mark.parametrize("weights", ["examples", "uniform"])
def test_ifca(weights: str, engine: type[Engine]) -> None:
    assert_ifca_equals_reference(weights, engine)


def test_ifca_minimizes_the_loss_of_the_task(smoothed_loss: Loss) -> None:
    assert_ifca_equals_reference("examples", Sequential, loss=smoothed_loss)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_cluster_is_chosen_by_the_loss_of_the_task(sign: int) -> None:
    federation = federate_one_model(loss=lambda s, y: sign * functional.cross_entropy(s, y, reduction="none"))
    run = run_rounds(IFCA(clusters=2), federation, steps=0)
    module, models = federation.architectures["small"].module, run.method.server_init(run.task)
    for info in federation.infos:
        train = federation.clients[info.id].train
        losses = [
            functional.cross_entropy(
                torch.func.functional_call(module, {n: t[c] for n, t in models.items()}, train.inputs),
                train.y,
            )
            for c in range(2)
        ]
        assert run.local_model(info).routes == [
            float(c == np.argmin([sign * v for v in losses])) for c in range(2)
        ]


def test_ifca_sends_all_models_down_and_the_change_of_one_up() -> None:
    run = run_rounds(IFCA(clusters=3, **LOCAL), federate_one_model(), steps=1)
    state, down, view = get_client_inputs(run, 2)
    _, up = run.method.local_update(state, down, view)
    assert {p: tuple(t.shape) for p, t in tree.leaves(up)} == {
        **{f"/change{p}": (1, *t.shape[1:]) for p, t in tree.leaves(down)},
        "/choice": (3,),
    }
    assert sorted(up.choice.tolist()) == [0, 0, 1]
    _, norm = clip_update(
        up, run.method.describe_update(down, run.federation.infos[2], run.task).reference, 1e-3
    )
    assert 0 < norm == pytest.approx(np.sqrt(sum(float(t.square().sum()) for t in up.change.values())))
    assert norm < 0.5 * np.sqrt(sum(float(t[up.choice.argmax()].square().sum()) for t in down.values()))
    record = run.step()
    assert record.parameters_down == 4 * 3 * SMALL_PARAMETERS
    assert record.parameters_up == 4 * (SMALL_PARAMETERS + 3)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_model_that_has_diverged_is_the_nearest_of_no_client(value: float) -> None:
    run = run_rounds(IFCA(clusters=3, **LOCAL), federate_one_model(), steps=0)
    _, down, view = get_client_inputs(run, 2)
    models = {n: t.clone() for n, t in down.items()}
    for t in models.values():
        t[1] = value
    others = {n: t[[0, 2]] for n, t in down.items()}
    assert find_nearest_model(models, view) == (0, 2)[find_nearest_model(others, view)]


def test_a_model_that_nobody_picks_stays_bit_for_bit() -> None:
    run = run_rounds(IFCA(clusters=2, **LOCAL), federate_one_model(), steps=0)
    # a model that no one could want
    awful = {n: torch.stack([t[0], t[1] + 5]) for n, t in run.state.server.items()}
    run.state = State(0, awful, ClientStore())
    for _ in range(3):
        run.step()
    assert tree.equal(select_cluster(run.state.server, 1), select_cluster(awful, 1))
    # so the other is FedAvg's
    expected = fedavg(
        get_initial_networks(run.federation)[0], get_train_data(run.federation), plan_rounds(run), LR
    )
    assert_nested_close(get_networks(run.state.server)[0], expected)


def test_separated_clusters_stay_fedavg_runs_of_their_own() -> None:
    # from models that each cluster has learnt already, every client goes on picking its own
    federation = federate_opposed_clusters()
    method = IFCA(clusters=2, batch_size=8, optimizer=SGD(lr=0.5))
    run = Run(method, federation, RunSettings(rounds=6, unseen=0.34), Sequential())
    w = torch.tensor([[-1.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
    models = {"head.weight": torch.stack([w, -w]), "head.bias": torch.zeros(2, 2, dtype=torch.float64)}
    run.state = State(0, models, ClientStore())
    for _ in range(3):
        record = run.step()
        for c in range(2):
            assert record.values("route", series=str(c), split="") == [float(c == k % 2) for k in range(6)]
    accuracies = record.values("accuracy", series="personal", split="test")
    assert len(accuracies) == 6
    assert min(accuracies) > 0.9
    assert not run.client_sampler.unseen & set(run.state.clients)
