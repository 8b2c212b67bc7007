"""The command ``score``, and functions that it shares with other commands for language models."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from ..adapters.lora.adapted_layers import PEFT_PREFIX
from ..adapters.lora.lora_factors import find_lora
from ..config.reading.merging import parse_overrides
from ..config.reading.parsing import build
from ..config.stored_run import find_typed_client, open_run
from ..core.errors import ConfigError, TaskError, did_you_mean
from ..core.io.atomic_files import as_checkpoint_error, write_json
from ..core.key import Key
from ..core.tree import Params
from ..data.text.chat.chat_template import ChatTemplate
from ..data.text.packing import Sample
from ..data.text.text_formats import make_conversation, render_instruction
from ..data.text.text_records import Instruction
from ..language.base_model import load_base
from ..language.device_map import NO_MAP
from ..language.export.client_models import find_client_model
from ..language.export.server_model import find_server_model
from ..language.language_model import Language
from ..language.lora.new_tokens import name_rows
from ..language.lora.peft_adapter import ADAPTER
from ..language.scores import TASKS, PromptFormat, Score, ScoreTask
from ..rounds.run import Run
from .terminal import OUT


def score(
    folder: Path,
    task: str,
    overrides: Sequence[str],
    models: Sequence[str],
    out: Path | None,
    best: bool,
    allow_code: bool,
) -> int:
    """Score models of a run by the texts that they write; see :func:`scores`."""
    if task not in TASKS:
        raise ConfigError(f"--task: there is no task {task!r}. {did_you_mean(task, TASKS)}")
    scorer: ScoreTask = build(TASKS[task], parse_overrides(overrides), f"score {task}")
    if out is not None:
        # scoring takes minutes, so an output that cannot be written is refused first
        with as_checkpoint_error(f"cannot make {out.parent}"):
            out.parent.mkdir(parents=True, exist_ok=True)
    run = open_language_run(folder, best, allow_code)
    results = scores(run, scorer, models)
    title = f"{task}, {run.method.title}, after round {run.round}"
    table = Table("model", "score", "over", "decoding", title=title)
    for name, result in results.items():
        table.add_row(name, f"{result.value:.4f}", str(result.count), result.decoding)
    OUT.print(table)
    for name, result in results.items():
        OUT.print(f"{name}: " + ", ".join(f"{k} {v}" for k, v in result.details.items()))
    if out is not None:
        write_json(out, {n: _plain(s) for n, s in results.items()})
    return 0


def scores(run: Run, task: ScoreTask, models: Sequence[str] = ()) -> dict[str, Score]:
    """Score models of a run.

    Args:
        run: run with language models.
        task: task that the models answer, and the rule by which answers are scored.
        models: ``server``, ``base`` or clients, as in :func:`params_of`; by default the server's model, or else client 0.
    """
    language = language_of_run(run)
    if language.settings.task != "causal":
        raise ConfigError("this run's models write no text; `fedlowrank report` has how good they are")
    scores_by_model = {}
    for name in models or (default_model(run),):
        with language.use_parameters(params_of(run, name)) as model:
            scores_by_model[name] = task.score(model, language.loaded.tokenizer, prompt_of(language))
    return scores_by_model


def prompt_of(language: Language) -> PromptFormat:
    """Format of prompts in training."""
    settings = language.settings
    chat = (
        ChatTemplate(language.loaded.tokenizer, "response", settings.system)
        if language.uses_chat_template
        else None
    )

    def prompt(record: Mapping[str, str]) -> str:
        if settings.format == "none":
            # a text that the model continues
            return record["instruction"] + record["input"]
        instruction = Instruction(record["instruction"], "", record["input"])
        if chat is not None:
            return chat.write_prompt(make_conversation(instruction))
        return render_instruction(instruction, settings.format)[0]

    def make_chat_rows(records: Sequence[Instruction]) -> list[Sample]:
        assert chat is not None
        conversations = [make_conversation(record, f"record {i}") for i, record in enumerate(records, 1)]
        return [sample for _, sample in chat.samples(conversations)]

    make_rows = None if chat is None else make_chat_rows
    return PromptFormat(prompt, chat is None, language.end_token, make_rows)


def language_of_run(run: Run) -> Language:
    """Return the companion object of a run's language models.

    Raises:
        TaskError: if the run's models are no language models.
    """
    companion = run.federation.companion
    if not isinstance(companion, Language):
        raise TaskError("this run has no language models; adapter folders and generation are for those alone")
    return companion


def open_language_run(folder: Path, best: bool, allow_code: bool, in_memory: bool = False) -> Run:
    """Open a stored run at its last checkpoint, or at that of its best round.

    Args:
        folder: folder of the run.
        best: whether to open the round with the best validation.
        allow_code: whether to import the Python code that the stored configuration names.
        in_memory: whether the base is in memory and dense also if the run has a device map or quantizes it, to be merged with
            updates.
    """
    python = "use fedlowrank.cli.language_commands.scores, or federation.companion.write(run, folder)"
    dense_in_memory = {"device_map": NO_MAP, "quantize": "none"}
    return open_run(folder, python, best, allow_code, dense_in_memory if in_memory else None)


def default_model(run: Run) -> str:
    """Name of a run's default model: the server's, or else that of client 0."""
    infos = run.federation.infos
    if run.local_model(infos[0]).server is not None:
        return "server"
    return "number=0" if any(info.name == "0" for info in infos[1:]) else "0"


def params_of(run: Run, name: str) -> Params:
    """Parameters of a run's model that are put into the model in memory.

    ``base`` is the base model of the files without any adapter, also without ``lora.start``. Its rows of
    ``language.new_tokens`` are those before any training: the mean of the former rows, or the row of a token that the
    base already has.

    Args:
        run: run with language models.
        name: name of the model: ``server``, ``base``, or the name or number of a client.

    Raises:
        ConfigError: if there is no such model, or the client infers by a mixture of models.
    """
    if name == "base":
        return _find_base_parameters(language_of_run(run))
    if name == "server":
        server_model = find_server_model(run)
        if server_model is None:
            # a mixture has neither
            find_client_model(run, run.federation.infos[0])
            raise ConfigError(
                f"{run.method.title} has no model of the server; name a client, such as --model 0"
            )
        return server_model
    return find_client_model(run, find_typed_client(run.federation.infos, name, "--model"))


def _find_base_parameters(language: Language) -> Params:
    """Find the parameters that undo the start adapter of the model in memory; none without ``lora.start``."""
    if not language.start:
        # the initial factors have no effect
        return {}
    model = language.model
    parameters = dict(model.named_parameters(remove_duplicate=False))
    base_parameters = {}
    for layer in find_lora(model, None).layers.values():
        name = str(getattr(layer, layer.zero))
        base_parameters[name] = torch.zeros_like(parameters[name])
    token_layers: Mapping[str, list[int]] = model.peft_config[ADAPTER].trainable_token_indices or {}
    for layer_name, name in name_rows(token_layers).items():
        # the start adapter sets the rows that are trained, and not the embedding below them
        embedding = model.get_submodule(f"{PEFT_PREFIX}{layer_name}.token_adapter.base_layer")
        rows = embedding.weight[token_layers[layer_name]]
        base_parameters[f"{name}.{ADAPTER}"] = rows.to(parameters[f"{name}.{ADAPTER}"])
    if saved_modules := language.loaded.saved_modules:
        # the start adapter overwrote them, so they are read from the files again
        base = load_base(language.settings, language.classes, Key((0,))).model
        for module in saved_modules:
            for parameter_name, value in base.get_submodule(module).named_parameters(prefix=module):
                name = PEFT_PREFIX + parameter_name
                base_parameters[name] = value.to(parameters[name])
    return base_parameters


def _plain(result: Score) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(json.dumps(vars(result), default=str))
    return fields
