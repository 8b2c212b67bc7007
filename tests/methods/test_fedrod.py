"""FedRoD: against NumPy, its balanced loss, clients that never trained, and the heads that it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fedlowrank.core.errors import TaskError
from fedlowrank.data.federation import Federation
from fedlowrank.engines.engine import Engine, client_view
from fedlowrank.engines.sequential import Sequential
from fedlowrank.methods.fedrod import FedRoD
from fedlowrank.rounds.run import Run
from fedlowrank.rounds.run_settings import RunSettings
from tests.golden import contrast_and_mixture_reference as golden
from tests.golden import reference

from .comparisons import assert_nested_close, to_layers
from .run_contents import get_client_states, get_reference_inputs, get_train_data
from .setting import (
    CLASSES,
    FLOAT32,
    LOCAL,
    SAMPLE,
    SIZES,
    WIDTH,
    Net,
    federate_one_model,
    make_arrays,
    run_rounds,
)

ABSENT_LABELS = [
    sorted(set(range(CLASSES)) - set(y.tolist())) for _, y in get_train_data(federate_one_model())
]


def get_local_model(run: Run, client: int) -> Any:
    return run.local_model(run.federation.infos[client])


@pytest.mark.few(2)
@pytest.mark.parametrize("gamma", [1.0, 0.5])
def test_fedrod(gamma: float, engine: type[Engine]) -> None:
    assert all(ABSENT_LABELS)
    run = run_rounds(FedRoD(gamma=gamma, **LOCAL), federate_one_model(), engine=engine, **SAMPLE)
    net, heads = golden.fedrod(*get_reference_inputs(run), gamma)
    assert_nested_close(to_layers(run.state.server), net)
    assert_nested_close([to_layers(s) for s in get_client_states(run)], heads)
    for k, head in enumerate(heads):
        x = run.federation.clients[k].test.x
        inputs, scores = reference.forward(net, x.double().numpy())
        predictors = get_local_model(run, k).predictors
        assert list(predictors) == ["personal", "global"]
        assert_nested_close(predictors["global"](x), scores)
        assert_nested_close(predictors["personal"](x), scores + inputs[-1] @ head[0][0].T + head[0][1])


def test_a_client_of_fedrod_that_never_trained_scores_as_the_generic_model() -> None:
    run = run_rounds(FedRoD(**LOCAL), federate_one_model(**FLOAT32), rounds=2, steps=1, participation=0.5)
    unseen = sorted(set(range(len(SIZES))) - set(run.state.clients))
    assert unseen
    for k in range(len(SIZES)):
        x = run.federation.clients[k].test.x
        both = get_local_model(run, k).predictors
        assert torch.equal(both["personal"](x), both["global"](x)) == (k in unseen)


def test_a_class_that_a_client_lacks_keeps_its_weights_in_the_balanced_loss() -> None:
    method = FedRoD(**LOCAL)
    run = run_rounds(method, federate_one_model(), steps=0)
    for info in run.federation.infos:
        trainer = run.engine.trainer(method, run.federation, 0, info)
        view = client_view(run.federation, run.task, info, 0, trainer)
        start = method.download(run.state.server, info)
        _, end = method.local_update(run.state_of(info), start, view)
        moved = (end["head.weight"] - start["head.weight"]).abs().amax(1) > 0
        assert (~moved).nonzero()[:, 0].tolist() == ABSENT_LABELS[info.id]


@pytest.mark.filterwarnings("ignore:.*makes 6 scores")
def test_an_output_beyond_the_classes_keeps_its_weights_in_the_balanced_loss(engine: type[Engine]) -> None:
    federation = Federation.from_arrays(
        make_arrays(), lambda: Net(WIDTH, classes=CLASSES + 2), classes=CLASSES
    )
    run = run_rounds(FedRoD(**LOCAL), federation, engine=engine)
    start, end = federation.architectures["model"].initial["head.weight"], run.state.server["head.weight"]
    torch.testing.assert_close(end[CLASSES:], start[CLASSES:], rtol=0, atol=1e-12)
    assert ((end - start)[:CLASSES].abs().amax(1) > 1e-3).all()
    # the personal head learns to score them low
    assert all((s["head.bias"][CLASSES:] < 0).all() for s in run.state.clients.values())


def test_fedrod_refuses_a_head_of_several_layers() -> None:
    class Deep(Net):
        def __init__(self) -> None:
            super().__init__(WIDTH)
            self.head = nn.Sequential(nn.Linear(WIDTH, 6), nn.ReLU(), nn.Linear(6, CLASSES)).double()

    federation = Federation.from_arrays(make_arrays(), Deep, classes=CLASSES)
    with pytest.raises(TaskError, match="one linear layer"):
        Run(FedRoD(), federation, RunSettings(rounds=1), Sequential())
