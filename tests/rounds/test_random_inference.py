"""Modules that draw random numbers in inference: what is computed of them depends on the run alone, not on global generators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedlowrank import Federation
from fedlowrank.engines import Sequential
from fedlowrank.methods.fedavg import FedAvg
from fedlowrank.results.evaluation.backdoor import backdoor_success
from fedlowrank.rounds.outcome.representations import compute_representations
from fedlowrank.rounds.run import Run
from fedlowrank.rounds.run_settings import RunSettings
from fedlowrank.trust.trust_settings import Attack


class Noisy(nn.Module):
    head_name = "head"

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(16, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x.flatten(1))
        scores: Tensor = self.head(hidden + torch.randn_like(hidden))
        return scores


def measure_backdoor(run: Run) -> Tensor:
    attack = Attack("backdoor", target=0)
    federation = run.federation
    return torch.tensor(backdoor_success(federation, federation.infos, attack, 1.0, run.local_model))


def represent(run: Run) -> Tensor:
    return compute_representations(run, 30)["x"]


@pytest.mark.parametrize("compute", [measure_backdoor, represent])
def test_global_generators_are_neither_read_nor_moved(compute: Callable[[Run], Tensor]) -> None:
    generator = torch.Generator().manual_seed(0)
    data: list[Any] = [(torch.rand(40, 1, 4, 4, generator=generator), torch.arange(40) % 3) for _ in range(3)]
    run = Run(FedAvg(), Federation.from_arrays(data, Noisy, classes=3), RunSettings(rounds=1), Sequential())
    run.step()
    values = []
    with torch.random.fork_rng(devices=[]):
        for seed in (1, 2):
            state = torch.manual_seed(seed).get_state()
            values.append(compute(run))
            assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(*values)
