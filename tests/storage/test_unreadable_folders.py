"""A run folder that may not be read is named, alone and among others."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fedlowrank.core.errors import CheckpointError
from fedlowrank.storage.run_files import read_config, run_folders
from fedlowrank.storage.run_folder import RunFolder
from tests.cli.small_experiment import refused


@pytest.fixture(name="locked")
def _locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """One of two run folders, which may not be entered."""
    for name in ("open", "locked"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "run.json").write_text("{}")
    locked = tmp_path / "runs" / "locked"
    locked.chmod(0)
    if os.geteuid() == 0:
        # nothing is denied to root
        def denied(function: Callable[..., Any], is_denied: Callable[[Path], bool]) -> Callable[..., Any]:
            def checked(path: Any = ".", **options: Any) -> Any:
                if isinstance(path, str | Path) and is_denied(Path(path)):
                    raise PermissionError(13, "Permission denied", str(path))
                return function(path, **options)

            return checked

        for name in ("listdir", "scandir"):
            monkeypatch.setattr(
                os, name, denied(getattr(os, name), lambda path: locked in (path, *path.parents))
            )
        monkeypatch.setattr(os, "stat", denied(os.stat, lambda path: locked in path.parents))
    yield locked
    monkeypatch.undo()
    locked.chmod(0o700)


def test_a_folder_that_may_not_be_read_is_named(locked: Path) -> None:
    says = f"cannot read {locked}.*Permission denied"
    with pytest.raises(CheckpointError, match=says):
        run_folders([locked])
    # nothing shows that it is no run
    assert run_folders([locked.parent]) == [locked, locked.with_name("open")]
    with pytest.raises(CheckpointError, match=says):
        read_config(locked)
    with pytest.raises(CheckpointError, match=says):
        RunFolder.has_begun(locked)
    with pytest.raises(CheckpointError, match=says):
        RunFolder(locked / "inner", {}, []).create(force=False)
    with pytest.raises(CheckpointError, match=says):
        RunFolder(locked, {}, []).lock()


@pytest.mark.parametrize("command", ["report", "status"])
def test_a_command_names_it(command: str, locked: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in (locked, locked.parent):
        assert f"cannot read {locked}: Permission denied" in refused(capsys, command, str(folder))


def test_folders_that_are_not_there_or_hold_no_run_are_kept(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    given = [tmp_path / "missing", tmp_path / "empty", tmp_path / "file"]
    assert run_folders(given) == given
