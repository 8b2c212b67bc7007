"""Optimizer states that clients keep from round to round: against one optimizer of torch for all rounds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from fedlowrank.core import tree
from fedlowrank.core.contract import AnyMethod
from fedlowrank.core.errors import ConfigError, TaskError
from fedlowrank.core.learning.batch_losses import supervised_loss
from fedlowrank.core.learning.optimizer import SGD, AdamW, Optimizer, Schedule
from fedlowrank.core.tree import Params
from fedlowrank.data.federation import Federation
from fedlowrank.engines.engine import Engine, client_view
from fedlowrank.engines.processes import Processes
from fedlowrank.engines.sequential import Sequential, Wire
from fedlowrank.engines.vectorized import Vectorized
from fedlowrank.methods import METHODS
from fedlowrank.methods.apfl import APFL
from fedlowrank.methods.ditto import Ditto
from fedlowrank.methods.fedavg import FedAvg
from fedlowrank.methods.fedbabu import FedBABU
from fedlowrank.methods.floral import FederatedFloral
from fedlowrank.methods.scaffold import SCAFFOLD
from fedlowrank.methods.standalone import Standalone
from fedlowrank.rounds.run import Run
from fedlowrank.rounds.run_settings import RunSettings
from fedlowrank.storage import checkpoint
from fedlowrank.storage.state import State
from fedlowrank.training.kept_optimizers import KeepingTrainer, StateWithOptimizers
from tests.methods.setting import CLASSES, Net, make_arrays
from tests.support.engine_runs import has_same_end

ROUNDS = 4
Make = Callable[[Any], torch.optim.Optimizer]
KEPT: dict[str, tuple[Optimizer, Make]] = {
    "momentum": (
        SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01, keep=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    ),
    "adamw": (AdamW(lr=0.02, keep=True), lambda p: torch.optim.AdamW(p, lr=0.02)),
}


def federation(clients: Any = None, **options: Any) -> Federation:
    make: Any = {"m": lambda: Net(6)}
    return Federation.from_arrays(clients or make_arrays(), make, classes=CLASSES, **options)


def run_of(method: AnyMethod, engine: Engine, on: Federation, rounds: int = ROUNDS, **settings: Any) -> Run:
    run = Run(method, on, RunSettings(rounds=rounds, **settings), engine)
    for _ in range(rounds):
        run.step()
    engine.close()
    return run


def with_torch(fed: Federation, client: int, rounds: list[int], make: Make, epochs: int = 2) -> Params:
    """A client's training in some rounds, from the common initial weights, with one optimizer for all of them."""
    module = Net(6)
    module.load_state_dict(fed.architectures["m"].initial)
    optimizer, data = make(module.parameters()), fed.clients[client].train
    for t in rounds:
        method = Standalone(epochs=epochs, batch_size=8)
        trainer = Sequential().trainer(method, fed, t, fed.infos[client])
        for index in trainer.data.order("local"):
            optimizer.zero_grad()
            functional.cross_entropy(module(data.x[index]), data.y[index]).backward()
            optimizer.step()
    return {n: p.detach() for n, p in module.named_parameters()}


def assert_close(found: Params, wanted: Params) -> None:
    tree.map_leaves(lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=1e-10), found, wanted)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", KEPT)
@pytest.mark.parametrize("engine", [Sequential, Vectorized])
def test_every_client_that_trains_alone_has_one_optimizer_for_all_rounds(
    kind: str, engine: type[Engine]
) -> None:
    # clients take different numbers of steps, and some skip rounds
    optimizer, make = KEPT[kind]
    fed = federation()
    method = Standalone(epochs=2, batch_size=8, optimizer=optimizer)
    run = run_of(method, engine(), fed, participation=0.75)
    trained = {i: [t for t in range(ROUNDS) if i in run.client_sampler.draw(t)] for i in run.state.clients}
    assert len({len(rounds) for rounds in trained.values()}) > 1
    for client, rounds in trained.items():
        assert_close(run.personal_params(fed.infos[client]), with_torch(fed, client, rounds, make))


def test_fedavg_of_one_client_is_one_optimizer_for_all_rounds() -> None:
    optimizer, make = KEPT["adamw"]
    fed = federation(make_arrays()[:1])
    run = run_of(FedAvg(epochs=2, batch_size=8, optimizer=optimizer), Sequential(), fed)
    assert_close(run.state.server, with_torch(fed, 0, [*range(ROUNDS)], make))


def test_a_client_whose_reply_is_lost_keeps_the_state_of_before() -> None:
    optimizer, make = KEPT["adamw"]
    fed = federation()
    run = Run(
        Standalone(epochs=2, batch_size=8, optimizer=optimizer), fed, RunSettings(rounds=3), Sequential()
    )
    for t in range(3):
        run.step({"2": "lost"} if t == 1 else None)
    assert_close(run.personal_params(fed.infos[2]), with_torch(fed, 2, [0, 2], make))
    assert_close(run.personal_params(fed.infos[0]), with_torch(fed, 0, [0, 1, 2], make))


METHODS_WITH_PASSES: dict[str, AnyMethod] = {
    "two passes": Ditto(optimizer=KEPT["momentum"][0], batch_size=8),
    "groups of parameters": APFL(adaptive=False, optimizer=KEPT["adamw"][0], batch_size=8),
    "clients of other sizes": FedAvg(
        optimizer=AdamW(keep=True, schedule=Schedule("cosine", rounds=10)), batch_size=8
    ),
}


@pytest.mark.parametrize("name", METHODS_WITH_PASSES)
def test_states_are_the_same_in_every_engine_and_after_a_resume(name: str, tmp_path: Path) -> None:
    method, fed = METHODS_WITH_PASSES[name], federation()
    run = run_of(method, Sequential(), fed, participation=0.7)
    # all cross processes as they do bytes
    for engine in (Wire(), Processes(workers=2)) if name == "two passes" else (Wire(),):
        assert has_same_end(run, run_of(method, engine, fed, participation=0.7))
    together = run_of(method, Vectorized(), fed, participation=0.7)
    for client, state in run.state.clients.items():
        assert isinstance(state, StateWithOptimizers)
        assert_close(tree.canonical(together.state.clients[client]), state)
    half = Run(method, fed, RunSettings(rounds=ROUNDS, participation=0.7), Sequential())
    half.step()
    half.step()
    checkpoint.save(tmp_path, half.round, half.state.server, half.state.clients)
    actual = checkpoint.load(tmp_path)
    other = Run(method, fed, RunSettings(rounds=ROUNDS, participation=0.7), Sequential())
    other.restore(State(actual.round, actual.server, actual.clients))
    other.step()
    other.step()
    assert has_same_end(run, other)


def test_an_evaluation_uses_no_state_and_changes_none() -> None:
    fed, optimizer = federation(), KEPT["momentum"][0]
    run = run_of(FedBABU(optimizer=optimizer, fine_tuning_epochs=1), Sequential(), fed, rounds=2)
    before = {str(i): tree.encode(s) for i, s in run.state.clients.items()}
    tuned = run.personal_params(fed.infos[0])
    afresh = FedBABU(
        optimizer=SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01), fine_tuning_epochs=1
    )
    other = Run(afresh, fed, RunSettings(rounds=2), Sequential())
    other.restore(State(2, run.state.server, other.new_store()))
    assert tree.equal(tuned, other.personal_params(fed.infos[0]))
    assert before == {str(i): tree.encode(s) for i, s in run.state.clients.items()}


def test_a_state_that_does_not_fit_is_an_error_that_names_client_pass_and_parameter() -> None:
    fed, optimizer = federation(), KEPT["momentum"][0]
    run = run_of(FedAvg(optimizer=optimizer), Sequential(), fed, rounds=1)
    smaller = Federation.from_arrays(make_arrays(), {"m": lambda: Net(5)}, classes=CLASSES)
    other = Run(FedAvg(optimizer=optimizer), smaller, RunSettings(rounds=2), Sequential())
    other.restore(State(1, other.state.server, run.state.clients))
    with pytest.raises(
        TaskError, match=r"client 0 .*'local': /body.0.weight had shape \[6, 12\].* has \[5, 12\]"
    ):
        other.step()


@pytest.mark.parametrize("name", ["fednova", "fedspa", "ifca", "flora", "flexlora", "fedhl", "hetlora"])
def test_methods_whose_rounds_have_other_parameters_refuse(name: str) -> None:
    prunes: dict[str, Any] = {"prune": 0.5} if name == "hetlora" else {}
    with pytest.raises(
        ConfigError, match=r"optimizer.keep = true is refused, because .* Leave optimizer.keep out"
    ):
        METHODS[name](optimizer=KEPT["momentum"][0], **prunes)
    # of a rank that stays, each factor is the same in all rounds
    METHODS["hetlora"](optimizer=KEPT["momentum"][0])


def test_keep_is_refused_where_it_does_nothing() -> None:
    with pytest.raises(ConfigError, match="nothing without a momentum"):
        SGD(lr=0.1, keep=True)
    with pytest.raises(ConfigError, match="SCAFFOLD"):
        SCAFFOLD(optimizer=KEPT["momentum"][0])
    with pytest.raises(ConfigError, match=r"server_optimizer\.keep"):
        FederatedFloral(server_optimizer=KEPT["momentum"][0])
    with pytest.raises(ConfigError, match=r"fine_tuning_optimizer\.keep"):
        FedBABU(fine_tuning_optimizer=KEPT["momentum"][0])


def test_each_time_that_a_pass_is_taken_in_a_round_has_its_own_state() -> None:
    fed = federation()
    states: dict[str, Any] = {}
    actual: list[list[list[int]]] = []
    # twice, once, twice: the second time goes on where it was left
    for times in (2, 1, 2):
        view = client_view(
            fed, fed.task(1), fed.infos[0], 0, Sequential().trainer(FedAvg(), fed, 0, fed.infos[0])
        )
        keeping = KeepingTrainer(view.trainer, fed.infos[0], states)
        view = dataclasses.replace(view, trainer=keeping)
        for _ in range(times):
            view.train(supervised_loss(view.model), view.model.initial, "local", AdamW(keep=True))
        states = keeping.collect(None).optimizers
        actual.append([s.step_counts for s in states["local"]])
    assert [[taken[0] for taken in of] for of in actual] == [[1, 1], [2, 1], [3, 2]]
