"""Per-FedAvg, FedRep, FedPer and FedSpa: against NumPy, in their limits, and what crosses the wire."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from contract import personal
from fedlowrank.core import tree
from fedlowrank.core.contract.method import Batch
from fedlowrank.core.contract.training_request import Request
from fedlowrank.core.errors import ConfigError, TaskError
from fedlowrank.core.learning.optimizer import SGD, AdamW
from fedlowrank.data.federation import Federation
from fedlowrank.engines.engine import Engine
from fedlowrank.engines.sequential import Sequential
from fedlowrank.engines.vectorized import Vectorized
from fedlowrank.methods.fedavg import FedAvg
from fedlowrank.methods.fedper import FedPer
from fedlowrank.methods.fedrep import FedRep
from fedlowrank.methods.fedspa import FedSpa, layer_counts, next_mask
from fedlowrank.methods.per_fedavg import PerFedAvg, half
from fedlowrank.models.architectures.resnet import ResNet18
from fedlowrank.results.local_model import local_model
from fedlowrank.rounds.run import Run
from fedlowrank.rounds.run_settings import RunSettings
from golden import personal_reference, reference

from .setting import (
    CLASSES,
    INPUTS,
    SIZES,
    WIDTH,
    Net,
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
    view_of,
)

LR = 0.3
LOCAL = {"optimizer": SGD(lr=LR), "batch_size": 8, "epochs": 2}
SAMPLE = {"participation": 0.75}
F32 = {"dtype": torch.float32}


def download(run: Run, client: int) -> Any:
    return run.method.download(run.state.server, run.federation.infos[client])


def state_of(run: Run, client: int) -> Any:
    return run.state_of(run.federation.infos[client])


def personal_of(run: Run, client: int, round: int | None = None) -> Any:
    return personal(run.method, state_of(run, client), download(run, client), view_of(run, client, round))


# -- against NumPy -------------------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize("weights", ["uniform", "examples"])
def test_per_fedavg_of_first_order(weights: str, engine: type[Engine]) -> None:
    federation = alike()
    run = run_of(PerFedAvg(alpha=0.4, weighting=weights, **LOCAL), federation, engine=engine, **SAMPLE)
    # one client's last batch is a single example
    assert any(len(step) == 1 for clients in plan(run) for steps, _ in clients.values() for step in steps)
    wanted = personal_reference.per_fedavg(
        start_of(federation)[0], train_data(federation), plan(run), 0.4, LR, weighted=weights == "examples"
    )
    same(layers(run.state.server), wanted)
    assert all(s is None for s in states(run))


@pytest.mark.full
@pytest.mark.parametrize("delta", [0.001, 0.1])
def test_hessian_free_per_fedavg(delta: float, engine: type[Engine]) -> None:
    federation = alike()
    method = PerFedAvg(alpha=0.4, variant="hessian_free", delta=delta, **LOCAL)
    run = run_of(method, federation, engine=engine, **SAMPLE)
    wanted = personal_reference.per_fedavg(
        start_of(federation)[0], train_data(federation), plan(run), 0.4, LR, delta=delta
    )
    same(layers(run.state.server), wanted)


def test_fedper(engine: type[Engine]) -> None:
    federation = alike()
    run = run_of(FedPer(**LOCAL), federation, engine=engine, **SAMPLE)
    start = start_of(federation)
    body, heads = personal_reference.fedper(
        start[0][:-1], [s[-1:] for s in start], train_data(federation), plan(run), LR
    )
    same(layers(run.state.server), body)
    same([layers(s) for s in states(run)], heads)
    for k in range(len(SIZES)):
        same(layers(personal_of(run, k)), body + heads[k])


@pytest.mark.parametrize("head_epochs", [1, 3])
def test_fedrep(head_epochs: int, engine: type[Engine]) -> None:
    federation = alike()
    run = run_of(FedRep(head_epochs=head_epochs, **LOCAL), federation, engine=engine, **SAMPLE)
    start, rounds = start_of(federation), plan(run)
    for k, (of_head, of_body) in rounds[0].items():
        assert (len(of_head), len(of_body)) == (head_epochs * -(-SIZES[k] // 8), 2 * -(-SIZES[k] // 8))
    body, heads = personal_reference.fedrep(
        start[0][:-1], [s[-1:] for s in start], train_data(federation), rounds, LR
    )
    same(layers(run.state.server), body)
    same([layers(s) for s in states(run)], heads)
    for k in range(len(SIZES)):
        same(layers(personal_of(run, k)), body + heads[k])


@pytest.mark.few(3)
@pytest.mark.parametrize(("density", "prune"), [(0.5, 0.5), (0.6, 1.0), (0.5, 0.0)])
def test_fedspa(density: float, prune: float, engine: type[Engine]) -> None:
    federation = alike()
    method = FedSpa(density=density, prune=prune, **LOCAL)
    run = run_of(method, federation, engine=engine, **SAMPLE)
    first = [method.client_init(run.task, i) for i in federation.infos]
    names = [n for n, p in federation.architectures["small"].initial.items() if p.ndim == 2]
    masks = [[m[n].numpy() for n in names] for m in first]
    net, masks = personal_reference.fedspa(
        start_of(federation)[0], masks, train_data(federation), plan(run), LR, prune
    )
    same(layers(run.state.server.model), net)
    for k, state in enumerate(states(run)):
        for n, m in zip(names, masks[k], strict=True):
            assert np.array_equal(state[n].numpy(), m)
            assert torch.equal(state[n], first[k][n]) == (prune == 0)
        same(layers(personal_of(run, k)), personal_reference.on(net, masks[k]))


# -- Per-FedAvg ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 6, 7])
def test_the_halves_of_a_padded_batch_hold_the_examples_of_the_bare_one(count: int) -> None:
    x = torch.arange(float(count))[:, None]
    bare = Batch({"a": x, "b": -x}, torch.arange(count))
    padded = Batch(
        {n: functional.pad(t, (0, 0, 0, 9 - count)) for n, t in bare.x.items()},
        functional.pad(bare.y, (0, 9 - count)),
        torch.arange(9) < count,
    )
    seen = []
    for which in (0, 1):
        short, long = half(bare, which), half(padded, which)
        assert short.mask is None
        assert torch.equal(long.y[long.mask], short.y)
        for n, t in short.x.items():
            assert torch.equal(long.x[n][long.mask], t)
            torch.testing.assert_close(long.mean(long.x[n][:, 0]), short.mean(t[:, 0]))
        seen += short.y.tolist()
    assert sorted(seen) == (list(range(count)) if count > 1 else [0, 0])


def test_a_hessian_free_step_follows_the_gradient_through_the_inner_step() -> None:
    federation = alike()
    data, model = federation.clients[1].train, federation.architectures["small"]
    step = {}
    for variant in ("hessian_free", "first_order"):
        # all nine examples of the client in one batch
        step_size = {"delta": 1e-6} if variant == "hessian_free" else {}
        method = PerFedAvg(optimizer=SGD(lr=1.0), batch_size=9, alpha=0.5, variant=variant, **step_size)
        run = run_of(method, federation, steps=0)
        start = download(run, 1)
        step[variant] = tree.sub(start, method.local_update(None, start, view_of(run, 1))[1])
        ((order,), _) = plan(run)[0][1]
    one, two = torch.as_tensor(order[0::2].copy()), torch.as_tensor(order[1::2].copy())
    theta = {n: p.clone().requires_grad_() for n, p in start.items()}

    def risk(params: Any, index: Tensor) -> Tensor:
        return functional.cross_entropy(model.apply(params, data.x[index]), data.y[index])

    inner = torch.autograd.grad(risk(theta, one), list(theta.values()), create_graph=True)
    moved = {n: p - 0.5 * g for (n, p), g in zip(theta.items(), inner, strict=True)}
    exact = dict(zip(theta, torch.autograd.grad(risk(moved, two), list(theta.values())), strict=True))
    tree.map_leaves(
        lambda g, e: torch.testing.assert_close(g, e, rtol=0, atol=1e-7), step["hessian_free"], exact
    )
    # the second-order term is not a trifle
    assert max((step["first_order"][n] - g).abs().max() for n, g in exact.items()) > 1e-3


@pytest.mark.full
def test_per_fedavg_without_an_inner_step_is_sgd_on_every_second_example() -> None:
    federation = alike()
    runs = [
        run_of(PerFedAvg(alpha=0.0, variant=v, **LOCAL), federation, **SAMPLE)
        for v in ("first_order", "hessian_free")
    ]
    assert tree.equal(runs[0].state.server, runs[1].state.server)
    net = start_of(federation)[0]
    for clients in plan(runs[0]):
        replies = [
            reference.plain_sgd(
                net, *train_data(federation)[k], [s if len(s) == 1 else s[1::2] for s in steps], LR
            )
            for k, (steps, _) in clients.items()
        ]
        net = reference.weighted_mean(replies, [1] * len(replies))
    same(layers(runs[0].state.server), net)


def predictors(run: Run, client: int) -> Any:
    info = run.federation.infos[client]
    with torch.inference_mode():
        return local_model(
            run.method,
            run.federation,
            run.task,
            run.engine,
            state_of(run, client),
            info,
            run.round,
            server=run.state.server,
        ).predictors


@pytest.mark.few(1)
def test_per_fedavg_infers_after_one_step_on_a_batch_of_the_training_data(engine: type[Engine]) -> None:
    federation = alike()
    run = run_of(PerFedAvg(alpha=0.4, **LOCAL), federation, engine=engine, rounds=4, steps=2, **SAMPLE)
    net = layers(run.state.server)
    for k in range(len(SIZES)):
        x, y = train_data(federation)[k]
        (first,) = order_of(run, run.round, federation.infos[k])[1]
        assert len(first) == 8
        wanted = reference.descended(net, reference.gradient(net, x[first], y[first]), 0.4)
        same(layers(personal_of(run, k)), wanted)
        found = predictors(run, k)
        assert list(found) == ["adapted", "global"]
        probe = federation.clients[k].test.x
        same(found["adapted"](probe), reference.forward(wanted, probe.double().numpy())[1])
        same(found["global"](probe), reference.forward(net, probe.double().numpy())[1])


@pytest.mark.few(1)
@pytest.mark.parametrize("make", [PerFedAvg, FedRep, FedPer, FedSpa])
def test_no_model_depends_on_test_data(make) -> None:
    clean, poisoned = arrays(), arrays()
    for part in poisoned:
        x, y = part["test"]
        part["test"] = (1e4 * x + 7, (y + 1) % CLASSES)
    runs = [run_of(make(**LOCAL), alike(clients=c), **SAMPLE) for c in (clean, poisoned)]
    probe = torch.randn(5, INPUTS, generator=torch.Generator().manual_seed(0))
    for k in range(len(SIZES)):
        assert not torch.equal(*(r.federation.clients[k].test.x for r in runs))
        assert tree.equal(*(personal_of(r, k) for r in runs))
        for a, b in zip(*(predictors(r, k).values() for r in runs), strict=True):
            assert torch.equal(a(probe), b(probe))


# -- FedRep and FedPer ---------------------------------------------------------------------------------------


class Spy:
    """A trainer that notes what it was asked and what came of it."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.seen: list[tuple[Request, Any]] = []

    def train(self, request: Request) -> Any:
        end = self.trainer.train(request)
        self.seen.append((request, end))
        return end


@pytest.mark.parametrize("optimizer", [SGD(lr=LR, momentum=0.9, weight_decay=0.1), AdamW(lr=0.1)])
def test_fedrep_freezes_what_it_does_not_train_in_each_phase(optimizer) -> None:
    federation = alike(**F32)
    method = FedRep(optimizer=optimizer, batch_size=8, head_epochs=2)
    run = run_of(method, federation, steps=1)
    model, info = federation.architectures["small"], federation.infos[2]
    spy = Spy(run.engine.trainer(method, federation, 1, info))
    down, state = download(run, 2), state_of(run, 2)
    before = tree.encode((down, state))
    head, body = method.local_update(state, down, view_of(run, 2, 1, spy))
    assert tree.encode((down, state)) == before
    (first, end_of_first), (second, end_of_second) = spy.seen
    assert (first.name, second.name) == ("head", "base")
    # phase one trains the old head on the body as received, phase two that body below the new head
    assert tree.equal((first.start, first.constants), (state, (down,)))
    assert tree.equal((second.start, second.constants), (down, (end_of_first,)))
    assert tree.equal((head, body), (end_of_first, end_of_second))
    assert head.keys() == model.head_of(model.initial).keys()
    assert body.keys() == model.body_of(model.initial).keys()
    for name, p in ({**head, **body}).items():
        assert not torch.equal(p, {**state, **down}[name])


def test_how_long_fedrep_trains_the_body_does_not_touch_the_head() -> None:
    short, long = (run_of(FedRep(optimizer=SGD(lr=LR), epochs=e), alike(**F32), steps=1) for e in (1, 3))
    for k in range(len(SIZES)):
        assert tree.equal(state_of(short, k), state_of(long, k))
    assert not tree.equal(short.state.server, long.state.server)


@pytest.mark.few(1)
@pytest.mark.parametrize("make", [FedRep, FedPer])
def test_only_the_body_crosses_in_both_directions(make) -> None:
    run = run_of(make(**LOCAL), alike(**F32), steps=1)
    body = sum(p.numel() for n, p in run.state.server.items())
    assert body == INPUTS * WIDTH + WIDTH
    _, up = run.method.local_update(state_of(run, 0), download(run, 0), view_of(run, 0))
    assert tree.numel(up) == tree.numel(download(run, 0)) == body
    # heads part, bodies do not
    assert not tree.equal(state_of(run, 0), state_of(run, 1))
    model = run.federation.architectures["small"]
    assert tree.equal(*(model.body_of(personal_of(run, k)) for k in (0, 1)))


@pytest.mark.parametrize("make", [FedRep, FedPer])
def test_a_model_without_a_head_is_refused(make) -> None:
    federation = Federation.from_arrays(
        arrays(), {"bare": lambda: nn.Sequential(nn.Linear(INPUTS, CLASSES))}, classes=4
    )
    with pytest.raises(TaskError, match="names no head"):
        Run(make(), federation, RunSettings(rounds=1), Sequential())


# -- FedSpa --------------------------------------------------------------------------------------------------


def shapes_of(module: nn.Module) -> dict[str, Tensor]:
    return {n: p.detach() for n, p in module.named_parameters()}


@pytest.mark.parametrize("density", [0.1, 0.5, 0.8, 1.0])
@pytest.mark.parametrize("make", [lambda: Net(9, WIDTH), lambda: ResNet18((3, 32, 32), 10, width=16)])
def test_erk_densities_are_those_of_the_formula(make, density: float) -> None:
    params = shapes_of(make())
    counts = layer_counts(params, density)
    wanted = personal_reference.erk_counts([tuple(p.shape) for p in params.values()], density)
    for name, count in zip([n for n, p in params.items() if p.ndim > 1], wanted, strict=True):
        assert counts[name] == pytest.approx(count, abs=0.5 + 1e-6)
        assert 1 <= counts[name] <= params[name].numel()
    vectors = sum(p.numel() for p in params.values() if p.ndim == 1)
    total = sum(p.numel() for p in params.values())
    assert sum(counts.values()) + vectors == pytest.approx(density * total, abs=len(counts) / 2)


def test_a_density_that_the_vectors_use_up_is_refused_before_training() -> None:
    # 14 of 174 parameters are vectors, and each of the two weights needs an entry
    fits = Run(FedSpa(density=0.1), alike(), RunSettings(rounds=1), Sequential())
    assert {n: int(m.sum()) for n, m in state_of(fits, 0).items()} == {"body.0.weight": 2, "head.weight": 1}
    with pytest.raises(TaskError, match=r"density 0\.08"):
        Run(FedSpa(density=0.08), alike(), RunSettings(rounds=1), Sequential())


def test_erk_densities_by_hand() -> None:
    # sums of the shapes 5, 24 and 16; a budget of 70: 70 / 45 is more than the first can take (6 of 7.8), and
    # the others share 64 at 24 : 16
    params = {
        "a": torch.zeros(2, 3),
        "b": torch.zeros(10, 8, 3, 3),
        "c": torch.zeros(8, 8),
        "v": torch.zeros(2),
    }
    counts = layer_counts(params, 72 / 792)
    assert counts == {"a": 6, "b": round(64 * 24 / 40), "c": round(64 * 16 / 40)}
    # the long weight is full although it is the larger: 30 · 21 / 29 is more than its 20, and 10 are left
    assert layer_counts({"square": torch.zeros(4, 4), "long": torch.zeros(1, 20)}, 30 / 36) == {
        "long": 20,
        "square": 10,
    }


def test_pruning_and_regrowth_entry_by_entry() -> None:
    rng = np.random.default_rng(0)
    for trial, rate in itertools.product(range(8), (0.0, 0.07, 0.5, 1.0)):
        shape = ((4, 5), (3, 2, 3, 3))[trial % 2]
        mask = rng.random(shape) < (0.2, 0.5, 0.9, 1.0)[trial // 2]
        weight, gradient = rng.normal(size=shape) * mask, rng.normal(size=shape)
        # some inputs of a ReLU network are dead
        gradient[rng.random(shape) < 0.4] = 0
        found = next_mask(*map(torch.as_tensor, (mask, weight, gradient)), rate).numpy()
        assert np.array_equal(found, personal_reference.exchanged(mask, weight, gradient, rate))
        assert found.sum() == mask.sum()
        if rate == 0:
            assert np.array_equal(found, mask)


def test_a_mask_stays_where_nothing_has_a_gradient() -> None:
    mask = torch.rand(6, 7, generator=torch.Generator().manual_seed(0)) < 0.5
    weight = torch.where(mask, torch.randn(6, 7, generator=torch.Generator().manual_seed(1)), 0.0)
    assert torch.equal(next_mask(mask, weight, torch.zeros(6, 7), 0.5), mask)


def test_the_share_exchanged_falls_by_half_a_cosine() -> None:
    federation, rounds = alike(**F32), 4
    run = run_of(FedSpa(prune=0.8, **LOCAL), federation, rounds=rounds, steps=0)
    for t in range(rounds):
        before = state_of(run, 0)
        spy = Spy(run.engine.trainer(run.method, federation, t, federation.infos[0]))
        after, _ = run.method.local_update(before, download(run, 0), view_of(run, 0, t, spy))
        end, slope = (result for _, result in spy.seen)
        rate = (0.8, 0.4 * (1 + 0.5**0.5), 0.4, 0.4 * (1 - 0.5**0.5))[t]
        for n, m in before.items():
            wanted = personal_reference.exchanged(m.numpy(), end[n].numpy(), slope[n].numpy(), rate)
            assert np.array_equal(after[n].numpy(), wanted)


def test_the_gradient_that_grows_is_dense_and_leaves_the_model_alone() -> None:
    federation = alike()
    run = run_of(FedSpa(**LOCAL), federation, steps=1)
    spy = Spy(run.engine.trainer(run.method, federation, run.round, federation.infos[2]))
    state, down = state_of(run, 2), download(run, 2)
    _, up = run.method.local_update(state, down, view_of(run, 2, run.round, spy))
    (_, end), (_, moved) = spy.seen
    (last,) = order_of(run, run.round, federation.infos[2])[1]
    x, y = train_data(federation)[2]
    gradient = reference.gradient(layers(end), x[last], y[last])
    same(layers(moved), [(-LR * w, -LR * b) for w, b in gradient])
    # the update is that of the masked training alone
    for n, u in up.update.items():
        trained = end[n][state[n]] if n in state else end[n]
        torch.testing.assert_close(u, down[n] - trained, rtol=0, atol=1e-15)


@pytest.mark.full
@pytest.mark.parametrize("optimizer", [SGD(lr=LR, momentum=0.9, weight_decay=0.1, clip=0.5), AdamW(lr=0.1)])
@pytest.mark.parametrize("engine_", [Sequential, Vectorized])
def test_density_is_constant_and_all_is_zero_outside_the_mask(optimizer, engine_: type[Engine]) -> None:
    federation = alike(**F32)
    method = FedSpa(optimizer=optimizer, batch_size=8, epochs=2)
    run = run_of(method, federation, rounds=4, steps=0, engine=engine_, lost_replies=0.3, **SAMPLE)
    initial = federation.architectures["small"].initial
    counts, first = layer_counts(initial, 0.5), {k: state_of(run, k) for k in range(len(SIZES))}
    assert len({tree.encode(m) for m in first.values()}) == len(SIZES)
    for _ in range(4):
        run.step()
        for k in range(len(SIZES)):
            masks, model = state_of(run, k), personal_of(run, k)
            assert {n: int(m.sum()) for n, m in masks.items()} == counts
            # the server cuts by what the client holds, also where a reply was lost
            assert tree.equal(masks, run.state.server.masks[str(k)])
            for n, p in model.items():
                assert p.shape == initial[n].shape
                held = masks.get(n, torch.ones_like(p, dtype=torch.bool))
                assert torch.equal(p, torch.where(held, run.state.server.model[n], 0.0))
    assert any(not tree.equal(first[k], state_of(run, k)) for k in first)


def test_training_moves_nothing_outside_the_mask() -> None:
    federation = alike(**F32)
    method = FedSpa(optimizer=SGD(lr=LR, momentum=0.9, weight_decay=0.1), batch_size=8)
    run = run_of(method, federation, steps=1)
    for k in range(len(SIZES)):
        spy = Spy(run.engine.trainer(method, federation, run.round, federation.infos[k]))
        method.local_update(state_of(run, k), download(run, k), view_of(run, k, trainer=spy))
        end = spy.seen[0][1]
        for n, m in state_of(run, k).items():
            assert (end[n][~m] == 0).all()
            assert (end[n][m] != 0).all()


@pytest.mark.parametrize("prune", [0.5, 0.0])
def test_masked_values_and_new_masks_as_bits_are_all_that_crosses(prune: float) -> None:
    federation = alike(**F32)
    run = run_of(FedSpa(prune=prune, **LOCAL), federation, steps=1)
    initial = federation.architectures["small"].initial
    counts = layer_counts(initial, 0.5)
    vectors = sum(p.numel() for p in initial.values() if p.ndim == 1)
    bits = sum(-(-initial[n].numel() // 8) for n in counts) if prune else 0
    down = download(run, 0)
    _, up = run.method.local_update(state_of(run, 0), down, view_of(run, 0))
    values = sum(counts.values()) + vectors
    assert values == pytest.approx(0.5 * federation.architectures["small"].parameters, abs=1)
    assert tree.numel(down) == tree.numel(up) == values
    assert tree.nbytes(down) == 4 * values
    assert tree.nbytes(up) == 4 * values + bits
    # the file around them holds no array besides
    for message, size in ((down, 4 * values), (up, 4 * values + bits)):
        whole = tree.encode(message)
        assert len(whole) - 8 - int.from_bytes(whole[:8], "little") == size
    assert all(v.ndim == 1 for v in (*down.values(), *up.update.values()))


@pytest.mark.full
def test_fedspa_of_full_density_is_fedavg_of_uniform_weights() -> None:
    dense = run_of(FedSpa(density=1.0, **LOCAL), alike(), **SAMPLE)
    plain = run_of(FedAvg(weighting="uniform", **LOCAL), alike(), **SAMPLE)
    tree.map_leaves(
        lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=1e-12),
        dense.state.server.model,
        plain.state.server,
    )
    # by examples the mean is another
    other = run_of(FedAvg(**LOCAL), alike(), **SAMPLE)
    assert any((dense.state.server.model[n] - p).abs().max() > 1e-3 for n, p in other.state.server.items())


# -- all -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "settings", "words"),
    [
        (PerFedAvg, {"alpha": -0.1}, "alpha"),
        (PerFedAvg, {"alpha": float("inf")}, "alpha"),
        (PerFedAvg, {"delta": 0.0}, "delta"),
        (PerFedAvg, {"variant": "hessian"}, "hessian_free"),
        (PerFedAvg, {"weighting": "example"}, "examples"),
        (FedRep, {"head_epochs": 0}, "head_epochs"),
        (FedRep, {"epochs": 0}, "epochs"),
        (FedPer, {"batch_size": 0}, "batch_size"),
        (FedSpa, {"density": 0.0}, "density"),
        (FedSpa, {"density": 1.1}, "density"),
        (FedSpa, {"density": float("nan")}, "density"),
        (FedSpa, {"prune": -0.1}, "prune"),
        (FedSpa, {"prune": 1.5}, "prune"),
    ],
)
def test_bad_settings_are_refused_by_name(make, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make(**settings)


def test_defaults_are_those_of_the_papers() -> None:
    assert PerFedAvg().optimizer == SGD(lr=0.001)
    assert (PerFedAvg().alpha, PerFedAvg().weighting) == (0.01, "uniform")
    assert FedRep().head_epochs == 10
    assert FedSpa().density == 0.5
