"""The command that times rounds, and the ratios themselves, by CPU time and with room for a busy machine."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from fedlowrank.cli.main import main
from fedlowrank.core.optimizer import SGD
from fedlowrank.engines import Sequential
from fedlowrank.methods.fedavg import FedAvg
from fedlowrank.models.architecture import build_module
from fedlowrank.simulation.run import Run
from fedlowrank.simulation.settings import RunSettings
from fedlowrank.testing import bench
from fedlowrank.testing.bench import SUBJECTS, federation, markdown, rows, time_rounds

torch.set_num_threads(1)


@pytest.mark.parametrize("name", SUBJECTS)
def test_the_bare_loop_takes_the_same_steps(name: str) -> None:
    """What is compared ends in the same weights: the mean of what the bare loop makes is the round's."""
    subject = SUBJECTS[name]
    fed = federation(subject, clients=4)
    run = Run(
        FedAvg(batch_size=32, optimizer=SGD(lr=0.01)),
        fed,
        RunSettings(rounds=1, participation=0.5),
        Sequential(),
    )
    loop = bench._Bare(subject, fed)
    ends = []
    load = loop._model.load_state_dict

    def noted(start: Any) -> None:
        ends.append([p.detach().clone() for p in loop._model.parameters()])
        load(start)

    loop._model.load_state_dict = noted  # type: ignore[method-assign, assignment]
    loop.round(run, 0)
    noted(loop._model.state_dict())
    run.step()
    for place, (name_of, p) in enumerate(run.state.server.items()):
        mean = (ends[1][place] + ends[2][place]) / 2
        torch.testing.assert_close(p, mean, rtol=1e-4, atol=1e-5, msg=name_of)
    assert [p.shape for p in build_module(subject.plain, fed.key).parameters()] == [
        p.shape for p in run.state.server.values()
    ]


def test_the_table_has_a_row_a_model_and_engine() -> None:
    seen: list[int] = []
    found = [
        time_rounds(n, ["sequential", "processes"], 2, clients=6, sample=2, on_round=lambda: seen.append(1))
        for n in ("mlp25k", "mlp99k")
    ]
    assert len(seen) == 4
    assert [t.parameters for t in found] == [784 * 32 + 32 + 32 * 10 + 10, 3072 * 32 + 32 + 32 * 10 + 10]
    assert [t.steps for t in found] == [2 * 2] * 2
    assert all(len(a.cpu) == len(a.wall) == len(t.bare) == 2 for t in found for a in t.arms.values())
    table = rows(found)
    assert [r[3] for r in table] == ["sequential", "processes"] * 2
    # of an engine whose children work no CPU time is claimed
    assert [bool(r[4]) for r in table] == [True, False] * 2
    assert markdown(found).count("\n") == 1 + len(table)


def test_the_command(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "WARM", 1)
    out = tmp_path / "speed.md"
    assert (
        main(["bench", "--models", "mlp25k", "--engines", "vectorized", "--rounds", "1", "-o", str(out)]) == 0
    )
    assert "25,450" in capsys.readouterr().out
    written = out.read_text()
    assert "fedlowrank bench --method fedavg --models mlp25k --engines vectorized --rounds 1" in written
    assert "GFLOP/s" in written
    assert "| vectorized |" in written


@pytest.mark.parametrize(
    ("options", "said"),
    [(["--models", "mlp25"], "Did you mean 'mlp25k'?"), (["--engines", "vectorised"], "'vectorized'"),
     (["--rounds", "0"], "--rounds must be >= 1")],
)  # fmt: skip
def test_bad_options_are_named(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *options]) != 0
    assert said in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "engine", "most"),
    [
        ("cnn", "sequential", 1.15),
        ("mlp25k", "vectorized", 1.0),
        ("mlp99k", "vectorized", 1.1),
        ("mlp99k", "sequential", 1.6),
    ],
)
def test_a_round_is_not_slower_than_plain_pytorch(name: str, engine: str, most: float) -> None:
    """Measured 0.8, 0.66, 0.71 and 1.13. The margins are for busy machines: they tell a round that takes half
    as long again."""
    found = time_rounds(name, [engine], 7, clients=20, sample=10)
    assert statistics.median(found.arms[engine].cpu) < most
