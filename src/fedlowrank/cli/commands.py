"""What the commands of the command line do."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from rich.table import Table
from rich.text import Text

from ..adapters.deployment import Layout
from ..adapters.router import Router
from ..config import experiment
from ..config import tables as config
from ..config.comparison import plan, refuse_conflicts
from ..config.experiment import Experiment
from ..config.lora_section import LoraTable
from ..config.network_settings import Limits, NetworkSettings
from ..config.stored_run import opened, stored_config
from ..core.errors import CheckpointError, ConfigError, NonFiniteError, TaskError
from ..core.files import as_checkpoint_error
from ..core.method import Method
from ..core.optimizer import SGD, AdamW, Schedule
from ..core.user_code import import_named
from ..data.augment import Augment
from ..data.concept import CONCEPTS
from ..data.describe import class_count_figure, class_count_table, class_counts
from ..data.federation import Federation
from ..data.partition import PARTITIONS
from ..data.sources import SOURCES
from ..data.split import SPLITS
from ..data.text.sources import TEXT_SOURCES
from ..language.federation import LanguageSettings
from ..linalg.delta import Form
from ..methods import METHODS
from ..methods.families.effective_delta import Weighing
from ..methods.families.lora import Tuning
from ..models.zoo import MODELS, ModelSettings
from ..network.account import went_back
from ..report import comparison, export_tensorboard, in_order, render_terminal, save_figures, write_report
from ..report.style import EMBEDDED_FONTS
from ..simulation.export import write
from ..simulation.records import RunRecord, run_folders
from ..simulation.run import RunSettings
from ..simulation.run_folder import RunFolder
from ..simulation.simulate import simulate
from ..simulation.terminal import console
from ..testing.check import check_method

OUT = console()
_CURRENT: list[str] = []


def hint() -> str:
    """What to do after an interrupt."""
    return f"Go on with: {_CURRENT[-1]}" if _CURRENT else "Nothing is lost; start it again to go on."


def list_(method: str | None) -> int:
    """Show what there is."""
    if method is not None:
        cls = experiment.method_class(method)
        OUT.print(inspect.getdoc(sys.modules[cls.__module__]) or "", highlight=False)
        OUT.print(_fields(f"methods.{method}", cls))
        return 0
    table = Table("method", "", "models", "source", title="Methods")
    for name, cls in METHODS.items():
        line = (inspect.getdoc(cls) or "").splitlines()[0]
        table.add_row(name, line, "any" if cls.heterogeneous else "equal", cls.citation)
    OUT.print(table)
    for title, known in (
        ("Models (model.names)", MODELS),
        ("Data (data.source)", _lines(SOURCES)),
        ("Texts (data.source, with [language])", _lines(TEXT_SOURCES)),
        ("Partitions (partition.kind)", _lines(PARTITIONS)),
        ("Splits (split.kind)", _lines(SPLITS)),
        ("Concepts (concept.kind)", _lines(CONCEPTS)),
    ):
        table = Table("name", "", title=title)
        for name, line in known.items():
            table.add_row(name, line)
        OUT.print(table)
    OUT.print("`fedlowrank list METHOD` shows a method's paper, algorithm and fields.")
    return 0


def _lines(known: dict[str, type[Any]]) -> dict[str, str]:
    return {n: (inspect.getdoc(c) or "").splitlines()[0] for n, c in known.items()}


def _fields(title: str, cls: type[Any]) -> Table:
    table = Table("field", "default", "meaning", title=f"[{title}]", title_justify="left")
    for f in config.fields_of(cls):
        table.add_row(f"{f.name}: {f.type}", f.default, f.meaning)
    return table


@functools.cache
def field_help() -> str:
    """The fields of every section, for ``--help``."""
    lines = ["Fields of an experiment file, with their defaults:"]
    sections: list[tuple[str, type[Any]]] = [("run", RunSettings), ("model", ModelSettings)]
    sections += [("data, any source", experiment.Preparation)]
    sections += [(f"data, source = {n}", c) for n, c in SOURCES.items()]
    sections += [(f"data, source = {n} (texts)", c) for n, c in TEXT_SOURCES.items()]
    sections += [(f"partition, kind = {n}", c) for n, c in PARTITIONS.items()]
    sections += [(f"split, kind = {n}", c) for n, c in SPLITS.items()]
    sections += [(f"concept, kind = {n}", c) for n, c in CONCEPTS.items() if dataclasses.fields(c)]
    sections += [("augment", Augment)]
    sections += [("defaults.optimizer, kind = sgd", SGD), ("defaults.optimizer, kind = adamw", AdamW)]
    sections += [("defaults.optimizer.schedule", Schedule)]
    sections += [(f"methods.{n}", c) for n, c in METHODS.items()]
    sections += [("methods.floral.router, methods.ensemble.router", Router)]
    sections += [("methods.NAME.tuning, of federated LoRA", Tuning), ("methods.fedhl.weighing", Weighing)]
    sections += [("methods.fedhl.form, methods.flexlora.form", Form)]
    sections += [("lora; with [language] the fields of peft.LoraConfig, and ranks", LoraTable)]
    sections += [("language", LanguageSettings)]
    sections += [("network", NetworkSettings), ("network.limits", Limits)]
    for title, cls in sections:
        lines.append(f"\n[{title}]")
        lines += [f"  {f.name} = {f.default}\n      {f.meaning}" for f in config.fields_of(cls)]
    return "\n".join(lines)


def run(
    file: Path, overrides: Sequence[str], method: str | None, engine: str | None, out: Path | None, force: bool
) -> int:
    """Run one method of an experiment."""
    more = [] if engine is None else [f"run.engine={engine}"]
    made = experiment.load(config.read(file, [*overrides, *more]))
    name = made.chosen(method)
    folder = out or Path("runs") / made.name / f"{name}-s{made.run.seed}"
    made.method(name)
    _refuse_existing(folder, force)
    federation = made.federation()
    _show_data(federation)
    _one(made, name, federation, folder, force=force)
    return show_run(folder)


def show_run(folder: Path) -> int:
    """Print what came of a run."""
    OUT.print(render_terminal(comparison([RunRecord.load(folder)])))
    OUT.print(f"run folder: {folder}")
    return 0


def compare(
    file: Path,
    overrides: Sequence[str],
    methods: str | None,
    seeds: str | None,
    vary: Sequence[str],
    out: Path | None,
    target: float | None,
    force: bool,
) -> int:
    """Run every combination of method, seed and varied value; finished runs of the same configuration are kept."""
    if target is not None and not 0 < target <= 1:
        raise ConfigError(f"--target is an accuracy in (0, 1], such as 0.9; it is {target}")
    tables = config.read(file, overrides)
    base = experiment.load(tables)
    names = [m.strip() for m in methods.split(",")] if methods else base.compared
    numbers = _seeds(seeds) if seeds else list(base.header.seeds) or [base.run.seed]
    out = out or Path("runs") / base.name
    runs = plan(tables, names, numbers, vary or base.header.vary, out)
    if not force:
        refuse_conflicts(runs)
    records, refused, federation, last = [], [], None, None
    for one in runs:
        made, name, folder = one.experiment, one.name, one.folder
        if federation is None or last is not made:
            first, federation, last = federation is None, made.federation(), made
            if first:
                _show_data(federation)
        try:
            _one(made, name, federation, folder, force=force, go_on=not force, extra={"vary": one.vary})
        except TaskError as error:
            refused.append(f"not run: {made.title(name)}, seed {made.run.seed}: {error}")
            continue
        except NonFiniteError as error:
            # a method that diverges is a result; its record until then belongs in the table
            refused.append(f"stopped: {made.title(name)}, seed {made.run.seed}: {error}")
        records.append(RunRecord.load(folder))
    if records:
        page = out / "report.html"
        write_report(records, page, target=target, command=shlex.join(["fedlowrank", *sys.argv[1:]]))
        OUT.print(render_terminal(comparison(records, target)))
        OUT.print(f"report: {page}")
    for line in refused:
        OUT.print(line, style="yellow")
    return 0 if records else 1


def resume(
    folder: Path,
    overrides: Sequence[str],
    round: int | None = None,
    without: Sequence[int] = (),
    allow_code: bool = False,
) -> int:
    """Go on with a stopped run, maybe from an earlier checkpoint and without some clients, or give a finished one more rounds."""
    stored = stored_config(folder, "resume it with simulate(..., folder=..., resume=True)")
    tables = stored["experiment"]
    for text in overrides:
        config.merge(tables, config.override(text))
    made = experiment.load(tables, allow_code)
    if (round is not None or without) and not went_back(folder, round, without, say):
        return 0
    _one(made, stored["method"]["name"], made.federation(), folder, go_on=True, extra={"vary": stored["vary"]})
    OUT.print(render_terminal(comparison([RunRecord.load(folder)])))
    return 0


def export_(folder: Path, client: int, series: str | None, layout: Layout, out: Path, allow_code: bool = False) -> int:
    """Write a client's model, and say what its thin layers gain."""
    run = opened(folder, "export by simulate(..., folder=..., resume=True).deploy(client)", allow_code=allow_code)
    gain = write(run, client, series, layout, out)
    table = Table("", "dense", "deployed", title=f"{run.method.title}, client {client}, after round {run.round}")
    table.add_row("parameters", *(f"{s.parameters:,}" for s in gain.size))
    table.add_row("bytes", *(f"{s.nbytes:,}" for s in gain.size))
    table.add_row("ms of CPU for 20 inputs", *(f"{t.median:.2f} [{t.lower:.2f}, {t.upper:.2f}]" for t in gain.latency))
    OUT.print(table)
    # a regression has no classes that could agree
    same = (
        f"{100 * gain.agreement:.1f} % of the test examples get the same class; scores"
        if run.task.classes
        else "Outputs"
    )
    OUT.print(
        f"{same} differ by {gain.difference:.1e} at most. ms: median and quartiles of calls that take turns, one thread."
    )
    OUT.print(f"{out}: {gain.file:,} bytes. Load it by fedlowrank.adapters.deployment.load(module, path).")
    return 0


def report(
    folders: Sequence[Path], out: Path, target: float | None, tensorboard: Path | None, figures: Path | None
) -> int:
    """Write the report of run folders."""
    records = in_order([RunRecord.load(f) for f in run_folders(folders)])
    write_report(records, out, target=target, command=shlex.join(["fedlowrank", *sys.argv[1:]]))
    for record in records if tensorboard else ():
        with as_checkpoint_error(f"cannot write {tensorboard}"):
            export_tensorboard(record, Path(str(tensorboard)) / record.folder.name)
    if figures is not None:
        save_figures(records, figures)
    OUT.print(render_terminal(comparison(records, target)))
    OUT.print(f"report: {out}")
    return 0


def check(name: str) -> int:
    """Test a method against the contract."""
    if ":" in name:
        cls = import_named(name, "check")
        if not (isinstance(cls, type) and issubclass(cls, Method)):
            raise ConfigError(f"{name!r} is no subclass of fedlowrank.Method")
    else:
        cls = experiment.method_class(name)
    try:
        method = cls()
    except TypeError as error:
        raise ConfigError(f"{name} cannot be made without arguments, give every field a default: {error}") from error
    findings = check_method(method)
    table = Table("check", "", "detail", title=f"{method.title}: the contract")
    for finding in findings:
        verdict = Text("ok", "green") if finding.ok else Text("FAILED", "red")
        table.add_row(finding.name, verdict, finding.detail)
    OUT.print(table)
    return 0 if all(f.ok for f in findings) else 1


def data(file: Path, overrides: Sequence[str], out: Path | None) -> int:
    """Show how an experiment shares out its data."""
    federation = experiment.load(config.read(file, overrides)).federation()
    _show_data(federation)
    if out is not None:
        figure = class_count_figure(class_counts(federation.clients, len(federation.classes)), federation.classes)
        try:
            with matplotlib.rc_context(EMBEDDED_FONTS):
                figure.savefig(out)
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot draw {out}: {error}") from error
        OUT.print(f"picture: {out}")
    return 0


def _show_data(federation: Federation) -> None:
    # plain print: the table is laid out already, and wrapping would tear its lines
    print(class_count_table(federation.clients, federation.classes, width=OUT.width), flush=True)


def _refuse_existing(folder: Path, force: bool) -> None:
    if folder.exists() and not force:
        raise CheckpointError(RunFolder.taken(folder))


def _one(
    made: Experiment,
    name: str,
    federation: Federation,
    folder: Path,
    *,
    force: bool = False,
    go_on: bool = False,
    extra: dict[str, Any] | None = None,
) -> None:
    method = made.method(name)
    for remark in method.remarks(federation.task(made.run.rounds)):
        OUT.print(f"{made.title(name)}: {remark}", style="yellow")
    _CURRENT.append(f"fedlowrank resume {shlex.quote(str(folder))}{' --allow-code' if made.model.own else ''}")
    begun = (folder / "checkpoint" / "manifest.json").exists()
    resume, force = go_on and begun, force or (go_on and not begun)
    config_ = {**made.describe(name), **(extra or {})}
    if made.run.engine == "flower":
        from .network import simulated

        simulated(made, name, folder, resume=resume, force=force, config=config_, say=say)
    else:
        simulate(
            method,
            federation,
            folder=folder,
            resume=resume,
            force=force,
            progress=True,
            config=config_,
            **dataclasses.asdict(made.run),
        )
    _CURRENT.pop()


def say(text: str) -> None:
    """Tell a person something on the way."""
    OUT.print(text, style="dim", highlight=False)


def _seeds(text: str) -> list[int]:
    try:
        return [int(s) for s in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"--seeds takes whole numbers separated by commas, such as 0,1,2; not {text!r}") from error
