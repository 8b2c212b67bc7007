"""Starting, resuming and looking at served runs, without Flower's programs."""

from __future__ import annotations

import configparser
import gzip
import hashlib
import json
import re
import shlex
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr")
pytest.importorskip("cryptography")
from flwr.app import Error

from fedlowrank.cli.deployment import network_commands as commands
from fedlowrank.cli.main import main, parser
from fedlowrank.network.flower import GridTransport
from fedlowrank.network.transport import NodeMessage, Response
from fedlowrank.results.records import RunRecord
from fedlowrank.storage.digest import write_sealed
from fedlowrank.storage.run_files import RECORDS_FILE
from fedlowrank.storage.run_folder import RunFolder
from tests.network.deployments import make_deployment_tables, write_tables
from tests.support.local_network import (
    LocalTransport,
    fault_in_round,
    intact,
    local,
    replace_fields,
    serve_run,
    small,
)


class ReachedError(Exception):
    """The server's programs would be started now."""


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    class Stub(commands.SuperLink):
        def start(self, seconds: float = 60.0) -> None:
            raise ReachedError

    monkeypatch.setattr(commands, "SuperLink", Stub)
    file = write_tables(tmp_path / "t.toml", make_deployment_tables("fedavg"))

    def call(*options: str) -> int:
        return main(["serve", str(file), "--insecure", "-o", str(tmp_path / "run"), *options])

    return call


def test_a_failed_start_and_resume_do_not_advise_each_other(
    serve: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    with pytest.raises(ReachedError):
        serve()
    assert serve("--resume") == 1
    assert "start it without --resume" in capsys.readouterr().err
    # what a server leaves that was killed at different moments of its start
    files: list[str] = []
    for name in ("clients.json", RECORDS_FILE, "status.json", "run.json", "network.json"):
        files.append(name)
        out.mkdir()
        for one in files:
            (out / one).write_text("{}")
        for options in ((), ("--resume",)):
            with pytest.raises(ReachedError):
                serve(*options)
        assert "starts again" in capsys.readouterr().err
        shutil.rmtree(out)
    out.mkdir(mode=0o700)
    (out / "checkpoint").mkdir()
    (out / "checkpoint" / "000000.checkpoint").write_text("{}")
    assert serve() == 1
    assert "--resume" in capsys.readouterr().err
    with pytest.raises(ReachedError):
        serve("--resume")
    shutil.rmtree(out)
    out.mkdir()
    (out / "thesis.tex").write_text("years of work")
    for options in ((), ("--resume",)):
        assert serve(*options) == 1
        assert "choose another folder" in capsys.readouterr().err
    assert [p.name for p in out.iterdir()] == ["thesis.tex"]


JOIN = ["join", "--client", "0", "--server", "127.0.0.1:1"]


def test_join_prints_the_notes_on_the_data_of_its_site(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(commands, "supervise", lambda *_: None)
    data = {"source": "csv", "path": "nowhere.csv", "label": "ill", "missing": "drop", "normalize": "none"}
    tables = {**make_deployment_tables("fedavg"), "data": data, "split": {"kind": "local"}}
    file = write_tables(tmp_path / "t.toml", tables)
    rows = "".join(f"{i % 7},{'yes' if i % 2 else 'no'}\n" for i in range(20))
    (tmp_path / "own.csv").write_text(f"x,ill\n,yes\n{rows}")
    options = ["--data", str(tmp_path / "own.csv"), "--folder", str(tmp_path / "c"), "--insecure", "--stay"]
    assert main(["join", str(file), "--client", "1", *options]) == 0
    assert "client 1: 1 of 21 rows dropped, which have empty cells" in caplog.messages


class _CountedWaits(threading.Event):
    """An event that is not waited for; a hook runs at each wait."""

    def __init__(self, hook: Callable[[int], None]) -> None:
        super().__init__()
        self.hook, self.count = hook, 0

    def wait(self, timeout: float | None = None) -> bool:
        self.count += 1
        assert self.count < 50, "it never stops"
        self.hook(self.count)
        return self.is_set()


def test_join_ends_with_the_run_also_if_an_earlier_model_of_it_exists(tmp_path: Path) -> None:
    path = tmp_path / "abc" / "model" / "model.safetensors"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"the model of before a resume")
    models = commands._models(tmp_path)

    def write_again(count: int) -> None:
        if count == 7:
            path.write_bytes(b"the same model")

    stop = _CountedWaits(write_again)
    node = SimpleNamespace(is_working=lambda: False)
    refusals = commands._RefusedDownloads(tmp_path / "audit.jsonl")
    commands._until_done(tmp_path, models, node, stop, False, refusals)  # type: ignore[arg-type]
    assert stop.is_set()
    assert stop.count >= 7


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["serve"], "a server needs keys: make them by `fedlowrank keys"),
        (["serve", "--keys", "keys", "--insecure"], "--keys and --insecure exclude each other"),
        (JOIN, "pass --keys keys/client-0"),
        ([*JOIN, "--keys", "keys", "--insecure"], "--insecure, but not both"),
        (
            [*JOIN, "--keys", "keys/client-1"],
            "holds the keys of client 1. Pass --client 1, or --keys keys/client-0.",
        ),
    ],
)
def test_keys_are_given_or_expressly_done_without(
    options: list[str], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_tables(tmp_path / "t.toml", make_deployment_tables("fedavg"))
    assert main([options[0], str(file), *options[1:]]) == 1
    assert why in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--test", "no-such-file"], "--test no-such-file: test data of your own belong to training data"),
        (["--server", "127.0.0.1"], "--server '127.0.0.1' is no address. Write HOST:PORT"),
        (["network.clients=5", "4"], "own data have 3 clients, from 0 to 2. Pass --data"),
        (["network.clients=2"], "network.clients is 2, but the experiment's data have 3 clients"),
    ],
)
def test_what_join_cannot_do_is_an_error_before_anything_is_written(
    options: list[str], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, folder = write_tables(tmp_path / "t.toml", make_deployment_tables("fedavg")), tmp_path / "c"
    client = options.pop() if options[-1].isdigit() else "0"
    command = ["join", str(file), *options, "--client", client, "--insecure", "--folder", str(folder)]
    assert main(command) == 1
    assert why in " ".join(capsys.readouterr().err.split())
    assert not (folder / "client.json").exists()


@pytest.mark.parametrize("reason", [None, "", " \n", "Error: Node Unavailable"])
def test_an_error_of_flower_is_told_in_words_even_if_its_reason_is_blank(reason: str | None) -> None:
    class Grid:
        def push_messages(self, messages: Any) -> list[str]:
            return ["m"]

        def pull_messages(self, names: Any) -> list[Any]:
            class Reply:
                class metadata:  # noqa: N801
                    reply_to_message_id = "m"

                error = Error(5, reason)

                def has_error(self) -> bool:
                    return True

            return [Reply()]

    carrier = GridTransport(Grid())  # type: ignore[arg-type]
    carrier._open, carrier._unsent = {"m": NodeMessage(1, "registration", "{}")}, []
    (actual,) = carrier.receive()
    assert actual.disconnected
    assert actual.problem.startswith("its node is not connected any more (Flower's error 5")
    assert not actual.problem.endswith(": )")


def test_either_of_two_requests_can_be_answered_and_the_other_is_not_asked_for_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A registration that takes long is asked for again while the client works on it."""
    # a message of Flower's needs a run around it
    monkeypatch.setattr("fedlowrank.network.flower.FlowerMessage", lambda *parts, **more: parts)
    asked: list[list[str]] = []

    class Grid:
        def push_messages(self, messages: Any) -> list[str]:
            return [f"m{len(asked)}-{i}" for i, _ in enumerate(messages)]

        def pull_messages(self, names: Any) -> list[Any]:
            class Reply:
                class metadata:  # noqa: N801
                    reply_to_message_id = "m0-0"

                error = Error(5, "gone")

                def has_error(self) -> bool:
                    return True

            asked.append(sorted(names))
            return [Reply()] if len(asked) == 2 else []

    carrier = GridTransport(Grid())  # type: ignore[arg-type]
    requests = [NodeMessage(n, "registration", "{}") for n in (1, 2)]
    actual = []
    for _ in range(3):
        carrier.send(requests if len(asked) == 0 else requests[:1], "registration", 60.0)
        actual.append([r.node for r in carrier.receive()])
        requests = requests[:1]
    assert actual == [[], [1], []]
    assert asked == [["m0-0", "m0-1"], ["m0-0", "m0-1", "m1-0"], ["m0-1", "m2-0"]]


def test_the_nodes_are_asked_for_at_most_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now, calls = [100.0], []

    class Grid:
        def get_node_ids(self) -> list[int]:
            calls.append(now[0])
            return [len(calls)]

    monkeypatch.setattr("fedlowrank.network.flower.time.monotonic", lambda: now[0])
    carrier = GridTransport(Grid())  # type: ignore[arg-type]
    actual = []
    for now[0] in (100.0, 100.5, 101.0, 101.5, 102.0, 103.0):
        actual.append(carrier.nodes())
    assert calls == [100.0, 101.5, 103.0]
    assert actual == [{1}, {1}, {1}, {2}, {2}, {3}]


def test_the_audit_log_names_every_registration_and_reply_and_only_grows(tmp_path: Path) -> None:
    made, log = small("fedavg", rounds=2), tmp_path / "run.audit.jsonl"
    sent: dict[tuple[int, int], bytes] = {}

    def spoil(carrier: LocalTransport, message: NodeMessage) -> Any:
        actual: Response = carrier.answered(message)
        return [replace_fields(actual, payload=b"nonsense")]

    fault = fault_in_round(2, 1, spoil)

    def watched(carrier: LocalTransport, message: NodeMessage) -> Any:
        actual = fault(carrier, message)
        if message.kind == "order":
            sent[json.loads(message.header)["round"] + 1, {999: 0}.get(message.node, message.node - 100)] = (
                actual[0].payload
            )
        return actual

    carrier = local(made, tmp_path, watched)
    unregistered = tmp_path / "unregistered"
    shutil.copytree(carrier.folders[100], unregistered)
    carrier.folders[999] = unregistered
    serve_run(carrier, made, tmp_path / "run", audit=log)
    events = [json.loads(line) for line in log.read_text().splitlines()]
    assert sorted(e["client"] for e in events if e["event"] == "registered") == [0, 1, 2]
    assert any(e["event"] == "rejected" and "is connected already" in e["why"] for e in events)
    replies = {(e["round"], e["client"]): e for e in events if e["event"] == "reply"}
    for where, payload in sent.items():
        digest = hashlib.blake2b(payload, digest_size=16).hexdigest() if payload else ""
        assert replies[where]["digest"] == digest
        assert replies[where]["bytes"] > len(payload)
    assert [w for w, e in replies.items() if not e["accepted"] and w[0] <= 2] == [(2, 1)]
    assert replies[2, 1]["why"]
    before = log.read_bytes()
    more = small("fedavg", rounds=2)
    serve_run(local(more, tmp_path / "more", intact), more, tmp_path / "second", audit=log)
    assert log.read_bytes().startswith(before)
    assert len(log.read_bytes()) > len(before)


def test_a_run_that_went_back_says_so_before_its_server_continues(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made, out = small("fedavg", rounds=3), tmp_path / "run"
    carrier = local(made, tmp_path)
    serve_run(carrier, made, out)
    before = [r.untimed() for r in RunRecord.load(out).rounds]
    # the last checkpoint is where the run stands already
    assert main(["resume", str(out), "--round", "3"]) == 0
    assert RunRecord.load(out).status["state"] == "finished"
    assert main(["resume", str(out), "--round", "1"]) == 0
    assert main(["status", str(out)]) == 0
    said = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "stopped 1 of 3" in said
    assert [r.untimed() for r in RunRecord.load(out).rounds] == before[:2]
    serve_run(carrier, made, out, resume=True)
    assert RunRecord.load(out).status == {"state": "finished", "rounds": 3, "message": ""}


def test_status_tells_how_runs_stand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = small("fedavg", rounds=2)
    serve_run(local(made, tmp_path), made, tmp_path / "runs" / "one")
    shutil.copytree(tmp_path / "runs" / "one", tmp_path / "runs" / "two")
    write_sealed(tmp_path / "runs" / "two" / "status.json", {"state": "running", "rounds": 1, "message": ""})
    assert main(["status", str(tmp_path / "runs")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "finished" in said
    assert "stopped" in said
    assert "2 of 2" in said
    assert "3 of 3" in said
    assert "running" not in said
    assert main(["status", str(tmp_path / "nowhere")]) == 1
    assert "not a run folder" in capsys.readouterr().err
    assert RunFolder.has_begun(tmp_path / "runs" / "one")


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "place", ["file", "override", "run.json", "status.json", RECORDS_FILE, "000001.checkpoint"]
)
def test_nesting_without_end_is_an_error_and_no_traceback(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    deep, file = "[" * 100_000, write_tables(tmp_path / "t.toml", make_deployment_tables("fedavg"))
    if place == "file":
        file.write_text(f"name = {deep}")
    if place in ("file", "override"):
        arguments = ["data", str(file), *([f"data.path={deep}"] if place == "override" else [])]
    else:
        made = small("fedavg", rounds=1)
        serve_run(local(made, tmp_path), made, out := tmp_path / "run")
        # a checkpoint ends with the size of its table of contents
        size = len(deep).to_bytes(8, "big") if place.endswith(".checkpoint") else b""
        content = deep.encode() + size
        next(out.rglob(place)).write_bytes(gzip.compress(content) if place == RECORDS_FILE else content)
        arguments = ["report" if place in ("status.json", RECORDS_FILE) else "resume", str(out)]
    assert main(arguments) == 1
    said = capsys.readouterr().err
    assert said.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in said
    assert len(said) < 1000


def test_the_examples_of_a_deployment_are_commands_that_exist() -> None:
    yaml = pytest.importorskip("yaml")
    folder = Path(__file__).parents[3] / "examples" / "deploy"
    services = yaml.safe_load((folder / "compose.yaml").read_text())["services"]
    actual = [
        services["server"]["entrypoint"][2].replace("$$", "$"),
        "fedlowrank " + services["client"]["command"],
    ]
    for unit in folder.glob("*.service"):
        parsed = configparser.RawConfigParser(strict=False)
        parsed.optionxform = str  # type: ignore[assignment, method-assign]
        parsed.read(unit)
        actual.append(parsed["Service"]["ExecStart"].replace("%i", "0"))
    assert len(actual) == 4
    for line in actual:
        header = shlex.split(
            line.partition("exec ")[2].partition(' "')[0] or re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", line)
        )
        arguments = parser().parse_args(header[1:])
        assert Path(header[0]).name == "fedlowrank"
        assert (arguments.command, arguments.file) in {
            ("serve", Path("experiment.toml")),
            ("join", Path("experiment.toml")),
        }
