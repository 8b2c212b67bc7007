"""FLoRAL: against NumPy, in its limits, what crosses the wire, and clients that never trained."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

from fedlowrank import Loss
from fedlowrank.adapters.mixtures.mixture import Pairs
from fedlowrank.adapters.mixtures.router import Router
from fedlowrank.core import tree
from fedlowrank.core.errors import ConfigError, TaskError
from fedlowrank.core.learning.optimizer import SGD, AdamW, Group, Schedule
from fedlowrank.engines.engine import Engine, client_key, client_view
from fedlowrank.engines.sequential import Sequential
from fedlowrank.methods.fedavg import FedAvg
from fedlowrank.methods.floral import FederatedFloral
from fedlowrank.methods.local_adaptor import LocalAdaptor
from fedlowrank.methods.shared.clusters import select_cluster
from fedlowrank.rounds.run import Run
from fedlowrank.rounds.run_settings import RunSettings
from fedlowrank.storage.client_store import ClientStore
from fedlowrank.storage.state import State
from fedlowrank.testing import check
from fedlowrank.testing.check import check_method
from fedlowrank.testing.check import small_federation as small
from tests.golden import floral_reference as reference
from tests.support.method_calls import personal, routes

from .cluster_setting import (
    ADAPTED_LAYERS,
    KNOWN_CLUSTERS,
    OPTIMAL,
    assign_two_clusters,
    federate_opposed_clusters,
    get_adaptors,
)
from .comparisons import assert_nested_close, get_shapes, to_layers
from .lora_setting import collect_replies, update_server
from .run_contents import (
    get_client_states,
    get_initial_networks,
    get_train_data,
    get_upload,
    list_batches,
    plan_rounds,
)
from .setting import (
    CLASSES,
    FLOAT32,
    INPUTS,
    LOCAL,
    LR,
    SAMPLE,
    SIZES,
    SMALL_PARAMETERS,
    WIDTH,
    federate_one_model,
    prepare_run,
    run_rounds,
)


def multiply_factors(adaptors: reference.Adaptors) -> list[Any]:
    """What the factors multiply to, where their signs are nobody's business."""
    return [(u @ v.transpose(0, 2, 1), b) for u, v, b in adaptors]


def run_beside_reference(
    method: FederatedFloral,
    engine: type[Engine],
    products: bool = False,
    data: Mapping[str, Any] = MappingProxyType({}),
    **wanted: Any,
) -> tuple[Run, Any]:
    """Run three rounds beside the reference, and compare the server and θ; ``data`` are settings of the federation."""
    federation = federate_one_model(cluster=KNOWN_CLUSTERS, **data)
    run = run_rounds(method, federation, engine=engine, **SAMPLE)
    adaptors = get_adaptors(method.server_init(run.task).model["adaptors"])
    assert any(u.any() for u, _, _ in adaptors)
    net, a, thetas = reference.floral(
        get_initial_networks(federation)[0],
        adaptors,
        get_train_data(federation),
        plan_rounds(run),
        LR,
        alpha=method.alpha,
        **wanted,
    )
    assert_nested_close(to_layers(run.state.server.model["base"]), net)
    actual = get_adaptors(run.state.server.model["adaptors"])
    assert_nested_close(
        multiply_factors(actual) if products else actual, multiply_factors(a) if products else a
    )
    for k, state in enumerate(get_client_states(run)):
        if state is not None:
            assert_nested_close(state, thetas[k])
    return run, thetas


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
    run, _ = run_beside_reference(method, engine, **wanted)
    shares = [method.router.shares(s) for s in get_client_states(run)]
    assert all(float(pi.sum()) == pytest.approx(1) for pi in shares)
    # the router has moved, or half of this would test nothing
    assert max(float(pi.max() - pi.min()) for pi in shares) > 0.005
    if method.router.top == 2:
        assert any(int((pi == 0).sum()) == 1 for pi in shares)


def assert_mfl_router_equals_reference(engine: type[Engine], **data: Any) -> None:
    """Eq. 4 and 5: π of the models received, unchanged by training and used in the average; even in the first
    round."""
    method = FederatedFloral(clusters=3, rank=2, alpha=1.7, router=Router(lr=4.0, update="mfl"), **LOCAL)
    run, thetas = run_beside_reference(method, engine, data=data, router_lr=4.0, mfl=True)
    assert all(s is None for s in get_client_states(run))
    model = run.state.server.model
    net, adaptors = to_layers(model["base"]), get_adaptors(model["adaptors"])
    for info, (x, y) in zip(run.federation.infos, get_train_data(run.federation), strict=True):
        theta = reference.mfl_router(net, adaptors, x, y, 4.0, 1.0, 1.7)
        pi = reference.shares(theta, 1.0, None)
        assert pi.max() - pi.min() > 0.02
        np.testing.assert_allclose(run.local_model(info).client_model.routes, pi, rtol=1e-9)
        if info.id in thetas:
            # what went into the last average is of the models before
            assert np.abs(reference.shares(thetas[info.id], 1.0, None) - pi).max() > 1e-3


@pytest.mark.few(1)
def test_the_mfl_router_weighs_the_averaged_models(engine: type[Engine]) -> None:
    assert_mfl_router_equals_reference(engine)


def test_floral_minimizes_the_loss_of_the_task(smoothed_loss: Loss) -> None:
    assert_mfl_router_equals_reference(Sequential, loss=smoothed_loss)


@pytest.mark.parametrize("precondition", [True, False])
@pytest.mark.parametrize("alpha", [1.0, 0.4])
def test_preconditioning_and_alpha(precondition: bool, alpha: float) -> None:
    method = FederatedFloral(
        clusters=2, rank=1, alpha=alpha, precondition=precondition, router=Router(lr=0.5), **LOCAL
    )
    run_beside_reference(method, Sequential, router_lr=0.5, precondition=precondition)


def test_ranks_of_single_layers_epsilon_and_the_initial_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    more: dict[str, Any] = {"rank_pattern": {"head": 2}, "eps": 0.05, "initial_scale": 0.25}
    method = FederatedFloral(clusters=2, rank=1, router=Router(lr=0.5), **more, **LOCAL)
    monkeypatch.setattr(reference, "EPS", 0.05)
    run, _ = run_beside_reference(method, Sequential, router_lr=0.5)
    first = method.server_init(run.task).model["adaptors"]
    for name, rank, columns in (("body.0.weight", 1, INPUTS), ("head.weight", 2, WIDTH)):
        assert first[name].u.shape[-1] == first[name].v.shape[-1] == rank
        bound = 0.25 * (6 / columns) ** 0.5
        assert 0.8 * bound < float(first[name].u.abs().max()) <= bound


def test_weight_decay_leaves_the_router_alone(engine: type[Engine]) -> None:
    local = {**LOCAL, "optimizer": SGD(lr=LR, weight_decay=0.05)}
    run_beside_reference(
        FederatedFloral(clusters=2, rank=2, router=Router(lr=0.9), **local), engine, router_lr=0.9, decay=0.05
    )


def test_optimal_routing(engine: type[Engine]) -> None:
    run, _ = run_beside_reference(
        FederatedFloral(clusters=3, rank=2, alpha=1.3, router=OPTIMAL, **LOCAL),
        engine,
        known=list(KNOWN_CLUSTERS),
    )
    assert all(s is None for s in get_client_states(run))


def test_a_client_without_memory_learns_its_router_anew(engine: type[Engine]) -> None:
    method = FederatedFloral(clusters=3, rank=2, router=Router(lr=0.7, keep=False), **LOCAL)
    run, _ = run_beside_reference(method, engine, router_lr=0.7, keep=False)
    assert all(s is None for s in get_client_states(run))


def test_noise_on_the_router_comes_from_its_named_key(engine: type[Engine]) -> None:
    federation, std = federate_one_model(cluster=KNOWN_CLUSTERS), 0.8
    method = FederatedFloral(clusters=3, rank=2, router=Router(lr=0.7, noise=std), **LOCAL)
    rounds = plan_rounds(run_rounds(method, federation, steps=0, **SAMPLE))

    def drawn(t: int, k: int, steps: int) -> np.ndarray:
        key = client_key(federation, k, t) / "noise"
        uniform = torch.rand(steps, 3, generator=key.generator(), dtype=torch.float64).numpy()
        return (2 * uniform - 1) * std * np.sqrt(3)

    noise = [
        {k: drawn(t, k, len(steps)) for k, (steps, _) in clients.items()} for t, clients in enumerate(rounds)
    ]
    run_beside_reference(method, engine, router_lr=0.7, noise=noise)


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
    run, thetas = run_beside_reference(method, engine, products=True, router_lr=0.7, center=True)
    # and the mean offset has gone into the base
    last = plan_rounds(run)[-1]
    p = sum(len(get_train_data(run.federation)[k][1]) * reference.shares(thetas[k]) for k in last)
    for _, _, b in get_adaptors(run.state.server.model["adaptors"]):
        np.testing.assert_allclose(p @ b / p.sum(), 0, atol=1e-10)


@pytest.mark.parametrize("which", ["sgd", "adam"])
def test_a_server_optimizer(which: str, engine: type[Engine]) -> None:
    optimizer: Any = SGD(lr=0.6, momentum=0.5)
    server = reference.server_sgd(0.6, 0.5)
    if which == "adam":
        optimizer = AdamW(lr=0.02, beta1=0.8, beta2=0.95, eps=1e-4, weight_decay=0.0)
        server = reference.server_adam(0.02, 0.8, 0.95, 1e-4)
    method = FederatedFloral(clusters=3, rank=2, router=Router(lr=0.7), server_optimizer=optimizer, **LOCAL)
    run, _ = run_beside_reference(method, engine, router_lr=0.7, server=server)
    assert run.state.server.optimizer_state.count == 3


def test_the_inference_of_a_newcomer_learns_its_router_on_the_frozen_mixture() -> None:
    federation = federate_one_model(cluster=KNOWN_CLUSTERS)
    router = Router(lr=0.9, unseen_steps=4, temperature=0.5)
    method = FederatedFloral(clusters=3, rank=2, alpha=1.7, router=router, **LOCAL)
    run = run_rounds(method, federation, steps=1, participation=0.5)
    # one of those that did not take part in the first round
    k = next(i for i in range(len(SIZES)) if i not in run.state.clients)
    info, t = federation.infos[k], run.round
    view = client_view(federation, run.task, info, t, run.engine.trainer(method, federation, t, info))
    net, a = to_layers(run.state.server.model["base"]), get_adaptors(run.state.server.model["adaptors"])
    _, steps = list_batches(run, t, info)
    assert len(steps) == 4
    _, _, theta = reference.floral_client(
        net, a, np.zeros(3), *get_train_data(federation)[k], steps, 0.0, router_lr=0.9, alpha=1.7, precondition=False,
        temperature=0.5, freeze=True,
    )  # fmt: skip
    pi = reference.shares(theta, 0.5)
    assert_nested_close(routes(method, None, run.state.server.model, view), pi)
    assert_nested_close(
        to_layers(personal(method, None, run.state.server.model, view)), reference.mixed(net, a, pi, 1.7)
    )
    assert abs(pi - 1 / 3).max() > 1e-4
    even = dataclasses.replace(method, router=dataclasses.replace(router, unseen_steps=0))
    assert_nested_close(routes(even, None, run.state.server.model, view), np.full(3, 1 / 3))


@pytest.mark.few(1)
@pytest.mark.parametrize("base", [SGD(lr=0.2), SGD(lr=0.1, momentum=0.9, weight_decay=0.01), AdamW(lr=0.01)])
@pytest.mark.parametrize("precondition", [True, False])
def test_one_frozen_cluster_is_fedavg(base: Any, precondition: bool) -> None:
    settings = {"batch_size": 8, "epochs": 2}
    # decay would shrink the adaptor's random factor, which is no part of the model while the other is zero
    frozen = dataclasses.replace(base, groups={"adaptors": Group(lr=0.0)})
    method = FederatedFloral(clusters=1, rank=2, precondition=precondition, optimizer=frozen, **settings)
    a, b = (
        run_rounds(method, federate_one_model(), **SAMPLE),
        run_rounds(FedAvg(optimizer=base, **settings), federate_one_model(), **SAMPLE),
    )
    close = {"rtol": 0, "atol": 1e-12}
    tree.map_leaves(
        lambda x, y: torch.testing.assert_close(x, y, **close), a.state.server.model["base"], b.state.server
    )
    fresh = method.server_init(a.task).model["adaptors"]
    tree.map_leaves(
        lambda x, y: torch.testing.assert_close(x, y, **close), a.state.server.model["adaptors"], fresh
    )


@pytest.mark.parametrize("precondition", [True, False])
def test_a_cluster_for_every_client_is_the_local_adaptor(precondition: bool) -> None:
    settings = {"rank": 2, "alpha": 1.3, "precondition": precondition, **LOCAL}
    floral = FederatedFloral(clusters=4, router=OPTIMAL, **settings)
    federation = federate_one_model(cluster=range(4))
    run = run_rounds(floral, federation, steps=0)
    # the random factors of all clusters those of the first, which are a lone adaptor's
    model = run.state.server.model
    first = tree.map_leaves(lambda t: t[:1].expand(4, *t.shape[1:]).clone(), model["adaptors"])
    run.state = State(
        0, dataclasses.replace(run.state.server, model={**model, "adaptors": first}), ClientStore()
    )
    for _ in range(3):
        run.step()
    alone = run_rounds(LocalAdaptor(**settings), federate_one_model())
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
            lambda a, b: torch.testing.assert_close(a, b, **close),
            run.personal_params(infos),
            alone.personal_params(infos),
        )


@pytest.mark.few(1)
@pytest.mark.parametrize("kinds", [("linear",), ("bias",)])
def test_only_what_is_asked_for_is_adapted(kinds: tuple[Any, ...]) -> None:
    run = run_rounds(FederatedFloral(clusters=2, rank=1, kinds=kinds, **LOCAL), federate_one_model())
    suffix = "weight" if kinds == ("linear",) else "bias"
    assert set(run.state.server.model["adaptors"]) == {f"{n}.{suffix}" for n in ADAPTED_LAYERS}


def test_a_cluster_to_which_nobody_belongs_keeps_its_adaptors_bit_for_bit() -> None:
    run = run_rounds(
        FederatedFloral(clusters=4, rank=2, router=OPTIMAL, **LOCAL),
        federate_one_model(cluster=KNOWN_CLUSTERS),
        **SAMPLE,
    )
    start = run.method.server_init(run.task).model["adaptors"]
    now = run.state.server.model["adaptors"]
    assert tree.equal(select_cluster(now, 3), select_cluster(start, 3))
    for c in range(3):
        assert not tree.equal(select_cluster(now, c), select_cluster(start, c))


@pytest.mark.parametrize(
    "optimizer", [SGD(lr=0.6, momentum=0.5), AdamW(lr=0.02, eps=1e-4, weight_decay=0.1)], ids=["sgd", "adam"]
)
def test_a_cluster_without_clients_keeps_its_adaptors_and_the_servers_memory_of_them(optimizer: Any) -> None:
    method = FederatedFloral(clusters=3, rank=2, router=OPTIMAL, server_optimizer=optimizer, **LOCAL)
    run = run_rounds(method, federate_one_model(cluster=KNOWN_CLUSTERS), steps=2)
    replies, before = collect_replies(run), run.state.server
    expected = update_server(run, replies)
    actual = update_server(run, [reply for reply in replies if reply.client.cluster != 1])
    paths = [path for path, _ in tree.leaves(before.model)]

    def get_clusters(server: Any, c: int) -> list[Any]:
        values = [[t for _, t in tree.leaves(server.model)], *server.optimizer_state.tensors]
        return [t[c] for slot in values for path, t in zip(paths, slot, strict=True) if "/adaptors/" in path]

    for c, server in ((0, expected), (1, before), (2, expected)):
        for a, b in zip(get_clusters(actual, c), get_clusters(server, c), strict=True):
            assert torch.equal(a, b)
    assert not torch.equal(get_clusters(actual, 0)[0], get_clusters(before, 0)[0])


def test_the_first_round_changes_no_base_by_adaptors_that_are_zero() -> None:
    federation = federate_one_model()
    run = run_rounds(FederatedFloral(clusters=3, rank=2, **LOCAL), federation, steps=0)
    for info in federation.infos:
        assert tree.equal(run.personal_params(info), federation.architectures["small"].initial)


ADAPTOR_PARAMETERS = 2 * (WIDTH + INPUTS) + WIDTH + 2 * (CLASSES + WIDTH) + CLASSES
"""Numbers of one adaptor of rank 2 of every layer, with its offsets of the biases."""


def test_a_learned_router_sends_the_base_all_adaptors_and_its_shares() -> None:
    run = run_rounds(FederatedFloral(clusters=3, rank=2, **LOCAL), federate_one_model(), steps=1)
    up = get_upload(run, 1)
    assert get_shapes(up) == {
        **{f"/model{p}": s for p, s in get_shapes(run.state.server.model).items()},
        "/pi": (3,),
    }
    assert sum(t.numel() for _, t in tree.leaves(up)) == SMALL_PARAMETERS + 3 * ADAPTOR_PARAMETERS + 3
    record = run.step()
    assert record.parameters_down == 4 * (SMALL_PARAMETERS + 3 * ADAPTOR_PARAMETERS)
    assert record.parameters_up == 4 * (SMALL_PARAMETERS + 3 * ADAPTOR_PARAMETERS + 3)
    assert not any("theta" in p for p in get_shapes(up))
    # what is sent are shares, from which θ is known only up to a constant
    assert float(up.pi.sum()) == pytest.approx(1)


def test_known_routes_carry_one_adaptor_each_way() -> None:
    run = run_rounds(
        FederatedFloral(clusters=3, rank=2, router=OPTIMAL, **LOCAL),
        federate_one_model(cluster=KNOWN_CLUSTERS),
        steps=1,
    )
    for k, c in enumerate(KNOWN_CLUSTERS):
        down, up = run.method.download(run.state.server, run.federation.infos[k]), get_upload(run, k)
        assert tree.equal(down["adaptors"], select_cluster(run.state.server.model["adaptors"], c))
        assert get_shapes(up) == {f"/model{p}": s for p, s in get_shapes(down).items()}
        assert up.pi is None
        assert sum(t.numel() for _, t in tree.leaves(down)) == SMALL_PARAMETERS + ADAPTOR_PARAMETERS
    record = run.step()
    assert record.parameters_down == record.parameters_up == 4 * (SMALL_PARAMETERS + ADAPTOR_PARAMETERS)


def test_the_memory_of_the_servers_optimizer_is_not_sent() -> None:
    run = run_rounds(
        FederatedFloral(clusters=2, rank=2, server_optimizer=AdamW(lr=0.01), **LOCAL),
        federate_one_model(),
        steps=1,
    )
    assert set(run.method.download(run.state.server, run.federation.infos[0])) == {"base", "adaptors"}


def make_separated_server(method: FederatedFloral, run: Run) -> Any:
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
    "router", [Router(lr=1.0, unseen_steps=60), Router(lr=20.0, update="mfl")], ids=["gradient", "mfl"]
)
def test_an_unseen_client_finds_its_cluster(router: Router) -> None:
    federation = federate_opposed_clusters()
    run = Run(
        FederatedFloral(clusters=2, rank=1, router=router),
        federation,
        RunSettings(rounds=3, unseen=0.34),
        Sequential(),
    )
    run.state = State(0, make_separated_server(run.method, run), ClientStore())
    assert len(run.client_sampler.unseen) == 2
    record = run.record_initial_models()
    for k in range(6):
        assert record.values("route", series=str(k % 2), split="")[k] > 0.9
    assert record.values("accuracy", series="personal", split="test") == [1] * 6


def test_unseen_clients_never_take_part_and_are_evaluated() -> None:
    federation = federate_opposed_clusters()
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
        assert len(record.values("route", series="1", split="")) == len(federation.infos)
        assert not run.client_sampler.unseen & set(run.state.clients)
    assert seen == set(range(6)) - run.client_sampler.unseen
    assert all(row["unseen"] == (row["id"] in run.client_sampler.unseen) for row in run.clients())


def test_known_routes_of_unseen_clients_are_their_clusters() -> None:
    federation = federate_opposed_clusters()
    method = FederatedFloral(clusters=3, rank=1, router=OPTIMAL, batch_size=8)
    run = Run(method, federation, RunSettings(rounds=2, unseen=0.34), Sequential())
    record = run.step()
    for c in range(3):
        assert record.values("route", series=str(c), split="") == [float(c == k % 2) for k in range(6)]


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
    monkeypatch.setattr("fedlowrank.testing.check.small_federation", assign_two_clusters(small))
    # that its steps are the formulas' is tested above, entry by entry
    rest = {name: test for name, test in check._CHECKS.items() if name != "it learns"}
    monkeypatch.setattr(check, "_CHECKS", rest)
    zero_step_settings = {"a learning rate of 0 changes no model"}
    actual = {f.name: f.detail for f in check_method(method) if not f.ok}
    assert set(actual) <= (zero_step_settings if method.center else set()), actual


def test_known_routes_need_known_clusters() -> None:
    with pytest.raises(
        TaskError, match=r"FLoRAL: optimal routing needs .* client 0 is unknown.*routing = 'learned'"
    ):
        prepare_run(FederatedFloral(router=OPTIMAL), federate_one_model())
    with pytest.raises(TaskError, match="FLoRAL: client 3 is of cluster 2, but clusters is 2"):
        prepare_run(FederatedFloral(clusters=2, router=OPTIMAL), federate_one_model(cluster=KNOWN_CLUSTERS))
    # with a learned router nobody asks
    prepare_run(FederatedFloral(clusters=2), federate_one_model(cluster=KNOWN_CLUSTERS))


@pytest.mark.parametrize("rank", [0, -1, 1.5])
def test_a_rank_is_a_number_or_a_budget(rank: float) -> None:
    with pytest.raises(ConfigError, match="rank must be an integer >= 1, or a budget"):
        prepare_run(FederatedFloral(rank=rank), federate_one_model())


def test_the_schedule_of_the_optimizer_is_the_routers_too() -> None:
    begin = run_rounds(FederatedFloral(clusters=2, rank=1), federate_one_model(), steps=0).state.server
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
        run = run_rounds(method, federate_one_model(), steps=0)
        run.state = State(1, dataclasses.replace(begin, model=moved), ClientStore())
        run.step()
        thetas.append(run.state.clients[0])
    torch.testing.assert_close(2 * thetas[0], thetas[1], rtol=0, atol=1e-12)
    assert float(thetas[1].abs().max()) > 1e-4


def test_the_servers_adam_moves_nothing_that_no_client_moved() -> None:
    # the mean of equal values is that value up to rounding, which Adam would make a full step of
    method = FederatedFloral(
        clusters=2,
        rank=1,
        optimizer=SGD(lr=0.0),
        server_optimizer=AdamW(lr=0.01, weight_decay=0.0),
        batch_size=8,
    )
    run = run_rounds(method, federate_one_model(**FLOAT32), steps=0)
    before = run.state.server.model
    for _ in range(3):
        run.step()
    tree.map_leaves(
        lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=1e-6), run.state.server.model, before
    )
