"""Streams the results of a round's clients to the aggregator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter, process_time
from typing import Any, TypeVar

from torch import Tensor

from ..core import tree
from ..core.contract import ClientInfo
from ..core.contract.contribution import (
    Aggregator,
    Each,
    contribution_leaves,
    find_not_finite,
    select_row,
)
from ..core.contract.hook_results import NonFiniteResultError
from ..core.errors import NonFiniteUploadError
from ..engines.engine import ClientResult
from ..storage.client_store import ClientStore
from ..training.cohorts.cohort_uploads import CohortContribution, CohortUploads
from ..training.trainer import Meter
from .participation.communication import Volume
from .participation.devices import RoundTiming

T = TypeVar("T")

_END: Any = object()

MAX_WAITING_STATES = 256
"""Number of states that are stored at once, because each time the whole index of the store is copied."""

MAX_SHARED_BYTES = 1 << 20
"""Maximum bytes of a tensor that shares memory pages; the system gives larger tensors their own."""


def _compact(t: Tensor) -> Tensor:
    return t.clone() if t.nbytes <= MAX_SHARED_BYTES else t


class Clock:
    """Measures seconds by name. The time of a nested block is not counted for the outer block."""

    def __init__(self) -> None:
        self.wall: dict[str, float] = {}
        self.cpu: dict[str, float] = {}
        self._names: list[str] = []
        self._since = 0.0, 0.0

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Add the time until the end of the block to a name."""
        self._charge()
        self._names.append(name)
        try:
            yield
        finally:
            self._charge()
            self._names.pop()

    def timed(self, name: str, items: Iterator[T]) -> Iterator[T]:
        """Iterate, and add the time that the next item takes to a name."""
        while True:
            with self(name):
                item = next(items, _END)
            if item is _END:
                return
            yield item

    def _charge(self) -> None:
        wall, cpu = perf_counter(), process_time()
        if self._names:
            name = self._names[-1]
            self.wall[name] = self.wall.get(name, 0.0) + wall - self._since[0]
            self.cpu[name] = self.cpu.get(name, 0.0) + cpu - self._since[1]
        self._since = wall, cpu


Contribute = Callable[[ClientInfo, Any], Any]
"""Maps a client's upload to its contribution."""

ContributeCohort = Callable[[CohortUploads, Mapping[int, ClientInfo]], list[CohortContribution]]
"""Maps the uploads of a cohort to the contributions of the clients at some positions in it."""


class RefusedError(Exception):
    """A reply that the server cannot use."""


@dataclass(frozen=True, slots=True)
class ReplyVerdict:
    """Decision on a reply, made before the server reads the contribution of the upload.

    Attributes:
        reason: reason why the reply is not used; None if it is used.
        is_refused: whether the reply is not used because of what the client sent.
        divergence: message that the training diverged or that the upload is not finite; None if neither.
    """

    reason: str | None
    is_refused: bool
    divergence: str | None


class RoundResults:
    """Collects client results as they arrive and adds their contributions.

    Peak memory: one upload; the uploads of a cohort if clients train as one; all uploads with ``wait``.

    Args:
        clients: records of the participants.
        lost_replies: reasons of the replies that are lost in any case, by client.
        unlucky: identifiers of clients whose reply is lost unless it is lost for another reason.
        drop_diverged: whether to leave out a client whose training diverged or whose upload or contribution is not
            finite; otherwise an error is raised.
        store: empty store for the states of clients.
        aggregator: aggregator of the clients' contributions.
        timing: timing of the round by the simulated clock.
        wait: whether to keep the uploads until all have arrived, see :meth:`contribute_together`.

    Attributes:
        aggregator: aggregator of the clients' contributions.
        timing: timing of the round by the simulated clock.
        lost: reason for each client whose reply did not arrive or was refused.
        meters: measurements of all clients' work.
        volume: sizes of the replies, including the lost ones.
        arrived: identifiers of the clients whose replies arrived and were used.
        not_finite: reason for each client whose reply was dropped because it diverged or holds a NaN.
        refused: identifiers of clients whose whole reply is rejected because of what they sent.
    """

    def __init__(
        self,
        clients: Sequence[ClientInfo],
        *,
        lost_replies: Mapping[str, str],
        unlucky: Set[int],
        drop_diverged: bool,
        store: ClientStore,
        aggregator: Aggregator,
        timing: RoundTiming,
        wait: bool = False,
    ) -> None:
        self._lost_replies, self._unlucky, self._drops_diverged = lost_replies, unlucky, drop_diverged
        self._states, self._waiting = store, dict[int, Any]()
        self.aggregator, self.timing = aggregator, timing
        self._infos = {info.id: info for info in clients}
        self._uploads: dict[int, Any] | None = {} if wait else None
        self.volume = Volume()
        self.lost: dict[str, str] = {}
        self.not_finite: dict[int, str] = {}
        self.refused: set[int] = set()
        self.meters: list[Meter] = []
        self._losses_of: dict[int, float] = {}
        self._cohorts: dict[CohortUploads, tuple[list[int], dict[int, ClientInfo]]] = {}
        self.arrived: set[int] = set()

    def add(
        self,
        info: ClientInfo,
        result: ClientResult,
        contribute: Contribute,
        contribute_cohort: ContributeCohort | None = None,
    ) -> None:
        """Add the result of the next client.

        Args:
            info: record of the client.
            result: result of the client's work.
            contribute: function that maps the client's upload to a contribution.
            contribute_cohort: function that maps the uploads of clients that trained as a cohort, called when all
                have arrived; None to map them one by one.

        Raises:
            NonFiniteError: if the training diverged or the upload or its contribution is not finite, and the run is to stop
                then.
            TreeError: if the contribution does not have the form of those before.
        """
        self.meters.append(result.meter)
        self.volume.add(info.id, result.upload, result.cohort)
        verdict = self._judge_reply(info, result)
        if verdict.divergence is not None:
            self.not_finite[info.id] = verdict.divergence
        if verdict.is_refused:
            self.refused.add(info.id)
        may_wait = result.cohort is not None and self._uploads is None and self.aggregator.accepts_rows
        if may_wait and contribute_cohort is not None:
            self._skip_unused(info, result, verdict.reason)
            self._register_reply(info, result, verdict.reason)
            self._await_cohort(info if verdict.reason is None else None, result, contribute_cohort)
        else:
            self._register_reply(info, result, self._add_upload(info, result, verdict.reason, contribute))

    def _register_reply(self, info: ClientInfo, result: ClientResult, reason: str | None) -> None:
        """Register a reply as used, or as lost for a reason."""
        if reason is None:
            self._keep_reply(info, result)
        else:
            self.lost[str(info.id)] = reason

    def _judge_reply(self, info: ClientInfo, result: ClientResult) -> ReplyVerdict:
        """Decide whether the reply of a client is used.

        Raises:
            NonFiniteError: if :meth:`add` must raise it.
        """
        timing_reason = self._record_time(info, result)
        # a reply that is lost in any case is not examined
        is_listed = str(info.id) in self._lost_replies
        path = None if is_listed else _find_not_finite(result)
        divergence = None
        if not is_listed:
            self._raise_if_diverged(info, result, path)
            divergence = _describe_divergence(info, result, path)
        reason = self._reason_lost(info, result, divergence, timing_reason)
        is_refused = reason is not None and (result.is_refused or divergence is not None)
        return ReplyVerdict(reason, is_refused, divergence)

    def _add_upload(
        self, info: ClientInfo, result: ClientResult, reason: str | None, contribute: Contribute
    ) -> str | None:
        """Add the contribution of a client's upload, or keep the upload until those of the others have arrived.

        Args:
            info: record of the client.
            result: result of the client's work.
            reason: reason why the reply is not used, or None.
            contribute: function that maps the client's upload to a contribution.

        Returns:
            The reason why the reply is not used: the given one, or that its contribution was refused; None if it is used.
        """
        if reason is None and result.upload is not None:
            if self._uploads is not None:
                self._uploads[info.id] = result.upload
            else:
                reason = self._contribute(info, result.upload, contribute)
        self._skip_unused(info, result, reason)
        return reason

    def _skip_unused(self, info: ClientInfo, result: ClientResult, reason: str | None) -> None:
        """Leave a client out of the totals if its reply is not used or holds no upload."""
        if reason is not None or result.upload is None:
            self.aggregator.skip(info.id)

    def _keep_reply(self, info: ClientInfo, result: ClientResult) -> None:
        """Register a client whose reply is used, with its losses and its next state."""
        self.arrived.add(info.id)
        if losses := result.meter.losses.values():
            self._losses_of[info.id] = sum(losses) / len(losses)
        self._waiting[info.id] = result.state
        if len(self._waiting) >= MAX_WAITING_STATES:
            self._store()

    def _contribute(self, info: ClientInfo, upload: Any, contribute: Contribute) -> str | None:
        """Add the contribution of an upload, or return the reason why it cannot be used."""
        try:
            with self._naming(f"{info.title}, contribution"):
                contribution = contribute(info, upload)
        except RefusedError as error:
            return str(error)
        return self._add_contribution(info, contribution)

    def _add_contribution(self, info: ClientInfo, contribution: Any) -> str | None:
        """Add the contribution of a client, or return the reason why it cannot be used."""
        with self._naming():
            # under secure sums over a network the upload is already in the total
            path = None if contribution is None else find_not_finite(contribution)
            if path is None:
                self.aggregator.add(info.id, contribution)
                return None
        error = NonFiniteResultError(
            "what contribution returned",
            self.timing.round,
            path,
            "The upload held none: look at what the hook computes, or set run.on_nan to 'drop' to go on without such replies. A "
            "number that means something can be sent as Each.",
            info.id,
            info.title,
        )
        if not self._drops_diverged:
            raise error
        self.not_finite[info.id] = (
            f"{error.finding}, and the upload held none; its reply was dropped. Look at what the hook computes."
        )
        return self.not_finite[info.id]

    @contextmanager
    def _naming(self, location: str = "") -> Iterator[None]:
        """Within this block, add the round and a location to a TreeError."""
        prefix = (
            f"round {self.timing.round + 1}" if not location else f"round {self.timing.round + 1}, {location}"
        )
        try:
            yield
        except tree.TreeError as error:
            raise tree.TreeError(f"{prefix}: {error}") from error

    def _await_cohort(
        self, info: ClientInfo | None, result: ClientResult, contribute: ContributeCohort
    ) -> None:
        """Register a client of a cohort (None if its reply is lost); add the cohort's contributions after the last one."""
        cohort = result.cohort
        assert cohort is not None, "it trained in a cohort"
        positions, infos_by_position = self._cohorts.setdefault(cohort, ([], {}))
        positions.append(result.position)
        if info is not None:
            infos_by_position[result.position] = info
        if len(positions) < cohort.client_count:
            return
        del self._cohorts[cohort]
        with self._naming("contribution"):
            contributions = contribute(cohort, infos_by_position) if infos_by_position else []
        for contribution in contributions:
            self._add_cohort_contribution(contribution)

    def _add_cohort_contribution(self, contribution: CohortContribution) -> None:
        """Add the contribution of several clients together, or one by one if it holds a NaN or an infinity."""
        client_ids, value, weights = contribution.client_ids, contribution.value, contribution.weights
        if weights is None:
            contributions = [value]
        elif _is_finite(value):
            with self._naming():
                self.aggregator.add_rows(client_ids, value, weights)
            return
        else:
            contributions = [select_row(value, weights, k) for k in range(len(client_ids))]
        for client_id, client_contribution in zip(client_ids, contributions, strict=True):
            reason = self._add_contribution(self._infos[client_id], client_contribution)
            if reason is not None:
                self.aggregator.skip(client_id)
                self.discard_reply(client_id, reason)

    def contribute_together(
        self, judge: Callable[[Mapping[int, Any]], Mapping[int, Any]], contribute: Contribute
    ) -> None:
        """Add the contributions of the uploads that were kept until all had arrived.

        Args:
            judge: function that selects the uploads that are used, by client.
            contribute: function that maps an upload to a contribution.
        """
        uploads, self._uploads = self._uploads or {}, None
        used_uploads = judge(uploads)
        for client_id in uploads:
            reason = (
                self._contribute(self._infos[client_id], used_uploads[client_id], contribute)
                if client_id in used_uploads
                else ""
            )
            if reason is not None:
                self.aggregator.skip(client_id)
            if reason:
                self.discard_reply(client_id, reason)

    def discard_reply(self, client_id: int, reason: str) -> None:
        """Remove a reply that had been accepted."""
        self.lost[str(client_id)] = reason
        self.arrived.discard(client_id)

    def client_states(self) -> ClientStore:
        """Next states of the clients whose replies arrived."""
        self._store()
        return self._states.only(self.arrived)

    def _store(self) -> None:
        # copied together, because each tensor that stayed among the tensors of training would keep a gap of
        # memory open
        compact_states = {
            client_id: tree.map_leaves(_compact, state) for client_id, state in self._waiting.items()
        }
        self._states, self._waiting = self._states | compact_states, {}

    def client_losses(self) -> dict[int, float]:
        """Training loss of each client whose reply arrived, as a mean over its passes."""
        return {client_id: loss for client_id, loss in self._losses_of.items() if client_id in self.arrived}

    def mean_losses(self) -> dict[str, float]:
        """Mean over all clients of the loss of each pass."""
        names = dict.fromkeys(name for m in self.meters for name in m.losses)
        values = {n: [m.losses[n] for m in self.meters if n in m.losses] for n in names}
        return {n: sum(losses) / len(losses) for n, losses in values.items()}

    def _record_time(self, info: ClientInfo, result: ClientResult) -> str | None:
        """Add a client to the simulated clock; return the reason why its reply does not arrive in time, or None."""
        return self.timing.add(info.id, self.volume.of(info.id), result.meter.flops)

    def _raise_if_diverged(self, info: ClientInfo, result: ClientResult, path: str | None) -> None:
        """Raise NonFiniteError if training met a NaN or the upload holds one at that path, and the run is to stop then."""
        if self._drops_diverged or result.lost is not None:
            return
        if result.error is not None:
            raise result.error
        if path is not None:
            raise NonFiniteUploadError(info.id, self.timing.round, path, info.title)

    def _reason_lost(
        self, info: ClientInfo, result: ClientResult, divergence: str | None, timing_reason: str | None
    ) -> str | None:
        """Choose the reason why the reply of a client is not used; None if it is used.

        Args:
            info: record of the client.
            result: result of the client's work.
            divergence: message of :func:`_describe_divergence`, or None.
            timing_reason: reason that :meth:`_record_time` gives, or None.
        """
        for reason in (self._lost_replies.get(str(info.id)), result.lost, divergence, timing_reason):
            if reason is not None:
                return reason
        return "the reply was lost" if info.id in self._unlucky else None


def _is_finite(contribution: Any) -> bool:
    """Whether all tensors of a contribution that are added are finite, of several clients together."""
    values = [leaf.value for _, leaf in contribution_leaves(contribution) if not isinstance(leaf, Each)]
    return tree.not_finite(values) is None


def _find_not_finite(result: ClientResult) -> str | None:
    """Find the path of the first NaN or infinity in an upload; None if there is none or if training failed."""
    if result.error is not None or result.lost is not None:
        return None
    if result.cohort is not None and result.cohort.is_finite(result.position):
        return None
    return tree.not_finite(result.upload)


def _describe_divergence(info: ClientInfo, result: ClientResult, path: str | None) -> str | None:
    """Describe why a reply was dropped: its training diverged or its upload is not finite at a path; None if neither."""
    if result.lost is not None:
        return result.lost if result.has_diverged else None
    if result.error is not None:
        return f"{result.error.finding}; its reply was dropped. {result.error.advice}."
    if path is not None:
        return f"the reply of {info.title} holds a NaN or an infinity at {path}; it was dropped"
    return None
