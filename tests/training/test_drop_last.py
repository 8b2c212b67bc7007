"""Local training that leaves out incomplete batches, beside PyTorch's DataLoader and a plain loop."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from fedlowrank.core.contract import ClientInfo, Pass
from fedlowrank.core.key import Key
from fedlowrank.core.learning.optimizer import SGD
from fedlowrank.data.dataset import Examples
from fedlowrank.data.federation import Federation
from fedlowrank.engines.sequential import Sequential
from fedlowrank.engines.vectorized import Vectorized
from fedlowrank.methods.ditto import Ditto
from fedlowrank.methods.fedavg import FedAvg
from fedlowrank.methods.fednova import FedNova
from fedlowrank.rounds.run import Run
from fedlowrank.rounds.run_settings import RunSettings
from fedlowrank.training.local_data import LocalData
from tests.methods.setting import CLASSES, INPUTS

SIZES = (23, 17, 5)
FULL = (16, 16, 5)
"""Examples in batches of 8 that are taken: the third client has fewer than one batch."""


@pytest.mark.parametrize("by_length", [False, True])
@pytest.mark.parametrize("n", [1, 3, 4, 5, 8, 23])
def test_an_incomplete_batch_is_left_out_as_by_a_data_loader(n: int, by_length: bool) -> None:
    mask = torch.ones(n, 6, dtype=torch.int64).tril(3)
    x = {"input_ids": mask, "attention_mask": mask} if by_length else torch.zeros(n, 2)
    passes = FedAvg(epochs=2, batch_size=4, drop_last=True).local_passes()
    data = Examples(x, torch.zeros(n, dtype=torch.int64))
    local = LocalData(ClientInfo(0, n, "a"), data, passes, Key((0,)), by_length=by_length)
    # fewer examples than a batch are one batch, where a loader would give none
    loader: DataLoader[int] = DataLoader(range(n), batch_size=4, drop_last=n >= 4)  # type: ignore[arg-type]
    assert local.steps("local") == len(local.order("local")) == 2 * len(loader)
    assert sorted(map(len, local.order("local"))) == sorted(2 * [len(batch) for batch in loader])
    for drop_last in (True, False):
        sizes = [len(batch) for batch in DataLoader(range(n), 4, drop_last=drop_last and n >= 4)]  # type: ignore[arg-type]
        assert Pass(1, 4, drop_last=drop_last).has_batch_of_one(n) == (1 in sizes)


def test_every_epoch_leaves_out_other_examples() -> None:
    data = Examples(torch.zeros(23, 2), torch.zeros(23, dtype=torch.int64))
    local = LocalData(ClientInfo(0, 23, "a"), data, {"local": Pass(20, 8, drop_last=True)}, Key((0,)))
    seen = torch.cat(local.order("local")).bincount(minlength=23)
    assert int(seen.sum()) == 20 * 16
    assert int(seen.min()) > 0


def test_all_passes_of_a_method_leave_it_out() -> None:
    assert [p.drop_last for p in Ditto(drop_last=True).local_passes().values()] == [True, True]
    assert not any(p.drop_last for p in Ditto().local_passes().values())


def federation() -> Federation:
    g = torch.Generator().manual_seed(5)
    arrays = [
        (torch.randn(n, INPUTS, generator=g), torch.randint(0, CLASSES, (n,), generator=g)) for n in SIZES
    ]
    return Federation.from_arrays(arrays, nn.Linear(INPUTS, CLASSES), classes=CLASSES, val=0.0, test=0.0)


def plain_loop(run: Run, client: int) -> Tensor:
    """The weight after plain SGD on the full batches of a client."""
    engine, info = Sequential(), run.federation.infos[client]
    data = engine.trainer(FedAvg(batch_size=8), run.federation, 0, info).data
    net, own = nn.Linear(INPUTS, CLASSES), run.federation.clients[client].train
    net.load_state_dict(run.federation.architectures["model"].initial)
    for index in data.order("local"):
        if len(index) == min(8, SIZES[client]):
            loss = functional.cross_entropy(net(own.x[index]), own.y[index])
            for p, g in zip(net.parameters(), torch.autograd.grad(loss, list(net.parameters())), strict=True):
                p.data -= 0.1 * g
    return net.weight.detach()


@pytest.mark.parametrize("engine", [Sequential, Vectorized])
@pytest.mark.parametrize("kind", [FedAvg, FedNova])
def test_steps_operations_and_weights(kind: type[FedAvg | FedNova], engine: type[Sequential]) -> None:
    method = kind(batch_size=8, optimizer=SGD(lr=0.1), drop_last=True)
    run = Run(method, federation(), RunSettings(rounds=1), engine())
    ends, start = [plain_loop(run, i) for i in range(3)], run.state.server["weight"]
    record, steps = run.step(), [2, 2, 1]
    assert record.steps == sum(steps)
    assert record.flops == sum(2 * (2 * n * INPUTS * CLASSES) for n in FULL)
    # n_k counts all examples of a client: each has the same chance to be left out
    shares = [n / sum(SIZES) for n in SIZES]
    # FedNova: x + τ_eff Σ p_i (x_i - x) / τ_i, τ_eff = Σ p_i τ_i (Wang et al., eq. 8); of FedAvg τ_i = 1
    taus = steps if kind is FedNova else [1] * 3
    effective = sum(p * tau for p, tau in zip(shares, taus, strict=True))
    mean = sum(p / tau * (end - start) for p, tau, end in zip(shares, taus, ends, strict=True))
    torch.testing.assert_close(run.state.server["weight"], start + effective * mean, rtol=1e-4, atol=1e-6)
