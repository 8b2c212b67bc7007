"""Reads pickled data without running code from the file.

The python version of CIFAR is a pickled dictionary, and unpickling can call anything that a file names. This reader
accepts bytes, text, numbers, lists and dictionaries, which need no calls, and the few functions by which numpy arrays
are pickled. It replaces those by its own, so a file never runs other code.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np

from ...core.errors import DataError


def unpickle(data: bytes, source: str) -> Any:
    """Read a pickle of plain data and numpy arrays.

    Args:
        data: pickle of any protocol, of Python 2 or 3; strings of Python 2 become bytes.
        source: name of the file, for messages.

    Returns:
        Dictionaries, lists, tuples, bytes, text, numbers; arrays as `PickledArray` (see its ``value``).

    Raises:
        DataError: if the pickle is damaged or names anything else; nothing that it names is called then.
    """
    try:
        return _Reader(data, source).load()
    except DataError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise DataError(f"{source} is not a whole pickle of plain data ({reason}).") from error


class PickledArray:
    """An array from a pickle; ``value`` is a read-only array of integers, floats or booleans."""

    __slots__ = ("value",)

    def __init__(self, value: np.ndarray | None = None) -> None:
        self.value = np.empty(0, dtype=np.uint8) if value is None else value

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, is_fortran, buffer = state
        self.value = _make_array(buffer, dtype, shape, "F" if is_fortran else "C")


class _PickledType:
    """The number type of an array; its state is the byte order."""

    __slots__ = ("value",)

    def __init__(self, code: str) -> None:
        self.value = np.dtype(code)

    def __setstate__(self, state: Any) -> None:
        if state[1] in ("<", ">", b"<", b">"):
            self.value = self.value.newbyteorder("<" if state[1] in ("<", b"<") else ">")


class _Reader(pickle.Unpickler):
    def __init__(self, data: bytes, source: str) -> None:
        super().__init__(io.BytesIO(data), encoding="bytes")
        self._source = source

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise DataError(
                f"{self._source} is a pickle that asks for {module}.{name}, which is no plain data; it was "
                "rejected, and nothing of it was run. Get the file from its authors."
            )
        return _ALLOWED[module, name]


class _Function:
    """A function that a pickle can call but not change: a pickle may set attributes of objects that it names."""

    __slots__ = ("_call",)
    _call: Callable[..., Any]

    def __init__(self, call: Callable[..., Any]) -> None:
        object.__setattr__(self, "_call", call)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(name)

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)


# stands for `numpy.ndarray`, which a pickle only passes on; a bare object has no attributes to set
_NDARRAY = object()


def _make_array(buffer: Any, dtype: Any, shape: Any, order: Any) -> np.ndarray:
    if not isinstance(dtype, _PickledType) or not isinstance(buffer, bytes | bytearray):
        raise ValueError("an array must hold plain numbers")
    sizes = [int(n) for n in shape]
    if min(sizes, default=0) < 0 or math.prod(sizes) * dtype.value.itemsize != len(buffer):
        raise ValueError(f"an array of {sizes} {dtype.value} has {len(buffer)} bytes")
    return np.frombuffer(buffer, dtype=dtype.value).reshape(sizes, order="F" if order in ("F", b"F") else "C")


def _reconstruct(array_type: Any, _shape: Any, _code: Any) -> PickledArray:
    """`numpy.core.multiarray._reconstruct`: an empty array, whose content follows as its state."""
    if array_type is not _NDARRAY:
        raise ValueError("an array must be a plain one")
    return PickledArray()


def _from_buffer(buffer: Any, dtype: Any, shape: Any, order: Any, axes: Any = None) -> PickledArray:
    """`numpy.core.numeric._frombuffer`: an array with its content, since protocol 5."""
    if axes is not None:
        raise ValueError("an array must be in C or Fortran order")
    return PickledArray(_make_array(buffer, dtype, shape, order))


def _make_type(code: Any, _align: Any = False, _copy: Any = True) -> _PickledType:
    """`numpy.dtype` of plain numbers."""
    text = _decode(code)
    if not isinstance(text, str) or len(text) != 2 or text[0] not in "biuf" or text[1] not in "1248":
        raise ValueError(f"an array of type {text!r} is not plain numbers")
    return _PickledType(text)


def _encode(text: Any, encoding: Any) -> bytes:
    """`_codecs.encode`: how Python 3 writes bytes in protocols below 3."""
    name = _decode(encoding)
    if not isinstance(text, str) or name not in ("latin1", "latin-1", "iso-8859-1"):
        raise ValueError(f"bytes in encoding {name!r}")
    return text.encode("latin1")


def _make_bytes(*content: Any) -> bytes:
    """`bytes` and `bytearray`: how Python 3 writes empty bytes in protocols below 3."""
    if len(content) > 1 or not all(isinstance(c, bytes | bytearray) for c in content):
        raise ValueError("bytes made from something else")
    return bytes(content[0]) if content else b""


def _decode(text: Any) -> Any:
    return text.decode("latin1") if isinstance(text, bytes) else text


_ALLOWED: dict[tuple[str, str], object] = {
    ("numpy", "ndarray"): _NDARRAY,
    ("numpy", "dtype"): _Function(_make_type),
    ("_codecs", "encode"): _Function(_encode),
    **{(m, n): _Function(_make_bytes) for m in ("__builtin__", "builtins") for n in ("bytes", "bytearray")},
    **{(f"numpy.{core}.multiarray", "_reconstruct"): _Function(_reconstruct) for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): _Function(_from_buffer) for core in ("core", "_core")},
}
