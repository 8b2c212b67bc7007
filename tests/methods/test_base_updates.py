"""FLoRA and FedEx-LoRA update a frozen base: what clients hold and share, what the base becomes, and clients that missed
rounds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedlowrank.adapters.lora.lora_factors import LoRA, find_lora, lora_of
from fedlowrank.adapters.lora.lora_layers import add_lora
from fedlowrank.adapters.wire_format import pack_factors, unpack_factors
from fedlowrank.core import tree
from fedlowrank.core.learning.optimizer import SGD
from fedlowrank.data.federation import Federation
from fedlowrank.linalg.pair import Factors, Pair
from fedlowrank.methods.fedex_lora import FedExLoRA
from fedlowrank.methods.flora import FLoRA
from fedlowrank.methods.shared.base_updates import Base
from fedlowrank.methods.shared.lora_family import LoRATraining

from .comparisons import assert_parameters_close
from .lora_setting import FAST_LOCAL, NO_EVALUATION, RANKS, federate_lora, predict, run_lora
from .setting import CLASSES, Net, make_arrays, run_rounds

D, K = 40, 30


def make_layer(dtype: torch.dtype = torch.float64) -> LoRA:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return find_lora(nn.ModuleDict({"a": nn.Linear(K, D)}).to(dtype), None)


def draw_updates(
    count: int, rank: int = 4, dtype: torch.dtype = torch.float64, size: float = 1.0
) -> list[Factors]:
    generator = torch.Generator().manual_seed(0)
    return [
        {"a": Pair(*(torch.randn(s, generator=generator).to(dtype) * size for s in ((D, rank), (rank, K))))}
        for _ in range(count)
    ]


def get_addresses(value: Any) -> set[int]:
    return {t.data_ptr() for _, t in tree.leaves(value)}


@pytest.mark.few(1)
@pytest.mark.parametrize("wire", ["float32", "int8"])
@pytest.mark.parametrize("kind", [FLoRA, FedExLoRA], ids=lambda k: k.title)
def test_simulated_clients_hold_the_tensors_of_the_server(
    kind: Any, wire: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # tensors below a megabyte are moved together in memory
    monkeypatch.setattr("fedlowrank.rounds.round_results.MAX_SHARED_BYTES", 0)
    wrapped = add_lora(Net(60, 60), 2, trainable=("head",))
    federation = Federation.from_arrays(make_arrays(), wrapped, classes=CLASSES, rank=[2] * 4)
    method = kind(training=LoRATraining(rank=2, wire=wire), optimizer=SGD(lr=0.1), batch_size=8)
    run = run_rounds(method, federation, rounds=3, evaluate_every=9)
    ledger = run.state.server.history
    whole = sum(d * k for d, k in lora_of(federation.architectures["model"]).shapes.values())
    for state in run.state.clients.values():
        assert len(state.base.stacks) == 2
        assert not state.base.dense
        # neither a copy of them nor a matrix
        assert get_addresses(state.base) <= get_addresses(ledger.updates)
        assert tree.numel(state.base) < whole
    # the weights with all updates are made once for all clients that use them
    merged = [run.personal_params(i)["body.0.weight"] for i in federation.infos]
    if kind is FLoRA:
        assert len({w.data_ptr() for w in merged}) == 1
        w = dict(wrapped.named_parameters())["body.0.weight"].numpy()
        total = sum(
            p["body.0"].b.double().numpy() @ p["body.0"].a.double().numpy()
            for p in map(unpack_factors, ledger.updates)
        )
        for actual in merged:
            np.testing.assert_allclose(actual.numpy(), w + total, rtol=0, atol=1e-6)


def test_factors_become_a_sum_where_they_outgrow_the_weights_the_same_at_every_client() -> None:
    actual, given = make_layer(), draw_updates(12)
    steady = [Base({}, []) for _ in range(2)]
    for i, update in enumerate(given):
        steady = [b.with_updates([pack_factors(update, "float32")], "merged", actual) for b in steady]
        # 4 · (40 + 30) numbers an update, of which 4 are fewer than 40 · 30
        assert len(steady[0].stacks) == (i + 1) % 5
        assert tree.numel(steady[0]) <= 2 * D * K
        assert get_addresses(steady[0]) == get_addresses(steady[1])
    late = Base({}, []).with_updates([pack_factors(u, "float32") for u in given], "merged", actual)
    assert tree.equal(late, steady[0])
    total = sum(u["a"].b.numpy() @ u["a"].a.numpy() for u in given)
    _, moved = late.split_updates("merged", actual)
    np.testing.assert_allclose(moved["a.weight"].numpy(), actual.base["a.weight"].numpy() + total, atol=1e-12)
    # stacked, they stay factors
    beside = Base({}, []).with_updates([pack_factors(u, "float32") for u in given], "stacked", actual)
    frozen, nothing = beside.split_updates("stacked", actual)
    np.testing.assert_allclose(frozen["a"].dense().numpy(), total, atol=1e-12)
    assert (len(beside.stacks), nothing, Base({}, []).split_updates("merged", actual)) == (
        12,
        {},
        ({}, {}),
    )


def test_clients_with_other_updates_get_another_base() -> None:
    actual, (first, second, third) = make_layer(), draw_updates(3)
    bases = [
        Base({}, []).with_updates([pack_factors(u, "float32") for u in us], "merged", actual)
        for us in ([first, second], [third])
    ]

    def weight(base: Base) -> Tensor:
        return base.split_updates("merged", actual)[1]["a.weight"]

    one, other = weight(bases[0]), weight(bases[1])
    assert weight(bases[1]) is other
    assert weight(bases[0]) is not one
    assert torch.equal(weight(bases[0]), one)
    assert not torch.equal(one, other)
    # what was made for inference can be trained with
    with torch.inference_mode():
        assert not weight(bases[1]).is_inference()


def test_small_updates_of_a_base_in_half_precision_are_not_lost() -> None:
    actual, given = make_layer(torch.bfloat16), draw_updates(50, dtype=torch.bfloat16, size=0.02)
    base = Base({}, []).with_updates([pack_factors(u, "float32") for u in given], "merged", actual)
    total = sum(u["a"].b.double() @ u["a"].a.double() for u in given)
    start = actual.base["a.weight"].double()
    moved = base.split_updates("merged", actual)[1]["a.weight"]
    assert moved.dtype == torch.bfloat16
    # rounded once, to the type of the weight
    assert torch.equal(moved, (start + total).to(torch.bfloat16)) or float(
        (moved.double() - start - total).abs().max()
    ) <= 2**-8 * float((start + total).abs().max())
    error = (moved.double() - start - total).norm() / total.norm()
    by_rounds = actual.base["a.weight"]
    for update in given:
        by_rounds = by_rounds + update["a"].dense()
    assert float(error) < 0.5 * float((by_rounds.double() - start - total).norm() / total.norm())


def test_a_factor_that_is_changed_in_place_changes_the_weights() -> None:
    lora = find_lora(add_lora(nn.Sequential(nn.Linear(5, 4)), 2, 2.0), None)
    (name,) = lora.layers
    weight = lora.layers[name].weight
    pair = Pair(torch.randn(4, 2), torch.randn(2, 5))
    one, other = (Base({}, [pack_factors({name: pair}, "float32")]) for _ in range(2))
    first = one.split_updates("merged", lora)[1][weight]
    # the factors are shared, so their sum is, too
    assert other.split_updates("merged", lora)[1][weight] is first
    torch.testing.assert_close(first, lora.base[weight] + pair.b @ pair.a)
    pair.b.mul_(2)
    changed = one.split_updates("merged", lora)[1][weight]
    torch.testing.assert_close(changed, lora.base[weight] + pair.b @ pair.a)


@pytest.mark.parametrize("kind", [FLoRA, FedExLoRA])
def test_a_base_that_is_merged_predicts_as_one_with_a_stack_beside(kind: Any) -> None:
    ranks = RANKS if kind is FLoRA else (3,) * 4
    training = LoRATraining(rank=2, scaling="alpha")
    a, b = (
        run_rounds(
            kind(base_updates=k, training=training, **FAST_LOCAL),
            federate_lora(ranks),
            participation=0.5,
            **NO_EVALUATION,
        )
        for k in ("merged", "stacked")
    )
    for k in range(4):
        assert_parameters_close(predict(a, k), predict(b, k))
    merged, stacked = (r.state.clients[max(r.state.clients)].base for r in (a, b))
    assert merged.dense or merged.stacks
    assert stacked.stacks
    assert not stacked.dense


@pytest.mark.parametrize("kind", [FLoRA, FedExLoRA], ids=lambda k: k.title)
@pytest.mark.parametrize("base_updates", ["merged", "stacked"])
def test_a_client_that_missed_rounds_catches_up_exactly(kind: Any, base_updates: Any) -> None:
    run = run_lora(kind, 0, base_updates=base_updates, rounds=5, participation=0.5, lost_replies=0.3)
    seen = dict.fromkeys(range(4), 0)
    lost = 0
    for _ in range(5):
        for k in range(4):
            down = run.method.download(run.state.server, run.federation.infos[k])
            held = down.stacks if kind is FLoRA else down.residuals
            assert len(held) == len(run.state.server.history.updates) - seen[k]
        before = len(run.state.server.history.updates)
        record = run.step()
        lost += len(record.lost)
        assert len(run.state.server.history.updates) == before + (len(record.lost) < 2)
        seen |= {k: before for k in record.participants if str(k) not in record.lost}
        for k in range(4):
            # whoever took part or not, and whose reply was lost: all now predict as the server does
            torch.testing.assert_close(predict(run, k), predict(run, k, "server"), rtol=0, atol=1e-12)
    assert lost > 0
    assert len(set(seen.values())) > 1
