"""A damaged run folder is named and left out, and the others are shown."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from fedlowrank.cli.main import main

from .small_experiment import done, refused, write

Capsys = pytest.CaptureFixture[str]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


DAMAGES: dict[str, Callable[[Path], None]] = {
    "run.json": lambda folder: (folder / "run.json").write_text("{}") and None,
    "clients.json": lambda folder: cut(folder / "clients.json"),
    "status.json": lambda folder: (folder / "status.json").unlink(),
    "metrics.jsonl.gz": lambda folder: (folder / "metrics.jsonl.gz").write_bytes(b"no archive"),
    "representations.safetensors": lambda folder: (folder / "representations.safetensors").write_bytes(b"x"),
    "answers.jsonl": lambda folder: (folder / "answers.jsonl").write_text("{"),
}


@pytest.mark.usefixtures("undrawn")
@pytest.mark.few(2)
@pytest.mark.parametrize("name", DAMAGES)
def test_a_report_names_and_leaves_out_a_damaged_run(name: str, capsys: Capsys) -> None:
    done(capsys, "compare", write(Path()))
    folder = Path("runs/small/fedavg-s0")
    DAMAGES[name](folder)
    capsys.readouterr()
    assert main(["report", "runs/small", "-o", "page.html", "--csv", "values.csv"]) == 1
    said = capsys.readouterr()
    (warning,) = [line for line in said.out.splitlines() if line.startswith(f"{folder} is left out: ")]
    assert name in warning
    assert "1 damaged run left out" in said.out
    assert "Traceback" not in said.err
    assert set(pd.read_csv("values.csv")["method"]) == {"standalone"}
    # named itself, it is an error
    assert name in refused(capsys, "report", str(folder))
    assert name in refused(capsys, "report", "runs/small", str(folder))


@pytest.mark.usefixtures("undrawn")
def test_status_shows_the_runs_that_can_be_read(capsys: Capsys) -> None:
    done(capsys, "compare", write(Path()))
    DAMAGES["status.json"](Path("runs/small/fedavg-s0"))
    capsys.readouterr()
    assert main(["status", "runs/small"]) == 1
    said = capsys.readouterr().out
    assert "runs/small/fedavg-s0 is left out: " in said
    (shown,) = [line for line in said.splitlines() if "finished" in line]
    assert "standalone-s0" in shown


@pytest.mark.usefixtures("undrawn")
def test_a_report_of_damaged_runs_alone_is_an_error(capsys: Capsys) -> None:
    done(capsys, "compare", write(Path()))
    for folder in Path("runs/small").glob("*-s0"):
        DAMAGES["run.json"](folder)
    said = refused(capsys, "report", "runs/small")
    assert said.startswith("no run can be read")
    assert "standalone-s0" in said
    assert "fedavg-s0" in said
