"""Data sets saved by the library datasets are read with their splits, classes and columns."""

import sys

import numpy as np
import pytest
import torch
from PIL import Image

from fedlowrank.core.errors import ConfigError, DataError
from fedlowrank.data.datasets.huggingface import HuggingFace

datasets = pytest.importorskip("datasets")

CATS = datasets.ClassLabel(names=["cat", "dog", "cow"])


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()


@pytest.fixture
def load(tmp_path):
    def load(path, **settings):
        return HuggingFace(str(path), cache=str(tmp_path / "cache"), **settings).load()

    return load


def pictures(n, size=(5, 4)):
    pixels = np.random.default_rng(0).integers(0, 256, (n, *size, 3), dtype=np.uint8)
    kinds = datasets.Features({"image": datasets.Image(), "label": CATS, "writer": datasets.Value("string")})
    rows = {
        "image": [Image.fromarray(p) for p in pixels],
        "label": [i % 3 for i in range(n)],
        "writer": ["bo", "al"] * (n // 2),
    }
    return datasets.Dataset.from_dict(rows, features=kinds), pixels


@pytest.mark.full
def test_images_saved_to_disk(tmp_path, load):
    train, pixels = pictures(6)
    test, _ = pictures(2)
    datasets.DatasetDict({"train": train, "test": test}).save_to_disk(tmp_path / "saved")
    data = load(tmp_path / "saved", client="writer")
    assert data.name == "saved"
    assert data.classes == ("cat", "dog", "cow")
    assert torch.equal(data.train.x, torch.from_numpy(pixels.transpose(0, 3, 1, 2) / np.float32(255)))
    assert data.train.y.tolist() == [0, 1, 2, 0, 1, 2]
    assert data.natural.tolist() == [1, 0] * 3
    assert data.natural_test.tolist() == [1, 0]
    assert data.test.x.shape == (2, 3, 5, 4)
    small = load(tmp_path / "saved", size=3, channels=1)
    assert small.train.x.shape == (6, 1, 3, 3)
    assert small.natural is None


def test_a_set_without_splits_is_the_training_part(tmp_path, load):
    pictures(4)[0].save_to_disk(tmp_path / "one")
    data = load(tmp_path / "one")
    assert (len(data.train), data.test) == (4, None)


TABLE = {
    "length": [1.5, 2.0, 3.0, 4.0],
    "count": [1, 2, 3, 250],
    "kind": ["no", "yes", "yes", "no"],
    "who": [3, 3, 9, -1],
    "words": ["a", "b", "c", "d"],
}


@pytest.mark.full
@pytest.mark.parametrize("end", ["parquet", "csv", "jsonl"])
def test_tables_in_a_folder_with_a_file_for_each_split(tmp_path, load, end):
    folder = tmp_path / "tables"
    folder.mkdir()
    for split, n in (("train", 4), ("test", 2)):
        table = datasets.Dataset.from_dict({name: values[:n] for name, values in TABLE.items()})
        write = {"parquet": table.to_parquet, "csv": table.to_csv, "jsonl": table.to_json}[end]
        write(str(folder / f"{split}.{end}"))
    data = load(folder, label="kind", client="who")
    assert data.train.x.tolist() == [[1.5, 1], [2, 2], [3, 3], [4, 250]]
    assert data.test.x.tolist() == [[1.5, 1], [2, 2]]
    assert data.classes == ("no", "yes")
    assert data.train.y.tolist() == [0, 1, 1, 0]
    assert data.natural.tolist() == [3, 3, 9, -1]
    only = load(folder, label="kind", features=("count",), test_split=None)
    assert only.train.x.tolist() == [[1], [2], [3], [250]]
    assert only.test is None


@pytest.mark.parametrize("end", [".csv", ".tsv", ".json"])
def test_a_single_file(tmp_path, load, end):
    line = {".csv": "{},{}\n", ".tsv": "{}\t{}\n", ".json": '{{"a": {}, "label": {}}}\n'}[end]
    head = "" if end == ".json" else line.format("a", "label")
    (tmp_path / f"table{end}").write_text(head + "".join(line.format(i, i % 2) for i in range(3)))
    data = load(tmp_path / f"table{end}")
    assert data.train.x.tolist() == [[0], [1], [2]]
    assert data.train.y.tolist() == [0, 1, 0]
    assert data.classes == ("0", "1")


def test_columns_of_arrays(tmp_path, load):
    pixels = np.random.default_rng(0).integers(0, 256, (4, 2, 3, 3), dtype=np.uint8)
    kinds = {
        "pixels": datasets.Array3D((2, 3, 3), "uint8"),
        "row": datasets.Sequence(datasets.Value("float32")),
    }
    rows = {"pixels": list(pixels), "row": [[1.0, 2.0]] * 4, "label": [0, 1, 2, 0]}
    features = datasets.Features({**kinds, "label": CATS})
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / "arrays")
    data = load(tmp_path / "arrays", features=("pixels",))
    assert torch.equal(data.train.x, torch.from_numpy(pixels / np.float32(255)))
    assert load(tmp_path / "arrays", features=("row",)).train.x.tolist() == [[1, 2]] * 4
    with pytest.raises(DataError, match="several columns must hold single numbers"):
        load(tmp_path / "arrays", features=("pixels", "row"))
    with pytest.raises(DataError, match="no column of images or numbers"):
        load(tmp_path / "arrays")


def test_what_does_not_fit_is_named(tmp_path, load):
    train, _ = pictures(4)
    datasets.DatasetDict({"train": train, "validation": train}).save_to_disk(tmp_path / "saved")
    for given, message in (
        ({}, r"no split 'test'.*test_split to None"),
        ({"test_split": "validaton"}, r"no split 'validaton'\. Did you mean 'validation'"),
        ({"label": "lable", "test_split": None}, r"no column 'lable'\. Did you mean 'label'"),
        ({"client": "user", "test_split": None}, "no column 'user'"),
        ({"features": ("writer",), "test_split": None}, "must be numbers"),
    ):
        with pytest.raises(DataError, match=message):
            load(tmp_path / "saved", **given)
    (tmp_path / "table.xls").write_text("x")
    (tmp_path / "broken.parquet").write_text("x")
    for path, message in (
        (tmp_path / "missing", "does not exist"),
        (tmp_path / "table.xls", r"ends in none of \.parquet"),
        (tmp_path / "broken.parquet", "datasets cannot read"),
        ("no-such-owner/no-such-set", "datasets cannot read 'no-such-owner/no-such-set'"),
    ):
        with pytest.raises(DataError, match=message):
            load(path)
    with pytest.raises(ConfigError, match="channels"):
        HuggingFace("x", channels=4)


def test_missing_values_and_labels_are_refused(tmp_path, load):
    def saved(name, rows, **features):
        datasets.Dataset.from_dict(rows, features=datasets.Features(features)).save_to_disk(tmp_path / name)
        return tmp_path / name

    number, text = datasets.Value("float32"), datasets.Value("string")
    with pytest.raises(DataError, match="NaN"):
        load(saved("nan", {"a": [1.0, None], "label": [0, 1]}, a=number, label=CATS))
    with pytest.raises(DataError, match="missing values"):
        load(saved("none", {"a": [1.0, 2.0], "label": ["x", None]}, a=number, label=text))
    with pytest.raises(DataError, match="there is a -1"):
        load(saved("unlabeled", {"a": [1.0, 2.0], "label": [-1, 1]}, a=number, label=CATS))
    ragged = {"a": [[1.0], [1.0, 2.0]], "label": [0, 1]}
    path = saved("ragged", ragged, a=datasets.Sequence(number), label=CATS)
    with pytest.raises(DataError, match="different lengths"):
        load(path, features=("a",))


def test_images_of_different_sizes_need_a_size(tmp_path, load):
    kinds = datasets.Features({"image": datasets.Image(), "label": CATS})
    rows = {"image": [Image.new("L", (3, 3)), Image.new("L", (4, 3))], "label": [0, 1]}
    datasets.Dataset.from_dict(rows, features=kinds).save_to_disk(tmp_path / "sizes")
    with pytest.raises(DataError, match=r"image 1 .* is 3x4, but the first one is 3x3"):
        load(tmp_path / "sizes")
    assert load(tmp_path / "sizes", size=8).train.x.shape == (2, 3, 8, 8)


def test_without_the_library_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"pip install 'fedlowrank\[huggingface\]'"):
        HuggingFace("x").load()


def test_lists_of_numbers_are_real_targets_and_zeros_and_ones_are_noticed(tmp_path):
    rows = {"x": [1.0, 2.0, 3.0, 4.0], "label": [[0.0, 1.0], [1.0, 1.0], [1.0, 0.0], [0.0, 0.0]]}
    datasets.Dataset.from_dict(rows).save_to_disk(str(tmp_path / "own"))
    data = HuggingFace(str(tmp_path / "own")).load()
    assert data.train.y.tolist() == rows["label"]
    assert data.classes == ()
    assert any("several classes an example" in note for note in data.notes)
