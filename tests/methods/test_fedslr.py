"""FedSLR and the designs it is compared with: golden values, identities and what goes wrong in public
code."""

from __future__ import annotations

import contextlib
import copy
import logging

import numpy as np
import pytest
import torch
from tests.engines.counting import Counting
from torch import nn

from fedlowrank.core import tree
from fedlowrank.core.contract.contribution import mean
from fedlowrank.core.errors import ConfigError, NonFiniteError, TaskError
from fedlowrank.core.learning.optimizer import SGD, Schedule
from fedlowrank.data.federation import Federation
from fedlowrank.engines import ENGINES
from fedlowrank.engines.engine import Engine
from fedlowrank.engines.sequential import Sequential
from fedlowrank.linalg.matricize import LowRank, unpack_weights
from fedlowrank.methods.fedslr import FedSLR
from fedlowrank.methods.gpgd import GPGD
from fedlowrank.methods.lpgd import LPGD
from fedlowrank.results.local_model import local_model
from fedlowrank.rounds.run import Run
from fedlowrank.rounds.run_settings import RunSettings
from fedlowrank.testing.check import CHECKS
from fedlowrank.testing.check import small_federation as check_federation
from golden import fedslr_reference as reference

from .setting import SIZES, Net, alike, arrays, layers, plan, run_of, same, start_of, train_data

DECAY = 1e-2
OPTIMIZER = SGD(lr=0.2, weight_decay=DECAY, schedule=Schedule("exponential", factor=0.8))
LOCAL = {"optimizer": OPTIMIZER, "batch_size": 8, "epochs": 2}
STRONG = {"lam": 0.06, "mu": 0.05, "eta_g": 5.0}
"""The threshold is 0.3: ranks fall, but the network lives."""
STILL = "a learning rate of 0 changes no model"


def lr(round: int) -> float:
    return 0.2 * 0.8**round


def w_of(run: Run):
    return run.state.server.w.dense(run.task.common_model("").initial)


def unlike_zero(values) -> bool:
    return all(bool(np.abs(w).max() > 1e-3) for layer in values for w in layer)


# Golden values


@pytest.mark.few(3)
@pytest.mark.parametrize("efficient", [True, False])
@pytest.mark.parametrize(
    ("options", "flags"),
    [
        ({}, {}),
        ({"personal_start": "initial"}, {"start_at_w": True}),
        ({"global_norm": "sparse", "personal_norm": "low_rank"}, {"sparse_w": True, "nuclear_p": True}),
    ],
)
def test_rounds_are_those_of_the_numpy_reference(
    options, flags, efficient: bool, engine: type[Engine]
) -> None:
    federation = alike()
    strong = STRONG | ({"lam": 0.01} if "global_norm" in options else {})
    method = FedSLR(**LOCAL, **strong, **options, memory_efficient=efficient)
    run = run_of(method, federation, engine=engine, participation=0.75)
    rounds = plan(run)
    assert all(len(clients) == 3 for clients in rounds)
    history, gammas, ps = reference.fedslr(
        start_of(federation)[0], train_data(federation), rounds, lr, DECAY, **strong, **flags
    )
    assert unlike_zero(history[-1])
    same(layers(w_of(run)), history[-1])
    same(layers(run.state.server.gamma), layers_mean(gammas))
    assert sorted(run.state.clients) == list(range(len(SIZES)))
    for k, state in run.state.clients.items():
        same(layers(state.gamma), gammas[k])
        same(layers(state.p), ps[k])
    ranks = [np.linalg.matrix_rank(w, tol=1e-9) for w, _ in history[-1]]
    if "global_norm" not in options:
        assert list(run.state.server.w.ranks.values()) == ranks
        assert ranks[0] < 10
    if "personal_norm" not in options:
        assert any((p["body.0.weight"] == 0).any() for p in (s.p for s in run.state.clients.values()))


def layers_mean(nets):
    return reference.weighted_mean(nets, [1] * len(nets))


def test_lpgd(engine: type[Engine]) -> None:
    federation = alike()
    run = run_of(LPGD(**LOCAL, lam=0.1), federation, engine=engine, participation=0.75)
    wanted = reference.lpgd(start_of(federation)[0], train_data(federation), plan(run), lr, DECAY, 0.1)
    assert unlike_zero(wanted)
    same(layers(run.state.server), wanted)


def test_gpgd(engine: type[Engine]) -> None:
    federation = alike()
    run = run_of(GPGD(**LOCAL, lam=0.06, eta_g=5.0), federation, engine=engine, participation=0.75)
    wanted = reference.gpgd(start_of(federation)[0], train_data(federation), plan(run), lr, DECAY, 0.3)
    assert unlike_zero(wanted)
    same(layers(run.state.server.dense(federation.architectures["small"].initial)), wanted)


# Identities


def test_without_penalty_the_global_model_is_feddyns_cloud_model() -> None:
    federation = alike()
    run = run_of(FedSLR(**LOCAL, lam=0.0, eta_g=4.0), federation, rounds=4, steps=0, participation=0.5)
    wanted = reference.feddyn(start_of(federation)[0], train_data(federation), plan(run), lr, DECAY, 1 / 4.0)
    for theta in wanted[1:]:
        run.step()
        same(layers(w_of(run)), theta)
        assert all(torch.is_tensor(p) for p in run.state.server.w.weights.values())


@pytest.mark.full
@pytest.mark.parametrize("lost", [0.0, 0.3])
def test_keeping_the_mean_alone_is_keeping_every_gamma(lost: float) -> None:
    ends = [
        run_of(
            FedSLR(**LOCAL, **STRONG, memory_efficient=efficient),
            alike(torch.float32),
            rounds=6,
            participation=0.5,
            lost_replies=lost,
        )
        for efficient in (True, False)
    ]
    for a, b in ((w_of(ends[0]), w_of(ends[1])), (ends[0].state.server.gamma, ends[1].state.server.gamma)):
        for name in a:
            torch.testing.assert_close(a[name], b[name], rtol=0, atol=1e-6)
    assert ends[0].state.server.gamma_by_client == {}
    kept = ends[1].state.server.gamma_by_client
    assert len(kept) == len(SIZES)
    for k, state in ends[1].state.clients.items():
        for name, own in state.gamma.items():
            torch.testing.assert_close(kept[str(k)][name], own, rtol=0, atol=1e-6)


@pytest.mark.full
def test_after_lost_replies_the_server_still_knows_the_mean_of_all_gammas() -> None:
    federation = alike(torch.float32)
    run = run_of(
        FedSLR(**LOCAL, **STRONG), federation, rounds=10, steps=0, participation=0.75, lost_replies=0.3
    )
    lost = [len(run.step().lost) for _ in range(10)]
    assert sum(lost) >= 3
    zero = tree.zeros_like(run.state.server.gamma)
    gammas = [run.state.clients[k].gamma if k in run.state.clients else zero for k in range(len(SIZES))]
    for name, p in mean(gammas, [1.0] * len(gammas)).items():
        torch.testing.assert_close(run.state.server.gamma[name], p, rtol=0, atol=1e-5)
        assert float(p.abs().max()) > 1e-3


@pytest.mark.full
def test_a_strong_penalty_kills_matrices_leaves_vectors_and_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "fedlowrank"):
        run = run_of(FedSLR(**LOCAL, lam=100.0), alike(torch.float32), rounds=4)
    w = w_of(run)
    for name, p in w.items():
        assert bool((p == 0).all()) == (p.ndim == 2), name
    assert [r.getMessage().split(";")[0] for r in caplog.records] == [
        "FedSLR: after round 1 every penalized weight is zero"
    ]
    assert run.state.server.w.ranks == {"body.0.weight": 0, "head.weight": 0}
    # what is left to send: the vectors
    info = run.federation.infos[0]
    assert tree.numel(run.method.download(run.state.server, info)) == sum(
        p.numel() for p in w.values() if p.ndim == 1
    )
    assert run.start().is_evaluated


def test_names_to_exclude_are_exact() -> None:
    run = run_of(FedSLR(**LOCAL, lam=100.0, exclude=("head.weight",)), alike(torch.float32), rounds=2)
    assert run.state.server.w.ranks == {"body.0.weight": 0}
    assert float(w_of(run)["head.weight"].abs().max()) > 0
    for method in (FedSLR, GPGD, LPGD):
        with pytest.raises(TaskError, match=r"no parameter \['head'\]"):
            Run(method(exclude=("head",)), alike(), RunSettings(rounds=1), Sequential())


# Messages


@pytest.mark.full
def test_the_download_carries_factors_and_they_are_the_model() -> None:
    run = run_of(FedSLR(**LOCAL, **STRONG), alike(torch.float32), rounds=3)
    down = run.method.download(run.state.server, run.federation.infos[0])
    initial = run.task.common_model("").initial
    rank = run.state.server.w.ranks["body.0.weight"]
    assert 0 < rank <= 5
    assert isinstance(down["body.0.weight"], LowRank)
    assert tree.numel(down["body.0.weight"]) == rank * (10 + 12)
    for name, p in unpack_weights(down, initial).items():
        torch.testing.assert_close(p, w_of(run)[name])
    assert tree.nbytes(down) < tree.nbytes(initial)
    record = run.step()
    assert record.bytes_down == len(SIZES) * tree.encoded_size(down)
    assert record.parameters_up == len(SIZES) * sum(p.numel() for p in initial.values())


def test_of_many_ranks_the_weight_itself_travels() -> None:
    run = run_of(FedSLR(**LOCAL, lam=1e-5), alike(torch.float32), rounds=2)
    down = run.method.download(run.state.server, run.federation.infos[0])
    assert all(torch.is_tensor(p) for p in down.values())


@pytest.mark.full
def test_a_sparse_global_model_travels_as_its_entries() -> None:
    run = run_of(FedSLR(**LOCAL, lam=0.02, eta_g=5.0, global_norm="sparse"), alike(torch.float32), rounds=3)
    down = run.method.download(run.state.server, run.federation.infos[0])
    w = w_of(run)
    entries = {n: int(np.count_nonzero(p.numpy())) for n, p in w.items() if p.ndim == 2}
    assert all(0 < entries[n] < 0.9 * w[n].numel() for n in entries)
    vectors = sum(p.numel() for p in w.values() if p.ndim == 1)
    record = run.step()
    assert record.parameters_down == len(SIZES) * (sum(entries.values()) + vectors)
    assert record.bytes_down < record.bytes_up
    for name, p in unpack_weights(down, w).items():
        torch.testing.assert_close(p, w[name], rtol=0, atol=0)


# Inference


def test_a_client_that_never_took_part_infers_by_the_global_model() -> None:
    run = run_of(FedSLR(**LOCAL, **STRONG), alike(torch.float32), rounds=1, participation=0.5)
    for info in run.federation.infos:
        made = local_model(
            run.method,
            run.federation,
            run.task,
            run.engine,
            run.state_of(info),
            info,
            0,
            server=run.state.server,
        ).predictors
        assert list(made) == ["mixed", "gkr"]
        x = run.federation.clients[info.id].test.x
        assert torch.equal(made["mixed"](x), made["gkr"](x)) == (info.id not in run.state.clients)
    assert len(run.state.clients) == 2


def test_the_mixed_model_is_the_sum() -> None:
    run = run_of(FedSLR(**LOCAL, **STRONG), alike(torch.float64), rounds=2)
    info = run.federation.infos[2]
    state, model = run.state_of(info), run.task.model(info)
    made = run.local_model(info).predictors
    x = run.federation.clients[2].test.x
    w = w_of(run)
    torch.testing.assert_close(made["gkr"](x), model.apply(w, x))
    torch.testing.assert_close(made["mixed"](x), model.apply({n: p + state.p[n] for n, p in w.items()}, x))


# Contract


@pytest.mark.few(1)
@pytest.mark.parametrize("method", [FedSLR(), GPGD()], ids=["fedslr", "gpgd"])
def test_a_prox_goes_on_shrinking_the_model_when_nobody_learns(method) -> None:
    patched = type("AtWork", (type(method),), {"zero_step_settings": {}})
    assert CHECKS[STILL](patched()) is not None
    assert CHECKS[STILL](method) is None


class RMSNorm(nn.Module):
    """As language models define it themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((10,), 1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x / x.square().mean(-1, keepdim=True).sqrt()


def test_a_personal_part_that_starts_at_w_leaves_the_scale_of_normalizations() -> None:
    class Normed(Net):
        def __init__(self) -> None:
            super().__init__(10)
            self.body = nn.Sequential(self.body[0], nn.GroupNorm(2, 10), nn.ReLU(), RMSNorm()).double()

    federation = Federation.from_arrays(arrays(), Normed, classes=4)
    run = Run(FedSLR(personal_start="initial"), federation, RunSettings(rounds=1), Sequential())
    initial = run.task.common_model("").initial
    start = run.local_model(federation.infos[0]).personal()
    norms = {"body.1.weight", "body.1.bias", "body.3.weight"}
    assert norms < {*initial}
    for n, w in initial.items():
        assert torch.equal(start[n], w if n in norms else 2 * w)


# Clients that diverge

DIVERGING = {"optimizer": SGD(lr=3e3), "batch_size": 100}
NUCLEAR = {
    "phase2": FedSLR(**DIVERGING, epochs=1, fusion_epochs=60, personal_norm="low_rank"),
    "local": LPGD(**DIVERGING, epochs=60),
}
"""Methods with a nuclear prox in every local step, by the pass in which they have it; one step an epoch."""


def one_that_diverges():
    """Client 1 has larger inputs than the others, so that at the same learning rate it alone diverges."""
    clients = arrays()
    for k, client in enumerate(clients):
        x, y = client["train"]
        client["train"] = (x * (1e3 if k == 1 else 1e-6), y)
    return alike(torch.float32, clients=clients)


def step_of_divergence(federation) -> int:
    """First step whose loss is not finite, by plain PyTorch and NumPy."""
    model = copy.deepcopy(federation.architectures["small"].module)
    model.load_state_dict(federation.architectures["small"].initial)
    x, y = federation.clients[1].train.x, federation.clients[1].train.y
    for step in range(60):
        loss = torch.nn.functional.cross_entropy(model(x), y)
        if not torch.isfinite(loss):
            return step
        for p, g in zip(model.parameters(), torch.autograd.grad(loss, [*model.parameters()]), strict=True):
            p.data -= 3e3 * g
            if p.ndim > 1 and bool(p.isfinite().all()):
                u, s, vt = np.linalg.svd(p.detach().double().numpy(), full_matrices=False)
                p.data = torch.from_numpy((u * np.maximum(s - 3e3 * 1e-4, 0)) @ vt).float()
    raise AssertionError("it does not diverge")


@pytest.mark.few(1)
@pytest.mark.parametrize("executor", ["sequential", "vectorized"])
@pytest.mark.parametrize("name", NUCLEAR)
def test_a_nan_before_a_nuclear_prox_names_the_client_and_can_be_dropped(name: str, executor: str) -> None:
    federation = one_that_diverges()
    run = Run(NUCLEAR[name], federation, RunSettings(rounds=1), ENGINES[executor]())
    with contextlib.closing(run.engine), pytest.raises(NonFiniteError) as caught:
        run.step()
    assert (caught.value.client, caught.value.round, caught.value.name) == (1, 0, name)
    if name == "local":
        assert caught.value.step == step_of_divergence(federation)
    else:
        assert caught.value.step
    run = Run(NUCLEAR[name], federation, RunSettings(rounds=1, on_nan="drop"), ENGINES[executor]())
    with contextlib.closing(run.engine):
        record = run.step()
    assert list(record.lost) == ["1"]
    assert "client 1, round 1" in record.lost["1"]
    assert all(bool(p.isfinite().all()) for p in tree.tensors(run.state.server))


@pytest.mark.parametrize("method", [FedSLR(personal_norm="low_rank"), LPGD()], ids=["fedslr", "lpgd"])
def test_clients_run_together(method) -> None:
    engine = Counting()
    Run(method, check_federation(False), RunSettings(rounds=1), engine).step()
    assert set(engine.sizes) == {5}


def test_settings_out_of_range_are_refused() -> None:
    for bad in (
        {"lam": -1.0},
        {"mu": -1e-9},
        {"eta_g": 0.0},
        {"eta_g": -2.0},
        {"lam": float("nan")},
        {"fusion_epochs": 0},
    ):
        with pytest.raises(ConfigError, match=next(iter(bad))):
            FedSLR(**bad)
    for bad in ({"lam": -1.0}, {"eta_g": 0.0}):
        with pytest.raises(ConfigError):
            GPGD(**bad)
    with pytest.raises(ConfigError):
        LPGD(lam=-1.0)
    with pytest.raises(ConfigError, match="low_rank"):
        FedSLR(global_norm="lowrank")


def test_defaults_are_the_papers() -> None:
    m = FedSLR()
    assert (m.lam, m.mu, m.eta_g, m.epochs, m.fusion_epochs, m.batch_size) == (1e-4, 1e-3, 10.0, 2, 1, 20)
    assert m.optimizer.learning_rate(3) == pytest.approx(0.1 * 0.998**3)
    assert m.optimizer.weight_decay == 1e-3


def test_the_record_counts_parameters_and_ranks_as_the_paper_does() -> None:
    run = run_of(FedSLR(**LOCAL, **STRONG), alike(torch.float32), rounds=2, participation=1.0)
    record = run.start()
    assert record.ranks == run.state.server.w.ranks
    assert record.is_evaluated
    initial = run.task.model(run.federation.infos[0]).initial
    dense, held = w_of(run), {}
    for n, p in initial.items():
        held[n] = p.numel()
        if p.ndim >= 2:
            rank = int(np.linalg.matrix_rank(dense[n].double().numpy(), tol=1e-5))
            assert rank == record.ranks[n]
            held[n] = min(rank * sum(p.shape), p.numel())
    assert record.values("parameters", "", "gkr") == [sum(held.values())] * len(run.federation.infos)
    assert sum(held.values()) < sum(p.numel() for p in initial.values())
    for i, count in enumerate(record.values("parameters", "", "mixed")):
        p_i = run.state.clients[i].p
        mixed = {n: min(held[n] + np.count_nonzero(p_i[n].numpy()), p.numel()) for n, p in initial.items()}
        assert sum(held.values()) < count == sum(mixed.values())
    # some weight is cheaper whole than as factors and entries
    assert any(mixed[n] < held[n] + np.count_nonzero(p_i[n].numpy()) for n in initial)
