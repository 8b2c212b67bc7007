"""Real targets from arrays and data sets to a run, FLoRAL's synthetic regressions, and the teacher of a chosen rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedlowrank import Federation, simulate
from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.core.errors import ConfigError, DataError, TaskError
from fedlowrank.core.key import Key
from fedlowrank.core.learning.optimizer import SGD
from fedlowrank.data.arrays import Arrays
from fedlowrank.data.clients import make_clients, subsample_training
from fedlowrank.data.dataset import draw_subset, normalize
from fedlowrank.data.datasets.synthetic import LowRankTeacher, SyntheticLinear, SyntheticMLP
from fedlowrank.data.describe import count_classes, draw_class_counts, format_class_counts
from fedlowrank.data.partitioning.partition import Iid, Natural
from fedlowrank.data.partitioning.split import LocalSplit, Matched, OwnTest, TestShare, WholeTest
from fedlowrank.methods.fedavg import FedAvg
from fedlowrank.results.evaluation.pools import ScoringPool
from fedlowrank.results.evaluation.scoring import measure_predictor
from tests.data.made_datasets import numbered

KEY = Key((1,))
REAL = numbered(40, 20, 0, torch.arange(40) % 4, torch.arange(20) % 4)


# Data sets and their division


@pytest.mark.parametrize(
    ("partition", "split"),
    [
        (Iid(4), LocalSplit()),
        (Iid(4), LocalSplit(pool="all")),
        (Iid(4), WholeTest()),
        (Iid(4), TestShare()),
        (Natural(), OwnTest(0.0)),
        (Natural(), LocalSplit(pool="all")),
    ],
)
def test_a_regression_is_divided_with_its_targets(partition: Any, split: Any) -> None:
    data = REAL
    clients = make_clients(data, partition, split, KEY)
    for c in clients:
        assert c.notes == ()
        for part in (c.train, c.val, c.test):
            assert part.y.shape == (len(part), 2)
            assert torch.equal(part.y, part.x * torch.tensor([1.0, 2.0]))
    train = sorted(x for c in clients for part in (c.train, c.val) for x in part.x[:, 0].tolist())
    assert len(set(train)) == len(train)
    if not isinstance(split, LocalSplit):
        assert train == list(range(40))
    if isinstance(split, TestShare | OwnTest):
        assert sorted(x for c in clients for x in c.test.x[:, 0].tolist()) == list(range(10_000, 10_020))
    assert count_classes(clients, 0).shape == (4, 0)
    table = format_class_counts(clients, ()).split("\n")
    assert table[0].split() == ["client", "train", "val", "test"]
    assert len(table) == 1 + 4 + 2
    assert all(len(c.train) == 3 for c in subsample_training(clients, 0.01, 3, KEY))


def test_what_goes_by_classes_refuses_a_regression() -> None:
    with pytest.raises(DataError, match=r"split 'matched' .* have none"):
        make_clients(REAL, Iid(4), Matched(), KEY)
    with pytest.raises(DataError, match="no classes to draw"):
        draw_class_counts(np.zeros((4, 0)), ())


def test_preparation_keeps_targets() -> None:
    data = REAL
    assert torch.equal(normalize(data, "standard").train.y, data.train.y)
    some = draw_subset(data, 7)
    assert torch.equal(some.train.y, some.train.x * torch.tensor([1.0, 2.0]))
    assert data.outputs == 2
    assert numbered(classes=3).outputs == 3


def test_arrays_of_real_targets(tmp_path: Any) -> None:
    x, y = np.arange(8.0).reshape(4, 2), np.arange(12.0).reshape(4, 3) / 7
    np.savez(tmp_path / "r.npz", x_train=x, y_train=y, x_test=x[:1], y_test=y[:1])
    data = Arrays(str(tmp_path / "r.npz")).load()
    assert data.classes == ()
    assert torch.equal(data.train.y, torch.from_numpy(y).float())
    assert data.test is not None
    assert data.test.y.shape == (1, 3)
    np.savez(tmp_path / "r.npz", x=x, y=y, classes=np.array(["a", "b"]))
    with pytest.raises(DataError, match="names classes, but its targets are real"):
        Arrays(str(tmp_path / "r.npz")).load()


# Federations


def pairs(clients: int = 3, width: int = 2, kind: Any = np.float64) -> list[Any]:
    draws = np.random.default_rng(0)
    return [(draws.normal(size=(20, 4)), draws.normal(size=(20, width)).astype(kind)) for _ in range(clients)]


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_a_federation_of_real_targets(kind: Any) -> None:
    given = pairs(kind=kind)
    made = Federation.from_arrays(given, lambda: nn.Linear(4, 2), cluster=[0, 1, 0])
    assert made.classes == ()
    assert made.task(1).classes == 0
    assert [i.cluster for i in made.infos] == [0, 1, 0]
    for (x, y), c in zip(given, made.clients, strict=True):
        rows = torch.cat([torch.cat([p.x, p.y], 1) for p in (c.train, c.val, c.test)])
        expected = np.concatenate([x, y], 1).astype(np.float32)
        assert sorted(rows.tolist()) == sorted(expected.tolist())
    for row in made.describe():
        assert row["classes"] == {"train": [], "val": [], "test": []}
        assert (row["train"], row["val"], row["test"]) == (16, 2, 2)
    assert [r["cluster"] for r in made.describe()] == [0, 1, 0]
    unknown = Federation.from_arrays(given, lambda: nn.Linear(4, 2))
    assert (unknown.infos[0].cluster, "cluster" in unknown.describe()[0]) == (None, False)
    for wrong, message in (([0, 1], r"3 clients, but .* 2 clusters"), ([0, 1, -1], "there is a -1")):
        with pytest.raises(DataError, match=message):
            Federation.from_arrays(given, lambda: nn.Linear(4, 2), cluster=wrong)
    other = [given[0], given[1], (given[2][0], given[2][1] + 1e-3)]
    prints, others = made.fingerprint(), Federation.from_arrays(other, lambda: nn.Linear(4, 2)).fingerprint()
    assert [a == b for a, b in zip(prints, others, strict=True)] == [True, True, False]


def test_federations_that_mix_tasks_or_widths_are_refused() -> None:
    labels = (np.zeros((20, 4)), np.arange(20) % 2)
    for given, more, message in [
        ([*pairs(2), labels], {}, "client 0 has real targets and client 2 class labels"),
        (pairs(), {"classes": 2}, "client 0 has real targets, a regression, which has no classes"),
        ([*pairs(2), *pairs(1, 3)], {}, "2 at client 0, 3 at client 2"),
        ([{"train": pairs()[0], "test": pairs(1, 3)[0]}], {}, "2 at client 0, 3 at client 0"),
        ([pairs()[0], (np.zeros((5, 4)), np.full((5, 2), np.nan))], {}, "client 1: there is a NaN"),
        ([{"train": pairs()[0], "test": labels}], {}, "test has class labels, .* names 0 classes"),
    ]:
        with pytest.raises(DataError, match=message):
            Federation.from_arrays(given, lambda: nn.Linear(4, 2), **more)
    # a width of 1 would broadcast against the targets and train on nonsense
    with pytest.raises(TaskError, match=r"client 0: model model makes \[1, 1\] .* its target is \[1, 2\]"):
        Federation.from_arrays(pairs(), lambda: nn.Linear(4, 1))
    made = Federation.from_arrays(pairs(), lambda: nn.Linear(4, 2))
    with pytest.raises(DataError, match=r"client 0: train has real targets, but .* names 2 classes"):
        replace(made, classes=("a", "b"))


def test_fedavg_with_one_full_batch_step_is_a_gradient_step_by_hand() -> None:
    given = [{"train": p, "test": p} for p in pairs()]
    start = nn.Linear(4, 2, bias=False)
    weight = start.weight.detach().numpy().astype(np.float64)
    made = Federation.from_arrays(given, start)
    result = simulate(FedAvg(batch_size=20, optimizer=SGD(lr=0.1)), made, rounds=1, representations=0)
    gradient = np.mean([((x @ weight.T - y).T @ x) / 20 for x, y in pairs()], 0)
    after = weight - 0.1 * gradient
    for k, (x, y) in enumerate(pairs()):
        actual = result.personal(k)
        assert np.allclose(actual["weight"].numpy(), after, atol=1e-5)
        model = made.architectures["model"]
        results = measure_predictor(
            lambda rows, p=actual, m=model: m.apply(p, rows), ScoringPool([made.clients[k].test])
        )
        assert results.accuracy == [None]
        assert results.loss[0] == pytest.approx(np.mean(((x @ after.T - y) ** 2).sum(1)) / 2, rel=1e-4)


# Synthetic regressions


@pytest.mark.full
def test_the_papers_sizes_and_the_seed() -> None:
    data = SyntheticLinear().load()
    # 10 clients · 0.25 · 30 = 7.5, half up
    assert (data.train.x.shape, data.train.y.shape) == ((80, 10), (80, 3))
    assert (data.test.x.shape, data.test.y.shape) == ((10_000, 10), (10_000, 3))
    mlp = SyntheticMLP().load()
    assert (mlp.train.x.shape, mlp.train.y.shape) == ((1000, 10), (1000, 1))  # 20 clients · 0.5 · 100
    for kind in (SyntheticLinear, SyntheticMLP):
        first, again, other = (kind(seed=s).load() for s in (0, 0, 1))
        assert torch.equal(first.train.x, again.train.x)
        assert torch.equal(first.train.y, again.train.y)
        assert not torch.equal(first.train.x, other.train.x)
        assert len(torch.unique(first.train.x, dim=0)) == len(first.train)


@pytest.mark.parametrize("kind", [SyntheticLinear, SyntheticMLP])
def test_targets_are_those_of_the_models_in_the_paper(kind: Any) -> None:
    # Drawn again by the names of the parameters, computed by numpy; 1/√d_in is the standard deviation.
    is_mlp = kind is SyntheticMLP
    more = {"hidden": 8} if is_mlp else {}
    data = kind(clients=5, clusters=2, inputs=6, outputs=3, rank=2, alpha=1.5, test=30, seed=4, **more).load()
    key, width = Key(("synthetic_mlp" if is_mlp else "synthetic_linear", 4)), 8 if is_mlp else 3

    def normal(at: Key, *shape: int) -> np.ndarray[Any, Any]:
        return torch.randn(shape, generator=at.generator(), dtype=torch.float64).numpy()

    phi = normal(key / "phi", 3, 8) / np.sqrt(8)
    for k in range(5):
        c = k % 2
        u, v = (normal(key / n / c, rows, 2) / np.sqrt(6) for n, rows in (("U", width), ("V", 6)))
        weight = normal(key / "W", width, 6) / np.sqrt(6) + 1.5 * u @ v.T
        for part, ids in ((data.train, data.natural), (data.test, data.natural_test)):
            x, y = part.x[ids == k].double().numpy(), part.y[ids == k].numpy()
            expected = np.maximum(x @ weight.T, 0) @ phi.T if is_mlp else x @ weight.T
            assert np.allclose(y, expected, atol=1e-5)


def test_synthetic_settings_are_checked() -> None:
    for name in ("clients", "clusters", "inputs", "outputs", "rank", "test"):
        for kind in (SyntheticLinear, SyntheticMLP):
            with pytest.raises(ConfigError, match=rf"data\.{name}"):
                kind(**{name: 0})
    with pytest.raises(ConfigError, match=r"data\.hidden"):
        SyntheticMLP(hidden=0)
    for name in ("alpha", "share"):
        with pytest.raises(ConfigError, match=rf"data\.{name}"):
            SyntheticLinear(**{name: 0.0})
    with pytest.raises(ConfigError, match="only 2 clients"):
        SyntheticLinear(clients=2, clusters=3)


LINEAR = """
method = "fedavg"
[data]
source = "synthetic_linear"
normalize = "none"
clients = 4
clusters = 2
test = 20
[partition]
kind = "natural"
[split]
kind = "own_test"
val = 0.0
[concept]
kind = "natural"
clusters = 2
[model]
names = ["linear"]
bias = false
[defaults]
batch_size = 4
optimizer = { kind = "sgd", lr = 0.1 }
"""


def load(folder: Any, *overrides: str) -> ExperimentConfig:
    (folder / "e.toml").write_text(LINEAR)
    return ExperimentConfig.read(folder / "e.toml", overrides)


@pytest.mark.full
def test_an_experiment_on_a_synthetic_regression_runs(tmp_path: Any) -> None:
    made = load(tmp_path)
    federation = made.federation()
    assert [i.cluster for i in federation.infos] == [0, 1, 0, 1]
    assert [len(c.train) for c in federation.clients] == [8] * 4
    assert [len(c.test) for c in federation.clients] == [20] * 4
    (model,) = federation.architectures.values()
    assert {n: tuple(p.shape) for n, p in model.initial.items()} == {"linear.weight": (3, 10)}
    again = load(tmp_path, "run.seed=7").federation()
    assert again.fingerprint() == federation.fingerprint()
    simulate(made.build_method("fedavg"), federation, rounds=2, folder=tmp_path / "run", representations=0)


def test_an_experiment_keeps_a_share_of_the_training_data(tmp_path: Any) -> None:
    federation = load(tmp_path, "data.keep=0.5", "data.keep_at_least=3").federation()
    assert (
        [len(c.train) for c in federation.clients] == [i.example_count for i in federation.infos] == [4] * 4
    )
    assert [len(c.test) for c in federation.clients] == [20] * 4
    federation = load(tmp_path, "data.keep=0.1", "data.keep_at_least=3").federation()
    assert [len(c.train) for c in federation.clients] == [3] * 4
    for wrong in ("0.0", "1.5", "-1.0", "nan"):
        with pytest.raises(ConfigError, match=r"data\.keep"):
            load(tmp_path, f"data.keep={wrong}")
    with pytest.raises(ConfigError, match=r"data\.keep_at_least"):
        load(tmp_path, "data.keep_at_least=0")


def test_what_would_make_another_task_of_a_synthetic_source_is_refused(tmp_path: Any) -> None:
    for setting, message in (
        ("data.normalize=scale", r"Set data\.normalize to 'none'"),
        ("concept.clusters=4", r"concept\.clusters is 4, but data\.clusters is 2"),
        ("data.rnak=1", r"data\.rnak.*rank"),
    ):
        with pytest.raises(ConfigError, match=message):
            load(tmp_path, setting)


# The teacher


@pytest.mark.few(1)
@pytest.mark.parametrize("rank", [1, 3, 8])
def test_the_teachers_labels_need_an_update_of_its_rank(rank: int) -> None:
    data = LowRankTeacher(inputs=12, classes=9, rank=rank, examples=60_000, seed=3).load()
    x, y = data.train.x.numpy(), data.train.y.numpy()
    assert (data.test.x.shape, data.classes) == ((1000, 12), tuple("012345678"))
    # given W x, the part of x outside of W's row space is independent of y, so E[x | y] lies in that space
    means = np.stack([(x * (y == c)[:, None]).mean(0) for c in range(9)])
    values = np.linalg.svd(means, compute_uv=False)
    noise = np.sqrt(12 / 60_000)
    assert values[rank - 1] > 3 * noise
    assert values[rank] < noise


TEACHER = """
method = "fedavg"
[data]
source = "low_rank_teacher"
normalize = "none"
examples = 40
seed = "run"
[partition]
kind = "iid"
clients = 4
[model]
names = ["linear"]
"""


def test_a_teacher_by_the_seed_of_the_run(tmp_path: Any) -> None:
    (tmp_path / "e.toml").write_text(TEACHER)

    def inputs(*overrides: str) -> set[float]:
        made = ExperimentConfig.read(tmp_path / "e.toml", overrides)
        return {
            row[0]
            for c in made.federation().clients
            for part in (c.train, c.val, c.test)
            for row in part.x.tolist()
        }

    assert inputs() == inputs()
    assert not inputs() & inputs("run.seed=1")
    assert inputs("data.seed=5") == inputs("data.seed=5", "run.seed=1")


def test_wrong_settings_of_the_teacher_are_refused(tmp_path: Any) -> None:
    (tmp_path / "e.toml").write_text(TEACHER)
    with pytest.raises(ConfigError, match=r"data\.rank is 33, but a matrix of 32 × 64"):
        LowRankTeacher(rank=33)
    with pytest.raises(ConfigError, match=r"data\.classes"):
        LowRankTeacher(classes=1)
    with pytest.raises(ConfigError, match="there is no run"):
        LowRankTeacher(seed="run").load()
    with pytest.raises(ConfigError, match=r"data\.normalize"):
        ExperimentConfig.read(tmp_path / "e.toml", ["data.normalize=standard"]).federation()
    with pytest.raises(ConfigError, match=r"data\.seed"):
        ExperimentConfig.read(tmp_path / "e.toml", ["data.seed=walk"])


def test_a_mean_accuracy_that_does_not_exist() -> None:
    x = torch.arange(12.0)[:, None]
    result = simulate("fedavg", Federation.from_arrays([(x, x)] * 2, nn.Linear(1, 1)), rounds=1)
    with pytest.raises(DataError, match=r"no mean accuracy, because this is a regression.*to_frame"):
        result.mean_accuracy()
    untested = Federation.from_arrays([(x, x[:, 0].long() % 2)] * 2, nn.Linear(1, 2), test=0)
    result = simulate("fedavg", untested, rounds=1)
    with pytest.raises(
        DataError, match=r"no mean accuracy, because no client has examples in the split 'test'"
    ):
        result.mean_accuracy()
    assert 0 <= result.mean_accuracy("val") <= 1
