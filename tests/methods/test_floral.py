"""FLoRAL: against NumPy, in its limits, what crosses the wire, and clients that never trained."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from contract import personal, routes
from fedlowrank.adapters.mixtures.mixture import Pairs
from fedlowrank.adapters.mixtures.router import Router
from fedlowrank.core import tree
from fedlowrank.core.errors import ConfigError, TaskError
from fedlowrank.core.learning.optimizer import SGD, AdamW, Group, Schedule
from fedlowrank.data.federation import Federation
from fedlowrank.engines.engine import Engine, client_key, client_view
from fedlowrank.engines.sequential import Sequential
from fedlowrank.methods.families.clusters import select_cluster
from fedlowrank.methods.fedavg import FedAvg
from fedlowrank.methods.floral import FederatedFloral
from fedlowrank.methods.local_adaptor import LocalAdaptor
from fedlowrank.rounds.run import Run
from fedlowrank.rounds.run_settings import RunSettings
from fedlowrank.storage.client_store import ClientStore
from fedlowrank.storage.state import State
from fedlowrank.testing import check
from fedlowrank.testing.check import check_method
from fedlowrank.testing.check import small_federation as small
from golden import floral_reference as reference

from .setting import (
    CLASSES,
    INPUTS,
    SIZES,
    WIDTH,
    alike,
    arrays,
    layers,
    order_of,
    plan,
    run_of,
    same,
    start_of,
    states,
    train_data,
)

LR = 0.3
LOCAL: dict[str, Any] = {"optimizer": SGD(lr=LR), "batch_size": 8, "epochs": 2}
SAMPLE = {"participation": 0.75}
F32 = {"dtype": torch.float32}
KNOWN = (0, 1, 0, 2)
OPTIMAL = Router(routing="optimal")
NAMES = ("body.0", "head")


def adaptors_of(values: dict[str, Any]) -> reference.Adaptors:
    """As the reference writes them: (U, V, offset of the bias) a layer, each with the axis of clusters."""
    out = []
    for name in NAMES:
        pairs, offset = values[f"{name}.weight"], values[f"{name}.bias"]
        out.append(tuple(t.detach().double().numpy().copy() for t in (pairs.u, pairs.v, offset)))
    return out


def dense(adaptors: reference.Adaptors) -> list[Any]:
    """What the factors multiply to, where their signs are nobody's business."""
    return [(u @ v.transpose(0, 2, 1), b) for u, v, b in adaptors]


def golden(
    method: FederatedFloral, engine: type[Engine], products: bool = False, **wanted: Any
) -> tuple[Run, Any]:
    """Three rounds of a run and of the reference, server and θ compared."""
    federation = alike(cluster=KNOWN)
    run = run_of(method, federation, engine=engine, **SAMPLE)
    adaptors = adaptors_of(method.server_init(run.task).model["adaptors"])
    assert any(u.any() for u, _, _ in adaptors)
    net, a, thetas = reference.floral(
        start_of(federation)[0], adaptors, train_data(federation), plan(run), LR, alpha=method.alpha, **wanted
    )
    same(layers(run.state.server.model["base"]), net)
    found = adaptors_of(run.state.server.model["adaptors"])
    same(dense(found) if products else found, dense(a) if products else a)
    for k, state in enumerate(states(run)):
        if state is not None:
            same(state, thetas[k])
    return run, thetas


# -- against NumPy -------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize(
    ("router", "wanted"),
    [
        ({"lr": 0.7}, {"router_lr": 0.7}),
        ({"lr": 0.7, "temperature": 0.25}, {"router_lr": 0.7, "temperature": 0.25}),
        ({"lr": 0.7, "temperature": 3.0}, {"router_lr": 0.7, "temperature": 3.0}),
        ({"lr": 0.7, "top": 2}, {"router_lr": 0.7, "top": 2}),
    ],
    ids=["plain", "cold", "warm", "top"],
)
def test_a_learned_router(router: dict[str, Any], wanted: dict[str, Any], engine: type[Engine]) -> None:
    method = FederatedFloral(clusters=3, rank=2, alpha=1.7, router=Router(**router), **LOCAL)
    run, _ = golden(method, engine, **wanted)
    shares = [method.router.shares(s) for s in states(run)]
    assert all(float(pi.sum()) == pytest.approx(1) for pi in shares)
    # the router has moved, or half of this would test nothing
    assert max(float(pi.max() - pi.min()) for pi in shares) > 0.005
    if method.router.top == 2:
        assert any(int((pi == 0).sum()) == 1 for pi in shares)


@pytest.mark.full
def test_the_mfl_router_weighs_the_averaged_models(engine: type[Engine]) -> None:
    """Eq. 4 and 5: π of the models received, unchanged by training and used in the average; even in the first
    round."""
    method = FederatedFloral(clusters=3, rank=2, alpha=1.7, router=Router(lr=4.0, update="mfl"), **LOCAL)
    run, thetas = golden(method, engine, router_lr=4.0, mfl=True)
    assert all(s is None for s in states(run))
    model = run.state.server.model
    net, adaptors = layers(model["base"]), adaptors_of(model["adaptors"])
    for info, (x, y) in zip(run.federation.infos, train_data(run.federation), strict=True):
        theta = reference.mfl_router(net, adaptors, x, y, 4.0, 1.0, 1.7)
        pi = reference.shares(theta, 1.0, None)
        assert pi.max() - pi.min() > 0.02
        np.testing.assert_allclose(run.local_model(info).client_model.routes, pi, rtol=1e-9)
        if info.id in thetas:
            # what went into the last average is of the models before
            assert np.abs(reference.shares(thetas[info.id], 1.0, None) - pi).max() > 1e-3


@pytest.mark.full
@pytest.mark.parametrize("precondition", [True, False])
@pytest.mark.parametrize("alpha", [1.0, 0.4])
def test_preconditioning_and_alpha(precondition: bool, alpha: float) -> None:
    method = FederatedFloral(
        clusters=2, rank=1, alpha=alpha, precondition=precondition, router=Router(lr=0.5), **LOCAL
    )
    golden(method, Sequential, router_lr=0.5, precondition=precondition)


@pytest.mark.full
def test_ranks_of_single_layers_epsilon_and_the_initial_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    more: dict[str, Any] = {"rank_pattern": {"head": 2}, "eps": 0.05, "initial_scale": 0.25}
    method = FederatedFloral(clusters=2, rank=1, router=Router(lr=0.5), **more, **LOCAL)
    monkeypatch.setattr(reference, "EPS", 0.05)
    run, _ = golden(method, Sequential, router_lr=0.5)
    first = method.server_init(run.task).model["adaptors"]
    for name, rank, columns in (("body.0.weight", 1, INPUTS), ("head.weight", 2, WIDTH)):
        assert first[name].u.shape[-1] == first[name].v.shape[-1] == rank
        bound = 0.25 * (6 / columns) ** 0.5
        assert 0.8 * bound < float(first[name].u.abs().max()) <= bound


@pytest.mark.full
def test_weight_decay_leaves_the_router_alone(engine: type[Engine]) -> None:
    local = {**LOCAL, "optimizer": SGD(lr=LR, weight_decay=0.05)}
    golden(
        FederatedFloral(clusters=2, rank=2, router=Router(lr=0.9), **local), engine, router_lr=0.9, decay=0.05
    )


@pytest.mark.full
def test_optimal_routing(engine: type[Engine]) -> None:
    run, _ = golden(
        FederatedFloral(clusters=3, rank=2, alpha=1.3, router=OPTIMAL, **LOCAL), engine, known=list(KNOWN)
    )
    assert all(s is None for s in states(run))


@pytest.mark.full
def test_a_client_without_memory_learns_its_router_anew(engine: type[Engine]) -> None:
    method = FederatedFloral(clusters=3, rank=2, router=Router(lr=0.7, keep=False), **LOCAL)
    run, _ = golden(method, engine, router_lr=0.7, keep=False)
    assert all(s is None for s in states(run))


@pytest.mark.full
def test_noise_on_the_router_comes_from_its_named_key(engine: type[Engine]) -> None:
    federation, std = alike(cluster=KNOWN), 0.8
    method = FederatedFloral(clusters=3, rank=2, router=Router(lr=0.7, noise=std), **LOCAL)
    rounds = plan(run_of(method, federation, steps=0, **SAMPLE))

    def drawn(t: int, k: int, steps: int) -> np.ndarray:
        key = client_key(federation, k, t) / "noise"
        uniform = torch.rand(steps, 3, generator=key.generator(), dtype=torch.float64).numpy()
        return (2 * uniform - 1) * std * np.sqrt(3)

    noise = [
        {k: drawn(t, k, len(steps)) for k, (steps, _) in clients.items()} for t, clients in enumerate(rounds)
    ]
    golden(method, engine, router_lr=0.7, noise=noise)


def test_noise_has_the_standard_deviation_asked_for() -> None:
    federation = small(False)
    noises = Router(noise=0.5).noises(federation.key, 4000, torch.zeros(3))
    assert float(noises.std()) == pytest.approx(0.5, rel=0.02)
    assert float(noises.abs().max()) <= 0.5 * np.sqrt(3)
    assert abs(float(noises.mean())) < 0.02
    assert not Router().noises(federation.key, 4000, torch.zeros(3)).any()


@pytest.mark.few(1)
@pytest.mark.parametrize("alpha", [1.0, 1.7])
def test_centering_by_numpy(alpha: float, engine: type[Engine]) -> None:
    method = FederatedFloral(clusters=3, rank=2, alpha=alpha, center=True, router=Router(lr=0.7), **LOCAL)
    run, thetas = golden(method, engine, products=True, router_lr=0.7, center=True)
    # and the mean offset has gone into the base
    last = plan(run)[-1]
    p = sum(len(train_data(run.federation)[k][1]) * reference.shares(thetas[k]) for k in last)
    for _, _, b in adaptors_of(run.state.server.model["adaptors"]):
        np.testing.assert_allclose(p @ b / p.sum(), 0, atol=1e-10)


@pytest.mark.full
@pytest.mark.parametrize("which", ["sgd", "adam"])
def test_a_server_optimizer(which: str, engine: type[Engine]) -> None:
    optimizer: Any = SGD(lr=0.6, momentum=0.5)
    server = reference.server_sgd(0.6, 0.5)
    if which == "adam":
        optimizer = AdamW(lr=0.02, beta1=0.8, beta2=0.95, eps=1e-4, weight_decay=0.0)
        server = reference.server_adam(0.02, 0.8, 0.95, 1e-4)
    method = FederatedFloral(clusters=3, rank=2, router=Router(lr=0.7), server_optimizer=optimizer, **LOCAL)
    run, _ = golden(method, engine, router_lr=0.7, server=server)
    assert run.state.server.optimizer_state.count == 3


def test_the_inference_of_a_newcomer_learns_its_router_on_the_frozen_mixture() -> None:
    federation = alike(cluster=KNOWN)
    router = Router(lr=0.9, adapt=4, temperature=0.5)
    method = FederatedFloral(clusters=3, rank=2, alpha=1.7, router=router, **LOCAL)
    run = run_of(method, federation, steps=1, participation=0.5)
    # one of those that did not take part in the first round
    k = next(i for i in range(len(SIZES)) if i not in run.state.clients)
    info, t = federation.infos[k], run.round
    view = client_view(federation, run.task, t, info, run.engine.trainer(method, federation, t, info))
    net, a = layers(run.state.server.model["base"]), adaptors_of(run.state.server.model["adaptors"])
    _, steps = order_of(run, t, info)
    assert len(steps) == 4
    _, _, theta = reference.floral_client(
        net, a, np.zeros(3), *train_data(federation)[k], steps, 0.0, router_lr=0.9, alpha=1.7, precondition=False,
        temperature=0.5, freeze=True,
    )  # fmt: skip
    pi = reference.shares(theta, 0.5)
    same(routes(method, None, run.state.server.model, view), pi)
    same(layers(personal(method, None, run.state.server.model, view)), reference.mixed(net, a, pi, 1.7))
    assert abs(pi - 1 / 3).max() > 1e-4
    even = dataclasses.replace(method, router=dataclasses.replace(router, adapt=0))
    same(routes(even, None, run.state.server.model, view), np.full(3, 1 / 3))


# -- limits --------------------------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize("base", [SGD(lr=0.2), SGD(lr=0.1, momentum=0.9, weight_decay=0.01), AdamW(lr=0.01)])
@pytest.mark.parametrize("precondition", [True, False])
def test_one_frozen_cluster_is_fedavg(base: Any, precondition: bool) -> None:
    settings = {"batch_size": 8, "epochs": 2}
    # decay would shrink the adaptor's random factor, which is no part of the model while the other is zero
    frozen = dataclasses.replace(base, groups={"adaptors": Group(lr=0.0)})
    method = FederatedFloral(clusters=1, rank=2, precondition=precondition, optimizer=frozen, **settings)
    a, b = run_of(method, alike(), **SAMPLE), run_of(FedAvg(optimizer=base, **settings), alike(), **SAMPLE)
    close = {"rtol": 0, "atol": 1e-12}
    tree.map_leaves(
        lambda x, y: torch.testing.assert_close(x, y, **close), a.state.server.model["base"], b.state.server
    )
    fresh = method.server_init(a.task).model["adaptors"]
    tree.map_leaves(
        lambda x, y: torch.testing.assert_close(x, y, **close), a.state.server.model["adaptors"], fresh
    )


def together(clients: list[int], cluster: int | None = None) -> Federation:
    """These clients alone; with full batches the order of their examples is nobody's business."""
    parts = arrays()
    return alike(
        clients=[parts[k] for k in clients], cluster=None if cluster is None else [cluster] * len(clients)
    )


@pytest.mark.full
@pytest.mark.parametrize("precondition", [True, False])
def test_a_cluster_for_every_client_is_the_local_adaptor(precondition: bool) -> None:
    settings = {"rank": 2, "alpha": 1.3, "precondition": precondition, **LOCAL}
    floral = FederatedFloral(clusters=4, router=OPTIMAL, **settings)
    federation = alike(cluster=range(4))
    run = run_of(floral, federation, steps=0)
    # the random factors of all clusters those of the first, which are a lone adaptor's
    model = run.state.server.model
    first = tree.map_leaves(lambda t: t[:1].expand(4, *t.shape[1:]).clone(), model["adaptors"])
    run.state = State(
        0, dataclasses.replace(run.state.server, model={**model, "adaptors": first}), ClientStore()
    )
    for _ in range(3):
        run.step()
    alone = run_of(LocalAdaptor(**settings), alike())
    close = {"rtol": 0, "atol": 1e-12}
    tree.map_leaves(
        lambda a, b: torch.testing.assert_close(a, b, **close),
        run.state.server.model["base"],
        alone.state.server,
    )
    for k in range(4):
        own = select_cluster(run.state.server.model["adaptors"], k)
        tree.map_leaves(lambda a, b: torch.testing.assert_close(a, b, **close), own, alone.state.clients[k])
        infos = federation.infos[k]
        tree.map_leaves(
            lambda a, b: torch.testing.assert_close(a, b, **close), run.personal(infos), alone.personal(infos)
        )


@pytest.mark.few(1)
@pytest.mark.parametrize("kinds", [("linear",), ("bias",)])
def test_only_what_is_asked_for_is_adapted(kinds: tuple[Any, ...]) -> None:
    run = run_of(FederatedFloral(clusters=2, rank=1, kinds=kinds, **LOCAL), alike())
    suffix = "weight" if kinds == ("linear",) else "bias"
    assert set(run.state.server.model["adaptors"]) == {f"{n}.{suffix}" for n in NAMES}


@pytest.mark.full
def test_a_cluster_to_which_nobody_belongs_keeps_its_adaptors_bit_for_bit() -> None:
    run = run_of(FederatedFloral(clusters=4, rank=2, router=OPTIMAL, **LOCAL), alike(cluster=KNOWN), **SAMPLE)
    start = run.method.server_init(run.task).model["adaptors"]
    now = run.state.server.model["adaptors"]
    assert tree.equal(select_cluster(now, 3), select_cluster(start, 3))
    for c in range(3):
        assert not tree.equal(select_cluster(now, c), select_cluster(start, c))


def test_the_first_round_changes_no_base_by_adaptors_that_are_zero() -> None:
    federation = alike()
    run = run_of(FederatedFloral(clusters=3, rank=2, **LOCAL), federation, steps=0)
    for info in federation.infos:
        assert tree.equal(run.personal(info), federation.architectures["small"].initial)


# -- the wire ------------------------------------------------------------------------------------------------

BASE = WIDTH * INPUTS + WIDTH + CLASSES * WIDTH + CLASSES
ADAPTOR = 2 * (WIDTH + INPUTS) + WIDTH + 2 * (CLASSES + WIDTH) + CLASSES
"""Numbers of one adaptor of rank 2 of every layer, with its offsets of the biases."""


def paths(value: Any) -> dict[str, tuple[int, ...]]:
    return {path: tuple(t.shape) for path, t in tree.leaves(value)}


def upload_of(run: Run, client: int) -> Any:
    info, method = run.federation.infos[client], run.method
    view = client_view(
        run.federation, run.task, run.round, info, run.engine.trainer(method, run.federation, run.round, info)
    )
    return method.local_update(run.state_of(info), method.download(run.state.server, info), view)[1]


@pytest.mark.full
def test_a_learned_router_sends_the_base_all_adaptors_and_its_shares() -> None:
    run = run_of(FederatedFloral(clusters=3, rank=2, **LOCAL), alike(), steps=1)
    up = upload_of(run, 1)
    assert paths(up) == {
        **{f"/model{p}": s for p, s in paths(run.state.server.model).items()},
        "/pi": (3,),
    }
    assert sum(t.numel() for _, t in tree.leaves(up)) == BASE + 3 * ADAPTOR + 3
    record = run.step()
    assert record.parameters_down == 4 * (BASE + 3 * ADAPTOR)
    assert record.parameters_up == 4 * (BASE + 3 * ADAPTOR + 3)
    assert not any("theta" in p for p in paths(up))
    # what is sent are shares, from which θ is known only up to a constant
    assert float(up.pi.sum()) == pytest.approx(1)


@pytest.mark.full
def test_known_routes_carry_one_adaptor_each_way() -> None:
    run = run_of(FederatedFloral(clusters=3, rank=2, router=OPTIMAL, **LOCAL), alike(cluster=KNOWN), steps=1)
    for k, c in enumerate(KNOWN):
        down, up = run.method.download(run.state.server, run.federation.infos[k]), upload_of(run, k)
        assert tree.equal(down["adaptors"], select_cluster(run.state.server.model["adaptors"], c))
        assert paths(up) == {f"/model{p}": s for p, s in paths(down).items()}
        assert up.pi is None
        assert sum(t.numel() for _, t in tree.leaves(down)) == BASE + ADAPTOR
    record = run.step()
    assert record.parameters_down == record.parameters_up == 4 * (BASE + ADAPTOR)


def test_the_memory_of_the_servers_optimizer_is_not_sent() -> None:
    run = run_of(
        FederatedFloral(clusters=2, rank=2, server_optimizer=AdamW(lr=0.01), **LOCAL), alike(), steps=1
    )
    assert set(run.method.download(run.state.server, run.federation.infos[0])) == {"base", "adaptors"}


# -- clients that never train --------------------------------------------------------------------------------


class Plain(nn.Module):
    """One layer, in which two adaptors are told apart by their sign."""

    head_name = "head"

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 2, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(x.double())
        return out


def opposed(clients: int = 6) -> Federation:
    """Clients of two clusters with opposite labels."""
    rng = np.random.default_rng(0)
    data = []
    for k in range(clients):
        x = rng.normal(size=(20 + k, 2)).astype(np.float32)
        data.append(
            {
                "train": (x, (x[:, 0] > 0).astype(int) ^ (k % 2)),
                "test": (x, (x[:, 0] > 0).astype(int) ^ (k % 2)),
            }
        )
    return Federation.from_arrays(data, Plain, classes=2, cluster=[k % 2 for k in range(clients)])


def separated(method: FederatedFloral, run: Run) -> Any:
    """A server whose two adaptors are the two clusters' solutions."""
    u = torch.tensor([[[-4.0], [4.0]], [[4.0], [-4.0]]], dtype=torch.float64)
    v = torch.tensor([[[1.0], [0.0]]] * 2, dtype=torch.float64)
    zeros = {n: torch.zeros_like(t) for n, t in run.federation.architectures["model"].initial.items()}
    model = {
        "base": zeros,
        "adaptors": {"head.weight": Pairs(u, v), "head.bias": torch.zeros(2, 2, dtype=torch.float64)},
    }
    return dataclasses.replace(run.state.server, model=model)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "router", [Router(lr=1.0, adapt=60), Router(lr=20.0, update="mfl")], ids=["gradient", "mfl"]
)
def test_an_unseen_client_finds_its_cluster(router: Router) -> None:
    federation = opposed()
    run = Run(
        FederatedFloral(clusters=2, rank=1, router=router),
        federation,
        RunSettings(rounds=3, unseen=0.34),
        Sequential(),
    )
    run.state = State(0, separated(run.method, run), ClientStore())
    assert len(run.draws.unseen) == 2
    record = run.start()
    for k in range(6):
        assert record.values("route", "", str(k % 2))[k] > 0.9
    assert all(a == 1 for a in record.values("accuracy", "test", "personal"))


@pytest.mark.full
def test_unseen_clients_never_take_part_and_are_evaluated() -> None:
    federation = opposed()
    run = Run(
        FederatedFloral(clusters=2, rank=1, batch_size=8),
        federation,
        RunSettings(rounds=8, unseen=0.34),
        Sequential(),
    )
    seen: set[int] = set()
    for _ in range(8):
        record = run.step()
        seen |= set(record.participants)
        assert len(record.values("route", "", "1")) == len(federation.infos)
        assert not run.draws.unseen & set(run.state.clients)
    assert seen == set(range(6)) - run.draws.unseen
    assert all(row["unseen"] == (row["id"] in run.draws.unseen) for row in run.clients())


def test_known_routes_of_unseen_clients_are_their_clusters() -> None:
    federation = opposed()
    method = FederatedFloral(clusters=3, rank=1, router=OPTIMAL, batch_size=8)
    run = Run(method, federation, RunSettings(rounds=2, unseen=0.34), Sequential())
    record = run.step()
    for c in range(3):
        assert record.values("route", "", str(c)) == [float(c == k % 2) for k in range(6)]


# -- the battery ---------------------------------------------------------------------------------------------


def clustered(make: Any) -> Any:
    """A maker of federations whose clients are of two clusters."""

    def made(*args: Any, **kwargs: Any) -> Federation:
        on = make(*args, **kwargs)
        infos = [dataclasses.replace(i, cluster=i.id % 2) for i in on.infos]
        return dataclasses.replace(on, infos=infos)

    return made


@pytest.mark.full
@pytest.mark.few(1)
@pytest.mark.parametrize(
    "method",
    [
        FederatedFloral(
            clusters=3, rank=1, router=Router(noise=1.0, temperature=2.0, top=2, keep=False), center=True
        ),
        # of entries with next to no gradient Adam's step depends on rounding; its eps says what next to none
        # is
        FederatedFloral(clusters=2, rank=1, server_optimizer=AdamW(lr=0.01, eps=1e-3, weight_decay=0.0)),
    ],
    ids=["noise", "adam"],
)
def test_every_form_passes_every_check(method: FederatedFloral, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedlowrank.testing.check.small_federation", clustered(small))
    # that its steps are the formulas' is tested above, entry by entry
    rest = {name: test for name, test in check._CHECKS.items() if name != "it learns"}
    monkeypatch.setattr(check, "_CHECKS", rest)
    zero_step_settings = {"a learning rate of 0 changes no model"}
    found = {f.name: f.detail for f in check_method(method) if not f.ok}
    assert set(found) <= (zero_step_settings if method.center else set()), found


# -- bad input -----------------------------------------------------------------------------------------------


def started(method: Any, federation: Federation) -> Run:
    return Run(method, federation, RunSettings(rounds=1), Sequential())


def test_there_is_at_least_one_cluster() -> None:
    with pytest.raises(ConfigError, match=r"at least one cluster.*clusters is 0"):
        started(FederatedFloral(clusters=0), alike())


def test_known_routes_need_known_clusters() -> None:
    with pytest.raises(
        TaskError, match=r"FLoRAL: optimal routing needs .* client 0 is unknown.*routing = 'learned'"
    ):
        started(FederatedFloral(router=OPTIMAL), alike())
    with pytest.raises(TaskError, match="FLoRAL: client 3 is of cluster 2, but clusters is 2"):
        started(FederatedFloral(clusters=2, router=OPTIMAL), alike(cluster=KNOWN))
    # with a learned router nobody asks
    started(FederatedFloral(clusters=2), alike(cluster=KNOWN))


class Bare(nn.Module):
    """A model of one parameter that is no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(INPUTS, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.table


@pytest.mark.parametrize("method", [FederatedFloral(), LocalAdaptor()], ids=lambda m: m.title)
def test_a_model_without_a_layer_to_adapt_is_refused(method: Any) -> None:
    federation = Federation.from_arrays(arrays(), Bare, classes=CLASSES)
    with pytest.raises(TaskError, match=r"no layer to adapt.*Bare"):
        started(method, federation)


@pytest.mark.parametrize("rank", [0, -1, 1.5])
def test_a_rank_is_a_number_or_a_budget(rank: float) -> None:
    with pytest.raises(ConfigError, match="rank must be an integer >= 1, or a budget"):
        started(FederatedFloral(rank=rank), alike())


def test_the_schedule_of_the_optimizer_is_the_routers_too() -> None:
    begin = run_of(FederatedFloral(clusters=2, rank=1), alike(), steps=0).state.server
    # at adaptors that are zero θ has no gradient, so begin elsewhere; and in the second round, of which the
    # rate is half
    moved = {
        **begin.model,
        "adaptors": tree.map_leaves(lambda t: t + 0.1 * torch.rand_like(t), begin.model["adaptors"]),
    }
    thetas = []
    for schedule in (Schedule(kind="exponential", factor=0.5), Schedule()):
        method = FederatedFloral(
            clusters=2, rank=1, optimizer=SGD(lr=LR, schedule=schedule), batch_size=max(SIZES)
        )
        run = run_of(method, alike(), steps=0)
        run.state = State(1, dataclasses.replace(begin, model=moved), ClientStore())
        run.step()
        thetas.append(run.state.clients[0])
    torch.testing.assert_close(2 * thetas[0], thetas[1], rtol=0, atol=1e-12)
    assert float(thetas[1].abs().max()) > 1e-4


@pytest.mark.full
def test_the_servers_adam_moves_nothing_that_no_client_moved() -> None:
    # the mean of equal values is that value up to rounding, which Adam would make a full step of
    method = FederatedFloral(
        clusters=2,
        rank=1,
        optimizer=SGD(lr=0.0),
        server_optimizer=AdamW(lr=0.01, weight_decay=0.0),
        batch_size=8,
    )
    run = run_of(method, alike(**F32), steps=0)
    before = run.state.server.model
    for _ in range(3):
        run.step()
    tree.map_leaves(
        lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=1e-6), run.state.server.model, before
    )
