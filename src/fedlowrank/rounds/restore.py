"""Restores a run from its folder's checkpoint, to go on or to inspect it."""

from __future__ import annotations

import logging

from ..core.io.text import join_words
from ..results.records import RoundRecord, read_records
from ..storage import checkpoint
from ..storage.run_files import read_config
from ..storage.run_folder import RunFolder
from .config_changes import (
    check_changes,
    describe_version_changes,
    find_changed_callbacks,
    keep_measured_fields,
)
from .run import Run

logger = logging.getLogger(__name__)


def restore_run(run: Run, folder: RunFolder) -> list[RoundRecord]:
    """Restore a run from its last checkpoint, to go on from there.

    The checkpoint alone suffices to go on. If other files are damaged, they are rewritten as far as their content is
    known, and a warning says what is lost. A warning also names callbacks whose code was changed, and software whose
    version differs from the one that made the run.

    Args:
        run: run that was made of the same configuration and data.
        folder: folder of the run, which is locked.

    Returns:
        The records of the completed rounds that could be read.

    Raises:
        CheckpointError: if the configuration or the data changed, or the checkpoint cannot be read.
        FolderInUseError: if another process writes the folder.
    """
    folder.lock()
    stored_config = read_config(folder.path)
    example_counts = [info.example_count for info in run.federation.infos]
    check_changes(folder.path, stored_config, folder.config, run.method, example_counts)
    if changes := describe_version_changes(stored_config, folder.config):
        logger.warning(
            "the run was made with other software: %s. Its further rounds may be rounded differently.",
            changes,
        )
    for name in find_changed_callbacks(stored_config, folder.config):
        logger.warning(
            "the code of the callback %s was changed since the run was started. No round's result depends on it, but the "
            "run may end in another round than it would have with the new code from the start.",
            name,
        )
    run.restore(folder.load(run.new_store()))
    is_damaged = folder.repair_tables(run.round)
    records, missing_rounds = read_records(folder.path, run.round, folder.run_id)
    # an unbroken run plans by its first round, even if no client was drawn in it
    first_record = next((r for r in records if r.round == 1 and not r.restored), None)
    planning_record = first_record or next((r for r in records if r.flops), None)
    if planning_record is not None:
        run.plan_evaluations(planning_record.flops)
    if run.round in missing_rounds:
        last_record = RoundRecord(round=run.round, restored=True)
        # over a network the clients evaluate at the end of the next round
        records.append(last_record if run.evaluates_late else run.evaluate_last(last_record))
    has_ended = folder.has_ended(run.round, stored_config)
    if has_ended:
        run.stopped = str(folder.read_status().get("message", ""))
    goes_on = not has_ended and run.round < run.settings.rounds
    if not goes_on and folder.is_finished() and (names := keep_measured_fields(stored_config, folder.config)):
        logger.warning(
            "%s has ended, so that %s would change nothing and keep their former values. Ask for more rounds by run.rounds, "
            "or start a new run in another folder.",
            folder.path,
            join_words([f"run.{name}" for name in names]),
        )
    if folder.config != stored_config or is_damaged:
        folder.reconfigure()
    checkpoint.tidy(folder.path / "checkpoint")
    folder.remove_later_best(run.round)
    if goes_on or missing_rounds:
        # rounds after the checkpoint will be repeated
        folder.rewrite(r.to_line() for r in records)
    if goes_on:
        folder.status("running", run.round)
    return records
