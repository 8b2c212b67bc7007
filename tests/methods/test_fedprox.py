"""FedProx: against NumPy, with the loss of the task, and as FedAvg without its proximal term."""

from __future__ import annotations

from typing import Any

import pytest

from fedlowrank import Loss
from fedlowrank.core import tree
from fedlowrank.core.learning.optimizer import SGD, AdamW
from fedlowrank.engines.engine import Engine
from fedlowrank.engines.sequential import Sequential
from fedlowrank.methods.fedavg import FedAvg
from fedlowrank.methods.fedprox import FedProx
from tests.golden import reference

from .comparisons import assert_bits_equal, assert_nested_close, to_layers
from .run_contents import get_initial_networks, get_train_data, plan_rounds
from .setting import FLOAT32, LOCAL, LR, SAMPLE, federate_one_model, run_rounds


def assert_fedprox_equals_reference(mu: float, engine: type[Engine], **data: Any) -> None:
    """Compare a run with the reference; ``data`` are settings of the federation."""
    federation = federate_one_model(**data)
    run = run_rounds(FedProx(mu=mu, **LOCAL), federation, engine=engine, **SAMPLE)
    expected = reference.fedprox(
        get_initial_networks(federation)[0], get_train_data(federation), plan_rounds(run), LR, mu
    )
    assert_nested_close(to_layers(run.state.server), expected)


@pytest.mark.parametrize("mu", [0.1, 2.0])
def test_fedprox(mu: float, engine: type[Engine]) -> None:
    assert_fedprox_equals_reference(mu, engine)


def test_fedprox_minimizes_the_loss_of_the_task(smoothed_loss: Loss) -> None:
    assert_fedprox_equals_reference(2.0, Sequential, loss=smoothed_loss)


@pytest.mark.parametrize(
    "optimizer", [SGD(lr=0.2), SGD(lr=0.2, momentum=0.9, weight_decay=0.01, clip=0.5), AdamW(lr=0.01)]
)
def test_fedprox_without_a_proximal_term_is_fedavg_bit_for_bit(optimizer) -> None:
    settings = {"optimizer": optimizer, "batch_size": 8, "epochs": 2}
    a = run_rounds(FedProx(mu=0.0, **settings), federate_one_model(**FLOAT32), **SAMPLE)
    b = run_rounds(FedAvg(**settings), federate_one_model(**FLOAT32), **SAMPLE)
    assert_bits_equal(a.state.server, b.state.server)
    # any weight of the proximal term changes the model
    c = run_rounds(FedProx(mu=0.01, **settings), federate_one_model(**FLOAT32), **SAMPLE)
    assert not tree.equal(a.state.server, c.state.server)
