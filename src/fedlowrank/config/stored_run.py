"""Opens stored runs to evaluate or export them, and finds the client that a command names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..core.contract import ClientInfo
from ..core.errors import CheckpointError, ConfigError, FedlowrankError, did_you_mean
from ..rounds.run import Run
from ..rounds.simulate import reopen
from ..storage.run_files import ACCOUNT, CONFIG, read_config
from .experiment import ExperimentConfig
from .working_folder import enter_working_folder


def open_run(
    folder: Path,
    python: str,
    best: bool = False,
    allow_code: bool = False,
    local: Mapping[str, Any] | None = None,
) -> Run:
    """Open a run at one of its checkpoints; nothing is trained or written.

    Its data and code are read from the working folder in which the run began; see :mod:`.working_folder`.

    Args:
        folder: folder of a run that an experiment file made.
        python: advice for a run that was made from Python, for the message.
        best: whether to open the round with the best validation, for a run with ``run.keep_best``, and not the last
            round.
        allow_code: whether to import the Python code that the stored configuration names; see
            :mod:`fedlowrank.core.arguments.user_code`.
        local: fields of the section ``[local]`` that replace those of the run.

    Raises:
        CheckpointError: if there is no such run, or data or configuration have changed; or if its clients were
            reached over a network, so that their examples are not on this machine.
        ConfigError: if the configuration names Python code and that is not allowed.
    """
    stored_config = read_run_config(folder, python)
    with enter_working_folder(folder, stored_config) as folder:
        name = stored_config["method"]["name"]
        tables = dict(stored_config["experiment"])
        if local:
            tables["local"] = {**tables.get("local", {}), **local}
        experiment = ExperimentConfig.parse(tables, allow_code, name)
        config = {**experiment.describe_run(name), "vary": stored_config["vary"]}
        checkpoint_name = "best" if best else "checkpoint"
        try:
            method, federation = experiment.build_method(name), experiment.federation()
            return reopen(method, federation, folder, experiment.run_here, config, checkpoint_name)
        except FedlowrankError as error:
            if not (folder / ACCOUNT).exists():
                raise
            raise CheckpointError(_explain_served(folder, experiment)) from error


def find_typed_client(infos: Sequence[ClientInfo], text: str, option: str = "--client") -> ClientInfo:
    """Find the client that a text on the command line names.

    Args:
        infos: all clients of the run.
        text: name or number of a client; ``name=TEXT`` is a name and ``number=TEXT`` a number, also where one client has
            the name and another one the number.
        option: option that takes the text, for messages.

    Raises:
        ConfigError: if no client has the name or the number, or if the text is the name of one client and the number
            of another one.
    """
    by_name = {info.name: info for info in infos if info.name}
    by_number = {str(info.id): info for info in infos}
    kind, _, value = text.partition("=")
    if text in by_name or kind not in ("name", "number"):
        kind, value = "", text
    named_client = by_name.get(value) if kind != "number" else None
    numbered_client = by_number.get(value) if kind != "name" else None
    if named_client and numbered_client and named_client is not numbered_client:
        raise ConfigError(
            f"{option} {text} may be {named_client.title}, by its name, or {numbered_client.title}, by its number. Type "
            f"{option} name={text} for {named_client.title}, or {option} number={text} for {numbered_client.title}"
        )
    if client := named_client or numbered_client:
        return client
    message = f"{option} {text}: there is no client {text}; they are numbered from 0 to {len(infos) - 1}"
    raise ConfigError(f"{message} and have names. {did_you_mean(value, by_name)}" if by_name else message)


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
