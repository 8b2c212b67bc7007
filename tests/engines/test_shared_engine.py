"""Runs that share an engine: each takes gradients by the micro batch of its own settings."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fedlowrank.data.federation import Federation
from fedlowrank.engines import ENGINES
from fedlowrank.engines.engine import Engine
from fedlowrank.methods.fedavg import FedAvg
from fedlowrank.rounds.run import Run
from fedlowrank.rounds.run_settings import RunSettings
from tests.support.engine_runs import has_same_end

torch.set_num_threads(1)

SIZES: list[int] = []
"""Examples of each forward pass that records a graph."""

BATCH_SIZE = 8


class Listening(nn.Linear):
    """A linear layer that notes how many examples it gets in training."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            SIZES.append(len(x))
        return super().forward(x)


def make_federation(layer: type[nn.Linear]) -> Federation:
    generator = torch.Generator().manual_seed(0)
    clients = [(torch.randn(40, 20, generator=generator), torch.arange(40) % 2) for _ in range(3)]
    return Federation.from_arrays(clients, lambda: layer(20, 2), classes=2)


def make_run(federation: Federation, engine: Engine, micro_batch: int | None) -> Run:
    return Run(FedAvg(batch_size=BATCH_SIZE), federation, RunSettings(micro_batch=micro_batch), engine)


@pytest.mark.parametrize("name", ["sequential", "wire", "auto"])
def test_runs_that_share_an_engine_have_micro_batches_of_their_own(name: str) -> None:
    engine, federation = ENGINES[name](), make_federation(Listening)
    runs = {micro_batch: make_run(federation, engine, micro_batch) for micro_batch in (2, None, 5)}
    # one after another, and each once more after the others
    for micro_batch, run in [*runs.items(), *runs.items()]:
        SIZES.clear()
        run.step()
        assert max(SIZES) == (micro_batch or BATCH_SIZE)
    assert engine.micro_batch is None
    assert all(run.engine.ledger is engine.ledger for run in runs.values())


def test_runs_that_share_processes_have_micro_batches_of_their_own() -> None:
    federation, shared = make_federation(nn.Linear), ENGINES["processes"]()
    runs = {micro_batch: make_run(federation, shared, micro_batch) for micro_batch in (None, 3)}
    alone = {m: make_run(federation, ENGINES["sequential"](), m) for m in runs}
    try:
        for _ in range(2):
            for run in (*runs.values(), *alone.values()):
                run.step()
    finally:
        for run in runs.values():
            run.engine.close()
    assert all(has_same_end(runs[m], alone[m]) for m in runs)
    # gradients of parts add up with another rounding
    assert not has_same_end(alone[None], alone[3])
