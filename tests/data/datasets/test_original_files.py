"""The authors' own files, read where the environment variable FEDLOWRANK_DATA says that they are."""

import pytest
import torch

from fedlowrank.data.datasets.cifar import Cifar10, Cifar100
from fedlowrank.data.datasets.cifar_names import CIFAR10
from fedlowrank.data.datasets.idx import Mnist


@pytest.mark.data
def test_real_mnist(real):
    data = Mnist(f"{real}/mnist").load()
    assert (len(data.train), len(data.test)) == (60_000, 10_000)
    assert data.train.y[:5].tolist() == [5, 0, 4, 1, 9]
    assert float(data.train.x.double().mean()) == pytest.approx(0.1307, abs=1e-4)


@pytest.mark.data
def test_real_cifar10_is_the_same_in_both_versions(real):
    binary = Cifar10(f"{real}/cifar-10-batches-bin").load()
    pickled = Cifar10(f"{real}/cifar-10-batches-py").load()
    assert (len(binary.train), len(binary.test)) == (50_000, 10_000)
    assert binary.classes == pickled.classes == CIFAR10
    for part in ("train", "test"):
        assert torch.equal(getattr(binary, part).x, getattr(pickled, part).x)
        assert torch.equal(getattr(binary, part).y, getattr(pickled, part).y)
    assert binary.train.y[:5].tolist() == [6, 9, 9, 4, 1]
    assert torch.allclose(binary.train.x.mean((0, 2, 3)), torch.tensor([0.4914, 0.4822, 0.4465]), atol=1e-3)


@pytest.mark.data
def test_real_cifar100(real):
    fine, coarse = (Cifar100(f"{real}/cifar-100-binary", labels).load() for labels in ("fine", "coarse"))
    assert len(fine.train) == len(coarse.train) >= 10_000
    assert fine.train.y.unique().tolist() == list(range(100))
    # Every fine class lies in a single coarse one, and each coarse one has five.
    pairs = set(zip(fine.train.y.tolist(), coarse.train.y.tolist(), strict=True))
    assert len(pairs) == 100
    of = {coarse.classes[c]: set() for c in range(20)}
    for f, c in pairs:
        of[coarse.classes[c]].add(fine.classes[f])
    assert of["trees"] == {"maple_tree", "oak_tree", "palm_tree", "pine_tree", "willow_tree"}
    assert of["people"] == {"baby", "boy", "girl", "man", "woman"}
