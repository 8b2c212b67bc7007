"""FedSLR: against NumPy, as FedDyn without its penalty, what its server keeps and sends, its models, its defaults, and
what its record counts."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedlowrank import Loss, simulate
from fedlowrank.core import tree
from fedlowrank.core.contract.contribution import mean
from fedlowrank.core.errors import TaskError
from fedlowrank.core.learning.optimizer import SGD
from fedlowrank.data.federation import Federation
from fedlowrank.engines.engine import Engine
from fedlowrank.engines.sequential import Sequential
from fedlowrank.linalg.matricize import LowRank, unpack_weights
from fedlowrank.methods import METHODS
from fedlowrank.methods.fedslr import FedSLR
from fedlowrank.methods.gpgd import GPGD
from fedlowrank.methods.lpgd import LPGD
from fedlowrank.results.evaluation.local_model import make_local_model
from fedlowrank.rounds.run import Run
from fedlowrank.rounds.run_settings import RunSettings
from tests.golden import fedslr_reference as reference

from .awkward_setting import federate_images, make_low_rank_method
from .comparisons import assert_nested_close, to_layers
from .fedslr_setting import DECAY, DECAYING_LOCAL, get_learning_rate, is_nonzero
from .run_contents import get_initial_networks, get_train_data, plan_rounds
from .setting import SIZES, Net, federate_one_model, make_arrays, run_rounds

STRONG = {"lam": 0.06, "mu": 0.05, "prox_step": 5.0}
"""The threshold is 0.3: ranks fall, but the network lives."""


def get_global_weights(run: Run):
    return run.state.server.w.dense(run.task.common_model("").initial)


def average_layers(nets):
    return reference.weighted_mean(nets, [1] * len(nets))


def assert_rounds_equal_reference(
    options: Any, flags: Any, efficient: bool, engine: type[Engine], **data: Any
) -> None:
    """Compare a run with the reference; ``data`` are settings of the federation."""
    federation = federate_one_model(**data)
    strong = STRONG | ({"lam": 0.01} if "global_norm" in options else {})
    method = FedSLR(**DECAYING_LOCAL, **strong, **options, memory_efficient=efficient)
    run = run_rounds(method, federation, engine=engine, participation=0.75)
    rounds = plan_rounds(run)
    assert all(len(clients) == 3 for clients in rounds)
    history, gammas, ps = reference.fedslr(
        get_initial_networks(federation)[0],
        get_train_data(federation),
        rounds,
        get_learning_rate,
        DECAY,
        **strong,
        **flags,
    )
    assert is_nonzero(history[-1])
    assert_nested_close(to_layers(get_global_weights(run)), history[-1])
    assert_nested_close(to_layers(run.state.server.gamma), average_layers(gammas))
    assert sorted(run.state.clients) == list(range(len(SIZES)))
    for k, state in run.state.clients.items():
        assert_nested_close(to_layers(state.gamma), gammas[k])
        assert_nested_close(to_layers(state.p), ps[k])
    ranks = [np.linalg.matrix_rank(w, tol=1e-9) for w, _ in history[-1]]
    if "global_norm" not in options:
        assert list(run.state.server.w.ranks.values()) == ranks
        assert ranks[0] < 10
    if "personal_norm" not in options:
        assert any((p["body.0.weight"] == 0).any() for p in (s.p for s in run.state.clients.values()))


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
    options: Any, flags: Any, efficient: bool, engine: type[Engine]
) -> None:
    assert_rounds_equal_reference(options, flags, efficient, engine)


def test_fedslr_minimizes_the_loss_of_the_task(smoothed_loss: Loss) -> None:
    assert_rounds_equal_reference({}, {}, True, Sequential, loss=smoothed_loss)


def test_without_penalty_the_global_model_is_feddyns_cloud_model() -> None:
    federation = federate_one_model()
    run = run_rounds(
        FedSLR(**DECAYING_LOCAL, lam=0.0, prox_step=4.0), federation, rounds=4, steps=0, participation=0.5
    )
    expected = reference.feddyn(
        get_initial_networks(federation)[0],
        get_train_data(federation),
        plan_rounds(run),
        get_learning_rate,
        DECAY,
        1 / 4.0,
    )
    for theta in expected[1:]:
        run.step()
        assert_nested_close(to_layers(get_global_weights(run)), theta)
        assert all(torch.is_tensor(p) for p in run.state.server.w.weights.values())


@pytest.mark.parametrize("lost", [0.0, 0.3])
def test_keeping_the_mean_alone_is_keeping_every_gamma(lost: float) -> None:
    ends = [
        run_rounds(
            FedSLR(**DECAYING_LOCAL, **STRONG, memory_efficient=efficient),
            federate_one_model(torch.float32),
            rounds=6,
            participation=0.5,
            lost_replies=lost,
        )
        for efficient in (True, False)
    ]
    for a, b in (
        (get_global_weights(ends[0]), get_global_weights(ends[1])),
        (ends[0].state.server.gamma, ends[1].state.server.gamma),
    ):
        for name in a:
            torch.testing.assert_close(a[name], b[name], rtol=0, atol=1e-6)
    assert ends[0].state.server.gamma_by_client == {}
    kept = ends[1].state.server.gamma_by_client
    assert len(kept) == len(SIZES)
    for k, state in ends[1].state.clients.items():
        for name, own in state.gamma.items():
            torch.testing.assert_close(kept[str(k)][name], own, rtol=0, atol=1e-6)


def test_after_lost_replies_the_server_still_knows_the_mean_of_all_gammas() -> None:
    federation = federate_one_model(torch.float32)
    run = run_rounds(
        FedSLR(**DECAYING_LOCAL, **STRONG),
        federation,
        rounds=10,
        steps=0,
        participation=0.75,
        lost_replies=0.3,
    )
    lost = [len(run.step().lost) for _ in range(10)]
    assert sum(lost) >= 3
    zero = tree.zeros_like(run.state.server.gamma)
    gammas = [run.state.clients[k].gamma if k in run.state.clients else zero for k in range(len(SIZES))]
    for name, p in mean(gammas, [1.0] * len(gammas)).items():
        torch.testing.assert_close(run.state.server.gamma[name], p, rtol=0, atol=1e-5)
        assert float(p.abs().max()) > 1e-3


def test_a_strong_penalty_kills_matrices_leaves_vectors_and_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "fedlowrank"):
        run = run_rounds(FedSLR(**DECAYING_LOCAL, lam=100.0), federate_one_model(torch.float32), rounds=4)
    w = get_global_weights(run)
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
    assert run.record_initial_models().is_evaluated


def test_names_to_exclude_are_exact() -> None:
    run = run_rounds(
        FedSLR(**DECAYING_LOCAL, lam=100.0, exclude=("head.weight",)),
        federate_one_model(torch.float32),
        rounds=2,
    )
    assert run.state.server.w.ranks == {"body.0.weight": 0}
    assert float(get_global_weights(run)["head.weight"].abs().max()) > 0
    for method in (FedSLR, GPGD, LPGD):
        with pytest.raises(TaskError, match=r"no parameter \['head'\]"):
            Run(method(exclude=("head",)), federate_one_model(), RunSettings(rounds=1), Sequential())


def test_the_download_carries_factors_and_they_are_the_model() -> None:
    run = run_rounds(FedSLR(**DECAYING_LOCAL, **STRONG), federate_one_model(torch.float32), rounds=3)
    down = run.method.download(run.state.server, run.federation.infos[0])
    initial = run.task.common_model("").initial
    rank = run.state.server.w.ranks["body.0.weight"]
    assert 0 < rank <= 5
    assert isinstance(down["body.0.weight"], LowRank)
    assert tree.numel(down["body.0.weight"]) == rank * (10 + 12)
    for name, p in unpack_weights(down, initial).items():
        torch.testing.assert_close(p, get_global_weights(run)[name])
    assert tree.nbytes(down) < tree.nbytes(initial)
    record = run.step()
    assert record.bytes_down == len(SIZES) * tree.encoded_size(down)
    assert record.parameters_up == len(SIZES) * sum(p.numel() for p in initial.values())


def test_of_many_ranks_the_weight_itself_travels() -> None:
    run = run_rounds(FedSLR(**DECAYING_LOCAL, lam=1e-5), federate_one_model(torch.float32), rounds=2)
    down = run.method.download(run.state.server, run.federation.infos[0])
    assert all(torch.is_tensor(p) for p in down.values())


def test_a_sparse_global_model_travels_as_its_entries() -> None:
    run = run_rounds(
        FedSLR(**DECAYING_LOCAL, lam=0.02, prox_step=5.0, global_norm="sparse"),
        federate_one_model(torch.float32),
        rounds=3,
    )
    down = run.method.download(run.state.server, run.federation.infos[0])
    w = get_global_weights(run)
    entries = {n: int(np.count_nonzero(p.numpy())) for n, p in w.items() if p.ndim == 2}
    assert all(0 < entries[n] < 0.9 * w[n].numel() for n in entries)
    vectors = sum(p.numel() for p in w.values() if p.ndim == 1)
    record = run.step()
    assert record.parameters_down == len(SIZES) * (sum(entries.values()) + vectors)
    assert record.bytes_down < record.bytes_up
    for name, p in unpack_weights(down, w).items():
        torch.testing.assert_close(p, w[name], rtol=0, atol=0)


def test_a_client_that_never_took_part_infers_by_the_global_model() -> None:
    run = run_rounds(
        FedSLR(**DECAYING_LOCAL, **STRONG), federate_one_model(torch.float32), rounds=1, participation=0.5
    )
    for info in run.federation.infos:
        made = make_local_model(
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
    run = run_rounds(FedSLR(**DECAYING_LOCAL, **STRONG), federate_one_model(torch.float64), rounds=2)
    info = run.federation.infos[2]
    state, model = run.state_of(info), run.task.model(info)
    made = run.local_model(info).predictors
    x = run.federation.clients[2].test.x
    w = get_global_weights(run)
    torch.testing.assert_close(made["gkr"](x), model.apply(w, x))
    torch.testing.assert_close(made["mixed"](x), model.apply({n: p + state.p[n] for n, p in w.items()}, x))


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

    federation = Federation.from_arrays(make_arrays(), Normed, classes=4)
    run = Run(FedSLR(personal_start="initial"), federation, RunSettings(rounds=1), Sequential())
    initial = run.task.common_model("").initial
    start = run.local_model(federation.infos[0]).personal()
    norms = {"body.1.weight", "body.1.bias", "body.3.weight"}
    assert norms < {*initial}
    for n, w in initial.items():
        assert torch.equal(start[n], w if n in norms else 2 * w)


def test_defaults_are_the_papers() -> None:
    m = FedSLR()
    assert (m.lam, m.mu, m.prox_step, m.epochs, m.fusion_epochs, m.batch_size) == (1e-4, 1e-3, 10.0, 2, 1, 20)
    assert m.optimizer.learning_rate(3) == pytest.approx(0.1 * 0.998**3)
    assert m.optimizer.weight_decay == 1e-3


def test_the_record_counts_parameters_and_ranks_as_the_paper_does() -> None:
    run = run_rounds(
        FedSLR(**DECAYING_LOCAL, **STRONG), federate_one_model(torch.float32), rounds=2, participation=1.0
    )
    record = run.record_initial_models()
    assert record.ranks == run.state.server.w.ranks
    assert record.is_evaluated
    initial = run.task.model(run.federation.infos[0]).initial
    dense, held = get_global_weights(run), {}
    for n, p in initial.items():
        held[n] = p.numel()
        if p.ndim >= 2:
            rank = int(np.linalg.matrix_rank(dense[n].double().numpy(), tol=1e-5))
            assert rank == record.ranks[n]
            held[n] = min(rank * sum(p.shape), p.numel())
    assert record.values("parameters", series="gkr", split="") == [sum(held.values())] * len(
        run.federation.infos
    )
    assert sum(held.values()) < sum(p.numel() for p in initial.values())
    for i, count in enumerate(record.values("parameters", series="mixed", split="")):
        p_i = run.state.clients[i].p
        mixed = {n: min(held[n] + np.count_nonzero(p_i[n].numpy()), p.numel()) for n, p in initial.items()}
        assert sum(held.values()) < count == sum(mixed.values())
    # some weight is cheaper whole than as factors and entries
    assert any(mixed[n] < held[n] + np.count_nonzero(p_i[n].numpy()) for n in initial)


def test_a_client_that_never_took_part_has_no_personal_part() -> None:
    result = simulate(make_low_rank_method("fedslr"), federate_images(), rounds=2, participation=0.25)
    seen = set(result.run.state.clients)
    record = result.rounds[-1]
    assert record.is_evaluated
    unseen = set(range(4)) - seen
    assert unseen
    for i in range(4):
        same = (
            record.values("parameters", series="mixed", split="")[i]
            == record.values("parameters", series="gkr", split="")[i]
        )
        assert same == (i in unseen)
        if i in unseen:
            assert (
                record.values("accuracy", series="mixed", split="test")[i]
                == record.values("accuracy", series="gkr", split="test")[i]
            )


def test_a_sparse_penalty_that_kills_every_personal_part_leaves_the_global_model() -> None:
    method = METHODS["fedslr"](batch_size=10, optimizer=SGD(lr=0.05), lam=0.03, mu=1e6)
    record = simulate(method, federate_images(), rounds=2).rounds[-1]
    assert record.is_evaluated
    assert record.values("accuracy", series="mixed", split="test") == record.values(
        "accuracy", series="gkr", split="test"
    )
    assert record.values("parameters", series="mixed", split="") == record.values(
        "parameters", series="gkr", split=""
    )
