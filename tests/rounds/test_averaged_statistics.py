"""Running statistics averaged by the server, beside a loop that averages PyTorch's ``state_dict``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedlowrank import SGD, Clipping, Compression, Federation, Privacy, simulate
from fedlowrank.core.contract import AnyMethod
from fedlowrank.core.errors import ConfigError, TaskError
from fedlowrank.engines import ENGINES
from fedlowrank.methods import METHODS, FedAvg
from fedlowrank.rounds.run import Run
from fedlowrank.rounds.run_settings import RunSettings

SIZES = (22, 15, 9)
FEDAVG = FedAvg(batch_size=8, optimizer=SGD(lr=0.2), drop_last=True)


def net(momentum: float | None = 0.1) -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6, momentum=momentum), nn.ReLU(), nn.Linear(6, 5), nn.BatchNorm1d(5),
        nn.Linear(5, 3),
    )  # fmt: skip


def federation(make: Callable[[], nn.Module] = net) -> Federation:
    g = torch.Generator().manual_seed(2)
    data = []
    for k, n in enumerate(SIZES):
        x, y = (k + 1) * torch.randn(n + 7, 4, generator=g) + k, torch.randint(0, 3, (n + 7,), generator=g)
        data.append({"train": (x[:n], y[:n]), "test": (x[n:], y[n:])})
    return Federation.from_arrays(data, make)


def plain_loop(run: Run, module: nn.Module, rounds: int) -> dict[str, Tensor]:
    """Federated averaging of whole state dictionaries."""
    server = copy.deepcopy(module)
    server.load_state_dict(run.federation.architectures["model"].initial, strict=False)
    for t in range(rounds):
        ends = []
        for info, own in zip(run.federation.infos, run.federation.clients, strict=True):
            client = copy.deepcopy(server).train()
            for index in run.engine.trainer(FEDAVG, run.federation, t, info).data.order("local"):
                loss = functional.cross_entropy(client(own.train.x[index]), own.train.y[index])
                grads = torch.autograd.grad(loss, list(client.parameters()))
                for p, g in zip(client.parameters(), grads, strict=True):
                    p.data -= 0.2 * g
            ends.append(client.state_dict())
        mean = {
            n: sum(s * e[n].double() for s, e in zip(SIZES, ends, strict=True)) / sum(SIZES) for n in ends[0]
        }
        server.load_state_dict(
            {n: t if ends[0][n].is_floating_point() else t.round() for n, t in mean.items()}
        )
    return server.state_dict()


@pytest.mark.few(4)
@pytest.mark.parametrize("engine", ["sequential", "wire", "vectorized", "processes"])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_it_is_the_average_of_state_dictionaries(momentum: float | None, engine: str) -> None:
    on = federation(partial(net, momentum))
    before = {n: b.clone() for n, b in on.architectures["model"].module.named_buffers()}
    result = simulate(FEDAVG, on, rounds=3, statistics="averaged", engine=engine)
    expected = plain_loop(result.run, net(momentum), 3)
    module = net(momentum)
    for i in range(len(SIZES)):
        module.load_state_dict(result.personal(i))
        for n, t in module.state_dict().items():
            torch.testing.assert_close(t, expected[n], rtol=1e-4, atol=1e-5)
    scores = module.eval()(on.clients[1].test.x).detach()
    torch.testing.assert_close(result.predict(1), scores, rtol=1e-4, atol=1e-5)
    loss = float(functional.cross_entropy(scores, on.clients[1].test.y))
    assert result.rounds[-1].is_evaluated
    assert result.rounds[-1].values("loss", series="personal", split="test")[1] == pytest.approx(
        loss, rel=1e-4
    )
    assert all(torch.equal(b, before[n]) for n, b in on.architectures["model"].module.named_buffers())
    # they travel with the model, and no client keeps them
    parameters = sum(p.numel() for p in module.parameters())
    assert result.rounds[-1].parameters_up == len(SIZES) * (parameters + 2 * (6 + 5) + 2)
    assert not any(result.run.state.clients[i] for i in range(len(SIZES)))


def test_operations_are_those_of_local_statistics() -> None:
    flops = [
        simulate(FEDAVG, federation(), rounds=1, statistics=s).rounds[-1].flops for s in ("local", "averaged")
    ]
    assert flops[0] == flops[1]


@pytest.mark.parametrize("name", ["fedprox", "fednova", "fedavgm", "fedadam", "scaffold", "feddyn"])
def test_other_methods_whose_clients_use_the_server_s_model(name: str) -> None:
    method = METHODS[name](batch_size=8, drop_last=True)
    result = simulate(method, federation(), rounds=1, statistics="averaged")
    running = {n for n in result.personal(0) if "running" in n}
    assert len(running) == 4
    assert all(torch.equal(result.personal(0)[n], result.personal(1)[n]) for n in running)


@pytest.mark.parametrize("name", ["fedbn", "ditto", "moon", "fedrep"])
def test_it_is_refused_where_a_client_uses_another_model(name: str) -> None:
    with pytest.raises(TaskError, match=r"statistics = 'averaged': at a client, .* statistics = 'local'"):
        simulate(METHODS[name](drop_last=True), federation(), rounds=1, statistics="averaged")


def test_it_is_refused_where_statistics_would_leak_or_do_not_exist() -> None:
    private: dict[str, Any] = {
        "clipping": Clipping(norm=1.0),
        "privacy": Privacy(kind="central", epsilon=5.0, delta=1e-3),
        "sampling": "poisson",
        "participation": 0.5,
    }
    with pytest.raises(ConfigError, match="neither noise"):
        simulate(FEDAVG, federation(), rounds=1, statistics="averaged", **private)
    with pytest.raises(TaskError, match="no batch normalization with running statistics"):
        simulate(FEDAVG, federation(partial(nn.Linear, 4, 3)), rounds=1, statistics="averaged")


def test_clipped_and_compressed_updates_leave_statistics_whole() -> None:
    plain = simulate(FEDAVG, federation(), rounds=1, statistics="averaged").personal(0)
    changed = simulate(
        FEDAVG,
        federation(),
        rounds=1,
        statistics="averaged",
        clipping=Clipping(norm=1e-3),
        compression=Compression(uplink="int8"),
    ).personal(0)
    assert not torch.equal(plain["0.weight"], changed["0.weight"])
    for n in ("1.running_mean", "1.running_var", "1.num_batches_tracked"):
        torch.testing.assert_close(plain[n], changed[n])


def test_a_client_with_one_example_can_be_evaluated() -> None:
    g = torch.Generator().manual_seed(0)
    sizes = [12] * 9 + [1]
    data = [(torch.randn(n, 4, generator=g), torch.arange(n) % 3) for n in sizes]
    on = Federation.from_arrays(data, net(), classes=3, val=0.0, test=0.0)
    seed = next(
        s for s in range(99)
        if 9 in Run(FEDAVG, Federation.from_arrays(data[:9] + data[:1], net(), classes=3, seed=s),
                    RunSettings(unseen=0.1, seed=s), ENGINES["sequential"]()).client_sampler.unseen
    )  # fmt: skip
    on = Federation.from_arrays(data, net(), classes=3, val=0.0, test=0.0, seed=seed)
    result = simulate(FEDAVG, on, rounds=1, unseen=0.1, statistics="averaged")
    assert result.predict(9, inputs=data[9][0]).isfinite().all()
    with pytest.raises(TaskError, match="client 9 has 1 training example"):
        simulate(FEDAVG, on, rounds=1, unseen=0.1)


def test_a_run_is_resumed(tmp_path: Path) -> None:
    method: AnyMethod = FEDAVG
    whole = simulate(method, federation(), rounds=3, statistics="averaged").personal(0)
    simulate(method, federation(), rounds=2, statistics="averaged", folder=tmp_path / "run")
    again = simulate(
        method, federation(), rounds=3, statistics="averaged", folder=tmp_path / "run", resume=True
    )
    assert all(torch.equal(t, again.personal(0)[n]) for n, t in whole.items())
