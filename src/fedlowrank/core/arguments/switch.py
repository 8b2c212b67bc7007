"""Settings that are read only for some values of a switch beside them, such as ``kind``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..errors import ConfigError
from ..io.text import join_words


class Switch(NamedTuple):
    """A field whose value decides which other fields are read.

    Attributes:
        field: name of the switch field.
        reads: values of the switch for which each other field is read, by field; an empty tuple means every value
            that is not empty, zero or false.
    """

    field: str
    reads: Mapping[str, tuple[Any, ...]]

    def is_read(self, name: str, value: Any) -> bool:
        """Whether a field is read for this value of the switch."""
        values = self.reads.get(name, (value,))
        return value in values if values else bool(value)


def check_switch(settings: Any, switch: Switch, title: str) -> None:
    """Refuse a field that nothing reads, because it would otherwise be ignored silently.

    A field at its default is accepted, also if it is written out.

    Args:
        settings: dataclass object, checked in its ``__post_init__``.
        switch: switch among its fields.
        title: title of the settings, for the message.

    Raises:
        ConfigError: if a field is set that nothing reads; the message names the field and what to type instead.
    """
    switch_value, path = getattr(settings, switch.field), f"{title}.{switch.field}"
    for name, values in switch.reads.items():
        choices = join_words([repr(value) for value in values], "or")
        if not switch.is_read(name, switch_value):
            refuse_unread_field(
                settings,
                name,
                title,
                f"with {path} = {switch_value!r}",
                f"set {path}{f' to {choices}' if choices else ''}",
            )


def refuse_unread_field(settings: Any, name: str, title: str, condition: str, advice: str) -> None:
    """Raise ConfigError for a field that nothing reads, unless it is at its default."""
    value = getattr(settings, name)
    if value != next(field.default for field in dataclasses.fields(settings) if field.name == name):
        raise ConfigError(
            f"{title}.{name} = {value!r} does nothing {condition}: {advice}, or leave {title}.{name} out"
        )
