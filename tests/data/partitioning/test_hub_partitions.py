"""Partitions of Hugging Face's data sets become clients with the labels numbered over all of them."""

import numpy as np
import pytest
import torch
from PIL import Image

from fedlowrank import Federation
from fedlowrank.core.errors import ConfigError, DataError

datasets = pytest.importorskip("datasets")

KINDS = datasets.ClassLabel(names=["cat", "dog", "cow"])


class Partitioner:
    """What a partitioner of flwr-datasets offers; it has no data before the first partition is loaded."""

    def __init__(self, whole, count):
        self.whole, self.count, self.loaded = whole, count, False

    @property
    def num_partitions(self):
        assert self.loaded
        return self.count

    def load_partition(self, partition_id):
        self.loaded = True
        return self.whole.shard(self.count, partition_id, contiguous=True)


class FederatedDataset:
    """The part of ``flwr_datasets.FederatedDataset`` that is used."""

    def __init__(self, whole, count):
        self.partitioners = {"train": Partitioner(whole, count)}

    def load_partition(self, partition_id, split=None):
        return self.partitioners[split].load_partition(partition_id)


def pictures(n):
    pixels = np.random.default_rng(0).integers(0, 256, (n, 4, 5, 3), dtype=np.uint8)
    rows = {"img": [Image.fromarray(p) for p in pixels], "label": [i % 3 for i in range(n)]}
    kinds = datasets.Features({"img": datasets.Image(), "label": KINDS})
    return datasets.Dataset.from_dict(rows, features=kinds), pixels


def test_a_federated_dataset_of_images():
    whole, pixels = pictures(12)
    federation = Federation.from_partitions(
        FederatedDataset(whole, 3),
        torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(60, 3)),
        val=0,
        test=0,
    )
    assert federation.classes == ("cat", "dog", "cow")
    assert [len(c.train) for c in federation.clients] == [4, 4, 4]
    for k, client in enumerate(federation.clients):
        expected = pixels[4 * k : 4 * k + 4].transpose(0, 3, 1, 2) / np.float32(255)
        order = np.lexsort(expected.reshape(4, -1).T)
        actual = client.train.x.numpy()
        found_order = np.lexsort(actual.reshape(4, -1).T)
        np.testing.assert_array_equal(actual[found_order], expected[order])
        assert client.train.y[torch.from_numpy(found_order)].tolist() == [(4 * k + i) % 3 for i in order]


def test_text_labels_are_numbered_over_all_clients_and_splits_are_kept():
    a = datasets.Dataset.from_dict({"x": [1.0, 2.0], "kind": ["b", "b"]})
    b = datasets.Dataset.from_dict({"x": [3.0], "kind": ["a"]})
    own = datasets.DatasetDict({"train": b, "test": a})
    federation = Federation.from_partitions([a, own], torch.nn.Linear(1, 2), label="kind", val=0, test=0.5)
    assert federation.classes == ("a", "b")
    assert (federation.clients[0].train.y.tolist(), federation.clients[1].train.y.tolist()) == ([1], [0])
    assert federation.clients[1].test.x.tolist() == [[1], [2]]


@pytest.mark.parametrize("kind", [int, float, bool])
def test_several_labels_an_example_are_learnt_by_binary_cross_entropy(kind):
    x = np.random.default_rng(0).normal(size=(12, 5)).astype(np.float32)
    y = (np.random.default_rng(1).random((12, 3)) > 0.5).astype(kind)
    parts = [datasets.Dataset.from_dict({"x": x[k::2].tolist(), "label": y[k::2].tolist()}) for k in range(2)]
    model = torch.nn.Linear(5, 3)
    federation = Federation.from_partitions(parts, model, features=["x"], loss="bce", val=0, test=0)
    assert federation.classes == ()
    for k, client in enumerate(federation.clients):
        order, expected_order = (np.argsort(v[:, 0]) for v in (client.train.x.numpy(), x[k::2]))
        np.testing.assert_array_equal(client.train.x.numpy()[order], x[k::2][expected_order])
        np.testing.assert_array_equal(client.train.y.numpy()[order], y[k::2][expected_order])


@pytest.mark.parametrize(("loss", "label"), [("bce", [0, 1]), ("mse", [3, 7]), ("auto", [0.5, 2.0])])
def test_numbers_are_the_target_of_one_output(loss, label):
    part = datasets.Dataset.from_dict({"x": [1.0, 2.0], "label": label})
    model = torch.nn.Linear(1, 1)
    federation = Federation.from_partitions([part], model, loss=loss, val=0, test=0)
    train = federation.clients[0].train
    rows = sorted(zip(train.x[:, 0].tolist(), train.y[:, 0].tolist(), strict=True))
    assert rows == [(1.0, label[0]), (2.0, label[1])]


def test_it_names_what_is_wrong():
    a = datasets.Dataset.from_dict({"x": [1.0, 2.0], "label": [0, 1]})
    several = datasets.Dataset.from_dict({"x": [1.0], "label": [[0, 1]]})
    model = torch.nn.Linear(1, 2)
    for given, settings, message in (
        ([a, 3], {}, "client 1: expected a datasets.Dataset, not a int"),
        (a, {}, "one for each client"),
        ({"train": a}, {}, "one for each client, or a FederatedDataset"),
        ([], {}, "at least one partition"),
        ([a], {"label": "lable"}, "Did you mean 'label'"),
        ([several], {}, "'label' holds lists of whole numbers, int64 \\[1, 2\\]. .* set loss='bce'"),
        ([datasets.DatasetDict({"train": a, "valid": a})], {}, "not \\['valid'\\]"),
        (FederatedDataset(a, 2), {"split": "test"}, "no partitioner of 'test'"),
    ):
        with pytest.raises(DataError, match=message):
            Federation.from_partitions(given, model, **settings)


def test_a_transform_is_applied_once_to_each_example():
    whole, pixels = pictures(12)

    def normalize(batch):
        batch["img"] = [torch.from_numpy(np.array(v)).permute(2, 0, 1) / 128 - 1 for v in batch["img"]]
        return batch

    federation = Federation.from_partitions(
        [whole.with_transform(normalize)] * 2,
        torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(60, 3)),
        val=0,
        test=0,
    )
    examples = federation.clients[0].train
    assert federation.classes == ("cat", "dog", "cow")
    expected = torch.from_numpy(pixels).permute(0, 3, 1, 2) / 128 - 1
    assert torch.equal(ordered(examples.x), ordered(expected))


def ordered(x):
    """Examples in an order that the division of a client's data does not change."""
    return torch.tensor(sorted(x.flatten(1).tolist()))


def test_a_transform_of_numbers_and_labels_is_that_of_the_rows():
    rows = datasets.Dataset.from_dict({"a": [float(i) for i in range(8)], "label": [i % 2 for i in range(8)]})
    part = rows.cast_column("label", datasets.ClassLabel(names=["no", "yes"])).with_transform(
        lambda batch: {"a": [-v for v in batch["a"]], "label": [2 - v for v in batch["label"]]}
    )
    federation = Federation.from_partitions([part], torch.nn.Linear(1, 3), val=0, test=0)
    order = federation.clients[0].train.x[:, 0].argsort(descending=True)
    assert federation.clients[0].train.x[order, 0].tolist() == [part[i]["a"] for i in range(8)]
    assert federation.clients[0].train.y[order].tolist() == [part[i]["label"] for i in range(8)]
    # other labels than the stored ones, which have the names
    assert federation.classes == ("0", "1", "2")


def test_random_transforms_follow_the_seed():
    whole, _ = pictures(6)

    def crop(batch):
        return {"pixels": [torch.rand(3) for _ in batch["img"]], "label": batch["label"]}

    def read(seed):
        state = torch.get_rng_state()
        made = Federation.from_partitions(
            [whole.with_transform(crop)] * 2,
            lambda: torch.nn.Linear(3, 3),
            features=["pixels"],
            seed=seed,
            val=0,
            test=0,
        )
        assert torch.equal(torch.get_rng_state(), state)
        return [ordered(client.train.x) for client in made.clients]

    first, again, other = read(0), read(0), read(1)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[0], other[0])


def test_transforms_that_cannot_be_read_are_named():
    whole, _ = pictures(6)
    model = torch.nn.Linear(3, 3)

    def fail(batch):
        raise ValueError("no such file")

    with pytest.raises(DataError, match=r"transform .* fails at example 0: ValueError: no such file"):
        Federation.from_partitions([whole.with_transform(fail)], model)
    with pytest.raises(DataError, match="no column 'label'"):
        Federation.from_partitions([whole.with_transform(lambda b: {"x": [1.0 for _ in b["img"]]})], model)
    with pytest.raises(ConfigError, match=r"features: a list is needed, such as \['img'\]"):
        Federation.from_partitions([whole], model, features="img")


@pytest.mark.parametrize("form", ["torch", "numpy"])
def test_the_format_of_a_data_set_does_not_change_its_images(form):
    whole, pixels = pictures(6)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(60, 3))
    federation = Federation.from_partitions([whole.with_format(form)], model, val=0, test=0)
    expected = torch.from_numpy(pixels.transpose(0, 3, 1, 2) / np.float32(255))
    assert torch.equal(ordered(federation.clients[0].train.x), ordered(expected))
