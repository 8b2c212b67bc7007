"""Imports optional packages at their first use."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..core.errors import DataError


def import_library(module: str, purpose: str, install: str = "'fedlowrank[language]'") -> Any:
    """Import a module of an optional package.

    Args:
        module: name of the module.
        purpose: feature that needs the module, for the message.
        install: argument of ``pip install``, for the message.

    Raises:
        DataError: if the package is not installed.
    """
    # transformers and PEFT import bitsandbytes where it is installed; on a CPU it warns that a faster kernel is missing
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DataError(
            f"{purpose} needs {module.partition('.')[0]}: pip install {install} ({error})"
        ) from error


@contextmanager
def silence_library(library: Any) -> Iterator[None]:
    """Silence progress bars and warnings of ``transformers`` within a block, then restore the settings.

    transformers prints a table of missing weights when it loads a model; the notes of
    :class:`fedlowrank.language.base_model.LoadedBase` name them instead.
    """
    log = library.utils.logging
    verbosity, is_bar_enabled = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(verbosity)
        if is_bar_enabled:
            log.enable_progress_bar()
