"""Learning rates that change over the local steps of a pass: against the schedulers of torch on a plain loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import lr_scheduler as torch_schedules

from fedlowrank import Federation, LocalSchedule, simulate
from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.core import tree
from fedlowrank.core.errors import ConfigError
from fedlowrank.core.learning.batch_losses import supervised_loss
from fedlowrank.core.learning.optimizer import SGD, AdamW, Group, Schedule
from fedlowrank.core.tree import Params
from fedlowrank.engines.engine import Engine, client_view
from fedlowrank.engines.sequential import Sequential
from fedlowrank.engines.vectorized import Vectorized
from fedlowrank.methods.fedavg import FedAvg
from fedlowrank.methods.fednova import FedNova
from fedlowrank.methods.floral import FederatedFloral
from fedlowrank.methods.scaffold import SCAFFOLD
from fedlowrank.methods.standalone import Standalone
from fedlowrank.rounds.run import Run
from fedlowrank.rounds.run_settings import RunSettings
from tests.methods.setting import CLASSES, Net, make_arrays

LR = 0.1
Make = Callable[[torch.optim.Optimizer, int], Any]


def warm(optimizer: torch.optim.Optimizer, then: Any, warmup: int) -> Any:
    start = torch_schedules.LinearLR(optimizer, 1 / (warmup + 1), 1.0, warmup)
    return torch_schedules.SequentialLR(optimizer, [start, then], [warmup])


SCHEDULES: dict[str, tuple[LocalSchedule, Make]] = {
    "exponential": (
        LocalSchedule("exponential", factor=0.8),
        lambda o, n: torch_schedules.ExponentialLR(o, 0.8),
    ),
    "step": (LocalSchedule("step", factor=0.5, every=2), lambda o, n: torch_schedules.StepLR(o, 2, 0.5)),
    "cosine over the pass": (
        LocalSchedule("cosine", floor=0.1),
        lambda o, n: torch_schedules.CosineAnnealingLR(o, n, eta_min=0.1 * LR),
    ),
    "linear over some steps": (
        LocalSchedule("linear", steps=3, floor=0.25),
        lambda o, n: torch_schedules.LinearLR(o, 1.0, 0.25, 3),
    ),
    "linear over the pass": (
        LocalSchedule("linear"),
        lambda o, n: torch_schedules.LinearLR(o, 1.0, 0.0, n),
    ),
    "warm-up": (
        LocalSchedule(warmup=3),
        lambda o, n: torch_schedules.LinearLR(o, 1 / 4, 1.0, 3),
    ),
    "warm-up and cosine": (
        LocalSchedule("cosine", warmup=2),
        lambda o, n: warm(o, torch_schedules.CosineAnnealingLR(o, max(1, n - 2)), 2),
    ),
}


def federation() -> Federation:
    make: Any = {"m": lambda: Net(6)}
    return Federation.from_arrays(make_arrays(), make, classes=CLASSES)


def run_of(method: Any, engine: Engine, fed: Federation, rounds: int = 2) -> Run:
    run = Run(method, fed, RunSettings(rounds=rounds), engine)
    for _ in range(rounds):
        run.step()
    return run


def with_torch(fed: Federation, client: int, make: Any, schedule: Make, rounds: int = 2) -> Params:
    """A client's training alone; optimizer and schedule begin again in every round."""
    module = Net(6)
    module.load_state_dict(fed.architectures["m"].initial)
    data = fed.clients[client].train
    for t in range(rounds):
        order = (
            Sequential()
            .trainer(Standalone(epochs=2, batch_size=8), fed, t, fed.infos[client])
            .data.order("local")
        )
        optimizer = make(module)
        scheduler = schedule(optimizer, len(order))
        for index in order:
            optimizer.zero_grad()
            functional.cross_entropy(module(data.x[index]), data.y[index]).backward()
            optimizer.step()
            scheduler.step()
    return {n: p.detach() for n, p in module.named_parameters()}


def assert_close(found: Params, wanted: Params) -> None:
    tree.map_leaves(lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=1e-9), found, wanted)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("engine", [Sequential, Vectorized])
@pytest.mark.filterwarnings("ignore:The epoch parameter in")  # of torch's own SequentialLR
def test_steps_are_those_of_torch_with_its_scheduler(name: str, engine: type[Engine]) -> None:
    # clients take different numbers of steps
    ours, schedule = SCHEDULES[name]
    fed = federation()
    run = run_of(Standalone(epochs=2, batch_size=8, optimizer=SGD(lr=LR, local_schedule=ours)), engine(), fed)
    for info in fed.infos:
        expected = with_torch(fed, info.id, lambda m: torch.optim.SGD(m.parameters(), lr=LR), schedule)
        assert_close(run.personal_params(info), expected)


@pytest.mark.parametrize("engine", [Sequential, Vectorized])
def test_a_schedule_within_the_round_multiplies_that_over_rounds_and_the_rates_of_groups(
    engine: type[Engine],
) -> None:
    fed, ours = federation(), SCHEDULES["step"][0]
    optimizer = AdamW(
        lr=LR,
        weight_decay=0.1,
        schedule=Schedule("exponential", factor=0.5),
        groups={"head.weight": Group(lr=0.02)},
        local_schedule=ours,
    )
    run = run_of(Standalone(epochs=2, batch_size=8, optimizer=optimizer), engine(), fed)
    round_scale = iter([1.0, 0.5])

    def make(module: Any) -> torch.optim.Optimizer:
        scale = next(round_scale)
        head = [p for n, p in module.named_parameters() if n == "head.weight"]
        rest = [p for n, p in module.named_parameters() if n != "head.weight"]
        groups = [{"params": rest, "lr": scale * LR}, {"params": head, "lr": scale * 0.02}]
        return torch.optim.AdamW(groups, weight_decay=0.1)

    assert_close(run.personal_params(fed.infos[2]), with_torch(fed, 2, make, SCHEDULES["step"][1]))


def test_a_prox_takes_the_learning_rate_of_its_step() -> None:
    seen: list[float] = []
    fed = federation()
    method = Standalone(epochs=2, batch_size=8)
    trainer = Sequential().trainer(method, fed, 0, fed.infos[0])
    view = client_view(fed, fed.task(1), fed.infos[0], 0, trainer)

    def prox(p: Params, lr: float) -> Params:
        seen.append(lr)
        return p

    optimizer = SGD(lr=LR, local_schedule=SCHEDULES["exponential"][0])
    view.train(supervised_loss(view.model), view.model.initial, "local", optimizer, prox=prox)
    assert seen == pytest.approx([LR * 0.8**t for t in range(view.steps("local"))])


def test_scaffold_divides_by_the_sum_of_the_learning_rates() -> None:
    fed = federation()
    optimizer = SGD(lr=LR, local_schedule=SCHEDULES["step"][0])
    run = run_of(SCAFFOLD(epochs=2, batch_size=8, optimizer=optimizer), Sequential(), fed, rounds=1)
    module = Net(6)
    module.load_state_dict(fed.architectures["m"].initial)
    data, client = fed.clients[2].train, 2
    order = (
        Sequential()
        .trainer(Standalone(epochs=2, batch_size=8), fed, 0, fed.infos[client])
        .data.order("local")
    )
    total: Params = {n: torch.zeros_like(p) for n, p in module.named_parameters()}
    rates = [LR * 0.5 ** (t // 2) for t in range(len(order))]
    for lr, index in zip(rates, order, strict=True):
        module.zero_grad()
        functional.cross_entropy(module(data.x[index]), data.y[index]).backward()
        with torch.no_grad():
            for n, p in module.named_parameters():
                assert p.grad is not None
                total[n] += lr * p.grad
                p -= lr * p.grad
    assert_close(run.state.clients[client], {n: t / sum(rates) for n, t in total.items()})


@pytest.mark.parametrize("engine", [Sequential, Vectorized])
def test_scaffold_divides_by_the_rates_of_the_round_where_a_schedule_goes_on(engine: type[Engine]) -> None:
    # one step of all examples a round: the control is the gradient at the start of the round
    fed = federation()
    optimizer = SGD(lr=LR, local_schedule=LocalSchedule("cosine", rounds=4))
    run = Run(SCAFFOLD(batch_size=1000, optimizer=optimizer), fed, RunSettings(rounds=4), engine())
    data, module = fed.clients[2].train, Net(6)
    for _ in range(3):
        module.load_state_dict(run.personal_params(fed.infos[2]))
        module.zero_grad()
        functional.cross_entropy(module(data.x), data.y).backward()
        run.step()
        gradient = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
        tree.map_leaves(torch.testing.assert_close, run.state.clients[2], gradient)


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "FedNova": (lambda: FedNova(optimizer=SGD(local_schedule=LocalSchedule("cosine"))), "has local_schedule"),
    "server": (
        lambda: FederatedFloral(server_optimizer=SGD(lr=0.5, local_schedule=LocalSchedule("cosine"))),
        "one step a round",
    ),
    "factor": (lambda: LocalSchedule("step", every=3), "changes no learning rate"),
    "unread": (lambda: LocalSchedule("step", factor=0.5, floor=0.1), "floor = 0.1 does nothing"),
    "steps": (lambda: LocalSchedule("cosine", steps=0), "steps >= 1"),
    "floor": (lambda: LocalSchedule("linear", floor=1.5), r"floor within \[0, 1\]"),
    "warm-up": (lambda: LocalSchedule(warmup=-1), "warmup >= 0"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_nothing_or_means_nothing_is_refused(name: str) -> None:
    make, message = BAD[name]
    with pytest.raises(ConfigError, match=message):
        make()


ENDED: dict[str, dict[str, Any]] = {
    "schedule": {"schedule": Schedule("cosine", rounds=2)},
    "warm-up": {"schedule": Schedule("cosine", rounds=1, warmup=1)},
    "local": {"local_schedule": LocalSchedule("linear", rounds=2)},
    # 12 examples in batches of 4 are 3 steps a round, so that 6 steps are two rounds
    "steps": {"local_schedule": LocalSchedule("cosine", steps=6, rounds=9)},
}


@pytest.mark.parametrize("name", ENDED)
def test_rounds_after_the_end_of_a_schedule_are_refused(name: str) -> None:
    data = (torch.randn(12, 2), torch.arange(12) % 2)
    federation = Federation.from_arrays([{"train": data}] * 2, nn.Linear(2, 2))
    method = FedAvg(optimizer=SGD(**ENDED[name]), batch_size=4)
    assert len(simulate(method, federation, rounds=2).rounds) == 3
    field = next(iter(ENDED[name]))
    with pytest.raises(
        ConfigError, match=f"optimizer.{field} has fallen to a learning rate of 0 before the last of 3"
    ):
        simulate(method, federation, rounds=3)
    with_floor = dataclasses.replace(ENDED[name][field], floor=0.1)
    method = FedAvg(optimizer=SGD(**{field: with_floor}), batch_size=4)
    assert len(simulate(method, federation, rounds=3).rounds) == 4


def test_a_file_sets_the_schedule_and_a_comparison_another_kind() -> None:
    optimizer = {"local_schedule": {"kind": "cosine", "floor": 0.1, "warmup": 2}}
    made = ExperimentConfig.parse({"method": "fedavg", "defaults": {"optimizer": optimizer}})
    assert made.build_method("fedavg").optimizer.local_schedule == LocalSchedule(
        "cosine", floor=0.1, warmup=2
    )
    other = {"optimizer": {"local_schedule": {"kind": "step", "factor": 0.5}}}
    varied = made.overlay({"defaults": other}).build_method("fedavg").optimizer.local_schedule
    assert varied == LocalSchedule("step", factor=0.5, warmup=2)
