"""LG-FedAvg: against NumPy, the head that it infers with, and heads that it refuses."""

from __future__ import annotations

import numpy as np
import pytest

from fedlowrank.core.errors import TaskError
from fedlowrank.engines.engine import Engine
from fedlowrank.methods.lg_fedavg import LGFedAvg
from tests.golden import reference

from .comparisons import assert_nested_close, to_layers
from .run_contents import get_client_states, get_initial_networks, get_predictor, get_train_data, plan_rounds
from .setting import LOCAL, LR, SAMPLE, SLOW_LOCAL, federate_two_models, prepare_run, run_rounds


def test_lg_fedavg(engine: type[Engine]) -> None:
    federation = federate_two_models()
    run = run_rounds(LGFedAvg(**LOCAL), federation, engine=engine, **SAMPLE)
    start = get_initial_networks(federation)
    head, bodies = reference.lg_fedavg(
        start[0][-1], [s[:-1] for s in start], get_train_data(federation), plan_rounds(run), LR
    )
    assert_nested_close(to_layers(run.state.server), [head])
    assert_nested_close([to_layers(s) for s in get_client_states(run)], bodies)


def test_lg_fedavg_infers_with_the_head_after_aggregation() -> None:
    federation = federate_two_models()
    run = run_rounds(LGFedAvg(**SLOW_LOCAL), federation, steps=2)
    old = run.state.server
    record = run.step()
    for info, data in zip(federation.infos, federation.clients, strict=True):
        x, y = data.test.x.double().numpy(), data.test.y.numpy()
        body = to_layers(run.state.clients[info.id])
        fresh, stale = (reference.forward([*body, *to_layers(h)], x)[1] for h in (run.state.server, old))
        np.testing.assert_allclose(
            get_predictor(run, info.id)(data.test.x).detach().numpy(), fresh, atol=1e-12
        )
        assert not np.allclose(fresh, stale, atol=1e-6)
        assert record.values()[info.id] == (fresh.argmax(1) == y).mean()


def test_heads_of_two_shapes_are_refused_with_clients_and_shapes() -> None:
    with pytest.raises(TaskError, match=r"client 0 \(deep\) and client 1 \(small\) differ"):
        prepare_run(LGFedAvg(), federate_two_models(deep_width=7))
