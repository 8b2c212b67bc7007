"""Optional packages, imported where they are used and not before."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def quiet(library: Any) -> Iterator[None]:
    """Silence progress bars and warnings of ``transformers`` within a block, then restore the settings.

    Loading prints a table of missing weights, which :class:`fedlowrank.language.base_model.LoadedBase` notes.
    """
    log = library.utils.logging
    before, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(before)
        if bars:
            log.enable_progress_bar()
