"""MOON: against NumPy, as FedAvg in its first round, dropout, representations of zeros, and padded texts."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedlowrank import Loss
from fedlowrank.core import tree
from fedlowrank.core.learning.optimizer import SGD
from fedlowrank.data.federation import Federation
from fedlowrank.engines.engine import Engine
from fedlowrank.engines.sequential import Sequential
from fedlowrank.methods.fedavg import FedAvg
from fedlowrank.methods.moon import MOON
from tests.golden import contrast_and_mixture_reference as golden

from .comparisons import assert_nested_close, to_layers
from .run_contents import get_client_states, get_reference_inputs
from .setting import CLASSES, LOCAL, SAMPLE, WIDTH, Net, federate_one_model, make_arrays, run_rounds


def assert_moon_equals_reference(mu: float, temperature: float, engine: type[Engine], **data: Any) -> None:
    """Compare a run with the reference; ``data`` are settings of the federation."""
    run = run_rounds(
        MOON(mu=mu, temperature=temperature, **LOCAL),
        federate_one_model(**data),
        rounds=4,
        engine=engine,
        **SAMPLE,
    )
    net, last = golden.moon(*get_reference_inputs(run), mu, temperature)
    assert_nested_close(to_layers(run.state.server), net)
    assert_nested_close([to_layers(s) for s in get_client_states(run)], last)
    # the loss counts: without it the model is another one
    plain = golden.moon(*get_reference_inputs(run), 0.0, temperature)[0]
    assert max(np.abs(a[0] - b[0]).max() for a, b in zip(net, plain, strict=True)) > 1e-3


@pytest.mark.few(1)
@pytest.mark.parametrize(("mu", "temperature"), [(1.0, 0.5), (5.0, 0.2)])
def test_moon(mu: float, temperature: float, engine: type[Engine]) -> None:
    assert_moon_equals_reference(mu, temperature, engine)


def test_moon_minimizes_the_loss_of_the_task(smoothed_loss: Loss) -> None:
    assert_moon_equals_reference(1.0, 0.5, Sequential, loss=smoothed_loss)


def test_the_first_round_of_moon_is_that_of_fedavg() -> None:
    settings = {**LOCAL, "optimizer": SGD(lr=0.1)}
    actual, expected = (
        run_rounds(m, federate_one_model(), rounds=3, steps=1).state.server
        for m in (MOON(mu=5.0, **settings), FedAvg(**settings))
    )
    tree.map_leaves(lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=1e-13), actual, expected)


class WithDropout(Net):
    """A model with dropout before its head."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(functional.dropout(self.body(x.to(self.head.weight.dtype)), 0.5, self.training))


def test_the_targets_of_moon_are_without_dropout(engine: type[Engine]) -> None:
    """In round 0 both targets are equal, so that the contrast has no gradient whatever dropout draws."""
    federation = Federation.from_arrays(make_arrays(), lambda: WithDropout(WIDTH), classes=CLASSES)
    actual, expected = (
        run_rounds(m, federation, rounds=1, engine=engine).state.server
        for m in (MOON(mu=5.0, **LOCAL), FedAvg(**LOCAL))
    )
    tree.map_leaves(lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=1e-12), actual, expected)


def test_moon_survives_representations_of_zeros() -> None:
    class Dead(Net):
        def __init__(self) -> None:
            super().__init__(WIDTH)
            with torch.no_grad():
                # no unit is ever active
                self.body[0].weight.zero_()
                self.body[0].bias.fill_(-1.0)

    federation = Federation.from_arrays(make_arrays(), Dead, classes=CLASSES)
    run = run_rounds(MOON(**LOCAL), federation, rounds=2)
    assert tree.not_finite(run.state.server) is None


class Tagger(nn.Module):
    """Scores of the next token, each by the embedding of one token alone."""

    head_name = "head"

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.inner, self.head = nn.Embedding(11, 6), nn.Linear(6, 6), nn.Linear(6, 11)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.head(torch.relu(self.inner(self.embedding(input_ids.long()))) + 0.3)


def federate_texts(pad: int, has_mask: bool) -> Federation:
    """Sequences of three to six tokens in a width of eight, padded with a token."""
    clients = []
    for k in range(3):
        ids = torch.randint(1, 11, (9, 8), generator=torch.Generator().manual_seed(k))
        mask = (torch.arange(8)[None] < torch.tensor([3, 4, 5, 6, 3, 4, 5, 6, 4])[:, None]).long()
        padded = torch.where(mask > 0, ids, pad)
        x = {"input_ids": padded} | ({"attention_mask": mask} if has_mask else {})
        clients.append((x, torch.where(mask > 0, ids, -100)))
    return Federation.from_arrays(clients, Tagger, loss="next_token")


@pytest.mark.parametrize("has_mask", [True, False])
def test_padding_of_texts_is_no_part_of_the_representation_of_moon(
    has_mask: bool, engine: type[Engine]
) -> None:
    settings: dict[str, Any] = {"batch_size": 3, "optimizer": SGD(lr=0.3)}
    runs = [
        run_rounds(MOON(mu=5.0, **settings), federate_texts(pad, has_mask), rounds=2, engine=engine)
        for pad in (0, 7)
    ]
    close = partial(torch.testing.assert_close, rtol=0, atol=1e-6)
    tree.map_leaves(close, *(run.state.server for run in runs))
    plain = run_rounds(FedAvg(**settings), federate_texts(0, has_mask), rounds=2, engine=engine)
    assert any((runs[0].state.server[n] - p).abs().max() > 1e-3 for n, p in plain.state.server.items())
