"""One rule for the type and scale of inputs, from every source and in prediction, beside numpy's arithmetic."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedlowrank import SGD, Federation, simulate
from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.core.errors import ConfigError, DataError, TaskError
from fedlowrank.data.arrays import Arrays
from fedlowrank.methods import FedAvg

BYTES = np.random.default_rng(0).integers(0, 256, (6, 1, 2, 3), dtype=np.uint8)
Y = np.array([0, 1, 0, 1, 0, 1])
SCALED = torch.from_numpy(BYTES.astype(np.float32) / np.float32(255))


def linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 2))


class Words(nn.Module):
    """Looks words up, as a module of the user's does."""

    def __init__(self, table: nn.Module | None = None) -> None:
        super().__init__()
        self.table, self.head = table or nn.Embedding(256, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.table(x).mean(1))
        return scores


def from_arrays(x: Any, model: Callable[[], nn.Module] = linear) -> Tensor:
    actual = Federation.from_arrays([(x, Y)], model, val=0, test=0, seed=1)
    order = torch.argsort(torch.randperm(6, generator=(actual.key / "split" / 0).generator()))
    assert isinstance(actual.clients[0].train.x, Tensor)
    return actual.clients[0].train.x[order]


@pytest.mark.parametrize("flat", [False, True])
def test_bytes_are_scaled_alike_by_every_source(tmp_path: Path, flat: bool) -> None:
    x = BYTES.reshape(6, 6) if flat else BYTES
    truth = SCALED.reshape(x.shape)
    np.savez(tmp_path / "a.npz", x=x, y=Y)
    assert torch.equal(Arrays(str(tmp_path / "a.npz")).load().train.x, truth)
    for given in (x, torch.from_numpy(x), list(x)):
        # any warning is an error
        assert torch.equal(from_arrays(given), truth)
    datasets = pytest.importorskip("datasets")
    kinds = datasets.Features(
        {"image": datasets.Sequence(datasets.Value("uint8")), "label": datasets.Value("int64")}
    )
    if flat:
        part = datasets.Dataset.from_dict({"image": list(x), "label": Y}, features=kinds)
        made = Federation.from_partitions([part], linear, features=["image"], val=0, test=0.5)
        seen = torch.cat([made.clients[0].train.x, made.clients[0].test.x])
        assert torch.equal(seen.sort(0).values, truth.sort(0).values)


@pytest.mark.parametrize("kind", [np.int8, np.int16, np.uint16, np.int32, np.int64, np.float64, np.bool_])
def test_other_numbers_keep_their_values(tmp_path: Path, kind: Any) -> None:
    x = np.arange(36).reshape(6, 6).astype(kind)
    np.savez(tmp_path / "a.npz", x=x, y=Y)
    truth = torch.from_numpy(x.astype(np.float32))
    for actual in (from_arrays(x), Arrays(str(tmp_path / "a.npz")).load().train.x):
        assert actual.dtype == torch.float32
        assert torch.equal(actual, truth)


def test_columns_of_a_table_are_numbers_also_in_bytes() -> None:
    pandas = pytest.importorskip("pandas")
    x = BYTES.reshape(6, 6)
    assert torch.equal(from_arrays(pandas.DataFrame(x)), torch.from_numpy(x.astype(np.float32)))


def test_of_named_inputs_images_are_scaled_and_masks_are_not() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 2)

        def forward(self, image: Tensor, mask: Tensor) -> Tensor:
            scores: Tensor = self.linear(image.flatten(1) * mask)
            return scores

    mask = np.ones((6, 6), dtype=np.uint8)
    x = Federation.from_arrays([({"image": BYTES, "mask": mask}, Y)], Named, val=0, test=0).clients[0].train.x
    assert isinstance(x, dict)
    assert torch.equal(x["image"].flatten().sort().values, SCALED.flatten().sort().values)
    assert x["mask"].dtype == torch.uint8


@pytest.mark.parametrize("kind", [np.uint8, np.int32, np.int64])
def test_ids_stay_whole_where_a_model_looks_them_up(kind: Any) -> None:
    x = BYTES.reshape(6, 6).astype(kind)
    for model in (Words, Words()):
        assert torch.equal(from_arrays(x, model), torch.from_numpy(x.astype(np.int64)))  # type: ignore[arg-type]

    class Tables(Words):
        def forward(self, x: Tensor) -> Tensor:
            # no nn.Embedding is called, but a parameter is indexed
            scores: Tensor = self.head(self.table.weight[x].mean(1))
            return scores

    plain = nn.Linear(3, 256)
    assert from_arrays(x, lambda: Tables(plain)).dtype == torch.int64


def test_images_in_bytes_are_pixels_also_beside_an_embedding() -> None:
    class Patches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.positions, self.head = nn.Embedding(6, 3), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            scores: Tensor = self.head((x.flatten(1)[..., None] + self.positions(torch.arange(6))).mean(1))
            return scores

    assert torch.equal(from_arrays(BYTES, Patches), SCALED)


def test_ids_are_trained_and_predicted_as_a_plain_loop_does() -> None:
    x = torch.from_numpy(BYTES.reshape(6, 6))
    labels = torch.from_numpy(Y)
    model = Words()
    clients = [{"train": (x, labels), "test": (x, labels)}, {"train": (x[:5], labels[:5])}]
    federation = Federation.from_arrays(clients, model)
    result = simulate(FedAvg(optimizer=SGD(lr=0.3), epochs=1, batch_size=6), federation, rounds=1)
    trained = []
    for client in clients:
        own = Words()
        own.load_state_dict(model.state_dict())
        ids, y = client["train"]
        nn.functional.cross_entropy(own(ids.long()), y).backward()
        trained.append({n: p - 0.3 * p.grad for n, p in own.named_parameters() if p.grad is not None})
    mean = {n: (6 * p + 5 * trained[1][n]) / 11 for n, p in trained[0].items()}
    truth = torch.func.functional_call(model, mean, (x.long(),))
    for given in (None, x, x.long(), x.numpy()):
        assert torch.allclose(result.predict(0, given), truth, atol=1e-5)
    with pytest.raises(DataError, match=r"whole numbers, not float32 \[6, 6\].*x\.long\(\)"):
        result.predict(0, x.float())


def test_prediction_scales_as_training_does() -> None:
    model = linear()
    federation = Federation.from_arrays([{"train": (BYTES, Y), "test": (BYTES, Y)}], model)
    result = simulate(FedAvg(optimizer=SGD(lr=0.0)), federation, rounds=1)
    truth = model(SCALED).detach()
    for given in (None, BYTES, torch.from_numpy(BYTES), SCALED):
        assert torch.allclose(result.predict(0, given), truth, atol=1e-6)


def test_parts_of_different_scales_are_refused(tmp_path: Path) -> None:
    parts = {"train": (BYTES, Y), "test": (BYTES.astype(np.float32), Y)}
    with pytest.raises(
        DataError, match=r"client 1 \(train\) are unsigned bytes.*client 1 \(test\).*outside 0 to 1"
    ):
        Federation.from_arrays([{"train": (SCALED, Y)}, parts], linear)  # type: ignore[list-item]
    np.savez(tmp_path / "a.npz", x_train=BYTES, y_train=Y, x_test=BYTES.astype(int), y_test=Y)
    with pytest.raises(DataError, match=r"'x_train' in .*'x_test' in .*outside 0 to 1"):
        Arrays(str(tmp_path / "a.npz")).load()
    Federation.from_arrays([{"train": (BYTES, Y), "test": (SCALED, Y)}], linear)
    ids = BYTES.reshape(6, 6)
    with pytest.raises(DataError, match=r"client 0 are whole numbers.*client 1 are real numbers"):
        Federation.from_arrays([(ids, Y), (ids.astype(float), Y)], Words)


@pytest.mark.parametrize("max_value", [1, 16, 63])
def test_bytes_that_may_be_no_pixels_are_pointed_out(tmp_path: Path, max_value: int) -> None:
    x = BYTES % (max_value + 1)
    x[0, 0, 0, 0] = max_value
    says = f"bytes up to {max_value}, which are divided by 255 .*give them as float32, whose values stay"
    with pytest.warns(UserWarning, match=says) as said:
        from_arrays(x)
    assert len(said) == 1
    np.savez(tmp_path / "a.npz", x=x, y=Y)
    assert any(re.search(says, note) for note in Arrays(str(tmp_path / "a.npz")).load().notes)


def test_predictions_refuse_bytes_beside_numbers_that_are_not_scaled() -> None:
    result = simulate("fedavg", Federation.from_arrays([(BYTES.astype("float32"), Y)], linear), rounds=1)
    model = linear()
    model.load_state_dict(result.personal(0))
    whole = torch.from_numpy(BYTES.astype("float32"))
    torch.testing.assert_close(result.predict(0, BYTES.astype("float32")), model(whole).detach())
    with pytest.raises(DataError, match=r"are unsigned bytes, .*trains on values from \d+ to 2\d\d"):
        result.predict(0, BYTES)


def test_an_embedding_that_gets_real_numbers_is_told_of_the_conversion() -> None:
    class Mixed(Words):
        def forward(self, x: Tensor) -> Tensor:
            # whole numbers fail here, real ones in the table
            scores: Tensor = self.head(
                self.table(x[:, :3]).mean(1) + torch.nn.functional.softmax(x[:, 3:], -1)
            )
            return scores

    with pytest.raises(TaskError, match=r"x\.long\(\).*converted from uint8 to float32"):
        Federation.from_arrays([(BYTES.reshape(6, 6), Y)], Mixed)


class Bag(nn.Module):
    """Looks up the rows of words."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(50, 8), nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.last(self.table(x.long()).mean(1))
        return scores


class Positions(nn.Module):
    """Looks up rows of positions, and none of its inputs."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(6, 8), nn.Linear(6, classes)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.last(x + self.table(torch.arange(6)).mean(1))
        return scores


def make_bag(shape: tuple[int, ...], classes: int) -> nn.Module:
    return Bag(classes)


def make_positions(shape: tuple[int, ...], classes: int) -> nn.Module:
    return Positions(classes)


@pytest.mark.parametrize(("name", "is_refused"), [("make_bag", True), ("make_positions", False)])
def test_numbers_of_words_that_were_scaled_are_refused(tmp_path: Path, name: str, is_refused: bool) -> None:
    np.savez(tmp_path / "ids.npz", x=np.arange(120).reshape(20, 6) % 50, y=np.arange(20) % 3)
    fields: dict[str, Any] = {
        "data": {"source": "arrays", "path": str(tmp_path / "ids.npz")},
        "partition": {"clients": 2},
        "model": {"names": [f"{__name__}:{name}"]},
    }
    if is_refused:
        with pytest.raises(ConfigError, match=r"takes whole numbers.*data\.normalize to 'none'"):
            ExperimentConfig.parse(fields).federation()
    else:
        ExperimentConfig.parse(fields).federation()
    fields["data"]["normalize"] = "none"
    ExperimentConfig.parse(fields).federation()


@pytest.mark.parametrize("model", ["char_lstm", "char_lstm_w64"])
def test_an_experiment_whose_characters_became_pixels_is_refused(tmp_path: Path, model: str) -> None:
    fields: dict[str, Any] = {
        "data": {"source": "arrays", "path": str(tmp_path / "a.npz"), "normalize": "none"},
        "partition": {"clients": 2},
        "model": {"names": [model]},
    }
    np.savez(tmp_path / "a.npz", x=BYTES.reshape(6, 6) % 2 + 1, y=Y)
    with pytest.raises(ConfigError, match=model + r" takes the numbers of characters.*int64"):
        ExperimentConfig.parse(fields).federation()
    fields["data"]["path"] = str(tmp_path / "b.npz")
    np.savez(tmp_path / "b.npz", x=BYTES.reshape(6, 6).astype(int) % 2, y=Y)
    ExperimentConfig.parse(fields).federation()
