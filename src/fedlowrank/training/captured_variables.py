"""Identity of a function: its code and its captured variables (free variables and globals).

A method creates its loss function anew at every client and in every round. Two such functions compute the same if
their code and their captured variables are equal. Numbers, strings and frozen settings are compared by value; the
caller decides how the others (models, tensors, other objects) are compared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

_PLAIN = bool, int, float, str, torch.dtype, torch.device, CodeType

_EMPTY = object()
"""Placeholder of a captured variable that is not bound yet."""


def code_of(function: Any) -> Any:
    """Identity of a function's code and of its captured numbers and strings; equal at different clients."""
    function = getattr(function, "__func__", function)
    return getattr(function, "__code__", function), tuple(
        [v for v in captured_by(function) or () if is_plain(v)]
    )


def is_plain(value: Any) -> bool:
    """Whether an object is compared by value: a number, a string, code."""
    return value is None or isinstance(value, _PLAIN)


def captured_by(value: Any) -> list[Any] | None:
    """Parts of a function, a method, a list, a mapping or frozen settings; None for anything else."""
    if isinstance(value, FunctionType):
        cell_values = [_content(c) for c in value.__closure__ or ()]
        namespace = value.__globals__
        global_values = [namespace[n] for n in value.__code__.co_names if n in namespace]
        global_values = [
            v for v in global_values if not isinstance(v, (ModuleType, BuiltinFunctionType, type))
        ]
        # functions that are called by name are compared by their code alone, without their captured variables
        global_values = [v.__code__ if isinstance(v, FunctionType) else v for v in global_values]
        return [
            *cell_values,
            *(value.__defaults__ or ()),
            *(value.__kwdefaults__ or {}).values(),
            *global_values,
        ]
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, (tuple, list)):
        return list(value)
    if isinstance(value, Mapping):
        return [*value, *value.values()]
    settings: Any = value
    if (
        dataclasses.is_dataclass(value)
        and not isinstance(value, type)
        and settings.__dataclass_params__.frozen
    ):
        return [getattr(value, f.name) for f in dataclasses.fields(value)]
    return None


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _EMPTY
