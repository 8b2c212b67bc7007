"""A client's and a server's files on a machine with other users; and what a client can remove again."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr")
pytest.importorskip("cryptography")

from fedlowrank.cli.deployment import network_commands as commands
from fedlowrank.cli.main import main
from fedlowrank.core.errors import ConfigError
from fedlowrank.network.client import ClientRuntime
from fedlowrank.storage.lock import exclusive
from tests.network.deployments import write_tables
from tests.support.local_network import local, run_whole, small, tables


def seen_by_others(folder: Path) -> list[Path]:
    return [p for p in folder.rglob("*") if p.stat().st_mode & 0o077]


@pytest.fixture(autouse=True)
def _usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.fixture
def stubbed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower's processes are not started, and are over at once."""

    class Link(commands.SuperLink):
        def start(self, seconds: float = 60.0) -> None:
            self._prepare()

        def submit(self, app: Path) -> int:
            return 1

    monkeypatch.setattr(commands, "SuperLink", Link)
    monkeypatch.setattr(commands, "_see_through", lambda *_: None)
    monkeypatch.setattr(commands, "show_run", lambda folder: 0)
    monkeypatch.setattr(commands, "supervise", lambda node, stop: (node._prepare(), node._release()))


def test_clients_and_server_leave_nothing_that_others_can_read(
    stubbed: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = write_tables(tmp_path / "t.toml", tables("fedavg"))
    file.chmod(0o600)
    assert main(["serve", str(file), "--insecure", "-o", "runs/served"]) == 0
    assert main(["join", str(file), "--client", "0", "--insecure"]) == 0
    names = {p.name for p in tmp_path.rglob("*")}
    assert {"served.flower", "experiment.json", "clients", "data.tree", "client.json", "flower"} <= names
    assert seen_by_others(tmp_path) == []


def test_a_folder_of_before_is_refused_until_it_is_private(
    stubbed: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, folder = str(write_tables(tmp_path / "t.toml", tables("fedavg"))), tmp_path / "client"
    join = ["join", file, "--client", "0", "--insecure", "--folder", str(folder)]
    assert main(join) == 0
    folder.chmod(0o755)
    assert main(join) == 1
    with pytest.raises(ConfigError, match="can read or change"):
        ClientRuntime(folder)
    said = capsys.readouterr().err
    assert os.system(said.split("error: ")[1].split("`")[1]) == 0
    assert main(join) == 0
    served = tmp_path / "runs" / "served"
    (served / "checkpoint").mkdir(parents=True)
    (served / "checkpoint" / "000000.checkpoint").write_text("{}")
    serve = ["serve", file, "--insecure", "--resume", "-o", str(served)]
    assert main(serve) == 1
    assert f"chmod -R go-rwx {served}" in capsys.readouterr().err
    served.chmod(0o700)
    log = tmp_path / "runs" / "served.audit.jsonl"
    log.touch()
    assert main(serve) == 1
    assert f"chmod go-rwx {log}" in capsys.readouterr().err
    log.chmod(0o600)
    assert main(serve) == 0


def test_a_run_leaves_client_folders_that_only_their_owner_can_enter(tmp_path: Path) -> None:
    """Also where no command of this package started the process, as in a Flower app."""
    carrier, _ = run_whole(small("fedavg", rounds=1), tmp_path)
    for folder in carrier.folders.values():
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_client_forgets_its_data_states_and_models(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    carrier, _ = run_whole(small("fedavg", rounds=2), tmp_path)
    folder, file = carrier.folders[101], str(write_tables(tmp_path / "t.toml", tables("fedavg")))
    (folder / "privacy.jsonl").write_text("")
    (folder / "thesis.tex").write_text("years of work")
    before = set(folder.iterdir())
    assert main(["join", file, "--client", "0", "--folder", str(folder), "--forget"]) == 1
    assert "is the folder of client 1, not of client 0" in capsys.readouterr().err
    forget = ["join", file, "--client", "1", "--folder", str(folder), "--forget"]
    (folder / "flower").mkdir()
    with exclusive(folder / "flower"):
        assert main(forget) == 1
    assert "in use" in capsys.readouterr().err
    assert set(folder.iterdir()) >= before
    assert main(forget) == 0
    said = capsys.readouterr().out
    # what was asked of the site, and what left it, is known afterwards
    assert {p.name for p in folder.iterdir()} == {"privacy.jsonl", "thesis.tex", "audit.jsonl", "site.json"}
    for path in before - set(folder.iterdir()):
        assert f"removed: {path}" in said.replace("\n", "")
    assert f"still there: {folder / 'thesis.tex'}" in said.replace("\n", "")
    # it may take part again
    local(small("fedavg", rounds=2), tmp_path)
    assert (folder / "client.json").exists()
    assert main(["join", file, "--client", "1", "--folder", str(tmp_path), "--forget"]) == 1
    assert "is not a client's folder" in capsys.readouterr().err


def test_the_examples_of_services_are_private_and_keep_the_ledger_outside_of_runs() -> None:
    folder = Path(__file__).parents[3] / "examples" / "deploy"
    units = list(folder.glob("*.service"))
    assert len(units) == 2
    for unit in units:
        lines = unit.read_text().splitlines()
        assert "UMask=0077" in lines
        assert "Environment=FEDLOWRANK_STATE=/var/lib/fedlowrank/state" in lines
        assert "ReadWritePaths=/var/lib/fedlowrank" in lines
