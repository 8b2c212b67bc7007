"""What other users of the machine can read of what a command writes: the mode bits of every file."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedlowrank.core.errors import ConfigError
from fedlowrank.core.io.private_files import make_private_folder, private_umask, refuse_readable
from tests.cli.small_experiment import done, write


def seen_by_others(folder: Path) -> list[str]:
    """Files and folders that group or others have any right to."""
    return sorted(
        f"{p.relative_to(folder)} {stat.S_IMODE(p.stat().st_mode):03o}"
        for p in folder.rglob("*")
        if p.stat().st_mode & 0o077
    )


@pytest.fixture(autouse=True)
def _usual_umask() -> Iterator[None]:
    """The umask of most systems, by which a new file is 644."""
    before = os.umask(0o022)
    yield
    assert os.umask(before) == 0o022, "a command must leave the umask of its process as it was"


def test_nothing_that_a_command_writes_can_be_read_by_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], undrawn: None
) -> None:
    file = Path(write(tmp_path))
    file.chmod(0o600)
    for arguments in (
        ("run", "small.toml", "-o", "runs/one"),
        ("resume", "runs/one", "run.rounds=3"),
        ("compare", "small.toml", "-o", "runs/all"),
        ("report", "runs/one", "-o", "page/report.html", "--csv", "page/values.csv"),
        ("predict", "runs/one", "--client", "0"),
        ("export", "runs/one"),
        ("run", "small.toml", "-o", "runs/forced"),
        ("run", "small.toml", "-o", "runs/forced", "--force"),
        ("new", "own"),
    ):
        done(capsys, *arguments)
        assert seen_by_others(tmp_path) == [], arguments
    assert len(list(tmp_path.rglob("*"))) > 30


@pytest.mark.full
def test_nothing_that_workers_write_can_be_read_by_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], undrawn: None
) -> None:
    Path(write(tmp_path)).chmod(0o600)
    done(capsys, "compare", "small.toml", "--jobs", "2", "-o", "runs/jobs")
    done(capsys, "run", "small.toml", "--engine", "processes", "-o", "runs/processes")
    assert seen_by_others(tmp_path) == []


def test_a_stricter_umask_stays(tmp_path: Path) -> None:
    before = os.umask(0o277)
    with private_umask():
        (tmp_path / "file").touch()
    os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o400


@pytest.mark.parametrize("mode", [0o750, 0o705, 0o701, 0o710, 0o720, 0o755])
def test_a_folder_that_others_may_enter_is_refused_with_what_to_type(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "a client"
    make_private_folder(folder)
    refuse_readable(folder, tmp_path / "missing")
    folder.chmod(mode)
    with pytest.raises(ConfigError, match=f"'{folder}'`") as caught:
        make_private_folder(folder)
    assert os.system(str(caught.value).split("`")[1]) == 0
    refuse_readable(folder)


def test_a_key_is_refused_by_its_own_mode(tmp_path: Path) -> None:
    key = tmp_path / "client.key"
    key.write_text("secret")
    with pytest.raises(ConfigError, match=f"chmod go-rwx {key}`"):
        refuse_readable(key)
    key.chmod(0o400)
    refuse_readable(key)
