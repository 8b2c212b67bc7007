"""Pickles of data sets are read without running code, and malicious ones are refused."""

import os
import pickle

import numpy as np
import pytest

from fedlowrank.core.errors import DataError
from fedlowrank.data.datasets.cifar import Cifar100
from fedlowrank.data.download.unpickle import PickledArray, unpickle

PIXELS = np.arange(40, dtype=np.uint8).reshape(1, 40)


class Calls:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize(
    ("function", "name"), [(os.system, "(posix|nt).system"), (eval, "(__builtin__|builtins).eval")]
)
def test_a_malicious_pickle_is_refused_and_does_nothing(tmp_path, function, name, protocol):
    mark = tmp_path / "executed"
    argument = f"touch {mark}" if function is os.system else f"open({str(mark)!r}, 'w').close()"
    data = pickle.dumps({b"data": Calls(function, argument), b"labels": [1]}, protocol=protocol)
    for part in ("train", "test"):
        (tmp_path / part).write_bytes(data)
    with pytest.raises(DataError, match=name):
        Cifar100(str(tmp_path)).load()
    assert not mark.exists()
    # The same bytes do run under pickle itself: what is refused here is a real attack.
    pickle.loads(data)  # noqa: S301
    assert mark.exists()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("numpy", "load"),
        ("numpy.core.multiarray", "scalar"),
        ("numpy", "ndarray.tofile"),
        ("builtins", "getattr"),
        ("builtins", "bytes.fromhex"),
        ("functools", "partial"),
        ("_codecs", "decode"),
    ],
)
def test_names_near_the_known_ones_are_refused(module, name):
    data = b"\x80\x04" + b"".join(b"\x8c" + bytes([len(s)]) + s.encode() for s in (module, name)) + b"\x93."
    with pytest.raises(DataError, match=f"{module}.{name}"):
        unpickle(data, "it")


def test_a_pickle_cannot_change_the_reader():
    # GLOBAL, then BUILD with a state for __setattr__: would change what later pickles meet.
    for name in (b"cnumpy\nndarray\n", b"c_codecs\nencode\n", b"cnumpy\ndtype\n"):
        for attribute in (b"a", b"_call"):
            state = b"N}X" + bytes([len(attribute), 0, 0, 0]) + attribute + b"K\x01s\x86b."
            with pytest.raises(DataError, match="not a whole pickle"):
                unpickle(b"\x80\x02" + name + state, "it")


@pytest.mark.parametrize(
    "array",
    [np.array([{}], dtype=object), np.array(["text"]), np.zeros(2, dtype=[("a", "i4")]), np.array([1j])],
)
def test_arrays_that_are_not_plain_numbers_are_refused(array):
    for protocol in (2, 5):
        with pytest.raises(DataError, match=r"it is (not a whole pickle|a pickle that asks)"):
            unpickle(pickle.dumps(array, protocol=protocol), "it")


@pytest.mark.parametrize(
    "array", [np.arange(6, dtype=">i4").reshape(2, 3), np.arange(6.0).reshape(2, 3).T, np.array([], np.uint8)]
)
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_arrays_come_back(array, protocol):
    actual = unpickle(pickle.dumps([array, b"", bytearray(b"a"), "text", 1.5], protocol=protocol), "it")
    assert isinstance(actual[0], PickledArray)
    assert actual[0].value.dtype == array.dtype
    assert np.array_equal(actual[0].value, array)
    assert [bytes(actual[1]), bytes(actual[2]), actual[3], actual[4]] == [b"", b"a", "text", 1.5]


def test_damaged_pickles_raise_nothing_but_data_errors():
    good = pickle.dumps({b"data": PIXELS, b"labels": [1, 2], b"n": 2**70}, protocol=2)
    rng = np.random.default_rng(1)
    refused = 0
    for _ in range(1500):
        data = bytearray(good)
        for at in rng.integers(0, len(data), rng.integers(1, 4)):
            data[at] = rng.integers(0, 256)
        try:
            unpickle(bytes(data[: rng.integers(1, len(data) + 1)]), "it")
        except DataError:
            refused += 1
    assert refused > 500
