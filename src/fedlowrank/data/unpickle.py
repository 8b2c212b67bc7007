"""Reading pickled data without running what a pickle may hold.

The python version of CIFAR is a pickled dictionary, and unpickling can call anything that a file names. This reader
knows bytes, text, numbers, lists and dictionaries, which need no calls at all, and the few functions through which
numpy arrays are pickled; it replaces those by its own, so that no code is found by a name from the file.
"""

from __future__ import annotations

import io
import math
import pickle
from typing import Any

import numpy as np

from ..core.errors import DataError

_ENCODINGS = {"latin1", "latin-1", "iso-8859-1"}


def unpickle(data: bytes, where: str) -> Any:
    """The content of a pickle of plain data and numpy arrays.

    Args:
        data: a pickle of any protocol, of Python 2 or 3; strings of Python 2 become bytes.
        where: what is read, for messages.

    Returns:
        Dictionaries, lists, tuples, bytes, text, numbers; arrays as `PickledArray` (see its ``value``).

    Raises:
        DataError: if the pickle names anything else, in which case nothing of it has been called, or is damaged.
    """
    try:
        return _Reader(data, where).load()
    except DataError:
        raise
    # A damaged or hostile stream of opcodes can make the unpickler fail in any of these ways.
    except (
        pickle.UnpicklingError,
        ArithmeticError,
        AssertionError,
        AttributeError,
        EOFError,
        ImportError,
        LookupError,
        MemoryError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
        raise DataError(f"{where} is not a whole pickle of plain data ({type(error).__name__}: {error}).") from error


class PickledArray:
    """An array on its way out of a pickle.

    Attributes:
        value: the array, of a type of fixed size (numbers or bytes); not writable.
    """

    __slots__ = ("value",)

    def __init__(self, value: np.ndarray | None = None) -> None:
        self.value = np.empty(0, dtype=np.uint8) if value is None else value

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, fortran, raw = state
        self.value = _array(raw, dtype, shape, "F" if fortran else "C")


class _Dtype:
    """A number type on its way out of a pickle; only the plain kinds are known."""

    __slots__ = ("value",)

    def __init__(self, code: str) -> None:
        self.value = np.dtype(code)

    def __setstate__(self, state: Any) -> None:
        if state[1] in ("<", ">", b"<", b">"):
            self.value = self.value.newbyteorder("<" if state[1] in ("<", b"<") else ">")


def _array(raw: Any, dtype: Any, shape: Any, order: Any) -> np.ndarray:
    if not isinstance(dtype, _Dtype) or not isinstance(raw, bytes | bytearray):
        raise ValueError("an array must hold plain numbers")
    sizes = [int(n) for n in shape]
    if min(sizes, default=0) < 0 or math.prod(sizes) * dtype.value.itemsize != len(raw):
        raise ValueError(f"an array of {sizes} {dtype.value} has {len(raw)} bytes")
    return np.frombuffer(raw, dtype=dtype.value).reshape(sizes, order="F" if order in ("F", b"F") else "C")


# Instances without attributes stand for the functions: a pickle can set attributes of what it finds by name, and these
# have none to set.
class _Token:
    """`numpy.ndarray`, which is only ever passed on."""

    __slots__ = ()


class _Reconstruct:
    """`numpy.core.multiarray._reconstruct`: an empty array, whose content follows as its state."""

    __slots__ = ()

    def __call__(self, kind: Any, _shape: Any, _code: Any) -> PickledArray:
        if not isinstance(kind, _Token):
            raise ValueError("an array must be a plain one")
        return PickledArray()


class _FromBuffer:
    """`numpy.core.numeric._frombuffer`: an array with its content, from protocol 5 on."""

    __slots__ = ()

    def __call__(self, raw: Any, dtype: Any, shape: Any, order: Any, axes: Any = None) -> PickledArray:
        if axes is not None:
            raise ValueError("an array must lie in C or Fortran order")
        return PickledArray(_array(raw, dtype, shape, order))


class _MakeDtype:
    """`numpy.dtype`."""

    __slots__ = ()

    def __call__(self, code: Any, _align: Any = False, _copy: Any = True) -> _Dtype:
        text = code.decode("latin1") if isinstance(code, bytes) else code
        if not isinstance(text, str) or len(text) != 2 or text[0] not in "biuf" or text[1] not in "1248":
            raise ValueError(f"an array of type {text!r} is not plain numbers")
        return _Dtype(text)


class _Encode:
    """`_codecs.encode`: how Python 3 writes bytes in protocols below 3."""

    __slots__ = ()

    def __call__(self, text: Any, encoding: Any) -> bytes:
        name = encoding.decode("latin1") if isinstance(encoding, bytes) else encoding
        if not isinstance(text, str) or name not in _ENCODINGS:
            raise ValueError(f"bytes in encoding {name!r}")
        return text.encode("latin1")


class _Bytes:
    """`bytes` and `bytearray`: how Python 3 writes empty bytes in protocols below 3."""

    __slots__ = ()

    def __call__(self, *content: Any) -> bytes:
        if len(content) > 1 or not all(isinstance(c, bytes | bytearray) for c in content):
            raise ValueError("bytes made from something else")
        return bytes(content[0]) if content else b""


_KNOWN: dict[tuple[str, str], object] = {
    ("numpy", "ndarray"): _Token(),
    ("numpy", "dtype"): _MakeDtype(),
    ("_codecs", "encode"): _Encode(),
    **{(module, "bytes"): _Bytes() for module in ("__builtin__", "builtins")},
    **{(module, "bytearray"): _Bytes() for module in ("__builtin__", "builtins")},
    **{(f"numpy.{core}.multiarray", "_reconstruct"): _Reconstruct() for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): _FromBuffer() for core in ("core", "_core")},
}


class _Reader(pickle.Unpickler):
    def __init__(self, data: bytes, where: str) -> None:
        super().__init__(io.BytesIO(data), encoding="bytes")
        self._where = where

    def find_class(self, module: str, name: str) -> Any:
        found = _KNOWN.get((module, name))
        if found is None:
            raise DataError(
                f"{self._where} is a pickle that asks for {module}.{name}, which is no part of plain data; "
                "it was refused, and nothing of it was run. Get the file from its authors."
            )
        return found
