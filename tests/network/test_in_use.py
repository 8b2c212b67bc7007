"""A second server on a folder or a port is refused at once, and told which process has it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedlowrank.network.deploy import in_use
from fedlowrank.network.deploy.flower_process import ProcessError, free_port, listen
from fedlowrank.storage.lock import FolderInUseError, exclusive, identify_process

LISTEN = (
    "import socket, time; s = socket.create_server(('127.0.0.1', {port})); print(flush=True); time.sleep(60)"
)


def test_who_listens_is_named(tmp_path: Path) -> None:
    port = free_port()
    in_use.refuse_second(None, "127.0.0.1", port)
    with listen("127.0.0.1", port), pytest.raises(ProcessError, match=f"in use by process {os.getpid()} "):
        in_use.refuse_second(tmp_path / "served", "127.0.0.1", port)
    with pytest.raises(ProcessError, match="Cannot assign requested address"):
        in_use.refuse_second(None, "192.0.2.1", port)
    home = tmp_path / "served.flower"
    home.mkdir()
    command = [sys.executable, "-c", LISTEN.format(port=port), "--database", str(home / "superlink.db")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as link:
        assert link.stdout is not None
        link.stdout.readline()
        # of a server that was killed: the start ends it
        in_use.refuse_second(tmp_path / "served", "127.0.0.1", port)
        with exclusive(home):
            with pytest.raises(FolderInUseError, match=f"served is served by process {os.getpid()}"):
                in_use.refuse_second(tmp_path / "served", "127.0.0.1", free_port())
            with pytest.raises(
                ProcessError, match=f"process {os.getpid()}, which serves {tmp_path / 'served'}"
            ):
                in_use.refuse_second(tmp_path / "another", "127.0.0.1", port)
        link.kill()
    (home / "lock").write_text(json.dumps({**identify_process(os.getpid()), "started": 1.0}))
    in_use.refuse_second(tmp_path / "served", "127.0.0.1", port)


@pytest.mark.full
def test_the_second_server_is_refused_before_the_slow_imports(tmp_path: Path) -> None:
    """On an idle machine it takes a third of a second; the modules that take seconds must not be there."""
    port = free_port()
    code = (
        "import sys; from fedlowrank.cli.main import main;"
        f"print(main(['serve', 'no-such-file.toml', '--insecure', '--port', '{port}']),"
        "[m for m in ('torch', 'flwr', 'numpy', 'pydantic') if m in sys.modules])"
    )
    with listen("127.0.0.1", port):
        began = os.times().children_user
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "1 []\n"
    assert f"in use by process {os.getpid()}" in done.stderr
    assert os.times().children_user - began < 1
