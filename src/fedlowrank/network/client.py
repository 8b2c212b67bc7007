"""A client's half: its examples and its memory in a folder of its own, and an answer to every order of the server.

FOLDER/party.json     which client of which experiment it is
FOLDER/data.tree      its examples, as the experiment prepares them
FOLDER/RUN/           what it remembers of a run, see :mod:`.memory`
FOLDER/RUN/model/     at the end: its own model
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import json
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from ..config.assembly import Shares, assemble
from ..config.experiment import ExperimentConfig
from ..core import tree
from ..core.errors import CheckpointError, ConfigError
from ..core.files import as_checkpoint_error, write_atomically, write_json
from ..data.dataset import ClientData, Examples
from ..data.federation import Federation
from ..engines.base import ClientJob
from ..engines.sequential import Sequential
from ..simulation.digest import check_seal, digest_of, sealed
from ..simulation.evaluation import LocalModel, evaluate_client, local_model
from ..simulation.run import placed
from ..simulation.run_folder import versions
from .client_memory import ForgottenError, Memory
from .messages import Answer, Hello, Order, sections


def prepare(folder: Path, experiment: ExperimentConfig, client: int, shares: Shares) -> None:
    """Make a client's folder; one that exists keeps what it remembers.

    Args:
        folder: of the client.
        experiment: that it takes part in.
        client: which of its clients.
        shares: its examples at that place.

    Raises:
        ConfigError: if the folder is of another client or experiment.
        CheckpointError: if it cannot be written.
    """
    data, tables = tree.encode(_packed(shares.data[client])), experiment.to_dict()
    made = {
        "client": client,
        "tables": tables,
        "classes": list(shares.classes),
        "clients": len(shares.data),
        "data": digest_of(data),
    }
    path = folder / "party.json"
    if path.exists():
        found = _party(path)
        if found["client"] != client or sections(found["tables"]) != sections(tables):
            raise ConfigError(
                f"{folder} is the folder of client {found['client']} of another experiment or of one that was changed. "
                "Choose another folder, or remove it with all that the client remembers."
            )
    with as_checkpoint_error(f"cannot make {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "data.tree", data)
    write_json(path, sealed(made))


def own_share(
    experiment: ExperimentConfig, client: int, clients: int, data: Path, test: Path | None = None
) -> Shares:
    """The shares of an experiment in which one client brings all examples of a file or folder of its own.

    The examples are divided into training, validation and test by the experiment's section ``split``.

    Args:
        experiment: that the client takes part in.
        client: who brings them.
        clients: how many clients there are.
        data: where they lie, in the form of the experiment's source.
        test: where its test examples lie, if the source takes such a path.
    """
    tables = experiment.to_dict()
    own = {**tables["data"], "path": str(data.resolve())}
    own.pop("test", None)
    if test is not None:
        own["test"] = str(test.resolve())
    alone = {**tables, "data": own, "partition": {"kind": "iid", "clients": 1}, "concept": {}}
    found = ExperimentConfig.parse(alone).shares()
    return elsewhere(found, client, clients)


def elsewhere(shares: Shares, client: int, clients: int) -> Shares:
    """Shares of which only the first is known, put in that client's place among others without examples."""
    mine = shares.data[0]
    absent = ClientData(_none(mine.train), _none(mine.val), _none(mine.test))
    data = tuple(mine if i == client else absent for i in range(clients))
    return dataclasses.replace(shares, data=data, notes=())


class Party:
    """One client.

    Args:
        folder: made by :func:`prepare`.

    Raises:
        CheckpointError: if the folder is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        stored = _party(folder / "party.json")
        self.client = int(stored["client"])
        self.clients = int(stored["clients"])
        self.made, self.engine = _shared(json.dumps(stored["tables"], sort_keys=True))
        self.classes = tuple(stored["classes"])
        self.method = self.made.build_method(self.made.default_method)
        try:
            data = (folder / "data.tree").read_bytes()
            if digest_of(data) != stored["data"]:
                raise CheckpointError(
                    f"{folder / 'data.tree'} is damaged: its digest is not the one in party.json. Run `fedlowrank join` again "
                    "with the same --data and --folder to write it anew."
                )
            self.data = _unpacked(tree.decode(data))
        except (OSError, tree.TreeError, LookupError, TypeError) as error:
            raise CheckpointError(f"{folder / 'data.tree'} is missing or damaged: {error}") from error

    @cached_property
    def language(self) -> Any:
        """The base model, or None."""
        return self.made.load_language(self.classes)

    def hello(self) -> tuple[Hello, bytes]:
        """Who it is, and the form of its examples."""
        words = Hello(
            self.client,
            len(self.data.train),
            (len(self.data.val), len(self.data.test)),
            sections(self.made.to_dict()),
            "" if self.language is None else self.language.loaded.digest,
            versions(),
        )
        form = {
            "x": _none(self.data.train).inputs,
            "y": _none(self.data.train).y,
            "classes": list(self.classes),
        }
        return words, tree.encode(form)

    def answer(self, order: Order, body: bytes) -> tuple[Answer, bytes]:
        """Do what the server asks.

        Args:
            order: its words.
            body: the bytes of the download.

        Returns:
            Words and bytes of the reply. The client's new state is on the disk by then, but does not count before an order
            acknowledges it.
        """
        reply = Answer(self.client, order.run, order.round)
        try:
            with _alone(self.folder):
                return self._answer(order, body, reply)
        except ForgottenError as error:
            return dataclasses.replace(reply, problem=str(error), kind="state"), b""
        except CheckpointError as error:
            return dataclasses.replace(reply, problem=str(error), kind="disk"), b""

    def _answer(self, order: Order, body: bytes, reply: Answer) -> tuple[Answer, bytes]:
        digest = hashlib.blake2b(order.to_json().encode() + body, digest_size=16).hexdigest()
        memory = Memory(self.folder / _run_name(order.run), self.made.run.keep_checkpoints)
        before = memory.answered(digest)
        if before is not None:
            return Answer.from_json(before[0]), before[1]
        newest, branch = max(memory.stamps, default=0), memory.branch
        # a server that goes by a state which is no longer here is told so below
        old = order.round + 1 < newest and order.stamp in (0, *memory.stamps)
        if order.branch < branch or (order.branch == branch and old):
            why = f"an order of round {order.round + 1} came when one of round {newest} had been answered"
            return dataclasses.replace(reply, problem=why, kind="other"), b""
        state, method, down = memory.at(order.stamp), self.method, tree.decode(body)
        federation = self.federation
        task, info = federation.task(self.made.run.rounds), federation.infos[self.client]
        if state is None:
            state = self.engine.boundary(method.client_init(task, info))
        if order.evaluate or order.last:
            before_last = max(order.round - 1, 0)
            here = local_model(method, federation, task, self.engine, state, info, before_last, down=down)
            if order.evaluate:
                reply = dataclasses.replace(reply, evaluation=evaluate_client(here, self.data))
            if order.last:
                self._write_model(memory.folder / "model", here, order.round)
        if not order.train:
            return reply, b""
        outcome = next(
            iter(self.engine.run(method, federation, task, order.round, [ClientJob(state, down, info)]))
        )
        if outcome.error is not None:
            return dataclasses.replace(reply, problem=str(outcome.error), kind="training"), b""
        meter = outcome.meter
        reply = dataclasses.replace(
            reply, steps=meter.steps, flops=int(meter.flops), losses=dict(meter.losses)
        )
        # a method whose clients send nothing replies all the same
        upload = tree.encode(outcome.upload)
        memory.propose(
            order.stamp, order.round + 1, outcome.state, upload, digest, reply.to_json(), order.branch
        )
        return reply, upload

    @cached_property
    def federation(self) -> Federation:
        """The federation as a client sees it: its own examples, and of the others only how many clients there are."""
        shares = elsewhere(Shares((self.data,), self.classes, (), self.language), self.client, self.clients)
        return placed(assemble(self.made, shares, here=frozenset({self.client})), self.made.run)

    def _write_model(self, folder: Path, here: LocalModel, round: int) -> None:
        params = {n: t.detach().cpu().contiguous() for n, t in here.personal().items()}
        with as_checkpoint_error(f"cannot make {folder}"):
            folder.mkdir(exist_ok=True)
        write_atomically(folder / "model.safetensors", safetensors.torch.save(params))
        if self.language is not None:
            self.language.write_one(folder / "adapter", here.personal(), round, self.client)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process at a time: where a server was started again, one of before may still train for it."""
    with as_checkpoint_error(f"cannot lock {folder}"):
        file = (folder / "lock").open("w")
    with file:
        with as_checkpoint_error(f"cannot lock {folder}"):
            # let go when the file is closed, however the process ends
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _run_name(run: str) -> str:
    """The folder of a run; the server names it, and may name nothing else on this disk."""
    if not (run.isalnum() and run.isascii() and len(run) <= 64):
        raise ConfigError(f"the server calls its run {run[:80]!r}, which is no name of a run")
    return run


@functools.lru_cache(maxsize=16)
def _shared(tables: str) -> tuple[ExperimentConfig, Sequential]:
    """What clients of one process have in common: the experiment, and an engine, which finds once what a step costs."""
    made, engine = ExperimentConfig.parse(json.loads(tables)), Sequential()
    engine.micro_batch = made.run.micro_batch
    return made, engine


def _party(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        check_seal(found, path)
        sound = isinstance(found["client"], int) and isinstance(found["tables"], dict)
        sound = sound and isinstance(found["clients"], int) and isinstance(found["classes"], list)
        sound = sound and isinstance(found["data"], str)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path.parent} is not a client's folder: it holds no party.json") from error
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error!r}") from error
    if not sound:
        raise CheckpointError(f"{path} is damaged: it does not name a client and an experiment")
    return found


def _packed(data: ClientData) -> dict[str, Any]:
    parts = {
        s: {"x": e.inputs, "y": e.y}
        for s, e in (("train", data.train), ("val", data.val), ("test", data.test))
    }
    return {**parts, "notes": list(data.notes), "quarter_turns": data.quarter_turns}


def _unpacked(stored: dict[str, Any]) -> ClientData:
    train, val, test = (Examples(stored[s]["x"], stored[s]["y"]) for s in ("train", "val", "test"))
    return ClientData(train, val, test, tuple(stored["notes"]), stored["quarter_turns"])


def _none(examples: Examples) -> Examples:
    """No example, of the same form."""
    return examples.take(torch.arange(0))
