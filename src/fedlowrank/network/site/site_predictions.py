"""Predictions for new rows by the model that a run over a network left in a client's folder."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pandas as pd
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from ...config.new_rows import prepare_new_rows
from ...core.errors import CheckpointError, ConfigError, DataError
from ...data.dataset import Examples
from ...data.federation import hash_examples
from ...results.evaluation.pools import make_pool
from ...results.evaluation.scoring import score_sets
from ...rounds.outcome.predictions import tabulate_rows
from ..client import MODEL_FILE, PARTIAL_MODEL, ClientRuntime, parse_own_experiment


def predict_at_site(folder: Path, rows: Path) -> tuple[pd.DataFrame, Path]:
    """Predict the rows of a table by a client's own model, at the client.

    The rows are prepared as the client's training examples, whose file is read again.

    Args:
        folder: folder of the client, made by ``fedlowrank join --data``.
        rows: path of the table, which must have the columns of the inputs.

    Returns:
        The table of :func:`fedlowrank.rounds.outcome.predictions.predict_rows`, and the file of the model: of several
        runs that of the last one.

    Raises:
        ConfigError: if the client trained a language model, or on data of the experiment, or infers by a mixture of models.
        CheckpointError: if there is no model yet.
        DataError: if the client's file has changed, the table lacks a column, or a cell cannot be used.
    """
    runtime = ClientRuntime(folder)
    if runtime.experiment.language is not None:
        raise ConfigError(
            f"{folder} is the folder of a client with a language model. Its run's folder in there has an adapter for "
            "other programs (model/adapter); --rows is for tables"
        )
    if runtime.data_path is None:
        raise ConfigError(
            f"{folder} is the folder of a client that trained on the experiment's own data. --rows needs a client that "
            "was started with --data"
        )
    file = max(folder.glob(f"*/model/{MODEL_FILE}"), key=lambda path: path.stat().st_mtime, default=None)
    if file is None:
        raise CheckpointError(f"{folder} holds no model yet; a run writes it when it is over")
    experiment = parse_own_experiment(
        runtime.experiment, runtime.client, runtime.data_path, runtime.test_path
    )
    if hash_examples(experiment.shares().data[0]) != hash_examples(runtime.data):
        raise DataError(
            f"{runtime.data_path} has changed since client {runtime.client} trained on it, so it is no longer known how the "
            "inputs of its model were prepared. Give back the file of before"
        )
    inputs = prepare_new_rows(experiment, rows.absolute()).inputs(0)
    federation = runtime.federation
    model = federation.architectures[federation.infos[runtime.client].architecture]
    try:
        with safetensors.safe_open(file, "pt") as stored:
            metadata = stored.metadata()
        params = safetensors.torch.load_file(file)
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{file} is damaged: {error}") from error
    if metadata == PARTIAL_MODEL:
        raise ConfigError(
            f"client {runtime.client} infers by more than the scores of one model, such as a mixture of several, and {file} "
            "holds the weights of one. Use a method that infers by one model, such as IFCA, or Ensemble with mix = 'weights'"
        )

    def score(examples: Examples) -> Tensor:
        with torch.inference_mode():
            pool = make_pool(model, [examples], federation.loss)
            return score_sets(partial(model.apply, params), pool).cpu()

    return tabulate_rows(federation, runtime.client, range(len(inputs)), inputs, score), file
