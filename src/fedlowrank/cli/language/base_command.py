"""The command ``base``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ...core.errors import ConfigError, did_you_mean
from ...language.smollm2 import write_smollm2
from ..terminal import OUT, say

BASES: dict[str, Callable[[Path], Path]] = {"smollm2": write_smollm2}
"""Base models that can be downloaded, by name."""


def base(name: str, folder: Path) -> int:
    """Download a base model and write it as a transformers folder."""
    if name not in BASES:
        raise ConfigError(f"there is no base model {name!r}. {did_you_mean(name, BASES)}")
    say(f"downloading {name}, and writing it to {folder}")
    BASES[name](folder)
    OUT.print(f"{folder}: complete. In an experiment file:", soft_wrap=True)
    print(f'[language]\npath = "{folder}"\nformat = "chat"')
    return 0
