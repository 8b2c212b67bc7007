"""What runs on a CPU runs on a GPU and comes to the same: methods, protections, a client over a network."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from fedlowrank.core import tree
from fedlowrank.core.learning.optimizer import SGD
from fedlowrank.engines import ENGINES
from fedlowrank.methods import METHODS
from fedlowrank.rounds.run import Run
from fedlowrank.rounds.run_settings import RunSettings
from fedlowrank.testing.check import check_method, small_federation
from fedlowrank.trust.trust_settings import Clipping, Compression, Privacy, Robust, SecureSums
from tests.support.local_network import run_whole, small

# another device shows whether the tests themselves are right
DEVICE = os.environ.get("FEDLOWRANK_TEST_DEVICE", "cuda")

pytestmark = pytest.mark.skipif(
    DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a GPU that torch finds"
)

PROTECTIONS: dict[str, dict[str, Any]] = {
    "central noise": {
        "clipping": Clipping(norm=1.0),
        "privacy": Privacy(kind="central", noise=0.5, delta=1e-3),
        "sampling": "poisson",
    },
    "local noise": {
        "clipping": Clipping(norm=1.0),
        "privacy": Privacy(kind="local", noise=0.5, delta=1e-3),
        "sampling": "poisson",
    },
    "a median": {"robust": Robust(rule="median")},
    "a quarter of the entries": {"compression": Compression(uplink="top_k:0.25")},
    "secure sums": {"secure": SecureSums(on=True)},
}


def states_after(method: str, device: str, **settings: Any) -> Any:
    """Server and clients after two rounds, on the CPU."""
    given = {"rounds": 2, "device": device, **settings}
    run = Run(
        METHODS[method](optimizer=SGD(lr=0.05)),
        small_federation(False),
        RunSettings(**given),
        ENGINES["vectorized"](),
    )
    run.step()
    run.step()
    clients = {str(i): c for i, c in sorted(run.state.clients.items())}
    return tree.move((run.state.server, clients), "cpu")


def assert_close(found: Any, expected: Any, atol: float = 1e-4) -> None:
    pairs = zip(tree.leaves(found), tree.leaves(expected), strict=True)
    for (path, a), (_, b) in pairs:
        torch.testing.assert_close(
            a.double(), b.double(), rtol=1e-3, atol=atol, msg=lambda m, p=path: f"{p}: {m}"
        )


@pytest.mark.parametrize(
    "name",
    ["fedavg", "scaffold", "pfedlora", "fedslr", "fedhl", "flexlora", "floral", "fedem", "ifca", "ensemble"],
)
def test_a_method_passes_its_battery(name: str) -> None:
    assert [f for f in check_method(METHODS[name](), DEVICE) if not f.ok] == []


@pytest.mark.parametrize("name", ["ifca", "fedem", "ensemble"])
def test_models_of_clusters_begin_as_on_the_cpu(name: str) -> None:
    method, on_cpu = METHODS[name](), small_federation(False)
    there = method.server_init(on_cpu.to(DEVICE).task(1))
    assert tree.equal(tree.move(there, "cpu"), method.server_init(on_cpu.task(1)))


@pytest.mark.parametrize("protection", PROTECTIONS)
def test_protections_come_to_the_same(protection: str) -> None:
    settings = PROTECTIONS[protection]
    # a value on the border of two steps of the grid of secure sums may round to either
    assert_close(states_after("fedavg", DEVICE, **settings), states_after("fedavg", "cpu", **settings))


@pytest.mark.parametrize("method", ["scaffold", "fedhl"])
def test_a_client_over_a_network_trains_on_its_gpu(method: str, tmp_path: Path) -> None:
    made = small(method, rounds=2, run={"device": DEVICE})
    _, result = run_whole(made, tmp_path)
    on_cpu = small(method, rounds=2)
    truth = Run(on_cpu.build_method(method), on_cpu.federation(), on_cpu.run, ENGINES["sequential"]())
    truth.step()
    truth.step()
    assert {t.device.type for t in tree.tensors(result.run.state.server)} == {"cpu"}
    assert_close(result.run.state.server, truth.state.server)
