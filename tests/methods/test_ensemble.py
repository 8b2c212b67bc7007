"""Ensemble: against NumPy, with learned and with known clusters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedlowrank.adapters.mixtures.router import Router
from fedlowrank.core.errors import TaskError
from fedlowrank.engines.engine import Engine
from fedlowrank.methods.ensemble import Ensemble
from tests.golden import floral_reference as reference
from tests.golden.reference import forward
from tests.support.method_calls import predictor, routes

from .cluster_setting import KNOWN_CLUSTERS, OPTIMAL, get_networks
from .comparisons import assert_nested_close, to_layers
from .run_contents import get_client_inputs, get_client_states, get_train_data, plan_rounds
from .setting import LOCAL, LR, SAMPLE, federate_one_model, run_rounds


@pytest.mark.few(2)
@pytest.mark.parametrize("mix", ["outputs", "weights"])
@pytest.mark.parametrize("known", [None, KNOWN_CLUSTERS], ids=["learned", "optimal"])
def test_ensemble(mix: str, known: Any, engine: type[Engine]) -> None:
    federation = federate_one_model(cluster=KNOWN_CLUSTERS)
    router = Router(lr=0.7) if known is None else OPTIMAL
    method = Ensemble(clusters=3, mix=mix, router=router, **LOCAL)
    run = run_rounds(method, federation, engine=engine, **SAMPLE)
    models, thetas = reference.ensemble(
        get_networks(method.server_init(run.task)), get_train_data(federation), plan_rounds(run), LR, router_lr=0.7,
        outputs=mix == "outputs", known=known,
    )  # fmt: skip
    assert_nested_close(get_networks(run.state.server), models)
    for k, state in enumerate(get_client_states(run)):
        pi = np.eye(3)[known[k]] if known else reference.shares(thetas[k])
        if known is None:
            assert_nested_close(state, thetas[k])
        assert_nested_close(routes(run.method, *get_client_inputs(run, k)).double(), pi)
        x = get_train_data(federation)[k][0]
        scores = sum(p * forward(net, x)[1] for p, net in zip(pi, models, strict=True))
        if mix == "weights":
            whole = reference.summed([reference.scaled(net, p) for net, p in zip(models, pi, strict=True)])
            scores = forward(whole, x)[1]
            assert_nested_close(to_layers(run.personal_params(federation.infos[k])), whole)
        else:
            assert_nested_close(to_layers(run.personal_params(federation.infos[k])), models[int(pi.argmax())])
        assert_nested_close(
            predictor(run.method, *get_client_inputs(run, k))(federation.clients[k].train.x).detach(), scores
        )


def test_an_ensemble_with_known_routes_needs_known_clusters() -> None:
    with pytest.raises(TaskError, match=r"Ensemble: optimal routing needs .* client 0 is unknown"):
        run_rounds(Ensemble(router=OPTIMAL), federate_one_model(), steps=0)
    with pytest.raises(TaskError, match="Ensemble: client 3 is of cluster 2, but clusters is 2"):
        run_rounds(Ensemble(clusters=2, router=OPTIMAL), federate_one_model(cluster=KNOWN_CLUSTERS), steps=0)
