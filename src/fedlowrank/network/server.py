"""The server's half of a run: an engine that reaches its clients by messages.

A round takes one message round trip. The order to a client carries its download and the stamp of the state
that it builds on, which acknowledges its last reply. It also asks for the evaluation of the previous round.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

from ..config.network_settings import NetworkSettings
from ..core import tree
from ..core.errors import FedlowrankError
from ..core.method import Pass, Task
from ..data.federation import Federation
from ..engines.base import AnyMethod, ClientJob, ClientResult, Engine
from ..simulation.client_metrics import Metric
from ..simulation.evaluation import ClientEvaluation
from ..training.trainer import Meter
from .account import Account
from .answers import MAX_HEADER, check_counts, check_evaluation, read_answer, steps_of
from .audit import Audit
from .backoff import Backoff
from .messages import Order, plain
from .registry import ClientRegistry, UnregisteredNodeError
from .spool import Spool
from .transport import POLL_SECONDS, REGISTRATION_WAIT, Exchange, NodeMessage, Response, Transport
from .validation.norms import NormBound, PartNorms, measure
from .validation.uploads import Blocklist, RefusedReplyError, Templates, inspect, max_upload_bytes

logger = logging.getLogger(__name__)


class NetworkError(FedlowrankError):
    """The clients of a run cannot be reached, or too few of them reply."""


def _lost(why: str, diverged: bool = False) -> ClientResult:
    return ClientResult(None, None, Meter(), lost=why, diverged=diverged)


@dataclasses.dataclass
class NetworkEngine(Engine):
    """Sends the jobs of a round to remote clients and validates their replies.

    Attributes:
        transport: carries the messages.
        registry: the registered clients.
        settings: section ``network`` of the experiment.
        account: what is stored of the clients.
        audit: log of registrations and replies.
        evaluate: whether the next round trip asks for evaluations.
        evaluations: those of the last round trip, by client.
        reset_clients: clients that start again from the initial state.
        evaluation_jobs: jobs of the clients that only evaluate in the next round.
        sizes: examples by which each client is weighted in this round.
        bytes_sent: communication volume: headers, downloads (down) and uploads (up).
        spool: uploads of the round.
        templates: the forms of the next replies; set by the run.
        metrics: that evaluations must hold besides accuracy and loss, by name; set by the run.
        compares: whether replies are refused by their norms beside those of others; under central privacy
            they are not, for whether a client counts must not depend on another one.
    """

    name = "network"
    transport: Transport = dataclasses.field(kw_only=True)
    registry: ClientRegistry = dataclasses.field(kw_only=True)
    settings: NetworkSettings = dataclasses.field(kw_only=True)
    account: Account = dataclasses.field(kw_only=True)
    audit: Audit = Audit()
    evaluate: bool = False
    evaluations: dict[int, ClientEvaluation] = dataclasses.field(default_factory=dict)
    reset_clients: set[int] = dataclasses.field(default_factory=set)
    evaluation_jobs: list[ClientJob] = dataclasses.field(default_factory=list)
    sizes: tuple[int, ...] = ()
    bytes_sent: dict[str, int] = dataclasses.field(default_factory=lambda: {"header": 0, "down": 0, "up": 0})
    spool: Spool = dataclasses.field(default_factory=Spool, repr=False)
    templates: Templates = dataclasses.field(init=False, repr=False)
    metrics: Mapping[str, Metric] = dataclasses.field(default_factory=dict)
    compares: bool = True
    _norms: dict[int, dict[str, PartNorms]] = dataclasses.field(default_factory=dict)
    _logged_caps: dict[int, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self._exchange = Exchange(self.transport, self.settings.wait)
        self.blocklist = Blocklist(self.settings.limits.ban_after, self.account.refused)
        self.bound = NormBound(self.settings.limits.update_ratio, self.account.updates)
        self.backoff = Backoff(self.settings.silent_after, self.account.silent)

    def run(
        self, method: AnyMethod, federation: Federation, task: Task, round: int, jobs: Sequence[ClientJob]
    ) -> Generator[ClientResult, None, None]:
        """Yield the result of each job; clients that are unreachable or too slow are lost for the round."""
        del method, federation, task  # the clients have them, and `templates` knows what they may reply
        results: dict[int, ClientResult] = {}
        self.evaluations, self._norms = {}, {}
        self.spool.clear()
        pending, needed = list(jobs), min(self.settings.min_replies, len(jobs))
        for attempt in range(self.settings.attempts):
            if attempt:
                pending = self._prepare_attempt(pending)
            others = [] if attempt else self.evaluation_jobs
            results |= dict(self._round_trip(pending, others, round, last=False))
            if self.compares:
                self._check_norms(results, round)
            pending = [j for j in jobs if results[j.client.id].lost is not None]
            good = len(jobs) - len(pending)
            if good >= needed:
                break
            reasons = "; ".join(sorted({r.lost for r in results.values() if r.lost}))
            logger.info("round %d: %d good replies, %d are needed: %s", round + 1, good, needed, reasons)
        else:
            raise NetworkError(
                f"round {round + 1} was asked for {self.settings.attempts} times and never brought "
                f"{needed} good replies of {len(jobs)} clients: {reasons}. Fix the cause and resume, or "
                "lower network.min_replies."
            )
        self.bound.learn(self._norms, round)
        for job in jobs:
            result = results[job.client.id]
            if result.lost is None:
                # one upload in memory at a time
                result = dataclasses.replace(result, upload=self.spool.get(job.client.id))
            yield result

    def _prepare_attempt(self, pending: list[ClientJob]) -> list[ClientJob]:
        """Wait for clients that left; those that lost their state start again."""
        known = {j.client.id for j in pending if self.sizes[j.client.id]}
        wanted = {i for i in known - self.account.excluded.keys() if not self.blocklist.is_blocked(i)}
        nodes = self.transport.nodes
        self.wait_for_clients(self.settings.wait, lambda: wanted <= self.registry.reachable(nodes()))
        return [
            dataclasses.replace(j, state={"stamp": 0}) if j.client.id in self.reset_clients else j
            for j in pending
        ]

    def _check_norms(self, results: dict[int, ClientResult], round: int) -> None:
        """Refuse replies with outlying update norms; they do not count towards the blocklist."""
        passes = self.templates.method.local_passes()
        examples = {c: self.registry.registered[c].examples for c in self._norms}
        steps = {c: sum(steps_of(passes, n).values()) for c, n in examples.items()}
        for client, why in self.bound.outliers(self._norms, steps, round).items():
            if results[client].lost is None:
                error = RefusedReplyError(client, why, counts=False)
                results[client] = _lost(self.refuse(error, round))

    def refuse(self, error: RefusedReplyError, round: int) -> str:
        """Log a refused reply, drop its evaluation and count it; returns the reason for the record."""
        client, why = error.client, plain(str(error), 1000)
        self.evaluations.pop(client, None)
        self.audit.refused(client, round, why)
        self.account.refusals.append({"round": round + 1, "client": client, "reason": why})
        if error.counts and self.blocklist.add_refusal(client):
            logger.info(self.blocklist.reason(client))
        return why

    def finish(self, jobs: list[ClientJob], round: int) -> None:
        """Tell all clients that the run is over, and collect their last evaluations."""
        self.evaluations = {}
        for _ in self._round_trip([], jobs, round, last=True):
            pass

    def wait_for_clients(self, seconds: float, is_enough: Callable[[], bool]) -> None:
        """Register nodes until there are enough of them, or the time is up."""
        end = time.monotonic() + seconds
        while not is_enough() and (left := end - time.monotonic()) > 0:
            requests = self.registry.registration_requests(self.transport.nodes())
            # short, so that new nodes are found while others still hash their base model
            responses = self._exchange.replies(requests, "registration", min(left, POLL_SECONDS))
            accepted = [self._register(r) for r in responses]
            if not any(accepted) and not self._exchange.pending:
                # a rejected node is not asked again at once
                time.sleep(min(left, 1.0 if requests else 0.1))

    def _register(self, response: Response) -> bool:
        """Register the client of a node; whether it was accepted."""
        before = self.registry.rejections.get(response.node)
        try:
            client = self.registry.register(response, self.transport.nodes())
        except UnregisteredNodeError as error:
            if self.registry.rejections[response.node] != before:
                self.audit.rejected(response.node, str(error))
                logger.info(str(error))
            return False
        examples = self.registry.registered[client].examples
        self.audit.registered(client, response.node, examples)
        logger.info("client %d is registered, with %d examples", client, examples)
        caps = self.registry.capped_clients()
        for why in (why for other, why in caps.items() if self._logged_caps.get(other) != why):
            logger.info(why)
        self._logged_caps = caps
        return True

    def _round_trip(
        self, train: list[ClientJob], evaluate: list[ClientJob], round: int, last: bool
    ) -> Iterator[tuple[int, ClientResult]]:
        """Send the orders of a round and yield the result of each training client as it is known."""
        paused = set() if last else self.backoff.paused(round)
        if sum(j.client.id not in paused for j in train) < self.settings.min_replies:
            # the round needs them
            paused = set()
        present = self.transport.nodes()
        messages = self.registry.registration_requests(present)
        training = {j.client.id for j in train}
        asked: dict[int, ClientJob] = {}
        payloads: dict[int, bytes] = {}
        for job in [*train, *evaluate]:
            client, trains = job.client.id, job.client.id in training
            max_bytes, why = MAX_HEADER, self._reason_to_skip(client, present, paused)
            if why is None and trains:
                try:
                    template = self.templates.of(job.client, job.down)
                    max_bytes += max_upload_bytes(template, self.settings.limits)
                except RefusedReplyError as error:
                    why = f"client {client} is left out: {self.refuse(error, round)}"
            if why is not None:
                if trains:
                    yield client, _lost(why)
                continue
            stamp = int(job.state["stamp"])
            run, branch = self.account.run, self.account.branch
            order = Order(run, round, stamp, trains, self.evaluate or last, last, branch)
            header = order.to_json()
            if id(job.down) not in payloads:
                payloads[id(job.down)] = tree.encode(job.down)
            payload = payloads[id(job.down)]
            node = self.registry.registered[client].node
            assert node is not None, "a client that is not connected is skipped"
            messages.append(NodeMessage(node, "order", header, payload, max_bytes))
            asked[node] = job
            self.bytes_sent["header"] += len(header)
            self.bytes_sent["down"] += len(payload)
        del payloads
        deadline = self.settings.deadline if asked else min(self.settings.deadline, REGISTRATION_WAIT)
        for response in self._exchange.replies(messages, f"round-{round + 1}", deadline):
            if response.kind == "registration":
                self._register(response)
                continue
            job = asked.pop(response.node)
            client = job.client.id
            result = self._check_reply(response, job, round, client in training)
            self.audit.reply(response, client, round, result.lost)
            if client in training:
                yield client, result
            elif result.lost:
                logger.info(result.lost)
        for client in (job.client.id for job in asked.values()):
            why = f"client {client} did not reply within {self.settings.deadline:g} s"
            if pause := self.backoff.record_timeout(client, round):
                why += f"; it is paused for {pause} round{'s' if pause > 1 else ''} (network.silent_after)"
            if client in training:
                yield client, _lost(why)
            else:
                logger.info(why)

    def _reason_to_skip(self, client: int, present: set[int], paused: set[int]) -> str | None:
        """Why a client gets no order, or None if it gets one."""
        registered = self.registry.registered.get(client)
        if self.blocklist.is_blocked(client):
            return self.blocklist.reason(client)
        if registered is None or registered.node not in present:
            return f"client {client} is not connected"
        if (t := self.account.excluded.get(client)) is not None:
            return f"client {client} is excluded: the run went on without it after round {t}"
        if client in paused:
            return (
                f"client {client} is paused until round {self.backoff.until[client] + 1}: it did not answer "
                f"{self.backoff.counts[client]} orders in a row (network.silent_after)"
            )
        if not self.sizes[client]:
            # this round's federation does not know its size, so its reply would have no weight
            return f"client {client} registered after the round had begun"
        return None

    def _check_reply(self, response: Response, job: ClientJob, round: int, trains: bool) -> ClientResult:
        """Validate a reply and store its upload; nothing of a refused reply is kept."""
        client = job.client
        self.bytes_sent["header"] += len(response.header)
        self.bytes_sent["up"] += len(response.payload)
        if response.problem:
            if response.disconnected:
                # its sizes stay known
                self.registry.registered[client.id].node = None
            return _lost(f"no reply of client {client.id}: {plain(response.problem)}")
        self.backoff.record_reply(client.id)
        method, limits = self.templates.method, self.settings.limits
        upload: Any = None
        passes: Mapping[str, Pass] = {}
        trained: tuple[str, ...] = ()
        try:
            if response.too_large:
                raise RefusedReplyError(client.id, response.too_large)
            answer = read_answer(response.header, client, self.account.run, round)
            if answer.problem:
                if answer.kind == "state" and self.settings.forgotten == "begin":
                    self.reset_clients.add(client.id)
                return _lost(
                    f"client {client.id}: {plain(answer.problem)}", diverged=answer.kind == "training"
                )
            model = self.templates.task.model(client)
            if trains:
                template = self.templates.of(client, job.down)
                upload = inspect(response.payload, template, client, limits)
                passes, trained = method.local_passes(), template.trained
            check_counts(answer, passes, trained, model, self.registry.registered[client.id].examples)
            if answer.evaluation is not None:
                check_evaluation(answer.evaluation, client, model, self.metrics)
        except RefusedReplyError as error:
            return _lost(self.refuse(error, round), error.not_finite)
        if answer.evaluation is not None and self.evaluate:
            self.evaluations[client.id] = answer.evaluation
        if not trains:
            return ClientResult(None, None, Meter())
        self._norms[client.id] = measure(upload, method.reference(job.down, client))
        self.spool.put(client.id, response.payload, template)
        return ClientResult({"stamp": round + 1}, None, Meter(answer.steps, answer.flops, answer.losses))
