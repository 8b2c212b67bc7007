"""Batch normalization in a federation: the batch in training, the client's own statistics at inference,
nothing that travels."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedlowrank import SGD, Federation, simulate
from fedlowrank.adapters.deployment import load_deployed
from fedlowrank.core import tree
from fedlowrank.core.contract import ClientInfo
from fedlowrank.core.errors import TaskError
from fedlowrank.core.key import Key
from fedlowrank.data.dataset import Examples
from fedlowrank.engines import Sequential, Vectorized
from fedlowrank.linalg.matricize import sum_parts
from fedlowrank.methods import FedAvg, FedBABU, PerFedAvg
from fedlowrank.models.architecture import Architecture
from fedlowrank.rounds.outcome.export import export_model, write
from fedlowrank.rounds.run import Run
from fedlowrank.rounds.run_settings import RunSettings
from fedlowrank.training.flops import FlopLedger
from fedlowrank.training.local_data import LocalData
from fedlowrank.training.trainer import LocalTrainer


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


@pytest.mark.parametrize(
    ("method", "series"), [("fedavg", None), ("fedslr", "mixed"), ("fedslr", "gkr"), ("fedspa", None)]
)
def test_an_export_has_the_statistics_of_the_client(method: str, series: str | None, tmp_path: Path) -> None:
    run = simulate(method, Federation.from_arrays(clients([40, 60]), Net), rounds=1).run
    data = run.federation.clients[1]
    made = run.local_model(run.federation.infos[1])
    parts = made.parts.get(series or next(iter(made.predictors)), ())
    params = sum_parts(parts, made.model.initial) if parts else made.personal()
    write(run, 1, series, "small", tmp_path / "model.safetensors", repeats=1)
    for net in (export_model(run, 1, series), load_deployed(Net(), tmp_path / "model.safetensors")):
        actual = net.eval()(data.test.x).detach().numpy()
        np.testing.assert_allclose(actual, by_hand(params, data.train.x, data.test.x), atol=1e-4)


def trainer_of(model: Architecture, examples: Examples) -> LocalTrainer:
    data = LocalData(ClientInfo(0, len(examples), model.name), examples, {}, Key(("data",)))
    return LocalTrainer(model, [model], data, 0, FlopLedger())


class Twice(nn.Module):
    """One normalization that is called twice, and one of batches before them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.BatchNorm1d(4, track_running_stats=False)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.norm(torch.relu(self.norm(self.first(x).square())) * 2)
        return z


DEEP = {
    "vectors": (lambda: nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(),
        nn.Linear(5, 3), nn.BatchNorm1d(3, affine=False)), (4,)),
    "sequences": (lambda: nn.Sequential(nn.BatchNorm1d(2), nn.Conv1d(2, 3, 3), nn.BatchNorm1d(3)), (2, 6)),
    "images": (lambda: nn.Sequential(nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.ELU(), nn.Conv2d(3, 2, 2),
        nn.BatchNorm2d(2)), (1, 4, 4)),
    "volumes": (lambda: nn.Sequential(nn.Conv3d(1, 2, 2), nn.BatchNorm3d(2)), (1, 2, 3, 2)),
    "one layer twice": (Twice, (4,)),
}  # fmt: skip


@pytest.mark.parametrize("kind", DEEP)
def test_statistics_are_those_of_all_examples_as_one_batch(kind: str) -> None:
    make, shape = DEEP[kind]
    g = torch.Generator().manual_seed(3)
    x = torch.randn(600, *shape, generator=g)
    # sorted, so that each chunk has another mean
    x += torch.linspace(-3, 3, 600).reshape(-1, *[1] * len(shape))
    y = torch.zeros(600, dtype=torch.int64)
    model = Architecture("net", make(), x[:1])
    trainer = trainer_of(model, Examples(x, y))
    assert len(list(trainer.data.chunks())) == 3
    actual = model.with_local_statistics(trainer.inputs).inference_params(model.initial)
    torch.testing.assert_close(
        {n: actual[n] for n in model.statistics}, of_one_batch(make, model.initial, x), rtol=1e-4, atol=1e-5
    )


def of_one_batch(make: Callable[[], nn.Module], params: dict[str, Tensor], x: Tensor) -> dict[str, Tensor]:
    """Running statistics after one forward pass of all examples, by PyTorch."""
    net = make().train()
    net.load_state_dict(params, strict=False)
    for layer in net.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            layer.momentum = None
    with torch.no_grad():
        net(x)
    return {n: b for n, b in net.named_buffers() if "running" in n}


def test_the_order_of_examples_does_not_change_a_model() -> None:
    g = torch.Generator().manual_seed(0)
    y = torch.arange(512) // 256
    x, new = torch.randn(512, 4, generator=g) + 6.0 * y[:, None] - 3.0, torch.randn(8, 4, generator=g)
    model = Architecture("net", Net(), x[:1])
    for order in (torch.arange(512), torch.randperm(512, generator=g)):
        trainer = trainer_of(model, Examples(x[order], y[order]))
        scores = model.with_local_statistics(trainer.inputs).apply(model.initial, new)
        np.testing.assert_allclose(scores.detach(), by_hand(model.initial, x, new), atol=1e-5)


class Centered(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0))


MIXING = {
    "of batches": lambda: nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 3)),
    "own": lambda: Centered(4, 3),
}


@pytest.mark.parametrize("kind", MIXING)
def test_a_model_that_mixes_examples_scores_each_set_as_one_batch(kind: str) -> None:
    g = torch.Generator().manual_seed(1)
    many = [torch.randn(n, 4, generator=g) + torch.linspace(-3, 3, n)[:, None] for n in (40, 1200)]
    labels = [torch.randint(0, 3, (len(x),), generator=g) for x in many]
    one = {"train": (many[0], labels[0]), "test": (many[1], labels[1])}
    federation = Federation.from_arrays([one, one], MIXING[kind]())
    result = simulate("fedavg", federation, rounds=1)
    net = MIXING[kind]()
    net.load_state_dict(result.personal(0), strict=False)
    with torch.no_grad():
        scores = net(many[1])
    torch.testing.assert_close(result.predict(0), scores, rtol=1e-4, atol=1e-5)
    loss = nn.functional.cross_entropy(scores, labels[1])
    assert result.rounds[-1].is_evaluated
    assert result.rounds[-1].values("loss", series="personal", split="test")[0] == pytest.approx(
        float(loss), rel=1e-5
    )
    trainer = trainer_of(federation.architectures["model"], Examples(many[1], labels[1]))
    total = trainer.sum_over_data(
        lambda p, b: b.sum(trainer.model.apply(p, b.x).square()), result.personal(0), ()
    )
    torch.testing.assert_close(total, scores.square().sum(0), rtol=1e-4, atol=1e-3)


def test_sums_over_the_training_data_do_not_depend_on_chunks() -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(600, 4, generator=g) + torch.linspace(-3, 3, 600)[:, None]
    y = torch.randint(0, 3, (600,), generator=g)
    model = Architecture("net", Net(), x[:1])
    trainer = trainer_of(model, Examples(x, y))
    total = trainer.sum_over_data(lambda p, batch: batch.sum(model.apply(p, batch.x)), model.initial, ())
    np.testing.assert_allclose(total, by_hand(model.initial, x, x).sum(0), rtol=1e-4, atol=1e-3)
    # two matrices, a multiplication and an addition an entry; the statistics take the first one more
    assert trainer.meter.flops == 600 * 2 * (2 * (4 * 5 + 5 * 3))


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
    with pytest.raises(TaskError, match="at least two values of each channel"):
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
    assert record.is_evaluated
    losses = record.values("loss", series="personal", split="test")
    assert len(losses) == 2
    assert None not in losses


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize(
    ("method", "steps", "lr"),
    [
        (PerFedAvg(steps=1, alpha=0.5, optimizer=SGD(lr=0.1)), 1, 0.5),
        (FedBABU(steps=1, fine_tuning_epochs=5, optimizer=SGD(lr=0.3)), 5, 0.3),
    ],
    ids=["Per-FedAvg", "FedBABU"],
)
def test_training_before_inference_normalizes_by_the_batch(
    engine: str, method: FedAvg, steps: int, lr: float
) -> None:
    (data,) = clients([13])
    federation = Federation.from_arrays([{"train": data}] * 2, Net)
    result = simulate(method, federation, rounds=1, engine=engine)
    plain = Net()
    server = {**federation.architectures["model"].initial, **result.run.state.server}
    plain.load_state_dict(server, strict=False)
    optimizer = torch.optim.SGD(plain.parameters(), lr=lr)
    for _ in range(steps):
        optimizer.zero_grad()
        # one batch of all examples, so that their order does not matter
        nn.functional.cross_entropy(plain(data[0]), data[1]).backward()
        optimizer.step()
    personal = result.personal(0)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(personal[name], parameter.detach(), atol=1e-6, rtol=0)


def test_the_operations_of_a_round_do_not_depend_on_evaluations() -> None:
    module = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))
    federation = Federation.from_arrays([{"train": data} for data in clients([13, 40])], module)
    method = FedBABU(steps=3, batch_size=64, fine_tuned_part="body")
    result = simulate(method, federation, rounds=2, evaluate_every=1)
    # products of 4 × 5 and 5 × 3: forward of both, the gradient of the body's weight and of the head's input; two
    # operations for each multiplication
    flops_of_example = 2 * (4 * 5 + 5 * 3) + 2 * 4 * 5 + 2 * 5 * 3
    assert [record.flops for record in result.rounds[1:]] == [53 * 3 * flops_of_example] * 2
