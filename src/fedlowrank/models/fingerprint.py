"""Describes a module by one line for each layer, by which a resumed run recognizes its model.

A line holds the class, its options (attributes with plain values, such as ``p`` of a dropout, and functions such as
an activation), parameters and buffers with type and shape, and which of them are frozen or tied. For classes and
functions that are not part of an installed package it also holds a digest of their code: the source without comments,
docstrings and layout, with the values of its captured variables.

The lines do not cover the code of installed packages, whose versions ``run.json`` also holds, files that a forward
pass reads, and the values of tensors; for those of frozen tensors see :func:`digest_frozen`.
"""

from __future__ import annotations

import dataclasses
import dis
import enum
import functools
import hashlib
import inspect
import io
import linecache
import sys
import sysconfig
import textwrap
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

_PLAIN = bool, int, float, complex, str, bytes, torch.dtype, type(None)
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
BASE_ATTRIBUTES = frozenset(vars(nn.Module()))
"""Attributes of every module: its parameters, hooks and so on."""


def describe_layers(module: nn.Module) -> dict[str, str]:
    """Describe every layer of a module by one line.

    Args:
        module: module with parameters of known shapes.

    Returns:
        The lines by dotted name of the layer; the module itself has the name ``""``.
    """
    tensor_names: dict[int, str] = {}
    layers: dict[int, str] = {}
    lines = {}
    for path, layer in module.named_modules(remove_duplicate=False):
        if id(layer) in layers:
            lines[path] = f"the same layer as {layers[id(layer)]!r}"
            continue
        layers[id(layer)] = path
        lines[path] = "; ".join([_describe_class(layer), *_describe_tensors(path, layer, tensor_names)])
    return lines


def compare_layers(old_layers: Mapping[str, str], new_layers: Mapping[str, str], limit: int = 3) -> list[str]:
    """List the layers in which two descriptions differ, the first ``limit`` of them.

    Args:
        old_layers: lines of :func:`describe_layers` for the earlier model.
        new_layers: lines of :func:`describe_layers` for the present model.
        limit: maximum number of layers that are named.
    """
    differences = []
    for path in dict.fromkeys([*old_layers, *new_layers]):
        name = f"layer {path!r}" if path else "the model itself"
        if path not in new_layers or path not in old_layers:
            version = "stored" if path in old_layers else "new"
            differences.append(
                f"{name} is only in the {version} model: {(old_layers if path in old_layers else new_layers)[path]}"
            )
        elif old_layers[path] != new_layers[path]:
            before, after = _parts_that_differ(old_layers[path], new_layers[path])
            cause = " (its source, or a variable that it reads)" if after.startswith("code ") else ""
            differences.append(f"{name} was {before} and is {after}{cause}")
    remaining_count = len(differences) - limit
    return [
        *differences[:limit],
        *([f"and {remaining_count} more layers differ"] if remaining_count > 0 else []),
    ]


def describe_callable(function: Any) -> str:
    """Describe a user's function or class by its name and a digest of its code and captured variables."""
    if isinstance(function, type):
        return f"{function.__name__} {_digest(_describe_code(_own_classes(function)))}"
    if isinstance(function, nn.Module):
        tensors = {**dict(function.named_parameters()), **dict(function.named_buffers())}
        return f"{describe_layers(function)} {digest_frozen(function, tensors)}"
    if isinstance(function, FunctionType | MethodType | functools.partial):
        return _describe(function, ())
    code = _describe_code(_own_classes(type(function)))
    return f"{type(function).__name__} {_digest([_describe(vars(function), ()), *code])}"


def describe_named(functions: Mapping[str, Any]) -> dict[str, str]:
    """Describe functions and classes by name, without those of an installed package."""
    descriptions = {}
    for name, function in functions.items():
        module_name = getattr(function, "__module__", None) or ""
        if (
            _own_classes(function)
            if isinstance(function, type)
            else callable(function) and not is_installed(module_name)
        ):
            descriptions[name] = describe_callable(function)
    return descriptions


def _own_classes(cls: type) -> list[type]:
    """List a class and its base classes, without those of installed packages."""
    return [c for c in cls.__mro__ if not is_installed(c.__module__)]


def digest_frozen(module: nn.Module, buffers: Mapping[str, Tensor]) -> str:
    """Compute a digest of the values that a model takes from its module and that no checkpoint holds.

    Args:
        module: module whose frozen parameters are included.
        buffers: initial values of buffers that belong to the model.
    """
    frozen_parameters = {n: p for n, p in module.named_parameters() if not p.requires_grad}
    hasher = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted({**frozen_parameters, **buffers}.items()):
        hasher.update(f"{name} {_form(tensor)}".encode())
        hasher.update(_bytes_of(tensor))
    return hasher.hexdigest()


def _parts_that_differ(before: str, after: str) -> tuple[str, str]:
    """Remove the common parts from two lines, unless one line has no other parts."""
    parts_before, parts_after = before.split("; "), after.split("; ")
    only_before, only_after = (
        [p for p in a if p not in b] for a, b in ((parts_before, parts_after), (parts_after, parts_before))
    )
    # the class identifies the layer
    return "; ".join(only_before or parts_before), "; ".join(only_after or parts_after)


def describe_attributes(layer: nn.Module) -> dict[str, str]:
    """Describe the attributes of a layer by name, without parameters, buffers, submodules and hooks."""
    own_classes = _own_classes(type(layer))
    return {
        name: _describe(value, ())
        for name, value in sorted(vars(layer).items())
        # private attributes of installed classes are derived values or notes of a library
        if name not in BASE_ATTRIBUTES and (own_classes or not name.startswith("_"))
    }


def _describe_class(layer: nn.Module) -> str:
    cls = type(layer)
    own_classes = _own_classes(cls)
    options = (f"{name}={value}" for name, value in describe_attributes(layer).items())
    text = f"{cls.__name__}({', '.join(options)})"
    return f"{text}; code {_digest(_describe_code(own_classes))}" if own_classes else text


def _describe_tensors(path: str, layer: nn.Module, tensor_names: dict[int, str]) -> Iterator[str]:
    for prefix, tensors in (("", layer._parameters), ("buffer ", layer._buffers)):
        for name, tensor in tensors.items():
            if tensor is None:
                yield f"no {prefix}{name}"
            elif id(tensor) in tensor_names:
                yield f"{prefix}{name} tied to {tensor_names[id(tensor)]}"
            else:
                tensor_names[id(tensor)] = f"{path}.{name}" if path else name
                is_frozen = not prefix and not tensor.requires_grad
                yield f"{prefix}{name} {_form(tensor)}{' frozen' if is_frozen else ''}"


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {[*tensor.shape]}"


def as_dense(tensor: Tensor) -> Tensor:
    """Return the tensor itself, or the dense form of a sparse one."""
    return tensor if tensor.layout == torch.strided else tensor.to_dense()


def _bytes_of(tensor: Tensor) -> bytes:
    dense = as_dense(tensor.detach())
    if dense.numel() == 0:
        return b""
    return dense.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def is_installed(module: str) -> bool:
    """Whether a module belongs to Python, to this package or to an installed one."""
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names or top in ("torch", "fedlowrank"):
        return top != "__main__"
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is not None and any(Path(file).is_relative_to(folder) for folder in _INSTALLED)


def _describe(value: Any, containers: tuple[Any, ...]) -> str:
    """Describe a value as text that is equal in another process; objects without a plain value by their class."""
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, _PLAIN):
        return repr(value)
    if any(value is container for container in containers):
        return "itself"
    containers = (*containers, value)
    if isinstance(value, Tensor):
        return f"{_form(value)} {hashlib.blake2b(_bytes_of(value), digest_size=6).hexdigest()}"
    if isinstance(value, Mapping):
        pairs = (f"{_describe(k, containers)}: {_describe(v, containers)}" for k, v in value.items())
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, (set, frozenset)):
        return "{" + ", ".join(sorted(_describe(v, containers) for v in value)) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_describe(v, containers) for v in value) + "]"
    if isinstance(value, functools.partial):
        return f"partial({_describe([value.func, *value.args, value.keywords], containers)})"
    if isinstance(value, MethodType):
        return f"{_describe(value.__func__, containers)} of {_describe(value.__self__, containers)}"
    if isinstance(value, FunctionType):
        return _describe_function(value, containers)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return f"{type(value).__name__}{_describe(fields, containers)}"
    # functions of torch that are written in C, classes, and objects
    return str(getattr(value, "__name__", type(value).__name__))


def _describe_function(function: FunctionType, containers: tuple[Any, ...] = ()) -> str:
    """Describe a package's function by its name, and a user's function by name and digest with captured variables."""
    if is_installed(function.__module__ or ""):
        return function.__qualname__
    containers = (*containers, function)
    captured_variables: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            captured_variables[name] = cell.cell_contents
        except ValueError:
            captured_variables[name] = "not bound"
    for name in sorted(global_names(function.__code__)):
        value = function.__globals__.get(name)
        # a layer or a class that is named here is described where it is used
        if not isinstance(value, (ModuleType, type, nn.Module)):
            captured_variables[name] = value
    # leave out the class that `super()` refers to
    captured_variables.pop("__class__", None)
    parts = [_source(function), function.__defaults__, function.__kwdefaults__, captured_variables]
    name = function.__qualname__.rpartition("<locals>.")[2]
    return f"{name} {_digest(_describe(part, containers) for part in parts)}"


def _describe_code(classes: Iterable[type]) -> Iterator[str]:
    """Yield the methods and plain attributes of classes, in order."""
    for cls in classes:
        for name, value in sorted(vars(cls).items()):
            if isinstance(value, property):
                value = value.fget
            if isinstance(value, (staticmethod, classmethod)):
                value = value.__func__
            is_special = name.startswith("__") and name.endswith("__")
            if isinstance(value, FunctionType) or (isinstance(value, _PLAIN) and not is_special):
                yield f"{name} {_describe(value, ())}"


def global_names(code: CodeType) -> set[str]:
    """Find the global variables that a function reads and does not set, including those of its inner functions."""
    read_names, set_names = set(), set()
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            read_names.add(str(instruction.argval))
        elif instruction.opname == "STORE_GLOBAL":
            set_names.add(str(instruction.argval))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            read_names |= global_names(constant)
    return read_names - set_names


def _source(function: FunctionType) -> str:
    """Get the tokens of a function's source; its bytecode if there is no source, as in a console."""
    try:
        if function.__name__ == "<lambda>":
            return _lambda_source(function.__code__)
        text = textwrap.dedent(inspect.getsource(function))
        return " ".join(_words(text))
    except (OSError, TypeError, tokenize.TokenError, IndentationError):
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        return f"bytecode of Python {version}: {_bytecode(function.__code__)}"


def _lambda_source(code: CodeType) -> str:
    """Get the arguments and body of a lambda, which is a part of a line that may hold others."""
    # an instruction without width is the beginning of the function
    positions = [
        (a, b, c, d) for a, b, c, d in code.co_positions() if a and b and c is not None and d and c != d
    ]
    lines = linecache.getlines(code.co_filename)
    if not positions or not lines:
        raise OSError("no source")
    # as bytes, because columns are counted in bytes
    start, end = min((a, c) for a, _, c, _ in positions), max((b, d) for _, b, _, d in positions)
    rows = [line.encode() for line in lines[start[0] - 1 : end[0]]]
    rows[-1] = rows[-1][: end[1]]
    rows[0] = rows[0][start[1] :]
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return f"lambda {arguments}: {' '.join(b''.join(rows).decode().split())}"


def _bytecode(code: CodeType) -> str:
    constants = [_bytecode(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts]
    return f"{code.co_code.hex()} {constants} {code.co_names} {code.co_varnames}"


def _words(text: str) -> Iterator[str]:
    """Yield the tokens of source without comments, layout, and standalone strings such as docstrings."""
    skipped_types = (tokenize.COMMENT, tokenize.NL, tokenize.ENCODING, tokenize.ENDMARKER)
    layout_types = (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    tokens = [t for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type not in skipped_types]
    for index, token in enumerate(tokens):
        is_start = index == 0 or tokens[index - 1].type in layout_types
        is_end = index + 1 == len(tokens) or tokens[index + 1].type == tokenize.NEWLINE
        if token.type == tokenize.STRING and is_start and is_end:
            continue
        yield {tokenize.NEWLINE: "\n", tokenize.INDENT: "{", tokenize.DEDENT: "}"}.get(
            token.type, token.string
        )


def _digest(parts: Iterable[str]) -> str:
    hasher = hashlib.blake2b(digest_size=6)
    for part in parts:
        hasher.update(part.encode() + b"\0")
    return hasher.hexdigest()
