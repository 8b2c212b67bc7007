"""Ranks and scales of single layers (``rank_pattern`` and ``alpha_pattern`` of PEFT) mean what they mean in PEFT."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedlowrank.adapters.lora.lora_factors import find_lora
from fedlowrank.core.errors import TaskError
from fedlowrank.core.learning.optimizer import SGD, AdamW
from fedlowrank.data.federation import Federation
from fedlowrank.engines.sequential import Sequential
from fedlowrank.engines.vectorized import Vectorized
from fedlowrank.methods import METHODS
from fedlowrank.methods.shared.lora_family import LoRATraining
from fedlowrank.rounds.run import Run
from fedlowrank.rounds.run_settings import RunSettings

torch.set_num_threads(1)

peft = pytest.importorskip("peft")

PATTERNS: dict[str, Any] = {"rank_pattern": {"two": 1}, "alpha_pattern": {"two": 6, "words": 5}}
"""Of rank 3 and α = 4: the scales are 4/3 at one, 6 at two (rank 1) and 5/3 at words."""

SCALES = {"words": 5 / 3, "one": 4 / 3, "two": 6.0, "three": 4 / 3}
RANKS = {"words": 3, "one": 3, "two": 1, "three": 3}


class Net(nn.Module):
    """An embedding and three linear layers that are no squares."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.one, self.two = nn.Embedding(9, 7), nn.Linear(7, 6), nn.Linear(6, 8)
        self.three, self.head = nn.Linear(8, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.words(x).mean(1)
        actual: Tensor = self.head(self.three(self.two(self.one(y).tanh()).tanh()).tanh())
        return actual


def wrapped() -> nn.Module:
    torch.manual_seed(0)
    config = peft.LoraConfig(r=3, lora_alpha=4, target_modules=[*SCALES], **PATTERNS)
    actual: nn.Module = peft.get_peft_model(Net(), config)
    return actual


def examples(count: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(9, (count, 4), generator=generator)
    return x, x.sum(1) % 3


def federation(ranks: tuple[int, ...] | None = None, clients: int = 3) -> Federation:
    data = [examples(12 + 4 * k, k) for k in range(clients)]
    return Federation.from_arrays(data, wrapped(), classes=3, rank=ranks)


def test_what_peft_has_is_found() -> None:
    module = wrapped()
    actual = find_lora(module, None)
    # the scale that most layers have
    assert actual.scale == pytest.approx(4 / 3)
    assert {n: actual.scale * layer.ratio for n, layer in actual.layers.items()} == pytest.approx(SCALES)
    assert {n: layer.largest_rank for n, layer in actual.layers.items()} == {
        "words": 7,
        "one": 6,
        "two": 1,
        "three": 5,
    }
    # the update of each layer is the one by which PEFT changes its weight
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in module.named_parameters():
            if "lora_" in name:
                p.copy_(torch.randn(p.shape, generator=generator))
    params, merged = dict(module.named_parameters()), copy.deepcopy(module).merge_and_unload()  # type: ignore[operator]
    for name, layer in actual.layers.items():
        change = merged.get_submodule(name).weight - params[layer.weight]
        expected = layer.reshape_update(layer.read_pair(params).dense() * actual.scale)
        torch.testing.assert_close(change, expected, rtol=0, atol=1e-5)
        pair = layer.read_pair(params)
        again = layer.as_parameters(pair)
        assert all(torch.allclose(params[n], t, atol=1e-6) for n, t in again.items())


@pytest.mark.parametrize(
    "optimizer",
    [SGD(lr=0.3), SGD(lr=0.2, momentum=0.9, weight_decay=0.05), AdamW(lr=0.02)],
    ids=["sgd", "momentum", "adamw"],
)
@pytest.mark.parametrize("name", ["fedit", "fedhl", "flexlora", "hetlora", "fedavg"])
def test_a_client_trains_as_peft_does(name: str, optimizer: Any) -> None:
    """Three steps of one client, by plain PyTorch on PEFT's own parameters."""
    on = Federation.from_arrays([examples(16, 0)], wrapped(), classes=3)
    method = METHODS[name](optimizer=optimizer, batch_size=16, epochs=3)
    if name != "fedavg":
        method = METHODS[name](
            optimizer=optimizer, batch_size=16, epochs=3, training=LoRATraining(head="frozen")
        )
    run = Run(method, on, RunSettings(rounds=1), Sequential())
    info = run.federation.infos[0]
    before = {n: t.clone() for n, t in run.personal_params(info).items()}
    run.step()
    after = run.personal_params(info)

    module = wrapped()
    own = {n: p for n, p in module.named_parameters() if "lora_" in n}
    with torch.no_grad():
        for n, p in own.items():
            p.copy_(before[n])
    torch_optimizer = (
        torch.optim.AdamW(own.values(), lr=0.02, weight_decay=optimizer.weight_decay)
        if isinstance(optimizer, AdamW)
        else torch.optim.SGD(
            own.values(), lr=optimizer.lr, momentum=optimizer.momentum, weight_decay=optimizer.weight_decay
        )
    )
    data = on.clients[0].train
    for _ in range(3):
        torch_optimizer.zero_grad()
        nn.functional.cross_entropy(module(data.x), data.y).backward()
        torch_optimizer.step()
    # of the server's factorization the products alone are known
    lora = find_lora(module, None)
    for layer in lora.layers.values():
        expected = layer.read_pair({n: p.detach() for n, p in module.named_parameters()}).dense()
        actual = layer.read_pair(after).dense()
        torch.testing.assert_close(
            actual, expected, rtol=0, atol=2e-6 if name in ("fedit", "hetlora", "fedavg") else 5e-5
        )
        assert layer.read_pair(after).rank == RANKS[layer.weight.split(".")[2]]
        assert expected.abs().max() > 1e-4


def test_layers_of_a_rank_of_their_own_are_named() -> None:
    assert find_lora(wrapped(), None).layers_of_own_rank == ("two",)
    # min(d, k) of three is 5, which bounds its rank and leaves its scale
    config = peft.LoraConfig(r=6, lora_alpha=4, target_modules=["one", "three"])
    lowered = peft.get_peft_model(Net(), config)
    assert find_lora(lowered, None).layers_of_own_rank == ()


@pytest.mark.parametrize("name", ["fedhl", "hetlora", "flexlora"])
def test_clients_of_unequal_ranks_keep_the_limit_of_a_layer(name: str) -> None:
    method = METHODS[name](optimizer=SGD(lr=0.3), batch_size=4, training=LoRATraining(head="frozen"))
    run = Run(method, federation((3, 2, 1)), RunSettings(rounds=2), Sequential())
    run.step()
    run.step()
    lora = find_lora(run.task.architectures["model"].module, None)
    for info in run.federation.infos:
        actual = {n: layer.read_pair(run.personal_params(info)).rank for n, layer in lora.layers.items()}
        assert actual == {n: min(rank, info.rank or 0) for n, rank in RANKS.items()}
    # α/r of layer two is 6 for clients of any rank, and one factor would make it 6 · 3/2 for the one of rank 2
    alpha = METHODS[name](optimizer=SGD(lr=0.3), batch_size=4, training=LoRATraining(scaling="alpha"))
    with pytest.raises(TaskError, match="and two has another rank than other layers"):
        Run(alpha, federation((3, 2, 1)), RunSettings(rounds=2), Sequential())


@pytest.mark.parametrize("per_layer", [False, True])
def test_a_round_without_training_leaves_the_update_of_fedhl(per_layer: bool) -> None:
    """Line 17 subtracts of each layer the truncation that the client was sent, which has one component at two."""
    from fedlowrank.methods.shared.effective_delta import Weighing

    weighing = Weighing(per_layer=per_layer)
    trains, rests = (
        METHODS["fedhl"](
            optimizer=SGD(lr=lr), batch_size=4, weighing=weighing, training=LoRATraining(head="frozen")
        )
        for lr in (0.3, 0.0)
    )
    run = Run(trains, federation((3, 2, 1)), RunSettings(rounds=3), Sequential())
    run.step()
    before = {n: d.dense() for n, d in run.state.server.delta.items()}
    # three clients' components: more than a client of rank 3 is sent
    assert int(torch.linalg.matrix_rank(before["two"], atol=1e-6)) > 1
    run.method = rests
    run.step()
    for n, d in run.state.server.delta.items():
        torch.testing.assert_close(d.dense(), before[n], rtol=0, atol=1e-6)
    # eq. 15 sees what was cut off of each layer: r̂_i by numpy
    import numpy as np

    cut = []
    for rank in (3, 2, 1):
        tails = 0.0
        for n, w in before.items():
            values = np.linalg.svd(w.double().numpy(), compute_uv=False)
            tails += (values[min(rank, 10 if RANKS[n] == 3 else RANKS[n]) :] ** 2).sum()
        cut.append(tails / sum(float((w.double() ** 2).sum()) for w in before.values()))
    actual = run.method.server_metrics(run.state.server)["truncation"]
    assert [actual[str(k)] for k in range(3)] == pytest.approx(cut, rel=1e-5)


def test_clients_trained_together_are_what_they_are_alone() -> None:
    method = METHODS["fedhl"](optimizer=SGD(lr=0.3), batch_size=4, training=LoRATraining(head="frozen"))
    on = federation((3, 2, 1, 3, 2), 5)
    one, other = (Run(method, on, RunSettings(rounds=2), e) for e in (Sequential(), Vectorized()))
    for _ in range(2):
        assert other.step().training_losses == pytest.approx(one.step().training_losses, abs=1e-5)
    for info in on.infos:
        a, b = one.personal_params(info), other.personal_params(info)
        assert max(float((a[n] - b[n]).abs().max()) for n in a) < 1e-5
