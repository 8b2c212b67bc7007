"""What the commands ``adapters`` and ``score`` do."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from ..config.stored_run import opened
from ..config.tables import build, merge, override
from ..core.errors import ConfigError, TaskError, did_you_mean
from ..core.files import as_checkpoint_error, write_json
from ..core.tree import Params
from ..data.text.formats import render
from ..data.text.records import Instruction
from ..language.artifacts import BESIDE
from ..language.federation import Language
from ..language.scores import TASKS, Score, ScoreTask
from ..simulation.run import Run
from ..simulation.terminal import console

OUT = console()


def adapters(
    folder: Path,
    out: Path,
    merged: bool,
    best: bool = False,
    rank: int | None = None,
    allow_code: bool = False,
) -> int:
    """Write adapter folders of a run's last checkpoint, or of its best.

    Args:
        folder: of the run.
        out: gets the folders.
        merged: write the server's whole model, too.
        best: the round with the best validation and not the last.
        rank: of the adapters; None for that of each model.
        allow_code: import code of the user's that the run folder names.
    """
    if rank is not None and rank < 1:
        raise ConfigError(f"--rank must be at least 1; it is {rank}")
    run = _opened(folder, best, allow_code)
    with as_checkpoint_error(f"cannot write {out}"):
        for path in language_of(run).write(run, out, merged, rank):
            OUT.print(str(path))
            _print_truncation(path)
    OUT.print("Load one by peft.PeftModel.from_pretrained(base, folder); whole models by from_pretrained(folder).")
    return 0


def _print_truncation(path: Path) -> None:
    """What an adapter lost by its rank, by layer, where it lost something."""
    beside = path / BESIDE
    told = json.loads(beside.read_text()).get("truncation") if beside.is_file() else None
    if told is None:
        return
    OUT.print(f"  rank {told['rank']}: relative error {told['error']:.3g} in the Frobenius norm, over all layers")
    # what is below is the rounding of float32
    if told["error"] > 1e-6:
        table = Table("layer", "relative error")
        for name, error in told["layers"].items():
            table.add_row(name, f"{error:.3g}")
        OUT.print(table)


def score(
    folder: Path,
    task: str,
    fields: Sequence[str],
    models: Sequence[str],
    out: Path | None,
    best: bool = False,
    allow_code: bool = False,
) -> int:
    """Score models of a run by what they write.

    Args:
        folder: of the run.
        task: name of the task.
        fields: ``name=value``, settings of the task.
        models: ``server``, ``base`` or numbers of clients; empty for the server's model where there is one, else client 0.
        out: JSON file to write the scores to, or None.
        best: the round with the best validation and not the last.
        allow_code: import the Python code that the run's configuration names.
    """
    if task not in TASKS:
        raise ConfigError(f"--task: there is no task {task!r}. {did_you_mean(task, TASKS)}")
    settings: dict[str, Any] = {}
    for text in fields:
        merge(settings, override(text))
    made: ScoreTask = build(TASKS[task], settings, f"score {task}")
    run = _opened(folder, best, allow_code)
    found = scores(run, made, models)
    table = Table("model", "score", "over", "decoding", title=f"{task}, {run.method.title}, after round {run.round}")
    for name, one in found.items():
        table.add_row(name, f"{one.value:.4f}", str(one.count), one.decoding)
    OUT.print(table)
    for name, one in found.items():
        OUT.print(f"{name}: " + ", ".join(f"{k} {v}" for k, v in one.details.items()))
    if out is not None:
        write_json(out, {n: _plain(s) for n, s in found.items()})
    return 0


def scores(run: Run, task: ScoreTask, models: Sequence[str] = ()) -> dict[str, Score]:
    """Scores of models of a run by their names; see :func:`score`."""
    language = language_of(run)
    if language.settings.task != "causal":
        raise ConfigError("this run's models classify; their accuracy is in the report, and they write no text")
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


def language_of(run: Run) -> Language:
    """What belongs to the language models of a run.

    Raises:
        TaskError: if they are no language models.
    """
    companion = run.federation.companion
    if not isinstance(companion, Language):
        raise TaskError("this run has no language models; adapter folders and generation are for those alone")
    return companion


def _opened(folder: Path, best: bool, allow_code: bool) -> Run:
    python = "use fedlowrank.cli.language.scores, or federation.companion.write(run, folder)"
    return opened(folder, python, best, allow_code)


def _default(run: Run) -> str:
    return "server" if run.at_client(run.federation.infos[0]).server is not None else "0"


def _params(run: Run, name: str) -> Params:
    if name == "base":
        return {}
    if name == "server":
        found = run.at_client(run.federation.infos[0]).server
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
