"""A run gets more rounds, and is then the run that had as many from the start."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fedlowrank import simulate
from fedlowrank.cli.main import main
from fedlowrank.core.errors import CheckpointError
from fedlowrank.engines.sequential import Sequential
from fedlowrank.methods import METHODS
from fedlowrank.methods.fedavg import FedAvg
from fedlowrank.results.records import RunRecord
from fedlowrank.rounds.plan import Plan
from fedlowrank.rounds.run import Run
from fedlowrank.rounds.run_settings import RunSettings
from fedlowrank.storage.run_files import seal_run
from fedlowrank.testing.check import CHECKS, small_federation
from tests.cli.small_experiment import SMALL, done, files, refused, write

Capsys = pytest.CaptureFixture[str]
DEEP = ("model.names=['mlp']", "model.hidden=[6, 5]")


def compared(folder: Path) -> object:
    """All that two equal runs have in common: configuration, records but for the clocks, and every byte of the state."""
    record = RunRecord.load(folder)
    records = [r.untimed() for r in record.rounds]
    checkpoints = {name: apart(content) for name, content in files(folder / "checkpoint").items()}
    return record.config, record.clients, record.status, records, checkpoints


def apart(checkpoint: bytes) -> tuple[bytes, dict[str, object]]:
    """The states of a checkpoint, and its table of contents without the run's identifier, which is drawn."""
    size = int.from_bytes(checkpoint[-8:], "big")
    table = json.loads(checkpoint[-8 - size : -8])
    return checkpoint[: -8 - size], {key: table[key] for key in ("round", "elsewhere", "server", "clients")}


@pytest.mark.full
@pytest.mark.parametrize("method", ["fedavg", "scaffold", "pfedlora"])
def test_more_rounds_equal_as_many_from_the_start(method: str, capsys: Capsys) -> None:
    file = write(Path())
    done(
        capsys,
        "run",
        file,
        *DEEP,
        "--method",
        method,
        "-o",
        "grown",
        "run.rounds=2",
        "run.checkpoint_every=1",
    )
    done(
        capsys,
        "run",
        file,
        *DEEP,
        "--method",
        method,
        "-o",
        "whole",
        "run.rounds=5",
        "run.checkpoint_every=1",
    )
    done(capsys, "resume", "grown", "run.rounds=5")
    assert len(RunRecord.load(Path("grown")).rounds) == 6
    assert compared(Path("grown")) == compared(Path("whole"))
    # from now on it is such a run
    before = files(Path("grown"))
    done(capsys, "resume", "grown")
    assert files(Path("grown")) == before


@pytest.mark.full
@pytest.mark.usefixtures("undrawn")
def test_compare_gives_its_runs_more_rounds(capsys: Capsys) -> None:
    file = write(Path())
    done(capsys, "run", file, "run.rounds=1")
    done(capsys, "compare", file, "run.rounds=3")
    done(capsys, "run", file, "run.rounds=3", "-o", "whole")
    grown, whole = (RunRecord.load(Path(f)) for f in ("runs/small/fedavg-s0", "whole"))
    assert [r.untimed() for r in grown.rounds] == [r.untimed() for r in whole.rounds]


@pytest.mark.full
def test_a_run_gets_no_fewer_rounds(capsys: Capsys) -> None:
    done(capsys, "run", write(Path()), "run.rounds=2", "run.checkpoint_every=1")
    before = files(Path("runs"))
    actual = refused(capsys, "resume", "runs/small/fedavg-s0", "run.rounds=1")
    assert "run.rounds was 2 and is 1, but a run can only get more rounds" in actual
    assert files(Path("runs")) == before


@pytest.mark.few(1)
@pytest.mark.parametrize("method", [n for n, cls in METHODS.items() if cls.uses_rounds])
def test_a_schedule_over_all_rounds_is_named(method: str, capsys: Capsys) -> None:
    done(capsys, "run", write(Path()), *DEEP, "run.rounds=2", "--method", method)
    folder = f"runs/small/{method}-s0"
    before = files(Path(folder))
    actual = refused(capsys, "resume", folder, "run.rounds=4")
    assert "run.rounds was 2 and is 4" in actual
    assert f"{METHODS[method].title} plans its rounds by how many there are" in actual
    assert files(Path(folder)) == before


def test_the_methods_that_plan_their_rounds_are_those_that_say_so() -> None:
    (check,) = [test for name, test in CHECKS.items() if name.startswith("a run of more rounds")]
    assert sorted(n for n, cls in METHODS.items() if cls.uses_rounds) == ["fedkd", "fedspa"]
    for name in ("fedkd", "fedspa"):
        silent = type("Silent", (METHODS[name],), {"uses_rounds": False})
        assert "set uses_rounds = True" in str(check(silent()))
        assert check(METHODS[name]()) is None


@pytest.mark.full
def test_from_python(tmp_path: Path) -> None:
    fed = small_federation(False)
    simulate("fedavg", fed, rounds=1, folder=tmp_path / "grown")
    grown = simulate("fedavg", fed, rounds=3, folder=tmp_path / "grown", resume=True)
    whole = simulate("fedavg", fed, rounds=3)
    assert [r.untimed() for r in grown.rounds] == [r.untimed() for r in whole.rounds]
    with pytest.raises(CheckpointError, match="only get more rounds"):
        simulate("fedavg", fed, rounds=2, folder=tmp_path / "grown", resume=True)


@pytest.mark.full
def test_evaluations_keep_the_interval_of_the_first_plan(tmp_path: Path) -> None:
    """Else run.patience, which counts evaluations, would wait for more rounds after an extension than before."""
    fed, settings = small_federation(False), RunSettings(rounds=400)
    simulate("fedavg", fed, rounds=1, folder=tmp_path / "grown")
    grown = Run(FedAvg(), fed, settings, Sequential(), Plan.read(tmp_path / "grown"))
    new = Run(FedAvg(), fed, settings, Sequential())
    for run in (grown, new):
        # training costs next to nothing, so evaluations are as rare as they may be
        run.plan_evaluations(1)
    assert (grown.evaluate_every, new.evaluate_every) == (1, 8)


def test_a_run_that_has_ended_says_what_it_no_longer_measures(capsys: Capsys) -> None:
    """Else run.json would name a metric that no round has."""
    file, folder = write(Path()), Path("runs/small/fedavg-s0")
    done(capsys, "run", file)
    stored = RunRecord.load(folder).config
    added = ("run.metrics=['macro_f1']", "run.keep_best=true", "run.evaluate_every=1", "split.val=0.2")
    assert main(["compare", file, "--methods", "fedavg", *added[:3:2], "title=New"]) == 0
    assert "run.metrics and run.evaluate_every would change nothing" in capsys.readouterr().err
    config = RunRecord.load(folder).config
    assert config["run"] == stored["run"]
    assert config["experiment"]["run"] == stored["experiment"]["run"]
    # what the report reads without any round is taken over
    assert (stored["title"], config["title"]) == ("small", "New")
    done(capsys, "resume", str(folder), added[0], "run.rounds=3")
    assert "run.metrics" not in capsys.readouterr().err
    record = RunRecord.load(folder)
    assert record.config["run"]["metrics"] == ["macro_f1"]
    assert [bool(r.values("macro_f1")) for r in record.rounds[-2:]] == [False, True]


def test_the_command_line_keeps_the_noise_of_a_private_run(capsys: Capsys) -> None:
    pytest.importorskip("dp_accounting")
    private = (
        "run.clipping.norm=1.0",
        "run.privacy.kind=central",
        "run.privacy.epsilon=3",
        "run.privacy.delta=0.1",
    )
    file, folder = write(Path()), Path("runs/small/fedavg-s0")
    done(capsys, "run", file, *private)
    out = done(capsys, "resume", str(folder), "run.rounds=5")
    # all clients take part, so the loss is that of one Gaussian release with σ / √2
    (sigma,) = {json.loads(line)["noise"] for line in (folder / "privacy.jsonl").read_text().splitlines()}
    alpha = np.linspace(1.01, 200, 20_000)
    bound = (2 * alpha / (2 * sigma**2) + np.log1p(-1 / alpha) - np.log(0.1 * alpha) / (alpha - 1)).min()
    assert 2.9 < bound <= 3
    assert len(RunRecord.load(folder).rounds) == 3
    assert "privacy.epsilon = 3" in " ".join(out.split())
    assert "run.privacy.epsilon was 3" in refused(capsys, "resume", str(folder), "run.privacy.epsilon=9")


def test_a_damaged_configuration(capsys: Capsys) -> None:
    done(capsys, "run", write(Path()), "run.rounds=1")
    path = Path("runs/small/fedavg-s0/run.json")
    stored = json.loads(path.read_text())
    path.write_text(json.dumps({**stored, "run": 5}))
    assert "run.json is damaged or was changed by hand" in refused(capsys, "resume", str(path.parent))
    seal_run(path.parent)
    assert "run.json is damaged: run must be a table, not 5" in refused(capsys, "resume", str(path.parent))


def test_a_field_is_named_with_both_values_also_where_one_is_the_default(capsys: Capsys) -> None:
    text = SMALL.replace('kind = "iid"', 'kind = "dirichlet"\nmin_size = 1\nalpha = 5.0')
    done(capsys, "run", write(Path(), text), "run.rounds=1")
    before = files(Path("runs"))
    spelled = refused(capsys, "resume", "runs/small/fedavg-s0", "partition.alpha=0.5")
    left_out = refused(capsys, "compare", write(Path(), text.replace("alpha = 5.0", "")), "run.rounds=1")
    for actual in (spelled, left_out):
        assert "partition.alpha was 5.0 and is 0.5" in actual
    assert files(Path("runs")) == before
