"""Identity of a function: its code and its captured variables (free variables and globals).

A loss of a method is made anew at every client and in every round. Two of them compute the same where their
code is the same and what they captured is. Numbers, words and settings that are frozen count by their value;
what counts for the rest (models, tensors, other objects) is for the caller to say.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

_PLAIN = bool, int, float, str, torch.dtype, torch.device, CodeType

_EMPTY = object()
"""In the place of a variable that is not bound yet."""


def code_of(function: Any) -> Any:
    """Identity of a function's code and of its captured numbers and words; equal at different clients."""
    function = getattr(function, "__func__", function)
    return getattr(function, "__code__", function), tuple(
        [v for v in captured_by(function) or () if is_plain(v)]
    )


def is_plain(value: Any) -> bool:
    """Whether something counts by its value: a number, a word, code."""
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
        # what functions that are called by name captured is not looked at, only whether they are others now
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
