"""Evaluation of clients that have models of their own, against plain loops over clients."""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedlowrank import simulate
from fedlowrank.core.contract import ClientModel, ClientView
from fedlowrank.core.tree import Params
from fedlowrank.data.dataset import Examples
from fedlowrank.engines import Sequential
from fedlowrank.methods import METHODS
from fedlowrank.methods.standalone import Standalone
from fedlowrank.results.evaluation import scoring
from fedlowrank.results.evaluation.model_evaluation import evaluate_client
from fedlowrank.results.evaluation.pools import concatenate_sets
from fedlowrank.rounds.run import Run
from fedlowrank.rounds.run_settings import RunSettings
from tests.results.evaluation.evaluated_models import (
    CountingModule,
    assert_measures,
    build_linear,
    compute_measures,
    make_federation,
)

torch.set_num_threads(1)


def mixing() -> nn.Module:
    """Standard layers that mix the examples of a batch."""
    return nn.Sequential(nn.Linear(6, 3), nn.Softmax(0))


def normalized() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))


def convolution() -> nn.Module:
    """Layers whose operations have no rule for stacked parameters."""
    layers = nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 2, 3), nn.PReLU(), nn.Flatten(), nn.Linear(8, 3)
    return nn.Sequential(*layers)


def by_own_module(run: Run, split: str) -> tuple[list[Any], list[Any]]:
    """Each client's parameters in a copy of the module."""
    module = copy.deepcopy(run.federation.architectures["model"].module).eval()

    def scores(info: Any, x: Tensor) -> Tensor:
        missing, unknown = module.load_state_dict(run.personal_params(info), strict=False)
        assert all("num_batches_tracked" in name for name in missing)
        assert not unknown
        actual: Tensor = module(x)
        return actual

    return compute_measures(run, split, scores)


@pytest.mark.full
@pytest.mark.parametrize("model", [build_linear, CountingModule, normalized, convolution, mixing])
@pytest.mark.parametrize("engine", ["sequential", "processes", "vectorized"])
def test_personal_models_by_a_plain_loop(model: Callable[[], nn.Module], engine: Any) -> None:
    # so many examples that blocks are several, and clients that share the initial model
    made = make_federation(model, clients=40, held_out=80)
    result = simulate("standalone", made, rounds=2, engine=engine, participation=0.4)
    trained = {id(result.run.state_of(info)) for info in made.infos}
    assert len(trained) > 10
    for split in ("val", "test"):
        assert_measures(result.rounds[-1], "personal", split, by_own_module(result.run, split))


@pytest.mark.full
@pytest.mark.parametrize(
    "method", ["fedper", "apfl", "fedproto", "fedem", "feddyn", "ditto", "floral", "ifca"]
)
@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_every_series_is_that_of_a_client_alone(method: str, engine: Any) -> None:
    made = make_federation(linear_head, clients=20)
    result = simulate(method, made, rounds=2, participation=0.4, engine=engine)
    record = result.rounds[-1]
    assert record.is_evaluated
    for info, data in zip(made.infos, made.clients, strict=True):
        alone = evaluate_client(result.run.local_model(info), info, data)
        assert alone.series("loss") == record.series("loss")
        for column in alone.columns:
            actual, (value,) = (
                record.values(column.name, series=column.series, split=column.split)[info.id],
                column.values,
            )
            if column.name == "loss" and value is not None:
                value = pytest.approx(value, rel=1e-5)
            assert actual == value


def linear_head() -> nn.Module:
    return nn.Sequential(OrderedDict(body=nn.Linear(6, 4), relu=nn.ReLU(), head=nn.Linear(4, 3)))


def test_losses_of_a_work_item_are_computed_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_federation(build_linear)
    run = Run(METHODS["standalone"](), made, RunSettings(rounds=2), Sequential())
    run.record_initial_models()
    run.step()
    rows: list[int] = []
    sum_terms = scoring._sum_terms

    def counted(scores: Tensor, batch: Any, class_count: int) -> scoring.ExampleSums[Tensor]:
        rows.append(len(scores))
        return sum_terms(scores, batch, class_count)

    monkeypatch.setattr(scoring, "_sum_terms", counted)
    run.evaluate()
    assert rows == [sum(len(c.val) + len(c.test) for c in made.clients)]


@pytest.mark.parametrize("model", [mixing, lambda: CountingModule(lambda x: x - x.mean(0))])
def test_a_client_without_examples_is_not_the_one_that_is_compared(
    model: Callable[[], nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    made = make_federation(model, empty=(0,))
    with caplog.at_level(logging.WARNING):
        result = simulate("fedavg", made, rounds=1)
    assert caplog.text.count("mixes the examples of a batch") == 1
    assert_measures(result.rounds[-1], "personal", "test", by_own_module(result.run, "test"))


class Computed(Standalone):
    """Computes the parameters in every use, in the same memory for all clients."""

    def client_model(self, state: Params, down: None, view: ClientView) -> ClientModel:
        return ClientModel(lambda: {n: MEMORY[n].copy_(p) for n, p in state.items()})


MEMORY = {n: p.detach().clone() for n, p in build_linear().named_parameters()}


def test_parameters_that_are_computed_in_every_use_are_of_one_client() -> None:
    result = simulate(Computed(), make_federation(build_linear), rounds=1)
    for split in ("val", "test"):
        assert_measures(result.rounds[-1], "personal", split, by_own_module(result.run, split))


@pytest.mark.parametrize("count", [12, 300, 5000])
@pytest.mark.parametrize("classes", [3, 20])
def test_the_loss_of_few_and_of_many_examples_and_classes(count: int, classes: int) -> None:
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(count, classes, generator=g), torch.randint(classes, (count,), generator=g)
    pool = concatenate_sets([Examples(x[:5], y[:5]), Examples(x[5:], y[5:])])
    assert pool is not None
    actual = scoring.measure_predictors([(lambda rows: rows, 1), (lambda rows: 2 * rows, 1)], pool)
    for k, own, labels in ((0, x[:5], y[:5]), (1, 2 * x[5:], y[5:])):
        assert actual.loss[k] == pytest.approx(float(functional.cross_entropy(own, labels)), rel=1e-5)
        assert actual.accuracy[k] == float((own.argmax(1) == labels).double().mean())


def test_examples_are_concatenated_once_though_other_clients_share_a_model() -> None:
    made = make_federation(build_linear, clients=40)
    run = Run(METHODS["standalone"](), made, RunSettings(rounds=5, participation=0.1), Sequential())
    run.record_initial_models()
    for _ in range(5):
        run.step()
    inputs = sum((len(c.val) + len(c.test)) * 6 * 4 for c in made.clients)
    assert sum(pool.bytes for pool in run.evaluator.pools.pools.values()) == inputs
