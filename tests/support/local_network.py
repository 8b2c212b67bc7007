"""A federation within one process whose carrier loses, doubles, delays and changes what a test tells it to.

Clients and the server die at any point of their lives and come back from their disks; time passes only where
it is waited for.
"""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import functools
import json
import logging
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.core import tree
from fedlowrank.engines.sequential import Sequential
from fedlowrank.network import client as runtime
from fedlowrank.network import server, transport
from fedlowrank.network.client import ClientRuntime, prepare
from fedlowrank.network.drive import drive
from fedlowrank.network.messages import Answer, Order
from fedlowrank.network.persistence.client_memory import ClientMemory
from fedlowrank.network.site.site_settings import SiteSettings
from fedlowrank.network.transport import NodeMessage, Response
from fedlowrank.results.evaluation.model_evaluation import ModelEvaluation
from fedlowrank.results.records import RoundRecord
from fedlowrank.rounds.outcome.result import Result
from fedlowrank.rounds.run import Run
from fedlowrank.rounds.simulate import threads
from fedlowrank.training.flops import FlopLedger

PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9)
"""Values of JSON without inner ones."""


def fuzz(examples: int) -> settings:
    """The same examples in every run, without limits of time."""
    checks = [*HealthCheck]
    return settings(
        max_examples=examples, derandomize=True, deadline=None, database=None, suppress_health_check=checks
    )


class Killed(BaseException):
    """A process is gone: nobody catches this on its way."""


def until(is_so: Callable[[], Any], seconds: float = 100.0) -> Any:
    """What a function gives once that is something."""
    deadline = time.monotonic() + seconds
    while not (actual := is_so()):
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.1)
    return actual


def no_space(where: str) -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")


@dataclass
class Hazard:
    """The points of a process's life, counted; at some of them it dies, or what it does fails."""

    at: set[int] = field(default_factory=set)
    error: Callable[[str], BaseException] = Killed
    points: list[str] = field(default_factory=list)

    def __call__(self, where: str) -> None:
        self.points.append(where)
        if len(self.points) - 1 in self.at:
            raise self.error(where)


@dataclass
class Clock:
    """What the package takes for the module ``time``."""

    now: float = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


Fault = Callable[["LocalTransport", NodeMessage], "list[Response | tuple[float, Response]]"]
"""What comes back of a message, now or after so many seconds. Whoever asks ``answered`` lets the client work."""


def intact(carrier: LocalTransport, message: NodeMessage) -> list[Response | tuple[float, Response]]:
    return [carrier.answered(message)]


@dataclass
class LocalTransport:
    """Nodes are 100 + client; every message opens its client runtime again from the disk, as Flower's processes do.

    Attributes:
        folders: of the clients, by node.
        fault: what becomes of a message.
        away: nodes that cannot be reached.
        log: all messages to nodes.
        hazards: of clients, by node; of the server under 0.
        trained: client and round of every training.
    """

    folders: dict[int, Path]
    fault: Fault = intact
    away: set[int] = field(default_factory=set)
    log: list[NodeMessage] = field(default_factory=list)
    hazards: dict[int, Hazard] = field(default_factory=dict)
    trained: list[tuple[int, int]] = field(default_factory=list)
    clock: Clock = field(default_factory=Clock)
    ledger: FlopLedger = field(default_factory=FlopLedger)
    waiting: list[tuple[float, Response]] = field(default_factory=list)
    running: int = 0

    def nodes(self) -> set[int]:
        return set(self.folders) - self.away

    def send(self, messages: Sequence[NodeMessage], group: str, seconds: float) -> None:
        self.at("sending")
        for message in messages:
            self.log.append(message)
            if message.node in self.away:
                actual: Any = [
                    Response(message.node, message.kind, problem="it went away", disconnected=True)
                ]
            else:
                actual = self.fault(self, message)
            made = [f if isinstance(f, tuple) else (0.0, f) for f in actual]
            self.waiting += [(self.clock.now + after, response) for after, response in made]
        self.at("sent")

    def answered(self, message: NodeMessage) -> Response:
        """Let the client work. One that raises is answered for as Flower does; of one that dies nothing comes."""
        before, self.running = self.running, message.node
        try:
            mine = ClientRuntime(self.folders[message.node])
            header, payload = mine.reply(message.kind, message.header, message.payload, message.signature)
            return Response(message.node, message.kind, header, payload)
        except Killed as error:
            return Response(message.node, message.kind, problem=f"the client's process died: {error}")
        except Exception as error:  # noqa: BLE001 - whatever a client raises, its node says so
            return Response(message.node, message.kind, problem=f"{type(error).__name__}: {error}")
        finally:
            self.running = before

    def receive(self) -> list[Response]:
        self.at("receiving")
        # the last one first: the order of arrival must not matter
        actual = [d for due, d in self.waiting if due <= self.clock.now][::-1]
        self.waiting = [(due, d) for due, d in self.waiting if due > self.clock.now]
        return actual

    def cancel_orders(self) -> None:
        self.waiting = [(due, d) for due, d in self.waiting if d.kind == "registration"]

    def at(self, where: str, disk: bool = False) -> None:
        """A point in the life of the process that runs now; a full disk shows only where the disk is used."""
        hazard = self.hazards.get(self.running)
        if hazard is not None and (disk or hazard.error is not no_space):
            hazard(where)

    @contextmanager
    def world(self) -> Iterator[None]:
        """Time is the transport's, trainings are counted, and every write to the disk is a point of its process's life."""
        carrier, replace, unlink = self, Path.replace, Path.unlink

        class Counting(Sequential):
            def __post_init__(self) -> None:
                # what a step costs is the same in every process
                self.ledger = carrier.ledger

            def run(self, method: Any, federation: Any, task: Any, round: int, jobs: Any) -> Iterator[Any]:
                carrier.trained += [(job.client.id, round) for job in jobs]
                carrier.at("training")
                yield from super().run(method, federation, task, round, jobs)

        def synced(handle: int) -> None:
            try:
                self.at("not synced", disk=True)
            except Killed:
                # a machine that loses power may keep a part of what was not synced: half of a new file, all but the
                # end of a file that grew
                size = os.fstat(handle).st_size
                if stat.S_ISREG(os.fstat(handle).st_mode):
                    new = fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY
                    os.ftruncate(handle, size // 2 if new else max(0, size - 40))
                raise
            # no test takes this machine's power away, and to wait for its disk takes longer than all else

        def replaced(path: Path, target: Path) -> Path:
            self.at(f"{target.name} not renamed", disk=True)
            actual = replace(path, target)
            self.at(f"{target.name} renamed", disk=True)
            return actual

        def unlinked(path: Path, missing_ok: bool = False) -> None:
            self.at(f"{path.name} not removed", disk=True)
            unlink(path, missing_ok)

        with ExitStack() as stack:
            for module in (transport, server):
                stack.enter_context(mock.patch.object(module, "time", self.clock))
            stack.enter_context(mock.patch.object(ExperimentConfig, "parse", staticmethod(_parse_experiment)))
            stack.enter_context(mock.patch.object(runtime, "Sequential", Counting))
            # an engine of before would be shared
            runtime._load_shared.cache_clear()
            stack.callback(runtime._load_shared.cache_clear)
            stack.enter_context(mock.patch.object(os, "fsync", synced))
            stack.enter_context(mock.patch.object(Path, "replace", replaced))
            stack.enter_context(mock.patch.object(Path, "unlink", unlinked))
            yield

    def orders(self) -> list[tuple[int, Order]]:
        """Client and header of every order that was sent."""
        return [(p.node - 100, Order.from_json(p.header)) for p in self.log if p.kind == "order"]


_parse = ExperimentConfig.parse


def _parse_experiment(tables: dict[str, Any], allow_code: bool = True) -> ExperimentConfig:
    del allow_code
    return _loaded_json(json.dumps(tables))


@functools.lru_cache(maxsize=64)
def _loaded_json(text: str) -> ExperimentConfig:
    return _parse(json.loads(text))


def tables(method: str, clients: int = 3, rounds: int = 3, **sections: Any) -> dict[str, Any]:
    """A small experiment. Updates are not shortened unless a section ``network`` says so."""
    actual: dict[str, Any] = {
        "name": "small",
        "method": method,
        "data": {"source": "iris", "normalize": "standard"},
        "partition": {"kind": "iid", "clients": clients},
        "model": {"names": ["mlp"], "hidden": [6]},
        "defaults": {"epochs": 1, "batch_size": 16},
        "run": {"rounds": rounds, "representations": 0},
    }
    if method in ("fedhl", "hetlora", "flora"):
        actual["lora"] = {"ranks": [1, 2, 3]}
    for section, fields in sections.items():
        actual[section] = {**actual.get(section, {}), **fields}
    # an update that is shortened has other bits than in the run that is the truth of most tests
    network = actual.get("network", {})
    actual["network"] = {**network, "limits": {"update_ratio": 0.0, **network.get("limits", {})}}
    if actual["model"]["names"] != ["mlp"]:
        del actual["model"]["hidden"]
    return actual


def small(method: str, clients: int = 3, rounds: int = 3, **sections: Any) -> ExperimentConfig:
    return _parse_experiment(tables(method, clients, rounds, **sections))


def local(
    made: ExperimentConfig, base: Path, fault: Fault = intact, site: SiteSettings | None = None
) -> LocalTransport:
    """Clients that send exact evaluations and error texts, as those of a simulation, unless a test says otherwise."""
    site = site or SiteSettings.simulated()
    shares = made.shares()
    folders = {100 + i: base / f"client-{i}" for i in range(len(shares.data))}
    for node, folder in folders.items():
        prepare(folder, made, node - 100, shares, site)
    return LocalTransport(folders, fault)


def serve_run(carrier: LocalTransport, made: ExperimentConfig, out: Path, **more: Any) -> Result:
    """A run, or its continuation, of a server whose process begins now."""
    with carrier.world():
        return drive(carrier, made, out, **more)


def run_whole(
    made: ExperimentConfig, base: Path, fault: Fault = intact, **more: Any
) -> tuple[LocalTransport, Result]:
    """A whole run, and the transport that it used."""
    carrier = local(made, base, fault)
    return carrier, serve_run(carrier, made, base / "run", **more)


def fault_on_orders(act: Callable[[LocalTransport, NodeMessage, int, int], Any]) -> Fault:
    """Ask an act what becomes of an order, by its round from 1 and client; where it gives None, all arrives."""

    def fault(carrier: LocalTransport, message: NodeMessage) -> Any:
        actual = None
        if message.kind == "order":
            actual = act(carrier, message, Order.from_json(message.header).round + 1, message.node - 100)
        return intact(carrier, message) if actual is None else actual

    return fault


@contextmanager
def log_lines() -> Iterator[list[str]]:
    """The package's log messages while a block runs, where caplog cannot be used."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("fedlowrank")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def count_logged(caplog: pytest.LogCaptureFixture, text: str) -> int:
    """How many log messages hold a text."""
    return sum(text in line for line in caplog.messages)


def lose_replies(lost: Mapping[int, set[int]]) -> Fault:
    """Replies of these clients in these rounds are lost after the client did its work; rounds count from 1."""

    def act(carrier: LocalTransport, message: NodeMessage, t: int, client: int) -> Any:
        actual = carrier.answered(message)
        gone = client in lost.get(t, ())
        return [lost_reply(message)] if gone and Order.from_json(message.header).train else [actual]

    return fault_on_orders(act)


def find_missed_rounds(result: Result) -> set[tuple[int, int]]:
    """Evaluations that a lost reply took along: those of the round before."""
    return {(r.round - 1, int(c)) for r in result.rounds for c in r.lost}


def lost(result: Result) -> list[set[int]]:
    return [set(map(int, r.lost)) for r in result.rounds[1:]]


def fault_in_round(t: int, client: int, act: Fault) -> Fault:
    """What becomes of the order to that client in a round, counted from 1; all else arrives."""

    return fault_on_orders(lambda carrier, message, *at: act(carrier, message) if at == (t, client) else None)


def lost_reply(message: NodeMessage, problem: str = "it was lost") -> Response:
    return Response(message.node, message.kind, problem=problem)


def replace_fields(response: Response, **fields: Any) -> Response:
    """The delivery with another header or payload."""
    own = {k: fields.pop(k) for k in ("header", "payload") if k in fields}
    if fields:
        answer = dataclasses.replace(Answer.from_json(response.header), **fields)
        own["header"] = answer.to_json()
    return dataclasses.replace(response, **own)


def run_sequentially(made: ExperimentConfig, records: Sequence[RoundRecord]) -> tuple[Run, list[RoundRecord]]:
    """The same run within one process, whose replies are lost where these records lost them.

    Every client is evaluated alone, as over a network: in one batch with others its products may round otherwise.
    """
    with threads(1), mock.patch.object(ModelEvaluation, "_measure_in_one_pass", return_value=None):
        run = Run(made.build_method(made.default_method), made.federation(), made.run, Sequential())
        return run, [run.record_initial_models(), *(run.step(lost_replies=r.lost) for r in records[1:])]


def assert_equals_sequential_run(
    result: Result, carrier: LocalTransport, made: ExperimentConfig, losses: Sequence[RoundRecord] = ()
) -> set[Any]:
    """Assert that a run is the sequential one to the last bit: server, every client's state on its disk, and
    records.

    Args:
        result: of the network's run.
        carrier: knows the clients' folders.
        made: the experiment.
        losses: records whose losses the sequential run has; by default those of the run.

    Returns:
        Rounds and clients of which the records hold no evaluation.
    """
    run, records = run_sequentially(made, losses or result.rounds)
    assert_same_states(result, carrier, run)
    assert len(result.rounds) == len(records) == made.run.rounds + 1
    absent = set()
    for actual, expected in zip(result.rounds, records, strict=True):
        absent |= {(actual.round, i) for i in assert_same_record(actual, expected)}
    return absent


def assert_same_states(result: Result, carrier: LocalTransport, run: Run) -> None:
    """Assert that the server and all clients' disks hold the states of a run."""
    assert tree.equal(result.run.state.server, run.state.server)
    stamps = {i: s["stamp"] for i, s in result.run.state.clients.items() if s["stamp"]}
    assert stamps.keys() == run.state.clients.keys()
    for client, stamp in stamps.items():
        assert tree.equal(
            open_client_memory(result, carrier, client).read_state(stamp), run.state.clients[client]
        ), client


def open_client_memory(result: Result, carrier: LocalTransport, client: int) -> ClientMemory:
    engine = result.run.engine
    assert isinstance(engine, server.NetworkEngine)
    return ClientMemory(carrier.folders[100 + client] / engine.account.run)


def assert_same_record(found: RoundRecord, wanted: RoundRecord) -> set[int]:
    """Assert that all is the same but what was found of clients that were not heard; returns who was not evaluated."""
    a, b = found.untimed(), wanted.untimed()
    unheard = {"parameters_up", "steps", "flops", "training_losses"} if found.lost else set()
    sent = {"bytes_up", "bytes_down", "parameters_down"}
    for name in a.keys() - unheard - sent - {"measured"}:
        assert a[name] == b[name], (found.round, name)
    for name in sent if not found.lost else ():
        # a round that was asked for again takes more messages
        assert a[name] >= b[name], (found.round, name)
    if found.measured is None or wanted.measured is None:
        assert wanted.measured is None or found.measured is None
        return set() if wanted.measured is None else {*wanted.measured.client_ids}
    absent = set()
    # only the server could evaluate its own model on everybody's data
    series = [s for s in wanted.series() if s != "server"]
    assert found.series() == found.series("loss") == series
    here, there = (
        {
            (c.name, c.series, c.split, i): v
            for c in block.columns
            if c.series != "server"
            for i, v in zip(block.client_ids, c.values, strict=True)
        }
        for block in (found.measured, wanted.measured)
    )
    assert {key[:-1] for key in here} == {key[:-1] for key in there}
    assert here.keys() <= there.keys()
    for key, value in there.items():
        if here.get(key) is None and value is not None:
            absent.add(key[-1])
        else:
            assert here.get(key) == value, (found.round, key)
    return absent


def headline(record: RoundRecord) -> list[float | None]:
    assert record.is_evaluated
    return record.values("accuracy", split="test")
