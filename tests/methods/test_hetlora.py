"""HetLoRA: against NumPy, its weights, its pruning, as FedIT at equal ranks, and how its clients begin."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fedlowrank.adapters.lora.lora_layers import add_lora
from fedlowrank.adapters.wire_format import unpack_factors
from fedlowrank.core import tree
from fedlowrank.core.learning.optimizer import SGD, AdamW
from fedlowrank.engines.engine import ClientJob, Engine
from fedlowrank.engines.sequential import Sequential
from fedlowrank.methods.fedit import FedIT
from fedlowrank.methods.hetlora import HetLoRA
from fedlowrank.methods.shared.lora_family import LoRATraining, measure_rank
from fedlowrank.trust.trust_settings import Clipping, Compression, Privacy, Robust
from fedlowrank.trust.updates import compute_norm

from .comparisons import assert_parameters_close
from .lora_setting import (
    FAST_LOCAL,
    LAYER_NAMES,
    NO_EVALUATION,
    RANKS,
    TRAINING,
    assert_hetlora_equals_reference,
    collect_replies,
    draw_initial_a,
    federate_lora,
    run_lora,
    run_three_rounds,
    update_server,
)
from .setting import LOCAL, Net, run_rounds


@pytest.mark.few(1)
def test_hetlora(engine: type[Engine]) -> None:
    assert_hetlora_equals_reference(HetLoRA(training=TRAINING, **LOCAL), engine)


@pytest.mark.parametrize(
    ("method", "wanted"),
    [
        ({"weighting": "norm"}, {"by_norm": True}),
        ({"per_index": True}, {"per_index": True}),
        ({"weighting": "norm", "per_index": True}, {"by_norm": True, "per_index": True}),
    ],
    ids=["norm", "index", "both"],
)
def test_weights_of_hetlora(method: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert_hetlora_equals_reference(HetLoRA(training=TRAINING, **method, **LOCAL), Sequential, **wanted)


@pytest.mark.few(1)
@pytest.mark.parametrize("penalty", [0.0, 0.6])
def test_pruning_of_hetlora(penalty: float) -> None:
    ranks = (2, 3, 4, 8)
    method = HetLoRA(prune=0.7, penalty=penalty, training=TRAINING, **LOCAL)
    # in five rounds some that have pruned sit out
    left = assert_hetlora_equals_reference(method, Sequential, ranks, 5, prune=0.7, penalty=penalty)
    # the penalty is what shrinks the tails here
    assert (sum(left) < sum(ranks)) == (penalty > 0)
    assert sum(left) > 4


def test_the_norm_of_an_update_of_hetlora_is_that_of_what_the_server_adds_whatever_was_pruned() -> None:
    method = HetLoRA(prune=0.7, penalty=0.6, training=TRAINING, **LOCAL)
    run = run_three_rounds(method, Sequential, (2, 3, 4, 8), rounds=5)
    jobs = [ClientJob(run.state_of(i), method.download(run.state.server, i), i) for i in run.federation.infos]
    sent = [measure_rank(job.down.factors) for job in jobs]
    left = []
    assert sent != [2, 3, 4, 8]
    for job, result in zip(jobs, run.engine.run(method, run.federation, run.task, 5, jobs), strict=True):
        update = method.describe_update(job.down, job.client, run.task)
        reached, before = (
            method.contribution(run.state.server, upload, job.client) for upload in (result.upload, job.down)
        )
        parts = [
            (new.dense() - before["factors"].value[n].dense()).numpy()
            for n, new in reached["factors"].value.items()
        ]
        parts += [(t - before["rest"].value[n]).numpy() for n, t in reached["rest"].value.items()]
        expected = np.linalg.norm(np.concatenate([part.ravel() for part in parts]))
        assert compute_norm(result.upload, update.reference, update.scale) == pytest.approx(
            expected, rel=1e-9
        )
        left.append(measure_rank(result.upload.factors))
    # some prune in this round, after a rank that was pruned before
    assert any(a < b for a, b in zip(left, sent, strict=True))


@pytest.mark.parametrize(
    "trust",
    [{"clipping": Clipping(0.1)}, {"robust": Robust(rule="norm_bound")}],
    ids=["clipping", "norm_bound"],
)
def test_hetlora_prunes_under_a_bound_on_its_updates(trust: dict[str, Any]) -> None:
    method = HetLoRA(prune=0.7, penalty=0.6, training=TRAINING, **LOCAL)
    run = run_rounds(method, federate_lora((2, 3, 4, 8)), 4, **trust)
    server = run.state.server
    assert all(t.isfinite().all() for t in tree.tensors(getattr(server, "inner", server)))


@pytest.mark.parametrize(
    "trust",
    [
        {"compression": Compression("int8")},
        {"privacy": Privacy("local", noise=0.1, delta=1e-3), "clipping": Clipping(0.1)},
    ],
    ids=["compression", "local"],
)
def test_without_pruning_hetlora_is_fedit_under_protections(trust: dict[str, Any]) -> None:
    """Its updates have one form, which it said depended on the data."""
    het, fedit = (run_lora(kind, ranks=(2,) * 4, **trust).state.server.inner for kind in (HetLoRA, FedIT))
    for n, pair in fedit.factors.items():
        torch.testing.assert_close(het.factors[n].dense(), pair.dense(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("per_index", [False, True])
def test_without_pruning_hetlora_has_central_privacy(per_index: bool) -> None:
    """With little noise it is FedIT, also where components are divided by noised weights."""
    trust: dict[str, Any] = {
        "privacy": Privacy("central", noise=1e-4, delta=1e-3),
        "clipping": Clipping(1.0),
    }
    het = run_lora(HetLoRA, ranks=(2,) * 4, per_index=per_index, **trust).state.server.inner
    fedit = run_lora(FedIT, ranks=(2,) * 4, **trust).state.server.inner
    for n, pair in fedit.factors.items():
        torch.testing.assert_close(het.factors[n].dense(), pair.dense(), rtol=0, atol=2e-3)


def test_norms_that_are_all_zero_leave_the_weights_by_examples() -> None:
    run = run_rounds(
        HetLoRA(weighting="norm", optimizer=SGD(lr=0.0)), federate_lora(), steps=0, **NO_EVALUATION
    )
    before = run.state.server.factors
    run.step()
    # the first component is everyone's; a mean of equal values is that value
    for n, p in run.state.server.factors.items():
        torch.testing.assert_close(p.a[0], before[n].a[0], rtol=0, atol=1e-15)


@pytest.mark.parametrize("per_index", [False, True])
def test_components_that_no_client_of_a_round_holds_stay(per_index: bool) -> None:
    """As zeros in both factors they would have no gradient, and a client of the largest rank could never train them."""
    run = run_lora(HetLoRA, ranks=(1, 1, 1, 4), steps=1, per_index=per_index)
    before = run.state.server
    after = update_server(run, collect_replies(run, [0, 1, 2]))
    for n, pair in before.factors.items():
        assert pair.a[1:].any()
        assert pair.b[:, 1:].any()
        torch.testing.assert_close(after.factors[n].a[1:], pair.a[1:], rtol=0, atol=0)
        torch.testing.assert_close(after.factors[n].b[:, 1:], pair.b[:, 1:], rtol=0, atol=0)
        assert not torch.allclose(after.factors[n].a[0], pair.a[0])


@pytest.mark.parametrize("alpha", [0.75, 3.0, 12.0])
@pytest.mark.parametrize("optimizer", [SGD(lr=0.05, momentum=0.5, weight_decay=0.01), AdamW(lr=0.01)])
def test_zero_padding_of_equal_ranks_is_fedit(alpha: float, optimizer: Any) -> None:
    local = {**FAST_LOCAL, "optimizer": optimizer}
    held = add_lora(Net(9, 10), 3, alpha, trainable=("head",))
    a, b = (
        run_rounds(kind(**local), federate_lora([3] * 4, held), participation=0.75, **NO_EVALUATION)
        for kind in (HetLoRA, FedIT)
    )
    for info in a.federation.infos:
        assert_parameters_close(a.personal_params(info), b.personal_params(info), 1e-12)
    # the server of zero padding holds factors of scale 1
    for n in LAYER_NAMES:
        mine, theirs = a.state.server.factors[n], b.state.server.factors[n]
        assert_parameters_close(mine.dense(), alpha / 3 * theirs.dense(), 1e-12)
        assert float(theirs.b.norm()) > 1e-3


@pytest.mark.parametrize("scaling", ["equal", "alpha"])
def test_clients_of_zero_padding_begin_at_the_a_that_was_drawn(scaling: Any) -> None:
    held = add_lora(Net(9, 10), 4, 10.0, trainable=("head",))
    run = run_rounds(
        HetLoRA(training=LoRATraining(scaling=scaling), **FAST_LOCAL),
        federate_lora(RANKS, held),
        steps=0,
        **NO_EVALUATION,
    )
    for info, rank in zip(run.federation.infos, RANKS, strict=True):
        sent = unpack_factors(run.method.download(run.state.server, info).factors)
        for n, a in draw_initial_a(run.federation.key / "init", 4).items():
            assert torch.equal(sent[n].a, a[:rank])
            assert sent[n].b.shape[1] == rank
            assert not bool(sent[n].b.any())
