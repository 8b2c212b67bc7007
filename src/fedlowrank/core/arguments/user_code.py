"""The user's own Python code, named ``module:attribute`` in an experiment file or on the command line.

Importing a module runs it. Only this module of the package imports code that a text names. An experiment file that is
given to a command and the command line itself may name code. The configuration in a run folder may not, unless
``--allow-code`` is typed, because the folder may be somebody else's
(:meth:`fedlowrank.config.experiment.ExperimentConfig.parse`). ``report`` and ``list`` never import any.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from pathlib import Path
from typing import Any

from ..errors import ConfigError

_ADVICE = {
    "cannot inherit non-frozen dataclass": "Write @dataclass(frozen=True) above this class",
    "follows default argument": "Give the field a default, such as alpha: float = 0.5",
    "has no type annotation": "Write its type, such as alpha: float = field(default=0.5)",
}
"""Advice by the words of the dataclass module's own errors."""


_PACKAGE = __name__.partition(".")[0]


def is_of_package(code: Any) -> bool:
    """Whether a class or function is defined in this package and not by a user."""
    return (getattr(code, "__module__", None) or "").partition(".")[0] == _PACKAGE


def import_named(name: str, origin: str) -> Any:
    """Import an attribute of a module; the working folder is searched first.

    Args:
        name: import path ``package.module:attribute``.
        origin: setting or command that names the attribute, for messages.

    Raises:
        ConfigError: if the attribute cannot be imported, whatever its module raises.
    """
    module, _, attribute = name.partition(":")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        advice = next((f". {remedy}" for phrase, remedy in _ADVICE.items() if phrase in reason), "")
        raise ConfigError(
            f"{origin}: {name!r} cannot be imported: {reason}{_describe_import_location(error)}{advice}"
        ) from error


def _describe_import_location(error: Exception) -> str:
    """Describe the last line at the top level of a module that an exception passed, and the class that it defines there."""
    location, owner = "", ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_name == "<module>":
            location = f"{Path(frame.f_code.co_filename).name}, line {line}"
        if frame.f_globals.get("__name__") == "dataclasses" and isinstance(frame.f_locals.get("cls"), type):
            owner = f", class {frame.f_locals['cls'].__name__}"
    return f" ({location}{owner})" if location else ""
