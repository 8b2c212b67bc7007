"""What every client's own model is worth on its own validation and test examples, and what it takes."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.contract import AnyMethod, ClientInfo, Task
from ..core.contract.download_cache import Downloads
from ..core.contract.training_request import Trainer
from ..core.errors import naming
from ..core.key import generator_states
from ..core.learning.losses import AUTO, Loss
from ..data.dataset import ClientData
from ..data.federation import Federation
from ..engines.engine import Engine
from ..training.client_tensors.client_tensor import NoRuleError
from ..training.cohorts.closeness import full_precision, is_close
from ..training.cohorts.cohort_view import Cohort
from ..training.kept_optimizers import split_optimizers
from .client_metrics import Metric
from .client_numbers import ACCURACY, COUNTED_LABELS, LOSS, PARAMETERS, ROUTE
from .cohort_evaluation import CohortModels
from .local_model import LocalModel, make_local_model
from .measurements import ClientTable, Column
from .scoring import (
    Scores,
    ScoringPool,
    all_scores,
    concatenate,
    count_labels,
    measure,
    measure_each,
    pool_of,
)

ModelsOfClients = Sequence[tuple[LocalModel, Sequence[ClientInfo]]]
"""Models, each with the clients that use it."""

SPLITS = ("val", "test")

EXAMPLES_PER_WORK_ITEM = 4096
"""Examples of the clients in one item of the work that an engine maps over."""

MAX_CACHED_BYTES = 1 << 30
"""Bytes of concatenated inputs that are kept from one evaluation to the next."""

_MAX_NAMED_CLIENTS = 5
"""Clients that one warning names."""

logger = logging.getLogger(__name__)


class Evaluator:
    """Evaluates the models that clients would use now, those of clients that never took part included.

    Clients whose models are the very same tensors are evaluated in one pass over their concatenated examples.
    Where models differ but not their module of standard layers, each scores its own rows of them.

    Args:
        method: says how a client infers.
        federation: the clients.
        task: what is learnt.
        engine: maps over items of clients; also executes what a method does to its model before it infers
            (adaptation on *training* data).
        metrics: besides accuracy and loss, by name.
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
        self._examples = [len(data.val) + len(data.test) for data in federation.clients]
        # of this evaluation and of the one before
        self._pools: dict[tuple[int, ...], ScoringPool] = {}
        self._former_pools: dict[tuple[int, ...], ScoringPool] = {}
        self._is_separable: dict[str, bool] = {}
        self._cohort_is_equal: dict[str, bool] = {}
        self._fits_cohorts = True
        self._not_finite: set[int] = set()
        # by client the labels of each split that count; None if each example has one
        self._labels: dict[int, list[int] | None] = {}

    def evaluate(
        self,
        server: Any,
        state_of: Callable[[ClientInfo], Any],
        round: int,
        clients: Sequence[ClientInfo] | None = None,
        trained: bool = True,
    ) -> ClientTable:
        """Accuracy, loss, further metrics, size and shares of clusters of every client's model, and labels that count.

        Args:
            server: its state after the round.
            state_of: state of a client, fresh for one that never took part.
            round: counted from 0.
            clients: whom to evaluate; None for all.
            trained: False before the first round, when models may be equal by chance.
        """

        def model_of(info: ClientInfo, trainer: Trainer | None = None) -> LocalModel:
            return make_local_model(
                self.method,
                self.federation,
                self.task,
                self.engine,
                state_of(info),
                info,
                round,
                server=server,
                trainer=trainer,
            )

        def work(item: Sequence[ClientInfo]) -> dict[str, Any]:
            if self.engine.has_cohorts and self._fits_cohorts and not self._is_global:
                tables = self._evaluate_cohorts(item, server, state_of, round, model_of, trained)
                return ClientTable.join(tables).as_json()
            return self._evaluate_models(item, model_of).as_json()

        items = self._divide_work(self.federation.infos if clients is None else clients)
        self._pools, self._former_pools = {}, self._pools
        tables = self.engine.each(work, items)
        self._former_pools = {}
        measured = ClientTable.join([ClientTable.from_json(table) for table in tables])
        self._warn_of_not_finite(measured)
        return ClientTable(measured.clients, measured.columns + self._count_labels(measured.clients))

    def _count_labels(self, clients: Sequence[int]) -> list[Column]:
        """How many labels of each client count; nothing where these are the numbers of examples."""
        for i in clients:
            if i not in self._labels:
                data = self.federation.clients[i]
                counts = [count_labels(getattr(data, split), self.federation.loss) for split in SPLITS]
                self._labels[i] = None if counts == self._examples_of(i) else counts
        if all(self._labels[i] is None for i in clients):
            return []
        counted = {i: self._labels[i] or self._examples_of(i) for i in clients}
        return [
            Column(COUNTED_LABELS, "", split, [counted[i][k] for i in clients])
            for k, split in enumerate(SPLITS)
        ]

    def _examples_of(self, client: int) -> list[int]:
        """Number of examples of each split of a client."""
        return [len(getattr(self.federation.clients[client], split)) for split in SPLITS]

    def _warn_of_not_finite(self, measured: ClientTable) -> None:
        """Name once each client whose loss is not finite."""
        descriptions: dict[int, str] = {}
        for column in measured.columns:
            for client, loss in zip(measured.clients, column.values, strict=True):
                if column.name != LOSS or loss is None or math.isfinite(loss) or client in self._not_finite:
                    continue
                n = len(getattr(self.federation.clients[client], column.split))
                examples = f"{n} {column.split} example{'' if n == 1 else 's'}"
                title = self.federation.infos[client].title
                descriptions.setdefault(client, f"{title} ({column.series} model, {examples})")
        self._not_finite |= descriptions.keys()
        if descriptions:
            named = [*descriptions.values()]
            logger.warning(
                "the loss is not finite at %s%s: its scores hold a NaN or an infinity. Tables leave the loss out of "
                "means over clients and count it, loggers write NaN, and such examples count as wrong",
                ", ".join(named[:_MAX_NAMED_CLIENTS]),
                f" and {len(named) - _MAX_NAMED_CLIENTS} more clients"
                if len(named) > _MAX_NAMED_CLIENTS
                else "",
            )

    def _divide_work(self, infos: Sequence[ClientInfo]) -> list[list[ClientInfo]]:
        """Consecutive clients with about EXAMPLES_PER_WORK_ITEM examples together; the same for every engine."""
        items: list[list[ClientInfo]] = []
        examples = EXAMPLES_PER_WORK_ITEM
        for info in infos:
            if examples >= EXAMPLES_PER_WORK_ITEM:
                items.append([])
                examples = 0
            items[-1].append(info)
            examples += self._examples[info.id]
        return items

    @property
    def _is_global(self) -> bool:
        """Whether all clients use the server's own model as it is."""
        models = self.task.architectures.values()
        return self.method.one_model and not any(model.buffers or model.couples for model in models)

    def _evaluate_cohorts(
        self,
        infos: Sequence[ClientInfo],
        server: Any,
        state_of: Callable[[ClientInfo], Any],
        round: int,
        model_of: Callable[..., LocalModel],
        trained: bool,
    ) -> list[ClientTable]:
        """Evaluate clients of one form by one call of the method, and others as other engines do."""
        # of clients outside of cohorts, whose models are scored together where they can be
        others: dict[int, Trainer] = {}

        def keep_trainer(place: int, trainer: Trainer) -> None:
            others[infos[place].id] = trainer

        def evaluate_cohort(cohort: Cohort) -> list[ClientTable | None]:
            try:
                return evaluate(cohort)
            except (Exception, NoRuleError):
                # an operation without a rule, or the method's own error, which a client alone raises; the models of the
                # next evaluation are scored as in other engines
                self._fits_cohorts = False
                raise

        def evaluate(cohort: Cohort) -> list[ClientTable | None]:
            members = [infos[k] for k in cohort.places]
            kind = members[0].architecture
            pool = self._pool([info.id for info in members])
            model = self.task.model(members[0])
            if pool is None or model.couples or model.has_hooks or self._cohort_is_equal.get(kind) is False:
                raise NoRuleError("models that are evaluated client by client")
            models = CohortModels(self.method, self.task, server, round, members, cohort, pool)
            is_known_equal = self._cohort_is_equal.get(kind)
            with torch.inference_mode(), contextlib.nullcontext() if is_known_equal else full_precision():
                scores = models.score(len(SPLITS), self.metrics)
                if is_known_equal is None:
                    is_equal = self._is_as_alone(members, scores, model_of)
                    # models that are not trained yet are compared again
                    if not is_equal or trained:
                        self._cohort_is_equal[kind] = is_equal
                    if not is_equal:
                        raise NoRuleError("scores that are others for one client alone")
            scores_of_series = {series: of_series for series, (_, of_series) in scores.items()}
            return [_table_of_scores([i.id for i in members], scores_of_series, models.sizes())]

        downloads = Downloads(self.method, server)
        clients = [
            (info, (split_optimizers(state_of(info))[0], downloads.message_to(info))) for info in infos
        ]
        results = self.engine.map_clients(
            self.method, self.federation, round, clients, keep_trainer, evaluate_cohort
        )
        tables = [table for table in results if table is not None]
        if others:
            rest = [info for info in infos if info.id in others]
            tables.append(self._evaluate_models(rest, lambda info: model_of(info, others[info.id])))
        return tables

    def _is_as_alone(
        self,
        infos: Sequence[ClientInfo],
        scores: Mapping[str, tuple[Tensor, Scores]],
        model_of: Callable[..., LocalModel],
    ) -> bool:
        """Whether the scores of the last client that has examples are those that it gives alone."""
        ends = list(itertools.accumulate(self._examples[i.id] for i in infos))
        place = max((k for k, i in enumerate(infos) if self._examples[i.id]), default=0)
        rows = slice(ends[place] - self._examples[infos[place].id], ends[place])
        data = self.federation.clients[infos[place].id]
        pool = ScoringPool([getattr(data, split) for split in SPLITS], loss=self.federation.loss)
        if rows.start == rows.stop:
            return True
        predictors = model_of(infos[place]).predictors
        return predictors.keys() == scores.keys() and all(
            is_close(scores[name][0][rows], all_scores(predict, pool)) for name, predict in predictors.items()
        )

    def _evaluate_models(
        self, infos: Sequence[ClientInfo], model_of: Callable[[ClientInfo], LocalModel]
    ) -> ClientTable:
        """Evaluate the models of clients, those with the same tensors or of the same module in one pass."""
        groups: dict[Any, list[int]] = {}
        models: dict[Any, LocalModel] = {}
        is_global = self._is_global
        for place, info in enumerate(infos):
            # the server's own model needs no look at every client
            shared: Any = info.architecture if is_global else None
            if shared not in models:
                model = model_of(info)
                shared = shared or model.identity or info.id
                models.setdefault(shared, model)
            groups.setdefault(shared, []).append(place)
        tables = []
        kinds: dict[Any, list[tuple[LocalModel, list[int]]]] = {}
        used = {id(model.model): model.model for model in models.values()}
        is_standard = {i: model.is_standard for i, model in used.items()}
        for shared, places in groups.items():
            model, kind = models[shared], shared
            # a function of the method, and a user's module, is called for one model at a time
            if isinstance(shared, tuple) and is_standard[id(model.model)]:
                kind = (model.model, *model.client_model.series)
            kinds.setdefault(kind, []).append((model, places))
        for same in kinds.values():
            together = [(model, [infos[place] for place in places]) for model, places in same]
            scores = self._score_together(together)
            if scores is not None:
                tables.append(_table_of_models(together, scores))
                continue
            for model, clients in together:
                for info in clients:
                    client = model if len(clients) == 1 else model_of(info)
                    data = self.federation.clients[info.id]
                    with naming(f"{info.title}, whose examples are evaluated as one batch"):
                        tables.append(evaluate_client(client, info, data, self.metrics, self.federation.loss))
        return ClientTable.join(tables)

    def _score_together(self, models: ModelsOfClients) -> dict[str, Scores] | None:
        """Scores of models of one module on the splits of their clients, by series.

        Returns:
            Them, or None where clients must be scored one by one.
        """
        first, infos = models[0]
        model = first.model
        if len(models) == len(infos) == 1 or model.couples or model.has_hooks:
            return None
        if self._is_separable.get(model.name) is False:
            return None
        pool = self._pool([info.id for _, infos in models for info in infos])
        if pool is None:
            return None
        with torch.inference_mode():
            if model.name in self._is_separable:
                return _measure(models, pool, self.metrics)
            return self._score_with_check(models, pool)

    def _score_with_check(self, models: ModelsOfClients, pool: ScoringPool) -> dict[str, Scores] | None:
        """Scores by a module; None if it mixes examples of a batch or draws random numbers.

        Whether it does is found by comparing the scores of the first client that has examples with those
        on its examples alone.
        """
        clients = [(model, info.id) for model, infos in models for info in infos]
        place = next(k for k, (_, i) in enumerate(clients) if self._examples[i])
        first, i = clients[place]
        data = self.federation.clients[i]
        alone = ScoringPool([getattr(data, split) for split in SPLITS], loss=self.federation.loss)
        sets_of_first = slice(place * len(SPLITS), (place + 1) * len(SPLITS))
        is_equal = True
        with first.key.global_generators(data.train.y.device), full_precision():
            before = generator_states()
            scores = _measure(models, pool, self.metrics)
            for name, predict in first.predictors.items():
                expected, computed = measure(predict, alone).risk, scores[name].risk[sets_of_first]
                is_equal = is_equal and all(map(_is_close, expected, computed))
            is_random = generator_states() != before
        self._is_separable[first.model.name] = is_equal and not is_random
        if is_equal and not is_random:
            return scores
        why = "draws random numbers" if is_random else "mixes the examples of a batch"
        logger.warning("model %s %s: it is evaluated client by client", first.model.name, why)
        return None

    def _pool(self, clients: Sequence[int]) -> ScoringPool | None:
        """The splits of clients, one after another; None where inputs cannot be concatenated."""
        key = tuple(clients)
        pool = self._former_pools.pop(key, None)
        if pool is None:
            data = [self.federation.clients[i] for i in clients]
            pool = concatenate(
                [getattr(of_client, split) for of_client in data for split in SPLITS], self.federation.loss
            )
        if pool is not None and sum(p.bytes for p in self._pools.values()) + pool.bytes <= MAX_CACHED_BYTES:
            self._pools[key] = pool
        return pool


def evaluate_client(
    client: LocalModel,
    info: ClientInfo,
    data: ClientData,
    metrics: Mapping[str, Metric] | None = None,
    loss: Loss = AUTO,
) -> ClientTable:
    """What one client's models are worth on its own examples by the loss of the task, with further metrics by name."""
    device = data.train.y.device
    # a layer that is not standard may draw random numbers in evaluation, too
    generators = (
        contextlib.nullcontext() if client.model.is_standard else client.key.global_generators(device)
    )
    with torch.inference_mode(), generators:
        pool = pool_of(client.model, [getattr(data, split) for split in SPLITS], loss)
        scores = {name: measure(predict, pool, metrics) for name, predict in client.predictors.items()}
        return _table_of_models([(client, [info])], scores)


def _measure(models: ModelsOfClients, pool: ScoringPool, metrics: Mapping[str, Metric]) -> dict[str, Scores]:
    """Scores of models on the splits of their clients, by series."""
    predictors = [(model.predictors, len(SPLITS) * len(infos)) for model, infos in models]
    return {
        series: measure_each([(of_model[series], sets) for of_model, sets in predictors], pool, metrics)
        for series in predictors[0][0]
    }


def _table_of_models(models: ModelsOfClients, scores: Mapping[str, Scores]) -> ClientTable:
    """The table of the clients of models, given the scores of each series on the splits of one client after another."""
    sizes: list[tuple[Mapping[str, int], list[float]]] = []
    for model, infos in models:
        counts = {series: model.count_parameters(series) for series in scores}
        sizes += [(counts, model.routes or [])] * len(infos)
    return _table_of_scores([info.id for _, infos in models for info in infos], scores, sizes)


def _table_of_scores(
    clients: list[int], scores: Mapping[str, Scores], sizes: Sequence[tuple[Mapping[str, int], list[float]]]
) -> ClientTable:
    """The table of clients, given their scores and sizes.

    Args:
        clients: their identifiers.
        scores: of each series on the splits of one client after another.
        sizes: of each client the parameter count of every series, and its shares of clusters.
    """
    tables: dict[str, dict[str, list[float | None]]] = {
        ACCURACY: {
            series: scored.accuracy if scored.accuracy_name == ACCURACY else [None] * len(scored.accuracy)
            for series, scored in scores.items()
        },
        LOSS: {series: [_shorten(v) for v in scored.risk] for series, scored in scores.items()},
    }
    for name in sorted({scored.accuracy_name for scored in scores.values()} - {ACCURACY}):
        tables[name] = {series: scored.accuracy for series, scored in scores.items()}
    for name in next(iter(scores.values())).metrics:
        tables[name] = {
            series: [_shorten(v) for v in scored.metrics[name]] for series, scored in scores.items()
        }
    columns = [
        Column(name, series, split, values[k :: len(SPLITS)])
        for name, values_of_series in tables.items()
        for series, values in values_of_series.items()
        for k, split in enumerate(SPLITS)
    ]
    columns += [Column(PARAMETERS, series, "", [counts[series] for counts, _ in sizes]) for series in scores]
    routes = [shares for _, shares in sizes]
    columns += [
        Column(ROUTE, str(cluster), "", [s[cluster] if cluster < len(s) else None for s in routes])
        for cluster in range(max(map(len, routes)))
    ]
    return ClientTable(clients, columns)


def _shorten(value: float | None) -> float | None:
    """A loss or metric to six significant digits, of float32's seven: records stay small."""
    return value if value is None else float(f"{value:.6g}")


def _is_close(a: float | None, b: float | None) -> bool:
    """Whether two mean losses are equal up to the rounding of sums in another order."""
    if a is None or b is None:
        return a is b
    return math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-6) or (math.isnan(a) and math.isnan(b))
