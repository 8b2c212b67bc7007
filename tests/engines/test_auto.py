"""The engine that a rule chooses by models, clients and device."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedlowrank import Federation
from fedlowrank.core import tree
from fedlowrank.core.learning.optimizer import SGD
from fedlowrank.engines import Processes, Sequential, Vectorized, auto
from fedlowrank.engines.auto import Auto, choose_engine
from fedlowrank.engines.engine import Engine
from fedlowrank.methods.fedavg import FedAvg
from fedlowrank.rounds.run import Run
from fedlowrank.rounds.run_settings import RunSettings
from fedlowrank.rounds.simulate import simulate
from fedlowrank.trust.trust_settings import Clipping

OWN = type("Own", (FedAvg,), {"__module__": "elsewhere"})


def test_user_code_in_a_wrapper_is_user_code() -> None:
    settings: dict[str, Any] = {"rounds": 1, "clipping": Clipping(1.0)}
    for method, engine in ((FedAvg(), Vectorized), (OWN(), Sequential)):
        run = Run(method, federation(nn.Linear(4, 2)), RunSettings(**settings), Sequential())
        assert choose_engine(run.method, run.federation, 6, None)[0] is engine


def federation(model: nn.Module, clients: int = 6, *shape: int) -> Federation:
    data = [(torch.randn(8, *(shape or (4,))), torch.arange(8) % 2) for _ in range(clients)]
    return Federation.from_arrays(data, model, classes=2)


def convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2))


def hooked() -> nn.Module:
    model = nn.Linear(4, 2)
    model.register_forward_hook(lambda *_: None)
    return model


@pytest.mark.parametrize(
    ("model", "clients", "cores", "micro_batch", "method", "wanted"),
    [
        (nn.Linear(4, 2), 6, 1, None, FedAvg(), Vectorized),
        (nn.Linear(4, 2), 6, 8, None, FedAvg(), Vectorized),
        (nn.Linear(4, 2), 3, 8, None, FedAvg(), Processes),
        (nn.Linear(4, 2), 1, 8, None, FedAvg(), Sequential),
        (nn.Linear(4, 2), 6, 1, 4, FedAvg(), Sequential),
        (nn.Linear(4, 2), 6, 8, 4, FedAvg(), Processes),
        (nn.Linear(4, 2), 6, 1, None, OWN(), Sequential),
        (nn.Sequential(nn.Linear(4, 60_000), nn.Linear(60_000, 2)), 6, 8, None, FedAvg(), Processes),
        (nn.Sequential(nn.Linear(4, 60_000), nn.Linear(60_000, 2)), 6, 1, None, FedAvg(), Vectorized),
        (nn.Sequential(nn.Linear(4, 160_000), nn.Linear(160_000, 2)), 6, 1, None, FedAvg(), Sequential),
        (hooked(), 6, 8, None, FedAvg(), Sequential),
    ],
)
def test_auto_chooses_the_engine_by_model_clients_and_cores(
    monkeypatch: pytest.MonkeyPatch,
    model: nn.Module,
    clients: int,
    cores: int,
    micro_batch: int | None,
    method: FedAvg,
    wanted: type[Engine],
) -> None:
    monkeypatch.setattr(auto, "cores", lambda: cores)
    monkeypatch.setattr(auto, "MIN_PARALLEL_FLOPS", 0)
    actual, reason = choose_engine(method, federation(model), clients, micro_batch)
    assert actual is wanted
    assert reason


@pytest.mark.parametrize(("cores", "wanted"), [(1, Sequential), (2, Processes)])
def test_convolutions_on_a_cpu_are_not_batched_over_clients(
    monkeypatch: pytest.MonkeyPatch, cores: int, wanted: type[Engine]
) -> None:
    monkeypatch.setattr(auto, "cores", lambda: cores)
    monkeypatch.setattr(auto, "MIN_PARALLEL_FLOPS", 0)
    assert choose_engine(FedAvg(), federation(convolution(), 6, 1, 4, 4), 6, None)[0] is wanted


@pytest.mark.parametrize(("epochs", "wanted"), [(1, Sequential), (2, Processes)])
def test_processes_are_started_where_a_round_is_much_work(
    monkeypatch: pytest.MonkeyPatch, epochs: int, wanted: type[Engine]
) -> None:
    monkeypatch.setattr(auto, "cores", lambda: 2)
    # three forward passes of 2 x 4 x 2 operations for each of 3 x 5 examples
    data = [(torch.randn(5, 4), torch.arange(5) % 2) for _ in range(3)]
    on = Federation.from_arrays(data, nn.Linear(4, 2), classes=2, val=0.0, test=0.0)
    monkeypatch.setattr(auto, "MIN_PARALLEL_FLOPS", 3 * 16 * 15 * 2)
    assert choose_engine(FedAvg(epochs=epochs), on, 3, None)[0] is wanted


@pytest.mark.full
def test_the_choice_is_logged_and_gives_that_engine_s_result(caplog: pytest.LogCaptureFixture) -> None:
    method, model = FedAvg(optimizer=SGD(lr=0.1)), nn.Linear(4, 2)
    clients = [(torch.randn(8, 4), torch.arange(8) % 2) for _ in range(6)]

    def made() -> Federation:
        return Federation.from_arrays(clients, model, classes=2)

    with caplog.at_level(logging.INFO, logger="fedlowrank"):
        run = Run(method, made(), RunSettings(rounds=2), engine := Auto())
        run.step()
        run.step()
        engine.close()
    assert [r.getMessage() for r in caplog.records] == [
        "engine auto: vectorized (small dense models, enough clients to batch)"
    ]
    named = simulate(method, made(), rounds=2, engine="vectorized").run
    assert tree.equal(run.state.server, named.state.server)


@pytest.mark.few(1)
@pytest.mark.parametrize("cores", [(1, 8), (8, 1)])
def test_a_run_goes_on_with_its_bits_on_another_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cores: tuple[int, int]
) -> None:
    # between the limits for one core and for several
    model = nn.Sequential(nn.Linear(4, 30_000), nn.ReLU(), nn.Linear(30_000, 2))
    clients = [(torch.randn(6, 4), torch.arange(6) % 2) for _ in range(4)]
    monkeypatch.setattr(auto, "MIN_PARALLEL_FLOPS", 0)

    def ran(rounds: int, folder: Path, **more: Any) -> Any:
        on = Federation.from_arrays(clients, model, classes=2)
        return simulate("fedavg", on, rounds=rounds, folder=folder, evaluate_every=5, **more)

    monkeypatch.setattr(auto, "cores", lambda: cores[0])
    whole = ran(2, tmp_path / "whole")
    ran(1, tmp_path / "part")
    monkeypatch.setattr(auto, "cores", lambda: cores[1])
    actual = ran(2, tmp_path / "part", resume=True)
    assert tree.equal(actual.run.state.server, whole.run.state.server)
    # without what the run keeps, another engine would have made other bits
    kinds = {choose_engine(FedAvg(), whole.run.federation, 4, None)[0], type(whole.run.engine.chosen_engine)}
    assert kinds == {Vectorized, Processes}
