"""Evaluation of a model in memory by lm_eval (EleutherAI) on tasks in local files."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...core.errors import ConfigError, DataError
from ..optional import import_library
from .generate import evaluating

_INSTALL = "'fedlowrank[harness]'"


def evaluate_with_lm_eval(
    model: Any,
    tokenizer: Any,
    task_yaml_paths: Sequence[str],
    limit: int | None = None,
    batch_size: int = 8,
    bootstrap: int = 0,
) -> dict[str, Any]:
    """Evaluate by tasks in lm_eval's YAML form; none of those that come with lm_eval is looked at.

    For an evaluation without network, a task reads local files: ``dataset_path: json`` with ``dataset_kwargs:
    data_files:``. lm_eval seeds the global generators with its own defaults, so scores are
    reproducible; afterwards they, the mode of the model and the padding of the tokenizer are as before.

    Args:
        model: a causal language model of transformers. One wrapped by PEFT is used with its active adapter.
        tokenizer: its tokenizer.
        task_yaml_paths: files, one task in each.
        limit: only so many records of each task.
        batch_size: requests at a time.
        bootstrap: resamplings for the standard errors of metrics that are no means; 0 leaves all of them out.

    Returns:
        Each task's metrics by name, as lm_eval calls them: ``{"my_task": {"exact_match,strict-match": 0.5,
        ...}}``.

    Raises:
        DataError: if lm_eval or a file is missing.
        ConfigError: if no file is given.
    """
    if not task_yaml_paths:
        raise ConfigError("no task: give the path of a YAML file at least")
    paths = [str(Path(path).expanduser().resolve()) for path in task_yaml_paths]
    for path in paths:
        if not Path(path).is_file():
            raise DataError(f"the task file {path!r} does not exist.")
    wrapper, tasks, library = (
        import_library(name, "this evaluation", _INSTALL)
        for name in ("lm_eval.models.huggingface", "lm_eval.tasks", "lm_eval")
    )
    pads = {name: getattr(tokenizer, name) for name in ("pad_token", "padding_side")}
    # HFLM sets the mode, ties the weights again and pads as it likes
    with evaluating(model), _global_generators_kept():
        try:
            found = library.simple_evaluate(
                model=wrapper.HFLM(
                    pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=batch_size
                ),
                tasks=paths,
                limit=limit,
                bootstrap_iters=bootstrap,
                task_manager=tasks.TaskManager(include_defaults=False),
                log_samples=False,
            )
        finally:
            for name, value in pads.items():
                setattr(tokenizer, name, value)
    results: dict[str, Any] = found["results"]
    return results


@contextlib.contextmanager
def _global_generators_kept() -> Iterator[None]:
    ours, numpys = random.getstate(), np.random.get_state()  # noqa: NPY002 - lm_eval draws from it
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            yield
    finally:
        random.setstate(ours)
        np.random.set_state(numpys)  # noqa: NPY002 - lm_eval draws from it
