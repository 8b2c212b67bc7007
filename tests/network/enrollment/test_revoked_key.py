"""A key that is revoked while the server runs: its client is refused at once, and no round waits for it."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")
pytest.importorskip("cryptography")
from fedlowrank.cli.deployment.network_commands import _unregister_revoked
from fedlowrank.network.deploy.flower_app import write_app
from fedlowrank.network.deploy.keys import ClientKeys, ServerKeys, make_keys, revoke_client
from fedlowrank.network.deploy.server_processes import SuperLink, SuperNode
from tests.support.local_network import until

pytestmark = pytest.mark.usefixtures("no_process_left")


def test_a_revoked_client_is_unregistered_once_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make_keys(tmp_path / "keys", 3, [])
    keys, called = ServerKeys.read(tmp_path / "keys" / "server"), []
    link = SuperLink(tmp_path / "link", keys)
    link.process_folder.mkdir()

    def answer(self: SuperLink, *arguments: str) -> dict[str, Any]:
        called.append(arguments[:2] if arguments[1] == "register" else arguments)
        return {"node-id": str(70 + len(called))}

    monkeypatch.setattr(SuperLink, "_flwr", answer)
    for key in keys.clients.values():
        link.register(key)
    del called[:]
    _unregister_revoked(link)
    assert not called
    revoke_client(tmp_path / "keys", 1)
    _unregister_revoked(link)
    _unregister_revoked(link)
    assert called == [("supernode", "unregister", "72")]
    assert [r.getMessage() for r in caplog.records] == ["the key of client 1 was revoked; it is refused"]
    (tmp_path / "keys" / "server" / "clients" / "2.pub").unlink()
    _unregister_revoked(link)
    assert called[1:] == [("supernode", "unregister", "73")]
    assert "a client whose public key was removed" in caplog.text


SERVER_APP = """
import time
from pathlib import Path
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from fedlowrank.network.flower import GridTransport
from fedlowrank.network.transport import Exchange, NodeMessage

server = ServerApp()


@server.main()
def main(grid: Grid, context: Context):
    transport = GridTransport(grid)
    while not (nodes := transport.nodes()):
        time.sleep(0.1)
    found = Exchange(transport, 600.0).run_round_trip([NodeMessage(n, "order", "{}") for n in nodes], "round", 500.0)
    Path(context.run_config["out"]).write_text("\\n".join(r.problem for r in found))
"""

CLIENT = """
import sys, time
from pathlib import Path
from fedlowrank.network.enrollment.key_request import load_key_pair
from flwr.supernode.fleet_http_connection import http_request_response

address, authority, key = sys.argv[1:]
with http_request_response(address, False, Path(authority).read_bytes(), load_key_pair(Path(key))) as calls:
    while calls[1]() is None:
        time.sleep(0.1)
    print("training", flush=True)
    time.sleep(600)
"""


@pytest.mark.full
def test_no_round_waits_for_a_revoked_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "revoking_app.py").write_text(SERVER_APP)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'modules'}:{Path(__file__).parents[3] / 'src'}")
    out = tmp_path / "found.txt"
    write_app(tmp_path / "app", "revoking", "revoking_app:server", "revoking_app:server", {"out": str(out)})
    make_keys(tmp_path / "keys", 1, [])
    own = ClientKeys.read(tmp_path / "keys" / "client-0")
    with SuperLink(tmp_path / "link", keys := ServerKeys.read(tmp_path / "keys" / "server")) as link:
        link.register(keys.clients[0])
        link.unregister_revoked()
        link.submit(tmp_path / "app")
        arguments = [link.address, str(own.authority), str(own.key)]
        with subprocess.Popen([sys.executable, "-c", CLIENT, *arguments], stdout=subprocess.PIPE) as client:
            assert client.stdout is not None
            assert client.stdout.readline() == b"training\n"
            revoke_client(tmp_path / "keys", 0)
            began = time.monotonic()
            _unregister_revoked(link)
            text = until(lambda: out.exists() and out.read_text(), 60)
            assert time.monotonic() - began < 30
            assert "its node is not connected any more" in text
            client.kill()
        # one that starts again is told why
        node = SuperNode(tmp_path / "node", link.address, tmp_path, own)
        try:
            node.start()
            until(lambda: not node.alive(), 60)
            assert "this server has no such key. It was revoked" in node.log.read_text()
        finally:
            node.close()
        assert json.loads((link.process_folder / "registered.json").read_text()) == {}
