"""A method's functions are called once for a cohort: in training, for what replies contribute, and in evaluation."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedlowrank import Federation
from fedlowrank.core.contract import ClientInfo, ClientModel, ClientView, Mean
from fedlowrank.core.tree import Params
from fedlowrank.engines import ENGINES
from fedlowrank.engines.auto import Auto
from fedlowrank.engines.engine import Engine
from fedlowrank.engines.vectorized import Vectorized
from fedlowrank.methods import METHODS
from fedlowrank.rounds.run import Run
from fedlowrank.rounds.run_settings import RunSettings
from fedlowrank.testing.check import small_federation
from tests.support.counting_engine import CountingEngine

torch.set_num_threads(1)

CALLS: Counter[str] = Counter()


def run_of(method: Any, engine: Any, rounds: int = 3, **settings: Any) -> tuple[Run, list[Any]]:
    run = Run(method, small_federation(False), RunSettings(rounds=rounds, **settings), engine)
    return run, [run.step() for _ in range(rounds)]


@dataclass(frozen=True)
class Counted(METHODS["ditto"]):  # type: ignore[misc]
    """Ditto that counts its calls; counting changes no result."""

    def local_update(self, state: Any, down: Params, view: ClientView) -> tuple[Any, Params]:
        CALLS["local_update"] += 1
        actual: tuple[Any, Params] = super().local_update(state, down, view)
        return actual

    def contribution(self, server: Any, upload: Params, client: ClientInfo) -> Any:
        CALLS["contribution"] += 1
        return super().contribution(server, upload, client)

    def client_model(self, state: Any, down: Params, view: ClientView) -> ClientModel:
        CALLS["client_model"] += 1
        actual: ClientModel = super().client_model(state, down, view)
        return actual


@pytest.mark.parametrize("kind", [Vectorized, Auto])
def test_functions_are_called_once_a_round_and_give_what_each_client_gives_alone(
    kind: type[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    # auto leaves methods of a user's own to other engines
    monkeypatch.setattr("fedlowrank.engines.auto.choose_engine", lambda *_: (Vectorized, "chosen here"))
    CALLS.clear()
    one, expected = run_of(Counted(), ENGINES["sequential"]())
    assert CALLS["contribution"] == 3 * 5
    calls = []
    run = Run(Counted(), small_federation(False), RunSettings(rounds=3), kind())
    actual = []
    for _ in range(3):
        CALLS.clear()
        actual.append(run.step())
        calls.append(dict(CALLS))
    # the first time one client is called alone, too
    assert calls[1] == calls[2] == {"local_update": 1, "contribution": 1, "client_model": 1}
    assert calls[0] == {"local_update": 2, "contribution": 2, "client_model": 2}
    torch.testing.assert_close(run.state.server, one.state.server, rtol=1e-4, atol=1e-6)
    for a, b in zip(actual, expected, strict=True):
        assert (a.bytes_up, a.bytes_down, a.steps, a.flops) == (b.bytes_up, b.bytes_down, b.steps, b.flops)
        for split in ("val", "test"):
            for series in ("personal", "global"):
                assert a.values("accuracy", series=series, split=split) == b.values(
                    "accuracy", series=series, split=split
                )


@dataclass(frozen=True)
class ByNumber(METHODS["fedavg"]):  # type: ignore[misc]
    """FedAvg whose weights depend on a number of the upload, which control flow reads."""

    def contribution(self, server: Any, upload: Params, client: ClientInfo) -> Mean[Params]:
        return Mean(upload, client.example_count if upload["head.bias"][0] > 0 else 2 * client.example_count)


@dataclass(frozen=True)
class WithoutRule(METHODS["fedavg"]):  # type: ignore[misc]
    """FedAvg with an operation in its contribution that has no rule."""

    def contribution(self, server: Any, upload: Params, client: ClientInfo) -> Mean[Params]:
        return Mean({n: torch.logcumsumexp(t, 0) for n, t in upload.items()}, client.example_count)


@dataclass(frozen=True)
class Another(METHODS["fedavg"]):  # type: ignore[misc]
    """FedAvg that gives something else for stacked tensors, as a wrong rule would."""

    def contribution(self, server: Any, upload: Params, client: ClientInfo) -> Mean[Params]:
        return Mean({n: t if type(t) is Tensor else 2 * t for n, t in upload.items()}, client.example_count)


@pytest.mark.parametrize("method", [ByNumber(), WithoutRule(), Another()], ids=lambda m: type(m).__name__)
def test_contributions_that_differ_or_have_no_rule(method: Any, caplog: pytest.LogCaptureFixture) -> None:
    engine = CountingEngine()
    with caplog.at_level(logging.INFO, "fedlowrank.engines"):
        (one, _), (other, _) = run_of(method, ENGINES["sequential"]()), run_of(method, engine)
    torch.testing.assert_close(other.state.server, one.state.server, rtol=1e-4, atol=1e-6)
    # training is batched all the same
    assert engine.sizes == [5, 5, 5]
    assert ("logcumsumexp has no rule" in caplog.text) == isinstance(method, WithoutRule)


def test_a_lost_reply_of_a_cohort_does_not_count() -> None:
    settings = {"lost_replies": 0.4, "rounds": 4}
    (one, expected), (other, actual) = (
        run_of(METHODS["scaffold"](), engine(), **settings) for engine in (ENGINES["sequential"], Vectorized)
    )
    assert any(r.lost for r in actual)
    assert [r.lost for r in actual] == [r.lost for r in expected]
    torch.testing.assert_close(other.state.server.model, one.state.server.model, rtol=1e-4, atol=1e-6)


def test_routers_of_newcomers_are_learnt_at_once() -> None:
    """Clients that never trained learn a router before they are evaluated."""
    method = METHODS["floral"](rank=2, clusters=2)
    engine = CountingEngine()
    (_, expected), (_, actual) = (
        run_of(method, e, rounds=2, participation=0.2) for e in (ENGINES["sequential"](), engine)
    )
    # one client a round trains alone; in each evaluation the routers of the others are trained as one cohort
    assert engine.sizes == [4, 3]
    for a, b in zip(actual, expected, strict=True):
        assert a.measured is not None
        assert b.measured is not None
        names = [(c.name, c.series, c.split) for c in a.measured.columns]
        assert names == [(c.name, c.series, c.split) for c in b.measured.columns]
        for name, series, split in names:
            mine, theirs = (
                a.values(name, series=series, split=split),
                b.values(name, series=series, split=split),
            )
            assert len(mine) == 5
            assert mine == [v if v is None else pytest.approx(v, rel=1e-4, abs=1e-4) for v in theirs]


@pytest.mark.parametrize(("val", "test"), [(3, 7), (7, 3), (0, 5)])
def test_models_are_evaluated_at_once_whatever_the_sizes_of_the_splits(
    val: int, test: int, caplog: pytest.LogCaptureFixture
) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(4, 30, 6, generator=generator), torch.randint(3, (4, 30), generator=generator)
    parts = [slice(0, 20), slice(20, 20 + val), slice(20 + val, 20 + val + test)]
    data = [tuple((x[i, part], y[i, part]) for part in parts) for i in range(4)]
    federation = Federation.from_arrays(data, lambda: torch.nn.Linear(6, 3), classes=3)
    run = Run(Counted(), federation, RunSettings(rounds=2), Vectorized())
    with caplog.at_level(logging.INFO):
        run.step()
        CALLS.clear()
        run.step()
    assert CALLS["client_model"] == 1
    assert not caplog.messages


def test_clients_of_like_sizes_are_evaluated_together(caplog: pytest.LogCaptureFixture) -> None:
    generator, data = torch.Generator().manual_seed(0), []
    for examples in (2, 3, 3, 40, 50, 60):
        x = torch.randn(20 + examples, 6, generator=generator)
        y = torch.randint(3, (20 + examples,), generator=generator)
        data.append(((x[:20], y[:20]), (x[20:], y[20:])))
    federation = Federation.from_arrays(data, lambda: torch.nn.Linear(6, 3), classes=3)
    actual = []
    for engine in (Vectorized(), ENGINES["sequential"]()):
        # its models are functions, which are called once for a part of the cohort
        run = Run(METHODS["ensemble"](clusters=2), federation, RunSettings(rounds=2), engine)
        with caplog.at_level(logging.INFO):
            run.step()
            actual.append(run.step().measured)
        assert not caplog.messages
    one, other = (
        {(c.name, c.series, c.split): c.values for c in block.columns}
        for block in actual
        if block is not None
    )
    assert one.keys() == other.keys()
    for key, values in one.items():
        assert values == [v if v is None else pytest.approx(v, abs=1e-4) for v in other[key]], key


def test_few_clients_of_a_kind_go_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedlowrank.engines.vectorized.MIN_COHORT", 4)
    for participation, sizes in ((0.6, []), (0.8, [4, 4])):
        engine = CountingEngine()
        (one, _), (other, _) = (
            run_of(METHODS["fedavg"](), e, rounds=2, participation=participation)
            for e in (ENGINES["sequential"](), engine)
        )
        assert engine.sizes == sizes
        torch.testing.assert_close(other.state.server, one.state.server, rtol=1e-4, atol=1e-6)


class Operations(TorchDispatchMode):
    """Counts the operations on real numbers; what is drawn and counted of each client's order is whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        actual = func(*args, **(kwargs or {}))
        used = [t for t in tree_leaves((args, actual)) if isinstance(t, Tensor)]
        self.count += any(t.is_floating_point() for t in used)
        return actual


def operations(method: Any, clients: int) -> int:
    """Of a round, and of an evaluation, when all kinds of cohorts have been seen."""
    g = torch.Generator().manual_seed(0)
    data = [(torch.randn(20, 8, generator=g), torch.arange(20) % 3) for _ in range(clients)]
    model = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.ReLU(), torch.nn.Linear(6, 3))
    run = Run(method, Federation.from_arrays(data, model), RunSettings(rounds=4), Vectorized())
    for _ in range(2):
        run.step()
    with Operations() as seen:
        run.step()
    return seen.count


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "fedadam"])
def test_the_operations_of_a_round_do_not_depend_on_the_number_of_clients(name: str) -> None:
    assert operations(METHODS[name](), 10) == operations(METHODS[name](), 40)


@pytest.mark.parametrize(("name", "each"), [("scaffold", 4), ("floral", 5)])
def test_of_each_client_only_its_state_is_copied(name: str, each: int) -> None:
    """A copy of each tensor of a client's state, which leaves the memory of the cohort's tensors."""
    method = METHODS[name](**({"rank": 2, "clusters": 2} if name == "floral" else {}))
    assert operations(method, 40) - operations(method, 10) <= 30 * each
