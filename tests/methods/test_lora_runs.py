"""Runs of federated LoRA that are resumed, whose replies are not finite, or whose training changes no factor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor, nn

from fedlowrank import Loss
from fedlowrank.core import tree
from fedlowrank.core.errors import TaskError
from fedlowrank.core.learning.optimizer import SGD, AdamW, Group, LocalSchedule, Schedule
from fedlowrank.data.federation import Federation
from fedlowrank.engines.engine import ClientResult
from fedlowrank.engines.sequential import Sequential
from fedlowrank.methods.fedex_lora import FedExLoRA
from fedlowrank.methods.fedhl import FedHL
from fedlowrank.methods.fedit import FedIT
from fedlowrank.methods.flora import FLoRA
from fedlowrank.rounds.run import Run
from fedlowrank.rounds.run_settings import RunSettings
from fedlowrank.storage.checkpoint import load, save

from .lora_setting import (
    EQUAL_RANK_METHODS,
    UNEQUAL_RANK_METHODS,
    collect_replies,
    every_lora_method,
    run_lora,
    update_server,
)
from .setting import CLASSES, INPUTS, make_arrays


@pytest.mark.parametrize("kind", [FedHL, FLoRA, FedExLoRA], ids=lambda k: k.title)
def test_a_run_resumed_in_the_middle_ends_in_the_same_bits(kind: Any, tmp_path: Path) -> None:
    whole, half = (run_lora(kind, n, rounds=4, participation=0.5) for n in (4, 2))
    save(tmp_path, half.round, half.state.server, half.state.clients)
    again = Run(half.method, half.federation, half.settings, Sequential())
    again.restore(load(tmp_path))
    for _ in range(2):
        again.step()
    assert tree.equal(again.state.server, whole.state.server)
    assert again.state.clients.keys() == whole.state.clients.keys()
    assert all(tree.equal(again.state.clients[k], whole.state.clients[k]) for k in whole.state.clients)


class Spoiled(Sequential):
    """Client 2 sends a number that is none in the last tensor of its reply."""

    value = float("nan")

    def run(self, *args: Any) -> Any:
        for job, outcome in zip(args[-1], super().run(*args), strict=True):
            if job.client.id == 2:
                last = list(tree.leaves(outcome.upload))[-1][1]
                last[..., -1] = self.value
            yield ClientResult(outcome.state, outcome.upload, outcome.meter)


class Infinite(Spoiled):
    value = float("-inf")


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("kind", "engine"),
    [(FedIT, Infinite), *((kind, Spoiled) for kind in UNEQUAL_RANK_METHODS + EQUAL_RANK_METHODS)],
    ids=lambda v: v.__name__,
)
def test_a_reply_that_is_not_finite_is_dropped_and_the_rest_goes_on(kind: Any, engine: type[Spoiled]) -> None:
    run = run_lora(kind, 1, on_nan="drop")
    run.engine = engine()
    before, expected = run.state.clients[2], update_server(run, collect_replies(run, (0, 1, 3)))
    record = run.step()
    assert record.participants == [0, 1, 2, 3]
    assert record.lost.keys() == {"2"}
    assert "the reply of client 2 holds a NaN or an infinity at /rest/head.bias" in record.lost["2"]
    assert tree.equal(run.state.server, expected)
    assert tree.equal(run.state.clients[2], before)


class Unused(nn.Module):
    """Its adapted layer has no part in the output."""

    head_name = "head"

    def __init__(self) -> None:
        super().__init__()
        self.idle, self.head = nn.Linear(INPUTS, 5), nn.Linear(INPUTS, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


@every_lora_method
def test_training_that_changes_no_factor_is_an_error(kind: Any) -> None:
    federation = Federation.from_arrays(make_arrays(), Unused, classes=CLASSES, rank=[2] * 4)
    # the decay of AdamW moves A all the same
    for optimizer in (SGD(lr=0.1), AdamW(lr=0.1)):
        run = Run(kind(optimizer=optimizer), federation, RunSettings(rounds=1), Sequential())
        with pytest.raises(TaskError, match="client 0, round 1: training changed no LoRA factor"):
            run.step()
    for quiet in (SGD(lr=0.0), SGD(lr=0.0, groups={"rest": Group(lr=0.1)})):
        Run(kind(optimizer=quiet), federation, RunSettings(rounds=1), Sequential()).step()


class PartlyUnused(Unused):
    """One adapted layer has no part in the output, and another one has."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(INPUTS, INPUTS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


@every_lora_method
def test_a_layer_without_a_gradient_beside_others_is_no_error(kind: Any) -> None:
    federation = Federation.from_arrays(make_arrays(), PartlyUnused, classes=CLASSES, rank=[2] * 4)
    run = Run(kind(optimizer=SGD(lr=0.1)), federation, RunSettings(rounds=3), Sequential())
    for _ in range(3):
        run.step()


@every_lora_method
def test_a_client_with_a_loss_of_zero_is_no_error(kind: Any) -> None:
    """All its labels are left out."""
    clients = make_arrays()
    x, y = clients[1]["train"]
    clients[1]["train"] = x, -np.ones_like(y)
    federation = Federation.from_arrays(
        clients,
        PartlyUnused,
        classes=CLASSES,
        rank=[2] * 4,
        loss=MASKED,
    )
    run = Run(kind(optimizer=SGD(lr=0.1)), federation, RunSettings(rounds=2), Sequential())
    for _ in range(2):
        run.step()


MASKED = Loss("cross_entropy", ignore_index=-1)


@pytest.mark.few(3)
@every_lora_method
def test_steps_below_the_rounding_of_trained_factors_are_no_error(kind: Any) -> None:
    vanishing = Schedule("step", factor=1e-40, every=1)
    run_lora(kind, 2, optimizer=SGD(lr=0.1, schedule=vanishing))


@pytest.mark.parametrize("steps", [None, 1])
@every_lora_method
def test_rounds_after_the_end_of_a_schedule_over_rounds_are_no_error(kind: Any, steps: int | None) -> None:
    # FLoRA begins with fresh factors in every round
    run_lora(kind, 2, optimizer=SGD(lr=0.1, local_schedule=LocalSchedule("cosine", rounds=1, steps=steps)))
