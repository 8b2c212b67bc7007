"""Real processes: sites with keys of their own, one with a passphrase, and what they leave on their disks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr")
pytest.importorskip("cryptography")
pytest.importorskip("dp_accounting")

from fedlowrank.network.deploy.flower_process import find_free_port
from fedlowrank.results.records import RunRecord
from tests.network.deployments import (
    COMMAND,
    CommandProcess,
    make_deployment_tables,
    wait_while_running,
    write_tables,
)


@pytest.fixture(autouse=True)
def _usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.full
@pytest.mark.timeout(840)
@pytest.mark.usefixtures("no_process_left")
def test_sites_with_keys_of_their_own_run_and_leave_nothing_to_other_users(
    tmp_path: Path, processes: list[CommandProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = make_deployment_tables("fedavg")
    planned["run.privacy"] = {"kind": "local", "noise": 8.0, "epsilon": 100.0, "delta": 1e-3}
    planned["run.clipping"] = {"norm": 0.1}
    file, out, port = (
        write_tables(tmp_path / "t.toml", planned),
        tmp_path / "runs" / "served",
        find_free_port(),
    )
    file.chmod(0o600)

    def keys(*arguments: str) -> None:
        done = subprocess.run([*COMMAND, "keys", *arguments], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr

    keys(str(tmp_path / "keys"), "--clients", "0")
    for client in range(3):
        site = tmp_path / f"site-{client}"
        with monkeypatch.context() as patch:
            patch.setenv("FEDLOWRANK_PASSPHRASE", "correct horse")
            keys(str(site), "--request", str(client), *(["--passphrase"] if client == 1 else []))
        keys(str(tmp_path / "keys"), "--accept", str(site / "request.json"))
        for path in (tmp_path / "keys" / f"client-{client}").iterdir():
            shutil.copy(path, site)
    where = ("--keys", str(tmp_path / "keys" / "server"), "--port", str(port), "-o", str(out))
    server = CommandProcess(tmp_path / "serve.log", "serve", str(file), *where)
    processes.append(server)
    monkeypatch.setenv("FEDLOWRANK_PASSPHRASE", "correct horse")
    for client in range(3):
        options = ["--server", f"127.0.0.1:{port}", "--keys", str(tmp_path / f"site-{client}")]
        options += ["--client", str(client), "--folder", str(tmp_path / "clients" / str(client))]
        processes.append(CommandProcess(tmp_path / f"join{client}.log", "join", str(file), *options))
    wait_while_running(lambda: server.process.poll() is not None, 280)
    assert server.process.returncode == 0, server.log.read_text()[-3000:]
    for runtime in processes[1:]:
        runtime.process.wait(60)
        assert runtime.process.returncode == 0, runtime.log.read_text()[-3000:]
    assert [record.lost for record in RunRecord.load(out).rounds] == [{}, {}, {}]
    # what this test itself wrote is left out
    mine = {"t.toml", "serve.log", *(f"join{i}.log" for i in range(3))}
    seen = [p for p in tmp_path.rglob("*") if p.stat().st_mode & 0o077 and p.name not in mine]
    assert seen == []
    assert len(list(tmp_path.rglob("*"))) > 60
    # three clients of one machine, each with an account of its own data
    described = [json.loads(p.read_text()) for p in (tmp_path / "state" / "privacy").glob("*.json")]
    assert len({tuple(run["data"]) for run in described}) == 3
    shown = subprocess.run(
        [*COMMAND, "privacy"], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    assert shown.count("1 run") == 3
