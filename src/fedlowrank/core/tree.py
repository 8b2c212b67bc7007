"""Trees of tensors: the one data type that is stored, sent and averaged.

A *tree* is a tensor, ``None``, a bool, int, float or str, a dict with string keys, a list, a tuple, or an instance of
a class made by :func:`tree_dataclass`. Every tree encodes to bytes without pickle: the tensors as safetensors,
everything else as JSON in the safetensors header. Boolean tensors are encoded as bits, complex ones as their real and
imaginary parts.
"""

from __future__ import annotations

import builtins
import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, dataclass_transform

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from .errors import FedlowrankError
from .io import safetensors_writer as one_buffer

T = TypeVar("T")

Params = dict[str, Tensor]
"""Parameters of a model by their names, as ``nn.Module.named_parameters`` spells them."""

_CLASSES: dict[str, type[Any]] = {}
_FIELDS: dict[type[Any], tuple[str, ...]] = {}
"""Names of the fields by class; calling ``dataclasses.fields`` at each node takes a tenth of a round of small models."""
_DAMAGE = (
    ValueError, LookupError, TypeError, AttributeError, RecursionError, RuntimeError, ArithmeticError,
    AssertionError, safetensors.SafetensorError, FedlowrankError,
)  # fmt: skip
"""Exceptions that damaged bytes raise in the parsers below and in the constructors of the decoded classes."""
_PLAIN = (bool, int, float, str)
_MAX_NAMES = 5
"""Number of names of children that an error message lists."""
_VALUE_BYTES = 256
"""Upper bound in bytes on the memory of one value of the skeleton with its dictionary."""
_WIDE = {
    torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.complex32: torch.complex64,
    torch.float8_e4m3fn: torch.float32, torch.float8_e5m2: torch.float32,
}  # fmt: skip
"""Types of less than single precision, and the types to compute them in."""


class TreeError(FedlowrankError):
    """A value is not a tree, two trees differ in structure, or bytes are not an encoded tree."""


@dataclass_transform(frozen_default=True)
def tree_dataclass(cls: type[T]) -> type[T]:
    """Make ``cls`` a frozen dataclass that can be mapped over, stored and sent.

    Only classes registered by this decorator are ever decoded, so a message cannot name arbitrary code.
    """
    cls_as_dataclass = dataclasses.dataclass(frozen=True)(cls)
    register(cls_as_dataclass)
    return cls_as_dataclass


def register(cls: type[Any]) -> None:
    """Register a class that :func:`tree_dataclass` made in another process for encoding and decoding."""
    # a class that is defined again under the same name, for example in a notebook, replaces the former one
    _FIELDS.pop(_CLASSES.get(_name(cls), cls), None)
    _CLASSES[_name(cls)] = cls
    _FIELDS[cls] = tuple(f.name for f in dataclasses.fields(cls))


def tree_classes(module: str) -> tuple[type[Any], ...]:
    """Tree classes that a module defines."""
    return tuple([c for c in _CLASSES.values() if c.__module__ == module])


def _name(cls: type[Any]) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def children(value: Any, path: str = "") -> list[tuple[str, Any]] | None:
    """The children of a node by name, or None if the value is a leaf (a tensor, a plain value or None).

    Args:
        value: tree whose node is examined.
        path: path of the value in a larger tree (JSON pointer), for error messages.

    Raises:
        TreeError: if the value cannot be part of a tree.
    """
    if value is None or isinstance(value, Tensor) or type(value) in _PLAIN:
        return None
    if type(value) is dict:
        for key in value:
            if not isinstance(key, str):
                raise TreeError(f"the key {key!r} at {path or 'the top'} of a tree is not a string")
        return list(value.items())
    if type(value) in (list, tuple):
        return [(str(i), child) for i, child in enumerate(value)]
    if (names := _FIELDS.get(type(value))) is not None:
        return [(name, getattr(value, name)) for name in names]
    hint = ""
    if dataclasses.is_dataclass(value):
        hint = "; decorate its class with @tree_dataclass of fedlowrank.core.tree"
    elif isinstance(value, (np.ndarray, np.generic)):
        hint = f"; convert it by {'torch.from_numpy(...)' if isinstance(value, np.ndarray) else '.item()'}"
    raise TreeError(f"a {type(value).__name__} at {path or 'the top'} cannot be part of a tree{hint}")


def rebuild(node: Any, parts: list[tuple[str, Any]]) -> Any:
    """Make a node of the kind of another node, with new children.

    Args:
        node: node for which :func:`children` is not None.
        parts: names and children, in the order of :func:`children`.
    """
    if isinstance(node, dict):
        return dict(parts)
    if isinstance(node, (list, tuple)):
        return type(node)(part for _, part in parts)
    return type(node)(**dict(parts))


def join_path(path: str, key: str) -> str:
    """Append a key to a JSON pointer (RFC 6901), so that different keys always give different paths."""
    return f"{path}/{key.replace('~', '~0').replace('/', '~1')}"


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of a tree with their paths (JSON pointers), depth first in the order of fields and keys."""
    if isinstance(value, Tensor):
        yield path, value
        return
    for key, child in children(value, path) or ():
        yield from leaves(child, join_path(path, key))


def tensors(value: Any) -> list[Tensor]:
    """The tensors of a tree in the order of :func:`leaves`; several times faster than that function."""
    found_tensors: list[Tensor] = []
    _each(value, found_tensors.append)
    return found_tensors


def _each(value: Any, f: Callable[[Tensor], Any]) -> Any:
    """Apply f to every tensor of a tree; :func:`children` raises the error for a value that is no tree."""
    if isinstance(value, Tensor):
        return f(value)
    node_type = type(value)
    if node_type is dict and all(type(k) is str for k in value):
        return {k: _each(v, f) for k, v in value.items()}
    if node_type is list or node_type is tuple:
        return node_type([_each(v, f) for v in value])
    items = children(value)
    return value if items is None else node_type(**{k: _each(v, f) for k, v in items})


def map_leaves(f: Callable[..., Any], first: T, *rest: Any, path: str = "") -> T:
    """Apply ``f`` to the tensors of trees of one structure.

    Args:
        f: function of one tensor from each tree.
        first: tree that gives the structure and all values that are not tensors.
        rest: further trees; their values that are not tensors must equal those of ``first``.
        path: path of the trees in a larger tree (JSON pointer), for error messages.

    Returns:
        A tree like ``first`` with the results of ``f``.

    Raises:
        TreeError: if the structures differ; the message names the path.
    """
    if not rest:
        try:
            quick: T = _each(first, f)
            return quick
        except TreeError:
            # the slow path below names the place of the error
            pass
    out: T = _map(f, first, rest, path)
    return out


def move(value: T, device: torch.device | str) -> T:
    """Move every tensor of a tree to a device."""
    return map_leaves(lambda t: t.to(device), value)


def _map(f: Callable[..., Any], first: Any, rest: tuple[Any, ...], path: str) -> Any:
    if isinstance(first, Tensor):
        for other in rest:
            if not isinstance(other, Tensor):
                raise TreeError(f"trees differ at {path or 'the top'}: a tensor and a {type(other).__name__}")
        return f(first, *rest)
    items = children(first, path)
    if items is None:
        for other in rest:
            # repr distinguishes 1 from True and treats NaN as equal to itself
            if repr(other) != repr(first):
                raise TreeError(f"trees differ at {path or 'the top'}: {first!r} and {other!r}")
        return first
    columns: list[dict[str, Any]] = []
    for other in rest:
        parts = children(other, path)
        keys = None if parts is None else [k for k, _ in parts]
        if type(other) is not type(first) or keys is None or sorted(keys) != sorted(k for k, _ in items):
            raise TreeError(
                f"trees differ at {path or 'the top'}: {_describe_difference(first, [k for k, _ in items], other, keys)}"
            )
        columns.append(dict(parts or ()))
    return rebuild(
        first, [(k, _map(f, v, tuple(c[k] for c in columns), join_path(path, k))) for k, v in items]
    )


def _describe_difference(first: Any, names: list[str], other: Any, other_names: list[str] | None) -> str:
    """Describe how two nodes differ in type, or in the names of their children."""
    if type(other) is not type(first) or other_names is None:
        kinds = ["None" if node is None else f"a {type(node).__name__}" for node in (first, other)]
        return " and ".join(kinds)
    if not isinstance(first, dict):
        return f"a {type(first).__name__} of {len(names)} and one of {len(other_names)}"
    lacking_names = [n for n in names if n not in other_names]
    further_names = [n for n in other_names if n not in names]
    parts = (
        f"{verb} {', '.join(map(repr, keys[:_MAX_NAMES]))}{', ...' if len(keys) > _MAX_NAMES else ''}"
        for verb, keys in (("lacks", lacking_names), ("has in addition", further_names))
        if keys
    )
    return f"the second dict {' and '.join(parts)}"


def canonical(value: T) -> T:
    """Detach a tree's tensors and make them contiguous, as decoding would. Strides change the bits of sums."""
    return map_leaves(lambda t: t.detach().contiguous(), value)


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """Type in which numbers of a type are summed: float32 for half precision, the type itself for others."""
    return _WIDE.get(dtype, dtype)


def widen(value: T) -> T:
    """Convert half-precision tensors of a tree to float32 for computations; all others are the same objects."""
    return map_leaves(lambda t: t.to(_WIDE[t.dtype]) if t.dtype in _WIDE else t, value)


def cast_like(value: T, template: Any) -> T:
    """Round the tensors of a tree to the types of the tensors in another tree of its structure."""
    return map_leaves(lambda t, u: t.to(u.dtype), value, template)


def zeros_like(value: T) -> T:
    """Replace every tensor of a tree by zeros."""
    return map_leaves(torch.zeros_like, value)


def add(a: T, b: T, scale: float = 1.0) -> T:
    """``a + scale * b``, tensor by tensor; raises TreeError if two tensors have different shapes."""
    return _map_equal_shapes("add", lambda x, y: torch.add(x, y, alpha=scale), a, b)


def sub(a: T, b: T) -> T:
    """``a - b``, tensor by tensor; raises TreeError if two tensors have different shapes."""
    return _map_equal_shapes("sub", torch.sub, a, b)


def _map_equal_shapes(title: str, f: Callable[[Tensor, Tensor], Tensor], a: T, b: T) -> T:
    """Apply a function to the tensors of two trees; raises TreeError where PyTorch would broadcast a tensor."""

    def apply(x: Tensor, y: Tensor) -> Tensor:
        if x.shape != y.shape:
            path = next(path for path, t in leaves(a) if t is x)
            raise TreeError(
                f"tree.{title}: trees must have the same shapes; at {path or 'the top'} the first has {[*x.shape]} and the "
                f"second {[*y.shape]}"
            )
        return f(x, y)

    return map_leaves(apply, a, b)


def dot(a: Any, b: Any) -> Tensor:
    """Inner product of two trees of one structure, a differentiable scalar tensor."""
    terms: list[Tensor] = []
    map_leaves(lambda x, y: terms.append((x * y).sum()), a, b)
    return torch.stack(terms).sum()


def square_distance(a: Any, b: Any) -> Tensor:
    """Squared Euclidean distance of two trees of one structure, a differentiable scalar tensor."""
    terms: list[Tensor] = []
    map_leaves(lambda x, y: terms.append((x - y).square().sum()), a, b)
    return torch.stack(terms).sum()


def numel(value: Any) -> int:
    """Count the parameters of a tree as papers do: real numbers including int8, without labels and masks."""
    real = [t for t in tensors(value) if t.is_floating_point() or t.is_complex() or t.dtype == torch.int8]
    return sum([(1 + t.is_complex()) * t.numel() for t in real])


def nbytes(value: Any) -> int:
    """Number of bytes of tensor data in a tree; a boolean counts as one bit."""
    return sum([-(-t.numel() // 8) if t.dtype == torch.bool else t.nbytes for t in tensors(value)])


def skeleton(value: Any, path: str = "") -> Any:
    """Everything in a tree but tensor data, as JSON: structure, plain values, ``"t"`` for a tensor, ``"z"`` for a complex one."""
    if isinstance(value, Tensor):
        if value.is_complex():
            return "z"
        return "t" if value.dtype != torch.bool else {"b": list(value.shape)}
    items = children(value, path)
    if items is None:
        return {"v": value}
    parts = {k: skeleton(v, join_path(path, k)) for k, v in items}
    if isinstance(value, (list, tuple)):
        return {"l" if isinstance(value, list) else "u": list(parts.values())}
    return {"d": parts} if isinstance(value, dict) else {"c": _name(type(value)), "d": parts}


def encode(value: Any) -> bytes:
    """Encode a tree as a safetensors file whose metadata holds the skeleton as JSON.

    Raises:
        TreeError: if the value is not a tree.
    """
    tensors: dict[str, Tensor] = {}
    for path, leaf in leaves(value):
        real = torch.view_as_real(leaf.detach().resolve_conj()) if leaf.is_complex() else leaf.detach()
        flat = real.cpu().contiguous()
        if flat.dtype == torch.bool:
            flat = torch.from_numpy(np.packbits(flat.numpy().reshape(-1)))
        tensors[path] = flat
    text = json.dumps(skeleton(value), separators=(",", ":"))
    try:
        return one_buffer.safetensors_bytes(tensors, {"tree": text})
    except (KeyError, ValueError, RuntimeError) as error:
        raise TreeError(f"a tensor or a name in the tree has no safetensors form: {error!r}") from error


def decode(data: bytes, bools: int | None = None, memory: int | None = None) -> Any:
    """Decode the bytes of :func:`encode`.

    Args:
        data: encoded tree.
        bools: largest accepted number of booleans, each of which takes a byte in memory and only a bit in a message;
            None for any number.
        memory: largest memory of the tree in bytes, for bytes from somebody else: a boolean takes eight times its
            part of a message, and a small value of the header up to a hundred times; None for any size.

    Raises:
        TreeError: if the bytes are cut short, are of another format, name a class that is not registered, or encode a
            larger tree than is allowed.
    """
    try:
        size = int.from_bytes(data[:8], "little")
        if size > len(data):
            raise TreeError(
                f"these {len(data)} bytes are no encoded tree, for their header alone would take {size}"
            )
        if memory is not None:
            # the booleans are counted as they are decoded
            free_bytes = (
                memory
                - len(data)
                - _VALUE_BYTES * sum(data.count(c, 8, 8 + size) for c in (b"{", b"[", b","))
            )
            if free_bytes < 0:
                raise TreeError(
                    f"these {len(data)} bytes would take more than the {memory} bytes of memory that they may"
                )
            bools = free_bytes if bools is None else min(bools, free_bytes)
        shape = json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["tree"])
        return _decode(shape, safetensors.torch.load(data), "", [math.inf if bools is None else bools])
    except TreeError:
        raise
    except _DAMAGE as error:
        raise TreeError(f"these {len(data)} bytes are not an encoded tree: {error!r}") from error


def _decode(shape: Any, tensors: dict[str, Tensor], path: str, budget: list[float]) -> Any:
    if shape == "t":
        # bytes other than 0 and 1 in a boolean tensor are undefined behavior; encode writes booleans as bits
        if tensors[path].dtype == torch.bool:
            raise TreeError(f"the message holds booleans at {path} that are not packed as bits")
        return tensors[path]
    if shape == "z":
        return torch.view_as_complex(tensors[path])
    if "v" in shape:
        if shape["v"] is not None and type(shape["v"]) not in _PLAIN:
            raise TreeError(f"the message holds a {type(shape['v']).__name__} as a plain value at {path}")
        return shape["v"]
    if "b" in shape:
        count, packed = math.prod(shape["b"]), tensors[path]
        if min(shape["b"], default=1) < 0 or len(packed) != -(-count // 8):
            raise TreeError(f"the message holds {len(packed)} bytes for {count} bits at {path}")
        budget[0] -= count
        if budget[0] < 0:
            raise TreeError(
                f"the message holds more booleans than it may; the last are the {count} at {path}"
            )
        bits = np.unpackbits(packed.numpy(), count=count)
        # a view as booleans, because a copy would take the same memory again
        return torch.from_numpy(bits.view(np.bool_)).reshape(shape["b"])
    for tag, sequence_type in (("l", list), ("u", tuple)):
        if tag in shape:
            return sequence_type(
                _decode(s, tensors, join_path(path, str(i)), budget) for i, s in enumerate(shape[tag])
            )
    parts = {k: _decode(s, tensors, join_path(path, k), budget) for k, s in shape["d"].items()}
    if "c" not in shape:
        return parts
    if shape["c"] not in _CLASSES:
        raise TreeError(
            f"the message holds a {shape['c']}, which is no registered tree here; import its module first"
        )
    return _CLASSES[shape["c"]](**parts)


def signature(value: Any) -> str:
    """Everything that the encoded size depends on: skeleton, dtypes and shapes, but no tensor data."""
    shapes = [(str(t.dtype), tuple(t.shape)) for _, t in leaves(value)]
    return json.dumps([skeleton(value), shapes])


_SIZES: dict[Any, int] = {}
_MAX_SIZES = 4096
"""Number of sizes that are remembered; a tree with numbers that change each round has a new form each round."""


def form(value: Any, plain: bool = True) -> Any:
    """The content of :func:`signature` as a hashable key, computed many times faster.

    Args:
        value: tree to describe.
        plain: whether numbers and words in the tree are part of the key.
    """
    if isinstance(value, Tensor):
        return value.dtype, value.shape
    kind = type(value)
    if kind is dict:
        return kind, tuple(value), tuple([form(v, plain) for v in value.values()])
    if kind is list or kind is tuple:
        return kind, tuple([form(v, plain) for v in value])
    items = children(value)
    if items is None:
        # repr distinguishes 1 from True and treats NaN as equal to itself
        return kind, repr(value) if plain else None
    return kind, tuple([form(v, plain) for _, v in items])


def encoded_size(value: Any) -> int:
    """``len(encode(value))``, measured once for each :func:`signature` and remembered."""
    form_of_value = form(value)
    if form_of_value not in _SIZES:
        if len(_SIZES) >= _MAX_SIZES:
            _SIZES.clear()
        _SIZES[form_of_value] = len(encode(value))
    return _SIZES[form_of_value]


def not_finite(value: Any) -> str | None:
    """Path of the first tensor that holds a NaN or an infinity, or None."""
    numbers = [t for t in tensors(value) if (t.is_floating_point() or t.is_complex()) and t.numel()]
    if not numbers:
        return None
    # A finite norm implies finite elements, and norms are many times cheaper than a test of every element.
    # Norms of finite elements can overflow, so elements are tested where the sum of the norms is not finite.
    norms = list(torch._foreach_norm(numbers))
    if any(n.dtype != norms[0].dtype for n in norms):
        norms = [n.double() for n in norms]
    if math.isfinite(torch.stack(norms).sum().item()):
        return None
    floating = ((path, t) for path, t in leaves(value) if t.is_floating_point() or t.is_complex())
    return next((path for path, t in floating if not bool(t.isfinite().all())), None)


def have_equal_tensors(a: Any, b: Any) -> bool:
    """Whether two trees have the same tensors at the same paths, by :func:`torch.equal`, without encoding them."""
    tensors_a, tensors_b = dict(leaves(a)), dict(leaves(b))
    return tensors_a.keys() == tensors_b.keys() and all(
        torch.equal(t, tensors_b[path]) for path, t in tensors_a.items()
    )


def equal(a: Any, b: Any) -> bool:
    """Whether two trees are the same bit for bit (NaN equals NaN, -0.0 differs from 0.0)."""
    return builtins.bool(encode(a) == encode(b))
