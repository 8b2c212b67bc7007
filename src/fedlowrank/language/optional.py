"""Optional packages, imported where they are used and not before."""

from __future__ import annotations

import importlib
from typing import Any

from ..core.errors import DataError


def import_library(module: str, purpose: str, install: str = "'fedlowrank[language]'") -> Any:
    """A module of an optional package; DataError says what needs it and what to ``pip install``."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DataError(
            f"{purpose} needs {module.partition('.')[0]}: pip install {install} ({error})"
        ) from error
