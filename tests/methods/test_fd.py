"""FD: against NumPy, with the loss of the task, its targets, labels that nobody else owns, and what it sends."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from fedlowrank import Loss
from fedlowrank.core import tree
from fedlowrank.core.contract import ServerView
from fedlowrank.core.errors import TaskError
from fedlowrank.core.learning.optimizer import SGD
from fedlowrank.data.federation import Federation
from fedlowrank.engines.engine import Engine
from fedlowrank.engines.sequential import Sequential
from fedlowrank.engines.vectorized import Vectorized
from fedlowrank.methods.fd import FD, Outputs
from fedlowrank.methods.fedkd import FedKD
from fedlowrank.methods.fedproto import FedProto, Upload
from fedlowrank.methods.fml import FML
from fedlowrank.methods.standalone import Standalone
from tests.golden import reference
from tests.support.method_calls import Reply, server_update

from .comparisons import assert_nested_close, to_layers
from .run_contents import get_client_states, get_initial_networks, get_train_data, plan_rounds
from .setting import (
    CLASSES,
    FLOAT32,
    LOCAL,
    LR,
    OWNED,
    SAMPLE,
    SLOW_LOCAL,
    WIDTH,
    Net,
    federate_one_model,
    federate_two_models,
    make_arrays,
    prepare_run,
    run_rounds,
)


def assert_fd_equals_reference(gamma: float, engine: type[Engine], **data: Any) -> None:
    """Compare a run with the reference; ``data`` are settings of the federation."""
    federation = federate_two_models(deep_width=7, **data)
    run = run_rounds(FD(gamma=gamma, **LOCAL), federation, engine=engine, **SAMPLE)
    latest, nets = reference.fd(
        get_initial_networks(federation), get_train_data(federation), plan_rounds(run), LR, gamma, CLASSES
    )
    assert_nested_close([to_layers(s) for s in get_client_states(run)], nets)
    for info in federation.infos:
        own = run.state.server.latest[str(info.id)]
        assert own.labels.tolist() == sorted(latest[info.id])
        assert_nested_close(own.mean, np.stack([latest[info.id][j] for j in sorted(latest[info.id])]))
        targets, down = (
            reference.leave_one_out(latest, info.id, CLASSES),
            run.method.download(run.state.server, info),
        )
        assert down.is_known.nonzero()[:, 0].tolist() == sorted(targets)
        assert_nested_close(down.mean[down.is_known], np.stack([targets[j] for j in sorted(targets)]))


@pytest.mark.few(2)
@pytest.mark.parametrize("gamma", [1.0, 0.4])
def test_fd(gamma: float, engine: type[Engine]) -> None:
    assert_fd_equals_reference(gamma, engine)


def test_fd_minimizes_the_loss_of_the_task(smoothed_loss: Loss) -> None:
    assert_fd_equals_reference(0.4, Sequential, loss=smoothed_loss)


def test_a_client_whose_labels_nobody_else_owns_trains_alone_under_fd() -> None:
    owned = ((0, 1), (0, 1), (2, 3), (0, 1))
    federation = federate_one_model(clients=make_arrays(owned=owned))
    run, alone = (
        run_rounds(FD(**SLOW_LOCAL), federation),
        run_rounds(Standalone(**SLOW_LOCAL), federate_one_model(clients=make_arrays(owned=owned))),
    )
    tree.map_leaves(
        lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=1e-12),
        run.state.clients[2],
        alone.state.clients[2],
    )
    targets = run.method.download(run.state.server, federation.infos[2])
    assert targets.is_known.tolist() == [True, True, False, False]
    # the others do hear of labels 2 and 3, and of one another
    assert run.method.download(run.state.server, federation.infos[0]).is_known.all()
    assert not torch.equal(run.state.clients[0]["head.weight"], alone.state.clients[0]["head.weight"])


def test_fd_sends_a_square_of_the_classes_down_and_a_row_for_each_own_label_up() -> None:
    run = run_rounds(FD(**SLOW_LOCAL), federate_two_models(), participation=0.75, steps=0)
    for _ in range(3):
        record = run.step()
        assert record.parameters_down == 3 * CLASSES**2
        assert record.parameters_up == sum(len(OWNED[k]) for k in record.participants) * CLASSES


def test_fd_targets_are_probabilities_and_thirty_rounds_stay_finite() -> None:
    run = run_rounds(
        FD(optimizer=SGD(lr=0.1), batch_size=8), federate_two_models(**FLOAT32), rounds=30, steps=0
    )
    losses = []
    for _ in range(30):
        losses.append(run.step().training_losses["local"])
        for info in run.federation.infos:
            down = run.method.download(run.state.server, info)
            rows = down.mean[down.is_known]
            assert rows.min() >= -1e-6
            torch.testing.assert_close(rows.sum(1), torch.ones(len(rows)), rtol=0, atol=1e-5)
            assert torch.equal(down.mean[~down.is_known], torch.zeros_like(down.mean[~down.is_known]))
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0]
    assert all(torch.isfinite(t).all() for s in run.state.clients.values() for t in s.values())


@pytest.mark.filterwarnings("ignore:.*makes 6 scores")
@pytest.mark.parametrize("engine", [Sequential, Vectorized])
def test_fd_averages_all_outputs_of_a_model_with_more_of_them_than_classes(engine: Any) -> None:
    federation = Federation.from_arrays(
        make_arrays(), lambda: Net(WIDTH, classes=CLASSES + 2), classes=CLASSES
    )
    run = run_rounds(FD(**SLOW_LOCAL), federation, 2, engine=engine)
    for k, theta in run.state.clients.items():
        x, y = get_train_data(federation)[k]
        scores = torch.func.functional_call(Net(WIDTH, classes=CLASSES + 2), theta, torch.from_numpy(x))
        own = run.state.server.latest[str(k)]
        for label, mean in zip(own.labels.tolist(), own.mean, strict=True):
            expected = scores.softmax(-1)[torch.from_numpy(y) == label].mean(0).detach()
            torch.testing.assert_close(mean, expected, rtol=0, atol=1e-10)


@pytest.mark.filterwarnings("ignore:.*makes 6 scores")
@pytest.mark.parametrize("method", [FD(), FML(), FedKD()])
def test_models_of_other_numbers_of_outputs_are_refused_where_outputs_are_compared(method: Any) -> None:
    models = {"more": lambda: Net(WIDTH, classes=CLASSES + 2), "small": lambda: Net(WIDTH)}
    federation = Federation.from_arrays(make_arrays(), models, classes=CLASSES)
    with pytest.raises(TaskError, match="more has 6, small has 4"):
        prepare_run(method, federation)


@pytest.mark.parametrize(
    ("labels", "words"),
    [([1, 1], "class 1 twice"), ([1, 7], "class 7 of 4"), ([-1, 1], "class -1 of 4")],
    ids=["twice", "too large", "negative"],
)
def test_fd_and_fedproto_refuse_labels_that_no_honest_client_sends(labels: list[int], words: str) -> None:
    federation, y = federate_one_model(), torch.tensor(labels)
    fd, fedproto = prepare_run(FD(), federation), prepare_run(FedProto(), federation)
    client = federation.infos[2]
    outputs = Outputs(y, torch.full((2, CLASSES), 1 / CLASSES))
    with pytest.raises(TaskError, match=f"FD: client 2 sent {words}"):
        fd.method.contribution(fd.state.server, outputs, client)
    prototypes = Upload(y, torch.zeros(2, fedproto.state.server.mean.shape[1]), torch.ones(2).long())
    with pytest.raises(TaskError, match=f"FedProto: client 2 sent {words}"):
        fedproto.method.contribution(fedproto.state.server, prototypes, client)


def test_fd_leaves_out_the_clients_own_outputs() -> None:
    federation = federate_two_models()
    run = run_rounds(FD(**SLOW_LOCAL), federation)
    for info in federation.infos:
        down = run.method.download(run.state.server, info)
        # replacing what the client itself said moves none of its targets
        server = copy.deepcopy(run.state.server)
        own = server.latest[str(info.id)]
        other = type(own)(own.labels, torch.full_like(own.mean, 0.25))
        moved = server_update(
            run.method, server, [Reply(info, other)], ServerView(run.task, 3, federation.key)
        )
        again = run.method.download(moved, info)
        torch.testing.assert_close(again.mean, down.mean, rtol=0, atol=1e-12)
        assert torch.equal(again.is_known, down.is_known)
