"""A statistic that is summed for all clients at once is each client's own sum."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedlowrank import Federation
from fedlowrank.core.contract import Batch
from fedlowrank.engines.sequential import Sequential
from fedlowrank.engines.vectorized import Vectorized
from fedlowrank.methods import METHODS
from fedlowrank.models.architectures.mlp import MLP
from fedlowrank.rounds.run import Run
from fedlowrank.rounds.run_settings import RunSettings
from fedlowrank.training.client_tensors.client_tensor import NoRuleError, to_client_tensor
from fedlowrank.training.client_tensors.control_flow import unwrap_client_tensor
from fedlowrank.training.cohorts.cohort_statistics import sum_over_cohort
from fedlowrank.training.local_data import MAX_CHUNK

torch.set_num_threads(1)

SIZES = (2 * MAX_CHUNK, 30, 17, 9)


def federation() -> Federation:
    g = np.random.default_rng(0)
    data = [(g.normal(size=(n, 4)).astype(np.float32), g.integers(0, 3, n)) for n in SIZES]
    return Federation.from_arrays(data, lambda: MLP(4, (5,), 3), classes=3)


def trainers(on: Federation) -> list[Any]:
    engine = Sequential()
    return [engine.trainer(METHODS["fedavg"](), on, 0, info) for info in on.infos]


def test_sums_and_means_of_each_client_with_constants_of_its_own() -> None:
    on = federation()
    weight, shift = torch.randn(4, 3, dtype=torch.float64), torch.arange(4.0).double().reshape(4, 1)

    def statistic(w: Tensor, batch: Batch, shift: Tensor) -> dict[str, Tensor]:
        scores = batch.x.double() @ w
        return {"scores": batch.sum(scores + shift), "count": batch.sum(torch.ones_like(scores[:, 0]))}

    actual = sum_over_cohort(trainers(on), statistic, weight, (to_client_tensor(shift),))
    assert len(on.clients[0].train) > MAX_CHUNK
    for k, own in enumerate(on.clients):
        x = np.asarray(own.train.x)
        expected = (x.astype(np.float64) @ weight.numpy() + shift[k].numpy()).sum(0)
        np.testing.assert_allclose(unwrap_client_tensor(actual["scores"])[k].numpy(), expected, rtol=1e-9)
        assert unwrap_client_tensor(actual["count"])[k] == len(x)


def test_a_result_that_is_the_same_for_all_is_refused() -> None:
    on = federation()
    with pytest.raises(NoRuleError, match="same for all"):
        sum_over_cohort(trainers(on), lambda w, batch: w.sum(), torch.ones(2), ())


@pytest.mark.parametrize("name", ["ifca", "fedem", "fedrod", "fd"])
def test_methods_with_statistics_come_to_the_same_at_the_same_cost(name: str) -> None:
    on = federation()
    runs = [Run(METHODS[name](), on, RunSettings(rounds=2), engine()) for engine in (Sequential, Vectorized)]
    for _ in range(2):
        alone, together = (run.step() for run in runs)
        assert (alone.flops, alone.steps) == (together.flops, together.steps)
    torch.testing.assert_close(*(_tensors(run.state.server) for run in runs), rtol=1e-4, atol=1e-6)


def _tensors(value: Any) -> list[Tensor]:
    from fedlowrank.core import tree

    return [t.double() for t in tree.tensors(value)]
