"""Errors written for a person: what was wrong, where, what to do."""

from __future__ import annotations

import contextlib
import difflib
import re
import sys
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

_PACKAGE = str(Path(__file__).parents[1])


class FedlowrankError(Exception):
    """Any mistake that the caller can correct.

    The text advises a caller in Python. The command line prints :attr:`for_command` instead, without a traceback.

    Args:
        message: description of what is wrong, where, and what to do in Python and on the command line alike.
        python: advice for a caller in Python, appended to the message.
        command: advice for the command line, used instead.
    """

    def __init__(self, message: str = "", *, python: str = "", command: str = "") -> None:
        super().__init__(f"{message} {python}".strip())
        self.for_command = f"{message} {command or python}".strip()

    def drop_prefix(self, prefix: re.Pattern[str]) -> None:
        """Remove what a pattern matches from the text for Python, such as the table before a field's name."""
        self.args = (prefix.sub("", str(self)), *self.args[1:])


class ConfigError(FedlowrankError):
    """A setting is unknown, of the wrong type or out of range."""


class DataError(FedlowrankError):
    """A data set or a partition of it cannot be used as asked."""


class TaskError(FedlowrankError):
    """A method, its models and the federation do not fit together."""


class SingleValueError(TaskError):
    """A batch normalization sees a single value of each channel, which cannot be normalized.

    Args:
        layer: dotted name of the normalization in its model.
        owner: the client and its examples, or the model, if they are known.
        advice: advice on what to do instead.
    """

    def __init__(self, layer: str, owner: str = "", advice: str = "") -> None:
        need = "needs at least two values of each channel, and one example gives it one"
        prefix = f"{owner}: " if owner else ""
        advice = (
            advice or "Give more examples, or use a normalization that treats examples singly (nn.GroupNorm)."
        )
        super().__init__(f"{prefix}the batch normalization {layer!r} {need}. {advice}")
        self.layer, self.whose, self.advice = layer, owner, advice

    def __reduce__(self) -> tuple[type[SingleValueError], tuple[str, str, str]]:
        return type(self), (self.layer, self.whose, self.advice)


class LossError(TaskError):
    """A loss that cannot be trained: it is no single number, or no trained parameter changes it."""


@contextlib.contextmanager
def naming(owner: str, advice: str = "") -> Iterator[None]:
    """Within this block, raise a :class:`SingleValueError` without a client again with the client and an advice."""
    try:
        yield
    except SingleValueError as error:
        if error.whose or not owner:
            raise
        raise SingleValueError(error.layer, owner, advice or error.advice) from error


class CheckpointError(FedlowrankError):
    """A run folder cannot be written, read or resumed."""


class ResumeRefusedError(CheckpointError):
    """A run was asked to go on with another configuration. Nothing has changed."""


_DROP_SUCH_REPLIES = "set run.on_nan to 'drop' to go on without such replies."


class NonFiniteError(FedlowrankError):
    """A training pass met a NaN or an infinity.

    Args:
        client_id: identifier of the client.
        round: index of the training round, from 0.
        name: name of the pass over the data.
        step: index of the first step whose loss is not finite, from 0, or None if only the parameters show it.
        owner: name of the client in the message, by default its number.

    Attributes:
        finding: description of what is not finite, with client, round and pass; rounds are numbered as in
            :class:`..results.records.RoundRecord`, where 1 is the first round of training.
        advice: advice on what to do about it.
    """

    def __init__(self, client_id: int, round: int, name: str, step: int | None, owner: str = "") -> None:
        location = "the parameters after the pass are" if step is None else f"the loss of step {step} is"
        advice = "Lower the learning rate, clip the gradient (optimizer.clip)"
        if step == 0 and round == 0:
            advice = (
                "Nothing was learnt before this step, so look at this client's inputs and targets (a NaN, or "
                "numbers that are too large) and at the loss"
            )
        finding = f"{owner or f'client {client_id}'}, round {round + 1}, pass {name!r}: {location} not finite"
        super().__init__(f"{finding}. {advice}, or {_DROP_SUCH_REPLIES}")
        self.finding, self.advice = finding, advice
        self.client_id = client_id
        self.round = round
        self.name = name
        self.step = step
        self.owner = owner

    def __reduce__(self) -> tuple[type[NonFiniteError], tuple[int, int, str, int | None, str]]:
        return type(self), (self.client_id, self.round, self.name, self.step, self.owner)


class NonFiniteUploadError(NonFiniteError):
    """The upload of a client holds a NaN or an infinity, although none of its training passes met one.

    Args:
        client_id: identifier of the client.
        round: index of the training round, from 0.
        path: path of the first such number in the upload.
        owner: name of the client in the message, by default its number.
    """

    def __init__(self, client_id: int, round: int, path: str, owner: str = "") -> None:
        super().__init__(client_id, round, "", None, owner)
        self.finding = (
            f"{owner or f'client {client_id}'}, round {round + 1}: its upload holds a NaN or an infinity at {path}, "
            "and its training met none"
        )
        self.advice = "Look at what the method computes after training"
        self.path = path
        FedlowrankError.__init__(self, f"{self.finding}. {self.advice}, or {_DROP_SUCH_REPLIES}")

    def __reduce__(self) -> tuple[type[NonFiniteUploadError], tuple[int, int, str, str]]:  # type: ignore[override]
        return type(self), (self.client_id, self.round, self.path, self.owner)


class LoweredRankWarning(UserWarning):
    """A rank is larger than a layer allows, so that a lower one is used in this layer."""


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """End of a message about an unknown name: the nearest known one without regard to case, or all of them.

    Args:
        name: the unknown name.
        choices: names that would have been accepted.

    Returns:
        A sentence such as ``Did you mean 'fedavg'?`` or ``Known: 'fd', 'fedavg'.``
    """
    names = sorted(set(choices))
    lowercase_matches = difflib.get_close_matches(name.lower(), {n.lower() for n in names}, n=1, cutoff=0.6)
    # of names that differ in case alone, the nearest in case
    matches = difflib.get_close_matches(
        name, [n for n in names if n.lower() in lowercase_matches], n=1, cutoff=0
    )
    return f"Did you mean {matches[0]!r}?" if matches else "Known: " + ", ".join(map(repr, names)) + "."


def warn_user(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line that called this package: the first stack frame outside of it."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_PACKAGE, "<string>")):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)
