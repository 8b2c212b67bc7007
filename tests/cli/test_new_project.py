"""A project that `fedlowrank new` makes runs at once, and its own tests pass."""

from __future__ import annotations

import errno
import importlib
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedlowrank.cli.new import choose_name
from fedlowrank.core.errors import ConfigError
from fedlowrank.results.records import RunRecord
from tests.cli.small_experiment import done, files, refused

Capsys = pytest.CaptureFixture[str]
NAME = "trial_project"


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Forget the project's modules after a test."""
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == NAME]:
        del sys.modules[name]


def test_a_project_runs_at_once(capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    out = done(capsys, "new", "trial-project")
    assert f"the folder is {NAME}" in out
    assert f"fedlowrank compare {NAME}/experiment.toml" in " ".join(out.split())
    assert len(Path(NAME, "README.md").read_text().splitlines()) <= 15
    made = {str(path): path.read_text() for path in Path(NAME).iterdir() if path.suffix != ".npz"}
    assert {path: text for path, text in made.items() if "NAME" in text} == {}
    settings = tomllib.loads(made[f"{NAME}/experiment.toml"])
    file = f"{NAME}/experiment.toml"
    done(capsys, "compare", file, "run.rounds=1", "--seeds", "0", "--methods", "fedavg")
    record = RunRecord.load(Path("runs", NAME, "fedavg-s0"))
    assert record.rounds[-1].measured.metrics == settings["run"]["metrics"]
    data = np.load(f"{NAME}/data.npz")
    assert sum(row["train"] + row["val"] + row["test"] for row in record.clients) == len(data["y"])
    monkeypatch.syspath_prepend(str(Path.cwd()))
    tests = vars(importlib.import_module(f"{NAME}.test_{NAME}"))
    own = [test for name, test in tests.items() if name.startswith("test_")]
    assert len(own) == 3
    for test in own:
        test()


@pytest.mark.parametrize("full_file", [f"test_{NAME}.py", "__init__.py", "data.npz"])
def test_a_project_on_a_full_disk_leaves_no_folder(
    full_file: str, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    write_text, savez = Path.write_text, np.savez

    def write(path: Path, *arguments: Any, **more: Any) -> int:
        if path.name == full_file:
            raise full
        return write_text(path, *arguments, **more)

    def save(path: Path, **arrays: Any) -> None:
        Path(path).touch()
        if full_file == "data.npz":
            raise full
        savez(path, **arrays)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", write)
        patch.setattr(np, "savez", save)
        assert f"cannot make {NAME}: No space left on device" in refused(capsys, "new", NAME)
    assert not Path(NAME).exists()
    done(capsys, "new", NAME)


def test_nothing_is_overwritten(capsys: Capsys) -> None:
    Path(NAME).mkdir()
    Path(NAME, "mine.txt").write_text("mine")
    assert f"{NAME} exists already" in refused(capsys, "new", NAME)
    assert files(Path()) == {f"{NAME}/mine.txt": b"mine"}


def test_a_project_in_another_folder(capsys: Capsys) -> None:
    out = " ".join(done(capsys, "new", "some where/trial_project").split())
    assert "next: cd 'some where' && fedlowrank compare trial_project/experiment.toml" in out
    assert Path("some where", NAME, "data.npz").exists()


@pytest.mark.parametrize(
    ("text", "name"),
    [("mine", "mine"), ("my-project", "my_project"), ("my project.v2", "my_project_v2"), ("3d", "project_3d"),
     ("été", "été"), ("--x--", "x")],
)  # fmt: skip
def test_names(text: str, name: str) -> None:
    assert choose_name(text) == name


@pytest.mark.parametrize("text", ["class", "torch", "json", "fedlowrank", "", "..", "-"])
def test_names_that_hide_something(text: str) -> None:
    with pytest.raises(ConfigError, match=r"take (another name, such as my_|letters)"):
        choose_name(text)
