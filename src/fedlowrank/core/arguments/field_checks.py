"""Checks of the arguments of settings and functions against their annotations, with messages for a person."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import os
import re
import typing
from abc import ABCMeta
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, ParamSpec, TypeVar

import numpy as np

from ..errors import ConfigError, did_you_mean

P = ParamSpec("P")
R = TypeVar("R")

_SCALARS: dict[Any, str] = {
    bool: "a valid boolean",
    int: "a valid integer",
    float: "a valid number",
    str: "a valid string",
}
ALIASES = {"learning_rate": "lr", "local_epochs": "epochs"}
"""Names that other libraries give to arguments."""
_DEPTH = 3
"""Number of levels of nested settings in which an argument is searched that the class does not have."""


class _WrongValueError(Exception):
    """A value does not fit a type; the text follows the name of the field and says what would fit."""


class FieldChecks(ABCMeta):
    """The metaclass of settings: dataclasses whose constructor checks its arguments from the annotations.

    An unknown argument, an argument of another type and a missing one raise a ConfigError that names the field and
    says what to type. A scalar of NumPy becomes one of Python, and a list becomes a tuple if the annotation is a
    tuple. A class with a constructor of its own is left alone.
    """

    if not TYPE_CHECKING:

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            """Check the arguments and make the object."""
            plan = _plan_of(cls)
            return super().__call__(*args, **kwargs) if plan is None else _call(cls, plan, args, kwargs)

        @property
        def __signature__(cls) -> inspect.Signature:
            """Signature of the constructor, which ``inspect.signature`` would not find behind ``__call__``."""
            signature = inspect.signature(cls.__init__)
            return signature.replace(
                parameters=list(signature.parameters.values())[1:], return_annotation=signature.empty
            )


class CheckedFields(metaclass=FieldChecks):
    """Base of dataclasses of settings; see :class:`FieldChecks`."""

    section: ClassVar[str] = ""
    """Name of the settings in messages, if it is not the name of the class."""
    passed_to: ClassVar[str] = ""
    """Function that takes the fields as keyword arguments, for messages about arguments passed elsewhere."""

    @classmethod
    def check_class(cls) -> None:
        """Refuse a class that does not fit its base; called once, before the first object of the class is made."""


def check_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a public function so that its plain arguments are checked as those of settings are.

    Plain values are numbers, words, booleans, settings, and lists of these. The signature stays the same.
    """
    signature = inspect.signature(function)
    owner = function.__qualname__.removesuffix(".__init__").rpartition("<locals>.")[2]
    parameter_names = [
        n for n, p in signature.parameters.items() if p.kind is not p.VAR_KEYWORD and n not in ("self", "cls")
    ]
    takes_any = len(parameter_names) < len([n for n in signature.parameters if n not in ("self", "cls")])

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        hints = _hints_of_function(function)
        for name in kwargs if not takes_any else ():
            if name not in parameter_names:
                raise ConfigError(_unknown(owner, name, kwargs[name], parameter_names, hints))
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise ConfigError(f"{owner}: {error}") from error
        for name, value in bound.arguments.items():
            if name in hints:
                bound.arguments[name] = _check(owner, name, hints[name], value)
        return function(*bound.args, **bound.kwargs)

    return checked


@functools.cache
def _hints_of_function(function: Callable[..., Any]) -> Mapping[str, Any]:
    """Types of a function's plain parameters by name."""
    hints = _resolve_hints(function, inspect.signature(function).parameters)
    return {name: hint for name, hint in hints.items() if _is_plain(hint)}


def _is_plain(hint: Any) -> bool:
    """Whether a type consists only of numbers, words, booleans, settings, and lists of these."""
    inner = typing.get_args(hint)
    if not inner or typing.get_origin(hint) is Literal:
        return hint in (*_SCALARS, None, NoneType, Ellipsis) or bool(inner) or isinstance(hint, FieldChecks)
    return all(map(_is_plain, inner))


class _Plan(NamedTuple):
    """Arguments that the constructor of a dataclass takes.

    Attributes:
        hints: type of each argument, in the order of the arguments.
        exact: classes whose objects each argument accepts unchanged.
        required: names of the arguments without a default.
    """

    hints: dict[str, Any]
    exact: dict[str, frozenset[type[Any]]]
    required: list[str]


def _call(cls: Any, plan: _Plan, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    name, hints, exact = cls.section or cls.__name__, plan.hints, plan.exact
    if len(args) > len(hints):
        raise ConfigError(
            f"{name} takes at most {len(hints)} arguments ({', '.join(hints)}); {len(args)} were given"
        )
    for field, value in kwargs.items():
        if field not in hints:
            raise ConfigError(_unknown(cls.__name__, field, value, list(hints), hints, cls))
        if type(value) not in exact[field]:
            kwargs[field] = _check(name, field, hints[field], value)
    checked_values = [
        value if type(value) in exact[field] else _check(name, field, hints[field], value)
        for field, value in zip(hints, args, strict=False)
    ]
    if missing_names := [n for n in plan.required if n not in kwargs and n not in list(hints)[: len(args)]]:
        raise ConfigError(f"{name}.{missing_names[0]}: this field is needed")
    return super(FieldChecks, cls).__call__(*checked_values, **kwargs)


def _hints_of(cls: Any) -> Mapping[str, Any]:
    """Types of the arguments of settings by name; empty for any other class."""
    plan = _plan_of(cls) if isinstance(cls, FieldChecks) else None
    return {} if plan is None else plan.hints


def _plan_of(cls: Any) -> _Plan | None:
    """Plan of a dataclass, made once; None if the class defines a constructor of its own."""
    cached = cls.__dict__.get("_plan")
    if cached is None:
        if issubclass(cls, CheckedFields):
            cls.check_class()
        is_settings = dataclasses.is_dataclass(cls)
        fields = [f for f in dataclasses.fields(cls) if f.init] if is_settings else []
        names, sentinel = [f.name for f in fields], dataclasses.MISSING
        plan = None
        if is_settings and list(inspect.signature(cls).parameters) == names:
            resolved_hints = _resolve_hints(cls, names)
            hints = {name: resolved_hints.get(name, Any) for name in names}
            required_names = [
                f.name for f in fields if f.default is sentinel and f.default_factory is sentinel
            ]
            plan = _Plan(hints, {name: _exact_types(hint) for name, hint in hints.items()}, required_names)
        cached = cls._plan = (plan,)
    plan_or_none: _Plan | None = cached[0]
    return plan_or_none


def _resolve_hints(owner: Any, names: Iterable[str]) -> dict[str, Any]:
    """Resolve the types of fields or parameters; those that cannot be resolved, such as types of a local class, are left out."""
    try:
        resolved = typing.get_type_hints(owner)
    except (NameError, TypeError, AttributeError):
        return {}
    return {name: resolved[name] for name in names if name in resolved}


def check_value(name: str, hint: Any, value: Any) -> Any:
    """Convert a value to the type of an annotation, or raise a ConfigError that begins with the name."""
    try:
        return _fit(hint, value)
    except _WrongValueError as error:
        raise ConfigError(f"{name}{error}") from None


def _check(owner: str, name: str, hint: Any, value: Any) -> Any:
    try:
        return _fit(hint, value)
    except _WrongValueError as error:
        raise ConfigError(f"{owner}.{name}{error}{_hint_at_settings(name, hint, value)}") from None


def _exact_types(hint: Any) -> frozenset[type[Any]]:
    """Classes whose objects a type accepts unchanged."""
    if hint is float:
        return frozenset({float, int})
    if hint in _SCALARS or (dataclasses.is_dataclass(hint) and isinstance(hint, type)):
        return frozenset({hint})
    if typing.get_origin(hint) is typing.Annotated:
        return _exact_types(typing.get_args(hint)[0])
    if typing.get_origin(hint) in (typing.Union, UnionType):
        return frozenset().union(*map(_exact_types, typing.get_args(hint)))
    return frozenset({NoneType}) if hint in (None, NoneType) else frozenset()


def _fit(hint: Any, value: Any) -> Any:
    """Convert a value to a type, or raise _WrongValueError if the value does not fit it."""
    value_type = type(value)
    if hint is value_type or hint is Any or (hint is float and value_type is int):
        return value
    if isinstance(value, np.generic):
        return _fit(hint, value.item())
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _fit(inner[0], value)
    if origin in (typing.Union, UnionType):
        return _fit_union(inner, value)
    if hint in (None, NoneType):
        if value is None:
            return value
        raise _WrongValueError(f": input should be None; it is {_show(value)}")
    if hint in _SCALARS:
        return _fit_scalar(hint, value)
    if origin is Literal:
        if value in inner and not (isinstance(value, bool) and bool not in map(type, inner)):
            return value
        raise _WrongValueError(f": {value!r} is no choice. {did_you_mean(str(value), map(str, inner))}")
    if origin in (tuple, list, Sequence):
        return _fit_list(origin, inner, value)
    if origin in (dict, Mapping):
        if not isinstance(value, Mapping):
            raise _WrongValueError(f": input should be a dict; it is {_show(value)}")
        fitted = {key: _fit(inner[1], item) for key, item in value.items()}
        return value if all(fitted[key] is item for key, item in value.items()) else fitted
    if isinstance(hint, type) and dataclasses.is_dataclass(hint) and not isinstance(value, hint):
        raise _WrongValueError(f" must be {_name(hint)}(...), not {_show(value)}")
    return value


def _fit_scalar(hint: Any, value: Any) -> Any:
    if isinstance(value, hint) and (hint is bool or not isinstance(value, bool)):
        return value
    if hint is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if hint is str and isinstance(value, os.PathLike):
        return os.fspath(value)
    if hint is str and callable(value) and hasattr(value, "__name__"):
        raise _WrongValueError(f": name your own code 'module:{value.__name__}'; it is {_show(value)}")
    detail = ", got a number with a fractional part" if hint is int and isinstance(value, float) else ""
    raise _WrongValueError(f": input should be {_SCALARS[hint]}{detail}; it is {_show(value)}")


def _fit_union(hints: Sequence[Any], value: Any) -> Any:
    errors = []
    for hint in sorted(hints, key=lambda hint: hint is not type(value)):
        try:
            return _fit(hint, value)
        except _WrongValueError as error:
            errors.append((hint, error))
    settings = [hint for hint, _ in errors if dataclasses.is_dataclass(hint) and isinstance(hint, type)]
    if len(settings) > 1:
        names = " or ".join(f"{_name(hint)}(...)" for hint in settings)
        raise _WrongValueError(f" must be {names}, not {_show(value)}")
    raise next(error for hint, error in errors if hint is not NoneType)


def _fit_list(origin: Any, inner: Sequence[Any], value: Any) -> Any:
    if hasattr(value, "tolist"):
        # an array or a tensor
        value = value.tolist()
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | Mapping | Set):
        example = sorted(value, key=str) if isinstance(value, Set | Mapping) else [value]
        raise _WrongValueError(f": a list is needed, such as {example!r}; it is {_show(value)}")
    if not isinstance(value, Sequence):
        value = list(value)
    if origin is tuple and Ellipsis not in inner:
        if len(inner) != len(value):
            raise _WrongValueError(f": a list of {len(inner)} values is needed; it is {_show(value)}")
        fitted = [_fit(hint, item) for hint, item in zip(inner, value, strict=True)]
    else:
        fitted = [_fit_item(inner[0], index, item) for index, item in enumerate(value)]
    return tuple(fitted) if origin is tuple else fitted if isinstance(value, list) else value


def _fit_item(hint: Any, index: int, value: Any) -> Any:
    try:
        return _fit(hint, value)
    except _WrongValueError as error:
        raise _WrongValueError(f", value {index}{error}") from None


def _show(value: Any) -> str:
    """Format a value for a message: plain values by their repr, any other value by its class."""
    if isinstance(value, type):
        return f"the class {value.__module__}.{value.__qualname__}"
    if (
        isinstance(value, bool | int | float | str | NoneType | list | tuple | Mapping)
        and len(repr(value)) < 80
    ):
        return repr(value)
    return f"a {type(value).__module__}.{type(value).__qualname__}"


def _name(cls: type[Any]) -> str:
    """Name of a settings class as one imports it."""
    package = cls.__module__.partition(".")[0]
    is_public = cls.__name__ in getattr(__import__(package), "__all__", ())
    return f"{package if is_public else cls.__module__}.{cls.__name__}"


def _settings_in(hint: Any) -> list[type[Any]]:
    """Dataclasses in a type, such as in ``SGD | AdamW | None``."""
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return [hint]
    return [cls for inner in typing.get_args(hint) for cls in _settings_in(inner)]


def _hint_at_settings(name: str, hint: Any, value: Any) -> str:
    """Suggest what to write instead of a word or a dict where settings are needed."""
    for cls in _settings_in(hint):
        hints = _hints_of(cls)
        if isinstance(value, Mapping) and hints and {k for k in value if k != "kind"} <= set(hints):
            return f". Write {name}={cls.__name__}({', '.join(f'{k}={v!r}' for k, v in value.items())})"
        for field, field_hint in hints.items():
            choices = typing.get_args(field_hint) if typing.get_origin(field_hint) is Literal else ()
            if isinstance(value, str) and difflib.get_close_matches(value, map(str, choices), n=1):
                choice = difflib.get_close_matches(value, map(str, choices), n=1)[0]
                argument = "" if len(choices) == 1 else f"{field}={choice!r}"
                return f". Write {name}={cls.__name__}({argument})"
    return ""


def _unknown(
    owner: str, name: str, value: Any, known_names: Sequence[str], hints: Mapping[str, Any], cls: Any = None
) -> str:
    """Write the message about an unknown argument: it suggests one with a similar name, or settings that have the argument."""
    mistake = f"{owner} has no argument {name!r}"
    if numbered_fields := write_numbered(name, value, known_names):
        return f"{mistake}. Write {numbered_fields}"
    if difflib.get_close_matches(name, known_names, n=1, cutoff=0.75):
        return f"{mistake}. {did_you_mean(name, known_names)}"
    defaults = {f.name: f.default for f in dataclasses.fields(cls)} if cls is not None else {}
    name = ALIASES.get(name, name)
    value_text = _show(value)
    if suggestion := _find_deeper(hints, defaults, name, value_text, 1):
        return f"{mistake}. Did you mean {suggestion}?"
    for settings in CheckedFields.__subclasses__():
        if settings.passed_to and settings is not cls and name in _hints_of(settings):
            return f"{mistake}. Did you mean {settings.passed_to}(..., {name}={value_text})?"
    for depth in range(2, _DEPTH + 1):
        if suggestion := _find_deeper(hints, defaults, name, value_text, depth):
            return f"{mistake}. Did you mean {suggestion}?"
    return f"{mistake}. {did_you_mean(name, known_names)}"


def write_numbered(name: str, value: Any, known_names: Collection[str], prefix: str = "") -> str:
    """Write the numbered fields of a list, such as ``beta1=0.9, beta2=0.99`` for ``betas``; empty if there are none.

    Args:
        name: unknown name.
        value: value that the user gave it; unless it is a list of one item for each field, the values are left open.
        known_names: names of all fields.
        prefix: text before each name.
    """
    stem = re.escape(name.removesuffix("s"))
    fields = sorted({n for n in known_names if re.fullmatch(rf"{stem}\d+", n)})
    items = [_show(item) for item in value] if isinstance(value, (tuple, list)) else []
    if len(items) != len(fields):
        items = ["..."] * len(fields)
    return ", ".join(f"{prefix}{field}={item}" for field, item in zip(fields, items, strict=True))


def find_argument(cls: type[Any], name: str, value: Any, settings: Any = None) -> str | None:
    """Find an argument by name in settings or the settings nested in them, and write it as ``optimizer=SGD(lr=0.1)``.

    Args:
        cls: class of the settings.
        name: name of the argument.
        value: value of the argument, as the user wrote it.
        settings: object of the settings; the classes of its nested settings are searched first where a field accepts
            several classes.
    """
    hints = _hints_of(cls)
    name = ALIASES.get(name, name)
    if name in hints:
        return _write_argument(name, hints[name], value)
    defaults = {f.name: f.default for f in dataclasses.fields(cls)} if hints else {}
    defaults |= {field: getattr(settings, field) for field in hints if settings is not None}
    suggestions = (_find_deeper(hints, defaults, name, _show(value), depth) for depth in range(1, _DEPTH + 1))
    return next((suggestion for suggestion in suggestions if suggestion), None)


def _write_argument(name: str, hint: Any, value: Any) -> str:
    """Write an argument as code; if settings are needed and the value is none, write the class of the settings."""
    try:
        _fit(hint, value)
    except _WrongValueError:
        if text := _hint_at_settings(name, hint, value).removeprefix(". Write "):
            return text
        if settings := _settings_in(hint):
            return f"{name}={settings[0].__name__}(...)"
    return f"{name}={_show(value)}"


def list_arguments(cls: type[Any]) -> list[str]:
    """Names of the arguments of settings and of the settings nested in them."""
    hints = _hints_of(cls)
    return [
        *hints,
        *(
            name
            for hint in hints.values()
            for inner_class in _settings_in(hint)
            for name in _hints_of(inner_class)
        ),
    ]


def _find_deeper(
    hints: Mapping[str, Any], defaults: Mapping[str, Any], name: str, value_text: str, depth: int
) -> str | None:
    """Find an argument exactly ``depth`` settings deep and write it as ``field=Settings(name=value)``."""
    for field, hint in hints.items():
        # the class of the default value first
        classes = sorted(_settings_in(hint), key=lambda kind: kind is not type(defaults.get(field)))
        for settings_class in classes:
            inner = _hints_of(settings_class)
            if not inner or typing.get_origin(hint) in (dict, Mapping):
                continue
            if depth == 1 and name in inner:
                return f"{field}={settings_class.__name__}({name}={value_text})"
            if depth > 1:
                inner_defaults = {f.name: f.default for f in dataclasses.fields(settings_class)}
                if suggestion := _find_deeper(inner, inner_defaults, name, value_text, depth - 1):
                    return f"{field}={settings_class.__name__}({suggestion})"
    return None
