"""A client that keeps a sum of what it has sent keeps that of what the server got: clipped, compressed or with noise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fedlowrank.core import tree
from fedlowrank.core.contract import AnyMethod
from fedlowrank.core.learning.optimizer import SGD
from fedlowrank.data.federation import Federation
from fedlowrank.engines import ENGINES
from fedlowrank.methods.feddyn import FedDyn
from fedlowrank.methods.fedslr import FedSLR
from fedlowrank.methods.scaffold import SCAFFOLD
from fedlowrank.rounds.run import Run
from fedlowrank.rounds.run_settings import RunSettings
from fedlowrank.trust.trust_settings import Clipping, Compression, Privacy
from tests.methods.setting import federate_one_model, make_arrays

COMMON: dict[str, Any] = {"batch_size": 8, "optimizer": SGD(lr=0.1)}
METHODS: dict[str, AnyMethod] = {
    "scaffold": SCAFFOLD(**COMMON),
    "feddyn": FedDyn(**COMMON),
    "fedslr": FedSLR(**COMMON, memory_efficient=True),
}
CLIP = Clipping(0.05)
SETTINGS: dict[str, dict[str, Any]] = {
    "clipped": {"clipping": CLIP},
    "compressed": {"compression": Compression("top_k:0.05", error_feedback=False)},
    "both": {"clipping": CLIP, "compression": Compression("int8", error_feedback=False)},
    "central": {"clipping": CLIP, "privacy": Privacy("central", noise=1e-6, delta=1e-3)},
    "local": {"clipping": CLIP, "privacy": Privacy("local", noise=1.0, delta=1e-3)},
}


def run_of(name: str, engine: str = "sequential", rounds: int = 6, **settings: Any) -> Run:
    run = Run(METHODS[name], federate_one_model(), RunSettings(rounds=rounds, **settings), ENGINES[engine]())
    for _ in range(rounds):
        run.step()
    return run


def vector(value: Any) -> np.ndarray:
    return np.concatenate([t.double().numpy().ravel() for t in tree.tensors(value)])


def sums_of(run: Run, name: str) -> tuple[np.ndarray, np.ndarray]:
    """What the server keeps, and the mean of what the clients keep."""
    server = run.state.server.inner
    states = [run.state.clients[i].inner for i in range(4)]
    if name == "scaffold":
        return vector(server.control), np.mean([vector(s) for s in states], 0)
    if name == "feddyn":
        return vector(server.h), np.mean([vector(s) for s in states], 0)
    return vector(server.gamma), np.mean([vector(s.gamma) for s in states], 0)


@pytest.mark.parametrize("kind", SETTINGS)
@pytest.mark.parametrize("name", METHODS)
def test_the_servers_sum_is_the_mean_of_the_clients(name: str, kind: str) -> None:
    """c = mean c_k of SCAFFOLD, h = mean g_k of FedDyn, γ̄ = mean γ_i of FedSLR."""
    ours, theirs = sums_of(run_of(name, participation=1.0, **SETTINGS[kind]), name)
    assert np.linalg.norm(ours) > 1e-3
    assert np.allclose(ours, theirs, rtol=0, atol=1e-4 * np.abs(theirs).max())


def test_with_error_feedback_they_differ_by_what_waits() -> None:
    run = run_of("scaffold", compression=Compression("top_k:0.05"))
    ours, theirs = sums_of(run, "scaffold")
    waiting = [run.state.clients[i].residual for i in range(4)]
    lost = np.mean([vector({n: t for n, t in r.items() if n.startswith("/control")}) for r in waiting], 0)
    assert np.abs(lost).max() > 1e-3
    assert np.allclose(ours + lost, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", METHODS)
def test_an_update_within_the_norm_leaves_the_method_as_it_is(name: str) -> None:
    plain = Run(METHODS[name], federate_one_model(), RunSettings(rounds=3), ENGINES["sequential"]())
    for _ in range(3):
        plain.step()
    run = run_of(name, rounds=3, clipping=Clipping(1e6))
    assert tree.equal(run.state.server.inner, plain.state.server)
    assert all(tree.equal(run.state.clients[i].inner, plain.state.clients[i]) for i in range(4))


class Normalized(torch.nn.Module):
    """A linear model behind a batch normalization, whose statistics may be averaged."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(12)
        self.head = torch.nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(x))


def test_averaged_statistics_beside_the_sum_change_nothing() -> None:
    federation = Federation.from_arrays(make_arrays(), {"normalized": Normalized}, classes=4)
    settings = RunSettings(rounds=3, statistics="averaged", clipping=CLIP)
    method = SCAFFOLD(batch_size=8, optimizer=SGD(lr=0.1), drop_last=True)
    run = Run(method, federation, settings, ENGINES["sequential"]())
    for _ in range(3):
        run.step()
    theirs = np.mean([vector(run.state.clients[i].inner) for i in range(4)], 0)
    assert np.linalg.norm(theirs) > 1e-3
    assert np.allclose(vector(run.state.server.inner.inner.control), theirs, rtol=0, atol=1e-6)
