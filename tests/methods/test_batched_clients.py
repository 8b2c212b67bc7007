"""Clients of one model are trained in one batch, as one after another."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedlowrank.core import tree
from fedlowrank.core.learning.optimizer import SGD, AdamW
from fedlowrank.engines.vectorized import Vectorized
from fedlowrank.methods import METHODS
from fedlowrank.methods.apfl import APFL
from fedlowrank.methods.ditto import Ditto
from fedlowrank.methods.fedala import FedALA
from fedlowrank.methods.feddyn import FedDyn
from fedlowrank.methods.fedrod import FedRoD
from fedlowrank.methods.fedslr import FedSLR
from fedlowrank.methods.lpgd import LPGD
from fedlowrank.methods.moon import MOON
from fedlowrank.methods.pfedme import PFedMe
from fedlowrank.methods.scaffold import SCAFFOLD
from fedlowrank.rounds.run import Run
from fedlowrank.rounds.run_settings import RunSettings
from fedlowrank.testing.check import small_federation as check_federation
from tests.support.counting_engine import CountingEngine

from .setting import FLOAT32, LOCAL, SIZES, federate_for, federate_one_model, run_rounds


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "method",
    [
        SCAFFOLD(**LOCAL),
        FedDyn(**LOCAL),
        FedDyn(inference="mean_of_clients", **LOCAL),
        Ditto(**LOCAL),
        APFL(**LOCAL),
        APFL(adaptive=False, **LOCAL),
        MOON(**LOCAL),
        FedRoD(**LOCAL),
        PFedMe(**LOCAL),
        FedALA(**LOCAL),
    ],
    ids=[
        *("scaffold", "feddyn", "feddyn_mean", "ditto", "apfl", "apfl_fixed"),
        *("moon", "fedrod", "pfedme", "fedala"),
    ],
)
def test_clients_of_one_model_are_trained_at_once(method: Any) -> None:
    run = run_rounds(method, federate_one_model(**FLOAT32), engine=CountingEngine)
    assert len(run.state.clients) == len(SIZES)
    assert set(run.engine.sizes) == {len(SIZES)}


@pytest.mark.parametrize("method", [FedSLR(personal_norm="low_rank"), LPGD()], ids=["fedslr", "lpgd"])
def test_clients_run_together(method) -> None:
    engine = CountingEngine()
    Run(method, check_federation(False), RunSettings(rounds=1), engine).step()
    assert set(engine.sizes) == {5}


def get_comparable_server(name: str, server: Any) -> Any:
    """What of a server's state has one form: of a matrix held as singular triplets, the matrix."""
    if name in ("fedhl", "flexlora"):
        return {n: d.dense() for n, d in server.delta.items()}, server.rest
    return server


# one method for each kind of pass: plain, proximal, two passes, a prox on spectra, masks, mixtures, factors,
# distillation
@pytest.mark.few(3)
@pytest.mark.parametrize(
    "optimizer", [SGD(lr=0.1, momentum=0.9, weight_decay=0.01, clip=0.5), AdamW(lr=0.01)]
)
@pytest.mark.parametrize(
    "name", ["fedavg", "feddyn", "apfl", "fedslr", "fedspa", "floral", "fedem", "fedhl", "fedkd"]
)
def test_clients_at_once_are_trained_as_one_after_another(name: str, optimizer) -> None:
    # uneven clients: batches are padded, and small clients stop while the others, with their momentum, go on
    sgd_alone = {"apfl": {"adaptive": False}, "fedslr": {"mu": 0.0}}
    more: dict[str, Any] = sgd_alone.get(name, {}) if isinstance(optimizer, AdamW) else {}
    method = METHODS[name](optimizer=optimizer, batch_size=8, epochs=2, **more)
    a = run_rounds(method, federate_for(name), rounds=2)
    b = run_rounds(method, federate_for(name), rounds=2, engine=Vectorized)
    for k in a.state.clients:
        tree.map_leaves(
            lambda x, y: torch.testing.assert_close(x, y, rtol=0, atol=1e-8),
            a.state.clients[k],
            b.state.clients[k],
        )
    if name != "fedkd":  # ranks at the edge of an energy may differ
        servers = get_comparable_server(name, a.state.server), get_comparable_server(name, b.state.server)
        tree.map_leaves(lambda x, y: torch.testing.assert_close(x, y, rtol=0, atol=1e-8), *servers)
