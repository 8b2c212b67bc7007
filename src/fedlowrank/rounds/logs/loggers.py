"""Logging while a run goes on: TensorBoard, Weights & Biases, MLflow.

The numbers of a round (:func:`...results.scalars.list_scalars`) are written as soon as its record is complete.
Loggers read only records, so they never change a result.
"""

from __future__ import annotations

import functools
import importlib
import logging
import threading
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from ...core.errors import CheckpointError, ConfigError, FedlowrankError
from ...core.io.atomic_files import as_checkpoint_error
from ...results.records import RoundRecord
from ...results.scalars import list_scalars
from ...storage.digest import read_sealed, write_sealed
from ..callbacks import Callback
from .progress import run_label

MODULES = {
    "tensorboard": ("TensorBoard", "torch.utils.tensorboard"),
    "wandb": ("Weights & Biases", "wandb"),
    "mlflow": ("MLflow", "mlflow"),
}
"""Title and module of each logger that ``run.log`` may name."""

IDENTIFIERS = "logging.json"
"""File in a run folder with the identifiers by which Weights & Biases and MLflow know the run."""

logger = logging.getLogger(__name__)


def import_logger(name: str) -> Any:
    """Import the module of a logger that ``run.log`` names.

    Raises:
        ConfigError: if the module is not installed; the message gives the command that installs it.
    """
    title, path = MODULES[name]
    try:
        with warnings.catch_warnings():
            # warnings about these libraries' own use of their dependencies
            warnings.simplefilter("ignore")
            module = importlib.import_module(path)
    except ImportError as error:
        raise ConfigError(
            f"{title} is not installed ({error}). Install it with: pip install 'fedlowrank[{name}]'"
        ) from error
    if name == "mlflow":
        # MLflow reports every table that it makes
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        logging.getLogger("alembic").setLevel(logging.WARNING)
    return module


def check_loggers(names: Sequence[str], folder: Path | None) -> None:
    """Refuse loggers that cannot work, before anything is trained or written.

    Raises:
        ConfigError: if a package is missing, or the run has no folder.
    """
    for name in names:
        import_logger(name)
    if names and folder is None:
        raise ConfigError("run.log needs a run folder: simulate(..., folder='runs/mine')")


def make_loggers(
    names: Sequence[str], folder: Path, config: Mapping[str, Any], clients: Sequence[Mapping[str, Any]]
) -> list[Logger]:
    """Make the loggers of a run.

    Args:
        names: names of the loggers in ``run.log``.
        folder: folder of the run.
        config: contents of ``run.json``.
        clients: contents of ``clients.json``.
    """
    return [LOGGERS[name](folder, config, clients) for name in dict.fromkeys(names)]


def forget_targets(folder: Path) -> None:
    """Make a run log to new targets from now on, because it repeats rounds that its old targets hold.

    Weights & Biases and MLflow keep every number that was logged. TensorBoard's files are written anew in any case.

    Args:
        folder: folder of the run.

    Raises:
        CheckpointError: if the file of the identifiers cannot be removed.
    """
    path = folder / IDENTIFIERS
    if path.exists():
        with as_checkpoint_error(f"cannot remove {path}"):
            path.unlink()
        logger.info(
            "a run of Weights & Biases or MLflow keeps the rounds that are repeated: from now on, a new one is written, "
            "with the earlier rounds"
        )


def summary_writer(folder: Path, **options: Any) -> Any:
    """Make a ``SummaryWriter`` of TensorBoard; raises ConfigError if it is not installed."""
    module = import_logger("tensorboard")
    _hide_errors_of_writer_threads()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return module.SummaryWriter(log_dir=str(folder), **options)


@functools.cache
def _hide_errors_of_writer_threads() -> None:
    """Print no traceback of the threads that write TensorBoard's files: the writer raises their errors in its caller."""
    print_error = threading.excepthook

    def print_other_error(args: threading.ExceptHookArgs) -> None:
        if type(args.thread).__module__ != "tensorboard.summary.writer.event_file_writer":
            print_error(args)

    threading.excepthook = print_other_error


class Logger(Callback, ABC):
    """Base class of loggers: writes the numbers of each round, and after a resume those that are missing.

    Args:
        folder: folder of the run.
        config: contents of ``run.json``.
        clients: contents of ``clients.json``.
    """

    name: ClassVar[str]

    def __init__(self, folder: Path, config: Mapping[str, Any], clients: Sequence[Mapping[str, Any]]) -> None:
        self.folder, self.config, self.clients = folder, config, clients
        self._bytes = 0

    def on_run_begin(self, records: Sequence[RoundRecord]) -> None:
        """Open the target and write the earlier rounds that it lacks."""
        try:
            missing_rounds = self.open([record.round for record in records])
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"run.log: {self.name} cannot be opened: {type(error).__name__}: {error}"
            ) from error
        self._bytes = 0
        try:
            for record in records:
                values = self._scalars(record)
                if record.round in missing_rounds:
                    self._write(values, record.round)
        except Exception:
            self.on_run_end(False)
            raise

    def __call__(self, record: RoundRecord) -> None:
        """Write the numbers of a round.

        Raises:
            CheckpointError: if the target fails; the message says how the run goes on without it.
        """
        self._write(self._scalars(record), record.round)

    def on_run_end(self, finished: bool) -> None:
        """Close the target; of a run that has failed, the error of the run stays the one that is raised.

        Raises:
            CheckpointError: if the target of a finished run fails.
        """
        try:
            self.close(finished)
        except Exception as error:
            if finished:
                raise self._failure(error) from error
            logger.warning("run.log: %s cannot be closed: %s: %s", self.name, type(error).__name__, error)

    @abstractmethod
    def open(self, rounds: Sequence[int]) -> Collection[int]:
        """Open the target of a run with these completed rounds; return the ones that the target lacks."""

    @abstractmethod
    def write(self, values: Mapping[str, float], round: int) -> None:
        """Write the numbers of a round, by tag."""

    @abstractmethod
    def close(self, finished: bool) -> None:
        """Close the target if it was opened.

        Args:
            finished: whether the run reached its end.
        """

    def _write(self, values: Mapping[str, float], round: int) -> None:
        try:
            self.write(values, round)
        except FedlowrankError:
            raise
        except Exception as error:
            raise self._failure(error) from error

    def _failure(self, error: Exception) -> CheckpointError:
        return CheckpointError(
            f"run.log: {self.name} failed: {type(error).__name__}: {error}.",
            python="Go on without it by simulate(..., resume=True, log=()).",
            command="Go on without it by `fedlowrank resume RUN run.log=[]`.",
        )

    def _scalars(self, record: RoundRecord) -> dict[str, float]:
        values = list_scalars(record, self.clients, self._bytes)
        self._bytes += record.bytes_up + record.bytes_down
        return values

    def read_identifier(self) -> str | None:
        """Read the identifier by which the target knows this run; None for a new run."""
        identifier = self._identifiers().get(self.name)
        return None if identifier is None else str(identifier)

    def keep_identifier(self, identifier: str) -> None:
        """Store the identifier in the run folder, so that a resumed run logs to the same target."""
        self._keep(self.name, identifier)

    def _keep(self, name: str, value: Any) -> None:
        write_sealed(self.folder / IDENTIFIERS, {**self._identifiers(), name: value})

    def _identifiers(self) -> dict[str, Any]:
        path = self.folder / IDENTIFIERS
        try:
            return read_sealed(path) if path.exists() else {}
        except CheckpointError as error:
            raise CheckpointError(f"{error} Or remove it to log to a new run.") from error


class TensorBoardLogger(Logger):
    """Event files in ``RUN/tensorboard``, flushed after every round."""

    name = "tensorboard"
    _SUFFIX = ".fedlowrank"

    def open(self, rounds: Sequence[int]) -> Collection[int]:
        """Write all rounds anew, because rounds after the last checkpoint are repeated and must not appear twice."""
        target = self.folder / "tensorboard"
        for old_file in target.glob(f"events.out.tfevents.*{self._SUFFIX}"):
            old_file.unlink()
        self._writer = summary_writer(target, filename_suffix=self._SUFFIX, purge_step=0)
        return rounds

    def write(self, values: Mapping[str, float], round: int) -> None:
        """Write the numbers of a round, by tag."""
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, round)
        self._writer.flush()

    def close(self, finished: bool) -> None:
        """Close the event file."""
        del finished
        if hasattr(self, "_writer"):
            self._writer.close()


class WandbLogger(Logger):
    """A run of Weights & Biases: its project is the name of the experiment, its config is ``run.json``."""

    name = "wandb"
    _LAST_ROUND = "wandb_round"

    def open(self, rounds: Sequence[int]) -> Collection[int]:
        """Start a run, or continue the run that this folder began."""
        wandb = import_logger("wandb")
        run_id = self.read_identifier()
        self._run = wandb.init(
            project=str(self.config.get("name", "fedlowrank")),
            name=run_label(self.config),
            config=dict(self.config),
            id=run_id,
            resume=None if run_id is None else "allow",
            settings=wandb.Settings(silent=True, console="off", reinit="create_new"),
        )
        self.keep_identifier(str(self._run.id))
        # Weights & Biases takes no step that is not above the last one
        self._last_round = -1 if run_id is None else self._identifiers().get(self._LAST_ROUND, -1)
        return rounds

    def write(self, values: Mapping[str, float], round: int) -> None:
        """Write the numbers of a round by tag, unless the interrupted run had logged them."""
        if round <= self._last_round:
            return
        self._run.log(dict(values), step=round, commit=True)
        self._keep(self._LAST_ROUND, round)

    def close(self, finished: bool) -> None:
        """Finish the run, as failed if it did not reach its end."""
        if hasattr(self, "_run"):
            self._run.finish(exit_code=0 if finished else 1)


class MlflowLogger(Logger):
    """A run of MLflow: its experiment has the experiment's name, its parameters are the method, run and varied settings."""

    name = "mlflow"

    def __init__(self, folder: Path, config: Mapping[str, Any], clients: Sequence[Mapping[str, Any]]) -> None:
        super().__init__(folder, config, clients)
        # the steps of each tag that the interrupted run had logged; None in a new run
        self._logged: dict[str, set[int]] | None = None

    def open(self, rounds: Sequence[int]) -> Collection[int]:
        """Create a run, or continue the run that this folder began."""
        mlflow = import_logger("mlflow")
        self._client = mlflow.MlflowClient()
        run_id = self.read_identifier()
        if run_id is None:
            title = str(self.config.get("name", "fedlowrank"))
            experiment_id = self._find_experiment(title)
            self._id = str(
                self._client.create_run(experiment_id, run_name=run_label(self.config)).info.run_id
            )
            self.keep_identifier(self._id)
            entities = importlib.import_module("mlflow.entities")
            parameters = [entities.Param(field, value) for field, value in _flat(self.config)]
            for start in range(0, len(parameters), 100):
                self._client.log_batch(self._id, params=parameters[start : start + 100])
            return rounds
        self._id = run_id
        self._client.update_run(run_id, status="RUNNING")
        self._logged = {}
        return rounds

    def _find_experiment(self, title: str) -> str:
        """Find the experiment of a title, or create it; another run may do so at the same time."""
        exceptions = importlib.import_module("mlflow.exceptions")
        experiment = self._client.get_experiment_by_name(title)
        if experiment is None:
            try:
                return str(self._client.create_experiment(title))
            except exceptions.MlflowException:
                experiment = self._client.get_experiment_by_name(title)
                if experiment is None:
                    raise
        return str(experiment.experiment_id)

    def _logged_steps(self, tag: str) -> set[int]:
        """Steps of a tag that an interrupted run had logged."""
        if self._logged is None:
            return set()
        if tag not in self._logged:
            self._logged[tag] = {m.step for m in self._client.get_metric_history(self._id, tag)}
        return self._logged[tag]

    def write(self, values: Mapping[str, float], round: int) -> None:
        """Write the numbers of a round by tag, except those that the interrupted run had logged."""
        entities = importlib.import_module("mlflow.entities")
        timestamp = int(1000 * time.time())
        metrics = [
            entities.Metric(tag, value, timestamp, round)
            for tag, value in values.items()
            if round not in self._logged_steps(tag)
        ]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self, finished: bool) -> None:
        """Set the status of the run."""
        if hasattr(self, "_id"):
            self._client.set_terminated(self._id, status="FINISHED" if finished else "FAILED")


def _flat(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """List settings of method and run as dotted names and texts; MLflow takes at most 6,000 characters of a text."""
    method = config.get("method", {})
    settings = {"method": method.get("name", "")}
    tables = {"method": method.get("fields", {}), "run": config.get("run", {})}
    for section, fields in tables.items():
        settings |= {f"{section}.{field}": value for field, value in fields.items()}
    settings |= config.get("vary", {})
    return [(field, str(value)[:6000]) for field, value in settings.items()]


LOGGERS: dict[str, type[Logger]] = {c.name: c for c in (TensorBoardLogger, WandbLogger, MlflowLogger)}
