"""Scores by the lm-evaluation-harness (``lm_eval``, EleutherAI): GSM8K, HumanEval, MMLU and its other tasks."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from ...core.arguments.bounds import check_bounds
from ...core.arguments.field_checks import CheckedFields
from ...core.errors import ConfigError, DataError, did_you_mean
from ...data.text.table import read_file
from ..optional_packages import import_library
from .score import Render, Score, adds_special_tokens
from .text_generation import Decoding, complete_prompts, use_evaluation_mode

_INSTALL_TARGET = "'fedlowrank[harness]'"
_POSITIVE_FIELDS = ("limit", "batch_size", "max_new_tokens", "prompt_tokens")


@dataclass(frozen=True)
class HarnessTask(CheckedFields):
    """A task of lm_eval: its data, prompts, few-shot examples, stop strings and metrics.

    :func:`complete_prompts` generates the text. lm_eval's own generation decodes the new tokens without the
    prompt, where tokenizers such as Llama-2's drop the first space, and with it the indentation of code.

    Attributes:
        name: name of a task or group of lm_eval (``lm-eval ls tasks`` lists them), or the path of a task's YAML
            file.
        path: file with the records of the test split, for a named task. None takes the data set of the task,
            which lm_eval downloads from the Hugging Face hub.
        train_path: with ``path`` only: file with the records from which few-shot examples are drawn.
        shots: number of few-shot examples before each record; None for the task's own number.
        prompting: form of the prompt. plain: the prompt is the text of the task; format: the text of the task is an
            instruction in the format of training.
        execute: whether programs that the model wrote may be run; must be True for a task that runs them, such as
            humaneval. They run as the user of this process, without a sandbox: start such a task in a container.
        metric: metric that is the value of the score, such as ``exact_match,flexible-extract``; None takes the
            task's first metric. The details list all metrics.
        limit: number of records of each task, from the first on; None takes all.
        bootstrap: number of resamplings for standard errors; 0 for no standard errors. Standard errors of means need
            no resampling but a number above 0.
        batch_size: number of prompts in a batch.
        max_new_tokens: maximum number of tokens after a prompt; None takes the number of the task.
        prompt_tokens: maximum number of prompt tokens, see :class:`Decoding`.
        special_tokens: whether the tokenizer adds its special tokens to the prompt, see :class:`Decoding`.
    """

    section = "lm_eval"

    name: str
    path: str | None = None
    train_path: str | None = None
    shots: int | None = None
    prompting: Literal["plain", "format"] = "plain"
    execute: bool = False
    metric: str | None = None
    limit: int | None = None
    bootstrap: int = 0
    batch_size: int = 8
    max_new_tokens: int | None = None
    prompt_tokens: int | None = None
    special_tokens: bool = True

    def __post_init__(self) -> None:
        bounds = {**dict.fromkeys(_POSITIVE_FIELDS, ">= 1"), "shots": ">= 0", "bootstrap": ">= 0"}
        check_bounds(self, bounds, "lm_eval")
        if self.train_path is not None and self.path is None:
            raise ConfigError("lm_eval: train_path belongs to path; set both, or neither")
        if self.path is not None and self.train_path is None and self.shots != 0:
            raise ConfigError(
                "lm_eval: few-shot examples need train_path beside path. Set it, or set shots to 0."
            )

    def score(self, model: Any, tokenizer: Any, format: Render) -> Score:
        """Score a model; see :meth:`.score.ScoreTask.score`.

        lm_eval seeds the global generators with its own defaults. The state of these generators, the mode of the model
        and the padding of the tokenizer are restored afterwards.

        Raises:
            DataError: if lm_eval or a file is missing, or lm_eval cannot load the task.
            ConfigError: if there is no such task or metric, or the task runs programs without ``execute``.
        """
        library, wrapper = (
            import_library(name, "this score", _INSTALL_TARGET)
            for name in ("lm_eval", "lm_eval.models.huggingface")
        )
        decodings_used: dict[str, None] = {}
        adds_special = self.special_tokens and (self.prompting == "plain" or adds_special_tokens(format))

        def generate(requests: Sequence[Any]) -> list[str]:
            texts = [""] * len(requests)
            rows: dict[Decoding, list[int]] = {}
            for i, request in enumerate(requests):
                decoding = replace(self._make_decoding(request.args[1]), special_tokens=adds_special)
                rows.setdefault(decoding, []).append(i)
            for decoding, indices in rows.items():
                decodings_used[decoding.describe()] = None
                prompts = [requests[i].args[0] for i in indices]
                for i, text in zip(
                    indices, complete_prompts(model, tokenizer, prompts, decoding), strict=True
                ):
                    texts[i] = text
            return texts

        def write_prompt(messages: Sequence[Mapping[str, str]], **_: Any) -> str:
            instruction = "\n\n".join(m["content"] for m in messages if m["role"] != "assistant")
            answer_start = messages[-1]["content"] if messages[-1]["role"] == "assistant" else ""
            return format({"instruction": instruction, "input": ""}) + answer_start

        padding_settings = {name: getattr(tokenizer, name) for name in ("pad_token", "padding_side")}
        # HFLM changes the mode of the model and the padding of the tokenizer, and ties the weights again
        with use_evaluation_mode(model), _restore_global_generators():
            manager, tasks = self._load_tasks()
            try:
                lm = wrapper.HFLM(
                    model,
                    backend="causal",
                    tokenizer=tokenizer,
                    batch_size=self.batch_size,
                    add_bos_token=None if adds_special else False,
                )
                lm.generate_until, lm.apply_chat_template = generate, write_prompt
                evaluation = library.simple_evaluate(
                    model=lm,
                    tasks=tasks,
                    task_manager=manager,
                    num_fewshot=self.shots,
                    limit=self.limit,
                    bootstrap_iters=self.bootstrap,
                    apply_chat_template=self.prompting == "format",
                    fewshot_as_multiturn=False,
                    confirm_run_unsafe_code=self.execute,
                    log_samples=False,
                )
            finally:
                for name, value in padding_settings.items():
                    setattr(tokenizer, name, value)
        return self._summarize(evaluation, "; ".join(decodings_used) or "nothing generated")

    def _load_tasks(self) -> tuple[Any, list[Any]]:
        """Load the task manager, and the task or group to evaluate."""
        is_file = self.name.endswith((".yaml", ".yml"))
        file = Path(self.name).expanduser().resolve()
        if is_file and not file.is_file():
            raise DataError(f"the task file {str(file)!r} does not exist.")
        manager = _load_task_manager(include_defaults=not is_file)
        spec: Any = str(file) if is_file else self.name
        if not is_file and self.name not in manager.all_tasks:
            raise ConfigError(
                f"lm_eval has no task {self.name!r}. {_suggest_task(self.name, manager.all_tasks)}"
            )
        if self.path is not None:
            if self.name not in manager.all_subtasks:
                raise ConfigError(
                    f"lm_eval: path replaces the data of one named task; {self.name!r} is a "
                    f"{'file, which names its data itself' if is_file else 'group of tasks'}"
                )
            spec = {"group": "local files", "task": [{"task": self.name, **self._read_local_data()}]}
        try:
            loaded_tasks = manager.load([spec])
        except Exception as error:
            raise DataError(f"lm_eval cannot load {self.name!r}: {type(error).__name__}: {error}") from error
        for name, task in loaded_tasks["tasks"].items():
            if getattr(task, "UNSAFE_CODE", False) and not self.execute:
                raise ConfigError(
                    f"{name} runs programs that the model wrote, as the user of this process and without a "
                    "sandbox. Start it in a container that has nothing to lose, and set execute to true."
                )
            if self.shots and task.get_config("num_fewshot") == 0:
                raise ConfigError(f"{name} takes no few-shot examples; set shots to 0, or leave it out")
        groups = (
            [] if self.path is not None else [g for n, g in loaded_tasks["groups"].items() if n == self.name]
        )
        return manager, groups or list(loaded_tasks["tasks"].values())

    def _read_local_data(self) -> dict[str, Any]:
        """Read the records from the files, and make the settings of a task that uses them."""
        datasets = import_library("datasets", "this score", _INSTALL_TARGET)
        files = {"test": self.path, "train": self.train_path}
        splits = {
            split: datasets.Dataset.from_list([*map(dict, read_file(path).rows)])
            for split, path in files.items()
            if path is not None
        }
        train = "train" if "train" in splits else None
        return {
            "custom_dataset": lambda **_: splits,
            "dataset_kwargs": None,
            "test_split": "test",
            "validation_split": None,
            "training_split": train,
            "fewshot_split": train,
        }

    def _make_decoding(self, settings: Mapping[str, Any]) -> Decoding:
        """Make the decoding settings of a task from its ``generation_kwargs``."""
        library = import_library("lm_eval.models.utils", "this score", _INSTALL_TARGET)
        options = library.normalize_gen_kwargs(settings)
        tokens, stop, is_sampled = (options.pop(name) for name in ("max_gen_toks", "until", "do_sample"))
        temperature, top_p = options.pop("temperature", 1.0), options.pop("top_p", 1.0)
        if options:
            raise ConfigError(
                f"the task sets {', '.join(options)} for generation. Known: do_sample, temperature, top_p, until, "
                "max_gen_toks."
            )
        return Decoding(
            max_new_tokens=self.max_new_tokens or tokens,
            method="sample" if is_sampled else "greedy",
            temperature=temperature if is_sampled else 1.0,
            top_p=top_p if is_sampled else 1.0,
            batch_size=self.batch_size,
            stop=tuple(text for text in stop if text),
            prompt_tokens=self.prompt_tokens,
        )

    def _summarize(self, evaluation: Mapping[str, Any], decoding: str) -> Score:
        """Make the score of the task or group from lm_eval's results."""
        results: dict[str, dict[str, Any]] = evaluation["results"]
        name = self.name if self.name in results else next(iter(results))
        metrics = {n: v for n, v in results[name].items() if "," in n and v != "N/A"}
        metric = next(iter(metrics), None) if self.metric is None else self.metric
        if metric not in metrics or (len(results) > 1 and name != self.name):
            # the metrics took long to compute, so the message lists them
            all_metrics = {
                f"{task} {n}": v for task, values in results.items() for n, v in values.items() if "," in n
            }
            listing = ", ".join(f"{n} {v}" for n, v in all_metrics.items())
            raise ConfigError(f"{self.name} has no metric {self.metric or 'of its own'!r}. It has {listing}.")
        details = {
            **metrics,
            "metric": metric,
            "prompts": self.prompting,
            "shots": evaluation["n-shot"].get(name),
        }
        details |= {"version of the task": evaluation["versions"].get(name)}
        count = sum(counts["effective"] for counts in evaluation["n-samples"].values())
        return Score(self.name, float(metrics[metric]), count, decoding, details)


@functools.cache
def _load_task_manager(include_defaults: bool) -> Any:
    """Load the tasks of lm_eval once, because reading their thousands of files takes many seconds."""
    library = import_library("lm_eval.tasks", "this score", _INSTALL_TARGET)
    return library.TaskManager(include_defaults=include_defaults)


def _suggest_task(name: str, task_names: Sequence[str]) -> str:
    """Suggest a similar name as :func:`did_you_mean` does, without listing thousands of names."""
    text = did_you_mean(name, task_names)
    return text if text.startswith("Did") else "`lm-eval ls tasks` lists all."


@contextlib.contextmanager
def _restore_global_generators() -> Iterator[None]:
    python_state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002 - lm_eval draws from it
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002 - lm_eval draws from it
