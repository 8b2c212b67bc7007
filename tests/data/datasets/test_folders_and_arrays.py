"""Image folders and array files are read as they lie; a damaged one is named."""

import sys

import numpy as np
import pytest
import torch
from PIL import Image

from fedlowrank import Federation
from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.core.errors import ConfigError, DataError
from fedlowrank.data.arrays import Arrays
from fedlowrank.data.datasets.images import Folder

X = np.arange(24, dtype=np.float64).reshape(4, 6)
Y = np.array([0, 1, 1, 2])


def paint(file, color, size=(4, 4), mode="RGB"):
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, color).save(file)


def test_folder_with_parts(tmp_path):
    paint(tmp_path / "train" / "dog" / "a.png", (255, 0, 0))
    paint(tmp_path / "train" / "cat" / "deep" / "b.PNG", (0, 51, 0))
    paint(tmp_path / "train" / "cat" / "c.jpg", (0, 0, 0))
    (tmp_path / "train" / "cat" / "notes.txt").write_text("not an image")
    paint(tmp_path / "val" / "dog" / "a.png", (0, 0, 255))
    data = Folder(str(tmp_path), size=8).load()
    assert data.classes == ("cat", "dog")
    assert data.train.y.tolist() == [0, 0, 1]
    assert data.train.x.shape == (3, 3, 8, 8)
    assert data.train.x[:, :, 0, 0].tolist() == [[0, 0, 0], [0, pytest.approx(0.2), 0], [1, 0, 0]]
    assert data.test.y.tolist() == [1]
    assert data.test.x[0, :, 3, 3].tolist() == [0, 0, 1]
    paint(tmp_path / "val" / "cow" / "a.png", 0)
    with pytest.raises(DataError, match="lacks: 'cow'"):
        Folder(str(tmp_path)).load()


def test_folder_of_one_level_in_gray(tmp_path):
    paint(tmp_path / "x" / "1.png", 51, (5, 3), "L")
    paint(tmp_path / "y" / "2.png", 255, (5, 3), "L")
    data = Folder(str(tmp_path), size=None, channels=1).load()
    assert data.test is None
    assert data.train.x.shape == (2, 1, 3, 5)
    assert data.train.x[0].unique().tolist() == [pytest.approx(0.2)]
    Image.fromarray(np.array([[0, 100], [200, 20]], dtype=np.uint8)).save(tmp_path / "x" / "1.png")
    resized = Folder(str(tmp_path), size=1, channels=1).load()
    assert resized.train.x.flatten().tolist() == [pytest.approx(80 / 255), 1]
    paint(tmp_path / "x" / "1.png", 51, (5, 3), "L")
    paint(tmp_path / "y" / "3.png", 255, (5, 4), "L")
    with pytest.raises(DataError, match=r"3\.png.* is 4x5, but the first one is 3x5"):
        Folder(str(tmp_path), size=None, channels=1).load()


def test_folder_names_what_is_wrong(tmp_path):
    with pytest.raises(DataError, match="no folder for any class"):
        Folder(str(tmp_path)).load()
    (tmp_path / "cat").mkdir()
    with pytest.raises(DataError, match="holds no image"):
        Folder(str(tmp_path)).load()
    paint(tmp_path / "cat" / "a.png", 0, (64, 64))
    whole = (tmp_path / "cat" / "a.png").read_bytes()
    for broken in (b"", b"no image", whole[:60], whole[:30]):
        (tmp_path / "cat" / "a.png").write_bytes(broken)
        with pytest.raises(DataError, match=r"a\.png.* cannot be decoded"):
            Folder(str(tmp_path)).load()
    with pytest.raises(ConfigError, match="channels"):
        Folder(str(tmp_path), channels=2)
    with pytest.raises(ConfigError, match="size"):
        Folder(str(tmp_path), size=0)


def test_folder_without_pillow_says_what_to_install(tmp_path, monkeypatch):
    paint(tmp_path / "cat" / "a.png", 0)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(DataError, match=r"pip install 'fedlowrank\[images\]'"):
        Folder(str(tmp_path)).load()


def save(tmp_path, **arrays) -> str:
    np.savez(tmp_path / "toy.npz", **arrays)
    return str(tmp_path / "toy.npz")


def test_arrays_with_parts_and_clients(tmp_path):
    clients = {"client_train": np.array(["bo", "al", "bo", "cy"]), "client_test": np.array(["cy", "bx"])}
    more = {"classes": np.array(["a", "b", "c", "d"]), "writers": np.array([1.5])}
    parts = {"x_train": X, "y_train": Y, "x_test": X[:2], "y_test": Y[:2]}
    data = Arrays(save(tmp_path, **parts, **clients, **more)).load()
    assert data.name == "toy"
    assert torch.equal(data.train.x, torch.from_numpy(X).float())
    assert data.natural.tolist() == [1, 0, 1, 3]
    assert data.natural_test.tolist() == [3, 2]
    assert data.classes == ("a", "b", "c", "d")


def test_arrays_with_text_labels(tmp_path):
    ids = np.array([7, -1, 7, 3])
    data = Arrays(save(tmp_path, x=X, y=np.array(["no", "yes", "no", "no"]), client=ids)).load()
    assert (data.classes, data.test) == (("no", "yes"), None)
    assert data.train.y.tolist() == [0, 1, 0, 0]
    assert data.natural.tolist() == ids.tolist()
    # numbered over both parts
    train, test = np.array(["b", "c"]), np.array(["c", "a"])
    data = Arrays(save(tmp_path, x_train=X[:2], y_train=train, x_test=X[2:], y_test=test)).load()
    assert data.classes == ("a", "b", "c")
    assert (data.train.y.tolist(), data.test.y.tolist()) == ([1, 2], [2, 0])


def dense(tmp_path, y, **partition) -> Federation:
    x = np.arange(12 * 4, dtype=np.float32).reshape(12, 1, 2, 2)
    (tmp_path / "own_pixels.py").write_text(
        "from torch import nn\ndef net(shape, classes):\n    return nn.Conv2d(shape[0], classes or 1, 1)\n"
    )
    tables = {
        "method": "fedavg",
        "data": {"source": "arrays", "path": save(tmp_path, x=x, y=y), "normalize": "none"},
        "partition": {"kind": "iid", "clients": 2, **partition},
        "model": {"names": ["own_pixels:net"]},
    }
    return ExperimentConfig.parse(tables).federation()


def test_labels_of_pixels(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    y = np.random.default_rng(0).integers(-1, 3, (12, 2, 2))
    y[0, 0, 0] = 2
    made = dense(tmp_path, y)
    assert made.classes == ("0", "1", "2")
    actual = {}
    for client in made.clients:
        for part in (client.train, client.val, client.test):
            # the first pixel of an example says which it is
            actual |= {int(x[0, 0, 0]) // 4: label.tolist() for x, label in zip(part.x, part.y, strict=True)}
    assert actual == dict(enumerate(y.tolist()))
    with pytest.raises(DataError, match=r"labels of pixels or tokens.*'iid' or 'natural'"):
        dense(tmp_path, y, kind="dirichlet", alpha=0.5)


def test_a_real_number_for_each_pixel(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    y = np.random.default_rng(0).random((12, 1, 2, 2)).astype(np.float32)
    made = dense(tmp_path, y)
    assert made.classes == ()
    parts = [part.y for c in made.clients for part in (c.train, c.val, c.test)]
    assert sorted(torch.cat(parts).flatten().tolist()) == sorted(y.flatten().tolist())


def test_arrays_in_other_layouts(tmp_path):
    image = np.random.default_rng(0).integers(0, 256, (4, 5, 6, 3), dtype=np.uint8)
    data = Arrays(save(tmp_path, x=image, y=Y), "hwc").load()
    assert torch.equal(data.train.x, torch.from_numpy(image.transpose(0, 3, 1, 2) / np.float32(255)))
    assert data.train.x.is_contiguous()
    data = Arrays(save(tmp_path, x=image[..., 0], y=Y), "hw").load()
    assert data.train.x.shape == (4, 1, 5, 6)
    with pytest.raises(DataError, match="needs 4 axes"):
        Arrays(save(tmp_path, x=X, y=Y), "hwc").load()
    with pytest.raises(ConfigError, match="'hwc'"):
        Arrays("x", "hwcc")


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": X}, "lacks the array 'y'"),
        ({"x_train": X}, "lacks the array 'y_train'"),
        ({"x_train": X, "y_train": Y, "x_test": X}, "lacks the array 'y_test'"),
        ({"x": X, "y": Y[:3]}, "3 labels.*4 examples"),
        ({"x": X, "y": Y - 1}, "there is a -1"),
        ({"x": X, "y": Y * 10**9}, "there is a 2000000000, and only 4 labels.*return_inverse"),
        ({"x": X, "y": Y / 1.0}, "whole numbers"),
        ({"x": X, "y": Y[:, None]}, r"give labels \[n\]"),
        ({"x": X.astype("U3"), "y": Y}, "must be numbers"),
        ({"x": X * 1j, "y": Y}, "must be numbers"),
        ({"x": X + np.inf, "y": Y}, "infinity"),
        ({"x": X * 1e300, "y": Y}, "beyond the range of float32 in 'x' .*, 1e[+]300, in 4 of 4 examples"),
        ({"x": X, "y": X * 1e39}, "beyond the range of float32 in the targets in .*, 1e[+]39, in 4 of 4"),
        ({"x": X[:0], "y": Y[:0]}, "empty"),
        ({"x": X, "y": Y, "client": Y / 1.0}, "client ids"),
        ({"x": X, "y": Y, "clients": Y}, "unknown array 'clients'. Did you mean 'client'"),
        ({"x_train": X, "y_train": Y, "client": Y, "client_train": Y}, "both"),
        ({"x": X, "y": Y, "classes": np.array(["a"])}, "go up to 2"),
        ({"x": np.array([{}] * 4, dtype=object), "y": Y}, "plain arrays"),
    ],
)
def test_arrays_name_what_is_wrong(tmp_path, arrays, message):
    with pytest.raises(DataError, match=message):
        Arrays(save(tmp_path, **arrays)).load()


def test_labels_that_do_not_begin_at_0_are_noted(tmp_path):
    (note,) = Arrays(save(tmp_path, x=X, y=Y + 1)).load().notes
    assert "smallest label is 1" in note
    assert Arrays(save(tmp_path, x=X, y=Y)).load().notes == ()
    assert Arrays(save(tmp_path, x=X, y=Y + 1, classes=np.array(list("abcd")))).load().notes == ()


def test_arrays_in_damaged_files(tmp_path):
    path = tmp_path / "toy.npz"
    whole = (save(tmp_path, x=X, y=Y), path.read_bytes())[1]
    for data in (b"", b"nothing", whole[: len(whole) // 2], whole[:150] + b"\0" * 60 + whole[210:]):
        path.write_bytes(data)
        with pytest.raises(DataError, match=r"cannot be read as an \.npz file"):
            Arrays(str(path)).load()
    np.save(tmp_path / "single.npy", X)
    with pytest.raises(DataError, match="a single array"):
        Arrays(str(tmp_path / "single.npy")).load()
    with pytest.raises(DataError, match=f"^there is no file '{tmp_path}/missing.npz'"):
        Arrays(str(tmp_path / "missing.npz")).load()
