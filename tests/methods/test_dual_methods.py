"""SCAFFOLD, FedDyn, Ditto and APFL: against NumPy references, as limits of other methods, and what their
duals conserve."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.engines.counting import Counting
from torch import Tensor
from torch.nn import functional

from contract import personal, predictors
from fedlowrank.core import tree
from fedlowrank.core.contract.contribution import mean
from fedlowrank.core.errors import ConfigError
from fedlowrank.core.learning.optimizer import SGD, AdamW, Group, Schedule
from fedlowrank.data.federation import Federation
from fedlowrank.engines.engine import Engine, client_key, client_view
from fedlowrank.methods.apfl import APFL
from fedlowrank.methods.ditto import Ditto
from fedlowrank.methods.fedavg import FedAvg
from fedlowrank.methods.feddyn import FedDyn
from fedlowrank.methods.fedslr import FedSLR
from fedlowrank.methods.scaffold import SCAFFOLD
from fedlowrank.methods.standalone import Standalone
from fedlowrank.models import standard
from fedlowrank.rounds.run import Run
from fedlowrank.training.local_data import LocalData
from fedlowrank.trust.trust_settings import Clipping, Privacy
from golden import dual_reference, reference

from .setting import SIZES, Net, alike, arrays, at, layers, plan, run_of, start_of, states, train_data

LR = 0.3
LOCAL = {"optimizer": SGD(lr=LR), "batch_size": 8, "epochs": 2}
SAMPLE = {"participation": 0.75}
F32 = {"dtype": torch.float32}
# the rate differs between rounds, for a dual that used the first one would be wrong
FALLING = {**LOCAL, "optimizer": SGD(lr=LR, schedule=Schedule("exponential", factor=0.5))}
RATES = [LR, LR / 2, LR / 4]
TOLERANCE = 1e-10
METHODS = {
    "scaffold": SCAFFOLD,
    "feddyn": FedDyn,
    "feddyn_mean": lambda **k: FedDyn(evaluate="mean_of_clients", **k),
    "ditto": Ditto,
    "apfl": APFL,
    "apfl_fixed": lambda **k: APFL(adaptive=False, **k),
}


def same(found: Any, wanted: Any, atol: float = TOLERANCE) -> None:
    """Parameters and layers, or two trees, agree up to rounding."""
    if not isinstance(wanted, list):
        tree.map_leaves(lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=atol), found, wanted)
        return
    for f, w in zip(layers(found), wanted, strict=True):
        np.testing.assert_allclose(f[0], w[0], rtol=0, atol=atol)
        np.testing.assert_allclose(f[1], w[1], rtol=0, atol=atol)


def mean_of_duals(run: Run) -> Any:
    """Mean over all clients of what they keep, those included that never took part."""
    return mean([run.state_of(i) for i in run.federation.infos], [1.0] * len(run.federation.infos))


def inference(run: Run, client: int) -> tuple[Any, Any]:
    """The personal model of a client, and how it predicts."""
    of = at(run, client)
    made = predictors(run.method, *of)
    return personal(run.method, *of), made if len(made) > 1 else made["personal"]


# -- against the references ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("eta_g", "decay"), [(1.0, 0.0), (0.6, 0.05)])
def test_scaffold(eta_g: float, decay: float, engine: type[Engine]) -> None:
    federation = alike()
    optimizer = SGD(lr=LR, weight_decay=decay, schedule=Schedule("exponential", factor=0.5))
    method = SCAFFOLD(eta_g=eta_g, optimizer=optimizer, batch_size=8, epochs=2)
    run = run_of(method, federation, engine=engine, **SAMPLE)
    x, c, own = dual_reference.scaffold(
        start_of(federation)[0], len(SIZES), train_data(federation), plan(run), RATES, eta_g, decay
    )
    same(run.state.server.model, x)
    same(run.state.server.control, c)
    for found, wanted in zip(states(run), own, strict=True):
        same(found, wanted)
    # the clients of a round take unlike numbers of steps, or a wrong τ would not show
    assert any(len({len(steps) for (steps,) in clients.values()}) > 1 for clients in plan(run))


@pytest.mark.parametrize("alpha", [0.1, 0.7])
def test_feddyn(alpha: float, engine: type[Engine]) -> None:
    federation = alike()
    run = run_of(FedDyn(alpha=alpha, **FALLING), federation, engine=engine, **SAMPLE)
    theta, average, h, own = dual_reference.feddyn(
        start_of(federation)[0], len(SIZES), train_data(federation), plan(run), RATES, alpha
    )
    same(run.state.server.model, theta)
    same(run.state.server.mean, average)
    same(run.state.server.h, h)
    for found, wanted in zip(states(run), own, strict=True):
        same(found, wanted)


@pytest.mark.few(2)
@pytest.mark.parametrize("lam", [0.1, 1.5])
def test_ditto(lam: float, engine: type[Engine]) -> None:
    federation = alike()
    run = run_of(Ditto(lam=lam, **FALLING), federation, engine=engine, **SAMPLE)
    start = start_of(federation)
    w, own = dual_reference.ditto(start[0], start, train_data(federation), plan(run), RATES, lam)
    same(run.state.server, w)
    for found, wanted in zip(states(run), own, strict=True):
        same(found, wanted)


# a moves as the paper says and meets a bound, moves slowly enough to meet none, or stays
@pytest.mark.full
@pytest.mark.parametrize(
    ("alpha", "pace", "bounds"),
    [(0.5, 1.0, {0.0}), (0.97, 1.0, {1.0}), (0.5, 0.05, set()), (0.2, 0.0, set())],
)
def test_apfl(alpha: float, pace: float, bounds: set[float], engine: type[Engine]) -> None:
    federation = alike()
    groups = {"a": Group(lr=pace * LR)} if pace not in (0.0, 1.0) else {}
    optimizer = SGD(lr=LR, schedule=Schedule("exponential", factor=0.5), groups=groups)
    method = APFL(alpha=alpha, adaptive=pace > 0, optimizer=optimizer, batch_size=8, epochs=2)
    run = run_of(method, federation, engine=engine, **SAMPLE)
    start = start_of(federation)
    w, own, shares, clipped = dual_reference.apfl(
        start[0], start, train_data(federation), plan(run), RATES, alpha, pace
    )
    same(run.state.server, w)
    for state, v, a in zip(states(run), own, shares, strict=True):
        same(state.v, v)
        assert state.a.item() == pytest.approx(a, abs=TOLERANCE)
    assert clipped == bounds
    assert (shares == [alpha] * len(SIZES)) == (pace == 0)


@pytest.mark.full
def test_apfl_decays_its_weights_but_not_the_share_of_the_mixture() -> None:
    settings = {"batch_size": 8, "optimizer": SGD(lr=0.1, weight_decay=0.5)}
    run = run_of(APFL(adaptive=False, **settings), alike(), **SAMPLE)
    assert all(s.a.item() == 0.5 for s in states(run))
    averaged = run_of(FedAvg(**settings), alike(), **SAMPLE)
    same(run.state.server, averaged.state.server)
    # a group of that name keeps its rate
    held = SGD(lr=0.1, weight_decay=0.5, groups={"a": Group(lr=0.0)})
    assert all(
        s.a.item() == 0.5 for s in states(run_of(APFL(optimizer=held, batch_size=8), alike(), **SAMPLE))
    )
    assert all(s.a.item() != 0.5 for s in states(run_of(APFL(**settings), alike(), **SAMPLE)))


# -- duals: what the server holds is the mean over all clients -----------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_the_dual_of_the_server_is_the_mean_over_all_clients(participation: float) -> None:
    a = run_of(SCAFFOLD(**FALLING), alike(), rounds=5, participation=participation)
    same(a.state.server.control, mean_of_duals(a), 1e-12)
    b = run_of(FedDyn(**FALLING), alike(), rounds=5, participation=participation)
    same(b.state.server.h, mean_of_duals(b), 1e-12)
    assert tree.dot(b.state.server.h, b.state.server.h) > 1e-4
    assert tree.dot(a.state.server.control, a.state.server.control) > 1e-4


@pytest.mark.full
@pytest.mark.parametrize("make", [SCAFFOLD, FedDyn])
def test_lost_replies_leave_the_dual_of_the_server_the_mean_over_all_clients(make: Any) -> None:
    run = run_of(make(**LOCAL), alike(**F32), rounds=10, steps=0, lost_replies=0.3, **SAMPLE)
    lost = [len(run.step().lost) for _ in range(10)]
    assert 3 <= sum(lost) < 30
    server = run.state.server
    same(server.control if make is SCAFFOLD else server.h, mean_of_duals(run), 1e-5)


DUALS: dict[str, Any] = {
    "scaffold": (SCAFFOLD(**LOCAL), lambda server: server.control, lambda client: client),
    "feddyn": (FedDyn(**LOCAL), lambda server: server.h, lambda client: client),
    "fedslr": (FedSLR(**LOCAL), lambda server: server.gamma, lambda client: client.gamma),
    "fedslr_all": (
        FedSLR(**LOCAL, memory_efficient=False),
        lambda server: server.gamma,
        lambda client: client.gamma,
    ),
}
"""Methods, where the server holds its dual, and where a client holds its own."""


@pytest.mark.parametrize("name", DUALS)
def test_the_dual_of_the_server_is_the_mean_over_the_clients_that_can_train(name: str) -> None:
    method, of_server, of_client = DUALS[name]
    run = run_of(method, alike(**F32), rounds=4, unseen=0.5, participation=0.5)
    assert len(run.draws.seen) == 2
    own = [of_client(run.state_of(run.federation.infos[i])) for i in run.draws.seen]
    same(of_server(run.state.server), mean(own, [1.0] * len(own)), 1e-6)
    assert tree.dot(own[0], own[0]) > 1e-4


@pytest.mark.parametrize("name", ["scaffold", "feddyn"])
def test_under_central_privacy_the_planned_share_is_of_the_clients_that_can_train(name: str) -> None:
    method, of_server, of_client = DUALS[name]
    trust = {"privacy": Privacy("central", noise=1e-5, delta=1e-3), "clipping": Clipping(30.0)}
    run = run_of(method, alike(**F32), rounds=2, unseen=0.5, **trust)
    own = [of_client(run.state.clients[i].inner) for i in run.draws.seen]
    same(of_server(run.state.server.inner), mean(own, [1.0] * len(own)), 2e-3)
    assert max(float(t.abs().max()) for t in own[0].values()) > 0.02


# -- SCAFFOLD ------------------------------------------------------------------------------------------------


def mean_gradient_along_the_way(run: Run, client: int, weight_decay: float) -> dict[str, Tensor]:
    """What c_k claims to be, by autograd, of a first round from x = the initial weights and zero variates."""
    info, x = run.federation.infos[client], run.federation.architectures["small"].initial
    local = LocalData(
        info, run.federation.clients[client].train, run.method.passes(), client_key(run.federation, client, 0)
    )
    model, seen = Net(10), []
    model.load_state_dict(x)
    for batch in local.batches("local"):
        model.zero_grad()
        functional.cross_entropy(model(batch.x), batch.y).backward()
        with torch.no_grad():
            seen.append({n: p.grad + weight_decay * p for n, p in model.named_parameters()})
            for n, p in model.named_parameters():
                p.sub_(LR * seen[-1][n])
    return mean(seen, [1.0] * len(seen))


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_a_control_variate_is_the_mean_gradient_of_the_round_weight_decay_included(
    weight_decay: float,
) -> None:
    settings = {**LOCAL, "optimizer": SGD(lr=LR, weight_decay=weight_decay)}
    run = run_of(SCAFFOLD(**settings), alike(), steps=1)
    for k in range(len(SIZES)):
        same(run.state.clients[k], mean_gradient_along_the_way(run, k, weight_decay), 1e-12)


def test_a_round_without_a_learning_rate_leaves_every_variate_as_it_was() -> None:
    stops = SGD(lr=LR, schedule=Schedule("cosine", rounds=2))
    run = run_of(SCAFFOLD(optimizer=stops, batch_size=8), alike(), rounds=3, steps=2)
    before = run.state
    run.step()
    assert stops.learning_rate(2) == 0
    assert tree.equal(run.state.clients[0], before.clients[0])
    same(run.state.server, before.server, 1e-15)


# -- FedDyn --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.05, 0.8])
def test_a_local_step_of_feddyn_follows_the_derivative_of_its_objective(alpha: float) -> None:
    federation = alike()
    method = FedDyn(alpha=alpha, optimizer=SGD(lr=LR), batch_size=5)
    run = run_of(method, federation, steps=2)
    info, local = federation.infos[1], federation.clients[1].train
    state, down = run.state_of(info), run.method.download(run.state.server, info)
    view = client_view(federation, run.task, 2, info, run.engine.trainer(method, federation, 2, info))
    data = LocalData(info, local, method.passes(), client_key(federation, 1, 2))
    # two steps, for the first begins at the anchor, where the pull is zero
    theta = {n: p.clone().requires_grad_() for n, p in down.model.items()}
    batches = list(data.batches("local"))
    assert len(batches) == 2
    for batch in batches:
        scores = federation.architectures["small"].apply(theta, batch.x)
        fit = functional.cross_entropy(scores, batch.y)
        norm = tree.square_distance(theta, down.model)
        objective = fit - tree.dot(state, theta) + alpha / 2 * norm
        grads = torch.autograd.grad(objective, list(theta.values()))
        theta = {
            n: (p - LR * g).detach().requires_grad_() for (n, p), g in zip(theta.items(), grads, strict=True)
        }
    new, upload = method.local_update(state, down, view)
    wanted = tree.canonical(theta)
    same(upload, wanted, 1e-13)
    same(new, {n: state[n] - alpha * (wanted[n] - down.model[n]) for n in state}, 1e-13)


def test_feddyn_keeps_the_sum_rule_of_its_server() -> None:
    run = run_of(FedDyn(alpha=0.4, **LOCAL), alike(), **SAMPLE)
    server = run.state.server
    same(server.model, {n: server.mean[n] - server.h[n] / 0.4 for n in server.h}, 1e-14)


@pytest.mark.full
def test_feddyn_shows_the_mean_of_the_last_replies_as_well_and_pays_for_it() -> None:
    run = run_of(FedDyn(evaluate="mean_of_clients", **LOCAL), alike(), **SAMPLE)
    plain = run_of(FedDyn(**LOCAL), alike(), **SAMPLE)
    assert tree.equal(run.state.server, plain.state.server)
    x = run.federation.clients[1].test.x
    apply = run.federation.architectures["small"].apply
    series = inference(run, 1)[1]
    assert list(series) == ["mean_of_clients", "cloud"]
    torch.testing.assert_close(series["mean_of_clients"](x), apply(run.state.server.mean, x))
    torch.testing.assert_close(series["cloud"](x), apply(run.state.server.model, x))
    torch.testing.assert_close(inference(plain, 1)[1](x), apply(run.state.server.model, x))
    assert not torch.allclose(series["cloud"](x), series["mean_of_clients"](x))
    assert tree.equal(inference(run, 1)[0], run.state.server.mean)
    assert tree.equal(inference(plain, 1)[0], run.state.server.model)


# -- where the duals lead ------------------------------------------------------------------------------------


class Linear(torch.nn.Module):
    """A convex model."""

    head_name = "head"

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Identity()
        self.head = torch.nn.Linear(12, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x.double()))


standard.LAYERS |= {Linear}  # its forward pass is deterministic, so clients may be batched


DECAY = 0.1


def gradients(federation: Federation, theta: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """Of every client's whole objective, weight decay included."""
    out = []
    for client in federation.clients:
        free = {n: p.detach().clone().requires_grad_() for n, p in theta.items()}
        fit = functional.cross_entropy(
            federation.architectures["small"].apply(free, client.train.x), client.train.y
        )
        objective = fit + DECAY / 2 * tree.dot(free, free)
        out.append(dict(zip(free, torch.autograd.grad(objective, list(free.values())), strict=True)))
    return out


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["scaffold", "feddyn"])
def test_duals_find_a_stationary_point_of_the_mean_objective_and_hold_the_gradients_there(name: str) -> None:
    federation = Federation.from_arrays(arrays(), {"small": Linear}, classes=4)
    whole = {"optimizer": SGD(lr=0.5, weight_decay=DECAY), "batch_size": 64, "epochs": 5}
    method = SCAFFOLD(**whole) if name == "scaffold" else FedDyn(alpha=0.3, **whole)
    run = run_of(method, federation, rounds=60, evaluate_every=1000)
    theta = run.state.server.model
    each = gradients(federation, theta)
    average = mean(each, [1.0] * len(each))
    assert tree.dot(average, average) < 1e-14
    for k, gradient in enumerate(each):
        assert tree.dot(gradient, gradient) > 1e-3
        same(run.state.clients[k], gradient, 1e-6)
    # without duals the clients' own minima pull the mean of their models away
    drifted = run_of(
        FedAvg(weighting="uniform", **whole), federation, rounds=60, evaluate_every=1000
    ).state.server
    average = mean(gradients(federation, drifted), [1.0] * len(each))
    assert tree.dot(average, average) > 1e-6


# -- Ditto ---------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("optimizer", [SGD(lr=0.2), SGD(lr=0.1, momentum=0.9, clip=0.5), AdamW(lr=0.01)])
@pytest.mark.parametrize("lam", [0.0, 0.5])
def test_the_global_model_of_ditto_is_that_of_fedavg_bit_for_bit(lam: float, optimizer: Any) -> None:
    settings = {"optimizer": optimizer, "batch_size": 8, "epochs": 2}
    a, b = (run_of(m, alike(**F32), **SAMPLE) for m in (Ditto(lam=lam, **settings), FedAvg(**settings)))
    assert tree.equal(a.state.server, b.state.server)


@pytest.mark.full
def test_ditto_without_pull_is_standalone_but_for_the_order_of_examples() -> None:
    # by the reference of Standalone in the order of the second pass
    federation = alike()
    run = run_of(Ditto(lam=0.0, **LOCAL), federation, **SAMPLE)
    second = [{k: [passes[1]] for k, passes in clients.items()} for clients in plan(run)]
    wanted = reference.standalone(start_of(federation), train_data(federation), second, LR)
    for found, net in zip(states(run), wanted, strict=True):
        same(found, net)
    # in one step on all examples there is no order: Standalone itself
    whole = {"optimizer": SGD(lr=LR), "batch_size": 64}
    a, b = (run_of(m, alike(), **SAMPLE) for m in (Ditto(lam=0.0, **whole), Standalone(**whole)))
    for k, state in b.state.clients.items():
        same(a.state.clients[k], state, 1e-13)


def test_ditto_shows_both_models() -> None:
    run = run_of(Ditto(**LOCAL), alike(), **SAMPLE)
    x, apply, series = (
        run.federation.clients[2].test.x,
        run.federation.architectures["small"].apply,
        inference(run, 2)[1],
    )
    assert list(series) == ["personal", "global"]
    torch.testing.assert_close(series["personal"](x), apply(run.state.clients[2], x))
    torch.testing.assert_close(series["global"](x), apply(run.state.server, x))
    assert tree.equal(inference(run, 2)[0], run.state.clients[2])


# -- APFL ----------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize(("alpha", "adaptive"), [(0.0, False), (0.5, False), (0.5, True), (1.0, False)])
def test_the_global_model_of_apfl_is_that_of_fedavg_bit_for_bit(alpha: float, adaptive: bool) -> None:
    a = run_of(APFL(alpha=alpha, adaptive=adaptive, **LOCAL), alike(**F32), **SAMPLE)
    b = run_of(FedAvg(**LOCAL), alike(**F32), **SAMPLE)
    assert tree.equal(a.state.server, b.state.server)


@pytest.mark.full
def test_apfl_of_the_local_model_alone_is_standalone_bit_for_bit() -> None:
    a = run_of(APFL(alpha=1.0, adaptive=False, **LOCAL), alike(**F32), **SAMPLE)
    b = run_of(Standalone(**LOCAL), alike(**F32), **SAMPLE)
    for k, state in b.state.clients.items():
        assert tree.equal(a.state.clients[k].v, state)
        assert tree.equal(inference(a, k)[0], state)


def test_apfl_of_the_global_model_alone_infers_by_it_and_trains_no_other() -> None:
    run = run_of(APFL(alpha=0.0, adaptive=False, **LOCAL), alike(**F32), **SAMPLE)
    for k, state in run.state.clients.items():
        assert tree.equal(state.v, run.federation.architectures["small"].initial)
        assert tree.equal(inference(run, k)[0], run.state.server)


@pytest.mark.full
def test_apfl_infers_by_the_mixture_and_keeps_the_local_model_beside_it() -> None:
    slow = {**LOCAL, "optimizer": SGD(lr=LR, groups={"a": Group(lr=0.01)})}
    run = run_of(APFL(**slow), alike(), **SAMPLE)
    for k, state in run.state.clients.items():
        a = state.a.item()
        assert 0 < a < 1
        wanted = {n: a * v + (1 - a) * run.state.server[n] for n, v in state.v.items()}
        same(inference(run, k)[0], wanted, 1e-14)
        assert tree.square_distance(state.v, wanted) > 1e-3


# -- what is sent, refused and promised ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "down", "up"),
    [
        ("scaffold", 2, 2),
        ("feddyn", 1, 1),
        ("feddyn_mean", 2, 1),
        ("ditto", 1, 1),
        ("apfl", 1, 1),
        ("apfl_fixed", 1, 1),
    ],
)
def test_what_is_sent(name: str, down: int, up: int) -> None:
    federation = alike(**F32)
    record = run_of(METHODS[name](**LOCAL), federation, steps=0, **SAMPLE).step()
    theta = federation.architectures["small"].parameters
    assert (record.parameters_down, record.parameters_up) == (3 * down * theta, 3 * up * theta)
    assert record.bytes_down >= 4 * record.parameters_down


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: SCAFFOLD(optimizer=SGD(lr=0.1, momentum=0.9)), "has momentum"),
        (lambda: SCAFFOLD(optimizer=AdamW()), "has kind = 'adamw'"),
        (lambda: SCAFFOLD(optimizer=SGD(groups={"head": Group(lr=0.1)})), "has groups"),
        (lambda: SCAFFOLD(optimizer=SGD(clip=1.0)), "has clip"),
        (lambda: SCAFFOLD(eta_g=0.0), "eta_g"),
        (lambda: SCAFFOLD(eta_g=float("inf")), "eta_g"),
        (lambda: SCAFFOLD(eta_g=float("nan")), "eta_g"),
        (lambda: FedDyn(alpha=0.0), "alpha"),
        (lambda: FedDyn(alpha=-0.1), "alpha"),
        (lambda: FedDyn(alpha=float("nan")), "alpha"),
        (lambda: FedDyn(evaluate="clients"), "evaluate"),
        (lambda: Ditto(lam=-0.1), "lam"),
        (lambda: Ditto(lam=float("inf")), "lam"),
        (lambda: APFL(alpha=-0.01), "alpha"),
        (lambda: APFL(alpha=1.01), "alpha"),
        (lambda: APFL(alpha=float("nan")), "alpha"),
        (lambda: APFL(optimizer=AdamW()), "adaptive = true"),
    ],
)
def test_bad_settings_are_refused(make: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make()


@pytest.mark.few(2)
@pytest.mark.parametrize("name", METHODS)
def test_clients_of_one_model_are_trained_at_once(name: str) -> None:
    run = run_of(METHODS[name](**LOCAL), alike(**F32), engine=Counting)
    assert len(run.state.clients) == len(SIZES)
    assert set(run.engine.sizes) == {len(SIZES)}
