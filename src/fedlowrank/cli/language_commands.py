"""What the commands ``adapters`` and ``score`` do."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from ..config.reading.merging import parse_overrides
from ..config.reading.parsing import build
from ..config.stored_run import open_run
from ..core.errors import CheckpointError, ConfigError, TaskError, did_you_mean
from ..core.io.atomic_files import as_checkpoint_error, write_json
from ..core.tree import Params
from ..data.text.text_formats import render
from ..data.text.text_records import Instruction
from ..language.artifacts import METADATA
from ..language.scores import TASKS, Score, ScoreTask
from ..language.text_federation import Language
from ..rounds.run import Run
from ..storage.run_folder import RunFolder
from .terminal import OUT


def adapters(
    folder: Path, out: Path, force: bool, merged: bool, best: bool, rank: int | None, allow_code: bool
) -> int:
    """Write adapter folders of a run's last checkpoint, or of its best."""
    if rank is not None and rank < 1:
        raise ConfigError(f"--rank must be at least 1; it is {rank}")
    is_taken = out.is_dir() and any(out.iterdir())
    if is_taken and not force:
        raise CheckpointError(
            f"{out} exists already and is not empty. Choose another folder with -o, or pass --force to move it aside."
        )
    run = _open(folder, best, allow_code)
    if is_taken:
        RunFolder.move_aside(out)
    with as_checkpoint_error(f"cannot write {out}"):
        for path in language_of_run(run).write(run, out, merged, rank):
            OUT.print(str(path))
            _print_truncation(path)
    OUT.print("Load one by PeftModel.from_pretrained(base, folder); whole models by from_pretrained(folder).")
    return 0


def _print_truncation(path: Path) -> None:
    """What an adapter lost by its rank, by layer, where it lost something."""
    beside = path / METADATA
    truncation = json.loads(beside.read_text()).get("truncation") if beside.is_file() else None
    if truncation is None:
        return
    OUT.print(f"  rank {truncation['rank']}: relative error {truncation['error']:.3g} (Frobenius norm)")
    # what is below is the rounding of float32
    if truncation["error"] > 1e-6:
        table = Table("layer", "relative error")
        for name, error in truncation["layers"].items():
            table.add_row(name, f"{error:.3g}")
        OUT.print(table)


def score(
    folder: Path,
    task: str,
    overrides: Sequence[str],
    models: Sequence[str],
    out: Path | None,
    best: bool,
    allow_code: bool,
) -> int:
    """Score models of a run by what they write; see :func:`scores`."""
    if task not in TASKS:
        raise ConfigError(f"--task: there is no task {task!r}. {did_you_mean(task, TASKS)}")
    scorer: ScoreTask = build(TASKS[task], parse_overrides(overrides), f"score {task}")
    run = _open(folder, best, allow_code)
    found = scores(run, scorer, models)
    title = f"{task}, {run.method.title}, after round {run.round}"
    table = Table("model", "score", "over", "decoding", title=title)
    for name, one in found.items():
        table.add_row(name, f"{one.value:.4f}", str(one.count), one.decoding)
    OUT.print(table)
    for name, one in found.items():
        OUT.print(f"{name}: " + ", ".join(f"{k} {v}" for k, v in one.details.items()))
    if out is not None:
        write_json(out, {n: _plain(s) for n, s in found.items()})
    return 0


def scores(run: Run, task: ScoreTask, models: Sequence[str] = ()) -> dict[str, Score]:
    """Score models of a run.

    Args:
        run: with language models.
        task: what they write, and how it is judged.
        models: ``server``, ``base`` or numbers of clients; by default the server's model, or else client 0.
    """
    language = language_of_run(run)
    if language.settings.task != "causal":
        raise ConfigError("this run's models classify and write no text; their accuracy is in the report")
    found = {}
    for name in models or (_default(run),):
        with language.live(_params(run, name)) as model:
            found[name] = task.score(model, language.loaded.tokenizer, prompt_of(language))
    return found


def prompt_of(language: Language) -> Any:
    """The format of training, for prompts."""

    def prompt(record: Mapping[str, str]) -> str:
        asked = Instruction(record["instruction"], "", record["input"])
        return render(asked, language.settings.format, language.loaded.tokenizer)[0]

    return prompt


def language_of_run(run: Run) -> Language:
    """What belongs to the language models of a run.

    Raises:
        TaskError: if they are no language models.
    """
    companion = run.federation.companion
    if not isinstance(companion, Language):
        raise TaskError("this run has no language models; adapter folders and generation are for those alone")
    return companion


def _open(folder: Path, best: bool, allow_code: bool) -> Run:
    python = "use fedlowrank.cli.language_commands.scores, or federation.companion.write(run, folder)"
    return open_run(folder, python, best, allow_code)


def _default(run: Run) -> str:
    return "server" if run.local_model(run.federation.infos[0]).server is not None else "0"


def _params(run: Run, name: str) -> Params:
    if name == "base":
        return {}
    if name == "server":
        found = run.local_model(run.federation.infos[0]).server
        if found is None:
            raise ConfigError(f"{run.method.title} has no model of the server's own; name a client")
        return found
    if not name.isdecimal() or int(name) >= len(run.federation.infos):
        raise ConfigError(
            f"--model is server, base, or a client from 0 to {len(run.federation.infos) - 1}, not {name!r}"
        )
    return run.personal(run.federation.infos[int(name)])


def _plain(one: Score) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(vars(one), default=str))
    return found
