"""FedHL and FlexLoRA truncate the server's update to each client's rank: which factor takes the singular values,
components that begin at random, and clients of full rank."""

from __future__ import annotations

from typing import Any

import pytest

from fedlowrank.adapters.wire_format import unpack_factors
from fedlowrank.engines.sequential import Sequential
from fedlowrank.methods.fedhl import FedHL
from fedlowrank.methods.flexlora import FlexLoRA
from tests.golden import lora_reference as reference

from .lora_setting import (
    LAYER_NAMES,
    RANKS,
    TRAINING,
    assert_updates_equal,
    make_reference_setting,
    run_lora,
    run_three_rounds,
)
from .setting import LOCAL


@pytest.mark.few(1)
@pytest.mark.parametrize("split", ["B", "A", "sqrt"])
@pytest.mark.parametrize("kind", [FedHL, FlexLoRA])
def test_which_factor_takes_the_singular_values(kind: Any, split: Any) -> None:
    run = run_three_rounds(kind(split=split, training=TRAINING, **LOCAL), Sequential, RANKS)
    s = make_reference_setting(run)
    ws, net, *_ = reference.fedhl(s, split) if kind is FedHL else reference.flexlora(s, split)
    assert_updates_equal(run, ws, net, RANKS, 1e-9)


@pytest.mark.parametrize("kind", [FedHL, FlexLoRA])
def test_components_that_w_does_not_fill_begin_at_random(kind: Any) -> None:
    # one client a round: after that of rank 1 all others have dead components
    run = run_three_rounds(
        kind(training=TRAINING, **LOCAL), Sequential, (3, 1, 4, 2), participation=0.25, rounds=4
    )
    s = make_reference_setting(run)
    order = [s.ranks[k] for r in s.rounds for k in r]
    assert order[:3] == [1, 3, 4], "clients must follow those of smaller rank"
    ws, net, *_ = reference.fedhl(s) if kind is FedHL else reference.flexlora(s)
    assert_updates_equal(run, ws, net, s.ranks, 1e-9)


@pytest.mark.parametrize("kind", [FedHL, FlexLoRA], ids=lambda k: k.title)
def test_a_client_of_full_rank_receives_w_itself(kind: Any) -> None:
    # with V in place of Vᵀ a layer that is not square could not even be multiplied; a square one would be
    # wrong by 1.65
    run = run_lora(kind, 2, ranks=(9, 2, 3, 4))
    sent = unpack_factors(
        getattr(d := run.method.download(run.state.server, run.federation.infos[0]), "message", d).factors
    )
    for n in LAYER_NAMES:
        w = run.state.server.delta[n].dense()
        assert float((2 / 9 * sent[n].dense() - w).norm() / w.norm()) < 1e-14
