"""Routers, averages for each cluster, server optimizers; and the methods of whole models or one adaptor
beside FLoRAL."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from contract import predictor, routes
from fedlowrank.adapters.mixtures.mixture import Pairs
from fedlowrank.adapters.mixtures.router import Router
from fedlowrank.core import tree
from fedlowrank.core.contract.contribution import Aggregator
from fedlowrank.core.contract.method import Batch, ClientInfo, Pass
from fedlowrank.core.errors import ConfigError, TaskError
from fedlowrank.core.learning.optimizer import SGD, AdamW, Group, Schedule
from fedlowrank.core.learning.server_optimizer import (
    ServerOptimizerState,
    initial_optimizer_state,
    server_step,
)
from fedlowrank.data.federation import Federation
from fedlowrank.engines.engine import Engine
from fedlowrank.engines.sequential import Sequential
from fedlowrank.methods import fedem
from fedlowrank.methods.ensemble import Ensemble
from fedlowrank.methods.families.clusters import (
    by_cluster,
    cluster_means,
    cluster_weights,
    initial_models,
    known_cluster,
    losses_of,
    select_cluster,
    zero_router_logits,
)
from fedlowrank.methods.fedavg import FedAvg
from fedlowrank.methods.fedem import FedEM, shares_of_examples
from fedlowrank.methods.floral import FederatedFloral
from fedlowrank.methods.ifca import IFCA, nearest
from fedlowrank.methods.local_adaptor import LocalAdaptor
from fedlowrank.rounds.run import Run
from fedlowrank.rounds.run_settings import RunSettings
from fedlowrank.storage.client_store import ClientStore
from fedlowrank.storage.state import State
from fedlowrank.testing import check
from fedlowrank.testing.check import check_method
from fedlowrank.testing.check import small_federation as small
from fedlowrank.training import layer_rules, tensor_rules  # noqa: F401 - they add their rules to the table
from fedlowrank.training.stacked import stack
from golden import floral_reference as reference
from golden.reference import cross_entropy, fedavg, forward, softmax

from .setting import (
    CLASSES,
    INPUTS,
    SIZES,
    WIDTH,
    Net,
    alike,
    arrays,
    at,
    close,
    layers,
    plan,
    run_of,
    same,
    start_of,
    states,
    train_data,
    unlike,
)
from .test_floral import OPTIMAL, adaptors_of, clustered, opposed

LR = 0.3
LOCAL: dict[str, Any] = {"optimizer": SGD(lr=LR), "batch_size": 8, "epochs": 2}
FULL: dict[str, Any] = {"optimizer": SGD(lr=LR), "batch_size": max(SIZES), "epochs": 2}
SAMPLE = {"participation": 0.75}
KNOWN = (0, 1, 0, 2)
MODEL = WIDTH * INPUTS + WIDTH + CLASSES * WIDTH + CLASSES


def nets(models: dict[str, Tensor]) -> list[Any]:
    """Every one of C models as the reference writes it."""
    count = len(next(iter(models.values())))
    return [layers({n: t[c] for n, t in models.items()}) for c in range(count)]


# -- routers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lr": -0.1}, "router: lr and noise must be >= 0 and temperature > 0; they are -0.1"),
        ({"lr": float("nan")}, "lr and noise"),
        ({"lr": float("inf")}, "lr and noise"),
        ({"temperature": 0.0}, "temperature > 0"),
        ({"temperature": float("inf")}, "temperature > 0"),
        ({"noise": -1.0}, "noise must be >= 0"),
        ({"adapt": -1}, "router: adapt must be >= 0 and top >= 1; they are -1 and None"),
        ({"top": 0}, "adapt must be >= 0 and top >= 1; they are 10 and 0"),
        ({"top": 1}, r"top = 1 .*no gradient.*top >= 2, or update = 'mfl'"),
        ({"routing": "best"}, "routing"),
        ({"update": "adam"}, "update"),
    ],
)
def test_a_router_out_of_range_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Router(**fields)


def test_shares_are_a_softmax_at_a_temperature() -> None:
    theta = torch.tensor([0.3, -1.0, 2.0], dtype=torch.float64)
    for temperature in (0.1, 1.0, 7.0):
        e = np.exp(theta.numpy() / temperature)
        np.testing.assert_allclose(Router(temperature=temperature).shares(theta), e / e.sum(), atol=1e-14)
    assert Router(temperature=0.01).shares(theta)[2] == 1
    assert torch.equal(Router().shares(zero_router_logits({"a": torch.zeros(4, 2)})), torch.full((4,), 0.25))


def test_the_largest_are_mixed_and_of_equal_ones_the_first() -> None:
    theta = torch.tensor([0.3, -1.0, 2.0, 0.1], dtype=torch.float64)
    pi = Router(top=2).shares(theta)
    np.testing.assert_allclose(pi, reference.shares(theta.numpy(), top=2), atol=1e-14)
    assert pi[[1, 3]].tolist() == [0, 0]
    assert torch.equal(Router(top=4).shares(theta), theta.softmax(0))
    assert torch.equal(Router(top=9).shares(theta), theta.softmax(0))
    for top in (2, 3):
        assert Router(top=top).shares(torch.zeros(5)).tolist() == pytest.approx(
            [1 / top] * top + [0.0] * (5 - top)
        )
    assert Router(top=2).shares(torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0])).tolist() == [0, 0.5, 0, 0.5, 0]
    assert Router(top=1, update="mfl").shares(torch.tensor([0.0, 1.0, 1.0])).tolist() == [0, 1, 0]
    # many clients at once choose alike
    many = torch.tensor([[0.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    assert Router(top=2).shares(stack(many)).as_subclass(Tensor).tolist() == [
        [0, 0.5, 0.5, 0],
        [0.5, 0.5, 0, 0],
    ]
    # what is left out has no gradient, and no NaN
    x = theta.clone().requires_grad_()
    (Router(top=2).shares(x) ** 2).sum().backward()
    assert x.grad[[1, 3]].tolist() == [0, 0]
    assert bool(x.grad[[0, 2]].all())


def test_passes_of_a_router() -> None:
    assert list(Router().passes(Pass(2, 8))) == ["local", "router"]
    sweep = Router(adapt=7).passes(Pass(2, 8))["router"]
    assert (sweep.epochs, sweep.batch_size, sweep.steps) == (7, 8, 7)
    assert Router(adapt=0).passes(Pass(2, 8))["router"].steps == 1


def test_a_known_cluster_or_what_is_missing() -> None:
    assert known_cluster("X", ClientInfo(3, 5, "a", cluster=1), 2) == 1
    with pytest.raises(
        TaskError, match=r"^X: optimal routing needs .* of client 3 is unknown. Set \[concept\]"
    ):
        known_cluster("X", ClientInfo(3, 5, "a"), 2)
    with pytest.raises(TaskError, match=r"^X: client 3 is of cluster 2, but clusters is 2$"):
        known_cluster("X", ClientInfo(3, 5, "a", cluster=2), 2)


def test_weights_of_replies_are_shares_times_examples() -> None:
    assert cluster_weights("X", ClientInfo(0, 20, "a"), torch.tensor([0.5, 0.25, 0.25]), 3).tolist() == [
        10,
        5,
        5,
    ]
    assert cluster_weights("X", ClientInfo(1, 5, "a", cluster=2), None, 3).tolist() == [0, 0, 5]


# -- averages ------------------------------------------------------------------------------------------------


def some(seed: int, count: int = 3) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    return {
        "w": Pairs(*(torch.randn(count, n, 2, generator=g, dtype=torch.float64) for n in (5, 4))),
        "b": torch.randn(count, 5, generator=g, dtype=torch.float64),
    }


def cluster_mean(old: Any, ups: Any, weights: Any) -> Any:
    aggregator = Aggregator(range(len(ups)))
    for k, (up, of_clusters) in enumerate(zip(ups, weights, strict=True)):
        aggregator.add(k, by_cluster(up, torch.tensor(of_clusters, dtype=torch.float64)))
    return cluster_means(old, aggregator.finish())


def test_the_mean_of_each_cluster_by_hand() -> None:
    old, ups = some(0), [some(1), some(2)]
    weights = [[4.0, 0.0, 1.0], [12.0, 0.0, 0.5]]
    found = cluster_mean(old, ups, weights)
    for (_, o), (_, f), (_, a), (_, b) in zip(*map(tree.leaves, (old, found, *ups)), strict=True):
        torch.testing.assert_close(f[0], 0.25 * a[0] + 0.75 * b[0], rtol=0, atol=1e-14)
        assert torch.equal(f[1], o[1])
        torch.testing.assert_close(f[2], (2 * a[2] + b[2]) / 3, rtol=0, atol=1e-14)
    # nothing was changed in place
    assert tree.equal(old, some(0))
    assert tree.equal(ups[0], some(1))


def test_a_lone_cluster_counts_for_its_own_alone() -> None:
    old, ups = some(0), [select_cluster(some(1), 1), select_cluster(some(2), 1), some(3)]
    found = cluster_mean(old, ups, [[0.0, 3.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 2.0]])
    for (_, o), (_, f), (_, a), (_, b), (_, c) in zip(*map(tree.leaves, (old, found, *ups)), strict=True):
        assert a.shape[0] == b.shape[0] == 1
        assert torch.equal(f[0], o[0])
        torch.testing.assert_close(f[1], (3 * a[0] + b[0]) / 4, rtol=0, atol=1e-14)
        assert torch.equal(f[2], c[2])


def test_next_to_no_weight_leaves_a_cluster_as_it_was() -> None:
    old = some(0)
    for little, kept in ((1e-6, True), (1e-2, False)):
        found = cluster_mean(old, [some(1)], [[50.0, little, 50.0]])
        assert tree.equal(select_cluster(found, 1), select_cluster(old, 1)) == kept
        assert tree.equal(select_cluster(found, 1), select_cluster(some(1), 1)) != kept


def test_one_cluster_of_a_tree() -> None:
    value = some(0)
    assert torch.equal(select_cluster(value, 2)["w"].u, value["w"].u[2:])
    assert torch.equal(select_cluster(value, 0)["b"], value["b"][:1])


# -- models that begin ---------------------------------------------------------------------------------------


def test_models_begin_at_different_draws_of_which_the_first_is_everyones() -> None:
    federation = alike()
    task = federation.task(3)
    models = initial_models("X", task, 3)
    first = federation.architectures["small"].initial
    assert tree.equal({n: t[0] for n, t in models.items()}, first)
    for n, t in models.items():
        assert t.shape == (3, *first[n].shape)
        assert not torch.equal(t[0], t[1])
        assert not torch.equal(t[1], t[2])
        # of one spread, for they are drawn by the same rule
        assert 0.5 < float(t[1].std() / t[0].std()) < 2
    made = [m(clusters=3).server_init(task) for m in (Ensemble, FedEM, IFCA)]
    assert all(tree.equal(m, models) for m in made)
    # how many there are changes none of them
    assert tree.equal({n: t[:2] for n, t in models.items()}, initial_models("X", task, 2))


@pytest.mark.parametrize("method", [Ensemble, FederatedFloral])
def test_the_settings_of_the_router_are_no_group_of_the_optimizer(method: Any) -> None:
    with pytest.raises(
        ConfigError, match=rf"{method.title}: optimizer.groups.theta does nothing.* router.lr"
    ):
        method(optimizer=SGD(groups={"theta": Group(lr=50.0)}))


@pytest.mark.parametrize(
    "method", [Ensemble(clusters=0), FedEM(clusters=0), IFCA(clusters=-1)], ids=lambda m: m.title
)
def test_there_is_at_least_one_model(method: Any) -> None:
    with pytest.raises(ConfigError, match=f"{method.title}.*clusters"):
        run_of(method, alike(), steps=0)


@pytest.mark.parametrize("method", [Ensemble(), FedEM(), IFCA(), LocalAdaptor()], ids=lambda m: m.title)
def test_unequal_models_are_refused_by_name(method: Any) -> None:
    with pytest.raises(TaskError, match=f"{method.title} averages whole models"):
        run_of(method, unlike(), steps=0)


def test_losses_of_all_models() -> None:
    federation = alike()
    models = initial_models("X", federation.task(3), 3)
    data = federation.clients[2].train
    found = losses_of(federation.architectures["small"], models, Batch(data.x, data.y))
    x, y = train_data(federation)[2]
    for c, net in enumerate(nets(models)):
        p = softmax(forward(net, x)[1])[np.arange(len(y)), y]
        np.testing.assert_allclose(found[:, c], -np.log(p), atol=1e-12)


# -- the servers' optimizers ---------------------------------------------------------------------------------


def replay(optimizer: Any, made: Any, rounds: int = 6, scheduler: Any = None) -> None:
    """The same pseudo-gradients through :func:`server_step` and through an optimizer of torch."""
    g = torch.Generator().manual_seed(0)
    value: Any = {
        "a": torch.randn(4, 3, generator=g, dtype=torch.float64),
        "b": [torch.ones(2, dtype=torch.float64)],
    }
    params = [t.clone().requires_grad_() for _, t in tree.leaves(value)]
    theirs, memory = made(params), initial_optimizer_state()
    for t in range(rounds):
        mean = tree.map_leaves(lambda x: x + torch.randn(x.shape, generator=g, dtype=torch.float64), value)
        before, kept = tree.encode(value), tree.encode(memory)
        for p, (_, m) in zip(params, tree.leaves(mean), strict=True):
            p.grad = p.detach() - m
        theirs.step()
        if scheduler is not None:
            theirs.param_groups[0]["lr"] *= scheduler
        new, after = server_step(optimizer, value, mean, memory, t)
        assert (before, kept) == (tree.encode(value), tree.encode(memory))
        assert after.count == t + 1
        value, memory = new, after
        for p, (_, found) in zip(params, tree.leaves(value), strict=True):
            torch.testing.assert_close(found, p.detach(), rtol=0, atol=1e-12)


def test_the_servers_adam_is_that_of_torch() -> None:
    settings = {"lr": 0.05, "eps": 1e-6, "weight_decay": 0.1}
    replay(
        AdamW(beta1=0.8, beta2=0.95, **settings),
        lambda p: torch.optim.AdamW(p, betas=(0.8, 0.95), **settings),
    )
    halved = Schedule(kind="exponential", factor=0.5)
    replay(AdamW(schedule=halved, **settings), lambda p: torch.optim.AdamW(p, **settings), scheduler=0.5)


def test_the_servers_sgd_is_that_of_torch() -> None:
    for settings in ({"lr": 0.4}, {"lr": 1.0, "momentum": 0.7}, {"lr": 1.0, "weight_decay": 0.1}):
        replay(SGD(**settings), lambda p, s=settings: torch.optim.SGD(p, **s))


def test_a_plain_step_of_one_is_the_mean_itself() -> None:
    old, mean = some(0), some(1)
    memory = initial_optimizer_state()
    found, after = server_step(SGD(lr=1.0), old, mean, memory, 3)
    assert all(a is b for a, b in zip(tree.tensors(found), tree.tensors(mean), strict=True))
    assert after is memory
    # and so it is up to rounding by the long way
    other, _ = server_step(SGD(lr=1.0, nesterov=False, schedule=Schedule(warmup=1)), old, mean, memory, 3)
    close(other, mean)


def test_groups_of_a_servers_optimizer_are_paths_of_its_tree() -> None:
    old, mean = some(0), some(1)
    found, _ = server_step(SGD(lr=1.0, groups={"w": Group(lr=0.0)}), old, mean, initial_optimizer_state(), 0)
    assert tree.equal(found["w"], old["w"])
    close(found["b"], mean["b"])
    with pytest.raises(
        ConfigError, match=r"groups: \['x'\] match no parameter; the tree begins with \['b', 'w'\]"
    ):
        server_step(SGD(lr=1.0, groups={"x": Group(lr=0.0)}), old, mean, initial_optimizer_state(), 0)


def test_a_servers_optimizer_clips() -> None:
    old, mean = some(0), some(1)
    found, _ = server_step(SGD(lr=0.5, clip=0.01), old, mean, initial_optimizer_state(), 0)
    moved = sum(
        float((a - b).square().sum()) for (_, a), (_, b) in zip(*map(tree.leaves, (old, found)), strict=True)
    )
    assert moved**0.5 == pytest.approx(0.005, rel=1e-3)


def test_the_memory_of_a_server_survives_its_bytes() -> None:
    old, mean = some(0), some(1)
    _, memory = server_step(AdamW(lr=0.1), old, mean, initial_optimizer_state(), 0)
    assert isinstance(memory, ServerOptimizerState)
    assert tree.equal(tree.decode(tree.encode(memory)), memory)
    assert len(memory.tensors) == 2


# -- Local Adaptor -------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize(("alpha", "precondition"), [(1.0, True), (1.6, False), (0.5, True)])
def test_local_adaptor(alpha: float, precondition: bool, engine: type[Engine]) -> None:
    federation = alike()
    method = LocalAdaptor(rank=2, alpha=alpha, precondition=precondition, **LOCAL)
    run = run_of(method, federation, engine=engine, **SAMPLE)
    own = [adaptors_of(method.client_init(run.task, i)) for i in federation.infos]
    net, own = reference.local_adaptor(
        start_of(federation)[0],
        own,
        train_data(federation),
        plan(run),
        LR,
        alpha=alpha,
        precondition=precondition,
    )
    same(layers(run.state.server), net)
    for k, state in enumerate(states(run)):
        same(adaptors_of(state), own[k])
        same(layers(run.personal(federation.infos[k])), reference.mixed(net, own[k], np.ones(1), alpha))


@pytest.mark.full
def test_a_frozen_local_adaptor_is_fedavg_and_none_is_sent() -> None:
    frozen = {**LOCAL, "optimizer": SGD(lr=LR, groups={"adaptors": Group(lr=0.0)})}
    run = run_of(LocalAdaptor(rank=2, **frozen), alike(), steps=0, **SAMPLE)
    records = [run.step() for _ in range(3)]
    close(run.state.server, run_of(FedAvg(**LOCAL), alike(), **SAMPLE).state.server)
    assert all(r.parameters_up == r.parameters_down == 3 * MODEL for r in records)


# -- Ensemble ------------------------------------------------------------------------------------------------


@pytest.mark.few(2)
@pytest.mark.parametrize("mixed", ["outputs", "weights"])
@pytest.mark.parametrize("known", [None, KNOWN], ids=["learned", "optimal"])
def test_ensemble(mixed: str, known: Any, engine: type[Engine]) -> None:
    federation = alike(cluster=KNOWN)
    router = Router(lr=0.7) if known is None else OPTIMAL
    method = Ensemble(clusters=3, mixed=mixed, router=router, **LOCAL)
    run = run_of(method, federation, engine=engine, **SAMPLE)
    models, thetas = reference.ensemble(
        nets(method.server_init(run.task)), train_data(federation), plan(run), LR, router_lr=0.7,
        outputs=mixed == "outputs", known=known,
    )  # fmt: skip
    same(nets(run.state.server), models)
    for k, state in enumerate(states(run)):
        pi = np.eye(3)[known[k]] if known else reference.shares(thetas[k])
        if known is None:
            same(state, thetas[k])
        same(routes(run.method, *at(run, k)).double(), pi)
        x = train_data(federation)[k][0]
        scores = sum(p * forward(net, x)[1] for p, net in zip(pi, models, strict=True))
        if mixed == "weights":
            whole = reference.summed([reference.scaled(net, p) for net, p in zip(models, pi, strict=True)])
            scores = forward(whole, x)[1]
            same(layers(run.personal(federation.infos[k])), whole)
        else:
            same(layers(run.personal(federation.infos[k])), models[int(pi.argmax())])
        same(predictor(run.method, *at(run, k))(federation.clients[k].train.x).detach(), scores)


def alone(models: dict[str, Tensor], c: int, members: list[int]) -> Run:
    """FedAvg of these clients from the c-th of C models; with full batches the order of examples does not
    matter."""
    parts = arrays()
    run = run_of(FedAvg(**FULL), alike(clients=[parts[k] for k in members]), steps=0)
    run.state = State(0, {n: t[c].clone() for n, t in models.items()}, ClientStore())
    for _ in range(3):
        run.step()
    return run


@pytest.mark.full
@pytest.mark.parametrize("method", [Ensemble, FedEM, IFCA])
@pytest.mark.parametrize(
    "optimizer", [SGD(lr=0.2, momentum=0.9, weight_decay=0.01, clip=0.5), AdamW(lr=0.01)]
)
def test_a_single_model_is_fedavg(method: Any, optimizer: Any) -> None:
    settings = {"optimizer": optimizer, "batch_size": 8, "epochs": 2}
    a, b = (
        run_of(method(clusters=1, **settings), alike(), **SAMPLE),
        run_of(FedAvg(**settings), alike(), **SAMPLE),
    )
    close({n: t[0] for n, t in a.state.server.items()}, b.state.server)
    for k, info in enumerate(a.federation.infos):
        close(a.personal(info), b.state.server)
        assert routes(a.method, *at(a, k)).tolist() == [1]
        x = a.federation.clients[k].test.x
        found = predictor(a.method, *at(a, k))(x).detach()
        close(found.log_softmax(-1), predictor(b.method, *at(b, k))(x).detach().log_softmax(-1))


# -- FedEM ---------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_fedem(engine: type[Engine]) -> None:
    federation = alike()
    run = run_of(FedEM(clusters=3, **LOCAL), federation, engine=engine, **SAMPLE)
    start = nets(run.method.server_init(run.task))
    models, pis = reference.fedem(start, train_data(federation), plan(run), LR)
    same(nets(run.state.server), models)
    same(states(run), [pis[k] for k in range(len(SIZES))])
    for k, info in enumerate(federation.infos):
        same(routes(run.method, *at(run, k)), pis[k])
        same(layers(run.personal(info)), models[int(pis[k].argmax())])
        x = train_data(federation)[k][0]
        mixture = sum(p * softmax(forward(net, x)[1]) for p, net in zip(pis[k], models, strict=True))
        same(predictor(run.method, *at(run, k))(federation.clients[k].train.x).detach(), np.log(mixture))
    assert max(abs(pi - 1 / 3).max() for pi in pis.values()) > 0.05


@pytest.mark.full
def test_the_recorded_accuracy_of_fedem_is_that_of_the_mixture() -> None:
    federation = alike()
    run = run_of(FedEM(clusters=3, **LOCAL), federation, steps=2)
    record = run.step()
    models = nets(run.state.server)
    for k, data in enumerate(federation.clients):
        x, y = data.test.x.double().numpy(), data.test.y.numpy()
        pi = run.state.clients[k].numpy()
        mixture = sum(p * softmax(forward(net, x)[1]) for p, net in zip(pi, models, strict=True))
        assert record.values("accuracy", "test", "personal")[k] == (mixture.argmax(1) == y).mean()
        assert record.values("loss", "test", "personal")[k] == pytest.approx(
            -np.log(mixture[np.arange(len(y)), y]).mean(), rel=1e-5
        )
        assert [record.values("route", "", str(c))[k] for c in range(3)] == pytest.approx(pi, abs=1e-4)


@pytest.mark.parametrize("adapt", [0, 1, 10])
def test_a_newcomer_takes_em_steps_on_its_shares_alone(adapt: int) -> None:
    federation = alike()
    run = run_of(FedEM(clusters=3, adapt=adapt, **LOCAL), federation, steps=1, participation=0.5)
    k = next(i for i in range(len(SIZES)) if i not in run.state.clients)
    pi = np.full(3, 1 / 3)
    for _ in range(adapt):
        pi = reference.likelihoods(nets(run.state.server), pi, *train_data(federation)[k]).mean(0)
    same(routes(run.method, *at(run, k)), pi)
    assert (abs(pi - 1 / 3).max() > 1e-3) == (adapt > 0)


@pytest.mark.full
def test_the_shares_of_examples_hold_while_the_models_move() -> None:
    # with one step a round or many, the weights of the examples are those of the models received
    federation = alike()
    a, b = (
        run_of(FedEM(clusters=2, optimizer=SGD(lr=LR), batch_size=n, epochs=1), federation, rounds=1)
        for n in (4, max(SIZES))
    )
    assert not torch.allclose(a.state.server["head.weight"], b.state.server["head.weight"], atol=1e-3)
    for k in range(len(SIZES)):
        assert torch.equal(a.state.clients[k], b.state.clients[k])


@pytest.mark.full
def test_fedem_keeps_its_shares_and_sends_every_component() -> None:
    run = run_of(FedEM(clusters=3, **LOCAL), alike(), steps=0, **SAMPLE)
    for _ in range(2):
        record = run.step()
        assert record.parameters_up == record.parameters_down == 3 * 3 * MODEL
    state, down, view = at(run, 0)
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
    run = run_of(FedEM(clusters=2, **LOCAL), federation, rounds=1)
    start = nets(run.method.server_init(run.task))
    for k, info in enumerate(federation.infos):
        x, y = federation.clients[k].train.x.double().numpy(), federation.clients[k].train.y.double().numpy()
        density = np.stack([np.exp(-((forward(net, x)[1] - y) ** 2).sum(1) / 2) for net in start], 1)
        pi = (density / density.sum(1, keepdims=True)).mean(0)
        same(run.state.clients[info.id], pi)
        mean = sum(p * forward(net, x)[1] for p, net in zip(pi, nets(run.state.server), strict=True))
        same(predictor(run.method, *at(run, k))(federation.clients[k].train.x).detach(), mean)


class Wet(Net):
    """A model with dropout before its head."""

    def __init__(self, modes: list[bool]) -> None:
        super().__init__(WIDTH)
        self.body.append(nn.Dropout(0.5))
        self.modes = modes

    def forward(self, x: Tensor) -> Tensor:
        self.modes.append(self.training)
        return super().forward(x)


def test_the_shares_of_examples_in_fedem_are_without_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[Tensor, Tensor, Any]] = []

    def recorded(model: Any, models: Any, pi: Tensor, batch: Any) -> Tensor:
        q = shares_of_examples(model, models, pi, batch)
        found.append((q.detach(), batch.x, batch.y))
        return q

    monkeypatch.setattr(fedem, "shares_of_examples", recorded)
    modes: list[bool] = []
    federation = Federation.from_arrays(arrays(), lambda: Wet(modes), classes=CLASSES)
    modes.clear()
    run = run_of(FedEM(clusters=2, **LOCAL), federation, rounds=1)
    start = nets(run.method.server_init(run.task))
    assert len(found) > 2 * len(SIZES)
    for q, x, y in found:
        scores = [torch.from_numpy(forward(net, x.double().numpy())[1]) for net in start]
        losses = torch.stack([functional.cross_entropy(z, y, reduction="none") for z in scores], 1)
        torch.testing.assert_close(q, (-losses).softmax(1), rtol=0, atol=1e-9)
    # the trained components are in training mode
    assert True in modes[modes.index(True) + 2 :]


def test_fedem_counts_steps_of_em() -> None:
    with pytest.raises(ConfigError, match="FedEM: adapt must be >= 0; it is -1"):
        FedEM(adapt=-1)


def test_an_impossible_component_stays_impossible_and_makes_no_nan() -> None:
    run = run_of(FedEM(clusters=2, **LOCAL), alike(), rounds=1)
    _, down, view = at(run, 0)
    one = torch.tensor([1.0, 0.0], dtype=torch.float64)
    after, up = run.method.local_update(one, down, view)
    assert after.tolist() == [1, 0]
    assert tree.equal({n: t[1] for n, t in up.items()}, {n: t[1] for n, t in down.items()})
    x = run.federation.clients[0].test.x
    alone = view.model.apply({n: t[0] for n, t in down.items()}, x).log_softmax(-1)
    close(predictor(run.method, one, down, view)(x), alone)


# -- IFCA ----------------------------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize("weights", ["examples", "uniform"])
def test_ifca(weights: str, engine: type[Engine]) -> None:
    federation = alike()
    method = IFCA(clusters=2, weighting=weights, **LOCAL)
    run = run_of(method, federation, engine=engine, **SAMPLE)
    models, chosen = reference.ifca(
        nets(method.server_init(run.task)), train_data(federation), plan(run), LR, weights == "examples"
    )
    # both models have members in some round, and one has several
    assert {c for row in chosen for c in row} == {0, 1}
    assert any(row.count(c) > 1 for row in chosen for c in row)
    same(nets(run.state.server), models)
    assert all(s is None for s in states(run))
    for k, info in enumerate(federation.infos):
        own = int(
            np.argmin(
                [
                    cross_entropy(forward(net, x)[1], y)
                    for net in models
                    for x, y in [train_data(federation)[k]]
                ]
            )
        )
        same(layers(run.personal(info)), models[own])
        assert routes(method, *at(run, k)).tolist() == np.eye(2)[own].tolist()
        assert nearest(*at(run, k)[1:]) == own


def test_ifca_sends_all_models_down_and_one_up() -> None:
    run = run_of(IFCA(clusters=3, **LOCAL), alike(), steps=1)
    state, down, view = at(run, 2)
    _, up = run.method.local_update(state, down, view)
    assert {p: tuple(t.shape) for p, t in tree.leaves(up)} == {
        **{f"/model{p}": (1, *t.shape[1:]) for p, t in tree.leaves(down)},
        "/choice": (3,),
    }
    assert sorted(up.choice.tolist()) == [0, 0, 1]
    record = run.step()
    assert record.parameters_down == 4 * 3 * MODEL
    assert record.parameters_up == 4 * (MODEL + 3)


def test_a_model_that_nobody_picks_stays_bit_for_bit() -> None:
    run = run_of(IFCA(clusters=2, **LOCAL), alike(), steps=0)
    # a model that no one could want
    awful = {n: torch.stack([t[0], t[1] + 5]) for n, t in run.state.server.items()}
    run.state = State(0, awful, ClientStore())
    for _ in range(3):
        run.step()
    assert tree.equal(select_cluster(run.state.server, 1), select_cluster(awful, 1))
    # so the other is FedAvg's
    wanted = fedavg(start_of(run.federation)[0], train_data(run.federation), plan(run), LR)
    same(nets(run.state.server)[0], wanted)


def test_separated_clusters_stay_fedavg_runs_of_their_own() -> None:
    # from models that each cluster has learnt already, every client goes on picking its own
    federation = opposed()
    method = IFCA(clusters=2, batch_size=8, optimizer=SGD(lr=0.5))
    run = Run(method, federation, RunSettings(rounds=6, unseen=0.34), Sequential())
    w = torch.tensor([[-1.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
    models = {"head.weight": torch.stack([w, -w]), "head.bias": torch.zeros(2, 2, dtype=torch.float64)}
    run.state = State(0, models, ClientStore())
    for _ in range(3):
        record = run.step()
        for c in range(2):
            assert record.values("route", "", str(c)) == [float(c == k % 2) for k in range(6)]
    assert all(a > 0.9 for a in record.values("accuracy", "test", "personal"))
    assert not run.draws.unseen & set(run.state.clients)


@pytest.mark.full
@pytest.mark.parametrize(
    "method",
    [FedEM(clusters=2, adapt=40), Ensemble(clusters=2, router=Router(lr=2.0, adapt=60))],
    ids=lambda m: m.title,
)
def test_an_unseen_client_finds_its_cluster(method: Any) -> None:
    run = Run(method, opposed(), RunSettings(rounds=3, unseen=0.34), Sequential())
    w = torch.tensor([[-4.0, 0.0], [4.0, 0.0]], dtype=torch.float64)
    run.state = State(
        0,
        {"head.weight": torch.stack([w, -w]), "head.bias": torch.zeros(2, 2, dtype=torch.float64)},
        ClientStore(),
    )
    record = run.start()
    for k in range(6):
        assert record.values("route", "", str(k % 2))[k] > 0.9
    assert all(a == 1 for a in record.values("accuracy", "test", "personal"))
    while run.round < 3:
        assert not run.draws.unseen & set(run.step().participants)


# -- the battery and bad input -------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "method",
    [
        Ensemble(clusters=2, router=OPTIMAL),
        Ensemble(clusters=2, mixed="weights", router=Router(update="mfl", lr=2.0, keep=False)),
        FedEM(clusters=2, adapt=0),
        IFCA(clusters=2, weighting="uniform"),
    ],
    ids=["optimal", "mfl", "fedem", "ifca"],
)
def test_every_form_passes_every_check(method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedlowrank.testing.check.small_federation", clustered(small))
    # that its steps are the formulas' is tested above, entry by entry
    rest = {name: test for name, test in check._CHECKS.items() if name != "it learns"}
    monkeypatch.setattr(check, "_CHECKS", rest)
    found = {f.name: f.detail for f in check_method(method) if not f.ok}
    assert found == {}


def test_an_ensemble_with_known_routes_needs_known_clusters() -> None:
    with pytest.raises(TaskError, match=r"Ensemble: optimal routing needs .* client 0 is unknown"):
        run_of(Ensemble(router=OPTIMAL), alike(), steps=0)
    with pytest.raises(TaskError, match="Ensemble: client 3 is of cluster 2, but clusters is 2"):
        run_of(Ensemble(clusters=2, router=OPTIMAL), alike(cluster=KNOWN), steps=0)


@pytest.mark.parametrize("make", [Ensemble, IFCA])
def test_choices_are_checked(make: Any) -> None:
    name = "mixed" if make is Ensemble else "weighting"
    with pytest.raises(ConfigError, match=name):
        make(**{name: "both"})
