"""Callbacks: functions that see the record of every round and may end the run."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import math
from collections.abc import Callable, Sequence, Set
from typing import Any, TypeAlias

import numpy as np

from ..core.arguments.field_checks import check_arguments
from ..core.arguments.user_code import import_named
from ..core.errors import ConfigError
from ..data.federation import Federation
from ..results.client_numbers import ACCURACY, LOSS
from ..results.measurements import is_lower_better
from ..results.ranking import exceeds
from ..results.records import RoundRecord
from .run_settings import RunSettings

RoundCallback: TypeAlias = Callable[[RoundRecord], Any]
"""Called with the record of every round; returns True to end the run after this round."""

NEEDS_VALIDATION = (
    "early stopping needs validation examples, and no client has any: set split.val in the experiment file, "
    "or val= of Federation.from_arrays, such as 0.1. Over a network, a client sends numbers about 20 validation "
    "examples or more, unless its site types `fedlowrank join --exact-evaluation`"
)

logger = logging.getLogger(__name__)


class Callback:
    """Base class of callbacks that do more than read one record. Override the methods that you need.

    A plain function of a :class:`..results.records.RoundRecord` is a callback, too.

    Attributes:
        reason: text that says why the run ends, once the callback has returned True; written to ``status.json``.
    """

    reason: str = ""

    def on_run_begin(self, records: Sequence[RoundRecord]) -> bool | None:
        """Begin with a new or a resumed run.

        Args:
            records: records of the rounds before; empty for a new run. They are not passed to :meth:`__call__` again,
                so a callback that depends on earlier rounds takes its state from them.

        Returns:
            True if the run must not go on after these rounds.
        """

    def __call__(self, record: RoundRecord) -> bool | None:
        """Read the record of a new round; return True to end the run after this round."""

    def on_run_end(self, finished: bool) -> None:
        """Finish when the run ends.

        Args:
            finished: whether the run reached its end; False after an error or an interrupt.
        """


class EarlyStopping(Callback):
    """Ends a run whose validation result does not improve.

    The criterion is :meth:`..results.records.RoundRecord.validation`: the mean validation accuracy of the clients, or
    minus their mean validation loss for models without an accuracy. Rounds without evaluation do not count. Results that
    differ only by rounding are equal: see :func:`..results.ranking.exceeds`.

    Over a network, an evaluation may lack clients. Two evaluations are then compared by the mean over the clients that
    both have. One with further clients that is as good as the best one takes its place, and is not counted.

    Args:
        patience: number of consecutive evaluations without an improvement after which the run ends.
        min_delta: smallest improvement: an evaluation is better if it exceeds the best one by more than this, in
            units of the accuracy in [0, 1], of the loss, or of the metric.
        metric: name of one of the run's ``metrics`` to use as the criterion: its mean over the clients' validation
            examples.
        lower_is_better: whether a smaller value of this metric is better, as for an error. None uses the known
            direction of this package's metrics, and False for a function of your own.

    Raises:
        ConfigError: if a number is out of its bounds, if no client has validation examples, or if the run does not
            measure the metric.
    """

    @check_arguments
    def __init__(
        self,
        patience: int = 10,
        min_delta: float = 0.0,
        *,
        metric: str | None = None,
        lower_is_better: bool | None = None,
    ) -> None:
        if patience < 1:
            raise ConfigError(f"EarlyStopping: patience must be >= 1; it is {patience}")
        if not 0 <= min_delta < float("inf"):
            raise ConfigError(f"EarlyStopping: min_delta must be >= 0; it is {min_delta}")
        if lower_is_better and metric is None:
            raise ConfigError("EarlyStopping: lower_is_better is about a metric; name it by metric=...")
        self.patience, self.min_delta = patience, min_delta
        if lower_is_better is None and metric is not None:
            lower_is_better = is_lower_better(metric)
        self.metric, self.sign = metric, -1.0 if lower_is_better else 1.0
        self._best: RoundRecord | None = None
        self._waited = 0

    @property
    def reason(self) -> str:  # type: ignore[override]  # computed, a field of the base
        """Text that says why the run ends."""
        best_round = 0 if self._best is None else self._best.round
        return f"no better validation for {self.patience} evaluations after round {best_round}"

    def on_run_begin(self, records: Sequence[RoundRecord]) -> bool:
        """Count the evaluations of earlier rounds, as an uninterrupted run would have counted them."""
        self._best, self._waited = None, 0
        for record in records:
            self(record)
        return self._waited >= self.patience

    def __call__(self, record: RoundRecord) -> bool:
        """Count an evaluation."""
        value = self._value(record)
        if value is None:
            # over a network, clients with few examples and clients that do not reply have no validation result
            if record.mean(LOSS, split="test") is not None and self._best is None:
                raise ConfigError(self._reason_without_value(record))
            if record.is_evaluated:
                logger.warning(
                    "round %d: no client has a validation result, so early stopping does not count it",
                    record.round,
                )
            return False
        if self._best is None:
            self._best = record
            return False
        client_ids, best_ids = self._list_clients(record), self._list_clients(self._best)
        if client_ids != best_ids:
            value = self._value(_restrict(record, client_ids & best_ids))
        best_value = self._value(_restrict(self._best, client_ids & best_ids))
        if value is None or best_value is None:
            logger.warning(
                "round %d: no client has a validation result here and in round %d, the best one until now, so early "
                "stopping does not count it",
                record.round,
                self._best.round,
            )
        elif exceeds(value, best_value, margin=self.min_delta):
            self._best, self._waited = record, 0
        elif client_ids > best_ids and not exceeds(best_value, value):
            self._best = record
        else:
            self._waited += 1
        return self._waited >= self.patience

    def _reason_without_value(self, record: RoundRecord) -> str:
        """Explain why no client has a validation result by which the run could end."""
        if self.metric is None or record.mean(LOSS, split="val") is None:
            return NEEDS_VALIDATION
        return (
            f"EarlyStopping: the metric {self.metric!r} is not defined on the validation examples of any client, as "
            "that of AUROC where all are of one class. Choose another metric, or give clients more validation examples"
        )

    def _list_clients(self, record: RoundRecord) -> set[int]:
        """Identifiers of the clients whose validation results a record's criterion is the mean of."""
        names = (ACCURACY, LOSS) if self.metric is None else (self.metric,)
        client_ids = {
            client_id
            for name in names
            for client_id, value in record.by_client(name, split="val").items()
            if value is not None
        }
        return client_ids.difference(record.excluded_from_means or ())

    def _value(self, record: RoundRecord) -> float | None:
        """Value of the criterion, higher is better; None without an evaluation or validation examples."""
        if self.metric is None or record.measured is None:
            return record.validation()
        if not record.measured.series(self.metric):
            metric_names = ", ".join(record.measured.metrics) or "no metric"
            raise ConfigError(
                f"EarlyStopping: the run measures {metric_names} and not {self.metric!r}: add it to metrics"
            )
        value = record.mean(self.metric, split="val")
        if value is None:
            return None
        return -math.inf if math.isnan(value) else self.sign * value


def _restrict(record: RoundRecord, client_ids: Set[int]) -> RoundRecord:
    """Make a record whose means are over some of its clients."""
    evaluated_ids = set() if record.measured is None else {*record.measured.client_ids}
    excluded_ids = {*(record.excluded_from_means or ())} | (evaluated_ids - client_ids)
    return dataclasses.replace(record, excluded_from_means=sorted(excluded_ids))


class CallbackList:
    """The callbacks of a run, called in order."""

    def __init__(self, callbacks: Sequence[RoundCallback]) -> None:
        self._callbacks = list(callbacks)
        self._begun: list[Callback] = []

    def begin(self, records: Sequence[RoundRecord]) -> str:
        """Begin a new or a resumed run.

        Returns:
            The reason why the run must not go on; empty if it may.
        """
        answers: list[tuple[RoundCallback, Any]] = []
        for callback in self._callbacks:
            if isinstance(callback, Callback):
                answers.append((callback, callback.on_run_begin(records)))
                self._begun.append(callback)
        return _first_reason(answers, records)

    def __call__(self, record: RoundRecord) -> str:
        """Pass the record of a round to all callbacks and return why the run ends, or an empty text."""
        return _first_reason([(c, c(record)) for c in self._callbacks], [record])

    def end(self, finished: bool) -> None:
        """End all callbacks that have begun."""
        for callback in self._begun:
            callback.on_run_end(finished)


def _first_reason(answers: Sequence[tuple[RoundCallback, Any]], records: Sequence[RoundRecord]) -> str:
    reasons = []
    for callback, answer in answers:
        if answer is not None and not isinstance(answer, bool | np.bool_):
            raise ConfigError(
                f"the callback {name_of(callback)} returned {answer!r}; return True to end the run, False or "
                "None to go on"
            )
        if answer:
            reason = callback.reason if isinstance(callback, Callback) else ""
            reasons.append(reason or f"{name_of(callback)} returned True after round {records[-1].round}")
    return f"stopped early: {reasons[0]}" if reasons else ""


def name_of(callback: RoundCallback) -> str:
    """Name of a callback for messages."""
    definition = callback if hasattr(callback, "__qualname__") else type(callback)
    return f"{definition.__module__}:{definition.__qualname__}"


def as_callbacks(value: RoundCallback | Sequence[RoundCallback] | None) -> list[RoundCallback]:
    """List the callbacks that a user passes: one, several or none; ConfigError if one cannot be called."""
    callbacks = list(value) if isinstance(value, Sequence) else [] if value is None else [value]
    for callback in callbacks:
        if isinstance(callback, type) or not callable(callback):
            description = f"the class {callback.__name__}" if isinstance(callback, type) else repr(callback)
            raise ConfigError(
                "a callback is a function of a round's record, or an object such as EarlyStopping(); not "
                f"{description}"
            )
        if not _takes_record(callback):
            raise ConfigError(
                f"the callback {name_of(callback)} cannot be called with a round's record alone: define it as "
                "function(record)"
            )
    return callbacks


def _takes_record(callback: RoundCallback) -> bool:
    """Whether a callback can be called with one argument, as far as its signature is known."""
    try:
        signature = inspect.signature(callback)
    except ValueError:
        # some functions of C have none
        return True
    try:
        signature.bind(None)
    except TypeError:
        return False
    return True


def refuse_without_validation(callbacks: Sequence[RoundCallback], federation: Federation) -> None:
    """Refuse early stopping for a federation whose clients have no validation examples."""
    stops = any(isinstance(callback, EarlyStopping) for callback in callbacks)
    if stops and not any(len(client.val) for client in federation.clients):
        raise ConfigError(NEEDS_VALIDATION)


def settings_callbacks(settings: RunSettings) -> list[RoundCallback]:
    """Make the callbacks that a run's settings name in ``run.patience`` and ``run.callbacks``.

    Raises:
        ConfigError: if one of ``run.callbacks`` cannot be imported or called.
    """
    callbacks: list[RoundCallback] = [] if settings.patience is None else [EarlyStopping(settings.patience)]
    for name in settings.callbacks:
        attribute = import_named(name, "run.callbacks")
        callbacks += as_callbacks(
            attribute() if isinstance(attribute, type) and issubclass(attribute, Callback) else attribute
        )
    return callbacks
