"""Metrics besides accuracy and loss: named ones, and functions of the user's own.

A metric is computed for each client, series and split from the model's scores on the client's own examples.
Definitions are those of scikit-learn for the metrics that it has: ``f1_score``, ``balanced_accuracy_score``,
``roc_auc_score``, ``average_precision_score``, ``top_k_accuracy_score``, the root of ``mean_squared_error``,
``mean_absolute_error``, and ``r2_score`` without its option ``force_finite``. Its functions are not called, because
their checks of arguments would take most of the time on the small sets that clients have. Two things differ. A metric
that scikit-learn warns about or sets to a constant, such as AUROC of one class, is None. AUROC and average precision
rank examples by :func:`log_odds`, because probabilities of confident models round to 0 and 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..core.arguments.user_code import import_named
from ..core.contract import EngineModel
from ..core.errors import ConfigError, did_you_mean
from ..core.learning.losses import AUTO, Loss, class_axis
from ..data.dataset import Examples
from .client_numbers import CLIENT_NUMBERS, ClientNumber, reserved_names

Reals = NDArray[np.float64]
Labels = NDArray[Any]

BINS = 15
"""Number of equally wide bins of the expected calibration error, as in Guo et al. (arXiv:1706.04599)."""


def softmax(scores: Reals) -> Reals:
    """Compute the softmax probabilities ``[n, classes]`` of scores."""
    # scores of a diverged model give NaN
    with np.errstate(invalid="ignore"):
        powers = np.exp(scores - scores.max(axis=1, keepdims=True))
        probabilities: Reals = powers / powers.sum(axis=1, keepdims=True)
    return probabilities


@dataclass(frozen=True)
class Metric:
    """A measure of the quality of scores on a set of examples.

    Attributes:
        about: description of the metric.
        compute: function of scores, float64 ``[n, classes]``, and labels, int64 ``[n]``, of examples, or of pixels
            and tokens that count; in a regression of outputs and targets ``[n, d]``. n is at least 1. It returns None
            where the metric is not defined.
        task: kind of task that the metric needs; ``any`` for a function of the user's own.
        bounds: least and largest value of the metric.
        min_classes: number that the number of classes must exceed.
        of_labels: function of scores and targets ``[n, classes]`` of zeros and ones, for examples in which every
            class is present or absent; None where there is no such metric.
        lower_is_better: whether a smaller value is better, as for an error; None for a function of the user's own.
        title: heading of the metric; empty for its name with spaces.
    """

    about: str
    compute: Callable[[Reals, Labels], float | None]
    task: Literal["classes", "regression", "labels", "any"] = "classes"
    bounds: tuple[float, float] = (0.0, 1.0)
    min_classes: int = 0
    of_labels: Callable[[Reals, Labels], float | None] | None = None
    lower_is_better: bool | None = False
    title: str = ""


def _f1(average: Literal["macro", "weighted"], scores: Reals, labels: Labels) -> float:
    hits, label_counts, prediction_counts = _count_by_class(scores, labels)
    # only classes that are a label or a prediction, as scikit-learn averages
    mask = label_counts + prediction_counts > 0
    f1 = 2 * hits[mask] / (label_counts + prediction_counts)[mask]
    return float(np.average(f1, weights=label_counts[mask] if average == "weighted" else None))


def _micro_f1(scores: Reals, labels: Labels) -> float:
    """Micro-averaged F1 score, which is the accuracy if each example has one label."""
    return float((scores.argmax(1) == labels).mean())


def _intersection_over_union(scores: Reals, labels: Labels) -> float:
    """Mean over the classes that are a label or a prediction: hits / (labeled + predicted - hits)."""
    hits, label_counts, prediction_counts = _count_by_class(scores, labels)
    mask = label_counts + prediction_counts > 0
    return float((hits[mask] / (label_counts + prediction_counts - hits)[mask]).mean())


def _count_by_label(scores: Reals, targets: Labels) -> tuple[Labels, Labels, Labels]:
    """Count for each class how often it is rightly predicted, present, and predicted to be present."""
    is_present, is_predicted = targets > 0.5, scores > 0
    return (is_present & is_predicted).sum(0), is_present.sum(0), is_predicted.sum(0)


def _f1_of_labels(average: Literal["macro", "weighted"], scores: Reals, targets: Labels) -> float | None:
    hits, label_counts, prediction_counts = _count_by_label(scores, targets)
    # scikit-learn sets the F1 score of a class that is neither present nor predicted to 0
    f1 = 2 * hits / np.maximum(label_counts + prediction_counts, 1)
    if average == "weighted":
        return float(np.average(f1, weights=label_counts)) if label_counts.any() else None
    return float(f1.mean())


def _micro_f1_of_labels(scores: Reals, targets: Labels) -> float | None:
    hits, label_count, prediction_count = (int(n.sum()) for n in _count_by_label(scores, targets))
    return 2 * hits / (label_count + prediction_count) if label_count + prediction_count else None


def _intersection_of_labels(scores: Reals, targets: Labels) -> float:
    hits, label_counts, prediction_counts = _count_by_label(scores, targets)
    # scikit-learn sets the index of a class that is neither present nor predicted to 0
    return float((hits / np.maximum(label_counts + prediction_counts - hits, 1)).mean())


def _mean_of_labels(
    metric: Callable[[NDArray[np.bool_], Reals], float], scores: Reals, targets: Labels
) -> float | None:
    """Mean of a metric over the classes; None if a class is present in all examples or in none."""
    is_present = targets > 0.5
    if is_present.all(0).any() or not is_present.any(0).all():
        return None
    return float(np.mean([metric(is_present[:, c], scores[:, c]) for c in range(scores.shape[1])]))


def _balanced_accuracy(scores: Reals, labels: Labels) -> float:
    hits, label_counts, _ = _count_by_class(scores, labels)
    mask = label_counts > 0
    return float((hits[mask] / label_counts[mask]).mean())


def _count_by_class(scores: Reals, labels: Labels) -> tuple[Labels, Labels, Labels]:
    """Count for each class how many examples are right, have it as label, and are predicted to have it."""
    predictions, class_count = scores.argmax(1), scores.shape[1]
    hits, label_counts, prediction_counts = (
        np.bincount(classes_of_examples, minlength=class_count)
        for classes_of_examples in (labels[predictions == labels], labels, predictions)
    )
    return hits, label_counts, prediction_counts


def log_odds(scores: Reals) -> Reals:
    """Log-odds ``[n, classes]`` of each class against all others: z_c - log Σ_j≠c exp(z_j).

    They have the order of the softmax probabilities without rounding to 0 or 1. Rows with the same scores in another
    order give the same numbers, so that ties are preserved.

    Args:
        scores: scores ``[n, classes]`` of at least two classes; a row may hold minus infinity, but not only that.
    """
    sorted_scores = np.sort(scores, axis=1)
    top_scores = sorted_scores[:, -1:]
    powers = np.exp(scores - top_scores)
    total = np.exp(sorted_scores - top_scores).sum(axis=1, keepdims=True)
    # for the largest score, the sum over the others; a difference of sums would lose their digits
    second_scores = sorted_scores[:, -2:-1]
    offset = np.where(np.isfinite(second_scores), second_scores, 0.0)
    other_sums = np.exp(sorted_scores[:, :-1] - offset).sum(axis=1, keepdims=True)
    with np.errstate(divide="ignore"):
        top_odds = (top_scores - offset) - np.log(other_sums)
        is_largest = scores == top_scores
        log_rest = np.log(np.where(is_largest, 1.0, total - powers))
    return np.where(is_largest, top_odds, scores - top_scores - log_rest)


def _one_versus_rest(
    metric: Callable[[NDArray[np.bool_], Reals], float], scores: Reals, labels: Labels
) -> float | None:
    """Mean over the present classes of a metric of each class against all others; None for one class.

    With two classes, class 1 is the positive one.
    """
    classes = np.unique(labels)
    if len(classes) < 2:
        return None
    if scores.shape[1] == 2:
        return metric(labels == 1, scores[:, 1] - scores[:, 0])
    ranking = log_odds(scores)
    return float(np.mean([metric(labels == c, ranking[:, c]) for c in classes]))


def _area_under_roc(is_positive: NDArray[np.bool_], ranking: Reals) -> float:
    """Share of correctly ordered pairs of a positive and a negative example, with ties as half: Mann-Whitney's U."""
    positives, negatives = ranking[is_positive], np.sort(ranking[~is_positive])
    lower_counts, lower_or_equal_counts = (
        np.searchsorted(negatives, positives, side) for side in ("left", "right")
    )
    return float((lower_counts + lower_or_equal_counts).mean() / 2 / len(negatives))


def _average_precision(is_positive: NDArray[np.bool_], ranking: Reals) -> float:
    """Sum over thresholds of the precision times the increase of recall."""
    order = np.argsort(-ranking, kind="stable")
    hits, sorted_ranking = np.cumsum(is_positive[order]), ranking[order]
    # examples of equal rank share a threshold
    is_threshold = np.append(sorted_ranking[1:] != sorted_ranking[:-1], True)
    precision = (hits / np.arange(1, len(hits) + 1))[is_threshold]
    return float((np.diff(hits[is_threshold], prepend=0) * precision).sum() / hits[-1])


def _top(k: int, scores: Reals, labels: Labels) -> float:
    """Share of examples whose class is among the first k; among equal scores the higher class number comes first."""
    score_of_label = np.take_along_axis(scores, labels[:, None], axis=1)
    is_later = np.arange(scores.shape[1]) > labels[:, None]
    is_higher = (scores > score_of_label) | ((scores == score_of_label) & is_later)
    return float((is_higher.sum(1) < k).mean())


def _calibration_error(scores: Reals, labels: Labels) -> float:
    """Expected calibration error of the highest probability, in bins (a, b] of equal width."""
    confidence = softmax(scores).max(1)
    gaps = (scores.argmax(1) == labels) - confidence
    bin_indices = np.clip(np.ceil(confidence * BINS).astype(int) - 1, 0, BINS - 1)
    return float(np.abs(np.bincount(bin_indices, gaps, BINS)).sum() / len(labels))


def _root_mean_square(outputs: Reals, targets: Labels) -> float:
    return math.sqrt(np.square(outputs - targets).mean())


def _mean_absolute(outputs: Reals, targets: Labels) -> float:
    return float(np.abs(outputs - targets).mean())


def _determination(outputs: Reals, targets: Labels) -> float | None:
    """Mean of R² over the targets; None for one example, or if a target does not vary."""
    total_squares = np.square(targets - targets.mean(0)).sum(0)
    if (targets == targets[0]).all(0).any():
        return None
    return float((1 - np.square(outputs - targets).sum(0) / total_squares).mean())


METRICS: Mapping[str, Metric] = {
    "macro_f1": Metric(
        "F1 score, mean over classes",
        partial(_f1, "macro"),
        of_labels=partial(_f1_of_labels, "macro"),
        title="macro F1",
    ),
    "weighted_f1": Metric(
        "F1 score, mean over classes weighted by examples",
        partial(_f1, "weighted"),
        of_labels=partial(_f1_of_labels, "weighted"),
        title="weighted F1",
    ),
    "micro_f1": Metric("F1 score over all classes at once", _micro_f1, of_labels=_micro_f1_of_labels),
    "mean_iou": Metric(
        "intersection over union (Jaccard), mean over the classes present or predicted",
        _intersection_over_union,
        of_labels=_intersection_of_labels,
    ),
    "balanced_accuracy": Metric("recall, mean over the classes present", _balanced_accuracy),
    "auroc": Metric(
        "area under the ROC curve, one versus rest, mean over the classes present",
        partial(_one_versus_rest, _area_under_roc),
        of_labels=partial(_mean_of_labels, _area_under_roc),
        title="AUROC",
    ),
    "average_precision": Metric(
        "average precision, one versus rest, mean over the classes present",
        partial(_one_versus_rest, _average_precision),
        of_labels=partial(_mean_of_labels, _average_precision),
    ),
    "top3": Metric(
        "share of examples whose class has one of the 3 highest scores",
        partial(_top, 3),
        min_classes=3,
        title="top-3 accuracy",
    ),
    "top5": Metric(
        "share of examples whose class has one of the 5 highest scores",
        partial(_top, 5),
        min_classes=5,
        title="top-5 accuracy",
    ),
    "ece": Metric(
        "expected calibration error, 15 bins", _calibration_error, lower_is_better=True, title="ECE"
    ),
    "rmse": Metric(
        "root mean squared error of a regression",
        _root_mean_square,
        "regression",
        (0.0, math.inf),
        lower_is_better=True,
        title="RMSE",
    ),
    "mae": Metric(
        "mean absolute error of a regression",
        _mean_absolute,
        "regression",
        (0.0, math.inf),
        lower_is_better=True,
        title="MAE",
    ),
    "r2": Metric(
        "coefficient of determination of a regression",
        _determination,
        "regression",
        (-math.inf, 1.0),
        title="R²",
    ),
}
"""Metrics by name."""


def find_number(name: str) -> Metric | ClientNumber | None:
    """Find the metric or further client number of that name; None for a metric of the user's own."""
    return METRICS.get(name) or CLIENT_NUMBERS.get(name)


_OF_LABELS = {
    name: replace(metric, task="labels", compute=metric.of_labels)
    for name, metric in METRICS.items()
    if metric.of_labels is not None
}


def check_metric_names(metrics: Any) -> tuple[str, ...]:
    """Check the names in ``run.metrics``, without importing anything.

    Raises:
        ConfigError: if the value is no list or a name is unknown; the message names the nearest metric.
    """
    if isinstance(metrics, str):
        raise ConfigError(f"run.metrics is a list of names, such as [{metrics!r}]")
    names = tuple(metrics)
    for name in names:
        if not isinstance(name, str):
            function_name = getattr(name, "__name__", "function")
            raise ConfigError(
                f"run.metrics holds names; a function of your own is named 'module:{function_name}', in a script or "
                f"notebook '__main__:{function_name}'; it is {name!r}"
            )
        if name in CLIENT_NUMBERS and CLIENT_NUMBERS[name].is_required:
            raise ConfigError(f"run.metrics: {name} is always measured; leave it out")
        if ":" not in name and name not in METRICS:
            raise ConfigError(
                f"run.metrics: there is no metric {name!r}. {did_you_mean(name, METRICS)} "
                "A function of your own is named 'module:function'."
            )
        if names.count(name) > 1:
            raise ConfigError(f"run.metrics names {name!r} twice")
    return names


OwnMetrics = Mapping[str, Callable[..., Any]]
"""Functions ``metric(scores, targets)`` of the user, by name."""


def split_metrics(metrics: Any) -> tuple[Any, OwnMetrics]:
    """Split the metrics that are passed in Python into names and functions by name.

    Args:
        metrics: names of metrics, or functions ``metric(scores, targets)``.

    Raises:
        ConfigError: if a function has no name of its own, or a name that is already taken.
    """
    if callable(metrics):
        raise ConfigError(f"run.metrics is a list, such as [{_name_of(metrics)}]")
    if isinstance(metrics, str) or not isinstance(metrics, Iterable):
        return metrics, {}
    names: list[Any] = []
    functions: dict[str, Callable[..., Any]] = {}
    for metric in metrics:
        if not callable(metric):
            names.append(metric)
            continue
        name = _name_of(metric)
        if isinstance(metric, type):
            raise ConfigError(f"run.metrics: {name} is a class; pass an object of it, such as {name}()")
        if not name.isidentifier():
            raise ConfigError(
                f"run.metrics: {name} has no name for tables; define it by def NAME(scores, targets)"
            )
        if name in METRICS or name in reserved_names() or name in functions:
            raise ConfigError(
                f"run.metrics: a function is called {name!r} as {'another one' if name in functions else 'something else'} "
                "in tables of results; rename it"
            )
        functions[name] = metric
    return names, functions


def _name_of(function: Any) -> str:
    """Name of a function; for a callable object without a name, the name of its class."""
    return str(getattr(function, "__name__", type(function).__name__))


def has_standard_scores(scores: Tensor, y: Tensor, class_count: int) -> bool:
    """Whether scores have the form that accuracy, named metrics and predictions assume.

    With a loss of the user's own, scores may have any form, such as one logit, thresholds or an embedding.

    Args:
        scores: scores of some examples.
        y: targets of the examples.
        class_count: number of classes; 0 for a regression.

    Returns:
        True for one score for each class beside every label, and for outputs in the shape of real targets.
    """
    if y.is_floating_point():
        return scores.shape == y.shape
    return scores.ndim > 1 and scores.movedim(class_axis(scores), -1).shape == (*y.shape, class_count)


def choose_metrics(
    names: Sequence[str],
    examples: Examples,
    class_count: int,
    loss: Loss = AUTO,
    functions: OwnMetrics | None = None,
    models: Iterable[EngineModel] = (),
) -> dict[str, Metric]:
    """Choose the metrics of those names for a task.

    Args:
        names: names in :data:`METRICS`, or ``module:function``.
        examples: examples of any client, for the form of its labels.
        class_count: number of classes; 0 for a regression.
        loss: loss of the task, which says whether real targets are several labels for each example.
        functions: functions of the user's own, by name.
        models: architectures of the clients, whose scores may have any form if the loss is a function of the user's own.

    Raises:
        ConfigError: if a metric does not suit the task or the scores of a model, or if its function cannot be imported.
    """
    if (names or functions) and loss.predicts_tokens(examples.y):
        raise ConfigError(
            "run.metrics needs one label for each example, and language models have one for each token; "
            "leave it empty. Loss and token_accuracy are always measured, and `fedlowrank score` scores what the "
            "models write."
        )
    metrics = {name: METRICS[name] if name in METRICS else _import_metric(name) for name in names}
    metrics |= {name: _own_metric(function) for name, function in (functions or {}).items()}
    task = "regression" if examples.is_regression else "classes"
    if loss.is_binary(examples.y):
        task = "labels"
        metrics = {name: _OF_LABELS.get(name, metric) for name, metric in metrics.items()}
    for name, metric in metrics.items():
        if metric.task not in (task, "any"):
            valid_names = ", ".join(
                _OF_LABELS if task == "labels" else [n for n, m in METRICS.items() if m.task == task]
            )
            raise ConfigError(
                f"run.metrics: {name} is a metric of {_TASKS[metric.task]}, and these data are "
                f"{_TASKS[task]}; choose among {valid_names}"
            )
        if metric.min_classes and class_count <= metric.min_classes:
            raise ConfigError(
                f"run.metrics: {name} needs more than {metric.min_classes} classes, and these data have {class_count}; "
                "leave it out"
            )
    needs_standard_scores = [name for name, metric in metrics.items() if metric.task != "any"]
    if loss.is_custom and needs_standard_scores:
        _check_scores_of_models(needs_standard_scores[0], models, examples, class_count)
    return metrics


def _check_scores_of_models(
    name: str, models: Iterable[EngineModel], examples: Examples, class_count: int
) -> None:
    """Raise ConfigError if a model's scores of one example are not those that a named metric needs."""
    y = examples.y.new_empty(1, *examples.y.shape[1:])
    for model in models:
        scores = model.probe(model.example)
        if not has_standard_scores(scores, y, class_count):
            form, classes = (
                ("outputs in the shape of the targets", "")
                if examples.is_regression
                else ("a score of each class for each label", f" of {class_count} classes")
            )
            raise ConfigError(
                f"run.metrics: {name} needs {form}, and model {model.name} makes scores {[*scores.shape]} beside targets "
                f"{[*y.shape]}{classes}. The loss is a function of your own, which alone knows what they mean. Name a metric "
                f"of your own, or leave {name} out"
            )


_TASKS = {
    "classes": "a classification",
    "regression": "a regression",
    "labels": "a classification with several labels an example",
}


def compute_metric(name: str, metric: Metric, scores: Reals, labels: Labels) -> float | None:
    """Compute a metric on a set of examples.

    Returns:
        The value; None where the metric is not defined; NaN if a diverged model's score is NaN or infinite (a score
        of minus infinity is a probability of zero unless its whole row is), or if a user's function returns NaN.

    Raises:
        ConfigError: if a user's function fails or does not return a number.
    """
    if not len(labels):
        return None
    if metric.task != "any":
        max_scores = scores.max(1) if metric.task == "classes" else scores
        is_number = (scores < math.inf).all() and np.isfinite(max_scores).all()
        return metric.compute(scores, labels) if is_number else math.nan
    try:
        value = metric.compute(scores, labels)
        return None if value is None else float(value)
    except Exception as error:
        # the user's code may raise any error
        shapes_text = f"scores {[*scores.shape]} and labels {[*labels.shape]}"
        raise ConfigError(
            f"run.metrics: {name!r} must return a number or None, and failed on {shapes_text}: "
            f"{type(error).__name__}: {error}"
        ) from error


def _import_metric(name: str) -> Metric:
    function = import_named(name, "run.metrics")
    if not callable(function):
        raise ConfigError(f"run.metrics: {name!r} is a {type(function).__name__} and not a function")
    return _own_metric(function)


def _own_metric(function: Callable[..., Any]) -> Metric:
    return Metric("", function, "any", (-math.inf, math.inf), lower_is_better=None)
