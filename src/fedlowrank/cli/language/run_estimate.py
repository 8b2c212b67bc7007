"""Estimates the training time and memory of a run of language models from one step."""

from __future__ import annotations

import time
from typing import Any

import psutil
import torch

from ...core.contract import AnyMethod
from ...core.contract.training_request import Request
from ...data.federation import Federation
from ...engines.engine import client_view
from ...engines.sequential import Sequential
from ...rounds.run_settings import RunSettings
from ...rounds.setup.preparation import check_classes
from ...training.cohorts.cohort_trainer import PassAskedError
from ...training.steps import PassSteps


class _Asking:
    """A trainer that ends the local update at its first pass."""

    def train(self, request: Request) -> Any:
        """Raise an error that carries the request."""
        raise PassAskedError(request)

    def sum_over_data(self, *_: Any) -> Any:
        """Raise an error, because a statistic before any pass cannot be timed."""
        raise _NoPassError

    def steps(self, _: str) -> int:
        """Return 1, as if every pass had one step."""
        return 1


class _NoPassError(Exception):
    """A method asks for a statistic before its first pass."""


def estimate_run(method: AnyMethod, federation: Federation, settings: RunSettings) -> str | None:
    """Time one step of the client with the most examples and extrapolate; None for a method whose pass cannot be observed.

    Args:
        method: method of the run.
        federation: federation of the run.
        settings: settings of the run.

    Raises:
        TaskError: if the method does not fit the federation.
    """
    check_classes(method, federation)
    if settings.device != "cpu":
        federation = federation.to(settings.device)
    task = federation.task(settings.rounds)
    info = max(federation.infos, key=lambda i: i.example_count)
    download = method.download(method.server_init(task), info)
    probe: Any = _Asking()
    try:
        method.local_update(
            method.client_init(info, task), download, client_view(federation, task, info, 0, probe)
        )
    except PassAskedError as first:
        request = first.request
    except _NoPassError:
        return None
    else:
        return None
    data = Sequential().trainer(method, federation, 0, info).data
    batch = next(iter(data.batches(request.name)))
    device, work = batch.y.device, PassSteps(request, 0)
    if settings.micro_batch is not None and len(batch) > settings.micro_batch:
        return None
    start = time.perf_counter()
    work.gradient(work.loss(batch))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - start
    passes = method.local_passes().values()
    steps_per_round = (
        sum(p.steps_over(i.example_count) for i in federation.infos for p in passes) * settings.participation
    )
    minutes = seconds * steps_per_round * settings.rounds / 60
    memory_bytes = (
        torch.cuda.max_memory_allocated(device)
        if device.type == "cuda"
        else psutil.Process().memory_info().rss
    )
    return (
        f"estimate from one step of {info.title}: {steps_per_round * settings.rounds:,.0f} local steps of {seconds:.2g} s, about "
        f"{minutes:,.0f} min beside evaluation; {memory_bytes / 2**30:.1f} GiB of memory in use after it"
    )
