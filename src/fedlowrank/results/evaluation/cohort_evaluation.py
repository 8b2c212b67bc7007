"""Evaluates the models of a cohort's clients: one call of the method makes all models, and one pass scores all examples."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...core.contract import ClientInfo, ClientModel, ClientView, EngineModel
from ...core.contract.client_model import Predictor
from ...core.contract.download_cache import Downloads
from ...core.contract.training_request import Trainer
from ...models.standard import channels_last
from ...training.client_tensors.client_tensor import NoRuleError, with_rows
from ...training.client_tensors.control_flow import DifferingError, split_clients
from ...training.cohorts.closeness import full_precision, is_close
from ...training.cohorts.cohort_view import Cohort
from ...training.kept_optimizers import split_optimizers
from ..client_metrics import Metric
from ..client_numbers import SPLITS
from ..measurements import ClientTable
from .evaluation_table import ModelSize, tabulate_results
from .local_model import LocalModel, RoundModels
from .model_checks import check_models
from .pools import PoolCache, ScoringPool
from .scoring import EXAMPLES_PER_LOSS_CALL, measure_scores, score_sets

MAX_PADDING_FACTOR = 2
"""Ratio of scored examples, including padding, to the clients' own, above which a cohort is divided."""


class CohortEvaluation:
    """Evaluates clients whose states and messages have one form by one call of the method.

    The first cohort of an architecture is compared with one of its clients evaluated alone.

    Args:
        pools: cache that concatenates the sets of clients.
        metrics: further metrics by name.

    Attributes:
        is_given_up: whether a cohort failed, so that clients are evaluated as in engines without cohorts from the
            next call on.
    """

    def __init__(self, pools: PoolCache, metrics: Mapping[str, Metric]) -> None:
        self._pools, self._metrics = pools, metrics
        self.is_given_up = False
        # by architecture, whether a client has the same scores alone and in a cohort
        self._is_equal: dict[str, bool] = {}

    def evaluate(
        self, infos: Sequence[ClientInfo], round_models: RoundModels, is_trained: bool
    ) -> tuple[list[ClientTable], dict[int, Trainer]]:
        """Evaluate the clients that form cohorts.

        Args:
            infos: records of the clients.
            round_models: factory of the clients' models.
            is_trained: whether models are trained; False before the first round, when they may be equal by chance.

        Returns:
            The tables of the cohorts, and the trainers of the clients that are in no cohort, by client.
        """
        downloads = Downloads(round_models.method, round_models.server)
        arguments = [
            (info, (split_optimizers(round_models.state_of(info))[0], downloads.message_to(info)))
            for info in infos
        ]
        results: list[ClientTable | tuple[int, Trainer]] = round_models.engine.map_clients(
            round_models.method,
            round_models.federation,
            round_models.round,
            arguments,
            lambda position, trainer: (infos[position].id, trainer),
            lambda cohort: [self._evaluate_cohort(cohort, infos, round_models, is_trained)],
        )
        tables = [result for result in results if isinstance(result, ClientTable)]
        trainers = dict(result for result in results if not isinstance(result, ClientTable))
        return tables, trainers

    def _evaluate_cohort(
        self, cohort: Cohort, infos: Sequence[ClientInfo], round_models: RoundModels, is_trained: bool
    ) -> ClientTable:
        """Evaluate a cohort, and give up cohorts if that fails."""
        cohort_infos = [infos[position] for position in cohort.positions]
        try:
            return self._measure_cohort(cohort, cohort_infos, round_models, is_trained)
        except (Exception, NoRuleError):
            # an operation without a rule, or an error of the method, which a single client raises again
            self.is_given_up = True
            raise

    def _measure_cohort(
        self, cohort: Cohort, infos: Sequence[ClientInfo], round_models: RoundModels, is_trained: bool
    ) -> ClientTable:
        """Evaluate a cohort; raises NoRuleError if its clients are to be evaluated one by one."""
        architecture = infos[0].architecture
        pool = self._pools.concatenate([info.id for info in infos])
        model = round_models.task.model(infos[0])
        is_known_equal = self._is_equal.get(architecture)
        if pool is None or model.couples or model.has_hooks or is_known_equal is False:
            raise NoRuleError("models that are evaluated client by client")
        models = CohortModels(round_models, infos, cohort, pool)
        with torch.inference_mode(), contextlib.nullcontext() if is_known_equal else full_precision():
            scores = models.score()
            labels = pool.passes[0].y
            results = {
                series: measure_scores([(series_scores, labels)], pool, self._metrics)
                for series, series_scores in scores.items()
            }
            if is_known_equal is None:
                is_equal = self._matches_single_client(infos, scores, pool, round_models)
                # untrained models are compared again later
                if not is_equal or is_trained:
                    self._is_equal[architecture] = is_equal
                if not is_equal:
                    raise NoRuleError("scores that are others for one client alone")
        return tabulate_results([info.id for info in infos], results, models.sizes())

    def _matches_single_client(
        self,
        infos: Sequence[ClientInfo],
        scores: Mapping[str, Tensor],
        pool: ScoringPool,
        round_models: RoundModels,
    ) -> bool:
        """Whether the last client that has examples gets the same scores when its model is evaluated alone."""
        counts = pool.count_examples(len(SPLITS))
        position = max(k for k, count in enumerate(counts) if count)
        end = sum(counts[: position + 1])
        rows = slice(end - counts[position], end)
        single_pool = self._pools.make_single(infos[position].id)
        predictors = round_models.make(infos[position]).predictors
        return predictors.keys() == scores.keys() and all(
            is_close(scores[series][rows], score_sets(predict, single_pool))
            for series, predict in predictors.items()
        )


class CohortModels:
    """The current models of a cohort's clients, as stacked tensors.

    Args:
        round_models: factory of the models, with the method, its task and its server.
        infos: records of the clients.
        cohort: clients with their states and messages.
        pool: sets of examples of the clients, one client after another.
    """

    def __init__(
        self, round_models: RoundModels, infos: Sequence[ClientInfo], cohort: Cohort, pool: ScoringPool
    ) -> None:
        info: Any = cohort.info
        key: Any = cohort.key
        state, message = cohort.value
        method, task = round_models.method, round_models.task
        model = task.model(infos[0])
        view = ClientView(info, task, model, round_models.round, key, cohort.trainer)
        self._infos, self._pool, self._key = infos, pool, key
        with torch.inference_mode(False):
            client_model = method.client_model(state, message, view)
            self._server = method.server_model(round_models.server, state, view)
            self._client_model = check_models(
                method, client_model, self._server, model, round_models.federation, infos[0]
            )
        self.model: EngineModel = model

    def predictors(self) -> dict[str, Predictor]:
        """Functions from inputs of all clients ``[K·b, ...]`` to scores by series, the headline first."""
        return LocalModel(self._client_model, self.model, self._key, self._server).predictors

    def sizes(self) -> list[ModelSize]:
        """Compute the size of each client's model."""
        client_count, all_series = len(self._infos), [*self.predictors()]
        parts = split_clients(dict(self._client_model.parts), client_count)
        routes = split_clients(self._client_model.routes, client_count)
        sizes = []
        for parts_of_client, shares in zip(parts, routes, strict=True):
            client_model = ClientModel({}, self._client_model.series, parts_of_client, shares)
            local_model = LocalModel(client_model, self.model, self._key, self._server)
            parameters = {series: local_model.count_parameters(series) for series in all_series}
            sizes.append(ModelSize(parameters, local_model.routes or []))
        return sizes

    def score(self) -> dict[str, Tensor]:
        """Compute the scores of every series on the examples of all clients, one client after another.

        Raises:
            DifferingError: to divide the cohort into clients with 1, 2 to 3, 4 to 7, 8 to 15 ... examples, if most of
                the scored rows would be padding.
            NoRuleError: if the scores are not one row for each example, or if padding does not pay.
        """
        counts = self._pool.count_examples(len(SPLITS))
        if len(counts) * max(counts) > MAX_PADDING_FACTOR * sum(counts):
            # models without functions are scored one after another, without padding
            model = self._client_model
            if not callable(model.params) and not any(map(callable, model.series.values())):
                raise NoRuleError("clients with very different numbers of examples")
            raise DifferingError([count.bit_length() for count in counts])
        (examples,) = self._pool.passes
        return {
            series: score_by_rows(predict, examples.x, counts)
            for series, predict in self.predictors().items()
        }


def score_by_rows(predict: Predictor, inputs: Any, counts: Sequence[int]) -> Tensor:
    """Compute scores by the models of K clients, each on its own examples.

    Args:
        predict: predictor of inputs ``[K·b, ...]``, with b examples of each client.
        inputs: inputs of all examples, one client after another.
        counts: numbers of examples of the clients.

    Raises:
        NoRuleError: if the scores are not one row for each example.
    """
    client_count, max_count, example_count = len(counts), max(counts), sum(counts)
    lengths = torch.tensor(counts, device=inputs.device)
    starts = lengths.cumsum(0) - lengths
    columns = torch.arange(max_count, device=inputs.device)
    is_own = columns < lengths[:, None]
    # a client with fewer examples repeats its last one; a client without any has another's, which is not used
    row_indices = starts[:, None] + torch.minimum(columns, (lengths - 1).clamp(min=0)[:, None])
    row_indices = row_indices.clamp(max=example_count - 1)
    width = max(1, EXAMPLES_PER_LOSS_CALL // client_count)
    chunks = []
    with with_rows():
        for start in range(0, max_count, width):
            index = row_indices[:, start : start + width]
            scores = predict(channels_last(inputs.index_select(0, index.flatten())))
            if len(scores) != index.numel():
                raise NoRuleError("scores that are not one row an example")
            chunks.append(scores.as_subclass(Tensor).unflatten(0, index.shape))
    return torch.cat(chunks, 1)[is_own]
