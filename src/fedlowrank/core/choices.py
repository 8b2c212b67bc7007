"""Settings that take one of a few words."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any, Literal

from .errors import ConfigError, did_you_mean

_KNOWN: dict[type[Any], dict[str, tuple[str, ...]]] = {}


def check_choices(settings: Any) -> None:
    """Refuse a word that a ``Literal`` field does not know; it would else be taken for one of the others.

    Args:
        settings: a dataclass, from its ``__post_init__``.

    Raises:
        ConfigError: naming the field and the nearest word.
    """
    for name, words in _words(type(settings)).items():
        value = getattr(settings, name)
        if value not in words:
            raise ConfigError(
                f"{type(settings).__name__}.{name}: {value!r} is no choice. {did_you_mean(str(value), words)}"
            )


def _words(cls: type[Any]) -> dict[str, tuple[str, ...]]:
    if cls not in _KNOWN:
        hints = typing.get_type_hints(cls)
        fields = [f.name for f in dataclasses.fields(cls)]
        _KNOWN[cls] = {n: typing.get_args(hints[n]) for n in fields if typing.get_origin(hints[n]) is Literal}
    return _KNOWN[cls]
