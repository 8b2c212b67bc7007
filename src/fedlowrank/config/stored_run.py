"""Opens stored runs to evaluate or export them."""

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
    """Open a run at one of its checkpoints; nothing is trained or written.

    Its data and code are read from the working folder in which the run began; see :mod:`.working_folder`.

    Args:
        folder: folder of a run that an experiment file made.
        python: advice for a run that was made from Python, for the message.
        best: whether to open the round with the best validation, for a run with ``run.keep_best``, and not the last
            round.
        allow_code: whether to import the Python code that the stored configuration names; see
            :mod:`fedlowrank.core.arguments.user_code`.

    Raises:
        CheckpointError: if there is no such run, or data or configuration have changed; or if its clients were
            reached over a network, so that their examples are not on this machine.
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
    """Explain why a run over a network cannot be opened, and where its models are."""
    if experiment.run.engine == "flower":
        location = f"{folder}.clients/CLIENT/RUN/model"
    else:
        location = f"FOLDER/RUN/model on the clients' machines (FOLDER is clients/{experiment.name}/CLIENT, or join --folder)"
    return (
        f"{folder} was served over a network, so it holds neither the examples nor the models of clients. After the "
        f"last round each client's model is in {location}."
    )


def read_run_config(folder: Path, python: str) -> dict[str, Any]:
    """Read ``run.json`` of a run; ``python`` is the advice for a run that was made from Python."""
    stored_config = read_config(folder)
    if "method" not in stored_config:
        raise CheckpointError(f"{folder / CONFIG} is damaged: it is not the configuration of a run")
    if "experiment" not in stored_config:
        raise CheckpointError(f"{folder} was made from Python; {python}")
    return stored_config
