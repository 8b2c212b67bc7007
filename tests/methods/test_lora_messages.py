"""Messages of federated LoRA: shared, personal and frozen heads, bytes on the wire, and wires that lose precision."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fedlowrank.core import tree
from fedlowrank.methods.fedsa_lora import FedSALoRA
from fedlowrank.methods.ffa_lora import FFALoRA
from fedlowrank.methods.shared.lora_family import LoRATraining

from .comparisons import get_shapes
from .lora_setting import (
    LAYER_SHAPES,
    UNEQUAL_RANK_METHODS,
    collect_replies,
    every_lora_method,
    get_ranks_for,
    predict,
    run_lora,
    train_client,
    update_server,
)
from .setting import CLASSES


def count_sent_factors(kind: Any, rank: int) -> int:
    """Of a client's factors that travel."""
    return sum({FFALoRA: d, FedSALoRA: k}.get(kind, d + k) * rank for d, k in LAYER_SHAPES)


HEAD_PARAMETERS = CLASSES * 10 + CLASSES


@pytest.mark.few(4)
@every_lora_method
@pytest.mark.parametrize("head", ["shared", "personal", "frozen"])
def test_the_head_travels_only_where_it_is_shared(kind: Any, head: Any) -> None:
    run = run_lora(kind, 2, training=LoRATraining(rank=2, scaling="alpha", head=head), participation=0.75)
    initial = run.federation.architectures["model"].head_of(run.federation.architectures["model"].initial)
    for k, rank in enumerate(get_ranks_for(kind)):
        state, up = train_client(run, k)
        shared = {p for p in get_shapes(up) if "head" in p}
        assert shared == ({"/rest/head.weight", "/rest/head.bias"} if head == "shared" else set())
        assert tree.numel(up) == count_sent_factors(kind, rank) + (HEAD_PARAMETERS if head == "shared" else 0)
        kept = {p for p in get_shapes(state) if "head" in p}
        assert len(kept) == (2 if head == "personal" else 0)
        own = run.personal_params(run.federation.infos[k])
        assert all(torch.equal(own[n], p) for n, p in initial.items()) == (
            head == "frozen" or (head == "personal" and k not in run.state.clients)
        )
        if head == "personal" and k in run.state.clients:
            held = run.state.clients[k]
            assert all(
                torch.equal(own[n], (held if isinstance(held, dict) else held.rest)[n]) for n in initial
            )
    for server in (run.state.server, run.method.server_init(run.task)):
        assert set(server.rest) == (set(initial) if head == "shared" else set())
    replies = collect_replies(run, (0, 2))
    if head == "shared":
        sizes = [r.client.example_count for r in replies]
        mean = sum(
            w * r.upload.rest["head.weight"].numpy() for w, r in zip(sizes, replies, strict=True)
        ) / sum(sizes)
        np.testing.assert_allclose(
            update_server(run, replies).rest["head.weight"].numpy(), mean, rtol=0, atol=1e-14
        )


def test_the_servers_series_uses_a_clients_own_head() -> None:
    for kind in UNEQUAL_RANK_METHODS:
        run = run_lora(kind, 2, ranks=(9,) * 4, training=LoRATraining(rank=9, head="personal"))
        for k in range(4):
            torch.testing.assert_close(predict(run, k), predict(run, k, "server"), rtol=0, atol=1e-12)
        heads = [run.personal_params(i)["head.bias"] for i in run.federation.infos]
        assert not torch.allclose(heads[0], heads[1], atol=1e-3)


@pytest.mark.few(8)
@pytest.mark.parametrize(("wire", "size"), [("float32", 8), ("bfloat16", 2), ("int8", 1)])
@every_lora_method
def test_bytes_on_the_wire(kind: Any, wire: Any, size: int) -> None:
    run = run_lora(kind, 0, training=LoRATraining(rank=2, head="frozen", wire=wire))
    ranks = get_ranks_for(kind)
    ups = [train_client(run, k)[1] for k in range(4)]
    for up, rank in zip(ups, ranks, strict=True):
        # of int8 a scale of four bytes for each column of B and row of A
        scales = (
            4 * rank * len(LAYER_SHAPES) * (1 if kind in (FFALoRA, FedSALoRA) else 2) if wire == "int8" else 0
        )
        assert tree.nbytes(up) == size * count_sent_factors(kind, rank) + scales
        assert tree.encoded_size(up) == len(tree.encode(up)) >= tree.nbytes(up)
    assert run.step().bytes_up == sum(tree.encoded_size(up) for up in ups)


@every_lora_method
def test_a_lossy_wire_costs_accuracy_and_nothing_else(kind: Any) -> None:
    exact, lossy = (
        run_lora(kind, 3, training=LoRATraining(rank=2, wire=w), participation=0.75)
        for w in ("float32", "int8")
    )
    for k in range(4):
        gap = float((predict(exact, k) - predict(lossy, k)).abs().max())
        # of 8 bits a factor; clients that train on what they received do not stray far
        assert 1e-6 < gap < 0.05
