"""Federated LoRA in its limits: what must come out equal, and what must not change."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from contract import Reply
from fedlowrank.adapters.lora.lora_factors import lora_of
from fedlowrank.adapters.lora.lora_layers import add_lora
from fedlowrank.adapters.wire_format import unpack_factors
from fedlowrank.core import tree
from fedlowrank.core.contract.method import AnyMethod
from fedlowrank.core.key import Key
from fedlowrank.core.learning.optimizer import SGD, AdamW
from fedlowrank.data.federation import Federation
from fedlowrank.linalg.pair import Pair
from fedlowrank.methods.families.lora_family import Scaling, Tuning
from fedlowrank.methods.fedavg import FedAvg
from fedlowrank.methods.fedex_lora import FedExLoRA
from fedlowrank.methods.fedhl import FedHL
from fedlowrank.methods.fedit import FedIT
from fedlowrank.methods.fedsa_lora import FedSALoRA
from fedlowrank.methods.ffa_lora import FFALoRA
from fedlowrank.methods.flexlora import FlexLoRA
from fedlowrank.methods.flora import FLoRA
from fedlowrank.methods.hetlora import HetLoRA
from fedlowrank.rounds.run import Run
from fedlowrank.storage.client_store import ClientStore
from fedlowrank.storage.state import State

from .setting import CLASSES, Net, arrays, order_of, run_of, view_of

LR = 0.5
LOCAL: dict[str, Any] = {"optimizer": SGD(lr=LR), "batch_size": 8, "epochs": 2}
REST: dict[str, Any] = {**LOCAL, "optimizer": SGD(lr=0.0)}
NAMES = ("body.0", "body.2")
QUIET: dict[str, Any] = {"evaluate_every": 9}
UNEQUAL = (1, 2, 3, 4)
FULL = (9, 9, 9, 9)


def federation(
    ranks: Sequence[int | None] = UNEQUAL, module: Any = lambda: Net(9, 10), clients: Any = None
) -> Federation:
    return Federation.from_arrays(clients or arrays(), module, classes=CLASSES, rank=ranks)


def same_trees(a: Any, b: Any, atol: float = 1e-10) -> None:
    tree.map_leaves(lambda x, y: torch.testing.assert_close(x, y, rtol=0, atol=atol), a, b)


def whole(run: Run) -> dict[str, Tensor]:
    """W of every layer."""
    return {n: run.state.server.delta[n].dense() for n in NAMES}


def replies_of(run: Run, clients: Sequence[int] = range(4)) -> list[Reply]:
    """What these clients would send now."""
    out = []
    for info in (run.federation.infos[k] for k in clients):
        down = run.method.download(run.state.server, info)
        out.append(Reply(info, run.method.local_update(run.state_of(info), down, view_of(run, info.id))[1]))
    return out


def scores(run: Run, client: int, series: str = "personal") -> Tensor:
    return (
        run.local_model(run.federation.infos[client])
        .predictors[series](run.federation.clients[client].test.x)
        .detach()
    )


def by_torch(module: nn.Module, run: Run, rounds: int) -> None:
    """Train client 0's data by torch's own SGD, in the order in which the run sees them."""
    info, data = run.federation.infos[0], run.federation.clients[0].train
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=LR)
    for t in range(rounds):
        for i in order_of(run, t, info)[0]:
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(data.x[i]), data.y[i]).backward()
            optimizer.step()


def wrapped(run: Run, rank: int, drawn: dict[str, Tensor], alpha: float | None = None) -> nn.Module:
    """The federation's network with our LoRA layers, A as drawn."""
    base = Net(9, 10)
    base.load_state_dict(run.federation.architectures["model"].initial)
    made = add_lora(base, rank, alpha, trainable=("head",))
    with torch.no_grad():
        for name, a in drawn.items():
            made.get_submodule(name).lora_A.copy_(a)
    return made


def drawn(key: Key, rank: int) -> dict[str, Tensor]:
    widths = dict(zip(NAMES, (12, 9), strict=True))
    return {
        n: ((torch.rand(rank, k, generator=(key / "lora" / n).generator()) * 2 - 1) / k**0.5).double()
        for n, k in widths.items()
    }


# -- one method is another -----------------------------------------------------------------------------------


def test_fedit_of_one_client_is_training_alone() -> None:
    run = run_of(FedIT(tuning=Tuning(rank=2), **LOCAL), federation([2], clients=arrays()[:1]), **QUIET)
    module = wrapped(run, 2, drawn(run.federation.key / "init", 2))
    by_torch(module, run, 3)
    torch.testing.assert_close(scores(run, 0), module(run.federation.clients[0].test.x), rtol=0, atol=1e-10)
    assert bool(module.body[0].lora_B.any())


@pytest.mark.full
@pytest.mark.parametrize("optimizer", [SGD(lr=0.2, momentum=0.9, weight_decay=0.01), AdamW(lr=0.01)])
def test_fedit_is_fedavg_of_a_module_with_lora_layers(optimizer: Any) -> None:
    local = {**LOCAL, "optimizer": optimizer}
    held = add_lora(Net(9, 10), 3, 5.0, trainable=("head",))
    a = run_of(FedIT(**local), federation([3] * 4, held), steps=0, participation=0.75, **QUIET)
    b = run_of(FedAvg(**local), federation([3] * 4, held), steps=0, participation=0.75, **QUIET)
    start = a.personal(a.federation.infos[0])
    assert start.keys() == b.state.server.keys()
    b.state = State(0, {n: start[n] for n in b.state.server}, ClientStore())
    for _ in range(3):
        a.step()
        b.step()
    assert tree.equal({n: a.personal(a.federation.infos[0])[n] for n in b.state.server}, b.state.server)
    moved = [n for n, t in b.state.server.items() if not torch.equal(t, start[n])]
    assert len(moved) == 6


@pytest.mark.full
@pytest.mark.parametrize("alpha", [0.75, 3.0, 12.0])
@pytest.mark.parametrize("optimizer", [SGD(lr=0.05, momentum=0.5, weight_decay=0.01), AdamW(lr=0.01)])
def test_zero_padding_of_equal_ranks_is_fedit(alpha: float, optimizer: Any) -> None:
    local = {**LOCAL, "optimizer": optimizer}
    held = add_lora(Net(9, 10), 3, alpha, trainable=("head",))
    a, b = (
        run_of(kind(**local), federation([3] * 4, held), participation=0.75, **QUIET)
        for kind in (HetLoRA, FedIT)
    )
    for info in a.federation.infos:
        same_trees(a.personal(info), b.personal(info), 1e-12)
    # the server of zero padding holds factors of scale 1
    for n in NAMES:
        mine, theirs = a.state.server.factors[n], b.state.server.factors[n]
        same_trees(mine.dense(), alpha / 3 * theirs.dense(), 1e-12)
        assert float(theirs.b.norm()) > 1e-3


@pytest.mark.parametrize("scaling", ["equal", "alpha"])
def test_clients_of_zero_padding_begin_at_the_a_that_was_drawn(scaling: Any) -> None:
    held = add_lora(Net(9, 10), 4, 10.0, trainable=("head",))
    run = run_of(
        HetLoRA(tuning=Tuning(scaling=scaling), **LOCAL), federation(UNEQUAL, held), steps=0, **QUIET
    )
    for info, rank in zip(run.federation.infos, UNEQUAL, strict=True):
        sent = unpack_factors(run.method.download(run.state.server, info).factors)
        for n, a in drawn(run.federation.key / "init", 4).items():
            assert torch.equal(sent[n].a, a[:rank])
            assert sent[n].b.shape[1] == rank
            assert not bool(sent[n].b.any())


# -- exact means ---------------------------------------------------------------------------------------------


def test_fedex_of_one_round_is_the_base_with_the_mean_update() -> None:
    method = FedExLoRA(tuning=Tuning(rank=6, scaling="alpha"), **LOCAL)
    run = run_of(method, federation([3] * 4), steps=0, **QUIET)
    ups = replies_of(run)
    run.step()
    found = method.server_model(run.state.server, run.state.clients[0], view_of(run, 0))
    sizes = np.array([r.client.examples for r in ups], dtype=float)
    for n in NAMES:
        pairs = [r.upload.factors[n] for r in ups]
        update = sum(
            p * 2 * q.b.numpy() @ q.a.numpy() for p, q in zip(sizes / sizes.sum(), pairs, strict=True)
        )
        base = run.federation.architectures["model"].initial[f"{n}.weight"].numpy()
        np.testing.assert_allclose(found[f"{n}.weight"].numpy(), base + update, rtol=0, atol=1e-13)
        # which the product of the means is not: the residual is there
        assert np.linalg.norm(update - 2 * run.state.server.factors[n].dense().numpy()) > 1e-3


@pytest.mark.full
def test_the_mean_of_ffa_is_the_mean_of_its_updates_and_that_of_fedit_is_not() -> None:
    gaps = {}
    for kind in (FFALoRA, FedIT):
        run = run_of(kind(**LOCAL), federation([3] * 4), steps=0, **QUIET)
        ups = replies_of(run)
        run.step()
        sizes, a0 = (
            np.array([r.client.examples for r in ups], dtype=float),
            drawn(run.federation.key / "init", 3),
        )
        for n in NAMES:
            held = [r.upload.factors[n] for r in ups]
            a = [a0[n] if kind is FFALoRA else p.a for p in held]
            update = sum(w * p.b @ q for w, p, q in zip(sizes / sizes.sum(), held, a, strict=True))
            server = run.state.server.factors[n]
            mean = server.b @ (a0[n] if kind is FFALoRA else server.a)
            gaps[kind, n] = float((update - mean).abs().max())
            assert tuple(server.a.shape) == ((0, 1) if kind is FFALoRA else a0[n].shape)
    assert max(gaps[FFALoRA, n] for n in NAMES) < 1e-15
    assert min(gaps[FedIT, n] for n in NAMES) > 1e-5


@pytest.mark.full
@pytest.mark.parametrize("kind", [FLoRA, FedExLoRA])
def test_a_base_that_is_merged_predicts_as_one_with_a_stack_beside(kind: Any) -> None:
    ranks = UNEQUAL if kind is FLoRA else (3,) * 4
    tuning = Tuning(rank=2, scaling="alpha")
    a, b = (
        run_of(kind(keep=k, tuning=tuning, **LOCAL), federation(ranks), participation=0.5, **QUIET)
        for k in ("merged", "stacked")
    )
    for k in range(4):
        same_trees(scores(a, k), scores(b, k))
    merged, stacked = (r.state.clients[max(r.state.clients)].base for r in (a, b))
    assert merged.dense or merged.stacks
    assert stacked.stacks
    assert not stacked.dense


# -- scales --------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("kind", [FedHL, FlexLoRA, FLoRA, HetLoRA, FedIT, FFALoRA, FedSALoRA, FedExLoRA])
def test_at_the_configured_rank_both_scalings_are_one(kind: Any) -> None:
    held = add_lora(Net(9, 10), 3, 2.0, trainable=("head",), rslora=True)
    a, b = (
        run_of(kind(tuning=Tuning(scaling=s), **LOCAL), federation([3] * 4, held), rounds=2, **QUIET)
        for s in ("equal", "alpha")
    )
    skip = {f"/scaling{x}" for x in ("", "/power")}
    assert {p for p, _ in tree.leaves(a.state.server)} == {p for p, _ in tree.leaves(b.state.server)} - skip
    for (path, x), (_, y) in zip(tree.leaves(a.state.server), tree.leaves(b.state.server), strict=True):
        assert torch.equal(x, y), path
    for k in range(4):
        assert torch.equal(scores(a, k), scores(b, k))


@pytest.mark.parametrize(("rslora", "at_two"), [(False, 3.0), (True, 6 / 2**0.5)])
def test_alpha_falls_by_the_rank_or_by_its_root(rslora: bool, at_two: float) -> None:
    held = add_lora(Net(9, 10), 4, 6.0, trainable=("head",), rslora=rslora)
    model = federation([None] * 4, held).architectures["model"]
    assert Tuning(scaling="alpha").scaling_of(lora_of(model)).at(2) == pytest.approx(at_two, rel=1e-15)
    assert Tuning(scaling="equal").scaling_of(lora_of(model)).at(2) == pytest.approx(
        6 / (2 if rslora else 4), rel=1e-15
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", [FedHL, FlexLoRA, HetLoRA])
def test_what_a_client_adds_does_not_depend_on_its_scale(kind: Any) -> None:
    run = run_of(kind(tuning=Tuning(rank=2), **LOCAL), federation(), rounds=2, **QUIET)
    before = [scores(run, k) for k in range(4)]
    run.method = kind(tuning=Tuning(rank=2, scaling="alpha"), **LOCAL)
    run.state = State(
        2, dataclasses.replace(run.state.server, scaling=Scaling(1.0, 2, 1.0)), run.state.clients
    )
    for k in range(4):
        same_trees(scores(run, k), before[k])


# -- nothing is lost -----------------------------------------------------------------------------------------


def zero_step_settings(method: AnyMethod, run: Run, steps: int = 3) -> float:
    """By how much W changes in rounds in which nobody trains, from where the run stands."""
    before = whole(run)
    run.method = method
    for _ in range(steps):
        run.step()
    return max(float((whole(run)[n] - before[n]).abs().max()) for n in NAMES)


def random_pair(rng: np.random.Generator, d: int, r: int, k: int) -> Pair:
    return Pair(torch.from_numpy(rng.normal(size=(d, r))), torch.from_numpy(rng.normal(size=(r, k))))


@functools.cache
def made_once() -> Federation:
    return federation()


def ranked(ranks: Sequence[int]) -> Federation:
    infos = [dataclasses.replace(i, rank=r) for i, r in zip(made_once().infos, ranks, strict=True)]
    return dataclasses.replace(made_once(), infos=infos)
