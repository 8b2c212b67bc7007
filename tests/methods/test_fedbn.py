"""FedBN: against NumPy, as FedAvg of models without normalizations, and which parameters it keeps local."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedlowrank.core import tree
from fedlowrank.core.learning.optimizer import SGD
from fedlowrank.data.federation import Federation
from fedlowrank.engines.engine import Engine
from fedlowrank.methods.fedavg import FedAvg
from fedlowrank.methods.fedbn import FedBN
from fedlowrank.models import standard
from fedlowrank.models.statistics.normalization import normalization_parameters
from tests.golden import baseline_reference

from .comparisons import assert_trees_close
from .run_contents import get_train_data, plan_rounds
from .setting import (
    CLASSES,
    INPUTS,
    LOCAL,
    LR,
    SAMPLE,
    SIZES,
    WIDTH,
    federate_one_model,
    make_arrays,
    run_rounds,
)


class Normalized(nn.Module):
    """A layer, a normalization and a head, in float64."""

    head_name = "head"

    def __init__(self, norm: type[nn.Module] = nn.BatchNorm1d) -> None:
        super().__init__()
        self.body, self.norm = nn.Linear(INPUTS, WIDTH), norm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(torch.relu(self.norm(self.body(x.double()))))
        return scores


@pytest.fixture(autouse=True)
def standard_normalized(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines batch clients that hold ``Normalized``: its forward pass is deterministic."""
    monkeypatch.setattr(standard, "LAYERS", standard.LAYERS | {Normalized})


def normalized(make: Any = Normalized) -> Federation:
    return Federation.from_arrays(make_arrays(), {"normalized": make}, classes=CLASSES)


# no client of SIZES has a last batch of one example, which a batch normalization refuses
NORMALIZED: dict[str, Any] = {"optimizer": SGD(lr=LR), "batch_size": 7, "epochs": 2}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("norm", "kept"), [(nn.BatchNorm1d, "batch"), (nn.BatchNorm1d, "all"), (nn.LayerNorm, "all")]
)
def test_fedbn(norm: type[nn.Module], kept: Any, engine: type[Engine]) -> None:
    federation = normalized(lambda: Normalized(norm))
    run = run_rounds(FedBN(layers=kept, **NORMALIZED), federation, engine=engine, **SAMPLE)
    start = Normalized(norm)
    start.load_state_dict(federation.architectures["normalized"].initial, strict=False)
    local = {"norm.weight", "norm.bias"}
    shared, own = baseline_reference.fedbn(start, local, get_train_data(federation), plan_rounds(run), LR)
    assert_trees_close(run.state.server, shared)
    assert sorted(run.state.clients) == list(range(len(SIZES)))
    for info in federation.infos:
        assert_trees_close(run.state.clients[info.id], own[info.id])
        # what a client infers by is the common model with its own scales and shifts
        model = {n: p for n, p in run.personal_params(info).items() if "running" not in n}
        assert_trees_close(model, {n: {**shared, **own[info.id]}[n] for n in model})
        assert len(model) == 6


def test_fedbn_of_a_model_that_keeps_nothing_local_is_fedavg_and_says_so() -> None:
    def frozen() -> nn.Module:
        module = Normalized()
        module.norm.requires_grad_(False)
        return module

    layer_norm = "methods.fedbn.layers = 'all' keeps those of its other normalizations."
    cases = [
        (federate_one_model, LOCAL, ""),
        (lambda: normalized(frozen), NORMALIZED, ""),
        (lambda: normalized(lambda: Normalized(nn.LayerNorm)), NORMALIZED, layer_norm),
    ]
    for make, settings, advice in cases:
        bn, plain = (run_rounds(method(**settings), make(), **SAMPLE) for method in (FedBN, FedAvg))
        assert tree.equal(bn.state.server, plain.state.server)
        (remark,) = FedBN().remarks(bn.task)
        assert "the run is FedAvg's." in remark
        assert remark.endswith(advice or "FedAvg's.")
    assert FedBN().remarks(normalized().task(1)) == []


def test_which_parameters_are_those_of_normalizations() -> None:
    module = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.GroupNorm(2, 4),
        nn.BatchNorm2d(4, affine=False),
        nn.Linear(4, 4),
    )
    assert normalization_parameters(module, "batch") == {"1.weight", "1.bias"}
    assert normalization_parameters(module, "all") == {"1.weight", "1.bias", "2.weight", "2.bias"}
