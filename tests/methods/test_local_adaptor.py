"""Local Adaptor: against NumPy, and as FedAvg with frozen adaptors."""

from __future__ import annotations

import numpy as np
import pytest

from fedlowrank.core.learning.optimizer import SGD, Group
from fedlowrank.engines.engine import Engine
from fedlowrank.methods.fedavg import FedAvg
from fedlowrank.methods.local_adaptor import LocalAdaptor
from tests.golden import floral_reference as reference

from .cluster_setting import get_adaptors
from .comparisons import assert_nested_close, assert_trees_close, to_layers
from .run_contents import get_client_states, get_initial_networks, get_train_data, plan_rounds
from .setting import LOCAL, LR, SAMPLE, SMALL_PARAMETERS, federate_one_model, run_rounds


@pytest.mark.few(2)
@pytest.mark.parametrize(("alpha", "precondition"), [(0.5, True), (1.6, False), (1.0, True)])
def test_local_adaptor(alpha: float, precondition: bool, engine: type[Engine]) -> None:
    federation = federate_one_model()
    method = LocalAdaptor(rank=2, alpha=alpha, precondition=precondition, **LOCAL)
    run = run_rounds(method, federation, engine=engine, **SAMPLE)
    own = [get_adaptors(method.client_init(i, run.task)) for i in federation.infos]
    net, own = reference.local_adaptor(
        get_initial_networks(federation)[0],
        own,
        get_train_data(federation),
        plan_rounds(run),
        LR,
        alpha=alpha,
        precondition=precondition,
    )
    assert_nested_close(to_layers(run.state.server), net)
    for k, state in enumerate(get_client_states(run)):
        assert_nested_close(get_adaptors(state), own[k])
        assert_nested_close(
            to_layers(run.personal_params(federation.infos[k])),
            reference.mixed(net, own[k], np.ones(1), alpha),
        )


def test_a_frozen_local_adaptor_is_fedavg_and_none_is_sent() -> None:
    frozen = {**LOCAL, "optimizer": SGD(lr=LR, groups={"adaptors": Group(lr=0.0)})}
    run = run_rounds(LocalAdaptor(rank=2, **frozen), federate_one_model(), steps=0, **SAMPLE)
    records = [run.step() for _ in range(3)]
    assert_trees_close(
        run.state.server, run_rounds(FedAvg(**LOCAL), federate_one_model(), **SAMPLE).state.server
    )
    assert all(r.parameters_up == r.parameters_down == 3 * SMALL_PARAMETERS for r in records)
