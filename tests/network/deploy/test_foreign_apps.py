"""Flower's programs as real processes: apps of others, at the server and at a client, and who may call whom."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import ssl
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")
pytest.importorskip("cryptography")
from fedlowrank.network.deploy import guard, process_tree
from fedlowrank.network.deploy.flower_app import as_toml, write_app
from fedlowrank.network.deploy.flower_process import ProcessError
from fedlowrank.network.deploy.keys import ClientKeys, ServerKeys, make_keys
from fedlowrank.network.deploy.server_processes import SuperLink, SuperNode
from tests.support.local_network import until

pytestmark = pytest.mark.usefixtures("no_process_left")

SERVER_APP = """
import json, os, time
from pathlib import Path
from flwr.app import Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp

server = ServerApp()


@server.main()
def main(grid: Grid, context: Context):
    print("the server begins")
    if context.run_config["fail"]:
        raise ValueError("the server fails as it was asked to")
    while not (nodes := sorted(grid.get_node_ids())):
        time.sleep(0.1)
    waiting, replies = set(grid.push_messages([Message(RecordDict(), n, "query", ttl=120.0) for n in nodes])), []
    while waiting:
        time.sleep(0.1)
        for reply in grid.pull_messages(list(waiting)):
            waiting.discard(reply.metadata.reply_to_message_id)
            replies.append([reply.error.code, reply.error.reason] if reply.has_error() else "executed")
    found = {"home": os.environ["FLWR_HOME"], "mine": os.environ.get("FEDLOWRANK_TEST"), "replies": replies}
    Path(context.run_config["out"]).with_suffix(".part").write_text(json.dumps(found))
    Path(context.run_config["out"]).with_suffix(".part").rename(context.run_config["out"])
"""
CLIENT_APP = """
from pathlib import Path
from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp

Path(__file__).with_name("executed").touch()
client = ClientApp()


@client.query()
def answer(message, context):
    return Message(RecordDict(), reply_to=message)
"""


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Writes an app of somebody else, whose modules all programs of this test can import."""
    public = tmp_path / "modules"
    public.mkdir()
    (public / "foreign_server.py").write_text(SERVER_APP)
    (public / "foreign_client.py").write_text(CLIENT_APP)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(public), os.environ.get("PYTHONPATH", "")]))

    def write(name: str = "app", fail: bool = False) -> Path:
        settings: dict[str, Any] = {"out": str(public / f"{name}.json"), "fail": fail}
        write_app(public / name, "trial", "foreign_server:server", "foreign_client:client", settings)
        return public / name

    return write


class Keyless(SuperNode):
    """A client that believes the server and does not say who it is, which Flower by itself would let in."""

    def _launch(self, command: Sequence[str]) -> None:
        super()._launch(command[: command.index("--key")])


def connected(node: SuperNode) -> int | None:
    """The number of a client once it has connected."""
    node._wait_until(lambda: node.read_node_id() is not None, "it had connected", 60.0)
    return node.read_node_id()


def flwr_run(home: Path, app: Path, link: SuperLink, keys: ServerKeys, **variables: str) -> str:
    """What `flwr run` says to a process of this machine that the server did not start."""
    home.mkdir(exist_ok=True)
    connection = as_toml({"address": link.address, "root-certificates": str(keys.authority)})
    (home / "config.toml").write_text(f"[superlink.there]\n{connection}")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("FEDLOWRANK")}
    done = subprocess.run(
        [str(Path(sys.executable).with_name("flwr")), "run", str(app), "there", "--format", "json"],
        env={**clean, "FLWR_HOME": str(home), "FLWR_TELEMETRY_ENABLED": "0", **variables},
        capture_output=True,
        text=True,
    )
    return re.sub(r"\x1b\[[0-9;]*m", "", done.stdout + done.stderr)


@pytest.mark.full
def test_the_app_of_another_is_started_neither_at_the_server_nor_at_a_client(
    foreign: Callable[..., Path], tmp_path: Path
) -> None:
    make_keys(tmp_path / "keys", 2, [])
    make_keys(tmp_path / "unregistered", 1, [])
    keys = ServerKeys.read(tmp_path / "keys" / "server")
    own = ClientKeys.read(tmp_path / "keys" / "client-1")
    key = ClientKeys.read(tmp_path / "unregistered" / "client-0").key
    unregistered = ClientKeys(own.authority, key, own.orders)
    with contextlib.ExitStack() as stack:
        variables = {"FEDLOWRANK_TEST": "the server's"}
        link = stack.enter_context(SuperLink(tmp_path / "link", keys, host="0.0.0.0", variables=variables))
        node = SuperNode(tmp_path / "node", link.address, tmp_path, own)
        other = SuperNode(tmp_path / "other", link.address, tmp_path, unregistered)
        nobody = Keyless(tmp_path / "nobody", link.address, tmp_path, own)
        for program in (node, other, nobody):
            stack.callback(program.close)
        number = link.register(keys.clients[1])
        node.start()
        other.start()
        assert connected(node) == number
        with pytest.raises(ProcessError, match="Failed to activate"):
            connected(other)
        nobody.start()
        with pytest.raises(ProcessError):
            connected(nobody)
        assert [n["status"] for n in link._flwr("supernode", "list")["nodes"]] == ["online"]

        # another user of this machine calls from loopback, with Flower's own command
        said = flwr_run(tmp_path / "home", foreign(), link, keys)
        assert '"success": true' not in said
        assert "403" in said
        assert "refused without the server's token: '/v1/control/start-run'" in link.log.read_text()
        assert not (tmp_path / "modules" / "executed").exists()
        token = link.variables[guard.TOKEN_VARIABLE]
        for path, with_token in (
            ("control/list-nodes", 200),
            ("runtime/acquire-task", 200),
            ("fleet/pull-messages", 401),
        ):
            assert _status(link, keys, f"/v1/{path}") == (401 if path.startswith("fleet") else 403)
            assert _status(link, keys, f"/v1/{path}", token) == with_token
        # nobody reads the token off a command line, and no other user of the machine out of the environment
        assert not [p.command for p in process_tree.list_living_processes().values() if token in p.command]
        if os.geteuid() == 0 and Path("/proc/self/environ").exists():
            theirs = subprocess.run(
                ["cat", f"/proc/{link.pid}/environ"], user=65534, group=65534, capture_output=True
            )
            assert (theirs.returncode, theirs.stdout) == (1, b"")

        link.kill()
        link.start()
        # what it knew it knows, and asks nothing of the client, which has noticed nothing
        assert link.register(keys.clients[1]) == number
        # a server in the hands of another, who can submit what he likes
        link.submit(foreign())
        actual = json.loads(until(lambda: _text(tmp_path / "modules" / "app.json")))
        assert (actual["home"], actual["mine"]) == (str(tmp_path / "link"), "the server's")
        ((code, reason),) = actual["replies"]
        assert code == 7
        assert "fedlowrank/trial" in reason
        assert (
            "refused: this client answers messages of the app fedlowrank/fedlowrank" in node.log.read_text()
        )
        assert not (tmp_path / "modules" / "executed").exists()
        assert not list(tmp_path.glob("node/**/*.fab")) + list((tmp_path / "node").glob("apps"))
        assert node.tail(1000).count("SuperNode ID") == 1


@pytest.mark.full
def test_a_server_without_keys_tells_how_runs_stand_and_leaves_nothing(
    foreign: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # where nobody answers: what passes between programs of this machine must not go there
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with SuperLink(tmp_path / "link", None) as link:
        waiting = link.submit(foreign("waiting"))
        failing = link.submit(foreign("failing", fail=True))
        status = until(lambda: (s := link.status(failing)).is_finished and s)
        assert (status.status, status.is_completed) == ("finished:failed", False)
        assert "the server fails as it was asked to" in status.details
        with pytest.raises(ProcessError, match="already finished"):
            link.stop(failing)
        node = SuperNode(tmp_path / "a node", link.address, tmp_path, None)
        try:
            node.start()
            connected(node)
            status = until(lambda: (s := link.status(waiting)).is_finished and s)
            assert (status.status, status.details, status.is_completed) == ("finished:completed", "", True)
            assert not node.is_working()
        finally:
            before = {node.pid, *process_tree.find_descendants(node.pid or 0)}
            node.close()
            assert not before & set(process_tree.list_living_processes())
        link.submit(foreign("second"))
        before = {link.pid or 0}

        def runs() -> bool:
            before.update(process_tree.find_descendants(link.pid or 0))
            return any(
                "flwr-serverapp" in p.command
                for n, p in process_tree.list_living_processes().items()
                if n in before
            )

        until(runs)
        link.kill()
        assert not before & set(process_tree.list_living_processes())


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _status(link: SuperLink, keys: ServerKeys, path: str, token: str = "") -> int:
    trusted = ssl.create_default_context(cafile=keys.authority)
    connection = http.client.HTTPSConnection("127.0.0.1", link.port, context=trusted)
    headers = {"content-type": "application/protobuf", "accept": "application/protobuf"}
    try:
        connection.request(
            "POST", path, body=b"", headers=headers | ({guard.TOKEN_HEADER: token} if token else {})
        )
        return connection.getresponse().status
    finally:
        connection.close()
