"""FedBABU: against NumPy, its fine-tuning, and the head that it needs."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from fedlowrank.core import tree
from fedlowrank.core.errors import TaskError
from fedlowrank.core.learning.optimizer import SGD
from fedlowrank.data.federation import Federation
from fedlowrank.engines.engine import Engine
from fedlowrank.engines.sequential import Sequential
from fedlowrank.methods.fedbabu import FedBABU
from fedlowrank.rounds.run import Run
from fedlowrank.rounds.run_settings import RunSettings
from tests.golden import baseline_reference

from .comparisons import assert_nested_close, to_layers
from .run_contents import get_initial_networks, get_train_data, list_batches, plan_rounds
from .setting import (
    CLASSES,
    INPUTS,
    LOCAL,
    LR,
    OWNED,
    SAMPLE,
    SIZES,
    federate_one_model,
    make_arrays,
    run_rounds,
)


@pytest.mark.parametrize("part", ["whole", "head", "body"])
def test_fedbabu(part: Any, engine: type[Engine]) -> None:
    federation = federate_one_model()
    method = FedBABU(fine_tuning_epochs=3, fine_tuned_part=part, fine_tuning_optimizer=SGD(lr=0.2), **LOCAL)
    run = run_rounds(method, federation, engine=engine, **SAMPLE)
    data, start = get_train_data(federation), get_initial_networks(federation)[0]
    body = baseline_reference.fedbabu(start[:-1], start[-1:], data, plan_rounds(run), LR)
    # only the body crosses, and nothing is kept
    assert_nested_close(to_layers(run.state.server), body)
    assert all(state is None for state in run.state.clients.values())
    names = list(federation.architectures["small"].initial)
    for info in federation.infos:
        steps = list_batches(run, run.round - 1, info)[1]
        assert len(steps) == 3 * -(-SIZES[info.id] // 8)
        expected = baseline_reference.fine_tuned(body + start[-1:], *data[info.id], steps, 0.2, part)
        series = run.local_model(info).client_model.series
        assert list(series) == ["fine_tuned", "global"]
        assert_nested_close(to_layers({n: series["fine_tuned"][n] for n in names}), expected)
        assert_nested_close(to_layers({n: series["global"][n] for n in names}), body + start[-1:])


def test_fedbabu_fine_tunes_with_the_optimizer_of_the_training_unless_told_otherwise() -> None:
    federation = federate_one_model()
    alone, told = (
        run_rounds(FedBABU(fine_tuning_optimizer=o, **LOCAL), federation, steps=1) for o in (None, SGD(lr=LR))
    )
    assert tree.equal(alone.personal_params(federation.infos[1]), told.personal_params(federation.infos[1]))
    other = run_rounds(FedBABU(fine_tuning_optimizer=SGD(lr=0.1), **LOCAL), federation, steps=1)
    assert not tree.equal(
        alone.personal_params(federation.infos[1]), other.personal_params(federation.infos[1])
    )


def test_fedbabu_needs_a_head() -> None:
    bare = Federation.from_arrays(
        make_arrays(owned=OWNED), {"bare": lambda: nn.Sequential(nn.Linear(INPUTS, CLASSES))}, classes=4
    )
    with pytest.raises(TaskError, match="names no head"):
        Run(FedBABU(), bare, RunSettings(rounds=1), Sequential())
