"""Duals of SCAFFOLD, FedDyn and FedSLR: the server's is the mean of the clients', and they lead to a stationary point of the
mean objective."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fedlowrank.core import tree
from fedlowrank.core.contract.contribution import mean
from fedlowrank.core.learning.optimizer import SGD
from fedlowrank.data.federation import Federation
from fedlowrank.methods.fedavg import FedAvg
from fedlowrank.methods.feddyn import FedDyn
from fedlowrank.methods.fedslr import FedSLR
from fedlowrank.methods.scaffold import SCAFFOLD
from fedlowrank.models import standard
from fedlowrank.rounds.run import Run
from fedlowrank.trust.trust_settings import Clipping, Privacy

from .comparisons import assert_parameters_close
from .setting import FALLING_LOCAL, FLOAT32, LOCAL, SAMPLE, federate_one_model, make_arrays, run_rounds


class Linear(torch.nn.Module):
    """A convex model."""

    head_name = "head"

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Identity()
        self.head = torch.nn.Linear(12, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x.double()))


@pytest.fixture(autouse=True)
def standard_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines batch clients that hold ``Linear``: its forward pass is deterministic."""
    monkeypatch.setattr(standard, "LAYERS", standard.LAYERS | {Linear})


def compute_mean_of_duals(run: Run) -> Any:
    """Mean over all clients of what they keep, those included that never took part."""
    return mean([run.state_of(i) for i in run.federation.infos], [1.0] * len(run.federation.infos))


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_the_dual_of_the_server_is_the_mean_over_all_clients(participation: float) -> None:
    a = run_rounds(SCAFFOLD(**FALLING_LOCAL), federate_one_model(), rounds=5, participation=participation)
    assert_parameters_close(a.state.server.control, compute_mean_of_duals(a), 1e-12)
    b = run_rounds(FedDyn(**FALLING_LOCAL), federate_one_model(), rounds=5, participation=participation)
    assert_parameters_close(b.state.server.h, compute_mean_of_duals(b), 1e-12)
    assert tree.dot(b.state.server.h, b.state.server.h) > 1e-4
    assert tree.dot(a.state.server.control, a.state.server.control) > 1e-4


@pytest.mark.parametrize("make", [SCAFFOLD, FedDyn])
def test_lost_replies_leave_the_dual_of_the_server_the_mean_over_all_clients(make: Any) -> None:
    run = run_rounds(
        make(**LOCAL), federate_one_model(**FLOAT32), rounds=10, steps=0, lost_replies=0.3, **SAMPLE
    )
    lost = [len(run.step().lost) for _ in range(10)]
    assert 3 <= sum(lost) < 30
    server = run.state.server
    assert_parameters_close(
        server.control if make is SCAFFOLD else server.h, compute_mean_of_duals(run), 1e-5
    )


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
    run = run_rounds(method, federate_one_model(**FLOAT32), rounds=4, unseen=0.5, participation=0.5)
    assert len(run.client_sampler.seen) == 2
    own = [of_client(run.state_of(run.federation.infos[i])) for i in run.client_sampler.seen]
    assert_parameters_close(of_server(run.state.server), mean(own, [1.0] * len(own)), 1e-6)
    assert tree.dot(own[0], own[0]) > 1e-4


@pytest.mark.parametrize("name", ["scaffold", "feddyn"])
def test_under_central_privacy_the_planned_share_is_of_the_clients_that_can_train(name: str) -> None:
    method, of_server, of_client = DUALS[name]
    trust = {"privacy": Privacy("central", noise=1e-5, delta=1e-3), "clipping": Clipping(30.0)}
    run = run_rounds(method, federate_one_model(**FLOAT32), rounds=2, unseen=0.5, **trust)
    own = [of_client(run.state.clients[i].inner) for i in run.client_sampler.seen]
    assert_parameters_close(of_server(run.state.server.inner), mean(own, [1.0] * len(own)), 2e-3)
    assert max(float(t.abs().max()) for t in own[0].values()) > 0.02


DECAY = 0.1


def compute_gradients(federation: Federation, theta: dict[str, Tensor]) -> list[dict[str, Tensor]]:
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
    federation = Federation.from_arrays(make_arrays(), {"small": Linear}, classes=4)
    whole = {"optimizer": SGD(lr=0.5, weight_decay=DECAY), "batch_size": 64, "epochs": 5}
    method = SCAFFOLD(**whole) if name == "scaffold" else FedDyn(alpha=0.3, **whole)
    run = run_rounds(method, federation, rounds=60, evaluate_every=1000)
    theta = run.state.server.model
    each = compute_gradients(federation, theta)
    average = mean(each, [1.0] * len(each))
    assert tree.dot(average, average) < 1e-14
    for k, gradient in enumerate(each):
        assert tree.dot(gradient, gradient) > 1e-3
        assert_parameters_close(run.state.clients[k], gradient, 1e-6)
    # without duals the mean of the models moves away, towards the clients' own minima
    drifted = run_rounds(
        FedAvg(weighting="uniform", **whole), federation, rounds=60, evaluate_every=1000
    ).state.server
    average = mean(compute_gradients(federation, drifted), [1.0] * len(each))
    assert tree.dot(average, average) > 1e-6
