"""The loops written by hand take the package's steps, so that the two times can be compared."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from rounds_by_hand import ClientArrays, make_fedavg_round, make_floral_round
from torch import Tensor, nn

from fedlowrank import Federation
from fedlowrank.adapters.mixtures.router import Router
from fedlowrank.core.learning.optimizer import SGD
from fedlowrank.engines.sequential import Sequential
from fedlowrank.methods import METHODS
from fedlowrank.rounds.run import Run
from fedlowrank.rounds.run_settings import RunSettings

torch.set_num_threads(1)
ROUNDS = 3
LR, ROUTER_LR = 0.3, 30.0
"""So large that a wrong sign or a step that is left out changes the result by more than rounding."""


def make_problem() -> tuple[Federation, ClientArrays]:
    """Five clients with equally many examples, as a federation and as arrays of what they train on."""
    g = np.random.default_rng(0)
    data = [(g.normal(size=(20, 12)).astype(np.float32), g.integers(0, 10, 20)) for _ in range(5)]
    model = nn.Sequential(nn.Linear(12, 30), nn.ReLU(), nn.Linear(30, 10))
    federation = Federation.from_arrays(data, model, head="2")
    train = [client.train for client in federation.clients]
    x, y = torch.stack([t.x for t in train]), torch.stack([t.y for t in train])  # type: ignore[arg-type]
    return federation, ClientArrays(x, y, federation.key, 5, lr=LR, router_lr=ROUTER_LR)


def run_rounds(federation: Federation, name: str, **settings: Any) -> tuple[list[Any], Any]:
    """The server's first state and the state after the rounds."""
    method = METHODS[name](batch_size=32, epochs=5, optimizer=SGD(lr=LR), **settings)
    run = Run(method, federation, RunSettings(rounds=ROUNDS), Sequential())
    states = [run.state.server]
    for _ in range(ROUNDS):
        run.step()
    return states, run.state.server


def list_adaptors(adaptors: dict[str, Any]) -> list[Tensor]:
    """U, V and offsets of both layers."""
    return [
        t
        for layer in ("0", "2")
        for t in (adaptors[f"{layer}.weight"].u, adaptors[f"{layer}.weight"].v, adaptors[f"{layer}.bias"])
    ]


def test_fedavg_by_hand_equals_the_package() -> None:
    federation, arrays = make_problem()
    (start,), end = run_rounds(federation, "fedavg")
    execute_round = make_fedavg_round(arrays, list(start.values()))
    actual = [execute_round() for _ in range(ROUNDS)][-1]
    for a, expected in zip(actual, end.values(), strict=True):
        torch.testing.assert_close(a, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.few(1)
def test_floral_by_hand_equals_the_package() -> None:
    federation, arrays = make_problem()
    (start,), end = run_rounds(federation, "floral", clusters=3, rank=0.3, router=Router(lr=ROUTER_LR))
    model = start.model
    execute_round = make_floral_round(arrays, list(model["base"].values()), list_adaptors(model["adaptors"]))
    actual = [execute_round() for _ in range(ROUNDS)][-1]
    expected = [*end.model["base"].values(), *list_adaptors(end.model["adaptors"])]
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-5)
