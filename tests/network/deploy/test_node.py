"""A client's node: what it answers, what it refuses, and that it never asks for an app."""

from __future__ import annotations

import datetime
import itertools
import json
from pathlib import Path

import httpx
import pytest

pytest.importorskip("flwr")
from flwr.server.utils import validator
from flwr.supercore.inflatable.inflatable_utils import ObjectUnavailableError
from flwr.supercore.run import Run, RunNotRunningException

from fedlowrank.network import flower
from fedlowrank.network.client import ClientRuntime
from fedlowrank.network.deploy import node as deploy_node
from fedlowrank.network.deploy.node import Node, PinnedApp, choose_pause
from fedlowrank.network.flower import from_records, to_records
from tests.network.deploy.node_server import PINNED_APP, OneMessageServer, make_flower_run
from tests.support.local_network import Clock, local, small


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return local(small("fedavg"), tmp_path).folders[101]


def test_a_message_of_the_pinned_app_is_answered_by_the_installed_package(
    folder: Path, tmp_path: Path
) -> None:
    server = OneMessageServer(to_records("{}", b""), "query.registration", make_flower_run(*PINNED_APP))
    node = Node(server.connection(), flower.client, PINNED_APP, folder, tmp_path)
    assert node.step()
    header, payload = ClientRuntime(folder).make_registration()
    assert from_records(server.reply.content) == (header.to_json(), payload)
    assert json.loads(header.to_json())["client"] == 1
    assert server.calls.index("confirm") < server.calls.index("push")
    assert not node.step()
    assert not node.home.joinpath("working").exists()


@pytest.mark.parametrize("ahead", [-299.0, 0.0, 299.0])
def test_a_reply_is_taken_whatever_the_clock_of_the_client(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: float
) -> None:
    server = OneMessageServer(
        to_records("{}", b""), "query.registration", make_flower_run(*PINNED_APP), ahead
    )
    assert Node(server.connection(), flower.client, PINNED_APP, folder, tmp_path).step()
    # as Flower does by the server's clock; an order lives for 60 s here
    now = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=ahead)
    monkeypatch.setattr(validator, "now", lambda: now)
    assert validator.validate_message(server.reply, is_reply_message=True) == []


@pytest.mark.parametrize(
    "run",
    [
        make_flower_run("fedlowrank/fedlowrank", "cd" * 32),
        make_flower_run("other/app", PINNED_APP.digest),
        make_flower_run("other\napp\x1b[31m", ""),
    ],
)
def test_a_message_of_another_app_is_refused_before_anything_of_it_is_fetched(
    run: Run, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = OneMessageServer(to_records("{}", b""), "query.registration", run)
    Node(server.connection(), flower.client, PINNED_APP, folder, tmp_path).step()
    assert server.reply.error.code == 7
    assert PINNED_APP.digest in server.reply.error.reason
    assert "pull" not in server.calls
    assert "refused: " in caplog.text
    assert "\x1b" not in server.reply.error.reason


def test_a_message_that_makes_the_method_fail_is_answered_with_the_error(
    folder: Path, tmp_path: Path
) -> None:
    server = OneMessageServer(to_records("no order", b""), "train.order", make_flower_run(*PINNED_APP))
    assert Node(server.connection(), flower.client, PINNED_APP, folder, tmp_path).step()
    assert (server.reply.error.code, server.reply.error.reason[:12]) == (2, "MessageError")


def test_a_run_that_ended_while_its_message_was_fetched_is_given_up(folder: Path, tmp_path: Path) -> None:
    server = OneMessageServer(to_records("{}", b""), "query.registration", make_flower_run(*PINNED_APP))
    server.over = True
    assert not Node(server.connection(), flower.client, PINNED_APP, folder, tmp_path).step()
    assert server.reply is None


def test_a_message_whose_content_the_server_lost_is_given_up(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def lost(run: int, name: str) -> bytes:
        raise ObjectUnavailableError(name)

    monkeypatch.setattr(deploy_node, "PIECE_SECONDS", 0.0)
    server = OneMessageServer(to_records("{}", b""), "query.registration", make_flower_run(*PINNED_APP))
    # Flower waits for ever; the server asks again after its deadline, and only a node that gave up hears it
    connection = server.connection()._replace(pull=lost)
    assert not Node(connection, flower.client, PINNED_APP, folder, tmp_path).step()
    assert server.reply is None
    assert "a message was given up" in caplog.text


REQUEST = httpx.Request("POST", "https://server/v1/fleet/pull-messages")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (httpx.ConnectError("certificate verify failed: certificate has expired"), "certificate has expired"),
        (
            httpx.HTTPStatusError(
                "500", request=REQUEST, response=httpx.Response(500, text="database or\ndisk is full")
            ),
            "database or disk is full",
        ),
        (RunNotRunningException(), "HTTP 403"),
    ],
)
def test_a_node_that_gets_no_messages_pauses_and_says_why_once_a_minute(
    error: BaseException,
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    numbers = itertools.count()

    def receive() -> None:
        if isinstance(error, httpx.HTTPStatusError):
            # as the page of a proxy, which has the time of day
            response = httpx.Response(500, text=f"{error.response.text}, request {next(numbers)}")
            raise httpx.HTTPStatusError("500", request=REQUEST, response=response)
        raise error

    clock = Clock()
    monkeypatch.setattr(deploy_node, "time", clock)
    server = OneMessageServer(to_records("{}", b""), "query.registration", make_flower_run(*PINNED_APP))
    connection = server.connection()._replace(receive=receive)
    node = Node(connection, flower.client, PINNED_APP, tmp_path, tmp_path)
    # for 121 s, with the longest pause
    for _ in range(41):
        # the main loop sleeps only after a step without a message
        assert not node.step()
        clock.sleep(deploy_node.MAX_PAUSE_SECONDS)
    lines = [line for line in caplog.messages if line.startswith("the server gives no messages: ")]
    assert len(lines) == 3
    assert all(text in line for line in lines)


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")
def test_the_pinned_app_holds_no_module() -> None:
    import hashlib
    import io
    import zipfile

    from flwr.cli.build import build_fab_from_files

    from fedlowrank.network.deploy.flower_app import as_toml

    actual = PinnedApp.installed()
    assert actual.name == "fedlowrank/fedlowrank"
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
    assert hashlib.sha256(packed).hexdigest() == actual.digest
    with zipfile.ZipFile(io.BytesIO(packed)) as file:
        assert not [n for n in file.namelist() if n.endswith(".py")]


def test_a_client_that_waits_long_looks_less_often() -> None:
    assert [choose_pause(idle) for idle in (0.0, 5.0, 20.0, 60.0, 1e6)] == [0.5, 0.5, 1.0, 3.0, 3.0]
