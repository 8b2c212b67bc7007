"""The script that times rounds, and the ratios themselves, by CPU time and with room for a busy machine."""

from __future__ import annotations

import re
import statistics
from pathlib import Path

import pytest
import rounds_against_pytorch
import torch
from helpers import round_timing
from helpers.round_timing import (
    SUBJECTS,
    USER,
    FloorLoop,
    UserLoop,
    bench_federation,
    time_defaults,
    time_rounds,
)
from rounds_against_pytorch import HEAD, main, markdown, rows

from fedlowrank.core.learning.optimizer import SGD
from fedlowrank.engines import Sequential
from fedlowrank.methods.fedavg import FedAvg
from fedlowrank.models.architecture import build_module
from fedlowrank.rounds.run import Run
from fedlowrank.rounds.run_settings import RunSettings

torch.set_num_threads(1)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", SUBJECTS)
def test_the_loops_take_the_same_steps(name: str) -> None:
    """With the same batches the user's loop ends in the same weights as a round."""
    subject = SUBJECTS[name]
    fed = bench_federation(subject, clients=4)
    run = Run(
        FedAvg(batch_size=32, optimizer=SGD(lr=0.01)),
        fed,
        RunSettings(rounds=1, participation=0.5),
        Sequential(),
    )
    cohort = run.participants(0)
    orders = {i.id: run.engine.trainer(run.method, fed, 0, i).data.order("local") for i in cohort}
    loop, floor = UserLoop(subject, fed), FloorLoop(subject, fed)
    assert [len(floor.batches[i]) for i in orders] == [len(order) for order in orders.values()]
    loop.model.load_state_dict(dict(zip(loop.model.state_dict(), run.state.server.values(), strict=True)))
    loop.round(cohort, orders)
    run.step()
    for (name_of, p), mean in zip(run.state.server.items(), loop.model.parameters(), strict=True):
        torch.testing.assert_close(p, mean.detach(), rtol=1e-4, atol=1e-5, msg=name_of)
    assert [p.shape for p in build_module(subject.plain, fed.key).parameters()] == [
        p.shape for p in run.state.server.values()
    ]


@pytest.mark.full
def test_the_table_has_a_row_a_model_and_arm() -> None:
    engines = ["sequential", "processes"]
    actual = [time_rounds(n, engines, 2, clients=6, sample=2) for n in ("mlp25k", "mlp99k")]
    assert [t.parameters for t in actual] == [784 * 32 + 32 + 32 * 10 + 10, 3072 * 32 + 32 + 32 * 10 + 10]
    assert [t.steps for t in actual] == [2 * 2] * 2
    assert all(len(a.cpu) == len(a.wall) == len(t.floor) == 2 for t in actual for a in t.arms.values())
    table = rows(actual)
    assert [r[3] for r in table] == [USER, "sequential", "processes"] * 2
    # of an engine whose children work no CPU time is claimed
    assert [bool(r[4]) for r in table] == [True, True, False] * 2
    assert markdown(HEAD, table).count("\n") == 1 + len(table)


def test_default_settings_are_compared_with_the_same_rounds_without() -> None:
    actual = time_defaults("mlp25k", "sequential", 2, clients=4, sample=2, repeats=2)
    assert len(actual.ratios) == 2
    assert all(ratio > 0 for ratio in actual.ratios)


def test_the_script(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(round_timing, "WARM", 1)
    monkeypatch.setattr(rounds_against_pytorch, "LONGER", 2)
    out = tmp_path / "speed.md"
    engines = ["sequential", "vectorized"]
    main(["--models", "mlp25k", "--engines", *engines, "--rounds", "1", "-o", str(out)])
    written = out.read_text()
    assert written in capsys.readouterr().out
    assert "25,450" in written
    assert f"--method fedavg --models mlp25k --engines {' '.join(engines)} --rounds 1 -o {out}\n" in written
    assert "GFLOP/s" in written
    assert "Whole runs, 2 times as long, with" in written
    assert "| vectorized |" in written
    assert f"| {USER} |" in written
    assert re.search(
        r"## Default settings\n.*\| MLP 784-32-10 \| sequential \| [\d.]+ \(", written, re.DOTALL
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [(["--models", "mlp25"], "'mlp25k'"), (["--engines", "vectorised"], "'vectorized'"),
     (["--rounds", "0"], "--rounds must be >= 1")],
)  # fmt: skip
def test_bad_options_are_named(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(options)
    assert end.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.full
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
    """The margins are for busy machines: they tell a round that takes half as long again."""
    actual = time_rounds(name, [engine], 7, clients=20, sample=10)
    assert statistics.median(actual.arms[engine].cpu) < most * statistics.median(actual.arms[USER].cpu)
