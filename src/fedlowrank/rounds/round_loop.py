"""Executes the rounds of a run with records, checkpoints, callbacks and loggers, in this order."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

from ..core.contract import AnyMethod, Method
from ..core.errors import CheckpointError, FedlowrankError, NonFiniteError
from ..core.io.atomic_files import as_checkpoint_error, write_atomically
from ..results.ranking import find_best
from ..results.records import RoundRecord
from ..storage.run_files import ANSWERS, LEDGER, read_answers
from ..storage.run_folder import RunFolder
from ..training.hook_calls import list_layers
from .callbacks import CallbackList, RoundCallback
from .logs.loggers import make_loggers
from .logs.progress import bar, run_label
from .outcome.representations import compute_representations
from .run import Run

logger = logging.getLogger(__name__)


def run_rounds(
    run: Run,
    folder: RunFolder | None,
    records: list[RoundRecord],
    progress: bool,
    callbacks: Sequence[RoundCallback],
    after_round: Callable[[RoundRecord], None] | None = None,
) -> list[RoundRecord]:
    """Execute the remaining rounds and keep the folder up to date.

    Args:
        run: run in its current state.
        folder: folder of the run, or None.
        records: records of the completed rounds; new records are appended.
        progress: whether to show a progress bar.
        callbacks: functions that are called with every record as soon as it is complete.
        after_round: function that is called with every record, even before its evaluation is known.

    Returns:
        The records of all rounds.
    """
    settings = run.settings
    if run.budget is not None and folder is not None:
        run.budget.open(folder.path / LEDGER, run.round)
    with contextlib.ExitStack() as stack:
        config = {"method": {"title": run.method.title}, "run": {"seed": settings.seed}}
        label = run_label(config if folder is None else folder.config)
        show = stack.enter_context(bar(label, settings.rounds, run.round)) if progress else None
        stack.enter_context(_ending(run, folder, records))
        stack.callback(run.engine.close)
        loop = _Loop(run, folder, records, callbacks, show or _ignore, after_round or _ignore)
        stack.push(loop.end)
        loop.begin()
        if records:
            loop.complete()
        else:
            loop.add(run.record_initial_models())
        while not run.is_over:
            record = run.step()
            loop.settle()
            loop.add(record)
        run.stop_by_budget()
        run.finish()
        loop.settle()
        if run.evaluates_late:
            loop.pass_on()
        if folder is not None:
            folder.save_representations(compute_representations(run, settings.representations))
    return records


class _Loop:
    """Handles the record of each round.

    Args:
        run: run that makes the records.
        folder: folder of the run, or None.
        records: records of the completed rounds; new records are appended.
        callbacks: callbacks that get complete records and may end the run.
        show: function that gets every record, and again once a late evaluation is known.
        after_round: function that gets every record, even an incomplete one.
    """

    def __init__(
        self,
        run: Run,
        folder: RunFolder | None,
        records: list[RoundRecord],
        callbacks: Sequence[RoundCallback],
        show: Callable[[RoundRecord], None],
        after_round: Callable[[RoundRecord], None],
    ) -> None:
        self._run, self._folder, self._records = run, folder, records
        self._show, self._after_round = show, after_round
        self._expects_uploads = _expects_uploads(run.method)
        self._callbacks = CallbackList(callbacks)
        log = run.settings.log
        loggers = [] if folder is None else make_loggers(log, folder.path, folder.config, folder.clients)
        self._loggers = CallbackList(loggers)

    def begin(self) -> None:
        """Begin callbacks and loggers with the complete records; a callback may end a run that is resumed."""
        run = self._run
        self._stop(self._callbacks.begin(self._records[:-1] if run.evaluates_late else self._records))
        self._loggers.begin(self._records[:-1] if run.evaluates_late else self._records)

    def end(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End callbacks and loggers, whatever has ended the rounds; an error of the rounds stays the one that is raised."""
        del trace
        try:
            self._callbacks.end(error_type is None)
        except Exception:
            if error is None:
                raise
            logger.exception("a callback failed at the end of the run, which had ended by %r", error)
        finally:
            self._loggers.end(error_type is None)

    def add(self, record: RoundRecord) -> None:
        """Keep the record of a round, write the other files of the round, and pass on the last complete record.

        The record is kept first: :func:`_ending` saves a round that has a record, and :meth:`complete` writes the other
        files of the round when the run is resumed.
        """
        run, folder, settings = self._run, self._folder, self._run.settings
        self._warn_without_uploads(record)
        if folder is not None and record.round == 0:
            record = dataclasses.replace(record, run_id=folder.run_id)
        self._records.append(record)
        if folder is not None:
            folder.append(record.to_line())
            self._save_best(self._records)
            if record.round in settings.adapters:
                _write_models(run, folder)
            if record.round == 0 or run.is_over:
                _write_answers(run, folder)
            if folder.is_due(record.round, settings.rounds, settings.checkpoint_every):
                _save(run, folder)
        self._show(record)
        self._after_round(record)
        if not run.evaluates_late:
            self.pass_on()
        elif len(self._records) > 1:
            self.pass_on(-2)

    def _warn_without_uploads(self, record: RoundRecord) -> None:
        """Warn once if a method that expects uploads got replies without any in its first two rounds, or its only one."""
        has_replies = any(str(client_id) not in record.lost for client_id in record.participants)
        self._expects_uploads &= record.bytes_up == 0
        if self._expects_uploads and has_replies and (record.round > 1 or self._run.is_over):
            self._expects_uploads = False
            logger.warning(
                "until round %d no client has sent an upload, so the state of the server stays as it is. local_update must "
                "return (state, upload), in this order",
                record.round,
            )

    def complete(self) -> None:
        """Write the files of the last round that are missing because the run ended while they were written."""
        run, folder, record = self._run, self._folder, self._records[-1]
        if folder is None:
            return
        # with lost records the best round is not known
        if not record.restored and not folder.has_best(record.round):
            self._save_best(self._records)
        if record.round in run.settings.adapters:
            # written again, because nothing shows whether they are complete
            _write_models(run, folder)
        has_answers = any(row["round"] == record.round for row in _list_answers(folder))
        if (record.round == 0 or run.is_over) and not has_answers:
            _write_answers(run, folder)

    def pass_on(self, index: int = -1) -> None:
        """Call the callbacks with a complete record, end the run if one of them asks for it, and log the record."""
        self._stop(self._callbacks(self._records[index]))
        self._loggers(self._records[index])

    def _stop(self, reason: str) -> None:
        """End the run after the last record if callbacks gave a reason; a resumed run repeats what was interrupted."""
        run, folder = self._run, self._folder
        if reason and not run.is_over:
            run.stopped = reason
            self._evaluate_last()
            if folder is not None and self._records:
                _write_answers(run, folder)
                _save_once(run, folder)

    def settle(self) -> None:
        """Enter values that have become known late into the last record."""
        late_evaluation, record = self._run.take_late_evaluation(), self._records[-1]
        if late_evaluation is not None:
            if record.measured is not None:
                # after a resume, clients that were heard before the stop may be silent or gone
                late_evaluation = record.measured.extended(late_evaluation)
            self._replace_last(dataclasses.replace(record, measured=late_evaluation))
            self._show(self._records[-1])

    def _evaluate_last(self) -> None:
        """Evaluate the last round of a run that ends by a callback: the last round is always evaluated."""
        if self._records and not self._run.evaluates_late and not self._records[-1].is_evaluated:
            record = self._run.evaluate_last(self._records[-1])
            self._save_best([*self._records[:-1], record])
            self._replace_last(record)

    def _replace_last(self, record: RoundRecord) -> None:
        self._records[-1] = record
        if self._folder is not None:
            self._folder.rewrite(r.to_line() for r in self._records)

    def _save_best(self, records: list[RoundRecord]) -> None:
        if self._folder is not None and self._run.settings.keep_best and _is_best(records):
            self._folder.save_best(self._run.state)


def _save(run: Run, folder: RunFolder) -> None:
    """Write a checkpoint of the run in its current state."""
    folder.save(run.state, run.unsaved, run.settings.keep_checkpoints)
    run.unsaved.clear()


def _save_once(run: Run, folder: RunFolder) -> None:
    """Write a checkpoint of the run in its current state, unless the last checkpoint is from this round."""
    if not folder.is_saved(run.round):
        _save(run, folder)


def _write_models(run: Run, folder: RunFolder) -> None:
    """Write the current models to ``adapters/round-NNNN``, in the format that other tools read.

    Raises:
        CheckpointError: if the folder cannot be written.
    """
    companion = run.federation.companion
    assert companion is not None, "simulate refuses run.adapters without a language model"
    with as_checkpoint_error(f"cannot write {folder.path / 'adapters'}"):
        companion.write(run, folder.path / "adapters" / f"round-{run.round:04d}")


def _write_answers(run: Run, folder: RunFolder) -> None:
    """Write the models' answers to fixed prompts, in place of answers from this or later rounds.

    Raises:
        CheckpointError: if the file cannot be read or written.
    """
    companion = run.federation.companion
    # over a network the clients' models are elsewhere
    rows = [] if companion is None or run.is_deployed else companion.answer(run)
    if rows:
        earlier_rows = [row for row in _list_answers(folder) if row["round"] < run.round]
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in [*earlier_rows, *rows])
        write_atomically(folder.path / ANSWERS, text.encode())


def _list_answers(folder: RunFolder) -> list[dict[str, Any]]:
    """List the answers in a folder; raises CheckpointError if the file is damaged or cannot be read."""
    with as_checkpoint_error(f"cannot read {folder.path / ANSWERS}"):
        return read_answers(folder.path)


def _expects_uploads(method: AnyMethod) -> bool:
    """Whether a method has its own contribution, or clients that use the model of the server as they receive it.

    Other methods may send nothing on purpose, such as training at each client alone.
    """
    method_type = type(list_layers(method)[-1])
    return (
        method_type.contribution is not Method.contribution or method_type.client_model is Method.client_model
    )


def _ignore(record: RoundRecord) -> None:
    del record


def _is_best(records: list[RoundRecord]) -> bool:
    """Whether the validation result after the last round is better than all earlier ones."""
    return find_best(record.validation() for record in records) == len(records) - 1


def _save_finished(run: Run, folder: RunFolder, records: list[RoundRecord]) -> None:
    """Save the last round, unless it ended before its record was made."""
    if records and records[-1].round == run.round:
        # the last record may be incomplete
        folder.rewrite(r.to_line() for r in records)
        _save_once(run, folder)


@contextlib.contextmanager
def _ending(run: Run, folder: RunFolder | None, records: list[RoundRecord]) -> Iterator[None]:
    """Leave a folder that records the end of the rounds and can be resumed, however they end."""
    try:
        yield
    except KeyboardInterrupt:
        if folder is not None:
            _save_finished(run, folder, records)
            folder.status("stopped", run.round, "interrupted")
        raise
    except Exception as error:
        if folder is not None:
            reason = str(error) if isinstance(error, FedlowrankError) else f"{type(error).__name__}: {error}"
            # the disk may be at fault; the error itself matters more than writing it down
            with contextlib.suppress(CheckpointError):
                _save_finished(run, folder, records)
            with contextlib.suppress(CheckpointError):
                folder.status(
                    "diverged" if isinstance(error, NonFiniteError) else "stopped", run.round, reason
                )
        raise
    if folder is not None:
        folder.status("finished", run.round, run.stopped)
