"""Concepts: every cluster sees its own images or labels, in all three parts, and nothing else changes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.core.errors import ConfigError, DataError
from fedlowrank.core.key import Key
from fedlowrank.data.augment import Augment
from fedlowrank.data.clients import make_clients
from fedlowrank.data.dataset import ClientData, Dataset, Examples
from fedlowrank.data.partitioning.concept import (
    Concept,
    LabelShift,
    NaturalClusters,
    Rotation,
    apply_concept,
    rotate_images,
)
from fedlowrank.data.partitioning.partition import Dirichlet, Iid, LabelGroups, Natural
from fedlowrank.data.partitioning.split import WholeTest


def images(n: int, side: int = 4, channels: int = 2, seed: int = 0) -> torch.Tensor:
    return torch.rand(n, channels, side, side, generator=torch.Generator().manual_seed(seed))


def client(seed: int = 0, side: int = 4) -> ClientData:
    x, y = images(9, side, seed=seed), torch.arange(9) % 5
    return ClientData(Examples(x[:4], y[:4]), Examples(x[4:6], y[4:6]), Examples(x[6:], y[6:]), ("a note",))


def parts(data: ClientData) -> list[Examples]:
    return [data.train, data.val, data.test]


@pytest.mark.full
@given(st.integers(1, 9), st.sampled_from([1, 2, 4]))
def test_all_parts_of_client_k_are_turned_as_cluster_k_mod_c(number: int, clusters: int) -> None:
    before = [client(k) for k in range(number)]
    after = apply_concept(Rotation(clusters), before, 5)
    for k, (old, new) in enumerate(zip(before, after, strict=True)):
        turns = k % clusters * 4 // clusters
        assert new.quarter_turns == turns
        assert new.notes == old.notes
        for a, b in zip(parts(old), parts(new), strict=True):
            assert np.array_equal(np.rot90(a.x.numpy(), turns, (2, 3)), b.x.numpy())
            assert b.x.is_contiguous()
            assert torch.equal(a.y, b.y)


@given(st.integers(1, 12), st.integers(1, 5))
def test_labels_of_all_parts_are_shifted_and_images_kept(number: int, clusters: int) -> None:
    before = [client(k) for k in range(number)]
    for k, (old, new) in enumerate(zip(before, apply_concept(LabelShift(clusters), before, 5), strict=True)):
        assert new.quarter_turns == 0
        shift = k % clusters
        assert new.notes == ("a note" + (f" (before labels were shifted by {shift})" if shift else ""),)
        for a, b in zip(parts(old), parts(new), strict=True):
            assert b.y.tolist() == [(y + shift) % 5 for y in a.y.tolist()]
            assert torch.equal(a.x, b.x)


@pytest.mark.parametrize("concept", [Concept(), NaturalClusters(3)])
def test_other_concepts_change_nothing(concept: Concept) -> None:
    before = [client(k) for k in range(4)]
    for old, new in zip(before, apply_concept(concept, before, 5), strict=True):
        assert all(a is b for a, b in zip(parts(old), parts(new), strict=True))
    clusters = [None] * 4 if type(concept) is Concept else [0, 1, 2, 0]
    assert [concept.cluster(k) for k in range(4)] == clusters


# Other angles


@pytest.mark.parametrize(("height", "width"), [(5, 5), (6, 6), (4, 7)])
def test_bilinear_turns_agree_with_the_pixels_summed_by_hand(height: int, width: int) -> None:
    x = torch.rand(2, 3, height, width, generator=torch.Generator().manual_seed(0))
    angle, fill = 0.7, -0.5
    actual = rotate_images(x, angle, fill).numpy()
    pixels, expected = x.numpy().astype(np.float64), np.zeros(x.shape)
    cos, sin = np.cos(angle), np.sin(angle)
    for i in range(height):
        for j in range(width):
            # right and up from the center; an image turned counter-clockwise shows what lay clockwise
            right, up = j - (width - 1) / 2, (height - 1) / 2 - i
            column = cos * right + sin * up + (width - 1) / 2
            row = (height - 1) / 2 - (cos * up - sin * right)
            for r in (int(np.floor(row)), int(np.floor(row)) + 1):
                for c in (int(np.floor(column)), int(np.floor(column)) + 1):
                    weight = (1 - abs(row - r)) * (1 - abs(column - c))
                    inside = 0 <= r < height and 0 <= c < width
                    expected[:, :, i, j] += weight * (pixels[:, :, r, c] if inside else fill)
    assert np.allclose(actual, expected, atol=1e-5)


def test_with_eight_clusters_every_second_turn_is_exact() -> None:
    data = client(side=5)
    after = apply_concept(Rotation(8, fill=2.0), [data] * 8, 5)
    x = data.train.x
    for c, new in enumerate(after):
        assert new.quarter_turns == (0 if c % 2 else c // 2)
        assert torch.equal(
            new.train.x, rotate_images(x, c * np.pi / 4, 2.0) if c % 2 else torch.rot90(x, c // 2, (2, 3))
        )
    assert after[1].train.x[0, 0, 0, 0] > 1.2  # a corner comes mostly from outside
    assert len(rotate_images(x[:0], 1.0, 0.0)) == 0


# With augmentation


@given(st.integers(0, 3), st.integers(0, 2**20))
def test_a_turned_image_is_mirrored_as_the_upright_one_would_be(turns: int, seed: int) -> None:
    x = images(6)
    flip = Augment(flip=True)
    upright = flip.apply(x, torch.Generator().manual_seed(seed))
    turned = flip.apply(torch.rot90(x, turns, (2, 3)), torch.Generator().manual_seed(seed), turns)
    assert torch.equal(turned, torch.rot90(upright, turns, (2, 3)))


# Through make_clients and an experiment


def test_clients_of_one_cluster_go_on_sharing_the_whole_test_part() -> None:
    train, test = Examples(images(24), torch.arange(24) % 3), Examples(images(6, seed=1), torch.arange(6) % 3)
    dataset = Dataset("toy", train, test, ("a", "b", "c"))
    clients = apply_concept(Rotation(4), make_clients(dataset, Iid(8), WholeTest(0.0), Key((0,))), 3)
    assert [c.test.x.data_ptr() for c in clients[:4]] == [c.test.x.data_ptr() for c in clients[4:]]
    assert clients[0].test.x.data_ptr() == dataset.test.x.data_ptr()
    assert len({c.test.x.data_ptr() for c in clients}) == 4
    assert torch.equal(dataset.test.x, images(6, seed=1))


DIGITS = """
[data]
source = "digits"
[partition]
kind = "iid"
clients = 6
[model]
names = ["mlp"]
hidden = [5]
[concept]
kind = "rotation"
clusters = 4
"""


def load(folder, text: str, *overrides: str) -> ExperimentConfig:
    (folder / "e.toml").write_text(text)
    return ExperimentConfig.read(folder / "e.toml", overrides)


@pytest.mark.full
def test_a_federation_knows_its_clusters_and_holds_turned_digits(tmp_path) -> None:
    made = load(tmp_path, DIGITS)
    turned, plain = made.federation(), load(tmp_path, DIGITS, "concept.kind=none").federation()
    assert [i.cluster for i in turned.infos] == [0, 1, 2, 3, 0, 1]
    assert [r["cluster"] for r in turned.describe()] == [0, 1, 2, 3, 0, 1]
    assert [i.cluster for i in plain.infos] == [None] * 6
    assert all("cluster" not in r for r in plain.describe())
    for k, (a, b) in enumerate(zip(plain.clients, turned.clients, strict=True)):
        assert b.quarter_turns == k % 4
        for old, new in zip(parts(a), parts(b), strict=True):
            assert np.array_equal(np.rot90(old.x.numpy(), k % 4, (2, 3)), new.x.numpy())
    assert made.describe()["concept"] == {"kind": "rotation"}


# What is refused


def test_images_that_a_quarter_turn_would_reshape_are_refused() -> None:
    wide = Examples(torch.zeros(2, 1, 4, 6), torch.tensor([0, 1]))
    with pytest.raises(DataError, match="4×6 into 6×4"):
        Rotation(4).transform(wide, 1, 2)
    assert Rotation(2).transform(wide, 1, 2).x.shape == (2, 1, 4, 6)
    for x in (torch.zeros(2, 5), {"ids": torch.zeros(2, 5)}):
        for cluster in range(2):
            with pytest.raises(DataError, match="needs images"):
                Rotation(4).transform(Examples(x, torch.tensor([0, 1])), cluster, 2)


def test_label_shift_refuses_a_regression_and_clusters_that_would_be_equal() -> None:
    with pytest.raises(DataError, match="regression"):
        LabelShift(2).transform(Examples(torch.zeros(2, 1), torch.zeros(2, 3)), 0, 0)
    with pytest.raises(DataError, match="6 clusters cannot all differ with 5 classes"):
        LabelShift(6).transform(client().train, 0, 5)
    assert LabelShift(5).transform(client().train, 4, 5).y.tolist() == [4, 0, 1, 2]


def test_settings_that_contradict_each_other_are_refused_before_data_are_read(tmp_path) -> None:
    for kind in (Rotation, LabelShift, NaturalClusters):
        with pytest.raises(ConfigError, match=r"concept\.clusters"):
            kind(0)
    with pytest.raises(ConfigError, match=r"concept\.fill"):
        Rotation(fill=float("nan"))
    for clusters, degrees in ((3, 120), (8, 45)):
        with pytest.raises(ConfigError, match=f"{degrees} degrees"):
            load(tmp_path, DIGITS, f"concept.clusters={clusters}", "augment.flip=true")
    for clusters in (1, 2, 4):
        load(tmp_path, DIGITS, f"concept.clusters={clusters}", "augment.flip=true")
    load(tmp_path, DIGITS, "concept.clusters=3", "augment.crop=1")
    for wrong, message in (("kind=rotatoin", "rotation"), ("cluster=3", r"concept\.cluster")):
        with pytest.raises(ConfigError, match=message):
            load(tmp_path, DIGITS, f"concept.{wrong}")


def test_natural_clusters_go_only_where_clients_differ_by_k_mod_c() -> None:
    concept, plain = NaturalClusters(5), Augment()
    concept.check(LabelGroups(5, 20), plain)
    concept.check(Natural(), plain)
    for partition, message in (
        (LabelGroups(10, 20), r"partition\.groups = 10"),
        (Natural(3), r"partition\.clients"),
        (Natural(min_examples=2), r"min_examples"),
        (Iid(5), "label_groups"),
        (Dirichlet(5), "label_groups"),
    ):
        with pytest.raises(ConfigError, match=message):
            concept.check(partition, plain)


def with_pixel_labels(side: int = 4) -> ClientData:
    """Images whose pixels have labels: 1 where the first channel is above a half, and -1 where there is no label."""
    x = images(6, side)
    y = (x[:, 0] > 0.5).long()
    y[:, 0, 0] = -1
    return ClientData(Examples(x[:3], y[:3]), Examples(x[3:4], y[3:4]), Examples(x[4:], y[4:]))


def test_labels_of_pixels_turn_with_their_image() -> None:
    for k, new in enumerate(apply_concept(Rotation(4), [with_pixel_labels()] * 4, 2)):
        for part in parts(new):
            counts = part.y >= 0
            assert torch.equal((part.inputs[:, 0] > 0.5)[counts], part.y[counts] == 1), k
            assert (~counts).sum() == len(part)
    with pytest.raises(DataError, match=r"labels of their pixels have no place.*1, 2 or 4"):
        apply_concept(Rotation(3), [with_pixel_labels()] * 3, 2)


def test_a_label_that_does_not_count_is_not_shifted() -> None:
    old, new = apply_concept(LabelShift(2), [with_pixel_labels()] * 2, 2)
    for before, after in zip(parts(old), parts(new), strict=True):
        assert torch.equal(before.y < 0, after.y < 0)
        assert torch.equal(after.y[after.y >= 0], 1 - before.y[before.y >= 0])
