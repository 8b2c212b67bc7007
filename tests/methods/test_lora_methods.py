"""Federated LoRA against NumPy: products, heads and predictions after three rounds, in float64.

Three of four clients of unequal size and rank take part in a round. Two layers of unequal shape are adapted,
with a scale that depends on the rank. FedHL is compared with its dense recursion, though the package never forms W.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from fedlowrank.core import tree
from fedlowrank.core.contract.method import AnyMethod
from fedlowrank.core.learning.optimizer import SGD
from fedlowrank.data.federation import Federation
from fedlowrank.engines.engine import ClientJob, Engine, client_key
from fedlowrank.engines.sequential import Sequential
from fedlowrank.engines.vectorized import Vectorized
from fedlowrank.methods.families.lora_family import Tuning, rank_of_factors
from fedlowrank.methods.fedex_lora import FedExLoRA
from fedlowrank.methods.fedhl import FedHL
from fedlowrank.methods.fedit import FedIT
from fedlowrank.methods.fedsa_lora import FedSALoRA
from fedlowrank.methods.ffa_lora import FFALoRA
from fedlowrank.methods.flexlora import FlexLoRA
from fedlowrank.methods.flora import FLoRA
from fedlowrank.methods.hetlora import HetLoRA
from fedlowrank.rounds.run import Run
from fedlowrank.trust.trust_settings import Clipping, Robust
from fedlowrank.trust.updates import norm
from golden import lora_reference as reference
from golden.reference import Array, Layers, forward

from .setting import CLASSES, Net, arrays, layers, plan, run_of, start_of, train_data

LR = 0.3
LOCAL: dict[str, Any] = {"optimizer": SGD(lr=LR), "batch_size": 8, "epochs": 2}
RANKS = (1, 2, 3, 4)
EQUAL = (3, 3, 3, 3)
NAMES = ("body.0", "body.2")
# scales 2, 1, 2/3 and 1/2 at ranks 1 to 4
TUNING = Tuning(rank=2, scaling="alpha")
ENGINES: Sequence[type[Engine]] = (Sequential, Vectorized)


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> type[Engine]:
    return request.param


def unequal(ranks: Sequence[int] = RANKS) -> Federation:
    """Layers of 9 × 12 and 10 × 9, and a head."""
    return Federation.from_arrays(arrays(), lambda: Net(9, 10), classes=CLASSES, rank=ranks)


def drawn(key: Any, rank: int) -> list[Array]:
    """A as it is defined: uniform in ±1/√k, of each layer by its name."""
    out = []
    for name, k in zip(NAMES, (12, 9), strict=True):
        a = torch.rand(rank, k, generator=(key / "lora" / name).generator()) * 2 - 1
        out.append((a / k**0.5).double().numpy())
    return out


def setting_of(run: Run, scaling: str = "alpha") -> reference.Setting:
    federation = run.federation
    ranks = [i.rank or 0 for i in federation.infos]
    return reference.Setting(
        start_of(federation)[0],
        train_data(federation),
        plan(run),
        LR,
        ranks,
        (lambda r: 2 / r) if scaling == "alpha" else lambda r: 1.0,
        drawn(federation.key / "init", max(ranks)),
    )


def tolerance(engine: type[Engine]) -> float:
    return 1e-7 if engine is Vectorized else 1e-9


def same(found: Any, wanted: Any, atol: float) -> None:
    found = found.detach().numpy() if isinstance(found, torch.Tensor) else found
    assert found.shape == wanted.shape
    np.testing.assert_allclose(found, wanted, rtol=0, atol=atol)


def dense(factors: Any) -> list[Array]:
    """Products of the package's factors."""
    return [factors[n].b.numpy() @ factors[n].a.numpy() for n in NAMES]


def head_is(run: Run, net: Layers, atol: float) -> None:
    (found,) = layers(run.state.server.rest)
    for f, w in zip(found, net[-1], strict=True):
        same(f, w, atol)


def predicts(run: Run, client: int, net: Layers, atol: float, series: str = "personal") -> None:
    """A client's scores on its test examples."""
    x = run.federation.clients[client].test.x
    found = run.local_model(run.federation.infos[client]).predictors[series](x)
    same(found, forward(net, x.double().numpy())[1], atol)


def go(method: AnyMethod, engine: type[Engine], ranks: Sequence[int], **kwargs: Any) -> Run:
    run = run_of(method, unequal(ranks), engine=engine, evaluate_every=9, **{"participation": 0.75, **kwargs})
    # every client takes part, and none in all rounds, or absences would not show
    if not kwargs:
        assert set().union(*plan(run)) == set(range(4))
        assert all(len(r) == 3 for r in plan(run))
    return run


# -- factors averaged ----------------------------------------------------------------------------------------


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", [FedIT, FFALoRA])
def test_means_of_factors(kind: Any, engine: type[Engine]) -> None:
    run = go(kind(tuning=TUNING, **LOCAL), engine, EQUAL)
    s, atol = setting_of(run), tolerance(engine)
    factors, net = reference.fedit(s, move_a=kind is FedIT)
    held = run.state.server.factors
    for n, (b, a) in zip(NAMES, factors, strict=True):
        same(held[n].b, b, atol)
        same(held[n].a, a if kind is FedIT else np.zeros((0, 1)), atol)
    head_is(run, net, atol)
    for k in range(4):
        predicts(run, k, reference.added(net, reference.products(factors, 2 / 3)), atol)


def test_fedsa_keeps_b(engine: type[Engine]) -> None:
    run = go(FedSALoRA(tuning=TUNING, **LOCAL), engine, EQUAL)
    own, net = reference.fedsa(setting_of(run))
    for k, factors in enumerate(own):
        for i, n in enumerate(NAMES):
            same(run.state.clients[k].b[n], factors[i][0], tolerance(engine))
            same(run.state.server.factors[n].a, factors[i][1], tolerance(engine))
        predicts(run, k, reference.added(net, reference.products(factors, 2 / 3)), tolerance(engine))
    head_is(run, net, tolerance(engine))


@pytest.mark.few(1)
def test_zero_padding(engine: type[Engine]) -> None:
    hetlora(HetLoRA(tuning=TUNING, **LOCAL), engine)


@pytest.mark.parametrize(
    ("method", "wanted"),
    [
        ({"weighting": "norm"}, {"by_norm": True}),
        ({"per_index": True}, {"per_index": True}),
        ({"weighting": "norm", "per_index": True}, {"by_norm": True, "per_index": True}),
    ],
    ids=["norm", "index", "both"],
)
def test_weights_of_hetlora(method: dict[str, Any], wanted: dict[str, Any]) -> None:
    hetlora(HetLoRA(tuning=TUNING, **method, **LOCAL), Sequential, **wanted)


def hetlora(
    method: HetLoRA, engine: type[Engine], ranks: Sequence[int] = RANKS, rounds: int = 3, **wanted: Any
) -> list[int]:
    run = go(method, engine, ranks, **({"rounds": rounds} if rounds != 3 else {}))
    s, atol = setting_of(run), tolerance(engine)
    server, net, left = reference.hetlora(s, **wanted)
    for n, (b, a) in zip(NAMES, server, strict=True):
        same(run.state.server.factors[n].b, b, atol)
        same(run.state.server.factors[n].a, a, atol)
    head_is(run, net, atol)
    assert {int(k): r for k, r in run.state.server.ranks.items()} == {
        k: r for k, r in enumerate(left) if r != ranks[k]
    }
    for k, r in enumerate(left):
        cut = [b[:, :r] @ a[:r] for b, a in server]
        predicts(run, k, reference.added(net, cut), atol)
        predicts(run, k, reference.added(net, reference.products(server)), atol, "server")
    return left


@pytest.mark.few(1)
@pytest.mark.parametrize("penalty", [0.0, 0.6])
def test_pruning_of_hetlora(penalty: float) -> None:
    ranks = (2, 3, 4, 8)
    method = HetLoRA(prune=0.7, penalty=penalty, tuning=TUNING, **LOCAL)
    # in five rounds some that have pruned sit out
    left = hetlora(method, Sequential, ranks, 5, prune=0.7, penalty=penalty)
    # the penalty is what shrinks the tails here
    assert (sum(left) < sum(ranks)) == (penalty > 0)
    assert sum(left) > 4


def test_the_norm_of_an_update_of_hetlora_is_that_of_what_the_server_adds_whatever_was_pruned() -> None:
    method = HetLoRA(prune=0.7, penalty=0.6, tuning=TUNING, **LOCAL)
    run = go(method, Sequential, (2, 3, 4, 8), rounds=5)
    jobs = [ClientJob(run.state_of(i), method.download(run.state.server, i), i) for i in run.federation.infos]
    sent = [rank_of_factors(job.down.factors) for job in jobs]
    left = []
    assert sent != [2, 3, 4, 8]
    for job, result in zip(jobs, run.engine.run(method, run.federation, run.task, 5, jobs), strict=True):
        update = method.describe_update(job.down, job.client, run.task)
        reached, before = (
            method.contribution(upload, job.client, run.state.server) for upload in (result.upload, job.down)
        )
        parts = [
            (new.dense() - before["factors"].value[n].dense()).numpy()
            for n, new in reached["factors"].value.items()
        ]
        parts += [(t - before["rest"].value[n]).numpy() for n, t in reached["rest"].value.items()]
        wanted = np.linalg.norm(np.concatenate([part.ravel() for part in parts]))
        assert norm(result.upload, update.reference, update.scale) == pytest.approx(wanted, rel=1e-9)
        left.append(rank_of_factors(result.upload.factors))
    # some prune in this round, after a rank that was pruned before
    assert any(a < b for a, b in zip(left, sent, strict=True))


@pytest.mark.parametrize(
    "trust",
    [{"clipping": Clipping(0.1)}, {"robust": Robust(rule="norm_bound")}],
    ids=["clipping", "norm_bound"],
)
def test_hetlora_prunes_under_a_bound_on_its_updates(trust: dict[str, Any]) -> None:
    method = HetLoRA(prune=0.7, penalty=0.6, tuning=TUNING, **LOCAL)
    run = run_of(method, unequal((2, 3, 4, 8)), 4, **trust)
    server = run.state.server
    assert all(t.isfinite().all() for t in tree.tensors(getattr(server, "inner", server)))


# -- updates averaged ----------------------------------------------------------------------------------------


def updates_are(run: Run, ws: list[Array], net: Layers, ranks: Sequence[int], atol: float) -> None:
    for n, w in zip(NAMES, ws, strict=True):
        same(run.state.server.delta[n].dense(), w, atol)
    head_is(run, net, atol)
    for k, r in enumerate(ranks):
        predicts(run, k, reference.added(net, [reference.best(w, r) for w in ws]), atol)
        predicts(run, k, reference.added(net, ws), atol, "server")


@pytest.mark.full
def test_flexlora(engine: type[Engine]) -> None:
    run = go(FlexLoRA(tuning=TUNING, **LOCAL), engine, RANKS)
    ws, net = reference.flexlora(setting_of(run))
    updates_are(run, ws, net, RANKS, tolerance(engine))


@pytest.mark.few(1)
@pytest.mark.parametrize("split", ["B", "A", "sqrt"])
@pytest.mark.parametrize("kind", [FedHL, FlexLoRA])
def test_which_factor_takes_the_singular_values(kind: Any, split: Any) -> None:
    run = go(kind(split=split, tuning=TUNING, **LOCAL), Sequential, RANKS)
    s = setting_of(run)
    ws, net, *_ = reference.fedhl(s, split) if kind is FedHL else reference.flexlora(s, split)
    updates_are(run, ws, net, RANKS, 1e-9)


@pytest.mark.parametrize("kind", [FedHL, FlexLoRA])
def test_components_that_w_does_not_fill_begin_at_random(kind: Any) -> None:
    # one client a round: after that of rank 1 all others have dead components
    run = go(kind(tuning=TUNING, **LOCAL), Sequential, (3, 1, 4, 2), participation=0.25, rounds=4)
    s = setting_of(run)
    order = [s.ranks[k] for r in s.rounds for k in r]
    assert order[:3] == [1, 3, 4], "clients must follow those of smaller rank"
    ws, net, *_ = reference.fedhl(s) if kind is FedHL else reference.flexlora(s)
    updates_are(run, ws, net, s.ranks, 1e-9)


# -- updates of the base -------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("keep", ["merged", "stacked"])
def test_flora(keep: Any, engine: type[Engine]) -> None:
    if keep == "stacked" and engine is not Sequential:
        pytest.skip("the same boxes as merged")
    run = go(FLoRA(keep=keep, tuning=TUNING, **LOCAL), engine, RANKS)
    s = setting_of(run)
    draws = [
        {k: drawn(client_key(run.federation, k, t), s.ranks[k]) for k in clients}
        for t, clients in enumerate(s.rounds)
    ]
    net = reference.flora(s, draws)
    head_is(run, net, tolerance(engine))
    for k in range(4):
        # those absent in the last round catch up here
        predicts(run, k, net, tolerance(engine))
        predicts(run, k, net, tolerance(engine), "server")


def test_fedex(engine: type[Engine]) -> None:
    run = go(FedExLoRA(tuning=TUNING, **LOCAL), engine, EQUAL)
    factors, net = reference.fedex(setting_of(run))
    for n, (b, a) in zip(NAMES, factors, strict=True):
        same(run.state.server.factors[n].b, b, tolerance(engine))
        same(run.state.server.factors[n].a, a, tolerance(engine))
    head_is(run, net, tolerance(engine))
    whole = reference.added(net, reference.products(factors, 2 / 3))
    for k in range(4):
        predicts(run, k, whole, tolerance(engine))
        predicts(run, k, whole, tolerance(engine), "server")
