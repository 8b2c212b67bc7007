"""The models of a cohort's clients, made by one call of the method and scored in one pass over the examples of all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.contract import AnyMethod, ClientInfo, ClientModel, ClientView, EngineModel, Task
from ..core.contract.client_model import Predictor
from ..core.contract.hook_results import check_client_model
from ..training.client_tensors.client_tensor import NoRuleError, with_rows
from ..training.client_tensors.control_flow import DifferingError, split_clients
from ..training.cohorts.cohort_view import Cohort
from ..training.local_data import channels_last
from .client_metrics import Metric
from .local_model import LocalModel
from .scoring import EXAMPLES_PER_LOSS_CALL, Scores, ScoringPool, measure_scores

MAX_PADDING_FACTOR = 2
"""How many times as many examples are scored as there are, where clients have fewer than others, before a cohort is divided."""


class CohortModels:
    """The models that the clients of a cohort would use now, as tensors that are stacked.

    Args:
        method: says which.
        task: what is learnt.
        server: state of the server.
        round: counted from 0.
        infos: of the clients.
        cohort: the clients with their states and messages.
        pool: their sets of examples, one client after another.
    """

    def __init__(
        self,
        method: AnyMethod,
        task: Task,
        server: Any,
        round: int,
        infos: Sequence[ClientInfo],
        cohort: Cohort,
        pool: ScoringPool,
    ) -> None:
        info: Any = cohort.info
        key: Any = cohort.key
        state, message = cohort.value
        model = task.model(infos[0])
        view = ClientView(info, task, model, round, key, cohort.trainer)
        self._infos, self._pool, self._key = infos, pool, key
        with torch.inference_mode(False):
            self._client_model = check_client_model(method, method.client_model(state, message, view))
            self._server = method.server_model(server, state, view)
        self.model: EngineModel = view.model

    def predictors(self) -> dict[str, Predictor]:
        """Functions from inputs of all clients ``[K·b, ...]`` to scores by series, the headline first."""
        return LocalModel(self._client_model, self.model, self._key, self._server).predictors

    def sizes(self) -> list[tuple[dict[str, int], list[float]]]:
        """Of each client the parameter count of every series, and the shares of clusters."""
        count, names = len(self._infos), [*self.predictors()]
        parts = split_clients(dict(self._client_model.parts), count)
        routes = split_clients(self._client_model.routes, count)
        sizes = []
        for parts_of_client, shares in zip(parts, routes, strict=True):
            client_model = ClientModel({}, self._client_model.series, parts_of_client, shares)
            local = LocalModel(client_model, self.model, self._key, self._server)
            sizes.append(({name: local.count_parameters(name) for name in names}, local.routes or []))
        return sizes

    def score(self, sets: int, metrics: Mapping[str, Metric]) -> dict[str, tuple[Tensor, Scores]]:
        """The scores of every series on the examples of all clients, and what they are worth.

        Args:
            sets: of each client.
            metrics: further ones by name.

        Raises:
            DifferingError: to divide the cohort into clients with 1, 2 to 3, 4 to 7, 8 to 15 ... examples, if most of what
                would be scored is padding.
            NoRuleError: if the scores are not one row an example, or padding does not pay.
        """
        lengths = self._pool.lengths
        counts = [sum(lengths[k : k + sets]) for k in range(0, len(lengths), sets)]
        if len(counts) * max(counts) > MAX_PADDING_FACTOR * sum(counts):
            # models that are parameters alone are scored together one after another, without padding
            model = self._client_model
            if not callable(model.params) and not any(map(callable, model.series.values())):
                raise NoRuleError("clients with very different numbers of examples")
            raise DifferingError([count.bit_length() for count in counts])
        (whole,) = self._pool.passes
        scores_of_series = {}
        for series, predict in self.predictors().items():
            scores = score_by_rows(predict, whole.x, counts)
            scores_of_series[series] = scores, measure_scores([(scores, whole.y)], self._pool, metrics)
        return scores_of_series


def score_by_rows(predict: Predictor, inputs: Any, counts: Sequence[int]) -> Tensor:
    """Scores by the models of K clients, each of its own examples.

    Args:
        predict: takes inputs ``[K·b, ...]``, as many of each client.
        inputs: of all examples, one client after another.
        counts: examples of each client.

    Raises:
        NoRuleError: if a score is not one row an example.
    """
    clients, longest, total = len(counts), max(counts), sum(counts)
    lengths = torch.tensor(counts, device=inputs.device)
    starts = lengths.cumsum(0) - lengths
    columns = torch.arange(longest, device=inputs.device)
    is_own = columns < lengths[:, None]
    # a client with fewer examples repeats its last one; one without any has another's, which is not used
    places = starts[:, None] + torch.minimum(columns, (lengths - 1).clamp(min=0)[:, None])
    places = places.clamp(max=total - 1)
    width = max(1, EXAMPLES_PER_LOSS_CALL // clients)
    parts = []
    with with_rows():
        for first in range(0, longest, width):
            index = places[:, first : first + width]
            scores = predict(channels_last(inputs.index_select(0, index.flatten())))
            if len(scores) != index.numel():
                raise NoRuleError("scores that are not one row an example")
            parts.append(scores.as_subclass(Tensor).unflatten(0, index.shape))
    return torch.cat(parts, 1)[is_own]
