"""The clients that a method chooses for a round, without and with a privacy budget."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedlowrank import Attack, Clipping, Federation, Privacy, simulate
from fedlowrank.core.errors import TaskError
from fedlowrank.methods import FedAvg

G = torch.Generator().manual_seed(0)
FEDERATION = Federation.from_arrays(
    [(torch.randn(12, 3, generator=G), torch.arange(12) % 2) for _ in range(6)], nn.Linear(3, 2), val=0
)


def choosing(choose: Any) -> Any:
    return type("Choosing", (FedAvg,), {"participants": lambda self, s, a: choose(s, a)})()


def simulate_privately(method: Any, kind: str, participation: float = 0.5, sampling: str = "poisson") -> Any:
    return simulate(
        method,
        FEDERATION,
        rounds=3,
        participation=participation,
        sampling=sampling,
        privacy=Privacy(kind, noise=1.0, delta=1e-3),
        clipping=Clipping(norm=1.0),
    )


def epsilon_of(result: Any) -> float:
    return float(result.rounds[-1].server_metrics["privacy"]["epsilon"])


@pytest.mark.parametrize("convert", [tuple, np.array, torch.tensor, iter])
def test_identifiers_may_be_whole_numbers_of_any_library(convert: Any) -> None:
    expected, actual = (
        simulate(choosing(lambda s, a, f=f: f([4, 1])), FEDERATION, rounds=2) for f in (list, convert)
    )
    assert [r.participants for r in actual.rounds] == [[], [4, 1], [4, 1]]
    assert all(type(i) is int for r in actual.rounds for i in r.participants)
    assert torch.equal(actual.run.state.server["weight"], expected.run.state.server["weight"])


def test_a_client_that_never_trains_cannot_be_chosen() -> None:
    all_chosen = choosing(lambda s, a: range(6))
    with pytest.raises(
        TaskError, match=r"Choosing.participants returned the client \d, which is not available"
    ):
        simulate(all_chosen, FEDERATION, rounds=1, unseen=0.5)
    available = simulate(choosing(lambda s, a: a), FEDERATION, rounds=1, unseen=0.5, participation=0.4)
    assert len(available.rounds[1].participants) == 3


@pytest.mark.parametrize(
    ("choose", "says"),
    [
        (lambda s, a: a, "adds client"),
        (lambda s, a: [*s, *(i for i in a if i not in s)][: len(s) + 1], "adds client"),
        (lambda s, a: s[1:], "leaves out client"),
        # a change of the argument itself
        (lambda s, a: s.extend(i for i in a if i not in s) or s, "adds client"),
    ],
)
def test_central_privacy_counts_the_draw_that_takes_place(choose: Any, says: str) -> None:
    with pytest.raises(
        TaskError, match=rf"Choosing.participants {says} \d, but with privacy.kind = 'central'"
    ):
        simulate_privately(choosing(choose), "central")


def test_the_order_of_the_sampled_clients_changes_no_epsilon() -> None:
    expected, actual = (
        simulate_privately(choosing(lambda s, a, step=step: s[::step]), "central") for step in (1, -1)
    )
    assert any(len(r.participants) > 1 for r in actual.rounds)
    assert [sorted(r.participants) for r in actual.rounds] == [r.participants for r in expected.rounds]
    assert epsilon_of(actual) == epsilon_of(expected)


def test_local_privacy_charges_the_clients_that_a_method_chooses() -> None:
    expected = simulate_privately(FedAvg(), "local", participation=1.0, sampling="fixed")
    all_chosen = simulate_privately(choosing(lambda s, a: a), "local")
    none_chosen = simulate_privately(choosing(lambda s, a: []), "local")
    assert epsilon_of(all_chosen) == epsilon_of(expected) > epsilon_of(none_chosen) == 0


@pytest.mark.parametrize("seed", range(6))
def test_hostile_clients_are_among_those_that_train(seed: int) -> None:
    federation = dataclasses.replace(FEDERATION, seed=seed)
    count = len(federation.infos)
    result = simulate("fedavg", federation, rounds=1, unseen=0.5, attack=Attack("sign_flip", share=0.5))
    run = result.run
    assert not run.hostile & run.client_sampler.unseen
    assert len(run.hostile) == round(0.5 * (count - len(run.client_sampler.unseen)))
