"""Keeping figures method by method: once each, whole or not at all, of several processes at a time; and what commands say."""

from __future__ import annotations

import gzip
import importlib
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from fedlowrank.core.errors import CheckpointError

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs"))
running: Any = importlib.import_module("running")
tables: Any = importlib.import_module("tables.experiments")
sys.path.pop(0)

TASK = 'name = "small"\nmethod = "fedavg"\ncompare = ["fedavg", "ditto"]\n[data]\nsource = "digits"\n'


@pytest.fixture
def figures(tmp_path: Path) -> Path:
    """An experiment ``small.toml``, and a folder for its figures."""
    (tmp_path / "small.toml").write_text(TASK)
    return tmp_path / "figures"


def write_ended_runs(out: Path, states: dict[str, str], torch: str = "2") -> None:
    """What keeping reads of a method's runs that came to their end: versions, states, commit."""
    for name, state in states.items():
        (out / name).mkdir(parents=True)
        (out / name / "run.json").write_text(json.dumps({"versions": {"torch": torch}}))
        (out / name / "status.json").write_text(json.dumps({"state": state}))
    (out / "source.json").write_text('{"commit": "abc", "machine": "here"}')


def keep_method(figures: Path, method: str, accuracies: list[float]) -> None:
    """Keep a row for each of some runs of a method."""
    out = figures.parent / "runs" / method
    if not out.exists():
        write_ended_runs(out, {f"{method}-s{seed}": "finished" for seed in range(len(accuracies))})
    rows = pd.DataFrame({"method": method, "seed": range(len(accuracies)), "accuracy": accuracies})
    running.keep_figures(figures.parent / "small.toml", figures, method, out, {".csv": rows})


def test_a_method_that_is_kept_again_replaces_its_rows(figures: Path) -> None:
    keep_method(figures, "ditto", [0.5, 0.25])
    keep_method(figures, "fedavg", [0.75, 0.125])
    keep_method(figures, "ditto", [0.5, 0.375])
    assert (figures / "small.csv").read_text() == (
        "method,seed,accuracy\nfedavg,0,0.75\nfedavg,1,0.125\nditto,0,0.5\nditto,1,0.375\n"
    )


def test_rows_that_a_method_no_longer_has_are_removed(tmp_path: Path) -> None:
    file = tmp_path / "small-truncation.csv"
    running.keep_rows(file, "fedavg", pd.DataFrame(), ["fedavg"])
    assert not file.exists()
    for method in ("fedavg", "ditto"):
        running.keep_rows(
            file, method, pd.DataFrame({"method": [method], "weight": [0.5]}), ["fedavg", "ditto"]
        )
    running.keep_rows(file, "fedavg", pd.DataFrame(), ["fedavg", "ditto"])
    assert file.read_text() == "method,weight\nditto,0.5\n"


def test_keeping_that_was_interrupted_is_made_again(figures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_method(figures, "fedavg", [0.5, 0.25])
    with monkeypatch.context() as patch:
        patch.setattr(running, "keep_source", lambda *_: sys.exit("killed"))
        with pytest.raises(SystemExit, match="killed"):
            keep_method(figures, "ditto", [0.75, 0.125])
    # rows without a line in the .json file are no figures yet
    assert "ditto" in (figures / "small.csv").read_text()
    assert set(tables.read_kept(figures, "small")["method"]) == {"fedavg"}
    keep_method(figures, "ditto", [0.75, 0.125])
    assert tables.read_kept(figures, "small")["method"].tolist() == ["fedavg", "fedavg", "ditto", "ditto"]


@pytest.mark.parametrize("name", ["small.csv", "small-clients.csv.gz"])
def test_a_file_of_figures_is_written_whole_or_not_at_all(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, rows = tmp_path / name, pd.DataFrame({"method": ["fedavg"], "seed": [0]})
    running.keep_rows(file, "fedavg", rows, ["fedavg", "ditto"])
    before = file.read_bytes()
    assert (gzip.decompress(before) if file.suffix == ".gz" else before) == b"method,seed\nfedavg,0\n"

    def fail(*_: object) -> None:
        raise OSError("the disk was taken away")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(CheckpointError, match="the disk was taken away"):
        running.keep_rows(file, "ditto", rows.assign(method="ditto"), ["fedavg", "ditto"])
    assert file.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_two_processes_keep_methods_of_one_task(figures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have read the file when the first one writes it, but for the lock."""
    write = running.write_atomically

    def write_slowly(path: Path, data: bytes) -> None:
        time.sleep(0.2)
        write(path, data)

    monkeypatch.setattr(running, "write_atomically", write_slowly)
    threads = [
        threading.Thread(target=keep_method, args=(figures, m, [0.5, 0.25])) for m in ("fedavg", "ditto")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    kept = tables.read_kept(figures, "small")
    assert kept["method"].tolist() == ["fedavg", "fedavg", "ditto", "ditto"]
    assert list(json.loads((figures / "small.json").read_text())) == ["fedavg", "ditto"]


def keep_source(folder: Path, out: Path) -> dict[str, Any]:
    """The line that is kept of a method's runs."""
    (folder / "small.toml").write_text(TASK)
    running.keep_source(folder / "kept.json", folder / "small.toml", "fedavg", out)
    kept: dict[str, Any] = json.loads((folder / "kept.json").read_text())["fedavg"]
    return kept


def test_versions_are_those_of_the_runs_that_were_not_moved_aside(tmp_path: Path) -> None:
    # below a folder whose own name ends like that of runs moved aside
    out = tmp_path / "tuned.old-1" / "fedavg"
    write_ended_runs(out, {"fedavg-s0.old-1": "finished", "fedavg-s1.old-2": "running"}, torch="1")
    write_ended_runs(out, {"fedavg-s0": "finished", "fedavg-s1": "diverged"})
    kept = keep_source(tmp_path, out)
    assert (kept["versions"], kept["diverged"]) == ({"torch": "2"}, 1)


@pytest.mark.parametrize("state", ["finished", "diverged"])
def test_runs_of_two_versions_are_refused(state: str, tmp_path: Path) -> None:
    write_ended_runs(tmp_path / "runs", {"fedavg-s0": "finished"}, torch="1")
    write_ended_runs(tmp_path / "runs", {"fedavg-s1": state})
    with pytest.raises(SystemExit, match=r"fedavg-s0 ran with \{'torch': '1'\}, but .*fedavg-s1 with"):
        keep_source(tmp_path, tmp_path / "runs")
    assert not (tmp_path / "kept.json").exists()


def test_versions_of_runs_that_all_diverged_are_kept(tmp_path: Path) -> None:
    write_ended_runs(tmp_path / "runs", {"fedavg-s0": "diverged", "fedavg-s1": "diverged"})
    kept = keep_source(tmp_path, tmp_path / "runs")
    assert (kept["versions"], kept["diverged"]) == ({"torch": "2"}, 2)


def test_a_method_twice_for_one_seed_is_refused(figures: Path) -> None:
    keep_method(figures, "fedavg", [0.5, 0.25])
    file = figures / "small.csv"
    file.write_text(file.read_text() + "fedavg,1,0.25\n")
    with pytest.raises(
        SystemExit, match=r"small\.csv has more than one row of method fedavg, seed 1\. Remove"
    ):
        tables.read_kept(figures, "small")


def test_two_chosen_settings_of_a_method_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "small-tuning.csv"
    file.write_text("method,chosen,messages,lr\nfedavg,True,,0.1\nfedavg,False,,0.3\nditto,True,,0.3\n")
    assert [row[:2] for row in tables.read_tried(file)] == [
        ("fedavg", True),
        ("fedavg", False),
        ("ditto", True),
    ]
    file.write_text(file.read_text() + "fedavg,True,,1.0\n")
    with pytest.raises(SystemExit, match=r"small-tuning\.csv has more than one row of method fedavg, chosen"):
        tables.read_tried(file)


def test_a_line_removed_with_its_comma_left_is_explained(tmp_path: Path) -> None:
    (tmp_path / "small.json").write_text('{\n"fedavg": {},\n}\n')
    with pytest.raises(SystemExit, match=r"small\.json is no JSON: .*and the comma before it left\?"):
        tables.read_sources(tmp_path / "small.json")


def test_a_method_with_figures_is_skipped_and_named(
    figures: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for method in ("fedavg", "ditto"):
        keep_method(figures, method, [0.5])
    arguments = figures.parent / "small.toml", figures / "small.json", figures.parent / "runs"
    running.run_missing(*arguments, ["ditto"], 1, lambda *_: pytest.fail("nothing is to be kept"))
    assert capsys.readouterr().out == "ditto of small has figures and is not run again\n"


def test_a_command_that_fails_ends_with_its_status(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(words: list[str], check: bool = False, **_: object) -> subprocess.CompletedProcess[str]:
        ended: subprocess.CompletedProcess[str] = subprocess.CompletedProcess(words, 3)
        if check:
            ended.check_returncode()
        return ended

    monkeypatch.setattr(running.subprocess, "run", end)
    with pytest.raises(SystemExit) as error:
        running.run_command("tune", TASK)
    assert error.value.code == 3


def test_repeated_runs_and_their_report_stay(figures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_method(figures, "fedavg", [0.5, 0.25])
    (figures / "small-tuning.csv").write_text("method,chosen,messages,optimizer.lr\nfedavg,True,,0.1\n")
    (figures.parent / "small.toml").write_text(
        f'{TASK}[tune]\nseeds = [100]\n[tune.grid]\n"optimizer.lr" = [0.1]\n'
    )

    def compare(command: str, text: str, option: str, out: str, *_: str) -> None:
        assert (command, option) == ("compare", "-o")
        assert "lr = 0.1" in text
        (Path(out) / "report.html").write_text("report")

    monkeypatch.setattr(running, "run_command", compare)
    arguments = figures.parent / "small.toml", figures, "fedavg", [1], figures.parent / "repeated"
    folders = [running.run_chosen(*arguments) for _ in range(2)]
    # a folder for each, for runs that are there would not be run again
    assert len(set(folders)) == 2
    for folder in folders:
        assert folder.parent == figures.parent / "repeated"
        assert (folder / "report.html").read_text() == "report"
