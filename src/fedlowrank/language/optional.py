"""Optional packages, imported where they are used and not before."""

from __future__ import annotations

import importlib
from typing import Any

from ..core.errors import DataError


def import_library(module: str, purpose: str, install: str = "'fedlowrank[language]'") -> Any:
    """A module of an optional package.

    Args:
        module: its name.
        purpose: what needs it, for the message.
        install: what to give to ``pip install``.

    Raises:
        DataError: if it cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DataError(
            f"{purpose} needs {module.partition('.')[0]}: pip install {install} ({error})"
        ) from error
