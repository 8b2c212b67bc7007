"""A site's own log, the errors that leave it, and the memory that a server may take of it."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import logging
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("flwr")

import httpx
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedlowrank.cli.deployment import network_commands as network
from fedlowrank.cli.main import main
from fedlowrank.core import tree
from fedlowrank.core.errors import CheckpointError
from fedlowrank.network import flower
from fedlowrank.network.client import BASE_DOWNLOAD_BYTES, ClientRuntime, prepare
from fedlowrank.network.deploy.keys import make_keys
from fedlowrank.network.deploy.node import (
    MAX_CALL_BYTES,
    MAX_PIECE_BYTES,
    Node,
    TooLargeAnswerError,
    limit_answers,
)
from fedlowrank.network.deploy.server_processes import SuperNode
from fedlowrank.network.flower import from_records, to_records
from fedlowrank.network.messages import Answer, Order, RefusedOrderError
from fedlowrank.network.site import audit_log
from fedlowrank.network.site.signatures import read_public_key
from fedlowrank.network.site.site_settings import SiteSettings
from fedlowrank.rounds.run import Run
from tests.network.deploy.node_server import PINNED_APP, OneMessageServer, make_flower_run
from tests.network.deployments import make_deployment_tables, write_tables
from tests.network.orders_by_hand import RUN_NAME, encode_download, make_order
from tests.support.local_network import local, serve_run, small


@pytest.fixture
def folder(experiment: Any, tmp_path: Path) -> Path:
    prepare(tmp_path / "client", experiment, 1, experiment.shares())
    return tmp_path / "client"


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "audit.jsonl").read_text().splitlines()]


def sent(folder: Path, records: RecordDict, kind: str = "train.order") -> OneMessageServer:
    """A server whose message a client's node has answered."""
    server = OneMessageServer(records, kind, make_flower_run(*PINNED_APP))
    Node(server.connection(), flower.client, PINNED_APP, folder, folder).step()
    return server


# -- the log


def test_all_that_leaves_is_in_the_log_of_the_site_as_in_the_servers(tmp_path: Path) -> None:
    carrier = local(small("scaffold", 2, 2), tmp_path)
    serve_run(carrier, small("scaffold", 2, 2), tmp_path / "run", audit=tmp_path / "audit.jsonl")
    theirs = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    for node, folder in carrier.folders.items():
        mine = events(folder)
        assert [(e["event"], e["kind"]) for e in mine] == [("left", "registration")] + [("left", "order")] * 3
        replies = [e for e in theirs if e["event"] == "reply" and e["client"] == node - 100]
        assert [(e["bytes"], e["digest"]) for e in mine[1:]] == [(e["bytes"], e["digest"]) for e in replies]
        answers = [Answer.from_json(e["header"]) for e in mine[1:]]
        assert [(a.round, a.evaluation is not None) for a in answers] == [(0, True), (1, True), (2, True)]
        (state,) = folder.glob("*/000002.tree")
        assert mine[2]["digest"] == hashlib.blake2b(upload_in(state), digest_size=16).hexdigest()


def upload_in(state: Path) -> bytes:
    line, _, rest = state.read_bytes().partition(b"\n")
    return rest[json.loads(line)["state"] :]


REJECTION = '{"rejection": "client 1 has other columns"}'


def test_nothing_leaves_without_a_line(
    sequential_run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, down = make_order(sequential_run).to_json(), encode_download(sequential_run)
    monkeypatch.setattr(audit_log, "MAX_LOG_BYTES", 10)
    (folder / "audit.jsonl").write_text("a full log\n")
    # nor is there a word about an error, a refusal or an incident, whose numbers and texts would be sent unseen
    for sent_text in (text, make_order(sequential_run, stamp=2, round=2).to_json(), "no order", REJECTION):
        kind = "query.registration" if sent_text == REJECTION else "train.order"
        server = sent(folder, to_records(sent_text, down), kind)
        assert server.reply.has_error()
        assert server.reply.error.reason == "its audit log cannot be written"
    assert (folder / "audit.jsonl").read_text() == "a full log\n"
    (folder / "audit.jsonl").rename(folder / "away")
    answer = Answer.from_json(from_records(sent(folder, to_records(text, down)).reply.content)[0])
    assert (answer.problem, [e["event"] for e in events(folder)]) == ("", ["left"])
    full = OSError(errno.ENOSPC, "No space left on device")

    def fsync(handle: int) -> None:
        raise full

    monkeypatch.setattr(audit_log, "MAX_LOG_BYTES", 1 << 20)
    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(CheckpointError, match="No space left"):
        ClientRuntime(folder).reply("registration", "{}", b"")


def test_a_line_that_was_cut_short_does_not_spoil_the_next(folder: Path) -> None:
    log = folder / "audit.jsonl"
    log.write_text('{"event": "le')
    ClientRuntime(folder).audit.log_refusal("order", "a reason\nof two lines")
    assert log.read_text().startswith('{"event": "le\n{')
    line = json.loads(log.read_text().splitlines()[1])
    assert (line["event"], line["why"]) == ("refused", "a reason of two lines")


# -- errors

SECRET = "patient 4711 has 3.25"


class Broken:
    """A part of a client that fails with its data in the message."""

    def __call__(self, *arguments: Any, **more: Any) -> Any:
        raise ValueError(SECRET)


@pytest.mark.parametrize("text", [False, True])
@pytest.mark.parametrize(
    ("kind", "fails"),
    [
        ("query.registration", "make_registration"),
        ("train.order", "_answer"),
        ("train.order", "_evaluate"),
    ],
)
def test_the_text_of_an_error_stays_at_the_site(
    kind: str,
    fails: str,
    text: bool,
    sequential_run: Run,
    folder: Path,
    experiment: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    prepare(folder, experiment, 1, experiment.shares(), SiteSettings(send_errors=text))
    monkeypatch.setattr(ClientRuntime, fails, Broken())
    header = "{}" if kind != "train.order" else make_order(sequential_run, evaluate=True).to_json()
    reason = sent(folder, to_records(header, encode_download(sequential_run)), kind).reply.error.reason
    (incident,) = (e for e in events(folder) if e["event"] == "incident")
    assert incident["text"] == SECRET
    masked = f"ValueError, incident {incident['number']} in the site's audit log"
    assert reason == (f"ValueError: {SECRET}" if text else masked)
    assert [e["header"] for e in events(folder) if e["event"] == "left"] == [reason]
    # nor does `join` print it, whose output may be in a log of the system
    supernode = SuperNode(folder, "127.0.0.1:1", folder, None)
    supernode.log.write_text("".join(f"12:00:00 {line}\n" for line in caplog.messages))
    monkeypatch.setattr(supernode, "_process", SimpleNamespace(pid=1))
    assert SECRET in supernode.log.read_text()
    assert supernode.read_problems() == []


def test_an_answer_with_a_problem_holds_no_text_either(
    sequential_run: Run,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    masked = r"{}: {}, incident [0-9a-f]{{8}} in the site's audit log"
    runtime = ClientRuntime(folder)
    actual, _ = runtime.answer(make_order(sequential_run), encode_download(sequential_run, float("nan")))
    assert re.fullmatch(masked.format("its training failed", r"\w+"), actual.problem), actual.problem
    actual, _ = runtime.answer(make_order(sequential_run, round=2, stamp=2), encode_download(sequential_run))
    state = "the server expects the state after round 2, which this client does not have"
    assert re.fullmatch(masked.format(state, "ForgottenError"), actual.problem), actual.problem
    (folder / "site.json").write_text("{}")
    actual, _ = runtime.answer(make_order(sequential_run), encode_download(sequential_run))
    disk = "its folder cannot be read or written"
    assert re.fullmatch(masked.format(disk, "CheckpointError"), actual.problem), actual.problem
    texts = [e["text"] for e in events(folder)]
    assert len(texts) == 3
    assert str(folder) in texts[1]
    assert str(folder) in texts[2]


@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("is_logged", [False, True])
def test_join_prints_that_the_disk_of_its_site_is_full(
    is_logged: bool, is_last: bool, sequential_run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replace_nothing(path: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    # the end of every atomic write; the audit log is appended to
    monkeypatch.setattr(Path, "replace", replace_nothing)
    monkeypatch.setattr(audit_log, "MAX_LOG_BYTES", 1 << 20 if is_logged else -1)
    (folder / "audit.jsonl").touch()
    supernode = SuperNode(folder / "flower", "127.0.0.1:1", folder, None)
    supernode.process_folder.mkdir()
    # as the node's process logs
    handler = logging.FileHandler(supernode.log)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    package_logger = logging.getLogger("fedlowrank.network")
    package_logger.addHandler(handler)
    assert supernode.read_problems() == []
    monkeypatch.setattr(supernode, "_process", SimpleNamespace(pid=1))
    try:
        order = make_order(sequential_run, train=not is_last, last=is_last)
        reply = sent(folder, to_records(order.to_json(), encode_download(sequential_run))).reply
    finally:
        package_logger.removeHandler(handler)
        handler.close()
    assert reply.has_error() is not is_logged
    problem, *others = supernode.read_problems()
    path = re.escape(str(folder))
    assert re.match(rf"its folder cannot be read or written: cannot write {path}.*: No space left", problem)
    assert ("has not written its model" in problem) is is_last
    assert ("keep `fedlowrank join` running" in problem) is is_last
    # the reply that cannot be logged
    assert [p.partition(":")[0] for p in others] == ([] if is_logged else ["failed", "no reason is sent"])
    assert supernode.read_problems() == []


@pytest.mark.parametrize("damage", ["client.json", "data.tree"])
def test_a_damaged_folder_tells_nothing_of_itself(damage: str, folder: Path) -> None:
    (folder / damage).write_text(SECRET)
    reason = sent(folder, to_records("{}", b""), "query.registration").reply.error.reason
    assert re.fullmatch(r"CheckpointError, incident [0-9a-f]{8} in the site's audit log", reason)


def test_a_message_of_another_app_is_a_line_of_the_log(folder: Path) -> None:
    server = OneMessageServer(to_records("{}", b""), "query.registration", make_flower_run("other/app", ""))
    Node(server.connection(), flower.client, PINNED_APP, folder, folder).step()
    assert [(e["event"], e["kind"]) for e in events(folder)] == [
        ("refused", "query.registration"),
        ("left", "error"),
    ]


def test_a_message_of_another_kind_is_answered_with_an_error(folder: Path) -> None:
    for records, kind in ((to_records("{}", b""), "evaluate.order"), (RecordDict(), "train.order")):
        assert "incident" in sent(folder, records, kind).reply.error.reason


# -- memory


def test_a_piece_that_is_named_80_times_does_not_fill_the_memory(
    sequential_run: Run,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Five MiB cross, and 400 MiB would come of them."""
    records = to_records(make_order(sequential_run).to_json(), bytes(80 * (5 << 20)))
    with monkeypatch.context() as patch:
        patch.setattr(Array, "inflate", lambda *_, **__: pytest.fail("the array was put together"))
        server = sent(folder, records)
    assert sum(map(len, server.objects.values())) < 6 << 20
    assert "it has more bytes, too many" in server.reply.error.reason
    assert "fedlowrank join --max-download" in server.reply.error.reason
    reply = sent(
        folder, to_records(make_order(sequential_run).to_json(), encode_download(sequential_run))
    ).reply
    assert Answer.from_json(from_records(reply.content)[0]).problem == ""


def test_nothing_is_fetched_of_a_message_of_too_many_pieces(sequential_run: Run, folder: Path) -> None:
    server = OneMessageServer(
        to_records(make_order(sequential_run).to_json(), encode_download(sequential_run)),
        "train.order",
        make_flower_run(*PINNED_APP),
    )
    for _ in range(10**5):
        server.tree.children.append(server.tree.children[0].children[0])
    Node(server.connection(), flower.client, PINNED_APP, folder, folder).step()
    assert "pieces, too many" in server.reply.error.reason
    assert "pull" not in server.calls


def test_a_request_to_register_has_no_payload_worth_reading(folder: Path) -> None:
    server = sent(folder, to_records("{}", os.urandom(1 << 20)), "query.registration")
    assert "more bytes, too many" in server.reply.error.reason


@pytest.mark.full
def test_records_of_numbers_are_not_unpacked(folder: Path) -> None:
    """A record of small numbers takes many times its bytes in memory."""
    array = ArrayRecord({"tree": Array(dtype="uint8", shape=(0,), stype="safetensors", data=b"")})
    header = ConfigRecord({"json": "{}", "more": [7] * (5 << 20)})
    server = sent(folder, RecordDict({"header": header, "payload": array}))
    assert "more bytes, too many" in server.reply.error.reason


@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(1 << 20, dtype=torch.bool),
        [0] * 10**4,
        {str(i): None for i in range(10**4)},
        [[[]]] * 4000,
    ],
    ids=["bits", "numbers", "keys", "lists"],
)
def test_a_tree_that_would_take_many_times_its_message_is_not_decoded(value: Any) -> None:
    data = tree.encode(value)
    assert len(data) < 1 << 18
    with pytest.raises(
        tree.TreeError, match=r"(more than the 1048576 bytes of memory|more booleans than it may)"
    ):
        tree.decode(data, memory=1 << 20)
    assert tree.equal(tree.decode(data, memory=1 << 24), value)
    small_one = {"weight": torch.ones(100), "mask": torch.ones(100, dtype=torch.bool)}
    assert tree.equal(tree.decode(tree.encode(small_one), memory=1 << 20), small_one)


def test_a_download_is_bound_by_the_model(sequential_run: Run, folder: Path, experiment: Any) -> None:
    weights = sum(
        p.nbytes for p in sequential_run.task.model(sequential_run.federation.infos[1]).module.parameters()
    )
    most = ClientRuntime(folder).max_download
    assert most == BASE_DOWNLOAD_BYTES + 4 * (weights + len(encode_download(sequential_run)))
    prepare(folder, experiment, 1, experiment.shares(), SiteSettings(max_download=100))
    answer, _ = ClientRuntime(folder).answer(make_order(sequential_run), encode_download(sequential_run))
    assert (
        f"a download of {len(encode_download(sequential_run))} bytes came; at most 100 are taken"
        in answer.problem
    )


def answers(content: bytes, headers: dict[str, str], path: str, status: int = 200) -> bytes:
    """What a client reads of a server's answer."""

    def parts() -> Any:
        yield from (content[i : i + 65536] for i in range(0, len(content), 65536))

    def handle(request: httpx.Request) -> httpx.Response:
        return httpx.Response(status, headers=headers, content=parts())

    with httpx.Client(transport=httpx.MockTransport(handle), follow_redirects=True) as client:
        limit_answers(client)
        return client.post(f"https://server{path}").content


def test_the_servers_answers_are_read_up_to_a_limit() -> None:
    calls = "/v1/fleet/pull-messages", "/v1/fleet/pull-object"
    for path, most in zip(calls, (MAX_CALL_BYTES, MAX_PIECE_BYTES), strict=True):
        assert answers(bytes(most), {}, path) == bytes(most)
        with pytest.raises(TooLargeAnswerError, match=f"more than {most} bytes"):
            answers(bytes(most + 1), {}, path)
    # a packed answer may be a thousand times as long
    with pytest.raises(TooLargeAnswerError, match="packed"):
        answers(b"", {"content-encoding": "gzip"}, calls[0])
    # nor is a client sent to another machine of its site
    assert answers(b"moved", {"location": "https://other/"}, calls[0], 307) == b"moved"


def test_a_refused_order_is_a_line_of_the_log(sequential_run: Run, folder: Path) -> None:
    runtime = ClientRuntime(folder)
    runtime.answer(make_order(sequential_run), encode_download(sequential_run))
    with pytest.raises(RefusedOrderError, match="belongs to the run"):
        runtime.reply("registration", '{"run": "another"}', b"")
    runtime.answer(
        dataclasses.replace(make_order(sequential_run), run="another"), encode_download(sequential_run)
    )
    assert [(e["event"], e["kind"]) for e in events(folder)] == [
        ("refused", "registration"),
        ("refused", "order"),
    ]
    assert {p.name for p in folder.iterdir() if p.is_dir()} == {RUN_NAME}
    assert isinstance(make_order(sequential_run), Order)


# -- what a site types


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_tables(tmp_path / "t.toml", make_deployment_tables("fedavg"))


def typed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, file: Path, *arguments: str) -> SiteSettings:
    """The settings of a client whose node is not started."""
    monkeypatch.setattr(network, "supervise", lambda node, stop: None)
    folder = tmp_path / "joined"
    assert main(["join", str(file), "--client", "1", "--folder", str(folder), "--stay", *arguments]) == 0
    return ClientRuntime(folder).site


def test_a_site_types_what_it_allows(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert typed(monkeypatch, tmp_path, file, "--insecure") == SiteSettings()
    more = ("--no-evaluation", "--send-errors", "--runs", "2", "--max-download", "7")
    actual = typed(monkeypatch, tmp_path, file, "--insecure", *more)
    assert actual == SiteSettings("", "none", send_errors=True, runs=2, max_download=7 << 20)
    make_keys(tmp_path / "keys", 2, [])
    actual = typed(
        monkeypatch, tmp_path, file, "--keys", str(tmp_path / "keys" / "client-1"), "--exact-evaluation"
    )
    public = read_public_key(tmp_path / "keys" / "server" / "orders.pub")
    assert actual == SiteSettings(public, "exact")


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (["--no-evaluation", "--exact-evaluation"], "exclude each other"),
        (["--runs", "0"], "1 run or more"),
        (["--max-download", "-1"], "give a number of MiB"),
        (["run.privacy.kind=local", "run.privacy.noise=1", "run.privacy.delta=0.01", "run.clipping.norm=1",
          "--send-errors"], "texts of errors are not private"),
    ],
)  # fmt: skip
def test_what_a_site_cannot_type(
    more: list[str], why: str, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["join", str(file), *more, "--client", "1", "--insecure", "--folder"]
    assert main([*arguments, str(tmp_path / "joined")]) == 1
    assert why in " ".join(capsys.readouterr().err.split())


def test_no_text_of_an_error_leaves_a_private_client(tmp_path: Path) -> None:
    private = small(
        "fedavg", run={"privacy": {"kind": "local", "noise": 1.0, "delta": 0.01}, "clipping": {"norm": 1.0}}
    )
    prepare(tmp_path / "client", private, 1, private.shares(), SiteSettings(send_errors=True))
    assert not ClientRuntime(tmp_path / "client").site.send_errors
