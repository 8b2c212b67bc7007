"""The server's half: an engine whose clients are elsewhere, and a run that keeps of them only what they acknowledged.

One wave of messages a round. The order to a client carries its download, the stamp of the state it builds on (which acknowledges
its last reply), and asks it to evaluate what the round before came to; so evaluation costs no wave of its own.
"""

from __future__ import annotations

import dataclasses
import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from .. import tree
from ..data.federation import Federation
from ..engine.base import AnyMethod, Engine, Job, Outcome
from ..engine.run import Run, RunSettings
from ..errors import ConfigError, FedlowrankError
from ..evaluate import SPLITS, ClientEvaluation, Evaluation, together
from ..method import ClientInfo, Reply, ServerView, Task
from ..record import RoundRecord
from ..train import Meter
from .audit import Audit
from .messages import Answer, MessageError, Order, plain
from .roster import Roster, StrangerError
from .settings import NetworkSettings
from .transport import Delivery, Parcel, Transport, exchange
from .trust import Bans, Refused, Templates, inspect, update_or_name

WORDS = 1 << 20
"""Bytes of the words of an answer at most."""

MOST = 10**30
"""Of anything that a client counts: far above what it can be, and far below what a float cannot hold."""

Say = Callable[[str], None]


class NetworkError(FedlowrankError):
    """The clients of a run cannot be reached, or too few of them reply."""


@dataclasses.dataclass
class Remote(Engine):
    """Clients that are reached by messages.

    Attributes:
        transport: carries them.
        roster: who is there.
        settings: how to deal with them.
        run_id: names the run to the clients.
        bans: who takes no further part.
        say: tells a person what is worth knowing.
        audit: log of who registered, and of every reply.
        evaluate: whether the next wave asks what the models are worth.
        found: what clients found out of that, in the last wave.
        fresh: clients whose state is to be begun anew.
        others: everyone's download, for those who do not train in a round.
        sizes: training examples of all clients, as the federation has them in this round, whoever joins in the meantime.
        sent: bytes of words and bodies sent and received, by what they were.
    """

    name = "network"
    transport: Transport = dataclasses.field(kw_only=True)
    roster: Roster = dataclasses.field(kw_only=True)
    settings: NetworkSettings = dataclasses.field(kw_only=True)
    run_id: str = dataclasses.field(kw_only=True)
    bans: Bans = dataclasses.field(kw_only=True)
    say: Say = dataclasses.field(kw_only=True, repr=False)
    audit: Audit = Audit()
    evaluate: bool = False
    found: dict[int, ClientEvaluation] = dataclasses.field(default_factory=dict)
    fresh: set[int] = dataclasses.field(default_factory=set)
    others: list[Job] = dataclasses.field(default_factory=list)
    sizes: tuple[int, ...] = ()
    sent: dict[str, int] = dataclasses.field(default_factory=lambda: {"words": 0, "down": 0, "up": 0})
    _templates: Templates | None = None

    def run(
        self, method: AnyMethod, federation: Federation, task: Task, round: int, jobs: Sequence[Job]
    ) -> Iterator[Outcome]:
        """Ask the clients of a round; who cannot be reached or is too slow is lost to it."""
        del federation  # the clients know it
        if self._templates is None or self._templates.task is not task:
            self._templates = Templates(method, task)
        outcomes: dict[int, Outcome] = {}
        self.found = {}
        left, needed = list(jobs), min(self.settings.min_replies, len(jobs))
        for attempt in range(self.settings.attempts):
            if attempt:
                known = {j.client.id for j in left if self.sizes[j.client.id]}
                self._await({i for i in known if not self.bans.banned(i)})
                left = [dataclasses.replace(j, state={"stamp": 0}) if j.client.id in self.fresh else j for j in left]
            outcomes |= dict(self._wave(left, [] if attempt else self.others, round, last=False))
            left = [j for j in jobs if outcomes[j.client.id].lost is not None]
            good = len(jobs) - len(left)
            if good >= needed:
                break
            reasons = "; ".join(sorted({o.lost for o in outcomes.values() if o.lost}))
            self.say(f"round {round + 1}: {good} good replies, {needed} are needed: {reasons}")
        else:
            raise NetworkError(
                f"round {round + 1} was asked for {self.settings.attempts} times and never brought {needed} good replies of "
                f"{len(jobs)} clients: {reasons}. Mend what is wrong and resume, or lower network.min_replies."
            )
        yield from (outcomes[j.client.id] for j in jobs)

    def finish(self, jobs: list[Job], round: int) -> None:
        """Tell all clients that the run is over; what they say their models are worth is found."""
        self.found = {}
        for _ in self._wave([], jobs, round, last=True):
            pass

    def meet(self, seconds: float, enough: Callable[[], bool]) -> None:
        """Ask nodes who they are until there are enough of them, or the time is up."""
        end = time.monotonic() + seconds
        while not enough() and (left := end - time.monotonic()) > 0:
            questions = self.roster.questions(self.transport.nodes())
            admitted = [self._admit(d) for d in exchange(self.transport, questions, "hello", left)]
            if not any(admitted):
                # whoever was turned away is not asked again at once
                time.sleep(min(left, 1.0 if questions else 0.1))

    def _await(self, clients: set[int]) -> None:
        """Give clients that are away the time to come back."""
        self.meet(self.settings.wait, lambda: clients <= self.roster.reachable(self.transport.nodes()))

    def _admit(self, delivery: Delivery) -> bool:
        known = self.roster.strangers.get(delivery.node)
        try:
            client = self.roster.admit(delivery, self.transport.nodes())
        except StrangerError as error:
            if self.roster.strangers[delivery.node] != known:
                self.audit.rejected(delivery.node, str(error))
                self.say(str(error))
            return False
        self.audit.registered(client, delivery.node, self.roster.members[client].examples)
        self.say(f"client {client} is here, with {self.roster.members[client].examples} examples")
        return True

    def _wave(self, train: list[Job], watch: list[Job], round: int, last: bool) -> Iterator[tuple[int, Outcome]]:
        present = self.transport.nodes()
        parcels = self.roster.questions(present)
        asked: dict[int, Job] = {}
        bodies: dict[int, bytes] = {}
        for job, trains in [*((j, True) for j in train), *((j, False) for j in watch)]:
            client = job.client.id
            member = self.roster.members.get(client)
            if self.bans.banned(client):
                why = f"client {client} is banned: {self.bans.counts[client]} of its replies were refused"
            elif member is None or member.node not in present:
                why = f"client {client} is not connected"
            elif not self.sizes[client]:
                # this round's federation does not know how large it is, so its reply would have no weight
                why = f"client {client} came when the round had begun"
            else:
                words = self._order(job, round, trains, last)
                if id(job.down) not in bodies:
                    bodies[id(job.down)] = tree.encode(job.down)
                body = bodies[id(job.down)]
                parcels.append(Parcel(member.node, "order", words, body))
                asked[member.node] = job
                self.sent["words"] += len(words)
                self.sent["down"] += len(body)
                continue
            if trains:
                yield client, Outcome(None, None, Meter(), lost=why)
        del bodies
        training = {j.client.id for j in train}
        for delivery in exchange(self.transport, parcels, f"round-{round + 1}", self.settings.deadline):
            if delivery.kind == "hello":
                self._admit(delivery)
                continue
            job = asked.pop(delivery.node)
            outcome = self._outcome(delivery, job, round, job.client.id in training)
            self.audit.reply(delivery, job.client.id, round, outcome.lost)
            if job.client.id in training:
                yield job.client.id, outcome
            elif outcome.lost:
                self.say(outcome.lost)
        for job in asked.values():
            why = f"client {job.client.id} did not reply within {self.settings.deadline:g} s"
            if job.client.id in training:
                yield job.client.id, Outcome(None, None, Meter(), lost=why)
            else:
                self.say(why)

    def _order(self, job: Job, round: int, trains: bool, last: bool) -> str:
        tell = None if self.roster.members[job.client.id].told == self.sizes else self.sizes
        return Order(self.run_id, round, int(job.state["stamp"]), trains, self.evaluate or last, tell, last).to_json()

    def _outcome(self, delivery: Delivery, job: Job, round: int, trains: bool) -> Outcome:
        """What a delivery is worth: nothing of it is believed before it has been looked at."""
        client = job.client
        lost = Outcome(None, None, Meter())
        self.sent["words"] += len(delivery.words)
        self.sent["up"] += len(delivery.body)
        if delivery.problem:
            if delivery.gone:
                self.roster.leave(client.id)
            return dataclasses.replace(lost, lost=f"no reply of client {client.id}: {plain(delivery.problem)}")
        try:
            answer = self._answer(delivery, client, round, trains)
            if answer.problem:
                return dataclasses.replace(lost, lost=self._problem(answer, client))
            self.roster.members[client.id].told = self.sizes
            if answer.evaluation is not None and self.evaluate:
                self.found[client.id] = answer.evaluation
            if not trains:
                return lost
            if self._templates is None:
                raise AssertionError("a round without templates")
            upload = inspect(delivery.body, self._templates.of(client, job.down), client, self.settings.limits)
        except Refused as error:
            if self.bans.refuse(client.id):
                self.say(f"client {client.id} is banned: {self.bans.counts[client.id]} of its replies were refused")
            return dataclasses.replace(lost, lost=plain(str(error), 1000))
        meter = Meter(answer.steps, answer.flops, answer.losses)
        return Outcome({"stamp": round + 1}, upload, meter)

    def _answer(self, delivery: Delivery, client: ClientInfo, round: int, trains: bool) -> Answer:
        if len(delivery.words) > WORDS:
            raise Refused(client.id, "", f"its words take more than {WORDS} bytes")
        try:
            answer = Answer.from_json(delivery.words)
        except MessageError as error:
            raise Refused(client.id, "", str(error)) from error
        expected = (client.id, self.run_id, round)
        if (answer.client, answer.run, answer.round) != expected:
            raise Refused(client.id, "", f"it answers {(answer.client, answer.run, answer.round)} and not {expected}")
        passes = self._templates.method.passes() if trains and self._templates is not None else {}
        counted = 0 <= answer.steps <= MOST and 0 <= answer.flops <= MOST and answer.losses.keys() <= passes.keys()
        if not counted or not all(map(math.isfinite, answer.losses.values())):
            raise Refused(client.id, "", "it counts steps or losses that cannot be")
        if answer.evaluation is not None and not sound(answer.evaluation):
            raise Refused(client.id, "", "what it says its models are worth cannot be")
        return answer

    def _problem(self, answer: Answer, client: ClientInfo) -> str:
        member = self.roster.members[client.id]
        if answer.kind == "roster":
            member.told = None
        if answer.kind == "state" and self.settings.forgotten == "begin":
            self.fresh.add(client.id)
        return f"client {client.id}: {plain(answer.problem)}"


def sound(found: ClientEvaluation) -> bool:
    """Whether an evaluation says of each of its series what can be said of one."""
    accuracy, risk, parameters = found.accuracy, found.risk, found.parameters
    return (
        len(accuracy) > 0
        and accuracy.keys() == risk.keys() == parameters.keys()
        and all(table.keys() == set(SPLITS) for table in (*accuracy.values(), *risk.values()))
        and all(v is None or 0 <= v <= 1 for table in accuracy.values() for v in table.values())
        and all(0 <= n <= MOST for n in parameters.values())
        # a loss and a route may be NaN, of a model whose training diverged
        and not any(p < 0 or p > 1 for p in found.routes or ())
    )


class NetworkRun(Run):
    """A run whose clients keep their own states; of each only the stamp of the one it builds on is known here.

    Args:
        method: what to run.
        settings: the protocol; checkpoints are made every round, for what is acknowledged must be on the disk.
        engine: how the clients are reached; they have introduced themselves.
        federation: as the roster has it.
    """

    engine: Remote

    def __init__(self, method: AnyMethod, federation: Federation, settings: RunSettings, engine: Remote) -> None:
        if settings.keep_best:
            raise ConfigError(
                "run.keep_best: over a network a round's evaluation is known when the next round is over, and the state of "
                "the best is gone by then; leave it out"
            )
        super().__init__(method, federation, settings, engine)

    def state_of(self, info: ClientInfo) -> Any:
        """The stamp of the state that a client builds on."""
        return self.state.clients.get(info.id, {"stamp": 0})

    def step(self, losses: Any = None) -> RoundRecord:
        """One round, one wave."""
        self._prepare()
        record = super().step(losses)
        for client in self.engine.fresh:
            self.engine.say(f"client {client} has lost its state, and begins anew")
            # unless it did so in this round already, from the next one on it is as one that never took part
            if self.state.clients.get(client) != {"stamp": self.round}:
                clients = self.state.clients | {client: {"stamp": 0}}
                self.state = dataclasses.replace(self.state, clients=clients)
                self.unsaved.add(client)
        self.engine.fresh.clear()
        return record

    def updated(self, replies: Iterable[Reply[Any]], view: ServerView) -> tuple[Any, dict[str, str]]:
        """The server's next state without the replies that nothing can be computed from; to leave one out, all are needed."""
        server, dropped = update_or_name(self.method, self.state.server, list(replies), view)
        for client in dropped:
            self.engine.bans.refuse(client)
        return self.engine.boundary(server), {str(client): why for client, why in dropped.items()}

    def evaluation(self) -> Evaluation | None:
        """Not known before the next wave."""
        return None

    def late(self) -> Evaluation | None:
        """What the clients found of the round before, on the way of the last wave."""
        found = self.engine.found
        if not found:
            return None
        # side by side can only stand what measures the same; the others are mistaken, or lie
        usual = Counter(_form(found[client]) for client in sorted(found)).most_common(1)[0][0]
        for client in sorted(found):
            if _form(found[client]) != usual:
                self.engine.say(f"client {client} measures other things than most clients; what it found is left out")
                del found[client]
        return together([found.get(info.id) for info in self.federation.infos])

    def finish(self) -> None:
        """Tell the clients, so that they take their last state for good and write their models down."""
        self._prepare()
        self.engine.finish([self._job(i) for i in self.federation.infos], self.round)

    def _prepare(self) -> None:
        federation = self.engine.roster.updated(self.federation)
        if federation is not self.federation:
            self.federation, self.task = federation, federation.task(self.settings.rounds)
        self.engine.sizes = tuple(i.examples for i in federation.infos)
        self.engine.evaluate = self.is_due()
        training = {i.id for i in self.participants(self.round)} if self.round < self.settings.rounds else set()
        due = self.engine.evaluate
        self.engine.others = [self._job(i) for i in federation.infos if due and i.id not in training]

    def _job(self, info: ClientInfo) -> Job:
        return Job(self.state_of(info), self.method.download(self.state.server, info), info)

    def clients(self) -> list[dict[str, Any]]:
        """One row a client; what classes it has is its own business."""
        known = self.engine.roster.rows()
        none = {"train": 0, "val": 0, "test": 0}
        return [{**row, **known.get(row["id"], none), "classes": {}} for row in super().clients()]


def _form(found: ClientEvaluation) -> tuple[Any, ...]:
    return tuple(found.accuracy), None if found.routes is None else len(found.routes)


def new_run_id() -> str:
    """A name for a run that no other run has."""
    return secrets.token_hex(8)
