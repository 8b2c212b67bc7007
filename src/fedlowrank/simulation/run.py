"""The only loop over rounds."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ..core import tree
from ..core.choices import check_choices
from ..core.errors import ConfigError, DataError, TaskError
from ..core.method import ClientInfo, Method, ServerView
from ..core.tree import Params
from ..data.federation import Federation
from ..engines.base import ClientJob, Engine
from ..engines.jobs import LazyJobs
from .client_store import ClientStore, LazyMapping
from .communication import Volume, lost_replies
from .evaluation import Evaluation, Evaluator
from .local_model import LocalModel, local_model
from .progress import tell
from .records import RoundRecord
from .round_results import Clock, RoundResults


@dataclass(frozen=True)
class RunSettings:
    """The protocol of a run, the same for all methods.

    Attributes:
        rounds: T, rounds of communication.
        participation: C, share of the clients that take part in a round, in (0, 1].
        unseen: share of the clients that never train, in [0, 1), drawn at random; they are evaluated like the
            others, by whatever the method does at a client that never took part.
        seed: of everything random: partition, participants, order of examples, initial values.
        engine: sequential; vectorized (clients of like shapes at once); processes (one a core); auto (the
            fastest of these by a short trial); wire (every message through bytes); or flower (Flower's
            simulation, of an experiment file).
        device: cpu, or cuda where torch finds one.
        pixels: how images are kept on the device: float32; bytes (a quarter of the memory, the same bits in
            every step; data that are no images of at most 256 values a channel stay float32, and the run says
            so); or auto (bytes on a GPU where that can be, float32 on a CPU, which takes three times as long
            to make a batch of bytes).
        micro_batch: examples of which a gradient is taken at once, to save memory; larger batches are taken
            in parts whose gradients add up to the same. None takes every batch whole.
        client_memory: MiB of clients' states in memory; where they take more, those that were longest not
            changed wait in a temporary folder. None keeps all in memory.
        threads: of torch in this process; a second one makes small models many times slower on a busy
            machine.
        evaluate_every: rounds between evaluations; the first and last round are always evaluated.
        checkpoint_every: rounds between checkpoints; the last round is always saved.
        keep_checkpoints: checkpoints that are kept, the last one included; ``fedlowrank resume RUN --round
            N`` goes back to one.
        keep_best: keep the state of the round with the best mean validation accuracy beside the last, in
            ``best/``.
        on_nan: when a client's training meets a NaN: stop the run, or drop that client's reply and go on.
        lost_replies: probability that a reply is lost on its way, to study its effect.
        target: test accuracy whose cost is reported, in (0, 1]; by default the highest that all compared runs
            reached.
        adapters: rounds after which adapter folders of server and clients are written, where the models are
            language models.
        representations: test examples whose representations are kept at the end for pictures; 0 keeps none.
    """

    rounds: int = 50
    participation: float = 1.0
    unseen: float = 0.0
    seed: int = 0
    engine: Literal["sequential", "vectorized", "processes", "auto", "wire", "flower"] = "sequential"
    device: str = "cpu"
    pixels: Literal["auto", "float32", "bytes"] = "auto"
    micro_batch: int | None = None
    client_memory: int | None = None
    threads: int = 1
    evaluate_every: int = 1
    checkpoint_every: int = 1
    keep_checkpoints: int = 3
    keep_best: bool = False
    on_nan: Literal["stop", "drop"] = "stop"
    lost_replies: float = 0.0
    target: float | None = None
    adapters: tuple[int, ...] = ()
    representations: int = 1000

    def __post_init__(self) -> None:
        check_choices(self)
        for name in ("rounds", "threads", "evaluate_every", "checkpoint_every", "keep_checkpoints"):
            if getattr(self, name) < 1:
                raise ConfigError(f"run.{name} must be >= 1; it is {getattr(self, name)}")
        if self.micro_batch is not None and (self.micro_batch < 1 or self.engine == "vectorized"):
            raise ConfigError(
                f"run.micro_batch must be >= 1, and clients at once (engine 'vectorized') take batches whole; it is "
                f"{self.micro_batch} with engine {self.engine!r}"
            )
        if self.client_memory is not None and self.client_memory < 0:
            raise ConfigError(f"run.client_memory is a number of MiB, at least 0; it is {self.client_memory}")
        if not 0 < self.participation <= 1:
            raise ConfigError(
                f"run.participation is the share of clients in a round, in (0, 1]; it is {self.participation}"
            )
        if not 0 <= self.unseen < 1:
            raise ConfigError(
                f"run.unseen is the share of clients that never train, in [0, 1); it is {self.unseen}"
            )
        if self.representations < 0:
            raise ConfigError(f"run.representations must be >= 0; it is {self.representations}")
        if not 0 <= self.lost_replies < 1:
            raise ConfigError(f"run.lost_replies is a probability in [0, 1); it is {self.lost_replies}")
        _check_device(self.device)
        if self.target is not None and not 0 < self.target <= 1:
            raise ConfigError(f"run.target is an accuracy in (0, 1], such as 0.9; it is {self.target}")


def _check_device(device: str) -> None:
    if device == "cpu":
        return
    if not re.fullmatch(r"cuda(:\d+)?", device):
        raise ConfigError(
            f"run.device is {device!r}; it must be 'cpu', 'cuda', or 'cuda:1' and so on for a further GPU"
        )
    if not torch.cuda.is_available():
        why = (
            "this build of torch is without CUDA"
            if torch.version.cuda is None
            else "nvidia-smi shows whether the driver works"
        )
        raise ConfigError(
            f"run.device is {device!r}, but torch {torch.__version__} finds no GPU here ({why}). Set run.device=cpu."
        )
    if int(device.partition(":")[2] or 0) >= (count := torch.cuda.device_count()):
        raise ConfigError(
            f"run.device is {device!r}, but torch finds {count} GPU here, cuda:0 to cuda:{count - 1}"
        )


@dataclass(frozen=True)
class State:
    """Where a run stands between two rounds.

    Attributes:
        round: rounds completed.
        server: state of the server.
        clients: states of clients that have taken part.
    """

    round: int
    server: Any
    clients: ClientStore


class Run:
    """A run and all it needs to go on.

    Args:
        method: what to run.
        federation: on whom.
        settings: the protocol.
        engine: how the clients of a round are executed.

    Attributes:
        state: where it stands; replaced as a whole, so that an interrupted round leaves the one before.
        unsaved: identifiers of clients whose state changed since it was last saved.
        unseen: identifiers of clients that never train.

    Raises:
        TaskError: if the method does not fit the federation.
    """

    def __init__(
        self,
        method: Method[Any, Any, Any, Any],
        federation: Federation,
        settings: RunSettings,
        engine: Engine,
    ) -> None:
        self.method = method
        self.federation = placed(federation, settings)
        self.settings = settings
        self.engine = engine
        engine.micro_batch = settings.micro_batch
        self.task = federation.task(settings.rounds)
        self.evaluator = Evaluator(method, self.federation, self.task, engine)
        if method.needs_classes and self.task.classes == 0:
            raise TaskError(
                f"{method.title} works on classes and cannot learn a task without them; choose another method"
            )
        self.state = State(0, engine.boundary(method.server_init(self.task)), self.new_store())
        self.unsaved: set[int] = set()
        count = round_half_up(settings.unseen * len(federation.infos))
        if count >= len(federation.infos):
            raise ConfigError(f"run.unseen = {settings.unseen} leaves no client of {count} to train")
        order = (federation.key / "unseen").numpy().permutation(len(federation.infos))
        self.unseen = frozenset(order[:count].tolist())
        # every client's state can be made: a method that does not fit says so now, not in round 7
        for info in federation.infos:
            method.client_init(self.task, info)

    @property
    def round(self) -> int:
        """Rounds completed."""
        return self.state.round

    def restore(self, state: State) -> None:
        """Go on from a saved state."""

        def move(value: Any) -> Any:
            return tree.map(lambda t: t.to(self.settings.device), value)

        moved = LazyMapping(state.clients, lambda i: move(state.clients[i]))
        clients = self.new_store() | (state.clients if self.settings.device == "cpu" else moved)
        self.state = State(state.round, move(state.server), clients)

    def new_store(self) -> ClientStore:
        """An empty one, as the settings want it."""
        limit = self.settings.client_memory
        return ClientStore(None if limit is None else limit << 20, self.settings.device)

    def state_of(self, info: ClientInfo) -> Any:
        """State of a client, a fresh one if it never took part."""
        if info.id in self.state.clients:
            return self.state.clients[info.id]
        return self.engine.boundary(self.method.client_init(self.task, info))

    def personal(self, info: ClientInfo) -> Params:
        """Parameters of the whole model that a client would use now, with its statistics of batch normalizations."""
        return self.local_model(info).personal()

    def local_model(self, info: ClientInfo) -> LocalModel:
        """How a client would infer now, and what its models are made of."""
        t = max(self.round - 1, 0)
        server, state = self.state.server, self.state_of(info)
        return local_model(
            self.method, self.federation, self.task, self.engine, state, info, t, server=server
        )

    def participants(self, round: int) -> list[ClientInfo]:
        """Who trains in a round, by a draw that is the same for every method."""
        infos = self.federation.infos
        seen = [c.id for c in infos if c.id not in self.unseen]
        count = max(1, round_half_up(self.settings.participation * len(seen)))
        generator = (self.federation.key / "participants" / round).generator()
        sampled = sorted(seen[i] for i in torch.randperm(len(seen), generator=generator)[:count].tolist())
        return [infos[i] for i in self.method.participants(sampled, seen)]

    def clients(self) -> list[dict[str, Any]]:
        """One row a client, as in ``clients.json``."""
        rows = zip(self.federation.describe(), self.federation.infos, strict=True)
        return [{**row, "cluster": i.cluster, "unseen": i.id in self.unseen} for row, i in rows]

    def step(self, losses: Mapping[str, str] | None = None) -> RoundRecord:
        """One round. The run changes only if it succeeds as a whole.

        Args:
            losses: clients whose reply is lost whatever happens, with the reason, as a record has them: to go
                over a run again that lost replies.
        """
        t, clock = self.round, Clock()
        with clock("server"):
            infos = self.participants(t)
            sent = Volume()

            def job(info: ClientInfo) -> ClientJob:
                down = self.method.download(self.state.server, info)
                sent.add(info.id, down)
                return ClientJob(self.state_of(info), down, info)

            unlucky = lost_replies(
                [i.id for i in infos], self.settings.lost_replies, self.federation.key / "lost" / t
            )
            found = RoundResults(
                infos, losses or {}, unlucky, self.settings.on_nan == "drop", self.state.clients.empty()
            )
            results = self.engine.run(self.method, self.federation, self.task, t, LazyJobs(infos, job))
            with contextlib.closing(results) as clients:
                for info in infos:
                    with clock("train"):
                        result = next(clients)
                    found.add(info, result, self.contribute)
                with clock("train"):
                    # what an engine does after the last client
                    next(clients, None)
            server = self._server_step(found, t)
        self.unsaved |= found.arrived
        # a client commits when its reply has been acknowledged: dual methods break otherwise
        self.state = State(t + 1, server, self.state.clients | found.client_states())
        down, up, meters, lost = sent.total, found.volume.total, found.meters, found.lost
        passes = dict.fromkeys(name for m in meters for name in m.losses)
        record = RoundRecord(
            round=self.round,
            participants=[i.id for i in infos],
            lost=lost,
            bytes_down=down.bytes,
            bytes_up=up.bytes,
            parameters_down=down.parameters,
            parameters_up=up.parameters,
            steps=sum(m.steps for m in meters),
            flops=sum(m.flops for m in meters),
            loss={n: _mean([m.losses[n] for m in meters if n in m.losses]) for n in passes},
        )
        return self._evaluated(record, clock)

    def contribute(self, info: ClientInfo, upload: Any) -> Any:
        """What an upload contributes to the round.

        Raises:
            RefusedError: if the server cannot use it; the round goes on without it.
        """
        return self.method.contribution(upload, info, self.state.server)

    def _server_step(self, found: RoundResults, t: int) -> Any:
        total = found.aggregator.finish()
        if total is None:
            return self.state.server
        replied = [self.federation.infos[i] for i in found.aggregator.contributed]
        return self.server_update(
            total, ServerView(self.task, t, self.federation.key / "server" / t, replied), found
        )

    def server_update(self, total: Any, view: ServerView, found: RoundResults) -> Any:
        """The server's next state, given the total of the contributions."""
        del found
        return self.engine.boundary(self.method.server_update(self.state.server, total, view))

    def is_due(self) -> bool:
        """Whether the models are evaluated now."""
        return self.round % self.settings.evaluate_every == 0 or self.round in (0, 1, self.settings.rounds)

    def start(self) -> RoundRecord:
        """The record of round 0: the models before any training."""
        return self._evaluated(RoundRecord(round=0), Clock())

    def evaluation(self) -> Evaluation | None:
        """What the models are worth now; None where it is only known later, see :meth:`late`."""
        return self.evaluator.evaluate(self.state.server, self.state_of, max(self.round - 1, 0))

    def late(self) -> Evaluation | None:
        """The evaluation of the last round but one, where :meth:`evaluation` did not know it; None if there is none."""
        return None

    def finish(self) -> None:
        """What is to be done after the last round, such as telling the clients."""

    def _evaluated(self, record: RoundRecord, clock: Clock) -> RoundRecord:
        found = None
        if self.is_due():
            with clock("evaluate"):
                found = self.evaluation()
        metrics = dict(self.method.metrics(self.state.server))
        record = dataclasses.replace(
            record,
            ranks={name: int(rank) for name, rank in metrics.pop("ranks", {}).items()},
            observed=metrics,
            seconds=clock.wall,
            cpu_seconds=clock.cpu,
        )
        return record if found is None else evaluated(record, found)


def evaluated(record: RoundRecord, found: Evaluation) -> RoundRecord:
    """The record with what was found."""
    return dataclasses.replace(
        record, accuracy=found.accuracy, risk=found.risk, routes=found.routes, parameters=found.parameters
    )


def placed(federation: Federation, settings: RunSettings, say: Callable[[str], None] = tell) -> Federation:
    """A federation on the device of a run, its images in the form that the settings ask for.

    Args:
        federation: of the run.
        settings: of the run.
        say: tells a person why images stay float32 though bytes were asked for.
    """
    if settings.pixels == "float32" or (settings.pixels == "auto" and settings.device == "cpu"):
        made = federation.unpacked() if settings.pixels == "float32" else federation
        return made.to(settings.device)
    try:
        # before they are moved, so that it is bytes that move
        federation = federation.packed()
    except DataError as error:
        # a server of clients elsewhere holds none
        if settings.pixels == "bytes" and any(len(c.train) for c in federation.clients):
            say(f"run.pixels = 'bytes', but the inputs stay float32: {error}")
    return federation.to(settings.device)


def round_half_up(x: float) -> int:
    """Nearest whole number; halves go up, so that 10 % of 25 clients are 3."""
    return int(x + 0.5)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
