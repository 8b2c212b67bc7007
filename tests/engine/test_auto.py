"""The engine that a trial finds fastest: chosen once, kept, said, and never a reason for another result or a failure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from fedlowrank import tree
from fedlowrank.check import federation
from fedlowrank.engine import Processes, Sequential, Vectorised, auto
from fedlowrank.engine.auto import Auto, cache_file, fingerprint
from fedlowrank.engine.base import Engine
from fedlowrank.engine.run import Run, RunSettings
from fedlowrank.errors import TaskError
from fedlowrank.methods.fedavg import FedAvg
from fedlowrank.optimiser import SGD
from fedlowrank.simulate import simulate

torch.set_num_threads(1)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Seconds that engines are made to take; None for one that cannot."""
    table: dict[str, Any] = {"sequential": 1.0, "vectorised": 1.0, "processes": 1.0}
    tried: list[str] = []

    def timed(engine: Engine, *_: Any) -> float | None:
        tried.append(engine.name)
        seconds: float | None = table[engine.name]
        return seconds

    monkeypatch.setattr(auto, "_seconds", timed)
    monkeypatch.setattr(auto, "cores", lambda: 2)
    table["tried"] = tried
    return table


def chosen(engine: Auto, rounds: int = 2, method: FedAvg | None = None, clients: int = 5) -> type[Engine]:
    run = Run(method or FedAvg(), federation(False, clients=clients), RunSettings(rounds=rounds), engine)
    for _ in range(rounds):
        run.step()
    engine.close()
    return type(engine.chosen)


@pytest.mark.parametrize(
    ("times", "wanted"),
    [
        ({}, Sequential),
        ({"vectorised": 0.5}, Vectorised),
        ({"vectorised": 0.95, "processes": 0.96}, Sequential),
        ({"vectorised": 0.7, "processes": 0.6}, Processes),
        ({"vectorised": None, "processes": 0.6}, Processes),
        # one that takes long is not tried by other engines: cores help it anyway
        ({"sequential": 100.0, "vectorised": 0.1}, Processes),
    ],
)
def test_the_fastest_is_chosen_but_no_other_for_little(
    clock: dict[str, Any], times: dict[str, float | None], wanted: type[Engine]
) -> None:
    clock |= times
    said: list[str] = []
    assert chosen(Auto(cache=None, say=said.append)) is wanted
    assert len(said) == 1
    assert said[0].startswith(f"engine auto: {wanted.name}; 5 clients took sequential ")


def test_a_choice_is_kept_and_made_anew_for_other_work(clock: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "deep" / "engines.json"
    said: list[str] = []
    clock["vectorised"] = 0.2
    assert chosen(Auto(cache=file, say=said.append)) is Vectorised
    clock["vectorised"] = 5.0
    assert chosen(Auto(cache=file, say=said.append)) is Vectorised
    assert "as a trial found before" in said[1]
    assert clock["tried"].count("vectorised") == 1
    for method, clients in ((FedAvg(optimiser=SGD(lr=0.5)), 5), (FedAvg(), 4)):
        assert chosen(Auto(cache=file, say=said.append), method=method, clients=clients) is Sequential
    assert sorted(json.loads(file.read_text()).values()) == ["sequential", "sequential", "vectorised"]


@pytest.mark.parametrize("content", ["", "[1]", '{"a": 1}', "{"])
def test_a_damaged_file_of_choices_is_written_anew(clock: dict[str, Any], tmp_path: Path, content: str) -> None:
    file = tmp_path / "engines.json"
    file.write_text(content)
    assert chosen(Auto(cache=file, say=lambda _: None)) is Sequential
    assert list(json.loads(file.read_text()).values()) == ["sequential"]


def test_a_choice_that_cannot_be_kept_is_said(clock: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said: list[str] = []
    assert chosen(Auto(cache=tmp_path / "file" / "engines.json", say=said.append)) is Sequential
    assert "cannot be kept" in said[-1]


def test_the_trial_leaves_no_trace_in_the_result(tmp_path: Path) -> None:
    plain = simulate("scaffold", federation(False), rounds=3, engine="sequential").run
    engine = Auto(cache=None, say=lambda _: None)
    run = Run(plain.method, federation(False), RunSettings(rounds=3), engine)
    steps = [run.step().steps for _ in range(3)]
    engine.close()
    for a, b in zip(tree.leaves(run.state.server), tree.leaves(plain.state.server), strict=True):
        torch.testing.assert_close(a[1], b[1], rtol=1e-3, atol=1e-4)
    assert len(set(steps)) == 1


class Unable(Sequential):
    """An engine that cannot execute the method."""

    def run(self, *_: Any, **__: Any) -> Iterator[Any]:
        raise TaskError("not vectorised")
        yield


def test_an_engine_that_cannot_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "cores", lambda: 1)

    class Never(Unable):
        name = "vectorised"

    monkeypatch.setattr(auto, "Vectorised", Never)
    said: list[str] = []
    assert chosen(Auto(cache=None, say=said.append)) is Sequential
    assert "vectorised" not in said[0]


def test_the_file_of_choices_is_in_the_user_s_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_file() == tmp_path / "fedlowrank" / "engines.json"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_file() == Path.home() / ".cache" / "fedlowrank" / "engines.json"


def test_a_fingerprint_tells_work_apart() -> None:
    method, fed = FedAvg(), federation(False)
    assert fingerprint(method, fed, 5) == fingerprint(FedAvg(), federation(False), 5)
    others: Sequence[Any] = [
        (FedAvg(batch_size=3), fed, 5), (method, federation(True), 5), (method, fed, 4),
        (method, federation(False, scale=2), 5),
    ]  # fmt: skip
    assert len({fingerprint(*o) for o in others} | {fingerprint(method, fed, 5)}) == 5
