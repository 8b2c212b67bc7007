"""Batch normalization's running statistics averaged by the server, as frameworks that average ``state_dict`` do.

    server, each round t:   send the model and the statistics s^t                                  download
    client k:               begin with s^t; every step moves s_k by the layer's momentum, as in
                            PyTorch; send them with the model                                      local_update
    server:                 s^{t+1} = Σ_k n_k s_k / Σ_k n_k                                        server_update
    inference:              by s^t, at every client

:class:`AveragedStatistics` is itself a method and wraps another one, so that engines, the network and checkpoints
treat statistics like any other value, and the bytes of statistics are counted as they are sent. A variance is
averaged like any other value and so loses the variance between the clients' means. This is common practice, and the
reason why it is not the default.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch

from ...core.contract import (
    AnyMethod,
    ClientInfo,
    ClientModel,
    ClientView,
    Contribution,
    EngineModel,
    KeepsSumOfUploads,
    Mean,
    ServerView,
    Task,
    Update,
)
from ...core.contract.hook_results import check_pair
from ...core.contract.wrapper import MethodWrapper
from ...core.errors import ConfigError, TaskError
from ...core.tree import Params, tree_dataclass
from ..run_settings import RunSettings


@tree_dataclass
class WithStatistics:
    """A value of the method, with running statistics by name.

    Attributes:
        inner: state, download, upload or reference of the method.
        statistics: statistics of the model's batch normalizations, in float64; None where they are no part of an update.
    """

    inner: Any
    statistics: Params | None


@dataclass(frozen=True)
class AveragedStatistics(MethodWrapper[WithStatistics, Any, WithStatistics, WithStatistics]):
    """Sends the running statistics of a method's model with it; made by :func:`average_statistics`.

    Attributes:
        inner: method that is wrapped.
    """

    title = "Averaged statistics"
    """Title of the class; an object has the title of its method."""

    def server_metrics(self, server: WithStatistics) -> dict[str, dict[str, float]]:
        """See the base class."""
        return self.inner.server_metrics(server.inner)

    def server_init(self, task: Task) -> WithStatistics:
        """Make the method's state, with the statistics of the module."""
        return WithStatistics(self.inner.server_init(task), _read(task.common_model(self.title)))

    def client_init(self, client: ClientInfo, task: Task) -> Any:
        """Make the method's state."""
        return self.inner.client_init(client, task)

    def download(self, server: WithStatistics, client: ClientInfo) -> WithStatistics:
        """Make the method's download, with the statistics."""
        return WithStatistics(self.inner.download(server.inner, client), server.statistics)

    def local_update(self, state: Any, down: WithStatistics, view: ClientView) -> tuple[Any, WithStatistics]:
        """Train by the method, beginning with the statistics that were sent, and send the trained statistics back."""
        model = _engine_model(view)
        original_statistics = _read(model)
        model.set_buffers(down.statistics or {})
        state, upload = check_pair(self.inner, self.inner.local_update(state, down.inner, view))
        statistics = _read(model)
        # a client keeps no statistics
        model.set_buffers(original_statistics)
        return state, WithStatistics(upload, statistics)

    def follow_upload(
        self, before: Any, after: Any, down: WithStatistics, upload: WithStatistics, view: ClientView
    ) -> Any:
        """Follow the upload by the method; a method that keeps no sum of uploads keeps the state after local training."""
        method: Any = self.inner
        if not isinstance(method, KeepsSumOfUploads):
            return after
        return method.follow_upload(before, after, down.inner, upload.inner, view)

    def describe_update(self, down: WithStatistics, client: ClientInfo, task: Task) -> Update:
        """Describe the method's update; statistics are no part of it, so that they are neither clipped nor compressed."""
        update = self.inner.describe_update(down.inner, client, task)
        form = None if update.form is None else WithStatistics(update.form, down.statistics)
        return Update(WithStatistics(update.reference, None), update.scale, form)

    def contribution(
        self, server: WithStatistics, upload: WithStatistics, client: ClientInfo
    ) -> Contribution:
        """Compute the method's contribution, and the statistics in a mean weighted by n_k."""
        statistics = {
            # a client may send any value as a variance
            n: t.clamp(min=0) if n.endswith("running_var") else t
            for n, t in (upload.statistics or {}).items()
        }
        method = self.inner.contribution(server.inner, upload.inner, client)
        return {"method": method, "statistics": Mean(statistics, client.example_count)}

    def server_update(self, server: WithStatistics, total: Any, view: ServerView) -> WithStatistics:
        """Update the method's state, and set the statistics to their mean."""
        inner_state = self.inner.server_update(server.inner, total["method"], view)
        statistics = total["statistics"]
        return WithStatistics(inner_state, server.statistics if statistics is None else statistics)

    def client_model(self, state: Any, down: WithStatistics, view: ClientView) -> ClientModel:
        """Make the method's model, with the statistics that were sent."""
        _engine_model(view).set_buffers(down.statistics or {})
        return self.inner.client_model(state, down.inner, view)


def average_statistics(method: AnyMethod, task: Task, settings: RunSettings) -> AnyMethod:
    """Wrap the method with averaged running statistics if the settings ask for them; otherwise return it unchanged.

    Args:
        method: method of the run.
        task: task whose models keep running statistics, see :func:`fedlowrank.rounds.setup.preparation.move_to_device`.
        settings: settings of the run.

    Raises:
        TaskError: if the method's clients use more than one model or another model than they are sent, or if there
            are no running statistics.
        ConfigError: if the run is to be private.
    """
    if settings.statistics == "local":
        return method
    entry = "run.statistics = 'averaged'"
    if settings.privacy.kind != "none" or settings.secure.on:
        raise ConfigError(
            f"{entry}: statistics are means of data, which neither noise nor secure sums would hide. Leave out "
            "run.privacy and run.secure, or set run.statistics = 'local', by which none travel."
        )
    if not method.one_model:
        raise TaskError(
            f"{entry}: at a client, {method.title} uses another model than the one it is sent, or several, and "
            "one set of statistics cannot belong to all of them. FedAvg, FedProx, FedNova, SCAFFOLD, FedDyn, FedAvgM "
            "and the FedOpt methods can average statistics; for others set run.statistics = 'local'."
        )
    if not _read(task.common_model(method.title)):
        raise TaskError(
            f"{entry}: the model has no batch normalization with running statistics; leave the setting out"
        )
    return AveragedStatistics(inner=method)


def _engine_model(view: ClientView) -> EngineModel:
    """Get a client's model with its buffers, which are sent and which no method sees."""
    return cast(EngineModel, view.model)


def _read(model: EngineModel) -> Params:
    """Read the current running statistics of a model, in float64, because a counter is averaged, too."""
    return {n: t.to(torch.float64, copy=True) for n, t in model.running_statistics.items()}
