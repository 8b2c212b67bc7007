"""How targets, the scores of models and the loss of a task fit together, with errors that say what to change."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..core.errors import ConfigError, DataError, TaskError
from ..core.learning.losses import OF_LABELS, OF_REAL_TARGETS, Loss, class_axis
from ..core.learning.preference_losses import REFERENCE, RESPONSE_MASK
from .dataset import ClientData, Examples
from .partitioning.checks import describe_array


def fit_loss(loss: Loss, clients: Sequence[ClientData], classes: Sequence[str]) -> Loss:
    """Check that a loss fits the targets of a federation, and make ``auto`` exact where it has two meanings.

    Args:
        loss: of the task; its function is imported.
        clients: of the federation; all have targets of one kind.
        classes: names of the classes.

    Returns:
        The loss; ``cross_entropy`` where it is ``auto`` and there are labels of pixels or other dense labels.

    Raises:
        ConfigError: if an option does not fit.
        DataError: if the targets are of another kind than the loss needs.
    """
    first, kind = clients[0].train, loss.kind
    if kind in ("auto", "next_token") and first.has_token_labels and first.y.ndim > 2:
        raise DataError(
            f"the data are pairs of responses to one prompt, labels {describe_array(first.y)}, and loss {kind!r} learns "
            "one response. Set loss to 'dpo' or 'orpo', or give rows of another form, such as messages"
        )
    inputs = first.x if isinstance(first.x, dict) else {}
    is_texts = RESPONSE_MASK not in inputs and first.y.ndim == 1 and not classes
    holds_pairs = is_texts and "input_ids" in inputs and inputs["input_ids"].ndim == 3
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
        _check_pairs(loss, first)
        return loss
    if kind == "auto":
        predicts_tokens = first.has_token_labels and not classes
        return Loss("cross_entropy") if first.is_dense and not predicts_tokens else loss
    if loss.is_own:
        return loss
    if first.is_regression and kind not in OF_REAL_TARGETS:
        raise DataError(
            f"loss {kind!r} needs labels, whole numbers, and the targets are real numbers {describe_array(first.y)}. Give "
            "the number of each class (of one-hot rows, y.argmax(1)), or choose loss 'bce' for several labels an example"
        )
    if not first.is_regression and kind not in OF_LABELS:
        raise DataError(
            f"loss {kind!r} needs real targets, and these data have labels {describe_array(first.y)}. Choose loss "
            f"'cross_entropy', or pass loss={kind!r} to Federation.from_arrays, which makes real targets of numbers"
        )
    if kind == "next_token" and not first.has_token_labels:
        raise DataError(
            "loss 'next_token' is for language models: named inputs with input_ids [n, T] and labels of tokens [n, T], not "
            f"{describe_array(first.y)}"
        )
    if kind in ("cross_entropy", "focal") and first.has_token_labels and _are_own_ids(first):
        raise ConfigError(
            f"the labels are the tokens themselves, which a model that is trained by loss {kind!r} only copies. Choose "
            "loss 'next_token', the default of language models"
        )
    _check_weights(loss, first, classes)
    if loss.is_binary(first.y):
        _check_binary(loss, clients)
    return loss


def _check_pairs(loss: Loss, first: Examples) -> None:
    """Raise DataError if examples are no pairs of responses as a loss of preferences needs them."""
    inputs = first.x if isinstance(first.x, dict) else {}
    if RESPONSE_MASK not in inputs:
        raise DataError(
            f"loss {loss.kind!r} learns from pairs of responses to one prompt, which come from an experiment with [language] "
            "and rows with 'prompt', 'chosen' and 'rejected'; these data have labels "
            f"{describe_array(first.y)}. Choose another loss"
        )
    if (REFERENCE in inputs) != (loss.kind == "dpo"):
        raise DataError(
            f"these pairs of responses were made for another loss than {loss.kind!r}. Set [loss] in the experiment, so that "
            "they are made for this one"
        )


def _are_own_ids(examples: Examples) -> bool:
    """Whether all labels of tokens that count are the ids of these tokens."""
    if not isinstance(examples.x, dict) or not len(examples):
        return False
    counts = examples.y >= 0
    return bool((examples.x["input_ids"][counts] == examples.y[counts]).all())


def _check_weights(loss: Loss, first: Examples, classes: Sequence[str]) -> None:
    """Refuse options that targets of this kind do not read, and weights of another number than classes."""
    for name in ("class_weights", "ignore_index") if first.is_regression else ("pos_weight",):
        if getattr(loss, name) != getattr(Loss(), name):
            cure = "class_weights" if name == "pos_weight" else "pos_weight"
            raise ConfigError(
                f"loss.{name} does nothing with {'real targets' if first.is_regression else 'labels'}: set loss.{cure}, "
                f"or leave loss.{name} out"
            )
    weights = loss.class_weights
    if weights is not None and len(weights) != len(classes):
        raise ConfigError(
            f"loss.class_weights has {len(weights)} numbers, and there are {len(classes)} classes: give one for each"
        )
    positive = loss.pos_weight
    if isinstance(positive, tuple) and len(positive) not in (1, first.y.shape[1]):
        raise ConfigError(
            f"loss.pos_weight has {len(positive)} numbers, and the targets {describe_array(first.y)} have "
            f"{first.y.shape[1]} classes (dimension 1): give one for each, or one number for all"
        )


def _check_binary(loss: Loss, clients: Sequence[ClientData]) -> None:
    for i, data in enumerate(clients):
        for part, examples in (("train", data.train), ("val", data.val), ("test", data.test)):
            if len(examples) and not ((low := float(examples.y.min())) >= 0 and float(examples.y.max()) <= 1):
                wrong = low if low < 0 else float(examples.y.max())
                raise DataError(
                    f"client {i}: loss {loss.kind!r} needs targets from 0 to 1, and {part} has a {wrong:g}. For one of "
                    "several classes an example give labels [n] and loss 'cross_entropy'"
                )


def check_scores(loss: Loss, scores: Tensor, examples: Examples, classes: int, beginning: str) -> None:
    """Raise TaskError if a model's scores of one example do not fit the targets.

    Args:
        loss: of the task; a function of the user's own may take scores of any form.
        scores: of one example, ``[1, ...]``.
        examples: for the form of the targets.
        classes: number of classes.
        beginning: of the message; it says what the model makes.
    """
    shape, y = list(scores.shape), examples.y
    rest = list(y.shape[1:])
    if loss.is_own:
        return
    if examples.is_regression:
        if shape != [1, *rest]:
            raise TaskError(f"{beginning} its target is {[1, *rest]}")
        return
    if not examples.is_dense:
        if len(shape) != 2 or shape[0] != 1 or shape[1] < classes:
            raise TaskError(
                f"{beginning} there are {classes} classes; it must make [1, {classes}], one score per class"
            )
    else:
        wanted = [1, *rest, classes] if len(rest) == 1 else [1, classes, *rest]
        axis = class_axis(scores)
        fits = len(shape) == len(wanted) and shape[axis] >= classes
        if not fits or [n for i, n in enumerate(shape) if i != axis] != [1, *rest]:
            several = ""
            if len(rest) == 1 and classes <= 2:
                several = " For several labels an example, rows of zeros and ones, set loss='bce'."
            raise TaskError(
                f"{beginning} each example has {classes} classes at {rest} places; it must make {wanted}, one score per "
                f"class and place.{several}"
            )
    if loss.class_weights is not None and shape[class_axis(scores)] != classes:
        raise TaskError(
            f"{beginning} loss.class_weights names {classes}: give the model as many outputs as classes"
        )
