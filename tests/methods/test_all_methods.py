"""What holds for every method: all that is trained moves, one seed is one result, clients of one architecture begin alike,
and the recorded accuracy is that of the personal model, on which test data has no influence."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedlowrank.adapters.lora.lora_factors import lora_of, parameters_beside_factors
from fedlowrank.core import tree
from fedlowrank.data.federation import Federation
from fedlowrank.engines.engine import client_view
from fedlowrank.methods import METHODS
from fedlowrank.methods.fedper import FedPer
from fedlowrank.methods.fedrep import FedRep
from fedlowrank.methods.fedspa import FedSpa
from fedlowrank.methods.per_fedavg import PerFedAvg
from tests.golden import reference
from tests.support.method_calls import personal

from .comparisons import assert_bits_equal, to_layers
from .run_contents import get_personal_parameters, load_predictors, make_view
from .setting import (
    CLASSES,
    FLOAT32,
    INPUTS,
    KINDS,
    LOCAL,
    SAMPLE,
    SIZES,
    SLOW_LOCAL,
    WIDTH,
    Net,
    federate_for,
    federate_one_model,
    federate_two_models,
    make_arrays,
    run_rounds,
)

METHOD_NAMES = sorted(METHODS)
LORA_METHODS = {"fedit", "hetlora", "flexlora", "flora", "fedhl", "ffa_lora", "fedsa_lora", "fedex_lora"}


@pytest.mark.few(5)
@pytest.mark.parametrize("name", METHOD_NAMES)
def test_training_changes_every_parameter_of_the_personal_model(name: str) -> None:
    federation = federate_for(name, **FLOAT32)
    run = run_rounds(METHODS[name](**SLOW_LOCAL), federation)
    for info in federation.infos:
        down = run.method.download(run.state.server, info)
        trainer = run.engine.trainer(run.method, federation, 0, info)
        params = personal(
            run.method, run.state_of(info), down, client_view(federation, run.task, info, 0, trainer)
        )
        initial = federation.architectures[info.architecture].initial
        assert set(params) == set(initial)
        model = federation.architectures[info.architecture]
        trained = (
            {s.weight for s in lora_of(model).layers.values()} | set(parameters_beside_factors(model))
            if name in LORA_METHODS
            else set(initial)
        )
        assert {n for n in initial if not torch.equal(params[n], initial[n])} == trained


@pytest.mark.parametrize("name", ["standalone", "fedavg"])
def test_runs_of_one_seed_are_equal_and_of_two_seeds_differ(name: str) -> None:
    a, b, c = (
        run_rounds(METHODS[name](**SLOW_LOCAL), federate_for(name, **FLOAT32, seed=s), **SAMPLE)
        for s in (5, 5, 6)
    )
    assert_bits_equal(a.state.server, b.state.server)
    assert {k: tree.encode(s) for k, s in a.state.clients.items()} == {
        k: tree.encode(s) for k, s in b.state.clients.items()
    }
    assert {k: tree.encode(s) for k, s in a.state.clients.items()} != {
        k: tree.encode(s) for k, s in c.state.clients.items()
    } or (not tree.equal(a.state.server, c.state.server))


@pytest.mark.parametrize("name", ["standalone", "fedkd", "lg_fedavg"])
def test_clients_of_one_architecture_begin_with_the_same_weights(name: str) -> None:
    """As the pages of these methods say; clients 0 and 2 hold one architecture, clients 1 and 3 another."""
    federation = federate_two_models()
    task = run_rounds(METHODS[name](), federation, steps=0).task
    starts = [dict(tree.leaves(METHODS[name]().client_init(c, task))) for c in federation.infos]
    for a, b in ((0, 2), (1, 3)):
        assert starts[a].keys() == starts[b].keys()
        assert all(torch.equal(starts[a][n], starts[b][n]) for n in starts[a])
    assert starts[0].keys() != starts[1].keys() or any(
        starts[0][n].shape != starts[1][n].shape for n in starts[0]
    )


# fedem infers by a mixture of several models, which test_fedem.py tests
@pytest.mark.few(6)
@pytest.mark.parametrize("name", sorted(set(KINDS) - {"fedem"}))
def test_recorded_accuracy_is_that_of_the_personal_model_on_test_examples(name: str) -> None:
    federation = (federate_two_models if METHODS[name].heterogeneous else federate_one_model)()
    run = run_rounds(METHODS[name](**SLOW_LOCAL), federation, steps=2)
    record = run.step()
    for info, data in zip(federation.infos, federation.clients, strict=True):
        down = run.method.download(run.state.server, info)
        # the round that is over: its order of examples is that of an adaptation before inference, too
        params = personal(run.method, run.state_of(info), down, make_view(run, info.id, run.round - 1))
        in_order = {n: params[n] for n in federation.architectures[info.architecture].initial}
        scores = reference.forward(to_layers(in_order), data.test.x.double().numpy())[1]
        assert record.values()[info.id] == (scores.argmax(1) == data.test.y.numpy()).mean()
        assert record.values("accuracy", split="val")[info.id] is None


@pytest.mark.few(1)
@pytest.mark.parametrize("make", [PerFedAvg, FedRep, FedPer, FedSpa])
def test_no_model_depends_on_test_data(make) -> None:
    clean, poisoned = make_arrays(), make_arrays()
    for part in poisoned:
        x, y = part["test"]
        part["test"] = (1e4 * x + 7, (y + 1) % CLASSES)
    runs = [run_rounds(make(**LOCAL), federate_one_model(clients=c), **SAMPLE) for c in (clean, poisoned)]
    probe = torch.randn(5, INPUTS, generator=torch.Generator().manual_seed(0))
    for k in range(len(SIZES)):
        assert not torch.equal(*(r.federation.clients[k].test.x for r in runs))
        assert tree.equal(*(get_personal_parameters(r, k) for r in runs))
        for a, b in zip(*(load_predictors(r, k).values() for r in runs), strict=True):
            assert torch.equal(a(probe), b(probe))


@pytest.mark.parametrize("name", ["fedavg", "fedprox"])
def test_batch_normalization_is_welcome_and_keeps_its_statistics(name: str) -> None:
    """As the pages of these methods say."""

    class Normed(Net):
        def __init__(self) -> None:
            super().__init__(WIDTH)
            self.body.append(nn.BatchNorm1d(WIDTH))
            self.double()

    federation = Federation.from_arrays(make_arrays(), Normed, classes=CLASSES)
    run = run_rounds(METHODS[name](batch_size=7), federation, rounds=2)
    before = run.task.common_model("").initial
    assert {"body.2.weight", "body.2.bias"} < {*run.state.server} == {*before}
    assert not torch.equal(run.state.server["body.2.weight"], before["body.2.weight"])
