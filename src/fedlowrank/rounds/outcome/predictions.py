"""Predictions of the clients' models: scores, one row for each example, and confusion matrices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from ...core.contract.client_model import Predictor
from ...core.errors import ConfigError, DataError, did_you_mean
from ...core.learning.losses import Loss
from ...data.dataset import Examples, Inputs
from ...data.federation import Federation
from ...data.input_types import convert_inputs, convert_named_input, is_image
from ...data.partitioning.checks import check_finite_values, describe_array
from ...data.user_data.data_frames import is_frame
from ...data.user_data.feature_names import order_columns
from ...data.user_data.user_arrays import to_input_tensor
from ...results.client_metrics import has_standard_scores, softmax
from ...results.client_numbers import SPLITS
from ...results.evaluation.local_model import LocalModel
from ...results.evaluation.pools import make_pool
from ...results.evaluation.scoring import score_sets
from ..run import Run

PARTS = ("train", *SPLITS)
"""Parts of a client's examples."""


def predict(run: Run, client: int | str, inputs: Any = None, series: str | None = None) -> Tensor:
    """Compute the scores of a client's model in its current state.

    Args:
        run: run in its current state.
        client: number or name of the client.
        inputs: tensor or array ``[n, ...]``, or named ones, prepared like those that the clients train on; by default
            the client's own test examples. Unsigned bytes are divided by 255, as in ``Federation.from_arrays``.
            Columns of a data frame are matched by name if the clients' inputs were data frames, too.
        series: name of one of the method's models; by default its headline.

    Returns:
        Scores ``[n, classes]`` before a softmax, or the outputs ``[n, d]`` of a regression, on the CPU.

    Raises:
        ConfigError: if there is no such client or series, or if the run trains a language model.
        DataError: if the inputs are not finite or differ from the client's own in form or scale.
    """
    client = run.federation.client(client).id
    data = run.federation.clients[client]
    examples = data.test if inputs is None else _as_examples(inputs, data.train, run.federation)
    return _scores(run, client, examples, series)


def predictions(
    run: Run, client: int | str | None = None, split: str = "test", series: str | None = None
) -> pd.DataFrame:
    """Tabulate the predictions for clients' own examples, one row for each example with a label that counts.

    Args:
        run: run in its current state.
        client: number or name of the client; None for all clients, each with its own model.
        split: name of the split: ``test``, ``val`` or ``train``.
        series: name of one of the method's models; by default its headline.

    Returns:
        Columns client, example (index in that split of the client, from 0, that also counts the examples with
        ``loss.ignore_index``, which have no row), label and prediction (both as numbers of classes), correct, and
        probability, which the model gives to its prediction; also ``client_name`` if clients have names, and
        ``label_name`` and ``prediction_name`` if classes have. A regression has the columns target, prediction and
        error (their difference); with several targets ``target_0``, ``prediction_0``, ``error_0``, ... With several
        labels for each example there are, for each class, ``label_0``, ``prediction_0`` (1 if present) and
        ``probability_0`` of its presence, ..., and correct if all are right.

    Raises:
        ConfigError: if there is no such client, split or series, if the run trains a language model, if it has a
            label for each pixel or token, or if its loss is a function of the user's own and the scores are not one for
            each class or output.
    """
    first_examples = run.federation.clients[0].train
    if run.federation.loss.compares_texts:
        raise ConfigError(
            "predictions are of classes or real targets, and these models compare texts; predict(client) gives the scores or "
            "embeddings of both texts of a pair"
        )
    if first_examples.is_dense or first_examples.y.ndim > 2:
        raise ConfigError(
            "predictions are a table with one row an example, and these data have a label or target for each pixel or "
            "token; predict(client) gives the scores"
        )
    if split not in PARTS:
        raise ConfigError(f"there is no split {split!r}. {did_you_mean(split, PARTS)}")
    tables, infos, classes = [], run.federation.infos, run.federation.classes
    has_names = classes != tuple(map(str, range(len(classes))))
    for i in range(len(infos)) if client is None else [run.federation.client(client).id]:
        examples = getattr(run.federation.clients[i], split)
        scores = _scores(run, i, examples, series)
        example_indices = _counted_examples(examples, run.federation.loss)
        columns: dict[str, Any] = {"client": np.full(len(example_indices), i), "example": example_indices}
        if infos[i].name:
            columns["client_name"] = np.full(len(example_indices), infos[i].name)
        columns |= _outcomes(scores[example_indices], examples.y.cpu()[example_indices], run.federation)
        if has_names and "label" in columns:
            columns |= {f"{name}_name": _names(classes, columns[name]) for name in ("label", "prediction")}
        tables.append(pd.DataFrame(columns))
    return pd.concat(tables, ignore_index=True)


def predict_rows(
    run: Run,
    inputs: Callable[[int], Any],
    rows_by_client: Mapping[int, Sequence[int]],
    series: str | None = None,
) -> pd.DataFrame:
    """Tabulate the predictions of clients' models for new rows without labels, one row for each client and row.

    Args:
        run: run in its current state.
        inputs: function that maps the number of a client to all rows as its model takes them; see :func:`predict`.
        rows_by_client: indices of the rows of each client, from 0.
        series: name of one of the method's models; by default its headline.

    Returns:
        Columns client, row, prediction, probability and the names of clients and classes, as in :func:`predictions`.

    Raises:
        ConfigError: if :func:`predictions` would raise it.
        DataError: if :func:`predict` would raise it.
    """
    tables = []
    for i, rows in rows_by_client.items():
        score = partial(_scores, run, i, series=series)
        tables.append(tabulate_rows(run.federation, i, rows, inputs(i), score))
    return pd.concat(tables, ignore_index=True)


def tabulate_rows(
    federation: Federation,
    client_id: int,
    rows: Sequence[int],
    inputs: Any,
    score: Callable[[Examples], Tensor],
) -> pd.DataFrame:
    """Tabulate the predictions of one client's model for new rows; see :func:`predict_rows`.

    Args:
        federation: federation with the client's own data.
        client_id: number of the client.
        rows: indices of the rows.
        inputs: all rows as the client's model takes them.
        score: function that maps examples to the scores of the client's model.
    """
    info, classes = federation.infos[client_id], federation.classes
    examples = _as_examples(inputs[list(rows)], federation.clients[client_id].train, federation)
    columns: dict[str, Any] = {"client": np.full(len(rows), client_id), "row": list(rows)}
    if info.name:
        columns["client_name"] = np.full(len(rows), info.name)
    outcomes = _outcomes(score(examples), examples.y.cpu(), federation)
    columns |= {n: v for n, v in outcomes.items() if n.startswith(("prediction", "probability"))}
    if classes != tuple(map(str, range(len(classes)))) and "label" in outcomes:
        columns["prediction_name"] = _names(classes, outcomes["prediction"])
    return pd.DataFrame(columns)


def confusion(
    run: Run, client: int | str | None = None, split: str = "test", series: str | None = None
) -> pd.DataFrame:
    """Compute the confusion matrix of clients' own models on their own examples.

    Args:
        run: run in its current state.
        client: number or name of the client; None for the sum over the clients that can train and are not hostile, as
            in the mean accuracy.
        split: name of the split: ``test``, ``val`` or ``train``.
        series: name of one of the method's models; by default its headline.

    Returns:
        Numbers of examples whose label counts ``[classes, classes]``, with a row for each label and a column for each
        prediction, by name. If models predict scores beyond the classes, there are further columns up to the largest of
        them, named by their numbers.

    Raises:
        ConfigError: if :func:`predictions` would raise it, or if there are no classes.
    """
    names = run.federation.classes
    if not names:
        raise ConfigError("these data have no classes, so there is no confusion matrix of them")
    table = predictions(run, client, split, series)
    if client is None:
        table = table[~table["client"].isin(list(run.excluded_from_means))]
    # some models have more scores than there are classes
    column_count = max([len(names), *(table["prediction"] + 1)])
    counts = np.zeros((len(names), column_count), dtype=np.int64)
    np.add.at(counts, (table["label"], table["prediction"]), 1)
    column_names = _names(names, range(column_count))
    return pd.DataFrame(counts, pd.Index(names, name="label"), pd.Index(column_names, name="prediction"))


def _scores(run: Run, client_id: int, examples: Examples, series: str | None) -> Tensor:
    if examples.has_token_labels:
        raise ConfigError(
            "language models have a score for each token and not for each example, so there are no "
            "predictions of them; `fedlowrank score` and `fedlowrank adapters` use their models"
        )
    info = run.federation.infos[client_id]
    # the user's module keeps its mode, also if the models are computed here
    with run.federation.architectures[info.architecture].restored_modes():
        model = run.local_model(info)
        with torch.inference_mode(), model.fixed_generators(examples.y.device):
            predict = _predictor(run, model, series)
            if not len(examples):
                # any example shows the form of the scores
                return predict(model.model.example)[:0].cpu().clone()
            pool = make_pool(model.model, [examples], run.federation.loss)
            try:
                return score_sets(predict, pool).cpu().clone()
            except IndexError as error:
                raise DataError(
                    f"{info.title}: its model cannot score these inputs: {error}. An nn.Embedding(n, ...) has the numbers from 0 "
                    "to n - 1"
                ) from error


def _predictor(run: Run, model: LocalModel, series: str | None) -> Predictor:
    predictors = model.predictors
    if series is not None and series not in predictors:
        raise ConfigError(f"{run.method.title} has no series {series!r}. {did_you_mean(series, predictors)}")
    return predictors[series or next(iter(predictors))]


def _as_examples(inputs: Any, train_examples: Examples, federation: Federation) -> Examples:
    """Wrap inputs as examples with meaningless labels, on the device of the client's own examples."""
    if isinstance(inputs, dict) != isinstance(train_examples.x, dict):
        structure = (
            f"a dictionary with {sorted(train_examples.x)}"
            if isinstance(train_examples.x, dict)
            else "one tensor"
        )
        raise DataError(f"the inputs must be {structure}, as those that the client trains on")
    device = train_examples.y.device
    x: Inputs
    if isinstance(train_examples.x, dict):
        if inputs.keys() != train_examples.x.keys():
            raise DataError(
                f"the inputs must have the names {sorted(train_examples.x)}, not {sorted(inputs)}"
            )
        tensors = {
            name: _as_tensor(value, f"the inputs {name!r}", name, federation).to(device)
            for name, value in inputs.items()
        }
        x = {
            name: convert_named_input(value, train_examples.x[name].dtype) for name, value in tensors.items()
        }
        if wrong_names := [name for name, value in x.items() if value.dtype != train_examples.x[name].dtype]:
            name = wrong_names[0]
            expected_form = str(train_examples.x[name].dtype).removeprefix("torch.")
            raise DataError(
                f"the input {name!r} must be {expected_form}, not {describe_array(tensors[name])}"
            )
        for name, value in x.items():
            check_finite_values(f"the inputs {name!r}", value, tensors[name])
            if is_image(tensors[name]):
                _check_scale(train_examples.x[name], f"the inputs {name!r}", name, federation)
        count = len(next(iter(x.values())))
    else:
        numbers = _as_tensor(inputs, "the inputs", "", federation).to(device)
        x = convert_inputs(numbers, ids=train_examples.x.dtype == torch.int64)
        if x.dtype != train_examples.x.dtype:
            raise DataError(
                "the model looks up whole numbers, so the inputs must be whole numbers, not "
                f"{describe_array(numbers)}; give x.long()"
            )
        if x.ndim == 0 or x.shape[1:] != train_examples.x.shape[1:]:
            expected_form = ", ".join(map(str, ["n", *train_examples.x.shape[1:]]))
            raise DataError(f"the inputs must have the shape [{expected_form}], not {[*x.shape]}")
        check_finite_values("the inputs", x, numbers)
        if numbers.dtype == torch.uint8:
            _check_scale(train_examples.inputs, "the inputs", "", federation)
        count = len(x)
    return Examples(
        x, torch.zeros(count, *train_examples.y.shape[1:], dtype=train_examples.y.dtype, device=device)
    )


def _as_tensor(inputs: Any, title: str, name: str, federation: Federation) -> Tensor:
    """Convert one input to a tensor of its own type, with the columns and the scale of those that clients train on."""
    if is_frame(inputs) and name in federation.feature_names:
        inputs = order_columns(inputs, federation.feature_names[name], title)
    tensor = to_input_tensor(inputs, title)
    if name in federation.byte_inputs and tensor.dtype != torch.uint8 and tensor.numel():
        low, high = float(tensor.min()), float(tensor.max())
        if low < 0 or high > 1:
            raise DataError(
                f"{title} are {describe_array(tensor)} with values from {low:g} to {high:g}, but the clients train on unsigned "
                "bytes, which are divided by 255. Give unsigned bytes, x.astype('uint8'), or values from 0 to 1"
            )
    return tensor


def _check_scale(train_inputs: Inputs, title: str, name: str, federation: Federation) -> None:
    """Refuse unsigned bytes, which are divided by 255, if the client trains on real numbers outside 0 to 1."""
    assert isinstance(train_inputs, Tensor)
    if name in federation.byte_inputs or train_inputs.dtype != torch.float32 or not train_inputs.numel():
        return
    low, high = map(float, train_inputs.aminmax())
    if low < 0 or high > 1:
        raise DataError(
            f"{title} are unsigned bytes, which are divided by 255, but the client trains on values from {low:g} to {high:g}. "
            "Give x.astype('float32'), on the scale of these"
        )


def _counted_examples(examples: Examples, loss: Loss) -> Any:
    """Indices of the examples whose label counts."""
    if examples.is_regression:
        return np.arange(len(examples))
    return np.flatnonzero(examples.y.cpu().numpy() != loss.ignore_index)


def _outcomes(scores: Tensor, y: Tensor, federation: Federation) -> dict[str, Any]:
    """Make the columns of :func:`predictions` from the scores of some examples and their targets."""
    loss, class_count = federation.loss, len(federation.classes)
    if loss.is_custom and not has_standard_scores(scores, y, class_count):
        form = (
            f"a score of each of the {class_count} classes"
            if class_count
            else "outputs in the shape of the targets"
        )
        raise ConfigError(
            f"predictions need {form}, and the models make scores {[*scores.shape]} for targets {[*y.shape]}. The loss is a "
            "function of your own, which alone knows what they mean; predict(client) gives the scores"
        )
    labels = y.numpy()
    if loss.is_binary(y):
        return _presences(scores, labels)
    if y.is_floating_point():
        return _errors(scores.double().numpy(), labels.astype(np.float64))
    predicted_classes = scores.argmax(-1).numpy()
    probability = softmax(scores.double().numpy())[np.arange(len(labels)), predicted_classes]
    return {
        "label": labels,
        "prediction": predicted_classes,
        # argmax of scores with a NaN gives the index of the NaN
        "correct": (predicted_classes == labels) & ~np.isnan(probability),
        "probability": probability,
    }


def _names(classes: Sequence[str], numbers: Any) -> list[str]:
    """Names of classes; a score beyond the classes, which some models compute, is named by its number."""
    return [classes[c] if c < len(classes) else str(c) for c in numbers]


def _presences(scores: Tensor, targets: Any) -> dict[str, Any]:
    """Columns that say whether each class is present in each example and whether it is predicted."""
    is_present, probability = (scores > 0).numpy(), torch.sigmoid(scores.double()).numpy()
    columns: dict[str, Any] = {}
    for k, suffix in enumerate(_column_ends(targets)):
        columns[f"label{suffix}"], columns[f"prediction{suffix}"] = (
            targets[:, k],
            is_present[:, k].astype(int),
        )
        columns[f"probability{suffix}"] = probability[:, k]
    is_number = ~np.isnan(probability).any(axis=1)
    return {**columns, "correct": (is_present == (targets > 0.5)).all(axis=1) & is_number}


def _column_ends(targets: Any) -> Sequence[str]:
    """Suffixes of the column names of each target."""
    width = targets.shape[1]
    return [""] if width == 1 else [f"_{k}" for k in range(width)]


def _errors(outputs: Any, targets: Any) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    for k, suffix in enumerate(_column_ends(targets)):
        columns[f"target{suffix}"], columns[f"prediction{suffix}"] = targets[:, k], outputs[:, k]
        columns[f"error{suffix}"] = outputs[:, k] - targets[:, k]
    return columns
