"""A run over a network, in which the server stores only the stamps of its clients' states."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

from ..core.contract import AnyMethod, ClientInfo, ServerView
from ..core.contract.contribution import Aggregator
from ..data.federation import Federation
from ..engines.engine import ClientJob
from ..results.client_numbers import ROUTE
from ..results.measurements import ClientTable
from ..results.records import RoundRecord
from ..rounds.inspection import aggregator_of
from ..rounds.plan import Plan
from ..rounds.round_results import RefusedError, RoundResults
from ..rounds.run import Run
from ..rounds.run_settings import RunSettings
from ..training.hook_calls import refuse_global_draws
from ..trust.protection import decompress_upload
from .operation.start_checks import make_checked_zeros
from .secure.contributions import count_numbers, make_grid
from .secure.distributed_noise import DistributedNoise, describe_collusion
from .secure.rounds import SecureRounds, SecureTotal
from .server import NetworkEngine
from .validation.uploads import (
    FAULT_TYPES,
    RefusedReplyError,
    Templates,
    make_contribution,
    update_server,
    update_without_faulty,
)

logger = logging.getLogger(__name__)


class NetworkRun(Run):
    """A run whose clients store their own states; the server stores the stamp of the state each builds on.

    Its settings ask for a checkpoint every round, because an acknowledged state must be on disk.
    """

    engine: NetworkEngine
    is_deployed = True
    evaluates_late = True

    def __init__(
        self,
        method: AnyMethod,
        federation: Federation,
        settings: RunSettings,
        engine: NetworkEngine,
        plan: Plan | None = None,
    ) -> None:
        # called before the clients hear of the end
        self.on_end: Callable[[], None] | None = None
        # the device of an experiment is that on which clients train
        settings = dataclasses.replace(settings, device="cpu")
        super().__init__(method, federation, settings, engine, plan)
        engine.templates = Templates(self.method, self.task)
        engine.metrics = self.evaluator.metrics
        if settings.secure.on:
            engine.secure = self._make_secure_rounds()
        engine.compares = settings.privacy.kind != "central" and engine.secure is None
        engine.shortens = settings.robust.rule == "mean"
        engine.describes = (
            engine.compares and settings.privacy.kind == "none" and engine.settings.max_fall > 0
        )
        engine.count_repeats = self._count_repeats
        if self.budget is not None and self.budget.is_local:
            self.budget.branch, engine.charge = engine.account.branch, self._charge
        engine.decode = lambda upload, client: decompress_upload(
            self.method, self.state.server, upload, client
        )

    def _make_secure_rounds(self) -> SecureRounds:
        """Make the secure sums of the run; raises ConfigError or TaskError if the method has none over a network."""
        settings, keys = self.settings, self.engine.member_keys
        assert keys is not None, "check_secure_start refuses secure sums without keys"
        infos = self.federation.infos
        zero_contribution = make_checked_zeros(
            self.method, self.state.server, self.engine.templates, self.federation
        )
        client_count, grid = len(infos), make_grid(settings.secure, len(infos))
        if self.budget is not None and not self.budget.is_local:
            DistributedNoise(
                float(settings.clipping.norm or 0.0), self.budget.noise, client_count, grid
            ).check(count_numbers(zero_contribution))
            logger.info(describe_collusion(self.budget, client_count))
        return SecureRounds(client_count, keys, grid, zero_contribution)

    def charge_drawn(self, round: int, client_ids: Collection[int]) -> None:
        """See the base class; under local privacy a client is charged when an order to train is sent to it."""
        super().charge_drawn(round, () if self.settings.privacy.kind == "local" else client_ids)

    def aggregator(self, infos: Sequence[ClientInfo], round: int) -> Aggregator:
        """See the base class; under secure sums the engine computes the total."""
        if self.engine.secure is not None:
            return SecureTotal([info.id for info in infos], self.engine.secure)
        return super().aggregator(infos, round)

    def state_of(self, info: ClientInfo) -> Any:
        """The stamp of the state that a client builds on."""
        return self.state.clients.get(info.id, {"stamp": 0})

    def step(self, lost_replies: Any = None) -> RoundRecord:
        """Run one round."""
        if self.engine.secure is not None:
            # before the round, whose clients are those that have registered
            self.engine.wait_for_members({i.id for i in self.federation.infos}, self.engine.secure)
        self._prepare()
        record = super().step(lost_replies)
        for client_id in self.engine.reset_clients:
            logger.info("client %d has lost its state, and starts again", client_id)
            # unless it trained again in this round, it counts as a client that never took part
            if self.state.clients.get(client_id) != {"stamp": self.round}:
                client_states = self.state.clients | {client_id: {"stamp": 0}}
                self.state = dataclasses.replace(self.state, clients=client_states)
                self.unsaved.add(client_id)
        self.engine.reset_clients.clear()
        return dataclasses.replace(
            record,
            **vars(self.engine.training_volume),
            server_metrics={**record.server_metrics, **self._bounded_replies(record)},
        )

    def _bounded_replies(self, record: RoundRecord) -> dict[str, dict[str, float]]:
        """The replies of a round that counted less than their clients meant, by the bounds in network.limits.

        ``shortened`` has the share of an update's length that was used, and ``capped_examples`` the number of examples by
        which a client was weighted instead of the number that it registered, both by client.
        """
        registry = self.engine.registry
        lengths = {
            str(client_id): float(f"{share:.4g}")
            for client_id, share in sorted(self.engine.kept_shares.items())
        }
        capped_examples = {
            str(client_id): float(self.engine.sizes[client_id])
            for client_id in record.participants
            if str(client_id) not in record.lost
            and self.engine.sizes[client_id] < registry.registered[client_id].examples
        }
        bounds = {"shortened": lengths, "capped_examples": capped_examples}
        return {name: values for name, values in bounds.items() if values}

    def contribute(self, info: ClientInfo, upload: Any) -> Any:
        """See the base class; a reply that the method cannot use is refused."""
        if self.engine.secure is not None:
            # the upload is already in the total
            return None
        location = f"{info.title}, round {self.round + 1}"
        try:
            with refuse_global_draws(self.method, "contribution", location):
                return make_contribution(self.method, self.state.server, upload, self.weigh_client(info))
        except RefusedReplyError as error:
            raise RefusedError(self.engine.refuse(error, self.round)) from error

    def server_update(self, total: Any, view: ServerView, results: RoundResults) -> Any:
        """See the base class; replies on which the update fails are refused, and the others are used."""
        old_server = self.state.server
        try:
            server = update_server(self.method, old_server, total, view)
        except FAULT_TYPES:
            if self.inspection is not None or self.engine.secure is not None:
                # the contribution of each single reply is no longer known
                raise

            def contribution(client: ClientInfo) -> Any:
                return self.method.contribution(old_server, self.engine.read_upload(client.id), client)

            server, fault_reasons = update_without_faulty(
                self.method,
                old_server,
                contribution,
                view,
                lambda clients: aggregator_of(self.settings, clients, self.federation, view.round),
            )
            if not fault_reasons:
                raise
            for client_id, reason in fault_reasons.items():
                self.engine.refuse(RefusedReplyError(client_id, reason), view.round)
                results.discard_reply(client_id, reason)
        return self.engine.boundary(server)

    def count_evaluated_examples(self, info: ClientInfo) -> int:
        """See the base class; the sizes are those that clients registered, 0 for a client that has not."""
        client = self.engine.registry.registered.get(info.id)
        return 0 if client is None else sum(client.sizes)

    def _count_repeats(self, round: int) -> dict[int, int]:
        """See :attr:`.messages.Order.repeats`."""
        if self.budget is None or self.budget.is_local:
            return {}
        return self.budget.ledger.count_repeats(round)

    def evaluate(self) -> ClientTable | None:
        """Return None: the evaluation arrives with the next round trip, see :meth:`take_late_evaluation`."""
        return None

    def take_late_evaluation(self) -> ClientTable | None:
        """The evaluation of the previous round, which arrived with the last round trip."""
        evaluations = self.engine.evaluations
        if not evaluations:
            return None
        # only evaluations of the same series can be compared; those of the majority are kept
        for property_of in (_name_series, _count_clusters):
            property_values = {
                client_id: property_of(evaluations[client_id]) for client_id in sorted(evaluations)
            }
            # a client with few examples sends no shares of clusters
            value_counts = Counter(value for value in property_values.values() if value is not None)
            majority_values = [value for value, _ in value_counts.most_common(1)]
            for client_id in [
                client_id
                for client_id, value in property_values.items()
                if value not in (None, *majority_values)
            ]:
                logger.info(
                    "client %d measures other things than most clients; its evaluation is left out", client_id
                )
                del evaluations[client_id]
        return ClientTable.join([*evaluations.values()])

    def finish(self) -> None:
        """Tell the clients that the run is over, so that they commit their states and write their models."""
        self._prepare()
        if self.on_end is not None:
            self.on_end()
        self.engine.finish([self._make_job(i) for i in self.federation.infos], self.round)

    def _prepare(self) -> None:
        """Update changed sizes, and set which clients the engine asks for evaluations."""
        federation = self.engine.registry.update_federation(self.federation)
        if federation is not self.federation:
            self.federation, self.task = federation, federation.task(self.settings.rounds)
            self.engine.templates = Templates(self.method, self.task)
            if self.inspection is not None:
                self.inspection = dataclasses.replace(self.inspection, task=self.task)
        self.engine.sizes = tuple(i.example_count for i in federation.infos)
        # under differential privacy and secure sums, clients send no evaluations
        is_due = self.is_due() and self.budget is None and self.engine.secure is None
        self.engine.evaluated = frozenset(i.id for i in self.evaluated if is_due)
        training_ids = set() if self.is_over else {i.id for i in self.participants(self.round)}
        self.engine.evaluation_jobs = [
            self._make_job(federation.infos[i]) for i in sorted(self.engine.evaluated - training_ids)
        ]

    def _make_job(self, info: ClientInfo) -> ClientJob:
        with refuse_global_draws(self.method, "download", f"{info.title}, round {self.round + 1}"):
            return ClientJob(self.state_of(info), self.method.download(self.state.server, info), info)

    def clients(self) -> list[dict[str, Any]]:
        """One row for each client, without its class counts, which the server does not know."""
        split_sizes = self.engine.registry.count_examples()
        zero_sizes = {"train": 0, "val": 0, "test": 0}
        return [{**row, **split_sizes.get(row["id"], zero_sizes), "classes": {}} for row in super().clients()]


def _name_series(evaluation: ClientTable) -> tuple[str, ...] | None:
    return tuple(evaluation.series())


def _count_clusters(evaluation: ClientTable) -> int | None:
    return len(evaluation.series(ROUTE)) or None
