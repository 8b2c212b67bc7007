"""Runs whose ends are compared between engines."""

from __future__ import annotations

from typing import Any

from fedlowrank.core import tree
from fedlowrank.core.contract import AnyMethod
from fedlowrank.data.federation import Federation
from fedlowrank.engines.engine import Engine
from fedlowrank.rounds.run import Run
from fedlowrank.rounds.run_settings import RunSettings
from fedlowrank.testing.check import small_federation


def run_to_end(method: AnyMethod, engine: Engine, on: Federation | None = None, rounds: int = 3) -> Run:
    on = small_federation(method.heterogeneous) if on is None else on
    run = Run(method, on, RunSettings(rounds=rounds, participation=0.8), engine)
    for _ in range(rounds):
        run.step()
    engine.close()
    return run


def has_same_end(a: Run, b: Run) -> bool:
    return tree.equal((a.state.server, _clients(a)), (b.state.server, _clients(b)))


def _clients(run: Run) -> Any:
    return {str(i): s for i, s in run.state.clients.items()}
