"""FedAvgM, FedOpt's methods, FedNova, FedBN and FedBABU: against their references, and in their limits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedlowrank.core import tree
from fedlowrank.core.contract.method import ServerView
from fedlowrank.core.errors import ConfigError, TaskError
from fedlowrank.core.learning.optimizer import SGD, AdamW
from fedlowrank.data.federation import Federation
from fedlowrank.engines.engine import Engine
from fedlowrank.engines.sequential import Sequential
from fedlowrank.methods.fedavg import FedAvg
from fedlowrank.methods.fedavgm import FedAvgM
from fedlowrank.methods.fedbabu import FedBABU
from fedlowrank.methods.fedbn import FedBN
from fedlowrank.methods.fednova import FedNova
from fedlowrank.methods.fedopt import FedAdagrad, FedAdam, FedYogi, ServerState
from fedlowrank.models import standard
from fedlowrank.models.statistics.normalization import normalization_parameters
from fedlowrank.rounds.run import Run
from fedlowrank.rounds.run_settings import RunSettings
from golden import baseline_reference

from .setting import (
    CLASSES,
    INPUTS,
    OWNED,
    SIZES,
    WIDTH,
    alike,
    arrays,
    close,
    layers,
    order_of,
    plan,
    run_of,
    same,
    start_of,
    train_data,
)

LR = 0.3
LOCAL: dict[str, Any] = {"optimizer": SGD(lr=LR), "batch_size": 8, "epochs": 2}
SAMPLE = {"participation": 0.75}
# no client of SIZES has a last batch of one example, which a batch normalization refuses
NORMALIZED: dict[str, Any] = {"optimizer": SGD(lr=LR), "batch_size": 7, "epochs": 2}


class Normalized(nn.Module):
    """A layer, a normalization and a head, in float64."""

    head_name = "head"

    def __init__(self, norm: type[nn.Module] = nn.BatchNorm1d) -> None:
        super().__init__()
        self.body, self.norm = nn.Linear(INPUTS, WIDTH), norm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(torch.relu(self.norm(self.body(x.double()))))
        return scores


standard.LAYERS |= {Normalized}  # its forward pass is deterministic, so clients may be batched


def normalized(make: Any = Normalized) -> Federation:
    return Federation.from_arrays(arrays(), {"normalized": make}, classes=CLASSES)


# -- steps of the server -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("momentum", "server_lr"), [(0.9, 1.0), (0.6, 0.4)])
def test_fedavgm(momentum: float, server_lr: float, engine: type[Engine]) -> None:
    federation = alike()
    method = FedAvgM(server_momentum=momentum, server_lr=server_lr, **LOCAL)
    run = run_of(method, federation, engine=engine, rounds=4, **SAMPLE)
    model, velocity = baseline_reference.fedavgm(
        start_of(federation)[0], train_data(federation), plan(run), LR, momentum, server_lr
    )
    same(layers(run.state.server.model), model)
    same(layers(run.state.server.velocity), velocity)


@pytest.mark.full
@pytest.mark.parametrize("weighting", ["examples", "uniform"])
def test_fedavgm_without_momentum_is_fedavg(weighting: Any) -> None:
    method = FedAvgM(server_momentum=0.0, weighting=weighting, **LOCAL)
    run = run_of(method, alike(), **SAMPLE)
    close(
        run.state.server.model, run_of(FedAvg(weighting=weighting, **LOCAL), alike(), **SAMPLE).state.server
    )


@pytest.mark.parametrize("make", [FedAdagrad, FedAdam, FedYogi])
def test_fedopt(make: Any, engine: type[Engine]) -> None:
    federation, beta1, beta2, tau = alike(), 0.7, 0.8, 0.01
    rest = {} if make is FedAdagrad else {"beta2": beta2}
    run = run_of(
        make(server_lr=0.05, beta1=beta1, tau=tau, **rest, **LOCAL), federation, engine=engine, **SAMPLE
    )
    kind = make.__name__.removeprefix("Fed").lower()
    wanted = baseline_reference.fedopt(
        kind, start_of(federation)[0], train_data(federation), plan(run), LR, 0.05, beta1, beta2, tau
    )
    server = run.state.server
    same([layers(server.model), layers(server.m), layers(server.v)], wanted)


@pytest.mark.parametrize(
    ("method", "m", "v"),
    [
        (FedAdagrad(server_lr=2.0, beta1=0.5, tau=0.5), 0.5 * 0.3, 0.25 + 0.09),
        (FedAdam(server_lr=2.0, beta1=0.5, beta2=0.8, tau=0.5), 0.5 * 0.3, 0.8 * 0.25 + 0.2 * 0.09),
        # v = 0.25 is above 0.09 and falls; v = 0.01 is below and grows
        (FedYogi(server_lr=2.0, beta1=0.5, beta2=0.8, tau=0.5), 0.5 * 0.3, 0.25 - 0.2 * 0.09),
        (FedYogi(server_lr=2.0, beta1=0.5, beta2=0.8, tau=0.1), 0.5 * 0.3, 0.01 + 0.2 * 0.09),
    ],
    ids=["adagrad", "adam", "yogi falls", "yogi grows"],
)
def test_the_first_step_of_fedopt_by_hand(method: Any, m: float, v: float) -> None:
    federation = alike()
    task = federation.task(1)
    server = method.server_init(task)
    moved = tree.map_leaves(lambda t: t + 0.3, server.model)
    after: ServerState = method.server_update(server, moved, ServerView(task, 0, federation.key))
    step = 2.0 * m / (v**0.5 + method.tau)
    for name, start in server.model.items():
        for found, wanted in ((after.m, m), (after.v, v), (after.model, start + step)):
            torch.testing.assert_close(
                found[name], torch.as_tensor(wanted, dtype=torch.float64).expand_as(start), rtol=0, atol=1e-12
            )


# -- FedNova -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("momentum", "mu"), [(0.0, 0.0), (0.9, 0.0), (0.0, 0.5)])
def test_fednova(momentum: float, mu: float, engine: type[Engine]) -> None:
    federation = alike()
    lr = LR / 5 if momentum else LR
    method = FedNova(mu=mu, optimizer=SGD(lr=lr, momentum=momentum), batch_size=8, epochs=2)
    run = run_of(method, federation, engine=engine, **SAMPLE)
    counts = {len(steps) for clients in plan(run) for (steps,) in clients.values()}
    assert counts == {4, 6, 8}
    wanted = baseline_reference.fednova(
        start_of(federation)[0], train_data(federation), plan(run), lr, momentum, mu
    )
    same(layers(run.state.server), wanted)


@pytest.mark.full
@pytest.mark.parametrize("optimizer", [SGD(lr=LR, weight_decay=0.1, clip=0.5), SGD(lr=0.05, momentum=0.9)])
def test_fednova_of_equal_numbers_of_steps_is_fedavg(optimizer: SGD) -> None:
    # unequal numbers of examples, and three steps an epoch for each of them
    data = arrays(sizes=(23, 17, 24, 20))
    settings: dict[str, Any] = {"optimizer": optimizer, "batch_size": 8, "epochs": 2}
    nova, plain = (run_of(make(**settings), alike(clients=data), **SAMPLE) for make in (FedNova, FedAvg))
    close(nova.state.server, plain.state.server)
    # with other numbers of steps it is another model
    nova, plain = (run_of(make(**settings), alike(), **SAMPLE) for make in (FedNova, FedAvg))
    assert any((nova.state.server[n] - p).abs().max() > 1e-3 for n, p in plain.state.server.items())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"optimizer": AdamW(lr=0.01)}, "adamw"),
        ({"optimizer": SGD(lr=0.1, momentum=0.9, nesterov=True)}, "nesterov"),
        ({"optimizer": SGD(lr=0.1, momentum=0.9), "mu": 0.1}, "mu = 0.1 and optimizer has momentum"),
        ({"optimizer": AdamW(lr=0.01), "mu": 0.1}, "adamw"),
        ({"mu": -1.0}, "mu"),
    ],
)
def test_fednova_refuses_steps_whose_weights_it_does_not_know(settings: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        FedNova(**settings)


# -- FedBN ---------------------------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("norm", "kept"), [(nn.BatchNorm1d, "batch"), (nn.BatchNorm1d, "all"), (nn.LayerNorm, "all")]
)
def test_fedbn(norm: type[nn.Module], kept: Any, engine: type[Engine]) -> None:
    federation = normalized(lambda: Normalized(norm))
    run = run_of(FedBN(layers=kept, **NORMALIZED), federation, engine=engine, **SAMPLE)
    start = Normalized(norm)
    start.load_state_dict(federation.architectures["normalized"].initial, strict=False)
    local = {"norm.weight", "norm.bias"}
    shared, own = baseline_reference.fedbn(start, local, train_data(federation), plan(run), LR)
    close(run.state.server, shared)
    assert sorted(run.state.clients) == list(range(len(SIZES)))
    for info in federation.infos:
        close(run.state.clients[info.id], own[info.id])
        # what a client infers by is the common model with its own scales and shifts
        model = {n: p for n, p in run.personal(info).items() if "running" not in n}
        close(model, {n: {**shared, **own[info.id]}[n] for n in model})
        assert len(model) == 6


def test_fedbn_of_a_model_that_keeps_nothing_local_is_fedavg_and_says_so() -> None:
    def frozen() -> nn.Module:
        module = Normalized()
        module.norm.requires_grad_(False)
        return module

    layer_norm = "methods.fedbn.layers = 'all' keeps those of its other normalizations."
    cases = [
        (alike, LOCAL, ""),
        (lambda: normalized(frozen), NORMALIZED, ""),
        (lambda: normalized(lambda: Normalized(nn.LayerNorm)), NORMALIZED, layer_norm),
    ]
    for make, settings, advice in cases:
        bn, plain = (run_of(method(**settings), make(), **SAMPLE) for method in (FedBN, FedAvg))
        assert tree.equal(bn.state.server, plain.state.server)
        (remark,) = FedBN().remarks(bn.task)
        assert "the run is FedAvg's." in remark
        assert remark.endswith(advice or "FedAvg's.")
    assert FedBN().remarks(normalized().task(1)) == []


def test_which_parameters_are_those_of_normalizations() -> None:
    module = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.GroupNorm(2, 4),
        nn.BatchNorm2d(4, affine=False),
        nn.Linear(4, 4),
    )
    assert normalization_parameters(module, "batch") == {"1.weight", "1.bias"}
    assert normalization_parameters(module, "all") == {"1.weight", "1.bias", "2.weight", "2.bias"}


# -- FedBABU -------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("part", ["whole", "head", "body"])
def test_fedbabu(part: Any, engine: type[Engine]) -> None:
    federation = alike()
    method = FedBABU(fine_tuning_epochs=3, fine_tuned_part=part, fine_tuning_optimizer=SGD(lr=0.2), **LOCAL)
    run = run_of(method, federation, engine=engine, **SAMPLE)
    data, start = train_data(federation), start_of(federation)[0]
    body = baseline_reference.fedbabu(start[:-1], start[-1:], data, plan(run), LR)
    # only the body crosses, and nothing is kept
    same(layers(run.state.server), body)
    assert all(state is None for state in run.state.clients.values())
    names = list(federation.architectures["small"].initial)
    for info in federation.infos:
        steps = order_of(run, run.round - 1, info)[1]
        assert len(steps) == 3 * -(-SIZES[info.id] // 8)
        wanted = baseline_reference.fine_tuned(body + start[-1:], *data[info.id], steps, 0.2, part)
        series = run.local_model(info).client_model.series
        assert list(series) == ["fine_tuned", "global"]
        same(layers({n: series["fine_tuned"][n] for n in names}), wanted)
        same(layers({n: series["global"][n] for n in names}), body + start[-1:])


@pytest.mark.full
def test_fedbabu_fine_tunes_with_the_optimizer_of_the_training_unless_told_otherwise() -> None:
    federation = alike()
    alone, told = (
        run_of(FedBABU(fine_tuning_optimizer=o, **LOCAL), federation, steps=1) for o in (None, SGD(lr=LR))
    )
    assert tree.equal(alone.personal(federation.infos[1]), told.personal(federation.infos[1]))
    other = run_of(FedBABU(fine_tuning_optimizer=SGD(lr=0.1), **LOCAL), federation, steps=1)
    assert not tree.equal(alone.personal(federation.infos[1]), other.personal(federation.infos[1]))


def test_fedbabu_needs_a_head() -> None:
    bare = Federation.from_arrays(
        arrays(owned=OWNED), {"bare": lambda: nn.Sequential(nn.Linear(INPUTS, CLASSES))}, classes=4
    )
    with pytest.raises(TaskError, match="names no head"):
        Run(FedBABU(), bare, RunSettings(rounds=1), Sequential())


# -- all -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "settings", "words"),
    [
        (FedAvgM, {"server_momentum": 1.0}, "server_momentum must be >= 0 and < 1; it is 1.0"),
        (FedAvgM, {"server_lr": 0.0}, "server_lr"),
        (FedAdagrad, {"tau": 0.0}, "tau"),
        (FedAdam, {"beta2": 1.0}, "beta2"),
        (FedYogi, {"beta1": -0.1}, "beta1"),
        (FedBN, {"layers": "group"}, "layers"),
        (FedBABU, {"fine_tuning_epochs": 0}, "fine_tuning_epochs"),
        (FedBABU, {"fine_tuned_part": "neck"}, "fine_tuned_part"),
        (FedBABU, {"fine_tuning_optimizer": torch.optim.SGD}, "fine_tuning_optimizer"),
    ],
)
def test_bad_settings_are_refused_by_name(make: Any, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make(**settings)


def test_defaults_are_those_of_the_papers() -> None:
    assert (FedAvgM().server_momentum, FedAvgM().server_lr) == (0.9, 1.0)
    assert (FedAdagrad().beta1, FedAdam().beta1, FedAdam().beta2) == (0.0, 0.9, 0.99)
    assert (FedYogi().beta1, FedYogi().beta2, FedYogi().tau) == (0.9, 0.99, 0.001)
    assert (FedBABU().fine_tuning_epochs, FedBABU().fine_tuned_part, FedBN().layers) == (5, "whole", "batch")
    assert FedNova().mu == 0.0
