"""A run over a network: the server keeps of its clients only what they acknowledged."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

from ..core.errors import ConfigError
from ..core.method import ClientInfo, ServerView
from ..data.federation import Federation
from ..engines.base import AnyMethod, ClientJob
from ..simulation.evaluation import ClientEvaluation, Evaluation, gather_evaluations
from ..simulation.records import RoundRecord
from ..simulation.round_results import RefusedError, RoundResults
from ..simulation.run import Run, RunSettings
from .server import Remote
from .validation.uploads import FAULTS, Refused, checked_contribution, checked_update, update_without_faulty


class NetworkRun(Run):
    """A run whose clients keep their own states; of each only the stamp of the one it builds on is known here.

    Args:
        method: what to run.
        settings: the protocol; checkpoints are made every round, for what is acknowledged must be on the disk.
        engine: how the clients are reached; they have introduced themselves.
        federation: as the roster has it.
    """

    engine: Remote

    def __init__(
        self, method: AnyMethod, federation: Federation, settings: RunSettings, engine: Remote
    ) -> None:
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

    def contribute(self, info: ClientInfo, upload: Any) -> Any:
        """See the base class; a reply that the method cannot use is refused."""
        try:
            return checked_contribution(self.method, upload, info, self.state.server)
        except Refused as error:
            raise RefusedError(self.engine.refuse(error, self.round)) from error

    def server_update(self, total: Any, view: ServerView, found: RoundResults) -> Any:
        """See the base class; a reply on which the update fails is refused, and the others are used."""
        try:
            server = checked_update(self.method, self.state.server, total, view)
        except FAULTS:

            def contribution(client: ClientInfo) -> Any:
                return self.method.contribution(self.engine.spool.get(client.id), client, self.state.server)

            server, faulty = update_without_faulty(self.method, self.state.server, contribution, view)
            if not faulty:
                raise
            for client, reason in faulty.items():
                self.engine.refuse(Refused(client, "", reason), view.round)
                found.drop(client, reason)
        return self.engine.boundary(server)

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
                self.engine.say(
                    f"client {client} measures other things than most clients; what it found is left out"
                )
                del found[client]
        return gather_evaluations([found.get(info.id) for info in self.federation.infos])

    def finish(self) -> None:
        """Tell the clients, so that they take their last state for good and write their models down."""
        self._prepare()
        self.engine.finish([self._job(i) for i in self.federation.infos], self.round)

    def _prepare(self) -> None:
        federation = self.engine.roster.updated(self.federation)
        if federation is not self.federation:
            self.federation, self.task = federation, federation.task(self.settings.rounds)
        self.engine.sizes = tuple(i.examples for i in federation.infos)
        self.engine.begin(self.method, self.task)
        self.engine.evaluate = self.is_due()
        training = (
            {i.id for i in self.participants(self.round)} if self.round < self.settings.rounds else set()
        )
        due = self.engine.evaluate
        self.engine.others = [self._job(i) for i in federation.infos if due and i.id not in training]

    def _job(self, info: ClientInfo) -> ClientJob:
        return ClientJob(self.state_of(info), self.method.download(self.state.server, info), info)

    def clients(self) -> list[dict[str, Any]]:
        """One row a client; what classes it has is its own business."""
        known = self.engine.roster.rows()
        none = {"train": 0, "val": 0, "test": 0}
        return [{**row, **known.get(row["id"], none), "classes": {}} for row in super().clients()]


def _form(found: ClientEvaluation) -> tuple[Any, ...]:
    return tuple(found.accuracy), None if found.routes is None else len(found.routes)
