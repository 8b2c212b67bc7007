"""What ``fedlowrank list --trust`` says of a method is what a run does."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from fedlowrank.cli.catalog import build_trust_table
from fedlowrank.core import tree
from fedlowrank.core.contract import (
    NO_UPDATE,
    ZERO_REFERENCE,
    AnyMethod,
    ClientInfo,
    ClientView,
    Mean,
    ServerView,
    Sum,
    Task,
    Update,
)
from fedlowrank.core.errors import ConfigError, TaskError
from fedlowrank.core.learning.optimizer import SGD
from fedlowrank.engines import ENGINES
from fedlowrank.methods import METHODS
from fedlowrank.methods.fedavg import FedAvg
from fedlowrank.methods.fednova import FedNova
from fedlowrank.network.secure.contributions import compute_contribution, make_zero_contribution
from fedlowrank.network.secure.rounds import check_one_download
from fedlowrank.network.validation.shape_tracing import trace_template
from fedlowrank.rounds.run import Run
from fedlowrank.rounds.run_settings import RunSettings
from fedlowrank.testing.check import small_federation
from fedlowrank.trust.abilities import ABILITIES, abilities
from fedlowrank.trust.trust_settings import Clipping, Privacy, Robust, SecureSums
from tests.methods.setting import federate_one_model

SETTINGS: dict[str, dict[str, Any]] = {
    "central": {"privacy": Privacy("central", noise=1e-5, delta=1e-3), "clipping": Clipping(5.0)},
    "local": {"privacy": Privacy("local", noise=1e-5, delta=1e-3), "clipping": Clipping(5.0)},
    "secure": {"secure": SecureSums(on=True)},
}


def run_of(method: AnyMethod, **settings: Any) -> Run:
    return Run(method, federate_one_model(), RunSettings(rounds=2, **settings), ENGINES["sequential"]())


def listed(name: str) -> dict[str, str]:
    (row,) = (row for row in build_trust_table()["rows"] if row[0] == name)
    return dict(zip(ABILITIES, row[1:], strict=True))


def vector(value: Any) -> np.ndarray:
    return np.concatenate([t.double().numpy().ravel() for t in tree.tensors(value)])


@pytest.mark.parametrize("kind", SETTINGS)
def test_a_server_that_counts_local_steps_needs_as_many_at_all_clients(kind: str) -> None:
    """FedNova's server finds τ_k from n_k, which is private: its steps were about τ times too small."""
    with pytest.raises(TaskError, match=r"each client's number of examples.* set steps = N"):
        run_of(FedNova(batch_size=8), **SETTINGS[kind])
    assert listed("fednova")[kind].startswith("no: its server computes with each client's number of examples")


@pytest.mark.parametrize("rule", ["median", "norm_bound", "geometric_median"])
@pytest.mark.parametrize("weights", ["equal", "examples"])
def test_a_server_that_counts_local_steps_takes_no_weights_for_numbers_of_examples(
    rule: Any, weights: Any
) -> None:
    robust = Robust(rule, weights=weights)
    with pytest.raises(
        TaskError, match=rf"robust.rule = '{rule}'.* robust rules put weights.* set steps = N"
    ):
        run_of(FedNova(batch_size=8), robust=robust)
    assert listed("fednova")["robust"].startswith(
        "no: its server computes with each client's number of examples"
    )
    common: dict[str, Any] = {"batch_size": 8, "steps": 5, "optimizer": SGD(lr=0.05)}
    actual, expected = run_of(FedNova(**common), robust=robust), run_of(FedAvg(**common), robust=robust)
    actual.step()
    expected.step()
    np.testing.assert_allclose(vector(actual.state.server), vector(expected.state.server), atol=1e-6)


@pytest.mark.few(9)
@pytest.mark.parametrize("name", [row[0] for row in build_trust_table()["rows"] if row[1] == "yes"])
def test_the_table_says_which_methods_have_secure_sums_over_a_network(name: str) -> None:
    method = METHODS[name]()
    task = small_federation(method.heterogeneous).task(1)
    server, client = method.server_init(task), task.clients[0]
    form = trace_template(method, task, client, method.download(server, client)).form
    if listed(name)["secure_network"] == "yes":
        make_zero_contribution(method, server, form, client)
        compute_contribution(method, server, method.download(server, client), form, client)
        check_one_download(method, server, task.clients)
    else:
        with pytest.raises(ConfigError, match=f"{method.title} has no secure sum over a network"):
            make_zero_contribution(method, server, form, client)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("kind", ["central", "local"])
def test_with_as_many_steps_it_is_the_mean_of_all_clients(kind: str, momentum: float) -> None:
    """FedNova of equal numbers of steps is FedAvg, and under privacy all clients weigh the same."""
    common: dict[str, Any] = {"batch_size": 8, "steps": 5, "optimizer": SGD(lr=0.05, momentum=momentum)}
    private = run_of(FedNova(**common), **SETTINGS[kind])
    plain = run_of(FedAvg(weighting="uniform", **common))
    start = vector(plain.state.server)
    for _ in range(2):
        private.step()
        plain.step()
    step = vector(plain.state.server) - start
    actual = vector(private.state.server.inner) - start
    # the noise is on a mean of gradients, a τ-th of the update
    assert np.linalg.norm(step) > 0.1
    assert np.abs(actual - step).max() < 0.1 * np.abs(step).max()


def test_the_smallest_noise_is_that_of_the_setting() -> None:
    """Of local noise half is accounted for, and messages named the half."""
    for kind, smallest in (("local", 2e-6), ("central", 1e-6)):
        Privacy(kind, noise=smallest, delta=1e-3)  # type: ignore[arg-type]
        with pytest.raises(
            ConfigError, match=f"noise must be >= {smallest:g} and .*; it is {0.9 * smallest:g}"
        ):
            Privacy(kind, noise=0.9 * smallest, delta=1e-3)  # type: ignore[arg-type]
    run_of(FedAvg(batch_size=8), privacy=Privacy("local", noise=2e-6, delta=1e-3), clipping=Clipping(1.0))


@dataclass(frozen=True)
class Personal(FedAvg):
    """A middle client is sent another model, as a method with groups of clients may do."""

    def download(self, server: Any, client: ClientInfo) -> Any:
        return {n: t + 1 for n, t in server.items()} if client.id == 2 else server


@dataclass(frozen=True)
class Telling(FedAvg):
    """Sends a plain number beside its model."""

    def local_update(self, state: None, down: Any, view: ClientView) -> tuple[None, Any]:
        _, upload = super().local_update(state, down, view)
        return None, {"model": upload, "count": view.steps("local")}

    def contribution(self, server: Any, upload: Any, client: ClientInfo) -> Mean[Any]:
        return Mean(upload["model"], client.example_count)

    def describe_update(self, down: Any, client: ClientInfo, task: Task) -> Update:
        return Update({"model": down, "count": NO_UPDATE})


@dataclass(frozen=True)
class Unequal(FedAvg):
    """Clients of the rank 2 contribute one number less."""

    def contribution(self, server: Any, upload: Any, client: ClientInfo) -> Mean[Any]:
        return Mean({n: t[1:] if client.rank == 2 else t for n, t in upload.items()}, client.example_count)


def test_all_clients_are_compared_and_not_only_the_first_and_the_last() -> None:
    task = federate_one_model().task(1)
    assert abilities(Personal(), task)["central"] == (
        "clients are sent different things, so that their sum has no common reference"
    )
    assert abilities(FedAvg(), task)["central"] is None
    ranks = [None, 2, None, None]
    clients = [dataclasses.replace(c, rank=r) for c, r in zip(task.clients, ranks, strict=True)]
    other = dataclasses.replace(task, clients=tuple(clients))
    assert abilities(Unequal(), other)["secure"] == "what clients contribute differs in form"
    assert abilities(Unequal(), task)["secure"] is None


@pytest.mark.parametrize("kind", ["central", "local"])
def test_a_plain_number_beside_the_update_is_refused(kind: str) -> None:
    assert abilities(Telling(), federate_one_model().task(1))[kind] == (
        "its clients send count, which is no tensor, so that no noise is added to it"
    )


@dataclass(frozen=True)
class Misdescribed(FedAvg):
    """Describes its reference as a dict of another form, which its contribution cannot read."""

    def describe_update(self, down: Any, client: ClientInfo, task: Task) -> Update:
        return Update({"model": down})

    def contribution(self, server: Any, upload: Any, client: ClientInfo) -> Mean[Any]:
        return Mean({n: upload[n] for n in server}, client.example_count)


def test_an_error_of_the_method_names_the_ability_that_was_tried() -> None:
    task = federate_one_model().task(1)
    with pytest.raises(TaskError, match=r"FedAvg .* raised .* goes with central privacy: KeyError: 'body"):
        abilities(Misdescribed(), task)
    with pytest.raises(TaskError, match="central privacy: KeyError"):
        run_of(Misdescribed(), **SETTINGS["central"])
    # the other abilities do not depend on that trial
    run_of(Misdescribed(), **SETTINGS["secure"]).step()


@dataclass(frozen=True)
class Gradient(FedAvg):
    """Sends its change in one vector, whose reference is zero in one of two forms."""

    is_zero: bool = True
    divides: str = "planned"

    def local_update(self, state: Any, down: Any, view: ClientView) -> tuple[Any, Any]:
        state, end = super().local_update(state, down, view)
        return state, {"gradient": self._flat(tree.sub(end, down))}

    def _flat(self, params: Any) -> torch.Tensor:
        return torch.cat([t.reshape(-1) for t in tree.tensors(params)])

    def describe_update(self, down: Any, client: ClientInfo, task: Task) -> Update:
        return Update({"gradient": ZERO_REFERENCE if self.is_zero else torch.zeros_like(self._flat(down))})

    def contribution(self, server: Any, upload: Any, client: ClientInfo) -> Any:
        return {"gradient": Sum(upload["gradient"])}

    def server_update(self, server: Any, total: Any, view: ServerView) -> Any:
        count = len(view.replied) if view.planned is None or self.divides == "replied" else view.planned
        step = total["gradient"] / (
            float(count) if self.divides == "replied as a number" else torch.tensor(float(count))
        )
        parts = iter(step.split([t.numel() for t in tree.tensors(server)]))
        return tree.map_leaves(lambda t: t + next(parts).view_as(t), server)


def test_central_privacy_needs_a_tensor_as_a_reference() -> None:
    task = federate_one_model().task(1)
    reason = abilities(Gradient(), task)["central"]
    assert reason is not None
    assert "where its reference is ZERO_REFERENCE (gradient): give zeros" in reason
    assert abilities(Gradient(), task)["local"] is None
    method = Gradient(is_zero=False)
    assert abilities(method, task)["central"] is None
    run = run_of(method, **SETTINGS["central"])
    before = run.state.server.inner
    run.step()
    assert max(float((t - before[n]).abs().max()) for n, t in run.state.server.inner.items()) > 1e-3


def test_central_privacy_hides_the_number_of_replies() -> None:
    task = federate_one_model().task(1)
    reason = abilities(Gradient(is_zero=False, divides="replied"), task)["central"]
    assert reason is not None
    assert "Divide by view.planned" in reason

    @dataclass(frozen=True)
    class Plain(Gradient):
        def server_update(self, server: Any, total: Any, view: ServerView) -> Any:
            factor = 1.0 / len(view.replied)
            parts = iter((factor * total["gradient"]).split([t.numel() for t in tree.tensors(server)]))
            return tree.map_leaves(lambda t: t + next(parts).view_as(t), server)

    reason = abilities(Plain(is_zero=False), task)["central"]
    assert reason is not None
    assert "ZeroDivisionError" in reason


@dataclass(frozen=True)
class SumOfExamples(FedAvg):
    """FedAvg, written as a sum over examples and their number."""

    def contribution(self, server: Any, upload: Any, client: ClientInfo) -> Any:
        n = float(client.example_count)
        return {"sum": Sum({k: n * t for k, t in upload.items()}), "count": Sum(torch.tensor(n), counts=True)}

    def server_update(self, server: Any, total: Any, view: ServerView) -> Any:
        return {k: t / total["count"] for k, t in total["sum"].items()}


@pytest.mark.parametrize("rule", ["median", "trimmed_mean", "geometric_median"])
def test_the_median_of_sums_over_examples_is_refused(rule: Any) -> None:
    with pytest.raises(
        TaskError, match=r"terms of its sum at sum.* grow with the number of examples.*Mean\(value"
    ):
        run_of(SumOfExamples(), robust=Robust(rule, weights="examples"))
    run_of(FedAvg(), robust=Robust(rule, weights="examples"))
    # with one example for each client, equal models are that model
    run = run_of(SumOfExamples(optimizer=SGD(lr=1e-12)), robust=Robust(rule, weights="equal"))
    before = run.state.server
    run.step()
    for n, t in before.items():
        torch.testing.assert_close(run.state.server[n], t, rtol=1e-6, atol=1e-9)
