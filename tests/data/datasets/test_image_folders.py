"""Image folders of classes, and of clients and classes, beside a plain list of what was painted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.core.errors import ConfigError, DataError
from fedlowrank.data.datasets.images import Folder, image_to_array
from fedlowrank.data.describe import format_class_counts

CLIENTS = ("c1/cat/a", "c1/dog/b", "c2/cat/c", "c10/cat/d", "c10/cow/e")


def paint(root: Path, *names: str) -> None:
    for i, name in enumerate(names):
        file = root / f"{name}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (2, 2), i).save(file)


def load(
    root: Path, **more: object
) -> tuple[list[tuple[str | int, str]], list[tuple[str | int, str]] | None, str]:
    """Client and class of each image, in the order in which they were painted, and the first note."""
    data = Folder(str(root), size=2, channels=1, **more).load()  # type: ignore[arg-type]

    def rows(part: object, natural: torch.Tensor | None) -> list[tuple[str | int, str]]:
        order = torch.argsort(part.x[:, 0, 0, 0])  # type: ignore[attr-defined]
        owners = [-1] * len(order) if natural is None else natural.tolist()
        return [(owners[i], data.classes[part.y[i]]) for i in order]  # type: ignore[attr-defined]

    test = None if data.test is None else rows(data.test, data.natural_test)
    return rows(data.train, data.natural), test, data.notes[0]


@pytest.mark.parametrize("part", ["", "train/", "Training/"])
def test_clients_with_classes_of_which_some_are_missing(tmp_path: Path, part: str) -> None:
    paint(tmp_path, *(part + name for name in CLIENTS))
    (tmp_path / part / "c2" / "dog").mkdir()
    (tmp_path / part / ".cache" / "cat").mkdir(parents=True)
    paint(tmp_path / part / "c1" / "cat", ".hidden")
    train, test, note = load(tmp_path)
    # c10 after c2
    assert train == [(0, "cat"), (0, "dog"), (1, "cat"), (2, "cat"), (2, "cow")]
    assert test is None
    for text in (
        "CLIENT/CLASS/file",
        "3 clients (c1, c2, c10)",
        "3 classes (cat, cow, dog)",
        "5 images",
        "'natural'",
    ):
        assert text in note


def test_test_parts_of_all_and_of_clients(tmp_path: Path) -> None:
    paint(tmp_path / "whole", *(f"train/{name}" for name in CLIENTS), "test/c1/cat/a", "test/c2/cat/b")
    own = [name.replace("/", "/train/", 1) for name in CLIENTS]
    paint(tmp_path / "own", *own, "c1/test/cat/a", "c2/test/cat/b")
    paint(tmp_path / "shared", *(f"train/{name}" for name in CLIENTS), "test/cat/x", "test/dog/y")
    truth = [(0, "cat"), (0, "dog"), (1, "cat"), (2, "cat"), (2, "cow")]
    for name in ("whole", "own"):
        assert load(tmp_path / name)[:2] == (truth, [(0, "cat"), (1, "cat")])
    assert load(tmp_path / "shared")[:2] == (truth, [(-1, "cat"), (-1, "dog")])


@pytest.mark.parametrize(
    ("names", "classes"),
    [
        (("cat/a", "dog/b"), ["cat", "dog"]),
        (("cat/a", "cat/deep/b", "dog/c"), ["cat", "cat", "dog"]),
        (("cat/images/a", "dog/images/b"), ["cat", "dog"]),
    ],
)
def test_classes_alone(tmp_path: Path, names: tuple[str, ...], classes: list[str]) -> None:
    paint(tmp_path, *names)
    train, _, note = load(tmp_path)
    assert train == [(-1, name) for name in classes]
    assert "CLASS/file" in note
    assert "client" not in note


def test_the_setting_decides(tmp_path: Path) -> None:
    paint(tmp_path, *CLIENTS)
    assert load(tmp_path, layout="class")[0] == [(-1, name.split("/")[0]) for name in CLIENTS]
    paint(tmp_path / "x", "c1/cat/a", "c2/dog/b")
    with pytest.raises(DataError, match=r"not clear whether.*data\.layout = 'class'.*'client_class'"):
        load(tmp_path / "x")
    assert load(tmp_path / "x", layout="client_class")[0] == [(0, "cat"), (1, "dog")]
    with pytest.raises(ConfigError, match="'client_class'"):
        Folder(str(tmp_path), layout="client-class")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (
            ("c1/cat/a", "dog/b"),
            r"directly in some folders \(dog\) and deeper in others \(c1\).*data\.layout",
        ),
        (("all/cat/a", "all/dog/b"), "not clear whether"),
        (("c1/train/cat/a", "c1/test/cat/b", "c2/cat/a"), "some folders have a folder 'train', but not c2"),
        (("test/cat/a", "val/cat/b"), "no folder 'train'"),
        (("train/c1/cat/a", "train/c2/cat/b", "test/cow/c"), "lacks: 'cow'"),
        (("c1/cat/a", "c2/cat/b", "c1/dog/b", "c3/cat/.a"), "client 'c3' holds no image"),
    ],
)
def test_what_is_no_layout(tmp_path: Path, names: tuple[str, ...], says: str) -> None:
    paint(tmp_path, *names)
    with pytest.raises(DataError, match=says):
        load(tmp_path)


def test_files_that_are_no_images_or_lie_elsewhere_are_named(tmp_path: Path) -> None:
    paint(tmp_path, "cat/a", "preview")
    assert (
        "no folder of a class are not used: 1, first 'preview.png'" in Folder(str(tmp_path)).load().notes[1]
    )
    (tmp_path / "dog").mkdir()
    (tmp_path / "dog" / "a.npy").write_bytes(b"")
    with pytest.raises(
        DataError, match=r"dog.*no image \(there are files that end in \.npy\); images end in \.bmp"
    ):
        Folder(str(tmp_path)).load()


def test_an_experiment_trains_on_the_clients_and_shows_them(tmp_path: Path) -> None:
    paint(
        tmp_path,
        *(f"{client}/{name}/{i}" for client in ("a", "b") for name in ("cat", "dog") for i in range(5)),
    )
    fields = {
        "data": {"source": "folder", "path": str(tmp_path), "size": 2, "channels": 1},
        "partition": {"kind": "natural"},
        "model": {"names": ["linear"]},
    }
    made = ExperimentConfig.parse(fields).federation()
    assert [len(c.train) + len(c.val) + len(c.test) for c in made.clients] == [10, 10]
    shown = format_class_counts(made.clients, made.classes, notes=made.notes)
    assert "2 clients (a, b)" in shown


def test_images_of_16_bits_are_not_clipped(tmp_path: Path) -> None:
    values = np.array([[0, 255], [32768, 65535]], dtype=np.uint16)
    (tmp_path / "cat").mkdir()
    Image.fromarray(values).save(tmp_path / "cat" / "a.png")
    actual = Folder(str(tmp_path), size=None, channels=1).load().train.x
    assert torch.allclose(actual[0, 0], torch.from_numpy(values.astype(np.float32)) / 65535, atol=1 / 256)
    Image.fromarray(values.astype(np.float32)).save(tmp_path / "cat" / "a.tif")
    with pytest.raises(DataError, match=r"a\.tif.*32 bits"):
        Folder(str(tmp_path), size=None, channels=1).load()


@pytest.mark.parametrize(
    ("names", "unused"),
    [
        (("train/cat/a", "test/cat/b", "val/cat/c", "cat/d"), "cat, val"),
        (("train/cat/a", "cat/b"), "cat"),
        (("c1/train/cat/a", "c1/test/cat/b", "c1/val/cat/c", "c2/train/cat/d"), "c1/val"),
    ],
)
def test_folders_beside_the_parts_are_named(tmp_path: Path, names: tuple[str, ...], unused: str) -> None:
    paint(tmp_path, *names)
    notes = Folder(str(tmp_path)).load().notes
    assert [note for note in notes if note.startswith("folders") and note.endswith(f"part: {unused}")]


def test_images_are_upright(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    upright = np.random.default_rng(0).integers(0, 256, (6, 4), dtype=np.uint8)
    for orientation, stored in ((6, np.rot90(upright, 1)), (3, np.rot90(upright, 2)), (2, upright[:, ::-1])):
        exif = Image.Exif()
        exif[0x0112] = orientation
        file = tmp_path / "cat" / "a.png"
        Image.fromarray(np.ascontiguousarray(stored)).save(file, exif=exif)
        made = Folder(str(tmp_path), size=None, channels=1).load().train.inputs
        assert isinstance(made, torch.Tensor)
        np.testing.assert_array_equal((made[0, 0] * 255).round().numpy(), upright)
        with Image.open(file) as image:
            np.testing.assert_array_equal(image_to_array(image, "a")[0], upright)


def test_what_images_lose_is_said(tmp_path: Path) -> None:
    paint(tmp_path, "cat/a")
    assert len(Folder(str(tmp_path)).load().notes) == 1
    frames = [Image.new("L", (2, 2), level) for level in (0, 128, 255)]
    frames[0].save(tmp_path / "cat" / "b.gif", save_all=True, append_images=frames[1:])
    Image.new("RGBA", (2, 2), (255, 0, 0, 9)).save(tmp_path / "cat" / "c.png")
    assert Folder(str(tmp_path)).load().notes[1:] == (
        "images that have several frames, of which the first is used: 1",
        "images that have transparency, which is dropped: 1",
    )
    Image.fromarray(np.full((2, 2), 4095, np.uint16)).save(tmp_path / "cat" / "d.png")
    with pytest.warns(UserWarning, match="1 images of 16 bits have no value above 4095"):
        Folder(str(tmp_path)).load()


@pytest.mark.parametrize("layout", ["auto", "class"])
def test_a_class_may_be_called_train(tmp_path: Path, layout: str) -> None:
    paint(tmp_path / "flat", "bus/a", "car/b", "train/c")
    train, test, _ = load(tmp_path / "flat", layout=layout)
    assert (train, test) == ([(-1, "bus"), (-1, "car"), (-1, "train")], None)
    paint(tmp_path / "deep", "bus/day/a", "bus/night/b", "train/day/c", "train/night/d")
    with pytest.raises(DataError, match=r"not clear whether 'train' is the training part or a class"):
        load(tmp_path / "deep", layout=layout)


def test_an_image_beside_the_classes_of_the_training_part_makes_it_no_class(tmp_path: Path) -> None:
    paint(tmp_path, "train/cat/a", "train/dog/b", "test/cat/c", "train/overview")
    assert load(tmp_path)[0] == [(-1, "cat"), (-1, "dog")]


def test_a_class_of_a_client_may_be_called_train(tmp_path: Path) -> None:
    paint(tmp_path, "anna/bus/a", "anna/train/b", "bob/bus/c", "bob/train/d")
    train, _, _ = load(tmp_path)
    assert train == [(0, "bus"), (0, "train"), (1, "bus"), (1, "train")]
