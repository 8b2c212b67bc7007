"""New rows of a table, prepared for the models of a stored run in the same way as their training rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ..core.errors import ConfigError
from ..data.dataset import ClientData, Examples, normalize, standardize_client
from ..data.datasets.csv_table import Csv
from ..data.partitioning.concept import Concept, NaturalClusters
from .assembly import share_data
from .experiment import ExperimentConfig
from .stored_run import read_run_config
from .working_folder import enter_working_folder


@dataclass(frozen=True)
class NewRows:
    """Rows of a table as inputs of models.

    Attributes:
        inputs: function from a client's number to inputs float32 [n, features] for the client's model.
        clients: name of each row's client; None if the table has no such column.
    """

    inputs: Callable[[int], Tensor]
    clients: tuple[str, ...] | None


def read_new_rows(folder: Path, rows: Path, allow_code: bool = False) -> NewRows:
    """Read the rows of a table as inputs for the models of a run.

    Categories, means of empty cells and normalization are those of the run's training part, which is read again.

    Args:
        folder: folder of a run that an experiment file made, with the source ``csv``.
        rows: path of the table, which must have the columns of the inputs.
        allow_code: see :func:`.stored_run.open_run`.

    Raises:
        ConfigError: if the run's data are no table, or its concept changes the inputs or labels of clients.
        DataError: if the table lacks a column or a cell cannot be used.
    """
    stored_config, rows = (
        read_run_config(folder, "predict by simulate(...).predict(client, rows)"),
        rows.absolute(),
    )
    with enter_working_folder(folder, stored_config):
        experiment = ExperimentConfig.parse(
            stored_config["experiment"], allow_code, stored_config["method"]["name"]
        )
        return prepare_new_rows(experiment, rows)


def prepare_new_rows(experiment: ExperimentConfig, rows: Path) -> NewRows:
    """Read the rows of a table as inputs for models of an experiment; see :func:`read_new_rows`."""
    source, normalization = experiment.data.source, experiment.data.preparation.normalize
    if not isinstance(source, Csv):
        raise ConfigError(
            "new rows are the columns of a table, and the data of this run are of another source than 'csv'.",
            python="Call result.predict(client, inputs) with prepared inputs.",
            command="Leave out --rows. In Python, result.predict(client, inputs) takes prepared inputs.",
        )
    if type(experiment.concept) not in (Concept, NaturalClusters):
        raise ConfigError(
            "the concept of this run changes the examples of clients, so that new rows have no single meaning"
        )
    dataset, clients = source.load_with_rows(str(rows))
    test = normalize(dataset, normalization).test
    assert test is not None
    if normalization != "standard_per_client":
        inputs = test.x
        assert isinstance(inputs, Tensor)
        return NewRows(lambda _: inputs, clients)
    client_data = share_data(experiment, standardize=False).data
    return NewRows(lambda client: _standardize(client_data[client], test), clients)


def _standardize(client: ClientData, rows: Examples) -> Tensor:
    """Standardize rows with the statistics of a client's training examples."""
    inputs = standardize_client(dataclasses.replace(client, test=rows)).test.x
    assert isinstance(inputs, Tensor)
    return inputs
