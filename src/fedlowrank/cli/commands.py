"""The commands that make runs, continue them and show their results."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from rich.table import Table

from ..adapters.deployment import Layout
from ..config.comparison import PlannedRun, plan_runs, read_varied, refuse_conflicts
from ..config.experiment import ExperimentConfig
from ..config.reading.merging import LayeredTables, parse_overrides
from ..config.reading.unread_overrides import COMPARED, SEVERAL_RUNS, TUNE, refuse_unread_overrides
from ..config.stored_run import find_typed_client, open_run, read_run_config
from ..config.working_folder import describe_working_folder, enter_working_folder
from ..core.errors import CheckpointError, ConfigError, LoweredRankWarning, NonFiniteError, TaskError
from ..core.io.atomic_files import as_checkpoint_error, write_atomically
from ..data.describe import count_classes, draw_class_counts, format_class_counts
from ..data.federation import Federation
from ..data.text.row_report import describe_rows
from ..language.language_model import Language
from ..network.persistence.account import prepare_resume
from ..report import (
    Comparison,
    export_tensorboard,
    render_terminal,
    save_figures,
    sort_runs,
    to_latex,
    write_report,
    write_values,
)
from ..report.figures.gallery import SHEET
from ..report.figures.style import Width, write_figure
from ..results.records import RoundRecord, RunRecord
from ..rounds.outcome.export import write
from ..rounds.setup.client_ranks import list_remarks
from ..rounds.setup.preparation import apply_attack
from ..rounds.simulate import simulate
from ..storage.run_files import ACCOUNT
from ..storage.run_folder import RunFolder, ends_equally
from .download_command import get_data
from .jobs.parallel import Ending, Outcome, run_parallel
from .language.run_estimate import estimate_run
from .one_run import read_one, show_run
from .read_runs import count_left_out, read_each, read_for_report
from .terminal import INTERRUPT_HINTS, OUT

MANY_CLIENTS, FEW_CLIENTS = 10, 4
"""Number of clients above which a command that runs methods shows only some, and how many it shows."""


def run(
    file: Path,
    overrides: Sequence[str],
    method: str | None,
    engine: str | None,
    out: Path | None,
    force: bool,
    log: Sequence[str] | None = None,
) -> int:
    """Run one method of an experiment."""
    overrides_of_options = [*([] if engine is None else [f"run.engine={engine}"]), *_log_override(log)]
    experiment, name = read_one(file, [*overrides, *overrides_of_options], method)
    folder = out or Path("runs") / experiment.name / f"{name}-s{experiment.run.seed}"
    experiment.build_method(name)
    if folder.exists() and not force:
        raise RunFolder.taken(folder)
    refuse_network_settings(experiment, overrides)
    federation = experiment.federation()
    _show_data(federation)
    if isinstance(federation.companion, Language):
        estimate = estimate_run(experiment.build_method(name), federation, experiment.run_here)
        OUT.print(estimate or "no estimate of the time: the method's first pass cannot be seen alone")
    with _resume_hint(experiment, name, folder):
        run_method(experiment, name, federation, folder, force)
    return show_run(folder)


def refuse_network_settings(experiment: ExperimentConfig, overrides: Sequence[str]) -> None:
    """Refuse network settings that were typed for a run within this process, and log those of its file.

    A file may be shared with the server and the clients of a network, and simulated first. For the engine ``flower``,
    settings that cannot work over a network are refused.
    """
    if experiment.run.engine == "flower":
        from ..network.operation.start_checks import check_flower_simulation

        check_flower_simulation(experiment)
        return
    advice = "add --engine flower for a run over a network"
    for text in overrides:
        if text.strip().startswith("network."):
            raise ConfigError(f"{text} does nothing in a run within this process: {advice}, or leave it out")
    if network := experiment.to_dict().get("network"):
        names = ", ".join(f"network.{name}" for name in network)
        OUT.print(
            f"{names} {'do' if len(network) > 1 else 'does'} nothing in this run: {advice}", style="yellow"
        )


def _log_override(log: Sequence[str] | None) -> list[str]:
    return [] if log is None else [f"run.log={json.dumps(list(log))}"]


def compare(
    file: Path,
    overrides: Sequence[str],
    methods: Sequence[str] | None,
    seeds: str | None,
    vary: Sequence[str],
    out: Path | None,
    target: float | None,
    force: bool,
    jobs: int = 1,
    log: Sequence[str] | None = None,
    tables: bool = False,
) -> int:
    """Run every combination of method, seed and varied value; continue runs that have begun."""
    if target is not None and not 0 < target <= 1:
        raise ConfigError(f"--target is an accuracy in (0, 1], such as 0.9; it is {target}")
    config_tables = LayeredTables.read(file, [*overrides, *_log_override(log)])
    base = read_varied(config_tables, vary, methods or ())
    option_paths = [
        *(("compare", "method") if methods else ("method",) if base.compare else ()),
        *(("seeds", "run.seed") if seeds is not None else ("run.seed",) if base.seeds else ()),
        *(("vary",) if vary else ()),
    ]
    refuse_unread_overrides(config_tables, {"tune": TUNE, **{path: COMPARED[path] for path in option_paths}})
    refuse_network_settings(base, [*overrides, *(vary or base.vary)])
    seed_numbers = _parse_seeds(seeds) if seeds is not None else base.seeds or (base.run.seed,)
    out = out or Path("runs") / base.name
    runs = plan_runs(
        base, methods or base.compared_methods, seed_numbers, vary or base.vary, out, config_tables
    )
    if not force:
        refuse_conflicts(runs)
    outcomes = run_planned(runs, jobs, force)
    # a method that diverges is a result; its record until then belongs in the table
    records = [RunRecord.load(o.run.folder) for o in outcomes if o.state in ("finished", "diverged")]
    if records:
        write_comparison(records, out / "report.html", target, tables)
    return show_failures(outcomes) if records else show_failures(outcomes) or 1


def show_failures(outcomes: Sequence[Outcome]) -> int:
    """Print the runs that did not finish, with the reason; the exit code is 1 if one of them failed."""
    for outcome in outcomes:
        if outcome.state != "finished":
            OUT.print(str(outcome), style="yellow")
    return int(any(outcome.state == "failed" for outcome in outcomes))


def run_planned(planned_runs: Sequence[PlannedRun], jobs: int, force: bool) -> list[Outcome]:
    """Run planned runs or continue them, one after the other or several at a time.

    Args:
        planned_runs: planned runs; of several runs with one folder only the first is used.
        jobs: number of runs at a time, each in a process of its own; 1 runs all in this process.
        force: whether to move existing folders aside instead of continuing their runs.

    Returns:
        The outcome of each run, in order.
    """
    if jobs < 1:
        raise ConfigError(f"--jobs is a number of runs at a time, at least 1; it is {jobs}")
    runs = list({planned_run.folder: planned_run for planned_run in reversed(planned_runs)}.values())[::-1]
    if jobs > 1 and len(runs) > 1:
        return run_parallel(runs, jobs, force)
    outcomes, federation, last_experiment = [], None, None
    printed_remarks: set[str] = set()
    for planned_run in runs:
        experiment = planned_run.experiment
        if federation is None or last_experiment is not experiment:
            is_first, federation, last_experiment = federation is None, experiment.federation(), experiment
            if is_first:
                _show_data(federation)
        state: Ending = "finished"
        message = ""
        try:
            run_method(
                experiment,
                planned_run.name,
                federation,
                planned_run.folder,
                force,
                resume=not force,
                vary=planned_run.vary,
                printed_remarks=printed_remarks,
            )
        except TaskError as error:
            state, message = "refused", error.for_command
        except NonFiniteError as error:
            state, message = "diverged", error.for_command
        outcomes.append(Outcome(planned_run, state, message))
    return outcomes


def resume(
    folder: Path,
    overrides: Sequence[str],
    round: int | None,
    without: Sequence[int],
    allow_code: bool,
) -> int:
    """Continue a run, optionally from an earlier checkpoint, without some clients, or for more rounds.

    Relative paths and the user's own code are those of the folder in which the run began, wherever the command is
    typed; see :mod:`..config.working_folder`.
    """
    stored_config = read_run_config(folder, "resume it with simulate(..., folder=..., resume=True)")
    with enter_working_folder(folder, stored_config) as run_folder:
        if not _resume(run_folder, stored_config, overrides, round, without, allow_code):
            return 0
    return show_run(folder)


def _resume(
    folder: Path,
    stored_config: dict[str, Any],
    overrides: Sequence[str],
    round: int | None,
    excluded_ids: Sequence[int],
    allow_code: bool,
) -> bool:
    """Continue a run in its working folder; return False if a server with remote clients must continue it."""
    config_tables, name = (
        LayeredTables(stored_config["experiment"], parse_overrides(overrides)),
        stored_config["method"]["name"],
    )
    experiment = ExperimentConfig.parse_laid(config_tables, name, [name], allow_code)
    reasons = dict.fromkeys(("method", "compare"), f"the run is one of {name}.")
    refuse_unread_overrides(config_tables, {**SEVERAL_RUNS, **reasons})
    if changes := experiment.changes_from(stored_config, name, stored_config["vary"]):
        # simulate would refuse it later, and not with the field names of the file
        raise CheckpointError(
            f"{folder} cannot be resumed with another configuration: {'; '.join(changes)}. Set these back, "
            "or start a new run in another folder."
        )
    if not (folder / ACCOUNT).exists():
        refuse_network_settings(experiment, overrides)
    if (round is not None or excluded_ids) and not prepare_resume(folder, round, excluded_ids):
        return False
    if (folder / ACCOUNT).exists() and experiment.run.engine != "flower":
        raise CheckpointError(
            f"{folder} was served over a network, so the examples of its clients are not here. Go on with it by "
            f"fedlowrank serve FILE.toml --out {shlex.quote(str(folder))} --resume"
        )
    with _resume_hint(experiment, name, folder):
        run_method(experiment, name, experiment.federation(), folder, resume=True, vary=stored_config["vary"])
    return True


@contextlib.contextmanager
def _resume_hint(experiment: ExperimentConfig, name: str, folder: Path) -> Iterator[None]:
    """Let an interrupt within the block advise to resume the run."""
    code_option = " --allow-code" if experiment.code or ":" in name else ""
    INTERRUPT_HINTS.append(f"Go on with: fedlowrank resume {shlex.quote(str(folder))}{code_option}")
    try:
        yield
    except Exception:
        # the hint is printed only after an interrupt
        INTERRUPT_HINTS.pop()
        raise
    INTERRUPT_HINTS.pop()


def export(
    folder: Path, client: str | None, series: str | None, layout: Layout, out: Path, allow_code: bool
) -> int:
    """Write a client's model, and print what its thin layers gain in size and speed."""
    python = "export by simulate(..., folder=..., resume=True).deploy(client)"
    run = open_run(folder, python, allow_code=allow_code)
    infos = run.federation.infos
    if run.federation.companion is not None:
        raise ConfigError(
            f"{folder} is a run of a language model, whose models are written by fedlowrank adapters "
            f"{shlex.quote(str(folder))}"
        )
    info = infos[0] if client is None else find_typed_client(infos, client)
    gain = write(run, info.id, series, layout, out)
    title = f"{run.method.title}, {info.title}, after round {run.round}"
    table = Table("", "dense", "deployed", title=title)
    table.add_row("parameters", *(f"{s.parameters:,}" for s in gain.size))
    table.add_row("bytes", *(f"{s.nbytes:,}" for s in gain.size))
    times = (f"{t.median:.2f} [{t.lower:.2f}, {t.upper:.2f}]" for t in gain.latency)
    table.add_row("ms of CPU for 20 inputs", *times)
    OUT.print(table)
    # a regression has no classes that could agree
    agreement_text = f"{100 * gain.agreement:.1f} % of the test examples get the same class; scores"
    OUT.print(
        f"{agreement_text if run.task.classes else 'Outputs'} differ by {gain.difference:.1e} at most. ms: median and "
        "quartiles of calls that take turns, one thread."
    )
    OUT.print(
        f"{out}: {gain.file:,} bytes. Load it by fedlowrank.adapters.deployment.load_deployed(module, path)."
    )
    return 0


def report(
    folders: Sequence[Path],
    out: Path,
    target: float | None,
    tensorboard: Path | None,
    figures: Path | Literal[True] | None,
    width: Width,
    tables: bool = False,
    latex: Path | None = None,
    csv: Path | None = None,
) -> int:
    """Write the report of run folders; ``figures`` is a folder, or True for a folder beside the page.

    The exit code is 1 if a damaged run was left out.
    """
    runs, damaged_count = read_each(folders, read_for_report)
    records = sort_runs(runs)
    for option, path in (("--latex", latex), ("--csv", csv)):
        if path is not None and path.resolve() in {
            out.with_suffix(e).resolve() for e in (out.suffix, ".md", ".csv")
        }:
            raise ConfigError(f"{option} {path} is a file of the report itself; choose another name")
    if latex is not None and csv is not None and latex.resolve() == csv.resolve():
        raise ConfigError(f"--latex and --csv both name {csv}; choose another name for one of them")
    if figures is True:
        figures = out.with_name(f"{out.stem}-figures")
    table = write_comparison(records, out, target, tables, figures)
    if latex is not None:
        with as_checkpoint_error(f"cannot make {latex.parent}"):
            latex.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(latex, to_latex(table, tables).encode())
        OUT.print(f"LaTeX: {latex}")
    if csv is not None:
        write_values(records, csv)
        OUT.print(f"every value: {csv}")
    for record in records if tensorboard else ():
        with as_checkpoint_error(f"cannot write {tensorboard}"):
            export_tensorboard(record, Path(str(tensorboard)) / record.folder.name)
    if figures is not None:
        figure_files = save_figures(records, figures, width=width)
        OUT.print(f"figures: {figures / SHEET}, {len({path.stem for path in figure_files})} of them")
    return count_left_out(damaged_count)


def write_comparison(
    records: Sequence[RunRecord], page: Path, target: float | None, tables: bool = False,
    figures: Path | None = None,
) -> Comparison:  # fmt: skip
    """Write the report of runs and print its results; ``tables`` prints all its tables.

    The page links to the contact sheet in the folder ``figures``, which other code writes.
    """
    command = shlex.join(["fedlowrank", *sys.argv[1:]])
    sheet = figures / SHEET if figures is not None else None
    table = write_report(records, page, target=target, command=command, figures=sheet)
    OUT.print(render_terminal(table, tables))
    OUT.print(f"report: {page}")
    OUT.print(f"costs, further tables and all definitions: {page.with_suffix('.md')}")
    return table


def data(file: Path, overrides: Sequence[str], out: Path | None) -> int:
    """Show how an experiment divides its data among clients; with ``get`` instead of a file, download a data set."""
    if file == Path("get"):
        return get_data(overrides, out)
    federation = ExperimentConfig.read(file, overrides).federation()
    _show_data(federation, all_clients=True)
    if out is not None:
        counts = count_classes(federation.clients, len(federation.classes))
        figure = draw_class_counts(counts, federation.classes)
        write_figure(figure, out)
        OUT.print(f"picture: {out}")
    return 0


def _show_data(federation: Federation, all_clients: bool = False) -> None:
    # plain print: the table has its final layout, and wrapping would break its lines
    notes = (*federation.notes, *(federation.remarks or ()))
    max_clients = FEW_CLIENTS if len(federation.clients) > MANY_CLIENTS and not all_clients else None
    table = format_class_counts(
        federation.clients, federation.classes, OUT.width, notes=notes, max_clients=max_clients
    )
    print(table, flush=True)
    if isinstance(federation.companion, Language):
        print(describe_rows(federation.clients, federation.companion.loaded.tokenizer), flush=True)


def run_method(
    experiment: ExperimentConfig,
    name: str,
    federation: Federation,
    folder: Path,
    force: bool = False,
    *,
    resume: bool = False,
    vary: dict[str, Any] | None = None,
    on_round: Callable[[RoundRecord], None] | None = None,
    printed_remarks: set[str] | None = None,
) -> None:
    """Run a method of an experiment in a folder, or continue its run.

    A run without a checkpoint starts from scratch, unless it is finished and all its records are there.

    Args:
        experiment: experiment that holds the method.
        name: name of the method or variant.
        federation: federation of the experiment.
        folder: folder of the run.
        force: whether to move an existing folder aside.
        resume: whether to continue a run that has begun.
        vary: varied fields and their values.
        on_round: function called with every record; by default a progress bar shows the records.
        printed_remarks: remarks that were printed before; those of this run are added.
    """
    method, title = experiment.build_method(name), experiment.method_title(name)
    printed_remarks = set() if printed_remarks is None else printed_remarks
    for remark in list_remarks(method, federation.task(experiment.run.rounds), title):
        if remark not in printed_remarks:
            printed_remarks.add(remark)
            OUT.print(remark, style="yellow")
    has_begun = RunFolder.has_begun(folder)
    if resume and not has_begun and folder.exists():
        if _is_complete(experiment, name, federation, folder, vary or {}):
            OUT.print(
                f"{folder} is finished and has all its records; its checkpoint is missing", style="yellow"
            )
            return
        OUT.print(
            f"{folder} has no checkpoint to go on from; it is moved to {RunFolder.move_aside(folder)}, and the run starts "
            "from scratch",
            style="yellow",
        )
    options: dict[str, Any] = {
        "resume": resume and has_begun,
        "force": force,
        "config": {
            **experiment.describe_run(name),
            "vary": vary or {},
            **describe_working_folder(folder, experiment.to_dict(), name),
        },
    }
    if experiment.run.engine == "flower":
        from .deployment.network_commands import run_simulation

        run_simulation(experiment, name, folder, **options)
        return
    options |= vars(experiment.run_here)
    with warnings.catch_warnings():
        # a remark has reported the lowered rank
        warnings.simplefilter("ignore", LoweredRankWarning)
        simulate(method, federation, folder=folder, progress=on_round is None, on_round=on_round, **options)


def _is_complete(
    experiment: ExperimentConfig, name: str, federation: Federation, folder: Path, vary: dict[str, Any]
) -> bool:
    """Whether a folder holds this run, finished, with all its records."""
    try:
        record = RunRecord.load(folder)
    except CheckpointError:
        return False
    settings = experiment.run_here
    _, attacked_federation = apply_attack(federation, settings)
    return (
        record.status.get("state") == "finished"
        and not record.missing
        and not experiment.changes_from(record.config, name, vary)
        and ends_equally(record.section("run"), json.loads(json.dumps(dataclasses.asdict(settings))))
        and record.config.get("fingerprint") == attacked_federation.fingerprint()
    )


def _parse_seeds(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(seed) for seed in text.split(","))
    except ValueError as error:
        raise ConfigError(f"--seeds takes whole numbers, such as 0,1,2; not {text!r}") from error
