"""The command ``fedlowrank tune``: a grid search by validation for every method, then a comparison of the choices."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from ..config.comparison import PlannedRun, find_changes, plan_runs, refuse_conflicts
from ..config.experiment import ExperimentConfig
from ..config.reading.merging import LayeredTables
from ..config.reading.unread_overrides import COMPARED, refuse_unread_overrides
from ..config.sections.tune_section import TuneSettings
from ..config.tuning import (
    TUNED,
    Setting,
    choose_setting,
    find_edges,
    plan_tuning,
    score_run,
    tune_settings,
    tuned_experiment,
)
from ..core.errors import ConfigError, did_you_mean
from ..core.io.atomic_files import as_checkpoint_error, write_atomically
from ..report.tables.text_table import TerminalTable
from ..report.tables.tuning_table import tuning_csv, tuning_markdown, tuning_tables
from ..results.records import RunRecord
from ..storage.run_folder import RunFolder
from .commands import refuse_network_settings, run_planned, show_failures, write_comparison
from .jobs.parallel import Outcome
from .terminal import OUT

SEEDS = "the seeds are those of [tune]. Write tune.seeds=[...] and tune.test_seeds=[...]."


def tune(
    file: Path, overrides: Sequence[str], jobs: int, out: Path | None, target: float | None, force: bool
) -> int:
    """Tune every method of an experiment on its grid, and compare the choices on other seeds."""
    if target is not None and not 0 < target <= 1:
        raise ConfigError(f"--target is an accuracy in (0, 1], such as 0.9; it is {target}")
    config_tables = LayeredTables.read(file, overrides)
    experiment = ExperimentConfig.parse_laid(config_tables)
    for line in experiment.refuse_overrides_of_other_methods(config_tables, experiment.compared_methods):
        OUT.print(line, style="yellow")
    reasons = {
        "seeds": SEEDS,
        "run.seed": SEEDS,
        **({"method": COMPARED["method"]} if experiment.compare else {}),
    }
    refuse_unread_overrides(config_tables, reasons)
    refuse_network_settings(experiment, overrides)
    out = out or Path("runs") / f"{experiment.name}{TUNED}"
    tuned_config = tune_experiment(experiment, out, jobs, force)
    if tuned_config is None:
        return 1
    return compare_tuned(tuned_config, out, jobs, target, force)


def tune_experiment(
    experiment: ExperimentConfig, out: Path, jobs: int = 1, force: bool = False
) -> ExperimentConfig | None:
    """Run or continue the grid search of an experiment, and write the settings that it chooses.

    Writes ``tuning.csv``, ``tuning.md`` and ``tuned.toml`` into the folder, and the runs to its subfolder ``tuning``.

    Args:
        experiment: experiment with a section ``[tune]``.
        out: folder of the grid search.
        jobs: number of runs at a time.
        force: whether to move existing run folders aside instead of continuing their runs.

    Returns:
        The experiment with the chosen settings and the test seeds; None if runs failed, so that nothing can be
        chosen, or no method has a setting that does not diverge.
    """
    plan, tune = plan_tuning(experiment, out), tune_settings(experiment)
    runs = [run for setting in plan for run in setting.runs]
    OUT.print(f"{len(plan)} settings of {len(experiment.compared_methods)} methods, {len(runs)} tuning runs")
    if not force:
        refuse_conflicts(runs)
    if runs:
        _require_validation(runs[0])
    outcomes = run_planned(runs, jobs, force)
    if any(outcome.state == "failed" for outcome in outcomes):
        show_failures(outcomes)
        OUT.print("The choice needs all tuning runs. Start the same command again to go on with them.")
        return None
    _require_series(outcomes, tune.series)
    outcome_by_folder = {outcome.run.folder: outcome for outcome in outcomes}
    names = experiment.compared_methods
    titles = _unique_titles(experiment)
    scored_settings = {
        titles[name]: [
            _with_scores(candidate, outcome_by_folder, tune) for candidate in plan if candidate.method == name
        ]
        for name in names
    }
    selection = {title: choose_setting(settings) for title, settings in scored_settings.items()}
    warnings = [
        f"{title}: not compared, for no setting of the grid has a result"
        for title, setting in selection.items()
        if setting is None
    ]
    chosen_settings = [setting for setting in selection.values() if setting is not None]
    warnings += [
        line for setting in chosen_settings for line in find_edges(setting, tune.grid_of(setting.method))
    ]
    tables = tuning_tables(scored_settings, selection)
    for table in tables:
        OUT.print(TerminalTable(table))
    for warning in warnings:
        OUT.print(warning, style="yellow")
    with as_checkpoint_error(f"cannot make {out}"):
        out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / "tuning.csv", tuning_csv(scored_settings, selection).encode())
    write_atomically(out / "tuning.md", tuning_markdown(tables, warnings).encode())
    if not chosen_settings:
        return None
    tuned_config = tuned_experiment(experiment, chosen_settings)
    write_atomically(out / "tuned.toml", tuned_config.to_toml().encode())
    OUT.print(f"chosen settings: {out / 'tuned.toml'}")
    return tuned_config


def compare_tuned(
    tuned_config: ExperimentConfig, out: Path, jobs: int, target: float | None = None, force: bool = False
) -> int:
    """Compare methods with their chosen settings on the test seeds; runs of older choices are moved aside.

    Args:
        tuned_config: experiment that :func:`tune_experiment` returned.
        out: folder of the runs and of ``report.html``.
        jobs: number of runs at a time.
        target: accuracy for which the cost is reported, in (0, 1].
        force: whether to move all existing run folders aside.

    Returns:
        The exit code.
    """
    runs = plan_runs(tuned_config, tuned_config.compared_methods, tuned_config.seeds, (), out)
    for run in () if force else runs:
        if changes := find_changes(run):
            RunFolder.move_aside(run.folder)
            OUT.print(
                f"{run.folder} has other settings and was moved aside: {'; '.join(changes)}", style="yellow"
            )
    outcomes = run_planned(runs, jobs, force)
    records = [RunRecord.load(o.run.folder) for o in outcomes if o.state in ("finished", "diverged")]
    if records:
        write_comparison(records, out / "report.html", target)
    return show_failures(outcomes) if records else show_failures(outcomes) or 1


def _require_validation(run: PlannedRun) -> None:
    """Refuse to tune without validation examples, before anything is trained."""
    if run.experiment.language is None and not any(len(data.val) for data in run.experiment.shares().data):
        raise ConfigError(
            "settings are chosen by validation, but no client has validation examples. Set split.val, such "
            "as 0.1"
        )


def _require_series(outcomes: Sequence[Outcome], series: str | None) -> None:
    """Refuse a series of models that no method has, such as a misspelled name."""
    run_folders = [outcome.run.folder for outcome in outcomes if outcome.state == "finished"]
    if series is None or not run_folders:
        return
    last_records = [record for folder in run_folders for record in RunRecord.load(folder).rounds[-1:]]
    series_names = {name for record in last_records for name in record.series()}
    if series not in series_names:
        raise ConfigError(
            f"tune.series: no method has the series {series!r}. {did_you_mean(series, sorted(series_names))}"
        )


def _unique_titles(experiment: ExperimentConfig) -> dict[str, str]:
    """Titles of methods by name; methods with equal titles get their name added."""
    titles = {name: experiment.method_title(name) for name in experiment.compared_methods}
    return {
        name: f"{title} ({name})" if list(titles.values()).count(title) > 1 else title
        for name, title in titles.items()
    }


def _with_scores(setting: Setting, outcomes: dict[Path, Outcome], tune: TuneSettings) -> Setting:
    """Add the scores of its runs to a setting; a run that did not finish has none."""
    scores, messages = [], []
    for run in setting.runs:
        outcome = outcomes[run.folder]
        record = RunRecord.load(run.folder) if outcome.state == "finished" else None
        score = None if record is None else score_run(record, tune.at, tune.series)
        scores.append(score)
        seed = f"seed {run.experiment.run.seed}"
        if outcome.state == "refused":
            messages.append(f"not run: {outcome.message}")
        elif record is not None and record.has_used_no_reply:
            messages.append(f"diverged: no reply of a client was ever used ({seed})")
        elif score is None:
            messages.append(f"diverged ({seed})")
    return dataclasses.replace(setting, scores=tuple(scores), messages=tuple(messages))
