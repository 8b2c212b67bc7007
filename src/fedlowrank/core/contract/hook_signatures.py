"""Checks of a method's class against the contract before anything runs: names, kinds and arguments of its hooks."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import re
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

from ..errors import ConfigError
from .class_title import InheritedTitle
from .update import KeepsSumOfUploads

_TYPO_LIKENESS = 0.85
"""Similarity to the name of a hook at which a name is treated as a misspelling of it."""
_SUBSTITUTE_LIKENESS = 0.6
"""The same similarity if a required hook is missing, since any name may stand for it."""
_VALUES = (bool, int, float, str, tuple, list, dict, type(None))
"""Types of values that a setting may have, besides settings themselves."""


def check_class(cls: type[Any], contract: Any) -> None:
    """Refuse a class whose hooks or fields do not fit the contract.

    The contract defines which functions are hooks. Helpers may have any name that does not resemble a hook that their
    class leaves out.

    Args:
        cls: subclass of the contract.
        contract: class that defines all hooks and class variables.

    Raises:
        ConfigError: if the class does not fit; the message has a line for each mistake: what is wrong, where, and
            what to write.
    """
    classes = [c for c in cls.__mro__ if issubclass(c, contract) and c is not contract]
    mistakes = [*_find_missing(cls, contract, classes), *_find_unfit(cls, contract)]
    for base in classes:
        mistakes += [*_find_misspelt(base, contract), *_find_bare_fields(base, contract)]
    if mistakes:
        count = "a mistake" if len(mistakes) == 1 else f"{len(mistakes)} mistakes"
        lines = "".join(f"\n  {line}" for line in mistakes)
        raise ConfigError(f"the class {cls.__module__}:{cls.__qualname__} has {count}:{lines}")


@functools.cache
def _hooks(contract: Any) -> dict[str, Any]:
    """Functions of the contract by name, with the optional hooks that a method may add."""
    functions = {**vars(contract), **vars(KeepsSumOfUploads)}
    return {n: v for n, v in functions.items() if n[0] != "_" and inspect.isfunction(v)}


@functools.cache
def _variables(contract: Any) -> dict[str, Any]:
    """Types of the contract's class variables by name."""
    hints = typing.get_type_hints(contract)
    return {
        n: typing.get_args(hints[n])[0] for n, a in _annotations(contract).items() if _is_class_variable(a)
    }


@functools.cache
def _arguments(hook: Any) -> list[str]:
    """Names of the arguments that a hook is called with, including ``self``."""
    return list(inspect.signature(hook).parameters)


def _defined(cls: type[Any], name: str) -> Any:
    """Attribute of that name in the body of a class or of its nearest base that has it; None if no class has it."""
    return next((vars(c)[name] for c in cls.__mro__ if name in vars(c)), None)


def _is_stated(cls: type[Any], name: str) -> bool:
    """Whether the body of a class defines a name."""
    return name in vars(cls) and not isinstance(vars(cls)[name], InheritedTitle)


def _format_signature(function: Any) -> str:
    """First line of a hook's definition."""
    return f"def {function.__name__}({', '.join(_arguments(function))})"


def _find_missing(cls: type[Any], contract: Any, classes: Iterable[type[Any]]) -> Iterator[str]:
    """Find the title and the required hooks that a class lacks, with the function that may have been meant."""
    hooks, names = _hooks(contract), {n for c in classes for n, v in vars(c).items() if inspect.isfunction(v)}
    if (
        _defined(cls, "title") is None
        and _nearest("title", [n for c in classes for n in vars(c)], _TYPO_LIKENESS) is None
    ):
        yield 'title is missing. Write title = "..." in the class'
    for name in sorted(getattr(cls, "__abstractmethods__", ()), key=list(hooks).index):
        helpers = [n for n in names - hooks.keys() if n[0] != "_"]
        helper = _nearest(name, helpers, _SUBSTITUTE_LIKENESS)
        if helper is not None and _nearest(helper, hooks, _TYPO_LIKENESS) is not None:
            # already reported as a misspelling
            continue
        hint = f"; if {helper} is meant, rename it" if helper is not None else ""
        yield f"{name} is missing. Write {_format_signature(hooks[name])}{hint}"


def _find_unfit(cls: type[Any], contract: Any) -> Iterator[str]:
    """Find hooks that are no methods or cannot take their arguments, and class variables of a wrong type."""
    for name, hook in _hooks(contract).items():
        value = _defined(cls, name)
        is_left_out = (
            value is hook or not hasattr(cls, name) or name in getattr(cls, "__abstractmethods__", ())
        )
        if is_left_out:
            continue
        type_name = type(value).__name__
        if isinstance(value, (staticmethod, classmethod, property, functools.cached_property)):
            yield f"{name}{_line_of(value)} is a {type_name}. Write {_format_signature(hook)} without @{type_name}"
        elif not callable(getattr(cls, name)):
            yield f"{name} is of type {type_name} and must be a function. Write {_format_signature(hook)}"
        elif problem := _wrong_arguments(getattr(cls, name), hook):
            yield f"{name}{_line_of(value)} {problem}. Write {_format_signature(hook)}"
    for name, hint in _annotations(contract).items():
        value = _defined(cls, name)
        if name not in _variables(contract) and (inspect.isfunction(value) or isinstance(value, property)):
            yield f"{name}{_line_of(value)} is a {type(value).__name__} and must be a field. Write {name}: {hint} = ..."
    for name, hint in _variables(contract).items():
        value = getattr(cls, name, None)
        if hint in (str, bool) and value is not None and not isinstance(value, hint):
            example = f'{name} = "..."' if hint is str else f"{name} = True"
            type_name = type(value).__name__
            yield f"{name} is of type {type_name} and must be of type {hint.__name__}. Write {example} in the class"


def _wrong_arguments(function: Any, hook: Any) -> str:
    """Say why a function cannot be called as its hook is; empty if it can."""
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        return (
            f"{'is async' if inspect.iscoroutinefunction(function) else 'yields'} and must return its result"
        )
    argument_names = _arguments(hook)
    if inspect.isfunction(function) and not hasattr(function, "__wrapped__"):
        code = function.__code__
        if code.co_varnames[: code.co_argcount] == tuple(argument_names) and not code.co_kwonlyargcount:
            # true of nearly all functions; a signature takes 0.1 ms
            return ""
    try:
        signature = inspect.signature(function)
    except ValueError:
        # the signature of a function in C is not known
        return ""
    if not hasattr(function, "__get__"):
        # an object with __call__ is not bound to the method, so it gets no self
        argument_names = argument_names[1:]
    moved_names = [
        n
        for n, g in zip(signature.parameters, argument_names, strict=False)
        if n != g and n in argument_names
    ]
    try:
        signature.bind(*argument_names)
    except TypeError:
        moved_names = argument_names
    if not moved_names:
        return ""
    bare_parameters = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return f"takes {inspect.Signature(bare_parameters)} and is called with ({', '.join(argument_names)})"


def _find_misspelt(cls: type[Any], contract: Any) -> Iterator[str]:
    """Find attributes whose name resembles a hook or class variable that the class leaves out."""
    hooks, variables = _hooks(contract), _variables(contract)
    for name, value in vars(cls).items():
        if name[0] == "_" or hasattr(contract, name) or name in variables or isinstance(value, type):
            continue
        is_code = callable(value) or isinstance(value, (staticmethod, classmethod, property))
        if not is_code and not _is_class_variable(_annotations(cls).get(name, ClassVar)):
            continue
        missing_names = [n for n in (hooks if is_code else variables) if not _is_stated(cls, n)]
        nearest_name = _nearest(name, missing_names, _TYPO_LIKENESS)
        if nearest_name is None:
            continue
        advice = f" Write {_format_signature(hooks[nearest_name])}" if is_code else ""
        yield f"{name}{_line_of(value)}: a method has no {name!r}. Did you mean {nearest_name!r}?{advice}"


def _find_bare_fields(cls: type[Any], contract: Any) -> Iterator[str]:
    """Find attributes that are meant as settings and are none."""
    is_dataclass = "__dataclass_fields__" in vars(cls)
    if "__init__" in vars(cls) and not is_dataclass:
        return
    annotations, variables = _annotations(cls), _variables(contract)
    field_names = [n for n, a in annotations.items() if n not in variables and not _is_class_variable(a)]
    if field_names and not is_dataclass:
        verb = "is no setting" if len(field_names) == 1 else "are no settings"
        yield f"{', '.join(field_names)} {verb}: write @dataclass(frozen=True) above class {cls.__name__}"
    for name, value in vars(cls).items():
        is_value = isinstance(value, _VALUES) or dataclasses.is_dataclass(value)
        is_meant = name[0] != "_" and not name.isupper() and not isinstance(value, type)
        is_hook = inspect.isfunction(_defined(contract, name))
        if not is_value or not is_meant or is_hook or name in annotations or name in variables:
            continue
        if any(_is_class_variable(_annotations(base).get(name)) for base in cls.__mro__):
            continue
        if _nearest(name, variables, _TYPO_LIKENESS) is not None:
            # already reported as a misspelling
            continue
        type_name = "None" if value is None else type(value).__name__
        constant = (
            "" if hasattr(contract, name) else f"; for a constant, {name}: ClassVar[{type_name}] = {value!r}"
        )
        yield (
            f"{name} = {value!r} has no annotation, so it is no setting. Write {name}: {type_name} = {value!r} in a class "
            f"with @dataclass(frozen=True){constant}"
        )


def _nearest(name: str, known_names: Iterable[str], cutoff: float) -> str | None:
    """Most similar known name, whatever the order of its words; None if none reaches the cutoff."""
    by_words = {_words(n): n for n in known_names}
    matches = difflib.get_close_matches(name, by_words.values(), 1, cutoff)
    if not matches:
        matches = [by_words[w] for w in difflib.get_close_matches(_words(name), by_words, 1, cutoff)]
    return matches[0] if matches else None


def _words(name: str) -> str:
    """Words of a name in alphabetical order; ``localUpdate`` has two."""
    return "_".join(sorted(re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower().split("_")))


def _annotations(cls: type[Any]) -> Mapping[str, Any]:
    """Annotations in the body of a class."""
    return inspect.get_annotations(cls)


def _is_class_variable(annotation: Any) -> bool:
    """Whether an annotation, which may be a string, is ClassVar."""
    if isinstance(annotation, str):
        return re.match(r"(\w+\.)?ClassVar\b", annotation) is not None
    return annotation is ClassVar or typing.get_origin(annotation) is ClassVar


def _line_of(function: Any) -> str:
    """Line of a function, in parentheses; empty if it is not known."""
    function = getattr(function, "fget", getattr(function, "__func__", function))
    code = getattr(inspect.unwrap(function), "__code__", None)
    return "" if code is None else f" (line {code.co_firstlineno})"
