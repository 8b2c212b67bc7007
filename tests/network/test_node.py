"""A client's node: what it answers, what it refuses, and that it never asks for an app."""

from __future__ import annotations

import datetime
import json
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")
from flwr.app import Message, RecordDict
from flwr.app.metadata import Metadata
from flwr.server.utils import validator
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.inflatable.inflatable_utils import ObjectUnavailableError
from flwr.supercore.run import Run, RunNotRunningException

from fedlowrank.network import flower
from fedlowrank.network.client import ClientRuntime
from fedlowrank.network.deploy import node as deploy_node
from fedlowrank.network.deploy.node import Connection, Node, PinnedApp, pause_after
from fedlowrank.network.flower import from_records, to_records

from .local import local, small

PINNED = PinnedApp("fedlowrank/fedlowrank", "ab" * 32)


class Server:
    """A server that sends one message and keeps what comes back."""

    def __init__(self, records: RecordDict, kind: str, run: Run, ahead: float = 0.0) -> None:
        metadata = Metadata(5, "", 1, 7, "", "round-1", time.time() + ahead, 60.0, kind)
        self.message: Message | None = Message(metadata=metadata, content=records)
        self.message.metadata.__dict__["_message_id"] = self.message.object_id
        self.tree = get_object_tree(self.message)
        self.objects = {i: o.deflate() for i, o in get_all_nested_objects(self.message).items()}
        self.run = run
        self.calls: list[str] = []
        self.reply: Any = None
        self.over = False

    def receive(self) -> Any:
        found, self.message = self.message, None
        return None if found is None else (found, self.tree)

    def send(self, message: Message, tree: Any, seconds: float) -> tuple[set[str], str]:
        assert seconds >= 0
        self.reply = message
        return set(get_all_nested_objects(message)), "session"

    def app(self, digest: str, run: int) -> Any:
        raise AssertionError("a node never fetches an app")

    def pull(self, run: int, name: str) -> bytes:
        self.calls.append("pull")
        if self.over:
            raise RunNotRunningException
        return self.objects[name]

    def connection(self) -> Connection:
        push = lambda run, session, name, content: self.calls.append("push")  # noqa: E731
        confirm = lambda run, message: self.calls.append("confirm")  # noqa: E731
        return Connection(
            7, self.receive, self.send, lambda run: self.run, self.app, self.pull, push, confirm
        )


def run_of(app: str, digest: str) -> Run:
    made = Run.create_empty(5)
    made.fab_id, made.fab_hash = app, digest
    return made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return local(small("fedavg"), tmp_path).folders[101]


def test_a_message_of_the_pinned_app_is_answered_by_the_installed_package(
    folder: Path, tmp_path: Path
) -> None:
    server = Server(to_records("{}", b""), "query.registration", run_of(*PINNED))
    node = Node(server.connection(), flower.client, PINNED, folder, tmp_path)
    assert node.step()
    header, payload = ClientRuntime(folder).registration()
    assert from_records(server.reply.content) == (header.to_json(), payload)
    assert json.loads(header.to_json())["client"] == 1
    assert server.calls.index("confirm") < server.calls.index("push")
    assert not node.step()
    assert not node.home.joinpath("working").exists()


@pytest.mark.parametrize("ahead", [-299.0, 0.0, 299.0])
def test_a_reply_is_taken_whatever_the_clock_of_the_client(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: float
) -> None:
    server = Server(to_records("{}", b""), "query.registration", run_of(*PINNED), ahead)
    assert Node(server.connection(), flower.client, PINNED, folder, tmp_path).step()
    # as Flower does by the server's clock; an order lives for 60 s here
    now = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=ahead)
    monkeypatch.setattr(validator, "now", lambda: now)
    assert validator.validate_message(server.reply, is_reply_message=True) == []


@pytest.mark.parametrize(
    "run",
    [
        run_of("fedlowrank/fedlowrank", "cd" * 32),
        run_of("other/app", PINNED.digest),
        run_of("other\napp\x1b[31m", ""),
    ],
)
def test_a_message_of_another_app_is_refused_before_anything_of_it_is_fetched(
    run: Run, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(to_records("{}", b""), "query.registration", run)
    Node(server.connection(), flower.client, PINNED, folder, tmp_path).step()
    assert server.reply.error.code == 7
    assert PINNED.digest in server.reply.error.reason
    assert "pull" not in server.calls
    assert "refused: " in caplog.text
    assert "\x1b" not in server.reply.error.reason


def test_a_message_that_makes_the_method_fail_is_answered_with_the_error(
    folder: Path, tmp_path: Path
) -> None:
    server = Server(to_records("no order", b""), "train.order", run_of(*PINNED))
    assert Node(server.connection(), flower.client, PINNED, folder, tmp_path).step()
    assert (server.reply.error.code, server.reply.error.reason[:12]) == (2, "MessageError")


def test_a_run_that_ended_while_its_message_was_fetched_is_given_up(folder: Path, tmp_path: Path) -> None:
    server = Server(to_records("{}", b""), "query.registration", run_of(*PINNED))
    server.over = True
    assert Node(server.connection(), flower.client, PINNED, folder, tmp_path).step()
    assert server.reply is None


def test_a_message_whose_content_the_server_lost_is_given_up(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def lost(run: int, name: str) -> bytes:
        raise ObjectUnavailableError(name)

    monkeypatch.setattr(deploy_node, "PATIENCE", 0.0)
    server = Server(to_records("{}", b""), "query.registration", run_of(*PINNED))
    # Flower waits for ever; the server asks again after its deadline, and only a node that gave up hears it
    assert Node(server.connection()._replace(pull=lost), flower.client, PINNED, folder, tmp_path).step()
    assert server.reply is None
    assert "a message was given up" in caplog.text


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")
def test_the_pinned_app_holds_no_module() -> None:
    import hashlib
    import io
    import zipfile

    from flwr.cli.build import build_fab_from_files

    from fedlowrank.network.deploy.flower_app import as_toml

    found = PinnedApp.installed()
    assert found.name == "fedlowrank/fedlowrank"
    # written out by hand: whoever changes a byte of the app locks clients of other releases out, and should
    # know it
    components = {
        "serverapp": "fedlowrank.network.flower:server",
        "clientapp": "fedlowrank.network.flower:client",
    }
    text = (
        '[project]\nname = "fedlowrank"\nversion = "1.0.0"\ndescription = "fedlowrank"\nlicense = "Apache-2.0"\n\n'
        '[tool.flwr.app]\npublisher = "fedlowrank"\n\n[tool.flwr.app.components]\n'
        f"{as_toml(components)}\n[tool.flwr.app.config]\n"
    )
    packed, _ = build_fab_from_files({"pyproject.toml": text.encode()})
    assert hashlib.sha256(packed).hexdigest() == found.digest
    with zipfile.ZipFile(io.BytesIO(packed)) as file:
        assert not [n for n in file.namelist() if n.endswith(".py")]


def test_a_client_that_waits_long_looks_less_often() -> None:
    assert [pause_after(idle) for idle in (0.0, 5.0, 20.0, 60.0, 1e6)] == [0.5, 0.5, 1.0, 3.0, 3.0]
