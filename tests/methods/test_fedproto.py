"""FedProto: against NumPy, with the loss of the task, prototypes of rare labels, the nearest one, and what it sends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fedlowrank import Loss
from fedlowrank.core.contract import ServerView
from fedlowrank.engines.engine import Engine, client_view
from fedlowrank.engines.sequential import Sequential
from fedlowrank.methods.fedproto import ClientState, FedProto, Prototypes
from fedlowrank.rounds.run import Run
from tests.golden import reference
from tests.support.method_calls import Reply, predictor, server_update

from .comparisons import assert_bits_equal, assert_nested_close, to_layers
from .run_contents import get_client_states, get_initial_networks, get_train_data, make_view, plan_rounds
from .setting import (
    CLASSES,
    LOCAL,
    LR,
    OWNED,
    SAMPLE,
    SLOW_LOCAL,
    WIDTH,
    federate_one_model,
    federate_two_models,
    run_rounds,
)


def assert_fedproto_equals_reference(lam: float, weights: str, engine: type[Engine], **data: Any) -> None:
    """Compare a run with the reference; ``data`` are settings of the federation."""
    federation = federate_two_models(**data)
    run = run_rounds(FedProto(lam=lam, weighting=weights, **LOCAL), federation, engine=engine, **SAMPLE)
    known, nets = reference.fedproto(
        get_initial_networks(federation),
        get_train_data(federation),
        plan_rounds(run),
        LR,
        lam,
        weighted=weights == "examples",
    )
    assert_nested_close([to_layers(s.model) for s in get_client_states(run)], nets)
    assert run.state.server.is_known.nonzero()[:, 0].tolist() == sorted(known)
    assert_nested_close(
        run.state.server.mean[run.state.server.is_known], np.stack([known[j] for j in sorted(known)])
    )
    for k, state in enumerate(get_client_states(run)):
        assert state.is_owned.nonzero()[:, 0].tolist() == sorted(
            set(get_train_data(federation)[k][1].tolist())
        )


@pytest.mark.few(3)
@pytest.mark.parametrize(("lam", "weights"), [(1.0, "examples"), (0.3, "uniform")])
def test_fedproto(lam: float, weights: str, engine: type[Engine]) -> None:
    assert_fedproto_equals_reference(lam, weights, engine)


def test_fedproto_minimizes_the_loss_of_the_task(smoothed_loss: Loss) -> None:
    assert_fedproto_equals_reference(0.3, "uniform", Sequential, loss=smoothed_loss)


def compute_next_upload(method: Any, run: Any, client: int) -> Any:
    """What one client would send next."""
    info = run.federation.infos[client]
    trainer = run.engine.trainer(method, run.federation, run.round, info)
    view = client_view(run.federation, run.task, info, run.round, trainer)
    return method.local_update(run.state_of(info), method.download(run.state.server, info), view)[1]


def test_a_label_of_one_owner_has_that_owners_prototype_under_fedproto() -> None:
    federation = federate_one_model()
    run = run_rounds(FedProto(**SLOW_LOCAL), federation)
    data, model = federation.clients[2].train, run.state.clients[2].model
    r = federation.architectures["small"].represent(model, data.x[data.y == 3])
    torch.testing.assert_close(run.state.server.mean[3], r.mean(0), rtol=0, atol=1e-12)
    # it holds its prototype when its owner is absent
    lone = FedProto(**SLOW_LOCAL)
    replies = [Reply(federation.infos[0], compute_next_upload(lone, run, 0))]
    after = server_update(lone, run.state.server, replies, ServerView(run.task, 3, federation.key))
    assert_bits_equal(after.mean[3], run.state.server.mean[3])
    assert after.is_known.all()


def test_fedproto_sends_all_prototypes_down_and_its_own_up() -> None:
    run = run_rounds(FedProto(**SLOW_LOCAL), federate_two_models(), participation=0.75, steps=0)
    for _ in range(3):
        record = run.step()
        assert record.parameters_down == 3 * CLASSES * WIDTH
        assert record.parameters_up == sum(len(OWNED[k]) for k in record.participants) * WIDTH


def run_with_prototypes(infer: str, known: list[bool]) -> tuple[Run, Prototypes]:
    run = run_rounds(FedProto(inference=infer, **SLOW_LOCAL), federate_one_model())
    mean = torch.where(
        torch.tensor(known)[:, None], run.state.server.mean, torch.zeros(1, dtype=torch.float64)
    )
    return run, Prototypes(mean, torch.tensor(known))


@pytest.mark.parametrize("known", [[True, True, False, True], [False, True, True, False]])
def test_the_nearest_prototype_is_never_of_a_class_without_one(known: list[bool]) -> None:
    run, protos = run_with_prototypes("nearest", known)
    # at the origin, where a class without prototype holds its zeros, such a class would be the nearest
    small = {n: p * 1e-3 for n, p in run.state.clients[0].model.items()}
    state = ClientState(small, run.state.clients[0].is_owned)
    x = torch.cat([c.test.x for c in run.federation.clients])
    r = reference.forward(to_layers(small), x.double().numpy())[0][-1]
    gap = ((r[:, None, :] - protos.mean.numpy()[None]) ** 2).sum(2)
    gap[:, ~np.array(known)] = np.inf
    actual = predictor(run.method, state, protos, make_view(run, 0))(x).argmax(1)
    assert actual.tolist() == gap.argmin(1).tolist()


def test_the_nearest_own_prototype_is_of_a_class_the_client_has() -> None:
    run, protos = run_with_prototypes("nearest_own", [True] * CLASSES)
    x = torch.cat([c.test.x for c in run.federation.clients])
    for k, owned in enumerate(OWNED):
        actual = predictor(run.method, run.state.clients[k], protos, make_view(run, k))(x).argmax(1)
        r = reference.forward(to_layers(run.state.clients[k].model), x.double().numpy())[0][-1]
        gap = ((r[:, None, :] - protos.mean.numpy()[None]) ** 2).sum(2)
        expected = [min(owned, key=lambda j, row=row: row[j]) for row in gap]
        assert actual.tolist() == expected
