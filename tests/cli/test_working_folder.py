"""Where the paths of an experiment begin, its name, and what a stored run finds from another folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fedlowrank.results.records import RunRecord
from tests.cli.small_experiment import SMALL, done, refused, write

Capsys = pytest.CaptureFixture[str]

TABLE = SMALL.replace('source = "iris"', 'source = "csv"\npath = "data/rows.csv"\nlabel = "ill"').replace(
    "rounds = 2\n", "rounds = 1\n"
)
RUN = Path("runs/small/fedavg-s0")
CODE = "def stop(record):\n    return False\n"


def write_rows(folder: Path, seed: int = 0, names: tuple[str, ...] = ("age", "dose")) -> Path:
    draw = np.random.default_rng(seed)
    frame = pd.DataFrame(draw.normal(size=(60, 2)), columns=list(names))
    frame["ill"] = np.where(frame.iloc[:, 0] > 0, "yes", "no")
    (folder / "data").mkdir(exist_ok=True, parents=True)
    frame.to_csv(folder / "data" / "rows.csv", index=False)
    return folder / "data" / "rows.csv"


@pytest.fixture(name="project")
def _project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder of a run, with data and code of its own."""
    project = tmp_path / "project"
    write_rows(project)
    (project / "own_stop_here.py").write_text(CODE)
    monkeypatch.chdir(project)
    return project


@pytest.mark.parametrize("is_there_too", [False, True])
def test_a_stored_run_finds_its_data_and_code_from_any_folder(
    is_there_too: bool, project: Path, tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    done(capsys, "run", write(Path(), TABLE), 'run.callbacks=["own_stop_here:stop"]')
    other = tmp_path / "elsewhere" / "deep"
    other.mkdir(parents=True)
    if is_there_too:
        # other data under the same name
        write_rows(other, seed=1)
    monkeypatch.chdir(other)
    run = Path("../../project") / RUN
    done(capsys, "predict", str(run), "--allow-code", "-o", "out.csv")
    assert Path("out.csv").exists()
    done(capsys, "resume", str(run), "--allow-code", "run.rounds=2")
    assert len(RunRecord.load(run).rounds) == 3
    assert Path.cwd() == other
    # a project is moved as a whole
    project.rename(tmp_path / "moved")
    done(capsys, "predict", str(Path("../../moved") / RUN), "--allow-code", "-o", "again.csv")


def test_a_run_that_was_copied_reads_what_lies_here(project: Path, tmp_path: Path, capsys: Capsys) -> None:
    done(capsys, "run", write(Path(), TABLE))
    copied = Path(shutil.copytree(RUN, tmp_path / "a" / "b" / "c" / "d"))
    done(capsys, "predict", str(copied), "-o", "out.csv")
    (project / "data" / "rows.csv").unlink()
    assert f"there is no file '{project / 'data' / 'rows.csv'}'" in refused(capsys, "predict", str(copied))


def test_no_folder_is_stored_where_nothing_depends_on_it(project: Path, capsys: Capsys) -> None:
    for text, expected in ((SMALL, None), (TABLE, "../../..")):
        done(capsys, "run", write(Path(), text), "run.rounds=1", "--force")
        assert json.loads((RUN / "run.json").read_text()).get("working_folder") == expected
    done(capsys, "run", write(Path(), TABLE), f"data.path={project}/data/rows.csv", "--force")
    assert "working_folder" not in json.loads((RUN / "run.json").read_text())


@pytest.mark.parametrize("source", ["csv", "arrays", "folder", "femnist", "shakespeare", "mnist", "cifar10"])
def test_a_path_that_is_not_there_is_named_in_full(source: str, capsys: Capsys) -> None:
    label = ["data.label=ill"] if source == "csv" else []
    name = "none/rows" + {"csv": ".csv", "arrays": ".npz"}.get(source, "")
    typed = [f"data.source={source}", f"data.path={name}", "data.normalize=none", *label]
    said = refused(capsys, "run", write(Path()), *typed)
    assert repr(str(Path.cwd() / name)) in said


def test_swapped_names_of_columns_are_other_data(project: Path, capsys: Capsys) -> None:
    done(capsys, "run", write(Path(), TABLE))
    write_rows(project, names=("dose", "age"))
    says = "data: column 1 of the inputs was 'age' and is 'dose'"
    assert says in refused(capsys, "resume", str(RUN), "run.rounds=2")
    assert says in refused(capsys, "predict", str(RUN))
    write_rows(project)
    done(capsys, "resume", str(RUN), "run.rounds=2")


NAMELESS = SMALL.replace('name = "small"\n', "")


def test_an_experiment_without_a_name_has_that_of_its_file(capsys: Capsys) -> None:
    for stem in ("one", "two.b"):
        done(capsys, "run", write(Path(), NAMELESS, f"{stem}.toml"), "run.rounds=1")
        assert RunRecord.load(Path("runs") / stem / "fedavg-s0").experiment == stem
    # of a file that extends another the lower name counts only where it is written
    done(capsys, "run", write(Path(), 'extends = "one.toml"\n', "three.toml"), "run.rounds=1")
    assert Path("runs/three/fedavg-s0/run.json").exists()
    write(Path(), SMALL)
    done(capsys, "run", write(Path(), 'extends = "small.toml"\n', "four.toml"), "run.rounds=1")
    assert Path("runs/small/fedavg-s0/run.json").exists()
    done(capsys, "run", "one.toml", "run.rounds=1", "name=five")
    assert Path("runs/five/fedavg-s0/run.json").exists()
    done(capsys, "resume", "runs/one/fedavg-s0", "run.rounds=2")
