"""A second server on a folder or a port is refused at once, and told which process has it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from fedlowrank.core.errors import ConfigError
from fedlowrank.network.deploy import address_checks
from fedlowrank.network.deploy.flower_process import ProcessError, find_free_port, listen
from fedlowrank.storage.lock import FolderInUseError, exclusive, identify_process

LISTEN = (
    "import socket, time; s = socket.create_server(('127.0.0.1', {port})); print(flush=True); time.sleep(60)"
)


def test_who_listens_is_named(tmp_path: Path) -> None:
    port = find_free_port()
    address_checks.refuse_second(None, "127.0.0.1", port)
    with listen("127.0.0.1", port), pytest.raises(ProcessError, match=f"in use by process {os.getpid()} "):
        address_checks.refuse_second(tmp_path / "served", "127.0.0.1", port)
    with pytest.raises(ProcessError, match="Cannot assign requested address"):
        address_checks.refuse_second(None, "192.0.2.1", port)
    home = tmp_path / "served.flower"
    home.mkdir()
    command = [sys.executable, "-c", LISTEN.format(port=port), "--database", str(home / "superlink.db")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as link:
        assert link.stdout is not None
        link.stdout.readline()
        # of a server that was killed: the start ends it
        address_checks.refuse_second(tmp_path / "served", "127.0.0.1", port)
        with exclusive(home):
            with pytest.raises(FolderInUseError, match=f"served is served by process {os.getpid()}"):
                address_checks.refuse_second(tmp_path / "served", "127.0.0.1", find_free_port())
            with pytest.raises(
                ProcessError, match=f"process {os.getpid()}, which serves {tmp_path / 'served'}"
            ):
                address_checks.refuse_second(tmp_path / "another", "127.0.0.1", port)
        link.kill()
    (home / "lock").write_text(json.dumps({**identify_process(os.getpid()), "started": 1.0}))
    address_checks.refuse_second(tmp_path / "served", "127.0.0.1", port)


@pytest.mark.full
def test_the_second_server_is_refused_before_the_slow_imports(tmp_path: Path) -> None:
    """On an idle machine it takes a third of a second; the modules that take seconds must not be there."""
    port = find_free_port()
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


@pytest.mark.parametrize("port", [-1, 0, 65536, 99999])
def test_a_port_that_cannot_be_is_an_error_for_a_person(port: int) -> None:
    with pytest.raises(ProcessError, match=f"--port {port}: ports go from 1 to 65535"):
        address_checks.refuse_second(None, "127.0.0.1", port)


def test_a_name_that_is_not_known_is_told_in_words() -> None:
    error = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    said = str(address_checks.make_listen_error("999.1.1.1", 8000, error))
    assert said.startswith("cannot listen on 999.1.1.1, port 8000: Name or service not known. Give another")
    # the error that Python really raises is none of name resolution
    with pytest.raises(
        ProcessError, match=r"port 8000: [\w ]*(known|resolution)[\w ]*\. Give another"
    ) as raised:
        address_checks.refuse_second(None, "no-such-host.invalid", 8000)
    assert "Unknown error" not in str(raised.value)
    with pytest.raises(ProcessError, match="--host is empty"):
        address_checks.refuse_second(None, "", 8000)


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "[::1]:8123x", "::1:8000", "https://a.org:1", "a.org:", "a.org:0", "a:65536", ":1", "a b:1"]
)  # fmt: skip
def test_an_address_that_cannot_be_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=r"is no address\. Write HOST:PORT"):
        address_checks.check_address(address)


@pytest.mark.parametrize(
    "address", ["127.0.0.1:1", "[::1]:8000", "[fe80::1%eth0]:8000", "fl.example.org:65535"]
)
def test_an_address_that_can_be_is_taken(address: str) -> None:
    address_checks.check_address(address)
