"""What every client's own model is worth on its own validation and test examples, and what it takes."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import methodcaller
from typing import Any

import torch

from ..core.errors import naming
from ..core.key import generator_states
from ..core.losses import AUTO, Loss
from ..core.method import ClientInfo, Task
from ..data.dataset import ClientData
from ..data.federation import Federation
from ..engines.base import AnyMethod, Engine
from .client_metrics import Metric
from .local_model import LocalModel, local_model
from .records import Accuracy, RoundRecord
from .scoring import Scores, ScoringPool, concatenate, measure, measure_each, pool_of

Models = Sequence[tuple[LocalModel, Sequence[ClientInfo]]]
"""Models, each with the clients that use it."""

SPLITS = ("val", "test")

BLOCK = 4096
"""Examples of the clients in a block, the unit of work that an engine maps over."""

CACHE = 1 << 30
"""Bytes of concatenated inputs that are kept from one evaluation to the next."""

_NAMED = 5
"""Clients that one warning names."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ClientEvaluation:
    """What one client's models are worth, and what they take.

    Attributes:
        accuracy: series by name, the headline first; in each, the number of each split.
        risk: the mean loss on the same examples, in the same form.
        parameters: how many numbers the model of each series takes.
        routes: its share of each cluster, if the method has clusters.
        metrics: further ones by name, each in the form of the accuracy.
    """

    accuracy: dict[str, dict[str, float | None]]
    risk: dict[str, dict[str, float | None]]
    parameters: dict[str, int]
    routes: list[float] | None = None
    metrics: dict[str, dict[str, dict[str, float | None]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Evaluation:
    """What the models of several clients are worth, and what they take.

    Attributes:
        accuracy: series by name, the headline first; in each the splits; in each one number a client.
        risk: the mean loss on the same examples, in the same form.
        routes: each client's share of each cluster; None if the method has no clusters, or if not all clients
            are known.
        parameters: series by name; in each, how many numbers the model of each client takes; None if not all
            are known.
        metrics: further ones by name, each in the form of the accuracy.
    """

    accuracy: Accuracy
    risk: Accuracy
    routes: list[list[float]] | None
    parameters: dict[str, list[int]] | None
    metrics: dict[str, Accuracy] = field(default_factory=dict)


class Evaluator:
    """Evaluates the models that clients would use now, those of clients that never took part included.

    Clients whose models are the very same tensors are evaluated in one pass over their concatenated examples.
    Where models differ but not their module of standard layers, each scores its own rows of them.

    Args:
        method: says how a client infers.
        federation: the clients.
        task: what is learnt.
        engine: maps over blocks of clients; also executes what a method does to its model before it infers
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
        self._not_finite: set[int] = set()

    def evaluate(
        self,
        server: Any,
        state_of: Callable[[ClientInfo], Any],
        round: int,
        clients: Sequence[ClientInfo] | None = None,
    ) -> Evaluation:
        """Accuracy, loss, routes and size of every client's model.

        Args:
            server: its state after the round.
            state_of: state of a client, fresh for one that never took part.
            round: counted from 0.
            clients: whom to evaluate; None for all. The others have None in the place of their numbers.
        """

        def model_of(info: ClientInfo) -> LocalModel:
            state = state_of(info)
            return local_model(
                self.method, self.federation, self.task, self.engine, state, info, round, server=server
            )

        def work(block: Sequence[ClientInfo]) -> dict[str, Any]:
            return vars(self._evaluate_block(block, model_of))

        everyone = self.federation.infos
        blocks = self._blocks(everyone if clients is None else clients)
        self._pools, self._former_pools = {}, self._pools
        found = self.engine.each(work, blocks)
        self._former_pools = {}
        parts = [([i.id for i in b], Evaluation(**f)) for b, f in zip(blocks, found, strict=True)]
        evaluation = scatter(parts, len(everyone))
        self._warn_of_not_finite(evaluation.risk)
        return evaluation

    def _warn_of_not_finite(self, risk: Accuracy) -> None:
        """Name once each client with a loss that means leave out."""
        found: dict[int, str] = {}
        for series, splits in risk.items():
            for split, row in splits.items():
                for client, loss in enumerate(row):
                    if loss is not None and not math.isfinite(loss) and client not in self._not_finite:
                        n = len(getattr(self.federation.clients[client], split))
                        examples = f"{n} {split} example{'' if n == 1 else 's'}"
                        title = self.federation.infos[client].title
                        found.setdefault(client, f"{title} ({series} model, {examples})")
        self._not_finite |= found.keys()
        if found:
            named = [*found.values()]
            logger.warning(
                "the loss is not finite at %s%s: its scores hold a NaN or an infinity. Means over clients leave the "
                "loss out, and such examples count as wrong",
                ", ".join(named[:_NAMED]),
                f" and {len(named) - _NAMED} more clients" if len(named) > _NAMED else "",
            )

    def _blocks(self, infos: Sequence[ClientInfo]) -> list[list[ClientInfo]]:
        """Consecutive clients with about BLOCK examples together; the same for every engine."""
        blocks: list[list[ClientInfo]] = []
        examples = BLOCK
        for info in infos:
            if examples >= BLOCK:
                blocks.append([])
                examples = 0
            blocks[-1].append(info)
            examples += self._examples[info.id]
        return blocks

    def _evaluate_block(
        self, infos: Sequence[ClientInfo], model_of: Callable[[ClientInfo], LocalModel]
    ) -> Evaluation:
        groups: dict[Any, list[int]] = {}
        models: dict[Any, LocalModel] = {}
        own = self.task.architectures.values()
        is_global = self.method.one_model and not any(model.buffers or model.couples for model in own)
        for place, info in enumerate(infos):
            # the server's own model needs no look at every client
            shared: Any = info.architecture if is_global else None
            if shared not in models:
                model = model_of(info)
                shared = shared or model.identity or info.id
                models.setdefault(shared, model)
            groups.setdefault(shared, []).append(place)
        parts = []
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
            scores = self._score_together([(model, [infos[i] for i in places]) for model, places in same])
            if scores is not None:
                parts.append(([i for _, places in same for i in places], _of_models(same, scores)))
                continue
            for model, places in same:
                for place in places:
                    client = model if len(places) == 1 else model_of(infos[place])
                    data = self.federation.clients[infos[place].id]
                    with naming(f"{infos[place].title}, whose examples are evaluated as one batch"):
                        found = evaluate_client(client, data, self.metrics, self.federation.loss)
                        parts.append(([place], as_table(found)))
        return scatter(parts, len(infos))

    def _score_together(self, models: Models) -> dict[str, Scores] | None:
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
            return self._checked(models, pool)

    def _checked(self, models: Models, pool: ScoringPool) -> dict[str, Scores] | None:
        """Scores by a module; None if it mixes examples of a batch or draws random numbers.

        Whether it does is found by comparing the scores of the first client that has examples with those
        on its examples alone.
        """
        clients = [(model, info.id) for model, infos in models for info in infos]
        place = next(k for k, (_, i) in enumerate(clients) if self._examples[i])
        first, i = clients[place]
        data = self.federation.clients[i]
        alone = ScoringPool([getattr(data, split) for split in SPLITS], loss=self.federation.loss)
        own = slice(place * len(SPLITS), (place + 1) * len(SPLITS))
        is_equal = True
        with first.key.global_generators(data.train.y.device):
            before = generator_states()
            found = _measure(models, pool, self.metrics)
            for name, predict in first.predictors.items():
                expected, got = measure(predict, alone).risk, found[name].risk[own]
                is_equal = is_equal and all(map(_is_close, expected, got))
            draws = generator_states() != before
        self._is_separable[first.model.name] = is_equal and not draws
        if is_equal and not draws:
            return found
        why = "draws random numbers" if draws else "mixes the examples of a batch"
        logger.warning("model %s %s: it is evaluated client by client", first.model.name, why)
        return None

    def _pool(self, clients: Sequence[int]) -> ScoringPool | None:
        """The splits of clients, one after another; None where inputs cannot be concatenated."""
        key = tuple(clients)
        pool = self._former_pools.pop(key, None)
        if pool is None:
            data = [self.federation.clients[i] for i in clients]
            pool = concatenate(
                [getattr(own, split) for own in data for split in SPLITS], self.federation.loss
            )
        if pool is not None and sum(p.bytes for p in self._pools.values()) + pool.bytes <= CACHE:
            self._pools[key] = pool
        return pool


def evaluate_client(
    client: LocalModel,
    data: ClientData,
    metrics: Mapping[str, Metric] | None = None,
    loss: Loss = AUTO,
) -> ClientEvaluation:
    """What one client's models are worth on its own examples by the loss of the task, with further metrics by name."""
    device = data.train.y.device
    # a layer that is not standard may draw random numbers in evaluation, too
    draws = contextlib.nullcontext() if client.model.is_standard else client.key.global_generators(device)
    accuracy: dict[str, dict[str, float | None]] = {}
    risk: dict[str, dict[str, float | None]] = {}
    further: dict[str, dict[str, dict[str, float | None]]] = {name: {} for name in metrics or ()}
    with torch.inference_mode(), draws:
        predictors, pool = client.predictors, pool_of(client.model, [getattr(data, s) for s in SPLITS], loss)
        for name, predict in predictors.items():
            scores = measure(predict, pool, metrics)
            accuracy[name] = dict(zip(SPLITS, scores.accuracy, strict=True))
            risk[name] = dict(zip(SPLITS, scores.risk, strict=True))
            for metric, values in scores.metrics.items():
                further[metric][name] = dict(zip(SPLITS, values, strict=True))
        sizes = {name: client.count_parameters(name) for name in predictors}
        return ClientEvaluation(accuracy, risk, sizes, client.routes, further)


def as_table(found: ClientEvaluation) -> Evaluation:
    """The evaluation of a single client."""

    def table(values: dict[str, dict[str, float | None]]) -> Accuracy:
        return {name: {split: [v] for split, v in of.items()} for name, of in values.items()}

    routes = None if found.routes is None else [found.routes]
    sizes = {name: [count] for name, count in found.parameters.items()}
    metrics = {name: table(values) for name, values in found.metrics.items()}
    return Evaluation(table(found.accuracy), table(found.risk), routes, sizes, metrics)


def _measure(models: Models, pool: ScoringPool, metrics: Mapping[str, Metric]) -> dict[str, Scores]:
    """Scores of models on the splits of their clients, by series."""
    predictors = [(model.predictors, len(SPLITS) * len(infos)) for model, infos in models]
    return {
        name: measure_each([(of[name], sets) for of, sets in predictors], pool, metrics)
        for name in predictors[0][0]
    }


def _of_models(models: Sequence[tuple[LocalModel, Sequence[Any]]], scores: dict[str, Scores]) -> Evaluation:
    """The evaluation of clients whose models were scored together."""

    def table(values: Callable[[Scores], list[float | None]]) -> Accuracy:
        width = len(SPLITS)
        return {
            name: {split: values(of)[k::width] for k, split in enumerate(SPLITS)}
            for name, of in scores.items()
        }

    def metric(name: str) -> Accuracy:
        return table(lambda of: of.metrics[name])

    def each(value: Callable[[LocalModel], Any]) -> list[Any]:
        return [v for model, clients in models for v in [value(model)] * len(clients)]

    routes = each(lambda model: model.routes)
    sizes = {name: each(methodcaller("count_parameters", name)) for name in scores}
    accuracy, risk = table(lambda of: of.accuracy), table(lambda of: of.risk)
    metrics = {name: metric(name) for name in next(iter(scores.values())).metrics}
    return Evaluation(accuracy, risk, None if None in routes else routes, sizes, metrics)


def scatter(parts: Sequence[tuple[Sequence[int], Evaluation]], count: int) -> Evaluation:
    """One evaluation of several.

    Args:
        parts: evaluations, each with the places of its clients.
        count: of places; those that no part fills have None.

    Raises:
        ValueError: without a part.
    """
    if not parts:
        raise ValueError("no client was evaluated")
    if len(parts) == 1 and [*parts[0][0]] == [*range(count)]:
        return parts[0][1]
    series = parts[0][1].accuracy
    is_whole = sum(len(places) for places, _ in parts) == count

    def fill(values: Callable[[Evaluation], Sequence[Any]]) -> list[Any]:
        row: list[Any] = [None] * count
        for places, part in parts:
            # a client may measure other series than most
            for place, value in zip(places, values(part), strict=False):
                row[place] = value
        return row

    def table(values: Callable[[Evaluation], Accuracy]) -> Accuracy:
        def of(name: str, split: str) -> list[float | None]:
            return fill(lambda part: values(part).get(name, {}).get(split, ()))

        return {name: {split: of(name, split) for split in SPLITS} for name in series}

    def metric(name: str) -> Accuracy:
        return table(lambda part: part.metrics.get(name, {}))

    has_routes = is_whole and all(part.routes is not None for _, part in parts)

    def sizes_of(name: str) -> list[int]:
        return fill(lambda part: (part.parameters or {}).get(name, ()))

    return Evaluation(
        table(lambda part: part.accuracy),
        table(lambda part: part.risk),
        fill(lambda part: part.routes or ()) if has_routes else None,
        {name: sizes_of(name) for name in series} if is_whole else None,
        {name: metric(name) for name in parts[0][1].metrics},
    )


def gather_evaluations(found: Sequence[ClientEvaluation | None]) -> Evaluation:
    """The evaluations of all clients by identifier, None for a client that did not report.

    Raises:
        ValueError: if none is.
    """
    return scatter([([i], as_table(f)) for i, f in enumerate(found) if f is not None], len(found))


def _is_close(a: float | None, b: float | None) -> bool:
    """Whether two mean losses are equal up to the rounding of sums in another order."""
    if a is None or b is None:
        return a is b
    return math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-6) or (math.isnan(a) and math.isnan(b))


def evaluated(record: RoundRecord, found: Evaluation) -> RoundRecord:
    """The record with what was found."""
    return dataclasses.replace(
        record,
        accuracy=found.accuracy,
        risk=rounded(found.risk),
        routes=found.routes,
        parameters=found.parameters,
        metrics={name: rounded(table) for name, table in found.metrics.items()} or None,
    )


def rounded(risk: Accuracy) -> Accuracy:
    """Losses or metrics to six significant digits, of float32's seven: records stay small."""

    def short(row: list[float | None]) -> list[float | None]:
        return [value if value is None else float(f"{value:.6g}") for value in row]

    return {name: {split: short(row) for split, row in of.items()} for name, of in risk.items()}
