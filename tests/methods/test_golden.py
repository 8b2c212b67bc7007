"""Every method against its NumPy reference: server state and all clients' states after three rounds in
float64.

Three of four clients of unequal size take part in a round, so that weights, absences and the order of steps
all matter. What differs is rounding, about 1e-15; a wrong sign, factor or weight differs by ten orders of
magnitude more.
"""

from __future__ import annotations

import numpy as np
import pytest

from fedlowrank.core.learning.optimizer import SGD
from fedlowrank.engines.engine import Engine
from fedlowrank.linalg.factored import Factored
from fedlowrank.methods.fd import FD
from fedlowrank.methods.fedavg import FedAvg
from fedlowrank.methods.fedkd import FedKD
from fedlowrank.methods.fedproto import FedProto
from fedlowrank.methods.fedprox import FedProx
from fedlowrank.methods.fml import FML
from fedlowrank.methods.lg_fedavg import LGFedAvg
from fedlowrank.methods.pfedlora import PFedLoRA
from fedlowrank.methods.standalone import Standalone
from golden import reference

from .setting import (
    CLASSES,
    SIZES,
    alike,
    layers,
    plan,
    run_of,
    same,
    start_of,
    states,
    train_data,
    unlike,
)

LR = 0.3
LOCAL = {"optimizer": SGD(lr=LR), "batch_size": 8, "epochs": 2}
SAMPLE = {"participation": 0.75}
TOLERANCE = 1e-10


def test_standalone(engine: type[Engine]) -> None:
    federation = unlike()
    run = run_of(Standalone(**LOCAL), federation, engine=engine, **SAMPLE)
    wanted = reference.standalone(start_of(federation), train_data(federation), plan(run), LR)
    same([layers(s) for s in states(run)], wanted)


def test_standalone_of_everyone_trains_all_clients_in_every_round(engine: type[Engine]) -> None:
    federation = unlike()
    run = run_of(Standalone(everyone=True, **LOCAL), federation, engine=engine, **SAMPLE)
    assert all(len(r) == len(SIZES) for r in plan(run))
    wanted = reference.standalone(start_of(federation), train_data(federation), plan(run), LR)
    same([layers(run.state.clients[k]) for k in range(len(SIZES))], wanted)


def test_fedavg(engine: type[Engine]) -> None:
    federation = alike()
    run = run_of(FedAvg(**LOCAL), federation, engine=engine, **SAMPLE)
    wanted = reference.fedavg(start_of(federation)[0], train_data(federation), plan(run), LR)
    same(layers(run.state.server), wanted)
    assert all(s is None for s in states(run))


@pytest.mark.parametrize("mu", [0.1, 2.0])
def test_fedprox(mu: float, engine: type[Engine]) -> None:
    federation = alike()
    run = run_of(FedProx(mu=mu, **LOCAL), federation, engine=engine, **SAMPLE)
    wanted = reference.fedprox(start_of(federation)[0], train_data(federation), plan(run), LR, mu)
    same(layers(run.state.server), wanted)


@pytest.mark.full
@pytest.mark.parametrize(("alpha", "beta"), [(0.5, 0.5), (0.3, 0.8)])
def test_fml(alpha: float, beta: float, engine: type[Engine]) -> None:
    federation = unlike(deep_width=7)
    run = run_of(FML(alpha=alpha, beta=beta, meme="small", **LOCAL), federation, engine=engine, **SAMPLE)
    meme = layers(federation.architectures["small"].initial)
    server, clients = reference.fml(
        meme, start_of(federation), train_data(federation), plan(run), LR, alpha, beta
    )
    same(layers(run.state.server), server)
    same([layers(s) for s in states(run)], clients)


# at the first pair of energies weights travel both as factors and whole, at the second all travel whole
@pytest.mark.full
@pytest.mark.parametrize("energies", [(0.6, 0.9), (1.0, 1.0)])
def test_fedkd(energies: tuple[float, float], engine: type[Engine]) -> None:
    federation = unlike(deep_width=7)
    method = FedKD(energy_start=energies[0], energy_end=energies[1], mentee="small", **LOCAL)
    run = run_of(method, federation, engine=engine, **SAMPLE)
    task, mentee = run.task, layers(federation.architectures["small"].initial)
    projections = [method.client_init(task, i).projection.numpy().copy() for i in federation.infos]
    rounds = plan(run)
    history, mentors, projections, _ = reference.fedkd(
        mentee, start_of(federation), projections, train_data(federation), rounds, LR, energies
    )
    same(layers(run.state.server.mentee), history[-1])
    for k, state in enumerate(states(run)):
        last = max(t for t, clients in enumerate(rounds) if k in clients)
        same(layers(state.mentor), mentors[k])
        same(layers(state.mentee), history[last])
        same(state.projection, projections[k])
    factored = [isinstance(c, Factored) for update in run.state.server.updates for c in update.values()]
    assert any(factored) == (energies[0] < 1)


def test_lg_fedavg(engine: type[Engine]) -> None:
    federation = unlike()
    run = run_of(LGFedAvg(**LOCAL), federation, engine=engine, **SAMPLE)
    start = start_of(federation)
    head, bodies = reference.lg_fedavg(
        start[0][-1], [s[:-1] for s in start], train_data(federation), plan(run), LR
    )
    same(layers(run.state.server), [head])
    same([layers(s) for s in states(run)], bodies)


@pytest.mark.few(2)
@pytest.mark.parametrize("gamma", [1.0, 0.4])
def test_fd(gamma: float, engine: type[Engine]) -> None:
    federation = unlike(deep_width=7)
    run = run_of(FD(gamma=gamma, **LOCAL), federation, engine=engine, **SAMPLE)
    latest, nets = reference.fd(start_of(federation), train_data(federation), plan(run), LR, gamma, CLASSES)
    same([layers(s) for s in states(run)], nets)
    for info in federation.infos:
        own = run.state.server.latest[str(info.id)]
        assert own.labels.tolist() == sorted(latest[info.id])
        same(own.mean, np.stack([latest[info.id][j] for j in sorted(latest[info.id])]))
        targets, down = (
            reference.leave_one_out(latest, info.id, CLASSES),
            run.method.download(run.state.server, info),
        )
        assert down.known.nonzero()[:, 0].tolist() == sorted(targets)
        same(down.mean[down.known], np.stack([targets[j] for j in sorted(targets)]))


@pytest.mark.few(3)
@pytest.mark.parametrize(("lam", "weights"), [(1.0, "examples"), (0.3, "uniform")])
def test_fedproto(lam: float, weights: str, engine: type[Engine]) -> None:
    federation = unlike()
    run = run_of(FedProto(lam=lam, weighting=weights, **LOCAL), federation, engine=engine, **SAMPLE)
    known, nets = reference.fedproto(
        start_of(federation), train_data(federation), plan(run), LR, lam, weighted=weights == "examples"
    )
    same([layers(s.model) for s in states(run)], nets)
    assert run.state.server.known.nonzero()[:, 0].tolist() == sorted(known)
    same(run.state.server.mean[run.state.server.known], np.stack([known[j] for j in sorted(known)]))
    for k, state in enumerate(states(run)):
        assert state.own.nonzero()[:, 0].tolist() == sorted(set(train_data(federation)[k][1].tolist()))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("relu", "mu", "make"), [(False, 0.7, unlike), (True, 0.5, unlike), (True, 0.9, alike)]
)
def test_pfedlora(relu: bool, mu: float, make, engine: type[Engine]) -> None:
    federation = make()
    method = PFedLoRA(mu=mu, width=5, relu=relu, adapter_optimizer=SGD(lr=0.2), **LOCAL)
    run = run_of(method, federation, engine=engine, **SAMPLE)
    start = method.server_init(run.task)
    adapter = layers({"a": start.a, "a_bias": start.a_bias, "b": start.b, "b_bias": start.b_bias})
    server, nets = reference.pfedlora(
        adapter, start_of(federation), train_data(federation), plan(run), LR, 0.2, mu, relu
    )
    same(
        [run.state.server.a, run.state.server.a_bias, run.state.server.b, run.state.server.b_bias],
        [t for layer in server for t in layer],
    )
    same([layers(s) for s in states(run)], nets)


@pytest.mark.full
def test_pfedlora_trains_the_adapter_with_the_optimizer_of_the_model_unless_told_otherwise(
    engine: type[Engine],
) -> None:
    federation = unlike()
    method = PFedLoRA(mu=0.7, width=5, **LOCAL)
    run = run_of(method, federation, engine=engine, **SAMPLE)
    start = method.server_init(run.task)
    adapter = layers({"a": start.a, "a_bias": start.a_bias, "b": start.b, "b_bias": start.b_bias})
    server, _ = reference.pfedlora(
        adapter, start_of(federation), train_data(federation), plan(run), LR, LR, 0.7, False
    )
    same(
        [run.state.server.a, run.state.server.a_bias, run.state.server.b, run.state.server.b_bias],
        [t for layer in server for t in layer],
    )
