"""Runs that were stored, opened again to look at or to export from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..core.errors import CheckpointError
from ..simulation.run import Run
from ..simulation.simulate import reopen
from . import experiment


def opened(folder: Path, python: str, best: bool = False, allow_code: bool = False) -> Run:
    """A run as a checkpoint of it has it; nothing is trained or written.

    Args:
        folder: of a run that an experiment file made.
        python: what to do instead with a run that was made from Python, for the message.
        best: the round with the best validation, of a run with ``run.keep_best``, and not the last.
        allow_code: import the Python code that the stored configuration names; see :mod:`fedlowrank.core.user_code`.

    Raises:
        CheckpointError: if there is no such run, or data or configuration have changed.
        ConfigError: if the configuration names Python code and that is not allowed.
    """
    stored = stored_config(folder, python)
    made = experiment.load(stored["experiment"], allow_code)
    name = stored["method"]["name"]
    config = {**made.describe(name), "vary": stored["vary"]}
    which = "best" if best else "checkpoint"
    return reopen(made.method(name), made.federation(), folder, made.run, config, which)


def stored_config(folder: Path, python: str) -> dict[str, Any]:
    """Contents of ``run.json`` of a run that an experiment file made; ``python`` says what to do with one from Python."""
    try:
        stored = json.loads((folder / "run.json").read_text())
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} is not a run folder: it holds no run.json") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{folder / 'run.json'} is damaged: {error}") from error
    if not isinstance(stored, dict) or "method" not in stored:
        raise CheckpointError(f"{folder / 'run.json'} is damaged: it is not the configuration of a run")
    if "experiment" not in stored:
        raise CheckpointError(f"{folder} was made from Python; {python}")
    return stored
