"""Processes found, guarded, ended for certain; with stand-ins for Flower's programs, and at the end with these."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fedlowrank.storage.lock import FolderInUseError, identify_process

pytest.importorskip("flwr")
pytest.importorskip("cryptography")
from fedlowrank.network.access.gate import Gate
from fedlowrank.network.deploy import guard, process_tree
from fedlowrank.network.deploy.flower_app import as_toml, write_app
from fedlowrank.network.deploy.flower_process import (
    ProcessError,
    find_free_port,
    listen,
    make_environment,
)
from fedlowrank.network.deploy.server_processes import SuperLink, SuperNode
from fedlowrank.network.deploy.supervise import supervise
from tests.network.deploy.shell_process import ShellProcess
from tests.support.local_network import count_logged, fuzz, until

pytestmark = pytest.mark.usefixtures("no_process_left")


# settings and apps


@pytest.mark.full
@fuzz(200)
@given(
    st.dictionaries(
        st.from_regex(r"[A-Za-z0-9_-]+", fullmatch=True),
        st.text(st.characters(exclude_categories=["Cs"]))
        | st.integers(-(2**63), 2**63 - 1)
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.booleans(),
        max_size=4,
    )
)
@example({"a": "\x7f\x00\t\u2028\U0001f600'", "b": 1e22})
def test_settings_come_back_as_they_were(values: dict[str, str | int | float | bool]) -> None:
    actual = tomllib.loads(as_toml(values))
    assert actual == values
    assert {key: type(value) for key, value in actual.items()} == {
        key: type(value) for key, value in values.items()
    }


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")
def test_an_app_is_one_file_that_flower_accepts(tmp_path: Path) -> None:
    from flwr.cli.build import build_fab_from_disk
    from flwr.common.config import get_fused_config_from_fab
    from flwr.supercore.run import Run

    config: dict[str, str | int | float | bool]
    config = {"json": json.dumps({"a": 'say "no" \\ to\n\x7f', "b": ["ü", 1]}), "n": 3, "x": 0.1, "yes": True}
    write_app(tmp_path / "app", "trial-1", "a.b_c:server", "a.b_c:client", config)
    assert [path.name for path in (tmp_path / "app").iterdir()] == ["pyproject.toml"]
    fab = build_fab_from_disk(tmp_path / "app")
    run = Run.create_empty(1)
    assert get_fused_config_from_fab(fab, run) == config


def test_the_environment_is_private_and_keeps_what_was_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("OMP_NUM_THREADS", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FLWR_HOME", "/elsewhere")
    monkeypatch.chdir(tmp_path)
    actual = make_environment(Path("home"))
    assert actual["FLWR_HOME"] == str(tmp_path / "home")
    assert [actual[f"FLWR_{name}"] for name in ("TELEMETRY_ENABLED", "DISABLE_UPDATE_CHECK")] == ["0", "1"]
    assert actual["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] == "1"
    assert actual["RAY_USAGE_STATS_ENABLED"] == "0"
    assert actual["OMP_NUM_THREADS"] == "1"
    assert actual["no_proxy"] == actual["NO_PROXY"] == "localhost,127.0.0.1,::1"
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("NO_PROXY", "fl.example.org")
    actual = make_environment(Path("home"))
    assert actual["OMP_NUM_THREADS"] == "7"
    # the small spelling hides the great one from those who read both
    assert actual["no_proxy"] == "fl.example.org,localhost,127.0.0.1,::1"


# processes


@pytest.mark.full
def test_a_program_that_ends_too_soon_is_quoted_and_one_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    script = ShellProcess(tmp_path / "a", "printf '\\033[91mbroken\\033[0m: no ink\\n'; exit 3")
    script.start()
    with pytest.raises(
        ProcessError, match=r"ended with code 3 before it had said yes(?s:.*)\nbroken: no ink$"
    ):
        script.wait_for("yes", 10)
    script = ShellProcess(tmp_path / "b", "echo starting; sleep 79")
    script.start()
    with pytest.raises(ProcessError, match=r"more than 1 s until it had said yes(?s:.*)starting"):
        script.wait_for("yes", 1)
    assert not script.alive()


@pytest.mark.full
def test_the_tail_is_of_the_last_start_and_no_longer_than_asked(tmp_path: Path) -> None:
    script = ShellProcess(tmp_path, "for i in 1 2 3; do echo old $i; done")
    script.start()
    until(lambda: not script.alive())
    assert script.tail() == "old 1\nold 2\nold 3"
    script.script = "for i in $(seq 2000); do echo new $i; done"
    script.start()
    until(lambda: not script.alive())
    assert script.tail(2) == "new 1999\nnew 2000"
    assert "old" not in script.tail(100000)
    assert "old 1" in script.log.read_text()


@pytest.mark.full
def test_what_does_not_end_when_asked_is_ended(tmp_path: Path) -> None:
    script = ShellProcess(
        tmp_path,
        "trap '' TERM; setsid sh -c \"trap '' TERM; echo ready; sleep 80; sleep 81\" & sleep 82; wait",
    )
    script.start()
    script.wait_for("ready", 10)
    pid = script.pid
    assert pid is not None
    # "ready" is said before the programs are started
    until(
        lambda: {p.command for p in process_tree.find_descendants(pid).values()} >= {"sleep 80", "sleep 82"},
        10,
    )
    actual = process_tree.find_descendants(pid)
    # the shell that asked for a session of its own leads a group of its own
    assert len({p.group for p in actual.values()} | {pid}) == 2
    began = time.monotonic()
    script.close(0.5)
    assert time.monotonic() - began < 8
    assert not (set(actual) | {pid}) & set(process_tree.list_living_processes())
    script.close()


@pytest.mark.full
def test_what_ends_when_asked_is_left_to(tmp_path: Path) -> None:
    script = ShellProcess(
        tmp_path, "trap 'sleep 0.3; echo adieu; exit 7' TERM; echo ready; while :; do sleep 0.05; done"
    )
    script.start()
    script.wait_for("ready", 10)
    with pytest.raises(ProcessError, match="runs already"):
        script.start()
    script.close()
    assert (script.code, script.tail().splitlines()[-1]) == (7, "adieu")


@pytest.mark.full
def test_a_child_in_another_session_is_ended_even_if_its_parent_died_before(tmp_path: Path) -> None:
    wait = "import sys, time; print('ready', flush=True); time.sleep(83)"
    child = f'{sys.executable} -c "{wait}" {tmp_path} --runtime-api-address 127.0.0.1:1 --parent-pid'
    script = ShellProcess(tmp_path, f"setsid {child} $$ & setsid {child} 1 & wait")
    script.start()
    until(lambda: script.tail().count("ready") == 2)
    assert script.pid is not None
    children = [
        n
        for n, p in process_tree.find_descendants(script.pid).items()
        if p.command.startswith(sys.executable)
    ]
    (own,) = (
        n for n in children if process_tree.list_living_processes()[n].command.endswith(str(script.pid))
    )
    os.kill(script.pid, signal.SIGKILL)
    until(lambda: not script.alive())
    script.kill()
    (other,) = set(children) & set(process_tree.list_living_processes())
    assert other != own
    # of whom it says that somebody else started it
    os.kill(other, signal.SIGKILL)
    until(lambda: other not in process_tree.list_living_processes())


@pytest.mark.full
def test_what_a_killed_parent_left_running_is_ended_by_the_next_start_and_by_no_other(tmp_path: Path) -> None:
    starter = (
        "import sys, time; from pathlib import Path; from tests.network.deploy.shell_process import ShellProcess;"
        f"s = ShellProcess(Path({str(tmp_path)!r}), 'setsid sleep 88 & echo ready; sleep 89'); s.start();"
        "s.wait_for('ready', 10); print(s.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", starter], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        orphan = int(parent.stdout.readline())
        script = ShellProcess(tmp_path, "echo second; sleep 90")
        with pytest.raises(FolderInUseError, match=f"process {parent.pid}"):
            script.start()
        left = {orphan, *process_tree.find_descendants(orphan)}
        parent.kill()
    assert left <= set(process_tree.list_living_processes())
    assert len(left) >= 3
    script.start()
    try:
        assert not left & set(process_tree.list_living_processes())
        script.wait_for("second", 10)
    finally:
        script.close(0.1)
    # a process that has the number by chance is let live
    with subprocess.Popen(["sleep", "91"]) as innocent:
        strange = {**identify_process(innocent.pid), "started": 1.0, "address": "127.0.0.1:1"}
        (tmp_path / "script.process.json").write_text(json.dumps(strange))
        script.script = "echo third"
        script.start()
        until(lambda: not script.alive(), 10)
        script.close()
        assert innocent.poll() is None
        innocent.kill()


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    port = find_free_port()
    with listen("127.0.0.1", port):
        link = SuperLink(tmp_path, None, port=port)
        with pytest.raises(ProcessError, match=f"port {port}"):
            link.start()
    assert not link.alive()
    with pytest.raises(ProcessError, match="does not run"):
        link.status(1)


# the guard


def ask(path: str, *tokens: bytes, client: tuple[str, int] | None = ("127.0.0.1", 5)) -> int:
    """The status with which the guard answers; 200 comes from the application behind it."""
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {}

    headers = [(b"host", b"127.0.0.1"), *((guard.TOKEN_HEADER.encode(), token) for token in tokens)]
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "client": client,
        "server": ("127.0.0.1", 8000),
        "headers": headers,
    }
    answer: Any = guard.guard_app(Gate(app, None), "secret")(scope, receive, send)
    asyncio.run(answer)
    return int(sent[0]["status"])


@pytest.mark.parametrize("client", [("127.0.0.1", 5), ("::1", 5), ("192.0.2.7", 5), None])
def test_only_who_has_the_token_is_heard_on_what_is_not_for_clients(client: tuple[str, int] | None) -> None:
    inner = [
        "/v1/control/register-node",
        "/v1/runtime/acquire-task",
        "/health",
        "/",
        "/v1/fleet",
        "/V1/fleet/",
    ]
    for path in inner:
        assert ask(path, client=client) == 403, "loopback alone is no proof"
        assert ask(path, b"secret", client=client) == 200
        assert ask(path, b"", client=client) == ask(path, b"Secret", b"secre", client=client) == 403
    # the token is no client's signature
    assert ask("/v1/fleet/pull-messages", client=client) == 401
    assert ask("/v1/fleet/pull-messages", b"secret", client=client) == 401
    assert (ask(guard.PROBE_PATH, client=client), ask(guard.PROBE_PATH, b"secret", client=client)) == (
        403,
        204,
    )
    assert ask(guard.REPLIES_PATH, client=client) == 403


def test_the_start_and_end_of_the_application_pass_the_guard() -> None:
    seen = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["type"])

    passed: Any = guard.guard_app(Gate(app, None), "")({"type": "lifespan"}, None, None)  # type: ignore[arg-type]
    asyncio.run(passed)
    assert seen == ["lifespan"]


# keeping a client running


class Pretended(SuperNode):
    """A SuperNode whose starts are lines of shell, the last one again and again."""

    def __init__(self, home: Path, *scripts: str) -> None:
        super().__init__(home, "127.0.0.1:1", home, None)
        self.scripts = scripts
        self.starts = 0

    def start(self) -> None:
        self._prepare()
        self._launch(
            ["sh", "-c", self.scripts[min(self.starts, len(self.scripts) - 1)], str(self.process_folder)]
        )
        self.starts += 1


CONNECTED = "echo 'INFO : SuperNode ID: 123'"
REFUSED = "echo 'ERROR : Exit Code: 305'; echo 'Failed to activate'; exit 1"


def run_supervised(
    node: SuperNode, **limits: Any
) -> tuple[threading.Thread, threading.Event, list[ProcessError]]:
    stop, errors = threading.Event(), []

    def run() -> None:
        try:
            supervise(node, stop, **limits)
        except ProcessError as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, stop, errors


@pytest.mark.full
def test_a_program_that_was_killed_and_then_refused_for_a_while_is_brought_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stay = f"{CONNECTED}; exec sleep 85"
    node = Pretended(tmp_path, f"{CONNECTED}; exit 9", REFUSED, REFUSED, REFUSED, REFUSED, stay)
    thread, stop, errors = run_supervised(node, pauses=[0.01, 0.05], patience=60)
    try:
        until(lambda: node.starts == 6 and caplog.messages[-1].startswith("connected"))
        assert node.alive()
        assert node.read_node_id() == 123
    finally:
        stop.set()
        thread.join(20)
    assert not thread.is_alive()
    assert not errors
    assert not node.alive()
    log = "\n".join(caplog.messages)
    assert log.count("started again in 0.01 s") == 1
    assert log.count("started again in 0.05 s") == 4
    assert "connected to 127.0.0.1:1" in log


@pytest.mark.full
def test_refused_too_long_or_broken_from_the_start_it_is_given_up_with_its_log(tmp_path: Path) -> None:
    began = time.monotonic()
    node = Pretended(tmp_path / "refused", REFUSED)
    thread, _, errors = run_supervised(node, pauses=[0.05], patience=1.0)
    thread.join(20)
    assert "Failed to activate" in str(errors[0])
    assert time.monotonic() - began > 1
    assert node.starts > 3
    node = Pretended(tmp_path / "broken", "echo no such key; exit 2")
    thread, _, errors = run_supervised(node, pauses=[0.05], patience=60)
    thread.join(20)
    assert "ended with code 2 3 times" in str(errors[0])
    assert "no such key" in str(errors[0])
    assert node.starts == 3


def say_refusal(reason: str) -> str:
    """What Flower's node writes when it is refused."""
    before, after = (
        "Failed to initialize the connection to the SuperLink.",
        "The SuperNode could not establish",
    )
    return f"printf 'Exit Code: 305\\n{before}\\n{reason}\\n{after} a connection\\n'"


@pytest.mark.parametrize(
    ("reason", "meaning"),
    [
        ("[code: 2004] Failed to activate SuperNode.", "Another process uses this key"),
        ("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed", "did not sign the certificate"),
        (
            "[code: 2004] Failed to activate SuperNode.\\nthis server has no such key.",
            "this server has no such key",
        ),
    ],
)
def test_why_a_server_refuses_is_printed_once_and_while_the_program_still_runs(
    reason: str, meaning: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    refusal = say_refusal(reason)
    node = Pretended(tmp_path, f"{refusal}; sleep 1; exit 1", f"{refusal}; exec sleep 88")
    thread, stop, errors = run_supervised(node, pauses=[0.01])
    try:
        until(lambda: any(meaning in line for line in caplog.messages))
        assert node.starts == 1
        assert node.alive()
        until(lambda: node.starts == 2 and node.read_refusal())
    finally:
        stop.set()
        thread.join(20)
    assert not errors
    assert count_logged(caplog, "no connection to 127.0.0.1:1: [") == 1


@pytest.mark.parametrize(
    ("problem", "meaning"),
    [
        ("HTTPStatusError('403 Forbidden')", "403 Forbidden"),
        ("ConnectError('CERTIFICATE_VERIFY_FAILED')", "ask the server's operator for the current ca.crt"),
    ],
)
def test_why_a_connected_node_gets_no_messages_is_printed_once(
    problem: str, meaning: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    line = f'echo "12:34:56 the server gives no messages: {problem}"'
    node = Pretended(
        tmp_path, f"{CONNECTED}; {line}; {line}; echo 12:34:57 another line; {line}; exec sleep 84"
    )
    thread, stop, errors = run_supervised(node, pauses=[0.01])
    try:
        until(lambda: "another line" in node.tail() and count_logged(caplog, meaning))
        time.sleep(0.3)
    finally:
        stop.set()
        thread.join(20)
    assert not errors
    assert count_logged(caplog, "the server gives no messages: ") == 1
    assert count_logged(caplog, meaning) == 1
    assert not count_logged(caplog, "another line")


def test_a_full_disk_of_the_site_is_printed_once_though_no_log_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    node = Pretended(tmp_path, f"{CONNECTED}; exec sleep 86")
    thread, stop, errors = run_supervised(node, pauses=[0.01])
    try:
        until(lambda: count_logged(caplog, "connected to"))
        time.sleep(0.3)
    finally:
        stop.set()
        thread.join(20)
    assert not errors
    assert count_logged(caplog, f"the disk of {tmp_path} is full") == 1
    assert count_logged(caplog, "keep `fedlowrank join` running") == 1


@pytest.mark.full
def test_a_connection_wipes_out_what_failed_before(tmp_path: Path) -> None:
    steady = f"{CONNECTED}; sleep 3; exit 9"
    scripts = ["exit 2", "exit 2", steady, "exit 2", REFUSED, REFUSED, REFUSED, f"{CONNECTED}; exec sleep 87"]
    node = Pretended(tmp_path, *scripts)
    thread, stop, errors = run_supervised(node, pauses=[0.01], patience=2.5)
    try:
        until(lambda: errors or node.starts == len(scripts), 30)
    finally:
        stop.set()
        thread.join(20)
    assert not errors


@pytest.mark.full
def test_told_to_stop_in_a_pause_it_starts_nothing_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    node = Pretended(tmp_path, "exit 1")
    thread, stop, errors = run_supervised(node, pauses=[30.0])
    until(lambda: any("again in 30 s" in line for line in caplog.messages), 20)
    stop.set()
    thread.join(5)
    assert not thread.is_alive()
    assert node.starts == 1
    assert not errors


def test_a_port_that_is_freed_a_moment_later_is_waited_for() -> None:
    held = listen("127.0.0.1", 0)
    port = held.getsockname()[1]
    with pytest.raises(OSError, match="in use"):
        listen("127.0.0.1", port)
    threading.Timer(0.5, held.close).start()
    listen("127.0.0.1", port, 20.0).close()
