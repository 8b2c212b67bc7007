"""Number of clients of a run, with which the server and every client compute."""

from __future__ import annotations

from ...config.experiment import ExperimentConfig
from ...core.errors import ConfigError


def count_clients(experiment: ExperimentConfig) -> int:
    """Number of clients of an experiment; raises ConfigError if it is not set."""
    count = experiment.network.clients or getattr(experiment.partition, "clients", None)
    if count is None:
        raise ConfigError("how many clients there are depends on the data; set network.clients")
    return int(count)


def check_client_count(experiment: ExperimentConfig, client_count: int, share_count: int) -> None:
    """Refuse fewer clients than there are shares of the experiment's own data, since some shares would have no client.

    Raises:
        ConfigError: if there are fewer clients than shares.
    """
    if client_count < share_count:
        field = "network.clients" if experiment.network.clients else "partition.clients"
        raise ConfigError(
            f"{field} is {client_count}, but the experiment's data have {share_count} clients, so that the data of "
            f"{share_count - client_count} would be left out. Set it to {share_count} on the server and on all clients."
        )
