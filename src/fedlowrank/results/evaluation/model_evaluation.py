"""Evaluates models in one pass if they share a module, and client by client otherwise."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...core.contract import ClientInfo
from ...core.errors import naming
from ...core.key import generator_states
from ...core.learning.losses import AUTO, Loss
from ...data.dataset import ClientData
from ...data.federation import Federation
from ...training.cohorts.closeness import full_precision
from ..client_metrics import Metric
from ..client_numbers import SPLITS
from ..measurements import ClientTable
from .evaluation_table import tabulate_models
from .local_model import LocalModel, RoundModels, SharedModel, share_models
from .pools import PoolCache, ScoringPool, list_sets, make_pool
from .scoring import SetResults, measure_predictor, measure_predictors

logger = logging.getLogger(__name__)


class ModelEvaluation:
    """Evaluates the models of clients.

    Models that are the same tensors, and models that are parameters of one module of standard layers, are scored in
    one pass over the concatenated sets of their clients. The first pass of a module is compared with the results of
    one client evaluated alone. A module that mixes the examples of a batch or draws random numbers is scored client
    by client.

    Args:
        federation: clients and their data.
        pools: cache that concatenates the sets of clients.
        metrics: further metrics by name.
    """

    def __init__(self, federation: Federation, pools: PoolCache, metrics: Mapping[str, Metric]) -> None:
        self._federation, self._pools, self._metrics = federation, pools, metrics
        # by name of a module, whether the scores of an example depend only on this example
        self._is_separable: dict[str, bool] = {}

    def evaluate(
        self, infos: Sequence[ClientInfo], round_models: RoundModels, is_trained: bool = True
    ) -> ClientTable:
        """Evaluate the models of clients.

        Args:
            infos: records of the clients.
            round_models: factory of the clients' models.
            is_trained: whether models are trained; False before the first round, when a module that mixes the examples
                of a batch may give equal scores by chance, such as one whose last layer begins at zero.
        """
        tables: list[ClientTable] = []
        for module_models in group_by_module(share_models(infos, round_models)):
            results = self._measure_in_one_pass(module_models, is_trained)
            if results is None:
                tables += self._evaluate_one_by_one(module_models, round_models)
            else:
                tables.append(tabulate_models(module_models, results))
        return ClientTable.join(tables)

    def _measure_in_one_pass(
        self, models: Sequence[SharedModel], is_trained: bool
    ) -> dict[str, SetResults] | None:
        """Measure the models of one module on the sets of their clients, by series.

        Returns:
            The results, or None if clients must be evaluated one by one.
        """
        module = models[0].model.model
        has_one_client = len(models) == len(models[0].clients) == 1
        if has_one_client or module.couples or module.has_hooks:
            return None
        if self._is_separable.get(module.name) is False:
            return None
        pool = self._pools.concatenate([info.id for shared_model in models for info in shared_model.clients])
        if pool is None:
            return None
        with torch.inference_mode():
            if module.name in self._is_separable:
                return _measure_models(models, pool, self._metrics)
            return self._measure_with_check(models, pool, is_trained)

    def _measure_with_check(
        self, models: Sequence[SharedModel], pool: ScoringPool, is_trained: bool
    ) -> dict[str, SetResults] | None:
        """Measure by a module; None if it mixes the examples of a batch or draws random numbers.

        The check compares the mean losses of the first client that has examples with those of this client evaluated
        alone.
        """
        clients_with_models = [
            (shared_model.model, info.id) for shared_model in models for info in shared_model.clients
        ]
        counts = pool.count_examples(len(SPLITS))
        position = next(k for k, count in enumerate(counts) if count)
        model, client_id = clients_with_models[position]
        single_pool = self._pools.make_single(client_id)
        set_slice = slice(position * len(SPLITS), (position + 1) * len(SPLITS))
        is_equal = True
        device = self._federation.clients[client_id].train.y.device
        with model.key.global_generators(device), full_precision():
            initial_states = generator_states()
            results = _measure_models(models, pool, self._metrics)
            for series, predict in model.predictors.items():
                expected, actual = (
                    measure_predictor(predict, single_pool).loss,
                    results[series].loss[set_slice],
                )
                is_equal = is_equal and all(map(_is_equal_mean_loss, expected, actual))
            is_random = generator_states() != initial_states
        name = model.model.name
        is_separable = is_equal and not is_random
        # untrained models are compared again later
        if is_trained or not is_separable:
            self._is_separable[name] = is_separable
        if is_separable:
            return results
        reason = "draws random numbers" if is_random else "mixes the examples of a batch"
        logger.warning("model %s %s: it is evaluated client by client", name, reason)
        return None

    def _evaluate_one_by_one(
        self, models: Sequence[SharedModel], round_models: RoundModels
    ) -> list[ClientTable]:
        """Evaluate the clients one by one, each with a model of its own."""
        tables = []
        for shared_model in models:
            for info in shared_model.clients:
                model = shared_model.model if len(shared_model.clients) == 1 else round_models.make(info)
                data = self._federation.clients[info.id]
                with naming(f"{info.title}, whose examples are evaluated as one batch"):
                    loss, class_count = self._federation.loss, len(self._federation.classes)
                    tables.append(evaluate_client(model, info, data, self._metrics, loss, class_count))
        return tables


def evaluate_client(
    model: LocalModel,
    info: ClientInfo,
    data: ClientData,
    metrics: Mapping[str, Metric] | None = None,
    loss: Loss = AUTO,
    class_count: int = 0,
) -> ClientTable:
    """Evaluate the model of one client on its own examples.

    Args:
        model: model of the client.
        info: record of the client.
        data: examples of the client.
        metrics: further metrics by name.
        loss: loss of the task.
        class_count: number of classes, which a loss of the user's own needs.
    """
    with torch.inference_mode(), model.fixed_generators(data.train.y.device):
        pool = make_pool(model.model, list_sets(data), loss, class_count)
        results = {
            series: measure_predictor(predict, pool, metrics) for series, predict in model.predictors.items()
        }
        return tabulate_models([SharedModel(model, [info])], results)


def group_by_module(models: Sequence[SharedModel]) -> list[list[SharedModel]]:
    """Group the models that may be scored in one pass.

    A function of the method and a user's module are called for one model at a time.
    """
    modules = {id(shared_model.model.model): shared_model.model.model for shared_model in models}
    is_standard = {i: module.is_standard for i, module in modules.items()}
    groups: dict[Any, list[SharedModel]] = {}
    for index, shared_model in enumerate(models):
        model = shared_model.model
        may_join = is_standard[id(model.model)] and not model.is_computed
        key = (model.model, *model.client_model.series) if may_join else index
        groups.setdefault(key, []).append(shared_model)
    return list(groups.values())


def _measure_models(
    models: Sequence[SharedModel], pool: ScoringPool, metrics: Mapping[str, Metric]
) -> dict[str, SetResults]:
    """Compute the results of models on the sets of their clients, by series."""
    predictors = [
        (shared_model.model.predictors, len(SPLITS) * len(shared_model.clients)) for shared_model in models
    ]
    return {
        series: measure_predictors(
            [(model_predictors[series], set_count) for model_predictors, set_count in predictors],
            pool,
            metrics,
        )
        for series in predictors[0][0]
    }


def _is_equal_mean_loss(a: float | None, b: float | None) -> bool:
    """Whether two mean losses are equal up to the rounding of sums in another order."""
    if a is None or b is None:
        return a is b
    return math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-6) or (math.isnan(a) and math.isnan(b))
