"""Replies one after another: not all in memory at once, timed apart, and noted as they pass."""

from __future__ import annotations

import multiprocessing
import time
import weakref
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from fedlowrank.core import tree
from fedlowrank.core.contract import (
    AnyMethod,
    ClientInfo,
    ClientModel,
    ClientView,
    Mean,
    Method,
    ServerView,
    Sum,
    Task,
)
from fedlowrank.core.errors import NonFiniteError, TaskError
from fedlowrank.data.federation import Federation
from fedlowrank.engines import ENGINES
from fedlowrank.methods import METHODS
from fedlowrank.methods.fedavg import FedAvg
from fedlowrank.rounds.round_results import Clock
from fedlowrank.rounds.run import Run
from fedlowrank.rounds.run_settings import RunSettings
from fedlowrank.trust.trust_settings import Robust, SecureSums

torch.set_num_threads(1)

CLIENTS = 12


@dataclass(frozen=True)
class Sums(Method[Tensor, Tensor, Tensor, Tensor]):
    """Adds up what clients send, a large tensor each; nothing is trained.

    Attributes:
        size: of what they send.
        bad: the client that sends a NaN, or none.
    """

    size: int = 1000
    bad: int = -1

    most: ClassVar[int] = 10**9
    """Replies after which the server looks at no more."""

    title = "Sums"
    citation = "-"

    def server_init(self, task: Task) -> Tensor:
        return torch.zeros(self.size, dtype=torch.float64)

    def client_init(self, client: ClientInfo, task: Task) -> Tensor:
        return torch.zeros(())

    def download(self, server: Tensor, client: ClientInfo) -> Tensor:
        return server[: 1 + client.id].clone()

    def local_update(self, state: Tensor, down: Tensor, view: ClientView) -> tuple[Tensor, Tensor]:
        value = float("nan") if view.info.id == self.bad else float(2**view.info.id)
        return state + 1, torch.full((self.size,), value, dtype=torch.float64)

    def contribution(self, server: Tensor, upload: Tensor, client: ClientInfo) -> Sum[Tensor]:
        SEEN.append(weakref.ref(upload))
        ALIVE.append(sum(ref() is not None for ref in SEEN))
        if len(SEEN) == self.most:
            raise TaskError("Sums: enough")
        return Sum(upload)

    def server_update(self, server: Tensor, total: Tensor, view: ServerView) -> Tensor:
        return server + total

    def client_model(self, state: Tensor, down: Tensor, view: ClientView) -> ClientModel:
        return ClientModel(view.model.initial)


SEEN: list[Any] = []
ALIVE: list[int] = []


@pytest.fixture(autouse=True)
def _fresh() -> None:
    SEEN.clear()
    ALIVE.clear()


def federation(poisoned: int = -1) -> Federation:
    generator = torch.Generator().manual_seed(0)
    size = [1e30 if i == poisoned else 1.0 for i in range(CLIENTS)]
    data = [(torch.randn(10, 3, generator=generator) * s, torch.arange(10) % 2) for s in size]
    return Federation.from_arrays(data, lambda: nn.Linear(3, 2), classes=2)


def run_of(method: AnyMethod, engine: str = "sequential", **settings: Any) -> Run:
    return Run(
        method, federation(), RunSettings(rounds=3, evaluate_every=10**6, **settings), ENGINES[engine]()
    )


@pytest.mark.few(2)
@pytest.mark.parametrize("engine", ["sequential", "wire", "processes"])
def test_replies_are_let_go_one_after_another(engine: str) -> None:
    run = run_of(Sums(), engine)
    record = run.step()
    run.engine.close()
    assert len(ALIVE) == CLIENTS
    assert max(ALIVE) <= 2
    assert torch.equal(run.state.server, torch.full((1000,), float(2**CLIENTS - 1), dtype=torch.float64))
    weights = [tree.encoded_size(run.method.download(run.state.server, i)) for i in run.federation.infos]
    assert record.bytes_down == sum(weights)
    assert record.parameters_down == sum(range(1, CLIENTS + 1))
    assert record.parameters_up == 1000 * CLIENTS
    assert sorted(run.state.clients) == list(range(CLIENTS))


def test_the_server_is_told_who_replied() -> None:
    seen: list[list[int]] = []

    @dataclass(frozen=True)
    class Told(Sums):
        def server_update(self, server: Tensor, total: Tensor, view: ServerView) -> Tensor:
            seen.append([client.id for client in view.replied])
            return server

    run_of(Told(bad=4), on_nan="drop").step()
    assert seen == [[i for i in range(CLIENTS) if i != 4]]


def test_a_nan_half_way_stops_the_run_or_is_left_out() -> None:
    run = run_of(Sums(bad=4), on_nan="drop")
    record = run.step()
    assert list(record.lost) == ["4"]
    assert "holds a NaN or an infinity" in record.lost["4"]
    assert run.state.server[0] == 2**CLIENTS - 1 - 2**4
    assert 4 not in run.state.clients


def test_a_nan_in_an_upload_of_a_finite_training_stops_the_run() -> None:
    run = run_of(Sums(bad=4))
    before = run.state
    with pytest.raises(
        NonFiniteError, match=r"client 4, round 1: its upload .* or set run\.on_nan to 'drop'"
    ) as caught:
        run.step()
    assert (caught.value.client_id, caught.value.round, run.round) == (4, 0, 0)
    assert run.state is before


@dataclass(frozen=True)
class BadContribution(FedAvg):
    """A FedAvg whose server divides by zero for client 4."""

    title = "BadContribution"

    def contribution(self, server: Any, upload: Any, client: ClientInfo) -> Any:
        scale = 1.0 / (4 - torch.tensor(float(client.id)))
        return {"model": Mean(tree.map_leaves(lambda t: t * scale, upload), client.example_count)}

    def server_update(self, server: Any, total: Any, view: ServerView) -> Any:
        return total["model"]


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_a_contribution_that_is_not_finite_is_named_with_client_hook_and_round(engine: str) -> None:
    run = run_of(BadContribution(), engine)
    said = r"^client 4, round 1: what contribution returned holds a NaN or an infinity at /model/weight\. The upload held none"
    with pytest.raises(NonFiniteError, match=said) as caught:
        run.step()
    assert (caught.value.client_id, caught.value.round, run.round) == (4, 0, 0)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("settings", [{}, {"robust": Robust("norm_bound")}], ids=["mean", "norm_bound"])
def test_a_contribution_that_is_not_finite_is_left_out_where_the_run_goes_on(
    engine: str, settings: Any
) -> None:
    run = run_of(BadContribution(), engine, on_nan="drop", **settings)
    record = run.step()
    assert list(record.lost) == ["4"]
    assert "what contribution returned holds a NaN or an infinity at /model/weight" in record.lost["4"]
    assert all(bool(t.isfinite().all()) for t in tree.tensors(run.state.server))
    assert 4 not in run.state.clients


def test_the_total_without_a_client_whose_contribution_is_not_finite_is_that_of_the_others() -> None:
    sequential, vectorized = (
        run_of(BadContribution(), engine, on_nan="drop") for engine in ("sequential", "vectorized")
    )
    for run in (sequential, vectorized):
        run.step()
    for expected, actual in zip(
        tree.tensors(sequential.state.server), tree.tensors(vectorized.state.server), strict=True
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_an_error_of_pytorch_in_contribution_has_a_note_with_client_and_round() -> None:
    @dataclass(frozen=True)
    class Fails(Sums):
        def contribution(self, server: Tensor, upload: Tensor, client: ClientInfo) -> Sum[Tensor]:
            return Sum(upload @ torch.ones(3, dtype=torch.float64) if client.id == 2 else upload)

    with pytest.raises(RuntimeError) as caught:
        run_of(Fails()).step()
    assert any("Fails.contribution (client 2, round 1)" in note for note in caught.value.__notes__)


def test_a_form_that_differs_is_named_with_round_and_client() -> None:
    @dataclass(frozen=True)
    class Differs(Sums):
        def contribution(self, server: Tensor, upload: Tensor, client: ClientInfo) -> Sum[Tensor]:
            return Sum(upload[:1] if client.id == 3 else upload)

    said = r"^round 1: the contribution of client 3: .* this one has torch.float64 \[1\], those before it torch.float64 \[1000\]"
    with pytest.raises(tree.TreeError, match=said):
        run_of(Differs()).step()


@pytest.mark.parametrize("on_nan", ["stop", "drop"])
def test_an_upload_that_is_lost_anyway_stops_no_run(on_nan: str) -> None:
    record = run_of(Sums(bad=4), on_nan=on_nan).step({"4": "said so"})
    assert record.lost == {"4": "said so"}


def test_a_training_that_diverged_stops_no_run_if_its_reply_is_lost_anyway() -> None:
    run = Run(METHODS["fedavg"](), federation(poisoned=6), RunSettings(rounds=1), ENGINES["sequential"]())
    record = run.step({"6": "dropped when the run was made"})
    assert record.lost == {"6": "dropped when the run was made"}


def test_the_message_of_a_divergence_is_of_the_round_of_its_record() -> None:
    method = METHODS["fedavg"](epochs=3)
    # the inputs of client 6 make the first round's loss infinite
    settings = {"rounds": 3, "evaluate_every": 10**6}
    stops = Run(method, federation(poisoned=6), RunSettings(**settings), ENGINES["sequential"]())
    with pytest.raises(
        NonFiniteError, match=r"client 6, round 1, pass .* or set run\.on_nan to 'drop'"
    ) as caught:
        stops.step()
    assert (caught.value.round, stops.round) == (0, 0)
    drops = Run(
        method, federation(poisoned=6), RunSettings(on_nan="drop", **settings), ENGINES["sequential"]()
    )
    for t in (1, 2):
        record = drops.step()
        assert record.round == t
        assert record.lost["6"].startswith(f"client 6, round {t}, pass 'local': ")
        assert "its reply was dropped" in record.lost["6"]
        # it is set already
        assert "on_nan" not in record.lost["6"]


def test_reasons_have_an_order() -> None:
    run = run_of(Sums(bad=4), lost_replies=1 - 1e-9)
    record = run.step({"4": "said so", "5": "said so too"})
    assert record.lost["4"] == "said so"
    assert record.lost["5"] == "said so too"
    assert record.lost["3"] == "the reply was lost"
    assert not run.state.server.any()
    assert len(run.state.clients) == 0


def test_a_round_that_fails_in_training_while_the_server_adds_up_leaves_all_as_it_was() -> None:
    run = Run(
        METHODS["fedavg"](epochs=3), federation(poisoned=6), RunSettings(rounds=2), ENGINES["sequential"]()
    )
    before = run.state
    with pytest.raises(NonFiniteError, match="client 6"):
        run.step()
    assert run.state is before


@pytest.mark.few(2)
@pytest.mark.parametrize("engine", ["sequential", "vectorized", "processes"])
def test_after_a_server_that_fails_half_way_the_next_round_is_a_round_like_any_other(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = set(multiprocessing.active_children())
    run = run_of(Sums(), engine)
    caught = []
    monkeypatch.setattr(Sums, "most", 3)
    try:
        run.step()
    except TaskError as error:
        # as a notebook does, and with it all that was suspended
        caught.append(error)
    assert len(caught) == 1
    # an answer that nobody waited for would be taken for that of the next question
    assert set(multiprocessing.active_children()) <= others
    monkeypatch.undo()
    run.step()
    run.engine.close()
    assert torch.equal(run.state.server, torch.full((1000,), float(2**CLIENTS - 1), dtype=torch.float64))


@pytest.mark.parametrize("settings", [{"robust": Robust("median")}, {"secure": SecureSums(on=True)}], ids=str)
def test_contributions_of_a_cohort_are_added_one_by_one_where_the_aggregator_needs_it(settings: Any) -> None:
    together, apart = (
        run_of(METHODS["fedavg"](), engine, **settings) for engine in ("vectorized", "sequential")
    )
    for run in (together, apart):
        run.step()
    for parameter, value in together.state.server.items():
        torch.testing.assert_close(value, apart.state.server[parameter], rtol=1e-4, atol=1e-5)


def test_states_above_the_limit_wait_on_the_disk_during_the_round_too() -> None:
    run = run_of(Sums(), client_memory=0)
    for _ in range(2):
        run.step()
        assert run.state.clients.in_memory == 0
    assert {float(run.state.clients[i]) for i in range(CLIENTS)} == {2.0}


@pytest.mark.full
def test_time_within_is_not_the_outers_too() -> None:
    clock = Clock()

    def spend(seconds: float) -> None:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            pass

    def fail(seconds: float) -> None:
        spend(seconds)
        raise KeyError

    begin = time.perf_counter()
    with clock("outer"):
        spend(0.02)
        with clock("inner"):
            spend(0.05)
        with pytest.raises(KeyError), clock("inner"):
            fail(0.05)
        spend(0.02)
    whole = time.perf_counter() - begin
    assert sum(clock.wall.values()) == pytest.approx(whole, abs=0.01)
    assert clock.wall["inner"] >= 0.1
    assert 0.04 <= clock.wall["outer"] <= whole - 0.1 + 1e-6
    assert set(clock.cpu) == {"outer", "inner"}
