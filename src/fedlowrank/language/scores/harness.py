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
from ..optional import import_library
from .generate import Decoding, complete_prompts, evaluating
from .score import Render, Score, adds_special_tokens

_INSTALL = "'fedlowrank[harness]'"
_AT_LEAST_ONE = ("limit", "batch_size", "max_new_tokens", "prompt_tokens")


@dataclass(frozen=True)
class HarnessTask(CheckedFields):
    """A task of lm_eval: its data, prompts, few-shot examples, stop strings and metrics.

    :func:`complete_prompts` generates the text. lm_eval's own generation decodes the new tokens without the
    prompt, where tokenizers such as Llama-2's drop the first space, and with it the indentation of code.

    Attributes:
        name: a task or group of lm_eval (``lm-eval ls tasks`` lists them), or the path of a task's YAML file.
        path: file with the records of the test split, for a named task. None takes the data set of the task,
            which lm_eval downloads from the Hugging Face hub.
        train_path: beside ``path``: file with the records from which few-shot examples are drawn.
        shots: few-shot examples before each record; None leaves the number to the task.
        prompting: plain, the text of the task alone; or format, this text as an instruction in the format of
            training.
        execute: must be True for a task that runs programs which the model wrote, such as humaneval. They run
            as the user of this process, without a sandbox: start such a task in a container.
        metric: the headline, such as ``exact_match,flexible-extract``; None takes the task's first metric.
            The details have all.
        limit: only so many records of each task, the first; None takes all.
        bootstrap: resamplings for standard errors. Those of means need none, but a number above 0; 0 leaves
            all standard errors out.
        batch_size: prompts at a time.
        max_new_tokens: at most so many tokens after a prompt; None leaves the number to the task.
        prompt_tokens: see :class:`Decoding`.
        special_tokens: see :class:`Decoding`.
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
        bounds = {**dict.fromkeys(_AT_LEAST_ONE, ">= 1"), "shots": ">= 0", "bootstrap": ">= 0"}
        check_bounds(self, bounds, "lm_eval")
        if self.train_path is not None and self.path is None:
            raise ConfigError("lm_eval: train_path belongs to path; set both, or neither")
        if self.path is not None and self.train_path is None and self.shots != 0:
            raise ConfigError(
                "lm_eval: few-shot examples need train_path beside path. Set it, or set shots to 0."
            )

    def score(self, model: Any, tokenizer: Any, format: Render) -> Score:
        """Score a model; see :meth:`.score.ScoreTask.score`.

        lm_eval seeds the global generators with its own defaults. Afterwards these generators, the mode of
        the model and the padding of the tokenizer are as before.

        Raises:
            DataError: if lm_eval or a file is missing, or lm_eval cannot load the task.
            ConfigError: if there is no such task or metric, or the task runs programs without ``execute``.
        """
        library, wrapper = (
            import_library(name, "this score", _INSTALL) for name in ("lm_eval", "lm_eval.models.huggingface")
        )
        used: dict[str, None] = {}
        special = self.special_tokens and (self.prompting == "plain" or adds_special_tokens(format))

        def generate(requests: Sequence[Any]) -> list[str]:
            texts = [""] * len(requests)
            rows: dict[Decoding, list[int]] = {}
            for i, request in enumerate(requests):
                decoding = replace(self._decoding(request.args[1]), special_tokens=special)
                rows.setdefault(decoding, []).append(i)
            for decoding, own in rows.items():
                used[decoding.describe()] = None
                prompts = [requests[i].args[0] for i in own]
                for i, text in zip(own, complete_prompts(model, tokenizer, prompts, decoding), strict=True):
                    texts[i] = text
            return texts

        def write_prompt(messages: Sequence[Mapping[str, str]], **_: Any) -> str:
            asked = "\n\n".join(m["content"] for m in messages if m["role"] != "assistant")
            begun = messages[-1]["content"] if messages[-1]["role"] == "assistant" else ""
            return format({"instruction": asked, "input": ""}) + begun

        pads = {name: getattr(tokenizer, name) for name in ("pad_token", "padding_side")}
        # HFLM sets the mode, ties the weights again and pads as it likes
        with evaluating(model), _global_generators_kept():
            manager, tasks = self._load()
            try:
                lm = wrapper.HFLM(
                    model,
                    backend="causal",
                    tokenizer=tokenizer,
                    batch_size=self.batch_size,
                    add_bos_token=None if special else False,
                )
                lm.generate_until, lm.apply_chat_template = generate, write_prompt
                found = library.simple_evaluate(
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
                for name, value in pads.items():
                    setattr(tokenizer, name, value)
        return self._summarize(found, "; ".join(used) or "nothing generated")

    def _load(self) -> tuple[Any, list[Any]]:
        """The task manager, and the task or group to evaluate."""
        is_file = self.name.endswith((".yaml", ".yml"))
        file = Path(self.name).expanduser().resolve()
        if is_file and not file.is_file():
            raise DataError(f"the task file {str(file)!r} does not exist.")
        manager = _task_manager(include_defaults=not is_file)
        spec: Any = str(file) if is_file else self.name
        if not is_file and self.name not in manager.all_tasks:
            raise ConfigError(f"lm_eval has no task {self.name!r}. {_nearest(self.name, manager.all_tasks)}")
        if self.path is not None:
            if self.name not in manager.all_subtasks:
                raise ConfigError(
                    f"lm_eval: path replaces the data of one named task; {self.name!r} is a "
                    f"{'file, which names its data itself' if is_file else 'group of tasks'}"
                )
            spec = {"group": "local files", "task": [{"task": self.name, **self._local_data()}]}
        try:
            loaded = manager.load([spec])
        except Exception as error:
            raise DataError(f"lm_eval cannot load {self.name!r}: {type(error).__name__}: {error}") from error
        for name, task in loaded["tasks"].items():
            if getattr(task, "UNSAFE_CODE", False) and not self.execute:
                raise ConfigError(
                    f"{name} runs programs that the model wrote, as the user of this process and without a "
                    "sandbox. Start it in a container that has nothing to lose, and set execute to true."
                )
            if self.shots and task.get_config("num_fewshot") == 0:
                raise ConfigError(f"{name} takes no few-shot examples; set shots to 0, or leave it out")
        groups = [] if self.path is not None else [g for n, g in loaded["groups"].items() if n == self.name]
        return manager, groups or list(loaded["tasks"].values())

    def _local_data(self) -> dict[str, Any]:
        """Settings of a task that reads its records from the files."""
        datasets = import_library("datasets", "this score", _INSTALL)
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

    def _decoding(self, settings: Mapping[str, Any]) -> Decoding:
        """The decoding that a task asks for, in the words of its ``generation_kwargs``."""
        library = import_library("lm_eval.models.utils", "this score", _INSTALL)
        given = library.normalize_gen_kwargs(settings)
        tokens, stop, is_sampled = (given.pop(name) for name in ("max_gen_toks", "until", "do_sample"))
        temperature, top_p = given.pop("temperature", 1.0), given.pop("top_p", 1.0)
        if given:
            raise ConfigError(
                f"the task sets {', '.join(given)} for generation. Known: do_sample, temperature, top_p, until, "
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

    def _summarize(self, found: Mapping[str, Any], decoding: str) -> Score:
        """The score of the task or group among lm_eval's results."""
        results: dict[str, dict[str, Any]] = found["results"]
        name = self.name if self.name in results else next(iter(results))
        metrics = {n: v for n, v in results[name].items() if "," in n and v != "N/A"}
        metric = next(iter(metrics), None) if self.metric is None else self.metric
        if metric not in metrics or (len(results) > 1 and name != self.name):
            # the numbers took long to compute, so they are told all the same
            every = {f"{task} {n}": v for task, own in results.items() for n, v in own.items() if "," in n}
            told = ", ".join(f"{n} {v}" for n, v in every.items())
            raise ConfigError(f"{self.name} has no metric {self.metric or 'of its own'!r}. It has {told}.")
        details = {**metrics, "metric": metric, "prompts": self.prompting, "shots": found["n-shot"].get(name)}
        details |= {"version of the task": found["versions"].get(name)}
        count = sum(own["effective"] for own in found["n-samples"].values())
        return Score(self.name, float(metrics[metric]), count, decoding, details)


@functools.cache
def _task_manager(include_defaults: bool) -> Any:
    """The tasks of lm_eval. Reading its thousands of files takes many seconds, so they are read once."""
    library = import_library("lm_eval.tasks", "this score", _INSTALL)
    return library.TaskManager(include_defaults=include_defaults)


def _nearest(name: str, known: Sequence[str]) -> str:
    """As :func:`did_you_mean`, without a list of thousands."""
    text = did_you_mean(name, known)
    return text if text.startswith("Did") else "`lm-eval ls tasks` lists all."


@contextlib.contextmanager
def _global_generators_kept() -> Iterator[None]:
    ours, numpys = random.getstate(), np.random.get_state()  # noqa: NPY002 - lm_eval draws from it
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            yield
    finally:
        random.setstate(ours)
        np.random.set_state(numpys)  # noqa: NPY002 - lm_eval draws from it
