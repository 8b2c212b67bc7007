"""A cohort that runs out of memory is divided until its parts have room, and remembers it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedlowrank.core.learning.optimizer import SGD
from fedlowrank.engines.sequential import Sequential
from fedlowrank.engines.vectorized import Vectorized
from fedlowrank.methods import METHODS
from fedlowrank.rounds.run import Run
from fedlowrank.rounds.run_settings import RunSettings
from fedlowrank.training.cohorts import cohort_trainer
from tests.engines.ranked_clients import build_network, make_ranked_federation

torch.set_num_threads(1)


@pytest.mark.parametrize("room", [2, 0])
def test_a_cohort_without_room_is_divided(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    method = METHODS["fedavg"](batch_size=8, optimizer=SGD(lr=0.1, momentum=0.9))
    tried: list[int] = []
    train = cohort_trainer.train_cohort

    def with_little_room(trainers: Any, *args: Any) -> Any:
        tried.append(len(trainers))
        actual = train(trainers, *args)
        # after all steps, so that what they changed in place must not be trained again
        if len(trainers) > room:
            raise torch.OutOfMemoryError("no room")
        return actual

    monkeypatch.setattr(cohort_trainer, "train_cohort", with_little_room)
    on = make_ranked_federation(build_network)
    one, other = (Run(method, on, RunSettings(rounds=2), e) for e in (Sequential(), Vectorized()))
    for _ in range(2):
        a, b = one.step(), other.step()
        assert (a.steps, a.flops) == (b.steps, b.flops)
        assert b.training_losses == pytest.approx(a.training_losses, abs=1e-6)
    gaps = [(p - other.state.server[n]).abs().max() for n, p in one.state.server.items()]
    assert float(max(gaps)) < 1e-5
    # five clients at once, two and three, then parts of one or two; in the next round parts of one or two at once
    whole = [5, 2, 3, 1, 1, 1, 2] if room else [5, 2, 1]
    assert tried[: len(whole)] == whole
    assert max(tried[len(whole) :]) <= 2


def test_fewer_clients_than_parts_are_a_part_each(monkeypatch: pytest.MonkeyPatch) -> None:
    method = METHODS["fedavg"](batch_size=8, optimizer=SGD(lr=0.1, momentum=0.9))
    tried: list[int] = []
    train = cohort_trainer.train_cohort

    def with_room_for_one(trainers: Any, *args: Any) -> Any:
        tried.append(len(trainers))
        if len(trainers) > 1:
            raise torch.OutOfMemoryError("no room")
        return train(trainers, *args)

    monkeypatch.setattr(cohort_trainer, "train_cohort", with_room_for_one)
    on, engine = make_ranked_federation(build_network), Vectorized()
    Run(method, on, RunSettings(rounds=1), engine).step()
    # five parts are remembered
    assert tried[-5:] == [1] * 5
    tried.clear()
    settings = RunSettings(rounds=1, participation=0.8)
    one, other = (Run(method, on, settings, e) for e in (Sequential(), engine))
    assert other.step().training_losses == pytest.approx(one.step().training_losses, abs=1e-6)
    assert tried == [1] * 4
