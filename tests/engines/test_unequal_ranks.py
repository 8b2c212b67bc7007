"""Clients of unequal LoRA ranks are trained together and give the results of sequential training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fedlowrank.adapters.lora.lora_layers import add_lora
from fedlowrank.core import tree
from fedlowrank.core.learning.optimizer import SGD, AdamW
from fedlowrank.engines.sequential import Sequential
from fedlowrank.engines.vectorized import Vectorized
from fedlowrank.linalg.delta import DeltaForm
from fedlowrank.methods import METHODS
from fedlowrank.methods.shared.lora_family import LoRATraining
from fedlowrank.rounds.run import Run
from fedlowrank.rounds.run_settings import RunSettings
from tests.engines.ranked_clients import RANKS, build_network, make_ranked_federation
from tests.support.counting_engine import CountingEngine

torch.set_num_threads(1)


def wrapped() -> nn.Module:
    """The model with layers of LoRA of rank 2 and a scale of 3/2."""
    module = add_lora(build_network(), 2, 3.0, trainable=("head",))
    module.head_name = "head"  # type: ignore[assignment]
    return module


OPTIMIZERS = {
    "plain": SGD(lr=0.1, weight_decay=0.01),
    "momentum": SGD(lr=0.05, momentum=0.9, clip=0.5),
    "adam": AdamW(lr=0.01),
    "kept momentum": SGD(lr=0.05, momentum=0.9, keep=True),
}


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "optimizer", "scaling", "make"),
    [
        *(("fedhl", "plain", s, m) for s in ("equal", "alpha") for m in (build_network, wrapped)),
        *(("fedhl", o, "equal", build_network) for o in ("momentum", "adam")),
        *((n, "momentum", "alpha", wrapped) for n in ("hetlora", "flexlora", "flora")),
        ("hetlora", "kept momentum", "equal", build_network),
    ],
)
def test_clients_of_all_ranks_are_trained_together_and_each_is_what_it_is_alone(
    name: str, optimizer: str, scaling: Any, make: Any
) -> None:
    on = make_ranked_federation(make)
    method = METHODS[name](
        training=LoRATraining(rank=2, scaling=scaling),
        batch_size=8,
        epochs=2,
        optimizer=OPTIMIZERS[optimizer],
    )
    engine = CountingEngine()
    settings = RunSettings(rounds=2)
    one, other = Run(method, on, settings, Sequential()), Run(method, on, settings, engine)
    for _ in range(2):
        a, b = one.step(), other.step()
        assert (a.steps, a.flops, a.bytes_up) == (b.steps, b.flops, b.bytes_up)
        assert b.training_losses == pytest.approx(a.training_losses, abs=1e-5)
    # states of optimizers count steps, and these clients take other numbers; one client's scale is the
    # module's own, which is no constant of the pass
    joint = len(RANKS) - (scaling == "alpha")
    assert engine.sizes == ([] if optimizer == "kept momentum" else [joint] * 2)
    for info in on.infos:
        a, b = one.personal_params(info), other.personal_params(info)
        assert max(float((a[n] - b[n]).abs().max()) for n in a) < 2e-5
    a, b = (tree.tensors(run.state.server) for run in (one, other))
    assert [t.shape for t in a] == [t.shape for t in b]


@pytest.mark.full
def test_residuals_of_unequal_ranks() -> None:
    on = make_ranked_federation(build_network)
    method = METHODS["fedhl"](
        residual=True, delta_form=DeltaForm(kind="exact"), batch_size=8, optimizer=SGD(lr=0.1)
    )
    engine = CountingEngine()
    one, other = (Run(method, on, RunSettings(rounds=3), e) for e in (Sequential(), engine))
    for _ in range(3):
        one.step(), other.step()
    assert engine.sizes == [5, 5, 5]
    for info in on.infos:
        a, b = one.personal_params(info), other.personal_params(info)
        assert max(float((a[n] - b[n]).abs().max()) for n in a) < 2e-5


@pytest.mark.full
def test_uploads_are_of_each_clients_own_rank() -> None:
    on = make_ranked_federation(build_network)
    run = Run(METHODS["fedhl"](batch_size=8), on, RunSettings(rounds=1), Vectorized())
    jobs = run.engine.run
    actual = []

    def seen(*args: Any) -> Any:
        for outcome in jobs(*args):
            actual.append({p.rank for p in tree_pairs(outcome.upload)})
            yield outcome

    run.engine.run = seen  # type: ignore[method-assign]
    run.step()
    assert actual == [{r} for r in RANKS]


def tree_pairs(upload: Any) -> list[Any]:
    from fedlowrank.adapters.wire_format import unpack_factors

    return list(unpack_factors(upload.factors).values())
