"""Tabulates the results of clients: one column for each number, series and split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..client_numbers import ACCURACY, LOSS, PARAMETERS, ROUTE, SPLITS
from ..measurements import ClientTable, Column
from .local_model import SharedModel
from .scoring import SetResults


class ModelSize(NamedTuple):
    """Numbers of a client's model that do not depend on examples.

    Attributes:
        parameters: parameter count of the model of each series.
        routes: share of each cluster; empty for a method without clusters.
    """

    parameters: Mapping[str, int]
    routes: list[float]


def tabulate_models(models: Sequence[SharedModel], results: Mapping[str, SetResults]) -> ClientTable:
    """Tabulate the results of the clients of some models.

    Args:
        models: models with the clients that use them.
        results: results of each series on the sets of one client after another.
    """
    sizes: list[ModelSize] = []
    for model, clients in ((shared_model.model, shared_model.clients) for shared_model in models):
        parameters = {series: model.count_parameters(series) for series in results}
        sizes += [ModelSize(parameters, model.routes or [])] * len(clients)
    return tabulate_results(
        [info.id for shared_model in models for info in shared_model.clients], results, sizes
    )


def tabulate_results(
    client_ids: list[int], results: Mapping[str, SetResults], sizes: Sequence[ModelSize]
) -> ClientTable:
    """Tabulate the results of clients with the sizes of their models.

    Args:
        client_ids: identifiers of the clients.
        results: results of each series on the sets of one client after another.
        sizes: sizes of the clients' models.
    """
    values: dict[str, dict[str, list[float | None]]] = {
        ACCURACY: {
            series: set_results.accuracy
            if set_results.accuracy_name == ACCURACY
            else [None] * len(set_results.accuracy)
            for series, set_results in results.items()
        },
        LOSS: {series: [_shorten(v) for v in set_results.loss] for series, set_results in results.items()},
    }
    for name in sorted({set_results.accuracy_name for set_results in results.values()} - {ACCURACY}):
        values[name] = {series: set_results.accuracy for series, set_results in results.items()}
    for name in next(iter(results.values())).metrics:
        values[name] = {
            series: [_shorten(v) for v in set_results.metrics[name]]
            for series, set_results in results.items()
        }
    columns = [
        Column(name, series, split, set_values[k :: len(SPLITS)])
        for name, values_of_series in values.items()
        for series, set_values in values_of_series.items()
        for k, split in enumerate(SPLITS)
    ]
    columns += [
        Column(PARAMETERS, series, "", [size.parameters[series] for size in sizes]) for series in results
    ]
    columns += [
        Column(ROUTE, str(c), "", [s.routes[c] if c < len(s.routes) else None for s in sizes])
        for c in range(max(len(size.routes) for size in sizes))
    ]
    return ClientTable(client_ids, columns)


def _shorten(value: float | None) -> float | None:
    """Round a loss or metric to six of float32's seven significant digits, which keeps records small."""
    return value if value is None else float(f"{value:.6g}")
