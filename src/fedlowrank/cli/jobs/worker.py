"""A worker process of ``--jobs``: executes runs that it reads from its standard input; see :mod:`.parallel`."""

from __future__ import annotations

import _thread
import contextlib
import json
import logging
import os
import signal
import sys
import threading
import traceback
from pathlib import Path
from queue import SimpleQueue
from typing import Any, BinaryIO

from ...config.experiment import ExperimentConfig
from ...core.errors import FedlowrankError, NonFiniteError, TaskError
from ...results.records import RoundRecord
from ...rounds.logs.progress import describe_record
from ..commands import run_method
from ..main import show_log_messages
from ..terminal import OUT
from .parallel import Event


def main() -> None:
    """Execute one run after the other until the standard input is closed, which interrupts the current run."""
    # interrupt_main needs this handler; a script that starts the command in the background has SIGINT ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # separate from the standard streams, to which libraries print and which forked processes close
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null_file = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null_file, 0)
    os.dup2(2, 1)
    events: SimpleQueue[Event | None] = SimpleQueue()
    worker = _Worker(answers)
    with show_log_messages(_WorkerLogHandler(worker)), contextlib.suppress(KeyboardInterrupt):
        threading.Thread(target=_read, args=(requests, events), daemon=True).start()
        while (request := events.get()) is not None:
            worker.send(worker.run(request))


def _read(requests: BinaryIO, events: SimpleQueue[Event | None]) -> None:
    for line in requests:
        events.put(json.loads(line))
    events.put(None)
    _thread.interrupt_main()


class _Worker:
    """Executes requests; keeps the federation for the next request of the same experiment."""

    def __init__(self, answers: BinaryIO) -> None:
        self._answers, self._lock = answers, threading.Lock()
        self._last: tuple[Any, Any, Any] = (None, None, None)

    def send(self, event: Event) -> None:
        """Send a line to the parent, unless it has died: that closes the standard input, too, which interrupts the run."""
        with self._lock, contextlib.suppress(BrokenPipeError):
            self._answers.write(json.dumps(event).encode() + b"\n")
            self._answers.flush()

    def run(self, request: Event) -> Event:
        """Execute a request; returns how it ended."""
        try:
            self._run(request)
        except TaskError as error:
            return {"state": "refused", "message": error.for_command}
        except NonFiniteError as error:
            return {"state": "diverged", "message": error.for_command}
        except FedlowrankError as error:
            return {"state": "failed", "message": error.for_command}
        except Exception:  # noqa: BLE001 - whatever a user's method raises is shown with the name of the run
            return {"state": "failed", "message": traceback.format_exc().strip()}
        return {"state": "finished", "message": ""}

    def _run(self, request: Event) -> None:
        tables, experiment, federation = self._last
        if tables != request["experiment"]:
            experiment = ExperimentConfig.parse(request["experiment"])
            federation = experiment.federation()
            self._last = request["experiment"], experiment, federation

        def show(record: RoundRecord) -> None:
            self.send({"round": record.round, "text": describe_record(record)})

        try:
            with OUT.capture() as capture:
                run_method(
                    experiment, request["name"], federation, Path(request["folder"]), request["force"],
                    resume=not request["force"], vary=request["vary"], on_round=show,
                )  # fmt: skip
        finally:
            if text := capture.get().strip():
                self.send({"print": text})


class _WorkerLogHandler(logging.Handler):
    """Sends log messages of the package to the parent."""

    def __init__(self, worker: _Worker) -> None:
        super().__init__()
        self._worker = worker

    def emit(self, record: logging.LogRecord) -> None:
        """Send a message."""
        self._worker.send({"print": self.format(record)})


if __name__ == "__main__":
    main()
    # threads of libraries must not keep an interrupted worker from ending
    sys.stderr.flush()
    os._exit(0)
