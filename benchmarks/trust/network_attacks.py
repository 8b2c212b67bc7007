"""Attacks on a network of organizations, and what is left of them: a table of the figures before and after the protections.

    python benchmarks/trust/network_attacks.py [--seeds 5] [--out docs/results/network-attacks.md]

Each attack runs against the installed package. Within this process: calls of clients reach the gate of the server, behind
which a web application counts what is passed on; clients are runtimes and nodes without a network; runs are those of a
server whose clients answer at once. By processes of their own: strangers connect to a SuperLink with TLS and keys, a
second server starts, and commands write files under umask 022.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import logging
import os
import re
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from base64 import b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Message, Metadata
from flwr.app.message import make_message
from flwr.common.constant import SUPERLINK_NODE_ID, TIMESTAMP_HEADER
from flwr.proto.fleet_pb2 import PullMessagesRequest, PushMessagesRequest
from flwr.proto.message_pb2 import Message as MessageProto
from flwr.proto.message_pb2 import Metadata as MetadataProto
from flwr.proto.message_pb2 import ObjectTree, PushObjectRequest
from flwr.proto.node_pb2 import Node as NodeProto
from flwr.proto.runtime_pb2 import PushAppMessagesRequest
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.run import Run as FlowerRun

from fedlowrank.config.assembly import Shares
from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.core import tree
from fedlowrank.core.errors import FedlowrankError
from fedlowrank.core.io.atomic_files import write_json
from fedlowrank.network import flower
from fedlowrank.network.access.gate import CLIENT_PATHS, Gate
from fedlowrank.network.access.identity import Roster
from fedlowrank.network.client import ClientRuntime, prepare
from fedlowrank.network.deploy.flower_process import find_free_port, listen
from fedlowrank.network.deploy.keys import ServerKeys, make_keys, revoke_client
from fedlowrank.network.deploy.node import Connection, Node, PinnedApp
from fedlowrank.network.deploy.server_processes import SuperLink
from fedlowrank.network.drive import drive
from fedlowrank.network.enrollment.key_request import load_client_key
from fedlowrank.network.message_bounds import CHUNK_BYTES
from fedlowrank.network.messages import Order, Registration
from fedlowrank.network.operation.grace import Grace
from fedlowrank.network.site.audit_log import explain_error
from fedlowrank.network.site.site_settings import SiteSettings
from fedlowrank.network.transport import NodeMessage, Response
from fedlowrank.rounds.outcome.result import Result
from fedlowrank.trust.privacy.accounting import local_epsilon
from fedlowrank.trust.privacy.site_ledger import STATE_VARIABLE

MIB = 1 << 20
LIAR = 3
UNKNOWN = "not reported"


class Row(NamedTuple):
    """A line of the table.

    Attributes:
        attack: what is tried.
        before: what it gave when it was found.
        after: what it gives now.
    """

    attack: str
    before: str
    after: str


def tables(clients: int = 3, rounds: int = 4, **sections: Any) -> dict[str, Any]:
    """An experiment of linear models on irises, unless sections say otherwise."""
    found: dict[str, Any] = {
        "name": "attacks",
        "method": "fedavg",
        "data": {"source": "iris", "normalize": "standard"},
        "partition": {"kind": "iid", "clients": clients},
        "model": {"names": ["linear"]},
        "defaults": {"epochs": 1, "batch_size": 16},
        "run": {"rounds": rounds, "representations": 0},
    }
    for section, fields in sections.items():
        found[section] = {**found.get(section, {}), **fields}
    return found


# -- calls to the server


@dataclass
class Server:
    """A gate whose clients 0 and 1 have keys, before a web application that only counts.

    Attributes:
        folder: of the keys.
        passed: bytes that reached the application.
    """

    folder: Path
    passed: int = 0

    def __post_init__(self) -> None:
        make_keys(self.folder / "keys", 2, [])
        public = ServerKeys.read(self.folder / "keys" / "server").clients
        write_json(
            self.folder / "nodes.json", {path.read_text().strip(): 100 + c for c, path in public.items()}
        )
        roster = Roster(self.folder / "keys" / "server" / "clients", self.folder / "nodes.json")
        self.gate = Gate(self._count, roster)

    async def _count(self, scope: Any, receive: Any, send: Any) -> None:
        del scope
        self.passed += len((await receive())["body"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    def key(self, client: int) -> ec.EllipticCurvePrivateKey:
        """Private key of a client."""
        return load_client_key(self.folder / "keys" / f"client-{client}" / "client.key")

    def call(self, path: str, request: Any, client: int = 0, ahead: float = 0.0) -> int:
        """Status of a call that a client signs by a clock that is so many seconds ahead."""
        key, body, sent = self.key(client), request.SerializeToString(), list[int]()
        now = (datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=ahead)).isoformat().encode()
        headers = {
            FLEET_HTTP_PUBLIC_KEY_HEADER: b64encode(public_key_to_bytes(key.public_key())),
            TIMESTAMP_HEADER: now,
            FLEET_HTTP_SIGNATURE_HEADER: b64encode(key.sign(now, ec.ECDSA(hashes.SHA256()))),
        }

        async def receive() -> Any:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            sent.extend([message["status"]] if "status" in message else [])

        scope = {
            "type": "http", "method": "POST", "path": CLIENT_PATHS + path, "client": ("192.0.2.7", 5),
            "headers": [*((name.encode(), value) for name, value in headers.items())],
        }  # fmt: skip
        asyncio.run(self.gate.answer_client(scope, receive, send))
        return sent[0]


def metadata(source: int, target: int, name: str, reply_to: str = "") -> MessageProto:
    """A message without content."""
    about = MetadataProto(
        run_id=1, message_id=name, src_node_id=source, dst_node_id=target, reply_to_message_id=reply_to,
        created_at=time.time(), ttl=600.0, message_type="train.order",
    )  # fmt: skip
    return MessageProto(metadata=about)


def announced(node: int, message: MessageProto, pieces: Sequence[str] = ()) -> PushMessagesRequest:
    """A call by which a node announces a message."""
    objects = ObjectTree(
        object_id=message.metadata.message_id, children=[ObjectTree(object_id=p) for p in pieces]
    )
    return PushMessagesRequest(
        node=NodeProto(node_id=node), messages_list=[message], message_object_trees=[objects]
    )


def forged_orders(base: Path) -> list[Row]:
    """A registered client speaks for the server, and for another client; the other client gets an unsigned order."""
    server = Server(base / "gate")
    statuses = [
        server.call("push-messages", announced(100, metadata(SUPERLINK_NODE_ID, 101, "forged"))),
        server.call("push-messages", announced(100, metadata(101, SUPERLINK_NODE_ID, "lie", "asked"))),
    ]
    passed = server.passed
    made = ExperimentConfig.parse(tables())
    prepare(base / "client", made, 1, made.shares(), SiteSettings(order_key="ab" * 32))
    victim, down = ClientRuntime(base / "client"), tree.encode(linear(0))
    try:
        victim.reply("order", Order("run", 0, 0, True, False).to_json(), down, "")
        trained = "trained"
    except FedlowrankError:
        trained = "refused"
    revoke_client(base / "gate" / "keys", 0)
    revoked = server.call("pull-messages", PullMessagesRequest(node=NodeProto(node_id=100)))
    clocks = [
        server.call("pull-messages", PullMessagesRequest(node=NodeProto(node_id=101)), 1, ahead)
        for ahead in (-240, 240, 310)
    ]
    return [
        Row(
            "a client's own key, an order to another client; a reply in its name",
            "200, stored and obeyed",
            f"{statuses[0]}, {statuses[1]}; {passed} bytes passed on",
        ),
        Row("an order that the server did not sign, at a client", "trained", trained),
        Row("a call by a key that was just revoked", UNKNOWN, str(revoked)),
        Row(
            "honest clients with clocks 240 s behind, 240 s ahead, 310 s ahead",
            "200, 401, 401",
            ", ".join(map(str, clocks)),
        ),
    ]


def oversized_reply(base: Path) -> list[Row]:
    """A reply of 400 MB where 8 MiB are allowed, in honest pieces, and in as many as may be announced."""
    passed = []
    for count in (400 * 10**6 // CHUNK_BYTES + 1, 8 * MIB // CHUNK_BYTES + 10):
        server = Server(base / str(count))
        server.gate.instructions.set_limits({100: 8 * MIB})
        order = metadata(SUPERLINK_NODE_ID, 100, "order")
        objects = [ObjectTree(object_id="order")]
        server.gate.instructions.add(
            PushAppMessagesRequest(messages_list=[order], message_object_trees=objects)
        )
        pieces = [f"{i:064x}" for i in range(count)]
        status = server.call(
            "push-messages", announced(100, metadata(100, SUPERLINK_NODE_ID, "reply", "order"), pieces)
        )
        for piece in pieces if status == 200 else ():
            body = PushObjectRequest(
                node=NodeProto(node_id=100),
                object_id=piece,
                object_content=bytes(CHUNK_BYTES),
                session_id="s",
            )
            server.call("push-object", body)
        passed.append(f"{server.passed / MIB:.0f} MiB")
    text = f"{passed[0]} reach the database; {passed[1]} if fewer pieces are announced"
    return [Row("a reply of 400 MB", "database 4 → 376 MiB, never given back", text)]


def strangers(base: Path) -> list[Row]:
    """Connections without a key that hold back the last of 16 MiB."""
    make_keys(base / "keys", 1, [])
    keys = ServerKeys.read(base / "keys" / "server")
    trusted = ssl.create_default_context(cafile=keys.authority)
    head = b"POST /v1/fleet/push-object HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (16 * MIB)
    with contextlib.ExitStack() as stack:
        link = stack.enter_context(SuperLink(base / "link", keys))
        link.register(keys.clients[0])
        process = psutil.Process(link.pid)
        before = process.memory_info().rss
        for _ in range(40):
            with contextlib.suppress(OSError):
                made = trusted.wrap_socket(
                    socket.create_connection(("127.0.0.1", link.port)), server_hostname="localhost"
                )
                stack.enter_context(made).sendall(head + bytes(16 * MIB - 1))
        after = process.memory_info().rss
    return [
        Row(
            "40 connections without a key that hold back the last byte of 16 MiB: memory of the server",
            "154 → 1,003 MiB",
            f"{before // MIB} → {after // MIB} MiB",
        )
    ]


# -- orders to a client


def linear(seed: int) -> dict[str, torch.Tensor]:
    """Weights of a linear model of irises."""
    draws = torch.Generator().manual_seed(seed)
    return {"linear.weight": torch.randn(3, 4, generator=draws), "linear.bias": torch.zeros(3)}


def with_test_examples(shares: Shares, count: int) -> Shares:
    """Shares in which client 1 has so many test examples, and no validation."""
    whole = shares.data[1].train
    mine = replace(shares.data[1], test=whole.take(torch.arange(count)), val=whole.take(torch.arange(0)))
    return replace(shares, data=(shares.data[0], mine, shares.data[2]))


def evaluations(base: Path) -> list[Row]:
    """474 evaluation orders in all rounds of one run; and 100 orders of a run each."""
    made, rows = ExperimentConfig.parse(tables()), []
    for count, before in ((5, "474 of 474: all features and classes are read"), (40, UNKNOWN)):
        folder = base / str(count)
        prepare(folder, made, 1, with_test_examples(made.shares(), count))
        client, found = ClientRuntime(folder), 0
        for i in range(474):
            order = Order("run", i * (made.run.rounds + 1) // 474, 0, False, True)
            evaluation = client.answer(order, tree.encode(linear(i)))[0].evaluation
            found += evaluation is not None and evaluation.values(
                "loss", series="personal", split="test"
            ) != [None]
        rounds = f"of a run of {made.run.rounds} rounds"
        rows.append(
            Row(
                f"474 evaluation orders {rounds}, {count} test examples: answers with a loss",
                before,
                f"{found} of 474" + (", rounded to three digits" if found else ""),
            )
        )
    prepare(base / "runs", made, 1, made.shares())
    for i in range(100):
        ClientRuntime(base / "runs").answer(Order(f"run{i}", 0, 0, True, False), tree.encode(linear(i)))
    folders = sum(path.is_dir() for path in (base / "runs").iterdir())
    rows.append(Row("100 orders that each name another run: folders at the client", "one each", str(folders)))
    return rows


@dataclass
class Delivery:
    """A server's message at a client's node.

    Attributes:
        header: of the message.
        payload: of the message.
        reason: why the node refused it, or "".
    """

    header: str
    payload: bytes
    reason: str = ""

    def answer(self, folder: Path) -> float:
        """Let the node answer; returns the most MiB that Python took meanwhile."""
        about = Metadata(5, "", 1, 7, "", "round-1", time.time(), 60.0, flower.ORDER_TYPE)
        message = make_message(metadata=about, content=flower.to_records(self.header, self.payload))
        message.metadata.__dict__["_message_id"] = message.object_id
        objects = {name: one.deflate() for name, one in get_all_nested_objects(message).items()}
        waiting = [(message, get_object_tree(message))]
        pinned, run = PinnedApp("fedlowrank/fedlowrank", "ab" * 32), FlowerRun.create_empty(5)
        run.fab_id, run.fab_hash = pinned

        def send(reply: Message, tree_: Any, seconds: float) -> tuple[set[str], str]:
            del tree_, seconds
            self.reason = reply.error.reason if reply.has_error() else ""
            return set(), "session"

        def pull(number: int, name: str) -> bytes:
            del number
            # new memory, as for what comes over a network
            return bytes(bytearray(objects[name]))

        def nothing(*_: Any) -> Any:
            return None

        calls = Connection(7, waiting.pop, send, lambda _: run, nothing, pull, nothing, nothing)
        node = Node(calls, flower.client, pinned, folder, folder)
        self.payload = b""
        del message
        tracemalloc.start()
        node.step()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak / MIB


def downloads(base: Path) -> list[Row]:
    """One piece that a message names 80 times, and booleans, of which a message has eight in a byte."""
    made = ExperimentConfig.parse(tables())
    prepare(base / "client", made, 1, made.shares())
    header = Order("run", 0, 0, True, False).to_json()
    pieces = Delivery(header, bytes(80 * CHUNK_BYTES))
    taken = pieces.answer(base / "client")
    assert "it has more bytes, too many" in pieces.reason
    bits = tree.encode({"mask": torch.zeros(256 * MIB, dtype=torch.bool)})
    try:
        ClientRuntime(base / "client").reply("order", header, bits)
        decoded = "decoded"
    except FedlowrankError:
        decoded = "refused before it is decoded"
    return [
        Row(
            "an order with one 5 MiB piece named 80 times: memory of the client",
            "428 MiB",
            f"{taken:.0f} MiB, refused",
        ),
        Row(
            f"an order of {len(bits) // MIB} MiB of booleans, which take 256 MiB decoded",
            "nine times the message",
            decoded,
        ),
    ]


def error_texts(base: Path) -> list[Row]:
    """An error whose text has data."""
    made, secret = ExperimentConfig.parse(tables()), "patient 4711 has 3.25"
    prepare(base / "client", made, 1, made.shares())
    client = ClientRuntime(base / "client")
    sent = explain_error(ValueError(secret), client.audit, client.site)
    assert secret not in sent
    # the number is drawn
    sent = re.sub("incident [0-9a-f]{8}", "incident 1a2b3c4d", sent)
    return [Row("an error whose text has data: what the server gets", f"ValueError: {secret}", sent)]


# -- runs


@dataclass
class Sites:
    """A transport whose clients answer at once, within this process.

    Attributes:
        folders: of the clients, by node.
        lie: changes what a client sends; None for honest clients.
        waiting: answers that the server has not received.
    """

    folders: dict[int, Path]
    lie: Callable[[NodeMessage, Response], Response] | None = None
    waiting: list[Response] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._clients = {node: ClientRuntime(folder) for node, folder in self.folders.items()}

    def nodes(self) -> set[int]:
        """See the protocol."""
        return set(self.folders)

    def send(self, messages: Sequence[NodeMessage], group: str, seconds: float) -> None:
        """See the protocol."""
        del group, seconds
        for message in messages:
            header, payload = self._clients[message.node].reply(message.kind, message.header, message.payload)
            response = Response(message.node, message.kind, header, payload)
            self.waiting.append(response if self.lie is None else self.lie(message, response))

    def receive(self) -> list[Response]:
        """See the protocol."""
        found, self.waiting = self.waiting, []
        return found

    def cancel_orders(self) -> None:
        """See the protocol."""
        self.waiting = [response for response in self.waiting if response.kind == "registration"]


def run(made: ExperimentConfig, base: Path, lie: Callable[..., Response] | None = None) -> Result:
    """A run over the network, as its server sees it."""
    shares = made.shares()
    folders = {i: base / f"client-{i}" for i in range(len(shares.data))}
    for i, folder in folders.items():
        prepare(folder, made, i, shares, SiteSettings.simulated())
    return drive(Sites(folders, lie), made, base / "run")


def lying(times: float, examples: int | None = None) -> Callable[[NodeMessage, Response], Response]:
    """A client whose update is so many times the honest one, and that may claim a number of examples."""

    def lie(message: NodeMessage, response: Response) -> Response:
        if message.node != LIAR:
            return response
        if message.kind == "registration":
            said = Registration.from_json(response.header)
            return replace(response, header=replace(said, examples=examples or said.examples).to_json())
        if not response.payload:
            return response
        down, up = tree.decode(message.payload), tree.decode(response.payload)
        return replace(
            response, payload=tree.encode(tree.map_leaves(lambda d, u: d + times * (u - d), down, up))
        )

    return lie


BEFORE = {
    "limits": {"update_ratio": 0.0, "strikes": 0, "refuse_ratio": 30.0, "examples_ratio": 10.0},
    "max_fall": 0.0,
}
"""The bounds by default before."""


def liar(base: Path, seeds: int) -> list[Row]:
    """One of five clients lies: test accuracy of the others, the mean over seeds."""

    def trial(name: str, network: dict[str, Any], lie: Callable[..., Response] | None) -> str:
        found = []
        for seed in range(seeds):
            made = ExperimentConfig.parse(
                tables(
                    5, 10, data={"source": "digits", "normalize": "none"},
                    model={"names": ["mlp"], "hidden": [32]}, run={"seed": seed}, network=network,
                    defaults={"epochs": 2, "batch_size": 32, "optimizer": {"lr": 0.2}},
                )
            )  # fmt: skip
            result = run(made, base / f"{name}-{seed}", lie)
            accuracy = result.accuracy()
            found.append(statistics.mean(v for i, v in enumerate(accuracy) if i != LIAR and v is not None))
        return f"{100 * statistics.mean(found):.0f} %"

    honest = [trial(f"honest-{n}", network, None) for n, network in enumerate((BEFORE, {}))]
    rows = [Row("five honest clients: test accuracy", *honest)]
    for what, lie in (
        ("one hostile client of five, updates of −5 times the honest ones", lying(-5.0)),
        ("the same, and it claims 10⁶ examples", lying(-5.0, 10**6)),
        ("one hostile client of five just within the bounds, −2.9 times", lying(-2.9)),
    ):
        name = f"lie-{len(rows)}"
        found = trial(f"{name}-before", BEFORE, lie), trial(f"{name}-after", {"max_fall": 0.0}, lie)
        rows.append(Row(f"{what}: test accuracy of the others", *found))
    return rows


def epsilon(base: Path) -> list[Row]:
    """Three runs of three rounds in a new folder each, with a budget of five updates."""
    noise, delta = 4.0, 1e-3
    budget = local_epsilon(noise, 5, delta, "rdp") + 1e-6
    privacy = {"kind": "local", "noise": noise, "epsilon": budget, "delta": delta}
    made = ExperimentConfig.parse(
        tables(
            rounds=3, run={"privacy": privacy, "clipping": {"norm": 0.1}}, network={"min_replies": 0, "attempts": 1},
        )
    )  # fmt: skip
    os.environ[STATE_VARIABLE] = str(base / "state")
    sent = 0
    for i in range(3):
        result = run(made, base / str(i))
        sent += sum("0" not in record.lost for record in result.rounds[1:])
    found = [f"{n} updates, ε = {local_epsilon(noise, n, delta, 'rdp'):.1f}" for n in (9, sent)]
    return [Row(f"three private runs in new folders, budget ε = {budget:.1f}: spent by a client", *found)]


def waiting() -> list[Row]:
    """Replies take 20 s, one client says nothing, and the deadline is an hour."""
    grace = Grace(5.0, [20.0] * 10)
    return [
        Row(
            "a silent client, replies take 20 s, deadline 3,600 s: duration of a round",
            "3,600 s",
            f"{grace.limit(3600.0):.0f} s",
        )
    ]


# -- commands


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the package under umask 022."""
    line = [sys.executable, "-m", "fedlowrank", *arguments]
    return subprocess.run(line, umask=0o022, capture_output=True, text=True)


FILE = """
name = "attacks"
method = "fedavg"
data = { source = "iris" }
model = { names = ["linear"] }
partition = { kind = "iid", clients = 3 }
run = { rounds = 2 }
"""


def files(base: Path) -> list[Row]:
    """What another user of the machine can read of a run and of a client's folder."""
    file = base / "t.toml"
    file.write_text(FILE)
    done = (
        command("run", str(file), "-o", str(base / "run")),
        command("keys", str(base / "keys"), "--clients", "1"),
    )
    assert not any(one.returncode for one in done), done
    made = [path for name in ("run", "keys") for path in (base / name, *(base / name).rglob("*"))]
    readable = [path for path in made if path.stat().st_mode & 0o077]
    folder = base / "client"
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    joined = command(
        "join", str(file), "--client", "1", "--insecure", "--folder", str(folder), "--server", "127.0.0.1:1"
    )
    assert "chmod -R go-rwx" in joined.stderr, joined.stderr
    return [
        Row(
            "files and folders of a run and of keys that other users can read",
            "all, 0644 in 0755",
            f"{len(readable)} of {len(made)}",
        ),
        Row("`join` with a folder of mode 0755", "continues", "refused, with the `chmod` to type"),
    ]


def second_server(base: Path) -> list[Row]:
    """A second server on a port in use."""
    file, port = base / "t.toml", find_free_port()
    file.write_text(FILE)
    with listen("127.0.0.1", port):
        began = time.perf_counter()
        done = command("serve", str(file), "--insecure", "--port", str(port))
        seconds = time.perf_counter() - began
    assert f"in use by process {os.getpid()}" in done.stderr, done.stderr
    return [Row("a second `serve` on a port in use: refused after", UNKNOWN, f"{seconds:.1f} s")]


def rows(base: Path, seeds: int) -> list[Row]:
    """All attacks."""
    attacks: list[Callable[[Path], list[Row]]] = [
        forged_orders, strangers, oversized_reply, evaluations, downloads, error_texts, epsilon, files, second_server,
        lambda folder: liar(folder, seeds),
    ]  # fmt: skip
    found = []
    for number, attack in enumerate(attacks):
        folder = base / str(number)
        folder.mkdir()
        made = attack(folder)
        for row in made:
            print(" | ".join(row), flush=True)
        found += made
    return found + waiting()


HEAD = """# Attacks on a network, before and after

    python benchmarks/trust/network_attacks.py --out docs/results/network-attacks.md

The table shows the effect of attacks of the [threat model](../threat-model.md) before and after the protections were added.
The column *after* is the output of the command. The column *before* has the figures of the reports, which real processes
measured when the attacks were found; otherwise it describes the behavior at that time. The command measures the accuracies
of both columns, with the earlier bounds (updates above 30 medians refused, none shortened, `examples_ratio` 10) and with the
present bounds. They are the mean over {seeds} seeds after ten rounds on handwritten digits.

Conclusion: each of these attacks is stopped or bounded. A hostile client that stays within the bounds still costs much
accuracy.

"""

SHOWN_BY_TESTS = (
    Row(
        "a real client sends 400 MB: files of the server's database",
        "408 MiB",
        "3 MiB; `tests/network/deploy/test_oversized_reply.py::test_four_hundred_megabytes_do_not_stay_on_the_disk`",
    ),
    Row(
        "a server repeats a round of secure sums without one client, and subtracts the totals",
        "the client's update",
        "the round is lost; `tests/network/secure/test_secure_runs.py::test_no_round_is_summed_twice`",
    ),
    Row(
        "a server shows two lists of those that replied to a secure sum",
        "both secrets of a client",
        "no share leaves; "
        "`tests/network/secure/test_secure_protocol.py::TestLies::test_no_two_lists_are_signed_by_enough`",
    ),
    Row(
        "a revoked client is asked in each round",
        "each waits for its deadline",
        "none waits; `tests/network/enrollment/test_revoked_key.py::test_no_round_waits_for_a_revoked_client`",
    ),
)
"""Attacks that need a whole server and its clients."""


def table(head: Row, found: Sequence[Row]) -> str:
    """Rows in Markdown."""
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, Row(*[":---"] * 3), *found))


def main() -> None:
    """Run all attacks, and print or write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)
    with tempfile.TemporaryDirectory() as base:
        found = rows(Path(base), args.seeds)
    text = (
        HEAD.format(seeds=args.seeds)
        + table(Row("attack", "before", "after"), found)
        + "\nAttacks that need a whole server and its clients are shown by tests:\n\n"
        + table(Row("attack", "without the protection", "with it"), SHOWN_BY_TESTS)
    )
    if args.out:
        args.out.write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
