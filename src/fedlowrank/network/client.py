"""The client runtime: answers the orders of a server from a folder of its own.

FOLDER/client.json    the number of the client, and the experiment
FOLDER/data.tree      its examples, as the experiment prepares them
FOLDER/RUN/           its states in a run, see :mod:`.client_memory`
FOLDER/RUN/model/     its model, at the end of the run
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from functools import cached_property
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from filelock import FileLock

from ..config.assembly import Shares, assemble
from ..config.experiment import ExperimentConfig
from ..core import tree
from ..core.errors import CheckpointError, ConfigError
from ..core.files import as_checkpoint_error, write_atomically, write_json
from ..core.method import Method
from ..data.dataset import ClientData, Examples
from ..data.federation import Federation
from ..engines.base import ClientJob
from ..engines.sequential import Sequential
from ..simulation.averaged_statistics import average_statistics
from ..simulation.client_metrics import choose_metrics
from ..simulation.digest import check_seal, digest_of, sealed
from ..simulation.evaluation import evaluate_client
from ..simulation.local_model import LocalModel, local_model
from ..simulation.participants import Participants
from ..simulation.preparation import check_parts, placed
from ..simulation.run_folder import versions
from ..trust.budget import LEDGER, Budget
from ..trust.protection import protect
from .client_memory import ClientMemory, ForgottenError
from .messages import Answer, Order, Registration, sections

CLIENT_FILE = "client.json"


def prepare(folder: Path, experiment: ExperimentConfig, client: int, shares: Shares) -> None:
    """Make a client's folder. The states in an existing folder stay.

    Args:
        folder: of the client.
        experiment: that it takes part in.
        client: its number.
        shares: the clients' examples; those of this client are stored.

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
    path = folder / CLIENT_FILE
    if path.exists():
        stored = _read_client_file(path)
        if stored["client"] != client or sections(stored["tables"]) != sections(tables):
            spent = (
                f" Its {LEDGER} is the account of the client's privacy: another folder begins without it."
                if (folder / LEDGER).exists()
                else ""
            )
            raise ConfigError(
                f"{folder} is the folder of client {stored['client']} of another experiment or of one that "
                "was changed, such as in run.rounds. Choose another folder, or remove it with the client's "
                f"states.{spent}"
            )
    with as_checkpoint_error(f"cannot make {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "data.tree", data)
    write_json(path, sealed(made))


def own_share(
    experiment: ExperimentConfig, client: int, clients: int, data: Path, test: Path | None = None
) -> Shares:
    """The shares of an experiment whose client has all examples of a file or folder of its own.

    The experiment's section ``split`` divides them into training, validation and test examples; ``test`` is
    the path of the test examples, if the experiment's source takes one.
    """
    tables = experiment.to_dict()
    own = {**tables["data"], "path": str(data.resolve())}
    own.pop("test", None)
    if test is not None:
        own["test"] = str(test.resolve())
    alone = {**tables, "data": own, "partition": {"kind": "iid", "clients": 1}, "concept": {}}
    shares = ExperimentConfig.parse(alone).shares()
    return place_share(shares, client, clients)


def place_share(shares: Shares, client: int, clients: int) -> Shares:
    """Shares in which one client has the first share's examples and all others have none."""
    mine = shares.data[0]
    absent = ClientData(_empty(mine.train), _empty(mine.val), _empty(mine.test))
    data = tuple(mine if i == client else absent for i in range(clients))
    return dataclasses.replace(shares, data=data, notes=())


class ClientRuntime:
    """One client of an experiment.

    Args:
        folder: made by :func:`prepare`.

    Raises:
        CheckpointError: if the folder is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        stored = _read_client_file(folder / CLIENT_FILE)
        self.client: int = stored["client"]
        self.clients: int = stored["clients"]
        self.made, self.engine = _shared(json.dumps(stored["tables"], sort_keys=True))
        self.classes = tuple(stored["classes"])
        self.is_private = self.made.run.privacy.kind != "none"
        try:
            data = (folder / "data.tree").read_bytes()
            if digest_of(data) != stored["data"]:
                raise CheckpointError(
                    f"{folder / 'data.tree'} is damaged: its digest is not the one in client.json. Run "
                    "`fedlowrank join` again with the same --data and --folder to write it again."
                )
            self.data = _unpacked(tree.decode(data))
        except OSError as error:
            raise CheckpointError(f"{folder / 'data.tree'} is missing or damaged: {error}") from error

    @cached_property
    def language(self) -> Any:
        """The base model, or None."""
        return self.made.load_language(self.classes)

    @cached_property
    def _draws(self) -> Participants:
        """How the server draws clients."""
        return Participants(self.clients, self.made.run, self.federation.key)

    @cached_property
    def budget(self) -> Budget | None:
        """The client's own account of its privacy, in a file of its folder; None where nothing is private."""
        if not self.is_private:
            return None
        run, draws = self.made.run, self._draws
        budget = Budget(run.privacy, draws.sampling, run.rounds, run.participation, seeded=False)
        budget.open(self.folder / LEDGER)
        return budget

    @cached_property
    def method(self) -> Method[Any, Any, Any, Any]:
        """The experiment's method; its updates are protected as the experiment says."""
        run, draws = self.made.run, self._draws
        method, task = self.made.build_method(self.made.default_method), self.federation.task(run.rounds)
        check_parts(method, self.federation, run.micro_batch)
        method = average_statistics(method, task, run)
        return protect(method, task, run.trust, self.budget, expected=draws.expected, system=True)

    def registration(self) -> tuple[Registration, bytes]:
        """Header and payload of its registration; under differential privacy without its data's sizes."""
        sizes = 1, 0, 0
        if not self.is_private:
            sizes = len(self.data.train), len(self.data.val), len(self.data.test)
        header = Registration(
            self.client,
            sizes[0],
            sizes[1:],
            sections(self.made.to_dict()),
            "" if self.language is None else self.language.loaded.digest,
            versions(),
        )
        form = {
            "x": _empty(self.data.train).inputs,
            "y": _empty(self.data.train).y,
            "classes": list(self.classes),
        }
        return header, tree.encode(form)

    def answer(self, order: Order, payload: bytes) -> tuple[Answer, bytes]:
        """Execute an order on a download; returns header and payload of the reply.

        The client's new state is on the disk by then, but counts only once an order acknowledges it.
        """
        reply = Answer(self.client, order.run, order.round)
        try:
            # after a restart, an earlier process may still train; the system frees the lock however it ends
            with as_checkpoint_error(f"cannot lock {self.folder}"):
                lock = FileLock(self.folder / "lock").acquire()
            with lock:
                return self._answer(order, payload, reply)
        except ForgottenError as error:
            return dataclasses.replace(reply, problem=str(error), kind="state"), b""
        except CheckpointError as error:
            return dataclasses.replace(reply, problem=str(error), kind="disk"), b""

    def _answer(self, order: Order, payload: bytes, reply: Answer) -> tuple[Answer, bytes]:
        digest = hashlib.blake2b(order.to_json().encode() + payload, digest_size=16).hexdigest()
        memory = ClientMemory(self.folder / _run_name(order.run), self.made.run.keep_checkpoints)
        before = memory.answered(digest)
        if before is not None:
            return Answer.from_json(before[0]), before[1]
        newest, branch = max(memory.stamps, default=0), memory.branch
        # a state that is missing is reported below
        old = order.round + 1 < newest and order.stamp in (0, *memory.stamps)
        if order.branch < branch or (order.branch == branch and old):
            why = f"an order of round {order.round + 1} came when one of round {newest} had been answered"
            return dataclasses.replace(reply, problem=why, kind="other"), b""
        state, method, down = memory.at(order.stamp), self.method, tree.decode(payload)
        federation = self.federation
        task, info = federation.task(self.made.run.rounds), federation.infos[self.client]
        if state is None:
            state = self.engine.boundary(method.client_init(task, info))
        if order.evaluate or order.last:
            before_last = max(order.round - 1, 0)
            here = local_model(method, federation, task, self.engine, state, info, before_last, down=down)
            if order.evaluate and not self.is_private:
                metrics = choose_metrics(self.made.run.metrics, self.data.train, task.classes, task.loss)
                found = evaluate_client(here, self.data, metrics, task.loss)
                reply = dataclasses.replace(reply, evaluation=found)
            if order.last:
                self._write_model(memory.folder / "model", here, order.round)
        if not order.train:
            return reply, b""
        if (budget := self.budget) is not None and budget.is_local:
            if not budget.allowed([self.client], order.round):
                return dataclasses.replace(reply, problem=budget.reason(), kind="other"), b""
            if newest:
                budget.require(newest - 1)
            clip = float(self.made.run.clipping.norm or 0.0)
            budget.charge(order.round, clip, [self.client])
        outcome = next(
            iter(self.engine.run(method, federation, task, order.round, [ClientJob(state, down, info)]))
        )
        if outcome.error is not None:
            why = "its training failed" if self.is_private else str(outcome.error)
            return dataclasses.replace(reply, problem=why, kind="training"), b""
        if not self.is_private:
            # all of it tells of the client's data
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
        """The federation as a client sees it: its own examples, and only the number of other clients."""
        shares = place_share(Shares((self.data,), self.classes, (), self.language), self.client, self.clients)
        return placed(assemble(self.made, shares, here=frozenset({self.client})), self.made.run)

    def _write_model(self, folder: Path, here: LocalModel, round: int) -> None:
        params = {n: t.detach().cpu().contiguous() for n, t in here.personal().items()}
        with as_checkpoint_error(f"cannot make {folder}"):
            folder.mkdir(exist_ok=True)
        write_atomically(folder / "model.safetensors", safetensors.torch.save(params))
        if self.language is not None:
            self.language.write_one(folder / "adapter", here.personal(), round, self.client)


def _run_name(run: str) -> str:
    """The name of a run's folder; refuses a path, because the server chooses the name."""
    if not (run.isalnum() and run.isascii() and len(run) <= 64):
        raise ConfigError(f"the server calls its run {run[:80]!r}, which is not a valid name")
    return run


@functools.lru_cache(maxsize=16)
def _shared(tables: str) -> tuple[ExperimentConfig, Sequential]:
    """The experiment and the engine, which the clients of one process share."""
    made, engine = ExperimentConfig.parse(json.loads(tables)), Sequential()
    engine.micro_batch = made.run.micro_batch
    return made, engine


def _read_client_file(path: Path) -> dict[str, Any]:
    try:
        stored: dict[str, Any] = json.loads(path.read_text())
        check_seal(stored, path)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path.parent} is not a client's folder: it holds no client.json") from error
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error!r}") from error
    return stored


def _packed(data: ClientData) -> dict[str, Any]:
    parts = {
        s: {"x": e.inputs, "y": e.y}
        for s, e in (("train", data.train), ("val", data.val), ("test", data.test))
    }
    return {**parts, "notes": list(data.notes), "quarter_turns": data.quarter_turns}


def _unpacked(stored: dict[str, Any]) -> ClientData:
    train, val, test = (Examples(stored[s]["x"], stored[s]["y"]) for s in ("train", "val", "test"))
    return ClientData(train, val, test, tuple(stored["notes"]), stored["quarter_turns"])


def _empty(examples: Examples) -> Examples:
    """Zero examples of the same form."""
    return examples.take(torch.arange(0))
