"""FML: against NumPy, with the loss of the task, beside Standalone and FedAvg, and what its two models learn from."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedlowrank import Loss
from fedlowrank.core import tree
from fedlowrank.core.learning.optimizer import SGD
from fedlowrank.data.federation import Federation
from fedlowrank.engines.engine import Engine
from fedlowrank.engines.sequential import Sequential
from fedlowrank.methods.fedavg import FedAvg
from fedlowrank.methods.fml import FML
from fedlowrank.methods.standalone import Standalone
from tests.golden import reference

from .comparisons import assert_bits_equal, assert_nested_close, to_layers
from .run_contents import get_client_states, get_initial_networks, get_train_data, plan_rounds
from .setting import (
    CLASSES,
    FLOAT32,
    LOCAL,
    LR,
    SAMPLE,
    SIZES,
    SLOW_LOCAL,
    WIDTH,
    Net,
    federate_two_models,
    make_arrays,
    run_rounds,
)


def assert_fml_equals_reference(alpha: float, beta: float, engine: type[Engine], **data: Any) -> None:
    """Compare a run with the reference; ``data`` are settings of the federation."""
    federation = federate_two_models(deep_width=7, **data)
    run = run_rounds(FML(alpha=alpha, beta=beta, meme="small", **LOCAL), federation, engine=engine, **SAMPLE)
    meme = to_layers(federation.architectures["small"].initial)
    server, clients = reference.fml(
        meme, get_initial_networks(federation), get_train_data(federation), plan_rounds(run), LR, alpha, beta
    )
    assert_nested_close(to_layers(run.state.server), server)
    assert_nested_close([to_layers(s) for s in get_client_states(run)], clients)


@pytest.mark.few(2)
@pytest.mark.parametrize(("alpha", "beta"), [(0.3, 0.8), (0.5, 0.5)])
def test_fml(alpha: float, beta: float, engine: type[Engine]) -> None:
    assert_fml_equals_reference(alpha, beta, engine)


def test_fml_minimizes_the_loss_of_the_task(smoothed_loss: Loss) -> None:
    assert_fml_equals_reference(0.3, 0.8, Sequential, loss=smoothed_loss)


def test_fml_with_labels_alone_is_standalone_beside_fedavg() -> None:
    run = run_rounds(
        FML(alpha=1.0, beta=1.0, meme="small", **SLOW_LOCAL),
        federate_two_models(**FLOAT32, deep_width=7),
        **SAMPLE,
    )
    alone = run_rounds(Standalone(**SLOW_LOCAL), federate_two_models(**FLOAT32, deep_width=7), **SAMPLE)
    # the same clients with the small model everywhere: what FedAvg makes of the memes
    everywhere = Federation.from_arrays(
        make_arrays(), {"small": lambda: Net(WIDTH, **FLOAT32)}, classes=CLASSES
    )
    averaged = run_rounds(FedAvg(**SLOW_LOCAL), everywhere, **SAMPLE)
    assert_bits_equal(
        run.federation.architectures["small"].initial, everywhere.architectures["small"].initial
    )
    for k, state in alone.state.clients.items():
        assert_bits_equal(run.state.clients[k], state)
    assert_bits_equal(run.state.server, averaged.state.server)


def run_one_step(method: FML) -> tuple[Any, Any]:
    run = run_rounds(method, federate_two_models(deep_width=7), rounds=1)
    return run.state.server, run.state.clients


ONE_STEP = {"optimizer": SGD(lr=0.2), "batch_size": max(SIZES), "epochs": 1}


def test_the_private_model_does_not_learn_from_the_loss_of_the_meme() -> None:
    actual = [run_one_step(FML(alpha=0.5, beta=b, meme="small", **ONE_STEP)) for b in (0.0, 0.4, 1.0)]
    for server, clients in actual[1:]:
        for k, state in clients.items():
            tree.map_leaves(
                lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=1e-15), state, actual[0][1][k]
            )
        assert not torch.allclose(server["head.weight"], actual[0][0]["head.weight"], atol=1e-6)


def test_the_meme_does_not_learn_from_the_loss_of_the_private_model() -> None:
    actual = [run_one_step(FML(alpha=a, beta=0.5, meme="small", **ONE_STEP)) for a in (0.0, 0.4, 1.0)]
    for server, clients in actual[1:]:
        tree.map_leaves(
            lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=1e-15), server, actual[0][0]
        )
        assert not torch.allclose(clients[0]["head.weight"], actual[0][1][0]["head.weight"], atol=1e-6)
