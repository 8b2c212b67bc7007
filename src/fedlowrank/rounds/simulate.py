"""Runs a method on a federation from Python."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import inspect
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch

from ..core.arguments.field_checks import ALIASES, check_arguments, find_argument, list_arguments
from ..core.arguments.user_code import import_named
from ..core.contract import AnyMethod, Method
from ..core.errors import CheckpointError, ConfigError, FedlowrankError, did_you_mean
from ..core.learning.losses import AUTO, Loss
from ..data.federation import Federation
from ..engines import ENGINES
from ..engines.engine import Engine
from ..methods import METHODS
from ..models.architecture import Architecture
from ..models.fingerprint import describe_callable, describe_named
from ..results.client_metrics import OwnMetrics, split_metrics
from ..results.ranking import find_best
from ..results.records import RunRecord
from ..storage.run_files import read_config
from ..storage.run_folder import RunFolder
from .callbacks import RoundCallback, as_callbacks, refuse_without_validation, settings_callbacks
from .config_changes import check_changes
from .logs.loggers import check_loggers
from .outcome.result import Result
from .plan import Plan
from .restore import restore_run
from .round_loop import run_rounds
from .run import Run
from .run_settings import RunSettings
from .setup.client_ranks import list_remarks
from .setup.schedules import check_schedules
from .stored_settings import unwrap

P = ParamSpec("P")
R = TypeVar("R")


_TABLE = re.compile(rf"\brun\.(?=(?:{'|'.join(f.name for f in dataclasses.fields(RunSettings))})\b)")
"""Prefix by which messages name the fields of an experiment file that :func:`simulate` takes as arguments."""


def _name_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Name arguments of a function in its errors instead of fields of ``[run]``: ``rounds``, not ``run.rounds``."""

    @functools.wraps(function)
    def named(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except FedlowrankError as error:
            error.drop_prefix(_TABLE)
            raise

    return named


@_name_arguments
@check_arguments
def simulate(
    method: AnyMethod | str,
    federation: Federation,
    *,
    folder: str | Path | None = None,
    resume: bool = False,
    force: bool = False,
    progress: bool = False,
    on_round: RoundCallback | Sequence[RoundCallback] | None = None,
    config: Mapping[str, Any] | None = None,
    loss: Any = None,
    **settings: Any,
) -> Result:
    """Run a method on a federation.

    Args:
        method: a method, or the name of a method with its default settings.
        federation: clients to train on; their seed is the seed of the run.
        folder: folder for the run's record and checkpoints; None writes nothing.
        resume: whether to go on from the last checkpoint in ``folder``.
        force: whether to move an existing folder aside.
        progress: whether to show a progress bar, or a line now and then if there is no terminal.
        on_round: one or several callbacks. Each is called with the record of every new round, including the one
            before training; if a callback returns True, the run ends after this round. See
            :class:`.callbacks.EarlyStopping` and :class:`.callbacks.Callback`.
        config: further entries of ``run.json`` (the origin of data and models); ``variant`` with ``name`` and
            ``title`` distinguishes runs of one method with other settings.
        loss: loss that is minimized and reported instead of the federation's own; see
            :meth:`fedlowrank.Federation.from_arrays`.
        **settings: fields of :class:`fedlowrank.rounds.run_settings.RunSettings`: ``rounds=50, participation=0.1,
            ...``. ``metrics`` takes functions, too: ``metric(scores, targets)`` gets NumPy arrays of one client and
            returns a number.

    One process makes one run at a time, because runs in several threads would change each other's results; a callback
    may start a run. Modules of the federation are in the same modes afterwards as before.

    Returns:
        The result, with the last state and the records of all rounds.

    Raises:
        FedlowrankError: if the arguments are invalid, another thread runs simulate, or the training diverges; a run folder
            stays resumable.

    Example:
        >>> import torch
        >>> from fedlowrank import Federation, simulate
        >>> clients = [(torch.randn(40, 8), torch.randint(0, 2, (40,))) for _ in range(3)]
        >>> federation = Federation.from_arrays(clients, torch.nn.Linear(8, 2))
        >>> result = simulate("fedavg", federation, rounds=2)
        >>> len(result.accuracy())
        3
    """
    if isinstance(method, str):
        if method not in METHODS:
            raise ConfigError(f"there is no method {method!r}. {did_you_mean(method, METHODS)}")
        method = METHODS[method]()
    _check_types(method, federation)
    if loss is not None:
        federation = federation.with_loss(loss)
    callback_names = settings.get("callbacks", ())
    if isinstance(callback_names, Sequence) and any(map(callable, callback_names)):
        raise ConfigError(
            "simulate.callbacks holds names, 'module:Class'. Give functions and objects as on_round=..."
        )
    names, own_metrics = split_metrics(settings.get("metrics", ()))
    run_settings = _settings({**settings, "metrics": names}, federation, method)
    if run_settings.engine not in ENGINES:
        raise ConfigError(
            f"run.engine {run_settings.engine!r} needs an experiment file, for its clients are other processes: write it "
            "into the table [run] of the file, and use `fedlowrank run FILE.toml`"
        )
    callbacks = [*settings_callbacks(run_settings), *as_callbacks(on_round)]
    refuse_without_validation(callbacks, federation)
    if run_settings.adapters and federation.companion is None:
        raise ConfigError("run.adapters: only language models have adapter folders; leave it empty")
    if run_settings.adapters and folder is None:
        raise ConfigError(
            "run.adapters writes to the run's folder: pass folder=..., or leave run.adapters out"
        )
    if run_settings.keep_best:
        _check_keep_best(federation, folder)
    check_loggers(run_settings.log, None if folder is None else Path(folder))
    if not resume:
        check_schedules(method, run_settings.rounds, [len(client.train) for client in federation.clients])
    with _only_run_of_process(), _restored_modes(federation), threads(run_settings.threads):
        plan = Plan.read(Path(folder)) if resume and folder is not None else None
        run = Run(method, federation, run_settings, ENGINES[run_settings.engine](), plan, own_metrics)
        if folder is None:
            if resume:
                raise CheckpointError("to resume a run, name its folder")
            return Result(run, run_rounds(run, None, [], progress, callbacks))
        description = run_description(run, config or {}, own_metrics)
        with RunFolder(Path(folder), description, run.clients()) as run_folder:
            if resume:
                records = restore_run(run, run_folder)
                if run_folder.is_finished():
                    return Result(run, records)
            else:
                run_folder.create(force)
                records = []
            return Result(run, run_rounds(run, run_folder, records, progress, callbacks))


def _check_keep_best(federation: Federation, folder: str | Path | None) -> None:
    """Refuse to keep the best state if there are no validation examples to choose it by, or no folder for it."""
    if folder is None:
        raise ConfigError(
            "run.keep_best keeps a state in the run's folder: pass folder=..., or leave run.keep_best out"
        )
    if not any(len(client.val) for client in federation.clients):
        raise ConfigError(
            "run.keep_best chooses the state by validation examples, and no client has any: set split.val in the "
            "experiment file, or val= of Federation.from_arrays, such as 0.1, or leave run.keep_best out"
        )


def _check_types(method: Any, federation: Any) -> None:
    """Raise ConfigError, with advice, for a method's class instead of a method and for data that are no federation yet."""
    if isinstance(method, type):
        raise ConfigError(f"simulate needs a method, made by {method.__name__}(...) and not the class itself")
    if not isinstance(method, Method):
        raise ConfigError(f"simulate needs a method or the name of one, not a {type(method).__name__}")
    if not isinstance(federation, Federation):
        raise ConfigError(
            "simulate needs a federation, such as Federation.from_arrays makes, not a "
            f"{type(federation).__name__}"
        )


def reopen(
    method: AnyMethod,
    federation: Federation,
    folder: Path,
    settings: RunSettings,
    config: Mapping[str, Any],
    checkpoint_name: str = "checkpoint",
) -> Run:
    """Load a run from a checkpoint of its folder, to inspect or export it; nothing is trained or written.

    Args:
        method: method of the run.
        federation: federation of the run.
        folder: folder of the run.
        settings: settings of the run.
        config: further entries of ``run.json``, see :func:`simulate`.
        checkpoint_name: name of the checkpoint: ``checkpoint`` for the last one, ``best`` for the best round by
            validation of a run with ``keep_best``.

    Raises:
        CheckpointError: if the configuration or the data differ from those of the folder, or ``best`` holds another round
            than the best one.
    """
    run = Run(method, federation, settings, _make_engine(settings), Plan.read(folder))
    run_folder = RunFolder(folder, run_description(run, config), run.clients())
    check_changes(folder, read_config(folder), run_folder.config, run.method)
    run.restore(run_folder.load(run.new_store(), checkpoint_name))
    if checkpoint_name == "best":
        _check_best_round(folder, run.round)
    return run


def _make_engine(settings: RunSettings) -> Engine:
    # clients of a run over a network trained elsewhere; any engine opens its folder
    return ENGINES.get(settings.engine, ENGINES["auto"])()


def _check_best_round(folder: Path, round: int) -> None:
    """Raise CheckpointError if the state in ``best``, after a round, is not that of the best round in the records."""
    records = RunRecord.load(folder).rounds
    best = find_best(record.validation() for record in records)
    if best is not None and records[best].round != round:
        raise CheckpointError(
            f"{folder}: the best round by validation is {records[best].round}, but its state was not kept, only that of round "
            f"{round}: run.keep_best was off, or the run was killed then. Take the last checkpoint,",
            python="or run the experiment with keep_best=True.",
            command="or run the experiment with run.keep_best=true.",
        )


def run_description(
    run: Run, config: Mapping[str, Any], own_metrics: OwnMetrics | None = None
) -> dict[str, Any]:
    """Make the contents of ``run.json``; an entry ``variant`` names the method as the experiment does."""
    description = {**describe_run(run.method, run.federation, run.settings, own_metrics), **config}
    description["method"] |= description.pop("variant", {})
    remarks = [
        *(run.federation.remarks or ()),
        *list_remarks(run.method, run.federation.task(run.settings.rounds), description["method"]["title"]),
    ]
    # left out without remarks, as in runs that were made before there were any
    description |= {"remarks": remarks} if remarks else {}
    return {**description, "plan": dataclasses.asdict(run.plan)}


def describe_run(
    method: AnyMethod, federation: Federation, settings: RunSettings, own_metrics: OwnMetrics | None = None
) -> dict[str, Any]:
    """Describe everything that a run's result depends on, as JSON for ``run.json``."""
    names = {type_: name for name, type_ in METHODS.items()}
    method = unwrap(method)
    cls = type(method)
    named_metrics = {name: import_named(name, "run.metrics") for name in settings.metrics if ":" in name}
    code = {
        **describe_named({f"{cls.__module__}:{cls.__qualname__}": cls, **named_metrics}),
        **{name: describe_callable(metric) for name, metric in (own_metrics or {}).items()},
    }
    return {
        "name": federation.name,
        "method": {
            "name": names.get(cls, f"{cls.__module__}:{cls.__qualname__}"),
            "title": method.title,
            "citation": method.citation,
            "fields": dataclasses.asdict(method),
        },
        "run": dataclasses.asdict(settings),
        "models": {n: _describe_model(a, federation) for n, a in federation.architectures.items()},
        "classes": list(federation.classes),
        "notes": list(federation.notes),
        "fingerprint": federation.fingerprint(),
        "vary": {},
        "reference": None,
        # each is left out where it has no effect, as in runs that were made before it existed
        **({"code": code} if code else {}),
        **({"columns": columns} if (columns := _describe_columns(federation)) else {}),
        **({"base": federation.companion.describe()} if federation.companion is not None else {}),
        **({"loss": _describe_loss(federation.loss)} if federation.loss != AUTO else {}),
        **({"augment": dataclasses.asdict(federation.augment)} if federation.augment.is_active else {}),
    }


def _describe_columns(federation: Federation) -> dict[str, list[str]]:
    """List the names of the columns of the inputs, because the digests of examples cover only values."""
    return {name: [str(column) for column in names] for name, names in federation.feature_names.items()}


def _describe_loss(loss: Loss) -> dict[str, Any]:
    """Describe the loss with its options; a loss of the user's own with a digest of its code."""
    code = {"code": describe_callable(loss.function)} if loss.is_custom else {}
    return {**loss.describe(), **code}


def _describe_model(architecture: Architecture, federation: Federation) -> dict[str, Any]:
    """Describe a model: its layers, and a digest of its frozen tensors."""
    if federation.companion is not None:
        # the companion describes the base, whose layers differ by dtype and quantization of this machine
        layers = {name: f"{t.dtype} {[*t.shape]}" for name, t in architecture.initial.items()}
        head = architecture.head_name
        return {"parameters": architecture.parameter_count, "head": head, "frozen": "", "layers": layers}
    frozen = architecture.digest_frozen()
    return {
        "parameters": architecture.parameter_count,
        "head": architecture.head_name,
        "frozen": frozen,
        "layers": architecture.layers,
    }


def _settings(settings: dict[str, Any], federation: Federation, method: AnyMethod) -> RunSettings:
    field_names = [f.name for f in dataclasses.fields(RunSettings)]
    for name in settings:
        if name not in field_names:
            raise ConfigError(_explain_unknown(name, settings[name], method))
    run_settings = RunSettings(**{"seed": federation.seed, **settings})
    if run_settings.seed != federation.seed:
        raise ConfigError(
            f"the federation has seed {federation.seed}, so the run cannot have seed {run_settings.seed}"
        )
    return run_settings


def _explain_unknown(name: str, value: Any, method: AnyMethod) -> str:
    """Write the message about an unknown argument of :func:`simulate`, with its likely place."""
    problem = f"simulate has no argument {name!r}"
    argument_names = [
        n for n in inspect.signature(simulate).parameters if n not in ("method", "federation", "settings")
    ]
    known_names = [*argument_names, *(f.name for f in dataclasses.fields(RunSettings))]
    if advice := _suggest_owner(name, value, method):
        return f"{problem}. {advice}"
    if method_titles := [cls.title for cls in METHODS.values() if name in list_arguments(cls)]:
        return f"{problem}, and {method.title} has none. Methods that have it: {', '.join(method_titles)}"
    other_names = [*list_arguments(RunSettings), *list_arguments(type(method)), *_DATA]
    for names in (known_names, other_names):
        partial_matches = [
            candidate
            for candidate in names
            if name.endswith(f"_{candidate}") or candidate.startswith(f"{name}_")
        ]
        if matches := partial_matches or difflib.get_close_matches(name, names, n=1, cutoff=0.75):
            return f"{problem}. Did you mean {matches[0]!r}? {_suggest_owner(matches[0], value, method)}".rstrip()
    return f"{problem}. Known: {', '.join(map(repr, sorted(known_names)))}."


_DATA = [n for n in inspect.signature(Federation.from_arrays).parameters if n != "self"]


def _suggest_owner(name: str, value: Any, method: AnyMethod) -> str:
    """Say where an argument that :func:`simulate` lacks belongs: settings, method or data; empty if unknown."""
    cls = type(method)
    if name in {f.name for f in dataclasses.fields(RunSettings)}:
        return ""
    if argument := find_argument(cls, name, value, method):
        field = argument.partition("=")[0]
        owner = "the method" if field in (name, ALIASES.get(name)) else f"the {field} of the method"
        return f"It belongs to {owner}: simulate({cls.__name__}({argument}), ...)."
    if argument := find_argument(RunSettings, name, value):
        return f"Write {argument}."
    if name in _DATA:
        return f"It belongs to the data: Federation.from_arrays(..., {name}=...)."
    return ""


_RUNNING = threading.RLock()
"""Lock of the thread in which a run of this process is in progress."""


@contextlib.contextmanager
def _only_run_of_process() -> Iterator[None]:
    """Refuse a run while another thread runs one; a callback may start a run inside a run.

    Runs in several threads would share the seeded global generators of torch, numpy and Python, the number of torch
    threads, and the modes and parameters of a common module. Waiting instead could never end: a callback may wait for the
    other thread.
    """
    if not _RUNNING.acquire(blocking=False):
        raise ConfigError(
            "another thread of this process runs simulate, and runs in threads would change each other's results. Start the "
            "runs one after another, or in processes: concurrent.futures.ProcessPoolExecutor, or engine='processes' for the "
            "clients of one run"
        )
    try:
        yield
    finally:
        _RUNNING.release()


@contextlib.contextmanager
def _restored_modes(federation: Federation) -> Iterator[None]:
    """Restore the training or evaluation modes of the user's modules after a run."""
    with contextlib.ExitStack() as stack:
        for architecture in federation.architectures.values():
            stack.enter_context(architecture.restored_modes())
        yield


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Set the number of torch threads of this process and restore it afterwards; more than one makes small models slower."""
    previous_count = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(previous_count)
