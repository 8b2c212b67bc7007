"""The server's half of a run: an engine that reaches its clients by messages.

A round takes one message round trip. The order to a client carries its download and the stamp of the state
on which it builds, which acknowledges its last reply. It also asks for the evaluation of the previous round.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from statistics import median_low
from typing import Any, Self

from ..config.sections.network_section import NetworkSettings
from ..core import tree
from ..core.contract import AnyMethod, ClientInfo, Pass, Task
from ..core.errors import FedlowrankError
from ..data.federation import Federation
from ..engines.engine import ClientJob, ClientResult, Engine
from ..results.client_metrics import Metric
from ..results.measurements import ClientTable
from ..training.trainer import Meter
from .answers import MAX_HEADER, check_counts, check_evaluation, read_answer, steps_of
from .backoff import Backoff
from .messages import Answer, Order, RegistrationRequest, Step, to_one_line
from .operation.activity import MAX_DESCRIBED_ROUNDS, LastReply, UpdateShape
from .operation.grace import Grace
from .persistence.account import Account
from .persistence.audit import Audit, round_digits
from .persistence.registry import ClientRegistry, UnregisteredNodeError, describe_late_client
from .persistence.spool import Spool
from .secure.member import SecureSumError
from .secure.rounds import SecureRounds
from .secure.signing import MemberKeys
from .site.signatures import OrderSigner, payload_digest
from .transport import POLL_SECONDS, REGISTRATION_SECONDS, Exchange, NodeMessage, Response, Transport
from .validation.directions import collect_update, compute_cosines
from .validation.norm_clipping import Strikes, shorten_upload
from .validation.norms import PRODUCTS_SUFFIX, NormBound, PartNorms, Shortening, measure_norms, relative_steps
from .validation.uploads import (
    Blocklist,
    RefusedReplyError,
    Templates,
    decode_checked,
    inspect_upload,
    max_upload_bytes,
)

logger = logging.getLogger(__name__)

MAX_LAST_ORDERS = 5
"""Largest number of times that clients are told that the run is over while some of them reconnect."""

NOTICE_SECONDS = 10.0
"""Seconds within which a client must confirm that it was told why it does not take part."""


class NetworkError(FedlowrankError):
    """The clients of a run cannot be reached, or too few of them reply."""


class RunIsOverError(FedlowrankError):
    """A run is finished, and no client has to be told."""


def _make_lost_result(reason: str, has_diverged: bool = False, is_refused: bool = False) -> ClientResult:
    return ClientResult(None, None, Meter(), lost=reason, has_diverged=has_diverged, is_refused=is_refused)


def _count_no_repeats(round: int) -> dict[int, int]:
    del round
    return {}


def _keep_upload(upload: Any, client: ClientInfo) -> Any:
    del client
    return upload


def _charge_no_budget(round: int, client_ids: Collection[int]) -> None:
    del round, client_ids


@dataclasses.dataclass
class TrainingVolume:
    """Sizes of the messages that a round's training took.

    Attributes:
        bytes_down: bytes of the downloads.
        parameters_down: number of floating-point elements in the downloads.
        bytes_up: bytes of the uploads.
        parameters_up: number of floating-point elements in the uploads that can be read, or of masked numbers.
    """

    bytes_down: int = 0
    parameters_down: int = 0
    bytes_up: int = 0
    parameters_up: int = 0


@dataclasses.dataclass
class NetworkEngine(Engine):
    """Sends the jobs of a round to remote clients and validates their replies.

    Attributes:
        transport: transport that carries the messages.
        registry: registry of the clients.
        settings: section ``network`` of the experiment.
        account: stored information about the clients.
        audit: log of registrations and replies.
        signer: signer of the messages; None if keys are not checked.
        member_keys: public keys of all clients, which verify steps of secure sums; None without a roster.
        secure: secure sums of the run; None if updates are not masked; set by the run.
        evaluated: identifiers of the clients that the next round trip asks for evaluations.
        count_repeats: function that maps the index of a round to ``repeats`` of its orders; set by the run.
        evaluations: evaluations of the last round trip, by client.
        reset_clients: identifiers of the clients that start again from the initial state.
        evaluation_jobs: jobs of the clients that only evaluate in the next round.
        sizes: number of examples by which each client is weighted in this round.
        training_volume: sizes of the round's messages for training, as they were sent: repeated and refused ones count.
        spool: storage of the uploads of the round.
        templates: forms of the next replies; set by the run.
        metrics: metrics that evaluations must hold besides accuracy and loss, by name; set by the run.
        compares: whether replies with outlying norms are refused; not under central privacy,
            where the use of one client's reply must not depend on another client.
        shortens: whether long updates are shortened; not if a rule of run.robust bounds them; set by the run.
        describes: whether length and direction of updates are stored for a person to see; set by the run.
        decode: function that decompresses the upload of a client for the method; set by the run.
        charge: function that charges privacy budgets of clients before they get orders to train in a round; set by the run.
        kept_shares: remaining share of the length of each shortened update of the round, by client.
    """

    name = "network"
    transport: Transport = dataclasses.field(kw_only=True)
    registry: ClientRegistry = dataclasses.field(kw_only=True)
    settings: NetworkSettings = dataclasses.field(kw_only=True)
    account: Account = dataclasses.field(kw_only=True)
    audit: Audit = Audit()
    signer: OrderSigner | None = None
    evaluated: frozenset[int] = frozenset()
    count_repeats: Callable[[int], dict[int, int]] = _count_no_repeats
    evaluations: dict[int, ClientTable] = dataclasses.field(default_factory=dict)
    reset_clients: set[int] = dataclasses.field(default_factory=set)
    evaluation_jobs: list[ClientJob] = dataclasses.field(default_factory=list)
    sizes: tuple[int, ...] = ()
    training_volume: TrainingVolume = dataclasses.field(default_factory=TrainingVolume)
    spool: Spool = dataclasses.field(default_factory=Spool, repr=False)
    templates: Templates = dataclasses.field(init=False, repr=False)
    metrics: Mapping[str, Metric] = dataclasses.field(default_factory=dict)
    compares: bool = True
    shortens: bool = True
    describes: bool = False
    decode: Callable[[Any, ClientInfo], Any] = _keep_upload
    charge: Callable[[int, Collection[int]], None] = _charge_no_budget
    kept_shares: dict[int, float] = dataclasses.field(default_factory=dict)
    member_keys: MemberKeys | None = None
    secure: SecureRounds | None = None
    _min_members: int = 0
    _members: set[int] = dataclasses.field(default_factory=set)
    _parcels: Mapping[int, dict[str, str]] = dataclasses.field(default_factory=dict)
    _norms: dict[int, dict[str, PartNorms]] = dataclasses.field(default_factory=dict)
    _shortened_jobs: dict[int, tuple[ClientJob, Shortening]] = dataclasses.field(default_factory=dict)
    _logged_caps: dict[int, str] = dataclasses.field(default_factory=dict)
    _logged_long: set[int] = dataclasses.field(default_factory=set)
    _notified_nodes: set[int] = dataclasses.field(default_factory=set)
    _asked_nodes: dict[int, int] = dataclasses.field(default_factory=dict)
    _clients_that_answered: set[int] = dataclasses.field(default_factory=set)

    def __post_init__(self) -> None:
        self._exchange = Exchange(self.transport, self.settings.wait, self.registry.describe_node)
        self.blocklist = Blocklist(self.settings.limits.ban_after, self.account.refused)
        limits = self.settings.limits
        self.bound = NormBound(limits.refuse_ratio, self.account.updates)
        self.strikes = Strikes(limits.strikes, self.account.long)
        self.grace = Grace(self.settings.grace, self.account.seconds)
        self.backoff = Backoff(self.settings.silent_after, self.account.silent)

    def with_micro_batch(self, micro_batch: int | None) -> Self:
        """Return this engine, because clients compute gradients with settings of their own."""
        del micro_batch
        return self

    def run(
        self, method: AnyMethod, federation: Federation, task: Task, round: int, jobs: Sequence[ClientJob]
    ) -> Generator[ClientResult, None, None]:
        """Yield the result of each job; clients that are unreachable or too slow are lost for the round."""
        del method, federation, task  # the clients have them, and `templates` knows what they may reply
        results: dict[int, ClientResult] = {}
        self.evaluations, self._norms = {}, {}
        self.spool.clear()
        self._shortened_jobs = {}
        self.kept_shares, self.training_volume = {}, TrainingVolume()
        if self.secure is not None:
            yield from self._run_secure(self.secure, list(jobs), round)
            return
        pending_jobs, min_replies, reply_count = list(jobs), min(self.settings.min_replies, len(jobs)), 0
        for attempt in range(self.settings.attempts):
            if attempt:
                pending_jobs = self._prepare_attempt(pending_jobs)
            evaluation_jobs = [] if attempt else self.evaluation_jobs
            results |= dict(self._round_trip(pending_jobs, evaluation_jobs, round, min_replies - reply_count))
            if self.compares:
                self._check_norms(results, round)
            pending_jobs = [j for j in jobs if results[j.client.id].lost is not None]
            reply_count = len(jobs) - len(pending_jobs)
            if reply_count >= min_replies:
                break
            reasons = "; ".join(sorted({r.lost for r in results.values() if r.lost}))
            logger.info(
                "round %d: %d good replies, %d are needed: %s", round + 1, reply_count, min_replies, reasons
            )
        else:
            raise NetworkError(
                f"round {round + 1} was asked for {self.settings.attempts} times and never brought "
                f"{min_replies} good replies of {len(jobs)} clients: {reasons}. Fix the cause and resume, or "
                "lower network.min_replies."
            )
        used_jobs = {j.client.id: j for j in jobs if results[j.client.id].lost is None}
        shortenings = self._find_shortenings(used_jobs, round)
        self._shortened_jobs = {c: (used_jobs[c], shortening) for c, shortening in shortenings.items()}
        for job in jobs:
            client_id, result = job.client.id, results[job.client.id]
            if client_id in used_jobs:
                # only one upload is in memory at a time
                result = dataclasses.replace(result, upload=self.read_upload(client_id))
            yield result
        if self.describes:
            self._describe_updates(used_jobs, round)
        self.bound.learn(self._norms, round)

    def read_upload(self, client_id: int) -> Any:
        """Read the upload of a client whose reply is used in this round; a long update is shortened."""
        upload = self.spool.get(client_id)
        if client_id not in self._shortened_jobs:
            return upload
        job, shortening = self._shortened_jobs[client_id]
        return shorten_upload(self.decode(upload, job.client), self._find_reference(job), shortening.bounds)

    def _run_secure(self, secure: SecureRounds, jobs: list[ClientJob], round: int) -> list[ClientResult]:
        """Return the result of each job of a secure sum, which is repeated if too few clients begin it.

        Clients mask only one vector in a round, so a sum that is lost later is not repeated.
        """
        client_ids = {j.client.id for j in jobs}
        self._min_members = self._count_min_members(secure, len(jobs))
        for attempt in range(self.settings.attempts):
            if attempt:
                # a client that registers during the round takes part from the next one on
                self.wait_for_members({c for c in client_ids if self.sizes[c]}, secure)
            self._members = set()
            results = [*secure.run(self, jobs, self.account.run, self.account.branch, round)]
            if secure.contributed or len(self._members) >= self._min_members:
                return results
        reasons = "; ".join(sorted({r.lost for r in results if r.lost}))
        raise NetworkError(
            f"round {round + 1} was asked for {self.settings.attempts} times, and fewer than {self._min_members} of "
            f"{len(jobs)} clients began its secure sum: {reasons}. Start the clients and resume."
        )

    def _count_min_members(self, secure: SecureRounds, client_count: int) -> int:
        """Number of clients that must begin a secure sum; 0 if rounds without a result are accepted."""
        min_replies = min(self.settings.min_replies, client_count)
        return max(secure.min_clients, min_replies) if min_replies else 0

    def take_step(
        self, step: Step, parcels: Mapping[int, dict[str, str]], round: int
    ) -> Iterator[tuple[int, Answer | str]]:
        """Send a step of a secure sum to clients; yield the answer of each, or the reason why there is none."""
        node_ids, clients_by_node = self.transport.nodes(), dict[int, int]()
        messages, paused_ids = [], set[int]()
        if step == "announce" and self.secure is not None:
            # the later steps need every client that took the first one
            min_clients = max(self.secure.min_clients, self._min_members)
            paused_ids = self._list_paused(parcels, node_ids, round, min_clients)
        for client_id, parcel in sorted(parcels.items()):
            if (reason := self._reason_to_skip(client_id, node_ids, paused_ids)) is not None:
                yield client_id, reason
                continue
            order = Order(self.account.run, round, 0, False, False, False, self.account.branch, step, parcel)
            messages.append(self._order_message(client_id, order, b"", payload_digest(b""), MAX_HEADER))
            clients_by_node[messages[-1].node] = client_id
        deadline = self.settings.deadline
        for response in self._exchange.run_round_trip(messages, f"{step}-{round + 1}", deadline):
            if response.kind == "registration":
                self._register(response)
                continue
            client_id = clients_by_node.pop(response.node)
            self.account.sent["header"] += len(response.header)
            try:
                answer = self._read_step(response, client_id, round)
            except RefusedReplyError as error:
                answer = self.refuse(error, round)
            if isinstance(answer, Answer):
                # also of a client that refuses the round: it would do so again
                self._members.add(client_id)
            yield client_id, answer
        for client_id in clients_by_node.values():
            yield client_id, f"it did not reply within {deadline:g} s{self._count_timeout(client_id, round)}"
        if self.secure is not None and self.secure.min_clients <= len(self._members) < self._min_members:
            raise SecureSumError(
                f"{len(self._members)} clients answered, and {self._min_members} must (network.min_replies)"
            )

    def _read_step(self, response: Response, client_id: int, round: int) -> Answer | str:
        if response.problem:
            if response.disconnected:
                self.registry.registered[client_id].node = None
            return to_one_line(response.problem)
        if response.too_large:
            raise RefusedReplyError(client_id, response.too_large)
        info = self.templates.task.clients[client_id]
        return read_answer(response.header, info, self.account.run, round)

    def train_masked(
        self, jobs: Sequence[ClientJob], parcels: Mapping[int, dict[str, str]], round: int
    ) -> Mapping[int, ClientResult]:
        """Send the orders of a round of a secure sum; return the result of each client."""
        self._parcels = parcels
        try:
            return dict(self._round_trip(list(jobs), [], round, len(jobs)))
        finally:
            self._parcels = {}

    def _order_message(
        self, client_id: int, order: Order, payload: bytes, digest: str, max_bytes: int
    ) -> NodeMessage:
        """Make an order to a connected client, signed if keys are checked, and count its bytes."""
        node_id, header = self.registry.registered[client_id].node, order.to_json()
        assert node_id is not None, "a client that is not connected is skipped"
        self.account.sent["header"] += len(header)
        self.account.sent["down"] += len(payload)
        signature = "" if self.signer is None else self.signer.sign("order", client_id, header, digest)
        return NodeMessage(node_id, "order", header, payload, max_bytes, signature)

    def _find_reference(self, job: ClientJob) -> Any:
        """Return the reference with which the upload of a client is compared."""
        return self.templates.method.describe_update(job.down, job.client, self.templates.task).reference

    def _find_shortenings(self, used_jobs: Mapping[int, ClientJob], round: int) -> dict[int, Shortening]:
        """Find the updates to shorten, by client; those that are too long are counted and logged."""
        ratio = self.settings.limits.update_ratio
        if not (self.compares and self.shortens and ratio):
            return {}
        ratios = {c: 1.0 if self.strikes.is_reached(c) else ratio for c in self._norms}
        shortenings = self.bound.plan_shortenings(self._norms, ratios, self._find_reach(), ratio, round)
        shortenings = {
            client_id: shortenings[client_id] for client_id in used_jobs if client_id in shortenings
        }
        for client_id in used_jobs:
            if self.strikes.add(client_id, client_id in shortenings and shortenings[client_id].is_strike):
                logger.info(
                    "client %d is held to the usual norm: %d of its last updates were above %g times that "
                    "(network.limits.strikes)", client_id, self.strikes.after, ratio
                )  # fmt: skip
        for client_id, shortening in shortenings.items():
            self.kept_shares[client_id] = shortening.kept_share
            self.audit.log_shortening(client_id, round, shortening.length, shortening.kept_share)
            if client_id not in self._logged_long:
                self._logged_long.add(client_id)
                logger.info(
                    "round %d: the update of client %d is %.3g times as long as usual; %.3g of its length is used "
                    "(network.limits.update_ratio; with the counts in network.examples, a client with more examples "
                    "may have a longer one). Later rounds of this client are in the audit log alone.",
                    round + 1, client_id, shortening.length, shortening.kept_share
                )  # fmt: skip
        return shortenings

    def _find_reach(self) -> dict[int, float]:
        """Return the factor on the norm bound of each client that replied; see :mod:`.validation.norms`."""
        if self.registry.promised:
            return relative_steps(self._count_steps(), self._norms)
        median_size = median_low([n for n in self.sizes if n] or [1])
        return {c: min(1.0, median_size / max(1, self.sizes[c])) for c in self._norms}

    def _count_steps(self) -> dict[int, int]:
        """Steps of each client that replied, for the examples by which it is weighted, as a larger number is only a claim."""
        passes = self.templates.method.local_passes()
        return {c: sum(steps_of(passes, max(1, self.sizes[c])).values()) for c in self._norms}

    def _describe_updates(self, used_jobs: Mapping[int, ClientJob], round: int) -> None:
        """Store length and direction of the updates of a round, as they were before any was shortened."""
        by_change: dict[int, dict[str, bool]] = {c: {} for c in used_jobs}
        lengths: dict[int, float] = {}
        for part in sorted({p for norms in self._norms.values() for p in norms}):
            norms = {c: client_norms[part] for c, client_norms in self._norms.items() if part in client_norms}
            for client_id, length in self.bound.measure_lengths(part, norms, round).items():
                if client_id in used_jobs:
                    by_change[client_id][part.removesuffix(PRODUCTS_SUFFIX)] = length.by_change
                    if length.usual_norm > 0:
                        lengths[client_id] = max(lengths.get(client_id, 0.0), length.size / length.usual_norm)

        def update(client_id: int) -> Any:
            job = used_jobs[client_id]
            upload = self.decode(self.spool.get(client_id), job.client)
            return collect_update(upload, self._find_reference(job), by_change[client_id])

        shapes = {
            c: UpdateShape(
                round_digits(lengths[c]) if c in lengths else None, None if x is None else round_digits(x)
            )
            for c, x in compute_cosines(update, sorted(used_jobs)).items()
        }
        earlier_shapes = {t: length for t, length in self.account.shapes.items() if t <= round}
        earlier_shapes[round + 1] = shapes
        self.account.shapes = dict(sorted(earlier_shapes.items())[-MAX_DESCRIBED_ROUNDS:])

    def wait_for_members(self, client_ids: set[int], secure: SecureRounds) -> None:
        """If too few clients for a secure sum are connected, wait and register others; rounds would be lost meanwhile."""
        expected_ids = {
            c for c in client_ids - self.account.excluded.keys() if not self.blocklist.is_blocked(c)
        }
        min_members = self._count_min_members(secure, len(client_ids)) or secure.min_clients
        nodes, registry = self.transport.nodes, self.registry
        if len(expected_ids) >= min_members:
            self.wait_for_clients(
                self.settings.wait,
                lambda: len(expected_ids & registry.find_reachable(nodes())) >= min_members,
            )

    def _prepare_attempt(self, pending_jobs: list[ClientJob]) -> list[ClientJob]:
        """Wait for clients that left; reset the jobs of those that lost their state."""
        weighted_ids = {j.client.id for j in pending_jobs if self.sizes[j.client.id]}
        expected_ids = {
            i for i in weighted_ids - self.account.excluded.keys() if not self.blocklist.is_blocked(i)
        }
        nodes = self.transport.nodes
        self.wait_for_clients(
            self.settings.wait, lambda: expected_ids <= self.registry.find_reachable(nodes())
        )
        return [
            dataclasses.replace(j, state={"stamp": 0}) if j.client.id in self.reset_clients else j
            for j in pending_jobs
        ]

    def _check_norms(self, results: dict[int, ClientResult], round: int) -> None:
        """Refuse replies with outlying update norms; they do not count towards the blocklist."""
        for client_id, reason in self.bound.find_outliers(self._norms, self._count_steps(), round).items():
            if results[client_id].lost is None:
                error = RefusedReplyError(client_id, reason, counts=False)
                results[client_id] = _make_lost_result(self.refuse(error, round), is_refused=True)

    def refuse(self, error: RefusedReplyError, round: int) -> str:
        """Log a refused reply, drop its evaluation and count it; returns the reason for the record."""
        client_id, reason = error.client, to_one_line(str(error), 1000)
        self.evaluations.pop(client_id, None)
        self.audit.log_refusal(client_id, round, reason)
        self.account.refusals.append({"round": round + 1, "client": client_id, "reason": reason})
        if error.counts and self.blocklist.add_refusal(client_id):
            logger.info(self.blocklist.reason(client_id))
        return reason

    def finish(self, jobs: list[ClientJob], round: int) -> None:
        """Tell all clients that the run is over, and collect their last evaluations."""
        self.evaluations = {}
        self._clients_that_answered = set()
        asked_nodes: dict[int, int] = {}
        for _ in range(MAX_LAST_ORDERS):
            for _ in self._round_trip([], jobs, round, len(jobs), is_last=True):
                pass
            asked_nodes |= self._asked_nodes
            # registers clients that connected, or reconnected, during the wait for the others
            requests = self._make_registration_requests(self.transport.nodes())
            for response in (
                self._exchange.run_round_trip(requests, "registration", NOTICE_SECONDS) if requests else ()
            ):
                self._register(response)
            node_ids, registered_clients = self.transport.nodes(), self.registry.registered
            jobs = [
                job
                for job in jobs
                if (client_id := job.client.id) not in self._clients_that_answered
                and self._reason_to_skip(client_id, node_ids, set()) is None
                and asked_nodes.get(client_id) != registered_clients[client_id].node
            ]
            if not jobs:
                break
        self._tell_late_clients()

    def _tell_late_clients(self) -> None:
        """Tell the clients that registered after the last round that they took no part."""
        for client_id, registered_client in list(self.registry.registered.items()):
            if registered_client.node is not None and not self.sizes[client_id]:
                reason = describe_late_client(client_id)
                logger.info(reason)
                self.registry.notices[registered_client.node] = reason
                self.registry.permanently_rejected.add(registered_client.node)
                # it is no client of the run, also if the finished run is resumed
                del self.registry.registered[client_id]
        self.send_notices()

    def send_notices(self) -> None:
        """Tell rejected clients why they do not take part, and wait a moment until they confirm it."""
        notices = self._make_notices(self.transport.nodes())
        if notices:
            for response in self._exchange.run_round_trip(notices, "registration", NOTICE_SECONDS):
                self._register(response)

    def _make_notices(self, node_ids: set[int]) -> list[NodeMessage]:
        """Make messages to rejected clients with the reason; if keys are checked, signed and only to known keys."""
        notices = self.registry.take_notices(node_ids)
        if self.signer is not None:
            keys, digest = self.registry.keys or {}, payload_digest(b"")
            signed_notices = []
            for notice in (n for n in notices if n.node in keys):
                request = RegistrationRequest.from_json(notice.header)
                header = dataclasses.replace(request, run=self.account.run).to_json()
                signature = self.signer.sign("registration", keys[notice.node], header, digest)
                signed_notices.append(dataclasses.replace(notice, header=header, signature=signature))
            notices = signed_notices
        self._notified_nodes |= {notice.node for notice in notices}
        return notices

    def wait_for_clients(self, seconds: float, is_enough: Callable[[], bool]) -> None:
        """Register nodes until there are enough of them, or the time is up."""
        deadline = time.monotonic() + seconds
        while not is_enough() and (seconds_left := deadline - time.monotonic()) > 0:
            requests = self._make_registration_requests(self.transport.nodes())
            # short, so that new nodes are found while others still hash their base model
            responses = self._exchange.run_round_trip(
                requests, "registration", min(seconds_left, POLL_SECONDS)
            )
            results = [self._register(r) for r in responses]
            if not any(results) and not self._exchange.pending_nodes:
                # a rejected node is not asked again at once
                time.sleep(min(seconds_left, 1.0 if requests else 0.1))

    def _make_registration_requests(self, node_ids: set[int]) -> list[NodeMessage]:
        """Make requests to all present nodes that are not registered, and notices to those that were rejected.

        If keys are checked, they are signed and only sent to known keys.
        """
        requests, notices = self.registry.make_requests(node_ids), self._make_notices(node_ids)
        if self.signer is None:
            return requests + notices
        header, digest = RegistrationRequest(self.account.run).to_json(), payload_digest(b"")
        keys = self.registry.keys or {}
        signatures = {
            r.node: self.signer.sign("registration", keys[r.node], header, digest)
            for r in requests
            if r.node in keys
        }
        return [
            dataclasses.replace(r, header=header, signature=signatures[r.node])
            for r in requests
            if r.node in signatures
        ] + notices

    def _register(self, response: Response) -> bool:
        """Register the client of a node; return whether it was accepted."""
        if response.node in self._notified_nodes:
            # the node confirms that it was told why it was rejected
            self._notified_nodes.discard(response.node)
            return False
        last_rejection = self.registry.rejections.get(response.node)
        try:
            client_id = self.registry.register(response, self.transport.nodes())
        except UnregisteredNodeError as error:
            if self.registry.rejections[response.node] != last_rejection:
                self.audit.log_rejection(self.registry.find_client(response.node), str(error))
                logger.info(str(error))
            return False
        example_count = self.registry.registered[client_id].examples
        self.audit.log_registration(client_id, example_count)
        logger.info("client %d is registered, with %d examples", client_id, example_count)
        caps = self.registry.describe_capped_clients()
        for reason in (
            reason for capped_id, reason in caps.items() if self._logged_caps.get(capped_id) != reason
        ):
            logger.info(reason)
        self._logged_caps = caps
        return True

    def _round_trip(
        self,
        training_jobs: list[ClientJob],
        evaluation_jobs: list[ClientJob],
        round: int,
        min_replies: int,
        is_last: bool = False,
    ) -> Iterator[tuple[int, ClientResult]]:
        """Send the orders of a round and yield the result of each training client as soon as it is known.

        Args:
            training_jobs: jobs of the clients that train.
            evaluation_jobs: jobs of the clients that only evaluate.
            round: number of completed rounds.
            min_replies: number of good replies from which on the others are waited for only as long as :attr:`grace` allows.
            is_last: whether the run is over, in which case every client is waited for.
        """
        node_ids = self.transport.nodes()
        messages = self._make_registration_requests(node_ids)
        training_ids = {j.client.id for j in training_jobs}
        # in a secure sum, the other clients count on the masks of each client that took the first step
        asks_all = is_last or self.secure is not None
        paused_ids = (
            set() if asks_all else self._list_paused(training_ids, node_ids, round, self.settings.min_replies)
        )
        open_jobs: dict[int, ClientJob] = {}
        payloads: dict[int, tuple[bytes, str]] = {}
        repeats = self.count_repeats(round)
        for job in [*training_jobs, *evaluation_jobs]:
            client_id, is_training = job.client.id, job.client.id in training_ids
            max_bytes, reason = MAX_HEADER, self._reason_to_skip(client_id, node_ids, paused_ids)
            is_refused = self.blocklist.is_blocked(client_id) or client_id in self.account.excluded
            if reason is None and is_training and self.secure is not None:
                max_bytes += 8 * self.secure.size
            elif reason is None and is_training:
                try:
                    template = self.templates.of(job.client, job.down)
                    max_bytes += max_upload_bytes(template, self.settings.limits)
                except RefusedReplyError as error:
                    reason, is_refused = f"client {client_id} is left out: {self.refuse(error, round)}", True
            if reason is not None:
                if is_training:
                    yield client_id, _make_lost_result(reason, is_refused=is_refused)
                continue
            stamp = int(job.state["stamp"])
            run, branch = self.account.run, self.account.branch
            step: Step = "mask" if is_training and self.secure is not None else ""
            parcel = self._parcels.get(client_id, {}) if step else {}
            is_evaluated = client_id in self.evaluated
            order = Order(
                run, round, stamp, is_training, is_evaluated, is_last, branch, step, parcel, repeats
            )
            if id(job.down) not in payloads:
                encoded_download = tree.encode(job.down)
                payloads[id(job.down)] = encoded_download, payload_digest(encoded_download)
            if step and self.secure is not None:
                self.secure.bind(payloads[id(job.down)][1])
            messages.append(self._order_message(client_id, order, *payloads[id(job.down)], max_bytes))
            if is_training:
                self.training_volume.bytes_down += len(messages[-1].payload)
                self.training_volume.parameters_down += tree.numel(job.down)
            open_jobs[messages[-1].node] = job
        del payloads
        self._asked_nodes = {job.client.id: node for node, job in open_jobs.items()}
        self.charge(round, training_ids & self._asked_nodes.keys())
        deadline = self.settings.deadline if open_jobs else min(self.settings.deadline, REGISTRATION_SECONDS)
        reply_count, start_time = 0, time.monotonic()

        def limit() -> float:
            return (
                deadline
                if is_last or not open_jobs or reply_count < min_replies
                else self.grace.limit(deadline)
            )

        for response in self._exchange.run_round_trip(messages, f"round-{round + 1}", deadline, limit):
            if response.kind == "registration":
                self._register(response)
                continue
            seconds = time.monotonic() - start_time
            job = open_jobs.pop(response.node)
            client_id = job.client.id
            result = self._check_reply(response, job, round, client_id in training_ids)
            self.audit.log_reply(response, client_id, round, result.lost)
            if not is_last:
                self._remember(response, client_id, round, seconds, result.lost is None)
            reply_count += result.lost is None
            if response.disconnected:
                # it is asked again if it reconnects, even as the same node
                self._asked_nodes.pop(client_id, None)
            elif result.lost is None:
                self._clients_that_answered.add(client_id)
            if client_id in training_ids:
                yield client_id, result
            elif result.lost:
                logger.info(result.lost)
        waiting_time = f"{limit():.4g} s{' (network.grace)' if limit() < deadline else ''}"
        for client_id in (job.client.id for job in open_jobs.values()):
            reason = f"client {client_id} did not reply within {waiting_time}"
            if not is_last:
                reason += self._count_timeout(client_id, round)
            if client_id in training_ids:
                yield client_id, _make_lost_result(reason)
            else:
                logger.info(reason)

    def _list_paused(
        self, client_ids: Iterable[int], node_ids: set[int], round: int, min_replies: int
    ) -> set[int]:
        """Identifiers of the clients that get no order because they are paused; none if the round needs them."""
        paused_ids = self.backoff.list_paused(round)
        others = [c for c in client_ids if self._reason_to_skip(c, node_ids, paused_ids) is None]
        return set() if len(others) < min_replies else paused_ids

    def _count_timeout(self, client_id: int, round: int) -> str:
        """Count an order without a reply; returns the end of the reason, "" unless the client is paused."""
        pause = self.backoff.record_timeout(client_id, round)
        if not pause:
            return ""
        return f"; it is paused for {pause} round{'s' if pause > 1 else ''} (network.silent_after)"

    def _take_vector(self, response: Response, client: ClientInfo, round: int) -> ClientResult:
        """Add a masked vector; nothing else in the reply can be checked, and nothing else is used."""
        assert self.secure is not None, "masked vectors are of secure sums"
        try:
            self.secure.add(client.id, response.payload)
        except SecureSumError as error:
            raise RefusedReplyError(client.id, str(error)) from error
        self.training_volume.parameters_up += self.secure.size
        return ClientResult({"stamp": round + 1}, None, Meter())

    def _remember(
        self, response: Response, client_id: int, round: int, seconds: float, is_used: bool
    ) -> None:
        """Store when a reply arrived, its size and how long it took, for a person who monitors the run."""
        if response.problem:
            return
        size = len(response.header) + len(response.payload)
        self.account.replies[client_id] = LastReply.now(round + 1, size, seconds, is_used)
        if is_used and response.payload:
            self.grace.add(seconds)

    def _reason_to_skip(self, client_id: int, node_ids: set[int], paused_ids: set[int]) -> str | None:
        """The reason why a client gets no order, or None if it gets one."""
        registered_client = self.registry.registered.get(client_id)
        if self.blocklist.is_blocked(client_id):
            return self.blocklist.reason(client_id)
        if (exclusion := self.registry.describe_exclusion(client_id)) is not None:
            return exclusion
        if registered_client is None or registered_client.node not in node_ids:
            return f"client {client_id} is not connected"
        if client_id in paused_ids:
            return (
                f"client {client_id} is paused until round {self.backoff.until[client_id] + 1}: it did not answer "
                f"{self.backoff.counts[client_id]} orders in a row (network.silent_after)"
            )
        if not self.sizes[client_id]:
            # this round's federation does not know the client's size, so its reply would have no weight
            return f"client {client_id} registered after the round had begun"
        return None

    def _check_reply(self, response: Response, job: ClientJob, round: int, is_training: bool) -> ClientResult:
        """Validate a reply and store its upload; nothing of a refused reply is kept."""
        client = job.client
        self.account.sent["header"] += len(response.header)
        self.account.sent["up"] += len(response.payload)
        if is_training:
            self.training_volume.bytes_up += len(response.payload)
        if response.problem:
            if response.disconnected:
                # the sizes of the client stay known
                self.registry.registered[client.id].node = None
            return _make_lost_result(f"no reply of client {client.id}: {to_one_line(response.problem)}")
        self.backoff.record_reply(client.id)
        method, limits = self.templates.method, self.settings.limits
        norms: dict[str, PartNorms] = {}
        passes: Mapping[str, Pass] = {}
        pass_names: tuple[str, ...] = ()
        try:
            if response.too_large:
                raise RefusedReplyError(client.id, response.too_large)
            answer = read_answer(response.header, client, self.account.run, round)
            if answer.problem:
                if answer.kind == "state" and self.settings.forgotten == "begin":
                    self.reset_clients.add(client.id)
                return _make_lost_result(
                    f"client {client.id}: {to_one_line(answer.problem)}",
                    has_diverged=answer.kind == "training",
                )
            model = self.templates.task.model(client)
            if is_training and self.secure is not None:
                return self._take_vector(response, client, round)
            if is_training:
                template = self.templates.of(client, job.down)
                upload = inspect_upload(response.payload, template, client, limits)
                self.training_volume.parameters_up += tree.numel(upload)
                norms = measure_norms(
                    decode_checked(self.decode, upload, client, method.title), self._find_reference(job)
                )
                passes, pass_names = method.local_passes(), template.trained
            check_counts(answer, passes, pass_names, model, self.registry.registered[client.id].examples)
            if answer.evaluation is not None:
                check_evaluation(answer.evaluation, client, model, self.metrics)
        except RefusedReplyError as error:
            return _make_lost_result(self.refuse(error, round), error.not_finite, is_refused=True)
        if answer.evaluation is not None and client.id in self.evaluated:
            self.evaluations[client.id] = answer.evaluation
        if not is_training:
            return ClientResult(None, None, Meter())
        self._norms[client.id] = norms
        self.spool.put(client.id, response.payload, template)
        return ClientResult({"stamp": round + 1}, None, Meter(answer.steps, answer.flops, answer.losses))
