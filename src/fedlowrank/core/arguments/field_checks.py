"""Arguments of settings and functions, checked from their annotations, with messages for a person."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import os
import typing
from abc import ABCMeta
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
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
"""How many settings below a class an argument is looked for that the class does not have."""


class _WrongValueError(Exception):
    """A value does not fit a type; the text says what would fit, after the name of the field."""


class FieldChecks(ABCMeta):
    """The metaclass of settings: dataclasses whose constructor checks its arguments from the annotations.

    An unknown argument, one of another type and a missing one are a ConfigError that names the field and says
    what to type. NumPy's scalars become Python's and a list becomes a tuple where one is annotated.
    A class with a constructor of its own is left alone.
    """

    if not TYPE_CHECKING:

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            """Check the arguments, and make the object."""
            plan = _plan_of(cls)
            return super().__call__(*args, **kwargs) if plan is None else _call(cls, plan, args, kwargs)

        @property
        def __signature__(cls) -> inspect.Signature:
            """That of the constructor, which ``inspect.signature`` would not look for behind ``__call__``."""
            signature = inspect.signature(cls.__init__)
            return signature.replace(
                parameters=list(signature.parameters.values())[1:], return_annotation=signature.empty
            )


class CheckedFields(metaclass=FieldChecks):
    """Base of dataclasses of settings; see :class:`FieldChecks`."""

    section: ClassVar[str] = ""
    """How messages call the settings where it is not by the name of the class."""
    passed_to: ClassVar[str] = ""
    """The function that takes the fields as keyword arguments, for messages about arguments passed elsewhere."""

    @classmethod
    def check_class(cls) -> None:
        """Refuse a class that does not fit its base; called once, before its first object is made."""


def check_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a public function whose arguments are checked as those of settings are, where they are plain.

    Plain are numbers, words, truth values, settings, and lists of these. The signature stays as it is.
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
    """The types of a function's plain parameters."""
    hints = _resolve_hints(function, inspect.signature(function).parameters)
    return {name: hint for name, hint in hints.items() if _is_plain(hint)}


def _is_plain(hint: Any) -> bool:
    """Whether a type is made of numbers, words, truth values, settings, and lists of these alone."""
    inner = typing.get_args(hint)
    if not inner or typing.get_origin(hint) is Literal:
        return hint in (*_SCALARS, None, NoneType, Ellipsis) or bool(inner) or isinstance(hint, FieldChecks)
    return all(map(_is_plain, inner))


class _Plan(NamedTuple):
    """What the constructor of a dataclass takes.

    Attributes:
        hints: the types of its arguments, in their order.
        exact: classes whose objects each argument takes as they are.
        required: the arguments without a default.
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
    """The types of the arguments of settings; empty for any other class."""
    plan = _plan_of(cls) if isinstance(cls, FieldChecks) else None
    return {} if plan is None else plan.hints


def _plan_of(cls: Any) -> _Plan | None:
    """The plan of a dataclass, made once; None where its constructor is one of its own."""
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
    """The types of fields or parameters; those that cannot be resolved, such as of a local class, are left out."""
    try:
        resolved = typing.get_type_hints(owner)
    except (NameError, TypeError, AttributeError):
        return {}
    return {name: resolved[name] for name in names if name in resolved}


def check_value(name: str, hint: Any, value: Any) -> Any:
    """The value as an annotation takes it; a ConfigError that begins with the name where it takes no such value."""
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
    """Classes whose objects a type takes as they are."""
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
    """The value as a type takes it; raises _WrongValueError where it takes no such value."""
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
        # of an array or a tensor
        value = value.tolist()
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | Mapping | Set):
        raise _WrongValueError(f": a list is needed, such as [{value!r}]; it is {_show(value)}")
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
    """A value as a message shows it: what is plain as it is, of anything else the class."""
    if isinstance(value, type):
        return f"the class {value.__module__}.{value.__qualname__}"
    if (
        isinstance(value, bool | int | float | str | NoneType | list | tuple | Mapping)
        and len(repr(value)) < 80
    ):
        return repr(value)
    return f"a {type(value).__module__}.{type(value).__qualname__}"


def _name(cls: type[Any]) -> str:
    """A settings class as one imports it."""
    package = cls.__module__.partition(".")[0]
    is_public = cls.__name__ in getattr(__import__(package), "__all__", ())
    return f"{package if is_public else cls.__module__}.{cls.__name__}"


def _settings_in(hint: Any) -> list[type[Any]]:
    """The dataclasses in a type, such as in ``SGD | AdamW | None``."""
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return [hint]
    return [cls for inner in typing.get_args(hint) for cls in _settings_in(inner)]


def _hint_at_settings(name: str, hint: Any, value: Any) -> str:
    """What to write instead of a word or a dict where settings are needed."""
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
    """The message about an argument that does not exist: one with a like name, or settings that have it."""
    mistake = f"{owner} has no argument {name!r}"
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


def find_argument(cls: type[Any], name: str, value: Any, settings: Any = None) -> str | None:
    """The argument of settings or of settings below them that has a name, as ``optimizer=SGD(lr=0.1)``.

    Args:
        cls: the settings.
        name: of the argument.
        value: of it, as it is written.
        settings: an object of the settings, whose own settings come first where a field takes several.
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
    """An argument as it is written; where settings are needed and the value is none, with their class."""
    try:
        _fit(hint, value)
    except _WrongValueError:
        if text := _hint_at_settings(name, hint, value).removeprefix(". Write "):
            return text
        if settings := _settings_in(hint):
            return f"{name}={settings[0].__name__}(...)"
    return f"{name}={_show(value)}"


def list_arguments(cls: type[Any]) -> list[str]:
    """Names of the arguments of settings, and of the settings that these take."""
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
    """An argument ``field=Settings(name=value)`` that has the name, exactly so many settings deep."""
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
