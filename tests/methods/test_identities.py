"""Limits in which several methods are FedAvg or Standalone. Those of one method are in the file of the method."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedlowrank.core import tree
from fedlowrank.core.learning.optimizer import SGD, AdamW
from fedlowrank.methods.ensemble import Ensemble
from fedlowrank.methods.fd import FD
from fedlowrank.methods.fedala import FedALA
from fedlowrank.methods.fedavg import FedAvg
from fedlowrank.methods.fedem import FedEM
from fedlowrank.methods.fedproto import FedProto
from fedlowrank.methods.fedrod import FedRoD
from fedlowrank.methods.ifca import IFCA
from fedlowrank.methods.moon import MOON
from fedlowrank.methods.standalone import Standalone
from tests.support.method_calls import predictor, routes

from .comparisons import assert_trees_close
from .run_contents import get_client_inputs
from .setting import SAMPLE, SLOW_LOCAL, federate_one_model, federate_two_models, run_rounds


@pytest.mark.parametrize("optimizer", [SGD(lr=0.2, momentum=0.9), AdamW(lr=0.01)])
@pytest.mark.parametrize(
    "method",
    [
        lambda **k: MOON(mu=0.0, **k),
        lambda **k: FedRoD(gamma=0.0, **k),
        lambda **k: FedALA(weights_lr=0.0, **k),
    ],
    ids=["moon without contrast", "fedrod with cross-entropy", "fedala with W = 1"],
)
def test_the_global_model_is_that_of_fedavg(method: Any, optimizer: Any) -> None:
    settings = {"optimizer": optimizer, "batch_size": 8, "epochs": 2}
    actual, expected = (
        run_rounds(m(**settings), federate_one_model(), **SAMPLE).state.server for m in (method, FedAvg)
    )
    tree.map_leaves(lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=1e-13), actual, expected)


@pytest.mark.parametrize("method", [Ensemble, FedEM, IFCA])
@pytest.mark.parametrize(
    "optimizer", [SGD(lr=0.2, momentum=0.9, weight_decay=0.01, clip=0.5), AdamW(lr=0.01)]
)
def test_a_single_model_is_fedavg(method: Any, optimizer: Any) -> None:
    settings = {"optimizer": optimizer, "batch_size": 8, "epochs": 2}
    a, b = (
        run_rounds(method(clusters=1, **settings), federate_one_model(), **SAMPLE),
        run_rounds(FedAvg(**settings), federate_one_model(), **SAMPLE),
    )
    assert_trees_close({n: t[0] for n, t in a.state.server.items()}, b.state.server)
    for k, info in enumerate(a.federation.infos):
        assert_trees_close(a.personal_params(info), b.state.server)
        assert routes(a.method, *get_client_inputs(a, k)).tolist() == [1]
        x = a.federation.clients[k].test.x
        actual = predictor(a.method, *get_client_inputs(a, k))(x).detach()
        assert_trees_close(
            actual.log_softmax(-1), predictor(b.method, *get_client_inputs(b, k))(x).detach().log_softmax(-1)
        )


@pytest.mark.parametrize("name", ["fd", "fedproto"])
def test_distillation_of_weight_zero_trains_as_standalone(name: str) -> None:
    method = FD(gamma=0.0, **SLOW_LOCAL) if name == "fd" else FedProto(lam=0.0, **SLOW_LOCAL)
    a, b = (
        run_rounds(method, federate_two_models(), **SAMPLE),
        run_rounds(Standalone(**SLOW_LOCAL), federate_two_models(), **SAMPLE),
    )
    for k, state in b.state.clients.items():
        own = a.state.clients[k]
        tree.map_leaves(
            lambda x, y: torch.testing.assert_close(x, y, rtol=0, atol=1e-12),
            getattr(own, "model", own),
            state,
        )
