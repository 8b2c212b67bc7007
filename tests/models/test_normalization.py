"""Batch normalization in a federation: the batch in training, the client's own statistics at inference,
nothing that travels."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedlowrank import SGD, Federation, simulate
from fedlowrank.core import tree
from fedlowrank.core.errors import TaskError
from fedlowrank.engines import Sequential, Vectorized
from fedlowrank.methods import FedAvg
from fedlowrank.models.architecture import Architecture
from fedlowrank.simulation.run import Run
from fedlowrank.simulation.settings import RunSettings


class Net(nn.Module):
    """A layer, a normalization, a head."""

    head_name = "head"

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 5)
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(torch.relu(self.norm(self.body(x))))
        return scores


def clients(sizes: list[int]) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(0)
    return [
        ((k + 1) * torch.randn(n, 4, generator=g) + k, torch.randint(0, 3, (n,), generator=g))
        for k, n in enumerate(sizes)
    ]


def by_hand(params: dict[str, Tensor], train: Tensor, x: Tensor) -> np.ndarray:
    """Scores with the mean and the unbiased variance of the training data before the normalization."""
    p = {n: t.double().numpy() for n, t in params.items()}
    before = train.double().numpy() @ p["body.weight"].T + p["body.bias"]
    mean, var = before.mean(0), before.var(0, ddof=1)
    z = x.double().numpy() @ p["body.weight"].T + p["body.bias"]
    z = (z - mean) / np.sqrt(var + 1e-5) * p["norm.weight"] + p["norm.bias"]
    return np.asarray(np.maximum(z, 0) @ p["head.weight"].T + p["head.bias"])


def test_a_client_infers_by_the_statistics_of_its_own_training_data() -> None:
    result = simulate("fedavg", Federation.from_arrays(clients([40, 60, 50]), Net), rounds=2)
    for info, data in zip(result.run.federation.infos, result.run.federation.clients, strict=True):
        made = result.run.local_model(info)
        scores = made.predictors["personal"](data.test.x)
        expected = by_hand(result.run.state.server, data.train.x, data.test.x)
        np.testing.assert_allclose(scores.numpy(), expected, atol=1e-5)
        net = Net().eval()
        assert not net.load_state_dict(result.personal(info.id), strict=False).missing_keys
        np.testing.assert_allclose(net(data.test.x).detach().numpy(), expected, atol=1e-5)


def test_many_chunks_give_the_means_of_their_means() -> None:
    result = simulate("fedavg", Federation.from_arrays(clients([700, 40]), Net, val=0.0), rounds=1)
    x = result.run.federation.clients[0].train.x
    halves = [
        h @ result.run.state.server["body.weight"].T + result.run.state.server["body.bias"]
        for h in x.chunk(3)
    ]
    sizes = {len(h) for h in halves}
    assert len(x) > 512
    assert sizes == {210}
    mean = torch.stack([h.mean(0) for h in halves]).mean(0)
    torch.testing.assert_close(result.personal(0)["norm.running_mean"], mean, rtol=1e-4, atol=1e-5)


def test_no_statistic_travels_or_is_kept() -> None:
    run = Run(FedAvg(), Federation.from_arrays(clients([40, 60]), Net), RunSettings(rounds=2), Sequential())
    run.step()
    assert set(run.state.server) == {n for n, _ in Net().named_parameters()}
    assert all(state is None for state in run.state.clients.values())


def test_training_normalizes_by_the_batch_and_leaves_the_module_alone() -> None:
    net = Net()
    before = {n: b.clone() for n, b in net.named_buffers()}
    federation = Federation.from_arrays(clients([40, 60]), net)
    run = Run(FedAvg(batch_size=64, optimizer=SGD(lr=0.5)), federation, RunSettings(rounds=1), Sequential())
    run.step()
    assert all(torch.equal(before[n], b) for n, b in net.named_buffers())
    assert net.norm.track_running_stats
    # one client, one batch: a step of the loss with the batch's own statistics
    data = federation.clients[0].train
    reference = Net().train()
    reference.load_state_dict(federation.architectures["model"].initial, strict=False)
    loss = nn.functional.cross_entropy(reference(data.x), data.y)
    loss.backward()  # type: ignore[no-untyped-call]
    alone = dataclasses.replace(federation, clients=[federation.clients[0]], infos=[federation.infos[0]])
    single = Run(FedAvg(batch_size=64, optimizer=SGD(lr=0.5)), alone, RunSettings(rounds=1), Sequential())
    single.step()
    for n, p in reference.named_parameters():
        assert p.grad is not None
        torch.testing.assert_close(single.state.server[n], (p - 0.5 * p.grad).detach(), rtol=1e-4, atol=1e-6)


def test_padding_never_enters_a_batch_s_statistics() -> None:
    federation = Federation.from_arrays(clients([40, 63, 50]), Net)
    runs = [
        Run(FedAvg(batch_size=16, optimizer=SGD(lr=0.1)), federation, RunSettings(rounds=2), engine)
        for engine in (Sequential(), Vectorized())
    ]
    for run in runs:
        run.step()
    for (_, a), (_, b) in zip(*(tree.leaves(r.state.server) for r in runs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_batch_of_one_example_is_refused_with_a_way_out() -> None:
    federation = Federation.from_arrays(clients([42]), Net, val=0.0, test=0.0)
    with pytest.raises(TaskError, match=r"single example.*batch size"):
        simulate(FedAvg(batch_size=41), federation, rounds=1)


def test_an_instance_norm_with_running_statistics_is_refused() -> None:
    module = nn.Sequential(nn.Conv1d(2, 2, 3), nn.InstanceNorm1d(2, track_running_stats=True))
    with pytest.raises(TaskError, match="InstanceNorm with running statistics"):
        Architecture("net", module, torch.zeros(1, 2, 9))


def test_the_split_at_the_head_holds_with_a_normalization_in_the_body() -> None:
    net = Net()
    made = Architecture("net", net, torch.zeros(1, 4))
    x = clients([30])[0][0]
    local = made.with_local_statistics(lambda: [x])
    whole = local.apply(made.initial, x[:3])
    torch.testing.assert_close(local.head(made.initial, local.represent(made.initial, x[:3])), whole)
    np.testing.assert_allclose(whole.detach().numpy(), by_hand(made.initial, x, x[:3]), atol=1e-5)


def test_a_regression_takes_a_model_that_normalizes_by_the_batch() -> None:
    g = torch.Generator().manual_seed(1)
    data = [(torch.randn(40, 4, generator=g), torch.randn(40, 3, generator=g)) for _ in range(2)]
    record = simulate("fedavg", Federation.from_arrays(data, Net), rounds=1).rounds[-1]
    assert record.risk is not None
    assert all(v is not None for v in record.risk["personal"]["test"])
