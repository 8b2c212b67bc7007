"""Any method over Flower: the server's half in a ServerApp, a client's half in a ClientApp.

No other file imports flwr but :mod:`.node` and :mod:`.guard`, which run as programs of their own.

``server`` and ``client`` are what a Flower app names as its components. Where they find their things:

- the ServerApp reads :data:`EXPERIMENT` (a JSON file of the experiment's tables), :data:`OUT` (the run folder), :data:`NODES`
  (which client each registered key is, if keys are checked) and :data:`LOG` from its environment; an app that was submitted
  by hand brings the tables and the folder in its run config;
- the ClientApp reads ``folder`` from its node's config, the folder that ``fedlowrank join`` prepared; without it, it takes the
  place ``partition-id`` of the experiment in the run config, and keeps its things under ``state`` of the node's config.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.superlink.grid.http_grid import HttpGrid

from ..config.experiment import ExperimentConfig
from ..core.errors import ConfigError, FedlowrankError
from ..core.files import as_checkpoint_error
from ..simulation.run_folder import RunFolder
from ..simulation.simulate import threads
from .client import Party, prepare
from .drive import clients_of, drive
from .intake import Intake
from .messages import Order, sections
from .server import Say
from .transport import Delivery, Parcel

EXPERIMENT, OUT, NODES, LOG = "FEDLOWRANK_EXPERIMENT", "FEDLOWRANK_OUT", "FEDLOWRANK_NODES", "FEDLOWRANK_LOG"
"""Names of environment variables."""

GONE = frozenset({3, 5})
"""Codes of Flower's errors after which the node itself is to be asked again: message unavailable, node unavailable."""

MEANINGS = {
    1: "its client could not load the app",
    2: "its client met an error",
    3: "the message expired, or its node left, before it was fetched",
    4: "the reply expired before it was fetched",
    5: "its node is not connected any more",
    7: "its client answers no messages of this app",
    8: "its client crashed",
}
"""What Flower's codes of errors say, for Flower's own reason may be blank."""

_TYPES = {"hello": "query.hello", "order": "train.order"}
_KINDS = {t: k for k, t in _TYPES.items()}


def to_records(words: str, body: bytes) -> RecordDict:
    """A message as Flower carries it: the words, and one buffer; many arrays would take ten times as long."""
    array = Array(dtype="uint8", shape=(len(body),), stype="safetensors", data=body)
    return RecordDict({"words": ConfigRecord({"json": words}), "body": ArrayRecord({"tree": array})})


def from_records(records: RecordDict) -> tuple[str, bytes]:
    """Inverse of :func:`to_records`.

    Raises:
        FedlowrankError: if the records are something else.
    """
    try:
        words, body = records.config_records["words"]["json"], records.array_records["body"]["tree"].data
    except (KeyError, AttributeError) as error:
        raise FedlowrankError(f"a message lacks its parts: {error!r}") from error
    if not isinstance(words, str) or not isinstance(body, bytes):
        raise FedlowrankError("a message's words are no text, or its body no bytes")
    return words, body


class GridTransport:
    """Messages through a Flower grid.

    Args:
        grid: of a ServerApp.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._open: dict[str, Parcel] = {}
        self._unsent: list[Parcel] = []
        self._intake: Intake | None = None
        if isinstance(grid, HttpGrid):
            # a reply is fetched piece by piece; one that is too large is not read to its end
            self._intake = Intake(grid._runtime_client, lambda asked: self._open[asked].most)
            grid._client = self._intake  # type: ignore[assignment]

    def nodes(self) -> set[int]:
        """The nodes that can be reached now."""
        return set(self._grid.get_node_ids())

    def send(self, parcels: Sequence[Parcel], group: str, seconds: float) -> None:
        """Send messages, of which none is worth anything after so many seconds."""
        made = [
            Message(to_records(p.words, p.body), p.node, _TYPES[p.kind], ttl=seconds, group_id=group)
            for p in parcels
        ]
        ids = list(self._grid.push_messages(made)) if made else []
        # a node that went away in between gets no message, and its place holds no identifier
        # a registration may still be under way while orders are sent
        again = {p.node for p in parcels if p.kind == "hello"}
        self._open = {m: p for m, p in self._open.items() if p.node not in again}
        self._open |= {str(m): p for m, p in zip(ids, parcels, strict=True) if m}
        self._unsent += [p for m, p in zip(ids, parcels, strict=True) if not m]

    def receive(self) -> list[Delivery]:
        """What arrived since the last call."""
        found = [Delivery(p.node, p.kind, problem="its node went away", gone=True) for p in self._unsent]
        self._unsent = []
        if self._open:
            found += self._delivered(self._grid.pull_messages(list(self._open)))
        return found

    def forget(self) -> None:
        """Wait no longer for replies to orders."""
        self._open = {m: p for m, p in self._open.items() if p.kind == "hello"}
        self._unsent = [p for p in self._unsent if p.kind == "hello"]

    def _delivered(self, replies: Iterable[Message]) -> list[Delivery]:
        found = []
        for reply in replies:
            parcel = self._open.pop(reply.metadata.reply_to_message_id, None)
            if parcel is None:
                continue
            if self._intake is not None and reply.metadata.reply_to_message_id in self._intake.refused:
                why = self._intake.refused.pop(reply.metadata.reply_to_message_id)
                found.append(Delivery(parcel.node, parcel.kind, too_large=why))
                continue
            if reply.has_error():
                code, reason = reply.error.code, reply.error.reason
                meaning = MEANINGS.get(code, "an error that this release does not know")
                said = f": {reason.strip()}" if reason and reason.strip() else ""
                problem = f"{meaning} (Flower's error {code}{said})"
                found.append(Delivery(parcel.node, parcel.kind, problem=problem[:500], gone=code in GONE))
                continue
            try:
                words, body = from_records(reply.content)
            except FedlowrankError as error:
                found.append(Delivery(parcel.node, parcel.kind, problem=str(error)))
                continue
            found.append(Delivery(parcel.node, parcel.kind, words, body))
        return found


FolderOf = Callable[[Context], Path]


def client_app(folder_of: FolderOf) -> ClientApp:
    """A ClientApp whose party's folder is found by that function."""
    app = ClientApp()

    @app.query("hello")
    def hello(message: Message, context: Context) -> Message:
        words, body = party_at(str(folder_of(context))).hello()
        return Message(to_records(words.to_json(), body), reply_to=message)

    @app.train("order")
    def order(message: Message, context: Context) -> Message:
        words, body = from_records(message.content)
        party = party_at(str(folder_of(context)))
        with threads(party.made.run.threads):
            answer, upload = party.answer(Order.from_json(words), body)
        return Message(to_records(answer.to_json(), upload), reply_to=message)

    return app


def server_app(run: Callable[[Grid, Context], None]) -> ServerApp:
    """A ServerApp that does that."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        run(grid, context)

    return app


@functools.lru_cache(maxsize=256)
def party_at(folder: str) -> Party:
    """The party of a folder, read once a process."""
    return Party(Path(folder))


def _folder(context: Context) -> Path:
    """Where this node's client keeps its things; prepared on its first message if nobody did before."""
    config = context.node_config
    if "folder" in config:
        return Path(str(config["folder"]))
    if "partition-id" not in config:
        raise ConfigError(
            "this node does not know which client it is. Start it by `fedlowrank join`, or give it --node-config "
            "'folder=\"...\"' or 'partition-id=0'"
        )
    made, client = _from_run_config(context), int(config["partition-id"])
    state = Path(str(config.get("state", Path.home() / ".fedlowrank")))
    digest = hashlib.blake2b(json.dumps(sections(made.to_dict())).encode(), digest_size=6).hexdigest()
    # one node may serve many runs, of experiments that bear one name
    folder = state / f"{made.name}-{digest}" / f"client-{client}"
    if not (folder / "party.json").exists():
        prepare(folder, made, client, made.shares())
    return folder


def _from_run_config(context: Context) -> ExperimentConfig:
    text = context.run_config.get("experiment")
    if not isinstance(text, str):
        raise ConfigError("the app's config holds no experiment; make the app by `fedlowrank app FILE.toml`")
    return ExperimentConfig.parse(json.loads(text))


def _serve(grid: Grid, context: Context) -> None:
    env = os.environ
    tables = json.loads(Path(env[EXPERIMENT]).read_text()) if EXPERIMENT in env else None
    made = _from_run_config(context) if tables is None else ExperimentConfig.parse(tables)
    default = f"runs/{made.name}/{made.default_method}-s{made.run.seed}"
    out = Path(env.get(OUT) or str(context.run_config.get("folder") or default))
    keys = None
    if NODES in env:
        keys = {int(n): int(c) for n, c in json.loads(Path(env[NODES]).read_text()).items()}
    say = _speaker(Path(env[LOG]) if LOG in env else None)
    try:
        if RunFolder.is_failed_start(out):
            RunFolder.move_aside(out)
        log = out.with_name(f"{out.name}.audit.jsonl")
        with as_checkpoint_error(f"cannot make {out.parent}"):
            out.parent.mkdir(parents=True, exist_ok=True)
        drive(GridTransport(grid), made, out, say=say, resume=RunFolder.has_begun(out), keys=keys, audit=log)
    except FedlowrankError as error:
        say(f"error: {error}")
        raise
    say("finished")


def _speaker(log: Path | None) -> Say:
    def say(text: str) -> None:
        print(f"fedlowrank: {text}", flush=True)
        if log is not None:
            with log.open("a") as file:
                # one line, for whoever reads the file takes some lines for the end of the run
                file.write(f"{time.strftime('%H:%M:%S')} {text.replace(chr(10), ' | ')}\n")

    return say


client = client_app(_folder)
server = server_app(_serve)


def simulation(
    made: ExperimentConfig,
    out: Path,
    clients: Path,
    say: Say,
    *,
    resume: bool = False,
    config: Mapping[str, Any] | None = None,
) -> None:
    """Run an experiment in Flower's simulation.

    Args:
        made: the experiment.
        out: run folder.
        clients: folder of the clients' folders.
        say: tells a person what is worth knowing.
        resume: go on from the last checkpoint.
        config: see :func:`.drive.drive`.

    Raises:
        ConfigError: if Ray is missing.
        FedlowrankError: as :func:`.drive.drive`.
    """
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("Flower's simulation needs Ray: pip install 'fedlowrank[network-simulation]'")
    from flwr.simulation import run_simulation

    shares, count = made.shares(), clients_of(made)
    for i in range(count):
        prepare(clients / str(i), made, i, shares)
    failed: list[FedlowrankError] = []

    def run(grid: Grid, context: Context) -> None:
        del context
        try:
            # here nobody can promise more than there is
            own = [len(data.train) for data in shares.data]
            drive(
                GridTransport(grid),
                made,
                out,
                say=say,
                resume=resume,
                progress=True,
                config=config,
                promised=own,
            )
        except FedlowrankError as error:
            # Flower would wrap it in one of its own
            failed.append(error)

    app = client_app(lambda context: clients / str(context.node_config["partition-id"]))
    resources: dict[str, Any] = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server_app(run), app, count, backend_config=resources)
    if failed:
        raise failed[0]
