"""Evaluates the models of clients on their own validation and test examples."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ...core.contract import AnyMethod, ClientInfo, Task
from ...core.io.text import format_count, list_first
from ...data.federation import Federation
from ...engines.engine import Engine
from ..client_metrics import Metric
from ..client_numbers import COUNTED_LABELS, LOSS, SPLITS
from ..measurements import ClientTable, Column
from .cohort_evaluation import CohortEvaluation
from .local_model import RoundModels
from .model_evaluation import ModelEvaluation
from .pools import PoolCache, list_sets
from .scoring import count_labels_by_split

EXAMPLES_PER_WORK_ITEM = 4096
"""Number of examples of the clients in one item of the work that an engine maps over."""

_MAX_NAMED_CLIENTS = 5
"""Maximum number of clients that one warning names."""

logger = logging.getLogger(__name__)


class Evaluator:
    """Evaluates the models that clients would use now, including those of clients that never took part.

    An engine with cohorts evaluates clients of one form by one call of the method
    (:class:`.cohort_evaluation.CohortEvaluation`). All other models are evaluated by
    :class:`.model_evaluation.ModelEvaluation`.

    Args:
        method: method that defines how a client infers.
        federation: clients and their data.
        task: task that is learned.
        engine: engine that maps over items of clients; it also executes the changes that a method makes to its model
            before inference (adaptation on *training* data).
        metrics: metrics besides accuracy and loss, by name.
    """

    def __init__(
        self,
        method: AnyMethod,
        federation: Federation,
        task: Task,
        engine: Engine,
        metrics: Mapping[str, Metric] | None = None,
    ) -> None:
        self.method, self.federation, self.task, self.engine = method, federation, task, engine
        self.metrics = metrics or {}
        self.pools = PoolCache(federation)
        self._models = ModelEvaluation(federation, self.pools, self.metrics)
        self._cohorts = CohortEvaluation(self.pools, self.metrics)
        self._examples = [len(data.val) + len(data.test) for data in federation.clients]
        # identifiers of clients that a warning has named
        self._not_finite: set[int] = set()
        # for each client the number of labels of each split that count; None if each example has one
        self._labels: dict[int, list[int] | None] = {}

    def evaluate(
        self,
        server: Any,
        state_of: Callable[[ClientInfo], Any],
        round: int,
        clients: Sequence[ClientInfo] | None = None,
        is_trained: bool = True,
    ) -> ClientTable:
        """Measure accuracy, loss, further metrics, size and cluster shares of every client's model, and count labels.

        Args:
            server: state of the server after the round.
            state_of: function that maps a client to its state, a fresh one if the client never took part.
            round: index of the round, from 0.
            clients: records of the clients to evaluate; None for all.
            is_trained: whether models are trained; False before the first round, when they may be equal by chance.
        """
        round_models = RoundModels(
            self.method, self.federation, self.task, self.engine, server, state_of, round
        )
        work_items = self._divide_work(self.federation.infos if clients is None else clients)
        with self.pools.begin_evaluation():
            tables = self.engine.each(partial(self._evaluate_item, round_models, is_trained), work_items)
        client_table = ClientTable.join([ClientTable.from_dict(table) for table in tables])
        self._warn_of_not_finite(client_table)
        return ClientTable(
            client_table.client_ids, client_table.columns + self._count_labels(client_table.client_ids)
        )

    def _evaluate_item(
        self, round_models: RoundModels, is_trained: bool, infos: Sequence[ClientInfo]
    ) -> dict[str, Any]:
        """Evaluate the clients of one item of work and return their table as JSON values."""
        if not self.engine.has_cohorts or self._cohorts.is_given_up or round_models.is_global:
            return self._models.evaluate(infos, round_models, is_trained).to_dict()
        tables, trainers = self._cohorts.evaluate(infos, round_models, is_trained)
        if remaining_infos := [info for info in infos if info.id in trainers]:
            remaining_models = replace(round_models, trainers=trainers)
            tables.append(self._models.evaluate(remaining_infos, remaining_models, is_trained))
        return ClientTable.join(tables).to_dict()

    def _count_labels(self, client_ids: Sequence[int]) -> list[Column]:
        """Count the labels of each client that count; empty if these are the numbers of examples."""
        for i in client_ids:
            if i not in self._labels:
                self._labels[i] = count_labels_by_split(self.federation.clients[i], self.federation.loss)
        if all(self._labels[i] is None for i in client_ids):
            return []
        label_counts = {i: self._labels[i] or self._examples_of(i) for i in client_ids}
        return [
            Column(COUNTED_LABELS, "", split, [label_counts[i][k] for i in client_ids])
            for k, split in enumerate(SPLITS)
        ]

    def _examples_of(self, client_id: int) -> list[int]:
        """Numbers of examples of a client, one for each split."""
        return [len(examples) for examples in list_sets(self.federation.clients[client_id])]

    def _warn_of_not_finite(self, table: ClientTable) -> None:
        """Warn once of each client whose loss is not finite."""
        descriptions: dict[int, str] = {}
        for column in table.columns:
            for client_id, loss in zip(table.client_ids, column.values, strict=True):
                if (
                    column.name != LOSS
                    or loss is None
                    or math.isfinite(loss)
                    or client_id in self._not_finite
                ):
                    continue
                n = len(getattr(self.federation.clients[client_id], column.split))
                examples = format_count(n, f"{column.split} example")
                title = self.federation.infos[client_id].title
                descriptions.setdefault(client_id, f"{title} ({column.series} model, {examples})")
        self._not_finite |= descriptions.keys()
        if descriptions:
            or_loss = f", or the loss {self.task.loss.kind} makes one of finite scores"
            logger.warning(
                "the loss is not finite at %s: its scores hold a NaN or an infinity%s. Tables leave the loss out of "
                "means over clients and count it, loggers write NaN, and examples with such scores count as wrong",
                list_first([*descriptions.values()], _MAX_NAMED_CLIENTS, "clients"),
                or_loss if self.task.loss.is_custom else "",
            )

    def _divide_work(self, infos: Sequence[ClientInfo]) -> list[list[ClientInfo]]:
        """Group consecutive clients with about EXAMPLES_PER_WORK_ITEM examples together, alike for every engine."""
        work_items: list[list[ClientInfo]] = []
        example_count = EXAMPLES_PER_WORK_ITEM
        for info in infos:
            if example_count >= EXAMPLES_PER_WORK_ITEM:
                work_items.append([])
                example_count = 0
            work_items[-1].append(info)
            example_count += self._examples[info.id]
        return work_items
