"""FedALA: against NumPy, with weights of one, and of layers instead of a head."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from fedlowrank.core import tree
from fedlowrank.data.federation import Federation
from fedlowrank.engines.engine import Engine
from fedlowrank.methods.fedala import FedALA
from tests.golden import contrast_and_mixture_reference as golden

from .comparisons import assert_nested_close, to_layers
from .run_contents import get_client_states, get_reference_inputs, plan_rounds
from .setting import (
    CLASSES,
    FLOAT32,
    INPUTS,
    LOCAL,
    SAMPLE,
    SIZES,
    federate_one_model,
    make_arrays,
    run_rounds,
)


def assert_shares_of_examples(rounds: list[dict[int, list[list[np.ndarray]]]]) -> None:
    """The weights see 80 % of a client's examples, as often as there are epochs, and others in each round."""
    drawn: dict[int, list[frozenset[int]]] = {}
    for clients in rounds:
        for k, (local, later, first) in clients.items():
            assert set(np.concatenate(local)) == set(range(SIZES[k]))
            for steps, epochs in ((later, 1), (first, 2)):
                actual, counts = np.unique(np.concatenate(steps), return_counts=True)
                assert len(actual) == 4 * SIZES[k] // 5
                assert (counts == epochs).all()
            drawn.setdefault(k, []).append(frozenset(np.concatenate(later).tolist()))
    assert all(len(set(sets)) > 1 for sets in drawn.values())


@pytest.mark.parametrize(("eta", "upper"), [(1.0, 1), (20.0, 1), (20.0, 2)])
def test_fedala(eta: float, upper: int, engine: type[Engine]) -> None:
    method = FedALA(weights_lr=eta, first_epochs=2, layers=None if upper == 1 else upper, **LOCAL)
    run = run_rounds(method, federate_one_model(), rounds=5, engine=engine, **SAMPLE)
    assert_shares_of_examples(plan_rounds(run))
    net, own, weights, seen = golden.fedala(*get_reference_inputs(run), eta, upper)
    # every kind of round comes up: the first, the second, and a later one
    assert max(seen) >= 3
    assert_nested_close(to_layers(run.state.server), net)
    actual = get_client_states(run)
    assert_nested_close([to_layers(s.upper) for s in actual], own)
    assert_nested_close([to_layers(s.weights) for s in actual], weights)
    assert [s.rounds for s in actual] == seen
    values = torch.cat([t.flatten() for s in actual for t in tree.tensors(s.weights)])
    assert ((values > 0) & (values < 1)).any()
    # at the large rate some elements come to the lower bound, where they are clipped
    assert eta == 1.0 or (values == 0).any()
    for k in range(len(SIZES)):
        expected = net[:-upper] + golden.between(weights[k], net[-upper:], own[k])
        assert_nested_close(to_layers(run.personal_params(run.federation.infos[k])), expected)


def test_with_its_weights_at_one_fedala_infers_by_the_download_bit_for_bit() -> None:
    run = run_rounds(FedALA(weights_lr=0.0, **LOCAL), federate_one_model(**FLOAT32), **SAMPLE)
    for k in range(len(SIZES)):
        assert tree.equal(run.personal_params(run.federation.infos[k]), run.state.server)


def test_fedala_of_so_many_layers_needs_no_head() -> None:
    make = lambda: nn.Sequential(nn.Linear(INPUTS, 5), nn.ReLU(), nn.Linear(5, CLASSES))  # noqa: E731
    run = run_rounds(
        FedALA(layers=1, **LOCAL), Federation.from_arrays(make_arrays(), make, classes=4), rounds=2
    )
    assert {*run.state.clients[0].upper} == {"2.weight", "2.bias"}
