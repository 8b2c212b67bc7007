"""Checks of an experiment's settings that a server makes before it waits for clients."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...config.experiment import ExperimentConfig
from ...core import tree
from ...core.contract import AnyMethod, ServerView
from ...core.errors import ConfigError, FedlowrankError
from ...data.federation import Federation
from ...rounds.participation.devices import Devices
from ...rounds.run_settings import RunSettings
from ...training.tracing import trace_upload
from ...trust.abilities import abilities, require_ability
from ..secure.contributions import (
    check_reads_no_examples,
    compute_contribution,
    make_grid,
    make_zero_contribution,
)
from ..secure.distributed_noise import check_settings
from ..secure.rounds import SecureRounds, check_one_download
from ..secure.signing import MemberKeys
from ..validation.uploads import Templates
from .client_count import count_clients


def check_network_experiment(experiment: ExperimentConfig) -> int:
    """Refuse an experiment that no run over a network can have; neither data nor clients are needed for these checks.

    Returns:
        The number of clients.

    Raises:
        ConfigError: if a setting cannot work, or the number of clients is not set.
    """
    check_network_settings(experiment.run)
    return count_clients(experiment)


def check_flower_simulation(experiment: ExperimentConfig) -> int:
    """Refuse an experiment that Flower's simulation cannot run; see :func:`check_network_experiment`."""
    client_count = check_network_experiment(experiment)
    check_secure_start(experiment.run, client_count, client_count, None)
    return client_count


def check_network_settings(settings: RunSettings) -> None:
    """Refuse settings of a run that no run over a network can have.

    Raises:
        ConfigError: if a setting cannot work.
    """
    if settings.adapters:
        raise ConfigError(
            "run.adapters writes models of simulated clients; over a network the server and each client write their "
            "own at the end of the run. Leave run.adapters out"
        )
    if settings.keep_best:
        raise ConfigError(
            "run.keep_best: over a network a round's evaluation is known when the next round is over, "
            "and the state of the best is gone by then; leave it out"
        )
    if settings.patience is not None and settings.privacy.kind != "none":
        raise ConfigError(
            "run.patience: under differential privacy clients send no evaluations over a network, so "
            "there is no validation to stop by; leave it out"
        )
    if settings.attack.kind != "none":
        raise ConfigError(
            "run.attack is for simulations; leave it out of an experiment that runs over a network"
        )
    if settings.devices != Devices():
        raise ConfigError(
            "run.devices simulates slow and unavailable clients, and clients over a network have clocks "
            "of their own; leave it out of an experiment that runs over a network"
        )
    if settings.secure.on:
        _check_secure_settings(settings)


def _check_secure_settings(settings: RunSettings) -> None:
    if settings.participation < 1 or settings.unseen:
        raise ConfigError(
            "run.secure: over a network all clients take part in every round; set run.participation = 1 and "
            "leave out run.unseen"
        )
    if settings.privacy.kind == "central":
        check_settings(settings.trust)
    if settings.compression.uplink:
        raise ConfigError(
            "run.compression: masked numbers cannot be compressed; leave out run.compression or run.secure"
        )
    if settings.patience is not None:
        raise ConfigError("run.patience: under secure sums clients send no evaluations; leave it out")


def check_secure_start(
    settings: RunSettings, client_count: int, min_registered: int, keys: MemberKeys | None
) -> None:
    """Refuse secure sums without keys, or with too few clients.

    Args:
        settings: settings of the run.
        client_count: number of all clients.
        min_registered: number of registered clients at which the run begins.
        keys: public keys of all clients; None without a roster.

    Raises:
        ConfigError: if secure sums are on and cannot work.
    """
    if not settings.secure.on:
        return
    if keys is None:
        raise ConfigError(
            "run.secure: over a network, clients sign the steps of a secure sum by the keys of a roster. Start the "
            "server with --keys, whose folder has roster.json; a simulation by Flower has no keys"
        )
    # refuses too few clients and missing keys
    min_clients = SecureRounds(client_count, keys, make_grid(settings.secure, client_count), {}).min_clients
    if min_registered < min_clients:
        raise ConfigError(
            f"run.secure: every secure sum of {client_count} clients needs {min_clients} of them, and the run would begin "
            f"with {min_registered}. Set network.min_clients to {min_clients} or more; at most "
            f"{client_count - min_clients} of the clients can be excluded"
        )


def check_secure_method(method: AnyMethod, settings: RunSettings, client_count: int) -> None:
    """Refuse a method without secure sums over a network, as far as a small trial federation shows it.

    A method that does not fit the trial federation is checked once the clients' models are known.

    Raises:
        ConfigError: if the form of an upload depends on the client's data, or clients get different downloads.
        TaskError: if the server must see more than the sum.
    """
    federation = _make_trial_federation(client_count)
    task = federation.task(1)
    try:
        reason = abilities(method, task)["secure"]
        server = method.server_init(task)
        first_download = method.download(server, federation.infos[0])
        sends_tensors = bool(tree.tensors(trace_upload(method, task, federation.infos[0], first_download)[0]))
    except FedlowrankError:
        return
    if reason is not None and sends_tensors:
        require_ability(method, task, "secure", "secure.on")
    # under central privacy clients contribute the noisy change of the model instead
    if reason is None and settings.privacy.kind != "central":
        make_checked_zeros(method, server, Templates(method, task), federation)


def _make_trial_federation(client_count: int) -> Federation:
    """Make a federation of clients with one small model and a few examples."""
    data = [(torch.zeros(8, 6), torch.arange(8) % 3) for _ in range(client_count)]
    models = {"small": lambda: nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))}
    return Federation.from_arrays(data, models, classes=3, rank=[2] * client_count)


def make_checked_zeros(method: AnyMethod, server: Any, templates: Templates, federation: Federation) -> Any:
    """Make the contribution of zeros of a secure sum, after checks that the method has one over a network.

    Args:
        method: method of the run.
        server: state of the server.
        templates: forms of the replies.
        federation: clients of the run.

    Raises:
        ConfigError: if the form of an upload depends on the client's data, or clients get different downloads.
        TaskError: if a client could not compute its contribution, or the server computes with numbers of examples.
    """
    infos = federation.infos
    down = method.download(server, infos[0])
    form = templates.of(infos[0], down).form
    zero_contribution = make_zero_contribution(method, server, form, infos[0])
    # raises TaskError if clients, who do not know the state, could not compute the contribution
    compute_contribution(method, server, down, form, infos[0])
    view = ServerView(templates.task, 0, federation.key / "trial", infos)
    check_reads_no_examples(method, zero_contribution, server, view)
    check_one_download(method, server, infos)
    return zero_contribution
