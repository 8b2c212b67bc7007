"""FedRep: against NumPy, and what each of its two phases freezes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedlowrank.core import tree
from fedlowrank.core.errors import ConfigError
from fedlowrank.core.learning.optimizer import SGD, AdamW, Group
from fedlowrank.engines.engine import Engine
from fedlowrank.methods.fedrep import FedRep
from tests.golden import personal_reference

from .comparisons import assert_nested_close, to_layers
from .run_contents import (
    SpyTrainer,
    get_client_states,
    get_download,
    get_initial_networks,
    get_personal_parameters,
    get_state,
    get_train_data,
    make_view,
    plan_rounds,
)
from .setting import FLOAT32, LOCAL, LR, SAMPLE, SIZES, federate_one_model, run_rounds


@pytest.mark.parametrize("head_epochs", [1, 3])
def test_fedrep(head_epochs: int, engine: type[Engine]) -> None:
    federation = federate_one_model()
    run = run_rounds(FedRep(head_epochs=head_epochs, **LOCAL), federation, engine=engine, **SAMPLE)
    start, rounds = get_initial_networks(federation), plan_rounds(run)
    for k, (of_head, of_body) in rounds[0].items():
        assert (len(of_head), len(of_body)) == (head_epochs * -(-SIZES[k] // 8), 2 * -(-SIZES[k] // 8))
    body, heads = personal_reference.fedrep(
        start[0][:-1], [s[-1:] for s in start], get_train_data(federation), rounds, LR
    )
    assert_nested_close(to_layers(run.state.server), body)
    assert_nested_close([to_layers(s) for s in get_client_states(run)], heads)
    for k in range(len(SIZES)):
        assert_nested_close(to_layers(get_personal_parameters(run, k)), body + heads[k])


@pytest.mark.parametrize("optimizer", [SGD(lr=LR, momentum=0.9, weight_decay=0.1), AdamW(lr=0.1)])
def test_fedrep_freezes_what_it_does_not_train_in_each_phase(optimizer) -> None:
    federation = federate_one_model(**FLOAT32)
    method = FedRep(optimizer=optimizer, batch_size=8, head_epochs=2)
    run = run_rounds(method, federation, steps=1)
    model, info = federation.architectures["small"], federation.infos[2]
    spy = SpyTrainer(run.engine.trainer(method, federation, 1, info))
    down, state = get_download(run, 2), get_state(run, 2)
    before = tree.encode((down, state))
    head, body = method.local_update(state, down, make_view(run, 2, 1, spy))
    assert tree.encode((down, state)) == before
    (first, end_of_first), (second, end_of_second) = spy.seen
    assert (first.name, second.name) == ("head", "base")
    # phase one trains the old head on the body as received, phase two that body below the new head
    assert tree.equal((first.start, first.constants), (state, (down,)))
    assert tree.equal((second.start, second.constants), (down, (end_of_first,)))
    assert tree.equal((head, body), (end_of_first, end_of_second))
    assert head.keys() == model.head_of(model.initial).keys()
    assert body.keys() == model.body_of(model.initial).keys()
    for name, p in ({**head, **body}).items():
        assert not torch.equal(p, {**state, **down}[name])


def test_groups_of_the_head_and_of_the_body_are_those_of_their_passes() -> None:
    """A rate of 0 for one part leaves the other as it is without groups."""
    federation = federate_one_model()

    def train(groups: dict[str, Group]) -> tuple[Any, Any]:
        run = run_rounds(FedRep(**{**LOCAL, "optimizer": SGD(lr=LR, groups=groups)}), federation, 1)
        return to_layers(run.state.server), [to_layers(run.state.clients[k]) for k in range(len(SIZES))]

    body, heads = train({})
    frozen = {"head.weight": Group(lr=0.0), "head.bias": Group(lr=0.0)}
    start_head = [to_layers(federation.architectures["small"].initial)[-1:]] * len(heads)
    assert_nested_close(train(frozen)[1], start_head)
    assert_nested_close(train({"body.0.weight": Group(lr=LR)}), (body, heads))
    with pytest.raises(ConfigError, match=r"optimizer.groups: \['hed.weight'\] match no parameter"):
        train({"hed.weight": Group(lr=0.0)})


def test_how_long_fedrep_trains_the_body_does_not_touch_the_head() -> None:
    short, long = (
        run_rounds(FedRep(optimizer=SGD(lr=LR), epochs=e), federate_one_model(**FLOAT32), steps=1)
        for e in (1, 3)
    )
    for k in range(len(SIZES)):
        assert tree.equal(get_state(short, k), get_state(long, k))
    assert not tree.equal(short.state.server, long.state.server)
