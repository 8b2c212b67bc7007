"""Files of MNIST and CIFAR in their own formats give the pixels and labels that were written."""

import gzip
import pickle
import struct

import numpy as np
import pytest
import torch

from fedlowrank.core.errors import ConfigError, DataError
from fedlowrank.data.datasets.cifar import Cifar10, Cifar100
from fedlowrank.data.datasets.idx import Mnist
from fedlowrank.data.sources import SOURCES

RNG = np.random.default_rng(0)
X10 = RNG.integers(0, 256, (12, 3072), dtype=np.uint8)
Y10 = np.array([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 9], dtype=np.uint8)
NAMES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">I{array.ndim}I", 0x0800 + array.ndim, *array.shape) + array.tobytes()


def write_mnist(folder, end=".gz", dot="-"):
    folder.mkdir(parents=True, exist_ok=True)
    parts = {}
    for prefix, n in (("train", 20), ("t10k", 10)):
        x = RNG.integers(0, 256, (n, 5, 4), dtype=np.uint8)
        y = np.arange(n, dtype=np.uint8) % 10
        for kind, array in (("images", x), ("labels", y)):
            data = idx(array)
            name = f"{prefix}-{kind}{dot}idx{array.ndim}-ubyte{end}"
            (folder / name).write_bytes(gzip.compress(data) if end else data)
        parts[prefix] = x, y
    return parts


@pytest.mark.parametrize(("end", "dot"), [(".gz", "-"), ("", "-"), ("", ".")])
def test_mnist_files(tmp_path, end, dot):
    parts = write_mnist(tmp_path / "some" / "raw", end, dot)
    data = Mnist(str(tmp_path)).load()
    for prefix, part in (("train", data.train), ("t10k", data.test)):
        x, y = parts[prefix]
        assert torch.equal(part.x, torch.from_numpy(x[:, None] / np.float32(255)))
        assert part.y.tolist() == y.tolist()
    assert data.classes == tuple("0123456789")
    assert data.train.x.is_contiguous()
    assert Mnist(str(tmp_path), tuple("abcdefghij")).load().classes[0] == "a"


def test_mnist_names_what_is_wrong(tmp_path):
    for folder, message in ((tmp_path / "no", "does not exist"), (tmp_path, "no IDX files")):
        with pytest.raises(DataError, match=message):
            Mnist(str(folder)).load()
    write_mnist(tmp_path / "several" / "mnist")
    write_mnist(tmp_path / "several" / "fashion")
    with pytest.raises(DataError, match=r"'fashion', 'mnist'\. Name one"):
        Mnist(str(tmp_path / "several")).load()
    write_mnist(tmp_path, "")
    images, labels = tmp_path / "train-images-idx3-ubyte", tmp_path / "train-labels-idx1-ubyte"
    good = images.read_bytes()

    def fails(message):
        with pytest.raises(DataError, match=message):
            Mnist(str(tmp_path)).load()

    for data, message in [
        (good[:-1], "400 bytes; found 399"),
        (good + b"x", "400 bytes; found more"),
        (labels.read_bytes(), "00000803, found 00000801"),
        (good[:2], "found 0000"),
        (good[:9], "header of 16 bytes, found 9"),
        (struct.pack(">4I", 0x803, 0, 5, 4), "no images"),
        (idx(np.zeros((19, 5, 4), np.uint8)), "19 images.*20 labels"),
    ]:
        images.write_bytes(data)
        fails(message)
    images.write_bytes(good)
    labels.unlink()
    fails("not their labels")
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(np.zeros(20, np.uint8)))[:-12])
    fails("cut short")
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(b"not gzip at all")
    fails("cannot be read")


def batches():
    """Five files of two images and a test file of two."""
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    return {name: (X10[2 * i : 2 * i + 2], Y10[2 * i : 2 * i + 2]) for i, name in enumerate(names)}


def write_cifar10(folder, protocol=None):
    folder.mkdir(parents=True, exist_ok=True)
    for name, (x, y) in batches().items():
        if protocol is None:
            (folder / f"{name}.bin").write_bytes(np.concatenate([y[:, None], x], axis=1).tobytes())
        else:
            content = {b"batch_label": name.encode(), b"labels": y.tolist(), b"data": x, b"filenames": [b""]}
            (folder / name).write_bytes(pickle.dumps(content, protocol=protocol))
    if protocol is None:
        (folder / "batches.meta.txt").write_text("\n".join(NAMES) + "\n\n")
    else:
        meta = {b"label_names": [n.encode() for n in NAMES], b"num_cases_per_batch": 2}
        (folder / "batches.meta").write_bytes(pickle.dumps(meta, protocol=protocol))


def assert_cifar10(data):
    assert torch.equal(data.train.x, torch.from_numpy(X10[:10].reshape(-1, 3, 32, 32) / np.float32(255)))
    assert torch.equal(data.test.x, torch.from_numpy(X10[10:].reshape(-1, 3, 32, 32) / np.float32(255)))
    assert data.train.y.tolist() == Y10[:10].tolist()
    assert data.test.y.tolist() == Y10[10:].tolist()
    assert data.classes == tuple(NAMES)


@pytest.mark.parametrize("protocol", [None, 0, 1, 2, 3, 4, 5])
def test_cifar10_in_both_versions(tmp_path, protocol):
    write_cifar10(tmp_path / "cifar-10", protocol)
    assert_cifar10(Cifar10(str(tmp_path)).load())
    assert_cifar10(Cifar10(str(tmp_path / "cifar-10")).load())


def test_cifar10_as_python_2_wrote_it(tmp_path):
    # Protocol 2 of Python 2: text of 8 bits, old names of the modules of numpy.
    def string(data: bytes) -> bytes:
        return b"T" + struct.pack("<i", len(data)) + data

    def batch(x, y):
        shape = b"K" + bytes([len(x)]) + b"M" + struct.pack("<H", 3072) + b"\x86"
        dtype = b"cnumpy\ndtype\n" + string(b"u1") + b"K\x00K\x01\x87R(K\x03" + string(b"|")
        dtype += b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + string(b"b") + b"\x87R"
        array += b"(K\x01" + shape + dtype + b"\x89" + string(x.tobytes()) + b"tb"
        labels = b"](" + b"".join(b"K" + bytes([v]) for v in y) + b"e"
        return b"\x80\x02}(" + string(b"data") + array + string(b"labels") + labels + b"u."

    for name, (x, y) in batches().items():
        (tmp_path / name).write_bytes(batch(x, y))
    assert_cifar10(Cifar10(str(tmp_path)).load())


def test_cifar_files_that_are_cut_short(tmp_path):
    for version, protocol, end in (("bin", None, ".bin"), ("py", 2, "")):
        folder = tmp_path / version
        write_cifar10(folder, protocol)
        file = folder / f"data_batch_3{end}"
        whole = file.read_bytes()
        file.write_bytes(whole[:-100])
        message = "e.g. 6146; found 6046" if protocol is None else "not a whole pickle"
        with pytest.raises(DataError, match=message):
            Cifar10(str(folder)).load()
        file.write_bytes(b"")
        with pytest.raises(DataError, match="data_batch_3"):
            Cifar10(str(folder)).load()
        if protocol is None:
            file.write_bytes(whole[:3073])
            with pytest.raises(DataError, match=r"equally many images, not \[2, 2, 1, 2, 2\]"):
                Cifar10(str(folder)).load()
        file.unlink()
        with pytest.raises(DataError, match="no CIFAR-10 files"):
            Cifar10(str(folder)).load()


def test_cifar10_refuses_labels_out_of_range_and_wrong_contents(tmp_path):
    write_cifar10(tmp_path)
    file = tmp_path / "data_batch_1.bin"
    data = bytearray(file.read_bytes())
    data[0] = 77
    file.write_bytes(data)
    with pytest.raises(DataError, match="the first is 77"):
        Cifar10(str(tmp_path)).load()
    write_cifar10(tmp_path)
    (tmp_path / "batches.meta.txt").write_text("cat\n")
    with pytest.raises(DataError, match="expected 10 names of classes, found 1"):
        Cifar10(str(tmp_path)).load()
    (tmp_path / "batches.meta.txt").unlink()
    assert Cifar10(str(tmp_path)).load().classes == tuple(NAMES)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1, 2], "expected a dictionary, found a list"),
        ({b"data": X10[:2]}, "a list 'labels'"),
        ({b"data": X10[:2], b"labels": [1]}, "1 labels"),
        ({b"data": X10[:2].astype(np.int16), b"labels": [1, 2]}, "found int16"),
        ({b"data": X10[:2, :100], b"labels": [1, 2]}, r"\[2, 100\]"),
        ({b"data": X10[:2], b"labels": [1, b"cat"]}, "whole numbers"),
        ({b"data": X10[:2], b"labels": [1, 2**80]}, "whole numbers"),
    ],
)
def test_cifar10_pickles_of_another_form(tmp_path, content, message):
    write_cifar10(tmp_path, 2)
    (tmp_path / "data_batch_1").write_bytes(pickle.dumps(content, protocol=2))
    with pytest.raises(DataError, match=message):
        Cifar10(str(tmp_path)).load()


@pytest.mark.parametrize("version", ["bin", "py"])
def test_cifar100_has_fine_and_coarse_labels(tmp_path, version):
    fine, coarse = np.array([99, 0, 7], np.uint8), np.array([19, 0, 3], np.uint8)
    for part, n in (("train", 3), ("test", 2)):
        if version == "bin":
            records = np.concatenate([coarse[:n, None], fine[:n, None], X10[:n]], axis=1)
            (tmp_path / f"{part}.bin").write_bytes(records.tobytes())
        else:
            labels = {b"fine_labels": fine[:n].tolist(), b"coarse_labels": coarse[:n].tolist()}
            content = {b"data": X10[:n], **labels}
            (tmp_path / part).write_bytes(pickle.dumps(content, protocol=2))
    for labels, y, first in (("fine", fine, "apple"), ("coarse", coarse, "aquatic_mammals")):
        data = Cifar100(str(tmp_path), labels).load()
        assert data.train.y.tolist() == y.tolist()
        assert len(data.test) == 2
        assert torch.equal(data.train.x, torch.from_numpy(X10[:3].reshape(-1, 3, 32, 32) / np.float32(255)))
        assert data.classes[0] == first
        assert len(data.classes) == {"fine": 100, "coarse": 20}[labels]
    with pytest.raises(ConfigError, match="'coarse'"):
        Cifar100(str(tmp_path), "corse")


def test_bundled_sets():
    expected = {"digits": (1797, 1, 8, 8), "wine": (178, 13), "breast_cancer": (569, 30), "iris": (150, 4)}
    actual = {name: SOURCES[name]().load() for name in expected}
    assert {name: data.train.x.shape for name, data in actual.items()} == expected
    assert [(data.name, data.test) for data in actual.values()] == [(name, None) for name in expected]
    assert [len(data.classes) for data in actual.values()] == [10, 3, 2, 3]
    levels = actual["digits"].train.x * 16
    assert (float(levels.min()), float(levels.max())) == (0, 16)
    assert torch.equal(levels, levels.round())
