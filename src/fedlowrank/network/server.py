"""The server's half: an engine whose clients are elsewhere.

One wave of messages a round. The order to a client carries its download, the stamp of the state it builds on (which acknowledges
its last reply), and asks it to evaluate what the round before came to; so evaluation costs no wave of its own.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

from ..config.network_settings import Limits, NetworkSettings
from ..core import tree
from ..core.errors import FedlowrankError
from ..core.method import ClientInfo, Task
from ..data.federation import Federation
from ..engines.base import AnyMethod, ClientJob, ClientResult, Engine
from ..simulation.evaluation import ClientEvaluation
from ..training.trainer import Meter
from .answers import HEADER, check_counts, check_evaluation, read_answer, steps_of
from .audit import Audit
from .messages import Answer, Order, plain
from .registry import Roster, StrangerError
from .silence import Silence
from .spool import Spool
from .transport import LOOK, PATIENCE, Delivery, Exchange, Parcel, Transport
from .validation.norms import Measured, NormBound, measure
from .validation.uploads import Bans, Refused, Templates, inspect, most_bytes

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
        sizes: by how many examples each client is weighted in this round, whoever joins in the meantime.
        bound: compares the norms of updates.
        silence: clients that let orders pass without a reply.
        excluded: clients that take no part, with the reason.
        spool: uploads of the round.
        branch: how often the run went back to an earlier checkpoint.
        refusals: round, client and reason of every refused reply.
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
    others: list[ClientJob] = dataclasses.field(default_factory=list)
    sizes: tuple[int, ...] = ()
    bound: NormBound = dataclasses.field(default_factory=lambda: NormBound(Limits().update_ratio))
    silence: Silence = dataclasses.field(default_factory=lambda: Silence(0))
    excluded: Mapping[int, str] = dataclasses.field(default_factory=dict)
    branch: int = 0
    refusals: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    sent: dict[str, int] = dataclasses.field(default_factory=lambda: {"words": 0, "down": 0, "up": 0})
    spool: Spool = dataclasses.field(default_factory=Spool, repr=False)
    _templates: Templates | None = None
    _norms: dict[int, dict[str, Measured]] = dataclasses.field(default_factory=dict)
    _capped: dict[int, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self._exchange = Exchange(self.transport, self.settings.wait, self.say)

    def run(
        self, method: AnyMethod, federation: Federation, task: Task, round: int, jobs: Sequence[ClientJob]
    ) -> Generator[ClientResult, None, None]:
        """Ask the clients of a round; who cannot be reached or is too slow is lost to it."""
        del federation  # the clients know it
        self.begin(method, task)
        outcomes: dict[int, ClientResult] = {}
        self.found, self._norms = {}, {}
        self.spool.clear()
        left, needed = list(jobs), min(self.settings.min_replies, len(jobs))
        for attempt in range(self.settings.attempts):
            if attempt:
                known = {j.client.id for j in left if self.sizes[j.client.id]}
                self._await({i for i in known if not self.bans.banned(i) and i not in self.excluded})
                left = [
                    dataclasses.replace(j, state={"stamp": 0}) if j.client.id in self.fresh else j
                    for j in left
                ]
            outcomes |= dict(self._wave(left, [] if attempt else self.others, round, last=False))
            self._compare(outcomes, round)
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
        self.bound.learn(self._norms, round)
        for job in jobs:
            outcome = outcomes[job.client.id]
            if outcome.lost is None:
                # one upload in memory at a time
                outcome = dataclasses.replace(outcome, upload=self.spool.get(job.client.id))
            yield outcome

    def begin(self, method: AnyMethod, task: Task) -> None:
        """Learn by what the replies of the next round trips are judged."""
        if self._templates is None or self._templates.task is not task:
            self._templates = Templates(method, task)

    def _compare(self, outcomes: dict[int, ClientResult], round: int) -> None:
        """Refuse the replies whose updates are too long beside the others'; this does not count towards a ban."""
        if self._templates is None:
            return
        passes = self._templates.method.passes()
        steps = {c: sum(steps_of(passes, self.roster.members[c].examples).values()) for c in self._norms}
        for client, why in self.bound.refused(self._norms, steps, round).items():
            if outcomes[client].lost is None:
                refused = Refused(client, "", why, counts=False)
                outcomes[client] = ClientResult(None, None, Meter(), lost=self.refuse(refused, round))

    def refuse(self, error: Refused, round: int) -> str:
        """Log a refused reply, keep nothing of it, and count it where it counts; returns the reason for the record."""
        client, why = error.client, plain(str(error), 1000)
        self.found.pop(client, None)
        self.audit.refused(client, round, why)
        self.refusals.append({"round": round + 1, "client": client, "reason": why})
        if error.counts and self.bans.refuse(client):
            self.say(f"client {client} is banned: {self.bans.counts[client]} of its replies were refused")
        return why

    def finish(self, jobs: list[ClientJob], round: int) -> None:
        """Tell all clients that the run is over; what they say their models are worth is found."""
        self.found = {}
        for _ in self._wave([], jobs, round, last=True):
            pass

    def meet(self, seconds: float, enough: Callable[[], bool]) -> None:
        """Ask nodes who they are until there are enough of them, or the time is up."""
        end = time.monotonic() + seconds
        while not enough() and (left := end - time.monotonic()) > 0:
            questions = self.roster.questions(self.transport.nodes())
            # new nodes are looked for while others still hash their base model
            patience = min(left, LOOK)
            admitted = [self._admit(d) for d in self._exchange.replies(questions, "hello", patience)]
            if not any(admitted) and not self._exchange.asked:
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
        capped = self.roster.capped()
        for other, why in capped.items():
            if self._capped.get(other) != why:
                self.say(why)
        self._capped = capped
        return True

    def _sitting_out(self, train: list[ClientJob], round: int) -> set[int]:
        """The clients that get no order, because they let too many pass; none of them if the round needs them."""
        pausing = {j.client.id for j in train if self.silence.sits_out(j.client.id, round)}
        if len(train) - len(pausing) < self.settings.min_replies:
            return set()
        return {client for client in self.silence.until if self.silence.sits_out(client, round)}

    def _wave(
        self, train: list[ClientJob], watch: list[ClientJob], round: int, last: bool
    ) -> Iterator[tuple[int, ClientResult]]:
        pausing = set() if last else self._sitting_out(train, round)
        present = self.transport.nodes()
        parcels = self.roster.questions(present)
        asked: dict[int, ClientJob] = {}
        bodies: dict[int, bytes] = {}
        for job, trains in [*((j, True) for j in train), *((j, False) for j in watch)]:
            client = job.client.id
            member = self.roster.members.get(client)
            if self.bans.banned(client):
                why = f"client {client} is banned: {self.bans.counts[client]} of its replies were refused"
            elif member is None or member.node not in present:
                why = f"client {client} is not connected"
            elif client in self.excluded:
                why = f"client {client} is excluded: {self.excluded[client]}"
            elif client in pausing:
                why = (
                    f"client {client} sits out, and is asked again in round {self.silence.until[client] + 1}: it did not answer "
                    f"{self.silence.counts[client]} orders in a row (network.silent_after)"
                )
            elif not self.sizes[client]:
                # this round's federation does not know how large it is, so its reply would have no weight
                why = f"client {client} came when the round had begun"
            elif (most := self._most_bytes(job, trains, round)) is None:
                why = f"client {client} is left out: {self.refusals[-1]['reason']}"
            else:
                words = self._order(job, round, trains, last)
                if id(job.down) not in bodies:
                    bodies[id(job.down)] = tree.encode(job.down)
                body = bodies[id(job.down)]
                parcels.append(Parcel(member.node, "order", words, body, most))
                asked[member.node] = job
                self.sent["words"] += len(words)
                self.sent["down"] += len(body)
                continue
            if trains:
                yield client, ClientResult(None, None, Meter(), lost=why)
        del bodies
        training = {j.client.id for j in train}
        patience = self.settings.deadline if asked else min(self.settings.deadline, PATIENCE)
        for delivery in self._exchange.replies(parcels, f"round-{round + 1}", patience):
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
            if pause := self.silence.missed(job.client.id, round):
                why += f"; it sits out {pause} round{'s' if pause > 1 else ''} (network.silent_after)"
            if job.client.id in training:
                yield job.client.id, ClientResult(None, None, Meter(), lost=why)
            else:
                self.say(why)

    def _most_bytes(self, job: ClientJob, trains: bool, round: int) -> int | None:
        """Bytes that a reply may have; None, and its client is refused, if the method cannot work with what it would be sent."""
        if not trains or self._templates is None:
            return HEADER
        try:
            return HEADER + most_bytes(self._templates.of(job.client, job.down), self.settings.limits)
        except Refused as error:
            self.refuse(error, round)
            return None

    def _order(self, job: ClientJob, round: int, trains: bool, last: bool) -> str:
        evaluate = self.evaluate or last
        return Order(
            self.run_id, round, int(job.state["stamp"]), trains, evaluate, last, self.branch
        ).to_json()

    def _outcome(self, delivery: Delivery, job: ClientJob, round: int, trains: bool) -> ClientResult:
        """What a delivery is worth: nothing of it is believed before it has been looked at."""
        client = job.client
        lost = ClientResult(None, None, Meter())
        self.sent["words"] += len(delivery.words)
        self.sent["up"] += len(delivery.body)
        if delivery.problem:
            if delivery.gone:
                self.roster.leave(client.id)
            return dataclasses.replace(
                lost, lost=f"no reply of client {client.id}: {plain(delivery.problem)}"
            )
        self.silence.heard(client.id)
        if delivery.too_large:
            return dataclasses.replace(
                lost, lost=self.refuse(Refused(client.id, "", delivery.too_large), round)
            )
        if self._templates is None:
            raise AssertionError("a round without templates")
        try:
            answer = read_answer(delivery.words, client, self.run_id, round)
            if answer.problem:
                return dataclasses.replace(lost, lost=self._problem(answer, client))
            upload = None
            model, template = self._templates.task.model(client), None
            if trains:
                template = self._templates.of(client, job.down)
                upload = inspect(delivery.body, template, client, self.settings.limits)
            passes, trained = (
                ({}, ()) if template is None else (self._templates.method.passes(), template.trained)
            )
            check_counts(answer, passes, trained, model, self.roster.members[client.id].examples)
            if answer.evaluation is not None:
                check_evaluation(answer.evaluation, client, model)
        except Refused as error:
            return dataclasses.replace(lost, lost=self.refuse(error, round))
        # only now, for nothing of a refused reply is kept
        if answer.evaluation is not None and self.evaluate:
            self.found[client.id] = answer.evaluation
        if not trains:
            return lost
        self._norms[client.id] = measure(upload, self._templates.method.reference(job.down, client))
        self.spool.put(client.id, upload)
        return ClientResult({"stamp": round + 1}, None, Meter(answer.steps, answer.flops, answer.losses))

    def _problem(self, answer: Answer, client: ClientInfo) -> str:
        if answer.kind == "state" and self.settings.forgotten == "begin":
            self.fresh.add(client.id)
        return f"client {client.id}: {plain(answer.problem)}"
