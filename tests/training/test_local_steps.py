"""``steps`` of a method: as many local steps at every client, through reshuffled epochs; schedules over a whole run."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler

from fedlowrank import SGD, Federation, LocalSchedule
from fedlowrank.core import tree
from fedlowrank.core.contract import Pass
from fedlowrank.core.errors import ConfigError
from fedlowrank.engines import ENGINES
from fedlowrank.engines.sequential import Sequential
from fedlowrank.methods import METHODS
from fedlowrank.models.architectures.mlp import MLP
from fedlowrank.rounds.run import Run
from fedlowrank.rounds.run_settings import RunSettings
from fedlowrank.testing.check import small_federation

torch.set_num_threads(1)

SIZES = (9, 40, 17)


def federation() -> Federation:
    g = np.random.default_rng(0)
    data = [(g.normal(size=(n, 5)).astype(np.float32), g.integers(0, 3, n)) for n in SIZES]
    return Federation.from_arrays(data, lambda: MLP(5, (6,), 3), classes=3)


@pytest.mark.parametrize("drop_last", [False, True])
def test_steps_go_through_reshuffled_epochs(drop_last: bool) -> None:
    on, method = federation(), METHODS["fedavg"](steps=11, batch_size=4, drop_last=drop_last)
    for info in on.infos:
        data = Sequential().trainer(method, on, 0, info).data
        n, order = info.example_count, data.order("local")
        assert len(order) == data.steps("local") == 11
        an_epoch = n // 4 if drop_last or not n % 4 else n // 4 + 1
        epochs = [torch.cat(order[a : a + an_epoch]).tolist() for a in range(0, 11, an_epoch)]
        for seen in epochs[: 11 // an_epoch]:
            assert len(set(seen)) == len(seen) == (4 * an_epoch if drop_last else n)
        if len(epochs) > 1:
            assert epochs[0][: len(epochs[1])] != epochs[1]
        if not drop_last:
            counts = Counter(i for seen in epochs for i in seen)
            assert max(counts.values()) - min(counts.get(i, 0) for i in range(n)) <= 1


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_a_client_with_few_examples_takes_as_many_steps_as_one_with_many(engine: str) -> None:
    method = METHODS["fedavg"](steps=5, batch_size=8)
    run = Run(method, federation(), RunSettings(rounds=2, evaluate_every=9), ENGINES[engine]())
    assert [run.step().steps, run.step().steps] == [15, 15]


def test_engines_agree_for_unequal_clients() -> None:
    method = METHODS["scaffold"](steps=5, batch_size=8, optimizer=SGD(lr=0.1))
    runs = [
        Run(method, federation(), RunSettings(rounds=2), ENGINES[e]()) for e in ("sequential", "vectorized")
    ]
    for run in runs:
        run.step()
        run.step()
    torch.testing.assert_close(*(tree.tensors(r.state.server) for r in runs), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_takes_steps(name: str) -> None:
    method = METHODS[name](steps=2, batch_size=4)
    passes = method.local_passes()
    taken = [p for p in passes.values() if p.epochs is None]
    assert taken
    assert all(p.steps == 2 for p in taken)
    run = Run(
        method, small_federation(method.heterogeneous), RunSettings(rounds=1, evaluate_every=9), Sequential()
    )
    run.step()


def test_epochs_beside_steps_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"FedAvg.epochs = 3 does nothing with FedAvg.steps = 4"):
        METHODS["fedavg"](epochs=3, steps=4)


@dataclass(frozen=True)
class OwnPasses(METHODS["fedavg"]):  # type: ignore[misc]
    """A user's method whose passes read epochs alone."""

    def passes(self) -> dict[str, Pass]:
        return {"local": Pass(self.epochs, self.batch_size)}


def test_steps_that_no_pass_reads_are_refused() -> None:
    assert OwnPasses().local_passes()
    with pytest.raises(ConfigError, match=r"steps = 4 does nothing.*self.main_pass"):
        OwnPasses(steps=4).local_passes()


def test_a_schedule_over_the_run_is_that_of_a_trainer() -> None:
    """Three rounds of four steps are twelve steps of torch's schedule."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    start = lr_scheduler.LinearLR(optimizer, 1 / 3, 1.0, 2)
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, 10, eta_min=0.1)
    schedule = lr_scheduler.SequentialLR(optimizer, [start, cosine], [2])
    expected = []
    for _ in range(12):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    ours = LocalSchedule("cosine", floor=0.1, warmup=2, rounds=3)
    actual = [ours.scale(step, 4, t) for t in range(3) for step in range(4)]
    np.testing.assert_allclose(actual, expected, rtol=1e-6)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_training_uses_the_schedule_of_the_run(engine: str) -> None:
    """A gradient that is 1 in every step adds up the learning rates."""
    schedule = LocalSchedule("linear", rounds=3)
    method: Any = METHODS["fedavg"](steps=4, batch_size=4, optimizer=SGD(lr=0.1, local_schedule=schedule))
    on = federation()
    still = METHODS["fedavg"](steps=4, batch_size=4, optimizer=SGD(lr=0.1))
    settings = RunSettings(rounds=3, evaluate_every=9)
    run, plain = (Run(m, on, settings, ENGINES[engine]()) for m in (method, still))
    moved = []
    for one in (run, plain):
        before, actual = one.state.server, []
        for _ in range(3):
            one.step()
            actual.append(
                sum(
                    float((a - b).norm())
                    for a, b in zip(one.state.server.values(), before.values(), strict=True)
                )
            )
            before = one.state.server
        moved.append(actual)
    # in the last round the rates are 1/3, 1/4, 1/6 and 1/12 of the first one
    assert moved[0][2] < 0.4 * moved[1][2]
    assert moved[0][0] > 0.7 * moved[1][0]


def test_rounds_of_a_constant_schedule_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"local_schedule.rounds = 5 does nothing"):
        LocalSchedule(rounds=5)
