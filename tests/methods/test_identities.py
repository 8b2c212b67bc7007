"""Identities between methods, limits in which a method is another, and conservation laws."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from contract import Reply, personal, server_update
from fedlowrank.adapters.lora.lora_factors import lora_of, parameters_beside_factors
from fedlowrank.core import tree
from fedlowrank.core.contract.method import ServerView
from fedlowrank.core.learning.optimizer import SGD, AdamW
from fedlowrank.data.federation import Federation
from fedlowrank.engines.engine import client_view
from fedlowrank.engines.vectorized import Vectorized
from fedlowrank.linalg.factored import Factored
from fedlowrank.methods import METHODS
from fedlowrank.methods.fd import FD
from fedlowrank.methods.fedavg import FedAvg
from fedlowrank.methods.fedkd import FedKD
from fedlowrank.methods.fedproto import FedProto
from fedlowrank.methods.fedprox import FedProx
from fedlowrank.methods.fml import FML
from fedlowrank.methods.pfedlora import PFedLoRA
from fedlowrank.methods.standalone import Standalone
from fedlowrank.models.architectures.mlp import MLP
from golden import reference

from .setting import (
    CLASSES,
    INPUTS,
    SIZES,
    WIDTH,
    Net,
    alike,
    arrays,
    layers,
    plan,
    run_of,
    start_of,
    train_data,
    unlike,
)

F32 = {"dtype": torch.float32}
LOCAL = {"optimizer": SGD(lr=0.2), "batch_size": 8, "epochs": 2}
SAMPLE = {"participation": 0.75}
NAMES = sorted(METHODS)


def federation_for(name: str, **kwargs: Any) -> Federation:
    return unlike(**kwargs) if METHODS[name].heterogeneous else alike(**kwargs)


def assert_bits(a: Any, b: Any) -> None:
    assert tree.equal(a, b)


# -- limits --------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize(
    "optimizer", [SGD(lr=0.2), SGD(lr=0.2, momentum=0.9, weight_decay=0.01, clip=0.5), AdamW(lr=0.01)]
)
def test_fedprox_without_pull_is_fedavg_bit_for_bit(optimizer) -> None:
    settings = {"optimizer": optimizer, "batch_size": 8, "epochs": 2}
    a = run_of(FedProx(mu=0.0, **settings), alike(**F32), **SAMPLE)
    b = run_of(FedAvg(**settings), alike(**F32), **SAMPLE)
    assert_bits(a.state.server, b.state.server)
    # and the pull is felt as soon as it is there
    c = run_of(FedProx(mu=0.01, **settings), alike(**F32), **SAMPLE)
    assert not tree.equal(a.state.server, c.state.server)


@pytest.mark.full
def test_fml_with_labels_alone_is_standalone_beside_fedavg() -> None:
    run = run_of(FML(alpha=1.0, beta=1.0, meme="small", **LOCAL), unlike(**F32, deep_width=7), **SAMPLE)
    alone = run_of(Standalone(**LOCAL), unlike(**F32, deep_width=7), **SAMPLE)
    # the same clients with the small model everywhere: what FedAvg makes of the memes
    everywhere = Federation.from_arrays(arrays(), {"small": lambda: Net(WIDTH, **F32)}, classes=CLASSES)
    averaged = run_of(FedAvg(**LOCAL), everywhere, **SAMPLE)
    assert_bits(run.federation.architectures["small"].initial, everywhere.architectures["small"].initial)
    for k, state in alone.state.clients.items():
        assert_bits(run.state.clients[k], state)
    assert_bits(run.state.server, averaged.state.server)


@pytest.mark.full
def test_fedkd_at_full_energy_is_the_uncompressed_method() -> None:
    federation = unlike(deep_width=7)
    method = FedKD(energy_start=1.0, energy_end=1.0, mentee="small", **LOCAL)
    run = run_of(method, federation, **SAMPLE)
    assert not any(isinstance(c, Factored) for u in run.state.server.updates for c in u.values())
    projections = [method.client_init(run.task, i).projection.numpy().copy() for i in federation.infos]
    start = layers(federation.architectures["small"].initial)
    history, _, _, sent = reference.fedkd(
        start, start_of(federation), projections, train_data(federation), plan(run), 0.2, (1.0, 1.0)
    )
    for found, wanted in zip(layers(run.state.server.mentee), history[-1], strict=True):
        np.testing.assert_allclose(found[0], wanted[0], rtol=0, atol=1e-10)
        np.testing.assert_allclose(found[1], wanted[1], rtol=0, atol=1e-10)
    whole = federation.architectures["small"].parameters
    assert sent == [3 * whole] * 3


@pytest.mark.full
@pytest.mark.parametrize("optimizer", [SGD(lr=0.2), SGD(lr=0.1, momentum=0.9), AdamW(lr=0.01)])
def test_pfedlora_at_mu_one_trains_the_model_as_standalone_bit_for_bit(optimizer) -> None:
    settings = {"optimizer": optimizer, "batch_size": 8, "epochs": 2}
    a = run_of(PFedLoRA(mu=1.0, width=5, **settings), unlike(**F32), **SAMPLE)
    b = run_of(Standalone(**settings), unlike(**F32), **SAMPLE)
    assert sorted(a.state.clients) == sorted(b.state.clients)
    for k, state in b.state.clients.items():
        assert_bits(a.state.clients[k], state)


@pytest.mark.full
@pytest.mark.parametrize("gamma_or_lam", ["fd", "fedproto"])
def test_distillation_of_weight_zero_trains_as_standalone(gamma_or_lam: str) -> None:
    method = FD(gamma=0.0, **LOCAL) if gamma_or_lam == "fd" else FedProto(lam=0.0, **LOCAL)
    a, b = run_of(method, unlike(), **SAMPLE), run_of(Standalone(**LOCAL), unlike(), **SAMPLE)
    for k, state in b.state.clients.items():
        own = a.state.clients[k]
        tree.map_leaves(
            lambda x, y: torch.testing.assert_close(x, y, rtol=0, atol=1e-12),
            getattr(own, "model", own),
            state,
        )


# -- one client is plain SGD ---------------------------------------------------------------------------------


def bare_loop(
    initial: nn.Module, x: Tensor, y: Tensor, rounds: list[list[np.ndarray]], **settings: Any
) -> nn.Module:
    """Training as everyone writes it; the optimizer is new in every round because it keeps nothing between
    rounds."""
    for steps in rounds:
        optimizer = torch.optim.SGD(initial.parameters(), **settings)
        for i in steps:
            optimizer.zero_grad()
            functional.cross_entropy(initial(x[i]), y[i]).backward()
            optimizer.step()
    return initial


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_one_client_with_all_data_is_plain_sgd(momentum: float) -> None:
    parts = arrays()
    x = np.concatenate([p["train"][0] for p in parts])
    y = np.concatenate([p["train"][1] for p in parts])
    federation = alike(clients=[{"train": (x, y)}])
    method = FedAvg(optimizer=SGD(lr=0.1, momentum=momentum), batch_size=16, epochs=2)
    run = run_of(method, federation)
    model = Net(WIDTH)
    model.load_state_dict(federation.architectures["small"].initial)
    rounds = [clients[0][0] for clients in plan(run)]
    assert [len(r) for r in rounds] == [2 * -(-sum(SIZES) // 16)] * 3
    trained = bare_loop(model, torch.as_tensor(x), torch.as_tensor(y), rounds, lr=0.1, momentum=momentum)
    view = run.engine.trainer(method, federation, 0, federation.infos[0])
    found = personal(
        method,
        run.state_of(federation.infos[0]),
        method.download(run.state.server, federation.infos[0]),
        view,
    )
    for name, p in trained.named_parameters():
        torch.testing.assert_close(found[name], p.detach(), rtol=0, atol=1e-12)


# -- everything trained moves --------------------------------------------------------------------------------


LORA = {"fedit", "hetlora", "flexlora", "flora", "fedhl", "ffa_lora", "fedsa_lora", "fedex_lora"}


def comparable(name: str, server: Any) -> Any:
    """What of a server's state has one form: of a matrix held as singular triplets, the matrix."""
    if name in ("fedhl", "flexlora"):
        return {n: d.dense() for n, d in server.delta.items()}, server.rest
    return server


@pytest.mark.few(5)
@pytest.mark.parametrize("name", NAMES)
def test_training_changes_every_parameter_of_the_personal_model(name: str) -> None:
    federation = federation_for(name, **F32)
    run = run_of(METHODS[name](**LOCAL), federation)
    for info in federation.infos:
        down = run.method.download(run.state.server, info)
        trainer = run.engine.trainer(run.method, federation, 0, info)
        params = personal(
            run.method, run.state_of(info), down, client_view(federation, run.task, 0, info, trainer)
        )
        initial = federation.architectures[info.architecture].initial
        assert list(params) == list(initial) or set(params) == set(initial)
        model = federation.architectures[info.architecture]
        trained = (
            {s.weight for s in lora_of(model).layers.values()} | set(parameters_beside_factors(model))
            if name in LORA
            else set(initial)
        )
        assert {n for n in initial if not torch.equal(params[n], initial[n])} == trained


# -- labels that nobody else owns ----------------------------------------------------------------------------


def test_a_client_whose_labels_nobody_else_owns_trains_alone_under_fd() -> None:
    owned = ((0, 1), (0, 1), (2, 3), (0, 1))
    federation = alike(clients=arrays(owned=owned))
    run, alone = (
        run_of(FD(**LOCAL), federation),
        run_of(Standalone(**LOCAL), alike(clients=arrays(owned=owned))),
    )
    tree.map_leaves(
        lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=1e-12),
        run.state.clients[2],
        alone.state.clients[2],
    )
    targets = run.method.download(run.state.server, federation.infos[2])
    assert targets.known.tolist() == [True, True, False, False]
    # the others do hear of labels 2 and 3, and of one another
    assert run.method.download(run.state.server, federation.infos[0]).known.all()
    assert not torch.equal(run.state.clients[0]["head.weight"], alone.state.clients[0]["head.weight"])


def test_a_label_of_one_owner_has_that_owners_prototype_under_fedproto() -> None:
    federation = alike()
    run = run_of(FedProto(**LOCAL), federation)
    data, model = federation.clients[2].train, run.state.clients[2].model
    r = federation.architectures["small"].represent(model, data.x[data.y == 3])
    torch.testing.assert_close(run.state.server.mean[3], r.mean(0), rtol=0, atol=1e-12)
    # it holds its prototype when its owner is absent
    lone = FedProto(**LOCAL)
    replies = [Reply(federation.infos[0], lone_upload(lone, run, 0))]
    after = server_update(lone, run.state.server, replies, ServerView(run.task, 3, federation.key))
    assert_bits(after.mean[3], run.state.server.mean[3])
    assert after.known.all()


def lone_upload(method: Any, run: Any, client: int) -> Any:
    """What one client would send next."""
    info = run.federation.infos[client]
    trainer = run.engine.trainer(method, run.federation, run.round, info)
    view = client_view(run.federation, run.task, run.round, info, trainer)
    return method.local_update(run.state_of(info), method.download(run.state.server, info), view)[1]


# -- engines and functions -----------------------------------------------------------------------------------


# one method for each kind of pass: plain, proximal, two passes, a prox on spectra, masks, mixtures, factors,
# distillation
@pytest.mark.few(3)
@pytest.mark.parametrize(
    "optimizer", [SGD(lr=0.1, momentum=0.9, weight_decay=0.01, clip=0.5), AdamW(lr=0.01)]
)
@pytest.mark.parametrize(
    "name", ["fedavg", "feddyn", "apfl", "fedslr", "fedspa", "floral", "fedem", "fedhl", "fedkd"]
)
def test_clients_at_once_are_trained_as_one_after_another(name: str, optimizer) -> None:
    # uneven clients: batches are padded, and small clients stop while the others, with their momentum, go on
    sgd_alone = {"apfl": {"adaptive": False}, "fedslr": {"mu": 0.0}}
    more: dict[str, Any] = sgd_alone.get(name, {}) if isinstance(optimizer, AdamW) else {}
    method = METHODS[name](optimizer=optimizer, batch_size=8, epochs=2, **more)
    a = run_of(method, federation_for(name), rounds=2)
    b = run_of(method, federation_for(name), rounds=2, engine=Vectorized)
    for k in a.state.clients:
        tree.map_leaves(
            lambda x, y: torch.testing.assert_close(x, y, rtol=0, atol=1e-8),
            a.state.clients[k],
            b.state.clients[k],
        )
    if name != "fedkd":  # ranks at the edge of an energy may differ
        servers = comparable(name, a.state.server), comparable(name, b.state.server)
        tree.map_leaves(lambda x, y: torch.testing.assert_close(x, y, rtol=0, atol=1e-8), *servers)


@pytest.mark.full
@pytest.mark.parametrize("name", ["standalone", "fedavg"])
def test_runs_of_one_seed_are_equal_and_of_two_seeds_differ(name: str) -> None:
    a, b, c = (
        run_of(METHODS[name](**LOCAL), federation_for(name, **F32, seed=s), **SAMPLE) for s in (5, 5, 6)
    )
    assert_bits(a.state.server, b.state.server)
    assert {k: tree.encode(s) for k, s in a.state.clients.items()} == {
        k: tree.encode(s) for k, s in b.state.clients.items()
    }
    assert {k: tree.encode(s) for k, s in a.state.clients.items()} != {
        k: tree.encode(s) for k, s in c.state.clients.items()
    } or (not tree.equal(a.state.server, c.state.server))


def test_a_federation_of_float32_models_matches_the_reference_to_single_precision() -> None:
    federation = Federation.from_arrays(
        arrays(), {"mlp": lambda: MLP(INPUTS, (WIDTH,), CLASSES)}, classes=CLASSES
    )
    run = run_of(FedAvg(**LOCAL), federation, **SAMPLE)
    wanted = reference.fedavg(start_of(federation)[0], train_data(federation), plan(run), 0.2)
    for found, layer in zip(layers(run.state.server), wanted, strict=True):
        np.testing.assert_allclose(found[0], layer[0], rtol=0, atol=2e-5)
        np.testing.assert_allclose(found[1], layer[1], rtol=0, atol=2e-5)
