"""Runs several runs of a comparison at a time, each in a worker process.

A worker (:mod:`.worker`) is a new Python process. It reads a run as one line of JSON, the tables of the experiment,
and answers with lines of JSON: one for every round, one for the end of the run. Consecutive runs of a worker share
the data that it has loaded. Closing a worker's standard input interrupts it; its run can be resumed.
"""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from ...config.comparison import PlannedRun
from ...core.errors import CheckpointError, FedlowrankError
from ...rounds.logs.progress import CONSOLE

Event = dict[str, Any]
Ending = Literal["finished", "diverged", "refused", "failed"]

GRACE = 60.0
"""Seconds in which an interrupted worker must save its run before it is killed."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run in a comparison.

    Attributes:
        run: the planned run.
        state: state at the end: finished; diverged (its training met a NaN); refused (the method does not fit the
            models or the data); or failed (any other error, or its process was killed).
        message: reason why the run did not finish.
    """

    run: PlannedRun
    state: Ending
    message: str = ""

    @property
    def title(self) -> str:
        """Method, varied values and seed, for messages."""
        experiment, vary = self.run.experiment, self.run.vary
        values = [f"{name} = {value}" for name, value in vary.items()]
        seed = f"seed {experiment.run.seed}"
        return ", ".join([experiment.method_title(self.run.name), *values, seed])

    def __str__(self) -> str:
        words = {"finished": "finished", "diverged": "stopped", "refused": "not run", "failed": "failed"}
        return f"{words[self.state]}: {self.title}" + (f": {self.message}" if self.message else "")


class RunWorker:
    """A worker process."""

    def __init__(self) -> None:
        try:
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close
        except OSError as error:
            raise CheckpointError(
                f"cannot make a temporary file for a worker process: {error.strerror}. Set TMPDIR to a folder that can be "
                "written."
            ) from error
        # a session of its own: Ctrl-C reaches only the parent, which interrupts every worker once
        self.process = subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
        )
        requests, answers = self.process.stdin, self.process.stdout
        assert requests is not None
        assert answers is not None
        self._requests, self._answers = requests, answers

    def run(self, planned_run: PlannedRun, force: bool, on_event: Callable[[Event], None]) -> Outcome:
        """Run one planned run and wait for its end.

        Args:
            planned_run: the planned run.
            force: whether to move an existing folder aside.
            on_event: function called with every event that the worker sends before the end.
        """
        request = {
            "experiment": planned_run.experiment.to_dict(),
            "name": planned_run.name,
            "vary": planned_run.vary,
            "folder": str(planned_run.folder),
            "force": force,
        }
        with contextlib.suppress(BrokenPipeError):
            self._requests.write(json.dumps(request).encode() + b"\n")
            self._requests.flush()
        for line in self._answers:
            event = json.loads(line)
            if "state" in event:
                return Outcome(planned_run, event["state"], event["message"])
            on_event(event)
        return Outcome(planned_run, "failed", self._explain_death())

    @property
    def is_alive(self) -> bool:
        """Whether the worker can take a further run."""
        return self.process.poll() is None

    def _explain_death(self) -> str:
        code = self.process.wait()
        if code < 0:
            return (
                f"its process was killed by signal {-code}, perhaps for lack of memory (then lower --jobs). "
                "Start the same command again to go on"
            )
        self._errors.seek(0)
        return f"its process ended with code {code}:\n{self._errors.read().decode(errors='replace').strip()}"

    def interrupt(self) -> None:
        """Let the worker save its current run and end."""
        with contextlib.suppress(BrokenPipeError):
            self._requests.close()

    def close(self) -> None:
        """Wait for the worker to end after :meth:`interrupt`; kill it if that takes too long or is interrupted."""
        try:
            self.process.wait(GRACE)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self.process.kill()
            self.process.wait()
            self._answers.close()
            self._errors.close()


class _Pool:
    """Starts workers when they are needed, and ends them all."""

    def __init__(self, size: int) -> None:
        self._free: queue.SimpleQueue[RunWorker | None] = queue.SimpleQueue()
        self._all: list[RunWorker] = []
        self._lock, self.is_closed = threading.Lock(), False
        for _ in range(size):
            self._free.put(None)

    @contextlib.contextmanager
    def borrow(self) -> Iterator[RunWorker]:
        """Wait for a free worker; a worker that has died is replaced."""
        worker = self._free.get()
        try:
            with self._lock:
                if self.is_closed:
                    raise FedlowrankError("interrupted")
                if worker is None:
                    worker = RunWorker()
                    self._all.append(worker)
            yield worker
        finally:
            self._free.put(worker if worker is not None and worker.is_alive else None)

    def close(self) -> None:
        """End all workers and start no more."""
        with self._lock:
            self.is_closed = True
        with contextlib.ExitStack() as stack:
            # interrupt all workers before waiting for the first
            for worker in self._all:
                stack.callback(worker.close)
                worker.interrupt()


def run_parallel(runs: Sequence[PlannedRun], jobs: int, force: bool) -> list[Outcome]:
    """Run several runs of a comparison at a time; an error in one does not stop the others.

    Args:
        runs: planned runs with different folders.
        jobs: number of runs at a time.
        force: whether to move existing folders aside instead of continuing their runs.

    Returns:
        The outcome of each run, in the given order.
    """
    pool, threads = _Pool(min(jobs, len(runs))), ThreadPoolExecutor(jobs)
    with _bars(len(runs)) as bars:

        def work(planned_run: PlannedRun) -> Outcome:
            with pool.borrow() as worker:
                bar = bars.start(planned_run)
                outcome = worker.run(planned_run, force, lambda event: bars.update(bar, event))
                if not pool.is_closed:
                    bars.end(bar, outcome)
            return outcome

        try:
            futures = [threads.submit(work, run) for run in runs]
            return [future.result() for future in futures]
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
            pool.close()
            threads.shutdown()


@dataclass
class _Bars:
    """A progress bar for each active run, and one over all runs."""

    progress: Progress
    all: TaskID

    def start(self, planned_run: PlannedRun) -> TaskID:
        return self.progress.add_task(
            planned_run.folder.name, total=planned_run.experiment.run.rounds, text=""
        )

    def update(self, bar: TaskID, event: Event) -> None:
        if "print" in event:
            self.progress.console.print(event["print"], style="yellow")
        else:
            self.progress.update(bar, completed=event["round"], text=event["text"])

    def end(self, bar: TaskID, outcome: Outcome) -> None:
        text = next(task.fields["text"] for task in self.progress.tasks if task.id == bar)
        self.progress.remove_task(bar)
        self.progress.advance(self.all)
        line = (
            f"finished: {outcome.run.folder.name} {text}".rstrip()
            if outcome.state == "finished"
            else str(outcome)
        )
        self.progress.console.print(line, style=None if outcome.state == "finished" else "yellow")


@contextlib.contextmanager
def _bars(run_count: int) -> Iterator[_Bars]:
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[text]}", markup=False),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=CONSOLE) as progress:
        yield _Bars(progress, progress.add_task("runs", total=run_count, text=""))
