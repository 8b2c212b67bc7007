"""Checks that targets, scores of models and the loss of a task fit together, with errors that say what to change."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..core.errors import ConfigError, DataError, TaskError
from ..core.learning.losses import OF_LABELS, OF_REAL_TARGETS, Loss, class_axis
from ..core.learning.preference_losses import REFERENCE, RESPONSE_MASK
from .dataset import ClientData, Examples
from .partitioning.checks import describe_array
from .user_data.user_arrays import find_target_hint


def fit_loss(loss: Loss, clients: Sequence[ClientData], classes: Sequence[str]) -> Loss:
    """Check that a loss fits the targets of a federation, and resolve ``auto`` where it has two meanings.

    Args:
        loss: loss of the task, with its function imported.
        clients: data of the federation's clients; all have targets of one kind.
        classes: names of the classes.

    Returns:
        The loss; ``cross_entropy`` instead of ``auto`` for labels of pixels or other dense labels.

    Raises:
        ConfigError: if an option does not fit the targets.
        DataError: if the targets are of another kind than the loss needs.
    """
    examples, kind = clients[0].train, loss.kind
    if kind in ("auto", "next_token") and examples.has_token_labels and examples.y.ndim > 2:
        raise DataError(
            f"the data are pairs of responses to one prompt, labels {describe_array(examples.y)}, and loss {kind!r} learns "
            "one response. Set loss to 'dpo' or 'orpo', or give rows of another form, such as messages"
        )
    inputs = examples.x if isinstance(examples.x, dict) else {}
    has_texts = RESPONSE_MASK not in inputs and examples.y.ndim == 1 and not classes
    holds_pairs = has_texts and "input_ids" in inputs and inputs["input_ids"].ndim == 3
    if holds_pairs != (kind == "contrastive"):
        raise DataError(
            f"the data are pairs of texts, and loss {kind!r} does not compare these. Set loss to 'contrastive'"
            if holds_pairs
            else "loss 'contrastive' learns from pairs of texts, which come from an experiment with language.task = "
            "'embedding' and rows with 'anchor' and 'positive'. Choose another loss"
        )
    if loss.couples:
        return loss
    if loss.is_preference:
        _check_pairs(loss, examples)
        return loss
    if kind == "auto":
        predicts_tokens = examples.has_token_labels and not classes
        return Loss("cross_entropy") if examples.is_dense and not predicts_tokens else loss
    if loss.is_custom:
        return loss
    if examples.is_regression and kind not in OF_REAL_TARGETS:
        raise DataError(
            f"loss {kind!r} needs labels, whole numbers, and the targets are real numbers {describe_array(examples.y)}. Give "
            "the number of each class (of one-hot rows, y.argmax(1)), or choose loss 'bce' for several labels an example"
        )
    if not examples.is_regression and kind not in OF_LABELS:
        raise DataError(
            f"loss {kind!r} needs real targets, and these data have labels {describe_array(examples.y)}. Choose loss "
            f"'cross_entropy', or store the targets as real numbers, y.astype(numpy.float32). Federation.from_arrays makes real "
            f"targets of whole numbers if it gets loss={kind!r}"
        )
    if kind == "next_token" and not examples.has_token_labels:
        raise DataError(
            "loss 'next_token' is for language models: named inputs with input_ids [n, T] and labels of tokens [n, T], not "
            f"{describe_array(examples.y)}"
        )
    if kind in ("cross_entropy", "focal") and examples.has_token_labels and _are_input_ids(examples):
        raise ConfigError(
            f"the labels are the tokens themselves, which a model that is trained by loss {kind!r} only copies. Choose "
            "loss 'next_token', the default of language models"
        )
    _check_weights(loss, examples, classes)
    if loss.is_binary(examples.y):
        _check_binary(loss, clients)
    return loss


def _check_pairs(loss: Loss, examples: Examples) -> None:
    """Raise DataError if examples are no pairs of responses as preference losses need them."""
    inputs = examples.x if isinstance(examples.x, dict) else {}
    if RESPONSE_MASK not in inputs:
        raise DataError(
            f"loss {loss.kind!r} learns from pairs of responses to one prompt, which come from an experiment with [language] "
            "and rows with 'prompt', 'chosen' and 'rejected'; these data have labels "
            f"{describe_array(examples.y)}. Choose another loss"
        )
    if (REFERENCE in inputs) != (loss.kind == "dpo"):
        raise DataError(
            f"these pairs of responses were made for another loss than {loss.kind!r}. Set [loss] in the experiment, so that "
            "they are made for this one"
        )


def _are_input_ids(examples: Examples) -> bool:
    """Whether all token labels that count are the ids of these tokens."""
    if not isinstance(examples.x, dict) or not len(examples):
        return False
    counts = examples.y >= 0
    return bool((examples.x["input_ids"][counts] == examples.y[counts]).all())


def _check_weights(loss: Loss, examples: Examples, classes: Sequence[str]) -> None:
    """Refuse options that targets of this kind do not use, and weights whose number differs from the classes'."""
    for name in ("class_weights", "ignore_index") if examples.is_regression else ("pos_weight",):
        if getattr(loss, name) != getattr(Loss(), name):
            option = "class_weights" if name == "pos_weight" else "pos_weight"
            raise ConfigError(
                f"loss.{name} does nothing with {'real targets' if examples.is_regression else 'labels'}: set loss.{option}, "
                f"or leave loss.{name} out"
            )
    weights = loss.class_weights
    if weights is not None and len(weights) != len(classes):
        raise ConfigError(
            f"loss.class_weights has {len(weights)} numbers, and there are {len(classes)} classes: give one for each"
        )
    pos_weight = loss.pos_weight
    if isinstance(pos_weight, tuple) and len(pos_weight) not in (1, examples.y.shape[1]):
        raise ConfigError(
            f"loss.pos_weight has {len(pos_weight)} numbers, and the targets {describe_array(examples.y)} have "
            f"{examples.y.shape[1]} classes (dimension 1): give one for each, or one number for all"
        )


def _check_binary(loss: Loss, clients: Sequence[ClientData]) -> None:
    for client_id, data in enumerate(clients):
        for part, examples in (("train", data.train), ("val", data.val), ("test", data.test)):
            if len(examples) and not (
                (min_target := float(examples.y.min())) >= 0 and float(examples.y.max()) <= 1
            ):
                value = min_target if min_target < 0 else float(examples.y.max())
                raise DataError(
                    f"client {client_id}: loss {loss.kind!r} needs targets from 0 to 1, and {part} has a {value:g}. For one of "
                    "several classes an example give labels [n] and loss 'cross_entropy'"
                )


def check_scores(
    loss: Loss, scores: Tensor, examples: Examples, class_count: int, prefix: str, target_warning: str = ""
) -> None:
    """Raise TaskError if a model's scores of one example do not fit the targets.

    Args:
        loss: loss of the task; a function of the user may accept scores of any form.
        scores: scores of one example, ``[1, ...]``.
        examples: examples whose targets have the expected form.
        class_count: number of classes.
        prefix: beginning of the message, which says what the model returns.
        target_warning: warning of the targets, if there is one.
    """
    shape, y = list(scores.shape), examples.y
    dims = list(y.shape[1:])
    if loss.is_custom:
        return
    if examples.is_regression:
        if shape != [1, *dims]:
            raise TaskError(
                f"{prefix} its target is {[1, *dims]}" + (f": {target_warning}" if target_warning else "")
            )
        return
    if not examples.is_dense:
        if len(shape) != 2 or shape[0] != 1 or shape[1] < class_count:
            raise TaskError(
                f"{prefix} there are {class_count} classes; it must make [1, {class_count}], one score per class"
                + (
                    ", or set loss='bce' for labels 0 and 1 with one score"
                    if class_count == 2 and shape == [1, 1]
                    else ""
                )
            )
    else:
        expected_shape = [1, *dims, class_count] if len(dims) == 1 else [1, class_count, *dims]
        axis = class_axis(scores)
        fits = len(shape) == len(expected_shape) and shape[axis] >= class_count
        if not fits or [n for i, n in enumerate(shape) if i != axis] != [1, *dims]:
            hint = f" {target_hint}" if (target_hint := find_target_hint(y)) else ""
            if not hint and len(dims) == 1 and class_count <= 2:
                hint = " For several labels an example, rows of zeros and ones, set loss='bce'."
            raise TaskError(
                f"{prefix} each example has {class_count} classes at {dims} places; it must make {expected_shape}, one score per "
                f"class and place.{hint}"
            )
    if loss.class_weights is not None and shape[class_axis(scores)] != class_count:
        raise TaskError(
            f"{prefix} loss.class_weights names {class_count}: give the model as many outputs as classes"
        )
