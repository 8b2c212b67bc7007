"""Means of each cluster, how the models of several clusters begin, and how clients that never trained find theirs."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedlowrank.adapters.mixtures.router import Router
from fedlowrank.core import tree
from fedlowrank.core.contract import Batch
from fedlowrank.core.contract.contribution import Aggregator
from fedlowrank.core.errors import TaskError
from fedlowrank.data.federation import Federation
from fedlowrank.engines.sequential import Sequential
from fedlowrank.methods.ensemble import Ensemble
from fedlowrank.methods.fedem import FedEM
from fedlowrank.methods.ifca import IFCA
from fedlowrank.methods.shared.clusters import (
    average_clusters,
    compute_model_losses,
    contribute_by_cluster,
    draw_models,
    select_cluster,
)
from fedlowrank.rounds.run import Run
from fedlowrank.rounds.run_settings import RunSettings
from fedlowrank.storage.client_store import ClientStore
from fedlowrank.storage.state import State
from fedlowrank.testing import check
from fedlowrank.testing.check import check_method
from fedlowrank.testing.check import small_federation as small
from tests.golden.reference import forward, softmax

from .cluster_setting import OPTIMAL, assign_two_clusters, draw_tree, federate_opposed_clusters, get_networks
from .run_contents import get_train_data
from .setting import federate_one_model


def compute_cluster_means(old: Any, ups: Any, weights: Any) -> Any:
    aggregator = Aggregator(range(len(ups)))
    for k, (up, of_clusters) in enumerate(zip(ups, weights, strict=True)):
        aggregator.add(k, contribute_by_cluster(up, torch.tensor(of_clusters, dtype=torch.float64)))
    return average_clusters(old, aggregator.finish())


def test_the_mean_of_each_cluster_by_hand() -> None:
    old, ups = draw_tree(0), [draw_tree(1), draw_tree(2)]
    weights = [[4.0, 0.0, 1.0], [12.0, 0.0, 0.5]]
    actual = compute_cluster_means(old, ups, weights)
    for (_, o), (_, f), (_, a), (_, b) in zip(*map(tree.leaves, (old, actual, *ups)), strict=True):
        torch.testing.assert_close(f[0], 0.25 * a[0] + 0.75 * b[0], rtol=0, atol=1e-14)
        assert torch.equal(f[1], o[1])
        torch.testing.assert_close(f[2], (2 * a[2] + b[2]) / 3, rtol=0, atol=1e-14)
    # nothing was changed in place
    assert tree.equal(old, draw_tree(0))
    assert tree.equal(ups[0], draw_tree(1))


def test_a_lone_cluster_counts_for_its_own_alone() -> None:
    old, ups = draw_tree(0), [select_cluster(draw_tree(1), 1), select_cluster(draw_tree(2), 1), draw_tree(3)]
    actual = compute_cluster_means(old, ups, [[0.0, 3.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 2.0]])
    for (_, o), (_, f), (_, a), (_, b), (_, c) in zip(*map(tree.leaves, (old, actual, *ups)), strict=True):
        assert a.shape[0] == b.shape[0] == 1
        assert torch.equal(f[0], o[0])
        torch.testing.assert_close(f[1], (3 * a[0] + b[0]) / 4, rtol=0, atol=1e-14)
        assert torch.equal(f[2], c[2])


def test_next_to_no_weight_leaves_a_cluster_as_it_was() -> None:
    old = draw_tree(0)
    for little, kept in ((1e-6, True), (1e-2, False)):
        actual = compute_cluster_means(old, [draw_tree(1)], [[50.0, little, 50.0]])
        assert tree.equal(select_cluster(actual, 1), select_cluster(old, 1)) == kept
        assert tree.equal(select_cluster(actual, 1), select_cluster(draw_tree(1), 1)) != kept


def test_one_cluster_of_a_tree() -> None:
    value = draw_tree(0)
    assert torch.equal(select_cluster(value, 2)["w"].u, value["w"].u[2:])
    assert torch.equal(select_cluster(value, 0)["b"], value["b"][:1])


def test_models_begin_at_different_draws_of_which_the_first_is_everyones() -> None:
    federation = federate_one_model()
    task = federation.task(3)
    models = draw_models("X", task, 3)
    first = federation.architectures["small"].initial
    assert tree.equal({n: t[0] for n, t in models.items()}, first)
    for n, t in models.items():
        assert t.shape == (3, *first[n].shape)
        assert not torch.equal(t[0], t[1])
        assert not torch.equal(t[1], t[2])
        # of one spread, for they are drawn by the same rule; a bias has too few numbers to tell
        assert t.ndim < 3 or 0.5 < float(t[1].std() / t[0].std()) < 2
    made = [m(clusters=3).server_init(task) for m in (Ensemble, FedEM, IFCA)]
    assert all(tree.equal(m, models) for m in made)
    # how many there are changes none of them
    assert tree.equal({n: t[:2] for n, t in models.items()}, draw_models("X", task, 2))


def test_losses_of_all_models() -> None:
    federation = federate_one_model()
    models = draw_models("X", federation.task(3), 3)
    data = federation.clients[2].train
    actual = compute_model_losses(federation.architectures["small"], models, Batch(data.x, data.y))
    x, y = get_train_data(federation)[2]
    for c, net in enumerate(get_networks(models)):
        p = softmax(forward(net, x)[1])[np.arange(len(y)), y]
        np.testing.assert_allclose(actual[:, c], -np.log(p), atol=1e-12)


@pytest.mark.parametrize(
    "method",
    [FedEM(clusters=2, unseen_steps=40), Ensemble(clusters=2, router=Router(lr=2.0, unseen_steps=60))],
    ids=lambda m: m.title,
)
def test_an_unseen_client_finds_its_cluster(method: Any) -> None:
    run = Run(method, federate_opposed_clusters(), RunSettings(rounds=3, unseen=0.34), Sequential())
    w = torch.tensor([[-4.0, 0.0], [4.0, 0.0]], dtype=torch.float64)
    run.state = State(
        0,
        {"head.weight": torch.stack([w, -w]), "head.bias": torch.zeros(2, 2, dtype=torch.float64)},
        ClientStore(),
    )
    record = run.record_initial_models()
    for k in range(6):
        assert record.values("route", series=str(k % 2), split="")[k] > 0.9
    assert record.values("accuracy", series="personal", split="test") == [1] * 6
    while run.round < 3:
        assert not run.client_sampler.unseen & set(run.step().participants)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "method",
    [
        Ensemble(clusters=2, router=OPTIMAL),
        Ensemble(clusters=2, mix="weights", router=Router(update="mfl", lr=2.0, keep=False)),
        FedEM(clusters=2, unseen_steps=0),
        IFCA(clusters=2, weighting="uniform"),
    ],
    ids=["optimal", "mfl", "fedem", "ifca"],
)
def test_every_form_passes_every_check(method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedlowrank.testing.check.small_federation", assign_two_clusters(small))
    # that its steps are the formulas' is tested above, entry by entry
    rest = {name: test for name, test in check._CHECKS.items() if name != "it learns"}
    monkeypatch.setattr(check, "_CHECKS", rest)
    actual = {f.name: f.detail for f in check_method(method) if not f.ok}
    assert actual == {}


class Raw(nn.Module):
    """Parameters without a layer that could draw them again."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.c = nn.Parameter(torch.randn(6, 3)), nn.Parameter(torch.full((3,), -4.0))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w + self.c


def federate(model: Any) -> Federation:
    x = np.random.default_rng(0).normal(size=(4, 12, 6)).astype("float32")
    return Federation.from_arrays(
        [(of_client, np.arange(12) % 3) for of_client in x], model, classes=3, seed=0
    )


@pytest.mark.parametrize("method", [Ensemble(clusters=3), FedEM(clusters=3), IFCA(clusters=3)])
def test_the_factory_of_the_user_draws_all_models(method: Any) -> None:
    federation = federate(Raw)
    task = federation.task(2)
    models = method.server_init(task)
    assert torch.equal(models["c"], torch.full((3, 3), -4.0))
    assert not torch.equal(models["w"][0], models["w"][1])
    assert not torch.equal(models["w"][1], models["w"][2])
    assert tree.equal({n: t[0] for n, t in models.items()}, federation.architectures["model"].initial)
    assert method.remarks(task) == []


@pytest.mark.parametrize("method", [Ensemble(clusters=3), FedEM(clusters=3), IFCA(clusters=3)])
@pytest.mark.parametrize("model", [Raw(), lambda: copy.deepcopy(PRETRAINED)])
def test_models_that_begin_equal_are_refused(method: Any, model: Any) -> None:
    with pytest.raises(TaskError, match="all 3 models would begin with the same weights"):
        method.server_init(federate(model).task(2))


def test_a_module_is_the_start_of_the_first_model_alone_and_that_is_said() -> None:
    federation = federate(nn.Linear(6, 3))
    task = federation.task(2)
    assert len(IFCA(clusters=3).remarks(task)) == 1
    assert IFCA(clusters=1).remarks(task) == []
    models = IFCA(clusters=3).server_init(task)
    assert torch.equal(models["weight"][0], federation.architectures["model"].initial["weight"])


PRETRAINED = Raw()
