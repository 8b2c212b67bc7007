"""Runs that were stored, opened again to look at or to export from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..core.errors import CheckpointError, FedlowrankError
from ..rounds.run import Run
from ..rounds.simulate import reopen
from ..storage.run_files import ACCOUNT, CONFIG, read_config
from .experiment import ExperimentConfig
from .working_folder import enter_working_folder


def open_run(folder: Path, python: str, best: bool = False, allow_code: bool = False) -> Run:
    """Open a run as a checkpoint of it has it; nothing is trained or written.

    Its data and code are those of the folder in which it began; see :mod:`.working_folder`.

    Args:
        folder: of a run that an experiment file made.
        python: what to do instead with a run that was made from Python, for the message.
        best: the round with the best validation, of a run with ``run.keep_best``, and not the last.
        allow_code: import the Python code that the stored configuration names; see
            :mod:`fedlowrank.core.arguments.user_code`.

    Raises:
        CheckpointError: if there is no such run, or data or configuration have changed; or if its clients were
            reached over a network, and their examples are not here.
        ConfigError: if the configuration names Python code and that is not allowed.
    """
    stored_config = read_run_config(folder, python)
    with enter_working_folder(folder, stored_config) as folder:
        name = stored_config["method"]["name"]
        experiment = ExperimentConfig.parse(stored_config["experiment"], allow_code, name)
        config = {**experiment.describe_run(name), "vary": stored_config["vary"]}
        checkpoint_name = "best" if best else "checkpoint"
        try:
            method, federation = experiment.build_method(name), experiment.federation()
            return reopen(method, federation, folder, experiment.run_here, config, checkpoint_name)
        except FedlowrankError as error:
            if not (folder / ACCOUNT).exists():
                raise
            raise CheckpointError(_explain_served(folder, experiment)) from error


def _explain_served(folder: Path, experiment: ExperimentConfig) -> str:
    """Why a run over a network cannot be opened, and where its models are."""
    if experiment.run.engine == "flower":
        location = f"{folder}.clients/CLIENT/RUN/model"
    else:
        location = f"FOLDER/RUN/model on the clients' machines (FOLDER is clients/{experiment.name}/CLIENT, or join --folder)"
    return (
        f"{folder} was served over a network, so it holds neither the examples nor the models of clients. After the "
        f"last round each client's model is in {location}."
    )


def read_run_config(folder: Path, python: str) -> dict[str, Any]:
    """Read ``run.json`` of a run; ``python`` says what to do with one that was made from Python."""
    stored_config = read_config(folder)
    if "method" not in stored_config:
        raise CheckpointError(f"{folder / CONFIG} is damaged: it is not the configuration of a run")
    if "experiment" not in stored_config:
        raise CheckpointError(f"{folder} was made from Python; {python}")
    return stored_config
